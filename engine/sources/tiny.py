"""`tiny-random`: a small model of the Llama family with seeded weights, for tests and for trying Shoal offline.

Its bytes are the same on every machine: they come from a hash function, and no floating-point operation that could
differ is involved. It generates nonsense in printable ASCII and never ends a reply by itself.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from engine.errors import SourceError
from engine.sources.base import ModelSource
from engine.sources.cache import models_dir, publish, staging, write_whole
from engine.sources.gguf_tokenizer import byte_alphabet
from engine.sources.huggingface import open_folder
from engine.sources.safetensors import encode

NAME = "tiny-random"
_BLOCKS, _HIDDEN, _INNER, _HEADS, _KV_HEADS, _HEAD_DIM = 8, 64, 192, 4, 2, 16
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_VOCABULARY = 264  # 256 bytes and the special tokens, rounded up to a multiple of eight
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_NORMS = ("input_layernorm", "post_attention_layernorm")
# Uniform weights in plus or minus this power of two; the head's are larger, so that greedy choices have no near ties.
_SPREAD, _HEAD_SPREAD = 0.25, 1.0


def open_tiny(cache_dir: Path) -> ModelSource:
    """Open the tiny random model; writes it into the cache on first use, and again if it is damaged."""
    folder = models_dir(cache_dir) / NAME
    files = _files()
    if not _is_whole(folder, files):
        _write(folder, files)
    return replace(open_folder(folder), label=NAME, licence="MIT")


def _is_whole(folder: Path, files: dict[str, bytes]) -> bool:
    try:
        return all((folder / name).read_bytes() == data for name, data in files.items())
    except OSError:
        return False


def _write(folder: Path, files: dict[str, bytes]) -> None:
    with staging(folder.parent) as scratch:
        fresh = scratch / NAME
        fresh.mkdir()
        for name, data in files.items():
            write_whole(fresh / name, data)
        if folder.exists():  # damaged: moved into the scratch folder, which is removed
            os.replace(folder, scratch / "damaged")
        publish(fresh, folder)
    if not _is_whole(folder, files):
        raise SourceError(f"{folder} is damaged and could not be replaced: remove it and try again")


def _files() -> dict[str, bytes]:
    ids = special_ids()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": _BLOCKS,
        "hidden_size": _HIDDEN, "intermediate_size": _INNER, "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS, "head_dim": _HEAD_DIM, "vocab_size": _VOCABULARY,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "bos_token_id": ids["<|im_start|>"], "eos_token_id": ids["<|im_end|>"], "torch_dtype": "float32",
    }  # fmt: skip
    tokenizer, tokenizer_config = byte_tokenizer()
    texts = {"config.json": config, "tokenizer.json": tokenizer, "tokenizer_config.json": tokenizer_config}
    files = {name: json.dumps(value, indent=1, sort_keys=True).encode() for name, value in texts.items()}
    return {**files, "model.safetensors": encode(_weights())}


def special_ids() -> dict[str, int]:
    """Return the special tokens of the byte tokenizer, which follow the 256 bytes."""
    return {text: 256 + index for index, text in enumerate(_SPECIAL)}


def byte_tokenizer() -> tuple[dict[str, object], dict[str, object]]:
    """Return the contents of `tokenizer.json` and `tokenizer_config.json` for a model whose tokens are bytes."""
    vocabulary = {letter: byte for byte, letter in enumerate(byte_alphabet())}
    ids = special_ids()
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer: dict[str, object] = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "pre_tokenizer": byte_level,
        "post_processor": None, "decoder": byte_level,
        "added_tokens": [
            {"id": index, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True}
            for text, index in ids.items()
        ],
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": vocabulary, "merges": []},
    }  # fmt: skip
    tokenizer_config: dict[str, object] = {
        "bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>",
        "chat_template": _TEMPLATE,
    }  # fmt: skip
    return tokenizer, tokenizer_config


def _weights() -> dict[str, np.ndarray]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (_VOCABULARY, _HIDDEN)}
    for index in range(_BLOCKS):
        block = f"model.layers.{index}."
        shapes |= {
            block + "self_attn.q_proj.weight": (_HEADS * _HEAD_DIM, _HIDDEN),
            block + "self_attn.k_proj.weight": (_KV_HEADS * _HEAD_DIM, _HIDDEN),
            block + "self_attn.v_proj.weight": (_KV_HEADS * _HEAD_DIM, _HIDDEN),
            block + "self_attn.o_proj.weight": (_HIDDEN, _HEADS * _HEAD_DIM),
            block + "mlp.gate_proj.weight": (_INNER, _HIDDEN),
            block + "mlp.up_proj.weight": (_INNER, _HIDDEN),
            block + "mlp.down_proj.weight": (_HIDDEN, _INNER),
        }
    weights = {name: _uniform(name, shape, _SPREAD) for name, shape in shapes.items()}
    head = _uniform("lm_head.weight", (_VOCABULARY, _HIDDEN), _HEAD_SPREAD)
    head[:0x20] = head[0x7F:] = 0.0  # rows of zeros never win, so the best token is printable ASCII
    norms = [f"model.layers.{i}.{name}.weight" for i in range(_BLOCKS) for name in _NORMS] + ["model.norm.weight"]
    return {**weights, "lm_head.weight": head, **{name: np.ones(_HIDDEN, dtype="<f4") for name in norms}}


def _uniform(name: str, shape: tuple[int, ...], spread: float) -> np.ndarray:
    count = int(np.prod(shape))
    stream = hashlib.shake_256(f"shoal {NAME} 1 {name}".encode()).digest(2 * count)
    # A 16-bit integer times a power of two is exact in float32, so no rounding can differ between machines.
    return (np.frombuffer(stream, dtype="<i2").astype("<f4") * np.float32(spread / 32768)).reshape(shape)
