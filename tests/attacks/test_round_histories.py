"""What others say of how far they are stops nobody's steps: an island changes over to a log that it has verified."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import trio
from trio.testing import MockClock

from app.rounds import wire
from p2p.errors import P2PError
from p2p.memory.node import MemoryNode
from tests.app.rounds.island_swarm import ONE_STEP, IslandSwarm, open_islands
from tests.app.swarms import identity

STEP_S = 2.0
MADE_UP = (10**6, "ab" * 32)  # a round and its head


def idle_identities(swarm: IslandSwarm, count: int) -> list[MemoryNode]:
    """Identities on one machine that show no log."""

    async def silent(peer: str, body: bytes) -> Any:
        await trio.sleep_forever()

    ghosts = [swarm.fabric.node(identity(1000 + number).peer_id) for number in range(count)]
    for ghost in ghosts:
        swarm.fabric.machine_of[ghost.peer_id] = "the attacker's"
        ghost.serve(wire.LOG, silent)
    return ghosts


async def say(swarm: IslandSwarm, ghosts: Iterable[MemoryNode], said: Callable[[], tuple[int, str]]) -> None:
    """Say hello to all islands twice a second, with a round and a head."""
    while True:
        number, head = said()
        for ghost in ghosts:
            for node in list(swarm.nodes.values()):
                try:
                    body = wire.request(swarm.record.id, {"round": number, "head": head})
                    await ghost.call(node.name, wire.HELLO, body, timeout_s=1)
                except P2PError:
                    pass
        await trio.sleep(0.5)


async def test_idle_identities_that_name_one_made_up_head_stop_no_steps(
    tmp_path: Path, patient_clock: MockClock
) -> None:
    """They have free places in the rounds, where they are most, and are silent when asked for their log."""
    async with (
        open_islands(tmp_path, 0, 1, step_s=STEP_S, islands=20, grid=True, **ONE_STEP) as swarm,
        trio.open_nursery() as nursery,
    ):
        island, ghosts, is_lie = swarm.nodes[0].island, idle_identities(swarm, 6), False
        await swarm.until(lambda: len(island.standing.members) == 2)

        def said() -> tuple[int, str]:
            return MADE_UP if is_lie else (island.standing.round, island.head.hex())

        async def rounds_in(seconds: float) -> int:
            before = island.standing.round
            await trio.sleep(seconds)
            return island.standing.round - before

        nursery.start_soon(say, swarm, ghosts, said)
        await swarm.until(lambda: {ghost.peer_id for ghost in ghosts} <= {*island.standing.members})
        await trio.sleep(30)
        honest = await rounds_in(30)
        is_lie = True
        assert await rounds_in(30) >= 0.9 * honest
        swarm.kill(1)  # one that was away finds the true log among all who lie
        await trio.sleep(20)
        back = swarm.add(1, step_s=STEP_S)
        await swarm.until(lambda: back.island.standing.round >= island.standing.round - 1, within_s=90)
        nursery.cancel_scope.cancel()
