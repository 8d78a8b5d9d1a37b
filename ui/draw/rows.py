"""Rows of styled words: what the drawing functions return and the panels paint.

A span is a text and its style's words, such as `b mine on minebg`; which colour a word means is for `ui.draw.theme`.
What peers, models and files wrote passes through `one_line` before it is drawn.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.cells import cell_len, set_cell_size

Span = tuple[str, str]
Row = list[Span]
UNKNOWN = "—"


def span(text: object, style: str = "") -> Span:
    """One span of a row."""
    return str(text), style


def row(*parts: Span | str) -> Row:
    """A row of spans and plain texts."""
    return [part if isinstance(part, tuple) else (part, "") for part in parts]


def width_of(line: Iterable[Span]) -> int:
    """How many cells a row takes."""
    return sum(cell_len(text) for text, _ in line)


def shorten(text: str, width: int) -> str:
    """The text in at most `width` cells, with an ellipsis where something was cut."""
    if width <= 0:
        return ""
    if cell_len(text) <= width:
        return text
    return set_cell_size(text, width - 1).rstrip() + "…"


def cell(text: str, width: int, align: str = "<") -> str:
    """The text in exactly `width` cells, aligned `<` or `>`."""
    text = shorten(text, width)
    room = " " * (width - cell_len(text))
    return room + text if align == ">" else text + room


def fit(line: Row, width: int) -> Row:
    """The row in at most `width` cells, with an ellipsis where something was cut."""
    if width_of(line) <= width:
        return line
    fitted: Row = []
    room = width
    for text, style in line:
        size = cell_len(text)
        if size >= room:
            cut = set_cell_size(text, max(0, room - 1)).rstrip() + "…" if room > 0 else ""
            return [*fitted, (cut, style)]
        fitted.append((text, style))
        room -= size
    return fitted


def spread(left: Row, right: Row, width: int) -> Row:
    """One row with `left` at its beginning and `right` at its end; the left gives way."""
    room = width - width_of(right)
    if room < 4:
        return fit(left, width)
    left = fit(left, room - 1)
    return [*left, (" " * (room - width_of(left)), ""), *right]


def beside(rows: list[Row], notes: list[Row], width: int, gap: int = 2) -> list[Row]:
    """The rows with notes in the free margin at their right, where there is room for all of them."""
    inner = max((width_of(line) for line in rows), default=0)
    need = max((width_of(note) for note in notes), default=0)
    if inner + gap + need > width:
        return rows
    joined = []
    for index, line in enumerate(rows):
        note = notes[index] if index < len(notes) else []
        pad = inner - width_of(line) + gap
        joined.append([*line, (" " * pad, ""), *note] if note else line)
    return joined


def text_of(line: Row) -> str:
    """The row without its styles."""
    return "".join(text for text, _ in line)


def wrap(text: str, width: int, style: str = "") -> list[Row]:
    """A sentence on as many rows as it needs."""
    lines: list[Row] = []
    line = ""
    for word in text.split():
        if line and cell_len(line) + 1 + cell_len(word) > width:
            lines.append([(line, style)])
            line = word
        else:
            line = f"{line} {word}" if line else word
    return [*lines, [(shorten(line, width), style)]] if line else lines
