"""Steps through several nodes: the numbers of one process, bit for bit, whatever happens to frames and nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from trio.testing import MockClock

from app.core.errors import reason_of
from app.core.network import FrameStream
from app.routing.route import NoRoute, Route
from app.training import hop
from app.training.hop import TrainingTerms
from app.training.trainer import JobHooks, Patience, Snapshot, SwarmTrainer, TrainingStopped
from engine.sources.base import ModelSource
from engine.sources.tiny import open_tiny
from engine.training_runner import TrainingRunner
from tests.app.training.job_swarm import (
    ALL,
    PATIENCE,
    SETTINGS,
    Losses,
    States,
    batches_of,
    open_job_swarm,
    undisturbed,
)
from tests.engine.training import gradients, trainer

SPLITS = ((0, 2), (2, 6), (6, 8))
Alone = Callable[[int], tuple[list[Any], States]]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return open_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def alone(source: ModelSource) -> Alone:
    """The steps of one process up to a number, and the states after them."""
    return partial(undisturbed, source)


async def check_states(owner: SwarmTrainer, states: States) -> None:
    """The owner's states of all blocks are those of one process."""
    assert dict(enumerate(await owner.final_states())) == states


async def test_losses_and_states_are_those_of_one_process(source: ModelSource, alone: Alone, tmp_path: Path) -> None:
    wanted, states = alone(4)
    losses = Losses()
    async with open_job_swarm(source, tmp_path, *SPLITS) as swarm:
        owner = swarm.owner()
        await owner.run(4, batches_of, losses)
        losses.check(wanted)
        await check_states(owner, states)
        assert (owner.figures.epochs, owner.figures.micro_batches_again) == (1, 0)
        assert not owner.figures.rejected


async def test_an_owner_trains_all_blocks_of_its_job_itself(source: ModelSource, alone: Alone, tmp_path: Path) -> None:
    wanted, states = alone(3)
    losses = Losses()
    async with open_job_swarm(source, tmp_path, (0, source.config.n_blocks)) as swarm:
        owner = swarm.owner("n0", every=1)
        await owner.run(3, batches_of, losses)
        losses.check(wanted)
        await check_states(owner, states)


@pytest.mark.parametrize("fails", [True, False], ids=["fails", "has ended"])
async def test_an_owner_whose_own_server_does_not_serve_it_goes_on_elsewhere(
    source: ModelSource, alone: Alone, tmp_path: Path, fails: bool
) -> None:
    wanted, _ = alone(2)
    async with open_job_swarm(source, tmp_path, ALL, ALL) as swarm:

        async def own_server(stream: FrameStream) -> None:
            if fails:
                raise RuntimeError("Nursery is closed to new arrivals")

        losses, owner = Losses(), swarm.owner("n0")
        owner._own_server = own_server
        await owner.run(2, batches_of, losses)
        losses.check(wanted)
        assert [hop.peer for hop in owner.route] == ["n1"]
        [why] = owner.figures.lost
        assert "its stream broke" in why  # and nobody had to find out that it does not answer


async def test_a_server_that_ends_tells_the_owners_of_its_jobs(
    source: ModelSource, alone: Alone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hop, "LAST_WORDS_S", 60.0)  # a second can pass on a loaded machine
    wanted, _ = alone(4)
    async with open_job_swarm(source, tmp_path, ALL, ALL) as swarm:
        server = swarm.nodes["n0"].server
        losses, owner = Losses({2: swarm.nodes["n0"].scope.cancel}), swarm.owner(every=1)
        await owner.run(4, batches_of, losses)
        losses.check(wanted)
        assert list(owner.figures.lost) == ["n0: this node trains nothing any more"]
        assert not server.jobs
        await server.no_jobs()


async def test_neighbours_reach_the_server_that_follows_one_that_has_ended(
    source: ModelSource, alone: Alone, tmp_path: Path
) -> None:
    """Streams to the one that had ended stayed open, and what was sent on them was lost."""
    wanted, _ = alone(4)
    async with open_job_swarm(source, tmp_path, (0, 4), (4, 8)) as swarm, trio.open_nursery() as nursery:
        ended = trio.Event()

        def end() -> None:
            swarm.nodes["n1"].scope.cancel()
            ended.set()

        async def follow() -> None:
            await ended.wait()
            await swarm.train("n1", 4, 8, network=swarm.fabric.nodes["n1"])

        nursery.start_soon(follow)
        losses, owner = Losses({2: end}), swarm.owner(every=1)
        await owner.run(4, batches_of, losses)
        losses.check(wanted)
        assert owner.figures.micro_batches_again == 0


async def test_summed_gradients_are_those_of_one_process(source: ModelSource, tmp_path: Path) -> None:
    local = trainer(source, SETTINGS)
    for number, batch in enumerate(batches_of(0)):
        local.run(number, batch)
    found: dict[int, torch.Tensor] = {}

    def on_step(runner: TrainingRunner) -> None:
        found.update({block: runner.gradient(block) for block in range(runner.start, runner.stop)})

    async with open_job_swarm(source, tmp_path, *SPLITS) as swarm:
        swarm.before_step = on_step
        await swarm.owner().run(1, batches_of, Losses())
    wanted = gradients(local)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[block], wanted[block]) for block in wanted)


async def test_rows_of_int8_take_a_quarter_of_the_bytes_and_train_alike(source: ModelSource, tmp_path: Path) -> None:
    found: dict[str, tuple[Losses, SwarmTrainer]] = {}
    for wire in ("f32", "int8"):
        async with open_job_swarm(source, tmp_path / wire, *SPLITS) as swarm:
            losses, owner = Losses(), swarm.owner(wire=wire)
            await owner.run(4, batches_of, losses)
            found[wire] = losses, owner
    exact, rounded = ([step.loss for step in found[wire][0].steps.values()] for wire in found)
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=0.01)
    exact_links, links = (found[wire][1].figures.link_bytes for wire in found)
    # Each link carries every micro-batch there and back, and so does the owner's at either end of the route.
    pairs = {("owner", "n0"), ("n0", "n1"), ("n1", "n2"), ("n2", "owner")}
    assert links.keys() == exact_links.keys() == pairs | {(receiver, sender) for sender, receiver in pairs}
    assert len(set(links.values())) == 1
    assert all(links[pair] <= 0.3 * exact_links[pair] for pair in links)


@pytest.mark.soak
async def test_a_killed_hop_changes_nothing_with_rows_of_int8(source: ModelSource, tmp_path: Path) -> None:
    undisturbed_losses = Losses()
    async with open_job_swarm(source, tmp_path / "undisturbed", *SPLITS) as swarm:
        await swarm.owner(wire="int8").run(4, batches_of, undisturbed_losses)
    async with open_job_swarm(source, tmp_path / "killed", *SPLITS) as swarm:
        for index, (start, stop) in enumerate(SPLITS):
            await swarm.train(f"spare{index}", start, stop)
        losses = Losses({1: lambda: swarm.kill("n0"), 3: lambda: swarm.kill("n1")})
        await swarm.owner(every=2, wire="int8").run(4, batches_of, losses)
    assert losses.steps == undisturbed_losses.steps


async def test_every_hop_is_killed_once(source: ModelSource, alone: Alone, tmp_path: Path) -> None:
    wanted, states = alone(5)
    async with open_job_swarm(source, tmp_path, *SPLITS) as swarm:
        for index, (start, stop) in enumerate(SPLITS):
            await swarm.train(f"spare{index}", start, stop)
        losses = Losses({1: lambda: swarm.kill("n0"), 3: lambda: swarm.kill("n1"), 4: lambda: swarm.kill("n2")})
        owner = swarm.owner(every=2)
        await owner.run(5, batches_of, losses)
        losses.check(wanted)
        await check_states(owner, states)
        assert (owner.figures.epochs, losses.repeated) == (4, 5)


@pytest.mark.parametrize("point", ["backward", "commit"])
async def test_a_hop_killed_within_a_step_changes_nothing(
    source: ModelSource, alone: Alone, tmp_path: Path, point: str
) -> None:
    wanted, states = alone(2)
    async with open_job_swarm(source, tmp_path, *SPLITS) as swarm:
        await swarm.train("spare", 0, 8)
        swarm.kill_within("n1", point, call=2)
        losses, owner = Losses(), swarm.owner(every=1)
        await owner.run(2, batches_of, losses)
        losses.check(wanted)
        await check_states(owner, states)
        assert owner.figures.epochs == 2


async def test_a_frozen_hop_is_left(source: ModelSource, alone: Alone, tmp_path: Path) -> None:
    wanted, _ = alone(3)
    async with open_job_swarm(source, tmp_path, *SPLITS) as swarm:
        await swarm.train("spare", 0, 8)
        losses = Losses({1: lambda: swarm.fabric.freeze("n1")})
        owner = swarm.owner(every=1)
        await owner.run(3, batches_of, losses)
        losses.check(wanted)
        assert "has not answered" in owner.figures.lost[0]


async def test_a_job_goes_on_after_its_owner_was_restarted(source: ModelSource, alone: Alone, tmp_path: Path) -> None:
    wanted, last = alone(4)
    async with open_job_swarm(source, tmp_path, *SPLITS) as swarm:
        losses, owner = Losses(), swarm.owner(every=2)
        await owner.run(2, batches_of, losses)
        states = await owner.final_states()
        swarm.fabric.kill("owner")
        owner = swarm.owner(every=2)
        await owner.resume(2, states)
        await owner.run(4, batches_of, losses)
        losses.check(wanted)
        await check_states(owner, last)


async def test_neighbours_that_cannot_reach_each_other_send_through_the_owner(
    source: ModelSource, alone: Alone, tmp_path: Path
) -> None:
    wanted, _ = alone(2)
    async with open_job_swarm(source, tmp_path, *SPLITS) as swarm:
        swarm.separate("n0", "n1")
        losses, owner = Losses(), swarm.owner()
        await owner.run(2, batches_of, losses)
        losses.check(wanted)


@pytest.mark.parametrize("value", [float("nan"), 1e6])
async def test_a_hop_that_sends_what_must_not_be_used_is_left(
    source: ModelSource, alone: Alone, tmp_path: Path, value: float
) -> None:
    wanted, _ = alone(3)
    async with open_job_swarm(source, tmp_path, *SPLITS) as swarm:
        await swarm.train("spare", 0, 8)
        swarm.spoil("n1", value, after_steps=2)
        losses, owner = Losses(), swarm.owner(every=1)
        await owner.run(3, batches_of, losses)
        losses.check(wanted)
        assert owner.figures.rejected == {"n1": 3}
        assert "far beyond the usual" in owner.figures.rejected_why["n1"]
        assert "n1" not in {hop.peer for hop in owner.route}


async def test_who_refuses_is_not_asked_again(source: ModelSource, alone: Alone, tmp_path: Path) -> None:
    wanted, _ = alone(2)
    async with open_job_swarm(source, tmp_path) as swarm:
        await swarm.train("a", 0, 8, TrainingTerms(refuses=lambda owner: "it trains for members it trusts only"))
        await swarm.train("b", 0, 8)
        losses, owner = Losses(), swarm.owner()
        await owner.run(2, batches_of, losses)
        losses.check(wanted)
        assert owner.figures.epochs == 2
        assert not swarm.nodes["a"].blocks


@pytest.mark.parametrize("apart", [False, pytest.param(True, marks=pytest.mark.soak)])
async def test_validation_changes_no_step_and_is_that_of_one_process(
    source: ModelSource, alone: Alone, tmp_path: Path, apart: bool
) -> None:
    wanted, states = alone(3)
    held = batches_of(77)
    trained = trainer(source, SETTINGS)
    expected = {0: trained.loss(held)}
    for version in range(3):
        trained.step(batches_of(version))
        expected[version + 1] = trained.loss(held)
    losses, found = Losses(), dict[int, float]()
    async with open_job_swarm(source, tmp_path, *SPLITS) as swarm:
        if apart:
            swarm.separate("n0", "n1")
        owner = swarm.owner()
        hooks = JobHooks(validation=lambda version: held, on_validation=found.__setitem__)
        await owner.run(3, batches_of, losses, hooks)
        losses.check(wanted)
        assert found == expected
        await check_states(owner, states)


async def test_a_run_that_is_asked_to_leave_ends_at_a_snapshot_and_goes_on_from_it(
    source: ModelSource, alone: Alone, tmp_path: Path
) -> None:
    wanted, states = alone(6)
    losses, snapshots = Losses(), list[int]()

    async def note(snapshot: Snapshot) -> None:
        snapshots.append(snapshot.version)

    async with open_job_swarm(source, tmp_path, *SPLITS) as swarm:
        first = swarm.owner(every=3)
        await first.run(6, batches_of, losses, JobHooks(lambda: len(losses.steps) >= 4, on_snapshot=note))
        assert (first.version, first.snapshot.version, snapshots) == (4, 4, [3, 4])
        second = swarm.owner("another", every=3)
        await second.resume(4, await first.final_states())
        await second.run(6, batches_of, losses)
        losses.check(wanted)
        await check_states(second, states)


async def test_a_job_that_all_refuse_ends_at_once(
    autojump_clock: MockClock, source: ModelSource, tmp_path: Path
) -> None:
    async with open_job_swarm(source, tmp_path, (0, 4)) as swarm:
        await swarm.train("a", 4, 8, TrainingTerms(refuses=lambda owner: "it trains for members it trusts only"))

        async def routes(avoid: frozenset[str]) -> Route:
            if "a" in avoid:
                raise NoRoute(4, " for this job", peers=["a"])
            return await swarm.route(avoid)

        owner = swarm.owner(routes=routes, patience=Patience())
        begun = trio.current_time()
        with pytest.raises(TrainingStopped, match="it trains for members it trusts only"):
            await owner.run(2, batches_of, Losses())
        assert trio.current_time() - begun < 5


async def test_a_job_beyond_a_nodes_limits_is_refused_before_it_begins(source: ModelSource, tmp_path: Path) -> None:
    async with open_job_swarm(source, tmp_path) as swarm:
        await swarm.train("a", 0, 8, TrainingTerms(memory_bytes=1000))
        owner = swarm.owner(patience=replace(PATIENCE, route_s=0.0))
        with pytest.raises(TrainingStopped, match="of which 1000 are to spare") as stopped:
            await owner.run(1, batches_of, Losses())
        assert reason_of(stopped.value).code == "training_stopped"
        assert owner.figures.epochs == 2  # with two micro-batches under way, and with one


async def test_a_node_trains_no_more_jobs_than_it_wants(source: ModelSource, alone: Alone, tmp_path: Path) -> None:
    wanted, _ = alone(2)
    async with open_job_swarm(source, tmp_path, (0, 8)) as swarm:
        patient = replace(PATIENCE, route_s=60.0)
        first, second = swarm.owner("first", patience=patient), swarm.owner("second", patience=patient)
        losses = Losses(), Losses()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(first.run, 2, batches_of, losses[0])
            nursery.start_soon(second.run, 2, batches_of, losses[1])
        for one in losses:
            one.check(wanted)
        assert any("raise `train_jobs`" in why for why in (*first.figures.lost, *second.figures.lost))


async def test_hops_keep_the_states_of_two_versions_at_most(source: ModelSource, tmp_path: Path) -> None:
    def count() -> None:
        for name in ("n0", "n1", "n2"):
            states = [file for file in (tmp_path / name / "parts").iterdir() if not file.suffix]
            assert len(states) <= 2 * 8, name

    async with open_job_swarm(source, tmp_path, *SPLITS) as swarm:
        losses = Losses({version: count for version in (3, 4, 5)})
        await swarm.owner(every=1).run(5, batches_of, losses)
        assert len(losses.steps) == 5


async def test_training_gives_way_to_replies_at_every_block(source: ModelSource, tmp_path: Path) -> None:
    async with open_job_swarm(source, tmp_path, (0, 8)) as swarm:
        await swarm.owner().run(1, batches_of, Losses())
        device = swarm.nodes["n0"].device
        assert device.now == 0
        assert device.later >= 2 * len(batches_of(0)) * 8  # each block of each pass is a call of its own


async def test_nothing_of_a_finished_job_is_left(source: ModelSource, tmp_path: Path) -> None:
    async with open_job_swarm(source, tmp_path, *SPLITS) as swarm:
        owner = swarm.owner(every=1)
        await owner.run(2, batches_of, Losses())
        await owner.close()
        with trio.fail_after(30):
            for node in swarm.nodes.values():
                await node.server.no_jobs()
        assert not [file for file in tmp_path.glob("*/parts/*")]  # noqa: ASYNC240


async def test_blocks_that_are_not_hosted_any_more_end_the_job_here(
    source: ModelSource, alone: Alone, tmp_path: Path
) -> None:
    wanted, _ = alone(3)
    async with open_job_swarm(source, tmp_path, *SPLITS) as swarm:
        await swarm.train("spare", 0, 8)
        losses = Losses({1: lambda: swarm.nursery.start_soon(swarm.nodes["n2"].server.host, None)})
        owner = swarm.owner(every=1)
        await owner.run(3, batches_of, losses)
        losses.check(wanted)
        assert "does not host" in owner.figures.lost[0]
