"""The asking half of a link: calls of ours that wait for their answer, with a deadline each."""

from __future__ import annotations

import trio

from p2p.errors import DeadlineExceeded, P2PError, QueueFull, Refused
from p2p.link.frames import WHOLE, Assembler, Frame, Kind, body_bytes, failure_of
from p2p.link.handlers import LinkPort

MAX_PENDING_CALLS = 1024


class Pending:
    """A call that waits for its answer."""

    __slots__ = ("answer", "done", "failure", "held")

    def __init__(self) -> None:
        self.held = 0  # bytes of a large answer that the quota counts while it arrives
        self.done = trio.Event()
        self.answer = b""
        self.failure: P2PError | None = None

    def fail(self, failure: P2PError) -> None:
        """End the wait with an error."""
        self.failure = failure
        self.done.set()


class Calls:
    """The calls that this node has under way on one link."""

    def __init__(self, link: LinkPort) -> None:
        self._link = link
        self._pending: dict[int, Pending] = {}

    @property
    def busy(self) -> bool:
        """Whether an answer is waited for."""
        return bool(self._pending)

    def expect(self, id: int) -> Pending:
        """Wait for an answer under this id from now on."""
        if len(self._pending) >= MAX_PENDING_CALLS:
            raise QueueFull(f"{MAX_PENDING_CALLS} calls to {self._link.peer} wait for an answer; slow down")
        pending = self._pending[id] = Pending()
        return pending

    async def outcome(self, id: int, pending: Pending, timeout_s: float, what: str) -> bytes:
        """The answer; a caller that gives up, by its deadline or by being cancelled, cancels the remote handler."""
        try:
            with trio.move_on_after(max(timeout_s, 0)):
                await pending.done.wait()
        finally:
            del self._pending[id]
            self._link.consumed(pending.held)
            if not pending.done.is_set():
                self._link.give_up(id)
        if not pending.done.is_set():
            raise DeadlineExceeded(f"{what} was not answered within {timeout_s:g} s")
        if pending.failure is not None:
            raise pending.failure
        return pending.answer

    def on_answer(self, frame: Frame, assembler: Assembler) -> bool:
        """Take an answer, a chunk of one, an error or a pong; whether anybody waits for it."""
        pending = self._pending.get(frame.id)
        if pending is None or pending.done.is_set():  # given up or answered meanwhile
            return False
        if frame.kind == Kind.ERROR:
            pending.fail(failure_of(frame))
        elif frame.flags & WHOLE != WHOLE and not self._hold(pending, body_bytes(frame)):
            pending.fail(Refused(f"the answer of {self._link.peer} has {frame.total} bytes, too many to keep now"))
            self._link.give_up(frame.id)
        elif (whole := assembler.add(frame)) is not None:
            pending.answer = whole.body
            pending.done.set()
        return True

    def _hold(self, pending: Pending, size: int) -> bool:
        if not self._link.services.quota.hold(self._link.peer, size):
            return False
        pending.held += size
        return True

    def end(self, failure: P2PError) -> None:
        """The link is gone: nothing will be answered."""
        for pending in self._pending.values():
            pending.fail(failure)
