"""Bursts that measure links without traffic: rare, bounded, and of no harm if the peer refuses or is gone."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from app.membership.link_probe import AGAIN_S, BURST, BURST_BYTES, PERIOD_S, LinkProbe
from p2p.errors import Refused
from p2p.memory.fabric import LinkProfile, MemoryFabric, MemoryNode, open_fabric

RATE = 2e6


async def linked(fabric: MemoryFabric, a: MemoryNode, b: MemoryNode) -> None:
    """Open a link between two nodes."""

    async def echo(peer: str, body: bytes) -> bytes:
        return body

    b.serve("echo", echo)
    await a.call(b.peer_id, "echo", b"x", timeout_s=5)


def down(node: MemoryNode, peer: MemoryNode) -> float | None:
    """The measured speed from a peer."""
    return next(link.down_bytes_per_s for link in node.links() if link.peer == peer.peer_id)


async def test_a_neighbours_link_is_measured_once(autojump_clock: MockClock) -> None:
    async with open_fabric(profile=LinkProfile(bytes_per_s=RATE)) as fabric, trio.open_nursery() as nursery:
        a, b, c = fabric.node("a"), fabric.node("b"), fabric.node("c")
        for other in (b, c):
            LinkProbe(other, tuple).serve()
            await linked(fabric, a, other)
        nursery.start_soon(LinkProbe(a, lambda: ["b", "gone"]).run)
        await trio.sleep(10 * PERIOD_S)
        assert down(a, b) == pytest.approx(RATE)
        assert down(a, c) is None
        received = next(link.bytes_in for link in a.links() if link.peer == "b")
        await trio.sleep(10 * AGAIN_S)
        assert next(link.bytes_in for link in a.links() if link.peer == "b") == received < 2 * BURST_BYTES
        nursery.cancel_scope.cancel()


async def test_a_peer_that_does_not_know_bursts_is_asked_once_an_hour(autojump_clock: MockClock) -> None:
    async with open_fabric(profile=LinkProfile(bytes_per_s=RATE)) as fabric, trio.open_nursery() as nursery:
        a, b = fabric.node("a"), fabric.node("b")
        await linked(fabric, a, b)
        asked = []

        async def refuse(peer: str, body: bytes) -> bytes:
            asked.append(trio.current_time())
            raise Refused("no")

        b.serve(BURST, refuse)
        nursery.start_soon(LinkProbe(a, lambda: ["b"]).run)
        await trio.sleep(2.5 * AGAIN_S)
        assert len(asked) == 3
        nursery.cancel_scope.cancel()


async def test_who_asks_too_often_is_refused(autojump_clock: MockClock) -> None:
    async with open_fabric() as fabric:
        a, b = fabric.node("a"), fabric.node("b")
        LinkProbe(b, tuple).serve()
        for _ in range(2):
            assert len(await a.call("b", BURST, b"", timeout_s=5)) == BURST_BYTES
        with pytest.raises(Refused, match="too often"):
            await a.call("b", BURST, b"", timeout_s=5)
