"""Strangers at a node that trains: they cannot use, change or end the jobs of others."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from app.core.network import FrameStream
from app.core.span import Span
from app.session.frame import decode_hop_error, new_session_id, plain
from app.training.hop import TrainingTerms
from app.training.wire import PROTOCOL, JobOrder, Kind, Pass, decode, encode_open, pass_header
from engine.sources.base import ModelSource
from engine.sources.tiny import open_tiny
from p2p.errors import P2PError
from tests.app.training.job_swarm import JobSwarm, open_job_swarm

ORDER = JobOrder(Span(0, 8), "", "", 4, 8.0, ("q", "v"), 0.0, 3, 0.0, 64, 2, "f32")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return open_tiny(tmp_path_factory.mktemp("model"))


async def opened(swarm: JobSwarm, name: str) -> tuple[FrameStream, bytes]:
    """A job of `name` at `n0`, which is ready."""
    stream = await swarm.fabric.node(name).open("n0", PROTOCOL)
    run = new_session_id(name)
    await stream.send(encode_open(run, 1, 0, ORDER))
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
