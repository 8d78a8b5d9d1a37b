"""Decides that this node's swarm secret is wrong.

It is, if one of the peers named in the invite or the settings rejected it and none of them is linked `SECOND_OPINION_S`
later.
"""

from __future__ import annotations

from collections.abc import Iterable

import trio

from app.core.network import Network
from app.core.signal import Signal
from p2p.errors import WrongSecret

# From a rejection by one named peer until the others must have accepted this node.
SECOND_OPINION_S = 0.7


class SecretCheck:
    """Collects rejections by the named peers; those by other peers are ignored, as anybody could send them."""

    def __init__(self, named: Iterable[str]) -> None:
        self._named = frozenset(named)
        self._error: WrongSecret | None = None
        self._rejected = Signal()

    def hear(self, error: WrongSecret) -> None:
        """Record that a peer that this node dialled rejected the secret."""
        if error.peer in self._named:
            self._error = error
            self._rejected.notify()

    async def conclusive(self, network: Network) -> WrongSecret:
        """Wait until the secret is certainly wrong, and return the error; never returns while it may be right."""
        seen = 0
        while True:
            await self._rejected.wait_beyond(seen)
            await trio.sleep(SECOND_OPINION_S)
            assert self._error is not None
            if not any(link.peer in self._named for link in network.links()):
                return self._error
            seen = self._rejected.version
