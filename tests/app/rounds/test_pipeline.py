"""Islands of several machines on the in-memory network: the numbers of one process, whichever hop dies."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from trio.testing import MockClock

from app.core.pieces import at_once
from app.core.span import Span
from app.rounds.machines import Helpers, machine_routes
from app.rounds.steps import PipelineSteps
from app.routing.route import Hop, NoRoute, Route
from app.training.hop import TrainingServer, TrainingTerms
from app.training.states import StateStore
from app.training.trainer import MAX_FAILURES
from app.training.wire import ROOM, JobOrder
from engine.errors import EngineError, TrainingError, TrainingFull
from engine.full_runner import FullRunner
from engine.island import IslandTerms, PipelineModel
from engine.sources.hf_config import parse_config
from engine.training.full import FullModel
from engine.training.optimiser import AdamW, Muon, Schedule
from engine.training.outer import Nesterov
from engine.training.parameters import drawn_model, joined, part_weights
from tests.app.hash_model import InlineDevice
from tests.app.rounds.island_swarm import (
    CONFIG,
    CPU,
    PATIENCE,
    IslandSwarm,
    Lesson,
    Node,
    Text,
    in_place,
    members_of,
    open_islands,
)

FOUR = replace(CONFIG, n_blocks=4)
STEP_S = 0.5  # of islands of one machine: a step through several takes many trips


class Maker:
    """Makes full blocks in float32 on the CPU, and lets tests change them."""

    def __init__(self) -> None:
        self.changes: list[Any] = []
        self.made: list[FullRunner] = []

    def room(self, spare_bytes: int) -> int:
        return spare_bytes

    def release(self) -> None:
        pass

    def make(self, order: JobOrder, spare_bytes: int) -> FullRunner:
        blocks = FullRunner(
            parse_config(dict(order.shape or {}), "the order", {}), (order.span.start, order.span.stop), CPU,
            optimiser=AdamW(weight_decay=order.weight_decay), rows=order.rows, under_way=order.under_way,
            usable_bytes=spare_bytes,
        )  # fmt: skip
        for change in self.changes:
            change(blocks)
        self.made.append(blocks)
        return blocks


@dataclass
class Machine:
    """A node that gives memory and time to an island of somebody else."""

    name: str
    span: Span
    server: TrainingServer
    maker: Maker
    states: StateStore
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)


class Machines:
    """The machines of an island, and the routes through them."""

    def __init__(self, swarm: IslandSwarm, folder: Path, nursery: trio.Nursery) -> None:
        self._swarm, self._folder, self._nursery = swarm, folder, nursery
        self.alive: dict[str, Machine] = {}

    async def add(
        self, name: str, start: int, stop: int, terms: TrainingTerms | None = None, device: InlineDevice | None = None
    ) -> Machine:
        network = self._swarm.fabric.node(name)
        states = StateStore(network, self._folder / name, lambda peer: True, in_place)
        maker = Maker()
        server = TrainingServer(network, device or InlineDevice(), states, lambda: terms or TrainingTerms(), maker)
        machine = Machine(name, Span(start, stop), server, maker, states)

        async def run(*, task_status: Any) -> None:
            with machine.scope:
                await server.run(task_status=task_status)

        await self._nursery.start(run)
        self.alive[name] = machine
        return machine

    def kill(self, name: str) -> None:
        self._swarm.fabric.kill(name)
        self.alive.pop(name).scope.cancel()

    def kill_within(self, name: str, method: str, call: int) -> None:
        """Crash a machine in a call of a method of its blocks, from 1."""
        calls = 0

        def change(blocks: Any) -> None:
            function = getattr(blocks, method)

            def dying(*args: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == call:
                    self.kill(name)
                return function(*args)

            setattr(blocks, method, dying)

        self.alive[name].maker.changes.append(change)

    async def route(self, avoid: frozenset[str]) -> Route:
        """The first machines, by name, that follow each other."""
        hops: list[Hop] = []
        while (block := hops[-1].span.stop if hops else 0) < FOUR.n_blocks:
            usable = [one for name, one in sorted(self.alive.items()) if name not in avoid and block in one.span]
            if not usable:
                raise NoRoute(block)
            hops.append(Hop(usable[0].name, Span(block, usable[0].span.stop)))
        return tuple(hops)


def lesson(**changes: Any) -> Lesson:
    config = replace(FOUR, **changes)
    return Lesson(config, drawn_model(config, 1), Text(16))


async def of_one_machine(folder: Path, **terms: Any) -> Node:
    """An island that is founded and finished on one machine."""
    async with open_islands(folder / "one", 0, lesson=terms.pop("lesson", None) or lesson(), **terms) as swarm:
        await swarm.finished(0)
        return swarm.nodes[0]


@asynccontextmanager
async def open_pipeline(
    folder: Path, *spans: tuple[int, int], islands: tuple[int, ...] = (), **terms: Any
) -> AsyncIterator[tuple[IslandSwarm, Machines]]:
    """A swarm whose founder is an island of machines with these blocks; the other islands have one machine each."""
    async with open_islands(folder / "islands", lesson=terms.pop("lesson", None) or lesson(), **terms) as swarm:
        async with trio.open_nursery() as nursery:
            machines = Machines(swarm, folder, nursery)
            for index, (start, stop) in enumerate(spans):
                await machines.add(f"hop{index}", start, stop)
            swarm.add(0, routes=machines.route)
            for number in islands:
                swarm.add(number, step_s=STEP_S)
            yield swarm, machines
            nursery.cancel_scope.cancel()


def steps_of(node: Node) -> PipelineSteps:
    steps = node.island._steps
    assert isinstance(steps, PipelineSteps)
    return steps


async def test_an_island_of_two_machines_is_one_process_bit_for_bit(tmp_path: Path, patient_clock: MockClock) -> None:
    alone = await of_one_machine(tmp_path)
    async with open_pipeline(tmp_path, (0, 1), (1, 4)) as (swarm, _):
        await swarm.finished(0)
        node = swarm.nodes[0]
        assert node.island.figures.losses == alone.island.figures.losses
        assert node.island.standing.root == alone.island.standing.root
        assert [hop.span for hop in steps_of(node).route] == [Span(0, 1), Span(1, 4)]
        # the loss after the last round is not measured, as no round follows it
        validated, wanted = node.island.figures.validation, alone.island.figures.validation
        assert [step for step, _ in validated] == [step for step, _ in wanted[:-1]]
        assert [loss for _, loss in validated] == pytest.approx([loss for _, loss in wanted[:-1]], rel=1e-6)


async def test_several_micro_batches_follow_each_other_through_the_machines(
    tmp_path: Path, patient_clock: MockClock
) -> None:
    many: dict[str, Any] = {"batch": 40, "steps": 10}  # of 16 tokens: three micro-batches of 256 rows
    alone = await of_one_machine(tmp_path, **many)
    async with open_pipeline(tmp_path, (0, 1), (1, 3), (3, 4), **many) as (swarm, _):
        await swarm.finished(0)
        node = swarm.nodes[0]
        assert node.island.figures.losses == alone.island.figures.losses
        assert node.island.standing.root == alone.island.standing.root
        figures = steps_of(node).trainer.figures
        assert figures.computed["hop1"] == 3 * 10 + 1  # and the text to validate with, before the second round
        assert figures.micro_batches_again == 0


async def test_with_a_tied_head_losses_differ_by_rounding_alone(tmp_path: Path, patient_clock: MockClock) -> None:
    tied: dict[str, Any] = {"lesson": lesson(tied_embeddings=True), "batch": 40, "steps": 10}
    alone = await of_one_machine(tmp_path, **tied)
    async with open_pipeline(tmp_path, (0, 2), (2, 4), **tied) as (swarm, _):
        await swarm.finished(0)
        # both ends add to one matrix, in another order than in one process
        assert swarm.nodes[0].island.figures.losses == pytest.approx(alone.island.figures.losses, rel=1e-4)


async def test_it_takes_part_in_rounds_with_islands_of_one_machine(tmp_path: Path, patient_clock: MockClock) -> None:
    async with open_pipeline(tmp_path, (0, 2), (2, 4), islands=(1, 2)) as (swarm, _):
        await swarm.finished(0, 1, 2)
        log = swarm.nodes[0].island.log
        assert members_of(log)[-1] == 3
        assert not any(entry.doubted for entry in log)
        # it neither tests changes nor gives moments away, and that hurts nobody
        assert all(not one.tested for entry in log for one in entry.results if one.peer == swarm.nodes[0].name)


@pytest.mark.parametrize(
    ("method", "call"),
    [
        ("forward", 9),
        *(pytest.param(*one, marks=pytest.mark.soak) for one in (("backward", 14), ("step", 3), ("commit", 7))),
        ("state", 1),
    ],
)
async def test_a_hop_that_dies_changes_no_loss(
    tmp_path: Path, method: str, call: int, patient_clock: MockClock
) -> None:
    alone = await of_one_machine(tmp_path, steps=15)
    async with open_pipeline(tmp_path, (0, 2), (2, 4), (1, 4), steps=15) as (swarm, machines):
        machines.kill_within("hop1", method, call)
        await swarm.finished(0)
        assert "hop1" not in machines.alive
        node = swarm.nodes[0]
        assert node.island.figures.losses == alone.island.figures.losses
        assert node.island.standing.root == alone.island.standing.root
        assert [hop.peer for hop in steps_of(node).route] == ["hop0", "hop2"]


class SlowLoading(InlineDevice):
    """A device that takes nearly as long to load states as an owner waits."""

    async def run_later(self, function: Any, *args: Any) -> Any:
        if function.__name__ == "load":
            await trio.sleep(PATIENCE.stuck_s - 10)
        return await self.run(function, *args)


async def test_a_hop_that_takes_long_to_load_its_states_is_used(tmp_path: Path, patient_clock: MockClock) -> None:
    async with open_pipeline(tmp_path, (0, 2), steps=5) as (swarm, machines):
        await machines.add("hop1", 2, 4, device=SlowLoading())
        await swarm.finished(0)
        node = swarm.nodes[0]
        assert node.failure is None
        assert [hop.peer for hop in steps_of(node).route] == ["hop0", "hop1"]


async def test_without_its_machines_an_island_waits_and_the_others_go_on(
    tmp_path: Path, patient_clock: MockClock
) -> None:
    async with open_pipeline(tmp_path, (0, 2), (2, 4), islands=(1, 2), steps=35) as (swarm, machines):
        first = swarm.nodes[1].island
        await swarm.until(lambda: len(first.standing.members) == 3)
        machines.kill("hop1")
        before = first.standing.round
        await swarm.until(lambda: first.standing.round >= before + 2)
        await machines.add("hop3", 2, 4)
        await swarm.finished(0, 1, 2)
        assert members_of(first.log)[-1] == 3


async def test_a_machine_without_which_no_step_can_be_made_is_used_again_at_once(
    tmp_path: Path, patient_clock: MockClock
) -> None:
    """Its stream breaks for a moment in each of six rounds; each machine has room for half of the blocks."""
    async with (
        open_islands(tmp_path / "islands", lesson=lesson(), steps=35) as swarm,
        trio.open_nursery() as nursery,
    ):
        machines, names, broken_in = Machines(swarm, tmp_path, nursery), ("hop0", "hop1"), set[int]()
        for name in names:
            await machines.add(name, 0, 4)
            swarm.fabric.nodes[name].serve(ROOM, _two_blocks)
        node = swarm.add(0, routes=lambda avoid: find(avoid))
        helpers = Helpers(swarm.fabric.nodes[node.name], lambda: names, _nothing, _nowhere)
        find = machine_routes(helpers, FOUR.n_blocks, lambda blocks, under_way: blocks)

        def breaks_in_a_step(blocks: Any) -> None:
            step, number = blocks.step, node.island.standing.round

            def broken(*args: Any) -> None:
                if number < 6 and number not in broken_in:
                    broken_in.add(number)
                    swarm.fabric.unlink(node.name, "hop1", tell=(node.name, "hop1"))
                step(*args)

            blocks.step = broken

        machines.alive["hop1"].maker.changes.append(breaks_in_a_step)
        await swarm.finished(0, within_s=60)
        assert len(broken_in) == 6
        assert len(steps_of(node).trainer.figures.lost) >= 6
        nursery.cancel_scope.cancel()


async def _two_blocks(peer: str, body: bytes) -> bytes:
    return b'{"bytes":2}'


async def _nothing() -> int:
    return 0


async def _nowhere(stream: Any) -> None:
    raise AssertionError("nobody trains here")


async def test_a_hop_whose_weights_cannot_be_used_is_left_out(tmp_path: Path, patient_clock: MockClock) -> None:
    alone = await of_one_machine(tmp_path)
    async with open_pipeline(tmp_path, (0, 2), (2, 4), (2, 4)) as (swarm, machines):

        def spoil(blocks: Any) -> None:
            honest = blocks.state
            blocks.state = lambda block: honest(block)[:-8] + b"\xff" * 8 if block == 3 else _nan(honest(block))

        machines.alive["hop1"].maker.changes.append(spoil)
        await swarm.finished(0)
        node = swarm.nodes[0]
        assert steps_of(node).trainer.figures.left_out.keys() == {"hop1"}
        assert [hop.peer for hop in steps_of(node).route] == ["hop0", "hop2"]
        # the first round was made again from its beginning
        assert node.island.figures.losses[5:] == alone.island.figures.losses
        assert node.island.standing.root == alone.island.standing.root


def _nan(state: bytes) -> bytes:
    return state[:24] + b"\xff" * 4 + state[28:]


@pytest.mark.parametrize(
    "what",
    [
        "weights",
        *(pytest.param(what, marks=pytest.mark.soak) for what in ("first moments", "second moments", "steps")),
        "no moments",
    ],
)
async def test_a_hop_whose_state_would_stop_its_owner_or_the_next_hop_is_left_out(
    tmp_path: Path, what: str, patient_clock: MockClock
) -> None:
    async with open_pipeline(tmp_path, (0, 2), (2, 4), (2, 4), steps=15) as (swarm, machines):

        def spoil(blocks: Any) -> None:
            honest = blocks.state
            blocks.state = lambda block: spoiled(honest(block), what)

        machines.alive["hop1"].maker.changes.append(spoil)
        await swarm.finished(0)
        node = swarm.nodes[0]
        assert node.failure is None
        assert steps_of(node).trainer.figures.left_out.keys() == {"hop1"}
        assert [hop.peer for hop in steps_of(node).route] == ["hop0", "hop2"]


def spoiled(state: bytes, what: str) -> bytes:
    """The state of a block with numbers that are finite, and that nothing can go on with."""
    count, head = part_weights(FOUR, "block.2"), 16 + 8
    values = torch.frombuffer(bytearray(state[head:]), dtype=torch.float32)
    steps = int.from_bytes(state[16:head], "little")
    if what == "weights":
        values[0] = 1e30  # no change with it can be sent
    elif what == "first moments":
        values[count] = 1e20
    elif what == "second moments":
        values[2 * count :] = 0  # moves weights by millions of times the rate
    elif what == "no moments":
        values = values[:count]
    else:
        steps += 1  # the other blocks' states are of other steps
    return state[:16] + steps.to_bytes(8, "little") + values.numpy().tobytes()


async def test_machines_that_let_no_step_be_made_do_not_end_an_islands_part(
    tmp_path: Path, patient_clock: MockClock
) -> None:
    async with open_pipeline(tmp_path, (0, 2), (2, 4), (2, 4), steps=10) as (swarm, machines):

        def refuse(blocks: Any) -> None:
            def failing(*args: Any) -> Any:
                raise TrainingError("not here")

            blocks.forward = failing

        for name in ("hop1", "hop2"):
            machines.alive[name].maker.changes.append(refuse)
        await swarm.until(lambda: steps_of(swarm.nodes[0]).trainer.figures.epochs > MAX_FAILURES + 2)
        await machines.add("hop00", 2, 4)  # before the others in the order of names
        await swarm.finished(0)
        assert swarm.nodes[0].failure is None


@pytest.mark.parametrize(
    "terms",
    [TrainingTerms(refuses=lambda owner: "not for strangers"), TrainingTerms(memory_bytes=1000), TrainingTerms(jobs=0)],
    ids=["refuses", "memory", "jobs"],
)
async def test_a_machine_keeps_to_what_its_user_allows(
    tmp_path: Path, terms: TrainingTerms, patient_clock: MockClock
) -> None:
    async with open_pipeline(tmp_path, (0, 2), steps=10) as (swarm, machines):
        unwilling = await machines.add("hop1", 2, 4, terms)
        await machines.add("hop2", 2, 4)
        await swarm.finished(0)
        assert not unwilling.maker.made
        assert [hop.peer for hop in steps_of(swarm.nodes[0]).route] == ["hop0", "hop2"]


async def test_nothing_of_an_island_is_left_at_its_machines(tmp_path: Path, patient_clock: MockClock) -> None:
    async with open_pipeline(tmp_path, (0, 2), (2, 4), steps=10) as (swarm, machines):
        await swarm.finished(0)
        for machine in machines.alive.values():
            await machine.server.no_jobs()
            assert not machine.states._runs
        await steps_of(swarm.nodes[0]).close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimiser", [AdamW(weight_decay=0.1), Muon(weight_decay=0.1)])
def test_blocks_and_ends_make_the_steps_of_a_whole_model(optimiser: AdamW | Muon, dtype: torch.dtype) -> None:
    vectors, options = drawn_model(FOUR, 1), replace(CPU, dtype=dtype)
    alone = FullModel(FOUR, vectors, options, optimiser=optimiser, graph_bytes=0)
    owner = PipelineModel(FOUR, vectors, options, terms_of(optimiser))
    runner = FullRunner(FOUR, (0, 4), options, optimiser=optimiser, rows=64, under_way=2, usable_bytes=2**40)
    runner.load({block: owner.first_state(block) for block in range(4)})
    text, schedule = Text(16), Schedule(1e-2, 100)
    for step in range(3):
        batches = owner.batches([text.sequence(10 * step + at) for at in range(8)])
        assert len(batches) == 2
        wanted = at_once(alone.step(batches, schedule, step, 1.0))
        total = sum(run_batch(owner, runner, batch, number) for number, batch in enumerate(batches))
        run_batch(owner, runner, batches[0], 0, counts=False)  # once more, which changes nothing
        tokens = sum(batch.counted for batch in batches)
        norm = math.sqrt(math.fsum([*runner.squared_norms(), *owner.ends.squared_norms()])) / tokens
        assert total / tokens == wanted.loss
        assert norm == pytest.approx(wanted.norm, rel=1e-12)
        clip = min(1.0, 1.0 / (wanted.norm + 1e-6))
        runner.step(schedule.at(step), 1 / tokens, clip)
        runner.commit()
        owner.ends.step(schedule.at(step), 1 / tokens, clip)
    for block in range(4):
        owner.gather(block, runner.state(block), 3)
    assert torch.equal(owner._own(), joined(FOUR, alone.vectors()))
    # a block goes on with the moments that it has
    renewed = owner.renewed(1, runner.state(1))
    assert renewed != runner.state(1)
    assert (
        renewed[24 + 4 * part_weights(FOUR, "block.1") :] == runner.state(1)[24 + 4 * part_weights(FOUR, "block.1") :]
    )


def terms_of(optimiser: AdamW | Muon) -> IslandTerms:
    return IslandTerms(Schedule(1e-2, 100), 1.0, optimiser, Nesterov(), "int8", True, rows=64)


def run_batch(owner: PipelineModel, runner: FullRunner, batch: Any, number: int, *, counts: bool = True) -> float:
    """One micro-batch through all blocks and back."""
    ends, sequences = owner.ends, batch.token_ids.shape[0]
    rows = runner.rows(memoryview(ends.embed(batch, "f32")), "f32")
    for block in range(4):
        rows = runner.forward(block, number, rows, sequences)
    hidden = memoryview(runner.data(rows, "f32"))
    found = at_once(ends.loss(batch, hidden, "f32", gradient=True, number=number, wire="f32"))
    gradient = runner.rows(memoryview(found.gradient), "f32")
    for block in reversed(range(4)):
        gradient = runner.backward(block, number, gradient, counts)
    ends.back(batch, number, memoryview(runner.data(gradient, "f32")), "f32")
    return found.total


@pytest.mark.parametrize("muon", [False, True])
def test_a_runner_refuses_what_does_not_fit(muon: bool) -> None:
    kind: Any = Muon if muon else AdamW
    terms: dict[str, Any] = {"optimiser": kind(), "rows": 64, "under_way": 2}
    with pytest.raises(TrainingFull):
        FullRunner(FOUR, (0, 2), CPU, **terms, usable_bytes=1000)
    with pytest.raises(TrainingError):
        FullRunner(FOUR, (3, 5), CPU, **terms, usable_bytes=2**40)
    runner = FullRunner(FOUR, (1, 3), CPU, **terms, usable_bytes=2**40)
    right = {block: runner.state(block) for block in (1, 2)}
    runner.load(right)
    for wrong in (b"", right[1][:-4], b"x" * len(right[1]), _nan(right[1]), right[1][:-4] + b"\0\0\x80\xbf"):
        with pytest.raises(EngineError):
            runner.load({**right, 1: wrong})
    rows = torch.ones(8, FOUR.hidden_size)
    with pytest.raises(TrainingError):
        runner.backward(1, 0, rows, True)
    with pytest.raises(EngineError):
        runner.forward(1, 0, rows * float("nan"), 1)
    with pytest.raises(TrainingError):
        runner.forward(1, 0, rows, 3)
    with pytest.raises(TrainingError):
        runner.commit()
