"""The speed of replies: seconds of a token over a route, tokens/s of several replies at once, time to the first token.

The time of a token is that of `app.routing.cost`, whose terms are its parts here; the head is added to them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Protocol

from app.core.span import Span
from app.planning.cover import StageCandidate, cheapest_cover
from app.planning.devices import block_time_s, ends_time_s, slowest_host_s
from app.planning.machines import Fleet, MachineSpec
from app.planning.memory import held_for_replies
from app.routing.cost import (
    ASSUMED_BYTES_PER_S,
    BELIEVED_TIMES,
    HOP_S,
    believed_prompt_seconds,
    believed_seconds,
    compute_seconds,
    entry_seconds,
    limited,
    links_seconds,
    route_seconds,
    wait_seconds,
)
from app.routing.route import Hop, KnownCosts, LinkSeconds, Route, RouteRequest
from app.session.frame import CHUNK_ROWS
from app.swarm.records import Announcement
from engine.config import ModelConfig

LEAST_PROMPT = 64  # tokens of an earlier prompt that say how fast the next one is read


@dataclass(frozen=True)
class ReplyTask:
    """Replies to forecast."""

    prompt_tokens: int = 128
    reply_tokens: int = 256
    streams: int = 1  # at once

    @property
    def context(self) -> int:
        """Tokens that are in the cache half-way through a reply."""
        return self.prompt_tokens + self.reply_tokens // 2


@dataclass(frozen=True)
class ReplySpeed:
    """The speed of replies over a route; `parts` are the seconds of one token, by name."""

    route: Route
    parts: Mapping[str, float]
    tokens_per_s: float
    first_token_s: float | None  # None: the speed of prompts is not known
    block_s: Mapping[str, float]  # of a token in one block, by machine
    sending_s: float | None = None  # part of `first_token_s` that the prompt spends on the machines' connections
    row_bytes: float = 0.0  # that machines send to each other for a token

    @property
    def token_s(self) -> float:
        """Seconds of one token of one reply."""
        return sum(self.parts.values())


def token_parts(
    route: Route, members: Sequence[Announcement], request: RouteRequest, link_s: LinkSeconds, known: KnownCosts
) -> dict[str, float]:
    """Return the terms of `route_seconds` by name; they add up to it."""
    return {
        "links": links_seconds(route, link_s, request.origin, request.target),
        "hops": sum(entry_seconds(members, known, request)[hop.peer] for hop in route),
        "blocks": compute_seconds(route, believed_seconds(members, request, known)),
    }


class TimedHop(Protocol):
    """A hop of a past reply with the seconds of a token there, as the hop reports them; None: not reported."""

    @property
    def peer(self) -> str: ...
    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...
    @property
    def link_s(self) -> float | None: ...
    @property
    def compute_s(self) -> float | None: ...
    @property
    def queue_s(self) -> float | None: ...
    @property
    def host_s(self) -> float | None: ...


@dataclass(frozen=True)
class PastPrompt:
    """The prompt of an earlier reply: who read how many tokens of it, and the seconds until all had."""

    peers: tuple[str, ...]
    tokens: int
    seconds: float
    beside_s: float = 0.0  # of these, on links and at hops besides computing


@dataclass(frozen=True)
class PastReply:
    """What an earlier reply showed of its hops: what a token cost there, and how fast they read its prompt."""

    known: KnownCosts = field(default_factory=KnownCosts)
    prompt: PastPrompt | None = None


def past_reply(
    hops: Sequence[TimedHop], prompt_tokens: int = 0, prompt_s: float | None = None, return_s: float | None = None
) -> PastReply:
    """Return what a reply showed of its hops; `prompt_tokens` of its prompt were read in `prompt_s`.

    The blocks' times are the hops' word, and limited as claims are; no overhead below `HOP_S` is believed. A prompt of
    fewer than `LEAST_PROMPT` tokens shows nothing.
    """
    reported = [hop for hop in hops if hop.compute_s]
    blocks_s = {hop.peer: (hop.compute_s or 0.0) / (hop.stop - hop.start) for hop in reported}
    hop_s = {hop.peer: max(HOP_S, (hop.queue_s or 0.0) + (hop.host_s or 0.0)) for hop in reported}
    known = KnownCosts(limited(blocks_s), hop_s=hop_s)
    if prompt_s is None or prompt_tokens < LEAST_PROMPT:
        return PastReply(known)
    beside_s = sum((hop.link_s or 0.0) + hop_s.get(hop.peer, HOP_S) for hop in hops) + (return_s or 0.0)
    return PastReply(known, PastPrompt(tuple(hop.peer for hop in hops), prompt_tokens, prompt_s, beside_s))


def replies_over(fleet: Fleet, config: ModelConfig, task: ReplyTask) -> ReplySpeed | None:
    """Forecast replies over the machines that answer fastest; None if together they cannot hold the model.

    Machines are chosen by their distance from here; links known between others change the time, not the choice.
    """
    machines = {machine.name: machine for machine in fleet.machines}
    candidates = [_candidate(fleet, machine, config, task) for machine in fleet.machines]
    cover = cheapest_cover(candidates, config.n_blocks)
    if cover is None:
        return None
    ends = [0]
    for share in cover:
        ends.append(ends[-1] + share.blocks)
    route = tuple(Hop(share.machine.name, Span(*bounds)) for share, bounds in zip(cover, pairwise(ends), strict=True))
    members = [announced(machines[hop.peer], hop.span, config, task) for hop in route]
    # Figures of a file are the user's own: they count as measured, not as a stranger's claim.
    known = KnownCosts(
        {share.machine.name: _token_block_s(machines[share.machine.name], config, task) for share in cover}
    )
    request = RouteRequest(Span(0, config.n_blocks), task.prompt_tokens + task.reply_tokens)
    parts = token_parts(route, members, request, fleet.link_s, known)
    parts["head"] = ends_time_s(config, fleet.here, rows=1)

    def stage_s(hop: Hop, rows: int, sessions: int, context: int) -> float:
        machine = machines[hop.peer]
        return len(hop.span) * block_time_s(config, machine, rows=rows, context=context, sessions=sessions)

    stages = [(machines[hop.peer], stage_s(hop, task.streams, task.streams, task.context)) for hop in route]
    heads_s = ends_time_s(config, fleet.here, rows=task.streams)
    rate = task.streams / max(sum(parts.values()), slowest_host_s([*stages, (fleet.here, heads_s)]))
    rows = min(CHUNK_ROWS, task.prompt_tokens)
    used = {hop.peer: machines[hop.peer] for hop in route} | {fleet.here.name: fleet.here}
    prompt = PromptChunks(
        math.ceil(task.prompt_tokens / rows),
        [(machines[hop.peer], stage_s(hop, rows, 1, task.prompt_tokens // 2)) for hop in route],
        [rows * row_bytes(config, m) / m.bytes_per_s for m in used.values()] if len(used) > 1 else [],
    )
    first_token_s = parts["links"] + parts["hops"] + parts["head"] + prompt.computing_s + prompt.sending_s
    sent = sum(row_bytes(config, machine) for machine in used.values()) if len(used) > 1 else 0.0
    return ReplySpeed(route, parts, rate, first_token_s, known.block_s, prompt.sending_s, sent)


def row_bytes(config: ModelConfig, machine: MachineSpec) -> int:
    """Bytes of a token's hidden state as a machine sends it on."""
    return config.hidden_size * machine.precision.compute_bytes


@dataclass(frozen=True)
class PromptChunks:
    """A prompt in chunks: the seconds of one at each hop of a route, and on each connection."""

    count: int
    stages: Sequence[tuple[MachineSpec, float]]
    sends_s: Sequence[float] = ()

    @property
    def computing_s(self) -> float:
        """Seconds that the hops compute: the first chunk through all of them, then the slowest host for each other."""
        return sum(stage_s for _, stage_s in self.stages) + (self.count - 1) * slowest_host_s(self.stages)

    @property
    def sending_s(self) -> float:
        """Seconds on connections besides: the first chunk on all, then what the slowest takes longer than computing."""
        slowest_s = max(self.sends_s, default=0.0)
        return sum(self.sends_s) + (self.count - 1) * max(0.0, slowest_s - slowest_host_s(self.stages))


def replies_of_members(
    route: Route,
    members: Sequence[Announcement],
    request: RouteRequest,
    link_s: LinkSeconds,
    head_s: float,
    prompt: MembersPrompt | None = None,
    known: KnownCosts | None = None,
) -> ReplySpeed:
    """Forecast one reply over a route of a running swarm, from what its members announce, as far as it is believed.

    What was measured of a member (`known`) counts instead of its claim. The time to the first token is known if they
    all say how fast they read prompts.
    """
    known = known or KnownCosts()
    parts = token_parts(route, members, request, link_s, known)
    parts["head"] = head_s
    assert math.isclose(sum(parts.values()), route_seconds(route, members, request, link_s, known) + head_s)
    believed = believed_seconds(members, request, known)
    speed = ReplySpeed(route, parts, 1 / sum(parts.values()), None, believed)
    used = {hop.peer for hop in route}
    if prompt is None or not all(member.prefill_tokens_per_s > 0 for member in members if member.peer in used):
        return speed
    chunks = prompt.chunks(route, members, known)
    first_token_s = speed.token_s - parts["blocks"] + chunks.computing_s + chunks.sending_s
    return replace(speed, first_token_s=first_token_s, sending_s=chunks.sending_s)


@dataclass(frozen=True)
class MembersPrompt:
    """A prompt that members of a running swarm read."""

    tokens: int
    row_bytes: int  # of a token's hidden state
    bytes_per_s: Mapping[str, float]  # of the connections of members, as far as they were measured
    hosts: Mapping[str, str]  # machine of each member, as far as it is known
    past: PastPrompt | None = None

    def chunks(self, route: Route, members: Sequence[Announcement], known: KnownCosts) -> PromptChunks:
        """Return the seconds of a chunk at each hop and on each connection, that back to the asker included.

        A chunk takes no less than a token, which reads all weights too.
        """
        slowdown, claimed = self.slowdown(route, members), believed_prompt_seconds(members)
        token_s = believed_seconds(members, RouteRequest(Span(0, 1), 1), known)
        return self._chunks(
            self.tokens, route, {peer: slowdown * block_s for peer, block_s in claimed.items()}, token_s
        )

    def slowdown(self, route: Route, members: Sequence[Announcement]) -> float:
        """Return how many times longer the hops took for an earlier prompt on the same way than they claim; else 1.

        How fast they were with single tokens says little: those wait for memory and for each other, prompts multiply.
        The time on connections that nobody measured is part of it (`speeds`).
        """
        past = self._past_over(route)
        if past is None:
            return 1.0
        expected = self._chunks(past.tokens, route, believed_prompt_seconds(members), {})
        computing_s = past.seconds - past.beside_s - expected.sending_s
        return max(computing_s / expected.computing_s, 1 / BELIEVED_TIMES)

    def speeds(self, route: Route) -> dict[str, float]:
        """Return the bytes/s of the hops' connections, as measured.

        One that nobody measured has the assumed speed; but after an earlier prompt on the same way it takes no time of
        its own, because that prompt took it and `slowdown` has it. Counting the assumed time as well would make the
        hops look as much faster as the connection is faster than assumed.
        """
        unknown = ASSUMED_BYTES_PER_S if self._past_over(route) is None else math.inf
        return {hop.peer: self.bytes_per_s.get(hop.peer, unknown) for hop in route}

    def _past_over(self, route: Route) -> PastPrompt | None:
        """Return the earlier prompt if these hops read it."""
        past = self.past
        return past if past is not None and past.peers == tuple(hop.peer for hop in route) else None

    def _chunks(
        self, tokens: int, route: Route, prompt_s: Mapping[str, float], token_s: Mapping[str, float]
    ) -> PromptChunks:
        rows = min(CHUNK_ROWS, tokens)
        stages = [
            (
                MachineSpec(hop.peer, 0, 0.0, 0.0, host=self.hosts.get(hop.peer, "")),
                len(hop.span) * max(rows * prompt_s[hop.peer], token_s.get(hop.peer, 0.0)),
            )
            for hop in route
        ]
        speeds = [*self.speeds(route).values()]
        sends_s = [rows * self.row_bytes / speed for speed in (*speeds, speeds[-1])]
        return PromptChunks(math.ceil(tokens / rows), stages, sends_s)


def announced(machine: MachineSpec, span: Span, config: ModelConfig, task: ReplyTask) -> Announcement:
    """Return what a machine that serves these blocks would announce."""
    decode = 1 / (len(span) * _token_block_s(machine, config, task))
    return Announcement(
        machine.name, 0, 0, "", "serving", span, decode_tokens_per_s=decode, kv_free_tokens=2**31 - 1, busy=machine.busy
    )


def _token_block_s(machine: MachineSpec, config: ModelConfig, task: ReplyTask) -> float:
    return block_time_s(config, machine, rows=1, context=task.context, sessions=1)


def _candidate(fleet: Fleet, machine: MachineSpec, config: ModelConfig, task: ReplyTask) -> StageCandidate:
    away_s = fleet.away_s(machine)
    waiting_s = wait_seconds(announced(machine, Span(0, 1), config, task))
    return StageCandidate(
        machine.name,
        held_for_replies(config, machine).blocks,
        _token_block_s(machine, config, task) + waiting_s,
        HOP_S + away_s,
        return_s=away_s,
    )
