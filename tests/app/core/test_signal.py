"""Signals: every waiting task is woken, and no wake-up is lost between a look and a wait."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from app.core.signal import Signal


async def woken_by(signal: Signal, wait: Callable[[], Awaitable[None]]) -> tuple[bool, bool]:
    """Whether a waiting task returned before `notify`, and after it."""
    done = False

    async def waiting() -> None:
        nonlocal done
        await wait()
        done = True

    async with trio.open_nursery() as nursery:
        nursery.start_soon(waiting)
        await wait_all_tasks_blocked()
        before = done
        signal.notify()
        await wait_all_tasks_blocked()
        after = done
        nursery.cancel_scope.cancel()
    return before, after


async def test_wait_returns_after_the_next_notify_and_not_because_of_an_earlier_one() -> None:
    signal = Signal()
    signal.notify()
    assert await woken_by(signal, signal.wait) == (False, True)


async def test_all_waiting_tasks_are_woken() -> None:
    signal, woken = Signal(), []

    async def waiting(number: int) -> None:
        await signal.wait()
        woken.append(number)

    async with trio.open_nursery() as nursery:
        for number in range(3):
            nursery.start_soon(waiting, number)
        await wait_all_tasks_blocked()
        signal.notify()
    assert sorted(woken) == [0, 1, 2]


async def test_a_notify_between_a_look_and_a_wait_is_not_lost() -> None:
    signal = Signal()
    seen = signal.version
    await trio.lowlevel.checkpoint()
    signal.notify()
    signal.notify()
    assert await woken_by(signal, lambda: signal.wait_beyond(seen)) == (True, True)
    assert await woken_by(signal, lambda seen=signal.version: signal.wait_beyond(seen)) == (False, True)  # type: ignore[misc]


async def test_wait_for_returns_only_once_its_condition_holds() -> None:
    signal, facts = Signal(), [False]
    assert await woken_by(signal, lambda: signal.wait_for(lambda: facts[0])) == (False, False)
    facts[0] = True
    assert await woken_by(signal, lambda: signal.wait_for(lambda: facts[0])) == (True, True)


async def test_a_cancelled_wait_leaves_the_signal_as_it_was() -> None:
    signal = Signal()
    with trio.CancelScope() as scope:
        scope.cancel()
        await signal.wait_beyond(signal.version)
    assert scope.cancelled_caught
    assert await woken_by(signal, signal.wait) == (False, True)


@pytest.mark.parametrize("missed", [False, True])
async def test_wait_beyond_is_a_checkpoint(missed: bool) -> None:
    signal = Signal()
    if missed:
        signal.notify()
    with trio.CancelScope() as scope:
        scope.cancel()
        await signal.wait_beyond(0)
    assert scope.cancelled_caught
