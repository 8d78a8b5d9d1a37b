"""The thread of a device: one for all steps, whoever asks; long work apart from it; nothing lost in between."""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable, Generator

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


@pytest.mark.parametrize("took_s", [0.1, 2 * BUSY_S])
@pytest.mark.parametrize(
    ("since_reply_s", "waits", "rests"),
    [
        (0.0, False, True),
        (BUSY_S - 0.01, False, True),
        (BUSY_S, False, False),
        (float("inf"), False, False),
        (float("inf"), True, True),
    ],
)
def test_work_that_can_wait_rests_while_replies_come(
    took_s: float, since_reply_s: float, waits: bool, rests: bool
) -> None:
    assert rest_s(took_s, since_reply_s, reply_waits=waits) == (REST * took_s if rests else 0.0)


async def test_a_call_longer_than_replies_count_as_coming_rests_too() -> None:
    device, order = DeviceThread("rested long"), list[str]()
    await device.run(order.append, "reply")
    await device.run_later(time.sleep, 1.2 * BUSY_S)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(device.run_later, order.append, "later")
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(3):
            await device.run(order.append, "reply")
        nursery.cancel_scope.cancel()
    assert order[:4] == ["reply"] * 4


class Pieces:
    """Work that can wait, each of whose pieces the test lets go on."""

    def __init__(self, count: int, order: list[str]) -> None:
        self.count, self.order = count, order
        self.begun, self.go_on = threading.Semaphore(0), threading.Semaphore(0)
        self.threads: set[int] = set()

    def run(self) -> Generator[None, None, str]:
        try:
            for number in range(self.count):
                self.threads.add(threading.get_ident())
                self.begun.release()
                self.go_on.acquire()
                self.order.append(f"piece {number}")
                yield
            return "made"
        finally:
            self.threads.add(threading.get_ident())
            self.order.append("closed")

    async def begin(self) -> None:
        """Wait until the next piece has begun."""
        await trio.to_thread.run_sync(self.begun.acquire)


async def test_a_reply_goes_between_the_pieces_of_work_that_can_wait() -> None:
    device, order = DeviceThread("in pieces"), list[str]()
    pieces = Pieces(4, order)

    async def train() -> None:
        order.append(await device.run_later(pieces.run))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(train)
        await pieces.begin()
        nursery.start_soon(device.run, order.append, "reply")
        await trio.testing.wait_all_tasks_blocked()
        pieces.go_on.release(4)
    assert order == ["piece 0", "reply", "piece 1", "piece 2", "piece 3", "closed", "made"]
    assert len(pieces.threads) == 1


async def test_pieces_are_closed_in_their_thread_when_their_caller_is_cancelled() -> None:
    device, order = DeviceThread("cancelled"), list[str]()
    pieces = Pieces(4, order)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(device.run_later, pieces.run)
        await pieces.begin()
        nursery.start_soon(device.run, order.append, "reply")  # ends the slice after this piece
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
        pieces.go_on.release()
    assert [one for one in order if one != "reply"] == ["piece 0", "closed"]
    assert len(pieces.threads) == 1
    assert await device.run_later(lambda: 1) == 1


async def test_an_error_in_a_piece_reaches_the_one_who_asked() -> None:
    def failing() -> Generator[None, None, None]:
        yield
        raise ZeroDivisionError

    device = DeviceThread()
    with pytest.raises(ZeroDivisionError):
        await device.run_later(failing)
    assert await device.run_later(lambda: 1) == 1


@pytest.mark.parametrize("beside", [False, True])
async def test_nothing_else_of_the_same_owner_runs_between_pieces(beside: bool) -> None:
    device, other, order = DeviceThread("owned"), DeviceThread("owned"), list[str]()
    pieces = Pieces(3, order)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(device.run_later, pieces.run)
        await pieces.begin()
        nursery.start_soon(device.run_beside if beside else device.run_later, order.append, "same owner")
        nursery.start_soon(other.run, order.append, "reply")  # ends the slice after this piece
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(other.run_later, order.append, "other owner")
        await trio.testing.wait_all_tasks_blocked()
        pieces.go_on.release(3)
    assert order[0] == "piece 0"
    assert order.index("other owner") < order.index("piece 1")
    assert order[-1] == "same owner"


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
