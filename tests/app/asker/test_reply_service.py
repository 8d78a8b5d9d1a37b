"""The service that makes replies ready: the ends and the asker, which the first request loads and starts."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from app.asker import reply_service


async def test_a_first_request_that_is_given_up_while_the_ends_are_loaded_does_not_block_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The asker was started by a cancelled task, in which it neither ran nor ended; every later request waited."""
    begun, over = threading.Event(), threading.Event()
    ends: Any = SimpleNamespace()

    def slowly(source: object, options: object) -> Any:
        begun.set()
        assert over.wait(20)
        return ends

    async def get_ends() -> Any:
        return object()

    monkeypatch.setattr(reply_service, "_load_ends", slowly)
    nobody: Any = SimpleNamespace(n_blocks=2)
    service = reply_service.ReplyService(nobody, nobody, get_ends, lambda: "")
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            await nursery.start(service.run)
            async with trio.open_nursery() as hasty:
                hasty.start_soon(service.training_ends)
                await trio.to_thread.run_sync(begun.wait)
                hasty.cancel_scope.cancel()
                over.set()
            _, found = await service.training_ends()
            assert found is ends
            nursery.cancel_scope.cancel()


async def test_all_who_ask_while_the_ends_are_downloaded_have_the_same_time(autojump_clock: MockClock) -> None:
    """Each waited for those before it: the eighth request failed after four minutes."""

    async def never() -> Any:
        await trio.sleep_forever()

    nobody: Any = SimpleNamespace(n_blocks=2, record="home")
    service = reply_service.ReplyService(nobody, nobody, never, lambda: "10 MB of 500 MB")
    refused: list[float] = []

    async def ask() -> None:
        with pytest.raises(reply_service.NoModelHere, match="10 MB of 500 MB"):
            await service.training_ends()
        refused.append(trio.current_time())

    async with trio.open_nursery() as nursery:
        await nursery.start(service.run)
        began = trio.current_time()
        async with trio.open_nursery() as asking:
            for _ in range(8):
                asking.start_soon(ask)
        nursery.cancel_scope.cancel()
    assert {at - began for at in refused} == {reply_service.WAIT_FOR_ENDS_S}
