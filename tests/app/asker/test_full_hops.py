"""Hops without room: a refusal is about sessions of one size, and what can never fit is said at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from app.asker.asker import Asker, PromptTooLong, ReplyTooLong
from app.asker.reply import ReplyStats
from app.core.errors import AppError
from app.routing.route import NoRoute
from app.serving.block_server import BlockServer
from app.session.frame import HopError
from app.session.wire import PROTOCOL, Kind, decode, encode_hop_error
from tests.app.hash_model import HashEnds, HashRunner, greedy
from tests.app.session_swarm import PROMPT, SessionSwarm, ask, no_leaks, open_swarm

CACHE = 2000


async def serve_small(swarm: SessionSwarm) -> BlockServer:
    """A hop `small` with the second half of the blocks, which announces each second how much room it has."""
    server = await swarm.serve("small", HashRunner(4, 8, CACHE))

    async def announce() -> None:
        while "small" in swarm.announcements:
            said = swarm.announcements["small"]
            swarm.announcements["small"] = replace(
                said, sequence=said.sequence + 1, kv_free_tokens=server.kv_free_tokens
            )
            await trio.sleep(1)

    swarm.nursery.start_soon(announce)
    return server


async def ask_for(asker: Asker, tokens: int, owner: str = "", count: int = 2) -> ReplyStats:
    """A short reply in a session of so many tokens; raises as replies do."""
    async with asker.reply(PROMPT, count, max_tokens=tokens - len(PROMPT), owner=owner) as reply:
        async for _ in reply:
            pass
    assert reply.stats.token_ids == greedy(PROMPT, count)
    return reply.stats


async def ask_in_vain(asker: Asker, tokens: int, owner: str = "") -> AppError:
    with pytest.raises(AppError) as caught:
        await ask_for(asker, tokens, owner)
    return caught.value


def counted_orders(swarm: SessionSwarm, name: str) -> Iterator[int]:
    """Count the orders to open a session that a hop has got since the last look."""
    times: list[float] = []
    server = swarm.servers[name]
    usual = server._open

    async def count(*args: Any) -> Any:
        times.append(trio.current_time())
        return await usual(*args)

    server._open = count  # type: ignore[method-assign, assignment]
    while True:
        seen = len(times)
        yield seen
        del times[:seen]


@pytest.mark.parametrize("requests", [3, 12])
async def test_what_is_too_large_for_a_hop_keeps_no_other_reply_from_it(
    requests: int, autojump_clock: MockClock
) -> None:
    """Each refusal banned the hop for all replies, for longer each time: those of other programs failed for minutes."""
    async with open_swarm((0, 4)) as swarm:
        await serve_small(swarm)
        asker = await swarm.asker()
        for _ in range(requests):
            await ask_in_vain(asker, 2 * CACHE, "greedy")
            begin = trio.current_time()
            await ask_for(asker, 300, "modest")
            assert trio.current_time() - begin < 1
        assert not asker.bans.active(trio.current_time())
        assert asker.planner.book.standing("small").score == 1.0
        await no_leaks(swarm)


async def test_a_hop_is_used_again_as_soon_as_it_has_room(autojump_clock: MockClock) -> None:
    """Another asker had its cache for five minutes: replies failed for as long again after that."""
    async with open_swarm((0, 4)) as swarm:
        await serve_small(swarm)
        asker, other = await swarm.asker(), await swarm.asker("other")
        async with other.reply(PROMPT, 10**6, max_tokens=CACHE - 100) as reply:
            await anext(reply)
            until = trio.current_time() + 300
            while trio.current_time() < until:
                await anext(reply)
                error = await ask_in_vain(asker, 300)
                assert error.code == "busy"
                await trio.sleep(5)
        await trio.sleep(0.1)
        begin = trio.current_time()
        await ask_for(asker, 300)
        assert trio.current_time() - begin < 1


async def test_smaller_sessions_fit_where_a_larger_one_was_refused(autojump_clock: MockClock) -> None:
    """The larger one waits, and has its room when the other reply ends."""
    async with open_swarm((0, 4)) as swarm:
        await serve_small(swarm)
        asker, other = await swarm.asker(), await swarm.asker("other")
        async with trio.open_nursery() as nursery:
            async with other.reply(PROMPT, 10**6, max_tokens=1000) as reply:
                await anext(reply)
                nursery.start_soon(ask_for, asker, 1500)
                for _ in range(8):
                    await trio.sleep(0.25)
                    begin = trio.current_time()
                    await ask_for(asker, 300)
                    assert trio.current_time() - begin < 0.5


async def test_a_running_reply_keeps_the_hop_that_had_no_room_for_others(autojump_clock: MockClock) -> None:
    """Refusals of other replies threw the hop out of the route when another hop died, and the reply was lost."""
    async with open_swarm((0, 4), (0, 4)) as swarm:
        await serve_small(swarm)
        asker = await swarm.asker()
        async with asker.reply(PROMPT, 60, max_tokens=1000, owner="modest") as reply:
            await anext(reply)
            for _ in range(12):
                await ask_in_vain(asker, 1500, "greedy")
                await anext(reply)
            first = reply.stats.route[0].peer
            swarm.kill(first)
            del swarm.announcements[first]
            begin = trio.current_time()
            async for _ in reply:
                pass
        assert trio.current_time() - begin < 10
        assert reply.stats.token_ids == greedy(PROMPT, 60)
        assert reply.stats.route[-1].peer == "small"
        await no_leaks(swarm)


@pytest.mark.soak
async def test_what_can_never_fit_holds_nobody_back(autojump_clock: MockClock) -> None:
    """Owners with a reply at the full hop began no further one for 20 s, each time that another asked for too much."""
    async with open_swarm((0, 4)) as swarm:
        await serve_small(swarm)
        asker = await swarm.asker()

        async def greedy_one() -> None:
            while True:
                await ask_in_vain(asker, 2 * CACHE, "greedy")
                await trio.sleep(0.1)

        async def long_one() -> None:
            async with asker.reply(PROMPT, 10**6, max_tokens=600, owner="modest") as reply:
                async for _ in reply:
                    await trio.sleep(1)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(long_one)
            await trio.sleep(1)
            nursery.start_soon(greedy_one)
            for _ in range(60):
                begin = trio.current_time()
                await ask_for(asker, 100, "modest")
                assert trio.current_time() - begin < 1
                await trio.sleep(4)
            nursery.cancel_scope.cancel()


async def test_what_can_never_fit_is_said_at_once_and_asked_for_once(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 4)) as swarm:
        await serve_small(swarm)
        asker, orders = await swarm.asker(), counted_orders(swarm, "small")
        next(orders)
        error = await ask_in_vain(asker, 2 * CACHE)
        assert trio.current_time() < 1
        assert error.code == "cache_exceeded"
        assert error.peers == ("small",)
        assert "4000 tokens" in str(error)
        assert "2000" in str(error)
        assert next(orders) == 1


async def test_one_with_a_larger_cache_takes_what_is_too_large_for_another(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 4), (4, 8)) as swarm:
        await serve_small(swarm)
        swarm.announcements["small"] = replace(swarm.announcements["small"], decode_tokens_per_s=10_000.0)
        asker = await swarm.asker()
        assert (await ask_for(asker, 300)).route[-1].peer == "small"
        for _ in range(3):
            assert (await ask_for(asker, 2 * CACHE)).route[-1].peer == "n1"
            assert (await ask_for(asker, 300)).route[-1].peer == "small"
        await no_leaks(swarm)


async def test_many_that_wait_for_a_full_hop_ask_it_a_few_times_a_second_together(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 4), delay_s=0.05) as swarm:
        await serve_small(swarm)
        asker, other, orders = await swarm.asker(), await swarm.asker("other"), counted_orders(swarm, "small")
        next(orders)

        async def wait_for_room(number: int) -> None:
            with pytest.raises(NoRoute, match="no room"):
                await ask_for(asker, 300 + number * 7 % 40, f"owner {number}")

        async with other.reply(PROMPT, 10**6, max_tokens=CACHE - 100) as reply:
            await anext(reply)
            next(orders)
            async with trio.open_nursery() as nursery:
                for number in range(40):
                    nursery.start_soon(wait_for_room, number)
                await trio.sleep(0.4)
                assert next(orders) <= 40, "each once"
                await trio.sleep(2.5)
                assert next(orders) <= 2.5 * 12


@pytest.mark.parametrize("owners", [1, 30])
async def test_room_for_all_that_wait_is_taken_by_all(owners: int, autojump_clock: MockClock) -> None:
    """They ask one after the other, which must not take until some have given up."""
    async with open_swarm((0, 4), delay_s=0.05) as swarm:
        await serve_small(swarm)
        asker, other = await swarm.asker(), await swarm.asker("other")
        async with trio.open_nursery() as nursery:
            async with other.reply(PROMPT, 10**6, max_tokens=CACHE - 50) as reply:
                await anext(reply)
                for number in range(30):
                    nursery.start_soon(ask_for, asker, 60, f"owner {number % owners}", 8)
                await trio.sleep(1)
        await no_leaks(swarm)


async def test_a_reply_that_ends_makes_room_for_the_next_at_once(autojump_clock: MockClock) -> None:
    """Two owners of one asker: the second one has been refused again and again, and asks seldom by now."""
    async with open_swarm((0, 4)) as swarm:
        await serve_small(swarm)
        asker, began = await swarm.asker(), trio.Event()

        async def first() -> None:
            async with asker.reply(PROMPT, 10**6, max_tokens=CACHE - 100, owner="one") as reply:
                await anext(reply)
                began.set()
                for _ in range(30):
                    await anext(reply)
                    await trio.sleep(1)
            ended.append(trio.current_time())

        ended: list[float] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(first)
            await began.wait()
            await ask_for(asker, CACHE // 2, "two")  # so much that nobody has far more
        assert trio.current_time() < ended[0] + 1


# --- what members announce of their caches ----------------------------------------------------------------------------


def says_all(swarm: SessionSwarm, **totals: int) -> None:
    """Let members announce the size of their whole cache."""
    for name, tokens in totals.items():
        swarm.announcements[name] = replace(swarm.announcements[name], kv_total_tokens=tokens)


async def test_what_is_too_large_for_all_that_announce_their_caches_is_refused_before_a_hop_is_asked(
    autojump_clock: MockClock,
) -> None:
    async with open_swarm((0, 4), (0, 4)) as swarm:
        await serve_small(swarm)
        says_all(swarm, n0=9000, n1=500, small=CACHE)
        asker, orders = await swarm.asker(), counted_orders(swarm, "small")
        next(orders)
        with pytest.raises(ReplyTooLong, match=r"40 \+ 3960 > 2000.* lower max_tokens to 1960") as caught:
            await ask_for(asker, 2 * CACHE)
        assert caught.value.code == "cache_exceeded"
        assert (trio.current_time(), next(orders)) == (0, 0)
        stats = await ask_for(asker, CACHE)
        assert [hop.peer for hop in stats.route] == ["n0", "small"]
        with pytest.raises(PromptTooLong, match="2000 tokens, but the caches of the members hold 2000"):
            await asker.hidden_states([1] * CACHE)
        assert len(await asker.hidden_states([1] * 50)) == 50
        with pytest.raises(PromptTooLong, match="2000 tokens, but the caches of the members hold 2000"):
            await ask(asker, [1] * CACHE, 1)
        del swarm.announcements["n0"], swarm.announcements["n1"]
        with pytest.raises(NoRoute, match="nobody serves block 0"):
            await ask_for(asker, 2 * CACHE)


async def test_a_running_reply_that_loses_its_hop_waits_for_one_with_a_larger_cache(autojump_clock: MockClock) -> None:
    """What is said at once before a reply begins is no reason to end one that is being written."""
    async with open_swarm((0, 4), (4, 8)) as swarm:
        asker = await swarm.asker()
        async with asker.reply(PROMPT, 20, max_tokens=2 * CACHE) as reply:
            await anext(reply)
            await serve_small(swarm)
            says_all(swarm, small=CACHE)
            swarm.kill("n1")
            del swarm.announcements["n1"]

            async def come() -> None:
                await trio.sleep(30)
                await swarm.serve("late", HashRunner(4, 8))

            swarm.nursery.start_soon(come)
            async for _ in reply:
                pass
        assert reply.stats.token_ids == greedy(PROMPT, 20)
        assert reply.stats.route[-1].peer == "late"


@pytest.mark.parametrize(
    ("prompt", "wanted", "all_of_it", "free", "tokens"),
    [
        pytest.param(100, 10**6, 40_000, 40_000, 10_000, id="a share of the caches"),
        pytest.param(100, 3000, 40_000, 40_000, 3000, id="less is wanted"),
        pytest.param(100, 10**6, 40_000, 5000, 4900, id="there is less room now"),
        pytest.param(100, 10**6, 40_000, 50, 512, id="the usual number is waited for"),
        pytest.param(100, 512, 40_000, 50, 512, id="the usual number"),
        pytest.param(100, 16, 40_000, 50, 16, id="less than that"),
        pytest.param(1700, 10**6, 2000, 2000, 300, id="less than that ever fits"),
        pytest.param(1700, 512, 2000, 2000, 300, id="less than the usual number ever fits"),
        pytest.param(100, 10**6, 0, 0, 512, id="nobody says how much fits"),
        pytest.param(1999, 10**6, 2000, 2000, 1, id="one token"),
        pytest.param(2000, 10**6, 2000, 2000, None, id="nothing"),
    ],
)
async def test_a_reply_that_may_end_sooner_is_as_long_as_fits(
    prompt: int, wanted: int, all_of_it: int, free: int, tokens: int | None, autojump_clock: MockClock
) -> None:
    async with open_swarm((0, 8)) as swarm:
        said = replace(swarm.announcements["n0"], kv_total_tokens=all_of_it, kv_free_tokens=free)
        swarm.announcements["n0"] = said
        asker = await swarm.asker(ends=HashEnds(context_length=131_072))
        if tokens is not None:
            assert await asker.fitting_tokens(prompt, wanted) == tokens
        else:
            with pytest.raises(PromptTooLong):
                await asker.fitting_tokens(prompt, wanted)


async def test_the_context_bounds_what_fits(autojump_clock: MockClock) -> None:
    async with open_swarm((0, 8)) as swarm:
        says_all(swarm, n0=40_000)
        asker = await swarm.asker()
        assert await asker.fitting_tokens(4000, 10**6) == 96
        with pytest.raises(PromptTooLong, match="context is 4096"):
            await asker.fitting_tokens(4096, 10**6)


async def test_a_stranger_that_failed_does_not_say_how_long_replies_may_be(autojump_clock: MockClock) -> None:
    """Replies reserved a share of what it claims, which no other member has room for, and failed each time."""
    async with open_swarm((0, 4), (4, 8)) as swarm:
        says_all(swarm, n0=CACHE, n1=CACHE)
        await swarm.serve("stranger", HashRunner(0, 8), speed=100.0)
        says_all(swarm, stranger=10**9)

        async def refuse(stream: Any) -> None:
            while True:
                frame = decode(await stream.receive())
                if frame.kind == Kind.TURN:
                    error = HopError("failed", "not now")
                    await stream.send(encode_hop_error(frame.session, frame.epoch, 0, error))

        swarm.fabric.nodes["stranger"].accept(PROTOCOL, refuse)
        asker = await swarm.asker(ends=HashEnds(context_length=10**6))
        assert await asker.fitting_tokens(100, 10**6) > CACHE
        await ask(asker, PROMPT, 2)
        assert await asker.fitting_tokens(100, 10**6) < CACHE
        assert isinstance(await ask_in_vain(asker, 10 * CACHE), ReplyTooLong)
