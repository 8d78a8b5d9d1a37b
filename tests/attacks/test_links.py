"""Links under load and links at rest: waiting for room costs no work, and streams that nobody uses are closed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from app.core.network import FrameStream, Priority
from app.core.span import Span
from app.serving.block_server import HopFrame
from app.session import outbound
from app.session.frame import SESSION_BYTES, new_session_id
from app.session.outbound import (
    FRAME_COST_BYTES,
    MAX_DIALS,
    MAX_DIALS_PER_ASKER,
    MAX_WAITING_BYTES,
    MAX_WAITING_IN_ALL,
    OutboundFrame,
    PeerOutbox,
    PeerOutboxes,
    WaitingBytes,
)
from app.session.wire import KEEP, EpochOrder, encode_turn
from app.session.wire import PROTOCOL as SESSIONS
from p2p.host.pruning import ENOUGH_LINKS
from p2p.link.frames import PREFACE, WHOLE, Frame, FrameDecoder, Kind, encode
from p2p.link.outbox import QUEUE_BYTES
from p2p.link.streams import MessageStream
from p2p.link.switchboard import LIVE_LANE
from p2p.memory.fabric import LinkProfile, MemoryNode, open_fabric
from p2p.shares import Holder
from tests.app.session_swarm import PROMPT, ask, open_swarm
from tests.p2p.network_contract import PROTOCOL
from tests.p2p.networks import TrioByteStream, WiredNode, wired_world

HOUR_S = 3600.0


# --- L-2: a full queue -----------------------------------------------------------------------------------------------


class SlowPeer:
    """The far end of a node's link, spoken by hand: it reads only while the test asks it to."""

    def __init__(self, pipe: trio.abc.Stream) -> None:
        self._pipe, self._decoder = pipe, FrameDecoder()
        self.frames: list[Frame] = []

    async def accept_streams(self, node: WiredNode, count: int) -> list[MessageStream]:
        """Let a node open so many streams."""
        opened: list[MessageStream] = []

        async def open_one() -> None:
            opened.append(await node.open("slow peer", PROTOCOL))

        await self._pipe.send_all(PREFACE)
        async with trio.open_nursery() as nursery:
            for _ in range(count):
                nursery.start_soon(open_one)
            await self.read_until(lambda frames: len(frames) == count)
            for frame in self.frames:
                await self._pipe.send_all(encode(Frame(Kind.OPENED, WHOLE, frame.id, 0, 0, "", b"")))
        return opened

    async def read_until(self, holds: Callable[[list[Frame]], bool]) -> None:
        """Read until this holds for all frames that came."""
        while not holds(self.frames):
            self.frames += self._decoder.feed(bytes(await self._pipe.receive_some(2**20)))


async def test_an_outlet_behind_a_full_queue_waits_without_using_the_processor() -> None:
    """A peer stops reading while one stream's prefill fills the link's queue: another stream's outlet only waits."""
    here, there = trio.testing.lockstep_stream_pair()
    async with wired_world() as world, trio.open_nursery() as nursery:
        node = await world.node()
        world.connect(node, "slow peer", LIVE_LANE, TrioByteStream(there))
        peer = SlowPeer(here)
        busy, quiet = await peer.accept_streams(node, 2)
        await busy.send(bytes(2 * QUEUE_BYTES), Priority.PREFILL)
        outbox = PeerOutbox(quiet, nursery)
        await outbox.push(OutboundFrame((b"a turn",), Priority.CONTROL))
        await outbox.push(OutboundFrame((b"a prefill",), Priority.PREFILL))
        with trio.move_on_after(1) as scope:
            await trio.testing.wait_all_tasks_blocked()
        assert not scope.cancelled_caught, "a task runs all the time"
        with trio.fail_after(10):  # and it goes on once the peer reads again
            await peer.read_until(lambda frames: frames[-1].body == b"a prefill")
        nursery.cancel_scope.cancel()


# --- H-8: streams without a session ----------------------------------------------------------------------------------


async def test_an_hour_after_its_only_reply_no_link_of_a_route_is_busy(autojump_clock: MockClock) -> None:
    """An asker takes one reply over two hops and falls silent: no stream keeps any of their links from being closed."""
    async with open_swarm((0, 4), (4, 8)) as swarm:
        await ask(await swarm.asker(), PROMPT[:4], 2)
        await trio.sleep(HOUR_S)
        links = [
            (node.peer_id, link.use(peer, ""))
            for node in swarm.fabric.nodes.values()
            for peer, link in node.linked.items()
        ]
        assert [(name, use.peer) for name, use in links if use.busy] == []


async def test_askers_that_fell_silent_do_not_use_up_the_links_of_a_hop(autojump_clock: MockClock) -> None:
    """Sixty askers take one reply each and stay connected: when the next one comes, the hop has closed what is idle."""
    async with open_swarm((0, 8)) as swarm:
        for number in range(60):
            await ask(await swarm.asker(f"asker {number}"), PROMPT[:4], 2)
        await trio.sleep(HOUR_S)
        await ask(await swarm.asker("the next one"), PROMPT[:4], 2)
        assert len(swarm.fabric.nodes["n0"].links()) <= ENOUGH_LINKS + 1


# --- one stream from hop to hop for all askers -----------------------------------------------------------------------

MIB = 2**20
SLOW = LinkProfile(bytes_per_s=MIB)


def row_of(asker: str, name: str, size: int, priority: Priority, home: str = "") -> HopFrame:
    key = bytes(SESSION_BYTES) + asker.encode()
    return HopFrame(key, (name.encode(), bytes(size)), priority, 1, 0, 0, (home or asker, asker, key))


@asynccontextmanager
async def hop_to_hop() -> AsyncIterator[tuple[PeerOutboxes[HopFrame], list[tuple[str, float]]]]:
    """The streams of a hop behind a slow link, and what arrives at the other one, with the time."""
    arrived: list[tuple[str, float]] = []

    async def read(stream: FrameStream) -> None:
        while True:
            name = (await stream.receive()).rstrip(b"\0").decode()
            arrived.append((name, trio.current_time()))

    async with open_fabric(profile=SLOW) as fabric, trio.open_nursery() as nursery:
        fabric.node("next").accept(PROTOCOL, read)
        node = fabric.node("hop")
        yield (
            PeerOutboxes(node, PROTOCOL, nursery, lost=lambda peer: arrived.append((f"lost {peer}", 0.0)),
                         undeliverable=lambda peer, frames: None),
            arrived,
        )  # fmt: skip
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("claimed", [Priority.PREFILL, Priority.DECODE])
async def test_the_prompts_of_one_asker_do_not_hold_up_the_tokens_of_another(
    autojump_clock: MockClock, claimed: Priority
) -> None:
    """100 MiB of one asker's prompts wait for a link of 1 MiB/s, as urgent as it says, when another's token comes."""
    async with hop_to_hop() as (outboxes, arrived):
        await outboxes.push("next", row_of("first", "first", 100, Priority.DECODE), Holder("first", "first"))
        await trio.sleep(1)
        for _ in range(100):
            await outboxes.push("next", row_of("flood", "prompt", MIB, claimed), Holder("flood", "flood"))
        begin = trio.current_time()
        await outboxes.push("next", row_of("honest", "token", 100, Priority.DECODE), Holder("honest", "honest"))
        await trio.sleep(200)
        times = {name: at - begin for name, at in reversed(arrived)}
        assert times["token"] < (1.0 if claimed is Priority.PREFILL else 5.0)
        assert [name for name, _ in arrived].count("prompt") == 100, "nothing is lost"


async def test_an_asker_with_too_much_for_a_link_loses_that_and_not_the_link_of_all(autojump_clock: MockClock) -> None:
    async with hop_to_hop() as (outboxes, arrived):
        await outboxes.push("next", row_of("first", "first", 100, Priority.DECODE), Holder("first", "first"))
        await trio.sleep(1)
        await outboxes.push("next", row_of("flood", "prompt", 4 * MIB, Priority.PREFILL), Holder("flood", "flood"))
        await outboxes.push(
            "next", row_of("honest", "another prompt", MIB, Priority.PREFILL), Holder("honest", "honest")
        )
        for _ in range(200):
            await outboxes.push("next", row_of("flood", "prompt", MIB, Priority.PREFILL), Holder("flood", "flood"))
        await trio.sleep(400)
        names = [name for name, _ in arrived]
        assert "another prompt" in names
        assert not any(name.startswith("lost") for name in names)
        assert names.count("prompt") < 200


async def test_identities_at_one_address_have_one_part_of_a_link_however_large_their_rows_are(
    autojump_clock: MockClock,
) -> None:
    """With eight of them a prompt had a ninth of the frames of a link, and each of theirs was four times as large."""
    async with hop_to_hop() as (outboxes, arrived):
        await outboxes.push("next", row_of("first", "first", 100, Priority.DECODE), Holder("first", "first"))
        await trio.sleep(1)
        begin = trio.current_time()
        for number in range(8):
            twin = Holder("one address", f"twin {number}")
            for _ in range(4):
                await outboxes.push("next", row_of(twin.asker, "theirs", MIB, Priority.PREFILL, twin.home), twin)
        for _ in range(16):
            row = row_of("honest", "honest", MIB // 4, Priority.PREFILL)
            await outboxes.push("next", row, Holder("honest", "honest"))
        await trio.sleep(60)
        times = [at - begin for name, at in arrived if name == "honest"]
        assert len(times) == 16
        assert times[-1] < 11, "4 MiB take 4 s alone, and the others' as long"


async def test_what_is_dropped_is_of_the_home_with_most(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many identities that each had less waiting than an honest asker made it lose its prompt."""
    monkeypatch.setattr(outbound, "MAX_WAITING_BYTES", 16 * MIB)
    async with hop_to_hop() as (outboxes, arrived):
        await outboxes.push("next", row_of("first", "first", 100, Priority.DECODE), Holder("first", "first"))
        await trio.sleep(1)
        for _ in range(4):
            row = row_of("honest", "honest", MIB, Priority.PREFILL)
            await outboxes.push("next", row, Holder("honest", "honest"))
        for number in range(20):
            twin = Holder("one address", f"twin {number}")
            await outboxes.push("next", row_of(twin.asker, "theirs", MIB, Priority.PREFILL, twin.home), twin)
        await trio.sleep(60)
        names = [name for name, _ in arrived]
        assert names.count("honest") == 4
        assert 0 < names.count("theirs") < 20


@pytest.mark.parametrize("homes", [1, 3])
async def test_an_honest_asker_finds_room_to_dial_whoever_has_hops_dial_the_dead(
    homes: int, autojump_clock: MockClock
) -> None:
    """Fourteen identities took all dials of a hop: half of the others' replies had to go through their askers."""
    async with open_fabric() as fabric, trio.open_nursery() as nursery:
        fabric.node("next").accept(PROTOCOL, sleep_on)
        outboxes = PeerOutboxes[HopFrame](
            fabric.node("hop"), PROTOCOL, nursery, lost=lambda peer: None, undeliverable=lambda peer, frames: None
        )
        for number in range(2 * MAX_DIALS):
            name, identity = f"dead {number}", f"identity {number // MAX_DIALS_PER_ASKER}"
            fabric.node(name)
            fabric.freeze(name)
            outboxes.prepare(name, Holder(f"address {number % homes}", identity))
        assert len(outboxes._dials) > MAX_DIALS / 2
        outboxes.prepare("next", Holder("honest", "honest"))
        await trio.sleep(1)
        assert "next" in outboxes._open
        nursery.cancel_scope.cancel()


async def test_of_streams_that_the_next_hop_closes_nothing_stays(autojump_clock: MockClock) -> None:
    """It closes its side only, of one stream after the other."""
    async with wired_world() as world, trio.open_nursery() as nursery:
        node, after, lost = await world.node(), await world.node(), list[str]()

        async def close(stream: FrameStream) -> None:
            await stream.aclose()
            await trio.sleep_forever()

        after.accept(PROTOCOL, close)
        outboxes = PeerOutboxes[HopFrame](
            node, PROTOCOL, nursery, lost=lost.append, undeliverable=lambda peer, frames: None
        )
        for _ in range(5):
            await outboxes.push(after.peer_id, row_of("asker", "row", 100, Priority.DECODE), Holder("asker", "asker"))
            await trio.sleep(3)
        [link] = node.links_to(after.peer_id)
        assert len(lost) == 5
        assert not link.busy
        nursery.cancel_scope.cancel()


# --- peers that do not read ------------------------------------------------------------------------------------------


async def unread(node: MemoryNode, nursery: trio.Nursery, waiting: WaitingBytes, peer: str) -> PeerOutbox:
    """A stream to a peer that never reads, with its window full."""
    outbox = PeerOutbox(await node.open(peer, PROTOCOL), nursery, waiting=waiting)
    await outbox.push(OutboundFrame((bytes(4 * MIB),), Priority.DECODE))
    return outbox


def total(outboxes: list[PeerOutbox]) -> int:
    return sum(outbox._backlog.bytes for outbox in outboxes)


async def test_a_peer_with_many_streams_has_no_more_waiting_for_it_than_one_with_one(
    autojump_clock: MockClock,
) -> None:
    async with open_fabric() as fabric, trio.open_nursery() as nursery:
        node, waiting, chunk = fabric.node("hop"), WaitingBytes(), bytes(MIB)
        for name in ("greedy", "slow"):
            fabric.node(name).accept(PROTOCOL, sleep_on)
        slow = await unread(node, nursery, waiting, "slow")
        await slow.push(OutboundFrame((chunk,), Priority.DECODE))
        greedy = [await unread(node, nursery, waiting, "greedy") for _ in range(4)]
        for _ in range(100):
            for outbox in greedy:
                await outbox.push(OutboundFrame((chunk,), Priority.DECODE))
                assert total(greedy) <= MAX_WAITING_BYTES
        assert sum(outbox.broken for outbox in greedy) == 3
        assert (slow.broken, total([slow])) == (False, MIB + FRAME_COST_BYTES)
        nursery.cancel_scope.cancel()


async def test_many_peers_that_do_not_read_leave_room_for_those_that_do(autojump_clock: MockClock) -> None:
    async with open_fabric() as fabric, trio.open_nursery() as nursery:
        node, waiting, chunk = fabric.node("hop"), WaitingBytes(), bytes(MIB)
        names = [f"greedy {number}" for number in range(16)]
        for name in (*names, "slow"):
            fabric.node(name).accept(PROTOCOL, sleep_on)
        slow = await unread(node, nursery, waiting, "slow")
        greedy = [await unread(node, nursery, waiting, name) for name in names]
        for _ in range(100):
            await slow.push(OutboundFrame((b"token",), Priority.DECODE))
            for outbox in greedy:
                await outbox.push(OutboundFrame((chunk,), Priority.DECODE))
        assert total([slow, *greedy]) <= MAX_WAITING_IN_ALL
        assert any(outbox.broken for outbox in greedy)
        assert (slow.broken, total([slow])) == (False, 100 * (len(b"token") + FRAME_COST_BYTES))
        nursery.cancel_scope.cancel()


async def test_too_much_in_all_costs_the_peer_with_most_its_stream_and_not_whoever_comes_next(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """Some hold just what one may, and many hold next to nothing, so that anybody has more than most."""
    monkeypatch.setattr(outbound, "MAX_WAITING_BYTES", 2 * MIB)
    monkeypatch.setattr(outbound, "MAX_WAITING_IN_ALL", 7 * MIB)
    async with open_fabric() as fabric, trio.open_nursery() as nursery:
        node, waiting = fabric.node("hop"), WaitingBytes()
        names = [*(f"greedy {number}" for number in range(4)), *(f"idle {number}" for number in range(30)), "slow"]
        for name in names:
            fabric.node(name).accept(PROTOCOL, sleep_on)
        *greedy_and_idle, slow = [await unread(node, nursery, waiting, name) for name in names]
        greedy, idle = greedy_and_idle[:4], greedy_and_idle[4:]
        for one in idle:
            await one.push(OutboundFrame((b"token",), Priority.DECODE))
        for one in greedy:
            await one.push(OutboundFrame((bytes(7 * MIB // 4 - 10_000),), Priority.DECODE))
        assert not any(one.broken for one in greedy)
        for _ in range(10):
            await slow.push(OutboundFrame((bytes(MIB // 8),), Priority.DECODE))
        assert not any(one.broken for one in (*idle, slow))
        assert sum(one.broken for one in greedy) == 1
        nursery.cancel_scope.cancel()


async def test_frames_that_are_nearly_empty_count_with_the_memory_that_they_take(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """Answers of 40 bytes on 64 streams took ten times the memory that was counted."""
    monkeypatch.setattr(outbound, "MAX_WAITING_BYTES", MIB)
    async with open_fabric() as fabric, trio.open_nursery() as nursery:
        node, waiting = fabric.node("hop"), WaitingBytes()
        fabric.node("greedy").accept(PROTOCOL, sleep_on)
        greedy = [await unread(node, nursery, waiting, "greedy") for _ in range(4)]
        for _ in range(1000):
            for one in greedy:
                await one.push(OutboundFrame((bytes(40),), Priority.CONTROL))
        frames = sum(one._backlog._frames for one in greedy)
        assert 0 < frames <= MIB // FRAME_COST_BYTES
        nursery.cancel_scope.cancel()


async def test_all_streams_of_a_block_server_count_together(autojump_clock: MockClock) -> None:
    """A member opens sessions on several streams, has their outputs sent again and again, and reads none of them."""
    async with open_swarm((0, 8)) as swarm:
        server, member = swarm.servers["n0"], swarm.fabric.node("member")
        for _ in range(3):
            id, stream = new_session_id("member"), await member.open("n0", SESSIONS)
            await stream.send(encode_turn(id, 1, KEEP, EpochOrder(Span(0, 8), "", "", 256, 0, 0)))
            await stream.receive()
        await trio.sleep(0.1)
        outboxes = [attended.answers for attended in server._attending]
        assert len(outboxes) == 3
        assert {outbox._backlog._waiting for outbox in outboxes} == {server._waiting}


async def sleep_on(stream: FrameStream) -> None:
    await trio.sleep_forever()
