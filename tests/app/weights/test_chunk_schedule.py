"""Which chunks are asked for together, and what becomes of those that did not come."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.weights.chunk_schedule import (
    BUSY_S,
    JITTER,
    LONGEST_SHUN_S,
    RETRIED_AT_ONCE,
    RETRY_GAP_S,
    RETRY_S,
    SHUN_S,
    SLOW_S,
    ChunkQueue,
    ChunkRun,
    PeerPerformance,
    chunk_runs,
)
from app.weights.download import WINDOW

LONGER = 1.0 + JITTER


@given(st.sets(st.integers(0, 60)), st.integers(1, 6))
def test_pieces_are_all_that_is_missing_and_cut_where_everybody_cuts(missing: set[int], most: int) -> None:
    pieces = chunk_runs("block.0", sorted(missing), most)
    assert [index for piece in pieces for index in range(piece.index, piece.index + piece.count)] == sorted(missing)
    assert all(piece.count >= 1 and piece.index // most == (piece.index + piece.count - 1) // most for piece in pieces)


def test_a_peers_pace_is_smoothed_and_its_failures_in_a_row_cost_ever_longer_pauses() -> None:
    performance, now = PeerPerformance(), 0.0
    for taken_s, pace_s in ((1.0, 1.0), (5.0, 2.0), (2.0, 2.0)):
        performance.gave("a", taken_s)
        assert performance.pace_s == {"a": pace_s}
    for times in (1, 2, 4):
        pause_s = performance.failed("a", now)
        assert times * SHUN_S <= pause_s <= times * LONGER * SHUN_S
        assert performance.failed("a", now) == 0.0  # of a request that was under way at the same time
        now += pause_s
    performance.gave("a", 2.0)
    assert SHUN_S <= performance.failed("a", now) <= LONGER * SHUN_S
    for _ in range(2000):
        now += LONGER * LONGEST_SHUN_S
        longest_s = performance.failed("a", now)
    assert LONGEST_SHUN_S <= longest_s <= LONGER * LONGEST_SHUN_S


def failed_often(*peers: str) -> PeerPerformance:
    """Peers that are not to be asked for hours, since the time 0."""
    performance = PeerPerformance()
    for peer in peers:
        performance._failures[peer] = 9
        performance.failed(peer, 0.0)
    return performance


def test_who_failed_is_asked_again_after_minutes_while_nobody_else_is_usable() -> None:
    performance = failed_often("hung", "liar")
    performance.lied("liar")
    performance.retry([["hung", "liar"]], RETRY_S - 1)
    assert not performance.is_usable("hung", RETRY_S - 1)
    now = RETRY_S + RETRY_GAP_S
    performance.retry([["hung", "liar"]], now)
    assert (performance.is_usable("hung", now), performance.is_usable("liar", now)) == (True, False)
    performance.failed("hung", now)
    performance.retry([["hung", "liar"]], now + RETRY_GAP_S)
    assert not performance.is_usable("hung", now + RETRY_GAP_S)


def test_who_failed_is_left_alone_while_another_holder_of_the_part_gives() -> None:
    performance = failed_often("hung")
    performance.gave("good", 0.1)
    performance.retry([["hung", "good"]], RETRY_S)
    assert not performance.is_usable("hung", RETRY_S)
    performance.retry([["hung", "good"], ["hung"]], RETRY_S + RETRY_GAP_S)
    assert performance.is_usable("hung", RETRY_S + RETRY_GAP_S)


def test_of_many_that_failed_a_few_at_a_time_are_asked_again() -> None:
    """Members that claim a part and never answer take little of the time that is for the others."""
    many = [f"silent-{number}" for number in range(40)]
    performance, asked = failed_often(*many), list[str]()
    for turn in range(10):
        now = RETRY_S + turn * RETRY_GAP_S
        for _ in range(3):
            performance.retry([many], now)
        usable = [peer for peer in many if performance.is_usable(peer, now)]
        assert len(usable) == RETRIED_AT_ONCE
        asked += usable
        for peer in usable:
            performance.failed(peer, now)
    assert sorted(asked) == sorted(many), "each has its turn"


def test_peers_that_failed_at_the_same_time_are_not_asked_again_at_the_same_time() -> None:
    performance = PeerPerformance(random.Random(1))
    assert len({performance.failed(peer, 0.0) for peer in "abc"}) == 3


def test_a_peer_is_slow_after_a_failure_until_it_gives_a_chunk_fast() -> None:
    performance = PeerPerformance()
    performance.answered("a", 0.01)
    assert not performance.is_slow("a")
    performance.failed("a", 0.0)
    performance.answered("a", 0.01)
    assert performance.is_slow("a")
    performance.gave("a", 2 * SLOW_S)
    assert performance.is_slow("a")
    performance.gave("b", 0.1)
    assert not performance.is_slow("b")


def test_a_slow_peer_is_asked_for_the_first_chunks_of_a_run() -> None:
    queue = ChunkQueue(random.Random(1), 4)
    queue.add("block.0", range(4))
    one = queue.take("slow", {"block.0"}, at_most=1, late_before=0.0, now=1.0)
    assert one == ChunkRun("block.0", 0)
    rest = queue.take("fast", {"block.0"}, at_most=4, late_before=0.0, now=1.0)
    assert rest == ChunkRun("block.0", 1, 3)
    assert queue.take("slow", {"block.0"}, at_most=1, late_before=2.0, now=3.0) is None  # the rest is too long for it
    assert queue.take("fast", {"block.0"}, at_most=4, late_before=2.0, now=3.0) == one


def test_what_did_not_come_is_asked_for_again() -> None:
    queue = ChunkQueue(random.Random(1), 4)
    queue.add("block.0", range(4))
    assert queue.waiting(["block.0"]) == 4
    piece = queue.take("a", {"block.0"}, at_most=4, late_before=0.0, now=1.0)
    assert piece == ChunkRun("block.0", 0, 4)
    assert [queue.is_coming("block.0", index) for index in (0, 3, 4)] == [True, True, False]
    assert queue.complete(piece, 1)
    assert (queue.waiting(["block.0"]), queue.is_over("block.0")) == (3, False)
    rest = queue.take("b", {"block.0"}, at_most=4, late_before=0.0, now=1.0)
    assert rest == ChunkRun("block.0", 1, 3)
    queue.failed(rest, "b")
    assert queue.take("a", {"block.0"}, at_most=4, late_before=0.0, now=2.0) == rest
    assert queue.take("b", {"block.0"}, at_most=4, late_before=1.5, now=3.0) is None  # it is not late yet
    assert queue.take("b", {"block.0"}, at_most=4, late_before=2.5, now=3.0) == rest
    assert queue.complete(rest, 3)
    assert not queue.complete(rest, 3)  # the slower of the two
    assert queue.is_over("block.0")


def test_a_run_that_was_redirected_is_repeated_by_the_holder_that_named_another_once_it_is_late() -> None:
    queue = ChunkQueue(random.Random(1), 4)
    queue.add("block.0", range(4))
    piece = queue.take("seed", {"block.0"}, at_most=4, late_before=0.0, now=1.0)
    assert piece is not None
    assert queue.redirect(piece, "seed", "named")
    assert queue.take("seed", {"block.0"}, at_most=4, late_before=0.5, now=1.0) is None  # it is not late yet
    assert queue.take("seed", {"block.0"}, at_most=4, late_before=1.5, now=2.0) == piece
    assert not queue.redirect(piece, "seed", "named")  # it is asked already
    queue.failed(piece, "named")
    assert queue.waiting(["block.0"]) == 0
    assert queue.complete(piece, 4)
    assert not queue.redirect(piece, "seed", "other")


@pytest.mark.parametrize(("helps", "is_heeded"), [([1, 0, 0] * 3, False), ([0, 1] * 9, True), ([0] * 3, False)])
def test_who_redirects_to_members_that_mostly_do_not_help_is_asked_to_send_itself(
    helps: list[int], is_heeded: bool
) -> None:
    performance = PeerPerformance()
    for helped in helps:
        performance.record_redirect("a", succeeded=bool(helped))
    assert performance.may_not_redirect("a") is not is_heeded


def test_refusals_in_a_row_cost_ever_longer_pauses_up_to_that_of_a_failure() -> None:
    performance, now = PeerPerformance(), 0.0
    for times in range(12):
        pause_s = min(BUSY_S * 2**times, SHUN_S)
        for _ in range(WINDOW):  # requests under way at the same time count once
            performance.refused_as_busy("a", now)
        assert not performance.is_usable("a", now + 0.99 * pause_s)
        now += LONGER * pause_s
        assert performance.is_usable("a", now)
    performance.gave("a", 1.0)
    performance.refused_as_busy("a", now)
    assert performance.is_usable("a", now + LONGER * BUSY_S)
