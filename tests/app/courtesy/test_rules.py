"""Courtesy: every rule through its whole cycle by fake sensors, and one by a real program that takes the processor."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import trio
import trio.testing

from app.courtesy.rules import RULES, Readings, believable, limits_at
from app.courtesy.sensors import Sensors, machine_sources
from app.courtesy.watch import LOOK_S, CourtesyWatch
from engine.device.sensors import ProcessorShare, Unavailable
from tests.app.courtesy.courtesy_scene import CALM, MONDAY, HangsForever, Recorder, Scene


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
    "pause_full_screen": Cycle(
        {"pause_full_screen": True}, {"full_screen": True}, {"full_screen": False}, "a program fills the screen"
    ),
    "pause_unused": Cycle(
        {"pause_unused": 30}, {"unused_s": 1800.0}, {"unused_s": 0.0}, "nobody uses its blocks, so they are unloaded"
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
        scene.settings = CALM  # the user disables the rule
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


def test_what_is_believable_is_kept() -> None:
    said = Readings(MONDAY, "GPU", 0.0, 0, 0.0, False, 20.0, frozenset(), 0)
    assert believable(said) == said
    assert limits_at(replace(CALM, max_upload=0), MONDAY) == (None, None)


class OwnMachine:
    """A machine of one core on which nothing runs but the programs of the test: real CPU time, and nobody else's."""

    def __init__(self) -> None:
        self._programs: list[subprocess.Popen[bytes]] = []
        self._spent_s = 0.0  # by programs that have ended

    def burn(self) -> None:
        """Start a program that takes all it can."""
        self._programs.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))

    def end(self) -> None:
        """End the programs."""
        self._spent_s = self._busy_s()
        programs, self._programs = self._programs, []
        for process in programs:
            process.kill()
            process.wait()

    def cpu_seconds(self) -> tuple[float, float, float]:
        """As `engine.device.sensors.machine_cpu_seconds`, of these programs alone."""
        return time.monotonic(), self._busy_s(), 0.0

    def _busy_s(self) -> float:
        times = [psutil.Process(program.pid).cpu_times() for program in self._programs]
        return self._spent_s + float(sum(one.user + one.system for one in times))


async def test_another_program_takes_the_processor_and_gives_it_back(tmp_path: Path) -> None:
    """A real program and the real sensor, of a machine that the test owns; the rule hesitates less than usual."""
    machine = OwnMachine()
    share = ProcessorShare(machine.cpu_seconds)
    sources = {**machine_sources(lambda: "cpu", tmp_path), "others_load": share.others_share}
    # Even a niced program beside others gets so much of a core.
    node, settings = Recorder(), replace(CALM, pause_busy=2)
    hasty = [replace(rule, after_s=1.0, release_s=1.0) for rule in RULES]
    watch = CourtesyWatch(node, lambda: settings, Sensors(sources), rules=hasty)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch.run)
            with trio.fail_after(60):
                changed = node.changed
                machine.burn()
                await changed.wait()
                assert node.reason is not None
                assert node.reason.text == "another program uses the processor"
                changed = node.changed
                machine.end()
                await changed.wait()
                assert node.changes == ["pause_busy", "resume"]
            nursery.cancel_scope.cancel()
    finally:
        machine.end()
