"""The shape of a model, as plain values. Reading it from files is done by `engine.sources`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Family = Literal["llama", "mistral", "qwen2", "qwen3"]


@dataclass(frozen=True)
class Rope:
    """Rotary position settings: `kind` names the scaling rule, the other fields are its parameters."""

    theta: float = 10_000.0
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # yarn's attention temperature; None: derived from `factor`


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder-only transformer of the Llama line."""

    family: Family
    n_blocks: int
    hidden_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    context_length: int
    norm_eps: float
    rope: Rope
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    # Indices of the blocks that use the sliding window; empty: all of them, if `sliding_window` is set.
    sliding_blocks: tuple[int, ...] = ()
    tied_embeddings: bool = False
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None

    def window_of(self, block: int) -> int | None:
        """Return the attention window of one block in tokens, or None if it sees the whole past."""
        if self.sliding_window is None or (self.sliding_blocks and block not in self.sliding_blocks):
            return None
        return self.sliding_window
