"""Islands over slow links: changes and states that take longer than a minute are exchanged all the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from app.core.network import Payload
from app.rounds import wire
from app.rounds.island import Island, RoundTiming
from engine.config import ModelConfig, Rope
from engine.training.parameters import model_weights
from p2p.errors import RemoteError
from p2p.memory.fabric import LinkProfile
from tests.app.rounds.island_swarm import Lesson, members_of, open_islands, plain_lesson

# A tenth of the starter model, and a fortieth, so that tests do not compute for long.
SHAPE = ModelConfig(
    family="llama", n_blocks=13, hidden_size=256, n_heads=4, n_kv_heads=4, head_dim=64, intermediate_size=1024,
    vocab_size=260, context_length=64, norm_eps=1e-5, rope=Rope(), tied_embeddings=True,
)  # fmt: skip
NARROW = replace(SHAPE, hidden_size=128, n_heads=2, n_kv_heads=2, intermediate_size=512)
TIMING = RoundTiming()
SLOW = LinkProfile(0.03, bytes_per_s=150e3)


def blocks_to_learn(blocks: int, shape: ModelConfig = SHAPE) -> Lesson:
    """As many plain numbers as a model of so many blocks has."""
    return plain_lesson(replace(shape, n_blocks=blocks))


def bounds(every: int) -> dict[str, Any]:
    """A job that does not end, with rounds of so many steps or up to ten times as many."""
    return {"every": every, "least_every": every, "most_every": 10 * every, "steps": 10**6, "batch": 1, "rate": 1e-3}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("blocks", "every", "timing"),
    [(1, 6, replace(TIMING, exchange_s=4.0)), pytest.param(13, 60, TIMING, marks=pytest.mark.soak)],
)
async def test_islands_whose_changes_take_longer_than_the_least_time_make_rounds_together(
    tmp_path: Path, patient_clock: MockClock, blocks: int, every: int, timing: RoundTiming
) -> None:
    """A minute and a half for 13 blocks, which is no burden in 20; the starter model takes as long over 12 Mbit/s."""
    lesson = blocks_to_learn(blocks)
    assert model_weights(lesson.config) / SLOW.bytes_per_s > 1.4 * timing.exchange_s
    async with open_islands(
        tmp_path, 0, 1, lesson=lesson, profile=SLOW, timing=timing, step_s=20.0, wire="int8", **bounds(every)
    ) as swarm:
        islands = [node.island for node in swarm.nodes.values()]
        await swarm.until(lambda: members_of(islands[0].log).count(2) >= 2, within_s=5 * 3600)


@pytest.mark.soak
async def test_members_that_are_done_wait_for_one_that_is_not(tmp_path: Path, patient_clock: MockClock) -> None:
    """They waited for its result for `lead_s` only; its line is slower downwards than upwards."""
    timing = replace(TIMING, lead_s=1.0)
    async with open_islands(
        tmp_path, 0, 1, 2, lesson=blocks_to_learn(1), timing=timing, step_s=20.0, wire="int8", **bounds(4)
    ) as swarm:
        slow = swarm.nodes[0].name

        def answer_late(island: Island) -> None:
            async def merged(peer: str, body: bytes) -> Payload:
                _, rest = wire.read_request(body)
                if peer == slow:
                    await trio.sleep(3.0)
                return await island.answer(wire.MERGED, peer, rest)

            swarm.fabric.nodes[island.peer].serve(wire.MERGED, merged)

        for number in (1, 2):
            answer_late(swarm.nodes[number].island)
        first = swarm.nodes[0].island
        await swarm.until(lambda: first.standing.round >= 4, within_s=5 * 3600)
        assert members_of(first.log).count(3) >= 2, members_of(first.log)
        assert not any(node.island.figures.repeated for node in swarm.nodes.values())


@pytest.mark.parametrize("every", [3, 20])
async def test_who_delays_an_exchange_costs_a_minute_and_as_long_as_the_steps_took(
    tmp_path: Path, patient_clock: MockClock, every: int
) -> None:
    async with open_islands(
        tmp_path, 0, 1, timing=TIMING, step_s=5.0, **{**bounds(every), "most_every": every}
    ) as swarm:
        first, other = swarm.nodes[0].island, swarm.nodes[1]
        await swarm.until(lambda: members_of(first.log).count(2) >= 1)

        async def never(peer: str, body: bytes) -> Any:
            raise RemoteError("the share is not merged yet", wire.NOT_YET)

        swarm.fabric.nodes[other.name].serve(wire.SHARE, never)
        swarm.fabric.nodes[other.name].serve(wire.MERGED, never)
        rounds = first.standing.round + 1
        await swarm.until(lambda: first.standing.round >= rounds)
        began = trio.current_time()
        await swarm.until(lambda: first.standing.round >= rounds + 4, within_s=3600)
        steps_s = every * 5.0
        most_s = 2 * steps_s + TIMING.exchange_s + TIMING.grace_most_s + TIMING.quorum_s + 2 * TIMING.lead_s
        assert trio.current_time() - began < 4 * most_s


@pytest.mark.soak
async def test_after_an_exchange_that_took_too_long_rounds_are_longer_and_numbers_smaller(
    tmp_path: Path, patient_clock: MockClock
) -> None:
    """Otherwise islands that make their steps fast would fail in every round."""
    timing = replace(TIMING, exchange_s=5.0)
    async with open_islands(
        tmp_path, 0, 1, lesson=blocks_to_learn(1), timing=timing, step_s=0.5, wire="auto", **bounds(4)
    ) as swarm:
        first, names = swarm.nodes[0].island, [node.name for node in swarm.nodes.values()]
        await swarm.until(lambda: members_of(first.log).count(2) >= 1)
        swarm.fabric.set_link(names[0], names[1], SLOW)
        rounds = len(first.log)
        await swarm.until(lambda: len(first.log) > rounds, within_s=3600)
        assert members_of(first.log)[rounds:] == [1]
        assert first.standing.codec == "int4"
        assert first.standing.every > 4
        await swarm.until(lambda: members_of(first.log)[rounds:].count(2) >= 2, within_s=3600)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("blocks", "speed"), [(1, 75e3), pytest.param(4, 312.5e3, marks=pytest.mark.soak)])
async def test_a_newcomer_comes_in_though_the_state_takes_longer_than_two_rounds(
    tmp_path: Path, patient_clock: MockClock, blocks: int, speed: float
) -> None:
    """Four rounds, as for the starter model over 130 Mbit/s, where the founder makes fifty steps in 17 s.

    The founder keeps the state for as long as it is fetched, and the changes with which the newcomer catches up.
    """
    lesson, profile = blocks_to_learn(blocks, NARROW), LinkProfile(0.03, bytes_per_s=speed)
    step_s = 8 * model_weights(lesson.config) / speed / 4 / 5
    async with open_islands(
        tmp_path, 0, lesson=lesson, profile=profile, timing=TIMING, step_s=step_s, wire="auto", **bounds(5)
    ) as swarm:
        founder = swarm.nodes[0].island
        await swarm.until(lambda: founder.standing.round >= 2)
        newcomer = swarm.add(1, step_s=step_s, has_model=False).island
        await swarm.until(lambda: founder.standing.step >= 400 or newcomer.figures.steps > 0, within_s=3600)
        assert newcomer.figures.steps > 0, (founder.standing.round, newcomer.figures)
        assert newcomer.figures.fetched == 1
