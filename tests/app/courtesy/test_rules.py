"""Courtesy: every rule through its whole cycle by fake sensors, and one by a real program that takes the processor."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from app.courtesy.rules import RULES, Readings, believable, limits_at
from app.courtesy.sensors import Sensors, machine_sources
from app.courtesy.watch import LOOK_S, CourtesyWatch
from engine.device.sensors import Unavailable
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
    watch = CourtesyWatch(node, lambda: settings, Sensors(sources), rules=hasty)
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
