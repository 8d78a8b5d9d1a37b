"""Numbers as short texts; `—` if a value is unknown."""

from __future__ import annotations

import time

from ui.draw.rows import UNKNOWN


def rate(value: float | None) -> str:
    """Tokens per second without the unit: 4.5, 43, 1 204."""
    if value is None:
        return UNKNOWN
    return f"{value:.1f}" if value < 9.95 else count(round(value))


def fine_rate(value: float | None) -> str:
    """Tokens per second with one decimal below 100: 28.4, 143."""
    return rate(value) if value is None or value >= 99.95 else f"{value:.1f}"


def known_rate(value: float | None) -> str:
    """Tokens per second, where 0 means that nothing was measured and becomes a dash."""
    return rate(value or None)


def count(value: int | None) -> str:
    """A whole number in groups of three digits: 1 204."""
    return UNKNOWN if value is None else f"{value:,}".replace(",", " ")


def many(value: int | None) -> str:
    """A number rounded to its order of magnitude: 612 k, 1.2 M."""
    if value is None:
        return UNKNOWN
    if value < 10_000:
        return count(value)
    if value < 10**6:
        return f"{value / 1000:.0f} k"
    return f"{value / 10**6:.1f} M" if value < 10**9 else f"{value / 10**9:.1f} G"


def memory(value: int) -> str:
    """Bytes of memory with their unit: 5.5 GB, 220 MB."""
    if value >= 0.95 * 10**9:
        return f"{gigabytes(value)} GB"
    return size(value) if value else "0 GB"


def memory_of(part: int, whole: int) -> str:
    """A part of some memory, with the unit only once if both have the same: 5.5 of 25.2 GB, 23 of 220 MB."""
    amount = memory(part).removesuffix(memory(whole)[-3:]) if part else "0"
    return f"{amount} of {memory(whole)}"


def gigabytes(value: int | None) -> str:
    """Bytes as gigabytes without the unit: 5.5, 0.03."""
    if value is None:
        return UNKNOWN
    size = value / 10**9
    return f"{size:.1f}" if size >= 0.095 or size == 0 else f"{size:.2f}"


def size(value: int | None) -> str:
    """Bytes with their unit: 98 MB, 5.5 GB."""
    if value is None:
        return UNKNOWN
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if value >= 0.95 * factor:
            amount = value / factor
            return f"{amount:.1f} {unit}" if amount < 9.95 else f"{amount:.0f} {unit}"
    return f"{value} B"


def progress(done: int | None, total: int | None) -> str:
    """How far something is: 12 of 93 MB from 100,000 up, which are bytes; else 5 of 12."""
    if total is not None and total >= 100_000:
        return f"{size(done)} of {size(total)}"
    return f"{count(done)} of {count(total)}"


def megabits(bytes_per_s: float | None) -> str:
    """Bytes per second as Mbit/s, without the unit."""
    if bytes_per_s is None:
        return UNKNOWN
    value = bytes_per_s * 8 / 10**6
    return f"{value:.1f}" if value < 99.5 else f"{value:.0f}"


def milliseconds(seconds: float | None) -> str:
    """Seconds as milliseconds, without the unit."""
    if seconds is None:
        return UNKNOWN
    value = seconds * 1000
    return f"{value:.1f}".removesuffix(".0") if 0 < value < 9.95 else f"{value:.0f}"


def clock(seconds: float | None) -> str:
    """A duration in seconds as on a stopwatch: 0:19, 11:02, 2:04:10."""
    if seconds is None:
        return UNKNOWN
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def duration(seconds: float | None) -> str:
    """A duration in seconds in its largest units: 41 s, 12 m, 4 h 51 m, 3 d 2 h, 7 d."""
    if seconds is None:
        return UNKNOWN
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes = whole // 60
    if minutes < 60:
        return f"{minutes} m"
    hours, minutes = divmod(minutes, 60)
    large, small = (f"{hours} h", f"{minutes} m") if hours < 48 else (f"{hours // 24} d", f"{hours % 24} h")
    return large if small.startswith("0 ") else f"{large} {small}"


def time_of_day(at_ms: int) -> str:
    """Local time of day of an event: 14:33:07."""
    return time.strftime("%H:%M:%S", time.localtime(at_ms / 1000))


def day_or_time(at_ms: int, now_ms: int) -> str:
    """Local date or time of a recent use, as precise as is useful: now, 09:12, Tue, 2 May."""
    then, now = time.localtime(at_ms / 1000), time.localtime(now_ms / 1000)
    if now_ms - at_ms < 60_000:
        return "now"
    if then[:3] == now[:3]:
        return time.strftime("%H:%M", then)
    if now_ms - at_ms < 6 * 86_400_000:
        return time.strftime("%a", then)
    return f"{then.tm_mday} {time.strftime('%b', then)}"


def plural(number: int, one: str, several: str | None = None) -> str:
    """A number with its noun: 1 peer, 14 peers."""
    return f"{count(number)} {one if number == 1 else several or one + 's'}"
