"""The watch applying the rules: timetables, limits, the delay of an only host, and a wall clock that jumps."""

from __future__ import annotations

from dataclasses import replace

import trio
import trio.testing

from app.courtesy.watch import LOOK_S, ONLY_HOLDER_S
from tests.app.courtesy.courtesy_scene import CALM, Scene


async def test_a_timetable_pauses_and_resumes_by_the_clock(autojump_clock: trio.testing.MockClock) -> None:
    scene = Scene(replace(CALM, pause_times="mon-fri 09:00-18:00, sun 23:00-01:00"))
    scene.pace = 450  # so that it checks every quarter of an hour
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
        assert scene.node.reason.text == "paused by timetable until mon 18:00"
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
        assert "game is running; waiting because no other node hosts" in scene.watch.view().next_text
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
        scene.said = {"programs": frozenset()}  # over before the delay ends
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


async def test_a_clock_that_jumps_over_a_timetable_is_followed_at_the_next_look(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A laptop that sleeps from noon into the evening, and a clock that is set back by hours."""
    scene = Scene(replace(CALM, pause_times="mon-fri 09:00-18:00"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scene.watch.run)
        await trio.sleep(3 * LOOK_S)
        assert scene.node.reason is None, "it is eight o'clock"
        for jump_h, paused in ((4, True), (8, False), (-8, True), (72, True), (-90, False)):
            scene.jump(hours=jump_h)
            await trio.sleep(LOOK_S + 0.1)
            assert (scene.node.reason is not None) is paused, scene.now()
        nursery.cancel_scope.cancel()
