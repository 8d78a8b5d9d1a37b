"""Strangers at a node that trains cannot use, change or end the jobs of others; a hop cannot end its owner's job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from app.core.network import FrameStream, Priority
from app.core.span import Span
from app.session.frame import HopError, decode_hop_error, new_session_id, plain, with_json
from app.session.outbound import OutboundFrame
from app.training import hop, trainer
from app.training.hop import HopJob, TrainingTerms
from app.training.wire import (
    PROTOCOL,
    JobOrder,
    Kind,
    Pass,
    StatePart,
    decode,
    encode_open,
    encode_parts,
    encode_trouble,
    pass_header,
)
from engine.sources.base import ModelSource
from engine.sources.tiny import open_tiny
from p2p.errors import P2PError
from tests.app.training.job_swarm import JobSwarm, Losses, batches_of, open_job_swarm, undisturbed

ORDER = JobOrder(Span(0, 8), "", "", 4, 8.0, ("q", "v"), 0.0, 3, 0.0, 64, 2, "f32")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return open_tiny(tmp_path_factory.mktemp("model"))


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
        owner, run = await opened(swarm, "owner", replace(ORDER, successor="after"))
        neighbour = await swarm.fabric.node("after").open("n0", PROTOCOL)
        body = bytes(4 * 65)
        head = pass_header(Kind.BACK, run, 1, Pass(0, 0, 0), dtype="f32", rows=65, width=1, length=len(body))
        for _ in range(3 * hop.MAX_REJECTIONS):
            await neighbour.wait_room()
            await neighbour.send(head + body)
        await neighbour.send(plain(Kind.PROBE, run, 1))
        await neighbour.receive()
        await owner.send(plain(Kind.PROBE, run, 1))
        kinds = []
        while Kind.STATE not in kinds:
            kinds.append(Kind(decode(await owner.receive()).kind))
        assert kinds == [Kind.TROUBLE] * hop.MAX_REJECTIONS + [Kind.STATE]


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


HOSTILE = {
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
    wanted, _ = undisturbed(source, 3)
    async with open_job_swarm(source, tmp_path, (0, 4), (4, 8)) as swarm:
        await swarm.train("spare", 0, 4)
        HOSTILE[what](swarm.nodes["n0"].server)
        losses, owner = Losses(), swarm.owner(every=1)
        await owner.run(3, batches_of, losses)
        losses.check(wanted)
        assert any(why.startswith("n0") for why in owner.figures.lost)
        assert {hop.peer for hop in owner.route} == {"spare", "n1"}


async def test_a_hop_that_floods_its_owner_is_read_no_faster_than_it_is_used(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 1 << 20
    monkeypatch.setattr(trainer, "MAX_QUEUED_BYTES", most)
    queued: list[int] = []
    read = trainer._HopGroup._next

    async def watched(epoch: Any) -> Any:
        queued.append(max(epoch._queued.values(), default=0))
        return await read(epoch)

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
