"""The machine's devices: their free memory, sensors and measured speed.

`sensors` asks the operating system and NVIDIA's driver, without torch; `dtypes` and `read_speed` time small products.
`engine.budget` and the caller decide how much of a device to use; models and their weights are unknown here.
"""
