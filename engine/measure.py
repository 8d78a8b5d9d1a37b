"""How fast a span is on its device: the figures that announcements carry and `shoal bench` prints."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from engine.attention import Segment
from engine.errors import CacheFull
from engine.span import SpanRunner


@dataclass(frozen=True)
class Throughput:
    """Tokens per second through all blocks of a span; None where the cache was too small to try."""

    decode_tokens_per_s: float
    prefill_tokens_per_s: float
    batch8_tokens_per_s: float | None


def measure_span(span: SpanRunner, context: int = 128, steps: int = 8) -> Throughput:
    """Time a prefill of `context` tokens, single steps behind it, and steps of eight sessions at once."""
    context = min(context, span.config.context_length - steps - 2)
    prefill_s = _session_seconds(span, lambda: _prefill(span, context), repeats=3)
    single_s = _decode_seconds(span, 1, context, steps)
    try:
        eight_s: float | None = _decode_seconds(span, 8, context, steps)
    except CacheFull:
        eight_s = None
    return Throughput(1 / single_s, context / prefill_s, None if eight_s is None else 8 / eight_s)


def _session_seconds(span: SpanRunner, run: Callable[[], list[Segment]], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        segments = run()
        times.append(time.perf_counter() - begin)
        for segment in segments:
            segment.lease.close()
    return min(times)


def _prefill(span: SpanRunner, context: int) -> list[Segment]:
    segment = Segment(span.open(context), 0, context)
    _step(span, [segment])
    return [segment]


def _decode_seconds(span: SpanRunner, sessions: int, context: int, steps: int) -> float:
    leases = []
    try:
        for _ in range(sessions):
            leases.append(span.open(context + steps + 1))
            _step(span, [Segment(leases[-1], 0, context)])
        times = []
        for _ in range(steps + 1):  # the first builds what later ones use (kernels, graphs)
            begin = time.perf_counter()
            _step(span, [Segment(lease, lease.length, 1) for lease in leases])
            times.append(time.perf_counter() - begin)
        return median(times[1:])
    finally:
        for lease in leases:
            lease.close()


def _step(span: SpanRunner, segments: list[Segment]) -> None:
    rows = sum(segment.count for segment in segments)
    hidden = torch.zeros(rows, span.config.hidden_size, dtype=span.options.dtype)
    span.step(hidden, segments)[0, 0].item()  # reading one number waits for the device
