"""A guarded swarm on the in-memory network, for tests: nodes with keys, home folders, certificates and an issuer."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import trio

from app.config.home import Home
from app.joining.admission import AdmissionDesk, ask_admission, issue, revoke
from app.membership import GuardedNetwork, Membership, MembershipSetup
from app.swarm.invitations import InviteLimits
from app.swarm.invite import Pass
from app.swarm.saved import SavedSwarm
from p2p.envelope import parse
from p2p.identity import Identity
from p2p.memory.fabric import MemoryFabric, MemoryNode, open_fabric
from tests.app.swarms import N_BLOCKS, RECORD, identity, wall_clock

T = TypeVar("T")
SECRET = b"s" * 32
CREATOR = identity(0)
SWARM = SavedSwarm(RECORD.name, RECORD.model_hash, 0, SECRET, RECORD.raw, creator=CREATOR.peer_id)


async def in_place(function: Callable[[], T]) -> T:
    """Run a function without a thread, for which the simulated clock would not wait."""
    await trio.lowlevel.checkpoint()
    return function()


@dataclass
class GuardedNode:
    """One node: raw network, guard, desk, and its membership once it takes part."""

    who: Identity
    home: Home
    raw: MemoryNode
    guard: GuardedNetwork
    swarm: SavedSwarm
    scope: trio.CancelScope
    notes: list[str]
    membership: Membership | None = None

    @property
    def peer(self) -> str:
        """Its peer id."""
        return self.who.peer_id

    def knows(self) -> set[str]:
        """The members that it has met."""
        return set() if self.membership is None else set(self.membership.table.present())

    def invite(self, **limits: object) -> Pass:
        """Make an invite."""
        entry, _ = issue(self.home, self.who, self.swarm, InviteLimits(**limits))  # type: ignore[arg-type]
        assert entry is not None
        return entry

    async def enter(self, entry: Pass) -> None:
        """Use an invite."""
        self.swarm = await ask_admission(self.raw, replace(self.swarm, entry=entry), f"node {self.peer[-4:]}")
        self.guard.certificate = self.swarm.certificate

    def revoke(self, peer: str, *, remove: bool = False) -> None:
        """Revoke a member, or take it back."""
        raw = revoke(self.home, self.who, self.swarm, peer, remove=remove)
        assert raw is not None
        self.guard.keep(parse(raw))


class GuardedSim:
    """Nodes of one guarded swarm."""

    def __init__(self, fabric: MemoryFabric, nursery: trio.Nursery, folder: Path) -> None:
        self.fabric, self._nursery, self._folder = fabric, nursery, folder

    def add(self, number: int) -> GuardedNode:
        """A node with the secret and without a certificate; number 0 is the creator."""
        who = identity(number)
        home = Home.open(self._folder / str(number))
        raw = self.fabric.node(who.peer_id)
        authority = SWARM.authority
        assert authority is not None
        guard = GuardedNetwork(raw, authority)
        notes: list[str] = []
        AdmissionDesk(raw, guard, who, home, lambda kind, text: notes.append(text), in_place)
        node = GuardedNode(who, home, raw, guard, SWARM, trio.CancelScope(), notes)
        self._nursery.start_soon(guard.run)
        return node

    def take_part(self, node: GuardedNode, *via: GuardedNode) -> None:
        """Let a node be a member."""
        setup = MembershipSetup(secret=SECRET, wall_clock=wall_clock, rng=random.Random(node.peer))
        node.membership = Membership(node.guard, node.who, RECORD, N_BLOCKS, setup)
        node.membership.join_via(one.peer for one in via)

        async def live(membership: Membership) -> None:
            with node.scope:
                await membership.run()

        self._nursery.start_soon(live, node.membership)

    async def grow(self, count: int) -> list[GuardedNode]:
        """A creator and members that it admitted, all of whom know each other."""
        nodes = [self.add(number) for number in range(count)]
        self.take_part(nodes[0])
        for node in nodes[1:]:
            await node.enter(nodes[0].invite())
            self.take_part(node, nodes[0])
        await self.until(lambda: all(len(node.knows()) == count - 1 for node in nodes))
        return nodes

    async def until(self, holds: Callable[[], bool], within_s: float = 120) -> None:
        """Wait until something holds; fails where it takes too long."""
        deadline = trio.current_time() + within_s
        while not holds():
            assert trio.current_time() < deadline, f"not within {within_s} s"
            await trio.sleep(0.05)


@asynccontextmanager
async def open_guarded(folder: Path) -> AsyncIterator[GuardedSim]:
    """A guarded swarm that ends with the block."""
    async with open_fabric(1) as fabric, trio.open_nursery() as nursery:
        yield GuardedSim(fabric, nursery, folder)
        nursery.cancel_scope.cancel()
