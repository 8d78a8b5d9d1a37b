"""Measures the speed of a loaded span: the figures that announcements carry and `shoal bench` prints."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from statistics import median

import torch

from engine.errors import CacheFull
from engine.model.hosted_span import HostedSpan, SessionLease, SessionRows


@dataclass(frozen=True)
class Throughput:
    """Tokens per second through all blocks of a span.

    `batch8_tokens_per_s` counts the tokens of eight sessions together; None if it was not measured or the cache was too
    small for it.
    """

    decode_tokens_per_s: float
    prefill_tokens_per_s: float
    batch8_tokens_per_s: float | None


def measure_span(span: HostedSpan, context: int = 128, steps: int = 8, *, batch: bool = True) -> Throughput:
    """Time a prefill of `context` tokens, then decode steps of one session and, with `batch`, of eight at once."""
    context = min(context, span.config.context_length - steps - 2)
    prefill_s, single_s = _seconds(span, 1, context, steps)
    eight_s = None
    if batch:
        with suppress(CacheFull):
            eight_s = _seconds(span, 8, context, steps)[1]
    return Throughput(1 / single_s, context / prefill_s, None if eight_s is None else 8 / eight_s)


def _seconds(span: HostedSpan, sessions: int, context: int, steps: int) -> tuple[float, float]:
    """Return the fastest prefill of one session and the median decode step of all `sessions` after it, in seconds."""
    leases: list[SessionLease] = []
    try:
        prefills = []
        for _ in range(sessions):
            leases.append(span.open(context + steps + 1))
            prefills.append(_step(span, [SessionRows(leases[-1], 0, context)]))
        if sessions == 1:  # the first prefill includes building kernels and graphs, so time a second
            leases[0].truncate(0)
            prefills.append(_step(span, [SessionRows(leases[0], 0, context)]))
        times = [_step(span, [SessionRows(lease, lease.length, 1) for lease in leases]) for _ in range(steps + 1)]
        return min(prefills), median(times[1:])
    finally:
        for lease in leases:
            lease.close()


def _step(span: HostedSpan, work: list[SessionRows]) -> float:
    """Return the seconds that one step takes."""
    rows = sum(own.count for own in work)
    hidden = torch.zeros(rows, span.config.hidden_size, dtype=span.options.dtype)
    begin = time.perf_counter()
    span.step(hidden, work)[0, 0].item()  # reading a number back waits until the device is done
    return time.perf_counter() - begin
