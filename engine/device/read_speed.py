"""Measures how fast a device reads weights and multiplies, to estimate times before a model is loaded.

Computing one token reads every weight once, so memory bandwidth and not arithmetic determines its time; the overhead of
launching a block's operations is a lower bound. Models that fit into a processor's cache are faster than estimated.
"""

from __future__ import annotations

import functools
import time

import torch

_RUNS = 5
_OPERATIONS = 24  # roughly the number in a block
_SMALL = 64
_CPU_SIDE, _GPU_SIDE = 4096, 8192  # side of a square matrix that is too large for any cache


@functools.cache
def reading_bytes_per_s(device: str, dtype: torch.dtype) -> float:
    """Bytes of weights per second when one row is multiplied by a matrix; measured once per process."""
    side = _CPU_SIDE if device == "cpu" else _GPU_SIDE
    weight = torch.ones(side, side, device=device, dtype=dtype)
    row = torch.ones(1, side, device=device, dtype=dtype)
    best_s = float("inf")
    with torch.inference_mode():
        for _ in range(_RUNS + 1):  # the first run is a warm-up
            began = time.perf_counter()
            torch.nn.functional.linear(row, weight)[0, 0].item()  # reading one number synchronizes with the device
            best_s = min(best_s, time.perf_counter() - began)
    return side * side * dtype.itemsize / best_s


@functools.cache
def multiplying_flops_per_s(device: str, dtype: torch.dtype) -> float:
    """Flop/s when many rows are multiplied by a matrix, as for a prompt or in training; measured once per process."""
    side, rows = (_CPU_SIDE, 64) if device == "cpu" else (_GPU_SIDE, 2048)
    weight = torch.ones(side, side, device=device, dtype=dtype)
    many = torch.ones(rows, side, device=device, dtype=dtype)
    best_s = float("inf")
    with torch.inference_mode():
        for _ in range(_RUNS):
            began = time.perf_counter()
            torch.nn.functional.linear(many, weight)[0, 0].item()
            best_s = min(best_s, time.perf_counter() - began)
    return 2 * rows * side * side / best_s


@functools.cache
def block_floor_s(device: str, dtype: torch.dtype) -> float:
    """Seconds of pure overhead for a block: its number of operations on tiny tensors; measured once per process."""
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
