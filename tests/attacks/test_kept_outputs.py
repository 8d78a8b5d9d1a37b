"""Attacks with outputs that a hop keeps: they are sent again at the cost of a link, and held at the cost of memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from statistics import mean
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from app.core.compute import StepWork
from app.core.network import Priority
from app.core.signal import Signal
from app.core.span import Span
from app.serving import hop_session
from app.serving.block_server import PART_BYTES, URGENT_AHEAD_BYTES, BlockServer
from app.serving.hop_session import KeptOutputs
from app.session.frame import Frame, new_session_id
from app.session.wire import KEEP, PROTOCOL, EpochOrder, Kind, Prefix, decode, encode_turn
from p2p.errors import QueueFull
from p2p.memory.fabric import LinkProfile, MemoryFabric, MemoryStream, open_fabric
from tests.app.hash_model import HashRunner, InlineDevice, Output
from tests.attacks.test_sessions import zeros

WIDTH = 1024  # 4 KiB for each token
ROW, MIB = 4 * WIDTH, 2**20
LINK = LinkProfile(delay_s=0.005, bytes_per_s=MIB)  # from the first hop to the second
TURN = EpochOrder(Span(0, 4), "", "second", 4096, 2**20, 0)


class WideRunner(HashRunner):
    """Blocks that return their input as it is."""

    def __init__(self, start: int = 0, stop: int = 4) -> None:
        super().__init__(start, stop)
        self.hidden_size = WIDTH

    def step(self, work: Sequence[StepWork]) -> list[Output]:
        return [Output(bytes(item.data), item.dtype) for item in work]


class Asker:
    """An asker that speaks by hand, and reads whatever hops send."""

    def __init__(self, fabric: MemoryFabric, nursery: trio.Nursery, name: str) -> None:
        self._node, self._nursery, self.name = fabric.node(name), nursery, name
        self._streams: dict[str, MemoryStream] = {}
        self._heard = Signal()
        self._frames: list[tuple[str, Kind, bytes, int]] = []  # peer, kind, session and position

    async def send(self, peer: str, message: bytes, priority: Priority = Priority.DECODE) -> None:
        if peer not in self._streams:
            self._streams[peer] = await self._node.open(peer, PROTOCOL)
            self._nursery.start_soon(self._read, self._streams[peer])
        stream = self._streams[peer]
        while True:
            try:
                await stream.send(message, priority)
                return
            except QueueFull:
                await stream.wait_room(priority)

    async def _read(self, stream: MemoryStream) -> None:
        while True:
            frame = decode(await stream.receive())
            self._frames.append((stream.peer, Kind(frame.kind), frame.session, frame.position))
            self._heard.notify()

    async def hear(self, *frame: object) -> None:
        """Wait until a hop has sent a frame: its peer id, and the kind, session and position."""
        with trio.fail_after(30):
            await self._heard.wait_for(lambda: frame in self._frames)

    async def begin(self, peer: str, turn: EpochOrder, id: bytes = b"") -> bytes:
        """Open a session at a hop."""
        id = id or new_session_id(self.name)
        await self.send(peer, encode_turn(id, 1, KEEP, turn))
        await self.hear(peer, Kind.READY, id, 0)
        return id

    async def keep(self, turn: EpochOrder, rows: int) -> bytes:
        """A session at the first hop with so many outputs, of which none was sent yet."""
        id = await self.begin("first", replace(turn, send_from=None))
        for position in range(0, rows, 256):
            await self.send("first", zeros(id, 1, position, min(256, rows - position), WIDTH))
        await trio.sleep(1)
        return id

    async def have_sent_again(self, ids: Sequence[bytes], turn: EpochOrder, every_s: float) -> None:
        epoch = 1
        while True:
            epoch += 1
            for id in ids:
                await self.send("first", encode_turn(id, epoch, KEEP, turn), Priority.CONTROL)
            await trio.sleep(every_s)

    async def token_s(self, count: int) -> float:
        """Write tokens over both hops, each once the last one has come; returns the mean time of one."""
        id = await self.begin("second", EpochOrder(Span(4, 8), "first", "", 512, 0, 0))
        await self.begin("first", replace(TURN, urgent_from=0), id)
        times = []
        for position in range(count):
            began = trio.current_time()
            await self.send("first", zeros(id, 1, position, 1, WIDTH))
            await self.hear("second", Kind.DATA, id, position)
            times.append(trio.current_time() - began)
        return mean(times)


class Scene:
    """Two hops, and a slow link from the first to the second."""

    def __init__(self, fabric: MemoryFabric, nursery: trio.Nursery, first: BlockServer) -> None:
        self.fabric, self.nursery, self.first = fabric, nursery, first

    def asker(self, name: str) -> Asker:
        return Asker(self.fabric, self.nursery, name)

    def waiting(self, owner: tuple[str, ...], priority: Priority | None = None) -> int:
        """Bytes that wait for the link."""
        return self.first._sender._outboxes.waiting_for("second", owner, priority)


@asynccontextmanager
async def two_hops(*, second: Any = None) -> AsyncIterator[Scene]:
    """Give `second` to read what comes at the second hop, instead of a block server."""
    async with open_fabric(profile=LinkProfile(delay_s=0.005)) as fabric, trio.open_nursery() as nursery:
        fabric.set_link("first", "second", LINK)
        first = BlockServer(fabric.node("first"), WideRunner(), InlineDevice(0.01))
        await nursery.start(first.run)
        if second is None:
            await nursery.start(BlockServer(fabric.node("second"), WideRunner(4, 8), InlineDevice(0.01)).run)
        else:
            fabric.node("second").accept(PROTOCOL, second)
        yield Scene(fabric, nursery, first)
        nursery.cancel_scope.cancel()


# --- the link ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 16])
async def test_outputs_that_are_sent_again_do_not_hold_up_the_tokens_of_others(
    rows: int, autojump_clock: MockClock
) -> None:
    """With 2 kB of orders a second, one asker filled the link with tokens that it had got: 20 to 150 times as slow."""
    async with two_hops() as scene:
        alone_s = await scene.asker("honest").token_s(5)
        attacker, turn = scene.asker("attacker"), replace(TURN, urgent_from=0)
        id = await attacker.keep(turn, rows)
        scene.nursery.start_soon(attacker.have_sent_again, [id], turn, max(rows * ROW / MIB, 0.01))
        await trio.sleep(4)
        assert await scene.asker("another").token_s(5) < 2 * alone_s


async def test_of_what_is_sent_again_for_an_asker_one_part_waits_at_a_time(autojump_clock: MockClock) -> None:
    async with two_hops() as scene:
        attacker, most = scene.asker("attacker"), 0
        ids = [await attacker.keep(TURN, 1024) for _ in range(4)]
        scene.nursery.start_soon(attacker.have_sent_again, ids, TURN, 0.5)
        for _ in range(100):
            await trio.sleep(0.1)
            most = max(most, scene.waiting(("attacker", "attacker")))
        assert 0 < most < 1.1 * PART_BYTES


async def test_rows_that_are_sent_again_and_those_after_them_arrive_in_order(autojump_clock: MockClock) -> None:
    """More is computed meanwhile, and other sessions of the same asker have theirs sent again."""
    arrived: dict[bytes, list[Frame]] = {}

    async def read(stream: MemoryStream) -> None:
        while True:
            frame = decode(await stream.receive())
            arrived.setdefault(frame.session, []).append(frame)

    async with two_hops(second=read) as scene:
        asker = scene.asker("asker")
        ids = [await asker.keep(TURN, 768) for _ in range(2)]
        for id in ids:
            await asker.send("first", encode_turn(id, 2, KEEP, TURN), Priority.CONTROL)
        await trio.sleep(0.5)
        for position in (768, 1024):
            await asker.send("first", zeros(ids[0], 2, position, 256, WIDTH))
        await trio.sleep(60)
        for id, stop in zip(ids, (1280, 768), strict=True):
            places = [(frame.position, frame.rows) for frame in arrived[id] if frame.epoch == 2]
            assert [first for first, _ in places] == [0, *(sum(place) for place in places)][:-1]
            assert sum(places[-1]) == stop


@pytest.mark.parametrize("ordered", [True, False])
async def test_what_is_computed_meanwhile_is_not_lost_with_a_part_that_is_no_longer_kept(
    ordered: bool, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where an epoch needs such a part, its asker is told; where the asker only repeats itself, the rest is sent."""
    arrived: list[tuple[bytes, int, int]] = []

    async def read(stream: MemoryStream) -> None:
        while True:
            frame = decode(await stream.receive())
            arrived.append((frame.session, frame.epoch, frame.position))

    async with two_hops(second=read) as scene:
        asker, turn = scene.asker("asker"), replace(TURN, urgent_from=0)
        long = await asker.keep(TURN, 512)
        id = await asker.begin("first", turn)
        await asker.send("first", zeros(id, 1, 0, 16, WIDTH))
        await trio.sleep(1)
        await asker.send("first", encode_turn(long, 2, KEEP, TURN), Priority.CONTROL)  # what follows waits for it
        await trio.sleep(0.1)
        if ordered:
            await asker.send("first", encode_turn(id, 2, KEEP, turn), Priority.CONTROL)
            await trio.sleep(0.1)
        monkeypatch.setattr(hop_session, "KEPT_BYTES", 16 * ROW)
        epoch = 1 + ordered
        await asker.send("first", zeros(id, epoch, 0, 16, WIDTH))
        await asker.send("first", zeros(id, epoch, 16, 16, WIDTH))
        await trio.sleep(10)
        assert ((id, epoch, 16) in arrived) is not ordered
        assert any(frame[1:3] == (Kind.TROUBLE, id) for frame in asker._frames) is ordered


async def test_tokens_of_one_asker_wait_once_few_of_its_rows_do(autojump_clock: MockClock) -> None:
    """Its frames of 16 tokens are sent as fast as others write: what comes out of them does not pile up."""
    async with two_hops() as scene:
        attacker, most = scene.asker("attacker"), 0
        id = await attacker.begin("first", replace(TURN, urgent_from=0))
        for position in range(0, 512, 16):
            await attacker.send("first", zeros(id, 1, position, 16, WIDTH))
            await trio.sleep(0.02)
            most = max(most, scene.waiting(("attacker", "attacker"), Priority.DECODE))
        assert URGENT_AHEAD_BYTES < most < URGENT_AHEAD_BYTES + 32 * ROW
        await trio.sleep(5)
        assert scene.first.stats.queued_rows == 0


# --- memory -----------------------------------------------------------------------------------------------------------


async def test_sessions_that_begin_with_another_one_share_what_it_keeps(autojump_clock: MockClock) -> None:
    """Each order of 219 bytes had all of it copied while nobody else was served: 400 MiB took seconds."""
    async with two_hops() as scene:
        asker, rows = scene.asker("asker"), 512
        id = await asker.keep(TURN, rows)
        tracemalloc.start()
        try:
            for _ in range(20):
                fork = encode_turn(
                    new_session_id("asker"), 1, KEEP, replace(TURN, send_from=None, prefix=Prefix(id, rows, False))
                )
                await asker.send("first", fork)
            await trio.sleep(1)
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        sessions = scene.first._sessions.values()
        assert [(session.length, len(session.kept)) for session in sessions] == [(rows, rows * ROW)] * 21
        assert most < rows * ROW


chunks = st.lists(st.tuples(st.sampled_from(["append", "cut", "forget", "fork"]), st.integers(0, 40)), max_size=40)


@settings(max_examples=100)
@given(chunks)
def test_kept_outputs_are_those_that_were_computed(steps: list[tuple[str, int]]) -> None:
    kept, expected, start, number = KeptOutputs(), list[bytes](), 0, 0
    for what, count in steps:
        if what == "append" and count:
            rows = [b"%3d" % (number + row) for row in range(count)]
            number += count
            kept.append(count, b"".join(rows), "f32")
            expected += rows
        elif what in ("cut", "fork"):
            stop = min(count, len(expected))
            before, whole = kept, b"".join(expected[start:])
            if what == "fork":
                kept = kept.fork(stop)
            else:
                kept.cut(stop)
            if before is not kept and whole:
                assert b"".join(before.parts(start, len(expected)) or ()) == whole, "another session's are as they were"
            del expected[stop:]
            start = min(start, stop)
        elif what == "forget":
            kept.forget_before(count)
            start = max(start, min(count, len(expected)))
        assert (kept.start, kept.stop) == (start, len(expected))
        if start < len(expected):
            assert b"".join(kept.parts(start, len(expected)) or ()) == b"".join(expected[start:])
            middle = (start + len(expected)) // 2
            assert b"".join(kept.parts(middle, len(expected)) or ()) == b"".join(expected[middle:])
        assert kept.parts(start - 1, len(expected)) is None
        assert kept.parts(start, len(expected) + 1) is None
        assert len(kept) >= 3 * (len(expected) - start)


def test_what_a_session_keeps_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hop_session, "KEPT_BYTES", 100)
    kept = KeptOutputs()
    for _ in range(50):
        kept.append(10, bytes(30), "f32")
        assert len(kept) <= 100
    assert (kept.start, kept.stop) == (470, 500)


def test_few_outputs_that_are_left_of_many_hold_little_memory() -> None:
    """A session that is cut again and again would hold a whole chunk for each row."""
    kept = KeptOutputs()
    for position in range(20):
        kept.append(256, bytes(256 * 4), "f32")
        kept.cut(position + 1)
    assert len(kept) == 20 * 4
