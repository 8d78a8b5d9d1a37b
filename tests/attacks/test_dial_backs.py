"""Peers that keep others from learning that they can be dialled: by taking all dial-backs of those who are asked."""

from __future__ import annotations

import ipaddress
import itertools
import json
import math
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from p2p.addresses import Address, address_of
from p2p.errors import P2PError, Refused
from p2p.host.connection import Connection
from p2p.host.heartbeat import Hello
from p2p.host.host import Host
from p2p.nat.reachability import PEERS_ASKED, Reach, Reachability
from tests.p2p.nodes import make_host, make_network
from tests.p2p.test_host import running

OWN = address_of("8.8.8.8", 7464)


@asynccontextmanager
async def helper_asked_by(ips: Iterable[str]) -> AsyncIterator[Reachability]:
    """A helper that an identity at each of `ips` asks all the time, to dial a port that accepts and says nothing."""

    async def proves(address: Address, peer: str) -> bool:
        await trio.sleep(math.inf if peer.startswith("silent") else 0.1)
        return True

    host = SimpleNamespace(proves=proves, connection=lambda peer: connected(peer, peer.split()[1]))
    helper = Reachability(cast(Host, host), ask_nobody)

    async def keep_asking(peer: str) -> None:
        while True:
            await says(helper, peer)
            await trio.sleep(0.1)

    async with trio.open_nursery() as nursery:
        for number, ip in enumerate(ips):
            for _ in range(4):
                nursery.start_soon(keep_asking, f"silent{number} {ip}")
        await trio.sleep(0.5)
        yield helper
        nursery.cancel_scope.cancel()


def connected(peer: str, ip: str) -> Any:
    address = address_of(ip, 7464)
    return SimpleNamespace(
        peer=peer,
        relayed=False,
        is_open=True,
        ip=ipaddress.ip_address(ip),
        address=address,
        opened_at=0.0,
        in_turn=lambda work, *arguments: work(*arguments),
    )


async def ask_nobody(peer: str, body: bytes, timeout_s: float) -> bytes:
    raise AssertionError


async def says(helper: Reachability, peer: str) -> bool | None:
    """Ask for a dial-back in the name of a peer, which ends with its IP address; None if that is refused."""
    try:
        body = json.dumps({"version": 1, "address": str(address_of(peer.split()[1], 7464))}).encode()
        return bool(json.loads(await helper.handle(peer, body))["reached"])
    except Refused:
        return None


@pytest.mark.parametrize(
    "ips",
    [
        ["9.1.1.1"] * 4,
        [f"2600:1:1:1::{number}" for number in range(4)],  # one /64, which one customer has
        ["9.1.1.1"] * 4 + ["9.1.1.2"] * 4,
    ],
)
async def test_identities_of_one_address_or_two_leave_dial_backs_to_others(
    ips: list[str], autojump_clock: MockClock
) -> None:
    async with helper_asked_by(ips) as helper:
        for number in range(40):
            assert await says(helper, f"newcomer 9.2.2.{number}") is True
            await trio.sleep(0.3)


async def test_a_slow_dial_back_gives_way_to_an_address_that_has_none(autojump_clock: MockClock) -> None:
    async with helper_asked_by(f"9.1.1.{number}" for number in range(4)) as helper:
        assert await says(helper, "newcomer 9.2.2.1") is None
        await trio.sleep(2)
        assert await says(helper, "newcomer 9.2.2.2") is True


async def test_who_has_a_dial_back_already_takes_none_of_others(autojump_clock: MockClock) -> None:
    gave_way: list[str] = []

    async def ask(peer: str) -> None:
        if await says(helper, peer) is None:
            gave_way.append(peer)

    async with helper_asked_by([]) as helper, trio.open_nursery() as nursery:
        for number in range(4):
            nursery.start_soon(ask, f"silent{number} 9.1.1.{number}")
        await trio.sleep(3)
        assert await says(helper, "another 9.1.1.0") is None
        assert not gave_way
        assert await says(helper, "newcomer 9.2.2.1") is True
        assert len(gave_way) == 1, "who gave way is told nothing"


def node(helpers: dict[str, bool | None]) -> tuple[Reachability, list[str]]:
    """A node of a public address and whom it asked; `helpers` say by IP address if they reach it, None: too busy."""
    asked: list[str] = []

    async def call(ip: str, body: bytes, timeout_s: float) -> bytes:
        asked.append(ip)
        if helpers[ip] is None:
            raise Refused("too many dial-back requests; ask again later")
        return json.dumps({"version": 1, "reached": helpers[ip]}).encode()

    host = SimpleNamespace(
        own_addresses=[OWN],
        listening=[OWN],
        connection=lambda ip: connected(ip, ip),
        connections=lambda: [connected(ip, ip) for ip in helpers],
    )
    return Reachability(cast(Host, host), call), asked


async def test_a_busy_peer_is_no_answer_and_others_are_asked() -> None:
    helpers: dict[str, bool | None] = {f"9.{number}.1.1": None for number in range(PEERS_ASKED)}
    probe, asked = node(helpers | {"9.8.1.1": True})
    assert await probe.check() is Reach.VERIFIED
    assert "9.8.1.1" in asked


async def test_no_more_peers_are_asked_than_are_to_answer() -> None:
    probe, asked = node({f"9.{number}.1.1": True for number in range(40)})
    await probe.check()
    assert len(asked) == PEERS_ASKED
    probe, asked = node({f"9.{number}.1.1": None for number in range(40)})
    assert await probe.check() is Reach.UNVERIFIED
    assert len(asked) < 20


@pytest.mark.parametrize(
    ("later", "state"),
    [
        ({"9.1.1.1": None, "9.2.1.1": None}, Reach.VERIFIED),
        ({"9.1.1.1": False, "9.2.1.1": None}, Reach.VERIFIED),
        ({"9.1.1.1": False, "9.1.2.2": False, "9.2.1.1": None}, Reach.VERIFIED),  # two peers of one network
        ({"9.1.1.1": False, "9.2.1.1": False}, Reach.UNVERIFIED),
        ({"9.1.1.1": False}, Reach.UNVERIFIED),  # no other network can be asked
        ({}, Reach.UNKNOWN),
    ],
)
async def test_a_verified_node_stays_so_until_two_networks_did_not_reach_it(
    later: dict[str, bool | None], state: Reach
) -> None:
    helpers: dict[str, bool | None] = {"9.1.1.1": True}
    probe, _ = node(helpers)
    assert await probe.check() is Reach.VERIFIED
    helpers.clear()
    helpers.update(later)
    assert await probe.check() is state
    assert probe.verified == ([OWN] if state is Reach.VERIFIED else [])


async def test_a_peer_that_fails_is_no_answer_either() -> None:
    probe, _ = node({"9.1.1.1": True})
    assert await probe.check() is Reach.VERIFIED

    async def fail(peer: str, body: bytes, timeout_s: float) -> bytes:
        raise P2PError("the link broke")

    probe._call = fail
    assert await probe.check() is Reach.VERIFIED


async def test_a_relay_does_not_pass_its_own_address_off_as_that_of_the_node() -> None:
    """It is one that the node tells, for which one voice was enough: the node gave up its relays for it."""

    async def call(peer: str, body: bytes, timeout_s: float) -> bytes:
        return json.dumps({"version": 1, "reached": True}).encode()

    host = make_host()
    async with running(host):
        probe, relay = Reachability(host, call), connected("relay", "6.6.6.6")
        host._connections["relay"] = [relay]
        host.extra_addresses = [relay.address.of("relay").through(host.peer_id)]
        probe.observed(relay.ip, address_of("6.6.6.6", host.listening[0].port))
        for _ in range(2):
            assert await probe.check() is Reach.UNVERIFIED
        host._connections.clear()


async def test_identities_of_one_machine_have_one_voice_about_where_a_node_is_seen() -> None:
    """32 of them told four false addresses, and the true one, which seven peers told, was not tried any more."""
    network = make_network()
    async with network.running():
        port, names = network.host.listening[0].port, itertools.count()

        def hear(ip: str, seen: str) -> None:
            connection = SimpleNamespace(
                initiated=True,
                relayed=False,
                ip=ipaddress.ip_address(ip),
                local_ip=None,
                peer=str(next(names)),
                address=address_of(ip, 7464),
            )
            network.traversal.heard(cast(Connection, connection), Hello((), address_of(seen, port)))

        for number in range(3):
            hear(f"9.1.{number}.1", "8.8.8.8")
        for number in range(32):
            hear("9.2.2.2", f"7.7.7.{number % 4}")
            hear(f"2600:1:1:1::{number:x}", f"7.7.8.{number % 4}")
        assert [address.host for address in network.reachability._candidates()] == ["8.8.8.8", "7.7.7.3", "7.7.8.3"]
