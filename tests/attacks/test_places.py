"""Attacks on the room of a hop: all of its places or cache held with sessions that do nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import torch
import trio
from trio.testing import MockClock

from app.asker.asker import Asker, AskerOptions
from app.core.span import Span
from app.routing.route import NoRoute
from app.serving.admission import IDLE_S, HopRoom
from app.serving.block_server import ServerSettings
from app.session.frame import decode_hop_error, new_session_id, plain
from app.session.wire import KEEP, PROTOCOL, EpochOrder, Kind, decode, encode_turn
from engine.model.hosted_span import HostedSpan
from engine.model.kv_cache import PAGE_TOKENS
from engine.model.span import SpanOptions, load_span
from engine.session_runner import SessionRunner
from engine.sources.opening import open_source
from p2p.errors import P2PError
from tests.app.hash_model import HashEnds, HashRunner, InlineDevice
from tests.app.session_swarm import PROMPT, SessionSwarm, ask, open_swarm
from tests.attacks.test_sessions import next_frame

SMALL = EpochOrder(Span(0, 8), "", "", 1, 0, 0)  # one token


class Squatter:
    """An identity that opens sessions of one token, computes nothing, and says that it is there."""

    def __init__(self, swarm: SessionSwarm, name: str) -> None:
        self._swarm, self._name = swarm, name
        self.held: set[bytes] = set()
        self.refusals: list[str] = []

    async def hold(self, sessions: int) -> None:
        """Open as many sessions as it is let, up to so many, and keep them open."""
        fabric = self._swarm.fabric
        stream = await (fabric.nodes.get(self._name) or fabric.node(self._name)).open("n0", PROTOCOL)

        async def listen() -> None:
            with suppress(P2PError):  # a stream without sessions is closed
                while True:
                    frame = decode(await stream.receive())
                    if frame.kind == Kind.TROUBLE:
                        self.held.discard(frame.session)
                        self.refusals.append(decode_hop_error(frame).why)

        async def probe() -> None:
            while True:
                await trio.sleep(50)
                for id in list(self.held):
                    await stream.send(plain(Kind.PROBE, id, 1))

        self._swarm.nursery.start_soon(listen)
        self._swarm.nursery.start_soon(probe)
        for _ in range(sessions):
            id = new_session_id(self._name)
            self.held.add(id)
            await stream.send(encode_turn(id, 1, KEEP, SMALL))
        await trio.sleep(1)


async def own_asker(swarm: SessionSwarm) -> Asker:
    """The asker of the node that hosts the blocks."""
    members = lambda: list(swarm.announcements.values())  # noqa: E731
    asker = Asker(
        swarm.fabric.nodes["n0"],
        HashEnds(),
        InlineDevice(),
        members,
        own_server=swarm.servers["n0"].attend,
        options=AskerOptions(),
    )
    await swarm.nursery.start(asker.run)
    return asker


@asynccontextmanager
async def crowded(squatters: int) -> AsyncIterator[SessionSwarm]:
    """A hop all of whose places are held by so many identities."""
    async with open_swarm((0, 8)) as swarm:
        for number in range(squatters):
            await Squatter(swarm, f"squatter {number}").hold(64)
        assert swarm.servers["n0"].sessions >= 240
        yield swarm


@pytest.mark.parametrize("squatters", [5, 12])
async def test_sessions_that_do_nothing_do_not_hold_all_places(squatters: int, autojump_clock: MockClock) -> None:
    """Five identities held all of them for good, with 4 kbit/s."""
    async with crowded(squatters) as swarm:
        strangers = [await swarm.asker(f"honest {number}") for number in range(3)]
        for asker in (*strangers, await own_asker(swarm)):
            stats = await ask(asker, PROMPT, 3)
            assert (len(stats.token_ids), stats.recoveries) == (3, 0)


async def test_who_was_made_to_give_way_cannot_have_the_place_back(autojump_clock: MockClock) -> None:
    """The place of an asker below its share stays, whatever those above theirs order meanwhile."""
    async with crowded(5) as swarm:
        stream = await swarm.fabric.node("honest").open("n0", PROTOCOL)
        ids = [new_session_id("honest") for _ in range(30)]
        for id in ids:
            await stream.send(encode_turn(id, 1, KEEP, SMALL))
            await next_frame(stream, Kind.READY)
        await Squatter(swarm, "squatter 0").hold(64)
        for id in ids:
            await stream.send(plain(Kind.PROBE, id, 1))
            assert (await next_frame(stream, Kind.STATE)).epoch == 1


@pytest.mark.parametrize("by", ["probes", "epochs"])
async def test_a_session_that_computes_nothing_is_closed(by: str, autojump_clock: MockClock) -> None:
    async with open_swarm((0, 8)) as swarm:
        hop, id = swarm.servers["n0"], new_session_id("asker")
        stream = await swarm.fabric.node("asker").open("n0", PROTOCOL)
        closed_at = epoch = 0
        await stream.send(encode_turn(id, 1, KEEP, SMALL))
        for second in range(10, 1000, 10):
            epoch += by == "epochs"
            await stream.send(encode_turn(id, epoch, KEEP, SMALL) if by == "epochs" else plain(Kind.PROBE, id, 1))
            await trio.sleep(10)
            if not hop.sessions and not closed_at:
                closed_at = second
                break
        settings = ServerSettings()
        assert settings.unused_s <= closed_at <= settings.unused_s + settings.idle_s


# --- pages ------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def paged(tokens: int) -> AsyncIterator[SessionSwarm]:
    """A hop whose cache is leased in pages."""
    async with open_swarm() as swarm:
        await swarm.serve("n0", HashRunner(0, 8, kv_tokens=tokens, page_tokens=PAGE_TOKENS))
        yield swarm


async def test_one_asker_does_not_hold_a_small_cache_with_sessions_of_one_token(autojump_clock: MockClock) -> None:
    """Each leases a page, and counted as one token: all 64 were below any share, and the cache was full for good."""
    async with paged(64 * PAGE_TOKENS) as swarm:
        squatter = Squatter(swarm, "squatter")
        await squatter.hold(64)
        assert {*squatter.refusals} == {"cache_reserved"}
        assert swarm.servers["n0"].kv_free_tokens == 16 * PAGE_TOKENS
        assert len((await ask(await swarm.asker(), PROMPT, 3)).token_ids) == 3


async def test_several_askers_with_sessions_of_one_token_make_way_in_time(autojump_clock: MockClock) -> None:
    async with paged(64 * PAGE_TOKENS) as swarm:
        for number in range(4):
            await Squatter(swarm, f"squatter {number}").hold(64)
        assert swarm.servers["n0"].kv_free_tokens == 0
        asker, began = await swarm.asker(), trio.current_time()
        while True:
            try:
                await ask(asker, PROMPT * 5, 3)
                break
            except (NoRoute, P2PError):
                await trio.sleep(20)
        assert trio.current_time() - began <= IDLE_S + 60


def test_what_an_engine_leases_is_what_counts(tmp_path: Path) -> None:
    options = SpanOptions(torch.device("cpu"), torch.float32, kv_bytes=1 << 20)
    runner = SessionRunner(HostedSpan([load_span(open_source("tiny-random", tmp_path), 0, 4, options)]))
    room = HopRoom(runner, [], ServerSettings().admission)
    for tokens in (1, PAGE_TOKENS, PAGE_TOKENS + 1):
        free = runner.kv_free_tokens
        runner.open(bytes([tokens]), tokens)
        assert free - runner.kv_free_tokens == room.needed(tokens)
