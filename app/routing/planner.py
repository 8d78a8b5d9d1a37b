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
from app.routing.estimates import Measured, link_seconds
from app.routing.reroute import Scales, Standing, is_worth_moving
from app.routing.route import Demand, Known, LinkSeconds, NoRoute, Privacy, Route
from app.routing.search import find_route, mend_route, why_unused
from app.routing.trust import TrustBook
from app.swarm.records import Announcement

Members = Callable[[], Sequence[Announcement]]


@dataclass(frozen=True)
class Wishes:
    """What the person wants of the ways that replies take."""

    private_blocks: int = 0  # so many at either end run here or on trusted peers alone
    trusted: frozenset[str] = frozenset()


class Guidance:
    """All that an asker knows of its swarm."""

    def __init__(
        self,
        network: Network,
        members: Members,
        wishes: Callable[[], Wishes] | None = None,
        book: TrustBook | None = None,
    ) -> None:
        self._network, self.members, self._wishes = network, members, wishes or Wishes
        self.book = book or TrustBook(clock=time.time)
        self.bans = Bans()
        self.measured = Measured()

    def innocent(self) -> frozenset[str]:
        """Peers that are never suspected: this node, and those that the person trusts."""
        return self._wishes().trusted | {self._network.peer_id}

    def privacy(self, blocks: int, edge: int | None = None) -> Privacy:
        """What must stay private; `edge` where a reply wants more than the settings say, and never less."""
        return Privacy(max(self._wishes().private_blocks, edge or 0), blocks, self.innocent())

    def shunned(self) -> dict[str, Reason]:
        """Who cannot be used now, and why."""
        standings = {m.peer: self.book.standing(m.peer) for m in self.members()}
        distrusted = {peer: because("distrusted", one.why, peer) for peer, one in standings.items() if not one.trusted}
        return self.bans.active(trio.current_time()) | {p: w for p, w in distrusted.items() if p not in self.innocent()}

    def unused(self, blocks: int) -> dict[str, Reason]:
        """Whom no session of this node goes through now, and why; a token is all that such a session needs room for."""
        demand = Demand(Span(0, blocks), 1, privacy=self.privacy(blocks))
        said = {m.peer: why for m in self.members() if (why := why_unused(m, demand)) is not None}
        return said | self.shunned()

    def known(self) -> Known:
        """What counts for more than members' words."""
        innocent = self.innocent()
        standings = {m.peer: self.book.standing(m.peer) for m in self.members() if m.peer not in innocent}
        return Known(self.measured.block_s, {peer: one.penalty_s for peer, one in standings.items() if one.score < 1})

    def link_s(self) -> LinkSeconds:
        """One-way seconds between two peers, as far as this node can tell; "" is this node."""
        rtt_s = {link.peer: link.rtt_s for link in self._network.links() if link.rtt_s is not None}
        return link_seconds(self._network.peer_id, rtt_s, self.members())

    def took(self, route: Route, token_s: float, demand: Demand) -> None:
        """A usual token of a reply took so long over this route."""
        link_s, ends = self.link_s(), ["", *(hop.peer for hop in route), ""]
        links_s = sum(link_s(a, b) for a, b in pairwise(ends))
        serving = [m for m in self.members() if m.serves]
        expected = believed_seconds(serving, replace(demand, prompt_tokens=0), Known())
        self.measured.note(route, token_s, links_s, expected)

    def find(self, current: Route, demand: Demand, avoid: Sequence[str]) -> Route:
        """A route to take now, with as much of the current one as can be kept; raises `NoRoute`."""
        members, link_s, shunned, known = self.members(), self.link_s(), self.shunned(), self.known()
        everybody = {*avoid, *shunned}
        try:
            if current:
                return mend_route(current, members, demand, link_s, avoid=everybody, known=known)
            return find_route(members, demand, link_s, avoid=everybody, known=known)
        except NoRoute as error:
            raise self._explained(error, members, shunned, demand) from None

    def better(self, standing: Standing, demand: Demand) -> Route | None:
        """A route for which a session should leave one that works, if there is one."""
        self.took(standing.route, standing.token_s, demand)
        scales = Scales(self.members(), demand, self.link_s(), self.known())
        try:
            # The prompt has been read: what remains is one token at a time.
            ahead = replace(demand, prompt_tokens=0)
            new = find_route(scales.members, ahead, scales.link_s, avoid=self.shunned(), known=scales.known)
        except NoRoute:
            return None
        return new if is_worth_moving(standing, new, scales) else None

    def _explained(
        self, error: NoRoute, members: Sequence[Announcement], shunned: dict[str, Reason], demand: Demand
    ) -> NoRoute:
        """The same with the reasons why the block's holders are not used."""
        block = error.block
        holders = [m.peer for m in members if m.serves and m.span is not None and block in m.span]
        reasons = [f"{p} ({shunned[p].text})" for p in holders if p in shunned and demand.privacy.allows(p, block)]
        if not reasons:
            error.peers = tuple(holders)
            return error
        busy = all(self.bans.is_busy(peer) for peer in holders)
        return NoRoute(block, f" that can be used now: {'; '.join(reasons)}", busy=busy, peers=holders)


class SessionGuide:
    """Routes for one session of an asker."""

    def __init__(self, guidance: Guidance, demand: Demand) -> None:
        self._guidance, self._demand = guidance, demand

    def route(self, current: Route, avoid: Sequence[str]) -> Route:
        """A route to take now."""
        return self._guidance.find(current, self._demand, avoid)

    def failed(self, peer: str, why: Reason, *, busy: bool) -> None:
        """A hop could not be used."""
        is_news = self._guidance.bans.ban(peer, trio.current_time(), why, brief=busy)
        if is_news and not busy:
            self._guidance.book.note(peer, "failed", f"failed: {why.text}")

    def worked(self, peer: str) -> None:
        """A hop did its part."""
        self._guidance.bans.forgive(peer)

    def better(self, standing: Standing) -> Route | None:
        """A route for which the session should leave its own, if there is one."""
        return self._guidance.better(standing, self._demand)


class PinnedGuide(SessionGuide):
    """One route and no other."""

    def __init__(self, guidance: Guidance, demand: Demand, route: Route) -> None:
        super().__init__(guidance, demand)
        self._route = route

    def route(self, current: Route, avoid: Sequence[str]) -> Route:
        """The route, as long as nothing has gone wrong on it."""
        usable = not current and not {hop.peer for hop in self._route} & set(
            self._guidance.bans.active(trio.current_time())
        )
        if not usable:
            raise NoRoute(self._route[0].span.start)
        return self._route

    def better(self, standing: Standing) -> Route | None:
        """There is none."""
        return None
