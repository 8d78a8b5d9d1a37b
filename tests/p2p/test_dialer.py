"""The order of addresses, and racing them under a clock that jumps."""

from __future__ import annotations

import errno
import ipaddress

import pytest
import trio

from p2p.addresses import Address, parse_address
from p2p.channel.raw import ConnectionClosed
from p2p.errors import PeerUnreachable
from p2p.host import dialer
from p2p.host.dialer import STAGGER_S, first_of, order
from p2p.identity import peer_id_of

PEER, RELAY = peer_id_of(bytes(32)), peer_id_of(bytes(31) + b"\1")
HERE = [ipaddress.ip_interface("127.0.0.1/8"), ipaddress.ip_interface("192.168.1.5/24")]


def at(*hosts: str) -> list[Address]:
    relayed = f"/ip4/8.8.4.4/tcp/1/p2p/{RELAY}/p2p-circuit"
    return [parse_address(relayed if host == "relay" else f"/ip4/{host}/tcp/1") for host in hosts]


def hosts(addresses: list[Address]) -> list[str]:
    return ["relay" if address.relay else address.host for address in addresses]


def test_near_before_far() -> None:
    mixed = at("relay", "8.8.8.8", "10.0.0.9", "192.168.1.77", "127.0.0.1")
    assert hosts(order(mixed, HERE)) == ["192.168.1.77", "10.0.0.9", "8.8.8.8", "127.0.0.1", "relay"]


def test_loopback_first_where_the_peer_is_on_this_machine() -> None:
    assert hosts(order(at("8.8.8.8", "192.168.1.5", "127.0.0.1"), HERE)) == ["127.0.0.1", "192.168.1.5", "8.8.8.8"]
    assert hosts(order(at("relay", "127.0.0.1"), HERE)) == ["127.0.0.1", "relay"]


def test_ipv6_comes_first_where_both_have_it_and_last_where_this_machine_has_none() -> None:
    both = [*at("8.8.8.8", "192.168.1.77"), parse_address("/ip6/2a00::1/tcp/1"), parse_address("/dns4/a.org/tcp/1")]
    with_ipv6 = [*HERE, ipaddress.ip_interface("2a00::5/64")]
    only_local = [*HERE, ipaddress.ip_interface("fe80::1/64"), ipaddress.ip_interface("fd00::1/64")]
    assert hosts(order(both, with_ipv6)) == ["192.168.1.77", "2a00::1", "8.8.8.8", "a.org"]
    assert hosts(order(both, only_local)) == ["192.168.1.77", "8.8.8.8", "a.org", "2a00::1"]


def test_what_cannot_be_dialled_is_left_out_and_repeats_too() -> None:
    assert hosts(order([*at("8.8.8.8", "8.8.8.8", "0.0.0.0"), Address("ip4", "1.1.1.1", 0)], HERE)) == ["8.8.8.8"]
    assert len(order([Address("ip4", "8.8.8.8", port) for port in range(1, 100)], HERE)) == dialer.MAX_ATTEMPTS


class Places:
    """What a dial to each host does: a time to succeed after, or an error."""

    def __init__(self, **outcomes: float | Exception) -> None:
        self.outcomes = {name.replace("_", "."): outcome for name, outcome in outcomes.items()}
        self.started: dict[str, float] = {}
        self.discarded: list[str] = []

    async def dial(self, address: Address) -> str:
        name = "relay" if address.relay else address.host
        self.started[name] = trio.current_time()
        outcome = self.outcomes["h" + name]
        if isinstance(outcome, Exception):
            raise outcome
        await trio.sleep(outcome)
        return name

    async def race(self, *names: str) -> str:
        return await first_of(PEER, at(*names), self.dial, self.discarded.append)


async def test_the_first_starts_at_once_and_wins(autojump_clock: trio.abc.Clock) -> None:
    places = Places(h10_0_0_1=0.01, h10_0_0_2=0.01)
    began = trio.current_time()
    assert await places.race("10.0.0.1", "10.0.0.2") == "10.0.0.1"
    assert trio.current_time() - began == pytest.approx(0.01)
    assert list(places.started) == ["10.0.0.1"]


async def test_a_failure_starts_the_next_without_waiting(autojump_clock: trio.abc.Clock) -> None:
    places = Places(h10_0_0_1=OSError("refused"), h10_0_0_2=PeerUnreachable("no"), h10_0_0_3=0.02)
    began = trio.current_time()
    assert await places.race("10.0.0.1", "10.0.0.2", "10.0.0.3") == "10.0.0.3"
    assert trio.current_time() - began == pytest.approx(0.02)


async def test_a_black_hole_costs_one_stagger(autojump_clock: trio.abc.Clock) -> None:
    places = Places(h10_0_0_1=1000.0, h10_0_0_2=0.02)
    began = trio.current_time()
    assert await places.race("10.0.0.1", "10.0.0.2") == "10.0.0.2"
    assert trio.current_time() - began == pytest.approx(STAGGER_S + 0.02)


async def test_a_relay_waits_longer_for_a_direct_way(autojump_clock: trio.abc.Clock) -> None:
    places = Places(h8_8_8_8=0.5, hrelay=0.01)
    assert await places.race("8.8.8.8", "relay") == "8.8.8.8"
    assert "relay" not in places.started


async def test_each_kind_of_failure_is_named_once(autojump_clock: trio.abc.Clock) -> None:
    refused = OSError(errno.ECONNREFUSED, "Error connecting to ('10.0.0.1', 1)")
    slow, wrong = trio.TooSlowError(), ValueError("a bug")
    places = Places(h10_0_0_1=refused, h10_0_0_2=refused, h10_0_0_3=slow, h10_0_0_4=refused, hrelay=wrong)
    with pytest.raises(PeerUnreachable) as caught:
        await places.race("10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4", "relay")
    said = str(caught.value).removeprefix(f"{PEER} could not be reached: ").split("; ")
    assert said[0] == "connection refused at 10.0.0.1:1 and 2 more"
    assert said[1] == "no answer in time at 10.0.0.3:1"
    assert "a bug" in said[2]
    assert said[2].endswith("through a relay")
    with pytest.raises(PeerUnreachable, match="no address"):
        await places.race()


async def test_a_peer_that_closes_the_connection_may_have_banned_this_node(autojump_clock: trio.abc.Clock) -> None:
    places = Places(h10_0_0_1=ConnectionClosed("the connection was lost: [Errno 104] Connection reset by peer"))
    with pytest.raises(PeerUnreachable) as caught:
        await places.race("10.0.0.1")
    words = "the peer closed the connection, as one does that has banned this node or is full, at 10.0.0.1:1"
    assert str(caught.value) == f"{PEER} could not be reached: {words}"


async def test_a_second_success_in_the_same_moment_is_discarded(autojump_clock: trio.abc.Clock) -> None:
    places = Places(h10_0_0_1=0.0, h10_0_0_2=0.0)

    async def dial(address: Address) -> str:
        with trio.CancelScope(shield=True):  # as a handshake that is already complete
            await trio.sleep(1.0)
        return address.host

    winner = await first_of(PEER, at("10.0.0.1", "10.0.0.2"), dial, places.discarded.append)
    assert winner == "10.0.0.1"
    assert places.discarded == ["10.0.0.2"]
