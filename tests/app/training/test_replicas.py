"""Several holders of a block in one job: they share the micro-batches, agree on every bit, and liars are left out.

Longer and more of the same: `tests/soak/test_replicas.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from trio.testing import MockClock

from app.core.span import Span
from app.routing.trust import TrustBook
from app.training.hop import TrainingTerms
from app.training.ledger import JobLedger
from app.training.trainer import JobHooks, Replicas, StepDone, SwarmTrainer
from engine.sources.base import ModelSource
from engine.sources.tiny import open_tiny
from engine.training_runner import TrainingRunner
from tests.app.training.job_swarm import (
    ALL,
    PLAIN,
    UNHURRIED,
    Batches,
    JobSwarm,
    Losses,
    batches_of,
    open_job_swarm,
    undisturbed,
)

ATTACKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "flipped": lambda sums: -sums,
    "flipped x 10": lambda sums: -10 * sums,
    "noise": lambda sums: torch.randn_like(sums) * sums.std(),
    "zeros": torch.zeros_like,
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return open_tiny(tmp_path_factory.mktemp("model"))


def one_process(source: ModelSource, steps: int, batches: Batches = batches_of) -> list[Any]:
    """The steps of one process."""
    return undisturbed(source, steps, batches=batches)[0]


def owner_of(
    swarm: JobSwarm, book: TrustBook | None = None, trusted: frozenset[str] = frozenset(), **more: Any
) -> SwarmTrainer:
    """An owner whose jobs all nodes train that hold a block."""
    more.setdefault("patience", UNHURRIED)
    return swarm.owner(replicas=Replicas(swarm.holders, lambda: trusted, book), **more)


def check_close(losses: Losses, wanted: list[Any]) -> None:
    """The steps are those of one process, but for rounding."""
    assert sorted(losses.steps) == [one.version for one in wanted]
    for one in wanted:
        found = losses.steps[one.version]
        assert (found.loss, found.norm) == pytest.approx((one.loss, one.norm), rel=1e-4)
        assert found.tokens == one.tokens


# --- steps ------------------------------------------------------------------------------------------------------------


async def check_shared(source: ModelSource, folder: Path, *spans: tuple[int, int]) -> None:
    """Nodes with these blocks share the work, and have the same state after every step, bit for bit."""
    losses, roots = Losses(), dict[tuple[int, int], set[bytes]]()

    def note(blocks: TrainingRunner) -> None:
        for block in range(blocks.start, blocks.stop):
            roots.setdefault((blocks.version, block), set()).add(blocks.state(block))

    async with open_job_swarm(source, folder, *spans) as swarm:
        swarm.before_step = note
        owner = owner_of(swarm, terms=PLAIN)
        await owner.run(2, batches_of, losses)
        check_close(losses, one_process(source, 2))
        assert set(owner.figures.computed) == set(swarm.nodes)
        assert (owner.figures.epochs, owner.figures.micro_batches_again, owner.figures.left_out) == (1, 0, {})
        assert all(len(states) == 1 for states in roots.values())
        assert len(roots) == 2 * 8


async def test_holders_share_the_work_and_agree_on_every_bit(source: ModelSource, tmp_path: Path) -> None:
    await check_shared(source, tmp_path, (0, 5), (3, 8), ALL)


async def test_a_step_of_one_micro_batch_is_that_of_one_process(source: ModelSource, tmp_path: Path) -> None:
    losses = Losses()
    async with open_job_swarm(source, tmp_path, ALL, ALL) as swarm:
        await owner_of(swarm).run(2, lambda version: batches_of(version)[:1], losses)
        losses.check(one_process(source, 2, lambda version: batches_of(version)[:1]))


async def test_three_honest_holders_learn_what_one_process_learns(source: ModelSource, tmp_path: Path) -> None:
    wanted, losses, book = one_process(source, 3), Losses(), TrustBook(clock=lambda: 0.0)
    async with open_job_swarm(source, tmp_path, ALL, ALL, ALL) as swarm:
        owner = owner_of(swarm, book)
        await owner.run(3, batches_of, losses)
        # they are clipped around their centre, so these are not the same steps
        assert losses.steps[3].loss == pytest.approx(wanted[2].loss, rel=0.02)
        assert owner.figures.audits >= 2  # each once at first, as soon as it has micro-batches
        assert not owner.figures.left_out
        assert all(book.standing(peer).trusted for peer in swarm.nodes)
        assert sum(book.agreed(peer) for peer in swarm.nodes) == owner.figures.audits


class Enough(Exception):
    """Ends a run before its snapshot, which is written in threads that an autojumping clock does not wait for."""


async def test_faster_holders_take_more(autojump_clock: MockClock, source: ModelSource, tmp_path: Path) -> None:
    def stop(step: StepDone) -> None:
        if step.version == 6:
            raise Enough

    async with open_job_swarm(source, tmp_path, ALL, ALL) as swarm:
        swarm.nodes["n0"].device.seconds, swarm.nodes["n1"].device.seconds = 0.003, 0.001
        owner = owner_of(swarm, every=100, terms=PLAIN)
        with pytest.raises(Enough):
            await owner.run(100, lambda version: [*batches_of(2 * version), *batches_of(2 * version + 1)], stop)
        computed = owner.figures.computed
        assert computed["n0"] + computed["n1"] == 6 * 2 * len(batches_of(0))
        assert 1.6 < computed["n1"] / computed["n0"] < 5


async def test_a_newcomer_takes_part_from_the_next_snapshot_on(source: ModelSource, tmp_path: Path) -> None:
    async with open_job_swarm(source, tmp_path, ALL) as swarm:
        losses = Losses({1: lambda: swarm.nursery.start_soon(swarm.train, "n1", 0, 8)})
        owner = owner_of(swarm, every=2, terms=PLAIN)
        await owner.run(4, batches_of, losses)
        check_close(losses, one_process(source, 4))
        assert owner.figures.computed["n1"] > 0
        assert losses.repeated == 0


# --- deaths -----------------------------------------------------------------------------------------------------------


async def check_death(source: ModelSource, folder: Path, point: str, call: int) -> None:
    """One of two holders dies within a call, and the other goes on with the version that it has."""
    losses = Losses()
    async with open_job_swarm(source, folder, ALL, ALL) as swarm:
        swarm.kill_within("n1", point, call)
        owner = owner_of(swarm, every=2, terms=PLAIN)
        await owner.run(3, batches_of, losses)
        check_close(losses, one_process(source, 3))
        assert losses.repeated == 0
        assert owner.figures.epochs == 2
        assert [hop.peer for hop in owner.route] == ["n0"]


@pytest.mark.parametrize(("point", "call"), [("take_sums", 2), ("commit", 1)])
async def test_a_holder_dies_and_the_others_go_on(source: ModelSource, tmp_path: Path, point: str, call: int) -> None:
    await check_death(source, tmp_path, point, call)


async def test_who_cannot_be_reached_or_refuses_is_left_at_once(source: ModelSource, tmp_path: Path) -> None:
    async with open_job_swarm(source, tmp_path, ALL) as swarm:
        await swarm.train("n1", 0, 8, TrainingTerms(refuses=lambda owner: "it trains for members it trusts only"))
        await swarm.train("n2", 0, 8)
        swarm.fabric.kill("n2")
        losses, owner = Losses(), owner_of(swarm, terms=PLAIN)
        await owner.run(1, batches_of, losses)
        losses.check(one_process(source, 1))
        assert [hop.peer for hop in owner.route] == ["n0"]
        assert len(owner.figures.lost) == 2


# --- liars ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attack", ATTACKS)
async def test_one_of_three_that_lies_is_left_out(source: ModelSource, tmp_path: Path, attack: str) -> None:
    torch.manual_seed(1)
    losses, book = Losses(), TrustBook(clock=lambda: 0.0)
    async with open_job_swarm(source, tmp_path, ALL, ALL, ALL) as swarm:
        swarm.poison("n1", ATTACKS[attack])
        owner = owner_of(swarm, book)
        # in its own first audit, or in one of another where the lot says that it is asked
        await owner.run(40, batches_of, losses, JobHooks(lambda: bool(owner.figures.left_out)))
        assert set(owner.figures.left_out) == {"n1"}
        assert "not what others compute" in owner.figures.left_out["n1"]
        assert {hop.peer for hop in owner.route} == {"n0", "n2"}
        assert "trained wrongly" in book.standing("n1").why
        assert [book.standing(peer).trusted for peer in ("n0", "n1", "n2")] == [True, False, True]


async def test_a_liar_of_one_stage_rests_and_its_neighbour_shares_the_doubt(
    source: ModelSource, tmp_path: Path
) -> None:
    """What `n0` had sent may have been wrong, so nobody is left out for good."""
    book = TrustBook(clock=lambda: 0.0)
    async with open_job_swarm(source, tmp_path, (0, 4), (4, 8), (4, 8), (4, 8)) as swarm:
        swarm.poison("n2", ATTACKS["flipped x 10"])
        owner = owner_of(swarm, book)
        await owner.run(20, batches_of, Losses(), JobHooks(lambda: bool(owner.figures.lost)))
        assert [why.partition(":")[0] for why in owner.figures.lost] == ["n2"]
        assert "not what others compute" in owner.figures.lost[0]
        assert {hop.peer for hop in owner.route} == {"n0", "n1", "n3"}
        assert not owner.figures.left_out
        assert (book.doubt("n0"), book.doubt("n2")) == (0.5, 0.5)
        assert (book.doubt("n1"), book.doubt("n3")) == (0.0, 0.0)


async def test_of_two_that_differ_the_one_that_the_user_trusts_is_right(source: ModelSource, tmp_path: Path) -> None:
    losses, book = Losses(), TrustBook(clock=lambda: 0.0)
    async with open_job_swarm(source, tmp_path, ALL, ALL) as swarm:
        swarm.poison("n0", ATTACKS["flipped"])
        owner = owner_of(swarm, book, frozenset({"n1"}))
        await owner.run(2, batches_of, losses)
        check_close(losses, one_process(source, 2))
        assert set(owner.figures.left_out) == {"n0"}
        assert not book.standing("n0").trusted


async def test_of_two_that_differ_one_rests_and_both_are_doubted(source: ModelSource, tmp_path: Path) -> None:
    book = TrustBook(clock=lambda: 0.0)
    async with open_job_swarm(source, tmp_path, ALL, ALL) as swarm:
        swarm.poison("n1", ATTACKS["flipped"])
        owner = owner_of(swarm, book)
        await owner.run(2, batches_of, Losses())
        assert [why.partition(":")[0] for why in owner.figures.lost] == ["n1"]  # the route's own hop stays
        assert "nobody can tell" in owner.figures.lost[0]
        assert not owner.figures.left_out
        assert (book.doubt("n0"), book.doubt("n1")) == (0.5, 0.5)
        assert book.standing("n0").trusted


async def test_who_was_left_out_before_a_pause_stays_out(source: ModelSource, tmp_path: Path) -> None:
    async with open_job_swarm(source, tmp_path, ALL, ALL) as swarm:
        losses, owner = Losses(), owner_of(swarm)
        owner.leave_out([("n0", "it lied")])
        await owner.run(1, batches_of, losses)
        losses.check(one_process(source, 1))
        assert [hop.peer for hop in owner.route] == ["n1"]
        assert owner.figures.left_out == {"n0": "it lied"}


async def check_bad_sums(source: ModelSource, folder: Path, spoilt: Callable[[bytes], bytes], why: str) -> None:
    """A holder whose sums cannot be used is left."""
    losses = Losses()
    async with open_job_swarm(source, folder, ALL, ALL) as swarm:

        def change(blocks: Any) -> None:
            take = blocks.take_sums
            blocks.take_sums = lambda block: spoilt(take(block))

        swarm.nodes["n1"].changes.append(change)
        owner = owner_of(swarm)
        await owner.run(1, batches_of, losses)
        losses.check(one_process(source, 1))
        assert any(why in lost for lost in owner.figures.lost)
        assert [hop.peer for hop in owner.route] == ["n0"]


async def test_sums_that_are_not_finite_cost_the_holder_its_place(source: ModelSource, tmp_path: Path) -> None:
    await check_bad_sums(source, tmp_path, lambda data: b"\xff" * len(data), "not finite")


class ClaimsAll(JobLedger):
    """Says that it has counted what others were sent."""

    @property
    def counted(self) -> tuple[tuple[Span, frozenset[int]], ...]:
        """All micro-batches for each run of blocks."""
        return tuple((run, frozenset(range(3))) for run, _ in super().counted)


async def test_a_holder_that_counts_what_it_was_not_sent_is_left(source: ModelSource, tmp_path: Path) -> None:
    async with open_job_swarm(source, tmp_path, ALL, ALL) as swarm:

        def claim() -> None:
            (job,) = swarm.nodes["n1"].server._jobs.values()
            job.ledger.__class__ = ClaimsAll

        losses, owner = Losses({1: claim}), owner_of(swarm, terms=PLAIN)
        await owner.run(2, batches_of, losses)
        check_close(losses, one_process(source, 2))
        assert any("never sent to it" in lost for lost in owner.figures.lost)


async def test_a_holder_that_only_a_dead_one_led_to_does_not_end_the_job(source: ModelSource, tmp_path: Path) -> None:
    """Blocks 3 and 4 lie within those of `n0`: without `n1` no way leads through `n2`, whose stream is just open."""
    losses = Losses()
    async with open_job_swarm(source, tmp_path, ALL, (5, 8), (3, 5)) as swarm:
        swarm.fabric.kill("n1")
        owner = owner_of(swarm)
        await owner.run(1, batches_of, losses)
        losses.check(one_process(source, 1))
        assert {hop.peer for hop in owner.route} == {"n0"}


async def test_two_trusted_holders_that_differ_do_not_end_the_job(source: ModelSource, tmp_path: Path) -> None:
    losses, book, both = Losses(), TrustBook(clock=lambda: 0.0), frozenset({"n0", "n1"})
    async with open_job_swarm(source, tmp_path, ALL, ALL) as swarm:
        swarm.poison("n1", ATTACKS["flipped"])
        owner = owner_of(swarm, book, both)
        await owner.run(2, batches_of, losses)
        assert [why.partition(":")[0] for why in owner.figures.lost] == ["n1"]
        assert not owner.figures.left_out
        assert [book.doubt(peer) for peer in sorted(both)] == [0.0, 0.0]
