"""Batches the head: replies that wait for their next token share one pass through head and sampler.

Requests that arrive during a pass go together in the next, and so reach the first hop together. A pass starts when no
further request has arrived for an eighth of a pass; a single reply never waits.

Where the first hop is this node's own block server, on the card that also computes the head, the server is told before
the tokens are known, and the card begins with their step at once (`app.serving.step_ahead`). If that hop has all the
blocks, the card goes on with the pass after that step, and with the step after that pass: it never waits for the event
loop. What comes in due course is compared with what the card went on with; if it differs, the pass is run again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakSet

import trio

from app.core.awake import until
from app.core.compute import ChoiceUnderWay, Device, NextStep, ReplyEnds, TextPiece, TokenChoice
from app.core.signal import Signal
from app.core.smoothing import Ewma

_SMOOTHING = 0.25


class StepAhead(Protocol):
    """A step that the device begins before its tokens are known; `app.serving.step_ahead` has it."""

    @property
    def rows(self) -> Any:
        """Its output on the device; None: not there."""

    def expect(self, inputs: Mapping[int, bytes]) -> None:
        """Take the embeddings of the tokens that were chosen, by row."""

    def output_at(self, row: int) -> bytes | None:
        """What the step computed in this row; None: under way."""


GoAhead = Callable[[Sequence[NextStep], Any], StepAhead | None]  # with `ChoiceUnderWay.next_rows`


@dataclass(frozen=True)
class _PassAhead:
    """A pass that the device begins before its outputs are here, and the step that follows it."""

    choices: Sequence[TokenChoice]  # of the pass before
    source: StepAhead  # whose outputs it begins with
    started: ChoiceUnderWay
    step: StepAhead | None

    def rows_of(self, choices: Sequence[TokenChoice]) -> list[int] | None:
        """The row of each choice in this pass; None if one is missing, or goes on with something else."""
        rows = {id(choice.reply): row for row, choice in enumerate(self.choices)}
        found: list[int] = []
        for choice in choices:
            row = rows.get(id(choice.reply))
            if row is None or choice.guesses or bytes(choice.hidden) != self.source.output_at(row):
                return None
            found.append(row)
        return found


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

    def __init__(self, ends: ReplyEnds, device: Device, go_ahead: GoAhead | None = None, *, stays_awake: bool) -> None:
        self._ends, self._device, self._go_ahead = ends, device, go_ahead
        self._waiting: list[_HeadRequest] = []
        self._busy = False
        self._added = Signal()  # a request came
        self._away: WeakSet[Any] = WeakSet()  # replies whose last token is on its way through the hops
        self._pass_s = Ewma(_SMOOTHING)
        self._ahead: _PassAhead | None = None
        self._stays_awake = stays_awake

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
        if not self._stays_awake:
            return await self._device.run(self._ends.choose, choices)
        ahead, self._ahead = self._ahead, None
        rows = None if ahead is None else ahead.rows_of(choices)
        if ahead is not None and rows is not None:
            started, step, is_whole = ahead.started, ahead.step, len(choices) == len(ahead.choices)
        else:
            launched = self._ends.launch(choices)
            if launched is None:
                return await self._device.run(self._ends.choose, choices)
            started, rows, is_whole = launched, list(range(len(choices))), True
            step = self._step_after(choices, started.next_rows)
        if step is not None and is_whole:
            by_row = sorted(zip(rows, choices, strict=True), key=lambda one: one[0])
            self._pass_after([choice for _, choice in by_row], step)
        await until(started.is_done)
        chosen = started.take(rows)
        if step is not None:
            step.expect({row: pieces[-1].embedding for row, pieces in zip(rows, chosen, strict=True)})
        return chosen

    def _step_after(self, choices: Sequence[TokenChoice], rows: Any, later: int = 0) -> StepAhead | None:
        """Have this node's blocks begin with the tokens that are being chosen, if they come next for all of them."""
        steps = [choice.next_step for choice in choices if choice.next_step is not None]
        if self._go_ahead is None or rows is None or len(steps) < len(choices):
            return None
        return self._go_ahead([step._replace(position=step.position + later) for step in steps], rows)

    def _pass_after(self, choices: Sequence[TokenChoice], step: StepAhead) -> None:
        """Have the device choose the tokens after the step too, and begin with the step after these."""
        if all(choice.next_step is not None and choice.next_step.is_whole for choice in choices):
            started = self._ends.launch_ahead(choices, step.rows)
            if started is not None:
                self._ahead = _PassAhead(choices, step, started, self._step_after(choices, started.next_rows, 1))

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
