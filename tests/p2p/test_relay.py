"""Relays on one machine: places, circuits, limits; and the probe that tells who is reachable."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import trio
from trio.testing import MockClock

from p2p import sockets
from p2p.addresses import Address, parse_address
from p2p.errors import P2PError, PeerUnreachable, ProtocolError, Refused
from p2p.host.connection import Connection, Stream
from p2p.host.heartbeat import Hello
from p2p.host.host import Host
from p2p.host.messages import address_bytes, address_from_bytes, receive_message, send_message
from p2p.nat import relay_client, relay_server
from p2p.nat.hole_punching import ATTEMPTS, HolePunch, HolePuncher, PunchType, _addresses
from p2p.nat.hole_punching import PROTOCOL as DCUTR
from p2p.nat.reachability import Reach, Reachability
from p2p.nat.relay_client import RelayClient, _Place, best_relay
from p2p.nat.relay_server import RelayLimits, RelayServer
from p2p.nat.relay_wire import HOP, STOP, HopMessage, HopType, Status, StopMessage, StopType
from p2p.nat.traversal import Traversal
from p2p.network import Libp2pNetwork
from tests.p2p.network_contract import echo
from tests.p2p.nodes import GENEROUS, make_host, make_network, until
from tests.p2p.test_host import ask_echo, running

Hidden = tuple[Libp2pNetwork, Libp2pNetwork, Address]


@asynccontextmanager
async def behind_a_relay(
    limits: RelayLimits | None = None,
) -> AsyncIterator[tuple[Libp2pNetwork, Libp2pNetwork, Address]]:
    """A relay, a node that holds a place there, and that node's relayed address."""
    relay, hidden = make_network(relay=True), make_network()
    if limits is not None:
        relay.traversal.server._limits = limits
    async with relay.running(), hidden.running():
        hidden.serve("echo", echo)
        hidden.traversal.client.needed = True
        hidden.seek(relay.addresses()[0])
        await until(lambda: hidden.traversal.client.places == [relay.peer_id])
        (relayed,) = (one for one in map(parse_address, hidden.addresses()) if one.relay == relay.peer_id)
        yield relay, hidden, relayed


async def test_a_hidden_node_is_reached_through_its_relay() -> None:
    async with behind_a_relay() as (relay, hidden, relayed):
        caller = make_network()
        async with caller.running():
            caller.learn(hidden.peer_id, [str(relayed)])
            assert await caller.call(hidden.peer_id, "echo", b"hello", timeout_s=5) == b"hello"
            assert await caller.call(hidden.peer_id, "echo", bytes(1 << 20), timeout_s=10) == bytes(1 << 20)
            kinds = {link.peer: link.kind for link in caller.links()}
            assert kinds == {hidden.peer_id: "relayed", relay.peer_id: "lan"}
            # A direct way, once there is one, is preferred.
            await caller.host.dial(hidden.host.addresses[0], hidden.peer_id)
            assert {link.peer: link.kind for link in caller.links()}[hidden.peer_id] == "lan"


async def test_without_a_place_nobody_is_connected() -> None:
    relay, hermit, caller = make_network(relay=True), make_network(), make_network()
    async with relay.running(), hermit.running(), caller.running():
        hermit.seek(relay.addresses()[0])
        await until(lambda: bool(relay.links()))
        way = parse_address(relay.addresses()[0]).through(hermit.peer_id)
        caller.learn(hermit.peer_id, [str(way)])
        with pytest.raises(PeerUnreachable, match="NO_RESERVATION"):
            await caller.call(hermit.peer_id, "echo", b"", timeout_s=5)


async def test_a_node_that_is_no_relay_says_so() -> None:
    plain, caller, target = make_network(relay=False), make_network(), make_network()
    async with plain.running(), caller.running():
        way = parse_address(plain.addresses()[0]).through(target.peer_id)
        caller.learn(target.peer_id, [str(way)])
        with pytest.raises(PeerUnreachable, match="hop"):
            await caller.call(target.peer_id, "echo", b"", timeout_s=5)


async def test_a_circuit_ends_at_its_limit_and_the_next_one_works() -> None:
    async with behind_a_relay(RelayLimits(circuit_bytes=1 << 20, bytes_per_s=1 << 30)) as (_, hidden, relayed):
        caller = make_network()
        async with caller.running():
            caller.learn(hidden.peer_id, [str(relayed)])
            with pytest.raises(P2PError):
                await caller.call(hidden.peer_id, "echo", bytes(4 << 20), timeout_s=10)
            caller.learn(hidden.peer_id, [str(relayed)])
            assert await caller.call(hidden.peer_id, "echo", b"small", timeout_s=5) == b"small"


async def test_places_and_circuits_are_bounded() -> None:
    relay = make_host()
    server = RelayServer(relay, RelayLimits(reservations=2, circuits_per_peer=1))
    server.enable()
    hosts = [make_host() for _ in range(3)]
    clients = [RelayClient(host) for host in hosts]
    caller = make_host()
    RelayClient(caller)
    async with running(relay, caller, *hosts):
        for host, client in zip(hosts, clients, strict=True):
            connection = await host.connect(relay.peer_id, relay.addresses)
            client.heard_of(relay.peer_id, connection.address)
            await client._reserve(relay.peer_id)
        assert [bool(client.places) for client in clients] == [True, True, False]
        ways = [relay.addresses[0].through(host.peer_id) for host in hosts]
        await caller.dial(ways[0], hosts[0].peer_id)
        with pytest.raises(Refused, match="RESOURCE_LIMIT"):
            await caller.dial(ways[1], hosts[1].peer_id)
        # A place ends with the connection that holds it.
        await hosts[0].disconnect(relay.peer_id)
        await until(lambda: relay.connection(hosts[0].peer_id) is None)
        await clients[2]._reserve(relay.peer_id)
        assert clients[2].places == [relay.peer_id]


async def test_one_address_takes_neither_all_places_nor_all_circuits() -> None:
    """A machine with many names would otherwise keep a relay for itself."""
    relay = make_host()
    server = RelayServer(relay, RelayLimits(reservations=8, reservations_per_address=2, circuits_per_address=1))
    server.enable()
    hosts, callers = [make_host() for _ in range(3)], [make_host() for _ in range(2)]
    clients = [RelayClient(host) for host in hosts]
    for caller in callers:
        RelayClient(caller)
    async with running(relay, *callers, *hosts):
        for host, client in zip(hosts, clients, strict=True):
            connection = await host.connect(relay.peer_id, relay.addresses)
            client.heard_of(relay.peer_id, connection.address)
            await client._reserve(relay.peer_id)
        assert [bool(client.places) for client in clients] == [True, True, False]
        ways = [relay.addresses[0].through(host.peer_id) for host in hosts]
        await callers[0].dial(ways[0], hosts[0].peer_id)
        with pytest.raises(Refused, match="RESOURCE_LIMIT"):
            await callers[1].dial(ways[1], hosts[1].peer_id)
        await callers[0].disconnect(relay.peer_id)
        await until(lambda: not server.served - {host.peer_id for host in hosts})
        await callers[1].dial(ways[1], hosts[1].peer_id)


async def test_one_address_does_not_keep_others_from_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Circuits may be idle, and each identity has some of them: a stranger with two would reach a peer alone."""
    relay, hidden, other = make_host(), make_host(), make_host()
    strangers = [make_host() for _ in range(3)]
    server, client = RelayServer(relay), RelayClient(hidden)
    server.enable()
    for caller in (other, *strangers):
        RelayClient(caller)
    elsewhere = ipaddress.ip_address("192.0.2.1")
    counted = relay_server._counted
    monkeypatch.setattr(relay_server, "_counted", lambda one: elsewhere if one.peer == other.peer_id else counted(one))
    async with running(relay, hidden, other, *strangers):
        connection = await hidden.connect(relay.peer_id, relay.addresses)
        client.heard_of(relay.peer_id, connection.address)
        await client._reserve(relay.peer_id)
        way = relay.addresses[0].through(hidden.peer_id)
        for number in range(4):
            await strangers[number % 2].dial(way, hidden.peer_id)
        with pytest.raises(Refused, match="RESOURCE_LIMIT"):
            await strangers[2].dial(way, hidden.peer_id)
        await other.dial(way, hidden.peer_id)


@pytest.mark.parametrize("leaving", ["the stream", "the connection"])
async def test_a_circuit_whose_asker_leaves_while_it_is_opened_ends_at_the_target_too(
    leaving: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The relay forgot such circuits, so a stranger filled all places of a hidden node with them, and nobody got in."""
    relay, hidden, asker = make_host(), make_host(), make_host()
    server = RelayServer(relay)
    server.enable()
    asked, asker_left, ended = trio.Event(), trio.Event(), trio.Event()
    counted_at_reset: list[int] = []
    reset = Stream.reset

    async def accept(stream: Stream) -> None:
        await receive_message(stream, StopMessage)
        asked.set()
        await asker_left.wait()
        with contextlib.suppress(P2PError):
            await send_message(stream, StopMessage(StopType.STATUS, status=Status.OK))
            while await stream.read():
                pass
        ended.set()

    async def counting_reset(stream: Stream) -> None:
        if stream.protocol == STOP and stream.peer == hidden.peer_id:
            counted_at_reset.append(len(server._circuits))
        await reset(stream)

    monkeypatch.setattr(Stream, "reset", counting_reset)
    async with running(relay, hidden, asker):
        hidden.handle(STOP, accept)
        await hidden.connect(relay.peer_id, relay.addresses)
        await until(lambda: relay.connection(hidden.peer_id) is not None)
        server._reserved[hidden.peer_id] = math.inf
        connection = await asker.connect(relay.peer_id, relay.addresses)
        stream = await connection.open_stream(HOP)
        await send_message(stream, HopMessage(HopType.CONNECT, hidden.peer_id))
        with trio.fail_after(10):
            await asked.wait()
            if leaving == "the stream":
                await stream.reset()
                await connection.ping()  # the relay has seen the reset once it answers
            else:
                await asker.disconnect(relay.peer_id)
                await until(lambda: relay.connection(asker.peer_id) is None)
            asker_left.set()
            await ended.wait()
            await until(lambda: not server._circuits)
    assert counted_at_reset == [1], "a circuit counts until it has ended"


async def test_one_address_does_not_ask_for_circuits_without_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who leaves at once holds no circuit, so the limits on open ones do not stop it."""
    relay, stranger, other = make_host(), make_host(), make_host()
    server = RelayServer(relay, RelayLimits(requests_per_address=3, requests_per_address_s=0.001))
    server.enable()
    elsewhere = ipaddress.ip_address("192.0.2.1")
    counted = relay_server._counted
    monkeypatch.setattr(relay_server, "_counted", lambda one: elsewhere if one.peer == other.peer_id else counted(one))

    async def ask(host: Host) -> Status | None:
        stream = await host.open_stream(relay.peer_id, HOP)
        await send_message(stream, HopMessage(HopType.CONNECT, make_host().peer_id))
        return (await receive_message(stream, HopMessage)).status

    async with running(relay, stranger, other):
        for host in (stranger, other):
            await host.connect(relay.peer_id, relay.addresses)
        answers = [await ask(stranger) for _ in range(5)]
        assert answers == [Status.NO_RESERVATION] * 3 + [Status.RESOURCE_LIMIT_EXCEEDED] * 2
        assert await ask(other) == Status.NO_RESERVATION
        assert relay.connection(stranger.peer_id) is not None, "others behind its address may be the ones who ask"


async def test_relays_that_are_gone_make_way_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over weeks a node meets more relays than it remembers."""
    monkeypatch.setattr(relay_client, "MAX_RELAYS", 2)
    host, relays = make_host(), [make_host() for _ in range(3)]
    client = RelayClient(host)
    for relay in relays:
        RelayServer(relay).enable()
    async with running(host, *relays):
        for relay in relays:
            connection = await host.connect(relay.peer_id, relay.addresses)
            client.heard_of(relay.peer_id, connection.address)
        assert set(client._offering) == {relay.peer_id for relay in relays[:2]}, "those that are here stay"
        await host.disconnect(relays[0].peer_id)
        client.heard_of(relays[2].peer_id, relays[2].addresses[0])
        client.needed = True
        await client._reserve(relays[2].peer_id)
        assert client.places == [relays[2].peer_id]
        assert host.extra_addresses


async def test_only_a_relay_with_a_place_may_bring_visitors() -> None:
    victim, stranger = make_host(), make_host()
    RelayClient(victim)
    async with running(victim, stranger):
        connection = await stranger.connect(victim.peer_id, victim.addresses)
        stream = await connection.open_stream(STOP)
        await send_message(stream, StopMessage(StopType.CONNECT, stranger.peer_id))
        answer = await receive_message(stream, StopMessage)
        assert answer.status == Status.PERMISSION_DENIED
        assert len(victim.connections()) == 1
        for protocol in (STOP, HOP, DCUTR):
            if protocol in victim.protocols:
                garbage = await connection.open_stream(protocol)
                await garbage.write(b"\xff\xff\x03" + bytes(1000))
        assert await ask_echo(stranger, victim) == b"hello"


async def test_a_relay_brings_no_visitors_into_the_places_of_dials() -> None:
    victim, relay = make_host(replace(GENEROUS, connections=2, inbound_share=0.5)), make_host()
    client = RelayClient(victim)
    async with running(victim, relay):
        connection = await relay.connect(victim.peer_id, victim.addresses)
        await until(lambda: bool(victim.connections()))
        client._places[relay.peer_id] = _Place(math.inf, math.inf)
        stream = await connection.open_stream(STOP)
        await send_message(stream, StopMessage(StopType.CONNECT, make_host().peer_id))
        assert (await receive_message(stream, StopMessage)).status == Status.RESOURCE_LIMIT_EXCEEDED


async def test_a_peer_dials_back_only_where_the_asker_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    asker, helper = make_host(), make_host()
    async with running(asker, helper):
        await asker.connect(helper.peer_id, helper.addresses)
        await until(lambda: helper.connection(asker.peer_id) is not None)
        probe = Reachability(helper, _never)
        assert json.loads(await probe.handle(asker.peer_id, _ask(asker.addresses[0])))["reached"] is True
        with monkeypatch.context() as patched:
            patched.setattr(helper, "proves", None)
            for elsewhere in ("/ip4/192.0.2.77/tcp/80", "/dns4/example.org/tcp/80", "/ip6/::1/tcp/80"):
                answer = await probe.handle(asker.peer_id, _ask(parse_address(elsewhere)))
                assert json.loads(answer)["reached"] is False
        closed = parse_address("/ip4/127.0.0.1/tcp/1")
        assert json.loads(await probe.handle(asker.peer_id, _ask(closed)))["reached"] is False
        # Somebody answers there, but it is not the asker.
        assert json.loads(await probe.handle(asker.peer_id, _ask(helper.addresses[0])))["reached"] is False
        await probe.handle(asker.peer_id, _ask(closed))
        with pytest.raises(Refused, match="later"):
            await probe.handle(asker.peer_id, _ask(asker.addresses[0]))
        with pytest.raises(Refused, match="directly"):
            await probe.handle("a peer that is not connected", _ask(asker.addresses[0]))
        for garbage in (b"", b"[]", b"{}", b'{"address": 5}', b"\xff", bytes(5000)):
            with pytest.raises(ProtocolError):
                await probe.handle(asker.peer_id, garbage)


def _ask(address: Address) -> bytes:
    return json.dumps({"version": 1, "address": str(address.of(None))}).encode()


async def _never(peer: str, body: bytes, timeout_s: float) -> bytes:
    raise PeerUnreachable("nobody is asked here")


@pytest.mark.parametrize(
    ("own", "votes", "state"),
    [
        ("/ip4/8.8.8.8/tcp/7464", {"a": True}, Reach.VERIFIED),
        ("/ip4/8.8.8.8/tcp/7464", {"a": False, "b": False}, Reach.UNVERIFIED),
        ("", {"a": True}, Reach.UNVERIFIED),
        ("", {"a": True, "b": True}, Reach.VERIFIED),
        ("", {"a": True, "b": False, "c": False}, Reach.UNVERIFIED),
        ("", {"a": True, "another": True, "a third one": True}, Reach.UNVERIFIED),  # one network
        ("", {}, Reach.UNKNOWN),
    ],
)
async def test_what_the_votes_say(own: str, votes: dict[str, bool], state: Reach) -> None:
    host = make_host(listen=("/ip4/127.0.0.1/tcp/0",), advertise=(own,) if own else ())
    asked: list[str] = []

    async def call(peer: str, body: bytes, timeout_s: float) -> bytes:
        asked.append(peer)
        return json.dumps({"version": 1, "reached": votes[peer]}).encode()

    async with running(host):
        probe = Reachability(host, call)
        port = host.listening[0].port
        for number, peer in enumerate(votes):
            probe.observed(ipaddress.ip_address(f"9.1.1.{number}"), Address("ip4", "8.8.8.8", port))
            host._connections[peer] = [_Open(peer)]  # type: ignore[list-item]
        probe.observed(
            ipaddress.ip_address("9.2.2.2"), Address("ip4", "192.168.0.9", port)
        )  # a private place is no news
        assert await probe.check() is state
        assert set(asked) == set(votes)
        host._connections.clear()


async def test_the_address_at_which_others_see_a_node_is_tried_however_many_ipv6_addresses_it_has() -> None:
    """A machine gets a new one every day, and four of them took all places: a port forwarded by hand was not found."""
    host = make_host(advertise=[f"/ip6/2600:1:1:1::{number:x}/tcp/7464" for number in range(1, 9)])
    async with running(host):
        probe = Reachability(host, _never)
        seen = Address("ip4", "8.8.8.8", host.listening[0].port)
        probe.observed(ipaddress.ip_address("9.1.1.1"), seen)
        assert seen in probe._candidates()
        assert len(probe._candidates()) == 4


async def test_a_long_answer_to_the_question_of_reachability_is_not_read() -> None:
    """Whoever is asked may answer 64 MiB of JSON, over which a node would think for 8 s and take 2 GB."""
    host = make_host(listen=("/ip4/127.0.0.1/tcp/0",), advertise=("/ip4/8.8.8.8/tcp/7464",))

    async def call(peer: str, body: bytes, timeout_s: float) -> bytes:
        return json.dumps({"version": 1, "reached": True, "more": [[]] * 1024}).encode()

    async with running(host):
        host._connections["a"] = [_Open("a")]  # type: ignore[list-item]
        assert await Reachability(host, call).check() is Reach.UNVERIFIED
        host._connections.clear()


async def test_where_others_saw_a_node_in_a_network_that_it_left_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """Of the addresses that hole punching names at most six, the old network's came first."""
    networks = {"192.168.1.2": "8.8.8.8", "10.0.0.7": "9.9.9.9"}  # this machine's address there: where others see it
    host = make_host()
    traversal = Traversal(host, _never, lambda task, *arguments: None, relay=None)
    for number, (own, seen) in enumerate(networks.items()):
        link = SimpleNamespace(
            peer="a",
            address=Address("ip4", f"7.7.7.{number}", 1),
            initiated=True,
            relayed=False,
            ip=ipaddress.ip_address(f"7.7.7.{number}"),
            local_ip=ipaddress.ip_address(own),
        )
        traversal.heard(cast(Connection, link), Hello((), Address("ip4", seen, 1)))
    own_ips = [ipaddress.ip_address(own) for own in networks]
    monkeypatch.setattr(sockets, "own_ips", lambda: list(own_ips))
    with trio.move_on_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(traversal._follow_network)
            await trio.sleep(3)
            assert [address.host for address in traversal.reachability.seen_at()] == ["8.8.8.8", "9.9.9.9"]
            del own_ips[0]
    assert [address.host for address in traversal.reachability.seen_at()] == ["9.9.9.9"]


class _Open:
    is_open, relayed, opened_at = True, False, 0.0

    def __init__(self, peer: str) -> None:
        # Whose names begin alike live in one network.
        self.peer, self.address = peer, Address("ip4", f"9.{ord(peer[0])}.9.{len(peer)}", 1, peer)
        self.ip = self.address.ip


async def test_a_mapped_address_is_told_once_it_is_confirmed_or_while_nobody_can_be_asked() -> None:
    host = make_host(listen=("/ip4/127.0.0.1/tcp/0",))
    reached = False

    async def call(peer: str, body: bytes, timeout_s: float) -> bytes:
        return json.dumps({"version": 1, "reached": reached}).encode()

    async with running(host):
        traversal = Traversal(host, call, lambda task, *arguments: None, relay=None)
        mapped = Address("ip4", "8.8.8.8", 7464)
        traversal._on_mapped(0, mapped)
        assert mapped.of(host.peer_id) in host.addresses  # nobody outside can be asked yet
        host._connections["a"] = [_Open("a")]  # type: ignore[list-item]
        assert await traversal.reachability.check() is Reach.UNVERIFIED
        assert mapped.of(host.peer_id) not in host.addresses
        reached = True
        assert await traversal.reachability.check() is Reach.VERIFIED
        assert mapped.of(host.peer_id) in host.addresses
        another = Address("ip4", "9.9.9.9", 7464)
        traversal._on_mapped(1, another)  # of a second uplink, not confirmed yet
        assert another.of(host.peer_id) not in host.addresses
        await traversal.reachability.check()
        assert {mapped.of(host.peer_id), another.of(host.peer_id)} <= set(host.addresses)
        reached = False
        await traversal.reachability.check()
        assert not {mapped.of(host.peer_id), another.of(host.peer_id)} & set(host.addresses)
        host._connections.clear()


def test_binary_addresses() -> None:
    for text in ("/ip4/8.8.8.8/tcp/7464", "/ip6/2606:4700::1/tcp/1", "/dns4/example.org/tcp/443"):
        assert str(address_from_bytes(address_bytes(parse_address(text)))) == text
    for garbage in (b"", b"\xff" * 10, b"\x04\x01"):
        with pytest.raises(P2PError):
            address_from_bytes(garbage)


async def test_the_puncher_knocks_on_no_private_door() -> None:
    places = [
        parse_address(text) for text in ("/ip4/192.168.1.1/tcp/80", "/ip4/127.0.0.1/tcp/22", "/ip4/8.8.8.8/tcp/1")
    ]
    message = HolePunch(PunchType.CONNECT, (*(address_bytes(place) for place in places), b"junk"))
    assert [str(address) for address in _addresses(message)] == ["/ip4/8.8.8.8/tcp/1"]
    await trio.lowlevel.checkpoint()


async def test_the_puncher_keeps_to_the_deny_list(monkeypatch: pytest.MonkeyPatch) -> None:
    dialled: list[str] = []

    async def connect(host: str, port: int, source: int | None = None) -> trio.SocketStream:
        dialled.append(host)
        raise OSError("refused")

    monkeypatch.setattr(sockets, "connect", connect)
    puncher = HolePuncher(make_host(deny=("8.8.0.0/16",)), list)
    theirs = [parse_address(text) for text in ("/ip4/8.8.8.8/tcp/1", "/ip4/9.9.9.9/tcp/1")]
    assert not await puncher._punch(make_host().peer_id, theirs, initiator=True)
    assert set(dialled) == {"9.9.9.9"}


async def test_a_peer_cannot_have_others_dialled_again_and_again() -> None:
    """Who asks for hole punching names the addresses: three times at once, then every half a minute."""
    async with behind_a_relay() as (_, hidden, relayed):
        caller = make_network()
        async with caller.running():
            hidden.traversal._puncher._seen_at = list  # nobody is to be dialled here
            caller.learn(hidden.peer_id, [str(relayed)])
            await caller.call(hidden.peer_id, "echo", b"", timeout_s=5)
            connection = hidden.host.connection(caller.peer_id)
            assert connection is not None
            answers = [await _asks_to_punch(connection) for _ in range(5)]
            assert answers[-2:] == [False, False]
            assert answers.count(True) <= ATTEMPTS


async def _asks_to_punch(connection: Connection) -> bool:
    message = HolePunch(PunchType.CONNECT, (address_bytes(parse_address("/ip4/8.8.8.8/tcp/1")),))
    try:
        stream = await connection.open_stream(DCUTR)
        await send_message(stream, message)
        await receive_message(stream, HolePunch)
    except P2PError:
        return False
    await stream.reset()
    return True


def test_places_are_taken_at_near_relays_of_different_networks() -> None:
    where = {"near": ("net1", 0.01), "nearer": ("net1", 0.005), "far": ("net2", 0.2), "unknown": ("net3", math.inf)}
    taken: list[str] = []
    for _ in range(4):
        taken.append(best_relay([relay for relay in where if relay not in taken], where.__getitem__, taken))
    assert taken == ["nearer", "far", "unknown", "near"]
