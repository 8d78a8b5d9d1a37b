"""The self-test of hosting: sends one token through this node's own blocks, as an asker would.

`app.node.hosting_loop` runs it and acts on a failure; `app.api.supervisor` tests the API in the same way.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import trio

from app.asker.route_session import HopLinks, RouteSession, SessionSettings, SessionShape
from app.core.compute import BlockRunner
from app.core.errors import AppError
from app.core.network import FrameStream, Network
from app.core.reasons import Reason, because
from app.core.span import Span
from app.routing.reroute import RunningRoute
from app.routing.route import Hop, NoRoute, ReadingPace, Route
from app.routing.wire_choice import Wires
from app.serving.stats import ServerStats
from app.session.frame import DTYPES, row_bytes

EVERY_S = 30.0
PATIENCE_S = 60.0  # long, because a step of a prompt through many blocks takes half a minute on a slow processor
_DTYPE = "f32"
_ATTEMPTS = 2  # each sends one row


class HopServer(Protocol):
    """The part of a block server that the test uses."""

    async def attend(self, stream: FrameStream) -> None:
        """Serve the sessions of one stream."""

    @property
    def stats(self) -> ServerStats:
        """Figures of the server, with the rows that went through the blocks."""


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

    def paces(self, route: Route) -> Mapping[str, ReadingPace]:
        return {}

    def waited(self, hop: Hop, tokens: int, waited_s: float, *, given_up: bool = False) -> None: ...

    async def would_use(self, hop: Hop, avoid: Sequence[str]) -> bool:
        return True

    def lacks_adapter(self, peer: str) -> None: ...

    def without_adapter(self) -> Collection[str]:
        return ()


async def span_trouble(network: Network, server: HopServer, runner: BlockRunner) -> Reason | None:
    """Return the reason why a token does not pass the hosted blocks; None if it does, or if they are only busy.

    They are busy if rows of others pass meanwhile: a session is opened between two steps, and on a slow machine one
    step of a long prompt takes seconds.
    """
    own = _OwnBlocks(Hop(network.peer_id, Span(runner.start, runner.stop)))
    row = bytes(row_bytes(DTYPES[_DTYPE], runner.hidden_size))
    rows_before = server.stats.rows

    async def embed(token_ids: Sequence[int], wire: str) -> bytes:
        return row * len(token_ids)

    trouble: str | None = None
    async with trio.open_nursery() as nursery:
        links = HopLinks(network, nursery, server.attend)
        settings = SessionSettings(
            first_route_s=0.0, new_route_s=0.0, attempts_without_progress=_ATTEMPTS, ready_s=PATIENCE_S
        )
        session = RouteSession(links, own, embed, SessionShape(1, runner.hidden_size, _DTYPE), settings)
        with trio.move_on_after(PATIENCE_S) as patience:
            try:
                await session.advance([0])
            except AppError as error:
                trouble = None if own.busy else own.why or str(error)
        await session.close()
        nursery.cancel_scope.cancel()
    if patience.cancelled_caught and server.stats.rows <= rows_before + _ATTEMPTS:
        trouble = f"a token did not pass its blocks within {PATIENCE_S:.0f} s"
    return None if trouble is None else because("probe_blocks", f"this node failed its own test: {trouble}")
