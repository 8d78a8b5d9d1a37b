"""Decides that this node's swarm secret is wrong, and says which named peers have another one.

It is wrong if one of the peers named in the invite or the settings rejected it and none of them is linked
`SECOND_OPINION_S` later. A node that serves in a swarm of its own goes on then, but its user must be told.
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
        self._errors: dict[str, WrongSecret] = {}  # by peer, the latest last
        self._rejected = Signal()

    def hear(self, error: WrongSecret) -> None:
        """Record that a peer that this node dialled rejected the secret."""
        if error.peer in self._named:
            self._errors.pop(error.peer, None)
            self._errors[error.peer] = error
            self._rejected.notify()

    def refusal(self, network: Network) -> WrongSecret | None:
        """Return the latest rejection by a named peer that is not linked now; None if there is none."""
        for link in network.links():
            self._errors.pop(link.peer, None)  # it has accepted this node since
        return next(reversed(self._errors.values()), None)

    async def conclusive(self, network: Network) -> WrongSecret:
        """Wait until the secret is certainly wrong, and return the error; never returns while it may be right."""
        seen = 0
        while True:
            await self._rejected.wait_beyond(seen)
            await trio.sleep(SECOND_OPINION_S)
            error = self.refusal(network)
            if error is not None and not any(link.peer in self._named for link in network.links()):
                return error
            seen = self._rejected.version
