"""Decides which span this node hosts, from the members' announcements. Pure: no I/O, no clock, no random numbers.

A newcomer takes a window on its disk that nobody serves, or else the one that most improves the worst-served blocks;
simultaneous newcomers choose in turn. A node that hosts a span moves for three reasons: a hole, that is a block that no
node serves (at once, but after minutes if others are about to); a block with a single holder while others have spare
ones (after seconds); and blocks served much worse than its own (after minutes). Nodes that could make the same move
wait by rank, which each of them computes alike from the announcements. No move gives up a block that no other node
serves, and only a hole justifies leaving a block to a single home. A move interrupts all blocks of a node, so one
that serves a block alone moves only to blocks on its disk, and downloads them before.

The members of one home count as one, since one machine can claim to be many: else these could send the real hosts of a
block away. Only a block with two members of one home is not called a lone one: where a swarm has few homes, nodes would
go round in circles for it. In the queue of those that could make a move, members count one by one, so that all nodes
see the same queue, and no home has more than `OF_HOME` places.

`app.swarm.coverage` sums the announcements up; `app.hosting.block_host` waits and moves.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from heapq import heappop, heappush
from itertools import accumulate, chain

from app.core.reasons import Reason, because
from app.core.span import Span
from app.swarm.coverage import COMING, Coverage, coverage_of
from app.swarm.records import Announcement

GAIN = 1.15  # blocks given up must be served this many times better, without this node, than the weakest block
REBALANCE_AFTER_S = 30 * 60.0  # shortest time on a span before moving to worse-served blocks
UNEVEN = 2.0  # if the weakest block is this many times below the average, the shorter time counts
REBALANCE_UNEVEN_AFTER_S = 3 * 60.0
JITTER_S = 120.0  # spreads such moves of different nodes
HOLE_STAGGER_S = 2.0  # per rank of those that could fill a hole: time for an announcement to spread
THIN_WAIT_S = 5.0  # before helping a single holder: a second one that restarts is back by then
THIN_STAGGER_S = 4.0  # per rank of those that could help
COMING_S = 120.0  # at least, and up to five times as long, those have that say they are about to fill a hole
HOLES = frozenset({"hole", "make_way"})  # codes of moves for a block that no node serves
LATEST_RANK = 30  # nobody waits for many more than these: members that could move need not exist, or need not do so
OF_HOME = 4  # of them, since one machine can claim to be many
JOIN_STAGGER_S = 0.6  # between two newcomers' choices, less if there are many
JOIN_STAGGER_TOTAL_S = 20.0  # for all newcomers together


@dataclass(frozen=True)
class Candidate:
    """This node as input of a decision."""

    peer: str
    blocks: int  # that fit
    tokens_per_s: float  # 0: not measured yet
    span: Span | None = None
    settled_s: float = 0.0  # since it took this span
    held: tuple[Span, ...] = ()  # blocks whose weights are on its disk, in spans with gaps between them
    unserved_s: Mapping[int, float] = field(default_factory=dict)  # blocks that no other node serves -> for how long
    is_needed: bool = False  # it serves some of these, or is loading them from disk
    fetched: Span | None = None  # blocks that it has downloaded for a move
    only: tuple[Span, ...] | None = None  # it moves only within these; None: anywhere
    homes: Mapping[str, str] = field(default_factory=dict)  # of other members; one that is not in it is a home itself

    def place_behind(self, peers: Iterable[str]) -> float:
        """Return the place in a queue behind these peers, of which no home counts for more than `OF_HOME`.

        Far behind, nodes are spread by lot: they would all come at once if those before them do nothing.
        """
        homes = Counter(self.homes.get(peer, peer) for peer in peers)
        place = sum(min(count, OF_HOME) for count in homes.values())
        return place if place < LATEST_RANK else LATEST_RANK * (1 + _hash_fraction(self.peer, "place"))


def is_within(span: Span, spans: Iterable[Span]) -> bool:
    """True if one of these spans has all blocks of `span`."""
    return any(one.covers(span) for one in spans)


@dataclass(frozen=True)
class Move:
    """Host `span` after `after_s` seconds, if the reason still holds then."""

    span: Span
    after_s: float
    why: Reason
    fetch_first: bool = False  # download it while the present blocks are served, then decide again


@dataclass(frozen=True)
class MoveTimer:
    """A move that is due at time `at` of the caller's clock, in seconds."""

    move: Move
    at: float


def due(waiting: MoveTimer | None, move: Move | None, now: float) -> MoveTimer | None:
    """Return the timer after a new decision: None without a move; the earlier time if the reason is the same."""
    if move is None:
        return None
    at = now + move.after_s
    if waiting is not None and waiting.move.why.code == move.why.code:
        at = min(at, waiting.at)
    return MoveTimer(move, at)


def decide(me: Candidate, others: Sequence[Announcement], n_blocks: int) -> Move | None:
    """Return the move that this node should make, or None if it should stay or can host nothing."""
    return decide_by(coverage_of(others, n_blocks, me.tokens_per_s, me.homes), me, others)


def decide_by(found: Coverage, me: Candidate, others: Sequence[Announcement]) -> Move | None:
    """Decide like `decide`, from the coverage by the other members, with this node's own speed in the median."""
    move = _choose(found, me, others)
    if move is None or not me.is_needed or is_within(move.span, me.held):
        return move
    # A hole is filled from the disk at once, if only in part; for the other reasons one whole move is better than two.
    fetched = (me.fetched,) if me.fetched is not None and is_within(me.fetched, me.held) else ()
    at_once = _choose(found, replace(me, only=me.held if move.why.code in HOLES else fetched), others)
    is_same = at_once is not None and at_once.why.code == move.why.code
    return at_once if is_same else replace(move, fetch_first=True)


def is_wanted(move: Move, me: Candidate, others: Sequence[Announcement], n_blocks: int) -> bool:
    """True if this node should go on with the download for a move: its reason lasts, and nothing on disk will do."""
    found = coverage_of(others, n_blocks, me.tokens_per_s, me.homes)
    now = decide_by(found, me, others)
    if now is None or not now.fetch_first or now.why.code != move.why.code:
        return False
    return now.span == move.span or _choose(found, replace(me, only=(move.span,)), others) is not None


def _choose(found: Coverage, me: Candidate, others: Sequence[Announcement]) -> Move | None:
    n_blocks = len(found.speeds)
    length = min(me.blocks, n_blocks)
    if length < 1:
        return None
    if me.span is None:
        best = best_window(found, _newcomers_windows(me, others, n_blocks), me)
        words = "the blocks with the fewest hosts" if any(found.holders) else "chosen when nobody else hosted any block"
        return Move(best, _join_delay_s(me.peer, others), because("worst_served", words))
    with_me = found.plus(me.span, me.tokens_per_s)
    if min(with_me.holders) == 0:
        return _fill_hole(me, others, found, with_me.holders.index(0))
    move = _fill_late_hole(me, others, n_blocks)
    if move is None and min(with_me.holders) == 1:
        move = _thicken(me, others, found, with_me)
    return move or _even_out(me, others, found, with_me)


def regrown(me: Candidate, others: Sequence[Announcement], n_blocks: int) -> Span:
    """Return the span of `me.blocks` blocks around the present one that helps the worst-served blocks most.

    A node that is needed takes one on its disk, if there is any.
    """
    assert me.span is not None
    found = coverage_of(others, n_blocks, me.tokens_per_s, me.homes)
    windows = [window for window in _windows(me, n_blocks, me.span.start) if window.stop >= me.span.stop]
    on_disk = [window for window in windows if me.is_needed and is_within(window, me.held)]
    return best_window(found, on_disk or windows, me)


def best_window(found: Coverage, windows: Iterable[Span], me: Candidate) -> Span:
    """Return the window where this node most improves the worst-served blocks.

    That is the one whose worths of all blocks, sorted, are the greatest list. Two such lists differ first at the lowest
    worth that one of them has more often, so only the differences to the best one so far are kept: a model may have
    thousands of blocks, and windows. Among equal windows it is the one of which most is on disk, then one by the hash
    of the peer id.
    """
    speeds, n_blocks = found.speeds, len(found.speeds)
    before, after = found.worth(), found.worth(found.trusted(me.tokens_per_s))
    on_disk = _counter([held > 0 for held in _counts(me.held, n_blocks)])

    def preference(span: Span) -> tuple[int, int, float]:
        # Of equal windows, prefer one next to served blocks or the model's ends: it leaves no gap too small for others.
        joins = (span.start == 0 or speeds[span.start - 1] > 0) + (span.stop == n_blocks or speeds[span.stop] > 0)
        return joins, on_disk(span.start, span.stop), _hash_fraction(me.peer, str(span.start))

    more: Counter[float] = Counter()  # worth -> blocks that have it with the present window, beyond those with the best
    lowest: list[float] = []  # a heap of these worths

    def change(blocks: Iterable[int], old: Sequence[float], new: Sequence[float]) -> None:
        for block in blocks:
            for worth, by in ((old[block], -1), (new[block], 1)):
                more[worth] += by
                heappush(lowest, worth)

    remaining = iter(windows)
    best = present = next(remaining)
    for window in remaining:
        change(_besides(window, present), before, after)
        change(_besides(present, window), after, before)
        present = window
        while lowest and not more[lowest[0]]:
            heappop(lowest)
        if more[lowest[0]] < 0 if lowest else preference(window) > preference(best):
            best = window
            more.clear()
            lowest.clear()
    return best


def _besides(span: Span, other: Span) -> Iterable[int]:
    """Return the blocks of a span that another one does not have."""
    return chain(range(span.start, min(span.stop, other.start)), range(max(span.start, other.stop), span.stop))


def _newcomers_windows(me: Candidate, others: Sequence[Announcement], n_blocks: int) -> list[Span]:
    """List the windows on disk with the most blocks that nobody serves or loads; all windows if there are none.

    So members that come back after an outage serve at once what their disks hold.
    """
    windows = _windows(me, n_blocks)
    states = COMING - {"fetching"}
    coming = [other.span for other in others if other.state in states and other.span is not None]
    count = _counter([not served for served in _counts(coming, n_blocks)])
    dark = {window: count(window.start, window.stop) for window in windows if is_within(window, me.held)}
    most = max(dark.values(), default=0)
    return [window for window in windows if dark.get(window) == most] if most else windows


def _windows(me: Candidate, n_blocks: int, over: int | None = None) -> list[Span]:
    """List the spans that this node could host, or those that contain block `over`."""
    length = min(me.blocks, n_blocks)
    first = 0 if over is None else max(0, over - length + 1)
    last = n_blocks - length if over is None else min(over, n_blocks - length)
    windows = [Span(start, start + length) for start in range(first, last + 1)]
    return windows if me.only is None else [window for window in windows if is_within(window, me.only)]


def _join_delay_s(peer: str, others: Sequence[Announcement]) -> float:
    """Seconds before a newcomer chooses, by its place among joining peers; at once, all would pick the same span."""
    rivals = [other.peer for other in others if other.state == "joining" and other.span is None]
    mine = _turn(peer)
    before_me = sum(turn < mine for turn in map(_turn, rivals))
    return before_me * min(JOIN_STAGGER_S, JOIN_STAGGER_TOTAL_S / (1 + len(rivals)))


# --- a block that no node serves --------------------------------------------------------------------------------------


def _fill_hole(me: Candidate, others: Sequence[Announcement], found: Coverage, hole: int) -> Move | None:
    """Move to the best window over a hole that opens no other hole; if there is none, shift towards it."""
    n_blocks = len(found.speeds)
    count = _counter([serving == 0 for serving in found.serving])
    windows = _windows(me, n_blocks, hole)
    possible = [window for window in windows if _given_up(me, window, count) == 0]
    if not possible:
        return _make_way(me, found, hole)
    wait_s = HOLE_STAGGER_S * _rank(me, others, n_blocks, hole, spare=1)
    return Move(best_window(found, possible, me), wait_s, because("hole", f"nobody serves block {hole}"))


def _fill_late_hole(me: Candidate, others: Sequence[Announcement], n_blocks: int) -> Move | None:
    """Move to a hole that has lasted although others say they are about to fill it: that can take hours, or be a lie.

    Each node waits for another time, so that few do the same. A block whose weights nobody has is left to those that
    wait for them.
    """
    assert me.span is not None
    late = {
        block
        for block, seconds in me.unserved_s.items()
        if seconds >= COMING_S * (1 + 4 * _hash_fraction(me.peer, str(block))) and block not in me.span
    }
    stored = _counts((*me.held, *(span for other in others for span in other.held)), n_blocks) if late else []
    hole = min((block for block in late if stored[block]), default=None)
    if hole is None:
        return None
    serving = [replace(other, growing=None) if other.growing else other for other in others if other.serves]
    return _fill_hole(me, serving, coverage_of(serving, n_blocks, me.tokens_per_s, me.homes), hole)


def unserved(others: Iterable[Announcement], n_blocks: int) -> list[int]:
    """List the blocks that none of these members serves."""
    served = _counts((other.span for other in others if other.serves and other.span is not None), n_blocks)
    return [block for block, count in enumerate(served) if not count]


def _counts(spans: Iterable[Span], n_blocks: int) -> list[int]:
    """Count for each block how many spans contain it."""
    changes = [0] * (n_blocks + 1)
    for span in spans:
        changes[min(span.start, n_blocks)] += 1
        changes[min(span.stop, n_blocks)] -= 1
    return list(accumulate(changes[:-1]))


def _make_way(me: Candidate, found: Coverage, hole: int) -> Move | None:
    """Shift towards a hole that no node can fill, giving up only blocks that others serve; neighbours then follow."""
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
    shifted = Span(span.start + step, span.stop + step)
    if me.only is not None and not is_within(shifted, me.only):
        return None
    # The hash makes one of two nodes that could shift go first.
    wait_s = HOLE_STAGGER_S * (1 + 2 * _hash_fraction(me.peer, str(hole)))
    why = because("make_way", f"moving: block {hole} has no host, and no node can take it over directly")
    return Move(shifted, wait_s, why)


# --- a block with a single holder -------------------------------------------------------------------------------------


def _thicken(me: Candidate, others: Sequence[Announcement], found: Coverage, with_me: Coverage) -> Move | None:
    """Move to the window that most reduces the number of blocks with a single holder; None if no move does."""
    n_blocks = len(found.speeds)
    held = (me.span, *(other.growing or other.span for other in others if other.state in COMING))
    alone = [members == 1 for members in _counts((span for span in held if span is not None), n_blocks)]
    single, pairs = ([homes == number for homes in with_me.holders] for number in (1, 2))
    stuck = [single[block] or found.serving[block] == 0 for block in range(n_blocks)]
    count_alone, count_pairs, count_stuck = _counter(alone), _counter(pairs), _counter(stuck)

    def cured(window: Span) -> int:
        return _added(me, window, count_alone) - _given_up(me, window, count_pairs)

    windows = [w for w in _windows(me, n_blocks) if _given_up(me, w, count_stuck) == 0]
    most = max(map(cured, windows), default=0)
    if most < 1:
        return None
    best = best_window(found, [window for window in windows if cured(window) == most], me)
    block = next(block for block in best.blocks() if alone[block])
    wait_s = THIN_WAIT_S + THIN_STAGGER_S * _rank(me, others, n_blocks, block, spare=2)
    why = because("lone_holder", f"only one node serves block {block}", *_holders(others, block))
    return Move(best, wait_s, why)


# --- a hole that opens while this node loads blocks -------------------------------------------------------------------


def leave_for_hole(me: Candidate, others: Sequence[Announcement], n_blocks: int) -> Move | None:
    """Return the move to a hole for which this node should give up loading `me.span`; None if there is none.

    Others that are loading may leave for it too, so they wait for each other as well.
    """
    move = decide(me, others, n_blocks)
    if move is None or move.why.code != "hole" or move.fetch_first:
        return None
    loading = [other.peer for other in others if other.state in COMING and not other.serves]
    rank = me.place_behind(peer for peer in loading if _turn(peer) < _turn(me.peer))
    return replace(move, after_s=move.after_s + HOLE_STAGGER_S * rank)


# --- blocks served much worse than others -----------------------------------------------------------------------------


def _even_out(me: Candidate, others: Sequence[Announcement], found: Coverage, with_me: Coverage) -> Move | None:
    """Move to a window over the weakest block, if this node's blocks are served `GAIN` times better without it."""
    assert me.span is not None
    speeds, n_blocks = with_me.speeds, len(with_me.speeds)
    weakest, average = min(speeds), sum(speeds) / n_blocks
    min_settled_s = REBALANCE_UNEVEN_AFTER_S if UNEVEN * weakest < average else REBALANCE_AFTER_S
    block = speeds.index(weakest)
    if me.settled_s < min_settled_s or GAIN * weakest > average or block in me.span:
        return None
    needed = [
        found.speeds[b] < GAIN * weakest or found.holders[b] < 2 or found.serving[b] == 0 for b in range(n_blocks)
    ]
    count = _counter(needed)
    windows = _windows(me, n_blocks, block)
    possible = [window for window in windows if _given_up(me, window, count) == 0]
    if not possible:
        return None
    wait_s = JITTER_S * _hash_fraction(me.peer, "even")
    why = because("gain", f"block {block} has far less capacity than this node's blocks", *_holders(others, block))
    return Move(best_window(found, possible, me), wait_s, why)


# --- counting and ranks -----------------------------------------------------------------------------------------------

Count = Callable[[int, int], int]


def _counter(marked: Sequence[bool]) -> Count:
    """Return a function that counts the marked blocks in [start, stop) in constant time."""
    sums = [0, *accumulate(marked)]
    return lambda start, stop: sums[stop] - sums[start] if start < stop else 0


def _given_up(me: Candidate, window: Span, count: Count) -> int:
    """Count the marked blocks that a move to `window` gives up."""
    assert me.span is not None
    return count(me.span.start, me.span.stop) - _common(me.span, window, count)


def _added(me: Candidate, window: Span, count: Count) -> int:
    """Count the marked blocks that a move to `window` adds."""
    assert me.span is not None
    return count(window.start, window.stop) - _common(me.span, window, count)


def _common(a: Span, b: Span, count: Count) -> int:
    return count(max(a.start, b.start), min(a.stop, b.stop))


def _rank(me: Candidate, others: Sequence[Announcement], n_blocks: int, block: int, *, spare: int) -> float:
    """This node's place in the queue of those that can move to a block and open no other hole: how many go before it.

    First come those whose blocks all keep more than `spare` serving nodes, and of these the ones with the best-served
    spans. Here each member's blocks count, whatever its home: else no two nodes would see the same queue.
    """
    assert me.span is not None
    own = Announcement(me.peer, 0, 0, "", "serving", me.span, me.tokens_per_s)
    found = coverage_of((*others, own), n_blocks)
    lone = [at for at, serving in enumerate(found.serving) if serving == 1]

    def precedence(member: Announcement) -> tuple[bool, float, float]:
        assert member.span is not None
        place = slice(member.span.start, min(member.span.stop, n_blocks))
        free = min(found.serving[place]) > spare
        left = min(found.speeds[place]) - found.trusted(member.decode_tokens_per_s)
        return free, left, _hash_fraction(member.peer, str(block))

    def is_able(member: Announcement) -> bool:
        """True if a window over the block has all that this member alone serves."""
        assert member.span is not None
        own_alone = lone[bisect_left(lone, member.span.start) : bisect_left(lone, member.span.stop)]
        needed = (block, *own_alone[:1], *own_alone[-1:])
        return max(needed) - min(needed) < len(member.span)

    mine = precedence(own)
    serving = (m for m in others if m.serves and m.span is not None and m.span.start < n_blocks)
    return me.place_behind(m.peer for m in serving if precedence(m) > mine and is_able(m))


def _holders(others: Iterable[Announcement], block: int) -> list[str]:
    """List the other peers that hold a block or are loading it."""
    spans = ((other.peer, other.growing or other.span) for other in others if other.state in COMING)
    return [peer for peer, span in spans if span is not None and block in span]


@lru_cache(maxsize=4096)
def _turn(peer: str) -> float:
    return _hash_fraction(peer, "turn")


def _hash_fraction(peer: str, about: str) -> float:
    """Return a number in [0, 1) from the hash of peer and subject: reproducible, and different for every node."""
    digest = hashlib.blake2b(f"{peer}/{about}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
