"""Relays that mean harm, for a node that others reach only through relays."""

from __future__ import annotations

import ipaddress
import itertools
import time
from types import SimpleNamespace
from typing import cast

import pytest
import trio
from trio.testing import MockClock

from p2p import sockets
from p2p.addresses import parse_address
from p2p.errors import PeerUnreachable, StreamReset
from p2p.host.admission import ConnectionLimits
from p2p.host.connection import Connection
from p2p.host.host import Host
from p2p.identity import Identity
from p2p.nat.hole_punching import COMERS_AGAIN_S, COMERS_AT_ONCE, HolePuncher
from p2p.nat.relay_client import RelayClient
from p2p.nat.relay_wire import HopMessage, HopType, Reservation, Status
from tests.p2p.nodes import make_host

THIRD_PARTY = parse_address("/ip4/9.9.9.9/tcp/80")


@pytest.mark.parametrize(("honest_at", "within_s"), [("9.9.9.9", 90), ("8.8.8.8", 1)])
async def test_silent_relays_nearby_do_not_keep_a_node_from_one_that_answers(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, honest_at: str, within_s: float
) -> None:
    """Each of 32 that are silent was waited for alone, for 8 s, and the nearest again before all had been asked."""
    *silent, honest = (Identity.generate().peer_id for _ in range(33))
    rtts = {**dict.fromkeys(silent, 0.001), honest: 0.1}
    links = {
        relay: SimpleNamespace(rtt_s=rtt, address=parse_address("/ip4/9.9.9.9/tcp/1")) for relay, rtt in rtts.items()
    }
    host = SimpleNamespace(
        peer_id="12D3me", connection=links.get, connections=lambda: [], handle=lambda *_: None, extra_addresses=[]
    )
    client = RelayClient(cast(Host, host))

    async def ask(relay: str) -> HopMessage:
        if relay != honest:
            await trio.sleep_forever()
        return HopMessage(HopType.STATUS, status=Status.OK, reservation=Reservation(int(time.time()) + 3600))

    monkeypatch.setattr(client, "_ask_for_place", ask)
    for relay in (*silent, honest):
        host_of = honest_at if relay == honest else "9.9.9.9"
        client.heard_of(relay, parse_address(f"/ip4/{host_of}/tcp/1/p2p/{relay}"))
    client.needed = True
    with trio.move_on_after(within_s):
        await client.run()
    assert client.places == [honest]


def through_a_relay(peer: str, relay: str = "9.9.9.9") -> Connection:
    """A connection that a peer opened to this node through a relay at this address."""
    ip = ipaddress.ip_address(relay)
    return cast(Connection, SimpleNamespace(peer=peer, relayed=True, initiated=False, is_open=True, ip=ip))


@pytest.mark.parametrize("identities", [1, 4, 100])
async def test_peers_that_come_through_relays_again_and_again_have_a_third_party_dialled_seldom(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, identities: int
) -> None:
    """Each new circuit had the node dial up to 300 times the addresses that the peer named, without end."""
    puncher, tries, minutes = HolePuncher(make_host(), list), 0, 5

    async def punch(connection: Connection) -> bool:
        nonlocal tries
        tries += 1
        await trio.sleep(2.5)
        return False

    async def come(peer: str) -> None:
        while True:
            with trio.move_on_after(5):  # then it opens another circuit
                await puncher.accompany(through_a_relay(peer))

    monkeypatch.setattr(puncher, "_initiate", punch)
    with trio.move_on_after(minutes * 60):
        async with trio.open_nursery() as nursery:
            for number in range(identities):
                nursery.start_soon(come, f"peer {number}")
    assert tries <= min(COMERS_AT_ONCE + minutes * 60 / COMERS_AGAIN_S, identities * (3 + minutes * 2)) + 1


@pytest.mark.parametrize(("relay", "circuits", "lasting_s"), [("9.9.9.9", 4, 2.0), ("6.6.6.6", 64, 30.0)])
async def test_new_identities_at_one_address_do_not_use_up_hole_punching(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, relay: str, circuits: int, lasting_s: float
) -> None:
    """Each attempt that another could make went to the one who came at that moment; honest peers stayed at relays.

    A relay lets one address have four circuits to a node; one that means harm itself brings as many as it likes.
    """
    puncher, tried = HolePuncher(make_host(), list), set[str]()

    async def punch(connection: Connection) -> bool:
        tried.add(connection.peer)
        if connection.peer.startswith("honest"):
            return True
        raise StreamReset("reset")

    async def come_again(circuit: int) -> None:
        for number in itertools.count():
            with trio.move_on_after(lasting_s):
                await puncher.accompany(through_a_relay(f"liar {circuit} {number}", relay))

    monkeypatch.setattr(puncher, "_initiate", punch)
    async with trio.open_nursery() as nursery:
        for circuit in range(circuits):
            nursery.start_soon(come_again, circuit)
        await trio.sleep(120)
        for number in range(5):
            nursery.start_soon(puncher.accompany, through_a_relay(f"honest {number}"))
            await trio.sleep(45)
            assert f"honest {number}" in tried
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("comes", [True, False])
async def test_a_punched_connection_of_a_peer_that_came_counts_as_one_that_was_accepted(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, comes: bool
) -> None:
    """With 64 connections of its address a peer gets no further one by way of hole punching.

    What this node dials is counted by the host, once it is open.
    """
    host, adopted = make_host(ConnectionLimits()), 0
    assert THIRD_PARTY.ip is not None
    for _ in range(ConnectionLimits().connections_per_ip):
        host.admission.opened(THIRD_PARTY.ip, dialled=False)

    async def connect(*_: object) -> trio.SocketStream:
        here, there = trio.socket.socketpair()
        there.close()
        return trio.SocketStream(here)

    async def adopt(*_: object) -> None:
        nonlocal adopted
        adopted += 1
        raise PeerUnreachable("far enough")

    monkeypatch.setattr(sockets, "connect", connect)
    monkeypatch.setattr(host, "adopt", adopt)
    await HolePuncher(host, list)._punch("somebody", [THIRD_PARTY], initiator=not comes)
    assert (adopted == 0) == comes
    assert host.admission.handshakes_in_flight == 0
