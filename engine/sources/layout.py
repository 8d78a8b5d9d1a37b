"""The tensors and shapes that a model's parts must have, according to its config.

Every source groups its tensors through `arrange`, so that a missing tensor or a config that contradicts the shapes is
found when the source is opened, before any weights are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from engine.config import ModelConfig
from engine.errors import SourceError
from engine.sources.base import BLOCK_ROLES, EMBEDDING_PART, HEAD_PART, TensorEntry, block_part
from engine.sources.files import AGAIN, shown

# Type -> (elements per block, bytes per block), as GGUF lays them out along a row.
KIND_SIZES: dict[str, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}

# Type -> columns that share a scale: matrices of AWQ and GPTQ checkpoints (`engine.sources.packed`). GPTQ's second
# format differs in what it stores as the zero point.
PACKED_GROUPS = {f"{method}_{group}": group for method in ("AWQ", "GPTQ", "GPTQ_V2") for group in (32, 64, 128)}

# Bounds on a config's numbers: far above any known model, far below what would exhaust memory.
MAX_BLOCKS = 4096
MAX_WIDTH = 1 << 20
MAX_VOCABULARY = 1 << 22
MAX_CONTEXT = 1 << 28
# Of rotary positions: with these every angle is a finite number, and no rule divides by nothing.
_ROPE_BOUNDS = {
    "theta": (1.01, 1e12), "factor": (1e-6, 1e6), "low_freq_factor": (1e-6, 1e6), "high_freq_factor": (1e-6, 1e6),
    "beta_fast": (1e-6, 1e6), "beta_slow": (1e-6, 1e6), "attention_factor": (0.0, 1e3),
}  # fmt: skip


def part_names(config: ModelConfig) -> list[str]:
    """Names of all parts of a model, in the order data flows through them."""
    return [EMBEDDING_PART, *(block_part(index) for index in range(config.n_blocks)), HEAD_PART]


def block_index(part: str) -> int | None:
    """Return the index of the block in a part, or None if the part is not a block."""
    digits = part.removeprefix("block.")
    plain = digits != part and digits.isascii() and digits.isdigit() and len(digits) < 6
    return int(digits) if plain and block_part(int(digits)) == part else None


def expected_shapes(config: ModelConfig, part: str) -> dict[str, tuple[int, ...]]:
    """Return the roles that a part must have and their shapes, in layout order."""
    hidden, inner, width = config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = config.n_heads * width, config.n_kv_heads * width
    if part == EMBEDDING_PART:
        return {"embedding": (config.vocab_size, hidden)}
    if part == HEAD_PART:
        output = {} if config.tied_embeddings else {"output": (config.vocab_size, hidden)}
        return {"final_norm": (hidden,), **output}
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,), "q": (q_rows, hidden), "k": (kv_rows, hidden), "v": (kv_rows, hidden),
        "o": (hidden, q_rows), "mlp_norm": (hidden,), "gate": (inner, hidden), "up": (inner, hidden),
        "down": (hidden, inner),
    }  # fmt: skip
    if config.qkv_bias:
        shapes |= {"q_bias": (q_rows,), "k_bias": (kv_rows,), "v_bias": (kv_rows,)}
    if config.o_bias:
        shapes["o_bias"] = (hidden,)
    if config.qk_norm:
        shapes |= {"q_norm": (width,), "k_norm": (width,)}
    if config.mlp_bias:
        shapes |= {"gate_bias": (inner,), "up_bias": (inner,), "down_bias": (hidden,)}
    return {role: shapes[role] for role in BLOCK_ROLES if role in shapes}


def byte_length(kind: str, shape: tuple[int, ...]) -> int | None:
    """Bytes of a tensor, or None if the type is unknown or its block size does not divide the rows."""
    if kind in PACKED_GROUPS:
        return _packed_length(PACKED_GROUPS[kind], shape)
    size = KIND_SIZES.get(kind)
    if size is None or not shape or shape[-1] % size[0]:
        return None
    return math.prod(shape) // size[0] * size[1]


def _packed_length(group: int, shape: tuple[int, ...]) -> int | None:
    """Bytes of a matrix with half a byte for each weight, and half a byte and a float16 for each row of a group."""
    if len(shape) != 2 or shape[0] % 8 or not shape[0] or shape[1] % group or not shape[1]:
        return None
    return shape[0] * (shape[1] // 2 + shape[1] // group * 2) + shape[0] * (shape[1] // group) // 2


def check_config(config: ModelConfig, origin: str) -> ModelConfig:
    """Return the config; raises `SourceError` if its numbers contradict each other or give no finite rotations."""
    for name, (low, high) in _ROPE_BOUNDS.items():
        value = getattr(config.rope, name)
        if value is not None and not low <= value <= high:
            raise SourceError(f"{origin}: the rope's {name} is {value}, expected {low:g} to {high:g}: {AGAIN}")
    if config.n_heads % config.n_kv_heads:
        problem = f"{config.n_heads} attention heads cannot share {config.n_kv_heads} key-value heads"
    elif config.head_dim % 2:
        problem = f"the head size {config.head_dim} is odd, which rotary positions do not allow"
    elif config.rope.kind in ("llama3", "yarn") and config.rope.original_context < 1:
        problem = f"the {config.rope.kind} rope scaling lacks the original context length"
    elif config.rope.kind == "llama3" and config.rope.low_freq_factor == config.rope.high_freq_factor:
        problem = "the two frequency factors of the llama3 rope scaling are equal"
    else:
        return config
    raise SourceError(f"{origin}: {problem}; the config is damaged or not supported: choose another model")


def check_entry(entry: TensorEntry, shape: tuple[int, ...], part: str) -> None:
    """Raise `SourceError` for an entry that contradicts the config or itself."""
    where = f"{entry.file}: tensor {entry.name} ({part})"
    if entry.kind not in KIND_SIZES and entry.kind not in PACKED_GROUPS:
        raise SourceError(f"{where} has type {entry.kind}; supported are {', '.join(KIND_SIZES)}: use another file")
    if entry.shape != shape:
        raise SourceError(
            f"{where} has shape {list(entry.shape)} where the config says {list(shape)}: "
            "the config and the weights do not belong together, download both again"
        )
    if byte_length(entry.kind, entry.shape) != entry.length:
        raise SourceError(f"{where} has {entry.length} bytes, which does not fit its type and shape: download it again")
    if entry.interleaved_heads and (shape[0] % entry.interleaved_heads or shape[0] // entry.interleaved_heads % 2):
        raise SourceError(f"{where} cannot be split into {entry.interleaved_heads} heads: download it again")


def check_part(config: ModelConfig, part: str, entries: Sequence[TensorEntry]) -> None:
    """Raise `SourceError` unless a part's tensors are exactly those that the config requires, in order."""
    if part not in (EMBEDDING_PART, HEAD_PART) and block_index(part) not in range(config.n_blocks):
        raise SourceError(f"unknown part {shown(part)} of a model with {config.n_blocks} blocks")
    shapes = expected_shapes(config, part)
    roles = [entry.role for entry in entries]
    if roles != list(shapes):
        raise SourceError(f"part {part} has {', '.join(roles) or 'no tensors'} instead of {', '.join(shapes)}")
    for entry in entries:
        check_entry(entry, shapes[entry.role], part)


def arrange(
    config: ModelConfig,
    names: Callable[[str, str], str],
    tensors: dict[str, TensorEntry],
    origin: Path,
    packed: Callable[[str, tuple[int, ...]], TensorEntry | None] | None = None,
) -> dict[str, tuple[TensorEntry, ...]]:
    """Group a source's tensors in parts; `names(part, role)` is the source's name of a tensor.

    `packed(name, shape)` finds a matrix that is stored as several tensors of other names.
    Raises `SourceError` if a tensor is missing or has the wrong shape or type.
    """
    parts: dict[str, tuple[TensorEntry, ...]] = {}
    for part in part_names(config):
        entries = []
        for role, shape in expected_shapes(config, part).items():
            name = names(part, role)
            if name not in tensors and packed is not None and (entry := packed(name, shape)) is not None:
                entries.append(replace(entry, role=role))
                continue
            if name not in tensors:
                raise SourceError(f"{origin}: tensor {name} ({part}) is missing: download the model again")
            entries.append(replace(tensors[name], role=role))
        check_part(config, part, entries)
        parts[part] = tuple(entries)
    return parts
