"""The values that every source consists of: tensor entries grouped in parts, and the tokenizer's data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import ModelConfig

# The roles of a block's tensors, in the order they are laid out in a part.
# Matrices are (out_features, in_features); biases and norms are (features,).
BLOCK_ROLES = (
    "attn_norm", "q", "k", "v", "o", "q_bias", "k_bias", "v_bias", "o_bias", "q_norm", "k_norm",
    "mlp_norm", "gate", "up", "down", "gate_bias", "up_bias", "down_bias",
)  # fmt: skip
EMBEDDING_PART = "embedding"  # one role: "embedding" (vocab, hidden)
HEAD_PART = "head"  # roles: "final_norm" (hidden,), and "output" (vocab, hidden) unless tied


def block_part(index: int) -> str:
    """Return the part name of block `index`."""
    return f"block.{index}"


@dataclass(frozen=True)
class Extent:
    """`length` bytes of a file from `offset` on."""

    file: Path
    offset: int
    length: int


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: its role in the part, its name in the source, type, shape, and where its bytes are."""

    role: str
    name: str
    kind: str  # "F32", "F16", "BF16", "Q4_0", "Q4_K", … as GGUF names them, or one of `layout.PACKED_GROUPS`
    shape: tuple[int, ...]  # as torch would print it, after decoding
    file: Path
    offset: int
    length: int  # with that of `more`
    # GGUF files of the llama family store q and k rows in interleaved rope order, which decoding undoes: the number of
    # heads in this tensor if interleaved, else 0.
    interleaved_heads: int = 0
    more: tuple[Extent, ...] = ()  # where the bytes go on, if they are several tensors of the file

    @property
    def extents(self) -> tuple[Extent, ...]:
        """All places of the tensor's bytes, in order."""
        return (Extent(self.file, self.offset, self.length - sum(each.length for each in self.more)), *self.more)


@dataclass(frozen=True)
class TokenizerSpec:
    """Everything a model's files say about text: `tokenizer.json`, chat template and special tokens."""

    tokenizer_json: str
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    # Extra template variables from the model's files (unk_token, tools defaults, …).
    template_variables: Mapping[str, Any]
    add_bos: bool = False


@dataclass(frozen=True)
class ModelSource:
    """A model that can be loaded part by part."""

    label: str
    config: ModelConfig
    parts: Mapping[str, tuple[TensorEntry, ...]]
    tokenizer: TokenizerSpec
    licence: str | None = None
