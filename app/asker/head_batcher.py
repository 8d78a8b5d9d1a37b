"""Batches the head: replies that wait for their next token share one pass through head and sampler.

Requests that arrive during a pass go together in the next, and so reach the first hop together. A pass starts when no
further request has arrived for an eighth of a pass; a single reply never waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import trio

from app.core.awake import may_stay_awake, result_of
from app.core.compute import Device, ReplyEnds, TextPiece, TokenChoice
from app.core.signal import Signal
from app.core.smoothing import Ewma

_SMOOTHING = 0.25


class _HeadRequest:
    """One reply that waits for its next token."""

    __slots__ = ("choice", "failure", "pieces", "woken")

    def __init__(self, choice: TokenChoice) -> None:
        self.choice = choice
        self.pieces: Sequence[TextPiece] = ()
        self.failure: BaseException | None = None
        self.woken = Signal()


class HeadBatcher:
    """Chooses the next tokens of many replies at once."""

    def __init__(self, ends: ReplyEnds, device: Device) -> None:
        self._ends, self._device = ends, device
        self._waiting: list[_HeadRequest] = []
        self._busy = False
        self._added = Signal()  # a request came
        self._away: WeakSet[Any] = WeakSet()  # replies whose last token is on its way through the hops
        self._pass_s = Ewma(_SMOOTHING)
        self._stays_awake = may_stay_awake()

    async def choose(self, choice: TokenChoice) -> Sequence[TextPiece]:
        """Return the next tokens of one reply, one and those after right guesses; raises whatever the ends raise."""
        request = _HeadRequest(choice)
        self._waiting.append(request)
        self._away.discard(choice.reply)
        self._added.notify()
        try:
            while not request.pieces and request.failure is None:
                if self._busy:
                    await request.woken.wait()
                else:
                    await self._lead()
        finally:
            if request in self._waiting:  # cancelled
                self._waiting.remove(request)
                self._wake_next()
        if request.failure is not None:
            raise request.failure
        return request.pieces

    async def _lead(self) -> None:
        """Run one pass for all requests; the task that found the device free does it for the others."""
        self._busy = True
        requests: list[_HeadRequest] = []
        try:
            await self._gather()
            requests, self._waiting = self._waiting, []
            begin = trio.current_time()
            with trio.CancelScope(shield=True):
                chosen = await self._choose([request.choice for request in requests])
            self._pass_s.add(trio.current_time() - begin)
            for request, pieces in zip(requests, chosen, strict=True):
                request.pieces = pieces
                if pieces[-1].finish_reason is None:
                    self._away.add(request.choice.reply)
        except Exception as error:
            for request in requests:
                request.failure = error
        finally:
            self._busy = False
            for request in requests:
                request.woken.notify()
            self._wake_next()

    async def _choose(self, choices: list[TokenChoice]) -> Sequence[Sequence[TextPiece]]:
        started = self._ends.launch(choices) if self._stays_awake else None
        if started is None:
            return await self._device.run(self._ends.choose, choices)
        return await result_of(started)

    async def _gather(self) -> None:
        """Wait until no request arrives for an eighth of a pass, all are here, or half a pass is over."""
        if not self._away:
            return
        with trio.move_on_after(self._pass_s.value / 2):
            while self._away:
                with trio.move_on_after(self._pass_s.value / 8) as quiet:
                    await self._added.wait()
                if quiet.cancelled_caught:
                    break

    def _wake_next(self) -> None:
        if self._waiting and not self._busy:
            self._waiting[0].woken.notify()
