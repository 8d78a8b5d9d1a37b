"""Who is next where several wait for the same thing, such as orders, tokens for a step, or rows for a link. Pure.

Homes take turns (`app.serving.homes`), then the askers of a home, and so on.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

REMEMBERED = 1024  # homes and askers that had something lately

T = TypeVar("T")
Who = tuple[Hashable, ...]  # a home, an asker of it, and what else is told apart below that; or only the first of these


class _Had(NamedTuple):
    """What one has had, as it counts beside those that belong to the same; of equals the first waited longest."""

    amount: float
    turn: int = 0  # the number of the latest turn that was its own


class Turns:
    """How much each home has had, each asker of a home, and so on: whoever had least is next.

    Nobody saves up turns: who comes back counts as having had what the last one had before its turn, and who was never
    here as having had what that one had after it. So it need not wait for all that others had before, and nobody waits
    for ever since others keep coming.
    """

    def __init__(self) -> None:
        self._had: OrderedDict[Who, _Had] = OrderedDict()  # the one that had something longest ago first
        self._last: dict[Who, tuple[float, float]] = {}  # of those that belong to one: before and after the last turn
        self._turn = 0

    def had(self, who: Who) -> _Had:
        """Return how much one has had."""
        return self._had.get(who) or _Had(self._last.get(who[:-1], (0.0, 0.0))[1])

    def join(self, who: Who) -> None:
        """Note that one waits for its turn."""
        for part in _parts(who):
            had = self._had.get(part)
            before, after = self._last.get(part[:-1], (0.0, 0.0))
            if had is None:
                self._had[part] = _Had(after)
            elif had.amount < before:
                self._had[part] = _Had(before, had.turn)

    def took(self, who: Who, amount: float) -> None:
        """Note that one had so much."""
        self._turn += 1
        for part in _parts(who):
            before = self.had(part).amount
            self._last[part[:-1]] = before, before + amount
            self._had[part] = _Had(before + amount, self._turn)
            self._had.move_to_end(part)  # what one belongs to comes after it, and so is not forgotten before it
        while len(self._had) > REMEMBERED:
            self._last.pop(self._had.popitem(last=False)[0], None)


class TurnQueue(Generic[T]):
    """What waits, by whom it is for; what is for one stays in order."""

    def __init__(self, turns: Turns | None = None) -> None:
        self._turns = turns or Turns()
        self._waiting: dict[Hashable, Any] = {}  # by home, then by asker, and so on: a queue

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __iter__(self) -> Iterator[T]:
        return _all_in(self._waiting)

    def put(self, who: Who, what: T) -> None:
        """Add something behind all that waits for the same one; every `who` has as many parts."""
        inner: Any = self._waiting
        for part in who[:-1]:
            inner = inner.setdefault(part, {})
        inner.setdefault(who[-1], deque()).append(what)
        self._turns.join(who)

    def first(self) -> tuple[Who, T]:
        """Return whose turn it is, and the first that waits for that one."""
        who: Who = ()
        inner: Any = self._waiting
        while not isinstance(inner, deque):
            who = min(((*who, part) for part in inner), key=self._turns.had)
            inner = inner[who[-1]]
        return who, inner[0]

    def pop(self, who: Who, amount: float = 1.0) -> T:
        """Remove the first that waits for one, which has had so much more then."""
        queue = self._find(who)
        what: T = queue.popleft()
        if not queue:
            self._forget(who)
        self._turns.took(who, amount)
        return what

    def drop(self, who: Who) -> list[T]:
        """Remove all that waits for one and what belongs to it, and return it."""
        dropped = list(_all_in(self._find(who)))
        self._forget(who)
        return dropped

    def is_first(self, who: Who, what: T) -> bool:
        """True if this is the first that waits for one."""
        queue = self._find(who)
        return bool(queue) and queue[0] is what

    def _find(self, who: Who) -> Any:
        inner: Any = self._waiting
        for part in who:
            inner = inner.get(part, {})
        return inner

    def _forget(self, who: Who) -> None:
        if not who:
            self._waiting.clear()
        for part in _parts(who):
            outer = self._find(part[:-1])
            outer.pop(part[-1], None)
            if outer:
                return


def _parts(who: Who) -> Iterator[Who]:
    """Return one, what it belongs to, and so on: a session, its asker, its home."""
    return (who[:depth] for depth in range(len(who), 0, -1))


def _all_in(inner: Any) -> Iterator[Any]:
    if isinstance(inner, deque):
        yield from inner
    else:
        for part in inner.values():
            yield from _all_in(part)
