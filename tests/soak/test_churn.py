"""A thousand members that come and go: every block is served again soon after a loss, and no node's loop stalls.

The swarm's decisions are simulated with modelled news (`tests.sim.model`): a thousand real memberships in one process
take many times the simulated time in CPU, since news goes to everybody. So one real node lives among a thousand
puppets, which announce, change, die and answer probes as members do: all that a member of such a swarm has to bear.
"""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Callable

import pytest
import trio
from trio.testing import MockClock

from app.core.span import Span
from app.hosting.block_host import BlockHost, HostingOptions
from app.membership import Membership, MembershipSetup, wire
from app.routing.planner import RoutePlanner
from app.routing.route import NoRoute, RouteRequest
from app.swarm.records import Announcement, sign_announcement, sign_suspicion
from p2p.errors import P2PError
from p2p.memory.fabric import LinkProfile, MemoryFabric, open_fabric
from tests.app.swarms import RECORD, identity, wall_clock
from tests.sim.model import Model
from tests.sim.twin import SimLoader
from tests.sim.world import NodeSpec, World

pytestmark = [pytest.mark.soak, pytest.mark.timeout(7200)]

MEMBERS = int(os.environ.get("CHURN_MEMBERS", "1000"))
HOURS = float(os.environ.get("CHURN_HOURS", "6"))
SOON_S = 15.0
STALL_S = 0.05
REFRESH_S = 30.0  # between two announcements of a member's figures
ROUTE_EVERY_S = 10.0
WORLD = World(nodes=MEMBERS, hours=HOURS, churn_s=30.0)
Record = Callable[[str, object], None]


def test_hours_of_churn_leave_no_block_unserved_for_long(record_property: Record) -> None:
    began_s = time.process_time()
    verdict = Model(WORLD).run()
    told = f"{MEMBERS} members, {HOURS:g} h: {verdict} ({time.process_time() - began_s:.0f} s of CPU)"
    record_property("verdict", told)
    print(told)
    assert max(verdict.holes_s, default=0.0) <= SOON_S, verdict
    assert verdict.moves_per_node_hour <= 2, verdict


class Steps(trio.abc.Instrument):
    """CPU seconds of the longest steps of all tasks; a step is what runs between two checkpoints."""

    def __init__(self) -> None:
        self.longest: list[tuple[float, str]] = []
        self.count = 0
        self._began_s = 0.0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._began_s = time.thread_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        took_s = time.thread_time() - self._began_s
        self.count += 1
        if took_s > STALL_S / 10:
            self.longest = sorted([*self.longest, (round(took_s, 4), task.name)], reverse=True)[:20]


class Puppets:
    """The other members: they sign what members sign, answer probes, and know nothing."""

    def __init__(self, fabric: MemoryFabric, real: str, rng: random.Random) -> None:
        self._fabric, self._real, self._rng = fabric, real, rng
        self.raw: dict[int, bytes] = {}
        self._specs: dict[int, NodeSpec] = {}

    def join(self, spec: NodeSpec) -> None:
        """Another one that serves a random window."""
        self._specs[spec.number] = spec
        self.announce(spec.number)
        node = self._fabric.node(identity(spec.number).peer_id)

        async def probe(peer: str, body: bytes) -> bytes:
            return wire.pack([self.raw[spec.number]])

        async def table(peer: str, body: bytes) -> bytes:
            known = self._rng.sample(sorted(self.raw), min(64, len(self.raw)))
            return wire.TableAnswer([], [self.raw[spec.number], *(self.raw[number] for number in known)]).encode()

        async def tell(peer: str, body: bytes) -> bytes:
            return b""

        node.serve(wire.PROBE, probe)
        node.serve(wire.TABLE, table)
        node.serve(wire.TELL, tell)

    def announce(self, number: int) -> bytes:
        """Sign a new announcement."""
        spec, who, now_ms = self._specs[number], identity(number), int(1000 * wall_clock())
        blocks = min(spec.blocks, WORLD.n_blocks)
        start = random.Random(number).randrange(WORLD.n_blocks - blocks + 1)
        said = Announcement(
            who.peer_id, now_ms, now_ms + 1_800_000, RECORD.id, "serving", Span(start, start + blocks),
            spec.tokens_per_s, 8 * spec.tokens_per_s, 1 << 20, busy=round(self._rng.random() / 2, 2),
        )  # fmt: skip
        self.raw[number] = sign_announcement(who, said)
        return self.raw[number]

    async def tell(self, statements: list[bytes]) -> None:
        """Have one of them pass statements on to the real node."""
        teller = self._rng.choice(sorted(self.raw))
        node = self._fabric.nodes.get(identity(teller).peer_id)
        body = wire.Tell(bytes.fromhex(RECORD.id), wire.fitting(statements, wire.MAX_BATCH_BYTES)).encode()
        if node is not None:
            try:
                await node.call(self._real, wire.TELL, body, timeout_s=5)
            except P2PError:
                pass  # gossip is lost now and then

    async def die(self, number: int) -> None:
        """One is gone, and another one says so."""
        peer = identity(number).peer_id
        self.raw.pop(number)
        self._fabric.kill(peer)
        await trio.sleep(self._rng.uniform(2, 6))
        accuser = self._rng.choice(sorted(self.raw))
        now_ms = int(1000 * wall_clock())
        await self.tell([sign_suspicion(identity(accuser), RECORD.id, peer, now_ms, sequence=now_ms)])

    async def refresh(self) -> None:
        """Everybody's figures change every half minute; what changed within a second comes together."""
        while True:
            await trio.sleep(1.0)
            some = self._rng.sample(sorted(self.raw), max(1, round(len(self.raw) / REFRESH_S)))
            await self.tell([self.announce(number) for number in some])


async def live(world: World, found: list[int]) -> None:
    """One real node among puppets through all events of a world; counts the routes that it finds."""
    async with open_fabric(1, LinkProfile(delay_s=0.03)) as fabric, trio.open_nursery() as nursery:
        who = identity(10**6)
        network = fabric.node(who.peer_id)
        setup = MembershipSetup(wall_clock=wall_clock, rng=random.Random(1))
        swarm = Membership(network, who, RECORD, world.n_blocks, setup)
        puppets = Puppets(fabric, who.peer_id, random.Random(2))
        events = world.events()
        first = [event for event in events if event.at_s <= world.arrival_s]
        for event in first:
            puppets.join(event.spec)
            await trio.lowlevel.checkpoint()  # the test's own work is no node's step
        swarm.join_via([identity(event.spec.number).peer_id for event in first[:3]])
        await nursery.start(swarm.run)
        nursery.start_soon(puppets.refresh)
        spec = NodeSpec(10**6, 8, 20.0, 5.0, (0.0, 0.0))
        host = BlockHost(network, swarm, SimLoader(spec), HostingOptions(), lambda state, why: None)
        nursery.start_soon(host.run)
        nursery.start_soon(_find_routes, RoutePlanner(network, swarm.announcements), world.n_blocks, found)
        start = trio.current_time()
        for event in events[len(first) :]:
            await trio.sleep_until(start + event.at_s)
            if event.kind == "join":
                puppets.join(event.spec)
                await puppets.tell([puppets.raw[event.spec.number]])
            elif event.spec.number in puppets.raw:
                nursery.start_soon(puppets.die, event.spec.number)
        await trio.sleep_until(start + world.duration_s)
        known = len(swarm.table.present())
        assert abs(known - len(puppets.raw)) <= 0.05 * len(puppets.raw), (known, len(puppets.raw))
        nursery.cancel_scope.cancel()


async def _find_routes(planner: RoutePlanner, n_blocks: int, found: list[int]) -> None:
    while True:
        await trio.sleep(ROUTE_EVERY_S)
        try:
            found.append(len(await planner.find((), RouteRequest(Span(0, n_blocks), 256, 64), ())))
        except NoRoute:
            found.append(0)


def test_a_node_among_a_thousand_never_stalls(record_property: Record) -> None:
    steps, found, began_s = Steps(), list[int](), time.process_time()
    gc.collect()
    gc.freeze()  # a collection over a thousand puppets is not what one node has to bear
    gc.disable()
    try:
        trio.run(live, WORLD, found, clock=MockClock(autojump_threshold=0), instruments=[steps])
    finally:
        gc.enable()
        gc.unfreeze()
    told = f"{MEMBERS} members, {HOURS:g} h: {steps.count} steps, longest {steps.longest[:5]}, {len(found)} routes"
    record_property("steps", f"{told} ({time.process_time() - began_s:.0f} s of CPU)")
    print(told, f"({time.process_time() - began_s:.0f} s of CPU)")
    assert found
    assert all(found[6:]), "no route was found for a while"
    assert not steps.longest or steps.longest[0][0] <= STALL_S, steps.longest
