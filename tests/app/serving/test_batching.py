"""The order of work on a device: everybody who waits, urgent first, bulk in chunks, no peer starved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.serving.admission import AdmissionLimits, HopLoad, why_busy
from app.serving.batching import BURST_GAP_S, CHOOSING_S, BatchLimits, BatchQueue, QueuedTokens, even_part

LIMITS = BatchLimits(chunk_rows=16, urgent_rows=8)


def waiting(
    session: str,
    rows: int = 1,
    *,
    peer: str = "p",
    home: str = "",
    position: int = 0,
    urgent: bool | None = None,
    at: float = 0.0,
    first: bool = False,
) -> QueuedTokens:
    urgent = rows == 1 if urgent is None else urgent
    return QueuedTokens(
        session.encode(), peer, home or peer, 1, position, rows, memoryview(bytes(4 * rows)), "f32", urgent, at, first
    )


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
    assert (queue.rows, queue.bytes) == (0, 0)


def test_homes_take_turns_and_so_do_the_peers_of_each() -> None:
    """Each identity of one machine had a turn of its own."""
    queue = BatchQueue(BatchLimits(urgent_rows=4))
    for number in range(6):
        queue.put(waiting(f"s{number}", peer=f"squatter {number}", home="the attacker's"))
    for name in ("a1", "a2", "b1"):
        queue.put(waiting(name, peer=name[0], home="a house"))
    steps = [[name for name, _, _ in take(queue)] for _ in range(2)]
    assert steps == [["s0", "a1", "s1", "b1"], ["s2", "a2", "s3", "s4"]]


def test_a_step_takes_one_group_of_sessions_of_each_home() -> None:
    queue = BatchQueue(LIMITS)
    for number in range(3):
        work = waiting(f"s{number}", peer=f"squatter {number}", home="the attacker's")
        queue.put(replace(work, group=number))
    queue.put(replace(waiting("a", peer="honest"), group=1))
    assert [take(queue) for _ in range(3)] == [[("s0", 0, 1), ("a", 0, 1)], [("s1", 0, 1)], [("s2", 0, 1)]]


def test_sessions_of_many_groups_gain_their_asker_no_more_of_its_homes_steps() -> None:
    """Its neighbour, behind the same relay, waited for a step for each of them."""
    queue = BatchQueue(LIMITS)
    for number in range(6):
        queue.put(replace(waiting(f"s{number}", peer="squatter", home="a relay"), group=number))
    for position in range(3):
        work = waiting("a", peer="honest", home="a relay", position=position)
        queue.put(replace(work, group="another"))
        assert ("a", position, 1) in take(queue) + take(queue)


def test_the_session_that_is_given_up_is_of_the_home_with_most_bytes() -> None:
    queue = BatchQueue(LIMITS)
    for number in range(3):
        queue.put(waiting(f"s{number}", 20 + number, peer=f"squatter {number}", home="the attacker's"))
    queue.put(waiting("a", 40, peer="honest"))
    assert queue.largest == b"s2"


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


def test_a_chunk_waits_until_replies_here_have_chosen_their_tokens() -> None:
    queue = BatchQueue(LIMITS)
    chat, other = (replace(waiting(name), shares_device=True) for name in ("chat", "other"))
    for work in (chat, other, waiting("far"), waiting("long", 40)):
        queue.put(work)
    step = queue.take(0.0)
    assert isinstance(step, list)
    assert len(step) == 3
    queue.done(step, 0.005, 1.0)
    assert queue.take(1.0) == 1.0 + CHOOSING_S
    queue.put(replace(chat, position=1, arrived_at=1.0005))
    assert queue.take(1.0005) == 1.0 + CHOOSING_S
    queue.put(replace(other, position=1, arrived_at=1.001))
    assert take(queue, 1.001) == [("long", 0, 16)]
    assert take(queue, 1.001) == [("chat", 1, 1), ("other", 1, 1)]


def test_a_chunk_does_not_wait_long_for_a_reply_that_ended_or_is_far() -> None:
    queue = BatchQueue(LIMITS)
    chat = replace(waiting("chat"), shares_device=True)
    for work in (chat, waiting("long", 40)):
        queue.put(work)
    step = queue.take(0.0)
    assert isinstance(step, list)
    queue.done(step, 0.005, 1.0)
    assert queue.take(1.001) == 1.0 + CHOOSING_S
    assert take(queue, 1.0 + CHOOSING_S) == [("long", 0, 16)]
    queue.put(replace(chat, position=1, arrived_at=1.004))
    step = queue.take(1.004)
    assert isinstance(step, list)
    queue.done(step, 0.005, 1.01)
    queue.drop(b"chat")
    assert take(queue, 1.01) == [("long", 16, 16)]


@pytest.mark.parametrize(
    ("rows", "most", "part"), [(256, 190, 128), (256, 256, 256), (256, 300, 256), (257, 128, 86), (1, 5, 1)]
)
def test_rows_are_divided_evenly(rows: int, most: int, part: int) -> None:
    assert even_part(rows, most) == part


def reading_beside_writing(bulk_s: Callable[[int], float], step_s: float = 0.01, writing: bool = True) -> list[int]:
    """Rows of each chunk of a long prompt, if a chunk takes `bulk_s(rows)` and a reply is written meanwhile."""
    queue, now, position, chunks = BatchQueue(), 0.0, 0, list[int]()
    queue.put(waiting("long", 4096))
    while queue.rows:
        if writing and position <= len(chunks):
            queue.put(waiting("chat", position=position, at=now))
            position += 1
        work = queue.take(now)
        assert isinstance(work, list), work
        rows, urgent = sum(item.rows for item in work), work[0].urgent
        seconds = step_s if urgent else bulk_s(rows)
        now += seconds
        queue.done(work, seconds, now)
        if not urgent:
            chunks.append(rows)
    return chunks


@pytest.mark.parametrize(("fixed_s", "row_s"), [(0.0, 0.0001), (0.004, 0.0001), (0.012, 0.00005), (0.001, 0.0002)])
def test_a_chunk_takes_two_steps_or_twice_its_fixed_time_while_a_reply_is_written(fixed_s: float, row_s: float) -> None:
    chunks = reading_beside_writing(lambda rows: fixed_s + rows * row_s)
    assert all(fixed_s + rows * row_s <= max(0.0201, 2.01 * fixed_s) for rows in chunks[3:-1]), chunks
    assert all(rows >= 64 for rows in chunks[:-1])


def test_a_prompt_alone_is_read_in_whole_chunks_and_a_fast_device_needs_no_smaller_ones() -> None:
    assert set(reading_beside_writing(lambda rows: rows * 0.01, writing=False)) == {256}
    assert set(reading_beside_writing(lambda rows: 0.001 + rows * 0.00001)) == {256}
    assert set(reading_beside_writing(lambda rows: rows * 0.01)[1:]) == {64}, "fewer read the weights for too little"


@given(st.lists(st.floats(0, 10), min_size=16, max_size=64))
def test_a_chunk_has_rows_however_its_time_is_measured(seconds: list[float]) -> None:
    times = iter(seconds * 64)
    chunks = reading_beside_writing(lambda rows: next(times))
    assert sum(chunks) == 4096
    assert all(64 <= rows <= 256 for rows in chunks[:-1])


def test_a_session_keeps_its_own_order() -> None:
    queue = BatchQueue(LIMITS)
    queue.put(waiting("a", 20))
    queue.put(waiting("a", 1, position=20))
    assert [take(queue), take(queue), take(queue)] == [[("a", 0, 16)], [("a", 16, 4)], [("a", 20, 1)]]


def test_sessions_of_one_peer_take_turns_with_their_chunks() -> None:
    queue = BatchQueue(LIMITS)
    for position in (0, 16, 32):
        queue.put(waiting("long", 16, position=position))
    queue.put(waiting("longer", 40))
    queue.put(waiting("short", 10))
    steps = [take(queue) for _ in range(6)]
    assert steps == [
        [("long", 0, 16)], [("longer", 0, 16)], [("short", 0, 10), ("long", 16, 6)],
        [("longer", 16, 16)], [("long", 22, 10), ("longer", 32, 6)], [("long", 32, 16)],
    ]  # fmt: skip


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


def warmed(*, first: bool = False, others: str = "b", peer: str = "p") -> BatchQueue:
    """`a` and others, of one peer or two, usually away for 20 ms, with steps of 10 ms; all left at 0.13."""
    queue = BatchQueue(LIMITS)
    now = 0.0
    for position in range(5):
        for name in "a" + others:
            queue.put(waiting(name, position=position, at=now, first=first, peer="p" if name == "a" else peer))
        work = queue.take(now + 0.02)
        assert isinstance(work, list)
        queue.done(work, 0.01, now + 0.01)
        now += 0.03
    return queue


def wait_of(queue: BatchQueue, now: float) -> float:
    """How long a step is put off."""
    until = queue.take(now)
    assert isinstance(until, float), until
    return until - now


def test_a_step_waits_for_those_who_left_together_however_late_they_all_are() -> None:
    for late_s in (-0.008, 0.0, 0.008, 0.1):
        queue = warmed()
        arrived_at = 0.15 + late_s
        queue.put(waiting("a", position=5, at=arrived_at))
        assert 0 < wait_of(queue, arrived_at) < 0.01
        queue.put(waiting("b", position=5, at=arrived_at + 0.003))
        assert take(queue, arrived_at + 0.003) == [("a", 5, 1), ("b", 5, 1)]


def test_a_step_does_not_wait_for_long_nor_for_the_gone() -> None:
    queue = warmed()
    queue.put(waiting("a", position=5, at=0.15))
    assert wait_of(queue, 0.15) < 0.01
    assert take(queue, 0.156) == [("a", 5, 1)]  # b is late by more than half a step
    queue = warmed()
    queue.drop(b"b")
    queue.put(waiting("a", position=5, at=0.148))
    assert take(queue, 0.148) == [("a", 5, 1)]


def test_the_ways_of_different_peers_are_told_apart() -> None:
    queue = warmed(peer="far")
    for turn in range(8):  # b's asker is farther away: its sessions come 50 ms later than a
        at = 0.15 + 0.1 * turn
        queue.put(waiting("a", position=5 + turn, at=at))
        queue.put(waiting("b", position=5 + turn, peer="far", at=at + 0.05))
        work = queue.take(at + 0.05)
        assert isinstance(work, list)
        queue.done(work, 0.01, at + 0.06)
    queue.put(waiting("a", position=13, at=0.95))
    assert take(queue, 0.95) == [("a", 13, 1)]


def test_those_who_were_sent_together_are_taken_together_though_nobody_knew_it() -> None:
    queue = warmed()
    queue.put(waiting("b", position=5, at=0.15))
    work = queue.take(0.16)
    assert isinstance(work, list)
    queue.done(work, 0.01, 0.17)  # from now on they are half a round apart
    queue.put(waiting("a", position=5, at=0.172))
    until = 0.172 + wait_of(queue, 0.172)
    assert until <= 0.172 + 1.01 * BURST_GAP_S
    queue.put(waiting("b", position=6, at=until - 0.0001))
    work = queue.take(until + BURST_GAP_S)
    assert isinstance(work, list)
    assert {item.session for item in work} == {b"a", b"b"}


def test_now_and_then_few_wait_for_many_where_their_route_begins() -> None:
    def late_by_a_step(*, first: bool) -> BatchQueue:
        """The others went on without `a`, which comes back when they have just left again."""
        queue = warmed(first=first, others="bcd", peer="q")
        for name in "bcd":
            queue.put(waiting(name, position=5, at=0.15, first=first, peer="q"))
        work = queue.take(0.156)
        assert isinstance(work, list)
        queue.done(work, 0.01, 0.166)
        queue.put(waiting("a", position=5, at=0.167, first=first))
        return queue

    queue = late_by_a_step(first=True)
    assert wait_of(queue, 0.167) > 0.01  # until the others' next round
    for name in "bcd":
        queue.put(waiting(name, position=6, at=0.186, first=True, peer="q"))
    assert len(take(queue, 0.186)) == 4
    # A hop in the middle could wait in vain for sessions that wait for its own at another hop.
    assert take(late_by_a_step(first=False), 0.167) == [("a", 5, 1)]


def test_a_session_alone_never_waits() -> None:
    queue = BatchQueue(LIMITS)
    for position in range(50):
        now = 0.03 * position
        queue.put(waiting("a", position=position, at=now, first=True))
        work = queue.take(now)
        assert isinstance(work, list)
        queue.done(work, 0.01, now + 0.01)


def test_a_single_session_gets_its_share_beside_a_greedy_peers_32() -> None:
    queue = BatchQueue(LIMITS)  # steps of 8 rows
    greedy, modest, steps = [0] * 32, 0, 64
    for index in range(32):
        queue.put(waiting(f"g{index}", peer="greedy", at=0.0))
    queue.put(waiting("m", peer="modest", at=0.0))
    for step in range(steps):
        now = 0.01 * step
        work = queue.take(now)
        assert isinstance(work, list)
        queue.done(work, 0.01, now + 0.01)
        for item in work:  # everybody comes back at once
            name = item.session.decode()
            queue.put(waiting(name, peer=item.peer, position=item.position + 1, at=now + 0.01))
            if name == "m":
                modest += 1
            else:
                greedy[int(name[1:])] += 1
    assert modest == steps  # one of two peers: never more than a step away
    assert sum(greedy) == 7 * steps
    assert max(greedy) - min(greedy) <= 1


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
    assert (queue.rows, queue.bytes) == (0, 0)


@pytest.mark.parametrize(
    ("load", "tokens", "expected"),
    [
        (HopLoad(0, 0, 0, 128, 0, 500, 1000, 1000), 900, None),  # alone, one session may be large
        (HopLoad(1, 1, 1, 128, 400, 500, 600, 1000), 300, None),
        (HopLoad(1, 1, 1, 128, 400, 500, 600, 1000), 400, "whose share is"),
        (HopLoad(1, 0, 1, 128, 400, 500, 600, 1000), 400, "whose share is"),  # another asker at its address
        (HopLoad(4, 1, 1, 51, 50, 200, 300, 1000), 150, None),  # within its share of a fifth
        (HopLoad(4, 1, 1, 51, 200, 200, 300, 1000), 150, "whose share is"),
        (HopLoad(4, 1, 1, 51, 200, 200, 100, 1000), 150, "whose share is"),  # nobody is to make way for it
        (HopLoad(4, 0, 0, 51, 0, 200, 300, 1000), 290, None),  # a newcomer takes what is there
        (HopLoad(4, 0, 0, 51, 0, 200, 300, 1000), 301, "no room for 301 tokens"),
        (HopLoad(4, 0, 0, 51, 0, 200, 300, 1000, held_back=True), 200, None),
        (HopLoad(4, 0, 0, 51, 0, 200, 300, 1000, held_back=True), 201, "whose share is"),
        (HopLoad(64, 64, 64, 128, 64, 500, 900, 1000), 1, "of yours"),
        (HopLoad(200, 0, 90, 85, 90, 500, 900, 1000), 1, "from your address"),
        (HopLoad(256, 0, 0, 23, 0, 90, 900, 1000), 1, "256 sessions"),
    ],
)
def test_admission(load: HopLoad, tokens: int, expected: str | None) -> None:
    why = why_busy(load, tokens, AdmissionLimits())
    assert (why is None) if expected is None else (why is not None and expected in why.text)


def test_sessions_with_few_rows_do_not_wait_for_one_with_many() -> None:
    queue = BatchQueue(LIMITS)
    queue.put(waiting("guesses", 8, peer="q", urgent=True))
    for name in "abcd":
        queue.put(waiting(name))
    assert sorted(take(queue)) == [("a", 0, 1), ("b", 0, 1), ("c", 0, 1), ("d", 0, 1), ("guesses", 0, 4)]
    assert take(queue) == [("guesses", 4, 4)]
    assert queue.take(0.0) is None


def learn_steps(queue: BatchQueue, row_s: float) -> None:
    """Let a queue see that a step takes 10 ms and `row_s` for each further row."""
    for rows in (1, 8, 1, 4, 1, 8):
        queue.done([waiting("x", rows, urgent=True)], 0.01 + (rows - 1) * row_s, 0.0)
    queue.drop(b"x")


@pytest.mark.parametrize(
    ("row_s", "taken"),
    [
        (0.0, 16),  # rows that cost nothing: all go along
        (0.001, 7),  # 12 ms with one row each, so 6 ms more: six guesses
        (0.02, 2),  # one guess at least, so that guesses move on
    ],
)
def test_guesses_stretch_a_step_that_others_share_only_so_far(row_s: float, taken: int) -> None:
    queue = BatchQueue(BatchLimits())
    learn_steps(queue, row_s)
    queue.put(waiting("guesses", 16, peer="q", urgent=True))
    queue.put(waiting("a"))
    queue.put(waiting("b"))
    work = queue.take(0.0)
    assert isinstance(work, list)
    assert {item.session.decode(): item.rows for item in work} == {"guesses": taken, "a": 1, "b": 1}


def test_guesses_of_a_session_that_is_alone_all_go_at_once() -> None:
    queue = BatchQueue(BatchLimits())
    learn_steps(queue, 0.02)
    queue.put(waiting("guesses", 16, urgent=True))
    assert take(queue) == [("guesses", 0, 16)]


def test_a_session_whose_rows_are_half_done_is_not_waited_for() -> None:
    queue = BatchQueue(LIMITS)
    for _ in range(2):
        queue.put(waiting("guesses", 12, urgent=True))
        done = queue.take(0.0)
        assert isinstance(done, list)
        queue.done(done, 0.01, 0.0)
        assert take(queue, 0.0) == [("guesses", 8, 4)]


@given(st.lists(st.tuples(st.sampled_from("pqr"), st.integers(1, 16)), min_size=1, max_size=30))
def test_urgent_rows_are_shared_out_evenly_and_none_is_lost(heads: list[tuple[str, int]]) -> None:
    limits = BatchLimits(urgent_rows=24)
    queue = BatchQueue(limits)
    for number, (peer, rows) in enumerate(heads):
        queue.put(waiting(f"s{number}", rows, peer=peer, urgent=True))
    left = {f"s{number}": rows for number, (_, rows) in enumerate(heads)}
    while queue.rows:
        before = {session: rows for session, rows in left.items() if rows}
        taken = {session: rows for session, _, rows in take(queue)}
        assert sum(taken.values()) <= limits.urgent_rows
        assert len(taken) == min(len(before), limits.urgent_rows)
        most = max(taken.values())
        for session, rows in taken.items():
            left[session] -= rows
            assert rows in (most, before[session])  # only a session that needs no more gets less
    assert not any(left.values())


@pytest.mark.parametrize("spacing_s", [0.4, 0.03])
def test_an_asker_whose_sessions_are_always_about_to_return_holds_up_no_other(spacing_s: float) -> None:
    """64 sessions of one asker are due one after the other and never come: another's tokens wait half a second."""
    queue, step_s, now = BatchQueue(), 0.05, 0.0

    def run_step() -> float:
        """Run the next step, and return the time at which it began."""
        nonlocal now
        while not isinstance(work := queue.take(now), list):
            assert work is not None
            now = work
        begun_at, now = now, now + step_s
        queue.done(work, step_s, now)
        return begun_at

    numbers = range(64, 0, -1)
    for number in numbers:
        now = max(now, 30.0 - number * spacing_s)
        queue.put(waiting(f"hostile {number}", peer="hostile", at=now, first=True))
        run_step()
    now = max(now, 30.0)
    for number in numbers:  # all together, each so long after its last one
        queue.put(waiting(f"hostile {number}", peer="hostile", position=1, at=now, first=True))
    while queue.rows:
        run_step()
    waits_s = []
    for position in range(40):
        arrived_at = now = now + 0.02
        queue.put(waiting("honest", peer="honest", position=position, at=now, first=True))
        waits_s.append(run_step() - arrived_at)
    assert max(waits_s) < 0.6


def test_sessions_of_one_peer_over_many_spans_do_not_share_a_step() -> None:
    """Each group is a pass of its own through the blocks: a step has one of each peer, and all have their turn."""
    queue = BatchQueue()
    for number in range(40):
        queue.put(replace(waiting(f"hostile {number}", peer="hostile"), group=number % 20))
    taken: list[list[QueuedTokens]] = []
    for position in range(20):
        queue.put(replace(waiting("honest", peer="honest", position=position), group="all"))
        work = queue.take(0.0)
        assert isinstance(work, list)
        taken.append(work)
    assert [len({item.group for item in work}) for work in taken] == [2] * 20
    assert [len(work) for work in taken] == [3] * 20
    assert not queue.rows
