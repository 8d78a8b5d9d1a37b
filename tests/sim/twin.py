"""The faithful simulator: real memberships and real hosting on the in-memory network, under an autojumping clock.

Only the device is simulated: making a plan and loading blocks take simulated time and no memory.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import torch
import trio

from app.core.device_thread import DeviceThread
from app.core.reasons import Reason
from app.core.span import MAX_BLOCKS, Span
from app.hosting.block_host import BlockHost, HostingOptions
from app.hosting.memory import Free, MemoryChange
from app.membership import Membership, MembershipSetup, Timing
from app.snapshot.views import State
from engine.benchmark import Throughput
from engine.budget import BlockBudget
from engine.device.probe import Device
from engine.hosting import Hosted, HostingPlan, HostingWish
from p2p.memory.fabric import LinkProfile, MemoryFabric, MemoryNode, open_fabric
from tests.app.swarms import RECORD, identity, wall_clock
from tests.sim.judge import Judge, Verdict
from tests.sim.world import NodeSpec, World

PLAN_S = 1.0
KV_TOKENS = 100_000


class SimLoader:
    """Loads in simulated time; when and where to move, and what the others hear of it, is the app's."""

    device = DeviceThread()

    def __init__(self, spec: NodeSpec) -> None:
        self._spec = spec

    async def plan(self, wish: HostingWish) -> HostingPlan:
        await trio.sleep(PLAN_S)
        budget = BlockBudget(self._spec.blocks, 0, 0, 0, 0, 0, "simulated")
        return HostingPlan(Device("sim", "cpu", "simulated", 0, 0), torch.float32, "none", budget)

    async def held(self) -> tuple[Span, ...]:
        return (Span(0, MAX_BLOCKS),)

    async def fetch(self, span: Span) -> None:
        raise AssertionError("all blocks are on disk")

    async def fitting(self, span: Span) -> Span | None:
        raise AssertionError("all blocks are on disk")

    async def load(self, plan: HostingPlan, span: Span, on_grown: object) -> Hosted:
        await trio.sleep(self._spec.load_s)
        runner: Any = SimpleNamespace(kv_free_tokens=KV_TOKENS, kv_total_tokens=KV_TOKENS, hidden_size=64)
        throughput = Throughput(self._spec.tokens_per_s, 8 * self._spec.tokens_per_s, None)
        return cast(Hosted, SimpleNamespace(runner=runner, throughput=throughput))

    async def memory_change(self, plan: HostingPlan, full: HostingPlan) -> MemoryChange:
        await trio.sleep_forever()
        raise AssertionError

    async def free_bytes(self, plan: HostingPlan) -> Free | None:
        return None

    async def keep(self, hosted: Hosted, span: Span) -> Hosted:
        return hosted

    async def release(self, plan: HostingPlan) -> None:
        pass


@dataclass(eq=False)
class TwinNode:
    """One node: its network, its membership, its hosting, and what it serves in truth."""

    spec: NodeSpec
    network: MemoryNode
    swarm: Membership
    hosting: BlockHost | None = None
    serving: Span | None = None
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)


class Twin:
    """A swarm of real nodes in simulated time; `run` in a trio loop with a clock that jumps."""

    def __init__(self, world: World) -> None:
        self.world, self.judge = world, Judge(world.n_blocks)
        self.nodes: dict[int, TwinNode] = {}
        self._rng = random.Random(f"twin/{world.seed}")

    async def run(self) -> Verdict:
        """Live through the world's events."""
        link = LinkProfile(delay_s=0.03, jitter_s=0.02)
        async with open_fabric(self.world.seed, link) as fabric, trio.open_nursery() as nursery:
            start = trio.current_time()
            for event in self.world.events():
                await trio.sleep_until(start + event.at_s)
                if event.kind == "join":
                    self._join(fabric, nursery, event.spec)
                else:
                    node = self.nodes.pop(event.spec.number)
                    nursery.start_soon(self._go, fabric, node, event.kind == "leave")
            await trio.sleep_until(start + self.world.duration_s)
            verdict = self.judge.verdict(trio.current_time() - start)
            nursery.cancel_scope.cancel()
        return verdict

    def _join(self, fabric: MemoryFabric, nursery: trio.Nursery, spec: NodeSpec) -> None:
        who = identity(spec.number)
        network = fabric.node(who.peer_id)
        setup = MembershipSetup(wall_clock=wall_clock, rng=random.Random(spec.number), timing=Timing())
        swarm = Membership(network, who, RECORD, self.world.n_blocks, setup)
        if self.nodes:
            known = self._rng.sample(list(self.nodes.values()), min(3, len(self.nodes)))
            swarm.join_via([node.network.peer_id for node in known])
        node = self.nodes[spec.number] = TwinNode(spec, network, swarm)
        self.judge.came(trio.current_time(), spec.blocks, spec.tokens_per_s)
        nursery.start_soon(self._live, node)

    async def _live(self, node: TwinNode) -> None:
        def say(state: State, why: Reason) -> None:
            self._note(node)

        with node.scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(node.swarm.run)
                with trio.move_on_after(2.0):
                    await node.swarm.joined()
                node.hosting = BlockHost(node.network, node.swarm, SimLoader(node.spec), HostingOptions(), say)
                await node.hosting.run()

    async def _go(self, fabric: MemoryFabric, node: TwinNode, drains: bool) -> None:
        if drains and node.hosting is not None:
            self._serves(node, None)
            with trio.move_on_after(30):
                await node.hosting.retire()
            await node.swarm.leave()
        self._serves(node, None)
        node.scope.cancel()
        fabric.kill(node.network.peer_id)
        self.judge.went(trio.current_time(), node.spec.blocks, node.spec.tokens_per_s)

    def _note(self, node: TwinNode) -> None:
        """Keep what a node truly serves: what it has announced, for nobody else speaks for it."""
        own = node.swarm.own
        span = own.span if own.serves and node.spec.number in self.nodes else None
        if span is None and node.serving is not None:
            self.judge.moved(trio.current_time())
        self._serves(node, span)

    def _serves(self, node: TwinNode, span: Span | None) -> None:
        now = trio.current_time()
        if node.serving is not None:
            self.judge.serves(now, node.serving, node.spec.tokens_per_s, -1)
        if span is not None:
            self.judge.serves(now, span, node.spec.tokens_per_s)
        node.serving = span
