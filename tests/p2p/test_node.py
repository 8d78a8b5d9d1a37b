"""The libp2p network does what the application asks of any network, and stops promptly."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import trio

from app.core.network import Network
from p2p.errors import PeerUnreachable, Refused
from p2p.network import Libp2pNetwork
from tests.p2p.network_contract import NetworkContract, echo
from tests.p2p.nodes import Libp2pWorld, libp2p_world, make_network, node_process


@pytest.fixture
async def world() -> AsyncIterator[Libp2pWorld]:
    async with libp2p_world() as made:
        yield made


class TestLibp2p(NetworkContract):
    """libp2p is a network."""


def as_network(network: Libp2pNetwork) -> Network:
    return network  # the type checker compares every method


async def test_two_processes_call_each_other() -> None:
    async with node_process() as a, node_process() as b:
        await a.ask(f"learn {b.peer_id} {b.addresses[0]}")
        assert await a.ask(f"echo {b.peer_id} hello") == "hello"
        assert a.peer_id in (await b.ask("links")).split()
        assert await b.ask(f"echo {a.peer_id} back") == "back"


async def test_a_peer_that_misbehaved_is_held_off_both_ways() -> None:
    a, b = make_network(), make_network()
    async with a.running(), b.running():
        a.serve("echo", echo)
        b.learn(a.peer_id, a.addresses())
        a.learn(b.peer_id, b.addresses())
        assert await b.call(a.peer_id, "echo", b"1", timeout_s=5) == b"1"
        await a.disconnect(b.peer_id, misbehaved=True)
        with pytest.raises(PeerUnreachable):
            await b.call(a.peer_id, "echo", b"2", timeout_s=5)
        with pytest.raises((Refused, PeerUnreachable), match="held off"):
            await a.call(b.peer_id, "echo", b"3", timeout_s=5)


async def test_a_frozen_peer_is_known_dead_and_does_not_hold_the_stop_up() -> None:
    network = make_network(heartbeat_s=1.0)
    async with node_process() as frozen, node_process() as healthy:
        async with network.running():
            lost = trio.Event()
            lost_peers: list[str] = []

            def on_lost(peer: str) -> None:
                lost_peers.append(peer)
                lost.set()

            network.on_link_lost(on_lost)
            for node in (frozen, healthy):
                network.learn(node.peer_id, node.addresses)
                await network.call(node.peer_id, "echo", b"x", timeout_s=5)
            frozen.freeze()
            with trio.fail_after(6):  # silent for three periods
                await lost.wait()
            assert lost_peers == [frozen.peer_id]
            assert await network.call(healthy.peer_id, "echo", b"still", timeout_s=5) == b"still"
            frozen.thaw()
            assert await network.call(frozen.peer_id, "echo", b"again", timeout_s=10) == b"again"
            frozen.freeze()
            stopping_at = trio.current_time()
        assert trio.current_time() - stopping_at < 2


async def test_bytes_that_a_frozen_peer_does_not_read_do_not_hold_the_stop_up() -> None:
    network = make_network()
    async with node_process() as frozen:
        async with network.running(), trio.open_nursery() as nursery:
            network.learn(frozen.peer_id, frozen.addresses)
            await network.call(frozen.peer_id, "echo", b"x", timeout_s=5)
            frozen.freeze()

            async def flood() -> None:
                with pytest.raises(PeerUnreachable):
                    await network.call(frozen.peer_id, "echo", bytes(32 << 20), timeout_s=60)

            nursery.start_soon(flood)
            await trio.sleep(0.3)  # the socket's buffers are full now; nothing tells when
            stopping_at = trio.current_time()
            await network.stop()
        assert trio.current_time() - stopping_at < 2


async def test_nothing_runs_on_after_a_stop() -> None:
    before = trio.lowlevel.current_statistics().tasks_living
    for _ in range(3):
        a, b = make_network("dht"), make_network("dht")
        async with a.running(), b.running():
            b.serve("echo", echo)
            a.learn(b.peer_id, b.addresses())
            await a.call(b.peer_id, "echo", b"x", timeout_s=5)
    assert trio.lowlevel.current_statistics().tasks_living == before
