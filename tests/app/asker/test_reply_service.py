"""The service that makes replies ready: the ends and the asker, which the first request loads and starts."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from app.asker import reply_service
from app.asker.asker import ReplyTooLong
from app.asker.reply import ReplyDone
from app.core.reasons import Reason, because
from app.routing.route import NoRoute
from tests.app.hash_model import HashEnds, HashReply, HashRunner, InlineDevice, greedy
from tests.app.session_swarm import open_swarm


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


async def test_a_reply_without_a_limit_of_its_user_ends_where_the_caches_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asked for the whole context, which fits nowhere; a number that the user named is not lowered."""
    prompt = list(range(40))
    monkeypatch.setattr(reply_service, "_prepared", lambda *_: SimpleNamespace(prompt_ids=prompt, constraint=None))
    monkeypatch.setattr(reply_service, "_settings", lambda ends, request, *_: request.max_tokens)
    monkeypatch.setattr(HashReply, "stop_string", None, raising=False)

    async def get_ends() -> Any:
        return object()

    async with open_swarm() as swarm:
        await swarm.serve("hop", HashRunner(0, 8, kv_tokens=60))
        swarm.announcements["hop"] = replace(swarm.announcements["hop"], kv_total_tokens=60)
        nobody: Any = SimpleNamespace(n_blocks=8)
        service = reply_service.ReplyService(nobody, nobody, get_ends, lambda: "")
        ends: Any = HashEnds()
        device: Any = InlineDevice()
        service._source, service._ends, service._asker, service.device = ends, ends, await swarm.asker(), device
        request = reply_service.ReplyRequest(prompt="", max_tokens=10**6, may_end_sooner=True)
        *_, done = [event async for event in service.reply(request)]
        assert isinstance(done, ReplyDone)
        assert (done.stats.token_ids, done.stats.finish_reason) == (greedy(prompt, 20), "length")
        with pytest.raises(ReplyTooLong, match="lower max_tokens to 20"):
            [event async for event in service.reply(replace(request, may_end_sooner=False))]


async def test_what_is_wrong_at_this_node_takes_the_place_of_what_it_lacks(autojump_clock: MockClock) -> None:
    """Nobody who asks waits long for what will hardly come."""

    async def never() -> Any:
        await trio.sleep_forever()

    nobody: Any = SimpleNamespace(n_blocks=2, record="home")
    why = because("model_gone", "the model's folder /m is gone")
    service = reply_service.ReplyService(nobody, nobody, never, lambda: "0 B of 1 MB", trouble=lambda: why)
    async with trio.open_nursery() as nursery:
        await nursery.start(service.run)
        began = trio.current_time()
        with pytest.raises(
            reply_service.NoModelHere, match=r"the model's folder /m is gone; put it back, or wait"
        ) as no:
            await service.training_ends()
        assert (no.value.code, trio.current_time() - began) == ("model_gone", reply_service.WAIT_IN_TROUBLE_S)
        nursery.cancel_scope.cancel()


def test_a_hole_is_explained_by_what_is_wrong_at_this_node() -> None:
    nobody: Any = SimpleNamespace(n_blocks=2, record="home")
    why: Reason | None = because("model_gone", "the model's folder /m is gone")
    service = reply_service.ReplyService(nobody, nobody, nobody, lambda: "", trouble=lambda: why)
    told = service._explained(NoRoute(0, " now: raise this node's memory limit"))
    assert str(told).startswith("no route: nobody serves block 0: the model's folder /m is gone; put it back")
    assert told.code == "model_gone"
    busy = NoRoute(0, busy=True)
    assert service._explained(busy) is busy
    why = None
    hole = NoRoute(0)
    assert service._explained(hole) is hole
