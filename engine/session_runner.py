"""A hosted span as a server drives it: sessions by id, many in one step, bytes in and bytes out.

Never called from two threads at once. Knows no peers and no time: whom to admit and whom to close is for the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.errors import SessionError
from engine.model.attention import Segment
from engine.model.kv_cache import KVLease
from engine.model.span import SpanRunner
from engine.wire import to_bytes, to_tensor, wire_name


class StepInput(Protocol):
    """One session's share of a step: `rows` tokens at `position` through blocks `start` to `stop`."""

    @property
    def session(self) -> bytes: ...
    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...
    @property
    def position(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def data(self) -> memoryview: ...
    @property
    def dtype(self) -> str: ...
    @property
    def wire(self) -> str: ...


class StepResult(NamedTuple):
    """What one session's rows became."""

    data: bytes
    dtype: str


class SessionRunner:
    """Sessions over one span."""

    def __init__(self, span: SpanRunner) -> None:
        self._span = span
        self._leases: dict[bytes, KVLease] = {}
        self.start = span.start
        self.hidden_size = span.config.hidden_size
        self.context_length = span.config.context_length
        self._native = wire_name(span.options.dtype)

    @property
    def stop(self) -> int:
        """Behind the last block; it moves while a span grows."""
        return self._span.stop

    @property
    def kv_free_tokens(self) -> int:
        """Cache slots that nobody has leased."""
        return self._span.pool.free_tokens

    @property
    def kv_total_tokens(self) -> int:
        """Cache slots in all."""
        return self._span.pool.total_tokens

    def open(self, session: bytes, tokens: int) -> None:
        """Lease cache for a new session; raises `CacheFull` where there is no room."""
        assert session not in self._leases, "a session is opened once"
        self._leases[session] = self._span.open(tokens)

    def close(self, session: bytes) -> None:
        """Give a session's cache back."""
        lease = self._leases.pop(session, None)
        if lease is not None:
            lease.close()

    def truncate(self, session: bytes, length: int) -> None:
        """Forget tokens from `length` on."""
        self._lease(session).truncate(length)

    def step(self, work: Sequence[StepInput]) -> list[StepResult]:
        """Advance sessions: those that use the same blocks go through them together."""
        groups: dict[tuple[int, int], list[int]] = {}
        for index, item in enumerate(work):
            groups.setdefault((item.start, item.stop), []).append(index)
        outputs: dict[int, StepResult] = {}
        advanced: list[Segment] = []
        try:
            for blocks, indices in groups.items():
                items = [work[index] for index in indices]
                segments = [Segment(self._lease(item.session), item.position, item.rows) for item in items]
                hidden = self._span.step(self._joined(items), segments, blocks)
                advanced += segments
                outputs.update(zip(indices, self._split(hidden, items), strict=True))
        except BaseException:  # all advance, or none
            for segment in advanced:
                segment.lease.truncate(segment.start)
            raise
        return [outputs[index] for index in range(len(work))]

    def _lease(self, session: bytes) -> KVLease:
        lease = self._leases.get(session)
        if lease is None:
            raise SessionError(f"there is no session {session.hex()[:8]} here; open it again")
        return lease

    def _joined(self, items: list[StepInput]) -> Tensor:
        dtype = items[0].dtype
        if all(item.dtype == dtype for item in items):
            return to_tensor([item.data for item in items], dtype, self.hidden_size)
        compute = self._span.options.dtype
        return torch.cat([to_tensor([item.data], item.dtype, self.hidden_size).to(compute) for item in items])

    def _split(self, hidden: Tensor, items: list[StepInput]) -> list[StepResult]:
        wires = [item.wire or self._native for item in items]
        views = {wire: to_bytes(hidden, wire) for wire in set(wires)}
        outputs, row = [], 0
        for item, wire in zip(items, wires, strict=True):
            size = len(views[wire]) // hidden.shape[0]
            outputs.append(StepResult(bytes(views[wire][row * size : (row + item.rows) * size]), wire))
            row += item.rows
        return outputs
