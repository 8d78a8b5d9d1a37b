"""The client of the public directory against simulated nodes of it: silence until used, limits, nothing believed."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest
import trio

from p2p.addresses import Address, parse_address
from p2p.dht import public_directory
from p2p.dht.public_directory import (
    BYTES_BURST,
    BYTES_PER_DAY,
    LOOK_UPS_BURST,
    REPUBLISH_S,
    PublicDirectory,
    is_public,
)
from p2p.dht.wire import MAX_PROVIDERS, Contact, Message, Op, provider_key
from p2p.errors import Refused
from p2p.host.host import Host
from p2p.identity import Identity
from tests.p2p.test_dht import World, peer_named

ME = Identity(bytes([9]) * 32)
PUBLIC, LAN = parse_address("/ip4/5.5.2.1/tcp/7464"), parse_address("/ip4/192.168.1.2/tcp/7464")
KEY = bytes(range(32))


class Directory:
    """Simulated nodes of the public directory, and what was sent to them."""

    def __init__(self) -> None:
        self.world = World()
        self.sent: list[Message] = []
        self.learnt: dict[str, list[Address]] = {}

    async def ask(self, host: Host, protocol: str, peer: str, request: Message, timeout_s: float) -> bytes | None:
        assert protocol == "/ipfs/kad/1.0.0"
        self.sent.append(request)
        await trio.sleep(0.05)
        return await self.world.nodes[peer].handle(host.peer_id, request.encode())

    def learn(self, peer: str, addresses: Sequence[Address]) -> None:
        self.learnt[peer] = list(addresses)

    def count(self, op: Op) -> int:
        return sum(request.op is op for request in self.sent)


@asynccontextmanager
async def running(
    monkeypatch: pytest.MonkeyPatch, own: Callable[[], Sequence[Address]] = lambda: [PUBLIC, LAN], nodes: int = 24
) -> AsyncIterator[tuple[Directory, PublicDirectory]]:
    """A client whose entry point is the first of some directory nodes that know each other."""
    theirs = Directory()
    await theirs.world.mesh(nodes)
    theirs.world.clients.add(ME.peer_id)
    monkeypatch.setattr(public_directory, "ask", theirs.ask)
    entry = f"/ip4/5.5.1.1/tcp/4001/p2p/{peer_named(1)}"
    client = PublicDirectory(ME, [entry], own, theirs.learn)
    async with trio.open_nursery() as nursery:
        await nursery.start(client.run)
        yield theirs, client
        nursery.cancel_scope.cancel()


async def test_nobody_is_contacted_before_it_is_used(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.abc.Clock
) -> None:
    async with running(monkeypatch) as (theirs, client):
        await trio.sleep(3600)
        assert theirs.sent == []
        client.provide(KEY)
        await trio.sleep(30)
        assert theirs.count(Op.ADD_PROVIDER) == 8


async def test_a_key_is_published_with_public_addresses_alone_and_again_when_they_change(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.abc.Clock
) -> None:
    own: list[Address] = [LAN]
    async with running(monkeypatch, lambda: own) as (theirs, client):
        client.provide(KEY)
        await trio.sleep(60)
        assert theirs.count(Op.ADD_PROVIDER) == 0  # nobody could dial it
        own.append(PUBLIC)
        await trio.sleep(60)
        said = [request.providers for request in theirs.sent if request.op is Op.ADD_PROVIDER]
        assert set(said) == {(Contact(ME.peer_id, (PUBLIC,)),)}
        assert len(said) == 8
        own[:] = [parse_address("/ip4/5.5.2.2/tcp/7464")]
        await trio.sleep(60)
        assert theirs.count(Op.ADD_PROVIDER) == 16
        await trio.sleep(REPUBLISH_S)
        assert theirs.count(Op.ADD_PROVIDER) == 24
        await trio.sleep(3 * REPUBLISH_S)  # nobody provides it any more
        assert theirs.count(Op.ADD_PROVIDER) == 24
        assert client.status.published == 0


async def test_a_provider_is_found_and_only_its_public_addresses_are_believed(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.abc.Clock
) -> None:
    async with running(monkeypatch) as (theirs, client):
        name = parse_address("/dns4/router.lan/tcp/80")
        for provider, places in ((peer_named(500), (PUBLIC, LAN, name)), (peer_named(501), (LAN,))):
            request = Message(Op.ADD_PROVIDER, provider_key(KEY), providers=(Contact(provider, places),))
            for node in list(theirs.world.nodes.values()):
                await node.handle(provider, request.encode())
        started_at = trio.current_time()
        assert await client.find_providers(KEY, timeout_s=10) == [peer_named(500)]
        assert trio.current_time() - started_at < 5
        assert theirs.learnt == {peer_named(500): [PUBLIC.of(peer_named(500))]}


async def test_a_slow_look_up_goes_on_for_later_calls(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.abc.Clock
) -> None:
    async with running(monkeypatch) as (theirs, client):
        request = Message(Op.ADD_PROVIDER, provider_key(KEY), providers=(Contact(peer_named(500), (PUBLIC,)),))
        for node in list(theirs.world.nodes.values()):
            await node.handle(peer_named(500), request.encode())
        assert await client.find_providers(KEY, timeout_s=0.01) == []
        await trio.sleep(5)
        sent = len(theirs.sent)
        assert await client.find_providers(KEY, timeout_s=0.01) == [peer_named(500)]
        assert len(theirs.sent) == sent


async def test_look_ups_and_bytes_are_bounded_however_often_it_is_asked(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.abc.Clock
) -> None:
    async with running(monkeypatch, nodes=20) as (_, client):
        rng = random.Random(1)
        for _ in range(600):
            await client.find_providers(rng.randbytes(32), timeout_s=1)
        took_s = 600.0  # at most a second each
        assert client.status.look_ups <= LOOK_UPS_BURST + 1 + took_s / 600
        assert client.status.bytes_used <= BYTES_BURST + took_s * BYTES_PER_DAY / 86400
        assert len(client._searches) <= 64


@pytest.mark.parametrize(("hours", "nodes"), [(3, 16), pytest.param(24, 60, marks=pytest.mark.soak)])
async def test_what_a_day_of_being_found_costs(
    hours: int,
    nodes: int,
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: trio.abc.Clock,
    record_property: Callable[[str, object], None],
) -> None:
    """An idle member: two keys, this hour's and the next one's, and the look-up of a key every ten minutes.

    Every request counts as if it needed a connection of its own, so a node that keeps connections needs less.
    """
    async with running(monkeypatch, nodes=nodes) as (theirs, client):
        started_at = trio.current_time()
        for turn in range(hours * 6):
            for hour in (turn // 6, turn // 6 + 1):
                client.provide(hour.to_bytes(32))
            await client.find_providers((10_000 + turn // 6).to_bytes(32), timeout_s=3)
            await trio.sleep(started_at + 600 * (turn + 1) - trio.current_time())
        by_kind = {op.name: theirs.count(op) for op in Op}
        record_property("requests", by_kind)
        record_property("bytes", client.status.bytes_used)
        record_property("look_ups", client.status.look_ups)
        assert trio.current_time() - started_at == pytest.approx(3600 * hours)
        assert client.status.published == 3  # the last hour's key is dropped after ninety minutes
        assert client.status.look_ups == 6 * hours
        assert client.status.bytes_used <= BYTES_PER_DAY * hours / 24
        # A key is provided for two hours and kept for ninety minutes: it is published four times, at eight nodes.
        assert 8 * hours <= by_kind["ADD_PROVIDER"] <= 8 * 4 * (hours + 1)
        assert by_kind["GET_PROVIDERS"] <= 30 * client.status.look_ups
        assert by_kind["FIND_NODE"] <= 30 * (4 * (hours + 1) + 2)
        assert by_kind["PUT_VALUE"] == by_kind["GET_VALUE"] == by_kind["PING"] == 0


def test_what_is_public() -> None:
    relayed = parse_address(f"/ip4/5.5.2.1/tcp/1/p2p/{ME.peer_id}/p2p-circuit")
    inside = parse_address(f"/ip4/10.0.0.1/tcp/1/p2p/{ME.peer_id}/p2p-circuit")
    assert [is_public(address) for address in (PUBLIC, relayed, LAN, inside)] == [True, True, False, False]
    assert not is_public(parse_address("/dns4/example.org/tcp/1"))


async def test_a_node_that_names_many_does_not_come_before_those_that_others_name(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.abc.Clock
) -> None:
    """One node answers first, with as many peers as fit that do not exist: all of them were dialled before others."""
    invented = [peer_named(1000 + number) for number in range(MAX_PROVIDERS)]
    async with running(monkeypatch) as (theirs, client):
        request = Message(Op.ADD_PROVIDER, provider_key(KEY), providers=(Contact(peer_named(500), (PUBLIC,)),))
        nodes = list(theirs.world.nodes)
        for node in nodes[1:]:
            await theirs.world.nodes[node].handle(peer_named(500), request.encode())
        ask, liar = theirs.ask, nodes[0]

        async def lied(host: Host, protocol: str, peer: str, request: Message, timeout_s: float) -> bytes | None:
            if peer not in theirs.world.nodes:
                raise Refused("nobody is there")
            if peer != liar or request.op is not Op.GET_PROVIDERS:
                await trio.sleep(0.2)
                return await ask(host, protocol, peer, request, timeout_s)
            said = tuple(Contact(one, (PUBLIC,)) for one in invented)
            return Message(Op.GET_PROVIDERS, request.key, providers=said).encode()

        monkeypatch.setattr(public_directory, "ask", lied)
        await client.find_providers(KEY, timeout_s=10)
        await trio.sleep(20)
        found = await client.find_providers(KEY, timeout_s=10)
        assert set(invented) & set(found)
        assert found.index(peer_named(500)) < 3
