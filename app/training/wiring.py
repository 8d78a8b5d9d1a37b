"""Connects training with the engine: orders of owners become blocks with adapters, and jobs become orders.

Imports the engine only when it is called, so that light starts do without it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from app.core.span import Span
from app.training.hop import JobBlocks, MakeBlocks
from app.training.wire import JobOrder

if TYPE_CHECKING:
    from engine.model.span import SpanRunner
    from engine.training.adapters import AdapterSettings


def blocks_of(hosted: SpanRunner) -> MakeBlocks:
    """Return a function that makes the blocks of a job from hosted ones."""
    return partial(_make_blocks, hosted)


def _make_blocks(hosted: SpanRunner, order: JobOrder, spare_bytes: int) -> JobBlocks:
    from engine.training.adapters import AdapterSettings
    from engine.training.optimiser import AdamW
    from engine.training_runner import TrainingRunner

    return TrainingRunner(
        hosted,
        (order.span.start, order.span.stop),
        AdapterSettings(order.rank, order.alpha, order.targets, order.dropout, order.seed),
        optimiser=AdamW(weight_decay=order.weight_decay),
        rows=order.rows,
        under_way=order.under_way,
        usable_bytes=spare_bytes,
    )


def order_of(settings: AdapterSettings, *, blocks: int, rows: int, wire: str, weight_decay: float = 0.0) -> JobOrder:
    """Return a job's order for all blocks of a model; the owner fills in each hop's part."""
    return JobOrder(
        span=Span(0, blocks),
        predecessor="",
        successor="",
        rank=settings.rank,
        alpha=settings.alpha,
        targets=settings.targets,
        dropout=settings.dropout,
        seed=settings.seed,
        weight_decay=weight_decay,
        rows=rows,
        under_way=1,
        wire=wire,
    )
