"""The transformer: blocks, attention, KV cache, embedding and head, CUDA graphs.

Hidden states go in and come out as tensors. `engine.sources` reads the weights, `engine.text` knows tokens and text,
`engine.session_runner` gives sessions ids and bytes.
"""
