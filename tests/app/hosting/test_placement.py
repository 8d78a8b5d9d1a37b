"""Placement: holes first, the worst-served next, nobody's only copy ever left, and no restlessness."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.reasons import because
from app.core.span import Span
from app.hosting.placement import (
    COMING_S,
    GAIN,
    HOLE_STAGGER_S,
    JOIN_STAGGER_TOTAL_S,
    LATEST_RANK,
    OF_HOME,
    REBALANCE_AFTER_S,
    REBALANCE_UNEVEN_AFTER_S,
    THIN_WAIT_S,
    Candidate,
    Move,
    MoveTimer,
    best_window,
    decide,
    due,
    is_wanted,
    is_within,
    regrown,
    unserved,
)
from app.swarm.coverage import coverage_of
from app.swarm.records import Announcement
from app.weights.model_weights import runs

BLOCKS = 12
LONG_S = REBALANCE_AFTER_S + 1


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


@given(
    st.lists(st.builds(holder, st.sampled_from("abcdef"), st.integers(0, 7), st.integers(8, 12), st.integers(1, 3))),
    st.integers(1, BLOCKS),
    st.sets(st.integers(0, BLOCKS - 1)),
)
def test_the_best_window_gives_the_worst_served_blocks_the_most(
    members: list[Announcement], length: int, left_out: set[int]
) -> None:
    found, me = coverage_of(members, BLOCKS), Candidate("me", length, 1.0)
    windows = [Span(start, start + length) for start in range(BLOCKS - length + 1) if start not in left_out]
    before, after = found.worth(), found.worth(found.trusted(1.0))

    def worths(window: Span) -> list[float]:
        return sorted(after[block] if block in window else before[block] for block in range(BLOCKS))

    if windows:
        assert worths(best_window(found, windows, me)) == max(map(worths, windows))


def test_a_node_that_is_still_loading_counts() -> None:
    others = [holder("a", 0, 6), holder("b", 6, 12, state="loading")]
    assert list(coverage_of(others, BLOCKS).speeds) == [10.0] * BLOCKS
    move = decide(Candidate("me", 12, 10.0, Span(0, 12)), others, BLOCKS)
    assert move is None


def test_a_node_that_can_hold_nothing_stays_a_client() -> None:
    assert decide(Candidate("me", 0, 10.0), [], BLOCKS) is None


def test_a_node_never_leaves_the_only_copy() -> None:
    others = [holder("a", 0, 4)]
    me = Candidate("me", 4, 10.0, Span(4, 8), LONG_S)
    assert decide(me, others, BLOCKS) is None
    assert decide(me, [*others, holder("b", 4, 8, state="loading")], BLOCKS) is None
    move = decide(me, [*others, holder("b", 4, 8)], BLOCKS)
    assert move is not None
    assert move.span == Span(8, 12)


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


def test_a_hole_that_others_are_about_to_fill_is_filled_if_it_lasts() -> None:
    """Each node that could waits for another time; a block whose weights nobody has moves nobody."""
    others = [*(holder(peer, 0, 6) for peer in "abc"), *(holder(peer, 6, 12, state="fetching") for peer in "de")]

    def move_after(peer: str, seconds: float, *held: Span) -> Move | None:
        lasted = dict.fromkeys(unserved(others, BLOCKS), seconds)
        return decide(Candidate(peer, 6, 10.0, Span(0, 6), 1.0, held, lasted), others, BLOCKS)

    waits = set()
    for peer in ("me", "you", "she"):
        assert move_after(peer, 5 * COMING_S) is None
        assert move_after(peer, COMING_S - 1, Span(0, 12)) is None
        move = move_after(peer, 5 * COMING_S, Span(0, 12))
        assert move is not None
        assert (move.span, move.why.code) == (Span(6, 12), "hole")
        waits.add(next(seconds for seconds in range(1000) if move_after(peer, seconds, Span(0, 12))))
    assert len(waits) == 3


def test_a_clear_gain_moves_a_settled_node_and_nothing_else_does() -> None:
    others = [holder("a", 0, 6, 15), holder("b", 0, 6, 10), holder("c", 6, 12, 10), holder("d", 6, 12, 10)]
    move = decide(Candidate("me", 6, 10.0, Span(0, 6), LONG_S), others, BLOCKS)
    assert move is not None
    assert move.span == Span(6, 12)
    assert decide(Candidate("me", 6, 10.0, Span(0, 6), REBALANCE_AFTER_S / 2), others, BLOCKS) is None
    others[1] = holder("b", 0, 6, 20 * GAIN - 15 - 0.1)
    assert decide(Candidate("me", 6, 10.0, Span(0, 6), LONG_S), others, BLOCKS) is None


def test_a_swarm_far_out_of_balance_waits_less_long() -> None:
    rich = [holder(f"r{number}", 0, 6, 10) for number in range(8)]
    poor = [holder("c", 6, 12, 10), holder("d", 6, 12, 10)]
    move = decide(Candidate("me", 6, 10.0, Span(0, 6), REBALANCE_UNEVEN_AFTER_S + 1), [*rich, *poor], BLOCKS)
    assert move is not None
    assert move.span == Span(6, 12)


def test_a_block_that_rests_on_one_holder_gets_a_second_soon() -> None:
    thick = [holder(f"t{number}", 0, 6) for number in range(3)]
    move = decide(Candidate("me", 6, 10.0, Span(0, 6), 1.0), [*thick, holder("lone", 6, 12)], BLOCKS)
    assert move is not None
    assert (move.span, move.why.code) == (Span(6, 12), "lone_holder")
    assert move.why.peers == ("lone",)
    assert THIN_WAIT_S <= move.after_s <= 30


def test_a_second_holder_is_no_reason_to_leave_another_block_to_one() -> None:
    others = [holder("a", 0, 6), holder("lone", 6, 12)]
    assert decide(Candidate("me", 6, 10.0, Span(0, 6), LONG_S), others, BLOCKS) is None


def test_a_waiting_move_comes_no_later_unless_its_reason_changes() -> None:
    gain, hole = because("gain", "-"), Move(Span(4, 6), 2.0, because("hole", "-"))
    slow, fast = Move(Span(0, 2), 60.0, gain), Move(Span(2, 4), 90.0, gain)
    waiting = due(None, slow, 100.0)
    assert waiting == MoveTimer(slow, 160.0)
    assert due(waiting, fast, 110.0) == MoveTimer(fast, 160.0)
    assert due(waiting, hole, 110.0) == MoveTimer(hole, 112.0)
    assert due(MoveTimer(hole, 112.0), slow, 111.0) == MoveTimer(slow, 171.0)
    assert due(waiting, None, 110.0) is None


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
    served = coverage_of(others, BLOCKS).serving
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
    speeds = coverage_of(swarm, 40).speeds
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
    assert min(coverage_of(members, count * length).holders) > 0


@given(st.lists(st.integers(1, 8), min_size=2, max_size=6), st.data())
def test_nodes_shift_until_no_block_is_left_out(lengths: list[int], data: st.DataObject) -> None:
    blocks = data.draw(st.integers(max(lengths), sum(lengths)))
    spans: dict[str, Span] = {}
    for index, length in enumerate(lengths):
        start: int = data.draw(st.integers(0, blocks - length))
        spans[f"p{index}"] = Span(start, start + length)
    for _ in range(400):
        members = [holder(peer, span.start, span.stop) for peer, span in spans.items()]
        if min(coverage_of(members, blocks).holders) > 0:
            return
        moves = []
        for peer, span in spans.items():
            others = [member for member in members if member.peer != peer]
            move = decide(Candidate(peer, len(span), 10.0, span, 1.0), others, blocks)
            if move is not None:
                moves.append((move.after_s, peer, move.span))
        assert moves, f"nobody moves, but blocks are left out: {spans}"
        _, peer, new = min(moves, key=lambda move: move[:2])
        others_serve = coverage_of([m for m in members if m.peer != peer], blocks).serving
        assert all(others_serve[block] > 0 for block in spans[peer].blocks() if block not in new), "a copy was lost"
        spans[peer] = new
    raise AssertionError(f"no end: {spans}")


# --- blocks on disk --------------------------------------------------------------------------------------------------


def test_of_equal_windows_a_newcomer_takes_the_one_on_its_disk() -> None:
    others = [holder(peer, 0, BLOCKS) for peer in "ab"]
    for number in range(8):
        move = decide(Candidate(f"p{number}", 4, 10.0, held=(Span(5, 9), Span(1, 3))), others, BLOCKS)
        assert move is not None
        assert move.span == Span(5, 9)


def test_a_newcomer_serves_what_is_on_its_disk_and_nobody_serves() -> None:
    me = Candidate("me", 4, 10.0, held=(Span(3, 7),))
    rest = [holder("a", 7, 12)]

    def chosen(*more: Announcement) -> Span:
        move = decide(me, [*rest, *more], BLOCKS)
        assert move is not None
        return move.span

    assert chosen() == Span(3, 7)
    assert chosen(holder("b", 0, 4)) == Span(3, 7)
    assert chosen(holder("b", 3, 7, state="fetching")) == Span(3, 7), "that can take hours"
    assert chosen(holder("b", 3, 7, state="loading")) == Span(0, 4)


@given(
    st.lists(st.tuples(st.integers(0, BLOCKS - 1), st.integers(1, 6)), min_size=1, max_size=8),
    st.randoms(use_true_random=False),
)
def test_members_that_come_back_serve_all_that_their_disks_hold(
    drawn: list[tuple[int, int]], rng: random.Random
) -> None:
    firsts = [min(at, BLOCKS - length) for at, length in drawn]
    spans = {f"p{index}": Span(at, at + drawn[index][1]) for index, at in enumerate(firsts)}
    back: list[Announcement] = []
    for peer in rng.sample(sorted(spans), len(spans)):
        move = decide(Candidate(peer, len(spans[peer]), 10.0, held=(spans[peer],)), back, BLOCKS)
        assert move is not None
        state = "loading" if move.span == spans[peer] else "fetching"
        back.append(holder(peer, move.span.start, move.span.stop, state=state))
    served = {block for member in back if member.state == "loading" and member.span for block in member.span.blocks()}
    assert served == {block for span in spans.values() for block in span.blocks()}


THREE = [holder("a", 0, 3), holder("c", 6, 12)]  # with the node on 3:9, that alone serves 3:6


def sole(*held: Span, fetched: Span | None = None) -> Candidate:
    return Candidate("me", 6, 10.0, Span(3, 9), LONG_S, (Span(3, 9), *held), is_needed=True, fetched=fetched)


def test_a_sole_holder_downloads_a_hole_before_it_moves() -> None:
    others = THREE[1:]
    move = decide(sole(), others, BLOCKS)
    assert move is not None
    assert (move.span, move.why.code, move.fetch_first) == (Span(0, 6), "hole", True)
    assert is_wanted(move, sole(), others, BLOCKS)
    assert is_wanted(move, replace(sole(), held=(Span(2, 9),)), others, BLOCKS)
    assert not is_wanted(move, sole(), THREE, BLOCKS), "somebody has filled it meanwhile"
    assert not is_wanted(move, replace(sole(), is_needed=False), others, BLOCKS), "it need not wait for the download"
    assert not is_wanted(move, replace(sole(), held=(Span(0, 9),)), others, BLOCKS)
    again = decide(replace(sole(), held=(Span(0, 9),)), others, BLOCKS)
    assert again is not None
    assert (again.span, again.fetch_first) == (Span(0, 6), False)


def test_a_node_that_is_not_needed_moves_to_a_hole_at_once() -> None:
    others = [*THREE[1:], holder("b", 3, 9)]
    move = decide(replace(sole(), is_needed=False), others, BLOCKS)
    assert move is not None
    assert (move.span, move.fetch_first) == (Span(0, 6), False)


def test_a_sole_holder_fills_a_hole_from_its_disk_at_once() -> None:
    others = [holder("a", 0, 2), holder("b", 0, 1), holder("c", 6, 12)]  # nobody serves block 2
    move = decide(replace(sole(), held=(Span(2, 9),)), others, BLOCKS)
    assert move is not None
    assert (move.span, move.fetch_first) == (Span(2, 8), False)


def test_a_sole_holder_helps_another_once_all_of_that_is_downloaded() -> None:
    others = [*THREE, holder("d", 6, 12)]
    partly, wholly = (Span(2, 9),), (Span(0, 9),)
    for held, fetched in (((Span(3, 9),), None), (partly, None), (partly, Span(0, 6))):
        move = decide(replace(sole(), held=held, fetched=fetched), others, BLOCKS)
        assert move is not None
        assert (move.span, move.why.code, move.fetch_first) == (Span(0, 6), "lone_holder", True)
    move = decide(replace(sole(), held=wholly), others, BLOCKS)
    assert move is not None
    assert (move.span, move.fetch_first) == (Span(0, 6), False)


def test_a_download_to_help_another_holder_stops_for_a_hole() -> None:
    others = [*THREE, holder("d", 6, 12)]
    move = decide(sole(), others, BLOCKS)
    assert move is not None
    assert is_wanted(move, sole(), others, BLOCKS)
    assert is_wanted(replace(move, span=Span(1, 7)), sole(), others, BLOCKS), "it is as good as begun"
    coming = [holder("a", 0, 3, state="fetching"), *others[1:], holder("e", 1, 2)]
    lasted = replace(sole(Span(0, 1)), unserved_s={0: 5 * COMING_S, 3: 1.0})
    now = decide(lasted, coming, BLOCKS)
    assert now is not None
    assert (now.why.code, now.fetch_first) == ("hole", True)
    assert not is_wanted(move, lasted, coming, BLOCKS)


def test_what_was_downloaded_for_a_move_is_used_although_another_window_is_better_by_now() -> None:
    others = [*THREE, holder("d", 6, 12)]
    move = decide(sole(Span(1, 7), fetched=Span(1, 7)), others, BLOCKS)
    assert move is not None
    assert (move.span, move.fetch_first) == (Span(1, 7), False)


def test_a_sole_holder_takes_blocks_back_from_its_disk() -> None:
    others = [*THREE, holder("d", 6, 12)]
    assert regrown(replace(sole(), span=Span(3, 6)), others, BLOCKS) == Span(3, 9)
    assert regrown(replace(sole(), span=Span(3, 6), is_needed=False), others, BLOCKS) == Span(0, 6)


@given(st.lists(st.integers(1, 8), min_size=2, max_size=6), st.data())
def test_sole_holders_come_to_rest_and_never_leave_for_a_download(lengths: list[int], data: st.DataObject) -> None:
    blocks = data.draw(st.integers(max(lengths), sum(lengths)))
    starts: list[int] = [data.draw(st.integers(0, blocks - length)) for length in lengths]
    spans = {f"p{i}": Span(start, start + lengths[i]) for i, start in enumerate(starts)}
    disks = {peer: set(span.blocks()) for peer, span in spans.items()}
    for _ in range(400):
        members = [holder(peer, span.start, span.stop) for peer, span in spans.items()]
        moves = []
        for peer, span in spans.items():
            others = [member for member in members if member.peer != peer]
            needed = any(block in span for block in unserved(others, blocks))
            me = Candidate(peer, len(span), 10.0, span, LONG_S, runs(sorted(disks[peer])), is_needed=needed)
            move = decide(me, others, blocks)
            if move is not None:
                assert move.fetch_first or not needed or is_within(move.span, me.held)
                moves.append((move.after_s, peer, move))
        if not moves:
            assert min(coverage_of(members, blocks).holders) > 0
            return
        _, peer, move = min(moves, key=lambda each: each[:2])
        disks[peer] |= set(move.span.blocks())
        if not move.fetch_first:
            spans[peer] = move.span
    raise AssertionError(f"no rest: {spans}")


# --- odd swarms ------------------------------------------------------------------------------------------------------


NO_HOMES: Mapping[str, str] = {}


def settle(
    fits: dict[str, int],
    spans: dict[str, Span],
    n_blocks: int,
    rounds: int = 400,
    liars: Sequence[Announcement] = (),
    homes: Mapping[str, str] = NO_HOMES,
) -> int:
    """Let the one whose turn comes first move, again and again, until nobody wants to; how many moves that took."""
    for count in range(rounds):
        members = [*liars, *(holder(peer, span.start, span.stop) for peer, span in spans.items())]
        moves = []
        for peer, span in spans.items():
            others = [member for member in members if member.peer != peer]
            move = decide(Candidate(peer, fits[peer], 10.0, span, LONG_S, homes=homes), others, n_blocks)
            if move is not None:
                moves.append((move.after_s, peer, move.span))
        if not moves:
            return count
        _, peer, spans[peer] = min(moves, key=lambda move: move[:2])
    raise AssertionError(f"no rest: {spans}")


def test_equal_nodes_that_come_at_once_choose_one_after_the_other() -> None:
    peers = [f"p{number}" for number in range(24)]
    arriving = [Announcement(peer, 1, 0, "", "joining") for peer in peers]
    waits = {}
    for peer in peers:
        move = decide(Candidate(peer, 4, 0.0), [other for other in arriving if other.peer != peer], 16)
        assert move is not None
        waits[peer] = move.after_s
    assert len(set(waits.values())) == len(peers)
    assert min(waits.values()) == 0
    assert max(waits.values()) <= JOIN_STAGGER_TOTAL_S
    placed: list[Announcement] = []
    for peer in sorted(peers, key=waits.__getitem__):
        move = decide(Candidate(peer, 4, 0.0), placed, 16)
        assert move is not None
        placed.append(holder(peer, move.span.start, move.span.stop, 0.0, "loading"))
    assert min(coverage_of(placed, 16).holders) >= 5  # 6 each would be even


def test_one_giant_and_many_tiny_nodes_rest_in_balance() -> None:
    fits = {"giant": 40, **{f"p{number}": 2 for number in range(40)}}
    spans: dict[str, Span] = {}
    for peer, blocks in fits.items():
        placed = [holder(other, span.start, span.stop) for other, span in spans.items()]
        move = decide(Candidate(peer, blocks, 10.0), placed, 40)
        assert move is not None
        spans[peer] = move.span
    assert settle(fits, spans, 40) <= 2
    del spans["giant"]
    assert min(coverage_of([holder(peer, span.start, span.stop) for peer, span in spans.items()], 40).holders) >= 1


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.integers(0, 6), st.data())
def test_nodes_that_cannot_cover_the_model_come_to_rest(lengths: list[int], missing: int, data: st.DataObject) -> None:
    n_blocks = sum(lengths) + missing
    fits = {f"p{index}": length for index, length in enumerate(lengths)}
    spans = {}
    for peer, length in fits.items():
        start: int = data.draw(st.integers(0, n_blocks - length))
        spans[peer] = Span(start, start + length)
    settle(fits, spans, n_blocks)
    held = coverage_of([holder(peer, span.start, span.stop) for peer, span in spans.items()], n_blocks).holders
    assert min(held) > 0 or sum(count == 0 for count in held) >= missing


@pytest.mark.parametrize("span", [Span(0, 12), Span(4, 6), Span(0, 1)])
@pytest.mark.parametrize("speed", [float("inf"), 1e30, 1e6])
def test_a_liar_cannot_drain_a_region(span: Span, speed: float) -> None:
    liar = holder("liar", span.start, span.stop, speed)
    fits = {f"p{number}": 3 for number in range(16)}
    spans = {peer: Span(3 * (number % 4), 3 * (number % 4) + 3) for number, peer in enumerate(fits)}
    settle(fits, spans, BLOCKS, liars=[liar])
    honest = coverage_of([holder(peer, place.start, place.stop) for peer, place in spans.items()], BLOCKS)
    assert min(honest.holders) >= 2
    assert any(place.start < span.stop and span.start < place.stop for place in spans.values())


@pytest.mark.parametrize("speed", [0.5, 10.0, 1e6])
def test_a_crowd_of_one_home_cannot_drain_a_region(speed: float) -> None:
    """They are one voice: else they would make the real hosts there seem spare, and send them away to the last."""
    liars = [holder(f"liar{number}", 6, 12, speed) for number in range(40)]
    fits = {f"p{number}": 6 for number in range(12)}
    spans = {peer: Span(6 * (number % 2), 6 * (number % 2) + 6) for number, peer in enumerate(fits)}
    settle(fits, spans, BLOCKS, liars=liars, homes={liar.peer: "one home" for liar in liars})
    honest = coverage_of([holder(peer, place.start, place.stop) for peer, place in spans.items()], BLOCKS)
    assert min(honest.holders) >= 5


@pytest.mark.parametrize(("homes", "ahead"), [(1, OF_HOME), (3, 3 * OF_HOME), (400, 2 * LATEST_RANK)])
def test_a_crowd_that_could_fill_a_hole_and_does_not_keeps_nobody_waiting_for_long(homes: int, ahead: int) -> None:
    crowd = [holder(f"liar{number}", 0, 1, 0.01) for number in range(400)]
    others = [holder("a", 0, 6), holder("b", 0, 6), *crowd]
    home_of = {liar.peer: f"home {number % homes}" for number, liar in enumerate(crowd)}
    move = decide(Candidate("me", 6, 10.0, Span(0, 6), 1.0, homes=home_of), others, BLOCKS)
    assert move is not None
    assert 6 in move.span
    assert move.after_s <= (ahead + 2) * HOLE_STAGGER_S


def test_where_many_do_not_move_those_behind_them_do_not_all_move_at_once() -> None:
    """Members whose blocks are fixed stay, and are first in the queue."""
    fixed = [holder(f"fixed{number}", 0, 2) for number in range(LATEST_RANK)]
    rest = [holder(f"other{number}", 2 * (number % 5), 2 * (number % 5) + 2) for number in range(20)]
    waits = []
    for one in rest:
        others = [*fixed, *(other for other in rest if other is not one)]
        move = decide(Candidate(one.peer, 2, 10.0, one.span, 1.0), others, BLOCKS)
        assert move is not None
        waits.append(move.after_s)
    assert max(waits) <= 2 * LATEST_RANK * HOLE_STAGGER_S
    assert max(Counter(wait // 2 for wait in waits).values()) <= 4


def test_nodes_that_can_only_shift_to_a_hole_wait_for_each_other_too() -> None:
    """None of them has blocks that all have a second host; each took itself for the first in the queue."""
    members = [holder("a", 0, 4), holder("b", 1, 5), holder("c", 6, 10), holder("d", 7, 11)]
    waits = []
    for one in members[1:3]:
        others = [other for other in members if other is not one]
        move = decide(Candidate(one.peer, 4, 10.0, one.span, 1.0), others, 11)
        assert move is not None
        assert 5 in move.span
        waits.append(move.after_s)
    assert sorted(waits) == [0.0, HOLE_STAGGER_S]


def test_nodes_of_two_homes_see_one_queue() -> None:
    members = [holder(f"{number}", 6 * (number % 3), 6 * (number % 3) + 6) for number in range(12)]
    homes = {member.peer: f"home {int(member.peer) // 6}" for member in members}
    waits = []
    for one in members:
        others = [other for other in members if other is not one]
        move = decide(Candidate(one.peer, 6, 10.0, one.span, 1.0, homes=homes), others, 24)
        assert move is not None
        waits.append(move.after_s)
    assert sorted(waits)[:OF_HOME] == [number * HOLE_STAGGER_S for number in range(OF_HOME)]


def test_two_machines_of_one_home_are_copies_enough_of_each_others_blocks() -> None:
    """A home that hosts a block twice needs no third host, but nobody counts on it alone to leave a block."""
    others = [holder("a", 0, 6), holder("b", 0, 6), holder("c", 6, 12), holder("d", 6, 12)]
    homes = {"a": "one home", "b": "one home"}
    settled = Candidate("me", 6, 10.0, Span(6, 12), REBALANCE_AFTER_S / 2, homes=homes)
    assert decide(settled, others, BLOCKS) is None
    move = decide(settled, [others[0], *others[2:]], BLOCKS)
    assert move is not None
    assert (move.span, move.why.code) == (Span(0, 6), "lone_holder")
    assert decide(Candidate("me", 6, 10.0, Span(0, 6), LONG_S, homes=homes), others[:3], BLOCKS) is None


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=20))
def test_a_flapping_node_moves_nobody_where_all_is_held_twice(flaps: list[tuple[int, bool]]) -> None:
    steady = {f"s{number}": Span(4 * (number % 3), 4 * (number % 3) + 4) for number in range(9)}
    for number, present in flaps:
        here = [holder(peer, span.start, span.stop) for peer, span in steady.items()]
        here += [holder("flapping", number, number + 4)] * present
        for peer, span in steady.items():
            others = [member for member in here if member.peer != peer]
            move = decide(Candidate(peer, 4, 10.0, span, REBALANCE_AFTER_S / 2), others, BLOCKS)
            assert move is None
