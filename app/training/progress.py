"""The owner's view of one step: which micro-batches are under way, which came back, and which must run again. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from app.core.span import Span
from app.training.ways import WayPlan, assigned
from app.training.wire import MAX_ATTEMPTS, Pass, Tally


class StepProgress:
    """The micro-batches 0 to `count - 1` of one step in one epoch; at most `window` are under way at a time."""

    def __init__(self, count: int, window: int) -> None:
        self._window = window
        self._attempts = dict.fromkeys(range(count), -1)  # the latest that was sent
        self._to_send = list(range(count))  # in order
        self._under_way: dict[int, bool] = {}  # micro-batch -> its loss is known
        self._passed_on: set[tuple[str, int, Pass]] = set()
        self.losses: dict[int, float] = {}
        self.ways: dict[int, int] = {}  # micro-batch -> number of its way, once it is drawn

    @property
    def next_number(self) -> int | None:
        """The micro-batch to send next; None if none is left or enough are under way."""
        return self._to_send[0] if self._to_send and len(self._under_way) < self._window else None

    def start(self, number: int, way: int = 0) -> int:
        """Count a micro-batch as under way, on this way; return the number of the attempt."""
        self._to_send.remove(number)
        self._attempts[number] += 1
        self._under_way[number] = False
        self.ways[number] = way
        return self._attempts[number]

    @property
    def ways_under_way(self) -> list[int]:
        """The ways of all micro-batches that are under way."""
        return [self.ways[number] for number in self._under_way]

    def awaits_end(self, number: int, attempt: int) -> bool:
        """True if an attempt is under way whose last hidden states were not here before."""
        return self._attempts.get(number) == attempt and self._under_way.get(number) is False

    def reached_end(self, number: int, attempt: int) -> bool:
        """True if these are the last hidden states of an attempt under way, which were not here before."""
        if not self.awaits_end(number, attempt):
            return False
        self._under_way[number] = True
        return True

    def came_back(self, number: int, attempt: int) -> bool:
        """True if an attempt under way has come back through all hops."""
        if self._attempts.get(number) != attempt or self._under_way.get(number) is not True:
            return False
        del self._under_way[number]
        return True

    def passes_on(self, sender: str, kind: int, one: Pass) -> bool:
        """True if a hop's pass may go on to its neighbour: of the latest attempt, and for the first time."""
        leg = sender, kind, one
        if self._attempts.get(one.number) != one.attempt or leg in self._passed_on:
            return False
        self._passed_on.add(leg)
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

    def under_way_on(self, ways: Iterable[int]) -> list[int]:
        """The micro-batches that are under way on these ways."""
        wanted = set(ways)
        return [number for number in self._under_way if self.ways[number] in wanted]

    @property
    def most_tried(self) -> list[int]:
        """The micro-batches that were sent most often."""
        most = max(self._attempts.values())
        return [number for number, attempts in self._attempts.items() if attempts == most]

    @property
    def under_way(self) -> list[int]:
        """The micro-batches that are under way."""
        return list(self._under_way)

    @property
    def is_back(self) -> bool:
        """True once nothing is under way or left to send."""
        return not self._to_send and not self._under_way

    def missing(self, tallies: Iterable[Tally]) -> list[int]:
        """Return the micro-batches that no holder of some block has counted."""
        counted: dict[Span, set[int]] = {}
        for tally in tallies:
            for run, numbers in tally.counted:
                counted.setdefault(run, set()).update(numbers)
        return sorted({number for numbers in counted.values() for number in self._attempts.keys() - numbers})

    def is_overcounted(self, plan: WayPlan, peer: str, tally: Tally) -> bool:
        """True if a hop claims a micro-batch which did not go through these blocks of it: it would count twice."""
        return any(numbers - assigned(plan, self.ways, peer, run) for run, numbers in tally.counted)
