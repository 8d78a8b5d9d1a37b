"""Bars, area plots and sparklines as characters.

A braille cell holds two samples side by side and four dots of height; `area_blocks` is for terminals without braille.
"""

from __future__ import annotations

from collections.abc import Sequence

from ui.draw.rows import Row

EIGHTHS = " ▁▂▃▄▅▆▇█"
_PARTS = " ▏▎▍▌▋▊▉"
_LEFT, _RIGHT = (0x40, 0x04, 0x02, 0x01), (0x80, 0x20, 0x10, 0x08)  # bits of the dots, the lowest dot first
Samples = Sequence[float | None]


def bar(share: float | None, width: int, style: str) -> Row:
    """A bar of `width` cells filled to `share` (0 to 1); an empty track if `share` is None."""
    if share is None or width <= 0:
        return [(" " * max(0, width), "on trackbg")]
    full, rest = divmod(round(max(0.0, min(1.0, share)) * width * 8), 8)
    head = "█" * full + (_PARTS[rest] if rest else "")
    return [(head + " " * (width - len(head)), f"{style} on trackbg")]


def resample(values: Samples, columns: int) -> list[float | None]:
    """Reduce the values to `columns` means, the newest at the end; fewer values are padded with None on the left."""
    if columns <= 0:
        return []
    if len(values) <= columns:
        return [None] * (columns - len(values)) + list(values)
    means: list[float | None] = []
    for index in range(columns):
        first, last = index * len(values) // columns, (index + 1) * len(values) // columns
        known = [value for value in values[first:last] if value is not None]
        means.append(sum(known) / len(known) if known else None)
    return means


def ceiling(values: Samples, least: float = 1.0) -> float:
    """The smallest round number (1, 2, 3, 5 or 8 times a power of ten) that no value exceeds; at least `least`."""
    peak = max((value for value in values if value is not None), default=0.0)
    step = 10.0**-6
    while True:
        for factor in (1, 2, 3, 5, 8):
            if step * factor >= max(peak, least):
                return step * factor
        step *= 10


def area(values: Samples, width: int, height: int, top: float, *, down: bool = False) -> list[str]:
    """An area plot in braille, `height` rows of `width` cells; None leaves a gap. `down` draws it from the top down."""
    sampled = resample(values, 2 * width)
    dots = [0 if value is None else _dots(value, top, 4 * height) for value in sampled]
    left, right = (_LEFT[::-1], _RIGHT[::-1]) if down else (_LEFT, _RIGHT)
    rows = []
    for line in range(height):
        low = 4 * (line if down else height - 1 - line)
        rows.append("".join(_braille(dots[2 * i] - low, dots[2 * i + 1] - low, left, right) for i in range(width)))
    return rows


def _dots(value: float, top: float, most: int) -> int:
    """Height of a value in dots; any value above 0 gets at least one."""
    return 0 if value <= 0 else max(1, min(most, round(value / top * most)))


def _braille(a: int, b: int, left: Sequence[int], right: Sequence[int]) -> str:
    bits = sum(left[: max(0, min(4, a))]) + sum(right[: max(0, min(4, b))])
    return chr(0x2800 + bits) if bits else " "


def area_blocks(values: Samples, width: int, height: int, top: float, *, down: bool = False) -> list[str]:
    """An area plot in eighths of a cell; downwards only halves of a cell exist."""
    levels = [0 if value is None else _dots(value, top, 8 * height) for value in resample(values, width)]
    rows = []
    for line in range(height):
        low = 8 * (line if down else height - 1 - line)
        parts = [max(0, min(8, level - low)) for level in levels]
        rows.append("".join(" ▀█"[(part + 3) // 4] if down else EIGHTHS[part] for part in parts))
    return rows


def plot(
    values: Samples, width: int, height: int, top: float, *, down: bool = False, braille: bool = True
) -> list[Row]:
    """An area plot with its axis at the left (the top value, and 0), in stronger colours towards the top value."""
    draw = area if braille else area_blocks
    rows: list[Row] = []
    for index, text in enumerate(draw(values, max(1, width - 6), height, top, down=down)):
        rank = index if down else height - 1 - index
        shade = f"plot{1 + min(3, rank * 4 // max(1, height))}"
        is_top = rank == height - 1
        label = f"{top:g}" if is_top else ("0" if rank == 0 and not down else "")
        rows.append([(f"{label:>4}  ", "dim"), (text, shade)])
    return rows


def spark(values: Samples, width: int) -> str:
    """The last `width` values as columns one cell high, scaled to the highest of them."""
    known = list(values)[-width:]
    top = max((value for value in known if value is not None), default=0.0) or 1.0
    return "".join(" " if value is None else EIGHTHS[max(1, round(value / top * 8))] for value in known)
