"""Finds the cheapest route over what members announce and what was measured. Pure.

The cost is that of `app.routing.cost.route_seconds`, added up block by block from the same terms, where members that
are a last resort (`app.routing.cost.is_last_resort`) count as many times as slow. Private blocks go only to trusted
peers. The caller decides which peers to avoid (`app.routing.bans`, `app.routing.trust`). In a large swarm a search
takes long, so it is computed in pieces (`app.core.pieces`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from app.core.pieces import Pieces, at_once, by_chunks
from app.core.reasons import Reason, because
from app.core.span import Span
from app.routing.cost import LAST_RESORT_TIMES, believed_in_pieces, entry_seconds, is_last_resort
from app.routing.estimates import LinkEstimates
from app.routing.route import Hop, KnownCosts, LinkSeconds, NoRoute, Route, RouteRequest, Visit, no_route
from app.session.wire import CACHE_EXCEEDED
from app.swarm.records import Announcement, is_coarse

FULL = "peer_full"
_NOT_SERVING = {  # state of a member that does not serve -> (reason code, text)
    "paused": ("peer_paused", "its owner has paused it"),
    "draining": ("peer_draining", "it is about to leave"),
    "joining": ("peer_loading", "it is choosing its blocks"),
    "fetching": ("peer_loading", "it is fetching its blocks"),
    "loading": ("peer_loading", "it is loading its blocks"),
}


class _Path(NamedTuple):
    cost_s: float
    peer: str
    begin: int  # first block of this peer's part
    before: _Path | None


def find_route(
    members: Sequence[Announcement],
    request: RouteRequest,
    link_s: LinkSeconds,
    *,
    avoid: Collection[str] = (),
    known: KnownCosts | None = None,
) -> Route:
    """Return what `search_route` does, computed without a break."""
    return at_once(search_route(members, request, link_s, avoid=avoid, known=known))


def search_route(
    members: Sequence[Announcement],
    request: RouteRequest,
    link_s: LinkSeconds,
    *,
    avoid: Collection[str] = (),
    known: KnownCosts | None = None,
) -> Pieces[Route]:
    """Return the cheapest route; members without room are used only if there is no other. Raises `NoRoute`."""
    avoid = frozenset(avoid)
    by_peer = yield from by_chunks(lambda some: {m.peer: m for m in some if m.peer not in avoid}, members)
    unused = yield from by_chunks(
        lambda some: {m.peer: why for m in some if (why := why_unused(m, request)) is not None}, [*by_peer.values()]
    )
    known = known or KnownCosts()
    try:
        return (yield from _cheapest([m for p, m in by_peer.items() if p not in unused], request, link_s, known))
    except NoRoute:
        usable = [m for p, m in by_peer.items() if p not in unused or unused[p].code == FULL]
        return (yield from _cheapest(usable, request, link_s, known))


def search_in_order(search: Callable[[Sequence[str]], Pieces[Route]], order: Sequence[str]) -> Pieces[Route]:
    """Return the first route that uses any of these peers, if the search may use one after the other of them.

    `search` may use those that it is called with. Raises `NoRoute` if it does with all of them. Who is on a route with
    all of them need not be asked first: a search with half of those that are left shows in which half the first one is.
    """
    route = yield from search(order)
    too_few, enough = 0, _first_that_use(route, order)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        found: Route = ()
        with suppress(NoRoute):
            found = yield from search(order[:middle])
        if _first_that_use(found, order[:middle]):
            route, enough = found, _first_that_use(found, order[:middle])
        else:
            too_few = middle
    return route


def _first_that_use(route: Route, order: Sequence[str]) -> int:
    """Return how many of these peers a search may use, at least, to find this route; 0 if it uses none."""
    return max((order.index(hop.peer) + 1 for hop in route if hop.peer in order), default=0)


def why_unused(member: Announcement, request: RouteRequest) -> Reason | None:
    """Return why no session with this request uses a member, from its announcement alone; None if one may."""
    peer, span = member.peer, member.span
    if member.state != "serving" or span is None:
        code, text = _NOT_SERVING.get(member.state, ("peer_client", "it hosts no blocks"))
        return because(code, text, peer)
    if request.privacy.edge and not any(request.privacy.allows(peer, block) for block in span.blocks()):
        return because("peer_private", f"blocks {span} may run only on trusted peers", peer)
    if 0 < member.kv_total_tokens < request.tokens:
        text = f"its cache holds {member.kv_total_tokens} tokens, {request.tokens} are needed"
        return because(CACHE_EXCEEDED, text, peer)
    if peer in request.full:
        return because(FULL, "it refused such a session lately", peer)
    if member.kv_free_tokens < request.tokens:
        return because(FULL, f"it has room for {member.kv_free_tokens} tokens, {request.tokens} are needed", peer)
    return None


def _cheapest(
    members: Sequence[Announcement], request: RouteRequest, link_s: LinkSeconds, known: KnownCosts
) -> Pieces[Route]:
    """Return the cheapest route over these members; raises `NoRoute` at a block nobody may run."""
    block_s = yield from believed_in_pieces(members, request, known)
    slower = yield from by_chunks(
        lambda some: {m.peer: block_s[m.peer] * LAST_RESORT_TIMES for m in some if is_last_resort(m, request)}, members
    )
    if len(slower) < len(members):  # else links would count for less than they do
        block_s |= slower
    entry_s = yield from by_chunks(lambda some: entry_seconds(some, known, request), members)
    if isinstance(link_s, LinkEstimates):
        from app.routing.vector_search import cheapest_visits  # loads numpy, which light starts do without

        visits = yield from cheapest_visits(members, request, link_s, block_s, entry_s)
    else:
        visits = _try_each_pair(members, request, link_s, block_s, entry_s)
    return _as_route(visits, request.wanted.stop)


def _try_each_pair(
    members: Sequence[Announcement],
    request: RouteRequest,
    link_s: LinkSeconds,
    block_s: Mapping[str, float],
    entry_s: Mapping[str, float],
) -> list[Visit]:
    """Extend the cheapest path per last peer block by block, for link times of any kind.

    Returns the visits of the cheapest path, the last one first. The plain form of `vector_search`, which tests compare
    with it: it takes seconds in a swarm of hundreds. Raises `NoRoute` at a block nobody may run.
    """
    paths: dict[str, _Path] = {}  # last peer -> cheapest path through all blocks so far
    for block in request.wanted.blocks():
        following: dict[str, _Path] = {}
        holders = [m.peer for m in members if m.span is not None and block in m.span]
        for peer in holders:
            if not request.privacy.allows(peer, block):
                continue
            options = [_extended(path, peer, block, link_s, entry_s[peer]) for path in paths.values()]
            if block == request.wanted.start:
                options.append(_Path(link_s(request.origin, peer) + entry_s[peer], peer, block, None))
            if options:
                best = min(options, key=lambda path: (path.cost_s, path.begin))
                following[peer] = best._replace(cost_s=best.cost_s + block_s[peer])
        if not following:
            raise no_route(block, request.privacy)
        paths = following
    last = min(paths.values(), key=lambda path: (path.cost_s + link_s(path.peer, request.target), path.peer))
    return list(_visits(last))


def _extended(path: _Path, peer: str, block: int, link_s: LinkSeconds, entry_s: float) -> _Path:
    """Continue a path with the next block on `peer`, adding the link and the cost of entry if it is a new hop."""
    if path.peer == peer:
        return path
    return _Path(path.cost_s + link_s(path.peer, peer) + entry_s, peer, block, path)


def _visits(path: _Path | None) -> Iterator[Visit]:
    while path is not None:
        yield path.peer, path.begin
        path = path.before


def _as_route(visits: Sequence[Visit], stop: int) -> Route:
    """Turn visits, the last one first, into hops, each peer at most once.

    A peer knows a session by one id, so a peer that the path visits twice runs the blocks in between as well.
    """
    backwards: list[Hop] = []
    for peer, begin in visits:
        backwards.append(Hop(peer, Span(begin, stop)))
        stop = begin
    hops: list[Hop] = []
    for hop in reversed(backwards):
        visited = next((index for index, earlier in enumerate(hops) if earlier.peer == hop.peer), None)
        if visited is None:
            hops.append(hop)
        else:
            hops[visited:] = [Hop(hop.peer, Span(hops[visited].span.start, hop.span.stop))]
    return tuple(hops)


def _still_serves(announced: Span | None, part: Span) -> bool:
    """True unless a member announces blocks that lack some of `part`; the lack of an announcement may be our own."""
    return announced is None or (announced.start <= part.start and part.stop <= announced.stop)


def repair_route(
    route: Route,
    members: Sequence[Announcement],
    request: RouteRequest,
    link_s: LinkSeconds,
    *,
    avoid: Collection[str],
    known: KnownCosts | None = None,
    formats: Mapping[str, str] | None = None,
) -> Pieces[Route]:
    """Replace the hops in `avoid` and keep the others if possible; else find a new route. Raises `NoRoute`.

    A hop that announces that it serves other blocks now is replaced too. `formats` has the number formats of the
    route's peers: if possible, a hop is replaced by members that compute in its format, or in a finer one than 4 bits.
    """
    formats = formats or {}

    def find(part: RouteRequest, lost: Iterable[Hop], avoid: Collection[str]) -> Pieces[Route]:
        wanted = {formats[hop.peer] for hop in lost if hop.peer in formats}
        was_coarse = any(is_coarse(one) for one in wanted)
        alike = [m for m in members if m.number_format in wanted or (was_coarse and not m.is_coarse)]
        if alike and len(alike) < len(members):
            with suppress(NoRoute):
                return (yield from search_route(alike, part, link_s, avoid=avoid, known=known))
        return (yield from search_route(members, part, link_s, avoid=avoid, known=known))

    serving = {member.peer: member.span for member in members if member.serves}
    kept = {hop.peer for hop in route if hop.peer not in avoid and _still_serves(serving.get(hop.peer), hop.span)}
    repaired: list[Hop] = []
    index = 0
    try:
        while index < len(route):
            if route[index].peer in kept:
                repaired.append(route[index])
                index += 1
                continue
            gap = index
            while index < len(route) and route[index].peer not in kept:
                index += 1
            span = Span(route[gap].span.start, route[index - 1].span.stop)
            origin = repaired[-1].peer if repaired else ""
            target = route[index].peer if index < len(route) else ""
            part = replace(request, wanted=span, origin=origin, target=target)
            others = {hop.peer for hop in repaired} | kept | set(avoid)
            repaired += yield from find(part, route[gap:index], others)
        return tuple(repaired)
    except NoRoute:
        return (yield from find(request, route, avoid))
