"""Whole swarms on the in-memory network, for tests: every node a `Membership` under an autojumping clock."""

from __future__ import annotations

import hashlib
import random
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache

import trio

from app.membership import Membership, MembershipSetup, Timing
from app.membership.member import Change
from app.swarm.records import SwarmRecord, sign_record
from p2p.identity import Identity
from p2p.memory.fabric import DirectoryProfile, LinkProfile, MemoryFabric, MemoryNode, open_fabric

START_S = 1_800_000_000.0
MODEL = "1a2b3c4d" * 8
N_BLOCKS = 24
CREATOR = Identity(b"c" * 32)
RECORD = sign_record(CREATOR, "attic", MODEL, now_ms=int(START_S * 1000))


@cache
def identity(number: int) -> Identity:
    """The same identity for the same number."""
    return Identity(hashlib.sha256(b"test node %d" % number).digest())


def wall_clock() -> float:
    """A wall clock that goes with trio's."""
    return START_S + trio.current_time()


@dataclass
class SimNode:
    """One node of a simulated swarm."""

    number: int
    network: MemoryNode
    swarm: Membership
    scope: trio.CancelScope
    changes: list[tuple[float, Change]] = field(default_factory=list)

    @property
    def peer(self) -> str:
        """Its name."""
        return self.network.peer_id

    def knows(self) -> set[str]:
        """Those it holds for alive."""
        return {member.peer for member in self.swarm.members() if member.present}

    def state_of(self, peer: str) -> str | None:
        """What it thinks of another."""
        return self.swarm.table.state(peer)


class Sim:
    """Nodes that come, go and fall silent."""

    def __init__(self, fabric: MemoryFabric, nursery: trio.Nursery, timing: Timing, record: SwarmRecord) -> None:
        self.fabric, self._nursery, self._timing, self.record = fabric, nursery, timing, record
        self.nodes: dict[str, SimNode] = {}
        self.clock_off_s: dict[int, float] = {}  # by which the wall clock of a node jumped

    def add(self, number: int, via: Iterable[str] = (), *, skew_s: float = 0.0) -> SimNode:
        """A new node that is told of some peers."""
        who = identity(number)
        network = self.fabric.node(who.peer_id)

        def clock() -> float:
            return wall_clock() + skew_s + self.clock_off_s.get(number, 0.0)

        setup = MembershipSetup(wall_clock=clock, rng=random.Random(number), timing=self._timing)
        swarm = Membership(network, who, self.record, N_BLOCKS, setup)
        node = self.nodes[who.peer_id] = SimNode(number, network, swarm, trio.CancelScope())
        swarm.subscribe(lambda change: node.changes.append((trio.current_time(), change)))
        swarm.join_via(via)
        self._nursery.start_soon(self._live, node)
        return node

    async def grow(self, count: int) -> list[SimNode]:
        """`count` nodes that know each other."""
        first = self.add(0)
        await trio.sleep(0.1)
        nodes = [first, *(self.add(number, [first.peer]) for number in range(1, count))]
        await self.until(lambda: all(len(n.swarm.table.present()) == count - 1 for n in nodes), 120)
        return nodes

    def kill(self, node: SimNode) -> None:
        """Crash a node."""
        node.scope.cancel()
        self.fabric.kill(node.peer)
        del self.nodes[node.peer]

    async def until(self, holds: Callable[[], bool], within_s: float) -> float:
        """Wait until something holds, and how long that took; fails where it takes too long."""
        started_at = trio.current_time()
        while not holds():
            assert trio.current_time() - started_at <= within_s, f"not within {within_s} s"
            await trio.sleep(0.05)
        return trio.current_time() - started_at

    async def _live(self, node: SimNode) -> None:
        with node.scope:
            await node.swarm.run()


@asynccontextmanager
async def open_sim(
    *,
    timing: Timing | None = None,
    link: LinkProfile | None = None,
    directory: DirectoryProfile | None = None,
    record: SwarmRecord = RECORD,
    seed: int = 1,
) -> AsyncIterator[Sim]:
    """A simulated network whose nodes end with the block."""
    async with open_fabric(seed, link, directory) as fabric, trio.open_nursery() as nursery:
        yield Sim(fabric, nursery, timing or Timing(), record)
        nursery.cancel_scope.cancel()
