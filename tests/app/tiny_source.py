"""A model source of a few kilobytes whose bytes are made up, for tests of formats; nothing can run it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from engine.config import ModelConfig, Rope
from engine.sources.base import ModelSource, TensorEntry, TokenizerSpec
from engine.sources.layout import byte_length, expected_shapes, part_names

CONFIG = ModelConfig(
    family="llama",
    n_blocks=3,
    hidden_size=64,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    vocab_size=100,
    context_length=512,
    norm_eps=1e-5,
    rope=Rope(theta=100_000.0),
    tied_embeddings=True,
    eos_ids=(2, 7),
    bos_id=1,
)
TOKENIZER = {"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "é": 2}, "merges": []}}


def tiny_source(
    folder: Path, config: ModelConfig = CONFIG, *, padding: int = 0, backwards: bool = False
) -> ModelSource:
    """A source in one file; `padding` and `backwards` change where tensors lie and are listed, not what they hold."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "weights.bin"
    parts: dict[str, tuple[TensorEntry, ...]] = {}
    with file.open("wb") as out:
        names = part_names(config)
        for part in reversed(names) if backwards else names:
            entries = []
            for role, shape in expected_shapes(config, part).items():
                kind = "Q8_0" if len(shape) == 2 and shape[-1] % 32 == 0 else "F32"
                length = byte_length(kind, shape)
                assert length is not None
                out.write(bytes(padding))
                name = f"{part}.{role}"
                entries.append(TensorEntry(role, name, kind, shape, file, out.tell(), length))
                out.write(hashlib.shake_256(name.encode()).digest(length))
            parts[part] = tuple(reversed(entries) if backwards else entries)
    return ModelSource("tiny", config, parts, tokenizer_spec(backwards), "Apache-2.0")


def tokenizer_spec(spaced: bool = False) -> TokenizerSpec:
    """The tokenizer of the tiny source, in one of two spellings."""
    content = json.dumps(TOKENIZER, indent=2) if spaced else json.dumps(dict(reversed(TOKENIZER.items())))
    variables = {"unk_token": "<unk>", "weight": 0.5}
    return TokenizerSpec(content, "{{ messages }} é", "<s>", "</s>", variables, add_bos=True)
