"""Many islands on the in-memory network, and the bytes that they take from each other in a round."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from app.rounds import wire
from p2p.memory.fabric import LinkProfile
from tests.app.rounds.island_swarm import IslandSwarm, Lesson, Node, open_islands
from tests.app.swarms import identity

LAN = LinkProfile(delay_s=0.001, kind="lan")
BULK = (wire.HASHES, wire.SHARE, wire.ROW, wire.MERGED)


@asynccontextmanager
async def open_grid(
    folder: Path, count: int, networks: Sequence[Sequence[int]] = (), **changes: Any
) -> AsyncIterator[IslandSwarm]:
    """So many islands of a small model, some of them on local networks."""
    async with open_islands(folder, **{"grid": True, "steps": 20, **changes}) as swarm:
        for network in networks:
            for one in network:
                for other in network:
                    if one < other:
                        swarm.fabric.set_link(identity(one).peer_id, identity(other).peer_id, LAN)
        for number in range(count):
            swarm.add(number)
        yield swarm


def count_bytes(swarm: IslandSwarm) -> Counter[tuple[bytes, str, str]]:
    """Count the bytes of leaves and hashes in exchanges, by the round's list, and by who took them from whom.

    Those of testers, who take changes of the round before, are not counted.
    """
    found = Counter[tuple[bytes, str, str]]()

    def counted(node: Node, call: Callable[..., Any]) -> Callable[..., Any]:
        async def counting(peer: str, method: str, body: bytes, **more: Any) -> Any:
            now = node.island.standing.round
            answer = await call(peer, method, body, **more)
            if method in BULK:
                members = wire.fields_of(wire.read_request(body)[1], method).hex_bytes("list", 32)
                if node.island._attempts[members].members.round == now:
                    found[members, node.name, peer] += len(answer)
            return answer

        return counting

    for node in swarm.nodes.values():
        network: Any = swarm.fabric.nodes[node.name]
        network.call = counted(node, network.call)
    return found


async def bytes_of_round(
    folder: Path, lesson: Lesson, count: int, networks: Sequence[Sequence[int]], *, is_grid: bool
) -> tuple[float, float]:
    """Return the bytes that a member takes in a round, and those of them from other networks, over its change's."""
    async with open_grid(folder, count, networks, lesson=lesson, grid=is_grid, steps=10) as swarm:
        island = swarm.nodes[0].island
        await swarm.until(lambda: len(island.standing.members) == count)
        first, taken = island.standing.round, count_bytes(swarm)
        await swarm.finished(*range(count))
        assert all(len(entry.list.members) == count for entry in island.log[first:])
        assert not any(node.island.figures.repeated for node in swarm.nodes.values())
        network_of = {identity(one).peer_id: at for at, network in enumerate(networks) for one in network}
        far = [size for (_, *pair), size in taken.items() if len({network_of.get(peer) for peer in pair}) > 1]
        whole = (len(island.log) - first) * count * island._model.leaves * island._model.leaf_bytes
        return taken.total() / whole, sum(far) / whole
