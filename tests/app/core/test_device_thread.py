"""The thread of a device: one for all steps, whoever asks; long work apart from it; nothing lost in between."""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing

from app.core.device_thread import BUSY_S, REST, DeviceThread, rest_s


async def test_all_work_of_a_device_runs_in_one_thread() -> None:
    names: set[int] = set()
    first, second = DeviceThread("cpu"), DeviceThread("cpu")

    async def ask(device: DeviceThread) -> None:
        names.add(await device.run(threading.get_ident))

    async with trio.open_nursery() as nursery:
        for device in (first, second) * 10:
            nursery.start_soon(ask, device)
    assert len(names) == 1
    assert threading.get_ident() not in names
    assert await DeviceThread("another").run(threading.get_ident) not in names


def test_the_thread_outlives_the_event_loop() -> None:
    ran = [trio.run(DeviceThread().run, threading.get_ident) for _ in range(2)]
    assert ran[0] == ran[1]


async def test_work_apart_does_not_wait_for_the_device_and_ends_its_thread() -> None:
    device, go_on = DeviceThread(), threading.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(device.run, go_on.wait)
        thread = await device.run_apart(threading.current_thread)
        go_on.set()
    with trio.fail_after(5):
        await trio.to_thread.run_sync(thread.join)
    assert not thread.is_alive()


async def test_an_error_reaches_the_one_who_asked() -> None:
    device = DeviceThread()
    with pytest.raises(ZeroDivisionError):
        await device.run(lambda: 1 / 0)
    assert await device.run(lambda: 1) == 1


async def test_a_cancelled_caller_waits_for_a_step_that_began() -> None:
    device, begun, go_on, done = DeviceThread(), threading.Event(), threading.Event(), []

    def step() -> None:
        begun.set()
        go_on.wait()
        done.append("done")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(device.run, step)
        await trio.to_thread.run_sync(begun.wait)
        nursery.cancel_scope.cancel()
        go_on.set()
    assert done == ["done"]


async def test_nothing_begins_for_a_caller_that_was_cancelled_before() -> None:
    ran: list[int] = []
    with trio.CancelScope() as scope:
        scope.cancel()
        await DeviceThread().run(ran.append, 1)
    assert ran == []


async def test_work_that_can_wait_gives_way() -> None:
    device, go_on = DeviceThread("waiting"), threading.Event()
    ran: list[str] = []

    async def call(run: Callable[..., Awaitable[object]], name: str) -> None:
        await run(ran.append, name)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(device.run, go_on.wait)
        await trio.testing.wait_all_tasks_blocked()
        for run, name in ((device.run_later, "training"), (device.run, "a reply"), (device.run, "another")):
            nursery.start_soon(call, run, name)
            await trio.testing.wait_all_tasks_blocked()
        go_on.set()
    assert ran == ["a reply", "another", "training"]


@pytest.mark.parametrize(
    ("took_s", "since_reply_s", "rest"),
    [(0.1, 0.0, REST * 0.1), (0.1, BUSY_S - 0.01, REST * 0.1), (0.1, BUSY_S, 0.0), (0.1, float("inf"), 0.0)],
)
def test_work_that_can_wait_rests_while_replies_come(took_s: float, since_reply_s: float, rest: float) -> None:
    assert rest_s(took_s, since_reply_s) == rest


async def test_a_reply_does_not_wait_for_the_end_of_a_rest() -> None:
    device, order = DeviceThread("rested"), list[str]()
    await device.run(order.append, "reply")
    await device.run_later(time.sleep, 0.3)  # the next one that can wait rests for twice as long
    async with trio.open_nursery() as nursery:
        nursery.start_soon(device.run_later, order.append, "later")
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(3):
            await device.run(order.append, "reply")
    assert order == ["reply"] * 4 + ["later"]
