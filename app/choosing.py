"""Replies that wait for their next token share one pass through the model's head.

While the device works for some, others gather; they go together next, and so come to the first hop together.
"""

from __future__ import annotations

import trio

from app.runner import Choice, Device, Piece, ReplyEnds


class _Ticket:
    """One reply's place in the queue."""

    __slots__ = ("choice", "failure", "piece", "woken")

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self.piece: Piece | None = None
        self.failure: BaseException | None = None
        self.woken = trio.Event()


class Chooser:
    """Chooses tokens for many replies at a time."""

    def __init__(self, ends: ReplyEnds, device: Device) -> None:
        self._ends, self._device = ends, device
        self._waiting: list[_Ticket] = []
        self._busy = False

    async def choose(self, choice: Choice) -> Piece:
        """The next token of one reply; raises what the ends raise."""
        ticket = _Ticket(choice)
        self._waiting.append(ticket)
        try:
            while ticket.piece is None and ticket.failure is None:
                if self._busy:
                    await ticket.woken.wait()
                    ticket.woken = trio.Event()
                else:
                    await self._lead()
        finally:
            if ticket in self._waiting:  # cancelled: nobody wants this token any more
                self._waiting.remove(ticket)
                self._wake_next()
        if ticket.failure is not None:
            raise ticket.failure
        assert ticket.piece is not None
        return ticket.piece

    async def _lead(self) -> None:
        """Choose for all that wait now; the task that found the device free does it for the others."""
        tickets, self._waiting, self._busy = self._waiting, [], True
        try:
            with trio.CancelScope(shield=True):
                pieces = await self._device.run(self._ends.choose, [ticket.choice for ticket in tickets])
            for ticket, piece in zip(tickets, pieces, strict=True):
                ticket.piece = piece
        except Exception as error:
            for ticket in tickets:
                ticket.failure = error
        finally:
            self._busy = False
            for ticket in tickets:
                ticket.woken.set()
            self._wake_next()

    def _wake_next(self) -> None:
        if self._waiting and not self._busy:
            self._waiting[0].woken.set()
