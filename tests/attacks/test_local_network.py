"""Somebody on the local network who answers mDNS and UPnP queries with whatever it likes."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import trio
from zeroconf import DNSOutgoing, DNSPointer, Zeroconf, const  # type: ignore[attr-defined]

from p2p.addresses import Address
from p2p.discovery.mdns import SERVICE, LocalNetwork
from p2p.discovery.seeker import MAX_NEIGHBOURS, Seeker
from p2p.identity import Identity
from p2p.nat import port_mapping
from p2p.nat.port_control import Mapping, MappingRefused, PortControl

# Names of services that are none: of another type, without a type, too long, with control characters.
NAMES = (
    "printer._ipp._tcp.local.",
    "nothing.local.",
    "nowhere.",
    f"{'x' * 60}.{'y' * 60}.{SERVICE}",
    f"a\x07b.{SERVICE}",
)
ADDRESS = Address("ip4", "127.0.0.1", 4001)
PATIENCE_S = 60.0


def address_of(peer: str) -> list[Address]:
    """Where a node says that it is."""
    return [ADDRESS.of(peer)]


def name_services() -> None:
    """Say that there are services of Shoal with these names."""
    out = DNSOutgoing(const._FLAGS_QR_RESPONSE | const._FLAGS_AA)
    for name in NAMES:
        out.add_answer_at_time(DNSPointer(SERVICE, const._TYPE_PTR, const._CLASS_IN, 4500, name), 0)
    daemon = Zeroconf()
    try:
        daemon.send(out)
    finally:
        daemon.close()


async def test_names_that_are_no_services_do_not_end_the_search() -> None:
    """A neighbour names services that do not exist: this node goes on, and finds the next real one."""
    here, first, second = (Identity.generate().peer_id for _ in range(3))
    found = {first: trio.Event(), second: trio.Event()}

    def on_found(peer: str, addresses: list[Address]) -> None:
        if peer in found:
            found[peer].set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(LocalNetwork(here, list, on_found).run)
        for peer in (first, second):
            nursery.start_soon(LocalNetwork(peer, partial(address_of, peer), lambda *_: None).run)
            with trio.fail_after(PATIENCE_S):
                await found[peer].wait()
            if peer == first:  # this node listens by now
                await trio.to_thread.run_sync(name_services)
        nursery.cancel_scope.cancel()


async def test_a_device_that_never_ends_its_upnp_answer_does_not_keep_the_node_from_stopping(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, may_end, token = trio.Event(), threading.Event(), trio.lowlevel.current_trio_token()

    class Silent:
        def __init__(self, own_ip: str) -> None: ...

        def find(self) -> None:
            token.run_sync_soon(asked.set)
            may_end.wait(PATIENCE_S)
            raise MappingRefused("no router")

    async def refuse(*_: object) -> None:
        raise MappingRefused("no PCP")

    monkeypatch.setattr(port_mapping, "UpnpRouter", Silent)
    monkeypatch.setattr(PortControl, "map", refuse)
    route = port_mapping.Route("192.0.2.1", "192.0.2.2")
    begun = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(port_mapping.PortMapper(4001, lambda address: None, lambda: route).run)
        await asked.wait()
        nursery.cancel_scope.cancel()
    assert trio.current_time() - begun < PATIENCE_S / 2
    may_end.set()


@pytest.mark.parametrize(("port", "lifetime_s", "again_s"), [(7000, 2**32 - 1, 1800), (7000, 0, 60), (0, 3600, 20)])
async def test_whatever_a_router_answers_it_is_asked_again_and_no_port_0_is_told(
    monkeypatch: pytest.MonkeyPatch, port: int, lifetime_s: int, again_s: float
) -> None:
    """A lifetime of 136 years was believed, and so was port 0."""

    async def said(self: PortControl, external_port: int, lifetime_s_: int = 0) -> Mapping:
        return Mapping("PCP", "5.5.5.5", port, lifetime_s)

    monkeypatch.setattr(PortControl, "map", said)
    told: list[Address | None] = []
    mapper = port_mapping.PortMapper(4001, told.append, lambda: None)
    pause_s = await mapper._map_along(port_mapping.Route("127.0.0.1", "127.0.0.1"))
    assert pause_s == pytest.approx(again_s, rel=0.5)
    assert [address.port for address in told if address is not None] == [port] * bool(port)


def announced(local: LocalNetwork, *addresses: Address) -> None:
    local._report({b"a%d" % index: str(address).encode() for index, address in enumerate(addresses)})


def test_an_announcement_names_one_peer_and_addresses_of_this_network() -> None:
    """One packet named eight peers, at addresses anywhere on the internet, and all of them were dialled."""
    here, one, other = (Identity.generate().peer_id for _ in range(3))
    found: dict[str, list[Address]] = {}
    local = LocalNetwork(here, list, found.__setitem__)
    near, far = Address("ip4", "192.168.7.7", 4001), Address("ip4", "8.8.8.8", 4001)
    name = Address("dns4", "example.org", 4001)
    announced(local, far.of(one), near.of(one), near.of(other), name.of(one))
    assert found == {one: [near.of(one)]}


async def test_names_on_the_local_network_push_out_each_other_only() -> None:
    async def connect(peer: str, addresses: list[Address]) -> bool:
        return False

    seeker = Seeker(connect, lambda peer: False, set)
    seeker.want("remembered", [ADDRESS])
    for number in range(2000):
        seeker.want_neighbour(f"invented {number}", [ADDRESS])
    assert "remembered" in seeker._wanted
    assert len(seeker._wanted) == 1 + MAX_NEIGHBOURS
