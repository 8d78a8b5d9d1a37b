"""Which span a node hosts, decided by the node itself from what members announce. Pure: no I/O, no clock, no dice.

A block is served as fast as its holders together. A newcomer takes the window that lifts the worst-served blocks
most. A node that has a place moves only for a hole (at once, one node after another by rank) or for a clear gain (after
a long stay and a wait that differs from node to node, so that not all move together), and never leaves a block that
nobody else serves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from app.records import Announcement
from app.span import Span

# Who counts as a holder of its span: it serves now, or will in a moment.
SERVES = frozenset({"serving"})
COMING = frozenset({"serving", "loading", "fetching", "joining"})

GAIN = 1.2  # a move must lift the worst-served block of both places by this factor
STAY_S = 30 * 60.0
JITTER_S = 60.0
HOLE_STAGGER_S = 2.0  # between the ranks of those who could fill a hole


@dataclass(frozen=True)
class Candidate:
    """This node as placement sees it: how many blocks fit, and how fast it runs so many."""

    peer: str
    blocks: int
    tokens_per_s: float
    span: Span | None = None
    settled_s: float = 0.0  # since it took this span


@dataclass(frozen=True)
class Move:
    """Take this span after `after_s`, if the decision is still the same then."""

    span: Span
    after_s: float
    reason: str
    code: str = "worst_served"  # of the reason, for programs


def block_speeds(members: Iterable[Announcement], n_blocks: int, states: frozenset[str] = COMING) -> list[float]:
    """Tokens per second that the holders of each block offer together; above 0 wherever there is a holder."""
    speeds = [0.0] * n_blocks
    for member in members:
        if member.span is not None and member.state in states:
            speed = max(member.decode_tokens_per_s, 1e-6)
            for block in range(member.span.start, min(member.span.stop, n_blocks)):
                speeds[block] += speed
    return speeds


def decide(me: Candidate, others: Sequence[Announcement], n_blocks: int) -> Move | None:
    """Where this node should go, or None where it should stay (or can host nothing)."""
    length = min(me.blocks, n_blocks)
    if length < 1:
        return None
    speeds = block_speeds(others, n_blocks)
    if me.span is None:
        best = best_window(speeds, length, me.tokens_per_s, me.peer)
        return Move(best, 0.0, "the blocks that are served worst")
    with_me = _added(speeds, me.span, me.tokens_per_s)
    holes = [block for block, speed in enumerate(with_me) if speed == 0]
    if holes:
        return _fill_hole(me, others, speeds, holes[0])
    # No move can lift the worst block above the average, so most nodes need not look further.
    if me.settled_s < STAY_S or GAIN * min(with_me) > sum(with_me) / n_blocks:
        return None
    best = best_window(speeds, length, me.tokens_per_s, me.peer)
    gain = min(_added(speeds, best, me.tokens_per_s)) / min(with_me)
    if gain < GAIN or not can_leave(me.span, best, others, n_blocks):
        return None
    return Move(best, JITTER_S * _chance(me.peer, str(best)), "blocks that are served much worse than mine", "gain")


def best_window(speeds: Sequence[float], length: int, speed: float, peer: str) -> Span:
    """The window whose support lifts the worst-served blocks most; nodes differ in how they break ties."""

    def merit(start: int) -> tuple[list[float], int, float]:
        span = Span(start, start + length)
        # Of equal windows, one that joins others (or the model's ends) leaves no gap too small for the next node.
        joins = (start == 0 or speeds[start - 1] > 0) + (span.stop == len(speeds) or speeds[span.stop] > 0)
        return sorted(_added(speeds, span, speed)), joins, _chance(peer, str(start))

    start = max(range(len(speeds) - length + 1), key=merit)
    return Span(start, start + length)


def can_leave(span: Span, new: Span, others: Iterable[Announcement], n_blocks: int) -> bool:
    """Whether every block that a move gives up is served by somebody else now."""
    speeds = block_speeds(others, n_blocks, SERVES)
    return all(speeds[block] > 0 for block in span.blocks() if block not in new and block < n_blocks)


def _fill_hole(me: Candidate, others: Sequence[Announcement], speeds: Sequence[float], hole: int) -> Move | None:
    """The best window over a hole that can be moved to without opening another one."""
    assert me.span is not None
    n_blocks = len(speeds)
    length = min(me.blocks, n_blocks)
    starts = range(max(0, hole - length + 1), min(hole, n_blocks - length) + 1)
    windows = [Span(start, start + length) for start in starts]
    possible = [window for window in windows if can_leave(me.span, window, others, n_blocks)]
    if not possible:
        return _make_way(me, others, hole, n_blocks)
    best = max(possible, key=lambda window: sorted(_added(speeds, window, me.tokens_per_s)))
    return Move(best, _rank(me, others, hole, n_blocks) * HOLE_STAGGER_S, f"nobody serves block {hole}", "hole")


def _make_way(me: Candidate, others: Sequence[Announcement], hole: int, n_blocks: int) -> Move | None:
    """Shift towards a hole that nobody can fill, as far as others serve what is left behind; neighbours then follow."""
    assert me.span is not None
    served = [speed > 0 for speed in block_speeds(others, n_blocks, SERVES)]
    span, towards_end = me.span, hole >= me.span.stop
    behind = span.blocks() if towards_end else reversed(span.blocks())
    spare = 0
    for block in behind:
        if not served[block]:
            break
        spare += 1
    room = hole + 1 - span.stop if towards_end else span.start - hole
    step = min(spare, room)
    if step == 0:
        return None
    step = step if towards_end else -step
    wait_s = HOLE_STAGGER_S * (1 + 2 * _chance(me.peer, str(hole)))  # of two that could shift, one goes first
    return Move(
        Span(span.start + step, span.stop + step), wait_s, f"making way: nobody can take block {hole}", "make_way"
    )


def _rank(me: Candidate, others: Sequence[Announcement], hole: int, n_blocks: int) -> int:
    """How many members are better placed to fill a hole: those in well-served places go first."""
    serving = [member for member in others if member.state in SERVES and member.span is not None]
    own = Announcement(me.peer, 0, 0, "", "serving", me.span, me.tokens_per_s)
    everybody = [*serving, own]
    speeds = block_speeds(everybody, n_blocks, SERVES)

    def eagerness(member: Announcement) -> tuple[float, float]:
        assert member.span is not None
        spare = min(speeds[block] for block in member.span.blocks() if block < n_blocks) - member.decode_tokens_per_s
        return spare, _chance(member.peer, str(hole))

    free = [
        member
        for member in serving
        if member.span is not None
        and all(speeds[block] > max(member.decode_tokens_per_s, 1e-6) for block in member.span.blocks())
    ]
    return sum(eagerness(member) > eagerness(own) for member in free)


def _added(speeds: Sequence[float], span: Span, speed: float) -> list[float]:
    speed = max(speed, 1e-6)
    return [value + speed if block in span else value for block, value in enumerate(speeds)]


def _chance(peer: str, about: str) -> float:
    """A number in [0, 1) that differs from node to node and from question to question."""
    digest = hashlib.blake2b(f"{peer}/{about}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
