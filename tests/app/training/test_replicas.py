"""Several holders of a block in one job: they share the micro-batches, agree on every bit, and liars are left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from trio.testing import MockClock

from app.core.span import Span
from app.routing.trust import TrustBook
from app.training.audits import Caution
from app.training.ledger import JobLedger
from app.training.trainer import JobHooks, Replicas, StepDone
from engine.sources.base import ModelSource
from engine.sources.tiny import open_tiny
from engine.training_runner import TrainingRunner
from tests.app.training.job_swarm import PATIENCE, SETTINGS, JobSwarm, Losses, batches_of, open_job_swarm, undisturbed
from tests.engine.training import trainer

SPANS = {
    "two of all": ((0, 8), (0, 8)),
    "overlapping": ((0, 5), (3, 8), (0, 8)),
    "one stage twice": ((0, 4), (4, 8), (4, 8)),
}
ATTACKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "flipped": lambda sums: -sums,
    "flipped x 10": lambda sums: -10 * sums,
    "noise": lambda sums: torch.randn_like(sums) * sums.std(),
    "zeros": torch.zeros_like,
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return open_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The model is too small for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def owner_of(swarm: JobSwarm, book: TrustBook | None = None, trusted: frozenset[str] = frozenset(), **more: Any) -> Any:
    """An owner whose jobs all nodes train that hold a block."""
    return swarm.owner(replicas=Replicas(swarm.holders, lambda: trusted, book), **more)


def check_close(losses: Losses, wanted: list[Any]) -> None:
    """The steps are those of one process, but for rounding."""
    assert sorted(losses.steps) == [one.version for one in wanted]
    for one in wanted:
        found = losses.steps[one.version]
        assert (found.loss, found.norm) == pytest.approx((one.loss, one.norm), rel=1e-4)
        assert found.tokens == one.tokens


def watch_roots(swarm: JobSwarm) -> dict[tuple[int, int], set[bytes]]:
    """Collect the state of each block after each step, of all its holders."""
    roots: dict[tuple[int, int], set[bytes]] = {}

    def note(blocks: TrainingRunner) -> None:
        for block in range(blocks.start, blocks.stop):
            roots.setdefault((blocks.version, block), set()).add(blocks.state(block))

    swarm.before_step = note
    return roots


@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
async def test_holders_share_the_work_and_agree_on_every_bit(
    source: ModelSource, tmp_path: Path, spans: tuple[tuple[int, int], ...]
) -> None:
    wanted, _ = undisturbed(source, 4)
    losses = Losses()
    async with open_job_swarm(source, tmp_path, *spans) as swarm:
        roots = watch_roots(swarm)
        owner = owner_of(swarm, terms={"caution": Caution(clips=False)})
        await owner.run(4, batches_of, losses)
        check_close(losses, wanted)
        assert set(owner.figures.computed) == set(swarm.nodes)
        assert (owner.figures.epochs, owner.figures.micro_batches_again, owner.figures.left_out) == (1, 0, {})
        assert all(len(states) == 1 for states in roots.values())
        assert len(roots) == 4 * 8


async def test_three_honest_holders_learn_what_one_process_learns(source: ModelSource, tmp_path: Path) -> None:
    wanted, _ = undisturbed(source, 5)
    losses = Losses()
    async with open_job_swarm(source, tmp_path, (0, 8), (0, 8), (0, 8)) as swarm:
        owner = owner_of(swarm)
        await owner.run(5, batches_of, losses)
        # they are clipped around their centre, so these are not the same steps
        assert losses.steps[5].loss == pytest.approx(wanted[4].loss, rel=0.02)
        assert not owner.figures.left_out


async def test_a_step_of_one_micro_batch_is_that_of_one_process(source: ModelSource, tmp_path: Path) -> None:
    job = trainer(source, SETTINGS)
    wanted = [job.step(batches_of(version)[:1]) for version in range(3)]
    losses = Losses()
    async with open_job_swarm(source, tmp_path, (0, 8), (0, 8)) as swarm:
        owner = owner_of(swarm)
        await owner.run(3, lambda version: batches_of(version)[:1], losses)
        losses.check(wanted)
        assert dict(enumerate(await owner.final_states())) == job.states()


class Enough(Exception):
    """Ends a run before its snapshot, which is written in threads that an autojumping clock does not wait for."""


async def test_faster_holders_take_more(autojump_clock: MockClock, source: ModelSource, tmp_path: Path) -> None:
    def stop(step: StepDone) -> None:
        if step.version == 12:
            raise Enough

    async with open_job_swarm(source, tmp_path, (0, 8), (0, 8)) as swarm:
        swarm.nodes["n0"].device.seconds, swarm.nodes["n1"].device.seconds = 0.003, 0.001
        owner = owner_of(swarm, every=100, terms={"caution": Caution(audit_every=None)})
        with pytest.raises(Enough):
            await owner.run(100, batches_of, stop)
        computed = owner.figures.computed
        assert computed["n0"] + computed["n1"] == 12 * 5
        assert 1.8 < computed["n1"] / computed["n0"] < 4.5


@pytest.mark.parametrize("point", ["forward", "backward", "take_sums", "set_sums", "step", "commit", "state"])
async def test_a_holder_dies_and_the_others_go_on(source: ModelSource, tmp_path: Path, point: str) -> None:
    wanted, _ = undisturbed(source, 4)
    losses = Losses()
    async with open_job_swarm(source, tmp_path, (0, 8), (0, 8)) as swarm:
        swarm.kill_within("n1", point, call=9 if point in ("forward", "backward") else 2)
        owner = owner_of(swarm, every=2)
        await owner.run(4, batches_of, losses)
        check_close(losses, wanted)
        assert losses.repeated == 0  # it went on with what the others have
        assert owner.figures.epochs == 2
        assert [hop.peer for hop in owner.route] == ["n0"]


async def test_a_frozen_holder_is_left(source: ModelSource, tmp_path: Path) -> None:
    wanted, _ = undisturbed(source, 3)
    async with open_job_swarm(source, tmp_path, (0, 4), (4, 8), (0, 8)) as swarm:
        losses = Losses({1: lambda: swarm.fabric.freeze("n1")})
        owner = owner_of(swarm)
        await owner.run(3, batches_of, losses)
        check_close(losses, wanted)
        assert losses.repeated == 0
        assert {hop.peer for hop in owner.route} == {"n0", "n2"}


async def test_a_death_beside_a_death(source: ModelSource, tmp_path: Path) -> None:
    wanted, _ = undisturbed(source, 4)
    async with open_job_swarm(source, tmp_path, *[(0, 8)] * 3) as swarm:

        def kill_two() -> None:
            swarm.kill("n0")
            swarm.kill("n2")

        losses = Losses({2: kill_two})
        owner = owner_of(swarm, terms={"caution": Caution(clips=False)})
        await owner.run(4, batches_of, losses)
        check_close(losses, wanted)
        assert losses.repeated == 0


async def test_who_alone_holds_a_block_and_dies_takes_the_job_back_to_the_snapshot(
    source: ModelSource, tmp_path: Path
) -> None:
    wanted, _ = undisturbed(source, 5)
    async with open_job_swarm(source, tmp_path, (0, 4), (4, 8), (4, 8)) as swarm:

        def replace_first() -> None:
            swarm.kill("n0")
            swarm.nursery.start_soon(swarm.train, "n9", 0, 4)

        losses = Losses({3: replace_first})

        def on_step(step: StepDone) -> None:
            losses.steps.pop(step.version, None)  # what is repeated differs by rounding
            losses(step)

        owner = owner_of(swarm, every=2)
        await owner.run(5, batches_of, on_step)
        check_close(losses, wanted)
        assert owner.snapshot.version == 5


async def test_a_newcomer_takes_part_from_the_next_snapshot_on(source: ModelSource, tmp_path: Path) -> None:
    wanted, _ = undisturbed(source, 6)
    async with open_job_swarm(source, tmp_path, (0, 8)) as swarm:
        losses = Losses({1: lambda: swarm.nursery.start_soon(swarm.train, "n1", 0, 8)})
        owner = owner_of(swarm, every=2)
        await owner.run(6, batches_of, losses)
        check_close(losses, wanted)
        assert owner.figures.computed["n1"] > 0
        assert losses.repeated == 0


async def test_neighbours_on_several_ways_that_cannot_reach_each_other(source: ModelSource, tmp_path: Path) -> None:
    wanted, _ = undisturbed(source, 2)
    async with open_job_swarm(source, tmp_path, (0, 4), (4, 8), (4, 8)) as swarm:
        swarm.separate("n0", "n2")
        losses = Losses()
        await owner_of(swarm).run(2, batches_of, losses)
        check_close(losses, wanted)


# --- liars ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attack", ATTACKS)
async def test_one_of_three_that_lies_is_left_out(source: ModelSource, tmp_path: Path, attack: str) -> None:
    torch.manual_seed(1)
    losses, book = Losses(), TrustBook(clock=lambda: 0.0)
    async with open_job_swarm(source, tmp_path, *[(0, 8)] * 3) as swarm:
        swarm.poison("n1", ATTACKS[attack])
        owner = owner_of(swarm, book, terms={"caution": Caution(audit_every=5)})
        await owner.run(20, batches_of, losses, JobHooks(lambda: bool(owner.figures.left_out)))
        assert owner.version <= 10
        assert set(owner.figures.left_out) == {"n1"}
        assert "not what others compute" in owner.figures.left_out["n1"]
        assert {hop.peer for hop in owner.route} == {"n0", "n2"}
        assert not book.standing("n1").trusted
        assert "trained wrongly" in book.standing("n1").why
        assert book.standing("n0").trusted
        assert book.standing("n2").trusted


async def test_a_liar_of_one_stage_is_found_and_its_neighbours_share_the_doubt(
    source: ModelSource, tmp_path: Path
) -> None:
    losses, book = Losses(), TrustBook(clock=lambda: 0.0)
    async with open_job_swarm(source, tmp_path, (0, 4), (4, 8), (4, 8), (4, 8)) as swarm:
        swarm.poison("n2", ATTACKS["flipped x 10"])
        owner = owner_of(swarm, book)
        await owner.run(6, batches_of, losses)
        assert set(owner.figures.left_out) == {"n2"}
        assert (book.doubt("n0"), book.doubt("n2")) == (0.5, 0.5)  # what n0 had sent may have been wrong
        assert (book.doubt("n1"), book.doubt("n3")) == (0.0, 0.0)


async def test_of_two_that_differ_the_one_that_the_user_trusts_is_right(source: ModelSource, tmp_path: Path) -> None:
    wanted, _ = undisturbed(source, 3)
    losses, book = Losses(), TrustBook(clock=lambda: 0.0)
    async with open_job_swarm(source, tmp_path, (0, 8), (0, 8)) as swarm:
        swarm.poison("n0", ATTACKS["flipped"])
        owner = owner_of(swarm, book, frozenset({"n1"}))
        await owner.run(3, batches_of, losses)
        check_close(losses, wanted)
        assert set(owner.figures.left_out) == {"n0"}
        assert not book.standing("n0").trusted


async def test_of_two_that_differ_one_is_left_and_both_are_doubted(source: ModelSource, tmp_path: Path) -> None:
    losses, book = Losses(), TrustBook(clock=lambda: 0.0)
    async with open_job_swarm(source, tmp_path, (0, 8), (0, 8)) as swarm:
        swarm.poison("n1", ATTACKS["flipped"])
        owner = owner_of(swarm, book)
        await owner.run(3, batches_of, losses)
        assert set(owner.figures.left_out) == {"n1"}  # the route's own hop stays
        assert "nobody can tell" in owner.figures.left_out["n1"]
        assert (book.doubt("n0"), book.doubt("n1")) == (0.5, 0.5)
        assert book.standing("n0").trusted


async def test_of_two_that_differ_a_third_says_who_lied(source: ModelSource, tmp_path: Path) -> None:
    losses, book = Losses(), TrustBook(clock=lambda: 0.0)
    async with open_job_swarm(source, tmp_path, *[(0, 8)] * 3) as swarm:
        swarm.poison("n0", ATTACKS["flipped"])
        patience = replace(PATIENCE, probe_s=0.01)  # who failed comes back soon
        owner = owner_of(swarm, book, every=1, patience=patience, terms={"replicas": 2})
        await owner.run(12, batches_of, losses, JobHooks(lambda: bool(owner.figures.left_out)))
        assert set(owner.figures.left_out) == {"n0"}
        assert not book.standing("n0").trusted
        assert book.standing("n1").trusted


@pytest.mark.parametrize("seed", range(2))
async def test_honest_holders_are_audited_and_never_left_out(source: ModelSource, tmp_path: Path, seed: int) -> None:
    losses, book = Losses(), TrustBook(clock=lambda: 0.0)
    async with open_job_swarm(source, tmp_path, *[(0, 8)] * 3) as swarm:
        owner = owner_of(swarm, book, terms={"caution": Caution(audit_every=2)})
        await owner.run(8, lambda version: batches_of(1000 * seed + version), losses)
        assert owner.figures.audits >= 3
        assert not owner.figures.left_out
        assert all(book.standing(peer).trusted for peer in swarm.nodes)


@pytest.mark.parametrize(
    ("spoilt", "why"),
    [
        pytest.param(lambda data: data[:-4], "not valid", id="too short"),
        pytest.param(lambda data: data + bytes(4), "not valid", id="too long"),
        pytest.param(lambda data: b"\xff" * len(data), "not finite", id="not finite"),
    ],
)
async def test_sums_that_cannot_be_used_cost_the_holder_its_place(
    source: ModelSource, tmp_path: Path, spoilt: Callable[[bytes], bytes], why: str
) -> None:
    wanted, _ = undisturbed(source, 2)
    losses = Losses()
    async with open_job_swarm(source, tmp_path, (0, 8), (0, 8)) as swarm:

        def change(blocks: Any) -> None:
            take = blocks.take_sums
            blocks.take_sums = lambda block: spoilt(take(block))

        swarm.nodes["n1"].changes.append(change)
        owner = owner_of(swarm)
        await owner.run(2, batches_of, losses)
        check_close(losses, wanted)
        assert any(why in lost for lost in owner.figures.lost)
        assert [hop.peer for hop in owner.route] == ["n0"]


class ClaimsAll(JobLedger):
    """Says that it has counted what others were sent."""

    @property
    def counted(self) -> tuple[tuple[Span, frozenset[int]], ...]:
        return tuple((run, frozenset(range(5))) for run, _ in super().counted)


async def test_a_holder_that_counts_what_it_was_not_sent_is_left(source: ModelSource, tmp_path: Path) -> None:
    wanted, _ = undisturbed(source, 2)
    async with open_job_swarm(source, tmp_path, (0, 8), (0, 8)) as swarm:

        def claim() -> None:
            (job,) = swarm.nodes["n1"].server._jobs.values()
            job.ledger.__class__ = ClaimsAll

        losses, owner = Losses({1: claim}), owner_of(swarm)
        await owner.run(2, batches_of, losses)
        check_close(losses, wanted)
        assert any("never sent to it" in lost for lost in owner.figures.lost)
