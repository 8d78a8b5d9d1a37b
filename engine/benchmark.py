"""How fast a span is on its device: the figures that announcements carry and `shoal bench` prints."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from statistics import median

import torch

from engine.errors import CacheFull
from engine.model.attention import Segment
from engine.model.kv_cache import KVLease
from engine.model.span import SpanRunner


@dataclass(frozen=True)
class Throughput:
    """Tokens per second through all blocks of a span; None where the cache was too small to try."""

    decode_tokens_per_s: float
    prefill_tokens_per_s: float
    batch8_tokens_per_s: float | None


def measure_span(span: SpanRunner, context: int = 128, steps: int = 8, *, batch: bool = True) -> Throughput:
    """Time a prefill of `context` tokens, single steps behind it and, unless told not to, steps of eight sessions."""
    context = min(context, span.config.context_length - steps - 2)
    prefill_s, single_s = _seconds(span, 1, context, steps)
    eight_s = None
    if batch:
        with suppress(CacheFull):
            eight_s = _seconds(span, 8, context, steps)[1]
    return Throughput(1 / single_s, context / prefill_s, None if eight_s is None else 8 / eight_s)


def _seconds(span: SpanRunner, sessions: int, context: int, steps: int) -> tuple[float, float]:
    """The best prefill of one session, and a usual step of them all behind it."""
    leases: list[KVLease] = []
    try:
        prefills = []
        for _ in range(sessions):
            leases.append(span.open(context + steps + 1))
            prefills.append(_step(span, [Segment(leases[-1], 0, context)]))
        if sessions == 1:  # the first builds what later ones use (kernels, graphs)
            leases[0].truncate(0)
            prefills.append(_step(span, [Segment(leases[0], 0, context)]))
        times = [_step(span, [Segment(lease, lease.length, 1) for lease in leases]) for _ in range(steps + 1)]
        return min(prefills), median(times[1:])
    finally:
        for lease in leases:
            lease.close()


def _step(span: SpanRunner, segments: list[Segment]) -> float:
    """The seconds of one step."""
    rows = sum(segment.count for segment in segments)
    hidden = torch.zeros(rows, span.config.hidden_size, dtype=span.options.dtype)
    begin = time.perf_counter()
    span.step(hidden, segments)[0, 0].item()  # reading one number waits for the device
    return time.perf_counter() - begin
