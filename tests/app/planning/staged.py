"""Six staged cases of advice, for any machine with a CPU: what is asked of the planner, and what it must answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from app.planning.forecast import Forecast, Terms, forecast_replies, forecast_training
from app.planning.machines import Fleet, MachineSpec
from app.planning.replies import ReplyTask
from app.planning.training_step import StepTask
from engine.config import ModelConfig, Rope
from engine.sources.starter import SHAPE

GB = 10**9
LLAMA8B = ModelConfig("llama", 32, 4096, 32, 8, 128, 14336, 128256, 8192, 1e-5, Rope())
CAP = 215 * 10**6  # ten of the starter model's 30 blocks, and their cache
TRAINING_CAP = 3 * GB  # training the starter model takes 10 GB
NARROW = 2.5e6  # bytes/s: 20 Mbit/s
STEP = StepTask(rank=None, rows=256, micro_batches=8)
HOUR = 3600.0


@dataclass(frozen=True)
class StagedCase:
    """A forecast and the advice and limit that it must have; None: any."""

    name: str
    forecast: Forecast
    advice: str | None
    limit: str | None

    @property
    def is_right(self) -> bool:
        """True if the planner gives the advice and names the limit."""
        found = self.forecast
        return self.advice in (None, found.advice) and self.limit in (None, found.limit)


def staged_cases(machine: MachineSpec) -> Iterator[StagedCase]:
    """Return the cases for swarms of machines like this one."""
    near = replace(machine, rtt_s=0.001, memory_bytes=64 * GB, used_bytes=0, island="", host="")

    def fleet(count: int, **changes: object) -> Fleet:
        machines = tuple(replace(near, name=f"m{n}", **changes) for n in range(count))  # type: ignore[arg-type]
        return Fleet(machines[0], machines)

    shared = fleet(3, host="desk")
    yield StagedCase("shared_cores_chat", forecast_replies(shared, SHAPE, ReplyTask(), Terms(256)), "alone", None)
    tuned = forecast_training(shared, SHAPE, StepTask(rows=256), Terms(10**6))
    yield StagedCase("shared_cores_finetune", tuned, "alone", None)

    capped = fleet(3, cap_bytes=CAP)
    yield StagedCase("capped", forecast_replies(capped, SHAPE, ReplyTask(), Terms(256)), "swarm", None)

    islands = two_islands(near)
    joint = forecast_training(islands, SHAPE, STEP, Terms(1, every=50)).swarm
    assert joint is not None
    tokens = int(0.8 * HOUR * joint.tokens_per_s)  # what rounds of fifty steps do in 48 minutes
    every_1 = forecast_training(islands, SHAPE, STEP, Terms(tokens, HOUR, every=1))
    yield StagedCase("narrow_every_1", every_1, "not_at_all", "bandwidth")
    every_50 = forecast_training(islands, SHAPE, STEP, Terms(tokens, HOUR, every=50))
    yield StagedCase("narrow_every_50", every_50, "swarm", None)

    slow = replace(
        capped.machines[2],
        reading_bytes_per_s=near.reading_bytes_per_s / 10,
        flops_per_s=near.flops_per_s / 10,
        few_rows_flops_per_s=near.few_rows_flops_per_s / 10,
    )
    route = Fleet(capped.here, (*capped.machines[:2], slow))
    yield StagedCase("one_slow", forecast_replies(route, SHAPE, ReplyTask(), Terms(256)), None, "stragglers")

    large = forecast_training(fleet(3), LLAMA8B, STEP, Terms(10**6))
    yield StagedCase("no_room", large, "not_at_all", "memory")


def two_islands(machine: MachineSpec) -> Fleet:
    """Two islands of four machines that together hold the starter model in training, behind narrow connections."""
    machines = tuple(
        replace(
            machine,
            name=f"{island}{n}",
            island=island,
            cap_bytes=TRAINING_CAP,
            up_bytes_per_s=NARROW,
            down_bytes_per_s=NARROW,
        )
        for island in "ab"
        for n in range(4)
    )
    return Fleet(machines[0], machines)
