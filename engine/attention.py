"""Attention over a pool of cached keys and values, for the rows of one step.

A step's rows are segments: `count` new tokens of one session that start at position `start`. Which rows see what is
planned once per step and used by every block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kv import BlockCache, KVLease


@dataclass(frozen=True)
class Segment:
    """`count` new tokens of one session, the first at position `start`."""

    lease: KVLease
    start: int
    count: int

    @property
    def stop(self) -> int:
        """The session's length once the step is done."""
        return self.start + self.count


@dataclass
class SegmentPlan:
    """What one segment's rows may see, for blocks with one attention window."""

    count: int
    stop: int
    seen_from: int  # the oldest position any row sees
    run: int | None  # first slot of the session's run, or None: use `seen_slots`
    seen_slots: Tensor | None
    mask: Tensor | None  # (count, stop - seen_from), True where seen
    causal: bool


class StepPlan:
    """Everything about one step that its blocks share."""

    def __init__(self, segments: list[Segment], device: torch.device) -> None:
        self._segments = segments
        self._device = device
        self._by_window: dict[int | None, list[SegmentPlan]] = {}
        positions = [torch.arange(s.start, s.stop) for s in segments]
        self.positions = (positions[0] if len(positions) == 1 else torch.cat(positions)).to(device)
        only = segments[0] if len(segments) == 1 else None
        # One run of slots is written as a slice, anything else by index.
        self.run = only.lease.first_slot if only is not None else None
        self.span = (segments[0].start, segments[0].stop)
        self.slots = None if self.run is not None else torch.cat([s.lease.slots(s.start, s.stop) for s in segments])

    def for_window(self, window: int | None) -> list[SegmentPlan]:
        """The plans of all segments for blocks that see `window` tokens (None: all)."""
        if window not in self._by_window:
            self._by_window[window] = [self._plan(segment, window) for segment in self._segments]
        return self._by_window[window]

    def _plan(self, segment: Segment, window: int | None) -> SegmentPlan:
        lease, stop = segment.lease, segment.stop
        # Row i sees the positions (start + i - window, start + i].
        seen_from = 0 if window is None else max(segment.start - window + 1, 0)
        causal = segment.start == 0 and segment.count > 1 and (window is None or stop <= window)
        mask = None
        if segment.count > 1 and not causal:
            query = torch.arange(segment.start, stop, device=self._device)[:, None]
            key = torch.arange(seen_from, stop, device=self._device)[None]
            mask = key <= query
            if window is not None:
                mask &= key > query - window
        seen_slots = None if lease.first_slot is not None else lease.slots(seen_from, stop)
        return SegmentPlan(segment.count, stop, seen_from, lease.first_slot, seen_slots, mask, causal)


def write_cache(cache: BlockCache, plan: StepPlan, k: Tensor, v: Tensor) -> None:
    """Put the new keys and values, each (N, kv_heads, 1, head_dim), into a block's pool."""
    if plan.run is not None:
        first, count = plan.run + plan.span[0], plan.span[1] - plan.span[0]
        cache.keys.narrow(2, first, count).copy_(k.transpose(0, 2))
        cache.values.narrow(2, first, count).copy_(v.transpose(0, 2))
    else:
        assert plan.slots is not None
        cache.keys.index_copy_(2, plan.slots, k.transpose(0, 2))
        cache.values.index_copy_(2, plan.slots, v.transpose(0, 2))


def attend_cached(cache: BlockCache, plans: list[SegmentPlan], q: Tensor) -> Tensor:
    """Each row of q (N, heads, 1, head_dim) attends to its own session's past: (N, heads * head_dim)."""
    if len(plans) == 1:
        return _attend_segment(cache, plans[0], q)
    parts = q.split([plan.count for plan in plans])
    return torch.cat([_attend_segment(cache, plan, part) for plan, part in zip(plans, parts, strict=True)])


def _attend_segment(cache: BlockCache, plan: SegmentPlan, q: Tensor) -> Tensor:
    if plan.run is not None:
        first, count = plan.run + plan.seen_from, plan.stop - plan.seen_from
        keys, values = cache.keys.narrow(2, first, count), cache.values.narrow(2, first, count)
    else:
        assert plan.seen_slots is not None
        keys, values = cache.keys.index_select(2, plan.seen_slots), cache.values.index_select(2, plan.seen_slots)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 2), keys, values, attn_mask=plan.mask, is_causal=plan.causal, enable_gqa=True
    )  # (1, heads, count, head_dim)
    return out.transpose(0, 2).reshape(q.shape[0], -1)


def attend_whole(q: Tensor, k: Tensor, v: Tensor, batch: int, window: int | None) -> Tensor:
    """Causal attention inside `batch` sequences of equal length, with no cache; differentiable.

    q is (batch * length, heads, 1, head_dim); the answer is (batch * length, heads * head_dim).
    """

    def split(x: Tensor) -> Tensor:
        return x.view(batch, -1, x.shape[1], x.shape[3]).transpose(1, 2)  # (batch, heads, length, head_dim)

    length = q.shape[0] // batch
    mask = None
    if window is not None and window < length:
        distance = torch.arange(length, device=q.device)[:, None] - torch.arange(length, device=q.device)[None]
        mask = (distance >= 0) & (distance < window)
    out = F.scaled_dot_product_attention(
        split(q), split(k), split(v), attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )
    return out.transpose(1, 2).reshape(batch * length, -1)
