"""Hand-overs under attack: a session's cache goes to whom its asker names, and orders of strangers cost little."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio
from trio.testing import MockClock

from app.core.network import FrameStream
from app.core.span import Span
from app.serving import handover
from app.serving.block_server import BlockServer
from app.serving.hop_session import MAX_RECEIVERS
from app.session.cache_wire import HANDOVER_S, CacheRequest, decode_answer, decode_chunk, encode_request
from app.session.cache_wire import PROTOCOL as CACHE_PROTOCOL
from app.session.frame import new_session_id, plain
from app.session.wire import KEEP, PROTOCOL, CacheGrant, EpochOrder, Kind, Prefix, encode_give, encode_turn
from p2p.errors import P2PError
from p2p.memory.fabric import MemoryFabric, MemoryStream, open_fabric
from tests.app.hash_model import ROW_BYTES, WIDTH, HashRunner, InlineDevice
from tests.attacks.test_sessions import next_frame, zeros

TOKENS = 100
ID = new_session_id("honest")
REQUEST = CacheRequest(ID, Span(0, 4), 0, TOKENS, "hashes")


async def served(fabric: MemoryFabric, nursery: trio.Nursery) -> tuple[BlockServer, HashRunner, MemoryStream]:
    """A server with a session of 100 tokens of an honest asker, and its stream."""
    runner = HashRunner(0, 4)
    server = BlockServer(fabric.node("victim"), runner, InlineDevice())
    await nursery.start(server.run)
    stream = await fabric.node("honest").open("victim", PROTOCOL)
    await stream.send(encode_turn(ID, 1, KEEP, EpochOrder(Span(0, 4), "", "", 200, 0, 0)))
    await next_frame(stream, Kind.READY)
    await stream.send(zeros(ID, 1, 0, TOKENS, WIDTH))
    await next_frame(stream, Kind.DATA)
    return server, runner, stream


async def mute(stream: FrameStream) -> None:
    """Never answer."""
    await trio.sleep_forever()


async def fetched(fabric: MemoryFabric, name: str, request: CacheRequest = REQUEST) -> int:
    """Number of tokens that a peer gets."""
    stream = await fabric.nodes[name].open("victim", CACHE_PROTOCOL)
    await stream.send(encode_request(request))
    stop, _ = decode_answer(await stream.receive(), request)
    position = request.first
    while position < stop:
        position += decode_chunk(await stream.receive(), request, position, stop, len(request.span) * ROW_BYTES).rows
    return position - request.first


async def test_only_a_peer_that_the_asker_named_gets_a_sessions_cache(autojump_clock: MockClock) -> None:
    async with open_fabric() as fabric, trio.open_nursery() as nursery:
        _, runner, honest = await served(fabric, nursery)
        thief = fabric.node("thief")
        fabric.node("next")
        assert await fetched(fabric, "thief") == 0
        orders = await thief.open("victim", PROTOCOL)
        for epoch in (1, 2):  # it knows the session's id, as every hop of the route does
            await orders.send(encode_give(ID, epoch, CacheGrant("thief", TOKENS)))
        assert await fetched(fabric, "thief") == 0
        await honest.send(encode_give(ID, 1, CacheGrant("next", TOKENS)))
        assert await fetched(fabric, "thief") == 0
        assert runner.exported == 0
        assert await fetched(fabric, "next") == TOKENS
        nursery.cancel_scope.cancel()


async def test_the_asker_of_one_session_cannot_give_away_anothers(autojump_clock: MockClock) -> None:
    """It has a session of its own at the same hop, and orders the other's cache to be given to itself."""
    async with open_fabric() as fabric, trio.open_nursery() as nursery:
        _, runner, _ = await served(fabric, nursery)
        other = await fabric.node("other").open("victim", PROTOCOL)
        own = new_session_id("other")
        await other.send(encode_turn(own, 1, KEEP, EpochOrder(Span(0, 4), "", "", 64, 0, 0)))
        await next_frame(other, Kind.READY)
        await other.send(encode_give(own, 1, CacheGrant("other", TOKENS)))
        await other.send(encode_give(ID, 1, CacheGrant("other", TOKENS)))
        assert await fetched(fabric, "other") == 0
        assert runner.exported == 0
        nursery.cancel_scope.cancel()


async def test_a_request_that_comes_before_the_order_waits_for_it(autojump_clock: MockClock) -> None:
    async with open_fabric() as fabric, trio.open_nursery() as nursery:
        _, _, honest = await served(fabric, nursery)
        fabric.node("next")
        got: list[int] = []

        async def fetch() -> None:
            got.append(await fetched(fabric, "next"))

        async with trio.open_nursery() as fetching:
            fetching.start_soon(fetch)
            await trio.sleep(1.5)
            await honest.send(encode_give(ID, 1, CacheGrant("next", TOKENS)))
        assert got == [TOKENS]
        nursery.cancel_scope.cancel()


async def test_an_order_wakes_only_the_request_that_it_allows(autojump_clock: MockClock) -> None:
    """Orders are cheap and requests wait for them: many of both must not keep a hop busy."""
    async with open_fabric() as fabric, trio.open_nursery() as nursery:
        server, _, honest = await served(fabric, nursery)
        for number in range(20):
            peer = fabric.node(f"waits {number}")
            stream = await peer.open("victim", CACHE_PROTOCOL)
            await stream.send(encode_request(REQUEST))
        await trio.sleep(handover.ORDER_S / 2)
        woken = server._giver._awaited
        assert len(woken) == 20
        await honest.send(encode_give(ID, 1, CacheGrant("somebody else", TOKENS)))
        await honest.send(encode_give(ID, 1, CacheGrant("waits 7", TOKENS)))
        await trio.sleep(handover.ORDER_S / 4)
        assert {peer for _, peer in woken} == {f"waits {number}" for number in range(20) if number != 7}
        await trio.sleep(handover.ORDER_S)
        assert not woken
        nursery.cancel_scope.cancel()


async def test_a_peer_gets_no_more_than_it_was_named_for(autojump_clock: MockClock) -> None:
    async with open_fabric() as fabric, trio.open_nursery() as nursery:
        _, _, honest = await served(fabric, nursery)
        fabric.node("next")
        await honest.send(encode_give(ID, 1, CacheGrant("next", 60)))
        await trio.sleep(0.1)
        for request, tokens in (
            (REQUEST, 60),
            (CacheRequest(ID, Span(1, 3), 50, TOKENS, "hashes"), 10),
            (CacheRequest(ID, Span(0, 4), 60, TOKENS, "hashes"), 0),
            (CacheRequest(ID, Span(0, 5), 0, TOKENS, "hashes"), 0),
            (CacheRequest(ID, Span(0, 4), 0, TOKENS, "other"), 0),
            (CacheRequest(new_session_id("honest"), Span(0, 4), 0, TOKENS, "hashes"), 0),
        ):
            assert await fetched(fabric, "next", request) == tokens, request
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("end", ["close", "epoch", "rest"])
async def test_the_permission_ends_with_the_session_or_its_epoch(autojump_clock: MockClock, end: str) -> None:
    async with open_fabric() as fabric, trio.open_nursery() as nursery:
        _, _, honest = await served(fabric, nursery)
        fabric.node("next")
        await honest.send(encode_give(ID, 1, CacheGrant("next", TOKENS)))
        if end == "epoch":
            await honest.send(encode_turn(ID, 2, KEEP, EpochOrder(Span(0, 4), "", "", 200, 0, 0)))
        else:
            await honest.send(plain(Kind.CLOSE, ID, 1, rows=60 if end == "rest" else 0))
        await trio.sleep(0.1)
        assert await fetched(fabric, "next") == 0
        nursery.cancel_scope.cancel()


async def test_an_asker_names_a_few_peers_only(autojump_clock: MockClock) -> None:
    async with open_fabric() as fabric, trio.open_nursery() as nursery:
        server, _, honest = await served(fabric, nursery)
        for number in range(100):
            await honest.send(encode_give(ID, 1, CacheGrant(f"peer{number}", TOKENS)))
        await trio.sleep(0.1)
        session = server.session(ID)
        assert session is not None
        assert len(session.given_to) == MAX_RECEIVERS
        nursery.cancel_scope.cancel()


async def test_requests_that_never_come_and_readers_that_never_read_hold_nothing_up(autojump_clock: MockClock) -> None:
    async with open_fabric() as fabric, trio.open_nursery() as nursery:
        server, _, honest = await served(fabric, nursery)
        for name in ("mute", "next"):
            fabric.node(name)
        mute = await fabric.nodes["mute"].open("victim", CACHE_PROTOCOL)
        await honest.send(encode_give(ID, 1, CacheGrant("next", TOKENS)))
        for _ in range(handover.MAX_GIVEN + 3):
            stream = await fabric.nodes["next"].open("victim", CACHE_PROTOCOL)
            await stream.send(encode_request(REQUEST))
        with pytest.raises(P2PError), trio.fail_after(handover.REQUEST_S + 1):
            await mute.receive()
        await trio.sleep(handover.GIVE_S)
        assert not server._giver._giving
        assert await fetched(fabric, "next") == TOKENS
        nursery.cancel_scope.cancel()


async def test_identities_at_one_address_leave_others_room_to_have_caches_moved(autojump_clock: MockClock) -> None:
    async with open_fabric() as fabric, trio.open_nursery() as nursery:
        server, _, _ = await served(fabric, nursery)
        fabric.node("decoy").accept(CACHE_PROTOCOL, sleep_on)
        names = [*(f"identity {number}" for number in range(handover.MAX_TAKEN)), "another"]
        fabric.machine_of.update(dict.fromkeys(names[:-1], "the attacker's"))
        for name in names:
            stream = await fabric.node(name).open("victim", PROTOCOL)
            order = EpochOrder(Span(0, 4), "", "", 100, 0, None, cache=CacheGrant("decoy", 100))
            await stream.send(encode_turn(new_session_id(name), 1, KEEP, order))
            await trio.sleep(0.1)
        askers = [holder.asker for holder in server._taker._taking.values()]
        assert 1 < len(askers) < len(names)
        assert askers[-1] == "another"
        nursery.cancel_scope.cancel()


async def sleep_on(stream: FrameStream) -> None:
    await trio.sleep_forever()


async def test_an_asker_makes_a_hop_fetch_a_few_caches_at_once(autojump_clock: MockClock) -> None:
    """A stranger opens many sessions, each with the order to fetch its cache from a peer that never answers."""
    async with open_fabric() as fabric, trio.open_nursery() as nursery:
        server, _, honest = await served(fabric, nursery)
        dialled = 0

        async def mute(stream: FrameStream) -> None:
            nonlocal dialled
            dialled += 1
            await sleep_on(stream)

        fabric.node("decoy").accept(CACHE_PROTOCOL, mute)
        attacker = await fabric.node("attacker").open("victim", PROTOCOL)
        for _ in range(30):
            order = EpochOrder(Span(0, 4), "", "", 100, 0, None, cache=CacheGrant("decoy", 100))
            await attacker.send(encode_turn(new_session_id("attacker"), 1, KEEP, order))
        await trio.sleep(0.1)
        assert dialled == handover.MAX_TAKEN_PER_ASKER == len(server._fetches)
        await honest.send(plain(Kind.PROBE, ID, 1))
        assert (await next_frame(honest, Kind.STATE)).position == TOKENS
        await trio.sleep(HANDOVER_S + 5)
        assert not server._fetches
        assert not server._taker._taking
        nursery.cancel_scope.cancel()


async def test_rows_that_come_before_the_cache_are_dropped(autojump_clock: MockClock) -> None:
    """The predecessor does not wait: its rows do not get into a cache that is still on its way."""
    async with open_fabric() as fabric, trio.open_nursery() as nursery:
        _, _, honest = await served(fabric, nursery)
        runner = HashRunner(0, 4)
        await nursery.start(BlockServer(fabric.node("next"), runner, InlineDevice()).run)
        stream = await fabric.nodes["honest"].open("next", PROTOCOL)
        order = EpochOrder(Span(0, 4), "", "", 200, 0, None, cache=CacheGrant("victim", TOKENS))
        await stream.send(encode_turn(ID, 2, KEEP, order))
        await stream.send(zeros(ID, 2, 0, 50, WIDTH))
        await trio.sleep(0.1)
        await honest.send(encode_give(ID, 2, CacheGrant("next", TOKENS)))
        assert (await next_frame(stream, Kind.READY)).position == TOKENS
        assert not runner.batches
        nursery.cancel_scope.cancel()


async def test_an_order_that_follows_at_once_ends_the_fetch_of_a_cache(autojump_clock: MockClock) -> None:
    """Both orders wait for the end of a step: the second is carried out before the first has begun to fetch."""
    async with open_fabric() as fabric, trio.open_nursery() as nursery:
        fabric.node("decoy")
        await nursery.start(BlockServer(fabric.node("victim"), HashRunner(0, 4), InlineDevice(1.0)).run)
        attacker = await fabric.node("attacker").open("victim", PROTOCOL)
        busy, id = new_session_id("attacker"), new_session_id("attacker")
        order = EpochOrder(Span(0, 4), "", "", 200, 0, 0)
        await attacker.send(encode_turn(busy, 1, KEEP, order))
        await next_frame(attacker, Kind.READY)
        await attacker.send(zeros(busy, 1, 0, 1, WIDTH))
        await trio.sleep(0.2)  # in the middle of the step
        await attacker.send(encode_turn(id, 1, KEEP, replace(order, cache=CacheGrant("decoy", 200))))
        await attacker.send(encode_turn(id, 2, KEEP, order))
        assert (await next_frame(attacker, Kind.READY)).epoch == 2
        await attacker.send(plain(Kind.PROBE, id, 2))
        assert (await next_frame(attacker, Kind.STATE)).epoch == 2
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("seconds", [0, 600])
async def test_a_session_that_is_closed_while_its_cache_is_fetched_ends_the_fetch(
    autojump_clock: MockClock, seconds: int
) -> None:
    """It begins with another session's cache, and is to fetch more of it from a peer that does not answer."""
    async with open_fabric() as fabric, trio.open_nursery() as nursery:
        server, _, stream = await served(fabric, nursery)
        fabric.node("decoy").accept(CACHE_PROTOCOL, mute)
        order = EpochOrder(Span(0, 4), "", "", 200, 0, 0, prefix=Prefix(ID, 10, False), cache=CacheGrant("decoy", 200))
        id = new_session_id("honest")
        await stream.send(encode_turn(id, 1, KEEP, order))
        await trio.sleep(0.1)
        assert server._fetches
        await stream.send(plain(Kind.CLOSE, id, 1, rows=seconds))
        await trio.sleep(0.1)
        assert not server._fetches
        await trio.sleep(HANDOVER_S)
        assert not server._taker._taking
        await stream.send(plain(Kind.PROBE, ID, 1))
        assert (await next_frame(stream, Kind.STATE)).position == TOKENS
        nursery.cancel_scope.cancel()


async def test_caches_that_are_fetched_again_and_again_do_not_keep_steps_waiting(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member has the cache of its own session fetched without end, over several streams: others' tokens go on."""
    monkeypatch.setattr(handover, "chunk_tokens", lambda token_bytes: 1)
    async with open_fabric() as fabric, trio.open_nursery() as nursery:
        server, runner, honest = await served(fabric, nursery)
        id, device = new_session_id("member"), InlineDevice(0.01)
        server._device = device
        member = await fabric.node("member").open("victim", PROTOCOL)
        await member.send(encode_turn(id, 1, KEEP, EpochOrder(Span(0, 4), "", "", 200, 0, 0)))
        await next_frame(member, Kind.READY)
        await member.send(zeros(id, 1, 0, TOKENS, WIDTH))
        await next_frame(member, Kind.DATA)
        await member.send(encode_give(id, 1, CacheGrant("member", TOKENS)))

        async def fetch_for_ever() -> None:
            while True:
                await fetched(fabric, "member", replace(REQUEST, session=id))

        for _ in range(handover.MAX_GIVEN):
            nursery.start_soon(fetch_for_ever)
        await trio.sleep(1)
        exported, begun_at = runner.exported, trio.current_time()
        with trio.move_on_after(20):
            for position in range(TOKENS, TOKENS + 10):
                await honest.send(zeros(ID, 1, position, 1, WIDTH))
                await next_frame(honest, Kind.DATA)
        assert trio.current_time() - begun_at < 2
        assert runner.exported > exported
        nursery.cancel_scope.cancel()
