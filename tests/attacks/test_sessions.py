"""Attacks on sessions: on a block server by anybody who can connect to it, and on an asker by its own hops."""

from __future__ import annotations

import tracemalloc
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import trio
import trio.testing
from trio.testing import MockClock

from app.asker import route_session
from app.asker.route_session import SessionSettings
from app.core.compute import BlockRunner, StepWork
from app.core.network import FrameStream, Payload, Priority
from app.core.reasons import Reason
from app.core.span import Span
from app.routing.reroute import RunningRoute
from app.routing.route import Hop, ReadingPace, Route
from app.routing.wire_choice import Wires
from app.serving.admission import IDLE_S, TURN_S
from app.serving.batching import BatchQueue, QueuedTokens
from app.serving.block_server import BlockServer, ServerSettings
from app.serving.hop_session import HopSession
from app.session.frame import Frame, decode_hop_error, header, new_session_id, plain
from app.session.loop_stream import loop_streams
from app.session.wire import KEEP, PROTOCOL, EpochOrder, Kind, decode, encode_turn
from engine.errors import NotFinite
from engine.model.hosted_span import HostedSpan
from engine.model.span import SpanOptions, load_span
from engine.session_runner import SessionRunner
from engine.sources.opening import open_source
from p2p.errors import P2PError, PeerUnreachable
from p2p.memory.fabric import LinkProfile, MemoryFabric, MemoryStream, open_fabric
from tests.app.hash_model import WIDTH, HashRunner, InlineDevice, Output, greedy, last_hidden
from tests.app.session_swarm import PROMPT, SessionSwarm, ask, bar, open_swarm

LAST_EPOCH = 2**32 - 1
F32 = 1  # on the wire


class Scene(NamedTuple):
    """A block server with an honest asker's session open, and the stream of an attacker."""

    fabric: MemoryFabric
    honest: MemoryStream
    honest_id: bytes
    attacker: MemoryStream

    async def still_serves(self) -> bool:
        """Ask the server how far the honest session is; True if it still knows the session."""
        await self.honest.send(plain(Kind.PROBE, self.honest_id, 1))
        return (await next_frame(self.honest, Kind.STATE)).epoch == 1


@asynccontextmanager
async def attacked(runner: BlockRunner) -> AsyncIterator[Scene]:
    """A server of these blocks under the name `victim`; a crash of its tasks comes out of here."""
    async with open_fabric() as fabric, trio.open_nursery() as nursery:
        await nursery.start(BlockServer(fabric.node("victim"), runner, InlineDevice()).run)
        honest = await fabric.node("honest").open("victim", PROTOCOL)
        id = new_session_id("honest")
        await honest.send(encode_turn(id, 1, KEEP, EpochOrder(Span(runner.start, runner.stop), "", "", 16, 0)))
        await next_frame(honest, Kind.READY)
        yield Scene(fabric, honest, id, await fabric.node("attacker").open("victim", PROTOCOL))
        nursery.cancel_scope.cancel()


async def next_frame(stream: FrameStream, kind: Kind) -> Frame:
    """The next frame of this kind; fails where none comes in 30 seconds."""
    with trio.fail_after(30):
        while True:
            frame = decode(await stream.receive())
            if frame.kind == kind:
                return frame


def zeros(session: bytes, epoch: int, position: int, rows: int, width: int) -> bytes:
    """A DATA frame of float32 zeros."""
    body = bytes(4 * width * rows)
    head = header(Kind.DATA, session, epoch, position, dtype=F32, rows=rows, width=width, length=len(body))
    return head + body


# --- strangers against a block server ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("successor", ["unreachable", "listening"])
async def test_a_wire_format_that_changes_within_a_session_harms_nobody(
    cache: Path, successor: str, autojump_clock: MockClock
) -> None:
    """An asker wants float16 first and float32 later: the server lives on and sends its successor valid frames only."""
    options = SpanOptions(torch.device("cpu"), torch.float32, kv_bytes=1 << 22)
    runner = SessionRunner(HostedSpan([load_span(open_source("tiny-random", cache), 0, 4, options)]))
    pushed: list[bytes] = []

    async def keep(stream: MemoryStream) -> None:
        while True:
            pushed.append(await stream.receive())

    async with attacked(runner) as scene:
        scene.fabric.node("successor").accept(PROTOCOL, keep)
        if successor == "unreachable":
            scene.fabric.freeze("successor")
        stream, id = scene.attacker, new_session_id("attacker")
        with suppress(P2PError):  # the server may hang up on such an asker
            for epoch, wire, position, rows in ((1, "f16", 0, 9), (2, "f32", 9, 1)):
                turn = EpochOrder(Span(0, 4), "", "successor", 16, 0, wire=wire)
                await stream.send(encode_turn(id, epoch, KEEP, turn))
                await stream.send(zeros(id, epoch, position, rows, runner.hidden_size))
                await trio.sleep(0.3)
            await stream.send(plain(Kind.GO, id, 2, 0))
        await trio.sleep(8)  # longer than a dial may take
        for message in pushed:
            decode(message)
        assert await scene.still_serves()


class WideRunner(HashRunner):
    """Blocks that return their input as it is, with 4 KiB for each token."""

    def __init__(self) -> None:
        super().__init__(0, 4)
        self.hidden_size = 1024

    def step(self, work: Sequence[StepWork]) -> list[Output]:
        return [Output(bytes(item.data), item.dtype) for item in work]


async def test_an_asker_that_never_reads_cannot_fill_a_hops_memory(autojump_clock: MockClock) -> None:
    """An asker demands the same outputs a thousand times and reads none: what waits for it stays within a bound."""
    most_bytes, rows = 256 << 20, 256  # the outputs of these tokens take 1 MiB
    runner = WideRunner()
    async with attacked(runner) as scene:
        stream, id = scene.attacker, new_session_id("attacker")
        await stream.send(encode_turn(id, 1, KEEP, EpochOrder(Span(0, 4), "", "", rows, 0, send_from=0)))
        await stream.send(zeros(id, 1, 0, rows, runner.hidden_size))
        await trio.sleep(5)
        tracemalloc.start()
        try:
            held_bytes = 0
            with suppress(P2PError), trio.move_on_after(60):  # the server may hang up, or not read on
                for _ in range(1000):
                    await stream.wait_room()
                    await stream.send(plain(Kind.GO, id, 1, 0))
                    await trio.sleep(0.01)
                    held_bytes, _ = tracemalloc.get_traced_memory()
                    if held_bytes > most_bytes:
                        break
        finally:
            tracemalloc.stop()
        assert held_bytes <= most_bytes
        assert await scene.still_serves()


@pytest.mark.parametrize(("hog", "turn_s"), [("idle", IDLE_S), ("working", TURN_S), ("victim", 25 * 30)])
async def test_nobody_holds_the_whole_cache_for_good(hog: str, turn_s: float, autojump_clock: MockClock) -> None:
    """A first session may take all of it, and a probe now and then kept it open; the node's own replies stay."""
    async with open_fabric() as fabric, trio.open_nursery() as nursery:
        server = BlockServer(fabric.node("victim"), HashRunner(0, 4, kv_tokens=1000), InlineDevice())
        await nursery.start(server.run)
        here, there = loop_streams(hog)
        if hog == "victim":
            nursery.start_soon(server.attend, there)
        holding = here if hog == "victim" else await fabric.node(hog).open("victim", PROTOCOL)
        held = new_session_id(hog)
        await holding.send(encode_turn(held, 1, KEEP, EpochOrder(Span(0, 4), "", "", 1000, 0)))
        await next_frame(holding, Kind.READY)
        await holding.send(zeros(held, 1, 0, 1, WIDTH))
        asking = await fabric.node("asker").open("victim", PROTOCOL)

        async def keep() -> None:
            for position in range(1, 1000):
                await holding.send(plain(Kind.PROBE, held, 1))
                if hog == "working":
                    await holding.send(zeros(held, 1, position, 1, WIDTH))
                await trio.sleep(30)

        nursery.start_soon(keep)
        answers = []
        times = 25 if hog == "victim" else int(turn_s / 30) + 5
        for _ in range(times):  # half a minute between two of them
            await asking.send(encode_turn(new_session_id("asker"), 1, KEEP, EpochOrder(Span(0, 4), "", "", 100, 0)))
            answers.append(Kind(decode(await asking.receive()).kind))
            await trio.sleep(30)
        refused = answers.count(Kind.TROUBLE)
        assert turn_s <= 30 * refused <= turn_s + 30
        assert answers == [Kind.TROUBLE] * refused + [Kind.READY] * (times - refused)
        if hog != "victim":
            assert decode_hop_error(await next_frame(holding, Kind.TROUBLE)).code == "busy"
        nursery.cancel_scope.cancel()


async def test_nobody_is_thrown_out_of_the_cache_again_and_again(autojump_clock: MockClock) -> None:
    """A member that was refused for ten minutes had each later session of another one ended as soon as it was open.

    Who made way has its share at once, and more of it when nobody was refused for a while.
    """
    async with open_fabric() as fabric, trio.open_nursery() as nursery:
        server = BlockServer(fabric.node("victim"), HashRunner(0, 4, kv_tokens=1000), InlineDevice())
        await nursery.start(server.run)
        honest = await fabric.node("asker").open("victim", PROTOCOL)
        member = await fabric.node("member").open("victim", PROTOCOL)

        async def is_admitted(stream: FrameStream, id: bytes, tokens: int) -> bool:
            await stream.send(encode_turn(id, 1, KEEP, EpochOrder(Span(0, 4), "", "", tokens, 0)))
            while True:
                frame = decode(await stream.receive())
                if frame.session == id:
                    return frame.kind == Kind.READY

        admitted = []
        for _ in range(int(2 * TURN_S / 10) + 10):  # 10 s each
            writing = new_session_id("asker")
            admitted.append(await is_admitted(honest, writing, 900))
            if not admitted[-1]:
                writing = new_session_id("asker")
                assert await is_admitted(honest, writing, 500), "its share"
            wanted = new_session_id("member")
            if await is_admitted(member, wanted, 200):
                await member.send(plain(Kind.CLOSE, wanted, 1))
            await trio.sleep(5)
            await honest.send(plain(Kind.CLOSE, writing, 1))
            await trio.sleep(5)
        turn = int(TURN_S / 10)
        assert abs(admitted.index(False) - turn) <= 1
        assert abs(admitted.count(False) - turn) <= 1
        assert admitted[-1]
        nursery.cancel_scope.cancel()


async def test_rows_that_wait_for_the_device_have_a_bound(autojump_clock: MockClock) -> None:
    """A fast asker filled a slow hop's memory with the rows of all tokens that it had leased; others were not safe."""
    settings, rows = ServerSettings(queued_bytes=64 * 4 * WIDTH), 16
    async with open_fabric() as fabric, trio.open_nursery() as nursery:
        server = BlockServer(fabric.node("victim"), HashRunner(0, 4), InlineDevice(10.0), settings)
        await nursery.start(server.run)
        streams = {}
        for name in ("attacker", "honest"):
            stream = streams[name] = await fabric.node(name).open("victim", PROTOCOL)
            order = EpochOrder(Span(0, 4), "", "", 1000, 0, send_from=0)
            await stream.send(encode_turn(new_session_id(name), 1, KEEP, order))
            id = (await next_frame(stream, Kind.READY)).session
            for position in range(0, 160 if name == "attacker" else 48, rows):
                await stream.send(zeros(id, 1, position, rows, WIDTH))
                await trio.testing.wait_all_tasks_blocked()
                assert server._queue.bytes <= settings.queued_bytes
        error = decode_hop_error(await next_frame(streams["attacker"], Kind.TROUBLE))
        assert (error.code, "memory" in error.text) == ("busy", True)
        outputs = 0
        while outputs < 48:
            outputs += (await next_frame(streams["honest"], Kind.DATA)).rows
        assert (server.sessions, server._queue.bytes) == (1, 0)
        nursery.cancel_scope.cancel()


async def test_an_asker_sends_no_more_of_a_prompt_than_hops_may_have_waiting(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """Two hops: the second one computes slowly, and what the first sends it waits there."""
    ahead, chunk, prompt, most = 64, 16, [7 * n % 50 for n in range(600)], 0
    monkeypatch.setattr(route_session, "UNCOMPUTED_BYTES", ahead * 4 * WIDTH)
    put = BatchQueue.put

    def watched(queue: BatchQueue, work: QueuedTokens) -> None:
        nonlocal most
        put(queue, work)
        most = max(most, queue.rows)

    monkeypatch.setattr(BatchQueue, "put", watched)
    async with open_swarm((0, 4), (4, 8)) as swarm:
        swarm.devices["n1"].seconds = 0.5
        asker = await swarm.asker(settings=SessionSettings(chunk_rows=chunk))
        stats = await ask(asker, prompt, 3)
        assert stats.token_ids == greedy(prompt, 3)
        assert stats.recoveries == 0
    assert chunk < most <= ahead + chunk


async def test_an_asker_that_names_one_silent_successor_after_the_other_leaves_no_copies(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """Each order has the same outputs sent to another successor; those for the earlier ones are not needed any more."""

    async def open_nobody(peer: str, protocol: str, *, timeout_s: float = 10.0) -> MemoryStream:
        await trio.sleep_forever()
        raise AssertionError

    rows, runner = 256, WideRunner()  # the outputs of these tokens take 1 MiB
    async with open_fabric() as fabric, trio.open_nursery() as nursery:
        server = BlockServer(fabric.node("victim"), runner, InlineDevice())
        await nursery.start(server.run)
        monkeypatch.setattr(fabric.nodes["victim"], "open", open_nobody)
        stream, id = await fabric.node("attacker").open("victim", PROTOCOL), new_session_id("attacker")
        await stream.send(encode_turn(id, 1, KEEP, EpochOrder(Span(0, 4), "", "nobody1", rows, 0)))
        await next_frame(stream, Kind.READY)
        await stream.send(zeros(id, 1, 0, rows, runner.hidden_size))
        await trio.sleep(5)  # simulated: until the tokens are computed

        def waiting() -> list[int]:
            return [backlog.bytes for backlog in server._sender._outboxes._opening.values() if backlog.bytes]

        for epoch in range(2, 5):
            order = EpochOrder(Span(0, 4), "", f"nobody{epoch}", rows, 0, send_from=0)
            await stream.send(encode_turn(id, epoch, KEEP, order))
            await next_frame(stream, Kind.READY)
            await trio.testing.wait_all_tasks_blocked()
            assert len(waiting()) == 1
            assert 1 << 20 <= waiting()[0] < 2 << 20
        await stream.send(plain(Kind.CLOSE, id, 4))
        await trio.sleep(1)  # simulated
        assert not waiting()
        nursery.cancel_scope.cancel()


async def test_turns_cannot_make_a_hop_dial_without_bound(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """An asker names another successor in each of a thousand TURNs: only some of them are dialled at a time."""
    under_way = most = 0

    async def open_nobody(peer: str, protocol: str, *, timeout_s: float = 10.0) -> MemoryStream:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        try:
            await trio.sleep(timeout_s)
        finally:
            under_way -= 1
        raise PeerUnreachable(f"{peer} does not answer")

    async with attacked(HashRunner(0, 4)) as scene:
        monkeypatch.setattr(scene.fabric.nodes["victim"], "open", open_nobody)
        stream, id = scene.attacker, new_session_id("attacker")
        with suppress(P2PError), trio.move_on_after(60):  # the server may hang up, or not read on
            for epoch in range(1, 1001):
                await stream.wait_room()
                await stream.send(encode_turn(id, epoch, KEEP, EpochOrder(Span(0, 4), "", f"nobody{epoch}", 16, 0)))
            await trio.sleep(1)
        assert 0 < most <= 64
        assert await scene.still_serves()


# --- hops against their asker -----------------------------------------------------------------------------------------


class RubbishRelay:
    """A hop's end of its asker's stream, on which it slips in one RELAY frame of another width than the model's."""

    def __init__(self, stream: FrameStream) -> None:
        self._stream = stream
        self.peer = stream.peer
        self.wait_room, self.is_clear = stream.wait_room, stream.is_clear
        self.aclose, self.reset = stream.aclose, stream.reset
        self.slipped_in = False

    async def send(self, message: Payload, priority: Priority = Priority.DECODE) -> None:
        await self._stream.send(message, priority)

    async def receive(self) -> bytes:
        message = await self._stream.receive()
        frame = decode(message)
        if frame.kind == Kind.DATA and frame.position > len(PROMPT) + 5 and not self.slipped_in:
            self.slipped_in = True
            place = (Kind.RELAY, frame.session, frame.epoch, frame.position)
            await self.send(header(*place, dtype=F32, rows=1, width=1, length=4) + bytes(4))
        return message


async def test_a_hop_cannot_have_its_successor_blamed(autojump_clock: MockClock) -> None:
    """A hop asks its asker to relay a malformed frame: the reply is right, and the hops behind it stand as before."""
    async with open_swarm((0, 3), (3, 8), (3, 8)) as swarm:
        hostile = await swarm.serve("hostile", HashRunner(0, 3), speed=500.0)
        streams: list[RubbishRelay] = []

        async def attend(stream: FrameStream) -> None:
            streams.append(RubbishRelay(stream))
            await hostile.attend(streams[-1])

        swarm.fabric.nodes["hostile"].accept(PROTOCOL, attend)
        asker = await swarm.asker()
        stats = await ask(asker, PROMPT, 20)
        assert any(stream.slipped_in for stream in streams)
        assert stats.token_ids == greedy(PROMPT, 20)
        assert {peer: asker.planner.book.standing(peer).score for peer in ("n1", "n2")} == {"n1": 1.0, "n2": 1.0}


async def test_a_hop_cannot_use_up_its_askers_session_id_elsewhere(autojump_clock: MockClock) -> None:
    """A hop opens and closes its asker's session at the other holders, then falls silent: these take over at once."""
    async with open_swarm((0, 3), (3, 8), (3, 8)) as swarm:
        hostile = await swarm.serve("hostile", HashRunner(3, 8), speed=500.0)
        asker = await swarm.asker()
        async with asker.reply(PROMPT, 10, max_tokens=10) as reply:
            for _ in range(5):
                await anext(reply)
            (session,) = hostile.stats.sessions
            id = bytes.fromhex(session.session)
            for victim in ("n1", "n2"):
                stream = await swarm.fabric.nodes["hostile"].open(victim, PROTOCOL)
                await stream.send(encode_turn(id, LAST_EPOCH, KEEP, EpochOrder(Span(3, 4), "", "", 1, 0)))
                await stream.send(plain(Kind.CLOSE, id, LAST_EPOCH))
            await trio.sleep(1)
            swarm.fabric.freeze("hostile")
            async for _ in reply:
                pass
        assert reply.stats.token_ids == greedy(PROMPT, 10)
        assert reply.stats.longest_gap_s < 10
        assert {peer: asker.planner.book.standing(peer).score for peer in ("n1", "n2")} == {"n1": 1.0, "n2": 1.0}


async def test_a_hop_that_only_claims_progress_is_left(autojump_clock: MockClock) -> None:
    """A hop takes all tokens, sends nothing, and claims more of them at each probe: the reply goes on without it."""
    probes = 0

    async def claim(stream: MemoryStream) -> None:
        nonlocal probes
        while True:
            frame = decode(await stream.receive())
            if frame.kind == Kind.TURN:
                await stream.send(plain(Kind.READY, frame.session, frame.epoch))
            elif frame.kind == Kind.PROBE:
                probes += 1
                await stream.send(plain(Kind.STATE, frame.session, frame.epoch, 0, 2**30 + probes))

    async with open_swarm((0, 4), (4, 8)) as swarm:
        await swarm.serve("liar", HashRunner(4, 8), speed=500.0)
        swarm.fabric.nodes["liar"].accept(PROTOCOL, claim)
        asker = await swarm.asker()
        with trio.move_on_after(600) as patience:
            stats = await ask(asker, PROMPT, 4)
        assert probes > 0
        assert not patience.cancelled_caught, f"no token, no error and no other hop after {probes} probes"
        assert stats.token_ids == greedy(PROMPT, 4)


async def test_a_hop_that_claims_a_token_now_and_then_is_left(autojump_clock: MockClock) -> None:
    """A hop claims one more token of the prompt every 25 s and sends nothing: that lasts a minute, not an hour."""
    claimed, claimed_at = 0, 0.0

    async def claim(stream: MemoryStream) -> None:
        nonlocal claimed, claimed_at
        while True:
            frame = decode(await stream.receive())
            if frame.kind == Kind.TURN:
                await stream.send(plain(Kind.READY, frame.session, frame.epoch))
            elif frame.kind == Kind.PROBE:
                if trio.current_time() >= claimed_at + 25:
                    claimed, claimed_at = claimed + 1, trio.current_time()
                await stream.send(plain(Kind.STATE, frame.session, frame.epoch, claimed, len(PROMPT)))

    async with open_swarm((0, 4), (4, 8)) as swarm:
        await swarm.serve("liar", HashRunner(4, 8), speed=500.0)
        swarm.fabric.nodes["liar"].accept(PROTOCOL, claim)
        asker = await swarm.asker()
        begun = trio.current_time()
        stats = await ask(asker, PROMPT, 4)
        assert claimed > 0
        assert stats.token_ids == greedy(PROMPT, 4)
        assert trio.current_time() - begun < 90


async def test_a_hop_cannot_stretch_the_time_after_which_it_is_probed(autojump_clock: MockClock) -> None:
    """A hop takes its time for the first token, so that it counts as slow, and then for ever: it is left soon."""
    async with open_swarm((0, 8)) as swarm:
        await swarm.serve("hostile", HashRunner(0, 8), speed=500.0)
        asker = await swarm.asker()
        async with asker.reply(PROMPT, 4, max_tokens=4) as reply:
            await anext(reply)
            assert reply.stats.route[0].peer == "hostile"
            for step_s in (29.0, 1e6):
                swarm.devices["hostile"].seconds = step_s
                await anext(reply)
            assert reply.stats.route[0].peer == "n0"
            await anext(reply)
        assert reply.stats.token_ids == greedy(PROMPT, 4)
        assert reply.stats.longest_gap_s < 45


# --- epochs -----------------------------------------------------------------------------------------------------------


class FixedRoutes:
    """Shows a session one route, and another one when it asks again."""

    def __init__(self, first: Route, then: Route) -> None:
        self._first, self._then = first, then

    async def route(self, current: Route, avoid: Sequence[str]) -> Route:
        return self._then if current else self._first

    def failed(self, peer: str, why: Reason, *, busy: bool) -> None: ...
    def leaves(self, peer: str, why: Reason) -> None: ...
    def link_broke(self, sender: str, receiver: str) -> None: ...
    def worked(self, peer: str) -> None: ...
    async def better(self, standing: RunningRoute) -> Route | None:
        return None

    def wires(self, route: Route, before: Wires | None) -> Wires:
        return {}

    def paces(self, route: Route) -> Mapping[str, ReadingPace]:
        return {}

    def waited(self, hop: Hop, tokens: int, waited_s: float, *, given_up: bool = False) -> None: ...
    async def would_use(self, hop: Hop, avoid: Sequence[str]) -> bool:
        return True

    def lacks_adapter(self, peer: str) -> None: ...
    def without_adapter(self) -> Sequence[str]:
        return ()


async def test_what_was_relayed_for_a_dead_hop_reaches_no_other(autojump_clock: MockClock) -> None:
    """A hop dies while its predecessor works on a token to be relayed to it: nobody else computes that output."""
    async with open_fabric(profile=LinkProfile(delay_s=0.005)) as fabric, trio.open_nursery() as nursery:
        swarm = SessionSwarm(fabric, nursery)
        for name, start, stop in (("a", 0, 6), ("b", 3, 6), ("c", 6, 8), ("new", 0, 1)):
            await swarm.serve(name, HashRunner(start, stop))
        bar(fabric.nodes["a"], "b")  # so that its outputs go through the asker
        fabric.set_link("asker", "new", LinkProfile(delay_s=0.1))
        asker = await swarm.asker()
        before = (Hop("a", Span(0, 3)), Hop("b", Span(3, 6)), Hop("c", Span(6, 8)))
        after = (Hop("new", Span(0, 1)), Hop("a", Span(1, 6)), Hop("c", Span(6, 8)))
        async with asker.open(FixedRoutes(before, after), 100, SessionSettings()) as session:
            await session.advance(PROMPT)
            swarm.devices["a"].seconds = 0.1
            async with trio.open_nursery() as dying:
                dying.start_soon(_kill_after, swarm, "b", 0.05)  # while "a" works; dialling "new" takes longer still
                answer = await session.advance([7])
        assert bytes(answer.body) == last_hidden([*PROMPT, 7])
        nursery.cancel_scope.cancel()


async def _kill_after(swarm: SessionSwarm, name: str, seconds: float) -> None:
    await trio.sleep(seconds)
    swarm.kill(name)


# --- numbers that are none --------------------------------------------------------------------------------------------

NAN_ROW = b"\x00\x00\xc0\x7f" * WIDTH


class FiniteRunner(HashRunner):
    """Refuses input that is not finite, as the engine does."""

    def step(self, work: Sequence[StepWork]) -> list[Output]:
        if any(NAN_ROW in bytes(item.data) for item in work):
            raise NotFinite("a session sent numbers that are not finite")
        return super().step(work)


class NanRunner(FiniteRunner):
    """Computes, and sends NaN instead."""

    def step(self, work: Sequence[StepWork]) -> list[Output]:
        return [Output(NAN_ROW * item.rows, "f32") for item in work]


class SlanderousRunner(HashRunner):
    """Says of all that it gets that it is not finite."""

    def step(self, work: Sequence[StepWork]) -> list[Output]:
        raise NotFinite("a session sent numbers that are not finite")


@pytest.mark.parametrize(
    ("evil", "at"), [(NanRunner, 0), (NanRunner, 1), (NanRunner, 2), (SlanderousRunner, 0), (SlanderousRunner, 1)]
)
async def test_who_sends_numbers_that_are_none_or_says_so_is_the_one_blamed(
    evil: type[HashRunner], at: int, autojump_clock: MockClock
) -> None:
    """One of three hops sends NaN, or says that it got some: the reply goes on without it, and the others stay."""
    spans = [(0, 3), (3, 6), (6, 8)]
    async with open_swarm() as swarm:
        for index, (start, stop) in enumerate(spans):
            await swarm.serve(f"n{index}", FiniteRunner(start, stop))
        await swarm.serve("evil", evil(*spans[at]), speed=10_000.0)
        asker = await swarm.asker()
        stats = await ask(asker, PROMPT, 12)
        assert stats.token_ids == greedy(PROMPT, 12)
        assert [hop.peer for hop in stats.route] == ["n0", "n1", "n2"]
        assert set(asker.bans.active(trio.current_time())) == {"evil"}


async def test_a_hop_that_is_to_send_through_the_asker_cannot_spoil_its_successor_directly(
    autojump_clock: MockClock,
) -> None:
    """The hop sends NaN to its successor itself and good numbers to the asker: the successor is not blamed for it."""
    async with open_swarm() as swarm:
        await swarm.serve("n0", FiniteRunner(0, 4))
        await swarm.serve("n1", FiniteRunner(4, 8))
        liar = await swarm.serve("liar", HashRunner(0, 4), speed=10_000.0)
        spoiled = await swarm.fabric.nodes["liar"].open("n1", PROTOCOL)

        send = liar._sender.send

        async def spoil_first(session: HopSession, position: int, data: bytes | memoryview) -> None:
            rows = len(data) // len(NAN_ROW)
            head = header(
                Kind.DATA, session.id, session.epoch, position, dtype=F32, rows=rows, width=WIDTH, length=len(data)
            )
            await spoiled.send(head + NAN_ROW * rows)
            await trio.sleep(0.1)
            await send(session, position, data)

        liar._sender.send = spoil_first  # type: ignore[method-assign]
        asker = await swarm.asker()
        stats = await ask(asker, PROMPT, 12)
        assert stats.token_ids == greedy(PROMPT, 12)
        assert "n1" not in asker.bans.active(trio.current_time())
        assert stats.recoveries <= 1
