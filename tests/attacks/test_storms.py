"""Storms of session frames: a peer that sends orders without end is read slowly, and an honest one is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio
from trio.testing import MockClock

from app.core.network import FrameStream, Priority
from app.core.span import Span
from app.serving.admission import AdmissionLimits, frame_cost
from app.serving.block_server import ServerSettings
from app.serving.hop_session import FrameAction
from app.session.frame import header, new_session_id, plain
from app.session.outbound import DIALS_BURST, DIALS_PER_S
from app.session.wire import KEEP, PROTOCOL, EpochOrder, Kind, encode_turn
from p2p.errors import PeerUnreachable
from tests.app.hash_model import ROW_BYTES, WIDTH, HashRunner, greedy
from tests.app.session_swarm import PROMPT, SessionSwarm, ask, open_swarm

LIMITS = AdmissionLimits()
LOW = AdmissionLimits(frames_burst=200.0, frames_per_s=50.0)  # so that a storm is soon over the limit
STORM_S = 8.0


def turn_frame(id: bytes, number: int) -> bytes:
    """Begin another epoch of one session, with another successor."""
    return encode_turn(id, number, KEEP, EpochOrder(Span(0, 4), "", f"nobody{number}", 16, 0))


def question_frame(id: bytes, number: int) -> bytes:
    return plain(Kind.PROBE if number % 2 else Kind.PACE, id, 1)


def close_frame(id: bytes, number: int) -> bytes:
    return plain(Kind.CLOSE, id, number)


def useless_frame(id: bytes, number: int) -> bytes:
    """Hidden states of a session that does not exist."""
    return header(Kind.DATA, id, number, 0, dtype=1, rows=1, width=WIDTH, length=ROW_BYTES) + bytes(ROW_BYTES)


class Reader:
    """Stands on a stream at the hop and counts the frames that the hop reads."""

    def __init__(self, stream: FrameStream, count: dict[str, int]) -> None:
        self._stream, self._count = stream, count
        self.peer, self.send = stream.peer, stream.send
        self.wait_room, self.is_clear = stream.wait_room, stream.is_clear
        self.aclose, self.reset = stream.aclose, stream.reset

    async def receive(self) -> bytes:
        message = await self._stream.receive()
        self._count[self.peer] = self._count.get(self.peer, 0) + 1
        return message


def count_frames(swarm: SessionSwarm, name: str) -> dict[str, int]:
    """Count the frames that a hop reads from each peer."""
    count: dict[str, int] = {}
    server = swarm.servers[name]
    swarm.fabric.nodes[name].accept(PROTOCOL, lambda stream: server.attend(Reader(stream, count)))
    return count


@pytest.mark.parametrize(
    ("frame", "cost"), [(turn_frame, 4), (question_frame, 1), (close_frame, 1), (useless_frame, 0.25)]
)
async def test_a_storm_of_frames_is_read_slowly_and_honest_replies_go_on(
    frame: Callable[[bytes, int], bytes], cost: float, autojump_clock: MockClock
) -> None:
    """The member storms on several streams; the limit is for all of them together."""
    async with open_swarm() as swarm:
        await swarm.serve("n0", HashRunner(0, 4), settings=ServerSettings(admission=LOW))
        await swarm.serve("n1", HashRunner(4, 8))
        read = count_frames(swarm, "n0")
        member = swarm.fabric.node("member")

        async def storm() -> None:
            stream, id = await member.open("n0", PROTOCOL), new_session_id("member")
            for number in range(1, 1000):
                await stream.send(frame(id, number), Priority.CONTROL)

        began_at = trio.current_time()
        for _ in range(4):
            swarm.nursery.start_soon(storm)
        asker = await swarm.asker()
        while trio.current_time() < began_at + STORM_S:
            stats = await ask(asker, PROMPT, 8)
            assert (stats.token_ids, stats.recoveries) == (greedy(PROMPT, 8), 0)
            assert stats.longest_gap_s < 0.2
        seconds = trio.current_time() - began_at
        allowed = (LOW.frames_burst + LOW.frames_per_s * seconds) / cost
        assert LOW.frames_burst / cost < read["member"] <= allowed + 4  # each stream reads one on credit


async def test_an_asker_whose_sessions_all_lose_a_hop_at_once_is_not_slowed(autojump_clock: MockClock) -> None:
    """As many sessions as an asker may have recover as fast as a few do, twice in a row."""
    async with open_swarm((0, 4), *[(4, 8)] * 3) as swarm:
        asker = await swarm.asker()
        gaps: list[float] = []

        async def converse() -> None:
            stats = await ask(asker, PROMPT, 30)
            assert stats.token_ids == EXPECTED
            gaps.append(stats.longest_gap_s)

        with trio.fail_after(120):
            async with trio.open_nursery() as nursery:
                for _ in range(LIMITS.peer_sessions):
                    nursery.start_soon(converse)
                for name in ("n1", "n2"):
                    await trio.sleep(0.8)
                    swarm.kill(name)
        assert len(gaps) == LIMITS.peer_sessions
        assert max(gaps) < 1.0


EXPECTED = greedy(PROMPT, 30)


async def test_an_asker_makes_a_hop_dial_few_new_successors(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """Dials that fail at once leave room for the next, so their number in a time is bounded, too."""
    dialled: list[str] = []

    async def open_nobody(peer: str, protocol: str, *, timeout_s: float = 10.0) -> FrameStream:
        dialled.append(peer)
        await trio.sleep(0.01)
        raise PeerUnreachable(f"{peer} does not answer")

    async with open_swarm((0, 4), (4, 8)) as swarm:
        member, seconds = swarm.fabric.node("member"), 60
        stream, id = await member.open("n0", PROTOCOL), new_session_id("member")
        with monkeypatch.context() as patch:
            patch.setattr(swarm.fabric.nodes["n0"], "open", open_nobody)
            for number in range(1, 20 * seconds):
                await stream.send(turn_frame(id, number), Priority.CONTROL)
                await trio.sleep(0.05)
        assert DIALS_BURST < len(dialled) <= DIALS_BURST + DIALS_PER_S * seconds
        stats = await ask(await swarm.asker(), PROMPT, 8)
        assert (stats.token_ids, stats.recoveries) == (greedy(PROMPT, 8), 0)


@pytest.mark.parametrize(
    ("kind", "action", "cost"),
    [
        (Kind.TURN, None, 4.0),
        (Kind.GO, None, 1.0),
        (Kind.CLOSE, None, 1.0),
        (Kind.PROBE, None, 1.0),
        (Kind.READY, None, 1.0),  # not for a hop at all
        (Kind.DATA, FrameAction.COMPUTE, 0.0),
        (Kind.DATA, FrameAction.DROP, 0.25),
        (Kind.DATA, FrameAction.GAP, 4.0),
        (Kind.DATA, FrameAction.REPEAT, 4.0),
    ],
)
def test_frame_cost(kind: Kind, action: FrameAction | None, cost: float) -> None:
    assert frame_cost(kind, action) == cost


async def test_a_session_that_is_cut_all_the_time_is_cut_once_after_a_step(autojump_clock: MockClock) -> None:
    """Rows that replace each other while the device is busy leave the step loop one thing to do, and not one each."""
    async with open_swarm((0, 8)) as swarm:
        server, device, id = swarm.servers["n0"], swarm.devices["n0"], new_session_id("flood")

        def row(revision: int) -> bytes:
            length = ROW_BYTES
            head = header(Kind.DATA, id, 1, 0, dtype=1, rows=1, width=WIDTH, length=length, revision=revision)
            return head + bytes(length)

        stream = await swarm.fabric.node("flood").open("n0", PROTOCOL)
        await stream.send(encode_turn(id, 1, KEEP, EpochOrder(Span(0, 8), "", "", 16, 0, 0)))
        await stream.receive()
        device.seconds = 5.0
        await stream.send(row(0))
        await trio.sleep(1)
        for revision in range(1, 501):
            await stream.send(row(revision))
        await trio.sleep(1)
        assert server._by_id[id].revision == 500, "all were read during the step"
        assert len(server._orders) <= 2, "it, and what the device prepares"
        await trio.sleep(20)
        assert server._by_id[id].length == 1
        assert not server._to_truncate


async def test_an_asker_does_not_slow_the_stream_that_others_share_between_two_hops(autojump_clock: MockClock) -> None:
    """A hop sends rows that another one refuses, because their asker orders it so, and an honest asker's rows."""
    async with open_swarm() as swarm:
        await swarm.serve("n0", HashRunner(0, 4))
        server = await swarm.serve("n1", HashRunner(4, 8), settings=ServerSettings(admission=LOW))
        member, id = swarm.fabric.node("member"), new_session_id("member")
        order = EpochOrder(Span(4, 8), "n0", "", 4096, 0, 0)
        stream = await member.open("n1", PROTOCOL)
        await stream.send(encode_turn(id, 1, KEEP, order))
        await stream.receive()
        hop = await swarm.fabric.nodes["n0"].open("n1", PROTOCOL)
        for position in range(1, 700):  # position 0 is missing
            head = header(Kind.DATA, id, 1, position, dtype=1, rows=1, width=WIDTH, length=ROW_BYTES)
            await hop.send(head + bytes(ROW_BYTES))
        await trio.sleep(0.1)
        begin = trio.current_time()
        stats = await ask(await swarm.asker(), PROMPT, 8)
        assert (stats.token_ids, stats.recoveries) == (greedy(PROMPT, 8), 0)
        assert trio.current_time() - begin < 2
        assert server._frame_limit.delay_s("n0", trio.current_time(), 0.0) == 0.0
        assert server._by_id[id].gap_told


async def test_neighbours_of_a_hop_do_not_make_what_it_sends_for_others_dearer(autojump_clock: MockClock) -> None:
    """Askers at its address spend a little each: rows that it sends in vain, by order of one of them, cost no more."""
    async with open_swarm() as swarm:
        await swarm.serve("n0", HashRunner(0, 4))
        await swarm.serve("n1", HashRunner(4, 8), settings=ServerSettings(admission=LOW))
        read, neighbours = count_frames(swarm, "n1"), [f"neighbour{number}" for number in range(12)]
        swarm.fabric.machine_of |= dict.fromkeys(["n0", *neighbours], "the relay")
        streams = [await swarm.fabric.node(name).open("n1", PROTOCOL) for name in neighbours]
        hop, id = await swarm.fabric.nodes["n0"].open("n1", PROTOCOL), new_session_id("member")
        for number in range(50):
            for stream in streams:
                await stream.send(close_frame(id, number), Priority.CONTROL)
            for _ in range(20):
                await hop.send(useless_frame(id, number))
            await trio.sleep(0.2)
        assert read["n0"] == 50 * 20


async def test_an_asker_with_a_session_for_each_span_makes_no_step_many_times_as_long(
    autojump_clock: MockClock,
) -> None:
    """Sessions over different blocks share no pass of the device: a step takes those of one span from each asker."""
    async with open_swarm((0, 8)) as swarm:
        server, device, runner = swarm.servers["n0"], swarm.devices["n0"], swarm.runners["n0"]
        spans = [Span(start, stop) for start in range(8) for stop in range(start + 1, 9)]
        ids = {new_session_id("member"): span for span in spans}
        stream = await swarm.fabric.node("member").open("n0", PROTOCOL)
        for id, span in ids.items():
            await stream.send(encode_turn(id, 1, KEEP, EpochOrder(span, "", "", 16, 0, 0)))
            await stream.receive()
        device.seconds = 1.0
        for id in ids:
            head = header(Kind.DATA, id, 1, 0, dtype=1, rows=1, width=WIDTH, length=ROW_BYTES)
            await stream.send(head + bytes(ROW_BYTES))
        await trio.sleep(2 * len(ids))
        assert all(server._by_id[id].length == 1 for id in ids)
        assert max(len({ids[key[:16]] for key, _, _ in batch}) for batch in runner.batches) == 1
