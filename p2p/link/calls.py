"""The calling side of a link: calls of this node that wait for an answer. `p2p.link.handlers` is the other side."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import trio

from p2p.errors import DeadlineExceeded, P2PError, QueueFull, Refused
from p2p.link.frames import WHOLE, Assembler, Frame, Kind, body_bytes, failure_of
from p2p.link.handlers import LinkPort
from p2p.link.quota import Held

MAX_PENDING_CALLS = 1024


class Pending:
    """One call that waits for its answer."""

    __slots__ = ("answer", "done", "failure", "held")

    def __init__(self) -> None:
        self.held = 0  # bytes of a chunked answer that the quota counts while it arrives
        self.done = trio.Event()
        self.answer = b""
        self.failure: P2PError | None = None

    def fail(self, failure: P2PError) -> None:
        """End the call with an error."""
        self.failure = failure
        self.done.set()


class Calls:
    """The calls that this node has in progress on one link."""

    def __init__(self, link: LinkPort) -> None:
        self._link = link
        self._pending: dict[int, Pending] = {}

    @property
    def busy(self) -> bool:
        """True if a call waits for its answer."""
        return bool(self._pending)

    def expect(self, id: int) -> Pending:
        """Register a call, before its request is sent; raises `QueueFull` if too many wait already."""
        if len(self._pending) >= MAX_PENDING_CALLS:
            raise QueueFull(f"{MAX_PENDING_CALLS} calls to {self._link.peer} wait for an answer; slow down")
        pending = self._pending[id] = Pending()
        return pending

    async def outcome(self, id: int, pending: Pending, timeout_s: float, what: str) -> bytes:
        """Wait for the answer and return it; raises `DeadlineExceeded`, or the error of the peer or link.

        At the deadline, and if the caller is cancelled, the remote handler is cancelled too.
        """
        try:
            with trio.move_on_after(max(timeout_s, 0)):
                await pending.done.wait()
        finally:
            del self._pending[id]
            self._link.drop_chunks(id)  # of an answer that ended otherwise than with its last one
            self._link.consumed(pending.held)
            if not pending.done.is_set():
                self._link.give_up(id)
        if not pending.done.is_set():
            raise DeadlineExceeded(f"{what} was not answered within {timeout_s:g} s")
        if pending.failure is not None:
            raise pending.failure
        return pending.answer

    def held(self) -> Iterator[Held]:
        """Yield the bytes that have come of each unfinished answer, and how to refuse the rest."""
        for id, pending in self._pending.items():
            if pending.held and not pending.done.is_set():
                yield Held(pending.held, partial(self._refuse, id, pending))

    def on_answer(self, frame: Frame, assembler: Assembler) -> bool:
        """Process an answer, a chunk of one, an error or a pong; False if no call waits for it."""
        pending = self._pending.get(frame.id)
        if pending is None or pending.done.is_set():  # given up or already answered
            return False
        if frame.kind == Kind.ERROR:
            pending.fail(failure_of(frame))
        elif frame.flags & WHOLE != WHOLE and not self._hold(pending, body_bytes(frame)):
            self._refuse(frame.id, pending)
        elif (whole := assembler.add(frame)) is not None:
            pending.answer = whole.body
            pending.done.set()
        return True

    def _hold(self, pending: Pending, size: int) -> bool:
        if not self._link.services.quota.hold(self._link.peer, size):
            return False
        pending.held += size
        return True

    def _refuse(self, id: int, pending: Pending) -> None:
        pending.fail(Refused(f"{self._link.peer} answers with more bytes than can be buffered now"))
        self._link.drop_chunks(id)
        self._link.consumed(pending.held)
        pending.held = 0
        self._link.give_up(id)

    def end(self, failure: P2PError) -> None:
        """End every waiting call with `failure`: the link has ended."""
        for pending in self._pending.values():
            pending.fail(failure)
