"""Prefers the blocks that this node hosts itself, as far as replies get only a little slower by it. Pure.

What runs here is seen by nobody else, and a user expects blocks of their own machine to be used. `app.routing.search`
finds the fastest route; this module compares it with the route that goes through this node's blocks.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from app.core.pieces import Pieces
from app.core.span import Span
from app.routing.reroute import RouteComparison
from app.routing.route import Hop, NoRoute, Route, RouteRequest
from app.routing.search import search_route, why_unused


def prefer_here(
    fastest: Route, here: str, comparison: RouteComparison, avoid: Collection[str], share: float
) -> Pieces[Route]:
    """Return the route through the blocks of the peer `here` if it keeps at least `1 - share` of the speed.

    Otherwise, or if that peer cannot take the session, or leaves more blocks to members that are a last resort, return
    `fastest`.
    """
    through = None if share <= 0 else (yield from _route_through(here, comparison, avoid))
    if through is None:
        return fastest
    yield
    if comparison.last_resort_blocks(through) > comparison.last_resort_blocks(fastest):
        return fastest
    fastest_s, through_s = comparison.token_s(fastest), comparison.token_s(through)
    if through_s is None or fastest_s is None or fastest_s < (1 - share) * through_s:
        return fastest
    return through


def _route_through(here: str, comparison: RouteComparison, avoid: Collection[str]) -> Pieces[Route | None]:
    """Return the fastest route on which a peer runs all that it hosts of the wanted blocks; None if there is none."""
    request, wanted = comparison.request, comparison.request.wanted
    own = next((member for member in comparison.members if member.peer == here), None)
    if own is None or own.span is None or here in avoid or why_unused(own, request) is not None:
        return None
    part = own.span.overlap(wanted)
    if part is None:
        return None
    route: list[Hop] = []
    try:
        if wanted.start < part.start:
            before = replace(request, wanted=Span(wanted.start, part.start), target=here)
            route += yield from _others(before, comparison, {*avoid, here})
        used = {hop.peer for hop in route}  # a peer takes part in a session once
        route.append(Hop(here, part))
        if part.stop < wanted.stop:
            after = replace(request, wanted=Span(part.stop, wanted.stop), origin=here)
            route += yield from _others(after, comparison, {*avoid, here, *used})
    except NoRoute:
        return None
    return tuple(route)


def _others(request: RouteRequest, comparison: RouteComparison, avoid: Collection[str]) -> Pieces[Route]:
    return search_route(comparison.members, request, comparison.link_s, avoid=avoid, known=comparison.known)
