"""Times of the week as users write them: "mon-fri 09:00-18:00, sat 22:00-02:00".

All times are local wall-clock times, so that 09:00 stays 09:00 when summer time begins or ends. A range that ends
before it begins extends over midnight into the next day.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_DAY_MINUTES = 24 * 60
_WEEK_MINUTES = 7 * _DAY_MINUTES
_MAX_CHARS = 1000
_CLOCK = r"(\d{1,2}):(\d{2})"
_ENTRY = re.compile(rf"(?:([a-z]+)(?:\s*-\s*([a-z]+))?\s+)?{_CLOCK}\s*-\s*{_CLOCK}", re.ASCII)


@dataclass(frozen=True)
class Schedule:
    """A set of times of the week, as disjoint sorted ranges of minutes since Monday 00:00, stop excluded."""

    ranges: tuple[tuple[int, int], ...] = ()

    def covers(self, moment: datetime) -> bool:
        """True if the schedule covers a local time."""
        minute = _minute_of(moment)
        return any(start <= minute < stop for start, stop in self.ranges)

    def until(self, moment: datetime) -> str | None:
        """End of the range that covers a local time, like "mon 18:00"; None if it never ends or none covers it."""
        minute = _minute_of(moment)
        stop = next((stop for start, stop in self.ranges if start <= minute < stop), None)
        if stop == _WEEK_MINUTES and self.ranges[0][0] == 0:
            stop = self.ranges[0][1]  # the range continues on Monday
        return None if stop is None or self.ranges == ((0, _WEEK_MINUTES),) else _as_text(stop)

    def next_start(self, moment: datetime) -> str | None:
        """Next start after a local time, like "mon 09:00"; None if the schedule is empty or covers that time."""
        if not self.ranges or self.covers(moment):
            return None
        minute = _minute_of(moment)
        return _as_text(min((start for start, _ in self.ranges), key=lambda start: (start - minute) % _WEEK_MINUTES))


@lru_cache(maxsize=16)  # called every few seconds with the same few texts
def parse_schedule(text: str) -> Schedule:
    """Parse a schedule; empty text is never. Raises `ValueError`, which says what is expected."""
    if len(text) > _MAX_CHARS:
        raise ValueError(f"expected at most {_MAX_CHARS} characters")
    pieces: list[tuple[int, int]] = []
    for entry in text.lower().split(","):
        if entry.strip():
            pieces += _pieces(entry.strip())
    return Schedule(_merged(pieces))


def _pieces(entry: str) -> list[tuple[int, int]]:
    match = _ENTRY.fullmatch(entry)
    if match is None:
        raise ValueError(f"{entry!r} is not a time of the week: write it like mon-fri 09:00-18:00 or 22:00-06:00")
    first, last, *clock = match.groups()
    start, stop = _minutes(*clock[:2]), _minutes(*clock[2:])
    if start == _DAY_MINUTES or start == stop:
        raise ValueError(f"{entry!r} is empty; a whole day is 00:00-24:00")
    pieces = []
    for day in _days(first, last):
        begin = day * _DAY_MINUTES + start
        end = begin + (stop - start) % _DAY_MINUTES if stop != _DAY_MINUTES else (day + 1) * _DAY_MINUTES
        pieces.append((begin, min(end, _WEEK_MINUTES)))
        if end > _WEEK_MINUTES:
            pieces.append((0, end - _WEEK_MINUTES))  # from Sunday over midnight into Monday
    return pieces


def _days(first: str | None, last: str | None) -> list[int]:
    if first is None or (first in ("daily", "everyday") and last is None):
        return list(range(7))
    start, stop = _day(first), _day(last or first)
    return [(start + offset) % 7 for offset in range((stop - start) % 7 + 1)]


def _day(name: str) -> int:
    # Three letters are enough: "monday", "mond" and "mon" are the same day.
    if name[:3] not in DAYS:
        raise ValueError(f"{name!r} is not a day: use {', '.join(DAYS)}")
    return DAYS.index(name[:3])


def _minutes(hours: str, minutes: str) -> int:
    value = int(hours) * 60 + int(minutes)
    if int(minutes) > 59 or value > _DAY_MINUTES:
        raise ValueError(f"{hours}:{minutes} is not a time of day")
    return value


def _merged(pieces: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Merge overlapping and adjacent ranges."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(pieces):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)


def _minute_of(moment: datetime) -> int:
    return moment.weekday() * _DAY_MINUTES + moment.hour * 60 + moment.minute


def _as_text(minute: int) -> str:
    day, rest = divmod(minute % _WEEK_MINUTES, _DAY_MINUTES)
    return f"{DAYS[day]} {rest // 60:02}:{rest % 60:02}"
