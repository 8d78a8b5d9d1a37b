"""Placement: holes first, the worst-served next, nobody's only copy ever left, and no restlessness."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from app.placement import GAIN, HOLE_STAGGER_S, STAY_S, Candidate, block_speeds, can_leave, decide
from app.records import Announcement
from app.span import Span

BLOCKS = 12
LONG_S = STAY_S + 1


def holder(peer: str, start: int, stop: int, speed: float = 10.0, state: str = "serving") -> Announcement:
    return Announcement(peer, 1, 0, "", state, Span(start, stop), speed)


def test_a_newcomer_takes_what_nobody_holds() -> None:
    move = decide(Candidate("me", 4, 10.0), [holder("a", 0, 4), holder("b", 8, 12)], BLOCKS)
    assert move is not None
    assert (move.span, move.after_s) == (Span(4, 8), 0.0)


def test_a_newcomer_lifts_the_worst_served() -> None:
    others = [holder("a", 0, 6, 30), holder("b", 6, 12, 5), holder("c", 0, 12, 1)]
    move = decide(Candidate("me", 6, 10.0), others, BLOCKS)
    assert move is not None
    assert move.span == Span(6, 12)


def test_a_node_that_is_still_loading_counts() -> None:
    others = [holder("a", 0, 6), holder("b", 6, 12, state="loading")]
    assert block_speeds(others, BLOCKS) == [10.0] * BLOCKS
    move = decide(Candidate("me", 12, 10.0, Span(0, 12)), others, BLOCKS)
    assert move is None


def test_a_node_that_can_hold_nothing_stays_a_client() -> None:
    assert decide(Candidate("me", 0, 10.0), [], BLOCKS) is None


def test_a_node_never_leaves_the_only_copy() -> None:
    others = [holder("a", 0, 4)]
    assert decide(Candidate("me", 4, 10.0, Span(4, 8), LONG_S), others, BLOCKS) is None
    assert not can_leave(Span(4, 8), Span(8, 12), [holder("b", 4, 8, state="loading")], BLOCKS)
    assert can_leave(Span(4, 8), Span(8, 12), [holder("b", 4, 8)], BLOCKS)


def test_a_hole_is_filled_at_once_by_those_who_can_one_after_another() -> None:
    nodes = {"a": (0, 6), "b": (0, 6), "c": (0, 6), "d": (6, 9)}
    members = [holder(peer, *span) for peer, span in nodes.items()]
    delays = []
    for peer, span in nodes.items():
        others = [member for member in members if member.peer != peer]
        move = decide(Candidate(peer, 6, 10.0, Span(*span), settled_s=1.0), others, BLOCKS)
        if peer == "d":
            assert move is None or move.span.start == 6  # it may not leave what it alone serves
            continue
        assert move is not None
        assert 9 in move.span
        delays.append(move.after_s)
    assert sorted(delays) == [0.0, HOLE_STAGGER_S, 2 * HOLE_STAGGER_S]


def test_a_clear_gain_moves_a_settled_node_and_nothing_else_does() -> None:
    others = [holder("a", 0, 6, 50), holder("b", 6, 12, 5)]
    move = decide(Candidate("me", 6, 10.0, Span(0, 6), LONG_S), others, BLOCKS)
    assert move is not None
    assert move.span == Span(6, 12)
    assert decide(Candidate("me", 6, 10.0, Span(0, 6), STAY_S / 2), others, BLOCKS) is None
    nearly = [holder("a", 0, 6, 10), holder("b", 6, 12, 10 / GAIN * 1.01 + 9)]
    assert decide(Candidate("me", 6, 1.0, Span(0, 6), LONG_S), nearly, BLOCKS) is None


members = st.lists(
    st.tuples(
        st.integers(0, BLOCKS - 1), st.integers(1, BLOCKS), st.floats(0.1, 100), st.sampled_from(["serving", "loading"])
    ),
    max_size=8,
)


@given(members, st.integers(1, BLOCKS), st.integers(0, BLOCKS - 1), st.floats(0.1, 100))
def test_no_move_ever_breaks_coverage_or_fails_to_fit(
    drawn: list[tuple[int, int, float, str]], blocks: int, start: int, speed: float
) -> None:
    others = [
        holder(f"p{index}", at, min(at + length, BLOCKS), tokens_per_s, state)
        for index, (at, length, tokens_per_s, state) in enumerate(drawn)
    ]
    span = Span(min(start, BLOCKS - blocks), min(start, BLOCKS - blocks) + blocks)
    move = decide(Candidate("me", blocks, speed, span, LONG_S), others, BLOCKS)
    if move is None:
        return
    assert len(move.span) == blocks
    assert move.span.stop <= BLOCKS
    served = block_speeds(others, BLOCKS, frozenset({"serving"}))
    for block in span.blocks():
        assert block in move.span or served[block] > 0


def test_a_swarm_that_grows_node_by_node_is_covered_and_balanced() -> None:
    dice = random.Random(1)
    swarm: list[Announcement] = []
    for number in range(60):
        blocks, speed = dice.choice([2, 3, 4, 6, 8]), dice.uniform(5, 50)
        move = decide(Candidate(f"p{number}", blocks, speed), swarm, 40)
        assert move is not None
        swarm.append(holder(f"p{number}", move.span.start, move.span.stop, speed))
    speeds = block_speeds(swarm, 40)
    bound = sum(len(member.span) * member.decode_tokens_per_s for member in swarm if member.span) / 40
    assert min(speeds) >= 0.75 * bound


@given(st.integers(1, 6), st.integers(1, 6), st.randoms(use_true_random=False))
def test_nodes_that_just_suffice_cover_the_model_as_they_come(count: int, length: int, rng: random.Random) -> None:
    members: list[Announcement] = []
    for _ in range(count):
        peer = f"p{rng.random()}"
        move = decide(Candidate(peer, length, 10.0), members, count * length)
        assert move is not None
        members.append(holder(peer, move.span.start, move.span.stop))
    assert min(block_speeds(members, count * length)) > 0


@given(st.lists(st.integers(1, 8), min_size=2, max_size=6), st.data())
def test_nodes_shift_until_no_block_is_left_out(lengths: list[int], data: st.DataObject) -> None:
    blocks = data.draw(st.integers(max(lengths), sum(lengths)))
    spans: dict[str, Span] = {}
    for index, length in enumerate(lengths):
        start: int = data.draw(st.integers(0, blocks - length))
        spans[f"p{index}"] = Span(start, start + length)
    for _ in range(400):
        members = [holder(peer, span.start, span.stop) for peer, span in spans.items()]
        speeds = block_speeds(members, blocks)
        if min(speeds) > 0:
            return
        moves = []
        for peer, span in spans.items():
            others = [member for member in members if member.peer != peer]
            move = decide(Candidate(peer, len(span), 10.0, span, 1.0), others, blocks)
            if move is not None:
                moves.append((move.after_s, peer, move.span))
        assert moves, f"nobody moves, but blocks are left out: {spans}"
        _, peer, new = min(moves, key=lambda move: move[:2])
        others_serve = block_speeds([m for m in members if m.peer != peer], blocks)
        assert all(others_serve[block] > 0 for block in spans[peer].blocks() if block not in new), "a copy was lost"
        spans[peer] = new
    raise AssertionError(f"no end: {spans}")
