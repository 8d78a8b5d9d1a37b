"""Which span a node hosts, decided by the node itself from what members announce. Pure: no I/O, no clock, no dice.

A newcomer takes the window that lifts the worst-served blocks most; of several at once, one chooses after the other. A
node that has a place leaves it for three reasons: a block that nobody serves (at once), a block that rests on one
holder while others are held more often than they need to be (soon), and blocks that are served much worse than its own
(after a long stay). Of those who could go, one goes after the other, in an order that all of them work out alike. No
move leaves a block that nobody else serves, and only a hole is a reason to leave one to a single holder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from app.core.reasons import Reason, because
from app.core.span import Span
from app.swarm.coverage import COMING, Coverage, survey
from app.swarm.records import Announcement

GAIN = 1.15  # how much better served the blocks left behind must be, even without this node, than those it joins
STAY_S = 30 * 60.0
UNEVEN = 2.0  # where the weakest block is so many times below the average, a short stay is enough
SHORT_STAY_S = 3 * 60.0
JITTER_S = 120.0
HOLE_STAGGER_S = 2.0  # between the ranks of those who could fill a hole: the time that news needs
THIN_WAIT_S = 5.0  # a node that restarts is back by then
THIN_STAGGER_S = 4.0
CHOICE_S = 0.6  # between two newcomers, unless there are many
CHOICES_S = 20.0  # for all newcomers together


@dataclass(frozen=True)
class Candidate:
    """This node as placement sees it: how many blocks fit, and how fast it runs so many."""

    peer: str
    blocks: int
    tokens_per_s: float  # 0: not measured yet
    span: Span | None = None
    settled_s: float = 0.0  # since it took this span


@dataclass(frozen=True)
class Move:
    """Take this span after `after_s`, if there is still reason to move then."""

    span: Span
    after_s: float
    why: Reason


@dataclass(frozen=True)
class MoveTimer:
    """A move that waits for its time."""

    move: Move
    at: float


def due(waiting: MoveTimer | None, move: Move | None, now: float) -> MoveTimer | None:
    """What a new decision makes of the move that waits: without reason none; for the same reason, it comes no later."""
    if move is None:
        return None
    at = now + move.after_s
    if waiting is not None and waiting.move.why.code == move.why.code:
        at = min(at, waiting.at)
    return MoveTimer(move, at)


def decide(me: Candidate, others: Sequence[Announcement], n_blocks: int) -> Move | None:
    """Where this node should go, or None where it should stay (or can host nothing)."""
    length = min(me.blocks, n_blocks)
    if length < 1:
        return None
    found = survey(others, n_blocks, me.tokens_per_s)
    if me.span is None:
        best = best_window(found, _windows(length, n_blocks), me)
        return Move(best, _turn(me.peer, others), because("worst_served", "the blocks that are served worst"))
    with_me = found.plus(me.span, me.tokens_per_s)
    if min(with_me.holders) == 0:
        return _fill_hole(me, others, found, with_me.holders.index(0))
    if min(with_me.holders) == 1:
        move = _thicken(me, others, found, with_me)
        if move is not None:
            return move
    return _even_out(me, others, found, with_me)


def best_window(found: Coverage, windows: Iterable[Span], me: Candidate) -> Span:
    """The window whose support lifts the worst-served blocks most; nodes differ in how they break ties."""
    speeds, n_blocks = found.speeds, len(found.speeds)
    before, after = found.worth(), found.worth(found.trusted(me.tokens_per_s))

    def merit(span: Span) -> tuple[list[float], int, float]:
        lifted = sorted(before[: span.start] + after[span.start : span.stop] + before[span.stop :])
        # Of equal windows, one that joins others (or the model's ends) leaves no gap too small for the next node.
        joins = (span.start == 0 or speeds[span.start - 1] > 0) + (span.stop == n_blocks or speeds[span.stop] > 0)
        return lifted, joins, _chance(me.peer, str(span.start))

    return max(windows, key=merit)


def _windows(length: int, n_blocks: int, over: int | None = None) -> list[Span]:
    """Every place of so many blocks, or those with a given block in them."""
    first = 0 if over is None else max(0, over - length + 1)
    last = n_blocks - length if over is None else min(over, n_blocks - length)
    return [Span(start, start + length) for start in range(first, last + 1)]


def _turn(peer: str, others: Sequence[Announcement]) -> float:
    """Seconds that a newcomer lets others choose before it: all at once they would choose the same."""
    rivals = [other.peer for other in others if other.state == "joining" and other.span is None]
    before_me = sum(_chance(rival, "turn") < _chance(peer, "turn") for rival in rivals)
    return before_me * min(CHOICE_S, CHOICES_S / (1 + len(rivals)))


# --- a block that nobody serves --------------------------------------------------------------------------------------


def _fill_hole(me: Candidate, others: Sequence[Announcement], found: Coverage, hole: int) -> Move | None:
    """The best window over a hole that can be moved to without opening another one."""
    n_blocks = len(found.speeds)
    count = _counter([serving == 0 for serving in found.serving])
    windows = _windows(min(me.blocks, n_blocks), n_blocks, hole)
    possible = [window for window in windows if _left(me, window, count) == 0]
    if not possible:
        return _make_way(me, found, hole)
    wait_s = HOLE_STAGGER_S * _rank(me, others, found, hole, spare=1)
    return Move(best_window(found, possible, me), wait_s, because("hole", f"nobody serves block {hole}"))


def _make_way(me: Candidate, found: Coverage, hole: int) -> Move | None:
    """Shift towards a hole that nobody can fill, as far as others serve what is left behind; neighbours then follow."""
    assert me.span is not None
    span, towards_end = me.span, hole >= me.span.stop
    spare = 0
    for block in span.blocks() if towards_end else reversed(span.blocks()):
        if not found.serving[block]:
            break
        spare += 1
    step = min(spare, hole + 1 - span.stop if towards_end else span.start - hole)
    if step == 0:
        return None
    step = step if towards_end else -step
    wait_s = HOLE_STAGGER_S * (1 + 2 * _chance(me.peer, str(hole)))  # of two that could shift, one goes first
    shifted = Span(span.start + step, span.stop + step)
    return Move(shifted, wait_s, because("make_way", f"making way: nobody can take block {hole}"))


# --- a block that rests on one holder --------------------------------------------------------------------------------


def _thicken(me: Candidate, others: Sequence[Announcement], found: Coverage, with_me: Coverage) -> Move | None:
    """A window after whose support fewer blocks rest on one holder than now."""
    n_blocks = len(found.speeds)
    alone, pairs = ([held == number for held in with_me.holders] for number in (1, 2))
    stuck = [alone[block] or found.serving[block] == 0 for block in range(n_blocks)]
    count_alone, count_pairs, count_stuck = _counter(alone), _counter(pairs), _counter(stuck)

    def cured(window: Span) -> int:
        return _joined(me, window, count_alone) - _left(me, window, count_pairs)

    windows = [w for w in _windows(min(me.blocks, n_blocks), n_blocks) if _left(me, w, count_stuck) == 0]
    most = max(map(cured, windows), default=0)
    if most < 1:
        return None
    best = best_window(found, [window for window in windows if cured(window) == most], me)
    block = next(block for block in best.blocks() if alone[block])
    wait_s = THIN_WAIT_S + THIN_STAGGER_S * _rank(me, others, found, block, spare=2)
    why = because("lone_holder", f"only one node serves block {block}", *_holders(others, block))
    return Move(best, wait_s, why)


# --- blocks that are served worse than others ------------------------------------------------------------------------


def _even_out(me: Candidate, others: Sequence[Announcement], found: Coverage, with_me: Coverage) -> Move | None:
    """A window over the weakest block, if even without this node its own blocks are served clearly better."""
    assert me.span is not None
    speeds, n_blocks = with_me.speeds, len(with_me.speeds)
    weakest, average = min(speeds), sum(speeds) / n_blocks
    stay_s = SHORT_STAY_S if UNEVEN * weakest < average else STAY_S
    block = speeds.index(weakest)
    if me.settled_s < stay_s or GAIN * weakest > average or block in me.span:
        return None
    needed = [
        found.speeds[b] < GAIN * weakest or found.holders[b] < 2 or found.serving[b] == 0 for b in range(n_blocks)
    ]
    count = _counter(needed)
    windows = _windows(min(me.blocks, n_blocks), n_blocks, block)
    possible = [window for window in windows if _left(me, window, count) == 0]
    if not possible:
        return None
    wait_s = JITTER_S * _chance(me.peer, "even")
    why = because("gain", f"block {block} is served much worse than mine", *_holders(others, block))
    return Move(best_window(found, possible, me), wait_s, why)


# --- counting and turns ----------------------------------------------------------------------------------------------

Count = Callable[[int, int], int]


def _counter(marked: Sequence[bool]) -> Count:
    """How many of the blocks from one to another are marked."""
    sums = [0, *accumulate(marked)]
    return lambda start, stop: sums[stop] - sums[start] if start < stop else 0


def _left(me: Candidate, window: Span, count: Count) -> int:
    """How many marked blocks a move to `window` gives up."""
    assert me.span is not None
    return count(me.span.start, me.span.stop) - _common(me.span, window, count)


def _joined(me: Candidate, window: Span, count: Count) -> int:
    """How many marked blocks it adds."""
    assert me.span is not None
    return count(window.start, window.stop) - _common(me.span, window, count)


def _common(a: Span, b: Span, count: Count) -> int:
    return count(max(a.start, b.start), min(a.stop, b.stop))


def _rank(me: Candidate, others: Sequence[Announcement], found: Coverage, block: int, *, spare: int) -> int:
    """How many members should go first: of those who leave `spare` others behind, the best served place's."""
    assert me.span is not None
    own = Announcement(me.peer, 0, 0, "", "serving", me.span, me.tokens_per_s)
    everybody = found.plus(me.span, me.tokens_per_s)
    n_blocks = len(found.speeds)

    def eagerness(member: Announcement) -> tuple[bool, float, float]:
        assert member.span is not None
        place = slice(member.span.start, min(member.span.stop, n_blocks))
        free = min(everybody.serving[place]) > spare
        left = min(everybody.speeds[place]) - everybody.trusted(member.decode_tokens_per_s)
        return free, left, _chance(member.peer, str(block))

    mine = eagerness(own)
    able = (m for m in others if m.serves and m.span is not None and m.span.start < n_blocks)
    return sum(theirs > mine for theirs in map(eagerness, able) if theirs[0])


def _holders(others: Iterable[Announcement], block: int) -> list[str]:
    """Who else holds a block, or will in a moment."""
    spans = ((other.peer, other.growing or other.span) for other in others if other.state in COMING)
    return [peer for peer, span in spans if span is not None and block in span]


def _chance(peer: str, about: str) -> float:
    """A number in [0, 1) that differs from node to node and from question to question."""
    digest = hashlib.blake2b(f"{peer}/{about}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
