"""Runs transformer blocks on one machine's devices.

Knows torch, model files, tokenizers, samplers and devices. Knows no network, no event loop and no peers: `app` and
`p2p` do that. Only bytes and plain values cross the border to them, hidden states in the formats of `engine.wire`.
"""

import os

# oneDNN and torch's layer over it each keep what they compiled for a shape and a number of rows, 0.4 MB, for 1024 of
# them: a node whose prompts have all lengths would grow by hundreds of megabytes. 96 are 24 row counts of a model.
# Both read their limit at the first product of a process, wherever that is.
COMPILED_PRODUCTS = "96"
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", COMPILED_PRODUCTS)
os.environ.setdefault("LRU_CACHE_CAPACITY", COMPILED_PRODUCTS)
# Texts are encoded one by one, each in a thread of its caller: the library's own threads would only be in the way.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
