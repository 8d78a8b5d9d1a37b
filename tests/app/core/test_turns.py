"""Turns: whoever had least is next, more askers of one home gain nothing, and nobody waits for ever."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.turns import TurnQueue


def taken(queue: TurnQueue[int], count: int) -> list[tuple[str, int]]:
    """The next so many, each with its home; the amount that each has is what it is."""
    result = []
    for _ in range(count):
        who, amount = queue.first()
        assert queue.pop(who, amount) == amount
        result.append((str(who[0]), amount))
    return result


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9), st.integers(1, 50)), min_size=2, max_size=60))
def test_who_waits_has_as_much_as_others_who_wait(waiting: list[tuple[str, int, int]]) -> None:
    """Homes by amounts, however many askers they have and however large each thing is that waits."""
    queue = TurnQueue[int]()
    for home, asker, amount in waiting:
        queue.put((home, asker), amount)
    had, left = dict.fromkeys("abc", 0), [home for home, _, _ in waiting]
    while queue:
        before = {home: had[home] for home in left}
        [(home, amount)] = taken(queue, 1)
        assert all(had[home] <= other for other in before.values())
        had[home] += amount
        left.remove(home)
    assert sum(had.values()) == sum(amount for _, _, amount in waiting)


def test_a_homes_part_is_shared_among_its_askers_and_an_askers_among_its_sessions() -> None:
    queue = TurnQueue[str]()
    for name in ("a11", "a12", "a21", "b11", "b12", "b13", "a13"):
        queue.put(tuple(name), name)
    queue.put(("a", "1", "another"), "another")
    order = []
    while queue:
        order.append(queue.pop(queue.first()[0]))
    assert order == ["a11", "b11", "a21", "b12", "a12", "b13", "a13", "another"]


def test_nobody_saves_up_turns_and_no_newcomers_keep_one_waiting() -> None:
    queue = TurnQueue[int]()
    for _ in range(30):
        queue.put(("a",), 1)
    assert taken(queue, 10) == [("a", 1)] * 10
    queue.put(("b",), 1)
    queue.put(("b",), 1)
    queue.put(("b",), 1)
    assert sorted(taken(queue, 4)) == [("a", 1)] * 2 + [("b", 1)] * 2
    served = []
    for number in range(40):  # there is always a home that had nothing before
        queue.put((f"new {number}",), 1)
        served += taken(queue, 1)
    assert served.count(("a", 1)) >= 5


def test_what_is_dropped_is_all_that_waits_for_one() -> None:
    queue = TurnQueue[int]()
    for who in (("a", "1"), ("a", "2"), ("b", "1"), ("a", "1")):
        queue.put(who, len(who))
    assert queue.drop(("a", "1")) == [2, 2]
    assert queue.drop(("a", "1")) == []
    assert list(queue) == [2, 2]
    assert queue.drop(("a",)) == [2]
    assert queue.first() == (("b", "1"), 2)
    assert queue.drop(()) == [2]
    assert not queue
