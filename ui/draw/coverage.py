"""The coverage strip (for each block its throughput as height and its holders as a digit), and sentences about it.

A cell that stands for several blocks shows the worst of them, so that a block without a holder is always visible.
`ui.state.coverage` computes the figures.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from math import ceil

from ui.draw.bars import EIGHTHS
from ui.draw.numbers import plural, rate
from ui.draw.rows import Row, fit, row
from ui.state.coverage import Coverage
from ui.state.store import Store

_GUTTER = 9
_WIDEST = 4  # most cells for one block
MARGIN = 27  # cells for the notes beside the strip


# --- the strip -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scale:
    """Mapping of blocks to cells: several blocks per cell for a large model, several cells per block for a small."""

    per_cell: int
    per_block: int
    blocks: int

    @property
    def cells(self) -> int:
        """Number of cells of the whole strip."""
        return ceil(self.blocks / self.per_cell) * self.per_block

    def first(self, block: int) -> int:
        """The first cell of a block."""
        return block // self.per_cell * self.per_block

    def end(self, stop: int) -> int:
        """The cell after the last one of block `stop - 1`."""
        return ceil(stop / self.per_cell) * self.per_block


def scale_for(blocks: int, room: int) -> Scale:
    """The largest scale for which `blocks` fit into `room` cells."""
    per_cell = ceil(blocks / max(1, room))
    return Scale(per_cell, max(1, min(_WIDEST, room // blocks)) if per_cell == 1 else 1, blocks)


def strip_rows(cover: Coverage, width: int, tall: int = 1, *, gutter: bool = True, margin: int = 0) -> list[Row]:
    """Rows of the strip: axis, `tall` rows of heights, digits, and marks under this node's span and the weak stretch.

    `margin` cells stay free at the right, unless the model is so large that it needs them.
    """
    indent = _GUTTER if gutter else 0
    scale = scale_for(len(cover.holders), max(1, width - indent - margin))
    if margin and scale.per_cell > 1:
        scale = scale_for(len(cover.holders), max(1, width - indent))
    step = scale.per_cell
    groups = range(0, len(cover.holders), step)
    holders = [min(cover.holders[first : first + step]) for first in groups]
    speeds = [min(cover.tokens_per_s[first : first + step]) for first in groups]

    def labelled(label: str, content: Row) -> Row:
        return [(label.ljust(indent), "dim"), *content] if indent else content

    rows = [labelled("block", [(_axis(scale), "dim")])]
    for line in range(tall):
        heights = _heights(cover, holders, speeds, scale, (8 * (tall - 1 - line), 8 * tall))
        rows.append(labelled("tok/s" if line == tall - 1 else "", heights))
    digits = [((str(number) if number < 10 else "+").ljust(scale.per_block), heat(number)) for number in holders]
    return [*rows, labelled("holders", _joined(digits)), labelled("", _marks(cover, scale))]


def heat(holders: int) -> str:
    """Style for a number of holders."""
    return {0: "error", 1: "warning", 2: "heat2"}.get(holders, "heat3")


def _axis(scale: Scale) -> str:
    axis = [" "] * scale.cells
    end = str(scale.blocks - 1)
    last = scale.first(scale.blocks - 1) if scale.per_block > 1 else scale.cells - len(end)
    step = 5 if scale.per_block > 1 else 10
    while scale.first(step) < 8 and step < scale.blocks:
        step *= 2
    for block in range(0, scale.blocks, step):
        at, text = scale.first(block), str(block)
        if at + len(text) < last or block == 0:
            axis[at : at + len(text)] = text
    if scale.cells > len(end) + 1:
        axis[last : last + len(end)] = end
    return "".join(axis)[: scale.cells]


def _heights(cover: Coverage, holders: list[int], speeds: list[float], scale: Scale, band: tuple[int, int]) -> Row:
    """One row of heights: `band` is the row's lowest level and the highest level of the strip, in eighths of a cell."""
    low, top = band
    peak = max(cover.tokens_per_s) or 1.0
    spans = []
    for index, number in enumerate(holders):
        first, stop = index * scale.per_cell, (index + 1) * scale.per_cell
        level = max(1, round(speeds[index] / peak * top))
        back = "minebg" if cover.own is not None and cover.own[0] < stop and cover.own[1] > first else "trackbg"
        mark = ("×" if low == 0 else " ") if number == 0 else EIGHTHS[max(0, min(8, level - low))]
        spans.append((mark * scale.per_block, f"{heat(number)} on {back}"))
    return _joined(spans)


def _joined(spans: list[tuple[str, str]]) -> Row:
    """Merge neighbouring spans of the same style: a strip has many cells but few styles."""
    return [("".join(text for text, _ in group), style) for style, group in groupby(spans, key=lambda part: part[1])]


def _marks(cover: Coverage, scale: Scale) -> Row:
    marks = [(" ", "")] * scale.cells
    if cover.weak is not None and cover.weak.holders:
        for start, stop in _outside(cover.own, (cover.weak.start, cover.weak.stop)):
            _mark(marks, scale.first(start), scale.end(stop), "weak", "warning")
    for start, stop in cover.holes:
        _mark(marks, scale.first(start), scale.end(stop), "hole", "b error")
    if cover.own is not None:
        label = f"you {cover.own[0]}:{cover.own[1]}"
        _mark(marks, scale.first(cover.own[0]), scale.end(cover.own[1]), label, "mine")
    return _joined(marks)


def _outside(own: tuple[int, int] | None, span: tuple[int, int]) -> list[tuple[int, int]]:
    """The parts of a span that are not of `own`, whose mark would cut theirs."""
    first, end = own or (span[1], span[1])
    parts = [(span[0], min(span[1], first)), (max(span[0], end), span[1])]
    return [(start, stop) for start, stop in parts if start < stop]


def _mark(marks: list[tuple[str, str]], start: int, stop: int, label: str, style: str) -> None:
    """Put a labelled bracket below a span; where the bracket does not fit, the label alone, kept inside the strip."""
    room = min(stop, len(marks)) - start
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
    """Legend of the strip's colours."""
    return row(("█", "heat3"), " 3+ ", ("█", "heat2"), " 2 ", ("█", "warning"), " 1 ", ("×", "error"), " no holder")


def weak_note(cover: Coverage) -> Row:
    """The weak stretch in a few words, for the margin beside the strip."""
    weak = cover.weak
    if weak is None:
        return row(("every block has ", "dim"), f"{plural(cover.holders[0], 'holder')}")
    if weak.holders == 0:
        return row((weak.label, "b error"), " has no holder")
    names = f", {weak.names[0]} only" if weak.holders == 1 and len(weak.names) == 1 else ""
    return row((weak.label, "warning"), f" {rate(weak.tokens_per_s)} tok/s{names}")


def loss_words(store: Store, event: str) -> str:
    """Warning that blocks lose their only host if `event` happens ("you pause"); empty if others host them too.

    A node that is alone in its swarm takes nothing away from anybody.
    """
    known, cover = store.snapshot, store.cover()
    if known is None or cover is None or cover.own is None or not known.peers:
        return ""
    alone = [block for block in range(*cover.own) if cover.holders[block] == 1]
    if not alone:
        return ""
    spans = ", ".join(f"{start}:{stop}" for start, stop in _spans(alone)[:4])
    return f"Blocks {spans} have no other host: if {event}, replies wait until another member has loaded them."


def _spans(blocks: list[int]) -> list[tuple[int, int]]:
    """Neighbouring block numbers as spans."""
    groups = groupby(enumerate(blocks), key=lambda pair: pair[1] - pair[0])
    found = [[block for _, block in group] for _, group in groups]
    return [(group[0], group[-1] + 1) for group in found]


def weak_sentence(cover: Coverage, width: int) -> Row:
    """A sentence about blocks without holders or, if there are none, about the weak stretch."""
    if cover.holes:
        spans = ", ".join(f"{start}:{stop}" for start, stop in cover.holes[:6])
        more = f" and {len(cover.holes) - 6} more" if len(cover.holes) > 6 else ""
        words = row((f"{spans}{more} without a holder", "b error"), ": no reply can be made until a node takes them.")
    elif cover.weak is None:
        words = row(f"Every block has {plural(cover.holders[0], 'holder')}.")
    elif cover.weak.holders == 1:
        who = ", ".join(cover.weak.names) or "single nodes"
        goes = "you leave" if who == "you" else "it leaves"
        lost = f" If {goes}, replies wait for another." if len(cover.weak.names) == 1 else ""
        each = "one holder" if len(cover.weak.names) == 1 else "one holder each"
        words = row((f"{cover.weak.label} has {each}", "warning"), f": {who}.{lost}")
    else:
        words = row(
            (f"{cover.weak.label}", "warning"),
            f" has the fewest holders: {cover.weak.holders}, {rate(cover.weak.tokens_per_s)} tok/s together.",
        )
    return fit(words, width)
