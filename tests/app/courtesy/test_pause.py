"""Pauses by hand and by rule: which comes first, what a restart keeps, and when a pause ends by itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from app.core.reasons import Reason
from app.courtesy.pause import LOOK_S, PauseControl

BATTERY = Reason("pause_battery", "on battery")


class Wall:
    """A wall clock that a test sets; it jumps where the machine sleeps."""

    def __init__(self) -> None:
        self.ms = 10**12

    def __call__(self) -> int:
        return self.ms


@pytest.fixture
def wall() -> Wall:
    return Wall()


@pytest.fixture
def begun(tmp_path: Path, wall: Wall) -> Callable[[], PauseControl]:
    """A new run of the node in the same home."""
    return lambda: PauseControl(tmp_path / "pause.json", lambda: None, wall)


async def test_a_rule_neither_undoes_nor_outlives_its_reason(begun: Callable[[], PauseControl]) -> None:
    pausing = begun()
    assert not pausing.view().paused
    pausing.by_rule(BATTERY)
    assert (pausing.view().paused, pausing.view().by) == (True, "rule")
    await pausing.by_hand(None)
    assert pausing.view().by == "hand"
    pausing.rule_over()
    assert pausing.view().by == "hand"
    pausing.by_rule(BATTERY)
    await pausing.resume()
    assert pausing.current is not None
    assert pausing.current.why == BATTERY
    pausing.rule_over()
    assert pausing.current is None


async def test_a_persons_pause_survives_a_restart_and_a_rules_does_not(
    begun: Callable[[], PauseControl], wall: Wall, tmp_path: Path
) -> None:
    first = begun()
    first.by_rule(BATTERY)
    assert begun().current is None
    await first.by_hand(None, patient=True)
    again = begun().current
    assert again is not None
    assert (again.patient, again.why.code) == (True, "drained_by_hand")
    await first.by_hand(60.0)
    again = begun().current
    assert again is not None
    assert (again.until_ms, again.patient) == (wall.ms + 60_000, False)
    await first.resume()
    assert begun().current is None


@pytest.mark.parametrize("damaged", [b"", b"{", b'{"until_ms": "soon"}', b"\xff" * 5000])
async def test_a_damaged_file_counts_as_a_pause(
    begun: Callable[[], PauseControl], tmp_path: Path, damaged: bytes
) -> None:
    (tmp_path / "pause.json").write_bytes(damaged)
    assert begun().view().by == "hand"


async def test_a_disk_that_takes_nothing_does_not_prevent_a_pause(tmp_path: Path, wall: Wall) -> None:
    pausing = PauseControl(tmp_path / "no such folder" / "pause.json", lambda: None, wall)
    await pausing.by_hand(None)
    assert pausing.view().paused


async def test_a_pause_with_an_end_ends_by_the_wall_clock(
    begun: Callable[[], PauseControl], wall: Wall, mock_clock: MockClock
) -> None:
    pausing = begun()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pausing.run)
        await pausing.by_hand(7200.0)
        for _ in range(3):
            mock_clock.jump(LOOK_S)
            await wait_all_tasks_blocked()
        assert pausing.current is not None, "the wall clock has not moved"
        wall.ms += 7200_001  # the machine slept
        mock_clock.jump(LOOK_S + 1)
        while pausing.current is not None:
            await pausing.wait_change()
        nursery.cancel_scope.cancel()


async def test_a_clock_that_is_set_back_makes_no_pause_longer(
    begun: Callable[[], PauseControl], wall: Wall, mock_clock: MockClock
) -> None:
    pausing = begun()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pausing.run)
        for _ in range(2):
            await pausing.by_hand(600.0)
            await wait_all_tasks_blocked()
            wall.ms -= 5 * 3600_000
            mock_clock.jump(599)
            await wait_all_tasks_blocked()
            assert pausing.current is not None
            mock_clock.jump(2)
            await wait_all_tasks_blocked()
            assert pausing.current is None
        nursery.cancel_scope.cancel()


async def test_a_pause_whose_end_went_by_while_the_node_was_off_is_over_at_once(
    begun: Callable[[], PauseControl], wall: Wall, autojump_clock: MockClock
) -> None:
    await begun().by_hand(600.0)
    wall.ms += 3600_000
    pausing = begun()
    assert pausing.current is not None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pausing.run)
        while pausing.current is not None:
            await pausing.wait_change()
        nursery.cancel_scope.cancel()
