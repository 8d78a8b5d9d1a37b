"""Who holds which block, and the strip that shows it: height is tokens a second, the digits are holders.

A cell that stands for several blocks shows the worst of them, so that a hole never averages away.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, groupby
from math import ceil

from app.snapshot import PeerView, Snapshot
from ui.bars import EIGHTHS
from ui.figures import plural, rate
from ui.ink import Row, clean, fit, row

_GUTTER = 9


@dataclass(frozen=True)
class Stretch:
    """Neighbouring blocks that are equally well held."""

    start: int
    stop: int
    holders: int
    tokens_per_s: float | None
    names: tuple[str, ...] = ()  # of a few holders

    @property
    def label(self) -> str:
        """As people write it."""
        return f"{self.start}:{self.stop}"


@dataclass(frozen=True)
class Coverage:
    """Each block's holders and their tokens a second together, where they have told them."""

    holders: tuple[int, ...]
    tokens_per_s: tuple[float, ...]
    own: tuple[int, int] | None
    weak: Stretch | None
    holes: tuple[tuple[int, int], ...]

    @property
    def held(self) -> int:
        """How many blocks have a holder."""
        return sum(1 for number in self.holders if number)


def coverage_of(snapshot: Snapshot | None) -> Coverage | None:
    """The coverage as this node knows it; None before the model is known."""
    if snapshot is None or not snapshot.blocks_total:
        return None
    total = snapshot.blocks_total
    serving = holders_in(snapshot)
    counts, speeds = [0] * (total + 1), [0.0] * (total + 1)
    for peer in serving:
        start, stop = _bounds(peer, total)
        counts[start] += 1
        counts[stop] -= 1
        speeds[start] += peer.tokens_per_s
        speeds[stop] -= peer.tokens_per_s
    holders = tuple(accumulate(counts[:-1]))
    tokens_per_s = tuple(max(0.0, round(value, 6)) for value in accumulate(speeds[:-1]))
    own = (snapshot.start, snapshot.stop) if snapshot.start is not None and snapshot.stop is not None else None
    holes = tuple((s.start, s.stop) for s in _stretches(holders, tokens_per_s) if s.holders == 0)
    return Coverage(holders, tokens_per_s, own, _weakest(holders, tokens_per_s, serving), holes)


def holders_in(snapshot: Snapshot) -> list[PeerView]:
    """The members that serve blocks now, this node among them as `you`."""
    known = [p for p in snapshot.peers if p.state == "serving" and p.start is not None and p.stop is not None]
    if snapshot.state == "serving" and snapshot.start is not None and snapshot.stop is not None:
        own = PeerView(snapshot.peer_id, "you", snapshot.start, snapshot.stop, tokens_per_s=snapshot.tokens_per_s)
        known.append(own)
    return known


def _bounds(peer: PeerView, total: int) -> tuple[int, int]:
    """A peer's span within the model, whatever it claims."""
    start = max(0, min(total, peer.start or 0))
    return start, max(start, min(total, peer.stop or 0))


def _stretches(holders: tuple[int, ...], speeds: tuple[float, ...]) -> list[Stretch]:
    found = []
    for number, group in groupby(range(len(holders)), key=lambda block: holders[block]):
        blocks = list(group)
        slowest = min(speeds[block] for block in blocks)
        found.append(Stretch(blocks[0], blocks[-1] + 1, number, slowest or None))
    return found


def _weakest(holders: tuple[int, ...], speeds: tuple[float, ...], serving: list[PeerView]) -> Stretch | None:
    """The stretch that needs help most: fewest holders, then slowest; None where all blocks are held alike."""
    stretches = _stretches(holders, speeds)
    worst = min(stretches, key=lambda s: (s.holders, s.tokens_per_s or 0.0))
    if len(stretches) == 1 and worst.holders > 1:
        return None
    total = len(holders)
    within = [p for p in serving if _bounds(p, total)[0] < worst.stop and _bounds(p, total)[1] > worst.start]
    names = tuple(dict.fromkeys(clean(p.name) or short_peer(p.peer) for p in within[:4])) if len(within) <= 3 else ()
    return Stretch(worst.start, worst.stop, worst.holders, worst.tokens_per_s, names)


def short_peer(peer: str) -> str:
    """A peer id as it fits into a table: its last six characters tell ids apart."""
    return clean(peer)[-6:]


# --- the strip -------------------------------------------------------------------------------------------------------


def strip_rows(cover: Coverage, width: int, tall: int = 1, *, gutter: bool = True) -> list[Row]:
    """Axis, heights, digits, and the marks of your span and the weak spot."""
    indent = _GUTTER if gutter else 0
    per = ceil(len(cover.holders) / max(1, width - indent))
    cells = ceil(len(cover.holders) / per)
    holders = [min(cover.holders[i * per : (i + 1) * per]) for i in range(cells)]
    speeds = [min(cover.tokens_per_s[i * per : (i + 1) * per]) for i in range(cells)]

    def labelled(label: str, content: Row) -> Row:
        return [(label.ljust(indent), "dim"), *content] if indent else content

    rows = [labelled("block", [(_axis(len(cover.holders), per, cells), "dim")])]
    for line in range(tall):
        heights = _heights(cover, holders, speeds, per, low=8 * (tall - 1 - line), top=8 * tall)
        rows.append(labelled("tok/s" if line == tall - 1 else "", heights))
    digits = [(str(number) if number < 10 else "+", heat(number)) for number in holders]
    return [*rows, labelled("holders", _joined(digits)), labelled("", _marks(cover, per, cells))]


def heat(holders: int) -> str:
    """The style of so many holders."""
    return {0: "error", 1: "warning", 2: "heat2"}.get(holders, "heat3")


def _axis(blocks: int, per: int, cells: int) -> str:
    axis = [" "] * cells
    end = str(blocks - 1)
    step = 10
    while step / per < 8 and step < blocks:
        step *= 2
    for block in range(0, blocks, step):
        at = block // per
        text = str(block)
        if at + len(text) < cells - len(end) or block == 0:
            axis[at : at + len(text)] = text
    if cells > len(end) + 1:
        axis[cells - len(end) :] = end
    return "".join(axis)[:cells]


def _heights(cover: Coverage, holders: list[int], speeds: list[float], per: int, low: int, top: int) -> Row:
    peak = max(cover.tokens_per_s) or 1.0
    spans = []
    for index, number in enumerate(holders):
        level = max(1, round(speeds[index] / peak * top))
        is_own = cover.own is not None and cover.own[0] < (index + 1) * per and cover.own[1] > index * per
        back = "minebg" if is_own else "trackbg"
        mark = ("×" if low == 0 else " ") if number == 0 else EIGHTHS[max(0, min(8, level - low))]
        spans.append((mark, f"{heat(number)} on {back}"))
    return _joined(spans)


def _joined(spans: list[tuple[str, str]]) -> Row:
    """Neighbours of one style as one span: a strip has few styles and many cells."""
    return [("".join(text for text, _ in group), style) for style, group in groupby(spans, key=lambda part: part[1])]


def _marks(cover: Coverage, per: int, cells: int) -> Row:
    marks = [(" ", "")] * cells
    if cover.weak is not None and cover.weak.holders:
        _mark(marks, cover.weak.start // per, ceil(cover.weak.stop / per), "weak", "warning")
    for start, stop in cover.holes:
        _mark(marks, start // per, ceil(stop / per), "hole", "b error")
    if cover.own is not None:
        label = f"you {cover.own[0]}:{cover.own[1]}"
        _mark(marks, cover.own[0] // per, ceil(cover.own[1] / per), label, "mine")
    return _joined(marks)


def _mark(marks: list[tuple[str, str]], start: int, stop: int, label: str, style: str) -> None:
    """Put a bracket with its label below a span; a narrow span has the label alone, kept within the strip."""
    room = stop - start
    for text in (label, label.split()[0]):
        if room >= len(text) + 2:
            drawn = "╰" + text.center(room - 2, "─") + "╯"
            break
    else:
        drawn = label if len(label) <= len(marks) else label.split()[0]
        start = max(0, min(start, len(marks) - len(drawn)))
    for offset, character in enumerate(drawn[: len(marks) - start]):
        marks[start + offset] = (character, style)


# --- sentences -------------------------------------------------------------------------------------------------------


def legend() -> Row:
    """What the strip's colours mean."""
    return row(("█", "heat3"), " 3+ ", ("█", "heat2"), " 2 ", ("█", "warning"), " 1 ", ("×", "error"), " no holder")


def weak_note(cover: Coverage) -> Row:
    """The weak spot in a few words."""
    weak = cover.weak
    if weak is None:
        return row(("every block has ", "dim"), f"{plural(cover.holders[0], 'holder')}")
    if weak.holders == 0:
        return row((weak.label, "b error"), " has no holder")
    names = f", {weak.names[0]} only" if weak.holders == 1 and len(weak.names) == 1 else ""
    return row((weak.label, "warning"), f" {rate(weak.tokens_per_s)} tok/s{names}")


def weak_sentence(cover: Coverage, width: int) -> Row:
    """What is wrong with the coverage, as one would say it."""
    if cover.holes:
        spans = ", ".join(f"{start}:{stop}" for start, stop in cover.holes[:6])
        more = f" and {len(cover.holes) - 6} more" if len(cover.holes) > 6 else ""
        said = row((f"{spans}{more} without a holder", "b error"), ": no reply can be made until a node takes them.")
    elif cover.weak is None:
        said = row(f"Every block has {plural(cover.holders[0], 'holder')}.")
    elif cover.weak.holders == 1:
        who = ", ".join(cover.weak.names) or "single nodes"
        lost = " If it leaves, replies wait until another node takes them." if len(cover.weak.names) == 1 else ""
        said = row((f"{cover.weak.label} has one holder", "warning"), f": {who}.{lost}")
    else:
        said = row(
            (f"{cover.weak.label}", "warning"),
            f" is held least: {cover.weak.holders} holders, {rate(cover.weak.tokens_per_s)} tok/s together.",
        )
    return fit(said, width)
