"""One process on the CPU, SmolLM2's shape in float32: Shoal's engine beside `transformers`, in one run.

    python -m tests.bench.engine [--json] [--rounds 5]

The contestants take turns, so that a noisy machine disturbs both alike; each figure is the median over the rounds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from engine.config import ModelConfig, Rope
from engine.model.ends import EmbeddingAndHead
from engine.model.kv_cache import Segment
from engine.model.linear import DenseLinear, packed
from engine.model.span import SpanRunner
from tests.engine.random_spans import random_span

PROMPT, DECODED = 256, 24


def smollm2() -> ModelConfig:
    """SmolLM2-135M's shape."""
    return ModelConfig(
        family="llama", n_blocks=30, hidden_size=576, n_heads=9, n_kv_heads=3, head_dim=64, intermediate_size=1536,
        vocab_size=49152, context_length=8192, norm_eps=1e-5, rope=Rope(theta=100_000.0), tied_embeddings=True,
    )  # fmt: skip


class Shoal:
    """The engine with random weights."""

    def __init__(self, config: ModelConfig) -> None:
        self._span: SpanRunner = random_span(config, kv_bytes=1 << 30, packed=True)
        embedding = torch.randn(config.vocab_size, config.hidden_size) * 0.02
        self._ends = EmbeddingAndHead(
            config, embedding, torch.ones(config.hidden_size), DenseLinear(embedding, packed=packed(embedding))
        )

    def prefill_s(self) -> float:
        """Seconds from a prompt to its last logits."""
        lease = self._span.open(PROMPT)
        begin = time.perf_counter()
        hidden = self._span.step(self._ends.embed([1] * PROMPT), [Segment(lease, 0, PROMPT)])
        self._ends.logits(hidden[-1:])
        seconds = time.perf_counter() - begin
        lease.close()
        return seconds

    def decode_s(self, sessions: int) -> float:
        """Seconds of a step of so many sessions, each behind a prompt, greedy choice included."""
        leases = [self._span.open(PROMPT + DECODED) for _ in range(sessions)]
        for lease in leases:
            self._span.step(self._ends.embed([1] * PROMPT), [Segment(lease, 0, PROMPT)])
        tokens = [1] * sessions
        begin = time.perf_counter()
        for _ in range(DECODED):
            hidden = self._span.step(self._ends.embed(tokens), [Segment(lease, lease.length, 1) for lease in leases])
            tokens = self._ends.logits(hidden).argmax(-1).tolist()
        seconds = time.perf_counter() - begin
        for lease in leases:
            lease.close()
        return seconds / DECODED


class Transformers:
    """`transformers`' Llama with random weights, used as its own generation loop uses it."""

    def __init__(self, config: ModelConfig) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        shape = LlamaConfig(
            hidden_size=config.hidden_size, num_attention_heads=config.n_heads, num_hidden_layers=config.n_blocks,
            num_key_value_heads=config.n_kv_heads, intermediate_size=config.intermediate_size,
            vocab_size=config.vocab_size, rms_norm_eps=config.norm_eps, max_position_embeddings=8192,
            tie_word_embeddings=True,
        )  # fmt: skip
        self._model: Any = LlamaForCausalLM(shape)
        self._model.eval()

    @torch.inference_mode()
    def prefill_s(self) -> float:
        """Seconds from a prompt to its last logits."""
        begin = time.perf_counter()
        self._model(torch.ones(1, PROMPT, dtype=torch.int64), use_cache=True, logits_to_keep=1)
        return time.perf_counter() - begin

    @torch.inference_mode()
    def decode_s(self, sessions: int) -> float:
        """Seconds of a step of one session behind a prompt, greedy choice included."""
        assert sessions == 1
        out = self._model(torch.ones(1, PROMPT, dtype=torch.int64), use_cache=True, logits_to_keep=1)
        begin = time.perf_counter()
        for _ in range(DECODED):
            token = out.logits[:, -1].argmax(-1, keepdim=True)
            out = self._model(token, past_key_values=out.past_key_values, use_cache=True)
        return (time.perf_counter() - begin) / DECODED


def measure(rounds: int) -> dict[str, float]:
    """All figures of one run."""
    config = smollm2()
    torch.manual_seed(0)
    ours, theirs = Shoal(config), Transformers(config)
    contestants: dict[str, Callable[[], float]] = {
        "transformers_decode": lambda: theirs.decode_s(1),
        "shoal_decode": lambda: ours.decode_s(1),
        "shoal_batch8": lambda: ours.decode_s(8),
        "transformers_prefill": theirs.prefill_s,
        "shoal_prefill": ours.prefill_s,
    }
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for index in range(rounds + 1):
        for name, run in contestants.items():
            seconds = run()
            if index > 0:  # the first round warms up
                times[name].append(seconds)
    seconds_of = {name: median(values) for name, values in times.items()}
    return {
        "transformers_decode_tokens_per_s": 1 / seconds_of["transformers_decode"],
        "shoal_decode_tokens_per_s": 1 / seconds_of["shoal_decode"],
        "shoal_batch8_tokens_per_s": 8 / seconds_of["shoal_batch8"],
        "transformers_prefill_tokens_per_s": PROMPT / seconds_of["transformers_prefill"],
        "shoal_prefill_tokens_per_s": PROMPT / seconds_of["shoal_prefill"],
        "decode_ratio": seconds_of["transformers_decode"] / seconds_of["shoal_decode"],
        "prefill_ratio": seconds_of["transformers_prefill"] / seconds_of["shoal_prefill"],
        "batch8_vs_transformers": 8 * seconds_of["transformers_decode"] / seconds_of["shoal_batch8"],
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    figures = measure(arguments.rounds)
    if arguments.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:>34}  {value:.2f}")


if __name__ == "__main__":
    main()
