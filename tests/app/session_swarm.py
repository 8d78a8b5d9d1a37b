"""Swarms of block servers on the in-memory network, for tests of sessions."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import trio

from app.asker.asker import Asker, AskerOptions
from app.asker.guessing import Guesser
from app.asker.reply import ReplyStats
from app.asker.route_session import SessionSettings
from app.core.compute import BlockRunner, ReplyEnds
from app.core.span import Span
from app.serving.adapters import AdapterSource
from app.serving.block_server import BlockServer, ServerSettings
from app.swarm.records import Announcement
from p2p.errors import PeerUnreachable
from p2p.memory.fabric import LinkProfile, MemoryFabric, MemoryNode, open_fabric
from tests.app.hash_model import HashEnds, HashRunner, InlineDevice

STEP_S = 0.01
PROMPT = list(range(100, 140))


class SessionSwarm:
    """Nodes that serve blocks, a membership that knows them all, and askers."""

    def __init__(self, fabric: MemoryFabric, nursery: trio.Nursery) -> None:
        self.fabric, self.nursery = fabric, nursery
        self.servers: dict[str, BlockServer] = {}
        self.runners: dict[str, Any] = {}
        self.devices: dict[str, InlineDevice] = {}
        self.announcements: dict[str, Announcement] = {}

    async def serve(
        self,
        name: str,
        runner: BlockRunner,
        *,
        speed: float = 100.0,
        settings: ServerSettings | None = None,
        adapters: AdapterSource | None = None,
    ) -> BlockServer:
        """A node that serves blocks."""
        device = self.devices[name] = InlineDevice(STEP_S)
        server = BlockServer(self.fabric.nodes.get(name) or self.fabric.node(name), runner, device, settings, adapters)
        await self.nursery.start(server.run)
        self.servers[name], self.runners[name] = server, runner
        span = Span(runner.start, runner.stop)
        self.announcements[name] = Announcement(name, 1, 0, "", "serving", span, speed, 10 * speed, 1 << 40)
        return server

    async def asker(
        self,
        name: str = "asker",
        ends: ReplyEnds | None = None,
        settings: SessionSettings | None = None,
        keep: int | Callable[[], int] = 0,
        nursery: trio.Nursery | None = None,
        guesser: Any = Guesser,
        draft: Any = lambda: None,
        loading: Callable[[], int] = lambda: 0,
    ) -> Asker:
        """A node that hosts nothing."""
        kept = keep if callable(keep) else lambda: keep
        outlook = AskerOptions(
            settings or SessionSettings(),
            rng=random.Random(1),
            keep_sessions=kept,
            guesser=guesser,
            draft=draft,
            loading=loading,
        )
        members = lambda: list(self.announcements.values())  # noqa: E731
        network = self.fabric.nodes.get(name) or self.fabric.node(name)
        asker = Asker(network, ends or HashEnds(), InlineDevice(), members, options=outlook)
        await (nursery or self.nursery).start(asker.run)
        return asker

    def kill(self, name: str) -> None:
        """Crash a node; membership has not noticed yet."""
        self.fabric.kill(name)


async def ask(asker: Asker, prompt: Sequence[int], count: int, owner: str = "") -> ReplyStats:
    """One whole reply of the model of hashes."""
    async with asker.reply(prompt, count, max_tokens=count, owner=owner) as reply:
        async for _ in reply:
            pass
    return reply.stats


@asynccontextmanager
async def open_swarm(*spans: tuple[int, int], delay_s: float = 0.005) -> AsyncIterator[SessionSwarm]:
    """A swarm of model-of-hashes nodes `n0`, `n1`, ... that serve these spans; checks that nothing leaks."""
    async with open_fabric(profile=LinkProfile(delay_s=delay_s)) as fabric, trio.open_nursery() as nursery:
        swarm = SessionSwarm(fabric, nursery)
        for index, (start, stop) in enumerate(spans):
            await swarm.serve(f"n{index}", HashRunner(start, stop))
        yield swarm
        nursery.cancel_scope.cancel()


async def no_leaks(swarm: SessionSwarm) -> None:
    """Wait for what is on its way; then no living node holds a session or a slot."""
    await trio.sleep(1)
    for name, server in swarm.servers.items():
        if name in swarm.fabric.nodes:
            runner = swarm.runners[name]
            assert (server.sessions, server.queued_rows) == (0, 0), name
            assert runner.kv_free_tokens == runner.kv_total_tokens, name


def bar(node: MemoryNode, barred: str) -> None:
    """Let a node fail to reach a peer, as two nodes behind strict NATs do."""
    usual = node.open

    async def open_unless_barred(peer: str, protocol: str, **options: Any) -> Any:
        if peer == barred:
            raise PeerUnreachable(f"no address of {peer} answers")
        return await usual(peer, protocol, **options)

    node.open = open_unless_barred  # type: ignore[method-assign]
