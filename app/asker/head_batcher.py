"""Replies that wait for their next token share one pass through the model's head.

While the device works for some, others gather; they go together next, and so come to the first hop together. Where one
comes, others may be right behind it: a pass begins when none has come for a moment. A reply alone never waits.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import trio

from app.core.compute import Device, ReplyEnds, TextPiece, TokenChoice

_SMOOTH = 0.25


class _HeadRequest:
    """One reply's place in the queue."""

    __slots__ = ("choice", "failure", "piece", "woken")

    def __init__(self, choice: TokenChoice) -> None:
        self.choice = choice
        self.piece: TextPiece | None = None
        self.failure: BaseException | None = None
        self.woken = trio.Event()


class HeadBatcher:
    """Chooses tokens for many replies at a time."""

    def __init__(self, ends: ReplyEnds, device: Device) -> None:
        self._ends, self._device = ends, device
        self._waiting: list[_HeadRequest] = []
        self._busy = False
        self._gathering: trio.Event | None = None
        self._away: WeakSet[Any] = WeakSet()  # replies whose last token was chosen and that have not come back
        self._pass_s = 0.0

    async def choose(self, choice: TokenChoice) -> TextPiece:
        """The next token of one reply; raises what the ends raise."""
        ticket = _HeadRequest(choice)
        self._waiting.append(ticket)
        self._away.discard(choice.reply)
        if self._gathering is not None:
            self._gathering.set()
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
        self._busy = True
        tickets: list[_HeadRequest] = []
        try:
            await self._gather()
            tickets, self._waiting = self._waiting, []
            begin = trio.current_time()
            with trio.CancelScope(shield=True):
                pieces = await self._device.run(self._ends.choose, [ticket.choice for ticket in tickets])
            self._pass_s += (_SMOOTH if self._pass_s else 1.0) * (trio.current_time() - begin - self._pass_s)
            for ticket, piece in zip(tickets, pieces, strict=True):
                ticket.piece = piece
                if piece.finish_reason is None:
                    self._away.add(ticket.choice.reply)
        except Exception as error:
            for ticket in tickets:
                ticket.failure = error
        finally:
            self._busy = False
            for ticket in tickets:
                ticket.woken.set()
            self._wake_next()

    async def _gather(self) -> None:
        """Wait until nobody has come for a moment, or half a pass is over, or all are here."""
        with trio.move_on_after(self._pass_s / 2):
            while self._away:
                self._gathering = trio.Event()
                with trio.move_on_after(self._pass_s / 8) as quiet:
                    await self._gathering.wait()
                if quiet.cancelled_caught:
                    break
        self._gathering = None

    def _wake_next(self) -> None:
        if self._waiting and not self._busy:
            self._waiting[0].woken.set()
