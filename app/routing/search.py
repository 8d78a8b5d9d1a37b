"""Which peers a session goes through: the cheapest path over what members announce and what was measured. Pure.

Cost is seconds a token: links one way, compute through the blocks, the wait for a busy device, and the prompt's share.
What the asker measured itself counts for more than what a member claims, and a claim far above all others' is not
believed. Blocks that shall stay private go to trusted peers alone. Whom to avoid, and for how long, is kept in `Bans`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from app.core.reasons import Reason, because
from app.core.span import Span
from app.routing.cost import HOP_S, believed_seconds, wait_seconds
from app.routing.route import Hop, KnownCosts, LinkSeconds, NoRoute, Privacy, Route, RouteRequest
from app.swarm.records import Announcement

FULL = "peer_full"
_RESTING = {  # of a member that does not serve, by its state
    "paused": ("peer_paused", "its owner has paused it"),
    "draining": ("peer_draining", "it is about to leave"),
    "joining": ("peer_loading", "it is choosing its blocks"),
    "fetching": ("peer_loading", "it is fetching its blocks"),
    "loading": ("peer_loading", "it is loading its blocks"),
}


class _Path(NamedTuple):
    cost_s: float
    peer: str
    begin: int  # the first block of this peer's share
    before: _Path | None


def find_route(
    members: Iterable[Announcement],
    request: RouteRequest,
    link_s: LinkSeconds,
    *,
    avoid: Collection[str] = (),
    known: KnownCosts | None = None,
) -> Route:
    """The cheapest route over members that serve; those without room only where there is no other. Raises `NoRoute`."""
    judged = [(m, why_unused(m, request)) for m in members if m.peer not in avoid]
    known = known or KnownCosts()
    try:
        return _cheapest([m for m, why in judged if why is None], request, link_s, known)
    except NoRoute:
        usable = [m for m, why in judged if why is None or why.code == FULL]
        return _cheapest(usable, request, link_s, known)


def why_unused(member: Announcement, request: RouteRequest) -> Reason | None:
    """Why no session of this demand goes through a member, by what it says of itself; None where one may."""
    peer, span = member.peer, member.span
    if not member.serves or span is None:
        code, text = _RESTING.get(member.state, ("peer_client", "it hosts no blocks"))
        return because(code, text, peer)
    if not any(request.privacy.allows(peer, block) for block in span.blocks()):
        return because("peer_private", f"blocks {span} go to trusted peers alone", peer)
    if member.kv_free_tokens < request.tokens:
        return because(FULL, f"it has room for {member.kv_free_tokens} tokens, {request.tokens} are needed", peer)
    return None


def _cheapest(members: Sequence[Announcement], request: RouteRequest, link_s: LinkSeconds, known: KnownCosts) -> Route:
    block_s = believed_seconds(members, request, known)
    enter_s = {m.peer: HOP_S + wait_seconds(m) + known.penalty_s.get(m.peer, 0.0) for m in members}
    paths: dict[str, _Path] = {}  # the cheapest ways to have run all blocks so far, by the last peer
    for block in request.wanted.blocks():
        following: dict[str, _Path] = {}
        holders = [m.peer for m in members if m.span is not None and block in m.span]
        for peer in holders:
            if not request.privacy.allows(peer, block):
                continue
            ways = [_moved(path, peer, block, link_s, enter_s[peer]) for path in paths.values()]
            if block == request.wanted.start:
                ways.append(_Path(link_s(request.origin, peer) + enter_s[peer], peer, block, None))
            if ways:
                best = min(ways, key=lambda path: (path.cost_s, path.begin))
                following[peer] = best._replace(cost_s=best.cost_s + block_s[peer])
        if not following:
            raise _missing(block, request.privacy)
        paths = following
    last = min(paths.values(), key=lambda path: (path.cost_s + link_s(path.peer, request.target), path.peer))
    return _as_route(last, request.wanted.stop)


def _missing(block: int, privacy: Privacy) -> NoRoute:
    if privacy.allows("", block):
        return NoRoute(block)
    return NoRoute(
        block,
        f" that is trusted, and the first and last {privacy.edge} blocks shall stay private: host it here, name one of "
        "its holders with `shoal config set trusted`, or lower private_blocks",
        code="private_blocks",
    )


def _moved(path: _Path, peer: str, block: int, link_s: LinkSeconds, enter_s: float) -> _Path:
    if path.peer == peer:
        return path
    return _Path(path.cost_s + link_s(path.peer, peer) + enter_s, peer, block, path)


def _as_route(path: _Path | None, stop: int) -> Route:
    hops: list[Hop] = []
    while path is not None:
        hops.insert(0, Hop(path.peer, Span(path.begin, stop)))
        stop, path = path.begin, path.before
    # A session is known by one id at each peer, so a peer that comes twice runs what lies between as well.
    for index, hop in enumerate(hops):
        again = next((i for i in range(len(hops) - 1, index, -1) if hops[i].peer == hop.peer), None)
        if again is not None:
            hops[index : again + 1] = [Hop(hop.peer, Span(hop.span.start, hops[again].span.stop))]
            break
    return tuple(hops)


def repair_route(
    route: Route,
    members: Sequence[Announcement],
    request: RouteRequest,
    link_s: LinkSeconds,
    *,
    avoid: Collection[str],
    known: KnownCosts | None = None,
) -> Route:
    """The route with the hops in `avoid` replaced and the others kept where that is possible, else a new one."""
    kept = {hop.peer for hop in route if hop.peer not in avoid}
    mended: list[Hop] = []
    index = 0
    try:
        while index < len(route):
            if route[index].peer in kept:
                mended.append(route[index])
                index += 1
                continue
            gap = index
            while index < len(route) and route[index].peer not in kept:
                index += 1
            span = Span(route[gap].span.start, route[index - 1].span.stop)
            origin = mended[-1].peer if mended else ""
            target = route[index].peer if index < len(route) else ""
            part = replace(request, wanted=span, origin=origin, target=target)
            others = {hop.peer for hop in mended} | kept | set(avoid)
            mended += find_route(members, part, link_s, avoid=others, known=known)
        return tuple(mended)
    except NoRoute:
        return find_route(members, request, link_s, avoid=avoid, known=known)
