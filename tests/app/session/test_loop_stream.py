"""A stream from a node to itself: in order, never two messages at once, and a failing receiver costs no sender."""

from __future__ import annotations

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from app.core.errors import RecordError
from app.session import loop_stream
from app.session.loop_stream import each_message, loop_streams
from p2p.errors import QueueFull, StreamClosed


async def test_messages_are_taken_in_the_senders_task() -> None:
    here, there = loop_streams("me")
    taken: list[tuple[bytes, object]] = []

    async def take(message: bytes) -> None:
        taken.append((message, trio.lowlevel.current_task()))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(each_message, there, take)
        await wait_all_tasks_blocked()
        await here.send((b"a", b"b"))
        await here.send(memoryview(b"c"))
        assert taken == [(b"ab", trio.lowlevel.current_task()), (b"c", trio.lowlevel.current_task())]
        nursery.cancel_scope.cancel()


async def test_what_came_before_the_receiver_waits_for_it_in_order() -> None:
    here, there = loop_streams("me")
    taken: list[bytes] = []

    async def take(message: bytes) -> None:
        taken.append(message)

    for number in range(5):
        await here.send(b"%d" % number)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(each_message, there, take)
        await wait_all_tasks_blocked()
        assert taken == [b"0", b"1", b"2", b"3", b"4"]
        nursery.cancel_scope.cancel()


async def test_a_message_that_comes_while_another_is_taken_waits_for_its_turn() -> None:
    here, there = loop_streams("me")
    go_on = trio.Event()
    log: list[str] = []

    async def take(message: bytes) -> None:
        log.append(f"{message.decode()} begins")
        await go_on.wait()
        log.append(f"{message.decode()} ends")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(each_message, there, take)
        await wait_all_tasks_blocked()
        nursery.start_soon(here.send, b"one")
        await wait_all_tasks_blocked()
        await here.send(b"two")  # does not wait
        assert log == ["one begins"]
        go_on.set()
        await wait_all_tasks_blocked()
        assert log == ["one begins", "one ends", "two begins", "two ends"]
        nursery.cancel_scope.cancel()


async def test_a_sender_that_is_cancelled_leaves_the_rest_to_the_receiver() -> None:
    here, there = loop_streams("me")
    stuck, taken = trio.Event(), []

    async def take(message: bytes) -> None:
        if message == b"stuck":
            await stuck.wait()
        taken.append(message)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(each_message, there, take)
        await wait_all_tasks_blocked()
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as senders:
                senders.start_soon(here.send, b"stuck")
                await wait_all_tasks_blocked()
                await here.send(b"next")
                scope.cancel()
        await wait_all_tasks_blocked()
        assert taken == [b"next"]
        nursery.cancel_scope.cancel()


async def test_a_receiver_that_fails_ends_its_own_task_and_no_sender() -> None:
    here, there = loop_streams("me")

    async def take(message: bytes) -> None:
        raise RecordError("nonsense")

    async with trio.open_nursery() as nursery:

        async def receive() -> None:
            with pytest.raises(RecordError, match="nonsense"):
                await each_message(there, take)
            await there.reset()

        nursery.start_soon(receive)
        await wait_all_tasks_blocked()
        await here.send(b"x")
        await wait_all_tasks_blocked()
        with pytest.raises(StreamClosed):
            await here.send(b"y")


@pytest.mark.parametrize("handed", [True, False])
async def test_the_end_is_told_after_what_was_sent(handed: bool) -> None:
    here, there = loop_streams("me")
    taken: list[bytes] = []

    async def take(message: bytes) -> None:
        taken.append(message)

    await here.send(b"last")
    await here.aclose()
    if not handed:
        taken.append(await there.receive())
    with pytest.raises(StreamClosed):
        await (each_message(there, take) if handed else there.receive())
    assert taken == [b"last"]


async def test_messages_that_nobody_takes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_stream, "MAX_MESSAGES", 3)
    here, there = loop_streams("me")
    for _ in range(3):
        await here.send(b"x")
    with pytest.raises(QueueFull):
        await here.send(b"x")
    assert await there.receive() == b"x"
    await here.send(b"x")
