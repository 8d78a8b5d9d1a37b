"""The owner's view of one step: which micro-batches are under way, which came back, and which must run again. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from app.core.span import Span
from app.training.wire import MAX_ATTEMPTS, Tally


class Attempt(NamedTuple):
    """One run of a micro-batch through all hops."""

    number: int
    attempt: int


class StepProgress:
    """The micro-batches 0 to `count - 1` of one step in one epoch; at most `window` are under way at a time."""

    def __init__(self, count: int, window: int) -> None:
        self._window = window
        self._attempts = dict.fromkeys(range(count), -1)  # the latest that was sent
        self._to_send = list(range(count))  # in order
        self._under_way: dict[int, bool] = {}  # micro-batch -> its loss is known
        self.losses: dict[int, float] = {}

    def start(self) -> list[Attempt]:
        """Return the attempts to send now; they count as under way."""
        started = []
        while self._to_send and len(self._under_way) < self._window:
            number = self._to_send.pop(0)
            self._attempts[number] += 1
            self._under_way[number] = False
            started.append(Attempt(number, self._attempts[number]))
        return started

    def reached_end(self, number: int, attempt: int) -> bool:
        """True if these are the last hidden states of an attempt under way, which were not here before."""
        if self._attempts.get(number) != attempt or self._under_way.get(number) is not False:
            return False
        self._under_way[number] = True
        return True

    def came_back(self, number: int, attempt: int) -> bool:
        """True if an attempt under way has come back through all hops."""
        if self._attempts.get(number) != attempt or self._under_way.get(number) is not True:
            return False
        del self._under_way[number]
        return True

    def run_again(self, numbers: Iterable[int] | None = None) -> bool:
        """Run micro-batches again, those under way unless given; False if one has been tried too often."""
        again = sorted(self._under_way if numbers is None else numbers)
        for number in again:
            self._under_way.pop(number, None)
            if self._attempts[number] + 1 >= MAX_ATTEMPTS:
                return False
        self._to_send = sorted({*self._to_send, *again})
        return True

    @property
    def under_way(self) -> int:
        """Number of micro-batches under way."""
        return len(self._under_way)

    @property
    def is_back(self) -> bool:
        """True once nothing is under way or left to send."""
        return not self._to_send and not self._under_way

    def missing(self, tallies: Iterable[Tally]) -> list[int]:
        """Return the micro-batches that some block has not counted."""
        wanted = set(self._attempts)
        return sorted({number for tally in tallies for _, counted in tally.counted for number in wanted - counted})


def is_overcounted(tallies: Iterable[Tally], count: int) -> Span | None:
    """Return blocks that claim a micro-batch which the step does not have; None if there are none."""
    for tally in tallies:
        for span, counted in tally.counted:
            if any(number >= count for number in counted):
                return span
    return None
