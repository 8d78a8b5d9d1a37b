"""Somebody on the local network who answers mDNS queries with whatever it likes."""

from __future__ import annotations

from functools import partial

import trio
from zeroconf import DNSOutgoing, DNSPointer, Zeroconf, const  # type: ignore[attr-defined]

from p2p.addresses import Address
from p2p.discovery.mdns import SERVICE, LocalNetwork
from p2p.discovery.seeker import MAX_NEIGHBOURS, Seeker
from p2p.identity import Identity

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
