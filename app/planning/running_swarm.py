"""Forecasts replies over a running swarm from a node's snapshot: what its members serve, how fast and how far.

Claims count as far as routing believes them. Members announce no memory, watts or arithmetic speed to a snapshot, so
training and several replies at once cannot be forecast from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from app.core.span import Span
from app.planning.devices import head_time_s
from app.planning.forecast import Forecast, Terms, conclude_replies, forecast_replies, straggling_hops
from app.planning.machines import Fleet, MachineSpec
from app.planning.memory import held_for_replies
from app.planning.replies import ReplyTask, replies_of_members, replies_over
from app.planning.verdicts import memory_verdict
from app.routing.estimates import link_seconds
from app.routing.route import Hop, NoRoute, Route, RouteRequest
from app.routing.search import find_route
from app.snapshot.views import Snapshot
from app.swarm.records import Announcement
from engine.config import ModelConfig

_PLENTY = 2**31 - 1  # the room in a member's cache is not in the snapshot


def members_of(snapshot: Snapshot) -> list[Announcement]:
    """Return what this node and the members that its sessions may use announce, as the snapshot has it."""
    found = [
        _member(peer.peer, peer.start, peer.stop, peer.tokens_per_s)
        for peer in snapshot.peers
        if peer.unused is None and peer.state == "serving"
    ]
    if snapshot.state == "serving":
        found.append(_member(snapshot.peer_id, snapshot.start, snapshot.stop, snapshot.tokens_per_s))
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
    try:
        route = find_route(members, request, link_s)
    except NoRoute as error:
        said = f"no swarm: this machine alone is forecast ({error})"
        return forecast_replies(replace(alone, assumed=(said,)), config, task, terms)
    head_s = head_time_s(config, here, rows=1)
    speed, alone_speed = replies_of_members(route, members, request, link_s, head_s), replies_over(alone, config, task)
    own = next((member for member in members if member.peer == snapshot.peer_id), None)
    if alone_speed is not None and own is not None and own.span is not None and own.decode_tokens_per_s > 0:
        # What this node measured with its own blocks is better than an estimate from reading weights.
        whole_per_s = own.decode_tokens_per_s * len(own.span) / config.n_blocks
        whole = replace(own, span=request.wanted, decode_tokens_per_s=whole_per_s)
        alone_speed = replies_of_members((Hop(own.peer, request.wanted),), [whole], request, link_s, head_s)
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
    unmeasured = sorted(used - rtt_s.keys() - {own_peer})
    return (
        "nobody else uses the members meanwhile",
        "no time to the first token: members do not say how fast they read prompts",
        *(f"the speed of {peer}, which announces none (`shoal bench` there)" for peer in silent),
        *(f"the round trip to {peer}" for peer in unmeasured),
    )


def _member(peer: str, start: int | None, stop: int | None, tokens_per_s: float) -> Announcement:
    span = Span(start, stop) if start is not None and stop is not None and Span.is_possible(start, stop) else None
    return Announcement(peer, 0, 0, "", "serving", span, decode_tokens_per_s=tokens_per_s, kv_free_tokens=_PLENTY)
