"""Judges routing: routes that random nodes find with what they know, beside the best with everything known."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import mean

from app.core.span import Span
from app.routing.cost import HOP_S
from app.routing.estimates import link_seconds, route_neighbours
from app.routing.route import LinkSeconds, NoRoute, Route, RouteRequest
from app.routing.search import find_route
from app.swarm.records import Announcement, tail
from tests.sim.model import Model


@dataclass
class RouteSamples:
    """What came of the routes that were asked for; call it with a running simulation."""

    askers: int = 2  # at a time
    asked: int = 0
    refused: int = 0  # no route was found
    stale: int = 0  # a hop was gone or elsewhere by then: the session mends such a route
    costs: list[float] = field(default_factory=list)  # seconds a token, as a multiple of the best route's
    token_s: list[float] = field(default_factory=list)
    hops: list[int] = field(default_factory=list)

    def __call__(self, model: Model, now: float) -> None:
        """Ask for some routes."""
        rng = random.Random(f"{model.world.seed}/{now}")
        for peer in rng.sample(sorted(model.nodes), self.askers):
            self._ask(model, peer)

    def __str__(self) -> str:
        return (
            f"routes {self.asked}, refused {self.refused}, stale {self.stale}, cost/best mean "
            f"{mean(self.costs or [0]):.3f} worst {max(self.costs, default=0):.2f}, "
            f"ms/token {1e3 * mean(self.token_s or [0]):.0f}, hops {mean(self.hops or [0]):.1f}"
        )

    def _ask(self, model: Model, asker: str) -> None:
        self.asked += 1
        demand = RouteRequest(Span(0, model.world.n_blocks), 256)

        def true_link_s(a: str, b: str) -> float:
            return model.nodes[a or asker].spec.link_s(model.nodes[b or asker].spec)

        known = _with_rtts(model, model.nodes[asker].view)
        measured_rtt_s = {peer: 2 * true_link_s("", peer) for peer in model.nodes if peer != asker}
        known_link_s = link_seconds(asker, measured_rtt_s, known)
        truth = {peer: node.said for peer, node in model.nodes.items() if node.serving is not None}
        try:
            route = find_route(known, demand, known_link_s)
            best = find_route([*truth.values()], demand, true_link_s)
        except NoRoute:
            self.refused += 1
            return
        if any(hop.peer not in truth or not _within(hop.span, model.nodes[hop.peer].serving) for hop in route):
            self.stale += 1
            return
        self.token_s.append(_cost_s(model, route, true_link_s))
        self.costs.append(self.token_s[-1] / _cost_s(model, best, true_link_s))
        self.hops.append(len(route))


def _with_rtts(model: Model, view: Mapping[str, Announcement]) -> list[Announcement]:
    """What an asker knows of the members, with the round-trip times that each would announce."""
    specs = {peer: node.spec for peer, node in model.nodes.items()}

    def told(said: Announcement) -> Announcement:
        if said.peer not in specs:  # it has gone, and the asker does not know yet
            return said
        beside = [peer for peer in route_neighbours(said.span, (), view.values()) if peer in specs]
        return replace(said, rtts=tuple((tail(peer), 2 * specs[said.peer].link_s(specs[peer])) for peer in beside))

    return [told(said) for said in view.values()]


def _within(span: Span, served: Span | None) -> bool:
    return served is not None and served.start <= span.start and span.stop <= served.stop


def _cost_s(model: Model, route: Route, link_s: LinkSeconds) -> float:
    """Seconds that a token takes through a route and back."""
    stops = ["", *(hop.peer for hop in route), ""]
    links_s = sum(link_s(a, b) for a, b in pairwise(stops))
    return links_s + sum(HOP_S + len(hop.span) * model.nodes[hop.peer].said.decode_block_s for hop in route)
