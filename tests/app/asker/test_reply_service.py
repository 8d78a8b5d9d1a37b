"""The service that makes replies ready: the ends and the asker, which the first request loads and starts."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import trio

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
