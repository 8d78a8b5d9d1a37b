"""Decides that this node's swarm secret is wrong, and says which named peer has another one.

A rejection says something of the peer that rejects, which may be in another swarm now or wish the swarm ill. The secret
is wrong only if a peer named in the invite or the settings rejected it, and each of the others rejected it too or could
not be reached. A node that serves in a swarm of its own goes on then, but its user must be told.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import trio

from app.core.network import Network
from app.core.signal import Signal
from app.membership import wire
from app.swarm.saved import SavedSwarm
from p2p.errors import P2PError, WrongSecret

PATIENCE_S = 10.0  # for the other named peers, after a rejection by one


class SecretCheck:
    """Collects rejections by the named peers; those by other peers are ignored, as anybody could send them.

    While an invite has still to be exchanged for a certificate, only its issuer counts: nobody else admits this node.
    """

    def __init__(self, named: Iterable[str], swarm: SavedSwarm | None = None) -> None:
        entry = None if swarm is None or swarm.certificate is not None else swarm.entry
        self._named = frozenset(named if entry is None else (entry.issuer,))
        self._anyone_has_it = swarm is not None and swarm.secret is not None and entry is None
        self._errors: dict[str, WrongSecret] = {}  # by peer, the latest last
        self._rejected = Signal()

    def hear(self, error: WrongSecret) -> None:
        """Record that a peer that this node dialled rejected the secret."""
        if error.peer in self._named:
            self._errors.pop(error.peer, None)
            self._errors[error.peer] = error
            self._rejected.notify()

    def refusal(self, network: Network) -> WrongSecret | None:
        """Return the latest rejection; None if there is none, or if a link shows that the secret is right.

        That is one to a named peer, or to any peer if the swarm is private: without the secret there would be no link.
        """
        if any(self._anyone_has_it or link.peer in self._named for link in network.links()):
            self._errors.clear()
        return next(reversed(self._errors.values()), None)

    async def conclusive(self, network: Network) -> WrongSecret:
        """Wait until the secret is certainly wrong, and return the error; never returns while it may be right."""
        seen = 0
        while True:
            await self._rejected.wait_beyond(seen)
            seen = self._rejected.version
            if self.refusal(network) is not None:
                await self._try_others(network)
                if (error := self.refusal(network)) is not None:
                    return error

    async def _try_others(self, network: Network) -> None:
        """Dial the named peers that have not rejected the secret, until one is linked or none is being dialled."""

        async def reach(peer: str) -> None:
            with suppress(P2PError):
                await network.call(peer, wire.FIND, b"", timeout_s=PATIENCE_S)
            if self.refusal(network) is None:
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for peer in self._named.difference(self._errors):
                nursery.start_soon(reach, peer)
