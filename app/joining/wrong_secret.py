"""When a wrong secret is certain: some peer that was to lead into a swarm said so, and no other one says otherwise."""

from __future__ import annotations

from collections.abc import Iterable

import trio

from app.core.network import Network
from p2p.errors import WrongSecret

# After one peer said that the secret is wrong, the others that were named beside it get this long to let us in.
SECOND_OPINION_S = 0.7


class SecretCheck:
    """What the peers that this node was told of say of its secret; strangers' words do not count."""

    def __init__(self, told: Iterable[str]) -> None:
        self._told = frozenset(told)
        self._error: WrongSecret | None = None
        self._heard = trio.Event()

    def hear(self, error: WrongSecret) -> None:
        """A peer that this node dialled holds another secret."""
        if error.peer in self._told:
            self._error = error
            self._heard.set()

    async def conclusive(self, network: Network) -> WrongSecret:
        """Wait until there is no doubt."""
        while True:
            await self._heard.wait()
            await trio.sleep(SECOND_OPINION_S)
            assert self._error is not None
            if not any(link.peer in self._told for link in network.links()):
                return self._error
            self._heard = trio.Event()
