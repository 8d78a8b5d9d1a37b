"""Forecasts over a running swarm, from what its members announce: replies from a node's snapshot, steps of a job.

Claims count as far as routing believes them. Members announce no memory, watts or speed of several replies at once, so
those cannot be forecast; who trains a job is known to the node, and not in its snapshot.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from app.core.span import Span
from app.planning.devices import CROWDED_PASSES, ends_time_s
from app.planning.forecast import Forecast, Terms, conclude_replies, forecast_replies, straggling_hops
from app.planning.machines import Fleet, MachineSpec
from app.planning.memory import held_for_replies
from app.planning.replies import (
    MembersPrompt,
    ReplyTask,
    past_reply,
    replies_of_members,
    replies_over,
    row_bytes,
)
from app.planning.training_step import StepTask, StepTime, step_over
from app.planning.verdicts import memory_verdict
from app.routing.cost import ASSUMED_BYTES_PER_S, believed_prompt_seconds, believed_seconds
from app.routing.estimates import link_seconds
from app.routing.route import Hop, KnownCosts, NoRoute, Route, RouteRequest
from app.routing.search import find_route
from app.snapshot.views import RouteView, Snapshot
from app.swarm.records import Announcement
from engine.budget import block_bytes, block_graph_bytes, block_weights
from engine.config import ModelConfig

_PLENTY = 2**31 - 1  # the room in a member's cache is not in the snapshot, nor its memory for jobs
KEPT_BYTES = 2**30  # as the setting `train_memory` has it unless a member's user changes it
# A CPU with weights of few bits takes longer for a row of a prompt than a training pass takes by it, because that
# multiplies with converted numbers: three nodes took 0.68 to 0.83 of the time that follows from their prompts.
GRID_PASSES = 0.75


def members_of(snapshot: Snapshot) -> list[Announcement]:
    """Return what this node and the members that its sessions may use announce, as the snapshot has it."""
    found = [
        _member(peer.peer, (peer.start, peer.stop), peer.tokens_per_s, peer.prefill_tokens_per_s)
        for peer in snapshot.peers
        if peer.unused is None and peer.state == "serving"
    ]
    if snapshot.state == "serving":
        span = (snapshot.start, snapshot.stop)
        found.append(_member(snapshot.peer_id, span, snapshot.tokens_per_s, snapshot.prefill_tokens_per_s))
    return [member for member in found if member.span is not None]


def forecast_running(
    snapshot: Snapshot, here: MachineSpec, config: ModelConfig, task: ReplyTask, terms: Terms
) -> Forecast:
    """Forecast one reply over the members of a running swarm; without a route on this machine alone, and say so."""
    here = replace(here, name=snapshot.peer_id)
    members = members_of(snapshot)
    rtt_s = {peer.peer: peer.rtt_s for peer in snapshot.peers if peer.rtt_s is not None}
    link_s = link_seconds(snapshot.peer_id, rtt_s, ())
    request = RouteRequest(Span(0, config.n_blocks), 1)
    alone = Fleet(here, (here,))
    latest = snapshot.route or RouteView("")
    past = past_reply(latest.hops, latest.prompt_tokens, latest.prompt_s, latest.return_s)
    known = past.known
    try:
        route = find_route(members, request, link_s, known=known)
    except NoRoute as error:
        said = f"no swarm: this machine alone is forecast ({error})"
        return forecast_replies(replace(alone, assumed=(said,)), config, task, terms)
    head_s = ends_time_s(config, here, rows=1)
    if latest.ends_s is not None:
        head_s = latest.ends_s + (latest.host_s or 0.0)  # and what else this node does for a token
    rates = {peer.peer: peer.down_bytes_per_s for peer in snapshot.peers if peer.down_bytes_per_s is not None}
    hosts = {peer.peer: peer.host for peer in snapshot.peers}
    rates |= {snapshot.peer_id: math.inf}
    prompt = MembersPrompt(task.prompt_tokens, row_bytes(config, here), rates, hosts, past.prompt)
    speed = replies_of_members(route, members, request, link_s, head_s, prompt, known)
    alone_speed = replies_over(alone, config, task)
    own = next((member for member in members if member.peer == snapshot.peer_id), None)
    if alone_speed is not None and own is not None and own.span is not None and own.decode_tokens_per_s > 0:
        # What this node measured with its own blocks is better than an estimate from reading weights.
        share = len(own.span) / config.n_blocks
        whole = replace(
            own,
            span=request.wanted,
            decode_tokens_per_s=own.decode_tokens_per_s * share,
            prefill_tokens_per_s=own.prefill_tokens_per_s * share,
        )
        route_here = (Hop(own.peer, request.wanted),)
        alone_speed = replies_of_members(route_here, [whole], request, link_s, head_s, prompt, known)
    verdicts = (memory_verdict(config.n_blocks, config.n_blocks), straggling_hops(speed))
    lacking = held_for_replies(config, here).lacking_bytes
    fleet = replace(alone, assumed=_assumed(route, members, rtt_s, snapshot.peer_id))
    return conclude_replies(fleet, speed, alone_speed, terms, verdicts, lacking)


def _assumed(
    route: Route, members: Sequence[Announcement], rtt_s: Mapping[str, float], own_peer: str
) -> tuple[str, ...]:
    """Return what a forecast over this route takes for granted, in words."""
    used = {hop.peer for hop in route}
    silent = [member.peer for member in members if member.peer in used and member.decode_tokens_per_s <= 0]
    unread = [member.peer for member in members if member.peer in used and member.prefill_tokens_per_s <= 0]
    unmeasured = sorted(used - rtt_s.keys() - {own_peer})
    return (
        "nobody else uses the members meanwhile",
        *(f"the speed of prompts of {peer}, which announces none" for peer in unread),
        *(f"the speed of {peer}, which announces none (`shoal bench` there)" for peer in silent),
        *(f"the round trip to {peer}" for peer in unmeasured),
    )


def _member(peer: str, bounds: tuple[int | None, int | None], decode: float, prefill: float) -> Announcement:
    start, stop = bounds
    span = Span(start, stop) if start is not None and stop is not None and Span.is_possible(start, stop) else None
    return Announcement(
        peer,
        0,
        0,
        "",
        "serving",
        span,
        decode_tokens_per_s=decode,
        prefill_tokens_per_s=prefill,
        kv_free_tokens=_PLENTY,
    )


def step_of_members(
    route: Route,
    members: Sequence[Announcement],
    here: MachineSpec,
    measured: MeasuredMembers,
    config: ModelConfig,
    task: StepTask,
) -> StepTime:
    """Forecast a training step over the members of a route; `here` is the machine of the job's owner.

    A member keeps what the backward pass needs where that is less than `KEPT_BYTES`, and else computes it again.
    """
    hops = {hop.peer: len(hop.span) for hop in route}
    known = [member for member in members if member.peer in hops and member.span is not None]
    token_s = believed_seconds(known, RouteRequest(Span(0, config.n_blocks), 1), measured.known)
    prompt_s = believed_prompt_seconds(known)
    machines = []
    hosts = {member.peer: measured.hosts.get(member.peer) or member.peer for member in known}
    crowds = Counter(hosts.values())
    for member in known:
        kind = "cpu" if member.device.startswith("cpu") else "gpu"
        spec = MachineSpec(
            member.peer,
            _PLENTY,
            1.0,
            1.0,
            kind=kind,
            rtt_s=2 * measured.away_s(member.peer),
            host=measured.hosts.get(member.peer, ""),
        )
        rate = measured.bytes_per_s.get(member.peer, ASSUMED_BYTES_PER_S)
        passes = CROWDED_PASSES if crowds[hosts[member.peer]] > 1 else 1.0
        passes *= GRID_PASSES if kind == "cpu" and member.quantisation in ("stored", "int4") else 1.0
        machines.append(
            replace(
                spec,
                reading_bytes_per_s=block_bytes(config, spec.precision) / token_s[member.peer],
                flops_per_s=2 * block_weights(config) / (passes * measured.slowdown * prompt_s[member.peer]),
                up_bytes_per_s=rate,
                down_bytes_per_s=rate,
            )
        )
    kept = max(task.micro_batches * blocks for blocks in hops.values())
    graphs = kept * block_graph_bytes(config, machines[0].precision, task.rows)
    fleet = Fleet(here, (here, *(machine for machine in machines if machine.name != here.name)))
    own = next((machine for machine in machines if machine.name == here.name), None)
    if own is not None:
        fleet = Fleet(own, tuple(machines))
    return step_over(fleet, hops, config, replace(task, recomputed=graphs > KEPT_BYTES))


@dataclass(frozen=True)
class MeasuredMembers:
    """What this node measured of members: the way to them and the speed of their connections, and of their blocks."""

    away_s: Callable[[str], float]  # one way
    bytes_per_s: Mapping[str, float]  # inf: the time of the connection is part of `slowdown`
    known: KnownCosts = field(default_factory=KnownCosts)
    hosts: Mapping[str, str] = field(default_factory=dict)  # machine of each member, as far as it is known
    slowdown: float = 1.0  # times that they take longer for a prompt than they claim
