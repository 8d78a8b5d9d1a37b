"""Decides when a node gives blocks back because other programs need the device's memory, and when it takes them again.

A device keeps some of its memory free for others. Once half of that is gone, so many blocks are given back that it is
free again; they are loaded again after there was room for them for `REGROW_AFTER_S`. The distance between the two
keeps a node from changing back and forth. Pure: `app.hosting.loader` reads the free memory, and
`app.hosting.block_host` carries the change out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.core.span import Span

if TYPE_CHECKING:
    from engine.hosting import DeviceShare, HostingPlan

LOOK_S = 1.0  # between two looks at the free memory
LOW_SHARE = 0.5  # of the memory that is left to others; less free memory than this is too little
LOW_LOOKS = 2  # in a row: a program that starts may take memory for a moment
REGROW_AFTER_S = 300.0
FEWER = 0.85  # of the blocks that a load found no memory for are tried next

Free = Mapping[str, int]  # device -> free bytes


@dataclass(frozen=True)
class MemoryChange:
    """Another number of blocks for each share of a plan; all 0: none can be hosted."""

    blocks: tuple[int, ...]

    @property
    def total(self) -> int:
        """Blocks on all devices."""
        return sum(self.blocks)


class MemoryWatch:
    """Compares the free memory, look by look, with what a plan leaves to others; `full` is the plan at the start."""

    def __init__(self, plan: HostingPlan, full: HostingPlan) -> None:
        self._plan, self._full = plan, full
        self._low_looks = 0
        self._room_since: float | None = None

    def look(self, free: Free, now: float) -> MemoryChange | None:
        """Return the change that is due after this look: counts by share, of `plan` if fewer, of `full` if more."""
        fewer = after_giving_back(self._plan, free)
        self._low_looks = self._low_looks + 1 if fewer is not None else 0
        if fewer is not None:
            self._room_since = None
            return fewer if self._low_looks >= LOW_LOOKS else None
        more = after_taking_back(self._plan, self._full, free)
        if more is None:
            self._room_since = None
            return None
        self._room_since = now if self._room_since is None else self._room_since
        return more if now - self._room_since >= REGROW_AFTER_S else None


def after_giving_back(plan: HostingPlan, free: Free, *, at_least: int = 0) -> MemoryChange | None:
    """Return the blocks that each device keeps so that others have their memory again; None if they have enough.

    With `at_least`, the device with the least room gives back so many even if its free memory looks sufficient: a step
    has just failed for want of memory.
    """
    given = [_to_give_back(share, free[share.device.id]) for share in plan.shares]
    if sum(given) < at_least:
        tightest = min(range(len(given)), key=lambda index: _room(plan.shares[index], free))
        given[tightest] = min(at_least, plan.shares[tightest].budget.blocks)
    if not sum(given):
        return None
    kept = tuple(share.budget.blocks - gone for share, gone in zip(plan.shares, given, strict=True))
    return MemoryChange(kept)


def after_taking_back(plan: HostingPlan, full: HostingPlan, free: Free) -> MemoryChange | None:
    """Return the blocks of each device of `full` with those that fit again; None unless half of the lost ones do."""
    lost = full.blocks - plan.blocks
    if lost < 1:
        return None
    held: dict[str, int] = {}
    for share in plan.shares:
        held[share.device.id] = held.get(share.device.id, 0) + share.budget.blocks
    room = {share.device.id: max(0, _room(share, free)) for share in full.shares}
    blocks = []
    for share in full.shares:
        device = share.device.id
        own = min(share.budget.blocks, held.get(device, 0))
        fit = min(share.budget.blocks - own, room[device] // share.block_bytes)
        held[device] = held.get(device, 0) - own
        room[device] -= fit * share.block_bytes
        blocks.append(own + fit)
    return MemoryChange(tuple(blocks)) if 2 * (sum(blocks) - plan.blocks) >= lost else None


def fewer_blocks(plan: HostingPlan, failed_loads: int) -> HostingPlan:
    """Return the plan to try after so many loads in a row that found the memory full.

    The first may have met a program that ended soon, so it is repeated as it was; each further one costs blocks: with
    a forecast that is too low for this device, a node would else host nothing for ever.
    """
    share = FEWER ** max(0, failed_loads - 1)
    if share == 1.0:
        return plan
    return plan.with_blocks([max(1, int(one.budget.blocks * share)) for one in plan.shares])


def kept_span(span: Span, plan: HostingPlan, change: MemoryChange, others: Sequence[int]) -> Span | None:
    """Return the blocks to keep: a run in which no device has more than the change allows, as long as possible.

    `others` counts for each block how many other homes serve it: of two runs of one length, the one stays that others
    can spare least. None if no block can be kept.
    """
    parts = plan.parts(span.start, span.stop)
    best: tuple[int, int, Span] | None = None
    for start in span.blocks():
        stop = start
        for (_, first, last), allowed in zip(parts, change.blocks, strict=False):
            if last <= start:
                continue
            stop = min(last, max(start, first) + allowed)
            if stop < last:
                break
        if stop > start:
            scarce = -sum(others[start:stop])
            candidate = (stop - start, scarce, Span(start, stop))
            best = candidate if best is None or candidate[:2] > best[:2] else best
    return None if best is None else best[2]


def blocks_of(span: Span, kept: Span, plan: HostingPlan) -> tuple[int, ...]:
    """Return how many blocks each share of a plan hosts once only `kept` of `span` is left."""
    counts = [
        max(0, min(last, kept.stop) - max(first, kept.start)) for _, first, last in plan.parts(span.start, span.stop)
    ]
    return (*counts, *(0 for _ in plan.shares[len(counts) :]))


def _to_give_back(share: DeviceShare, free_bytes: int) -> int:
    headroom = _headroom(share)
    if free_bytes >= LOW_SHARE * headroom:
        return 0
    return min(share.budget.blocks, -(-(headroom - free_bytes) // share.block_bytes))


def _room(share: DeviceShare, free: Free) -> int:
    """Free memory of a share's device beyond what is left to others."""
    return free[share.device.id] - _headroom(share)


def _headroom(share: DeviceShare) -> int:
    from engine.budget import default_headroom

    return default_headroom(share.device.kind, share.device.total_bytes)
