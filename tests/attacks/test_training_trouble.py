"""Neither a hop in trouble, nor a slow link or a full disk, costs other hops their places in a job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import trio
from trio.testing import MockClock

from app.core.network import FrameStream, Priority
from app.session import outbound
from app.session.frame import CHANGES, DTYPES, INT8, Frame, HopError, plain, root_mean_square, row_bytes
from app.session.outbound import OutboundFrame
from app.training import blame, hop, progress, states, trainer, wire
from app.training.audits import Caution
from app.training.blame import Blame
from app.training.hop import HopFrame, HopJob, TrainingTerms
from app.training.ledger import UsualSize
from app.training.trainer import JobHooks, Patience, Replicas, StepDone, SwarmTrainer
from app.training.ways import WayPlan
from app.training.wire import (
    MAX_ATTEMPTS,
    Kind,
    Pass,
    StatePart,
    SumsBuffer,
    encode_trouble,
    length_of,
    pass_header,
    pass_of,
    sequences_of,
)
from app.weights.extents import WeightsError
from engine import training_runner
from engine.budget import TrainingTask, plan_training, unquantised
from engine.model.ends import load_ends
from engine.pieces import Pieces
from engine.sources.base import ModelSource
from engine.sources.tiny import open_tiny
from engine.training.adapters import AdapterSettings
from engine.training.head import TrainingEnds
from engine.training_runner import BatchLoss, OwnerEnds, sums_bytes
from p2p.errors import PeerUnreachable, Refused
from p2p.memory import link
from p2p.memory.fabric import LinkProfile
from p2p.shares import Holder
from tests.app.training.job_swarm import ALL, PLAIN, SETTINGS, UNHURRIED, JobSwarm, Losses, batches_of, open_job_swarm
from tests.app.training.test_replicas import check_close, one_process
from tests.engine.training import OPTIONS


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return open_tiny(tmp_path_factory.mktemp("model"))


def owner_of(swarm: JobSwarm, **more: Any) -> SwarmTrainer:
    """An owner whose jobs all nodes train that hold a block."""
    more.setdefault("patience", UNHURRIED)
    return swarm.owner(replicas=Replicas(swarm.holders), terms=PLAIN, **more)


async def report_lost_link(job: HopJob) -> None:
    trouble = HopError("link", "the link to somebody broke")
    raw = encode_trouble(job.run, job.ledger.epoch, job.ledger.version, trouble)
    await job.answers.push(OutboundFrame((raw,), Priority.CONTROL))


async def test_a_holder_keeps_its_place_if_another_reports_trouble_while_it_hands_over_its_sums(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner began to collect anew, took the next slice for a wrong one, and never asked the honest holder again."""
    monkeypatch.setattr(wire, "SLICE_BYTES", 2**14)
    came = trio.Event()  # the first slice of the honest holder

    class Buffer(SumsBuffer):
        def add(self, frame: Frame) -> bytes | None:
            came.set()
            return super().add(frame)

    monkeypatch.setattr(trainer, "SumsBuffer", Buffer)
    async with open_job_swarm(source, tmp_path, ALL, ALL) as swarm:
        swarm.fabric.set_link("n0", "owner", LinkProfile(bytes_per_s=1e6))  # ten slices, 0.016 s each
        server: Any = swarm.nodes["n1"].server
        honest = server._reduce

        async def reduce(job: HopJob, sender: str, frame: Frame) -> None:
            await came.wait()
            await report_lost_link(job)
            await honest(job, sender, frame)

        server._reduce = reduce
        losses, owner = Losses(), owner_of(swarm)
        with trio.fail_after(60):
            await owner.run(1, batches_of, losses)
        assert not owner.figures.lost
        assert {hop.peer for hop in owner.route} == {"n0", "n1"}


async def test_sums_that_are_larger_than_what_may_wait_for_a_peer_are_sent_all_the_same(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of large adapters closed the streams on which they went, and no two holders could train together."""
    monkeypatch.setattr(wire, "SLICE_BYTES", 2**14)
    monkeypatch.setattr(outbound, "MAX_WAITING_BYTES", 2**16)
    monkeypatch.setattr(outbound, "AHEAD_BYTES", 2**14)
    monkeypatch.setattr(link, "fits_window", lambda outstanding, cost, priority=0: outstanding < 2**15)
    async with open_job_swarm(source, tmp_path, ALL, ALL) as swarm:
        for name in ("n0", "n1"):
            swarm.fabric.set_link(name, "owner", LinkProfile(bytes_per_s=1e6))
        losses, owner = Losses(), owner_of(swarm)
        assert sums_bytes(SETTINGS, source.config) * 8 > outbound.MAX_WAITING_BYTES
        with trio.fail_after(60):
            await owner.run(2, lambda version: batches_of(version)[:2], losses)
        assert not owner.figures.lost
        assert {hop.peer for hop in owner.route} == {"n0", "n1"}


async def test_a_hop_that_reports_trouble_is_not_on_the_ways_of_others(source: ModelSource, tmp_path: Path) -> None:
    """Whatever was under way ran again, on all ways: hops that the liar had nothing to do with were left for it."""
    async with open_job_swarm(source, tmp_path, ALL, ALL, ALL) as swarm:
        server: Any = swarm.nodes["n2"].server

        async def forward(job: HopJob, sender: str, frame: Frame) -> None:
            for _ in range(64):
                await report_lost_link(job)

        server._forward = forward
        losses, owner = Losses(), owner_of(swarm)
        with trio.fail_after(60):
            await owner.run(2, batches_of, losses)
        assert owner.figures.lost
        assert all(why.startswith("n2") for why in owner.figures.lost)
        assert {hop.peer for hop in owner.route} == {"n0", "n1"}


class Enough(Exception):
    """Ends a run before its snapshot, which is written in threads that an autojumping clock does not wait for."""


@pytest.mark.parametrize("spans", [((0, 4), (4, 8)), (ALL, ALL)])
@pytest.mark.parametrize("bytes_per_s", [20_000, pytest.param(4_000, marks=pytest.mark.soak), 1_000])
async def test_a_job_goes_on_over_slow_links(
    autojump_clock: MockClock,
    source: ModelSource,
    tmp_path: Path,
    spans: tuple[tuple[int, int], ...],
    bytes_per_s: int,
) -> None:
    """A micro-batch takes up to 4 s on a link, and the sums of a holder up to 160 s: longer than hops may be quiet."""

    def stop(step: StepDone) -> None:
        if step.version == 3:
            raise Enough

    async with open_job_swarm(source, tmp_path, *spans, delay_s=0.02) as swarm:
        for one, other in combinations(("n0", "n1", "owner"), 2):
            swarm.fabric.set_link(one, other, LinkProfile(delay_s=0.02, bytes_per_s=bytes_per_s))
        owner = owner_of(swarm, every=100, patience=Patience())
        with pytest.raises(Enough):
            await owner.run(100, batches_of, stop)
        assert not owner.figures.lost
        assert owner.figures.micro_batches_again <= 3 * len(batches_of(0)), "no more than were sent"


@pytest.mark.parametrize("numbers", [range(3), range(100, 200)], ids=["those of others", "more than there are"])
async def test_a_hop_cannot_keep_out_what_comes_to_its_neighbour_on_other_ways(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numbers: range
) -> None:
    """A hop took each micro-batch once and so many at a time, whichever way it came: honest hops were left for that.

    Now the liar leaves itself no room, and is the only one that is left.
    """
    monkeypatch.setattr(progress, "MAX_ATTEMPTS", 4)
    async with open_job_swarm(source, tmp_path, (0, 4), (0, 4), (4, 8)) as swarm:
        server: Any = swarm.nodes["n1"].server
        honest = server._forward

        async def forward(job: HopJob, sender: str, frame: Frame) -> None:
            one = pass_of(frame)
            for number in numbers:
                if number != one.number:
                    foreign = one._replace(number=number, attempt=MAX_ATTEMPTS - 1)
                    await server._send(job, "n2", frame, foreign, bytes(frame.body))
            await honest(job, sender, frame)

        server._forward = forward
        losses, owner = Losses(), owner_of(swarm, patience=replace(UNHURRIED, quiet_s=0.2))
        with trio.fail_after(110):
            await owner.run(3, batches_of, losses)
        assert all(why.startswith("n1") for why in owner.figures.lost)
        assert {"n0", "n2"} <= {hop.peer for hop in owner.route}


async def test_a_hop_whose_neighbour_swells_its_numbers_does_not_answer_for_it_alone(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hop may be used to larger numbers than its owner, who has seen those of other ways too."""

    class Strict(UsualSize):
        def accepts(self, size: float) -> bool:
            return size < 1000

    def swell(blocks: Any) -> None:
        blocks.data = lambda rows, wire: (rows * 4000).numpy().tobytes()

    monkeypatch.setattr(trainer, "UsualSize", Strict)
    async with open_job_swarm(source, tmp_path, (0, 4), (4, 8)) as swarm:
        await swarm.train("spare", 0, 4)
        swarm.nodes["n0"].changes.append(swell)
        losses, owner = Losses(), swarm.owner(patience=UNHURRIED)
        with trio.fail_after(60):
            await owner.run(1, batches_of, losses)
        assert sorted(losses.steps) == [1]
        assert {hop.peer for hop in owner.route} == {"spare", "n1"}


async def test_an_owner_whose_disk_is_full_is_told_so_and_blames_no_hop(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its hops were blamed for it one after the other, and the same steps were made 13 times."""
    monkeypatch.setattr(states, "disk_free_bytes", lambda folder: 0 if folder.name == "owner" else 2**40)
    async with open_job_swarm(source, tmp_path, (0, 4), (4, 8)) as swarm:
        owner = swarm.owner(every=1)
        with trio.fail_after(60), pytest.raises(WeightsError, match="no room on the disk"):
            await owner.run(2, batches_of, Losses())
        assert not owner.figures.lost


def spoils_audits(swarm: JobSwarm, name: str) -> Counter[str]:
    """Let a node send gradients that have no place in 16 bits, twice, when micro-batches run again; counts them."""
    server: Any = swarm.nodes[name].server
    honest, spoilt = server._send, Counter[str]()

    async def send(job: HopJob, neighbour: str, frame: Frame, one: Pass, data: bytes) -> None:
        if frame.kind != Kind.BACK or not one.attempt or spoilt[name] == 2:
            await honest(job, neighbour, frame, one, data)
            return
        spoilt[name] += 1
        numbers = torch.full((len(data) // 2,), 1e11).numpy().tobytes()
        head = pass_header(
            Kind.BACK, job.run, frame.epoch, one, dtype="f32", rows=length_of(frame), width=frame.width,
            length=len(numbers),
        )  # fmt: skip
        owner = Holder(job.ledger.owner, job.ledger.owner)
        sent = HopFrame(job.run, (head, numbers), Priority.BULK, frame.epoch, owner)
        await server._outboxes.push(neighbour, sent, owner)

    server._send = send
    return spoilt


async def test_a_hop_whose_neighbour_spoils_an_audit_keeps_its_place(source: ModelSource, tmp_path: Path) -> None:
    """It forgot which sums it had handed over, and the next order made no sense to it."""
    async with open_job_swarm(source, tmp_path, (0, 4), (0, 4), (4, 8)) as swarm:
        spoilt = spoils_audits(swarm, "n2")
        owner = swarm.owner(replicas=Replicas(swarm.holders), wire="f16", patience=UNHURRIED)
        with trio.fail_after(60):
            await owner.run(2, batches_of, Losses())
        assert spoilt["n2"] == 2
        assert not owner.figures.lost


async def test_sums_that_an_audit_costs_a_hop_are_made_again(source: ModelSource, tmp_path: Path) -> None:
    """Its step was made with the gradients of the micro-batches alone that ran after that, and nobody saw it."""
    counted: list[set[int]] = []

    def note(blocks: Any) -> None:
        if blocks.start == 0:
            counted.append({number for span in blocks._spans for number in span.counted(span.start)})

    async with open_job_swarm(source, tmp_path, (0, 4), (4, 8), (4, 8)) as swarm:
        swarm.before_step = note
        spoilt = [spoils_audits(swarm, name) for name in ("n1", "n2")]
        owner = swarm.owner(replicas=Replicas(swarm.holders), wire="f16", patience=UNHURRIED)
        with trio.fail_after(60):
            await owner.run(2, batches_of, Losses())
        assert any(spoilt)
        assert counted == [set(range(3))] * 2


async def send_forward(
    swarm: JobSwarm, job: HopJob, way: tuple[str, str], one: Pass, length: int, value: float = 0.0
) -> None:
    """Let the first of two nodes send the other a FORWARD of one sequence, whose numbers are all the same."""
    sender, to = way
    server: Any = swarm.nodes[sender].server
    width, epoch = swarm.source.config.hidden_size, job.ledger.epoch
    body = torch.full((width * length,), value).numpy().tobytes()
    head = pass_header(Kind.FORWARD, job.run, epoch, one, dtype="f32", rows=length, width=width, length=len(body))
    owner = Holder(job.ledger.owner, job.ledger.owner)
    await server._outboxes.push(to, HopFrame(job.run, (head, body), Priority.BULK, epoch, owner), owner)


@pytest.mark.parametrize("way", [0, 1, 60])
async def test_a_hop_does_not_complain_of_others_for_what_somebody_else_sent_it(
    source: ModelSource, tmp_path: Path, way: int
) -> None:
    """The hop after it sent it more rows than were agreed: it blamed the owner, or a way on which it was not."""
    async with open_job_swarm(source, tmp_path, (0, 4), (4, 8)) as swarm:
        server: Any = swarm.nodes["n1"].server
        honest = server._forward

        async def forward(job: HopJob, sender: str, frame: Frame) -> None:
            await send_forward(swarm, job, ("n1", "n0"), pass_of(frame)._replace(way=way), job.ledger.order.rows + 1)
            await honest(job, sender, frame)

        server._forward = forward
        owner = owner_of(swarm)
        with trio.fail_after(60):
            await owner.run(2, batches_of, Losses())
        assert not owner.figures.lost


async def test_a_hop_whose_neighbour_sends_too_long_a_sequence_does_not_answer_for_it(
    source: ModelSource, tmp_path: Path
) -> None:
    """As many rows as were agreed may be one sequence that is too long for the model: the hop said that it failed."""
    short = replace(source, config=replace(source.config, context_length=32))
    async with open_job_swarm(short, tmp_path, (0, 4), (4, 8)) as swarm:
        await swarm.train("spare", 0, 4)
        server: Any = swarm.nodes["n0"].server

        async def forward(job: HopJob, sender: str, frame: Frame) -> None:
            await send_forward(swarm, job, ("n0", "n1"), pass_of(frame), 33)

        server._forward = forward
        owner = swarm.owner(patience=replace(UNHURRIED, quiet_s=0.2))
        with trio.fail_after(60):
            await owner.run(1, batches_of, Losses())
        assert all(why.startswith("n0") for why in owner.figures.lost)
        assert {hop.peer for hop in owner.route} == {"spare", "n1"}


async def test_a_pass_that_is_refused_leaves_nothing_of_its_earlier_attempt(
    source: ModelSource, tmp_path: Path
) -> None:
    """Inputs of the attempt before stayed in memory until there was no room: the hop was never asked again."""
    rows = batches_of(0)[2].token_ids.numel()
    async with open_job_swarm(source, tmp_path, (0, 4), (4, 8)) as swarm:
        server: Any = swarm.nodes["n0"].server
        honest = server._forward
        begun = False

        async def forward(job: HopJob, sender: str, frame: Frame) -> None:
            nonlocal begun
            if not begun:
                begun = True
                for number in (100, 101):
                    await send_forward(swarm, job, ("n0", "n1"), Pass(0, number, 0), rows)
                    await send_forward(swarm, job, ("n0", "n1"), Pass(0, number, 1), rows, 1e13)
            await honest(job, sender, frame)

        server._forward = forward
        owner = owner_of(swarm, rows=rows)
        with trio.fail_after(60):
            await owner.run(2, batches_of, Losses())
        assert not owner.figures.lost


async def test_a_hop_that_sends_tiny_numbers_does_not_make_those_of_the_owner_unusual(
    source: ModelSource, tmp_path: Path
) -> None:
    """The hop after it found what the owner sent on another way too large, and was never asked again for saying so."""
    async with open_job_swarm(source, tmp_path, (0, 4), ALL) as swarm:
        server: Any = swarm.nodes["n0"].server
        honest = server._forward

        async def forward(job: HopJob, sender: str, frame: Frame) -> None:
            for attempt in range(MAX_ATTEMPTS):
                await send_forward(swarm, job, ("n0", "n1"), pass_of(frame)._replace(number=100, attempt=attempt), 1)
            await honest(job, sender, frame)

        server._forward = forward
        owner = owner_of(swarm)
        with trio.fail_after(60):
            await owner.run(6, batches_of, Losses())
        assert "n1" not in owner._refused
        assert "n1" in {hop.peer for hop in owner.route}


async def test_a_hop_that_sends_tiny_numbers_does_not_make_those_of_other_hops_unusual(
    source: ModelSource, tmp_path: Path
) -> None:
    """The owner took them for the usual ones, and never asked the honest hop again."""
    async with open_job_swarm(source, tmp_path, ALL, ALL) as swarm:
        server: Any = swarm.nodes["n0"].server
        honest = server._send

        async def send(job: HopJob, neighbour: str, frame: Frame, one: Pass, data: bytes) -> None:
            for _ in range(40 if frame.kind == Kind.FORWARD else 1):
                await honest(job, neighbour, frame, one, bytes(len(data)))

        server._send = send
        owner = owner_of(swarm)
        with trio.fail_after(60):
            await owner.run(3, batches_of, Losses())
        assert "n1" not in owner._refused
        assert "n1" in {hop.peer for hop in owner.route}


def sends_longer(server: Any) -> None:
    """Let a server send sequences with one row more forwards."""
    honest = server._send

    async def send(job: HopJob, neighbour: str, frame: Frame, one: Pass, data: bytes) -> None:
        if frame.kind == Kind.FORWARD:
            data += bytes(4 * frame.width * sequences_of(frame))
            frame = frame._replace(rows=frame.rows + 1)
        await honest(job, neighbour, frame, one, data)

    server._send = send


async def test_a_hop_that_must_send_through_the_owner_does_not_answer_for_a_wrong_shape_alone(
    source: ModelSource, tmp_path: Path
) -> None:
    """The hop before it made the shape, and nobody else holds its blocks: the job ended."""
    async with open_job_swarm(source, tmp_path, (0, 3), (3, 6), (6, 8)) as swarm:
        await swarm.train("spare", 0, 3)
        swarm.separate("n1", "n2")
        sends_longer(swarm.nodes["n0"].server)
        owner = swarm.owner(patience=replace(UNHURRIED, quiet_s=0.2))
        with trio.fail_after(60):
            await owner.run(1, batches_of, Losses())
        assert {hop.peer for hop in owner.route} == {"spare", "n1", "n2"}


async def test_of_a_hop_whose_numbers_are_refused_those_before_it_are_suspected_too(
    source: ModelSource, tmp_path: Path
) -> None:
    """`n1` is used to larger numbers than `n2`: both were left in turn for what `n0` had sent, until the job ended."""
    async with open_job_swarm(source, tmp_path, (0, 3), (3, 6), (6, 8)) as swarm:
        await swarm.train("spare", 0, 3)
        swarm.nodes["n0"].changes.append(
            lambda blocks: setattr(blocks, "data", lambda rows, wire: (rows * 4000).numpy().tobytes())
        )
        server: Any = swarm.nodes["n2"].server
        honest = server._admitted

        async def admitted(job: HopJob, frame: Frame) -> Any:
            if root_mean_square(frame) > 1000:
                raise hop._Rejected("far beyond the usual", "size")
            return await honest(job, frame)

        server._admitted = admitted
        owner = swarm.owner(patience=UNHURRIED)
        with trio.fail_after(60):
            await owner.run(1, batches_of, Losses())
        assert {hop.peer for hop in owner.route} == {"spare", "n1", "n2"}


async def test_hidden_states_whose_loss_is_not_finite_cost_their_hop_its_place_and_not_the_job(
    source: ModelSource, tmp_path: Path
) -> None:
    """They are finite themselves, but not in the 16 bits of the owner's head: the job ended at the first of them."""
    ends = TrainingEnds(load_ends(source, replace(OPTIONS, dtype=torch.float16)))
    async with open_job_swarm(source, tmp_path, (0, 4), (4, 8)) as swarm:
        await swarm.train("spare", 4, 8)
        swarm.nodes["n1"].changes.append(
            lambda blocks: setattr(blocks, "data", lambda rows, wire: (rows * 1e6).numpy().tobytes())
        )
        owner = swarm.owner(patience=UNHURRIED)
        owner._ends = OwnerEnds(ends, source.config.hidden_size)
        with trio.fail_after(60):
            await owner.run(1, batches_of, Losses())
        assert {hop.peer for hop in owner.route} == {"n0", "spare"}


async def test_a_hop_is_not_sent_more_than_it_made_room_for_when_another_is_lost(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ways without the lost hop may have more hops than all before: a hop was full then, and never asked again."""
    deepest = 1
    monkeypatch.setattr(WayPlan, "depth", property(lambda plan: deepest))
    rows = batches_of(0)[2].token_ids.numel()
    async with open_job_swarm(source, tmp_path, (0, 4), (4, 8), (4, 8), (4, 8)) as swarm:

        def lose() -> None:
            nonlocal deepest
            deepest = 6
            swarm.kill("n3")

        owner = owner_of(swarm, rows=rows)
        with trio.fail_after(60):
            await owner.run(3, batches_of, Losses({1: lose}))
        assert all(why.startswith("n3") for why in owner.figures.lost)
        assert {hop.peer for hop in owner.route} == {"n0", "n1", "n2"}


async def test_a_hard_record_among_learned_ones_costs_nobody_its_place(source: ModelSource, tmp_path: Path) -> None:
    """The gradients of what is learned by heart are thousands of times smaller than those of what comes as a surprise.

    The last hop refused those of the owner for it, and was never asked again; others were suspected until the job
    ended.
    """

    class Learned(OwnerEnds):
        factor = 1e-4

        def loss(self, *args: Any, **more: Any) -> Pieces[BatchLoss]:
            found = yield from super().loss(*args, **more)
            numbers = torch.frombuffer(bytearray(found.gradient), dtype=torch.float32)
            return BatchLoss(found.total, (numbers * type(self).factor).numpy().tobytes())

    ends = Learned(TrainingEnds(load_ends(source, OPTIONS)), source.config.hidden_size)
    async with open_job_swarm(source, tmp_path, (0, 4), (4, 8)) as swarm:
        owner = swarm.owner(patience=UNHURRIED)
        owner._ends = ends
        with trio.fail_after(60):
            await owner.run(4, batches_of, Losses({3: lambda: setattr(Learned, "factor", 1.0)}))
        assert not owner.figures.lost
        assert not owner.figures.rejected


async def test_a_hop_that_stops_the_job_before_every_snapshot_does_not_hold_it_up_for_good(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It made some good steps, which cleared it, then accused another: the job went back to the same snapshot for ever.

    Nobody rests here for longer than a moment: so that the liar is always there.
    """
    monkeypatch.setattr(blame, "MOST_REST_S", 0.001)
    async with open_job_swarm(source, tmp_path, (0, 4), (4, 8)) as swarm:
        server: Any = swarm.nodes["n1"].server
        honest = server._forward

        async def forward(job: HopJob, sender: str, frame: Frame) -> None:
            if job.ledger.version - begun[job.ledger.epoch] >= 3:
                await server._reject(job, frame, hop._Rejected("I do not like it", "size"))
                return
            await honest(job, sender, frame)

        begun: dict[int, int] = {}
        opening = server._open

        async def opened(job: HopJob, sender: str, frame: Frame) -> None:
            begun[frame.epoch] = frame.position
            await opening(job, sender, frame)

        server._forward, server._open = forward, opened
        owner = owner_of(swarm, every=10)
        owner._blame = Blame(0.001)
        with trio.fail_after(60):
            await owner.run(8, batches_of, Losses())
        assert owner.snapshot.version == 8
        assert not owner._refused


async def test_who_is_sent_other_numbers_than_the_others_is_not_left_out_for_good(
    source: ModelSource, tmp_path: Path
) -> None:
    """`n0` sends `n2` alone what is wrong: an audit found the sums of `n2` wrong, and it was never asked again."""
    async with open_job_swarm(source, tmp_path, (0, 4), (4, 8), (4, 8), (4, 8)) as swarm:
        server: Any = swarm.nodes["n0"].server
        honest = server._send

        async def send(job: HopJob, neighbour: str, frame: Frame, one: Pass, data: bytes) -> None:
            if neighbour == "n2" and frame.kind == Kind.FORWARD:
                data = (-10 * torch.frombuffer(bytearray(data), dtype=torch.float32)).numpy().tobytes()
            await honest(job, neighbour, frame, one, data)

        server._send = send
        owner = swarm.owner(replicas=Replicas(swarm.holders), patience=UNHURRIED)
        with trio.fail_after(60):
            await owner.run(8, batches_of, Losses(), JobHooks(lambda: bool(owner.figures.lost)))
        assert any("not what others compute" in why for why in owner.figures.lost)
        assert not owner._refused
        assert not owner.figures.left_out


async def test_numbers_in_another_format_cost_a_hop_its_place_at_once(source: ModelSource, tmp_path: Path) -> None:
    """Nobody else can have caused that."""
    async with open_job_swarm(source, tmp_path, (0, 4), (4, 8)) as swarm:
        await swarm.train("spare", 0, 4)
        server: Any = swarm.nodes["n0"].server
        honest = server._send

        async def send(job: HopJob, neighbour: str, frame: Frame, one: Pass, data: bytes) -> None:
            if frame.kind != Kind.BACK:
                await honest(job, neighbour, frame, one, data)
                return
            length, width = length_of(frame), frame.width
            data = bytes(sequences_of(frame) * (length * row_bytes(DTYPES[INT8], width) + 1))
            head = pass_header(
                Kind.BACK, job.run, frame.epoch, one, dtype=CHANGES, rows=length, width=width, length=len(data)
            )
            await job.answers.push(OutboundFrame((head, data), Priority.BULK))

        server._send = send
        owner = swarm.owner(patience=UNHURRIED)
        with trio.fail_after(60):
            await owner.run(1, batches_of, Losses())
        assert owner._refused == {"n0"}
        assert list(owner.figures.lost) == ["n0: it sent another number format than was agreed"]


async def test_a_holder_that_differs_from_one_that_is_needed_does_not_end_the_job(
    source: ModelSource, tmp_path: Path
) -> None:
    """`n1` came last on the route, and nobody else holds its other blocks: it was left out, and the job ended."""
    async with open_job_swarm(source, tmp_path, (0, 4), ALL) as swarm:
        swarm.poison("n0", lambda sums: -10 * sums)
        owner = swarm.owner(replicas=Replicas(swarm.holders), patience=UNHURRIED)
        with trio.fail_after(60):
            await owner.run(2, batches_of, Losses())
        assert [why.partition(":")[0] for why in owner.figures.lost] == ["n0"]
        assert not owner._refused


async def test_a_liar_does_not_have_one_honest_holder_after_the_other_left_out(
    source: ModelSource, tmp_path: Path
) -> None:
    """The route's own hop stayed whenever two holders differed, and who came beside it was never asked again."""
    async with open_job_swarm(source, tmp_path, ALL, ALL) as swarm:
        swarm.poison("n0", lambda sums: -10 * sums)
        owner = swarm.owner(replicas=Replicas(swarm.holders), patience=UNHURRIED, every=1)
        owner._blame = Blame(0.001)
        with trio.fail_after(60):
            await owner.run(4, batches_of, Losses(), JobHooks(lambda: "n0" in {why[:2] for why in owner.figures.lost}))
        assert [why.partition(":")[0] for why in owner.figures.lost] == ["n1", "n0"]
        assert not owner._refused


def hands_over(falsify: Callable[[torch.Tensor], None]) -> Callable[[Any], None]:
    """A change of a node's blocks: their weights and both moments are falsified in the states that it hands over."""

    def change(blocks: Any) -> None:
        honest = blocks.state

        def state(block: int) -> bytes:
            data = bytearray(honest(block))
            numbers = torch.frombuffer(data, dtype=torch.float32, offset=len(data) - 3 * blocks.sums_bytes)
            falsify(numbers.view(3, -1))
            return bytes(data)

        blocks.state = state

    return change


@pytest.mark.parametrize("part", range(3), ids=["weights", "first moments", "second moments"])
async def test_a_holder_that_hands_over_other_states_than_it_was_to_make_is_left_out(
    source: ModelSource, tmp_path: Path, part: int
) -> None:
    """Of two that differed, the state of the route's first one was taken: it made of the job whatever it liked."""

    def falsify(numbers: torch.Tensor) -> None:
        numbers[part] *= 1.1

    losses = Losses()
    async with open_job_swarm(source, tmp_path, ALL, ALL) as swarm:
        swarm.nodes["n0"].changes.append(hands_over(falsify))
        owner = owner_of(swarm, every=1)
        with trio.fail_after(60):
            await owner.run(3, batches_of, losses)
        check_close(losses, one_process(source, 3))
        assert set(owner.figures.left_out) == owner._refused == {"n0"}
        assert [why.partition(":")[0] for why in owner.figures.lost] == ["n0"]


async def test_a_state_with_one_wrong_number_among_many_does_not_get_into_a_job(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample of a block hardly ever has that number, and one weight of 10,000 ruins every later step."""
    monkeypatch.setattr(training_runner, "_SAMPLED", 8)

    def falsify(numbers: torch.Tensor) -> None:
        numbers[0, -1] = 1e4

    losses = Losses()
    async with open_job_swarm(source, tmp_path, ALL, ALL) as swarm:
        swarm.nodes["n0"].changes.append(hands_over(falsify))
        owner = owner_of(swarm, every=1)
        with trio.fail_after(60):
            await owner.run(3, batches_of, losses)
        check_close(losses, one_process(source, 3))
        assert set(owner.figures.left_out) == {"n0"}


def answers_late(server: Any, kinds: Collection[Kind], seconds: float) -> None:
    """Let a server take so long for frames of these kinds; it says that it computes."""
    honest = server._carry_out

    async def carry_out(job: HopJob, sender: str, frame: Frame) -> None:
        if frame.kind in kinds:
            await trio.sleep(seconds)
        await honest(job, sender, frame)

    server._carry_out = carry_out


ORDERS = (Kind.TALLY, Kind.REDUCE, Kind.SUMS, Kind.STEP, Kind.COMMIT)


@pytest.mark.parametrize("kinds", [pytest.param(ORDERS, id="orders"), pytest.param((Kind.FORWARD,), id="passes")])
@pytest.mark.parametrize(
    "slow", [pytest.param(("n1",), id="one", marks=pytest.mark.soak), pytest.param(("n1", "n2"), id="two")]
)
async def test_hops_that_a_job_can_do_without_do_not_slow_it_down_for_good(
    autojump_clock: MockClock, source: ModelSource, tmp_path: Path, slow: tuple[str, ...], kinds: tuple[Kind, ...]
) -> None:
    """They brought the job forward just before their time was up, always: a step took up to an hour, with audits more.

    `n0` holds all blocks.
    """

    def stop(step: StepDone) -> None:
        if step.version == 6:
            raise Enough

    async with open_job_swarm(source, tmp_path, ALL, ALL, ALL, delay_s=0.02) as swarm:
        for name in slow:
            answers_late(swarm.nodes[name].server, kinds, 550.0)
        terms = {"caution": Caution(clips=False, audit_every=2)}
        owner = swarm.owner(replicas=Replicas(swarm.holders), patience=Patience(), terms=terms, every=100)
        with pytest.raises(Enough):
            await owner.run(100, batches_of, stop)
        assert trio.current_time() < 600 * len(slow)
        assert {hop.peer for hop in owner.route}.isdisjoint(slow)
        assert not owner._refused


async def never(*args: Any) -> None:
    await trio.sleep_forever()


@pytest.mark.parametrize("silence", ["_open", "_snapshot"])
async def test_hops_that_a_job_can_do_without_and_that_never_answer_hold_it_up_once(
    source: ModelSource, tmp_path: Path, silence: str, patient_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where states may have to be fetched or written, the job waited ten minutes for each, one after the other."""
    spares = [(block, block + 1) for block in range(6)]
    async with open_job_swarm(source, tmp_path, ALL, *spares, delay_s=0.02) as swarm:
        for name in swarm.nodes.keys() - {"n0"}:
            monkeypatch.setattr(swarm.nodes[name].server, silence, never)
        owner = swarm.owner(replicas=Replicas(swarm.holders), patience=Patience(), terms={"copies": False}, every=1)
        with trio.fail_after(300):
            await owner.run(1, batches_of, Losses())
        assert owner.figures.epochs == 2


async def test_hops_that_cannot_be_reached_are_tried_at_once(
    source: ModelSource, tmp_path: Path, patient_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    spares = [(block, block + 1) for block in range(6)]
    async with open_job_swarm(source, tmp_path, ALL, *spares, delay_s=0.02) as swarm:
        owner = swarm.owner(replicas=Replicas(swarm.holders), patience=Patience(), terms={"copies": False})
        opened = owner._network.open

        async def slowly(peer: str, *args: Any, timeout_s: float) -> Any:
            if peer == "n0":
                return await opened(peer, *args, timeout_s=timeout_s)
            await trio.sleep(timeout_s)
            raise PeerUnreachable(peer)

        monkeypatch.setattr(owner._network, "open", slowly)
        with trio.fail_after(2 * Patience().open_s):
            await owner.run(1, batches_of, Losses())


async def test_small_members_do_not_cost_others_their_places_for_want_of_memory(
    source: ModelSource, tmp_path: Path
) -> None:
    """They make the ways longer. Then others were told to have more under way than they may, and were left for good."""
    task = TrainingTask(8, SETTINGS.rank, SETTINGS.targets, 64, 2)
    needed = plan_training(source.config, unquantised(4), task, 2**40)
    terms = TrainingTerms(memory_bytes=needed.total_bytes - needed.weight_bytes - needed.graph_bytes)
    small = [(block, block + 2) for block in range(0, 8, 2)]
    async with open_job_swarm(source, tmp_path, *small) as swarm:
        await swarm.train("large", 0, 8, terms)
        owner, losses = owner_of(swarm), Losses()
        await owner.run(2, batches_of, losses)
        assert {hop.peer for hop in owner.route} == {"large", "n0", "n1", "n2", "n3"}
        assert not owner.figures.lost
        assert owner.figures.computed["large"]
        check_close(losses, one_process(source, 2))


async def test_a_hop_that_breaks_its_link_does_not_have_others_rest_for_it(source: ModelSource, tmp_path: Path) -> None:
    """`n0` said that a link broke, and all that went through it ran again, until one of those on another way rested."""
    async with open_job_swarm(source, tmp_path, (0, 4), (4, 8), (4, 8)) as swarm:
        honest: Any = swarm.nodes["n2"].server.attend

        async def attend(stream: FrameStream) -> None:
            if stream.peer != "n0":
                await honest(stream)
                return
            await stream.receive()
            await stream.reset()

        swarm.fabric.nodes["n2"].accept(wire.PROTOCOL, attend)
        owner = owner_of(swarm, patience=replace(UNHURRIED, quiet_s=0.2))
        with trio.fail_after(60):
            await owner.run(6, batches_of, Losses())
        assert owner.figures.micro_batches_again
        assert all(why.startswith("n2") for why in owner.figures.lost)


async def test_changes_that_build_on_nothing_do_not_make_what_others_sent_run_again(
    source: ModelSource, tmp_path: Path
) -> None:
    """`n1` sends them to `n2`: what `n0` had sent ran again as often, so that it could be the one that rested."""
    unknown = wire.SequenceRows(1, wire.Form.UNCHANGED, 1, b"unknown!", b"", b"")
    async with open_job_swarm(source, tmp_path, (0, 4), (0, 4), (4, 8)) as swarm:
        server: Any = swarm.nodes["n1"].server
        honest, sent = server._forward, 0

        async def forward(job: HopJob, sender: str, frame: Frame) -> None:
            nonlocal sent
            await honest(job, sender, frame)
            body = wire.join_sequences([unknown])
            for _ in range(4):
                one, sent = pass_of(frame)._replace(number=100 + sent), sent + 1
                head = pass_header(
                    Kind.FORWARD, job.run, frame.epoch, one, dtype=CHANGES, rows=1, width=frame.width, length=len(body)
                )
                owner = Holder(job.ledger.owner, job.ledger.owner)
                await server._outboxes.push(
                    "n2", HopFrame(job.run, (head, body), Priority.BULK, frame.epoch, owner), owner
                )

        server._forward = forward
        owner = owner_of(swarm, wire=CHANGES, patience=replace(UNHURRIED, quiet_s=0.2))
        with trio.fail_after(60):
            await owner.run(6, batches_of, Losses())
        assert all(why.startswith("n1") for why in owner.figures.lost)
        assert owner.figures.micro_batches_again <= 2 * MAX_ATTEMPTS


async def test_a_snapshot_does_not_wait_for_one_of_several_that_have_its_states(
    source: ModelSource, tmp_path: Path
) -> None:
    """The owner asked the first of them alone, for as long as large states take on a slow link: more than an hour."""

    async def silent(peer: str, body: bytes) -> bytes:
        await trio.sleep_forever()

    async with open_job_swarm(source, tmp_path, ALL, ALL) as swarm:
        for method in (states.METHODS.leaves, states.METHODS.chunk):
            swarm.fabric.nodes["n0"].serve(method, silent)
        owner = owner_of(swarm)
        with trio.fail_after(40):
            await owner.run(1, batches_of, Losses())
        assert not owner.figures.lost


async def test_hops_do_not_forget_a_job_while_their_states_come_over_a_slow_link(
    source: ModelSource, tmp_path: Path, patient_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They did after three minutes, with their states: those of an 8B model take longer at 20 Mbit/s."""
    monkeypatch.setattr(hop, "IDLE_S", 30.0)
    monkeypatch.setattr(trainer, "PROBE_EVERY_S", 10.0)
    settings = AdapterSettings(rank=256, alpha=8.0, seed=3)
    async with open_job_swarm(source, tmp_path, ALL) as swarm:
        owner = swarm.owner(patience=Patience(), settings=settings, terms={"copies": False})
        swarm.fabric.set_link("owner", "n0", LinkProfile(delay_s=0.02, bytes_per_s=0.5e6))
        begun = trio.current_time()
        with trio.fail_after(600):
            await owner.run(1, batches_of, lambda step: None)
        assert trio.current_time() - begun > 45
        assert not owner.figures.lost


async def obtain_without_end(run: bytes, states: Sequence[StatePart], *holders: Any) -> None:
    if states:
        await trio.sleep_forever()


async def test_only_a_trusted_hop_is_given_the_states_of_blocks_that_it_does_not_train(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each hop in turn was given the whole adapter, also the finished one."""
    async with open_job_swarm(source, tmp_path, (0, 4), (4, 7), (7, 8)) as swarm:
        copied: Counter[str] = Counter()
        for name, node in swarm.nodes.items():
            keep = node.server._keep

            async def kept(*args: Any, name: str = name, keep: Any = keep) -> None:
                copied[name] += 1
                await keep(*args)

            monkeypatch.setattr(node.server, "_keep", kept)
        owner = swarm.owner(replicas=Replicas(not_accused=lambda: frozenset({"n1"})), every=1)
        await owner.run(3, batches_of, Losses())
    assert copied == {"n1": 3}


async def test_a_job_goes_on_if_no_hop_can_copy_its_snapshots_in_time(
    source: ModelSource, tmp_path: Path, patient_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One hop fetches all states from the owner: with a slow link from there, each snapshot failed and cost a hop."""
    async with open_job_swarm(source, tmp_path, ALL) as swarm:
        owner = swarm.owner(patience=Patience(), every=1, replicas=Replicas(not_accused=lambda: frozenset({"n0"})))
        swarm.fabric.set_link("owner", "n0", LinkProfile(delay_s=0.02))
        for node in swarm.nodes.values():
            monkeypatch.setattr(node.states, "obtain", obtain_without_end)
        losses: list[float] = []
        with trio.fail_after(400):
            await owner.run(3, batches_of, lambda step: losses.append(step.loss))
        assert len(losses) == 3
        assert not owner.figures.lost
        assert owner.snapshot.version == 3


class LastWords:
    """The stream of a hop that is not in the plan any more, which says that it computes."""

    peer = "n0"

    def __init__(self, run: bytes) -> None:
        self._messages = [plain(Kind.STATE, run, 1, 0, rows=9, width=1)]

    async def receive(self) -> bytes:
        if not self._messages:
            raise Refused("it is closed")
        return self._messages.pop()


async def test_a_hop_that_was_left_does_not_seem_to_compute_for_ever(source: ModelSource, tmp_path: Path) -> None:
    """While one computes, nothing is taken for lost: what gets lost later held the job up for ten minutes."""
    async with open_job_swarm(source, tmp_path, ALL) as swarm, trio.open_nursery() as nursery:
        owner = owner_of(swarm)
        group = trainer._HopGroup(owner, 1, nursery)
        await group._read(0, cast(FrameStream, LastWords(owner.run_id)))
        assert not group._busy
        assert not group._sending


async def test_of_different_states_those_of_a_hop_that_had_to_rest_do_not_count_again(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It named others than the honest holder at each snapshot, and sent none: each time the job waited for them."""
    monkeypatch.setattr(states, "FETCH_S", 3.0)
    async with open_job_swarm(source, tmp_path, ALL, ALL) as swarm:
        swarm.nodes["n0"].changes.append(lambda blocks: setattr(blocks, "state", lambda block: bytes([block])))

        async def silent(peer: str, body: bytes) -> bytes:
            if peer == "owner":
                await trio.sleep_forever()
            raise Refused("busy")

        for method in (states.METHODS.leaves, states.METHODS.chunk):
            swarm.fabric.nodes["n0"].serve(method, silent)
        owner = owner_of(swarm, every=1)
        owner._blame = Blame(0.001)
        with trio.fail_after(60):
            await owner.run(4, batches_of, lambda step: None)
        assert [why.partition(":")[0] for why in owner.figures.lost] == ["n0"]
