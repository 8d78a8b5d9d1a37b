"""Strangers at a node that trains cannot use, change or end the jobs of others; a hop cannot end its owner's job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import trio
import trio.testing

from app.core.network import FrameStream, Priority
from app.core.span import Span
from app.manifest.manifest import Part
from app.routing.route import Route
from app.session.frame import HopError, decode_hop_error, new_session_id, plain, with_json
from app.session.loop_stream import loop_streams
from app.session.outbound import OutboundFrame, PeerOutbox
from app.training import hop, progress, trainer
from app.training.hop import HopJob, TrainingTerms
from app.training.states import StateStore
from app.training.trainer import Patience
from app.training.wire import (
    NO_BASE,
    PROTOCOL,
    Form,
    JobOrder,
    Kind,
    Pass,
    SequenceRows,
    StatePart,
    decode,
    encode_open,
    encode_parts,
    encode_trouble,
    join_sequences,
    length_of,
    pass_header,
    sequences_of,
)
from engine import int8_rows
from engine.sources.base import ModelSource
from engine.sources.tiny import open_tiny
from p2p.errors import P2PError
from p2p.shares import Holder
from tests.app.training.job_swarm import PATIENCE, JobSwarm, Losses, batches_of, open_job_swarm, undisturbed

ORDER = JobOrder(Span(0, 8), "", "", 4, 8.0, ("q", "v"), 0.0, 3, 0.0, 64, 2, "f32")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return open_tiny(tmp_path_factory.mktemp("model"))


async def test_what_waits_for_one_peer_counts_over_all_its_streams(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger that asks for the state of jobs and does not read the answers had a limit for each of 64 streams."""
    made: list[PeerOutbox] = []

    class Noted(PeerOutbox):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr(hop, "PeerOutbox", Noted)
    async with open_job_swarm(source, tmp_path, (0, 8)) as swarm:
        stranger = swarm.fabric.node("stranger")
        for _ in range(3):
            stream = await stranger.open("n0", PROTOCOL)
            await stream.send(plain(Kind.PROBE, new_session_id("stranger"), 0))
            assert decode(await stream.receive()).kind == Kind.STATE
        assert [outbox.stream.peer for outbox in made] == ["stranger"] * 3
        assert {outbox._backlog._waiting for outbox in made} == {swarm.nodes["n0"].server._waiting}


async def opened(swarm: JobSwarm, name: str, order: JobOrder = ORDER) -> tuple[FrameStream, bytes]:
    """A job of `name` at `n0`, which is ready."""
    stream = await swarm.fabric.node(name).open("n0", PROTOCOL)
    run = new_session_id(name)
    await stream.send(encode_open(run, 1, 0, order))
    assert decode(await stream.receive()).kind == Kind.READY
    return stream, run


async def test_a_job_cannot_be_opened_under_anothers_id(source: ModelSource, tmp_path: Path) -> None:
    async with open_job_swarm(source, tmp_path, (0, 8)) as swarm:
        _, run = await opened(swarm, "owner")
        thief = await swarm.fabric.node("thief").open("n0", PROTOCOL)
        await thief.send(encode_open(run, 9, 0, ORDER))
        with trio.fail_after(5), pytest.raises(P2PError):
            await thief.receive()
        assert [job.owner for job in swarm.nodes["n0"].server.jobs] == ["owner"]


async def test_an_order_is_read_only_if_its_sender_may_give_one(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was read first: 48 kB of a member that the node trains nothing for kept it from all else for 0.27 s."""

    def read(frame: Any) -> JobOrder:
        raise AssertionError("it was read")

    async with open_job_swarm(source, tmp_path, (0, 8)) as swarm:
        await opened(swarm, "owner")
        busy: Any = swarm.nodes["n0"].server
        refusing: Any = (
            await swarm.train("n1", 0, 8, TrainingTerms(refuses=lambda owner: "it trains for nobody"))
        ).server
        monkeypatch.setattr(hop, "decode_open", read)
        stranger = swarm.fabric.node("stranger")
        for name, server, code in (("n0", busy, "busy"), ("n1", refusing, "refused")):
            stream = await stranger.open(name, PROTOCOL)
            await stream.send(encode_open(new_session_id("stranger"), 1, 0, ORDER))
            assert decode_hop_error(decode(await stream.receive())).code == code
            await stream.send(encode_open(new_session_id("owner"), 1, 0, ORDER))
            with trio.fail_after(5), pytest.raises(P2PError):
                await stream.receive()
            assert server.dropped == 1


async def test_small_frames_of_a_peer_are_read_at_a_bounded_rate(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    """A frame of 40 bytes costs as much computing as one of thousands, and nothing counted those that nobody awaits."""
    monkeypatch.setattr(hop, "FRAMES_AT_ONCE", 10)
    monkeypatch.setattr(hop, "FRAMES_PER_S", 5)
    async with open_job_swarm(source, tmp_path, (0, 8)) as swarm:
        stranger, begun = swarm.fabric.node("stranger"), trio.current_time()
        for _ in range(4):  # of all its streams together
            stream = await stranger.open("n0", PROTOCOL)
            for _ in range(15):
                await stream.send(plain(Kind.PROBE, new_session_id("stranger"), 0))
            for _ in range(15):
                assert decode(await stream.receive()).kind == Kind.STATE
        assert trio.current_time() - begun >= (4 * 15 - 10) / 5


async def test_a_stranger_changes_nothing_of_a_job(source: ModelSource, tmp_path: Path) -> None:
    async with open_job_swarm(source, tmp_path, (0, 8)) as swarm:
        owner, run = await opened(swarm, "owner")
        thief = await swarm.fabric.node("thief").open("n0", PROTOCOL)
        body = bytes(4 * 64 * 4)
        head = pass_header(Kind.FORWARD, run, 1, Pass(0, 0, 0), dtype="f32", rows=4, width=64, length=len(body))
        for frame in (head + body, plain(Kind.COMMIT, run, 1, 1), plain(Kind.CLOSE, run, 9), plain(Kind.PROBE, run, 1)):
            await thief.send(frame)
        state = decode(await thief.receive())
        assert (state.kind, state.epoch) == (Kind.STATE, 0)  # it is told nothing of the job
        await owner.send(plain(Kind.PROBE, run, 1))
        state = decode(await owner.receive())
        assert (state.kind, state.epoch, state.position, state.rows) == (Kind.STATE, 1, 0, 0)
        (job,) = swarm.nodes["n0"].server.jobs
        assert job.dropped == {"foreign": 1}


async def test_a_frame_that_is_not_understood_costs_the_stream_alone(source: ModelSource, tmp_path: Path) -> None:
    async with open_job_swarm(source, tmp_path, (0, 8)) as swarm:
        await opened(swarm, "owner")
        thief = await swarm.fabric.node("thief").open("n0", PROTOCOL)
        await thief.send(plain(99, bytes(16), 1))
        with trio.fail_after(5), pytest.raises(P2PError):
            await thief.receive()
        assert len(swarm.nodes["n0"].server.jobs) == 1


async def test_a_frame_with_more_rows_than_agreed_is_reported_and_not_kept(source: ModelSource, tmp_path: Path) -> None:
    async with open_job_swarm(source, tmp_path, (0, 8)) as swarm:
        owner, run = await opened(swarm, "owner")
        body = bytes(4 * 64 * 65)
        head = pass_header(Kind.FORWARD, run, 1, Pass(0, 0, 0), dtype="f32", rows=65, width=64, length=len(body))
        await owner.send(head + body)
        trouble = decode_hop_error(decode(await owner.receive()))
        assert (trouble.code, trouble.why) == ("input", "forward")
        assert swarm.nodes["n0"].server.jobs[0].dropped == {"shape": 1}


async def test_changes_that_cannot_be_used_are_counted_reported_and_not_kept(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hop, "MAX_REJECTIONS", 3)
    width = source.config.hidden_size
    async with open_job_swarm(source, tmp_path, (0, 8)) as swarm:
        owner, run = await opened(swarm, "owner", replace(ORDER, wire="changes"))
        whole = numpy.ones((4, width), numpy.float32)
        bodies = {
            "base": SequenceRows(1, Form.UNCHANGED, 4, b"anything", b"", b""),
            "size": SequenceRows(1, Form.KEEP, 0, NO_BASE, b"", int8_rows.encode(whole * numpy.nan)),
            "shape": None,  # rows of another format
        }
        for number, (why, sequence) in enumerate(bodies.items()):
            body = bytes(4 * width * 4) if sequence is None else join_sequences([sequence])
            head = pass_header(
                Kind.FORWARD, run, 1, Pass(0, number, 0), dtype="f32" if sequence is None else "changes", rows=4,
                width=width, length=len(body),
            )  # fmt: skip
            await owner.send(head + body)
            assert decode_hop_error(decode(await owner.receive())).code == ("base" if why == "base" else "input")
        again = join_sequences([SequenceRows(1, Form.UNCHANGED, 4, b"anything", b"", b"")])
        for attempt in range(1, 9):  # the owner is told three times in all
            one = Pass(0, 0, attempt)
            head = pass_header(
                Kind.FORWARD, run, 1, one, dtype="changes", rows=4, width=width, length=len(again)
            )  # fmt: skip
            await owner.send(head + again)
        await owner.send(plain(Kind.TALLY, run, 1, 0))
        assert decode(await owner.receive()).kind == Kind.TALLY
        assert swarm.nodes["n0"].server.jobs[0].dropped == {"base": 9, "size": 1, "shape": 1}
        assert swarm.disks["n0"].used_bytes == 0


async def test_a_new_epoch_does_not_wait_for_states_that_do_not_come(source: ModelSource, tmp_path: Path) -> None:
    """A hop that still fetched those of the last snapshot was not ready in time, and had to rest."""
    async with open_job_swarm(source, tmp_path, (0, 8)) as swarm:
        owner, run = await opened(swarm, "owner")
        swarm.fabric.node("silent")
        swarm.fabric.freeze("silent")
        await owner.send(encode_parts(Kind.KEEP, run, 1, 0, [StatePart(bytes(32), 2**20)], ["silent"]))
        await owner.send(plain(Kind.PROBE, run, 1))
        await owner.receive()
        await owner.send(encode_open(run, 2, 0, ORDER))
        with trio.fail_after(10):
            while (frame := decode(await owner.receive())).kind != Kind.READY:
                pass
        assert frame.epoch == 2


async def test_an_old_order_does_not_bring_a_closed_job_back(source: ModelSource, tmp_path: Path) -> None:
    async with open_job_swarm(source, tmp_path) as swarm:
        node = await swarm.train("n0", 0, 8, TrainingTerms(jobs=1))
        owner, run = await opened(swarm, "owner")
        await owner.send(plain(Kind.CLOSE, run, 1))
        await owner.send(encode_open(run, 1, 0, ORDER))
        await owner.send(plain(Kind.PROBE, run, 1))
        assert decode(await owner.receive()).epoch == 0
        await node.server.no_jobs()
        assert len(node.blocks) == 1


async def test_frames_that_wait_for_a_job_have_a_bound(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hop, "MAX_WAITING_BYTES", 1 << 20)
    async with open_job_swarm(source, tmp_path, (0, 8)) as swarm:
        owner, run = await opened(swarm, "owner")
        server: Any = swarm.nodes["n0"].server
        (job,) = server._jobs.values()
        begun, goes_on = trio.Event(), trio.Event()

        async def stuck(job: HopJob, sender: str, frame: Any) -> None:
            begun.set()
            await goes_on.wait()

        server._tally = stuck
        await owner.send(plain(Kind.TALLY, run, 1))
        await begun.wait()
        body = bytes(4 * 64 * 1024)  # few rows, very wide
        head = pass_header(Kind.FORWARD, run, 1, Pass(0, 0, 0), dtype="f32", rows=1, width=65536, length=len(body))
        for _ in range(8):
            await owner.send(head + body)
        await owner.send(plain(Kind.PROBE, run, 1))
        await owner.receive()
        assert job.waiting_bytes.total() <= 1 << 20
        assert job.dropped["queue"] == 4
        goes_on.set()
        await trio.testing.wait_all_tasks_blocked()
        assert job.waiting_bytes.total() == 0


async def test_senders_take_turns_at_a_hop(source: ModelSource, tmp_path: Path) -> None:
    """A neighbour that sends as many frames as may wait held up those of all others behind them."""
    async with open_job_swarm(source, tmp_path, (0, 8)) as swarm:
        _, run = await opened(swarm, "owner")
        server: Any = swarm.nodes["n0"].server
        (job,) = server._jobs.values()
        sent = [("greedy", 1), ("greedy", 2), ("greedy", 3), ("other", 4), ("owner", 5), ("other", 6)]
        for sender, number in sent:
            job.put(sender, decode(plain(Kind.TALLY, run, number)))
        taken = [job.take() for _ in sent]
        assert [(sender, frame.epoch) for sender, frame in taken] == [
            ("greedy", 1), ("other", 4), ("owner", 5), ("greedy", 2), ("other", 6), ("greedy", 3),
        ]  # fmt: skip
        assert not job.waiting


async def test_a_neighbour_cannot_keep_the_owners_orders_out(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hop would seem silent, and the owner would blame it."""
    monkeypatch.setattr(hop, "MAX_WAITING_BYTES", 1 << 20)
    async with open_job_swarm(source, tmp_path, (0, 8)) as swarm:
        owner, run = await opened(swarm, "owner", replace(ORDER, predecessor="before", successor="after"))
        server: Any = swarm.nodes["n0"].server
        (job,) = server._jobs.values()
        begun, goes_on, tally = trio.Event(), trio.Event(), server._tally

        async def slow(job: HopJob, sender: str, frame: Any) -> None:
            begun.set()
            await goes_on.wait()
            await tally(job, sender, frame)

        server._tally = slow
        await owner.send(plain(Kind.TALLY, run, 1))
        await begun.wait()
        for name, width in (("before", 64), ("after", 65536)):
            neighbour = await swarm.fabric.node(name).open("n0", PROTOCOL)
            body = bytes(4 * width)
            head = pass_header(Kind.BACK, run, 1, Pass(0, 0, 0), dtype="f32", rows=1, width=width, length=len(body))
            for _ in range(100):
                await neighbour.wait_room()
                await neighbour.send(head + body)
            await neighbour.send(plain(Kind.PROBE, run, 1))
            await neighbour.receive()
        await owner.send(plain(Kind.TALLY, run, 1))
        goes_on.set()
        with trio.fail_after(5):
            assert [decode(await owner.receive()).kind for _ in range(2)] == [Kind.TALLY] * 2
        assert job.dropped["queue"] > 100


async def test_the_owner_is_told_of_some_rejected_passes_and_not_of_thousands(
    source: ModelSource, tmp_path: Path
) -> None:
    async with open_job_swarm(source, tmp_path, (0, 8)) as swarm:
        owner, run = await opened(swarm, "owner", replace(ORDER, predecessor="before"))
        neighbour = await swarm.fabric.node("before").open("n0", PROTOCOL)
        body = bytes(4)
        head = pass_header(Kind.EVALUATE, run, 1, Pass(0, 0, 0), dtype="f32", rows=1, width=1, length=len(body))
        server = swarm.nodes["n0"].server
        for count in range(3 * hop.MAX_REJECTIONS):
            await neighbour.wait_room()
            await neighbour.send(head + body)
            while server.jobs[0].dropped.get("shape") != count + 1:
                await trio.lowlevel.checkpoint()
        await owner.send(plain(Kind.PROBE, run, 1))
        kinds = []
        while Kind.STATE not in kinds:
            kinds.append(Kind(decode(await owner.receive()).kind))
        assert kinds == [Kind.TROUBLE] * hop.MAX_REJECTIONS + [Kind.STATE]


async def offered(swarm: JobSwarm, name: str, size: int) -> tuple[FrameStream, bytes, StatePart]:
    """A job of `name` at `n0`, which is ready, and a state that `name` offers."""
    stream, run = await opened(swarm, name)
    states = StateStore(swarm.fabric.nodes[name], swarm.folder / f"{name}-states", lambda peer: True)
    states.serve()
    return stream, run, await states.keep(b"offered", bytes(size))


def reads_of(swarm: JobSwarm, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of all states that `n0` reads into memory from now on."""
    parts: Any = swarm.nodes["n0"].states._parts
    whole, names = parts.whole, list[str]()

    def noted(part: Part) -> bytes:
        names.append(part.name)
        return bytes(whole(part))

    monkeypatch.setattr(parts, "whole", noted)
    return names


async def test_a_state_to_keep_that_is_named_a_thousand_times_is_not_held_in_memory(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_job_swarm(source, tmp_path, (0, 8)) as swarm:
        owner, run, part = await offered(swarm, "owner", 1 << 20)
        names = reads_of(swarm, monkeypatch)
        for times in (1, 1000):
            await owner.send(encode_parts(Kind.KEEP, run, 1, 0, [part] * times, ["owner"]))
            with trio.fail_after(20):
                assert decode(await owner.receive()).kind == Kind.KEEP
        assert names == []


async def test_states_larger_than_the_adapters_are_not_read(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_job_swarm(source, tmp_path, (0, 8)) as swarm:
        owner, run, part = await offered(swarm, "owner", 1 << 22)
        names = reads_of(swarm, monkeypatch)
        await owner.send(encode_parts(Kind.KEEP, run, 1, 0, [part], ["owner"]))
        with trio.fail_after(20):
            assert decode(await owner.receive()).kind == Kind.KEEP
        names.clear()
        order = replace(ORDER, states=(part,) * 8, holders=("owner",))
        await owner.send(encode_open(run, 2, 1, order))
        with trio.fail_after(20):
            trouble = decode_hop_error(decode(await owner.receive()))
        assert (trouble.code, names) == ("failed", [])


async def test_states_that_are_kept_again_and_again_take_no_more_memory(source: ModelSource, tmp_path: Path) -> None:
    async with open_job_swarm(source, tmp_path, (0, 8)) as swarm:
        owner, run, part = await offered(swarm, "owner", 1 << 10)
        server: Any = swarm.nodes["n0"].server
        (job,) = server._jobs.values()
        for _ in range(5):
            await owner.send(encode_parts(Kind.KEEP, run, 1, 0, [part] * 100, ["owner"]))
            with trio.fail_after(20):
                assert decode(await owner.receive()).kind == Kind.KEEP
        assert job.kept == {0: [part]}


async def test_an_owner_names_no_more_states_than_blocks_have(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hop, "MAX_KEPT_STATES", 16)
    async with open_job_swarm(source, tmp_path, (0, 8)) as swarm:
        owner, run = await opened(swarm, "owner")
        parts = [StatePart(bytes([number]) * 32, 1) for number in range(17)]
        await owner.send(encode_parts(Kind.KEEP, run, 1, 0, parts, ["owner"]))
        with trio.fail_after(20):
            assert decode_hop_error(decode(await owner.receive())).code == "failed"
        server: Any = swarm.nodes["n0"].server
        assert [job.kept for job in server._jobs.values()] == [{}]


async def test_neighbours_that_an_owner_names_do_not_keep_links_open(
    source: ModelSource, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """A link with an open stream is never pruned, so an owner could fill the connections of a node."""
    async with open_job_swarm(source, tmp_path, (0, 8)) as swarm:
        arrived, ended = trio.Event(), trio.Event()

        async def attend(stream: FrameStream) -> None:
            try:
                while True:
                    await stream.receive()
                    arrived.set()
            except P2PError:
                ended.set()

        swarm.fabric.node("after").accept(PROTOCOL, attend)
        owner, run = await opened(swarm, "owner", replace(ORDER, successor="after"))
        body = bytes(4 * 64 * 4)
        head = pass_header(Kind.FORWARD, run, 1, Pass(0, 0, 0), dtype="f32", rows=4, width=64, length=len(body))
        await owner.send(head + body)
        with trio.fail_after(10):
            await arrived.wait()
        with trio.fail_after(3 * hop.IDLE_STREAM_S):
            await ended.wait()


async def test_a_stream_on_which_nothing_comes_is_closed(
    source: ModelSource, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_job_swarm(source, tmp_path, (0, 8)) as swarm:
        stream = await swarm.fabric.node("stranger").open("n0", PROTOCOL)
        with trio.fail_after(3 * hop.IDLE_S), pytest.raises(P2PError):
            await stream.receive()


# --- a hop against the owner ------------------------------------------------------------------------------------------


def instead_of(order: str, frames: Callable[[HopJob, Any], list[bytes]]) -> Callable[[Any], None]:
    """Let a server answer an order with these frames."""

    def change(server: Any) -> None:
        async def answer(job: HopJob, sender: str, frame: Any) -> None:
            for raw in frames(job, frame):
                await job.answers.push(OutboundFrame((raw,), Priority.CONTROL))

        setattr(server, order, answer)

    return change


def huge_states(job: HopJob, frame: Any) -> list[bytes]:
    parts = [StatePart(bytes([block]) * 32, 2**33) for block in job.span.blocks()]
    return [encode_parts(Kind.SNAPSHOT, job.run, frame.epoch, frame.position, parts)]


def says_it_computes(server: Any) -> None:
    """Let a server take passes and say for ever that it computes them."""
    honest = server._on_frame

    async def answer(frame: Any, peer: str, answers: Any) -> None:
        if frame.kind == Kind.PROBE:
            state = plain(Kind.STATE, frame.session, frame.epoch, 0, rows=1)
            await answers.push(OutboundFrame((state,), Priority.CONTROL))
        elif frame.kind != Kind.FORWARD:
            await honest(frame, peer, answers)

    server._on_frame = answer


def chatters(server: Any) -> None:
    """Let a server drop passes and send frames that bring nothing forward instead, so that it is never quiet."""

    async def chatter(job: HopJob, sender: str, frame: Any) -> None:
        server._nursery.start_soon(go_on, job, frame)

    async def go_on(job: HopJob, frame: Any) -> None:
        while not job.answers.broken:
            ready = plain(Kind.READY, job.run, frame.epoch, frame.position)
            await job.answers.push(OutboundFrame((ready,), Priority.CONTROL))
            await trio.sleep(0.05)

    server._forward = chatter


def names_states_twice(server: Any) -> None:
    """Let a server name the states of the first snapshot again, with other sizes."""
    first: list[StatePart] = []
    honest = server._snapshot

    async def snapshot(job: HopJob, sender: str, frame: Any) -> None:
        if first:
            parts = [StatePart(part.root, part.size_bytes + 1) for part in first]
            raw = encode_parts(Kind.SNAPSHOT, job.run, frame.epoch, frame.position, parts)
            await job.answers.push(OutboundFrame((raw,), Priority.CONTROL))
        else:
            await honest(job, sender, frame)
            first.extend(job.kept[frame.position])

    server._snapshot = snapshot


def keeps_nothing_of_use(server: Any) -> None:
    """Let a server keep zeros of the right length instead of its states."""

    async def snapshot(job: HopJob, sender: str, frame: Any) -> None:
        parts = []
        for block in job.span.blocks():
            size = len(job.blocks.state(block)) if job.blocks is not None else 1
            parts.append(await server._states.keep(job.run, bytes(size)))
        raw = encode_parts(Kind.SNAPSHOT, job.run, frame.epoch, frame.position, parts)
        await job.answers.push(OutboundFrame((raw,), Priority.CONTROL))

    server._snapshot = snapshot


HOSTILE = {
    "work that never ends": says_it_computes,
    "frames without end": chatters,
    "states of other sizes": names_states_twice,
    "states that are none": keeps_nothing_of_use,
    "an error that is none": instead_of(
        "_tally", lambda job, frame: [with_json(Kind.TROUBLE, job.run, frame.epoch, 0, {"code": 7})]
    ),
    "a complaint about the owner": instead_of(
        "_forward",
        lambda job, frame: [encode_trouble(job.run, frame.epoch, 0, HopError("input", "I do not like it", "forward"))],
    ),
    "states of many gigabytes": instead_of("_snapshot", huge_states),
}


@pytest.mark.parametrize("what", HOSTILE)
async def test_a_hostile_hop_costs_the_owner_its_place_and_not_the_job(
    source: ModelSource, tmp_path: Path, what: str
) -> None:
    wanted, _ = undisturbed(source, 2)
    async with open_job_swarm(source, tmp_path, (0, 4), (4, 8)) as swarm:
        await swarm.train("spare", 0, 4)
        HOSTILE[what](swarm.nodes["n0"].server)
        losses, owner = Losses(), swarm.owner(every=1, patience=replace(PATIENCE, stuck_s=1.0))
        with trio.fail_after(60):
            await owner.run(2, batches_of, losses)
        losses.check(wanted)
        assert any(why.startswith("n0") for why in owner.figures.lost)
        assert {hop.peer for hop in owner.route} == {"spare", "n1"}


def complains(job: HopJob, frame: Any) -> list[bytes]:
    return [encode_trouble(job.run, frame.epoch, 0, HopError("input", "I do not like it", "forward"))]


def swallows(job: HopJob, frame: Any) -> list[bytes]:
    return []


@pytest.mark.parametrize("lie", [complains, swallows])
async def test_a_hop_that_blames_another_does_not_end_the_job(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lie: Callable[[HopJob, Any], list[bytes]]
) -> None:
    """Nobody but `n0` holds the first blocks, while others hold those of the liar behind it."""
    monkeypatch.setattr(progress, "MAX_ATTEMPTS", 4)
    wanted, _ = undisturbed(source, 3)
    async with open_job_swarm(source, tmp_path, (0, 4), (4, 8)) as swarm:
        await swarm.train("spare", 4, 8)
        instead_of("_forward", lie)(swarm.nodes["n1"].server)
        losses, owner = Losses(), swarm.owner()
        with trio.fail_after(60):
            await owner.run(3, batches_of, losses)
        losses.check(wanted)
        assert {hop.peer for hop in owner.route} == {"n0", "spare"}


async def test_small_frames_count_for_the_memory_that_they_take(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frame of 40 bytes takes more than ten times as much while it waits."""
    waiting: list[int] = []
    read = trainer._HopGroup._next

    async def watched(epoch: Any, *args: Any) -> Any:
        await trio.testing.wait_all_tasks_blocked()  # as long as the owner would compute
        waiting.append(epoch._arrived.statistics().current_buffer_used)
        return await read(epoch, *args)

    monkeypatch.setattr(trainer._HopGroup, "_next", watched)
    monkeypatch.setattr(trainer, "MAX_QUEUED_BYTES", 1 << 16)

    def flood(server: Any) -> None:
        honest = server._tally

        async def tally(job: HopJob, sender: str, frame: Any) -> None:
            useless = plain(Kind.READY, job.run, frame.epoch, frame.position)
            for _ in range(3000):
                await job.answers.push(OutboundFrame((useless,), Priority.CONTROL))
            await honest(job, sender, frame)

        server._tally = tally

    async with open_job_swarm(source, tmp_path, (0, 4), (4, 8)) as swarm:
        flood(swarm.nodes["n0"].server)
        losses = Losses()
        await swarm.owner().run(1, batches_of, losses)
    assert 0 < max(waiting) <= 2 * (1 << 16) // 512


async def test_frames_that_an_owner_does_not_await_are_read_at_a_bounded_rate(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    monkeypatch.setattr(trainer, "FRAMES_AT_ONCE", 10)
    monkeypatch.setattr(trainer, "FRAMES_PER_S", 5)
    async with open_job_swarm(source, tmp_path, (0, 8)) as swarm, trio.open_nursery() as nursery:
        here, there = loop_streams("n0")
        owner = swarm.owner()
        group = trainer._HopGroup(owner, 1, nursery)
        nursery.start_soon(group._read, 0, here)
        for _ in range(60):
            await there.send(plain(Kind.STATE, owner.run_id, 1))
        await there.aclose()
        begun = trio.current_time()
        await group._arrived.receive()  # the end of the stream
        assert trio.current_time() - begun >= (60 - 10) / 5


async def test_a_hop_that_floods_its_owner_is_read_no_faster_than_it_is_used(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 1 << 20
    monkeypatch.setattr(trainer, "MAX_QUEUED_BYTES", most)
    queued: list[int] = []
    read = trainer._HopGroup._next

    async def watched(epoch: Any, *args: Any) -> Any:
        queued.append(max(epoch._queued.values(), default=0))
        return await read(epoch, *args)

    monkeypatch.setattr(trainer._HopGroup, "_next", watched)

    def flood(server: Any) -> None:
        honest = server._tally

        async def tally(job: HopJob, sender: str, frame: Any) -> None:
            body = bytes(4 * 64 * 512)
            head = pass_header(
                Kind.EVALUATE, job.run, frame.epoch, Pass(0, 0, 0), dtype="f32", rows=512, width=64, length=len(body)
            )
            for _ in range(100):
                await job.answers.push(OutboundFrame((head, body), Priority.CONTROL))
            await honest(job, sender, frame)

        server._tally = tally

    async with open_job_swarm(source, tmp_path, (0, 4), (4, 8)) as swarm:
        flood(swarm.nodes["n0"].server)
        losses = Losses()
        await swarm.owner().run(2, batches_of, losses)
        losses.check(undisturbed(source, 2)[0])
    assert 0 < max(queued) < most + (1 << 19)


def sends_through_owner(server: Any, times: int, rows: int = 0) -> None:
    """Let a server send what is for its successor through the owner, so many times, as micro-batches of more `rows`."""

    async def send(job: HopJob, neighbour: str, frame: Any, one: Pass, data: bytes) -> None:
        data += bytes(4 * frame.width * rows * sequences_of(frame))
        head = pass_header(
            Kind(frame.kind), job.run, frame.epoch, one, dtype="f32", rows=length_of(frame) + rows, width=frame.width,
            length=len(data),
        )  # fmt: skip
        for _ in range(times if neighbour else 1):
            await job.answers.push(OutboundFrame((head, data), Priority.BULK))

    server._send = send


async def test_the_owner_passes_each_pass_on_once(source: ModelSource, tmp_path: Path) -> None:
    """What a hop sends again would fill the stream to its neighbour, which would lose its place for not reading it."""
    wanted, _ = undisturbed(source, 1)
    async with open_job_swarm(source, tmp_path, (0, 4), (4, 8)) as swarm:
        sends_through_owner(swarm.nodes["n0"].server, times=50)
        came: Counter[tuple[int, int]] = Counter()
        server: Any = swarm.nodes["n1"].server
        honest = server._on_frame

        async def counted(frame: Any, peer: str, answers: Any) -> None:
            came[frame.kind, frame.revision] += frame.kind == Kind.FORWARD
            await honest(frame, peer, answers)

        server._on_frame = counted
        losses = Losses()
        with trio.fail_after(60):
            await swarm.owner().run(1, batches_of, losses)
        losses.check(wanted)
        assert max(came.values()) == 1


async def test_who_sends_a_wrong_shape_through_the_owner_loses_its_place(source: ModelSource, tmp_path: Path) -> None:
    wanted, _ = undisturbed(source, 1)
    async with open_job_swarm(source, tmp_path, (0, 4), (4, 8)) as swarm:
        await swarm.train("spare", 0, 4)
        sends_through_owner(swarm.nodes["n0"].server, times=1, rows=1)
        losses, owner = Losses(), swarm.owner()
        with trio.fail_after(60):
            await owner.run(1, batches_of, losses)
        losses.check(wanted)
        assert set(owner.figures.rejected) == {"n0"}
        assert {hop.peer for hop in owner.route} == {"spare", "n1"}


@pytest.mark.parametrize("kind", [Kind.FORWARD, Kind.BACK])
async def test_a_hop_whose_neighbour_sends_it_a_wrong_shape_does_not_answer_for_it(
    source: ModelSource, tmp_path: Path, kind: Kind
) -> None:
    """Others hold the liar's blocks and nobody those of its neighbour, which had to go: the job ended."""
    wanted, _ = undisturbed(source, 2)
    liar, blocks = ("n0", (0, 4)) if kind == Kind.FORWARD else ("n1", (4, 8))
    async with open_job_swarm(source, tmp_path, (0, 4), (4, 8)) as swarm:
        await swarm.train("spare", *blocks)
        server: Any = swarm.nodes[liar].server
        honest = server._send

        async def send(job: HopJob, neighbour: str, frame: Any, one: Pass, data: bytes) -> None:
            if frame.kind == kind:
                data += bytes(4 * frame.width * sequences_of(frame))
                frame = frame._replace(rows=frame.rows + 1)
                assert length_of(frame) == len(data) // 4 // frame.width // sequences_of(frame._replace(body=data))
            await honest(job, neighbour, frame, one, data)

        server._send = send
        losses, owner = Losses(), swarm.owner()
        with trio.fail_after(60):
            await owner.run(2, batches_of, losses)
        losses.check(wanted)
        assert {hop.peer for hop in owner.route} == {"n0", "n1", "spare"} - {liar}


async def test_a_hop_whose_neighbour_makes_its_numbers_overflow_does_not_answer_for_it(
    source: ModelSource, tmp_path: Path
) -> None:
    """Gradients of 10^11 are finite, but what comes of them has no place in 16 bits."""
    async with open_job_swarm(source, tmp_path, (0, 4), (4, 8)) as swarm:
        await swarm.train("spare", 4, 8)
        server: Any = swarm.nodes["n1"].server
        honest = server._send

        async def send(job: HopJob, neighbour: str, frame: Any, one: Pass, data: bytes) -> None:
            if frame.kind != Kind.BACK:
                await honest(job, neighbour, frame, one, data)
                return
            data = numpy.full(len(data) // 2, 1e11, "<f4").tobytes()
            head = pass_header(
                Kind.BACK, job.run, frame.epoch, one, dtype="f32", rows=length_of(frame), width=frame.width,
                length=len(data),
            )  # fmt: skip
            owner = Holder(job.ledger.owner, job.ledger.owner)
            sent = hop.HopFrame(job.run, (head, data), Priority.BULK, frame.epoch, owner)
            await server._outboxes.push(neighbour, sent, owner)

        server._send = send
        losses, owner = Losses(), swarm.owner(wire="f16")
        with trio.fail_after(60):
            await owner.run(2, batches_of, losses)
        assert sorted(losses.steps) == [1, 2]
        assert {hop.peer for hop in owner.route} == {"n0", "spare"}


async def test_a_slow_hop_does_not_make_the_owner_silent(
    autojump_clock: trio.testing.MockClock, source: ModelSource, tmp_path: Path
) -> None:
    """The owner waited for eight times the usual pause between frames; hops close streams that are silent so long."""
    patience = Patience()
    async with open_job_swarm(source, tmp_path, (0, 4), (4, 8), delay_s=0.01) as swarm:
        server: Any = swarm.nodes["n0"].server
        honest, slow_s, left = server._forward, 0.9 * patience.stuck_s, 2

        async def forward(job: HopJob, sender: str, frame: Any) -> None:
            nonlocal left
            left -= 1
            await trio.sleep(slow_s if left >= 0 else 1e6)
            await honest(job, sender, frame)

        async def routes(avoid: frozenset[str]) -> Route:
            if "n0" in avoid:
                found.cancel()
            return await swarm.route(avoid)

        server._forward = forward
        begun = trio.current_time()
        owner = swarm.owner(patience=patience, routes=routes)
        with trio.CancelScope() as found:
            await owner.run(1, batches_of, Losses())
        assert "nothing came of its work" in owner.figures.lost[0]
        assert trio.current_time() - begun < 2 * slow_s + 2 * patience.stuck_s
