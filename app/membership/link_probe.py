"""Measures links that carry too little traffic to tell their speed: asks the peer for one burst of bytes, rarely.

The network itself measures what arrives (`down_bytes_per_s` of a link). Only the neighbours of this node on routes are
asked, one at a time and each once an hour at most; who asks more often is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import trio

from app.core.network import Network, Priority
from p2p.errors import P2PError, Refused
from p2p.rate_limit import PeerRateLimit

log = logging.getLogger("shoal.membership")

BURST = "link.burst"
BURST_BYTES = 512 * 1024
PERIOD_S = 30.0  # between two bursts
AGAIN_S = 3600.0  # between two bursts of one peer
TIMEOUT_S = 60.0
_REMEMBERED = 1024  # peers


class LinkProbe:
    """Asks neighbours for bursts while `run` runs, and gives them to peers that ask."""

    def __init__(self, network: Network, neighbours: Callable[[], Iterable[str]]) -> None:
        self._network, self._neighbours = network, neighbours
        self._asked_at: dict[str, float] = {}
        self._given = PeerRateLimit(burst=2, per_s=1 / AGAIN_S)
        self._given_in_all = PeerRateLimit(burst=4, per_s=0.1)

    def serve(self) -> None:
        """Start answering other peers."""
        self._network.serve(BURST, self._on_burst)

    async def run(self) -> None:
        """Measure links until cancelled."""
        while True:
            await trio.sleep(PERIOD_S)
            peer = self._next()
            if peer is not None:
                await self._ask(peer)

    def _next(self) -> str | None:
        """Return a neighbour whose link is open and not measured, if one was not asked lately."""
        due_before = trio.current_time() - AGAIN_S
        unknown = {link.peer for link in self._network.links() if link.down_bytes_per_s is None}
        due = (peer for peer in self._neighbours() if self._asked_at.get(peer, due_before) <= due_before)
        return next((peer for peer in sorted(due) if peer in unknown), None)

    async def _ask(self, peer: str) -> None:
        self._asked_at.pop(peer, None)
        self._asked_at[peer] = trio.current_time()
        if len(self._asked_at) > _REMEMBERED:
            del self._asked_at[next(iter(self._asked_at))]
        try:
            await self._network.call(peer, BURST, b"", timeout_s=TIMEOUT_S, priority=Priority.BULK)
        except P2PError as error:
            log.debug("the link from %s was not measured: %s", peer, error)

    async def _on_burst(self, peer: str, body: bytes) -> bytes:
        now = trio.current_time()
        if not (self._given.take(peer, now) and self._given_in_all.take("", now)):
            raise Refused("this node was asked for bursts too often; ask again later")
        return bytes(BURST_BYTES)
