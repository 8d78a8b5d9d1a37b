"""The networks that the contract runs on here: the in-memory twin, and real links over byte pipes in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio
import trio.testing

from app.core.network import Network
from p2p.errors import P2PError, PeerUnreachable, StreamReset
from p2p.link.byte_stream import ByteStream
from p2p.link.quota import Limits
from p2p.link.switchboard import MOVE, Switchboard
from p2p.memory.fabric import MemoryFabric, open_fabric
from p2p.values import Buffer, LinkInfo

if TYPE_CHECKING:
    from trio_typing import TaskStatus


class TrioByteStream:
    """A `trio.abc.Stream` (TCP, memory) as a `ByteStream`."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream

    async def write_parts(self, parts: Sequence[Buffer]) -> None:
        try:
            await self._stream.send_all(b"".join(parts))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise StreamReset("the byte stream broke while writing") from error

    async def read(self, max_bytes: int) -> bytes:
        try:
            return bytes(await self._stream.receive_some(max_bytes))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise StreamReset("the byte stream broke while reading") from error

    async def close(self) -> None:
        await self._stream.aclose()

    async def reset(self) -> None:
        await trio.aclose_forcefully(self._stream)


class MemoryWorld:
    """The in-memory twin."""

    def __init__(self, fabric: MemoryFabric) -> None:
        self.fabric = fabric
        self.made = 0

    async def node(self) -> Network:
        self.made += 1
        return self.fabric.node(f"node-{self.made}")

    async def kill(self, node: Network) -> None:
        self.fabric.kill(node.peer_id)


class WiredNode(Switchboard):
    """A switchboard with what `Network` asks besides: the real codec, links and limits, and no libp2p."""

    def __init__(self, world: WiredWorld, name: str, limits: Limits | None = None) -> None:
        super().__init__(self._pipe_to, limits=limits)
        self._world, self._name = world, name
        self.reports: list[tuple[str, str]] = []
        self.on_misbehaved = lambda peer, why: self.reports.append((peer, why))

    @property
    def peer_id(self) -> str:
        return self._name

    async def _pipe_to(self, peer: str, lane: str) -> ByteStream:
        await trio.lowlevel.checkpoint()
        other = self._world.nodes.get(peer)
        if other is None:
            raise PeerUnreachable(f"no address of {peer} answers")
        here, there = self._world.pipe()
        self._world.connect(other, self._name, lane, TrioByteStream(there))
        return TrioByteStream(here)

    async def provide(self, key: bytes) -> None: ...

    async def find_providers(self, key: bytes, *, timeout_s: float) -> Sequence[str]:
        return ()

    async def put_value(self, key: bytes, value: bytes) -> None: ...

    async def get_value(self, key: bytes, *, timeout_s: float) -> bytes | None:
        return None

    def addresses(self) -> Sequence[str]:
        return ()

    def learn(self, peer: str, addresses: Sequence[str]) -> None: ...

    def source(self, peer: str) -> str:
        return peer if self.links_to(peer) else ""

    def keep_links(self, peers: Iterable[str]) -> None: ...

    def peers(self) -> list[str]:
        """The peers that this node has a link to."""
        return list(dict.fromkeys(peer for peer, _ in self._links))

    def links(self) -> Sequence[LinkInfo]:
        return [
            LinkInfo(peer, "direct", None, sum(link.bytes_in for link in links), sum(link.bytes_out for link in links))
            for peer in self.peers()
            if (links := self.links_to(peer))
        ]

    async def disconnect(self, peer: str, *, misbehaved: bool = False) -> None:
        self.hang_up(peer)
        await trio.lowlevel.checkpoint()


class WiredWorld:
    """Switchboards joined by memory pipes."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.nodes: dict[str, WiredNode] = {}
        self.limits: Limits | None = None
        self.pipe: Callable[[], tuple[trio.abc.Stream, trio.abc.Stream]] = trio.testing.memory_stream_pair
        self._nursery = nursery
        self._lives: dict[str, trio.Nursery] = {}
        self._made = 0

    async def node(self) -> WiredNode:
        self._made += 1
        node = self.nodes[f"node-{self._made}"] = WiredNode(self, f"node-{self._made}", self.limits)
        await self._nursery.start(self._live, node)
        return node

    async def kill(self, node: Network) -> None:
        del self.nodes[node.peer_id]
        self._lives[node.peer_id].cancel_scope.cancel()

    def connect(self, node: WiredNode, caller: str, lane: str, stream: ByteStream) -> None:
        if lane.endswith(MOVE):
            self._lives[node.peer_id].start_soon(_attend_move, node, caller, lane.removesuffix(MOVE), stream)
        else:
            self._lives[node.peer_id].start_soon(node.attend, caller, lane, stream)

    async def _live(self, node: WiredNode, *, task_status: TaskStatus[None]) -> None:
        async with trio.open_nursery() as nursery:
            self._lives[node.peer_id] = nursery
            await nursery.start(node.run)
            task_status.started()


async def _attend_move(node: WiredNode, caller: str, lane: str, stream: ByteStream) -> None:
    try:
        await node.attend_move(caller, lane, stream)
    except P2PError:
        await stream.reset()


@asynccontextmanager
async def memory_world() -> AsyncIterator[MemoryWorld]:
    async with open_fabric(seed=1) as fabric:
        yield MemoryWorld(fabric)


@asynccontextmanager
async def wired_world() -> AsyncIterator[WiredWorld]:
    async with trio.open_nursery() as nursery:
        yield WiredWorld(nursery)
        nursery.cancel_scope.cancel()
