"""Sizes and durations as users write them: "6GB" is 6·10⁹ bytes, "6GiB" is 6·2³⁰ bytes, "2h" is 7200 seconds."""

from __future__ import annotations

import re

_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_SIZE = re.compile(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([KMGT]?I?)(B?)\s*", re.IGNORECASE | re.ASCII)

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_TIME = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*([smhd])", re.IGNORECASE | re.ASCII)


def parse_duration(text: str) -> float:
    """Parse a duration of 1 s to 366 days, in seconds; raises `ValueError` that shows the accepted forms."""
    match = _TIME.fullmatch(text.strip())
    seconds = float(match.group(1)) * _SECONDS[match.group(2).lower()] if match else 0.0
    if not 1 <= seconds <= 366 * 86400:
        raise ValueError(f"{text!r} is not a duration; write it like 90s, 30m, 2h or 1d, a year at most")
    return seconds


def parse_size(text: str) -> int:
    """Parse a size, in bytes; raises `ValueError` that shows the accepted forms."""
    match = _SIZE.fullmatch(text)
    unit = match.group(2).upper() if match else ""
    factor = (_DECIMAL | _BINARY).get(unit)
    if match is None or factor is None:
        raise ValueError(f"{text!r} is not a size; write it like 6GB, 500MB, 1.5GiB or 0")
    number = match.group(1)
    # Whole numbers stay exact; a float would round beyond 2**53.
    return int(number) * factor if number.isdigit() else int(float(number) * factor)


def format_duration(seconds: float) -> str:
    """Format a duration like "90 s", "12 min", "3.0 h" or "2.5 days"."""
    for unit, length, least in (("days", 86400.0, 2.0), ("h", 3600.0, 2.0), ("min", 60.0, 2.0)):
        if seconds >= least * length:
            return f"{seconds / length:.{0 if unit == 'min' else 1}f} {unit}"
    return f"{seconds:.0f} s"


def format_lead(ahead_s: float) -> str:
    """Say how far a clock is ahead of another one, like "about 12 min ahead of", or behind it if that is negative."""
    return f"about {format_duration(abs(ahead_s))} {'ahead of' if ahead_s > 0 else 'behind'}"


def format_size(size_bytes: int) -> str:
    """Format a size with one decimal in powers of ten, like "1.5 GB"."""
    if size_bytes < 1000:
        return f"{size_bytes} B"
    value = float(size_bytes)
    for unit in ("kB", "MB", "GB", "TB"):
        value /= 1000
        # 999.95 would print as "1000.0", so it moves to the next unit.
        if value < 999.95 or unit == "TB":
            break
    return f"{value:.1f} {unit}"
