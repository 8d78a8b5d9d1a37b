"""Courtesy: every rule through its whole cycle by fake sensors, and one by a real program that takes the processor."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from app.courtesy.rules import RULES, Readings, believable, limits_at
from app.courtesy.sensors import Sensors, Source, machine_sources
from app.courtesy.watch import LOOK_S, ONLY_HOLDER_S, Watch
from app.reason import Reason
from app.settings import Settings
from app.snapshot import RuleView
from engine.sensors import Unavailable

MONDAY = datetime(2026, 3, 2, 8, 0)
CALM = Settings(pause_on_battery=False, disk_floor=None)


@dataclass
class Recorder:
    """A node that writes down what it is asked."""

    alone: bool = False
    reason: Reason | None = None
    changes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    limits: tuple[int | None, int | None] | None = None
    changed: trio.Event = field(default_factory=trio.Event)

    def pause_by_rule(self, reason: Reason) -> None:
        self.reason = reason
        self._write(reason.code)

    def resume_by_rule(self) -> None:
        self.reason = None
        self._write("resume")

    def _write(self, change: str) -> None:
        self.changes.append(change)
        self.changed.set()
        self.changed = trio.Event()

    def is_only_holder(self) -> bool:
        return self.alone

    def set_limits(self, upload: int | None, download: int | None) -> None:
        self.limits = (upload, download)

    def note(self, kind: str, text: str) -> None:
        self.notes.append(text)


async def ask_here(source: Source) -> Any:
    """Fake sensors answer at once: a thread's time is not the autojumping clock's."""
    answer = source()
    if isinstance(answer, HangsForever):
        await trio.sleep_forever()
    return answer


class HangsForever:
    """What a sensor that never answers answers."""


class Scene:
    """A watch over fake sensors, whose readings and settings a test changes as it goes."""

    def __init__(self, settings: Settings = CALM, **said: Any) -> None:
        self.settings, self.said, self.node = settings, said, Recorder()
        self.pace = 1  # how fast the clock on the wall goes
        self._began = trio.current_time()
        sources = {name: self._source(name) for name in Readings.__dataclass_fields__ if name != "now"}
        self.watch = Watch(self.node, lambda: self.settings, Sensors(sources, ask_here), self.now)

    def now(self) -> datetime:
        return MONDAY + timedelta(seconds=(trio.current_time() - self._began) * self.pace)

    def _source(self, name: str) -> Source:
        def ask() -> Any:
            value = self.said.get(name, Unavailable("there is none"))
            if isinstance(value, Exception):
                raise value
            return value

        return ask

    def rule(self, code: str) -> RuleView:
        return next(view for view in self.watch.view().rules if view.code == code)


@dataclass(frozen=True)
class Cycle:
    """A rule: the settings that switch it on, readings that bring it about, and readings that end it."""

    settings: dict[str, Any]
    bad: dict[str, Any]
    good: dict[str, Any]
    text: str


CYCLES = {
    "pause_busy": Cycle(
        {"pause_busy": 30}, {"others_load": 0.6, "device": "GPU"}, {"others_load": 0.1}, "another program uses the GPU"
    ),
    "pause_memory": Cycle(
        {"pause_busy_memory": 10**9},
        {"others_bytes": 2 * 10**9, "device": "GPU"},
        {"others_bytes": 10**8},
        "another program holds the GPU's memory",
    ),
    "pause_active": Cycle({"pause_active": 5}, {"idle_s": 20.0}, {"idle_s": 301.0}, "somebody is using this machine"),
    "pause_battery": Cycle(
        {"pause_on_battery": True}, {"on_battery": True}, {"on_battery": False}, "this machine runs on battery"
    ),
    "pause_heat": Cycle({"pause_above": 80}, {"temperature_c": 81.0}, {"temperature_c": 74.0}, "the processor is hot"),
    "pause_program": Cycle(
        {"pause_programs": ("blender",)},
        {"programs": frozenset({"blender", "sh"})},
        {"programs": frozenset({"sh"})},
        "blender is running",
    ),
}


def test_every_rule_that_pauses_has_its_cycle() -> None:
    by_clock = {"pause_schedule"}
    assert {rule.code for rule in RULES if rule.pauses} == CYCLES.keys() | by_clock


@pytest.mark.parametrize("code", CYCLES)
async def test_a_rule_through_its_cycle(code: str, autojump_clock: trio.testing.MockClock) -> None:
    cycle = CYCLES[code]
    rule = next(rule for rule in RULES if rule.code == code)
    scene = Scene(replace(CALM, **cycle.settings), **cycle.good)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scene.watch.run)
        await trio.sleep(120)
        assert scene.node.changes == []
        assert scene.rule(code) == replace(scene.rule(code), enabled=True, applies=False, available=True)

        scene.said = cycle.bad
        await trio.sleep(rule.after_s + 2 * LOOK_S)
        assert scene.node.changes == [code]
        assert scene.node.reason is not None
        assert scene.node.reason.text == cycle.text
        assert rule.setting in scene.node.reason.next_step
        assert scene.rule(code).applies
        assert scene.watch.view().by == "rule"
        await trio.sleep(900)
        assert scene.node.changes == [code], "it stays as it is for as long as the cause stays"

        scene.said = cycle.good
        await trio.sleep(rule.release_s + 2 * LOOK_S)
        assert scene.node.changes == [code, "resume"]

        scene.said = cycle.bad
        await trio.sleep(rule.after_s + 2 * LOOK_S)
        scene.settings = CALM  # the person drops the rule
        scene.watch.nudge()
        await trio.testing.wait_all_tasks_blocked()
        assert scene.node.changes == [code, "resume", code, "resume"]
        nursery.cancel_scope.cancel()


BROKEN = {
    "raises": OSError("the driver is gone"),
    "is absent": Unavailable("there is none"),
    "hangs": HangsForever(),
    "is not a number": float("nan"),
    "is out of all bounds": 1e300,
    "is text": "hot",
}


@pytest.mark.parametrize("fault", BROKEN)
@pytest.mark.parametrize("code", CYCLES)
async def test_a_broken_sensor_keeps_no_node_paused(
    code: str, fault: str, autojump_clock: trio.testing.MockClock
) -> None:
    cycle = CYCLES[code]
    rule = next(rule for rule in RULES if rule.code == code)
    scene = Scene(replace(CALM, **cycle.settings), **cycle.bad)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scene.watch.run)
        await trio.sleep(rule.after_s + 2 * LOOK_S)
        assert scene.node.changes == [code]
        scene.said = {rule.needs: BROKEN[fault]}
        await trio.sleep(rule.release_s + 20)
        assert scene.node.changes == [code, "resume"]
        if fault in ("raises", "is absent", "hangs"):
            assert not scene.rule(code).available
            assert scene.rule(code).text
        nursery.cancel_scope.cancel()


async def test_a_hanging_sensor_is_not_asked_again_and_the_others_go_on() -> None:
    asked: list[int] = []
    release = trio.Event()
    token = trio.lowlevel.current_trio_token()

    def hangs() -> float:
        asked.append(1)
        trio.from_thread.run(release.wait, trio_token=token)
        return 0.5

    sensors = Sensors({"others_load": hangs, "on_battery": lambda: True})
    readings = []
    async with trio.open_nursery() as nursery:

        async def read() -> None:
            readings.append(await sensors.read({"others_load", "on_battery"}, MONDAY))

        with trio.move_on_after(0.2):
            await read()
        await read()
        assert len(asked) == 1
        assert readings[-1] == Readings(MONDAY, on_battery=True)
        release.set()
        nursery.cancel_scope.cancel()


async def test_short_peaks_and_lulls_change_nothing(autojump_clock: trio.testing.MockClock) -> None:
    scene = Scene(replace(CALM, pause_busy=50), others_load=0.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scene.watch.run)
        for _ in range(10):  # four seconds of work, six of rest
            scene.said = {"others_load": 0.9}
            await trio.sleep(4)
            scene.said = {"others_load": 0.0}
            await trio.sleep(6)
        assert scene.node.changes == []
        scene.said = {"others_load": 0.9}
        await trio.sleep(20)
        for _ in range(10):  # a game that pauses now and then
            scene.said = {"others_load": 0.0}
            await trio.sleep(20)
            scene.said = {"others_load": 0.9}
            await trio.sleep(10)
        assert scene.node.changes == ["pause_busy"]
        nursery.cancel_scope.cancel()


async def test_a_hot_device_must_cool_down_before_it_works_again(autojump_clock: trio.testing.MockClock) -> None:
    scene = Scene(replace(CALM, pause_above=80), temperature_c=80.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scene.watch.run)
        await trio.sleep(20)
        scene.said = {"temperature_c": 77.0}
        await trio.sleep(600)
        assert scene.node.changes == ["pause_heat"]
        scene.said = {"temperature_c": 74.9}
        await trio.sleep(90)
        assert scene.node.changes == ["pause_heat", "resume"]
        scene.said = {"temperature_c": 79.0}
        await trio.sleep(90)
        assert scene.node.changes == ["pause_heat", "resume"]
        nursery.cancel_scope.cancel()


async def test_a_timetable_pauses_and_resumes_by_the_clock(autojump_clock: trio.testing.MockClock) -> None:
    scene = Scene(replace(CALM, pause_times="mon-fri 09:00-18:00, sun 23:00-01:00"))
    scene.pace = 450  # so that it looks every quarter of an hour
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scene.watch.run)
        await trio.sleep(1)
        assert scene.watch.view().next_text == "pauses mon 09:00 by timetable"
        at: list[str] = []
        with trio.move_on_after((7 * 86400 + 7200) / scene.pace):
            while True:
                await scene.node.changed.wait()
                at.append(f"{scene.now():%a %H:%M} {scene.node.changes[-1]}")
        weekdays = [f"{day} {change}" for day in ("Mon", "Tue", "Wed", "Thu", "Fri") for change in EACH_DAY]
        assert at == [*weekdays, "Sun 23:00 pause_schedule", "Mon 01:00 resume", "Mon 09:00 pause_schedule"]
        assert scene.node.reason is not None
        assert scene.node.reason.text == "the timetable says so until mon 18:00"
        nursery.cancel_scope.cancel()


EACH_DAY = ("09:00 pause_schedule", "18:00 resume")


async def test_one_reason_after_another_is_one_pause(autojump_clock: trio.testing.MockClock) -> None:
    scene = Scene(replace(CALM, pause_on_battery=True, pause_programs=("game",)), on_battery=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scene.watch.run)
        await trio.sleep(10)
        scene.said = {"on_battery": True, "programs": frozenset({"game"})}
        await trio.sleep(60)
        scene.said = {"on_battery": False, "programs": frozenset({"game"})}
        await trio.sleep(60)
        scene.said = {"on_battery": False, "programs": frozenset()}
        await trio.sleep(60)
        assert scene.node.changes == ["pause_battery", "pause_program", "resume"]
        nursery.cancel_scope.cancel()


async def test_an_only_holder_is_given_a_minute(autojump_clock: trio.testing.MockClock) -> None:
    scene = Scene(replace(CALM, pause_programs=("game",)), programs=frozenset({"game"}))
    scene.node.alone = True
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scene.watch.run)
        await trio.sleep(ONLY_HOLDER_S - LOOK_S)
        assert scene.node.changes == []
        assert "game is running; waits while nobody else holds" in scene.watch.view().next_text
        assert len(scene.node.notes) == 1
        await trio.sleep(3 * LOOK_S)
        assert scene.node.changes == ["pause_program"]
        assert scene.watch.view().next_text == ""
        nursery.cancel_scope.cancel()


async def test_an_only_holder_waits_no_longer_than_it_must(autojump_clock: trio.testing.MockClock) -> None:
    scene = Scene(replace(CALM, pause_programs=("game",)), programs=frozenset({"game"}))
    scene.node.alone = True
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scene.watch.run)
        await trio.sleep(10)
        scene.node.alone = False  # another member took over
        await trio.sleep(2 * LOOK_S)
        assert scene.node.changes == ["pause_program"]
        scene.said = {"programs": frozenset()}
        await trio.sleep(60)
        scene.node.alone = True
        scene.said = {"programs": frozenset({"game"})}
        await trio.sleep(10)
        scene.said = {"programs": frozenset()}  # over before the minute is
        await trio.sleep(300)
        assert scene.node.changes == ["pause_program", "resume"]
        nursery.cancel_scope.cancel()


async def test_the_second_set_of_limits_comes_and_goes(autojump_clock: trio.testing.MockClock) -> None:
    timed = replace(CALM, max_upload=1000, limit_times="09:00-10:00", timed_upload=10, timed_download=20)
    scene, seen = Scene(timed), []
    scene.pace = 30
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scene.watch.run)
        for _ in range(3):
            await trio.sleep(3600 / scene.pace - 1)
            seen.append(scene.node.limits)
        assert seen == [(1000, None), (10, 20), (1000, None)]
        assert scene.node.changes == []
        nursery.cancel_scope.cancel()


async def test_a_full_disk_stops_no_hosting_but_is_told(autojump_clock: trio.testing.MockClock) -> None:
    scene = Scene(replace(CALM, disk_floor=10**9), disk_free_bytes=10**8)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scene.watch.run)
        await trio.sleep(60)
        assert scene.node.changes == []
        assert scene.rule("disk_floor").applies
        assert len(scene.node.notes) == 1
        scene.said = {"disk_free_bytes": 10**10}
        await trio.sleep(60)
        assert not scene.rule("disk_floor").applies
        nursery.cancel_scope.cancel()


async def test_only_what_a_rule_needs_is_asked(autojump_clock: trio.testing.MockClock) -> None:
    scene = Scene(replace(CALM, pause_on_battery=True), on_battery=False, programs=AssertionError("nobody wants this"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scene.watch.run)
        await trio.sleep(60)
        assert scene.watch.view().rules[5].text == ""
        nursery.cancel_scope.cancel()


def test_what_is_believable_is_kept() -> None:
    said = Readings(MONDAY, "GPU", 0.0, 0, 0.0, False, 20.0, frozenset(), 0)
    assert believable(said) == said
    assert limits_at(replace(CALM, max_upload=0), MONDAY) == (None, None)


def burn() -> subprocess.Popen[bytes]:
    """Another program that takes all it can of one core."""
    return subprocess.Popen([sys.executable, "-c", "while True: pass"])


async def test_another_program_takes_the_processor_and_gives_it_back(tmp_path: Path) -> None:
    """Real sensors and a real program; the rule only hesitates less than it usually does."""
    sources = machine_sources(lambda: "cpu", tmp_path)
    sources["others_load"]()
    await trio.sleep(1.0)
    calm = sources["others_load"]()
    if calm > 0.5:
        pytest.skip(f"other programs take {calm:.0%} of this machine already")
    node, settings = Recorder(), replace(CALM, pause_busy=int(50 + calm * 50))
    hasty = [replace(rule, after_s=1.0, release_s=1.0) for rule in RULES]
    watch = Watch(node, lambda: settings, Sensors(sources), rules=hasty)
    burning: list[subprocess.Popen[bytes]] = []
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch.run)
            with trio.fail_after(60):
                changed = node.changed
                burning = [burn() for _ in range(os.cpu_count() or 1)]
                await changed.wait()
                assert node.reason is not None
                assert node.reason.text == "another program uses the processor"
                changed = node.changed
                for process in burning:
                    process.kill()
                await changed.wait()
                assert node.changes == ["pause_busy", "resume"]
            nursery.cancel_scope.cancel()
    finally:
        for process in burning:
            process.kill()
            process.wait()
