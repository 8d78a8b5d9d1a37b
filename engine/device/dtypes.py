"""Chooses the dtype in which a device computes, by measurement rather than by the device's name.

A CPU without bf16 instructions is hundreds of times slower in bf16 than in float32; an old GPU emulates bf16, a new
one halves its time with it. So small matrix products are timed in each dtype, once per process and device.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

log = logging.getLogger("shoal.device")

CANDIDATES = (torch.float32, torch.bfloat16, torch.float16)  # float32 first: its time bounds the other measurements
# A 16-bit dtype up to this many times slower than the fastest is still preferred: to float32 because it needs half the
# memory, and bf16 to fp16 because fp16 overflows at 65504.
NEAR = 1.15
WORST_ERROR = 0.02  # error norm relative to the product's norm; rounding to bf16 costs about 0.003
HOPELESS = 4.0  # times slower than the best so far: stop measuring after one run

# (dtype, at_most_s) -> seconds for the products, None if the result is wrong; measuring stops early above `at_most_s`.
Measure = Callable[[torch.dtype, float], float | None]


@dataclass(frozen=True)
class DtypeChoice:
    """The dtype chosen for a device, and the seconds measured for each dtype."""

    dtype: torch.dtype
    seconds: Mapping[torch.dtype, float]


@functools.cache
def pick_dtype(device: str) -> DtypeChoice:
    """Return the fastest dtype in which this device computes correctly; measured once per process."""
    choice = measure_dtypes(lambda dtype, at_most_s: time_products(device, dtype, at_most_s))
    log.info("%s computes in %s (%s)", device, choice.dtype, choice.seconds)
    return choice


def measure_dtypes(measure: Measure) -> DtypeChoice:
    """Time every candidate, skipping those that the device does not support, and choose one."""
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
    """Return the fastest dtype; among those within `NEAR` of it, bf16 before fp16 before float32."""
    if not seconds:
        return torch.float32
    fastest_s = min(seconds.values())
    near = [dtype for dtype in seconds if seconds[dtype] <= NEAR * fastest_s]
    return next(dtype for dtype in (torch.bfloat16, torch.float16, torch.float32) if dtype in near)


def time_products(device: str, dtype: torch.dtype, at_most_s: float, runs: int = 5) -> float | None:
    """Seconds to multiply one row and a chunk of rows by a matrix, best of `runs`; None if the result is wrong."""
    # On a GPU the matrix must be large, so that memory and arithmetic are timed rather than kernel launches.
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
        out = products().float().cpu()  # the first run is a warm-up; its result is checked
        expected = exact_input @ exact_weight.T
        if not bool((out - expected).norm() <= WORST_ERROR * expected.norm()):  # `not <=` also rejects NaN
            return None
        for _ in range(runs):
            started = time.perf_counter()
            products()[0, 0].item()  # reading one number synchronizes with the device
            best_s = min(best_s, time.perf_counter() - started)
            if best_s > at_most_s:
                break
    return best_s
