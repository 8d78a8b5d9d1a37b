"""Values and interfaces that every other room uses.

Errors and the reasons shown to users, spans of blocks, units, canonical JSON, text made safe for terminals, and the
interfaces of what others implement: `network` (by `p2p`) and `compute` (by `engine`). `device_thread` runs blocking
work on a device.
"""
