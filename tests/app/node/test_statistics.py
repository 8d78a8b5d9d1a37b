"""What this node gave and got: summed without waiting, written in time, and lost as little as can be."""

from __future__ import annotations

import logging
import os
import sqlite3
import sys
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import trio
import trio.testing

from app.asker.reply_service import ReplyService
from app.asker.stats import AskerStats, AuditCounts
from app.config.file import load_config
from app.config.home import Home
from app.node import statistics
from app.node.node import Node
from app.node.statistics import KEPT_DAYS, LifetimeTotals, Statistics, read_days, read_peers
from app.snapshot.views import GivenView

MONDAY = date(2026, 3, 2)


class Calendar:
    def __init__(self) -> None:
        self.day = MONDAY

    def __call__(self) -> date:
        return self.day


@pytest.fixture
def calendar() -> Calendar:
    return Calendar()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "statistics.db"


def test_sums_by_day_and_peer_come_back_after_a_restart(path: Path, calendar: Calendar) -> None:
    first = Statistics(path, calendar)
    assert first.totals() == GivenView()
    first.add_served("ann", 5)
    first.add_served("ann", 2)
    first.add_served("bob", 1)
    first.add_asked(10, ["bob", "cid"])
    first.add_bytes("ann", 1000, 50)
    first.add_audits(2, 1)
    expected = GivenView(8, 10, 1000, 50, 2, 2, 1)
    assert first.totals() == first.totals(ever=True) == expected
    assert first.write()
    calendar.day += timedelta(days=1)
    second = Statistics(path, calendar)
    assert second.totals() == GivenView()
    second.add_served("ann", 1)
    assert second.totals() == GivenView(served_tokens=1, peers=1)
    assert second.totals(ever=True) == replace(expected, served_tokens=9)
    assert second.write()
    assert read_days(path, 7) == [
        ("2026-03-03", LifetimeTotals(served=1)),
        ("2026-03-02", LifetimeTotals(8, 10, 1000, 50, 2, 1)),
    ]
    assert read_peers(path, 2) == [("bob", LifetimeTotals(1, 10)), ("cid", LifetimeTotals(asked=10))]


def test_midnight_begins_a_new_day(path: Path, calendar: Calendar) -> None:
    sums = Statistics(path, calendar)
    sums.add_served("ann", 5)
    calendar.day += timedelta(days=1)
    assert sums.totals() == GivenView()
    sums.add_served("ann", 2)
    sums.write()
    assert [day.served for _, day in read_days(path, 7)] == [2, 5]


def test_single_peers_are_forgotten_and_days_are_not(
    path: Path, calendar: Calendar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics, "KEPT_ROWS", 10)
    sums = Statistics(path, calendar)
    sums.add_served("old", 1)
    sums.write()
    calendar.day += timedelta(days=KEPT_DAYS + 1)
    for number in range(30):
        sums.add_served(f"peer {number}", number + 1)
    sums.write()
    assert [peer for peer, _ in read_peers(path, 100)] == [f"peer {number}" for number in range(29, 19, -1)]
    assert [day.served for _, day in read_days(path, 100)] == [465, 1]


async def test_it_writes_now_and_then_and_at_the_end(path: Path, calendar: Calendar) -> None:
    sums = Statistics(path, calendar)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sums.run)
        sums.add_served("ann", 5)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert Statistics(path, calendar).totals() == GivenView(served_tokens=5, peers=1)


@pytest.mark.parametrize("damage", [b"this is no database", b"SQLite format 3\0" + b"\xff" * 5000])
def test_a_damaged_file_is_moved_aside_and_said(
    path: Path, calendar: Calendar, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_bytes(damage)
    sums = Statistics(path, calendar)
    sums.add_served("ann", 5)
    assert sums.write()
    assert "damaged" in caplog.text
    [aside] = path.parent.glob("statistics.db.damaged-*")
    assert aside.read_bytes() == damage
    assert Statistics(path, calendar).totals().served_tokens == 5


def test_damage_while_it_runs_costs_the_past_and_not_the_present(path: Path, calendar: Calendar) -> None:
    sums = Statistics(path, calendar)
    sums.add_served("ann", 5)
    sums.write()
    sums._close()
    path.write_bytes(b"x" * path.stat().st_size)
    sums.add_served("ann", 2)
    assert not sums.write()
    assert sums.write()
    assert Statistics(path, calendar).totals().served_tokens == 2


@pytest.mark.skipif(sys.platform == "win32", reason="an open file cannot be deleted there")
def test_a_deleted_file_is_made_anew(path: Path, calendar: Calendar, caplog: pytest.LogCaptureFixture) -> None:
    sums = Statistics(path, calendar)
    sums.add_served("ann", 5)
    sums.write()
    for file in path.parent.glob("statistics.db*"):
        file.unlink()
    sums.add_served("ann", 2)
    assert sums.write()
    assert "removed or replaced" in caplog.text
    assert Statistics(path, calendar).totals().served_tokens == 2


def test_what_a_full_disk_refuses_is_written_later(
    path: Path, calendar: Calendar, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sums = Statistics(path, calendar)

    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(sums, "_write_to", full)
        sums.add_served("ann", 5)
        assert not sums.write()
        assert not sums.write()
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1, "said once"
    sums.add_served("ann", 2)
    assert sums.write()
    assert Statistics(path, calendar).totals().served_tokens == 7


def test_the_pending_sums_of_peers_are_bounded(path: Path, calendar: Calendar) -> None:
    sums = Statistics(path, calendar)
    for number in range(5000):
        sums.add_served(f"peer {number}", 1)
    assert len(sums._peers) == statistics._MAX_PENDING
    assert sums.totals().served_tokens == 5000


def test_a_folder_that_is_no_place_for_it_stops_nothing(tmp_path: Path, calendar: Calendar) -> None:
    sums = Statistics(tmp_path / "missing" / "statistics.db", calendar)
    sums.add_served("ann", 5)
    assert not sums.write()
    assert sums.totals().served_tokens == 5


def test_a_newer_file_is_left_alone(path: Path, calendar: Calendar, caplog: pytest.LogCaptureFixture) -> None:
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 2")
    sums = Statistics(path, calendar)
    assert not sums.write()
    assert "update Shoal" in caplog.text
    assert [file.name for file in path.parent.iterdir()] == ["statistics.db"]


@pytest.mark.skipif(os.name == "nt", reason="there the profile's own rights hold")
def test_nobody_else_may_read_it(path: Path, calendar: Calendar) -> None:
    Statistics(path, calendar).write()
    assert path.stat().st_mode & 0o077 == 0


def test_audits_are_counted_once_whoever_replies(tmp_path: Path) -> None:
    upkeep = Node(Home(tmp_path / "home"), load_config(tmp_path / "none", {}), tmp_path / "cache")._upkeep
    seen = [AuditCounts(sessions=2, passed=1, failed=1)]
    first, second = (cast(ReplyService, SimpleNamespace(stats=lambda: AskerStats(audits=seen[-1]))) for _ in "12")
    upkeep._count_audits(first)
    upkeep._count_audits(first)
    seen.append(AuditCounts(sessions=3, passed=2, failed=1))
    upkeep._count_audits(first)
    upkeep._count_audits(None)
    upkeep._count_audits(second)  # another swarm: its auditor counts from nought
    today = upkeep.view().today
    assert (today.audits, today.audits_passed) == (6, 4)
