"""Connects training with the engine: orders of owners become blocks, and jobs become orders.

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


class FullBlocksOn:
    """Makes blocks whose weights are all trained on this node's device; `app.training.hop.FullMaker`."""

    def __init__(self, device: str | None) -> None:
        """`device` is the setting; None takes the best one."""
        self._device = device
        self._made_on: set[str] = set()  # devices

    def room(self, spare_bytes: int) -> int:
        """Return the bytes that a job may have here, of these."""
        from engine.budget import allowance_on
        from engine.device.probe import chosen_devices, probe_devices

        return min(spare_bytes, allowance_on(chosen_devices(self._device, probe_devices())[0], None).usable_bytes)

    def make(self, order: JobOrder, spare_bytes: int) -> JobBlocks:
        """Make the blocks of an order; raises `EngineError`."""
        import torch

        from engine.device.dtypes import pick_dtype
        from engine.device.probe import chosen_devices, probe_devices
        from engine.full_runner import FullRunner
        from engine.model.block import WeightOptions
        from engine.sources.hf_config import parse_config
        from engine.training.optimiser import AdamW, Muon

        device = chosen_devices(self._device, probe_devices())[0].id
        self._made_on.add(device)
        kind = Muon if order.optimiser == "muon" else AdamW
        return FullRunner(
            parse_config(dict(order.shape or {}), "the job's order", {}),
            (order.span.start, order.span.stop),
            WeightOptions(torch.device(device), pick_dtype(device)),
            optimiser=kind(weight_decay=order.weight_decay),
            rows=order.rows,
            under_way=order.under_way,
            usable_bytes=self.room(spare_bytes),
        )

    def release(self) -> None:
        """Return the memory of blocks that are gone to the system."""
        from engine.hosting import release

        for device in self._made_on:
            release(device)


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
