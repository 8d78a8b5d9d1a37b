"""Runs transformer blocks on one machine's devices.

Knows torch, model files, tokenizers, samplers and devices. Knows no network, no event loop and no peers: `app` and
`p2p` do that. Only bytes and plain values cross the border to them, hidden states in the formats of `engine.wire`.
"""
