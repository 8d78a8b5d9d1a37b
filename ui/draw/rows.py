"""Rows of styled text: the format that drawing functions return and panels paint.

A span is a text and its style words, such as `b mine on minebg`; `ui.draw.theme` maps these to colours. Text from
peers, models and files must pass through `one_line` first, which removes control characters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import accumulate

from rich.cells import cell_len, set_cell_size

Span = tuple[str, str]
Row = list[Span]
UNKNOWN = "—"
_HASH = re.compile(r"(?<![0-9A-Za-z#])(?=[0-9]*[a-f])[0-9a-f]{13,}(?![0-9A-Za-z])")
_PIN = re.compile(r"(?<=#)([0-9a-f]{20})[0-9a-f]+")  # that many digits name a swarm's model to `shoal join`
_PROGRAMMERS = re.compile(r"\[Errno -?\d+\] |\b[A-Z][A-Za-z]+(?:Error|Exception|Failure): |\btorch\.(?=\w)")


def span(text: object, style: str = "") -> Span:
    """One span of a row."""
    return str(text), style


def row(*parts: Span | str) -> Row:
    """A row from spans and unstyled texts."""
    return [part if isinstance(part, tuple) else (part, "") for part in parts]


def tidy(text: str) -> str:
    """A text of the node without what only programmers read: error numbers, class names, and long hashes."""
    return _PROGRAMMERS.sub("", _PIN.sub(r"\1", _HASH.sub(lambda found: found.group()[:8], text)))


def width_of(line: Iterable[Span]) -> int:
    """Width of a row in cells."""
    return sum(cell_len(text) for text, _ in line)


def shorten(text: str, width: int) -> str:
    """The text in at most `width` cells, with an ellipsis if it was cut."""
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
    """The row in at most `width` cells, with an ellipsis if it was cut."""
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


def cut(line: Row, width: int) -> tuple[Row, Row]:
    """The row in two parts, the first of at most `width` cells; it is cut after a space if one is near."""
    text = text_of(line)
    ends = accumulate(cell_len(character) for character in text)
    end = next((index for index, cells in enumerate(ends) if cells > width), None)
    if end is None:
        return line, []
    space = text.rfind(" ", end - width // 3, end)
    end = space + 1 if space > 0 else end
    first: Row = []
    for index, (part, style) in enumerate(line):
        if len(part) >= end:
            rest = [(part[end:], style), *line[index + 1 :]]
            return [*first, (part[:end], style)], rest
        first.append((part, style))
        end -= len(part)
    return first, []


def spread(left: Row, right: Row, width: int) -> Row:
    """One row with `left` at its start and `right` at its end; `left` is shortened if both do not fit."""
    room = width - width_of(right)
    if room < 4:
        return fit(left, width)
    left = fit(left, room - 1)
    return [*left, (" " * (room - width_of(left)), ""), *right]


def beside(rows: list[Row], notes: list[Row], width: int, gap: int = 2) -> list[Row]:
    """The rows with notes to the right of them; without notes if these do not fit."""
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
    """The text of a row without its styles."""
    return "".join(text for text, _ in line)


def wrap(text: str, width: int, style: str = "") -> list[Row]:
    """A text broken into rows of at most `width` cells."""
    lines: list[Row] = []
    line = ""
    for word in text.split():
        if line and cell_len(line) + 1 + cell_len(word) > width:
            lines.append([(line, style)])
            line = word
        else:
            line = f"{line} {word}" if line else word
    return [*lines, [(shorten(line, width), style)]] if line else lines
