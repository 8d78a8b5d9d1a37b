"""A step that the device begins before its input has arrived.

A reply over this node's own blocks goes round within one machine: blocks, head and sampler, embedding, blocks. The card
could go on by itself, but each token also passes the event loop: as text to its reader, as frames to the next step. So
the next step begins as soon as the card has the token (`BlockServer.go_ahead`), and the frame that asks for it finds it
computed, or nearly. The frame still decides. If its numbers are those that the card began with, it gets the outputs; if
another frame comes, or none, they are dropped, and what the card wrote to the cache lies behind the session's end.

`app.asker.head_batcher` says when. Two such steps may be under way, the second behind the head's pass over the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from app.core.compute import NextStep, StepOutput, StepUnderWay
from app.serving.batching import QueuedTokens
from app.serving.hop_session import HopSession


class _Place(NamedTuple):
    """The token of one session that the step computes."""

    row: int
    epoch: int
    revision: int
    position: int


class StepAhead:
    """One step ahead, of one token for each of some sessions."""

    def __init__(
        self, started: StepUnderWay, sessions: Sequence[HopSession], steps: Sequence[NextStep], begun_at: float
    ) -> None:
        self._started: StepUnderWay | None = started
        self._outputs: Sequence[StepOutput] = ()
        self._inputs: Mapping[int, bytes] = {}
        self._places = {
            session.key: _Place(row, session.epoch, session.revision, step.position)
            for row, (session, step) in enumerate(zip(sessions, steps, strict=True))
        }
        self.rows: Any = started.rows  # the output on the device; None: another step has overwritten it
        self.begun_at = self.ended_at = begun_at

    @property
    def is_under_way(self) -> bool:
        """True until its outputs are here."""
        return self._started is not None

    def look(self, now: float) -> None:
        """Take the outputs if the device is done; raises what it did, and is over then."""
        started = self._started
        try:
            if started is not None and started.is_done():
                self._outputs = started.result()
                self._started, self.ended_at = None, now
        except BaseException:
            self._started, self._places = None, {}
            raise

    def expect(self, inputs: Mapping[int, bytes]) -> None:
        """Take the numbers that the device began with, by row."""
        self._inputs = inputs

    def output_at(self, row: int) -> bytes | None:
        """What the step computed in this row; None: under way."""
        return self._outputs[row].data if row < len(self._outputs) else None

    def is_for(self, session: HopSession, after: int | None = None) -> bool:
        """True if it computes a token that a session has not asked for yet: any, or the one after so many others."""
        place = self._places.get(session.key)
        if place is None or session.rests_until is not None:
            return False
        if (place.epoch, place.revision) != (session.epoch, session.revision):
            return False
        others = place.position - session.length
        return others >= 0 if after is None else others == after

    def take(self, item: QueuedTokens, session: HopSession) -> StepOutput | None:
        """Return what the step computed for these tokens, if they are the ones that it began with; once."""
        if not self._outputs or not self.is_for(session, 0) or (item.position, item.rows) != (session.length, 1):
            return None
        row = self._places[item.session].row
        if bytes(item.data) != self._inputs.get(row):  # a memoryview would be compared number by number
            return None
        del self._places[item.session]
        return self._outputs[row]


def may_go_ahead(session: HopSession, step: NextStep, before: Sequence[StepAhead]) -> bool:
    """True if nothing but the token itself is missing for a session's step, after those steps ahead."""
    if session.rests_until is not None or session.fetching or session.adapter is not None:
        return False
    waiting = sum(one.is_for(session, after) for after, one in enumerate(before))
    if waiting < len(before) or step.position != session.length + waiting or step.position >= session.turn.tokens:
        return False
    return session.length <= session.received <= session.length + waiting
