"""Chooses the dtype in which a device computes a model.

A card with 16-bit units computes in the model's own format. Elsewhere a measurement decides: a CPU without bf16
instructions is hundreds of times slower in bf16 than in float32, and an old GPU emulates bf16. So small matrix products
are timed in each dtype, once per process and device.

Other programs must not change the choice: a node that computes in 16 bits by mistake writes other tokens than its
neighbours. So products on a CPU are timed on one thread (several wait for each other, and any of them may be
interrupted), and the dtypes are timed in turn, several times, of which the shortest counts.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from engine.device.kinds import kind_of

log = logging.getLogger("shoal.device")

CANDIDATES = (torch.float32, torch.bfloat16, torch.float16)  # float32 first: its time bounds the other measurements
# A 16-bit dtype up to this many times slower than the fastest is still preferred: it needs half the memory of float32.
NEAR = 1.15
WORST_ERROR = 0.02  # error norm relative to the product's norm; rounding to bf16 costs about 0.003
HOPELESS = 4.0  # times slower than the best so far: not worth more measuring
ROUNDS = 3

# (dtype, at_most_s) -> seconds for the products, None if the result is wrong; measuring stops early above `at_most_s`.
Measure = Callable[[torch.dtype, float], float | None]


@dataclass(frozen=True)
class DtypeChoice:
    """The dtype chosen for a device, and the seconds measured for each dtype."""

    dtype: torch.dtype
    seconds: Mapping[torch.dtype, float]


def pick_dtype(device: str, own: torch.dtype = torch.bfloat16) -> torch.dtype:
    """Return the dtype for a model whose weights are stored as `own`; measures the device only where that is needed."""
    if _has_16_bit_units(device):
        return own if own.itemsize == 2 else torch.bfloat16
    return choose(dtype_times(device).seconds, own)


@functools.cache
def dtype_times(device: str) -> DtypeChoice:
    """Measure every dtype in which this device computes correctly, once per process, and choose one for bf16 models."""
    choice = measure_dtypes(lambda dtype, at_most_s: time_products(device, dtype, at_most_s))
    times = ", ".join(f"{name_of(dtype)} {1e3 * seconds:.2g} ms" for dtype, seconds in choice.seconds.items())
    log.info("%s computes in %s (%s)", device, name_of(choice.dtype), times)
    return choice


def name_of(dtype: torch.dtype) -> str:
    """Return the dtype's name without `torch.`"""
    return str(dtype).removeprefix("torch.")


def _has_16_bit_units(device: str) -> bool:
    """True for NVIDIA's cards since 2020 (compute capability 8), which compute in bf16 and fp16 at the same speed."""
    needed = kind_of(torch.device(device)).own_format_from
    return needed is not None and torch.cuda.get_device_capability(device) >= needed


def measure_dtypes(measure: Measure) -> DtypeChoice:
    """Time every candidate in turn, skipping those that the device does not support, and choose one."""
    seconds: dict[torch.dtype, float] = {}
    candidates: tuple[torch.dtype, ...] = CANDIDATES
    for _ in range(ROUNDS):
        for dtype in candidates:
            at_most_s = HOPELESS * min(seconds.values(), default=float("inf"))
            try:
                measured_s = measure(dtype, at_most_s)
            except (RuntimeError, NotImplementedError) as error:
                log.debug("%s is not supported: %s", dtype, error)
                continue
            if measured_s is not None:
                seconds[dtype] = min(measured_s, seconds.get(dtype, measured_s))
        worth_s = HOPELESS * min(seconds.values(), default=0.0)
        hopeful = {dtype for dtype, measured_s in seconds.items() if measured_s <= worth_s}
        candidates = tuple(dtype for dtype in CANDIDATES if dtype in hopeful or dtype is torch.float32)
    return DtypeChoice(choose(seconds), seconds)


def choose(seconds: Mapping[torch.dtype, float], own: torch.dtype = torch.bfloat16) -> torch.dtype:
    """Return the model's own 16-bit dtype unless it is clearly slower; then bf16, then float32, if near the fastest.

    fp16 overflows at 65504, so only a model that is stored in it uses it.
    """
    usable = {dtype: s for dtype, s in seconds.items() if dtype is not torch.float16 or own is torch.float16}
    near = [dtype for dtype in usable if usable[dtype] <= NEAR * min(usable.values())]
    preferred = (own, torch.bfloat16) if own.itemsize == 2 else (torch.bfloat16,)
    return next((dtype for dtype in preferred if dtype in near), torch.float32)


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
    with torch.inference_mode(), _one_thread(device):
        out = products().float().cpu()  # the first run is a warm-up; its result is checked
        expected = exact_input @ exact_weight.T
        if not bool((out - expected).norm() <= WORST_ERROR * expected.norm()):  # `not <=` also rejects NaN
            return None
        for run in range(runs):
            started = time.perf_counter()
            products()[0, 0].item()  # reading one number synchronizes with the device
            best_s = min(best_s, time.perf_counter() - started)
            if run and best_s > at_most_s:  # a single run may have been interrupted
                break
    return best_s


@contextmanager
def _one_thread(device: str) -> Iterator[None]:
    """Let torch compute on the calling thread alone, where the device is the CPU."""
    threads = torch.get_num_threads()
    if device == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if device == "cpu":
            torch.set_num_threads(threads)
