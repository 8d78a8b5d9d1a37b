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
_ATTEMPTS = 5  # more than a session excuses of one hop
# Reasons of a step that failed and of a session that was closed. Any other may be that of blocks that are only busy.
_BROKEN = frozenset({"hop_failed", "hop_input", "hop_closed"})


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
        self.why: Reason | None = None
        self.has_no_room = False

    @property
    def broken(self) -> Reason | None:
        """The reason of a failed step or a closed session, if that is how the last attempt ended."""
        return self.why if self.why is not None and self.why.code in _BROKEN else None

    async def route(self, current: Route, avoid: Sequence[str]) -> Route:
        if self.why is not None or self._hop.peer in avoid:
            raise NoRoute(self._hop.span.start, "" if self.why is None else f": {self.why.text}")
        return (self._hop,)

    def failed(self, peer: str, why: Reason, *, busy: bool) -> None:
        self.why, self.has_no_room = why, busy

    def leaves(self, peer: str, why: Reason) -> None: ...

    def worked(self, peer: str) -> None:
        self.why = None

    async def better(self, standing: RunningRoute) -> Route | None:
        return None

    def wires(self, route: Route, before: Wires | None) -> Wires:
        return {}

    def paces(self, route: Route) -> Mapping[str, ReadingPace]:
        return {}

    def waited(self, hop: Hop, tokens: int, waited_s: float, *, given_up: bool = False) -> None: ...

    async def would_use(self, hop: Hop, avoid: Sequence[str]) -> bool:
        return True

    def link_broke(self, sender: str, receiver: str) -> None: ...

    def lacks_adapter(self, peer: str) -> None: ...

    def without_adapter(self) -> Collection[str]:
        return ()


async def span_trouble(network: Network, server: HopServer, runner: BlockRunner) -> Reason | None:
    """Return the reason why a token does not pass the hosted blocks; None if it does, or if they are only busy.

    A failed step or a closed session counts at once. Otherwise the blocks have failed if no row of anybody passed them
    for `PATIENCE_S`: on a slow machine one step of a prompt takes half a minute, and a session is opened between two
    of them. Blocks that stand still are found within two tests and the pause between them.
    """
    own = _OwnBlocks(Hop(network.peer_id, Span(runner.start, runner.stop)))
    row = bytes(row_bytes(DTYPES[_DTYPE], runner.hidden_size))
    rows_before, own_rows = server.stats.rows, 0

    async def embed(token_ids: Sequence[int], wire: str) -> bytes:
        nonlocal own_rows
        own_rows += len(token_ids)
        return row * len(token_ids)

    async with trio.open_nursery() as nursery:
        links = HopLinks(network, nursery, server.attend)
        settings = SessionSettings(
            first_route_s=0.0,
            new_route_s=0.0,
            attempts_without_progress=_ATTEMPTS,
            ready_s=PATIENCE_S,
            stuck_s=PATIENCE_S,
            urgent=True,
        )
        session = RouteSession(links, own, embed, SessionShape(1, runner.hidden_size, _DTYPE), settings)
        with trio.move_on_after(PATIENCE_S) as patience:
            try:
                await session.advance([0])
            except AppError:
                if own.broken is None and not own.has_no_room:
                    await trio.sleep_forever()  # rows of others may pass until the patience is over
        await session.close()
        nursery.cancel_scope.cancel()
    trouble = None if own.broken is None else own.broken.text
    if patience.cancelled_caught and server.stats.rows <= rows_before + own_rows:
        trouble = f"a token did not pass its blocks within {PATIENCE_S:.0f} s"
    return None if trouble is None else because("probe_blocks", f"this node failed its own test: {trouble}")
