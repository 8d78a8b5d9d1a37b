"""One directory of nodes of ours and of other implementations, on loopback, while nodes come and go."""

from __future__ import annotations

import random
import statistics
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import trio

from p2p.dht.streams import PROTOCOL
from p2p.network import Libp2pNetwork
from tests.p2p.foreign_directory import directory
from tests.p2p.nodes import make_network, until

CHURN_S = 2.0  # between two nodes that are replaced


@dataclass
class Outcome:
    """What became of the look-ups, and how many nodes were replaced meanwhile."""

    found: int = 0
    took_s: list[float] = field(default_factory=list)
    replaced: int = 0

    @property
    def share(self) -> float:
        """The look-ups that found the provider, of all."""
        return self.found / len(self.took_s)

    @property
    def median_s(self) -> float:
        """How long a look-up took, in the median."""
        return statistics.median(self.took_s)


class Crowd:
    """Our nodes: some that stay and publish, others that are stopped and replaced."""

    def __init__(self, nursery: trio.Nursery, entries: list[str], lasting: int) -> None:
        self._nursery, self._entries, self._lasting = nursery, entries, lasting
        self.nodes: list[Libp2pNetwork] = []
        self.replaced = 0

    async def add(self) -> Libp2pNetwork:
        """Start a node that knows two of the entries."""
        node = make_network("dht", heartbeat_s=20.0)
        await self._nursery.start(node.run)
        for entry in random.sample(self._entries, min(2, len(self._entries))):
            node.seek(entry)
        self.nodes.append(node)
        return node

    async def churn(self) -> None:
        """Replace one node after another, except those that last."""
        while True:
            await trio.sleep(CHURN_S)
            leaving = self.nodes.pop(random.randrange(self._lasting, len(self.nodes)))
            await leaving.stop()
            await self.add()
            self.replaced += 1


async def look_up_under_churn(ours: int, theirs: dict[str, int], lasting: int, look_ups: int) -> Outcome:
    """Run `ours` nodes beside `theirs` (by kind), `lasting` of which stay and publish, and look keys up."""
    random.seed(5)
    async with AsyncExitStack() as stack:
        foreign = [await stack.enter_async_context(directory(kind, PROTOCOL, n)) for kind, n in theirs.items()]
        for other in foreign[1:]:
            await foreign[0].order("dial", address=other.addresses[0])
        async with trio.open_nursery() as nursery:
            crowd = Crowd(nursery, [address for group in foreign for address in group.addresses], lasting)
            for _ in range(ours):
                await crowd.add()
            tables = [node._directory.table for node in crowd.nodes if node._directory is not None]
            await until(lambda: all(len(table) >= min(8, ours - 1) for table in tables), 400)
            keys = [random.randbytes(32) for _ in range(2 * lasting)]
            for number, key in enumerate(keys):
                await crowd.nodes[number % lasting].provide(key)
            nursery.start_soon(crowd.churn)
            outcome = Outcome()
            for _ in range(look_ups):
                number = random.randrange(len(keys))
                provider = crowd.nodes[number % lasting]
                asker = random.choice([node for node in crowd.nodes[:lasting] if node is not provider])
                started_at = trio.current_time()
                names = await asker.find_providers(keys[number], timeout_s=5)
                outcome.took_s.append(trio.current_time() - started_at)
                outcome.found += provider.peer_id in names
            outcome.replaced = crowd.replaced
            nursery.cancel_scope.cancel()
    return outcome
