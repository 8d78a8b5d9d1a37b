"""Times of the week, as people write them: "mon-fri 09:00-18:00, sat 22:00-02:00".

All is wall-clock time, looked up at each moment, so that a change to or from summer time moves nothing: 09:00 is when
the clock on the wall says so. A range that ends before it begins goes over midnight, into the next day.
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
    """A set of times of the week: ranges of minutes since Monday's midnight, apart and in order."""

    ranges: tuple[tuple[int, int], ...] = ()

    def covers(self, moment: datetime) -> bool:
        """Whether a local time lies within it."""
        minute = _minute_of(moment)
        return any(start <= minute < stop for start, stop in self.ranges)

    def until(self, moment: datetime) -> str | None:
        """When the range that covers this local time ends, as a person says it; None where it never does."""
        minute = _minute_of(moment)
        stop = next((stop for start, stop in self.ranges if start <= minute < stop), None)
        if stop == _WEEK_MINUTES and self.ranges[0][0] == 0:
            stop = self.ranges[0][1]  # it goes on after Sunday's midnight
        return None if stop is None or self.ranges == ((0, _WEEK_MINUTES),) else _said(stop)

    def next_start(self, moment: datetime) -> str | None:
        """When it begins next after a local time that it does not cover, as a person says it; None for never."""
        if not self.ranges or self.covers(moment):
            return None
        minute = _minute_of(moment)
        return _said(min((start for start, _ in self.ranges), key=lambda start: (start - minute) % _WEEK_MINUTES))


@lru_cache(maxsize=16)  # the same few are looked up every other second
def parse_schedule(text: str) -> Schedule:
    """The times that a person wrote, none for empty text; raises `ValueError` that says what would be right."""
    if len(text) > _MAX_CHARS:
        raise ValueError(f"expected at most {_MAX_CHARS} characters")
    pieces: list[tuple[int, int]] = []
    for entry in text.lower().split(","):
        if entry.strip():
            pieces += _pieces(entry.strip())
    return Schedule(_joined(pieces))


def _pieces(entry: str) -> list[tuple[int, int]]:
    match = _ENTRY.fullmatch(entry)
    if match is None:
        raise ValueError(f"{entry!r} is not a time of the week: write it like mon-fri 09:00-18:00 or 22:00-06:00")
    first, last, *clock = match.groups()
    start, stop = _minutes(*clock[:2]), _minutes(*clock[2:])
    if start == _DAY_MINUTES or start == stop:
        raise ValueError(f"{entry!r} begins where it ends; a whole day is 00:00-24:00")
    pieces = []
    for day in _days(first, last):
        begin = day * _DAY_MINUTES + start
        end = begin + (stop - start) % _DAY_MINUTES if stop != _DAY_MINUTES else (day + 1) * _DAY_MINUTES
        pieces.append((begin, min(end, _WEEK_MINUTES)))
        if end > _WEEK_MINUTES:
            pieces.append((0, end - _WEEK_MINUTES))  # Sunday's night belongs to Monday's morning
    return pieces


def _days(first: str | None, last: str | None) -> list[int]:
    if first is None or (first in ("daily", "everyday") and last is None):
        return list(range(7))
    start, stop = _day(first), _day(last or first)
    return [(start + offset) % 7 for offset in range((stop - start) % 7 + 1)]


def _day(name: str) -> int:
    # "monday", "mond" and "mon" are the same day; "m" might be none.
    if name[:3] not in DAYS:
        raise ValueError(f"{name!r} is not a day: they are {', '.join(DAYS)}")
    return DAYS.index(name[:3])


def _minutes(hours: str, minutes: str) -> int:
    value = int(hours) * 60 + int(minutes)
    if int(minutes) > 59 or value > _DAY_MINUTES:
        raise ValueError(f"{hours}:{minutes} is not a time of day")
    return value


def _joined(pieces: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The same minutes in as few ranges as there can be."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(pieces):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return tuple(joined)


def _minute_of(moment: datetime) -> int:
    return moment.weekday() * _DAY_MINUTES + moment.hour * 60 + moment.minute


def _said(minute: int) -> str:
    day, rest = divmod(minute % _WEEK_MINUTES, _DAY_MINUTES)
    return f"{DAYS[day]} {rest // 60:02}:{rest % 60:02}"
