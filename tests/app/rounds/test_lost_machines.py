"""Islands of several machines that lose some of them within a round, or all of them for long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trio.testing import MockClock

from app.rounds.steps import PipelineSteps
from app.training.trainer import MAX_FAILURES
from engine.errors import TrainingError
from tests.app.rounds.island_swarm import IslandSwarm, Node
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

        def fails_at_times(blocks: Any) -> None:
            forward = blocks.forward

            def failing(*args: Any) -> Any:
                if is_broken:
                    raise TrainingError("not here")
                return forward(*args)

            blocks.forward = failing

        machines.alive["hop2"].maker.changes.append(fails_at_times)
        node, steps = await lose_one_within_a_round(swarm, machines, "hop1")
        is_broken, epochs = True, steps.trainer.figures.epochs
        await swarm.until(lambda: steps.trainer.figures.epochs >= epochs + MAX_FAILURES + 3)
        is_broken = False
        await swarm.finished(0)
        assert node.island.standing.root == alone.island.standing.root
        await node.island.close()
        assert not any(run.startswith((b"owner", b"round")) for runs in steps._states._runs.values() for run in runs)
