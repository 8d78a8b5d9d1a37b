"""Plans the routes of an asker's sessions from announcements, measurements, refusals, bans and trust.

The search itself is in `app.routing.search`, moving a running session in `app.routing.reroute`, and the links that are
gone round in `app.routing.broken_links`. A search lets other tasks run in between, so members and bans can change while
it runs. A route through a peer that was banned or left meanwhile is searched again; what changes later, the session
finds out when it uses the route, and has it repaired.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import trio

from app.core.network import Network
from app.core.pieces import Pieces, at_once, by_chunks, in_pieces
from app.core.reasons import Reason, because
from app.core.span import Span
from app.routing.bans import Bans
from app.routing.broken_links import BrokenLinks, Link
from app.routing.capacity import FullHops, largest_session
from app.routing.cost import (
    LAST_RESORT_TIMES,
    believed_in_pieces,
    believed_seconds,
    entry_seconds,
    hidden_by_others,
    last_resort_blocks,
    links_seconds,
    overhead_seconds,
    reading_pace,
)
from app.routing.estimates import LinkEstimates, MeasuredSpeeds, RateClaims, RateEstimates, link_seconds_in_pieces
from app.routing.prefer_here import prefer_here
from app.routing.reroute import RouteComparison, RunningRoute, is_worth_moving
from app.routing.route import (
    Hop,
    KnownCosts,
    LinkSeconds,
    NoRoute,
    Privacy,
    ReadingPace,
    Route,
    RouteRequest,
    RouteTimes,
)
from app.routing.search import repair_route, search_in_order, search_route, why_unused
from app.routing.strangers import Strangers
from app.routing.trust import TrustBook, TrustScore
from app.routing.wire_choice import Wires, choose_wires, keep_wires
from app.serving.homes import Homes
from app.session.adapter_index import AdapterRef
from app.session.frame import INT8
from app.session.wire import CACHE_EXCEEDED, MAX_TOKENS
from app.swarm.records import Announcement
from p2p.rate_limit import backoff_s

Members = Callable[[], Sequence[Announcement]]
Refusing = Callable[[], Mapping[str, Reason]]  # peers that a session must not ask now, with the reasons

HIDDEN_EVERY = 20  # one new route in so many tries a member that others make seem slow
WITHOUT_ADAPTER_S = 600.0  # for so long, replies with an adapter go round a peer to which it did not get
_REMEMBERED_WITHOUT = 1024
_SEARCHES = 3  # for one route, if those found are out of date at once
_DETOURS = 4  # searches, or one more, for one that goes round the links that broke
_AGAIN_S, _LATEST_AGAIN_S = 0.25, 300.0  # until a session asks a hop again that had no room for it, doubled each time
_PAUSED_HERE = "this node is paused; `shoal status` says why, and what lets it host again"
_HOST_MORE = "wait for a member that does, invite one (`shoal invite`), or raise this node's memory limit (max_vram)"


@dataclass(frozen=True)
class PrivacyPreferences:
    """The user's limits on which peers may see the blocks that reveal text, and how much to use this node itself."""

    private_blocks: int = 0  # blocks at either end that run only here or on trusted peers
    trusted: frozenset[str] = frozenset()
    prefer_here: float = 0.0  # share of the speed that a route through this node's own blocks may cost, 0 to 1


class RoutePlanner:
    """Routes for one asker; holds what it measured, its bans and its trust book."""

    def __init__(
        self,
        network: Network,
        members: Members,
        preferences: Callable[[], PrivacyPreferences] | None = None,
        book: TrustBook | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._network, self.members, self._preferences = network, members, preferences or PrivacyPreferences
        self.book = book or TrustBook(clock=time.time)
        self.bans = Bans()
        self.broken_links = BrokenLinks()
        self.full_hops = FullHops()
        self.measured = MeasuredSpeeds()
        self._rates = RateClaims()
        self.homes = Homes(network)
        self._strangers = Strangers(self.homes, rng or random.SystemRandom())
        self._new_routes = 0  # searched for
        self._without_adapter: dict[tuple[AdapterRef, str], float] = {}  # until when; the latest last
        self._searching = trio.Lock()  # one search at a time: the next one sees whom this one tries for the first time

    def not_accused(self) -> frozenset[str]:
        """Peers that are never distrusted: this node and those that the user trusts."""
        return self._preferences().trusted | {self._network.peer_id}

    def privacy(self, blocks: int, edge: int | None = None) -> Privacy:
        """Return which blocks must stay private; `edge` of a reply can raise the configured number, not lower it."""
        return Privacy(max(self._preferences().private_blocks, edge or 0), blocks, self.not_accused())

    def avoided(self) -> dict[str, Reason]:
        """Return the peers that are banned or distrusted now, with the reasons."""
        return self._avoided(at_once(self._standings(self.members())))

    def _avoided(self, scores: Mapping[str, TrustScore]) -> dict[str, Reason]:
        distrusted = {peer: because("distrusted", one.why, peer) for peer, one in scores.items() if not one.trusted}
        return self.bans.active(trio.current_time()) | distrusted

    def _standings(self, members: Sequence[Announcement]) -> Pieces[dict[str, TrustScore]]:
        """Return the scores of those members that can be accused and that there are events about."""
        not_accused = self.not_accused()
        return by_chunks(lambda some: self.book.standings(m.peer for m in some if m.peer not in not_accused), members)

    def unused(self, blocks: int) -> dict[str, Reason]:
        """Return the peers that no new session of this node uses now, with the reasons.

        Counts as full only a peer without room for a single token.
        """
        request = RouteRequest(Span(0, blocks), 1, privacy=self.privacy(blocks))
        by_announcement = {m.peer: why for m in self.members() if (why := why_unused(m, request)) is not None}
        return by_announcement | self.full_hops.full(request.tokens, trio.current_time()) | self.avoided()

    async def largest_session(self, request: RouteRequest, *, now_free: bool = False) -> int:
        """Return the tokens of the largest session for which members have room, or have it now if `now_free`.

        As far as they say, but strangers that failed, and members that are distrusted, count only where nobody else
        serves a block. No bound if a block is served by nobody, or if somebody does not say how much fits.
        """
        members = self.members()
        scores = await in_pieces(self._standings(members))
        doubtful = {peer for peer, one in scores.items() if not one.trusted}
        doubtful |= self._strangers.failed_among((member.peer for member in members), trio.current_time())

        def room_of(member: Announcement) -> int:
            return member.kv_free_tokens if now_free else member.kv_total_tokens or MAX_TOKENS

        found = await in_pieces(largest_session(members, request, room_of, doubtful))
        return MAX_TOKENS if found is None else found

    def _known(
        self, members: Sequence[Announcement], scores: Mapping[str, TrustScore], again: str = ""
    ) -> Pieces[KnownCosts]:
        """Return measured block times, trust penalties, and what bytes cost; `again` is a hop to be measured again."""
        penalty_s = {peer: one.penalty_s for peer, one in scores.items() if one.score < 1}
        yield from self._rates.update(members)
        rates = self._rates.estimates(self._network.peer_id, self._network.links())
        byte_s = yield from by_chunks(lambda some: rates.byte_s(m.peer for m in some), members)
        homes = yield from self._homes_of(members)
        return KnownCosts(self.measured.block_s(trio.current_time(), again), penalty_s, byte_s, homes=homes)

    def _homes_of(self, members: Sequence[Announcement]) -> Pieces[dict[str, str]]:
        return by_chunks(lambda some: {member.peer: self.homes.of(member.peer) for member in some}, members)

    def link_s(self) -> LinkSeconds:
        """Return a function for the estimated one-way seconds between two peers; "" is this node."""
        return at_once(self._link_s(self.members()))

    def _link_s(self, members: Sequence[Announcement]) -> Pieces[LinkEstimates]:
        rtt_s = {link.peer: link.rtt_s for link in self._network.links() if link.rtt_s is not None}
        return link_seconds_in_pieces(self._network.peer_id, rtt_s, members)

    def rates(self) -> RateEstimates:
        """Return a function for the estimated bytes a second from one peer to another; "" is this node."""
        at_once(self._rates.update(self.members()))
        return self._rates.estimates(self._network.peer_id, self._network.links())

    def record_times(self, ran: RunningRoute, request: RouteRequest) -> None:
        """Update the per-peer estimates from a reply's seconds per token, and those that hops may have cost besides.

        Be wary of strangers if some of its hops are measured for the first time, and it was far slower than they claim.
        """
        if ran.token_s is None and not ran.lost_s:
            return
        serving = [m for m in self.members() if m.serves]
        expected = believed_seconds(serving, replace(request, prompt_tokens=0), KnownCosts())
        now, slow = trio.current_time(), set[str]()
        if ran.token_s is not None:
            links_s = links_seconds(ran.route, self.link_s())
            # Slow members can make others seem slow, but no hop took longer than all hops together.
            most_s = max(ran.token_s - links_s, 0.0)
            known = [hop for hop in ran.route if hop.peer in expected]
            expected |= {hop.peer: min(most_s / len(hop.span), expected[hop.peer]) for hop in known}
            slow |= {*self.measured.note(ran.route, ran.token_s, links_s, expected, now, ran.lost_s)}
        left = [hop for hop in ran.lost_s if ran.token_s is None or hop not in ran.route]
        slow |= {hop.peer for hop in left if self.measured.note_lost(hop, ran.lost_s[hop], expected, now)}
        self._strangers.were_far_slower(slow, now)

    async def find(
        self,
        current: Route,
        request: RouteRequest,
        avoid: Sequence[str],
        refusing: Refusing = dict,
        formats: Mapping[str, str] | None = None,
    ) -> Route:
        """Find a route, keeping as much of the current one as possible; raises `NoRoute` with the reasons.

        `refusing` is called when the search begins: others have searched while this one waited for its turn. `formats`
        has the number formats of the current route's peers, which their successors should have too.
        """
        async with self._searching:
            return await in_pieces(self._search(current, request, avoid, refusing, formats))

    def _search(
        self,
        current: Route,
        request: RouteRequest,
        avoid: Sequence[str],
        refusing: Refusing,
        formats: Mapping[str, str] | None = None,
    ) -> Pieces[Route]:
        again = "" if current else self.measured.to_measure_again(trio.current_time())
        for _ in range(_SEARCHES):
            members = self.members()
            route = yield from self._search_among(members, current, request, avoid, refusing, formats, again)
            if not self._is_outdated(route, members):
                break
        self.measured.searched(again, route, trio.current_time())
        self._begin_trials(route, current)
        return route

    def _search_among(
        self,
        members: Sequence[Announcement],
        current: Route,
        request: RouteRequest,
        avoid: Sequence[str],
        refusing: Refusing,
        formats: Mapping[str, str] | None,
        again: str,
    ) -> Pieces[Route]:
        full = refusing()
        scores = yield from self._standings(members)
        avoided = self._avoided(scores)
        known = yield from self._known(members, scores, again)
        comparison = RouteComparison(members, request, (yield from self._link_s(members)), known)

        def repair(excluded: Collection[str]) -> Pieces[Route]:
            return repair_route(
                current, members, request, comparison.link_s, avoid=excluded, known=known, formats=formats
            )

        def search_with(to_try: Collection[str]) -> Pieces[Route]:
            among = replace(comparison, known=replace(known, to_try=to_try))
            search = repair if current else partial(self._search_new, among)
            search = partial(self._past_broken_links, search, request, current)
            return self._without_trials(search, members, {*avoid, *avoided, *full}, current)

        hidden = [] if current else (yield from self._hidden_to_try(comparison))
        try:
            return (yield from search_in_order(search_with, hidden))
        except NoRoute as error:
            raise self._explained(error, members, avoided, full, request) from None

    def _hidden_to_try(self, among: RouteComparison) -> Pieces[list[str]]:
        """Return the members that slow ones hide, by lot, for one new route in `HIDDEN_EVERY`; else none."""
        self._new_routes += 1
        if self._new_routes % HIDDEN_EVERY:
            return []
        serving = [member for member in among.members if member.serves]
        return self._strangers.in_order((yield from hidden_by_others(serving, among.request, among.known)))

    def _search_new(self, among: RouteComparison, excluded: Collection[str]) -> Pieces[Route]:
        found = yield from search_route(among.members, among.request, among.link_s, avoid=excluded, known=among.known)
        own, share = self._network.peer_id, self._preferences().prefer_here
        return (yield from prefer_here(found, own, among, excluded, share))

    def _is_outdated(self, route: Route, members: Sequence[Announcement]) -> bool:
        """True if a hop was banned, left or gave up its blocks since a search among these members began."""
        spans = {hop.peer: hop.span for hop in route}
        if not spans.keys().isdisjoint(self.bans.active(trio.current_time())):
            return True
        if members is self.members():
            return False
        served, serves = (
            {
                m.peer
                for m in some
                if m.peer in spans and m.serves and m.span is not None and m.span.covers(spans[m.peer])
            }
            for some in (members, self.members())
        )
        return not served <= serves

    async def find_first(
        self, held: Route, unread: int, request: RouteRequest, avoid: Sequence[str], refusing: Refusing
    ) -> Route:
        """Find a route for a prompt of which the hops of `held` have cached all but `unread` tokens.

        Keeps these hops, unless a route that reads the whole prompt anew is better even so, which is looked for if much
        is unread, if one of them was late (the prompt may have been given up because of it) or is a last resort. It is
        better if it is faster, where a route over such hops counts as many times as slow. Raises `NoRoute`.
        """
        now = trio.current_time()
        serving = {m.peer: m for m in self.members() if m.serves}
        spans = {m.peer: m.span for m in serving.values() if m.span is not None}
        gone = [hop.peer for hop in held if hop.peer not in spans or not spans[hop.peer].covers(hop.span)]
        async with self._searching:
            try:
                kept = await in_pieces(self._search(held, request, [*avoid, *gone], refusing))
            except NoRoute:  # a hop that is needed serves other blocks by now
                return await in_pieces(self._search((), request, avoid, refusing))
            was_late = any(self.measured.was_late(hop.peer, now) for hop in held)
            is_good = not was_late and not last_resort_blocks(held, serving, request)
            if kept == held and 2 * unread <= request.prompt_tokens and is_good:
                return kept
            fresh = await in_pieces(self._search((), request, avoid, refusing))
            seconds_of = await in_pieces(self._seconds_with(held, unread, request))

        def weighed_s(route: Route) -> float:
            return seconds_of(route) * (LAST_RESORT_TIMES if last_resort_blocks(route, serving, request) else 1.0)

        return min(kept, fresh, key=weighed_s)

    def _seconds_with(self, held: Route, unread: int, request: RouteRequest) -> Pieces[Callable[[Route], float]]:
        """Return a function for the seconds per token of a reply over a route, the prompt included.

        Hops of `held` read `unread` tokens of the prompt, the others all of it. Infinity if a hop has left.
        """
        members, link_s = [m for m in self.members() if m.serves], self.link_s()
        known = yield from self._known(members, (yield from self._standings(members)))
        rest = replace(request, prompt_tokens=unread, tokens=request.tokens - request.prompt_tokens + unread)
        whole_s = yield from believed_in_pieces(members, request, known)
        rest_s = yield from believed_in_pieces(members, rest, known)
        entry_s = yield from by_chunks(lambda some: entry_seconds(some, known, rest), members)

        def seconds(route: Route) -> float:
            if any(hop.peer not in entry_s for hop in route):
                return float("inf")
            overhead_s = overhead_seconds(route, links_seconds(route, link_s), entry_s)
            return overhead_s + sum(len(hop.span) * (rest_s if hop in held else whole_s)[hop.peer] for hop in route)

        return seconds

    async def times(self, request: RouteRequest) -> Callable[[Route], RouteTimes]:
        """Return a function for how long a reply to a prompt takes over a route."""
        prompt = request.prompt_tokens
        first_s = await in_pieces(self._seconds_with((), prompt, replace(request, tokens=prompt + 1)))
        token_s = await in_pieces(self._seconds_with((), 0, replace(request, tokens=1, prompt_tokens=0)))
        return lambda route: RouteTimes(first_s(route), token_s(route))

    def _without_trials(
        self,
        search: Callable[[Collection[str]], Pieces[Route]],
        members: Sequence[Announcement],
        excluded: set[str],
        current: Route,
    ) -> Pieces[Route]:
        """Search for a route without strangers that are not to be tried now, if there is one.

        A stranger that claims to be the fastest and does nothing then costs one session its time, and not all. After
        one that failed they are tried by lot, and not in the order of their claims: thousands can claim to be fastest.
        """
        now, own = trio.current_time(), {self._network.peer_id, *(hop.peer for hop in current)}
        among = self._strangers.among
        found = yield from by_chunks(lambda some: dict.fromkeys(among(m.peer for m in some if m.serves)), members)
        strangers = found.keys() - own - excluded
        not_now, failed = self._strangers.not_now(strangers, now), self._strangers.failed_among(strangers, now)
        to_try = self._strangers.in_order(strangers - not_now) if self._strangers.by_lot else []

        def search_with(tried: Collection[str]) -> Pieces[Route]:
            return search(excluded | not_now | {*to_try}.difference(tried))

        try:
            return (yield from search_in_order(search_with, to_try))
        except NoRoute:
            if not not_now:
                raise
        if set() < failed < not_now:
            with suppress(NoRoute):
                return (yield from search(excluded | failed))
        return (yield from search(excluded))

    def _past_broken_links(
        self,
        search: Callable[[Collection[str]], Pieces[Route]],
        request: RouteRequest,
        current: Route,
        excluded: Collection[str],
    ) -> Pieces[Route]:
        """Search for a route that goes round links that broke, and hops that share several, if there is one.

        The hops of the current route stay together, and links that the session itself has tried are tried again.
        """
        now, kept = trio.current_time(), {self._network.peer_id, *(hop.peer for hop in current)}
        broken = {link for link in self.broken_links.active(now) - {*request.links} if not link <= kept}
        if not broken:
            return (yield from search(excluded))
        shared = self.broken_links.shared_ends(now)
        first: Route = ()
        to_try = list(dict.fromkeys((shared - kept, frozenset[str]())))  # peers to leave out, few of them first
        for left_out in to_try:
            try:
                found = yield from search({*excluded, *left_out})
            except NoRoute:
                continue
            first = first or found
            peers = [hop.peer for hop in found]
            link = next((pair for pair in pairwise(peers) if frozenset(pair) in broken), None)
            if link is None:
                return found
            if len(to_try) < _DETOURS:
                to_try += [left_out | {peer} for peer in reversed(link) if peer not in kept]
        return first or (yield from search(excluded))

    def _begin_trials(self, route: Route, current: Route) -> None:
        """Note the peers that a session is about to use for the first time."""
        own = {self._network.peer_id, *(hop.peer for hop in current)}
        self._strangers.begin({hop.peer for hop in route} - own, trio.current_time())

    def link_broke(self, sender: str, receiver: str) -> None:
        """Go round a link between two hops for a while."""
        self.broken_links.note(self.homes.machines((sender, receiver)), trio.current_time())

    def worked(self, peer: str) -> None:
        """Record that a peer did its part in a session."""
        self.bans.forgive(peer)
        self._strangers.worked(peer)

    def failed(self, peer: str, why: Reason) -> None:
        """Note in the trust book that a peer failed, and be wary of others that never worked if it never did."""
        self.book.note(peer, "failed", f"failed: {why.text}")
        self.tried_in_vain(peer)

    def refused(self, peer: str, tokens: int, why: Reason) -> None:
        """Note that a peer had no room for a session of so many tokens; be wary of strangers if it had announced it."""
        self._note_refusal(peer, tokens, why, contradicts=self._announces_room(peer, tokens))

    def leaves(self, peer: str, tokens: int, why: Reason) -> None:
        """Doubt a peer that is about to leave, and announces that it serves, like one that has no room after all."""
        if self._announces_room(peer, tokens):
            self._note_refusal(peer, tokens, why, contradicts=True)

    def _note_refusal(self, peer: str, tokens: int, why: Reason, *, contradicts: bool) -> None:
        if self.full_hops.refused(peer, tokens, why, trio.current_time(), contradicts=contradicts):
            self.tried_in_vain(peer)

    def _announces_room(self, peer: str, tokens: int) -> bool:
        """True if a peer announces that it serves, and has room for a session of so many tokens."""
        return any(m.peer == peer and m.serves and m.kv_free_tokens >= tokens for m in self.members())

    def waited(self, hop: Hop, pace: ReadingPace, tokens: int, waited_s: float) -> None:
        """Note a hop that was waited for so long, far longer than was believed, and had not read so many tokens."""
        now = trio.current_time()
        if hop.peer not in self.measured.block_s(now):
            self._strangers.were_far_slower([hop.peer], now)
        self.measured.note_wait(hop, pace, tokens, waited_s, now)

    def tried_in_vain(self, peer: str) -> None:
        """Be wary of peers that never worked, if this one never did."""
        self._strangers.failed(peer, trio.current_time())

    def lacks_adapter(self, adapter: AdapterRef, peer: str) -> None:
        """Note that an adapter did not get to a peer."""
        self._without_adapter.pop((adapter, peer), None)
        self._without_adapter[adapter, peer] = trio.current_time() + WITHOUT_ADAPTER_S
        if len(self._without_adapter) > _REMEMBERED_WITHOUT:
            del self._without_adapter[next(iter(self._without_adapter))]

    def has_adapter(self, adapter: AdapterRef, peer: str) -> None:
        """Note that a peer computes with an adapter."""
        self._without_adapter.pop((adapter, peer), None)

    def without_adapter(self, adapter: AdapterRef) -> set[str]:
        """Return the peers to which an adapter did not get lately."""
        now = trio.current_time()
        return {peer for (one, peer), until in self._without_adapter.items() if one == adapter and now < until}

    async def better(self, standing: RunningRoute, request: RouteRequest, refusing: Refusing = dict) -> Route | None:
        """Return a route that is worth moving a running session to, or None; without `refusing` peers."""
        async with self._searching:
            self.record_times(standing, request)
            return await in_pieces(self._search_better(standing, request, refusing))

    async def would_use(self, hop: Hop, request: RouteRequest, avoid: Collection[str]) -> bool:
        """Return True if a new session would use this hop, be it that there is no other.

        Only speed counts here: who waits for a hop in vain is better off with a last resort.
        """
        async with self._searching:
            try:
                _, best = await in_pieces(self._search_beside((hop,), replace(request, finest_first=False), avoid))
            except NoRoute:
                return True
        return any(one.peer == hop.peer for one in best)

    def _search_beside(
        self, current: Route, request: RouteRequest, avoid: Collection[str]
    ) -> Pieces[tuple[RouteComparison, Route]]:
        """Search for the best route while `current` is in use; returns also what it was compared by."""
        members = self.members()
        scores = yield from self._standings(members)
        known = yield from self._known(members, scores)
        comparison = RouteComparison(members, request, (yield from self._link_s(members)), known)
        search, avoided = partial(self._search_new, comparison), {*avoid, *self._avoided(scores)}
        search = partial(self._past_broken_links, search, request, current)
        return comparison, (yield from self._without_trials(search, members, avoided, current))

    def _search_better(self, standing: RunningRoute, request: RouteRequest, refusing: Refusing) -> Pieces[Route | None]:
        try:
            # The prompt has been processed, so only single tokens count.
            wanted = replace(request, prompt_tokens=0)
            ahead, new = yield from self._search_beside(standing.route, wanted, refusing())
        except NoRoute:
            return None
        if not is_worth_moving(standing, new, replace(ahead, request=request)):
            return None
        self._begin_trials(new, standing.route)
        return new

    def _explained(
        self,
        error: NoRoute,
        members: Sequence[Announcement],
        avoided: dict[str, Reason],
        full: Mapping[str, Reason],
        request: RouteRequest,
    ) -> NoRoute:
        """Return the error with the reasons why the peers that serve the missing block are not used."""
        block = error.block
        hosts = [m for m in members if m.serves and m.span is not None and block in m.span]
        holders = [m.peer for m in hosts]
        said = {m.peer: why for m in hosts if (why := why_unused(m, request)) is not None}
        small = {peer: why for peer, why in {**said, **full}.items() if why.code == CACHE_EXCEEDED}
        whys = {**small, **full, **avoided}
        unusable = [p for p in holders if p in whys and request.privacy.allows(p, block)]
        reasons = [text if p in (text := whys[p].text) else f"{p} ({text})" for p in unusable]
        own = next((m for m in members if m.peer == self._network.peer_id), None)
        if own is not None and own.state == "paused":
            reasons.append(_PAUSED_HERE)
        if not unusable:
            error.peers = tuple(holders)
            if not error.is_hole or holders:
                return error
            if own is not None and own.state in ("fetching", "loading") and own.span is not None and block in own.span:
                return NoRoute(block, ": this node is still loading it; ask again in a moment", loading_here=True)
            if not reasons and own is not None and own.serves:
                return NoRoute(block, f" now: {_HOST_MORE}")
            return NoRoute(block, f": {reasons[0]}") if reasons else error
        no_room = set(holders) <= {*small, *full} - set(avoided)
        too_large = no_room and set(holders) <= set(small)
        code = CACHE_EXCEEDED if too_large else None
        text = f": {'; '.join(reasons)}"
        return NoRoute(block, text, who="no usable peer", busy=no_room and not too_large, code=code, peers=holders)


@dataclass(frozen=True)
class _Refused:
    """A hop that had no room for a session: how often since it last did its part, when, and why."""

    times: int
    at: float
    why: Reason


class SessionRoutes:
    """Routes for one session of an asker; passes its failures and successes to the planner."""

    def __init__(self, planner: RoutePlanner, request: RouteRequest, adapter: AdapterRef | None = None) -> None:
        self._planner, self._request, self._adapter = planner, request, adapter
        self._formats: dict[str, str] = {}  # of all members met so far: a hop that died is announced no longer
        self._proposed: dict[str, Span] = {}  # the latest route
        self._computed: dict[int, str] = {}  # block -> number format in which the session used it last
        self._able: set[str] = set()  # members met so far that understand rows of int8
        self._refused: dict[str, _Refused] = {}
        self._links: set[Link] = set()  # on which this session has lost something
        self._asks: set[str] = set()  # hops of the latest route that have no session yet, as far as is known
        self._claims: dict[str, Announcement] = {}  # of hops when they were first proposed: later they can say anything
        self._paces: dict[str, ReadingPace] = {}  # of hops, as the session was told
        self.notices: list[str] = []  # for the user

    async def route(self, current: Route, avoid: Sequence[str]) -> Route:
        """Find a route, keeping as much of `current` as possible; raises `NoRoute`."""
        self._formats |= {member.peer: member.number_format for member in self._planner.members()}
        request, refusing = self._wish(current), partial(self._refusing, current)
        found = await self._planner.find(current, request, avoid, refusing, self._formats)
        self._note_asks(found, current)
        return self._propose(found)

    def _wish(self, current: Route) -> RouteRequest:
        """Return the request with the peers to be asked only if there is no other, and the links to be tried again."""
        full = self._planner.full_hops.full(self._request.tokens, trio.current_time())
        asked = {*(full.keys() - {hop.peer for hop in current}), *self._refused}
        return replace(self._request, full=asked, links=frozenset(self._links))

    def _refusing(self, current: Route) -> dict[str, Reason]:
        """Return the peers that are not to be asked now, with the reasons.

        Refusals of other sessions do not concern hops that hold this one (`current`), and not those that it is asking.
        """
        now, full = trio.current_time(), self._planner.full_hops
        holding = self._asks | {hop.peer for hop in current}
        asked = full.just_asked(self._request.tokens, now, {peer: one.at for peer, one in self._refused.items()})
        others = {peer: why for peer, why in asked.items() if peer not in holding}
        own = {peer: one.why for peer, one in self._refused.items() if self._must_wait(peer, one, now)}
        return others | own

    def _must_wait(self, peer: str, refused: _Refused, now: float) -> bool:
        if refused.why.code == CACHE_EXCEEDED:
            return True
        pause_s = backoff_s(_AGAIN_S, refused.times, _LATEST_AGAIN_S)
        return now < refused.at + pause_s and not self._planner.full_hops.ended_since(peer, refused.at)

    def _note_asks(self, route: Route, current: Route) -> None:
        self._asks = {hop.peer for hop in route if hop not in current}
        self._planner.full_hops.asks(self._asks, self._request.tokens, trio.current_time())

    def _propose(self, route: Route) -> Route:
        self._proposed = {hop.peer: hop.span for hop in route}
        serving = {member.peer: member for member in self._planner.members() if member.span is not None}
        self._claims = {peer: serving[peer] for peer in self._proposed if peer in serving} | self._claims
        return route

    @property
    def formats(self) -> frozenset[tuple[str, str]]:
        """The hops of all routes so far, each with the number format that it announced when it was first proposed."""
        return frozenset((peer, claim.number_format) for peer, claim in self._claims.items())

    def paces(self, route: Route) -> Mapping[str, ReadingPace]:
        """Return how fast hops are believed to read, by their word when they were proposed, as far as that is known."""
        measured_s = self._planner.measured.block_s(trio.current_time())
        known = [(hop, self._claims[hop.peer]) for hop in route if hop.peer in self._claims]
        self._paces |= {hop.peer: reading_pace(hop, claim, measured_s.get(hop.peer)) for hop, claim in known}
        return {hop.peer: self._paces[hop.peer] for hop, _ in known}

    def waited(self, hop: Hop, tokens: int, waited_s: float, *, given_up: bool = False) -> None:
        """Record that a hop was waited for so long, and had not read these tokens by then; `given_up`: in vain."""
        if given_up:
            self._planner.tried_in_vain(hop.peer)
        if hop.peer in self._paces:
            self._planner.waited(hop, self._paces[hop.peer], tokens, waited_s)

    async def would_use(self, hop: Hop, avoid: Sequence[str]) -> bool:
        """Return True if a new session would use this hop: the others, if any, are believed slower."""
        return await self._planner.would_use(hop, self._wish((hop,)), {*avoid, *self._refusing((hop,))})

    def lacks_adapter(self, peer: str) -> None:
        """Record that the session's adapter did not get to a peer."""
        assert self._adapter is not None, "only sessions with an adapter wait for one"
        self._planner.lacks_adapter(self._adapter, peer)

    def without_adapter(self) -> Collection[str]:
        """Return the peers to which it did not get lately."""
        return () if self._adapter is None else self._planner.without_adapter(self._adapter)

    def wires(self, route: Route, before: Wires | None) -> Wires:
        """Choose the number formats of rows on a route; once chosen (`before`), they stay as far as hops allow."""
        self._able |= {member.peer for member in self._planner.members() if INT8 in member.wires}
        if before is None:
            return choose_wires(route, self._planner.rates(), self._able)
        kept = keep_wires(route, before, self._able)
        if len(kept) < len(before):
            self.notices.append(
                "hidden states are rounded at other blocks from here on, because other members took over, "
                "so the reply may differ a little from what it would have been"
            )
        return kept

    def failed(self, peer: str, why: Reason, *, busy: bool) -> None:
        """Ban a hop that failed, and note the first report of it in the trust book; not one that had no room."""
        self._asks.discard(peer)
        if busy or why.code == CACHE_EXCEEDED:
            times = self._refused[peer].times + 1 if peer in self._refused else 1
            self._refused[peer] = _Refused(times, trio.current_time(), why)
            self._planner.refused(peer, self._request.tokens, why)
        elif self._planner.bans.ban(peer, trio.current_time(), why):
            self._planner.failed(peer, why)

    def leaves(self, peer: str, why: Reason) -> None:
        """Record that a hop says that it is about to leave."""
        self._planner.leaves(peer, self._request.tokens, why)

    def link_broke(self, sender: str, receiver: str) -> None:
        """Have the routes of other sessions go round a link between two hops for a while."""
        self._links.add(frozenset((sender, receiver)))
        self._planner.link_broke(sender, receiver)

    def worked(self, peer: str) -> None:
        """Lift a hop's ban; note if its blocks were computed in another number format before."""
        self._planner.worked(peer)
        self._planner.full_hops.worked(peer, self._request.tokens)
        self._refused.pop(peer, None)
        if self._adapter is not None:
            self._planner.has_adapter(self._adapter, peer)
        span, now = self._proposed.get(peer), self._formats.get(peer)
        if span is None or now is None:
            return
        before = next((old for b in span.blocks() if (old := self._computed.get(b, now)) != now), None)
        if before is not None:
            now_text, before_text = (text.removeprefix("none ") for text in (now, before))
            self.notices.append(
                f"blocks {span} are computed in {now_text} from here on: no member could take over in {before_text}, "
                "so the reply may differ a little from what it would have been"
            )
        self._computed |= dict.fromkeys(span.blocks(), now)

    async def better(self, standing: RunningRoute) -> Route | None:
        """Return a route that is worth moving the session to, or None."""
        self._formats |= {member.peer: member.number_format for member in self._planner.members()}
        request, refusing = self._wish(standing.route), partial(self._refusing, standing.route)
        better = await self._planner.better(standing, request, refusing)
        return None if better is None else self._propose(better)


class PrefixRoutes(SessionRoutes):
    """Routes for a session whose prompt's beginning is cached at the hops of another one."""

    def __init__(
        self, planner: RoutePlanner, request: RouteRequest, held: Route, unread: int, adapter: AdapterRef | None = None
    ) -> None:
        super().__init__(planner, request, adapter)
        self._held, self._unread = held, unread

    async def route(self, current: Route, avoid: Sequence[str]) -> Route:
        """Find a route, the first one with the hops that have the cache unless that is slower; raises `NoRoute`."""
        if current:
            return await super().route(current, avoid)
        request, refusing = self._wish(self._held), partial(self._refusing, self._held)
        found = await self._planner.find_first(self._held, self._unread, request, avoid, refusing)
        self._note_asks(found, ())
        return self._propose(found)


class PinnedRoute(SessionRoutes):
    """One fixed route, for audits; it is never repaired or left."""

    def __init__(
        self, planner: RoutePlanner, request: RouteRequest, route: Route, adapter: AdapterRef | None = None
    ) -> None:
        super().__init__(planner, request, adapter)
        self._route = route

    async def route(self, current: Route, avoid: Sequence[str]) -> Route:
        """Return the route; raises `NoRoute` after a failure or while one of its hops is banned or to be avoided."""
        unusable = {*avoid, *self._planner.bans.active(trio.current_time()), *self._refusing(())}
        if current or any(hop.peer in unusable for hop in self._route):
            raise NoRoute(self._route[0].span.start)
        return self._propose(self._route)

    async def would_use(self, hop: Hop, avoid: Sequence[str]) -> bool:
        """Return True: the route is fixed."""
        return True

    async def better(self, standing: RunningRoute) -> Route | None:
        """Return None: the route is fixed."""
        return None
