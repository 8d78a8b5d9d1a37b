"""Finds the swarms of linked peers for a node that is in none, and estimates how fast replies through each would be.

The peers' answers are signed statements, bounded and checked here; of a swarm's model only the manifest is fetched, and
kept in memory. `app.joining.offers` compares the swarms with what this machine can do.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import trio

from app.core.errors import UnknownSwarm
from app.core.network import Link, Network
from app.core.pieces import Pieces, in_pieces
from app.core.span import Span
from app.manifest.manifest import Manifest
from app.membership import fetch_manifest, wire
from app.routing.cost import route_seconds
from app.routing.planner import RoutePlanner
from app.routing.route import KnownCosts, LinkSeconds, NoRoute, RouteRequest
from app.routing.search import search_route
from app.swarm.records import Announcement, SwarmRecord, read_record_or_announcement
from p2p.errors import P2PError

log = logging.getLogger("shoal.nearby")

ASK_TIMEOUT_S = 2.0
MAX_ASKED = 32
MAX_SWARMS = 8
MAX_SWARMS_TOLD = 2  # of these by the neighbours at one address, or behind one relay; honest ones name their own
MAX_MEMBERS = 512
MAX_SHOWN_MANIFEST_BYTES = 2**19  # about 400 blocks; a swarm of a larger model is shown without figures
TOKENS = 256  # of a usual reply: hops with less KV-cache room are used only if there are no others
_STATEMENTS_AT_ONCE = 4
_NEAREST = ("lan", "direct", "relayed")


@dataclass(frozen=True)
class ExpectedSpeed:
    """Seconds per token through a swarm's present members, or the first block that no member serves."""

    token_s: float | None = None
    missing_block: int | None = None


@dataclass(frozen=True)
class NearbySwarm:
    """A swarm that a linked peer is in; without a manifest its model and speed are unknown."""

    record: SwarmRecord
    link: str  # to the nearest peer that reported it: lan, direct or relayed
    members: tuple[Announcement, ...] = ()
    manifest: Manifest | None = None
    expectation: ExpectedSpeed = ExpectedSpeed()


@dataclass
class _Report:
    """One swarm as linked peers reported it."""

    record: SwarmRecord
    link: str
    source: str  # of the first peer that reported it
    reported_by: list[str] = field(default_factory=list)
    members: dict[str, Announcement] = field(default_factory=dict)


class NearbySwarms:
    """Asks linked peers for their swarms; keeps the manifests of the last `MAX_SWARMS` models."""

    def __init__(self, wall_clock: Callable[[], float] = time.time) -> None:
        self._wall_clock = wall_clock
        self._manifests: dict[str, Manifest] = {}

    async def look(self, network: Network) -> list[NearbySwarm]:
        """Return the swarms of all linked peers, the nearest first; takes at most twice `ASK_TIMEOUT_S`."""
        reports: dict[str, _Report] = {}
        links = sorted(network.links(), key=lambda link: _NEAREST.index(link.kind))[:MAX_ASKED]
        async with trio.open_nursery() as nursery:
            for link in links:
                nursery.start_soon(self._ask, network, link, reports)
        found: list[NearbySwarm] = []
        with trio.move_on_after(ASK_TIMEOUT_S):
            async with trio.open_nursery() as nursery:
                for one in reports.values():
                    nursery.start_soon(self._fetch_manifest, network, one)
        for one in reports.values():
            manifest = self._manifests.get(one.record.model_hash)
            members = tuple(one.members.values())
            near = NearbySwarm(one.record, one.link, members, manifest)
            if manifest is not None:
                link_s = RoutePlanner(network, lambda members=members: members).link_s()  # type: ignore[misc]
                expected = await in_pieces(expectation_of(members, manifest.config.n_blocks, link_s))
                near = replace(near, expectation=expected)
            found.append(near)
        return found

    async def _ask(self, network: Network, link: Link, reports: dict[str, _Report]) -> None:
        try:
            answer = await network.call(link.peer, wire.FIND, b"", timeout_s=ASK_TIMEOUT_S)
            source = network.source(link.peer)
            for count, raw in enumerate(wire.unpack(answer, wire.MAX_BATCH_BYTES), 1):
                self._take(raw, link, source, reports)
                if count % _STATEMENTS_AT_ONCE == 0:
                    await trio.lowlevel.checkpoint()  # checking signatures takes CPU time
        except P2PError as error:
            log.debug("%s did not say which swarm it is in: %s", link.peer, error)

    def _take(self, raw: bytes, link: Link, source: str, reports: dict[str, _Report]) -> None:
        said = read_record_or_announcement(raw, now_ms=int(self._wall_clock() * 1000))
        if isinstance(said, SwarmRecord):
            told = sum(one.source == source for one in reports.values())
            if said.id in reports or (len(reports) < MAX_SWARMS and told < MAX_SWARMS_TOLD):
                reports.setdefault(said.id, _Report(said, link.kind, source)).reported_by.append(link.peer)
            return
        swarm = reports.get(said.swarm)
        if swarm is None or (said.peer not in swarm.members and len(swarm.members) >= MAX_MEMBERS):
            return
        known = swarm.members.get(said.peer)
        if known is None or known.sequence < said.sequence:
            swarm.members[said.peer] = said

    async def _fetch_manifest(self, network: Network, one: _Report) -> None:
        model_hash = one.record.model_hash
        if model_hash in self._manifests:
            return
        try:
            found = await fetch_manifest(
                network, one.reported_by, model_hash, timeout_s=ASK_TIMEOUT_S, max_bytes=MAX_SHOWN_MANIFEST_BYTES
            )
        except UnknownSwarm as error:
            log.debug("%s", error)
            return
        self._manifests[model_hash] = found
        for oldest in list(self._manifests)[:-MAX_SWARMS]:
            del self._manifests[oldest]


def expectation_of(members: Sequence[Announcement], n_blocks: int, link_s: LinkSeconds) -> Pieces[ExpectedSpeed]:
    """Estimate seconds per token over the cheapest route, from the members' claims and the measured links."""
    demand = RouteRequest(Span(0, n_blocks), TOKENS)
    fitting = [member for member in members if member.serves]
    try:
        route = yield from search_route(fitting, demand, link_s)
    except NoRoute as error:
        return ExpectedSpeed(missing_block=error.block)
    return ExpectedSpeed(route_seconds(route, fitting, demand, link_s, KnownCosts()))
