"""Calls and streams over real links: the contract, and what only real frames can do."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from app.core.network import Payload, Priority
from p2p.errors import DeadlineExceeded, PeerUnreachable, Refused, StreamClosed
from p2p.link.byte_stream import ByteStream
from p2p.link.frames import CHUNK_BYTES, FIRST, LAST, PREFACE, WHOLE, Frame, FrameDecoder, Kind, encode
from p2p.link.link import STALLED_S
from p2p.link.quota import Limits
from p2p.link.streams import MessageStream
from p2p.link.switchboard import BULK_LANE, LIVE_LANE, MAX_LINKS_A_LANE
from tests.p2p.network_contract import PROTOCOL, NetworkContract, Stall, echo, echo_stream
from tests.p2p.networks import TrioByteStream, WiredNode, WiredWorld, wired_world


@pytest.fixture
async def world() -> AsyncIterator[WiredWorld]:
    async with wired_world() as made:
        yield made


class TestWired(NetworkContract):
    """Links over byte pipes are a network."""


async def two(world: WiredWorld) -> tuple[WiredNode, WiredNode]:
    a, b = await world.node(), await world.node()
    b.serve("echo", echo)
    b.accept(PROTOCOL, echo_stream)
    return a, b


async def stranger(world: WiredWorld, node: WiredNode) -> trio.abc.Stream:
    """A raw byte pipe into a node's live lane, from somebody who need not keep the rules."""
    here, there = trio.testing.memory_stream_pair()
    world.connect(node, "stranger", LIVE_LANE, TrioByteStream(there))
    return here


async def frames_of(pipe: trio.abc.Stream, count: int) -> list[Frame]:
    """The next frames that a node sends."""
    decoder, frames = FrameDecoder(), list[Frame]()
    while len(frames) < count:
        data = await pipe.receive_some(65536)
        assert data, "the link ended"
        frames += decoder.feed(bytes(data))
    return frames


async def ping_for_ever(pipe: trio.abc.Stream) -> None:
    """Show signs of life every second, until the link ends."""
    while True:
        await trio.sleep(1)
        await pipe.send_all(encode(Frame(Kind.PING, WHOLE, 201, 0, 0, "", b"")))


def request(id: int, body: bytes = b"", method: str = "echo") -> bytes:
    return encode(Frame(Kind.REQUEST, WHOLE, id, len(body), 60_000, method, body))


async def test_over_the_limit_is_refused_without_running_the_handler() -> None:
    async with wired_world() as world:
        world.limits = Limits(calls_per_peer=2)
        a, b = await two(world)
        stall = Stall()
        runs: list[str] = []

        async def stalling(peer: str, body: bytes) -> bytes:
            runs.append(peer)
            return await stall(peer, body)

        b.serve("stall", stalling)
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(lambda: a.call(b.peer_id, "stall", b"", timeout_s=60))
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(Refused, match="too many calls"):
                await a.call(b.peer_id, "stall", bytes(2**20), timeout_s=5)
            assert len(runs) == 2
            nursery.cancel_scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert await a.call(b.peer_id, "echo", b"room again", timeout_s=5) == b"room again"
        await trio.testing.wait_all_tasks_blocked()
        assert b.services.quota.under_way(a.peer_id) == (0, 0, 0)


async def test_streams_over_the_limit_are_refused_and_closed_ones_make_room() -> None:
    async with wired_world() as world:
        world.limits = Limits(streams_per_peer=1)
        a, b = await two(world)
        first = await a.open(b.peer_id, PROTOCOL)
        with pytest.raises(Refused, match="too many streams"):
            await a.open(b.peer_id, PROTOCOL)
        await first.aclose()
        with pytest.raises(StreamClosed):
            await first.receive()
        await (await a.open(b.peer_id, PROTOCOL)).reset()
        await a.call(b.peer_id, "echo", b"", timeout_s=5)
        assert b.services.quota.under_way(a.peer_id) == (0, 0, 0)


async def test_a_decode_message_passes_while_bulk_waits_for_the_upload_limit(autojump_clock: MockClock) -> None:
    async with wired_world() as world:
        a, b = await two(world)
        stream = await a.open(b.peer_id, PROTOCOL)
        a.services.bandwidth.set_limits(1e6, None)
        await stream.send(bytes(3_000_000), Priority.PREFILL)
        started_at = trio.current_time()
        await stream.send(b"now")
        assert await stream.receive() == b"now"
        assert trio.current_time() - started_at < 0.1
        assert len(await stream.receive()) == 3_000_000
        assert 2.4 <= trio.current_time() - started_at <= 3.3


async def test_no_decode_message_waits_behind_the_turn_of_what_waits_for_the_upload_limit(
    autojump_clock: MockClock,
) -> None:
    """Prompts have a share of a link beside tokens without end, but none that tokens would have to wait for."""
    async with wired_world() as world:
        a, b = await two(world)
        prompts, stream = [await a.open(b.peer_id, PROTOCOL) for _ in range(2)]
        a.services.bandwidth.set_limits(1e6, None)
        await prompts.send(bytes(3_000_000), Priority.PREFILL)
        started_at = trio.current_time()
        for _ in range(70):
            await stream.send(bytes(50_000))
        for _ in range(70):
            assert len(await stream.receive()) == 50_000
        assert trio.current_time() - started_at < 0.1


async def test_the_download_limit_slows_bulk_alone_and_is_lifted_live(autojump_clock: MockClock) -> None:
    async with wired_world() as world:
        a, b = await two(world)
        a.services.bandwidth.set_limits(None, 1e6)
        started_at = trio.current_time()
        await a.call(b.peer_id, "echo", bytes(4_000_000), timeout_s=60, priority=Priority.BULK)
        assert 3.0 <= trio.current_time() - started_at <= 4.3
        started_at = trio.current_time()
        await a.call(b.peer_id, "echo", b"control", timeout_s=60)
        assert trio.current_time() - started_at < 0.01
        a.services.bandwidth.set_limits(None, None)
        await a.call(b.peer_id, "echo", bytes(4_000_000), timeout_s=60, priority=Priority.BULK)
        assert trio.current_time() - started_at < 1.0


async def test_peers_on_the_lan_know_no_limit(autojump_clock: MockClock) -> None:
    async with wired_world() as world:
        a, b = await two(world)
        a.is_lan = lambda peer: True
        a.services.bandwidth.set_limits(1000, 1000)
        started_at = trio.current_time()
        await a.call(b.peer_id, "echo", bytes(4_000_000), timeout_s=60, priority=Priority.BULK)
        assert trio.current_time() - started_at < 1.0


@pytest.mark.parametrize(
    "rubbish",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        PREFACE + b"\xff" * 100 + bytes(100),
        PREFACE + request(2),  # an id that is not the dialler's
        PREFACE + request(1) + encode(Frame(Kind.CREDIT, WHOLE, 3, 0, 5, "", b"")) + bytes(40),
        PREFACE + encode(Frame(Kind.OPEN, WHOLE, 1, 0, 0, PROTOCOL, b"")) * 2,
    ],
)
async def test_rubbish_costs_its_sender_the_link_and_nobody_else(rubbish: bytes) -> None:
    async with wired_world() as world:
        a, b = await two(world)
        pipe = await stranger(world, b)
        await pipe.send_all(rubbish)
        with trio.fail_after(5):
            while await pipe.receive_some(65536):
                pass
        await trio.testing.wait_all_tasks_blocked()
        assert [peer for peer, _ in b.reports] == ["stranger"]
        assert await a.call(b.peer_id, "echo", b"on", timeout_s=5) == b"on"
        assert b.services.quota.under_way("stranger") == (0, 0, 0)


async def test_a_peer_that_floods_requests_is_refused_then_reported() -> None:
    async with wired_world() as world:
        world.limits = Limits(requests_per_s=10, request_burst=10, refusals=100)
        _, b = await two(world)
        pipe = await stranger(world, b)
        await pipe.send_all(PREFACE + b"".join(request(id) for id in range(1, 2001, 2)))
        with trio.fail_after(5):
            while await pipe.receive_some(65536):
                pass
        assert [why for _, why in b.reports] == ["it ignores refusals: too many requests a second"]


async def test_a_stream_sent_beyond_its_window_ends_the_link() -> None:
    async with wired_world() as world:
        _, b = await two(world)

        async def never_reads(stream: MessageStream) -> None:
            await trio.sleep_forever()

        b.accept("/test/1/deaf", never_reads)
        pipe = await stranger(world, b)
        message = encode(Frame(Kind.MESSAGE, WHOLE, 1, 200_000, 0, "", bytes(200_000)))
        await pipe.send_all(PREFACE + encode(Frame(Kind.OPEN, WHOLE, 1, 0, 0, "/test/1/deaf", b"")) + message * 22)
        with trio.fail_after(5):
            while await pipe.receive_some(65536):
                pass
        await trio.testing.wait_all_tasks_blocked()
        assert "window" in b.reports[0][1]
        assert b.services.quota.under_way("stranger") == (0, 0, 0)


async def test_a_peer_that_asks_and_never_reads_is_dropped_with_bounded_memory() -> None:
    """Its byte stream takes nothing: answers pile up in one bounded queue, then the link ends."""
    async with wired_world() as world:
        world.limits = Limits(requests_per_s=1e9, request_burst=1e9)
        _, b = await two(world)
        here, there = trio.testing.lockstep_stream_pair()
        world.connect(b, "stranger", LIVE_LANE, TrioByteStream(there))
        ping = encode(Frame(Kind.PING, WHOLE, 1, 0, 0, "", b""))
        with trio.fail_after(20), pytest.raises(trio.BrokenResourceError):
            await here.send_all(PREFACE + ping * 140_000)
        assert "does not read" in b.reports[0][1]


async def test_answers_that_nobody_reads_are_few_and_not_kept_for_ever(autojump_clock: MockClock) -> None:
    """A peer that lives, asks for 64 MiB and reads none of it: it is held 24 MiB, and those for a minute."""
    async with wired_world() as world:
        _, b = await two(world)
        made = 0

        async def big(peer: str, body: bytes) -> Payload:
            nonlocal made
            made += 1
            return bytes(2**20)

        b.serve("big", big)
        here, there = trio.testing.lockstep_stream_pair()
        world.connect(b, "stranger", BULK_LANE, TrioByteStream(there))
        await here.send_all(PREFACE + b"".join(request(id, b"", "big") for id in range(1, 128, 2)))
        await trio.testing.wait_all_tasks_blocked()
        calls, _, size = b.services.quota.under_way("stranger")
        assert made == 64
        assert (calls, size) == (24, 24 * 2**20)
        begun = trio.current_time()
        with pytest.raises(trio.BrokenResourceError):
            await ping_for_ever(here)
        assert trio.current_time() - begun == pytest.approx(STALLED_S, abs=2)
        assert b.services.quota.under_way("stranger") == (0, 0, 0)


async def test_a_slow_reader_that_goes_on_reading_is_served(autojump_clock: MockClock) -> None:
    async with wired_world() as world:
        _, b = await two(world)

        async def big(peer: str, body: bytes) -> Payload:
            return bytes(2**20)

        b.serve("big", big)
        here, there = trio.testing.lockstep_stream_pair()
        world.connect(b, "stranger", BULK_LANE, TrioByteStream(there))
        await here.send_all(PREFACE + request(1, b"", "big"))
        decoder, frames = FrameDecoder(), list[Frame]()
        while len(frames) < 4:
            await trio.sleep(STALLED_S / 3)
            frames += decoder.feed(bytes(await here.receive_some(2**18)))
        assert trio.current_time() > STALLED_S
        assert [frame.kind for frame in frames] == [Kind.ANSWER] * 4


async def test_a_request_cancelled_half_way_frees_what_had_arrived() -> None:
    async with wired_world() as world:
        _, b = await two(world)
        pipe = await stranger(world, b)
        half = Frame(Kind.REQUEST, FIRST, 1, 2 * CHUNK_BYTES, 60_000, "echo", bytes(CHUNK_BYTES))
        await pipe.send_all(PREFACE + encode(half))
        await trio.testing.wait_all_tasks_blocked()
        assert b.services.quota.under_way("stranger") == (1, 0, CHUNK_BYTES)
        rest = Frame(Kind.REQUEST, LAST, 1, 2 * CHUNK_BYTES, 0, "", bytes(CHUNK_BYTES))
        await pipe.send_all(encode(Frame(Kind.CANCEL, WHOLE, 1, 0, 0, "", b"")) + encode(rest) + request(3, b"next"))
        (answer,) = await frames_of(pipe, 1)
        assert (answer.id, answer.body) == (3, b"next")
        await trio.testing.wait_all_tasks_blocked()
        assert b.services.quota.under_way("stranger") == (0, 0, 0)


async def test_a_lost_link_frees_all_quotas_and_cancels_handlers() -> None:
    async with wired_world() as world:
        a, b = await two(world)
        stall = Stall()
        b.serve("stall", stall)
        stream = await a.open(b.peer_id, PROTOCOL)
        await stream.send(bytes(1000))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: a.call(b.peer_id, "stall", bytes(1000), timeout_s=60))
            await stall.started.wait()
            nursery.cancel_scope.cancel()
            a.hang_up(b.peer_id)
        with trio.fail_after(5):
            await stall.cancelled.wait()
        await trio.testing.wait_all_tasks_blocked()
        assert b.services.quota.under_way(a.peer_id) == (0, 0, 0)
        assert b.peers() == []


async def test_a_handler_stops_at_the_callers_deadline_even_if_no_cancel_comes(autojump_clock: MockClock) -> None:
    async with wired_world() as world:
        _, b = await two(world)
        stall = Stall()
        b.serve("stall", stall)
        pipe = await stranger(world, b)
        await pipe.send_all(PREFACE + encode(Frame(Kind.REQUEST, WHOLE, 1, 0, 2000, "stall", b"")))
        await stall.cancelled.wait()
        assert trio.current_time() == pytest.approx(2.0, abs=0.1)
        assert b.services.quota.under_way("stranger") == (0, 0, 0)


async def test_callers_share_one_dial_and_one_that_gives_up_does_not_end_it() -> None:
    async with wired_world() as world:
        a, b = await two(world)
        dials: list[str] = []
        go = trio.Event()
        pipe_to = a._dial

        async def slow_dial(peer: str, lane: str) -> ByteStream:
            dials.append(lane)
            await go.wait()
            return await pipe_to(peer, lane)

        a._dial = slow_dial
        answers: list[bytes] = []

        async def ask() -> None:
            answers.append(await a.call(b.peer_id, "echo", b"x", timeout_s=5))

        async with trio.open_nursery() as nursery:
            with pytest.raises(DeadlineExceeded):
                await a.call(b.peer_id, "echo", b"", timeout_s=0.01)
            for _ in range(3):
                nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
            go.set()
        assert answers == [b"x"] * 3
        assert dials == [LIVE_LANE]


async def test_a_ping_is_answered_with_its_id() -> None:
    async with wired_world() as world:
        _, b = await two(world)
        pipe = await stranger(world, b)
        await pipe.send_all(PREFACE + encode(Frame(Kind.PING, WHOLE, 201, 0, 0, "", b"")))
        (pong,) = await frames_of(pipe, 1)
        assert (pong.kind, pong.id) == (Kind.PONG, 201)


async def test_an_answer_larger_than_what_is_kept_for_one_peer_is_refused_here() -> None:
    async with wired_world() as world:
        world.limits = Limits(bytes_per_peer=2**20)
        a = await world.node()
        world.limits = None
        b = await world.node()
        b.serve("echo", echo)

        async def verbose(peer: str, body: bytes) -> bytes:
            return bytes(2**21)

        b.serve("verbose", verbose)
        with pytest.raises(Refused, match="more bytes than can be buffered"):
            await a.call(b.peer_id, "verbose", b"", timeout_s=5)
        assert len(await a.call(b.peer_id, "echo", bytes(2**19), timeout_s=5)) == 2**19
        assert a.services.quota.under_way(b.peer_id) == (0, 0, 0)


async def test_a_handler_that_shields_itself_does_not_hold_up_the_end_of_its_link() -> None:
    async with wired_world() as world:
        a, b = await two(world)
        started, free = trio.Event(), trio.Event()

        async def stubborn(peer: str, body: bytes) -> bytes:
            started.set()
            with trio.CancelScope(shield=True):
                await free.wait()
            return b""

        b.serve("stubborn", stubborn)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call_failing, a, b.peer_id)
            await started.wait()
            a.hang_up(b.peer_id)
            await trio.testing.wait_all_tasks_blocked()
            assert b.services.quota.under_way(a.peer_id) == (0, 0, 0)
            assert await a.call(b.peer_id, "echo", b"a new link", timeout_s=5) == b"a new link"
            free.set()


async def call_failing(node: WiredNode, peer: str) -> None:
    with pytest.raises(PeerUnreachable):
        await node.call(peer, "stubborn", b"", timeout_s=60)


async def test_a_peer_keeps_only_its_newest_links() -> None:
    async with wired_world() as world:
        _, b = await two(world)
        pipes = []
        for _ in range(MAX_LINKS_A_LANE + 3):
            pipes.append(await stranger(world, b))
            await trio.testing.wait_all_tasks_blocked()
        assert len(b.links_to("stranger")) == MAX_LINKS_A_LANE
        await pipes[-1].send_all(PREFACE + request(1, b"newest"))
        (answer,) = await frames_of(pipes[-1], 1)
        assert answer.body == b"newest"


async def test_a_loss_after_a_hang_up_and_a_new_call_is_still_reported() -> None:
    async with wired_world() as world:
        a, b = await two(world)
        lost: list[str] = []
        a.on_link_lost(lost.append)
        await a.call(b.peer_id, "echo", b"", timeout_s=5)
        a.hang_up(b.peer_id)
        await trio.testing.wait_all_tasks_blocked()
        assert lost == []
        await a.call(b.peer_id, "echo", b"", timeout_s=5)
        await world.kill(b)
        await trio.testing.wait_all_tasks_blocked()
        assert lost == [b.peer_id]
