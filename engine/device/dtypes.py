"""Which number format a device computes in: measured, never guessed from its name.

A CPU without bf16 instructions is hundreds of times slower in bf16 than in float32, an old card emulates it, a new
one halves its time by it. So a small matrix product is timed in each format, once per process and device.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

log = logging.getLogger("shoal.device")

CANDIDATES = (torch.float32, torch.bfloat16, torch.float16)  # float32 first: it is the measure of the others
# A half format this much slower than the fastest still wins in favour of memory (against float32) or of range
# (bf16 against fp16, which overflows at 65504).
NEAR = 1.15
WORST_ERROR = 0.02  # of the product's norm; rounding to bf16 costs about 0.003
HOPELESS = 4.0  # times slower than the best so far: one run tells enough

# Seconds for the products, or None where the device cannot do them or gets them wrong; `at_most_s` ends early.
Measure = Callable[[torch.dtype, float], float | None]


@dataclass(frozen=True)
class DtypeChoice:
    """The format chosen for a device, and the timings that decided it."""

    dtype: torch.dtype
    seconds: Mapping[torch.dtype, float]


@functools.cache
def pick_dtype(device: str) -> DtypeChoice:
    """The format in which this device is fastest without being wrong; measured once in this process."""
    choice = measure_dtypes(lambda dtype, at_most_s: time_products(device, dtype, at_most_s))
    log.info("%s computes in %s (%s)", device, choice.dtype, choice.seconds)
    return choice


def measure_dtypes(measure: Measure) -> DtypeChoice:
    """Time every candidate and choose."""
    seconds: dict[torch.dtype, float] = {}
    for dtype in CANDIDATES:
        at_most_s = HOPELESS * min(seconds.values(), default=float("inf"))
        try:
            measured_s = measure(dtype, at_most_s)
        except (RuntimeError, NotImplementedError) as error:
            log.debug("%s is not supported: %s", dtype, error)
            continue
        if measured_s is not None:
            seconds[dtype] = measured_s
    return DtypeChoice(choose(seconds), seconds)


def choose(seconds: Mapping[torch.dtype, float]) -> torch.dtype:
    """The fastest format, with bf16 before fp16 before float32 where they are near."""
    if not seconds:
        return torch.float32
    fastest_s = min(seconds.values())
    near = [dtype for dtype in seconds if seconds[dtype] <= NEAR * fastest_s]
    return next(dtype for dtype in (torch.bfloat16, torch.float16, torch.float32) if dtype in near)


def time_products(device: str, dtype: torch.dtype, at_most_s: float, runs: int = 5) -> float | None:
    """Seconds of one row and of a chunk of rows through a matrix; None where the result is wrong."""
    # On a GPU the matrix must be large enough that memory and arithmetic, not launches, are timed.
    size, rows, repeats = (512, 4, 1) if device == "cpu" else (4096, 64, 8)
    generator = torch.Generator().manual_seed(0)
    exact_weight = torch.randn(size, size, generator=generator)
    exact_input = torch.randn(rows, size, generator=generator)
    weight, chunk = exact_weight.to(device, dtype), exact_input.to(device, dtype)

    def products() -> torch.Tensor:
        for _ in range(repeats):
            torch.nn.functional.linear(chunk[:1], weight)
            out = torch.nn.functional.linear(chunk, weight)
        return out

    best_s = float("inf")
    with torch.inference_mode():
        out = products().float().cpu()  # the first run warms up, and its result is checked
        expected = exact_input @ exact_weight.T
        if not bool((out - expected).norm() <= WORST_ERROR * expected.norm()):  # so written, NaN is wrong too
            return None
        for _ in range(runs):
            started = time.perf_counter()
            products()[0, 0].item()  # reading one number waits for the device
            best_s = min(best_s, time.perf_counter() - started)
            if best_s > at_most_s:
                break
    return best_s
