"""Machines that share the cores of one host, and machines that are slower with few rows than with many."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.planning.devices import CROWDED_PASSES, FEW_ROWS, MANY_ROWS, block_time_s, flops_at, slowest_host_s
from app.planning.forecast import Terms, forecast_training
from app.planning.machines import Fleet, MachineSpec, PlanError, read_machines
from app.planning.replies import ReplyTask, replies_over
from app.planning.training_step import StepTask, step_over, step_time
from engine.sources.starter import SHAPE

CPU = MachineSpec(
    "a",
    64 * 10**9,
    12e9,
    60e9,
    kind="cpu",
    rtt_s=0.0,
    cap_bytes=215 * 10**6,
    up_bytes_per_s=1e12,
    down_bytes_per_s=1e12,
)
ASKER = replace(CPU, name="asker", cap_bytes=1)


def three(host: str) -> Fleet:
    """An asker that hosts nothing and three machines with ten blocks each, on one host or each on its own."""
    machines = tuple(replace(CPU, name=name, host=host) for name in "abc")
    asker = replace(ASKER, host=host)
    return Fleet(asker, (asker, *machines))


def test_one_reply_passes_the_machines_of_a_host_one_after_the_other_anyway() -> None:
    apart, shared = (replies_over(three(host), SHAPE, ReplyTask()) for host in ("", "desk"))
    assert apart is not None
    assert shared is not None
    assert apart.tokens_per_s == shared.tokens_per_s


def test_replies_at_once_add_up_on_one_host() -> None:
    task = ReplyTask(streams=64)
    apart, shared = (replies_over(three(host), SHAPE, task) for host in ("", "desk"))
    whole = replies_over(Fleet(free := replace(CPU, cap_bytes=None), (free,)), SHAPE, task)
    assert apart is not None
    assert shared is not None
    assert whole is not None
    assert shared.tokens_per_s == pytest.approx(whole.tokens_per_s)
    assert apart.tokens_per_s > 2 * shared.tokens_per_s


def test_chunks_of_a_prompt_overlap_between_hosts_only() -> None:
    task = ReplyTask(prompt_tokens=2048)
    apart, shared = (replies_over(three(host), SHAPE, task) for host in ("", "desk"))
    assert apart is not None
    assert shared is not None
    assert apart.first_token_s is not None
    assert shared.first_token_s is not None
    chunk_s = 30 * block_time_s(SHAPE, CPU, rows=256, context=1024, sessions=1)
    assert shared.first_token_s == pytest.approx(8 * chunk_s, rel=0.05)
    assert apart.first_token_s == pytest.approx((1 + 7 / 3) * chunk_s, rel=0.05)


def test_a_pipeline_on_one_host_is_as_slow_as_one_machine() -> None:
    fleet, task = three("desk"), StepTask(rank=8, rows=256, micro_batches=4, recomputed=True)
    blocks = {name: 10 for name in "abc"}
    shared = step_over(fleet, blocks, SHAPE, task)
    alone = step_time(Fleet(free := replace(CPU, cap_bytes=None), (free,)), SHAPE, task)
    assert alone is not None
    assert shared.seconds == pytest.approx(alone.seconds, rel=0.05)
    assert step_over(three(""), blocks, SHAPE, task).seconds < 0.7 * shared.seconds


def test_islands_on_one_host_slow_each_other_down() -> None:
    free = replace(CPU, cap_bytes=None)
    islands = tuple(replace(free, name=name, island=name, host="desk") for name in "ab")
    terms, task = Terms(10**6), StepTask(rank=None, rows=256)
    apart, shared = (
        forecast_training(Fleet(own[0], own), SHAPE, task, terms)
        for own in (tuple(replace(one, host="") for one in islands), islands)
    )
    assert apart.swarm is not None
    assert shared.swarm is not None
    assert apart.swarm.tokens_per_s == pytest.approx(2 * CROWDED_PASSES * shared.swarm.tokens_per_s, rel=0.01)
    assert (apart.advice, shared.advice) == ("swarm", "alone")


def test_what_a_host_does() -> None:
    machines = [replace(CPU, name=name, host=host) for name, host in (("a", "x"), ("b", ""), ("c", "x"))]
    assert slowest_host_s(zip(machines, (1.0, 2.5, 2.0), strict=True)) == 3.0
    assert slowest_host_s(()) == 0.0


def test_few_rows_are_slower() -> None:
    slow = replace(CPU, few_rows_flops_per_s=20e9)
    assert [flops_at(slow, rows) for rows in (1, FEW_ROWS, MANY_ROWS, 4096)] == [20e9, 20e9, 60e9, 60e9]
    assert flops_at(CPU, 1) == CPU.flops_per_s
    times = [block_time_s(SHAPE, slow, rows=rows, context=0, sessions=1) for rows in range(1, 200)]
    assert times == sorted(times)  # more rows never take less time


@pytest.mark.parametrize("field", ["host = 3", "few_rows_flops_per_s = -1", 'few_rows_flops_per_s = "fast"'])
def test_bad_fields(field: str) -> None:
    text = f'[[machine]]\nname = "x"\nmemory_bytes = 1\nreading_bytes_per_s = 1\nflops_per_s = 1\n{field}\n'
    with pytest.raises(PlanError, match=f"machine 'x': {field.split()[0]}"):
        read_machines(text, "m.toml")
