"""From a node's parts to what a person can see of their work: sessions, the latest route, rates, the device.

Figures are read where they are counted (`app.serving.stats`, `app.asker.stats`, the network's links); a figure that
nobody measured stays unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import trio

from app.asker.stats import AskedSession, AskerFigures
from app.core.network import Network
from app.node.active_swarm import Stay
from app.node.rates import Counters, Flow, Reading
from app.serving.stats import ServerFigures
from app.snapshot.views import HopView, RouteView, SessionView
from app.weights.manifest_store import model_name

SENSE_S = 10.0  # between two looks at the device's sensors


class Overview:
    """What a node does, in numbers; `look` is called now and then."""

    def __init__(self, own_peer: str) -> None:
        self._own = own_peer
        self._flow = Flow()
        self._sense_at = 0.0

    async def look(self, stay: Stay | None, network: Network | None) -> None:
        """Read the counters and, less often, the device's sensors."""
        links = network.links() if network is not None else ()
        sent = {link.peer: (link.bytes_out, link.bytes_in) for link in links}
        now = trio.current_time()
        self._flow.note(now, reading_of(self._own, *_figures(stay), sent))
        if stay is not None and stay.hosting is not None and now >= self._sense_at:
            self._sense_at = now + SENSE_S
            await stay.hosting.look_at_device()

    def facts(self, stay: Stay | None, network: Network | None) -> dict[str, Any]:
        """The snapshot's fields about work."""
        served, asked = _figures(stay)
        asking = [self._asking(session) for session in asked.sessions]
        latest = asked.sessions[-1] if asked.sessions else asked.latest
        kinds = {link.peer: link.kind for link in network.links()} if network is not None else {}
        return {
            "model": "" if stay is None else model_name(stay.source_name),
            "active_sessions": (*asking, *self._serving(served)),
            "route": None if latest is None else route_view(latest, kinds),
            "flow": self._flow.view(served.queued_sessions),
            "weights": None if stay is None or stay.stock is None else stay.stock.view(),
            "steps": () if stay is None else stay.steps.views(),
            "hardware": None if stay is None or stay.hosting is None else stay.hosting.hardware(),
        }

    def _asking(self, session: AskedSession) -> SessionView:
        return SessionView(
            id=session.id,
            role="asking",
            asker=self._own,
            tokens=session.prompt_tokens + session.tokens,
            prompt_done=session.prompt_done,
            age_s=session.age_s,
            tokens_per_s=session.tokens_per_s,
            start=session.route[0].start if session.route else None,
            stop=session.route[-1].stop if session.route else None,
            recoveries=session.recoveries,
        )

    def _serving(self, figures: ServerFigures) -> Sequence[SessionView]:
        return [
            SessionView(
                id=session.session,
                role="serving",
                asker=session.asker,
                tokens=session.tokens,
                age_s=session.age_s,
                tokens_per_s=self._flow.session_rate(session.session),
                start=session.start,
                stop=session.stop,
            )
            for session in figures.sessions
        ]


def reading_of(own_peer: str, served: ServerFigures, asked: AskerFigures, links: dict[str, tuple[int, int]]) -> Reading:
    """The counters that rates are made of; what a node computes for itself is served to nobody."""
    for_others = sum(tokens for peer, tokens in served.served.items() if peer != own_peer)
    counters = Counters(for_others, asked.asked_tokens, served.steps, served.urgent_steps, served.urgent_rows)
    return Reading(counters, links, {session.session: session.tokens for session in served.sessions})


def route_view(session: AskedSession, kinds: dict[str, Any]) -> RouteView:
    """Where a usual token's time goes."""
    hops = tuple(
        HopView(hop.peer, hop.start, hop.stop, kinds.get(hop.peer), hop.link_s, hop.compute_s, hop.queue_s)
        for hop in session.route
    )
    known = None if session.route_s is None or session.ends_s is None else session.route_s + session.ends_s
    return RouteView(session.id, hops, session.return_s, session.ends_s, known)


def _figures(stay: Stay | None) -> tuple[ServerFigures, AskerFigures]:
    served = ServerFigures() if stay is None or stay.hosting is None else stay.hosting.server.figures
    asked = AskerFigures() if stay is None or stay.replying is None else stay.replying.figures()
    return served, asked
