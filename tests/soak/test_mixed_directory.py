"""One directory of 20 nodes of ours and 4 of other implementations, on loopback, while nodes come and go."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable

import pytest
import trio

from p2p.dht.streams import PROTOCOL
from p2p.network import Libp2pNetwork
from tests.p2p.foreign_directory import directory
from tests.p2p.nodes import make_network, until

pytestmark = pytest.mark.soak

OURS, THEIRS, LOOK_UPS = 20, 2, 60
CHURN_S = 2.0  # between two nodes that are replaced
LASTING = 8  # of ours that stay, and publish


class Crowd:
    """Our nodes: some that stay and publish, others that are stopped and replaced."""

    def __init__(self, nursery: trio.Nursery, entries: list[str]) -> None:
        self._nursery, self._entries = nursery, entries
        self.nodes: list[Libp2pNetwork] = []
        self.replaced = 0

    async def add(self) -> Libp2pNetwork:
        node = make_network("dht", heartbeat_s=20.0)
        await self._nursery.start(node.run)
        for entry in random.sample(self._entries, 2):
            node.seek(entry)
        self.nodes.append(node)
        return node

    async def churn(self) -> None:
        while True:
            await trio.sleep(CHURN_S)
            leaving = self.nodes.pop(random.randrange(LASTING, len(self.nodes)))
            await leaving.stop()
            await self.add()
            self.replaced += 1


@pytest.mark.timeout(900)
async def test_look_ups_succeed_among_foreign_nodes_and_churn(record_property: Callable[[str, object], None]) -> None:
    random.seed(5)
    async with (
        directory("js", PROTOCOL, THEIRS) as js,
        directory("py", PROTOCOL, THEIRS) as py,
        trio.open_nursery() as nursery,
    ):
        await js.order("dial", address=py.addresses[0])
        crowd = Crowd(nursery, [*js.addresses, *py.addresses])
        for _ in range(OURS):
            await crowd.add()
        tables = [node._directory.table for node in crowd.nodes if node._directory is not None]
        await until(lambda: all(len(table) >= 8 for table in tables), 400)
        keys = [random.randbytes(32) for _ in range(2 * LASTING)]
        for number, key in enumerate(keys):
            await crowd.nodes[number % LASTING].provide(key)
        nursery.start_soon(crowd.churn)
        took_s: list[float] = []
        found = 0
        for _ in range(LOOK_UPS):
            number = random.randrange(len(keys))
            asker = crowd.nodes[random.choice([n for n in range(LASTING) if n != number % LASTING])]
            started_at = trio.current_time()
            names = await asker.find_providers(keys[number], timeout_s=5)
            took_s.append(trio.current_time() - started_at)
            found += crowd.nodes[number % LASTING].peer_id in names
        record_property("found", f"{found} of {LOOK_UPS}")
        record_property("median_s", round(statistics.median(took_s), 3))
        record_property("slowest_s", round(max(took_s), 2))
        record_property("replaced", crowd.replaced)
        nursery.cancel_scope.cancel()
        assert found >= 0.99 * LOOK_UPS
        assert statistics.median(took_s) <= 1.0
