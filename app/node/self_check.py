"""The self-test of hosting: sends one token through this node's own blocks, as an asker would.

`app.node.hosting_loop` runs it and acts on a failure; `app.api.supervisor` tests the API in the same way.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import trio

from app.asker.route_session import HopLinks, RouteSession, SessionSettings, SessionShape
from app.core.compute import BlockRunner
from app.core.errors import AppError
from app.core.network import FrameStream, Network
from app.core.reasons import Reason, because
from app.core.span import Span
from app.routing.reroute import RunningRoute
from app.routing.route import Hop, NoRoute, Route
from app.routing.wire_choice import Wires
from app.session.frame import DTYPES, row_bytes

EVERY_S = 30.0
PATIENCE_S = 20.0  # long, because a fully loaded device is slow
_DTYPE = "f32"


class _OwnBlocks:
    """Route guide of the test: always this node's own blocks, and no route after a failure."""

    def __init__(self, hop: Hop) -> None:
        self._hop = hop
        self.why = ""
        self.busy = False

    async def route(self, current: Route, avoid: Sequence[str]) -> Route:
        if self.why:
            raise NoRoute(self._hop.span.start, f": {self.why}")
        return (self._hop,)

    def failed(self, peer: str, why: Reason, *, busy: bool) -> None:
        self.why, self.busy = why.text, busy

    def worked(self, peer: str) -> None:
        self.why = ""

    async def better(self, standing: RunningRoute) -> Route | None:
        return None

    def wires(self, route: Route, before: Wires | None) -> Wires:
        return {}


async def span_trouble(
    network: Network, attend: Callable[[FrameStream], Awaitable[None]], runner: BlockRunner
) -> Reason | None:
    """Return the reason why a token does not pass the hosted blocks; None if it does, or if they are only busy."""
    own = _OwnBlocks(Hop(network.peer_id, Span(runner.start, runner.stop)))
    row = bytes(row_bytes(DTYPES[_DTYPE], runner.hidden_size))

    async def embed(token_ids: Sequence[int], wire: str) -> bytes:
        return row * len(token_ids)

    trouble: str | None = f"a token did not pass its blocks within {PATIENCE_S:.0f} s"
    async with trio.open_nursery() as nursery:
        links = HopLinks(network, nursery, attend)
        settings = SessionSettings(first_route_s=0.0, new_route_s=0.0, attempts_without_progress=2)
        session = RouteSession(links, own, embed, SessionShape(1, runner.hidden_size, _DTYPE), settings)
        with trio.move_on_after(PATIENCE_S):
            try:
                await session.advance([0])
                trouble = None
            except AppError as error:
                trouble = None if own.busy else own.why or str(error)
        await session.close()
        nursery.cancel_scope.cancel()
    return None if trouble is None else because("probe_blocks", f"this node failed its own test: {trouble}")
