"""Forecasts of fine-tuning jobs: what a step is, and how long it takes here and over the members of a swarm."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.config.settings import Settings
from app.core.span import Span
from app.planning.devices import trained_head_s
from app.planning.machines import MachineSpec
from app.planning.replies import PastPrompt, PastReply
from app.planning.running_swarm import KEPT_BYTES
from app.planning.training_step import StepTask
from app.routing.route import Hop, KnownCosts
from app.swarm.records import Announcement
from app.training.dataset import Dataset, Example
from app.training.forecasts import SwarmForecaster, step_here_s, usual_step
from engine.sources.starter import SHAPE
from p2p.memory.fabric import open_fabric
from tests.app.training.test_stores import RECORD

HERE = MachineSpec("here", 64 * 10**9, 12e9, 60e9, kind="cpu", rtt_s=0.0)


def data(*lengths: int) -> Dataset:
    return Dataset(tuple(Example((1,) * length, (True,) * length) for length in lengths))


@pytest.mark.parametrize(
    ("lengths", "batch", "rows", "expected"),
    [
        ((30, 10, 20, 40), 4, 1024, (160, 96, 1)),  # filled up to the longest of the four
        ((100, 100, 100, 100), 4, 200, (200, 198, 2)),
        ((500, 10, 10, 10), 4, 100, (265, 263, 2)),  # one that is longer than a micro-batch goes alone
        ((64,), 8, 1024, (64, 63, 1)),
    ],
)
def test_the_usual_step(lengths: tuple[int, ...], batch: int, rows: int, expected: tuple[int, int, int]) -> None:
    record = replace(RECORD, batch=batch, rows=rows, steps=100)
    task = usual_step(data(*lengths), record, "int8")
    assert (task.rows, task.counted_rows, task.micro_batches) == expected  # nothing foretells a sequence's first token
    assert (task.rank, task.wire_bytes) == (RECORD.rank, 1.0)


def test_a_machine_without_the_memory_has_no_step() -> None:
    task = StepTask(8, 256, 1)
    assert step_here_s(HERE, SHAPE, task) is not None
    assert step_here_s(replace(HERE, cap_bytes=10**8), SHAPE, task) is None


def test_only_rows_whose_loss_counts_pass_the_head() -> None:
    whole, some = (step_here_s(HERE, SHAPE, StepTask(8, 256, 1, counted_rows=rows)) for rows in (256, 128))
    assert whole is not None
    assert some is not None
    assert whole == step_here_s(HERE, SHAPE, StepTask(8, 256, 1))
    half_s = trained_head_s(SHAPE, HERE, rows=128, all_weights=False)
    assert whole - some == pytest.approx(half_s)


async def test_a_route_whose_hop_is_gone_has_no_forecast() -> None:
    hop = Announcement("hop", 0, 0, "", "serving", Span(0, 30), 50.0, 400.0)
    members = [hop]
    async with open_fabric() as fabric:
        past = [PastReply()]
        forecaster = SwarmForecaster(fabric.node("owner"), lambda: members, lambda: HERE, lambda: past[0])
        route, task = (Hop("hop", Span(0, 30)),), StepTask(8, 256, 1)
        first = await forecaster.step_s(route, SHAPE, task)
        assert first is not None
        members[0] = replace(hop, prefill_tokens_per_s=200.0)
        second = await forecaster.step_s(route, SHAPE, task)
        assert second is not None
        assert first < second < 2 * first
        # Twice what it claims for tokens says nothing of steps, twice for a prompt does.
        past[0] = PastReply(KnownCosts({"hop": 2 / 50 / 30}))
        assert await forecaster.step_s(route, SHAPE, task) == pytest.approx(second, rel=0.01)
        past[0] = PastReply(prompt=PastPrompt(("hop",), 100, 2 * 100 / 200))
        third = await forecaster.step_s(route, SHAPE, task)
        assert third is not None
        assert second < third < 2 * second
        members.clear()
        assert await forecaster.step_s(route, SHAPE, task) is None


def test_members_are_assumed_to_have_the_default_memory_for_jobs() -> None:
    assert Settings().train_memory == KEPT_BYTES
