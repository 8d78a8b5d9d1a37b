"""A decode step of a Llama-8B-shaped span on a CUDA device: Shoal's flavours beside `transformers` and the floor.

    python -m tests.bench.cuda [--json] [--blocks 32] [--context 512] [--steps 200]

Times are medians by CUDA events around the public step, host work included. The floor is the weights' and the
cache's bytes over the bandwidth that a plain copy reaches on the same device.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from engine.config import ModelConfig, Rope
from engine.model.kv_cache import Segment
from engine.model.span import SpanRunner
from tests.engine.random_spans import random_span

SHAPE = {
    "hidden_size": 4096, "n_heads": 32, "n_kv_heads": 8, "head_dim": 128, "intermediate_size": 14336,
    "vocab_size": 128256, "context_length": 8192, "norm_eps": 1e-5,
}  # fmt: skip


def llama_8b(blocks: int) -> ModelConfig:
    """Llama-3-8B's shape with the given number of blocks."""
    return ModelConfig(family="llama", n_blocks=blocks, rope=Rope(theta=500_000.0), **SHAPE)  # type: ignore[arg-type]


def by_events(step: Callable[[], object], count: int, warm_up: int = 10) -> float:
    """The median milliseconds of `count` calls, each between two events."""
    times: list[float] = []
    event: Any = torch.cuda.Event
    for index in range(warm_up + count):
        begin, end = event(enable_timing=True), event(enable_timing=True)
        begin.record()
        step()
        end.record()
        end.synchronize()
        if index >= warm_up:
            times.append(begin.elapsed_time(end))
    return median(times)


def decode_ms(span: SpanRunner, batch: int, context: int, count: int) -> float:
    """A step of `batch` sessions that each hold `context` tokens; each step is undone, so that the length stays."""
    leases = [span.open(context + 1) for _ in range(batch)]
    for lease in leases:
        span.step(_hidden(span, context), [Segment(lease, 0, context)])
    x = _hidden(span, batch)

    def step() -> None:
        span.step(x, [Segment(lease, context, 1) for lease in leases])
        for lease in leases:
            lease.length = context

    step()
    while span.capture_pending():  # a node does this before anybody waits
        pass
    milliseconds = by_events(step, count)
    for lease in leases:
        lease.close()
    return milliseconds


def _hidden(span: SpanRunner, rows: int) -> torch.Tensor:
    return torch.randn(rows, span.config.hidden_size, device="cuda", dtype=span.options.dtype)


def bandwidth() -> float:
    """Bytes per second that a large copy reaches, read and written."""
    data = torch.randn(1 << 31, device="cuda", dtype=torch.bfloat16)
    other = torch.empty_like(data)
    return 2 * data.nbytes / (by_events(lambda: other.copy_(data), 20) / 1e3)


def transformers_ms(blocks: int, context: int, count: int) -> float:
    """The same step by `transformers`' Llama blocks."""
    from transformers import LlamaConfig, LlamaModel
    from transformers.cache_utils import DynamicCache

    config = LlamaConfig(
        hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336,
        num_hidden_layers=blocks, vocab_size=1024, rms_norm_eps=1e-5, max_position_embeddings=8192,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model: Any = LlamaModel(config)
    torch.set_default_dtype(torch.float32)
    model.eval()
    cache = DynamicCache(config=config)
    with torch.inference_mode():
        model(inputs_embeds=torch.randn(1, context, 4096, device="cuda", dtype=torch.bfloat16), past_key_values=cache)
        x = torch.randn(1, 1, 4096, device="cuda", dtype=torch.bfloat16)

        def step() -> None:
            model(inputs_embeds=x, past_key_values=cache, use_cache=True)
            cache.crop(context)

        return by_events(step, count)


def measure(blocks: int, context: int, count: int) -> dict[str, float | str]:
    """All figures of one run, in milliseconds unless the name says otherwise."""
    config = llama_8b(blocks)
    speed = bandwidth()
    figures: dict[str, float | str] = {"device": torch.cuda.get_device_name(), "copy_gb_per_s": speed / 1e9}
    span = random_span(config, "cuda", torch.bfloat16, kv_bytes=4 << 30)
    assert span._graphs is not None
    fused = span._graphs.fused
    figures["flavour"] = "fused" if fused else "plain"
    figures["weights_gb"] = span.weight_bytes / 1e9
    figures["floor_ms"] = (span.weight_bytes + context * span.pool.bytes_per_token) / speed * 1e3
    figures["batch1_ms"] = decode_ms(span, 1, context, count)
    figures["batch8_ms"] = decode_ms(span, 8, context, count)
    span._graphs.fused = False
    span._graphs._captured.clear()
    figures["plain_batch1_ms"] = decode_ms(span, 1, context, count)
    figures["plain_batch8_ms"] = decode_ms(span, 8, context, count)
    del span
    torch.cuda.empty_cache()
    span = random_span(config, "cuda", torch.bfloat16, kv_bytes=4 << 30, quantisation="int8")
    figures["int8_batch1_ms"] = decode_ms(span, 1, context, count)
    figures["int8_batch8_ms"] = decode_ms(span, 8, context, count)
    figures["int8_weights_gb"] = span.weight_bytes / 1e9
    del span
    torch.cuda.empty_cache()
    figures["transformers_ms"] = transformers_ms(blocks, context, count)
    batch1 = float(figures["batch1_ms"])
    figures["batch8_ratio"] = float(figures["batch8_ms"]) / batch1
    figures["int8_ratio"] = float(figures["int8_batch1_ms"]) / batch1
    figures["transformers_ratio"] = float(figures["transformers_ms"]) / batch1
    return figures


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    figures = measure(args.blocks, args.context, args.steps)
    if args.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:>20}  {value:.3f}" if isinstance(value, float) else f"{name:>20}  {value}")


if __name__ == "__main__":
    main()
