"""Swarms of neighbours: a node that is in none asks whoever it is linked with, and works out what each would give.

What neighbours say is signed, bounded and checked; of a swarm's model only the manifest is fetched, and kept in memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import trio

from app.core.errors import UnknownSwarm
from app.core.network import Link, Network
from app.core.span import Span
from app.manifest.manifest import Manifest
from app.membership import fetch_manifest, wire
from app.routing.cost import HOP_S, believed_seconds, wait_seconds
from app.routing.planner import RoutePlanner
from app.routing.route import KnownCosts, LinkSeconds, NoRoute, Route, RouteRequest
from app.routing.search import find_route
from app.swarm.records import (
    ANNOUNCEMENT_DOMAIN,
    SWARM_DOMAIN,
    Announcement,
    SwarmRecord,
    read_announcement,
    read_record,
)
from p2p.envelope import parse
from p2p.errors import EnvelopeError, P2PError

log = logging.getLogger("shoal.nearby")

ASK_TIMEOUT_S = 2.0
MAX_ASKED = 32
MAX_SWARMS = 8
MAX_MEMBERS = 512
TOKENS = 256  # of a usual reply: hops without that much room are used only where there are no others
_NEAREST = ("lan", "direct", "relayed")


@dataclass(frozen=True)
class ExpectedSpeed:
    """What a reply through a swarm as it stands would take: seconds a token on the way, or the block that lacks."""

    token_s: float | None = None
    missing_block: int | None = None


@dataclass(frozen=True)
class NearbySwarm:
    """A swarm that a neighbour is in; without a manifest nothing can be said of its model."""

    record: SwarmRecord
    link: str  # of the nearest neighbour that told of it: lan, direct, relayed
    members: tuple[Announcement, ...] = ()
    manifest: Manifest | None = None
    expectation: ExpectedSpeed = ExpectedSpeed()


@dataclass
class _Heard:
    record: SwarmRecord
    link: str
    told_by: list[str] = field(default_factory=list)
    members: dict[str, Announcement] = field(default_factory=dict)


class NearbySwarms:
    """Looks around; manifests that were fetched are kept."""

    def __init__(self, wall_clock: Callable[[], float] = time.time) -> None:
        self._wall_clock = wall_clock
        self._manifests: dict[str, Manifest] = {}

    async def look(self, network: Network) -> list[NearbySwarm]:
        """The swarms of everybody who is linked now, the nearest first; takes a few seconds at most."""
        heard: dict[str, _Heard] = {}
        links = sorted(network.links(), key=lambda link: _NEAREST.index(link.kind))[:MAX_ASKED]
        async with trio.open_nursery() as nursery:
            for link in links:
                nursery.start_soon(self._ask, network, link, heard)
        found: list[NearbySwarm] = []
        with trio.move_on_after(ASK_TIMEOUT_S):
            async with trio.open_nursery() as nursery:
                for one in heard.values():
                    nursery.start_soon(self._have_manifest, network, one)
        for one in heard.values():
            manifest = self._manifests.get(one.record.model_hash)
            members = tuple(one.members.values())
            near = NearbySwarm(one.record, one.link, members, manifest)
            if manifest is not None:
                way = RoutePlanner(network, lambda members=members: members).link_s()  # type: ignore[misc]
                near = replace(near, expectation=expectation_of(members, manifest.config.n_blocks, way))
            found.append(near)
        return found

    async def _ask(self, network: Network, link: Link, heard: dict[str, _Heard]) -> None:
        try:
            answer = await network.call(link.peer, wire.FIND, b"", timeout_s=ASK_TIMEOUT_S)
            for raw in wire.unpack(answer, wire.MAX_BATCH_BYTES):
                self._take(raw, link, heard)
        except P2PError as error:
            log.debug("%s did not tell of its swarm: %s", link.peer, error)

    def _take(self, raw: bytes, link: Link, heard: dict[str, _Heard]) -> None:
        now_ms = int(self._wall_clock() * 1000)
        domain = parse(raw).domain
        if domain == SWARM_DOMAIN:
            record = read_record(raw, now_ms=now_ms)
            if record.id in heard or len(heard) < MAX_SWARMS:
                heard.setdefault(record.id, _Heard(record, link.kind)).told_by.append(link.peer)
        elif domain == ANNOUNCEMENT_DOMAIN:
            said = read_announcement(raw, now_ms=now_ms)
            swarm = heard.get(said.swarm)
            if swarm is None or (said.peer not in swarm.members and len(swarm.members) >= MAX_MEMBERS):
                return
            known = swarm.members.get(said.peer)
            if known is None or known.sequence < said.sequence:
                swarm.members[said.peer] = said
        else:
            raise EnvelopeError(f"a {domain} is no answer")

    async def _have_manifest(self, network: Network, one: _Heard) -> None:
        model_hash = one.record.model_hash
        if model_hash in self._manifests:
            return
        try:
            found = await fetch_manifest(network, one.told_by, model_hash, timeout_s=ASK_TIMEOUT_S)
        except UnknownSwarm as error:
            log.debug("%s", error)
            return
        self._manifests[model_hash] = found
        for oldest in list(self._manifests)[:-MAX_SWARMS]:
            del self._manifests[oldest]


def expectation_of(members: Sequence[Announcement], n_blocks: int, link_s: LinkSeconds) -> ExpectedSpeed:
    """What one token would take over the cheapest route, by what members claim and what links were measured."""
    demand = RouteRequest(Span(0, n_blocks), TOKENS)
    fitting = [member for member in members if member.serves]
    try:
        route = find_route(fitting, demand, link_s)
    except NoRoute as error:
        return ExpectedSpeed(missing_block=error.block)
    return ExpectedSpeed(_route_seconds(route, fitting, demand, link_s))


def _route_seconds(route: Route, members: Sequence[Announcement], demand: RouteRequest, link_s: LinkSeconds) -> float:
    block_s, by_peer = believed_seconds(members, demand, KnownCosts()), {member.peer: member for member in members}
    ends = ["", *(hop.peer for hop in route), ""]
    links_s = sum(link_s(a, b) for a, b in pairwise(ends))
    return links_s + sum(HOP_S + wait_seconds(by_peer[hop.peer]) + block_s[hop.peer] * len(hop.span) for hop in route)
