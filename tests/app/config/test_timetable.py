"""Times of the week: written by people, over midnight and over Sunday, by the clock on the wall."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.config.timetable import DAYS, Schedule, parse_schedule

MONDAY = datetime(2026, 3, 2)


def at(text: str) -> datetime:
    day, clock = text.split()
    hours, minutes = clock.split(":")
    return MONDAY + timedelta(days=DAYS.index(day), hours=int(hours), minutes=int(minutes))


@pytest.mark.parametrize(
    ("schedule", "inside", "outside"),
    [
        ("mon-fri 09:00-18:00", ("mon 09:00", "fri 17:59"), ("mon 08:59", "fri 18:00", "sat 12:00")),
        ("mon-fri 9:00-18:00, sat 10:00-12:00", ("sat 10:00",), ("sat 12:00", "sun 11:00")),
        ("22:00-06:00", ("mon 22:00", "tue 05:59", "mon 03:00", "sun 23:00"), ("mon 06:00", "sun 21:59")),
        ("fri 22:00-06:00", ("fri 22:00", "sat 05:59"), ("fri 05:00", "sat 22:00")),
        ("sun 22:00-06:00", ("sun 23:59", "mon 00:00", "mon 05:59"), ("sun 05:00", "mon 22:00")),
        ("sat-mon 12:00-13:00", ("sat 12:00", "sun 12:00", "mon 12:30"), ("tue 12:00", "fri 12:00")),
        ("Monday - Tuesday 00:00 - 24:00", ("mon 00:00", "tue 23:59"), ("wed 00:00",)),
        ("daily 00:00-24:00", ("mon 00:00", "sun 23:59"), ()),
        ("", (), ("mon 00:00",)),
        (" , ", (), ("mon 00:00",)),
    ],
)
def test_what_a_timetable_covers(schedule: str, inside: tuple[str, ...], outside: tuple[str, ...]) -> None:
    parsed = parse_schedule(schedule)
    assert [time for time in inside if not parsed.covers(at(time))] == []
    assert [time for time in outside if parsed.covers(at(time))] == []


@pytest.mark.parametrize(
    "wrong",
    [
        "9-17",
        "mon",
        "mon 09:00",
        "mon-fri",
        "xyz 09:00-10:00",
        "mon 25:00-26:00",
        "mon 09:60-10:00",
        "mon 24:01-01:00",
        "mon 09:00-09:00",
        "mon 24:00-06:00",
        "mon 09:00-10:00;tue 09:00-10:00",
        "٠٩:00-10:00",
        "daily-fri 09:00-10:00",
        "mon 09:00-18:00," * 100,
    ],
)
def test_what_is_no_timetable_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_schedule(wrong)


def test_when_it_begins_and_ends_is_said() -> None:
    parsed = parse_schedule("mon-fri 09:00-18:00, sun 23:00-01:00")
    assert parsed.next_start(at("mon 08:00")) == "mon 09:00"
    assert parsed.next_start(at("fri 18:00")) == "sun 23:00"
    assert parsed.next_start(at("mon 10:00")) is None
    assert parsed.until(at("mon 10:00")) == "mon 18:00"
    assert parsed.until(at("sun 23:30")) == "mon 01:00"
    assert parsed.until(at("mon 00:30")) == "mon 01:00"
    assert Schedule().next_start(at("mon 08:00")) is None
    assert parse_schedule("00:00-24:00").until(at("mon 08:00")) is None


def test_the_clock_on_the_wall_decides_when_summer_time_begins() -> None:
    """Of the night in which 02:00 becomes 03:00 and of the one in which it comes twice, by every real second."""
    parsed, berlin = parse_schedule("01:00-04:00"), ZoneInfo("Europe/Berlin")
    for day, hours in ((datetime(2026, 3, 29), 2), (datetime(2026, 10, 25), 4)):
        start = datetime(day.year, day.month, day.day, tzinfo=berlin).astimezone(UTC)
        local = [(start + timedelta(minutes=minute)).astimezone(berlin) for minute in range(8 * 60)]
        assert sum(parsed.covers(moment) for moment in local) == hours * 60


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 1439), st.integers(1, 1439)), max_size=8),
    st.integers(0, 10079),
)
def test_a_minute_is_covered_when_some_entry_covers_it(entries: list[tuple[int, int, int]], minute: int) -> None:
    def clock(value: int) -> str:
        return f"{value % 1440 // 60:02}:{value % 60:02}"

    text = ", ".join(f"{DAYS[day]} {clock(start)}-{clock(start + length)}" for day, start, length in entries)
    expected = any((minute - (day * 1440 + start)) % 10080 < length for day, start, length in entries)
    assert parse_schedule(text).covers(MONDAY + timedelta(minutes=minute)) is expected
