"""Which ways an asker's sessions take: what it knows of the swarm by itself, and routes that follow from it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import trio

from app.core.network import Network
from app.core.reasons import Reason, because
from app.core.span import Span
from app.routing.bans import Bans
from app.routing.cost import believed_seconds
from app.routing.estimates import MeasuredSpeeds, link_seconds
from app.routing.reroute import RouteComparison, RunningRoute, is_worth_moving
from app.routing.route import KnownCosts, LinkSeconds, NoRoute, Privacy, Route, RouteRequest
from app.routing.search import find_route, repair_route, why_unused
from app.routing.trust import TrustBook
from app.swarm.records import Announcement

Members = Callable[[], Sequence[Announcement]]


@dataclass(frozen=True)
class PrivacyPreferences:
    """What the person wants of the ways that replies take."""

    private_blocks: int = 0  # so many at either end run here or on trusted peers alone
    trusted: frozenset[str] = frozenset()


class RoutePlanner:
    """All that an asker knows of its swarm."""

    def __init__(
        self,
        network: Network,
        members: Members,
        preferences: Callable[[], PrivacyPreferences] | None = None,
        book: TrustBook | None = None,
    ) -> None:
        self._network, self.members, self._preferences = network, members, preferences or PrivacyPreferences
        self.book = book or TrustBook(clock=time.time)
        self.bans = Bans()
        self.measured = MeasuredSpeeds()

    def not_accused(self) -> frozenset[str]:
        """Peers that are never suspected: this node, and those that the person trusts."""
        return self._preferences().trusted | {self._network.peer_id}

    def privacy(self, blocks: int, edge: int | None = None) -> Privacy:
        """What must stay private; `edge` where a reply wants more than the settings say, and never less."""
        return Privacy(max(self._preferences().private_blocks, edge or 0), blocks, self.not_accused())

    def avoided(self) -> dict[str, Reason]:
        """Who cannot be used now, and why."""
        scores = {m.peer: self.book.standing(m.peer) for m in self.members()}
        distrusted = {peer: because("distrusted", one.why, peer) for peer, one in scores.items() if not one.trusted}
        return self.bans.active(trio.current_time()) | {
            p: w for p, w in distrusted.items() if p not in self.not_accused()
        }

    def unused(self, blocks: int) -> dict[str, Reason]:
        """Whom no session of this node goes through now, and why; a token is all that such a session needs room for."""
        request = RouteRequest(Span(0, blocks), 1, privacy=self.privacy(blocks))
        said = {m.peer: why for m in self.members() if (why := why_unused(m, request)) is not None}
        return said | self.avoided()

    def known(self) -> KnownCosts:
        """What counts for more than members' words."""
        not_accused = self.not_accused()
        scores = {m.peer: self.book.standing(m.peer) for m in self.members() if m.peer not in not_accused}
        return KnownCosts(self.measured.block_s, {peer: one.penalty_s for peer, one in scores.items() if one.score < 1})

    def link_s(self) -> LinkSeconds:
        """One-way seconds between two peers, as far as this node can tell; "" is this node."""
        rtt_s = {link.peer: link.rtt_s for link in self._network.links() if link.rtt_s is not None}
        return link_seconds(self._network.peer_id, rtt_s, self.members())

    def record_token_time(self, route: Route, token_s: float, request: RouteRequest) -> None:
        """A usual token of a reply took so long over this route."""
        link_s, ends = self.link_s(), ["", *(hop.peer for hop in route), ""]
        links_s = sum(link_s(a, b) for a, b in pairwise(ends))
        serving = [m for m in self.members() if m.serves]
        expected = believed_seconds(serving, replace(request, prompt_tokens=0), KnownCosts())
        self.measured.note(route, token_s, links_s, expected)

    def find(self, current: Route, request: RouteRequest, avoid: Sequence[str]) -> Route:
        """A route to take now, with as much of the current one as can be kept; raises `NoRoute`."""
        members, link_s, avoided, known = self.members(), self.link_s(), self.avoided(), self.known()
        everybody = {*avoid, *avoided}
        try:
            if current:
                return repair_route(current, members, request, link_s, avoid=everybody, known=known)
            return find_route(members, request, link_s, avoid=everybody, known=known)
        except NoRoute as error:
            raise self._explained(error, members, avoided, request) from None

    def better(self, standing: RunningRoute, request: RouteRequest) -> Route | None:
        """A route for which a session should leave one that works, if there is one."""
        self.record_token_time(standing.route, standing.token_s, request)
        scales = RouteComparison(self.members(), request, self.link_s(), self.known())
        try:
            # The prompt has been read: what remains is one token at a time.
            ahead = replace(request, prompt_tokens=0)
            new = find_route(scales.members, ahead, scales.link_s, avoid=self.avoided(), known=scales.known)
        except NoRoute:
            return None
        return new if is_worth_moving(standing, new, scales) else None

    def _explained(
        self, error: NoRoute, members: Sequence[Announcement], avoided: dict[str, Reason], request: RouteRequest
    ) -> NoRoute:
        """The same with the reasons why the block's holders are not used."""
        block = error.block
        holders = [m.peer for m in members if m.serves and m.span is not None and block in m.span]
        reasons = [f"{p} ({avoided[p].text})" for p in holders if p in avoided and request.privacy.allows(p, block)]
        if not reasons:
            error.peers = tuple(holders)
            return error
        busy = all(self.bans.is_busy(peer) for peer in holders)
        return NoRoute(block, f" that can be used now: {'; '.join(reasons)}", busy=busy, peers=holders)


class SessionRoutes:
    """Routes for one session of an asker."""

    def __init__(self, planner: RoutePlanner, request: RouteRequest) -> None:
        self._planner, self._request = planner, request

    def route(self, current: Route, avoid: Sequence[str]) -> Route:
        """A route to take now."""
        return self._planner.find(current, self._request, avoid)

    def failed(self, peer: str, why: Reason, *, busy: bool) -> None:
        """A hop could not be used."""
        is_news = self._planner.bans.ban(peer, trio.current_time(), why, brief=busy)
        if is_news and not busy:
            self._planner.book.note(peer, "failed", f"failed: {why.text}")

    def worked(self, peer: str) -> None:
        """A hop did its part."""
        self._planner.bans.forgive(peer)

    def better(self, standing: RunningRoute) -> Route | None:
        """A route for which the session should leave its own, if there is one."""
        return self._planner.better(standing, self._request)


class PinnedRoute(SessionRoutes):
    """One route and no other."""

    def __init__(self, planner: RoutePlanner, request: RouteRequest, route: Route) -> None:
        super().__init__(planner, request)
        self._route = route

    def route(self, current: Route, avoid: Sequence[str]) -> Route:
        """The route, as long as nothing has gone wrong on it."""
        usable = not current and not {hop.peer for hop in self._route} & set(
            self._planner.bans.active(trio.current_time())
        )
        if not usable:
            raise NoRoute(self._route[0].span.start)
        return self._route

    def better(self, standing: RunningRoute) -> Route | None:
        """There is none."""
        return None
