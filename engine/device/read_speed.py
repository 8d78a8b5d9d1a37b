"""How fast a device reads weights: what one token of a reply costs, before any model is on this machine.

A single token goes through every weight once, so that reading them, not arithmetic, takes its time; but never less than
the calls of a block's operations take. Models that fit into a processor's cache are faster.
"""

from __future__ import annotations

import functools
import time

import torch

_RUNS = 5
_OPERATIONS = 24  # of a block, about
_SMALL = 64
_CPU_SIDE, _GPU_SIDE = 4096, 8192  # of a square matrix too large for any cache


@functools.cache
def reading_bytes_per_s(device: str, dtype: torch.dtype) -> float:
    """Bytes of weights that one row goes through in a second; measured once in this process."""
    side = _CPU_SIDE if device == "cpu" else _GPU_SIDE
    weight = torch.ones(side, side, device=device, dtype=dtype)
    row = torch.ones(1, side, device=device, dtype=dtype)
    best_s = float("inf")
    with torch.inference_mode():
        for _ in range(_RUNS + 1):  # the first warms up, and is seldom the best
            began = time.perf_counter()
            torch.nn.functional.linear(row, weight)[0, 0].item()  # reading one number waits for the device
            best_s = min(best_s, time.perf_counter() - began)
    return side * side * dtype.itemsize / best_s


@functools.cache
def block_floor_s(device: str, dtype: torch.dtype) -> float:
    """Seconds that as many operations as a block has take on next to no numbers; measured once in this process."""
    weight = torch.ones(_SMALL, _SMALL, device=device, dtype=dtype)
    best_s = float("inf")
    with torch.inference_mode():
        for _ in range(_RUNS + 1):
            row = torch.ones(1, _SMALL, device=device, dtype=dtype)
            began = time.perf_counter()
            for _ in range(_OPERATIONS):
                row = torch.nn.functional.linear(row, weight) * (1 / _SMALL)
            row[0, 0].item()
            best_s = min(best_s, time.perf_counter() - began)
    return best_s
