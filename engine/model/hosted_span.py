"""The span that a node hosts: consecutive blocks on one device, or on several that run in turn.

Each device has a `SpanRunner` with its part of the blocks and their KV cache; hidden states are copied from one to the
next inside a step. A session has one lease, with a part for each device.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.errors import SessionError
from engine.model.cuda_graphs import StepUnderWay
from engine.model.kv_cache import KVLease, KVPool, Segment
from engine.model.span import BlockAdapter, SpanOptions, SpanRunner
from engine.sources.base import ModelSource


class SessionLease:
    """One session's cache on every device."""

    def __init__(self, parts: dict[KVPool, KVLease]) -> None:
        self.parts = parts
        self.length = 0  # tokens cached, on the devices whose blocks the session uses
        self.ahead: KVLease | None = None  # where the latest step ahead wrote its token

    def accept(self, length: int) -> None:
        """Count the token that a step ahead wrote to the cache; the session has `length` tokens now."""
        assert self.ahead is not None, "a step ahead comes first"
        assert length == self.length + 1, "a step ahead writes the next token"
        self.length = self.ahead.length = length

    def truncate(self, length: int) -> None:
        """Drop all tokens from position `length` on; raises `SessionError` if there are fewer."""
        if not 0 <= length <= self.length:
            raise SessionError(f"cannot cut a session of {self.length} tokens to {length}")
        for part in self.parts.values():
            part.truncate(min(length, part.length))
        self.length = length

    def resize(self, tokens: int) -> None:
        """Reserve room for `tokens` tokens on every device; raises `CacheFull` without, and may be called again."""
        for part in self.parts.values():
            part.resize(tokens)

    def close(self) -> None:
        """Return all of it; closing twice is harmless."""
        for part in self.parts.values():
            part.close()


@dataclass(slots=True)
class SessionRows:
    """`count` new tokens of one session, the first at position `start`."""

    lease: SessionLease
    start: int
    count: int


class HostedSpan:
    """Blocks [start, stop) of a model in one or more parts; the last parts may still be without blocks."""

    def __init__(self, parts: Sequence[SpanRunner]) -> None:
        assert parts, "a span has at least one part"
        self.parts = list(parts)
        self._leases: weakref.WeakSet[SessionLease] = weakref.WeakSet()

    @property
    def config(self) -> ModelConfig:
        """The model."""
        return self.parts[0].config

    @property
    def options(self) -> SpanOptions:
        """The options of the first device; all have the same number formats."""
        return self.parts[0].options

    @property
    def start(self) -> int:
        """The first block."""
        return self.parts[0].start

    @property
    def stop(self) -> int:
        """One past the last loaded block."""
        return next((part.stop for part in self.parts if not part.is_complete), self.parts[-1].stop)

    @property
    def is_complete(self) -> bool:
        """True if all blocks are loaded that the caches were laid out for."""
        return all(part.is_complete for part in self.parts)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all loaded weights."""
        return sum(part.weight_bytes for part in self.parts)

    @property
    def free_tokens(self) -> int:
        """Cache slots that no session has leased; a token needs one on every device."""
        return min(part.pool.free_tokens for part in self.parts)

    @property
    def total_tokens(self) -> int:
        """Cache slots that every device has."""
        return min(part.pool.total_tokens for part in self.parts)

    def grow(self, source: ModelSource) -> None:
        """Load one more block after the last; open sessions continue with the blocks that they use."""
        next(part for part in self.parts if not part.is_complete).grow(source)

    def keep(self, start: int, stop: int) -> None:
        """Free all blocks but [start, stop), with their cache; sessions that use others must be closed before."""
        assert self.start <= start < stop <= self.stop, "a span keeps blocks that it has"
        dropped = [part for part in self.parts if part.stop <= start or stop <= part.start]
        self.parts = [part for part in self.parts if part not in dropped]
        for lease in self._leases:
            for part in dropped:
                lease.parts.pop(part.pool, None)
        for part in self.parts:
            part.keep(max(start, part.start), min(stop, part.stop))

    def warm_up(self) -> None:
        """Build on every device what its first steps would have to build; the caller closes no sessions meanwhile."""
        for part in self.parts:
            part.warm_up()

    def capture_pending(self) -> bool:
        """Capture one decode step that ran uncaptured so far; False if there is none left to capture."""
        return any(part.capture_pending() for part in self.parts)

    @property
    def has_pending(self) -> bool:
        """True if `capture_pending` has something to do."""
        return any(part.has_pending for part in self.parts)

    def open(self, expected_tokens: int = 0) -> SessionLease:
        """Lease cache for a new session on every device, or on none.

        Raises `CacheFull` without room, and `SessionError` if the tokens exceed the model's context.
        """
        lease = SessionLease({})
        try:
            for part in self.parts:
                lease.parts[part.pool] = part.open(expected_tokens)
        except BaseException:
            lease.close()
            raise
        self._leases.add(lease)
        return lease

    def fork(self, source: SessionLease, length: int, tokens: int) -> SessionLease:
        """Lease cache for a session of `tokens` tokens that begins with the first `length` of another.

        Raises `CacheFull` without room, and `SessionError` if the other does not hold so many tokens.
        """
        if length > source.length:
            raise SessionError(f"cannot begin a session with {length} tokens of one that has {source.length}")
        lease = SessionLease({})
        try:
            for pool, part in source.parts.items():
                lease.parts[pool] = part.fork(min(length, part.length), tokens)  # 0 where none of its blocks is used
        except BaseException:
            lease.close()
            raise
        lease.length = length
        self._leases.add(lease)
        return lease

    def tokens_freed_by(self, leases: Sequence[SessionLease]) -> int:
        """Cache slots that closing these sessions would free on every device; `keep` may run in another thread."""
        freed = []
        for part in self.parts:
            held = (lease.parts.get(part.pool) for lease in leases)
            freed.append(part.pool.tokens_freed_by([lease for lease in held if lease is not None]))
        return min(freed)

    def read_cache(self, lease: SessionLease, blocks: tuple[int, int], start: int, stop: int) -> Tensor:
        """Copy the cache of positions [start, stop) to the CPU as it is kept: (blocks, 2, kv_heads, tokens, width).

        Raises `SessionError` if blocks or tokens are not here.
        """
        return torch.cat([lease.parts[part.pool].read(own, start, stop).cpu() for part, own in self._within(*blocks)])

    def write_cache(self, lease: SessionLease, blocks: tuple[int, int], numbers: Tensor) -> None:
        """Append tokens to a session with the cache of another, as `read_cache` gave it; raises as `step` does."""
        first, before = 0, lease.length
        try:
            for part, own in self._within(*blocks):
                count = own.stop - own.start
                lease.parts[part.pool].write(own, numbers[first : first + count])
                first += count
        except BaseException:
            for kept in lease.parts.values():
                kept.truncate(min(before, kept.length))
            raise
        lease.length = before + numbers.shape[3]

    def _within(self, start: int, stop: int) -> list[tuple[SpanRunner, slice]]:
        """The parts that run blocks [start, stop), and which of their own blocks these are."""
        self._check_loaded(start, stop)
        return [
            (part, slice(max(start, part.start) - part.start, min(stop, part.stop) - part.start))
            for part in self.parts
            if part.start < stop and start < part.stop
        ]

    def step(
        self,
        hidden: Tensor,
        work: Sequence[SessionRows],
        blocks: tuple[int, int] | None = None,
        adapter: BlockAdapter | None = None,
    ) -> Tensor:
        """Run rows of several sessions through the span, or a part [start, stop) of it: (N, hidden) -> (N, hidden).

        Either every session advances by its rows on all devices or, on an error, on none. Raises like
        `SpanRunner.step`.
        """
        start, stop = blocks or (self.start, self.stop)
        self._check_loaded(start, stop)
        advanced: list[Segment] = []
        try:
            for part in self.parts:
                if part.start < stop and start < part.stop:
                    segments = [Segment(rows.lease.parts[part.pool], rows.start, rows.count) for rows in work]
                    hidden = part.step(hidden, segments, (max(start, part.start), min(stop, part.stop)), adapter)
                    advanced += segments
        except BaseException:
            for segment in advanced:
                segment.lease.truncate(segment.start)
            raise
        for rows in work:
            rows.lease.length = rows.start + rows.count
        return hidden

    def launch(
        self, hidden: Tensor, work: Sequence[SessionRows], blocks: tuple[int, int], *, ahead: bool = False
    ) -> StepUnderWay[Tensor] | None:
        """Start a captured step on the one device that has the blocks, without waiting for it; None if there is none.

        Sessions advance when its result is taken; until then nothing else may use the span. With `ahead`, `hidden` must
        be on that device, no session advances but by `SessionLease.accept`, and a second one may be launched behind it.
        Raises as `step` does.
        """
        self._check_loaded(*blocks)
        part = next(part for part in self.parts if blocks[0] < part.stop)
        if part.stop < blocks[1]:
            return None
        if ahead and (hidden.device, hidden.dtype) != (part.pool.device, part.pool.dtype):
            return None
        segments = [Segment(rows.lease.parts[part.pool], rows.start, rows.count) for rows in work]
        started = part.launch(hidden, segments, blocks, ahead=ahead)

        def advance(output: Tensor) -> Tensor:
            for rows, segment in zip(work, segments, strict=True):
                rows.lease.length = segment.lease.length = segment.stop
            return output

        if started is None or not ahead:
            return None if started is None else started.then(advance)
        for rows, segment in zip(work, segments, strict=True):
            rows.lease.ahead = segment.lease
        return started

    def _check_loaded(self, start: int, stop: int) -> None:
        if not self.start <= start < stop <= self.stop:
            raise SessionError(f"blocks {start}:{stop} were asked for, but {self.start}:{self.stop} are loaded")
