"""Attention over a pool of cached keys and values, for the rows of one step.

The rows of a step are segments: `count` new tokens of one session from position `start`. A `StepPlan` works out once
per step which rows see which cache slots, and every block uses it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from engine.device.kinds import kind_of
from engine.model.kv_cache import BlockCache, Segment, Slots

# Sessions that get one token each are gathered into one padded attention call while the longest past is at most this
# many tokens per session; for longer pasts the copying costs more than it saves (measured).
GATHERED_TOKENS_PER_ROW = 32


@dataclass
class SegmentPlan:
    """Cache slots that one segment's rows see, in blocks with one attention window."""

    count: int
    stop: int
    seen_from: int  # oldest position that any row sees
    seen: Slots
    mask: Tensor | None  # (count, stop - seen_from), True where seen
    causal: bool  # row i sees all but the newest count - 1 - i tokens


@dataclass
class GatheredPlan:
    """Cache slots of several sessions that get one token each, padded to the longest past."""

    seen_slots: Tensor  # (sessions * longest,); padded with the session's first slot
    longest: int
    mask: Tensor  # (sessions, 1, 1, longest), True where seen


Plans = list[SegmentPlan] | GatheredPlan


class StepPlan:
    """Positions, cache slots and masks of one step, shared by all blocks."""

    def __init__(self, segments: list[Segment], device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self._segments = segments
        self._device = device
        self._flash = kind_of(device).flash_attention and dtype in (torch.float16, torch.bfloat16)
        self._by_window: dict[int | None, Plans] = {}
        positions = [torch.arange(s.start, s.stop) for s in segments]
        self.positions = (positions[0] if len(positions) == 1 else torch.cat(positions)).to(device)
        self.slots: Slots  # of the new tokens
        if len(segments) == 1:
            self.slots = segments[0].lease.places(segments[0].start, segments[0].stop)
        else:
            self.slots = torch.cat([s.lease.slots(s.start, s.stop) for s in segments])

    def for_window(self, window: int | None) -> Plans:
        """Return what each row sees in blocks with an attention window of `window` tokens (None: the whole past)."""
        if window not in self._by_window:
            seen = [_seen(segment, window) for segment in self._segments]
            gather = len(seen) > 1 and all(segment.count == 1 for segment in self._segments)
            if gather and max(map(len, seen)) <= GATHERED_TOKENS_PER_ROW * len(seen):
                self._by_window[window] = self._gathered(seen)
            else:
                self._by_window[window] = [self._plan(segment, window) for segment in self._segments]
        return self._by_window[window]

    def _gathered(self, seen: list[range]) -> GatheredPlan:
        longest = max(map(len, seen))
        slots = torch.empty(len(seen), longest, dtype=torch.int64, device=self._device)
        for row, segment, own in zip(slots, self._segments, seen, strict=True):
            row[: len(own)] = segment.lease.slots(own.start, own.stop)
            row[len(own) :] = row[0]
        lengths = torch.tensor([len(own) for own in seen], device=self._device)
        mask = torch.arange(longest, device=self._device) < lengths[:, None]
        return GatheredPlan(slots.view(-1), longest, mask[:, None, None])

    def _plan(self, segment: Segment, window: int | None) -> SegmentPlan:
        lease, stop = segment.lease, segment.stop
        seen_from = _seen(segment, window).start
        # Flash attention takes "each row sees everything before it" without a mask also where a past comes first.
        from_start = segment.start == 0 or self._flash
        causal = from_start and segment.count > 1 and (window is None or stop <= window)
        mask = None
        if segment.count > 1 and not causal:
            query = torch.arange(segment.start, stop, device=self._device)[:, None]
            key = torch.arange(seen_from, stop, device=self._device)[None]
            mask = key <= query
            if window is not None:
                mask &= key > query - window
        return SegmentPlan(segment.count, stop, seen_from, lease.places(seen_from, stop), mask, causal)


def _seen(segment: Segment, window: int | None) -> range:
    """Positions that any row of a segment sees; row i sees (start + i - window, start + i]."""
    return range(0 if window is None else max(segment.start - window + 1, 0), segment.stop)


def write_cache(cache: BlockCache, plan: StepPlan, k: Tensor, v: Tensor) -> None:
    """Write the new keys and values, each (N, kv_heads, 1, head_dim), into one block's cache."""
    cache.write(plan.slots, k.transpose(0, 2), v.transpose(0, 2))


def attend_cached(cache: BlockCache, plans: Plans, q: Tensor) -> Tensor:
    """Attend from each row of q (N, heads, 1, head_dim) to its own session's past: (N, heads * head_dim)."""
    if isinstance(plans, GatheredPlan):
        return _attend_gathered(cache, plans, q)
    if len(plans) == 1:
        return _attend_segment(cache, plans[0], q)
    parts = q.split([plan.count for plan in plans])
    return torch.cat([_attend_segment(cache, plan, part) for plan, part in zip(plans, parts, strict=True)])


def _attend_gathered(cache: BlockCache, plan: GatheredPlan, q: Tensor) -> Tensor:
    keys, values = (
        # (sessions, kv_heads, longest, head_dim)
        seen.view(seen.shape[1], -1, plan.longest, seen.shape[3]).transpose(0, 1)
        for seen in cache.read(plan.seen_slots, q.dtype)
    )
    if kind_of(q.device).grouped_attention:
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=plan.mask, enable_gqa=True)
    else:
        out = _ungrouped(q, keys, values, mask=plan.mask)
    return out.reshape(q.shape[0], -1)


def _attend_segment(cache: BlockCache, plan: SegmentPlan, q: Tensor) -> Tensor:
    keys, values = cache.read(plan.seen, q.dtype)
    if plan.count == 1 and q.device.type == "cpu":
        # The query heads that share a key head are as rows of one head: faster than letting torch repeat the keys.
        grouped = q.reshape(1, keys.shape[1], -1, q.shape[3])
        return F.scaled_dot_product_attention(grouped, keys, values).reshape(1, -1)
    out = _attention(q.transpose(0, 2), keys, values, plan)
    return out.transpose(0, 2).reshape(q.shape[0], -1)


def _attention(q: Tensor, keys: Tensor, values: Tensor, plan: SegmentPlan) -> Tensor:
    """Attention of one segment: q (1, heads, count, head_dim) over keys and values (1, kv_heads, seen, head_dim).

    On CUDA it uses flash attention, or torch's memory-efficient kernel for a mask, which needs a key per query head.
    Other kernels build a plan for every new length, which takes a tenth of a second, or hold all scores in memory.
    """
    kind = kind_of(q.device)
    if kind.flash_attention and plan.causal and plan.count < plan.stop - plan.seen_from:
        return continued(q, keys, values)
    if kind.flash_attention and plan.mask is not None:
        return _ungrouped(q, keys, values, mask=plan.mask)
    if not kind.grouped_attention:
        return _ungrouped(q, keys, values, mask=plan.mask, causal=plan.causal)
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=plan.mask, is_causal=plan.causal, enable_gqa=True)


def continued(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention whose last row sees all keys: flash attention, or with a mask on cards that lack it.

    The kernel is called directly: `torch.nn.attention.bias` loads torch's compiler, 2 s and more of a node's start.
    """
    if q.shape[3] % 8 == 0 and can_use_flash_attention(SDPAParams(q, keys, values, None, 0.0, False, True)):
        out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, keys, values, is_causal=True)[0]
        return out
    count, seen = q.shape[2], keys.shape[2]
    mask = torch.ones(count, seen, device=q.device, dtype=torch.bool).tril(seen - count)
    return _ungrouped(q, keys, values, mask=mask)


def _ungrouped(q: Tensor, keys: Tensor, values: Tensor, *, mask: Tensor | None, causal: bool = False) -> Tensor:
    """Attention with a key head for each query head, for kernels that take no fewer."""
    group = q.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, is_causal=causal)


def attend_whole(q: Tensor, k: Tensor, v: Tensor, batch: int, window: int | None) -> Tensor:
    """Causal attention inside `batch` sequences of equal length, with no cache; differentiable.

    q is (batch * length, heads, 1, head_dim); the result is (batch * length, heads * head_dim). For training.
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
