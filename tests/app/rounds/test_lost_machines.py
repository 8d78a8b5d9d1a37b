"""Islands of several machines that lose some of them within a round, or all of them for long."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from app.rounds import steps as steps_module
from app.rounds.steps import PipelineSteps
from app.rounds.train_jobs import figures_of
from app.training.trainer import MAX_FAILURES, TrainingStopped
from engine.errors import TrainingError
from tests.app.rounds import island_swarm
from tests.app.rounds.island_swarm import PATIENCE, IslandSwarm, Node
from tests.app.rounds.test_pipeline import Machines, of_one_machine, open_pipeline, steps_of

LONG: dict[str, Any] = {"every": 12, "least_every": 12, "most_every": 12, "steps": 48}  # rounds of twelve steps


async def lose_one_within_a_round(swarm: IslandSwarm, machines: Machines, name: str) -> tuple[Node, PipelineSteps]:
    """Kill a machine after four steps of the second round, and wait for a snapshot before the round is over."""
    node = swarm.nodes[0]
    steps = steps_of(node)
    await swarm.until(lambda: node.island.standing.round == 1 and steps.trainer.version >= steps._begun[0] + 4)
    first, made = steps._begun[0], steps.trainer.version
    assert first + 4 <= made < first + 12
    machines.kill(name)
    await swarm.until(lambda: steps.trainer.snapshot.version > first)
    assert steps.trainer.snapshot.version < first + 12
    return node, steps


def moments(ends: list[bytes]) -> list[bytes]:
    """Steps and moments of the ends, without their weights."""
    return [state[16:24] + state[24 + (len(state) - 24) // 3 :] for state in ends]


def fails_while(machines: Machines, name: str, condition: Callable[[], bool]) -> None:
    """Let a machine's blocks compute nothing while a condition holds."""

    def change(blocks: Any) -> None:
        forward = blocks.forward

        def failing(*args: Any) -> Any:
            if condition():
                raise TrainingError("not here")
            return forward(*args)

        blocks.forward = failing

    machines.alive[name].maker.changes.append(change)


def waiting(node: Node) -> str:
    """What `shoal jobs` says that an island waits for."""
    said: str = figures_of(node.island, "running")["waiting"]
    return said


async def test_an_island_that_lost_two_machines_in_a_round_goes_on_after_the_others_have_finished_it(
    tmp_path: Path, patient_clock: MockClock
) -> None:
    spans = ((0, 2), (2, 4), (2, 4))
    async with open_pipeline(tmp_path, *spans, islands=(1, 2), **LONG) as (swarm, machines):
        begun: list[bytes] = []
        node = swarm.nodes[0]
        make, model = steps_of(node).make, steps_of(node)._model

        async def watched(task: Any) -> bool:
            before = moments(model.ends.kept)
            counts = await make(task)
            if not counts:
                begun[:] = before
                assert moments(model.ends.kept) == before
                model.ends.keep()  # weights and moments as they are now
                assert moments(model.ends.kept) == before
            return counts

        steps_of(node).make = watched  # type: ignore[method-assign]
        await lose_one_within_a_round(swarm, machines, "hop1")
        machines.kill("hop2")
        others = swarm.nodes[1].island
        before = others.standing.round
        await swarm.until(lambda: others.standing.round >= before + 2)
        assert begun
        await machines.add("hop3", 2, 4)
        await swarm.finished(0, 1, 2)


async def test_a_round_begins_again_with_its_states_though_a_snapshot_was_taken_within_it(
    tmp_path: Path, patient_clock: MockClock
) -> None:
    alone = await of_one_machine(tmp_path, **LONG)
    async with open_pipeline(tmp_path, (0, 2), (2, 4), (2, 4), **LONG) as (swarm, machines):
        is_broken = False
        fails_while(machines, "hop2", lambda: is_broken)
        node, steps = await lose_one_within_a_round(swarm, machines, "hop1")
        is_broken, epochs = True, steps.trainer.figures.epochs
        await swarm.until(lambda: steps.trainer.figures.epochs >= epochs + MAX_FAILURES + 3)
        is_broken = False
        await swarm.finished(0)
        assert node.island.standing.root == alone.island.standing.root
        await node.island.close()
        assert not any(run.startswith((b"owner", b"round")) for runs in steps._states._runs.values() for run in runs)


# --- for long ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route_s", [60.0, math.inf])
async def test_an_island_waits_for_its_machines_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patient_clock: MockClock, route_s: float
) -> None:
    """They are switched off at night, and longer at the weekend."""
    monkeypatch.setattr(island_swarm, "PATIENCE", replace(PATIENCE, route_s=route_s))
    async with open_pipeline(tmp_path, (0, 2), (2, 4), steps=15) as (swarm, machines):
        node = swarm.nodes[0]
        await swarm.until(lambda: node.island.standing.round >= 1)
        assert waiting(node) == ""
        machines.kill("hop1")
        await trio.sleep(1800)
        assert (node.failure, node.ended.is_set()) == (None, False)
        assert waiting(node).startswith("waits for machines: ")
        await machines.add("hop3", 2, 4)
        await swarm.finished(0)
        assert waiting(node) == ""


@pytest.mark.parametrize("route_s", [60.0, math.inf])
async def test_an_island_that_waits_for_machines_is_left_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patient_clock: MockClock, route_s: float
) -> None:
    monkeypatch.setattr(island_swarm, "PATIENCE", replace(PATIENCE, route_s=route_s))
    async with open_pipeline(tmp_path, (0, 2)) as (swarm, _):
        node = swarm.nodes[0]
        await swarm.until(lambda: bool(waiting(node)))
        await trio.sleep(200)
        node.island.leave()
        with trio.fail_after(3):
            await node.ended.wait()
        assert node.failure is None


async def test_a_round_that_is_merely_long_is_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patient_clock: MockClock
) -> None:
    """Its steps take longer than an island goes on without any."""
    monkeypatch.setattr(island_swarm, "PATIENCE", replace(PATIENCE, route_s=5.0))
    monkeypatch.setattr(steps_module, "MOST_IN_VAIN", 1)
    async with open_pipeline(tmp_path, (0, 2), (2, 4), **LONG | {"steps": 24}) as (swarm, machines):
        node = swarm.nodes[0]
        steps = steps_of(node)
        broken_in, over = set[int](), set[int]()

        def is_broken() -> bool:
            """True within the fifth step of each round, until the round has begun again."""
            made, number = steps.trainer.version - steps._begun[0], node.island.standing.round
            if made >= 4 and steps.trainer.snapshot.version == steps._begun[0]:
                broken_in.add(number)
            if steps.waiting:
                over.update(broken_in)
            return number in broken_in - over

        fails_while(machines, "hop1", is_broken)
        await swarm.finished(0)
        assert broken_in == {0, 1}


async def test_an_island_whose_machines_make_no_step_ends_after_very_many_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patient_clock: MockClock
) -> None:
    monkeypatch.setattr(steps_module, "MOST_IN_VAIN", 2)
    async with open_pipeline(tmp_path, (0, 2), (2, 4)) as (swarm, machines):
        node = swarm.nodes[0]
        fails_while(machines, "hop1", lambda: True)
        await swarm.until(lambda: bool(waiting(node)))
        assert waiting(node).startswith("makes this round again: no step could be made in 13 attempts")
        with trio.fail_after(600):
            await node.ended.wait()
        assert isinstance(node.failure, TrainingStopped)
        assert steps_of(node).trainer.figures.epochs == 3 * (MAX_FAILURES + 1)
