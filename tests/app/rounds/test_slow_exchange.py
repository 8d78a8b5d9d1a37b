"""Islands over slow links: a change that takes longer than a minute is exchanged all the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from trio.testing import MockClock

from app.rounds.island import RoundTiming
from engine.config import ModelConfig, Rope
from engine.training.parameters import drawn_model, model_weights
from p2p.memory.fabric import LinkProfile
from tests.app.rounds.island_swarm import Lesson, Text, members_of, open_islands

# A tenth of the starter model, so that the test does not compute for long.
SHAPE = ModelConfig(
    family="llama", n_blocks=13, hidden_size=256, n_heads=4, n_kv_heads=4, head_dim=64, intermediate_size=1024,
    vocab_size=260, context_length=64, norm_eps=1e-5, rope=Rope(), tied_embeddings=True,
)  # fmt: skip
BYTES_PER_S = 150e3  # above what others accept of a link that a newcomer fetches the state over


@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_islands_whose_changes_take_90_s_make_rounds_together(tmp_path: Path, patient_clock: MockClock) -> None:
    """With a round of 20 minutes that is no burden; the starter model takes as long over 12 Mbit/s."""
    assert 85 < model_weights(SHAPE) / BYTES_PER_S < 95
    lesson, profile = Lesson(SHAPE, drawn_model(SHAPE, 1), Text()), LinkProfile(0.03, bytes_per_s=BYTES_PER_S)
    bounds = {"every": 60, "least_every": 60, "most_every": 600, "steps": 10**6, "batch": 1, "rate": 1e-3}
    async with open_islands(
        tmp_path, 0, 1, lesson=lesson, profile=profile, timing=RoundTiming(), step_s=20.0, wire="auto", **bounds
    ) as swarm:
        islands = [node.island for node in swarm.nodes.values()]
        await swarm.until(lambda: islands[0].standing.round >= 6, within_s=5 * 3600)
        made = members_of(islands[0].log)
        assert made.count(2) >= 2, (made, [island.figures for island in islands])


@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_a_newcomer_comes_in_though_the_state_takes_longer_than_two_rounds(
    tmp_path: Path, patient_clock: MockClock
) -> None:
    """Four rounds, as for the starter model over 130 Mbit/s, where the founder makes fifty steps in 17 s.

    The founder keeps the state of a round until the next but one is over, and the newcomer began anew each time.
    """
    shape, speed = replace(SHAPE, n_blocks=4), 1.25e6
    lesson, profile = Lesson(shape, drawn_model(shape, 1), Text()), LinkProfile(0.03, bytes_per_s=speed)
    step_s = 8 * model_weights(shape) / speed / 4 / 5
    bounds = {"every": 5, "least_every": 5, "most_every": 50, "steps": 10**6, "batch": 1, "rate": 1e-3}
    async with open_islands(
        tmp_path, 0, lesson=lesson, profile=profile, timing=RoundTiming(), step_s=step_s, wire="auto", **bounds
    ) as swarm:
        founder = swarm.nodes[0].island
        await swarm.until(lambda: founder.standing.round >= 2)
        newcomer = swarm.add(1, step_s=step_s, has_model=False).island
        await swarm.until(lambda: founder.standing.step >= 400 or newcomer.figures.steps > 0, within_s=3600)
        assert newcomer.figures.steps > 0, (founder.standing.round, newcomer.figures)
