"""Forecasts of fine-tuning jobs by `app.planning`: of their steps in this process, or over the members of a swarm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import TYPE_CHECKING

import trio

from app.core.network import Network
from app.planning.machines import Fleet, MachineSpec
from app.planning.replies import MembersPrompt, PastReply, row_bytes
from app.planning.running_swarm import MeasuredMembers, step_of_members
from app.planning.training_step import StepTask, step_time
from app.routing.estimates import link_rates, link_seconds
from app.routing.route import Route
from app.swarm.records import Announcement
from app.training.dataset import Dataset, step_batches
from app.training.record import JobRecord

if TYPE_CHECKING:
    from engine.config import ModelConfig

_LOOKED_AT = 16  # steps whose rows are counted
_WIRE_BYTES = {"f32": 4.0, "int8": 1.0, "changes": 0.75}  # of a number there and back; other formats have two


def usual_step(data: Dataset, record: JobRecord, wire: str = "f32") -> StepTask:
    """Return a job's step as its first steps are on average: micro-batches, and their rows with the filling."""
    steps = [
        step_batches(data, number, batch=record.batch, seed=record.seed, rows=record.rows)
        for number in range(min(_LOOKED_AT, record.steps))
    ]
    groups = [group for step in steps for group in step]
    rows = round(mean(len(group) * max(len(example.token_ids) for example in group) for group in groups))
    counted = round(mean(sum(example.tokens for example in group) for group in groups))
    each, wire_bytes = round(mean(map(len, steps))), _WIRE_BYTES.get(wire, 2.0)
    return StepTask(record.rank, rows, each, wire_bytes=wire_bytes, counted_rows=counted)


def step_here_s(machine: MachineSpec, config: ModelConfig, task: StepTask) -> float | None:
    """Seconds of a step in one process of a machine; None if it cannot hold the job."""
    step = step_time(Fleet(machine, (machine,)), config, task)
    return None if step is None else step.seconds


@dataclass(frozen=True)
class SwarmForecaster:
    """Forecasts the steps of this node's jobs over its swarm."""

    network: Network
    members: Callable[[], Sequence[Announcement]]
    look: Callable[[], MachineSpec]  # measures this machine, which takes a moment the first time
    past_reply: Callable[[], PastReply]  # of this node, the latest

    async def step_s(self, route: Route, config: ModelConfig, task: StepTask) -> float | None:
        """Seconds of a step over a route; None if one of its hops is gone meanwhile."""
        here = replace(await trio.to_thread.run_sync(self.look), name=self.network.peer_id)
        members, links = list(self.members()), tuple(self.network.links())
        if not {hop.peer for hop in route} <= {member.peer for member in members if member.span is not None}:
            return None
        rtt_s = {link.peer: link.rtt_s for link in links if link.rtt_s is not None}
        estimates, rates = link_seconds(here.name, rtt_s, members), link_rates(here.name, links, members)
        known = {hop.peer: rate for hop in route if (rate := rates(hop.peer, "")) is not None}
        hosts = {member.peer: member.host for member in members}
        past = self.past_reply()
        prompt = MembersPrompt(1, row_bytes(config, here), known, hosts, past.prompt)
        slowdown = prompt.slowdown(route, members)
        measured = MeasuredMembers(estimates.away_s, prompt.speeds(route), past.known, hosts, slowdown)
        return step_of_members(route, members, here, measured, config, task).seconds
