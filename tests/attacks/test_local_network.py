"""Somebody on the local network who answers mDNS queries with whatever it likes."""

from __future__ import annotations

from functools import partial

import trio
from zeroconf import DNSOutgoing, DNSPointer, Zeroconf, const  # type: ignore[attr-defined]

from p2p.addresses import Address
from p2p.discovery.mdns import SERVICE, LocalNetwork
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
