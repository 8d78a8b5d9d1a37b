"""The order of work on a device: everybody who waits, urgent first, bulk in chunks, no peer starved."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.batching import AdmissionLimits, BatchLimits, BatchQueue, Load, Waiting, why_busy

LIMITS = BatchLimits(chunk_rows=16, urgent_rows=8)


def waiting(
    session: str, rows: int = 1, *, peer: str = "p", position: int = 0, urgent: bool | None = None, at: float = 0.0
) -> Waiting:
    urgent = rows == 1 if urgent is None else urgent
    return Waiting(session.encode(), peer, 1, position, rows, memoryview(bytes(4 * rows)), "f32", urgent, at)


def take(queue: BatchQueue, now: float = 0.0) -> list[tuple[str, int, int]]:
    work = queue.take(now)
    assert isinstance(work, list), work
    return [(item.session.decode(), item.position, item.rows) for item in work]


def test_all_that_wait_go_together() -> None:
    queue = BatchQueue(LIMITS)
    for name in "abc":
        queue.put(waiting(name))
    assert take(queue) == [("a", 0, 1), ("b", 0, 1), ("c", 0, 1)]
    assert queue.take(0.0) is None
    assert queue.rows == 0


def test_urgent_goes_first_and_bulk_gets_every_second_step_in_chunks() -> None:
    queue = BatchQueue(LIMITS)
    queue.put(waiting("long", 40))
    seen = []
    for position in range(4):
        queue.put(waiting("chat", position=position))
        seen.append(take(queue))
        if queue.rows:
            seen.append(take(queue))
    assert seen == [
        [("chat", 0, 1)], [("long", 0, 16)], [("chat", 1, 1)], [("long", 16, 16)],
        [("chat", 2, 1)], [("long", 32, 8)], [("chat", 3, 1)],
    ]  # fmt: skip


def test_a_session_keeps_its_own_order() -> None:
    queue = BatchQueue(LIMITS)
    queue.put(waiting("a", 20))
    queue.put(waiting("a", 1, position=20))
    assert [take(queue), take(queue), take(queue)] == [[("a", 0, 16)], [("a", 16, 4)], [("a", 20, 1)]]


def test_a_greedy_peer_does_not_starve_another() -> None:
    queue = BatchQueue(LIMITS)
    for number in range(20):
        queue.put(waiting(f"g{number}", 16, peer="greedy"))
    queue.put(waiting("m", 16, peer="modest"))
    assert ("m", 0, 16) in take(queue) + take(queue)
    for number in range(20):
        queue.put(waiting(f"u{number}", peer="greedy"))
    queue.put(waiting("n", peer="modest"))
    assert ("n", 0, 1) in take(queue)


def test_dropped_work_is_never_taken() -> None:
    queue = BatchQueue(LIMITS)
    queue.put(waiting("a", 20))
    queue.put(waiting("b"))
    queue.drop(b"a")
    assert take(queue) == [("b", 0, 1)]
    assert (queue.take(0.0), queue.rows) == (None, 0)


def warmed() -> BatchQueue:
    """Two sessions that usually are away for 20 ms, with steps of 10 ms; both have just left."""
    queue = BatchQueue(LIMITS)
    now = 0.0
    for position in range(5):
        for name in "ab":
            queue.put(waiting(name, position=position, at=now))
        work = queue.take(now + 0.02)
        assert isinstance(work, list)
        queue.done(work, 0.01, now + 0.01)
        now += 0.03
    return queue


def test_a_step_waits_for_a_session_that_is_about_to_come_back() -> None:
    queue = warmed()  # both left at 0.13 and are due at 0.15
    queue.put(waiting("a", position=5, at=0.148))
    assert queue.take(0.148) == pytest.approx(0.14925)  # those who went together come within a moment
    until = queue.take(0.1493)
    assert isinstance(until, float)
    assert 0.15 <= until <= 0.158
    queue.put(waiting("b", position=5, at=0.15))
    assert take(queue, 0.15) == [("a", 5, 1), ("b", 5, 1)]


def test_a_step_does_not_wait_for_long_nor_for_strangers_nor_for_the_late() -> None:
    queue = warmed()
    queue.put(waiting("a", position=5, at=0.117))
    assert take(queue, 0.1185) == [("a", 5, 1)]  # b is not due for three steps
    queue = warmed()
    queue.drop(b"b")
    queue.put(waiting("a", position=5, at=0.148))
    assert take(queue, 0.148) == [("a", 5, 1)]
    queue = warmed()
    queue.put(waiting("a", position=5, at=0.17))
    assert take(queue, 0.1713) == [("a", 5, 1)]


@given(
    st.lists(st.tuples(st.sampled_from("abcde"), st.sampled_from("pq"), st.integers(1, 50), st.booleans()), max_size=30)
)
def test_everything_is_taken_once_and_in_order(puts: list[tuple[str, str, int, bool]]) -> None:
    queue = BatchQueue(LIMITS)
    ends: dict[str, int] = {}
    for name, peer, rows, urgent in puts:
        queue.put(waiting(name, rows, peer=peer, position=ends.get(name, 0), urgent=urgent and rows < 8))
        ends[name] = ends.get(name, 0) + rows
    done: dict[str, int] = {}
    for _ in range(2000):
        work = queue.take(1e9)
        if work is None:
            break
        assert isinstance(work, list)
        assert len({item.session for item in work}) == len(work)
        assert sum(item.rows for item in work) <= LIMITS.chunk_rows
        for item in work:
            assert item.position == done.get(item.session.decode(), 0)
            assert len(item.data) == 4 * item.rows
            done[item.session.decode()] = item.position + item.rows
    assert done == ends
    assert queue.rows == 0


@pytest.mark.parametrize(
    ("load", "tokens", "expected"),
    [
        (Load(0, 0, 0, 0, 1000, 1000), 900, None),  # alone, one session may be large
        (Load(1, 1, 0, 400, 600, 1000), 300, None),
        (Load(1, 1, 0, 400, 600, 1000), 400, "kept for others"),
        (Load(4, 1, 3, 50, 300, 1000), 150, None),  # within its share of a fifth
        (Load(4, 1, 3, 200, 300, 1000), 150, "kept for others"),
        (Load(4, 0, 3, 0, 300, 1000), 290, None),  # a newcomer takes what is there
        (Load(4, 0, 3, 0, 300, 1000), 301, "no room for 301 tokens"),
        (Load(64, 64, 0, 64, 900, 1000), 1, "of yours"),
        (Load(256, 0, 9, 0, 900, 1000), 1, "256 sessions"),
    ],
)
def test_admission(load: Load, tokens: int, expected: str | None) -> None:
    why = why_busy(load, tokens, AdmissionLimits())
    assert (why is None) if expected is None else (why is not None and expected in why)
