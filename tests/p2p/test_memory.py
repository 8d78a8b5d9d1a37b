"""The in-memory twin: the contract, and the faults it can be told to have."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import pytest
import trio
from trio.testing import MockClock

from app.core.network import Network, Priority
from p2p.errors import DeadlineExceeded, PeerUnreachable, Refused, StreamReset
from p2p.memory.fabric import DirectoryProfile, LinkProfile, MemoryFabric, open_fabric
from tests.p2p.network_contract import PROTOCOL, NetworkContract, Stall, echo, echo_stream
from tests.p2p.networks import MemoryWorld, memory_world


@pytest.fixture
async def world() -> AsyncIterator[MemoryWorld]:
    async with memory_world() as made:
        yield made


class TestMemory(NetworkContract):
    """The twin is a network."""


def two(fabric: MemoryFabric) -> tuple[Network, Network]:
    a, b = fabric.node("a"), fabric.node("b")
    b.serve("echo", echo)
    b.accept(PROTOCOL, echo_stream)
    return a, b


async def test_delay_and_bandwidth_take_their_time(autojump_clock: MockClock) -> None:
    async with open_fabric(profile=LinkProfile(delay_s=0.1)) as fabric:
        a, _ = two(fabric)
        await a.call("b", "echo", b"dial", timeout_s=5)
        started_at = trio.current_time()
        await a.call("b", "echo", b"x", timeout_s=5)
        assert trio.current_time() - started_at == pytest.approx(0.2)
        fabric.set_link("a", "b", LinkProfile(delay_s=0.1, bytes_per_s=1e6))
        started_at = trio.current_time()
        await a.call("b", "echo", bytes(1_000_000), timeout_s=50, priority=Priority.BULK)
        assert trio.current_time() - started_at == pytest.approx(2.2)


async def test_decode_overtakes_bulk_on_a_slow_link(autojump_clock: MockClock) -> None:
    async with open_fabric(profile=LinkProfile(delay_s=0.01, bytes_per_s=1e6)) as fabric:
        a, _ = two(fabric)
        stream = await a.open("b", PROTOCOL)
        await stream.send(bytes(2_000_000), Priority.BULK)
        await stream.send(b"urgent", Priority.DECODE)
        started_at = trio.current_time()
        assert await stream.receive() == b"urgent"
        assert trio.current_time() - started_at < 0.1


async def test_a_lost_call_meets_its_deadline_and_a_lost_message_resets_its_stream(autojump_clock: MockClock) -> None:
    async with open_fabric() as fabric:
        a, _ = two(fabric)
        stream = await a.open("b", PROTOCOL)
        fabric.set_link("a", "b", LinkProfile(loss=1.0))
        with pytest.raises(DeadlineExceeded):
            await a.call("b", "echo", b"", timeout_s=3)
        await stream.send(b"x")
        with pytest.raises(StreamReset):
            await stream.receive()


async def lost_calls(seed: int) -> list[int]:
    """Which of a hundred calls are lost on a bad link."""
    async with open_fabric(seed=seed, profile=LinkProfile(loss=0.1, jitter_s=0.05)) as fabric:
        a, _ = two(fabric)
        lost = []
        for number in range(100):
            try:
                await a.call("b", "echo", b"", timeout_s=1)
            except DeadlineExceeded:
                lost.append(number)
        return lost


async def test_the_same_seed_loses_the_same_messages(autojump_clock: MockClock) -> None:
    first = await lost_calls(1)
    assert 5 <= len(first) <= 40
    assert await lost_calls(1) == first
    assert await lost_calls(2) != first


async def test_a_partition_is_silence_then_a_lost_link_and_it_heals(autojump_clock: MockClock) -> None:
    async with open_fabric() as fabric:
        a, b = two(fabric)
        lost: list[tuple[str, float]] = []
        b.on_link_lost(lambda peer: lost.append((peer, trio.current_time())))
        await a.call("b", "echo", b"", timeout_s=5)
        started_at = trio.current_time()
        fabric.partition(["a"], ["b"])
        with pytest.raises(DeadlineExceeded):
            await a.call("b", "echo", b"", timeout_s=5)
        assert lost == []
        await trio.sleep(15)
        ((peer, lost_at),) = lost
        assert peer == "a"
        assert lost_at == pytest.approx(started_at + 15)
        with pytest.raises(PeerUnreachable):
            await a.call("b", "echo", b"", timeout_s=20)
        fabric.heal()
        assert await a.call("b", "echo", b"back", timeout_s=5) == b"back"


async def test_what_waits_on_a_short_silence_arrives_after_it(autojump_clock: MockClock) -> None:
    async with open_fabric() as fabric:
        a, _ = two(fabric)
        stream = await a.open("b", PROTOCOL)
        fabric.freeze("b")
        await stream.send(b"held")
        with trio.move_on_after(10) as waited:
            await stream.receive()
        assert waited.cancelled_caught
        fabric.resume("b")
        assert await stream.receive() == b"held"
        assert await a.call("b", "echo", b"on", timeout_s=1) == b"on"


async def test_a_frozen_node_is_silent_and_its_links_are_given_up(autojump_clock: MockClock) -> None:
    async with open_fabric() as fabric:
        a, b = two(fabric)
        stall = Stall()
        b.serve("stall", stall)
        stream = await a.open("b", PROTOCOL)
        fabric.freeze("b")
        with pytest.raises(DeadlineExceeded):
            await a.call("b", "stall", b"", timeout_s=5)
        assert not stall.started.is_set()
        with pytest.raises(StreamReset):
            await stream.receive()
        assert list(a.links()) == []


async def test_a_killed_node_is_refused_at_once_and_may_live_again(autojump_clock: MockClock) -> None:
    async with open_fabric() as fabric:
        a, b = two(fabric)
        await a.call("b", "echo", b"", timeout_s=5)
        fabric.kill("b")
        started_at = trio.current_time()
        for node, peer in ((a, "b"), (b, "a")):
            with pytest.raises(PeerUnreachable):
                await node.call(peer, "echo", b"", timeout_s=5)
        assert trio.current_time() - started_at < 0.1
        fabric.node("b").serve("echo", echo)
        assert await a.call("b", "echo", b"new life", timeout_s=5) == b"new life"


async def test_a_misbehaving_peer_is_held_off_longer_each_time(autojump_clock: MockClock) -> None:
    async with open_fabric() as fabric:
        a, b = two(fabric)
        for held_s in (30, 60):
            await a.call("b", "echo", b"", timeout_s=5)
            await b.disconnect("a", misbehaved=True)
            await trio.sleep(held_s - 1)
            with pytest.raises(Refused):
                await a.call("b", "echo", b"", timeout_s=5)
            await trio.sleep(2)


async def test_traffic_is_counted(autojump_clock: MockClock) -> None:
    async with open_fabric() as fabric:
        a, b = fabric.node("a"), fabric.node("b")
        b.serve("echo", echo)
        for _ in range(10):
            await a.call("b", "echo", bytes(100), timeout_s=5)
        assert (a.traffic.messages_out, a.traffic.messages_in) == (10, 10)
        assert (b.traffic.bytes_in, b.traffic.bytes_out) == (1000, 1000)


async def test_the_directory_is_slow_forgets_and_may_be_stale(autojump_clock: MockClock) -> None:
    profile = DirectoryProfile(latency_s=0.5, visible_after_s=10, expires_after_s=100)
    async with open_fabric(directory=profile) as fabric:
        a, b = two(fabric)
        key = bytes(32)
        await a.provide(key)
        await a.put_value(key, b"record")
        assert list(await b.find_providers(key, timeout_s=5)) == []
        await trio.sleep(10)
        fabric.kill("a")
        assert list(await b.find_providers(key, timeout_s=5)) == ["a"]  # dead, and still named
        assert await b.get_value(key, timeout_s=5) == b"record"
        assert await b.get_value(key, timeout_s=0.1) is None
        await trio.sleep(100)
        assert list(await b.find_providers(key, timeout_s=5)) == []


async def test_a_parted_directory_shows_each_side_its_own(autojump_clock: MockClock) -> None:
    async with open_fabric() as fabric:
        a, b = two(fabric)
        fabric.partition(["a"])
        await a.provide(b"k" * 32)
        assert list(await a.find_providers(b"k" * 32, timeout_s=5)) == ["a"]
        assert list(await b.find_providers(b"k" * 32, timeout_s=5)) == []
        fabric.heal()
        assert list(await b.find_providers(b"k" * 32, timeout_s=5)) == ["a"]


async def test_two_hundred_nodes_run_faster_than_time(autojump_clock: MockClock) -> None:
    async with open_fabric() as fabric:
        nodes = [fabric.node(f"n{number}") for number in range(200)]

        async def gossip(index: int) -> None:
            for turn in range(30):
                await trio.sleep(1)
                await nodes[index].call(f"n{(index + turn % 5 + 1) % 200}", "echo", bytes(200), timeout_s=5)

        for node in nodes:
            node.serve("echo", echo)
        started = time.process_time()  # of this process alone: the machine may be busy
        async with trio.open_nursery() as nursery:
            for index in range(200):
                nursery.start_soon(gossip, index)
        assert sum(node.traffic.messages_out for node in nodes) == 2 * 200 * 30
        assert time.process_time() - started < 30  # half a minute of simulated time
