"""Measures the speed of a loaded span: the figures that announcements carry and `shoal bench` prints.

A few blocks of random weights say what a model of their shape would reach before any of its weights are here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor

from engine.budget import Precision, block_bytes, block_weights, ends_bytes, kv_bytes_per_token, unquantised
from engine.config import ModelConfig
from engine.errors import CacheFull
from engine.model.block import build_block
from engine.model.hosted_span import HostedSpan, SessionLease, SessionRows
from engine.model.onnx_graph import GridProduct
from engine.model.span import SpanOptions, SpanRunner
from engine.sources.base import block_part
from engine.sources.grid import GRID_KINDS, Grid, decode_grid, quantise
from engine.sources.layout import KIND_SIZES, PACKED_GROUPS
from engine.stored_form import StoredForm
from engine.training.parameters import part_weights, views

_DRAWN_BYTES = 128 << 20  # of weights, more than a cache holds
_CONTEXT, _SESSIONS, _STEPS = 128, 8, 8


@dataclass(frozen=True)
class Throughput:
    """Tokens per second through all blocks of a span.

    `batch8_tokens_per_s` counts the tokens of eight sessions together; None if it was not measured or the cache was too
    small for it.
    """

    decode_tokens_per_s: float
    prefill_tokens_per_s: float
    batch8_tokens_per_s: float | None


def measure_span(span: HostedSpan, context: int = _CONTEXT, steps: int = _STEPS, *, batch: bool = True) -> Throughput:
    """Time a prefill of `context` tokens, then decode steps of one session and, with `batch`, of eight at once."""
    context = min(context, span.config.context_length - steps - 2)
    prefill_s, single_s = _seconds(span, 1, context, steps)
    eight_s = None
    if batch:
        with suppress(CacheFull):
            eight_s = median(_seconds(span, _SESSIONS, context, steps)[1])
    return Throughput(1 / median(single_s), context / prefill_s, None if eight_s is None else _SESSIONS / eight_s)


def _seconds(span: HostedSpan, sessions: int, context: int, steps: int) -> tuple[float, list[float]]:
    """Return the fastest prefill of one session, and the decode steps of all `sessions` after it, in seconds."""
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
        return min(prefills), times[1:]
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


@dataclass(frozen=True)
class ShapeSpeed:
    """Speeds of a device with blocks of one shape."""

    precision: Precision  # of the weights that were measured
    reading_bytes_per_s: float  # of weights and cache, for one token
    flops_per_s: float  # for a prompt
    few_rows_flops_per_s: float  # for eight replies at once
    head_bytes_per_s: float = 0.0  # of the output matrix, for one token; 0: not measured


def measure_shape(
    config: ModelConfig, device: str, dtype: torch.dtype, free_bytes: int, form: StoredForm | None = None
) -> ShapeSpeed | None:
    """Measure blocks of drawn weights with a model's shape; None if the free memory is too small for two of them.

    With `form`, they are in the grids of the model's files, and so is an output matrix; only on a CPU.
    """
    precision = unquantised(dtype.itemsize) if form is None else form.precision
    each, kv_bytes = block_bytes(config, precision), kv_bytes_per_token(config, precision)
    read = each if form is None else int(block_weights(config) * form.weight_bytes)  # the rest is packed for batches
    blocks = min(config.n_blocks, max(2, -(-_DRAWN_BYTES // read)))
    cache_bytes = 2 * (_SESSIONS + 1) * (_CONTEXT + 2 * _STEPS) * blocks * kv_bytes
    if 2 * blocks * each + cache_bytes > free_bytes:
        return None
    options = SpanOptions(torch.device(device), dtype, "none" if form is None else "stored", kv_bytes=cache_bytes)
    drawn = _DrawnBlock(config)
    built = []
    for index in range(blocks):
        if form is not None:  # types may change from block to block, as in files that keep some blocks finer
            drawn.kinds = form.blocks[index * config.n_blocks // blocks]
        built.append(build_block(index, drawn, options))
    span = SpanRunner(config, 0, built, options)
    hosted, context = HostedSpan([span]), min(_CONTEXT, config.context_length - _STEPS - 2)
    prefill_s, single_s = _seconds(hosted, 1, context, _STEPS)
    eight_s = _seconds(hosted, _SESSIONS, context, _STEPS)[1]
    flops = blocks * 2 * block_weights(config)
    attended = blocks * 4 * config.n_heads * config.head_dim  # for each token of the context
    return ShapeSpeed(
        precision,
        reading_bytes_per_s=blocks * (each + context * kv_bytes) / median(single_s),
        flops_per_s=context * (flops + attended * context / 2) / prefill_s,
        few_rows_flops_per_s=_SESSIONS * (flops + attended * context) / median(eight_s),
        head_bytes_per_s=0.0 if form is None else _head_bytes_per_s(hosted, form),
    )


def _head_bytes_per_s(span: HostedSpan, form: StoredForm) -> float:
    """Bytes that the output matrix has as numbers, by the seconds until a token is chosen with it in the file's grid.

    A step of the blocks before each product leaves none of the matrix in the processor's cache, as in a reply.
    """
    if form.head not in GRID_KINDS:
        return 0.0
    config = span.config
    rows = min(config.vocab_size, max(1024, _DRAWN_BYTES // config.hidden_size))
    product = GridProduct(_drawn_grid(form.head, (rows, config.hidden_size)))
    row, times, lease = torch.zeros(1, config.hidden_size), [], span.open(_STEPS + 1)
    try:
        for _ in range(_STEPS + 1):
            _step(span, [SessionRows(lease, lease.length, 1)])
            begin = time.perf_counter()
            with torch.inference_mode():
                product(row).argmax().item()
            times.append(time.perf_counter() - begin)
    finally:
        lease.close()
    head_s = median(times[1:]) * config.vocab_size / rows
    return ends_bytes(config, form.precision, embedding=False, head=True) / head_s


def _drawn_grid(kind: str, shape: tuple[int, ...]) -> Grid:
    """Return a random matrix in the grid of a type; products with zeros would be faster."""
    if kind in PACKED_GROUPS:
        return quantise(torch.rand(shape) * 0.04 - 0.02)
    elements, size = KIND_SIZES[kind]
    grid = decode_grid(torch.zeros(math.prod(shape) // elements * size, dtype=torch.uint8), kind, shape)
    eight = torch.randint(1 << 62, (-(-grid.quantised.numel() // 8),))  # at a time: bytes alone would take a second
    integers = eight.view(torch.uint8)[: grid.quantised.numel()].view_as(grid.quantised)
    return replace(grid, quantised=integers, scale=torch.rand_like(grid.scale) * 0.002)


class _DrawnBlock:
    """Random weights of one block, read like those of a file; `kinds` are the types that it has there, by role."""

    def __init__(self, config: ModelConfig) -> None:
        part = block_part(0)
        drawn = torch.rand(part_weights(config, part)) * 0.04 - 0.02
        self._tensors = views(config, part, drawn)
        self.kinds: Mapping[str, str] = {}

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {role: tuple(tensor.shape) for role, tensor in self._tensors.items()}

    def read(self, outs: Mapping[str, Tensor]) -> None:
        for role, out in outs.items():
            out.copy_(self._tensors[role])

    def grid(self, role: str) -> Grid | None:
        kind = self.kinds.get(role)
        return _drawn_grid(kind, self.shapes[role]) if kind in GRID_KINDS else None
