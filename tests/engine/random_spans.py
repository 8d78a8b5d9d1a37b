"""Spans with random weights, built in memory, for tests that need no files."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engine.budget import CacheFormat
from engine.config import ModelConfig, Rope
from engine.model.block import Block, Quantisation, build_block
from engine.model.span import SpanOptions, SpanRunner
from engine.sources.grid import Grid


def small_config(**changes: object) -> ModelConfig:
    """A small config with every flag off, but for `changes`."""
    values: dict[str, object] = {
        "family": "llama", "n_blocks": 2, "hidden_size": 48, "n_heads": 4, "n_kv_heads": 2, "head_dim": 32,
        "intermediate_size": 80, "vocab_size": 128, "context_length": 2048, "norm_eps": 1e-5, "rope": Rope(),
    }  # fmt: skip
    return ModelConfig(**(values | changes))  # type: ignore[arg-type]


CASES = {
    "plain": small_config(),
    "biases": small_config(qkv_bias=True, o_bias=True, mlp_bias=True),
    "qk_norm": small_config(family="qwen3", qk_norm=True),
    "window": small_config(family="mistral", sliding_window=40),
    "int8": small_config(),
}


class GivenTensors:
    """Tensors in memory, read like those of a file."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {role: tuple(tensor.shape) for role, tensor in self._tensors.items()}

    def read(self, outs: Mapping[str, torch.Tensor]) -> None:
        for role, out in outs.items():
            out.copy_(self._tensors[role])

    def grid(self, role: str) -> Grid | None:
        """These tensors are plain numbers."""
        return None


def random_block(config: ModelConfig, index: int, options: SpanOptions) -> Block:
    """A block of random weights with the biases and norms that the config asks for."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    shapes = {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q),
              "gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}  # fmt: skip

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=options.device, dtype=options.dtype)

    tensors = {role: random(*shape) * shape[1] ** -0.5 for role, shape in shapes.items()}
    biased = (["q", "k", "v"] if config.qkv_bias else []) + (["o"] if config.o_bias else [])
    biased += ["gate", "up", "down"] if config.mlp_bias else []
    tensors |= {f"{role}_bias": random(shapes[role][0]) * 0.1 for role in biased}
    norms = {"attn_norm": hidden, "mlp_norm": hidden}
    norms |= {"q_norm": config.head_dim, "k_norm": config.head_dim} if config.qk_norm else {}
    tensors |= {role: 1 + 0.1 * random(size) for role, size in norms.items()}
    return build_block(index, GivenTensors(tensors), options)


def random_span(
    config: ModelConfig,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    kv_bytes: int = 1 << 24,
    quantisation: Quantisation = "none",
    packed: bool = False,
    cache: CacheFormat = "own",
) -> SpanRunner:
    """All blocks of a config with random weights."""
    options = SpanOptions(torch.device(device), dtype, quantisation, packed, kv_bytes, cache=cache)
    blocks = [random_block(config, index, options) for index in range(config.n_blocks)]
    return SpanRunner(config, 0, blocks, options)
