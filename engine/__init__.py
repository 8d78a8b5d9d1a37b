"""The engine: transformer blocks on one machine's devices.

Knows torch, model files, tokenizers, samplers and devices. Leaves the network, the event loop and
every notion of a peer to others: what crosses the border to the rest of Shoal is bytes and plain values.
"""
