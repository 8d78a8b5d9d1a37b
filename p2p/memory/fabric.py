"""The in-memory network: nodes and the links between them, with slow links, partitions and crashes on demand.

    async with open_fabric(seed=1) as fabric:
        a, b = fabric.node("a"), fabric.node("b")
        fabric.set_link("a", "b", LinkProfile(delay_s=0.05, loss=0.01))

A node has the same methods and raises the same errors as the libp2p one. Messages are passed without encoding and are
counted, so that 200 nodes simulate hours in seconds under trio's autojumping clock. The fate of a message depends only
on the seed, the link and the message's number. The remote handler of a call runs in the caller's task: that is cheap,
and cancelling the call cancels the handler, but a handler that shields itself also blocks its caller.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager

import trio

from p2p.errors import PeerUnreachable, Refused
from p2p.memory.directory import DirectoryProfile, MemoryDirectory
from p2p.memory.link import Lane, LinkProfile, MemoryLink, MemoryStream, Traffic
from p2p.memory.node import MemoryNode
from p2p.memory.timer import Timer

__all__ = ["DirectoryProfile", "LinkProfile", "MemoryFabric", "MemoryNode", "MemoryStream", "Traffic", "open_fabric"]

DIAL_TIMEOUT_S = 5.0
SILENT_LINK_S = 15.0  # heartbeats every 5 s, dead at 15 s, as on a real host


class MemoryFabric:
    """All nodes and links, with methods to partition the network and to kill, freeze and resume nodes."""

    def __init__(self, nursery: trio.Nursery, seed: int, profile: LinkProfile, directory: DirectoryProfile) -> None:
        self.seed, self.default_profile = seed, profile
        self.nodes: dict[str, MemoryNode] = {}
        self.machine_of: dict[str, str] = {}  # of nodes that share one, and its address
        self.directory = MemoryDirectory(directory, seed)
        self._nursery = nursery
        self._timer = Timer()
        nursery.start_soon(self._timer.run)
        self._profiles: dict[tuple[str, str], LinkProfile] = {}
        self._group_of: dict[str, int] = {}
        self._links: dict[tuple[str, str], MemoryLink] = {}
        self._cuts_changed = trio.Event()  # set, and replaced, when partitions or frozen nodes change
        self._dials: dict[tuple[str, str], int] = {}

    def node(self, name: str) -> MemoryNode:
        """Create a node, or restart one that was killed; raises ValueError if it is alive."""
        if name in self.nodes:
            raise ValueError(f"{name} is alive; kill it first")
        node = self.nodes[name] = MemoryNode(self, name)
        return node

    def set_link(self, a: str, b: str, profile: LinkProfile) -> None:
        """Set the profile of the link between two nodes, from the next message on."""
        self._profiles[_pair(a, b)] = profile
        if link := self._links.get(_pair(a, b)):
            link.profile = profile

    def partition(self, *groups: Iterable[str]) -> None:
        """Split the network into these groups; the nodes not named form one more group."""
        self._group_of = {name: number for number, group in enumerate(groups, 1) for name in group}
        self.directory.partition(self._group_of, trio.current_time())
        self._update_silence()

    def heal(self) -> None:
        """End the partition."""
        self.partition()

    def kill(self, name: str) -> None:
        """Crash a node: its peers see resets at once, and later dials fail."""
        node = self.nodes.pop(name)
        node.die()
        for peer in list(node.linked):
            self.unlink(name, peer, tell=(peer,))

    def freeze(self, name: str) -> None:
        """Stop a node's traffic in both directions, as SIGSTOP would; after 15 s its links are closed."""
        self.nodes[name].frozen = True
        self._update_silence()

    def resume(self, name: str) -> None:
        """Unfreeze a node; messages held on links that are still open are delivered now."""
        self.nodes[name].frozen = False
        self._update_silence()

    def cut(self, a: str, b: str) -> bool:
        """True if nothing passes between two nodes now, because of a partition or a frozen node."""
        frozen = any(node is not None and node.frozen for node in (self.nodes.get(a), self.nodes.get(b)))
        return frozen or self._group_of.get(a, 0) != self._group_of.get(b, 0)

    def profile_of(self, a: str, b: str) -> LinkProfile:
        """Return the profile of the link between two nodes."""
        return self._profiles.get(_pair(a, b), self.default_profile)

    async def dial(self, source: MemoryNode, name: str) -> MemoryLink:
        """Connect two nodes, which takes one round trip.

        Raises `PeerUnreachable` (dead, or no answer within 5 s) or `Refused` (held off), as a real dial would.
        """
        with trio.move_on_after(DIAL_TIMEOUT_S):
            while self.cut(source.peer_id, name):
                await self._cuts_changed.wait()
            await trio.sleep(2 * self.profile_of(source.peer_id, name).delay_s)
            target = self.nodes.get(name)
            if target is None or not source.alive or name == source.peer_id:
                raise PeerUnreachable(f"no address of {name} answers; it may have stopped")
            if trio.current_time() < max(target.held_off_until(source.peer_id), source.held_off_until(name)):
                raise Refused(f"{name} refuses this node for now; use another peer")
            return self._link(source, target)
        raise PeerUnreachable(f"{name} did not answer within {DIAL_TIMEOUT_S:g} s")

    def unlink(self, a: str, b: str, tell: Iterable[str]) -> None:
        """Break the link between two nodes, and call the lost-link listeners of the nodes in `tell`."""
        link = self._links.pop(_pair(a, b), None)
        if link is None:
            return
        for here, there in ((a, b), (b, a)):
            if node := self.nodes.get(here):
                node.linked.pop(there, None)
        link.snap()
        for here in tell:
            if node := self.nodes.get(here):
                node.lost(b if here == a else a)

    def start(self, function: Callable[[MemoryStream], Awaitable[None]], stream: MemoryStream) -> None:
        """Start a stream handler in the background."""
        self._nursery.start_soon(function, stream)

    def _link(self, source: MemoryNode, target: MemoryNode) -> MemoryLink:
        a, b = source.peer_id, target.peer_id
        link = self._links.get(_pair(a, b))
        if link is None:
            dials = self._dials[_pair(a, b)] = self._dials.get(_pair(a, b), 0) + 1
            seed = f"{self.seed}/{dials}"
            lanes = {
                a: Lane(f"{seed}/{a}/{b}", source.traffic, target.traffic),
                b: Lane(f"{seed}/{b}/{a}", target.traffic, source.traffic),
            }
            link = self._links[_pair(a, b)] = MemoryLink(self.profile_of(a, b), lanes, self._timer)
            source.linked[b] = target.linked[a] = link
            source.close_surplus(b)
            target.close_surplus(a)
        return link

    def _update_silence(self) -> None:
        self._cuts_changed.set()
        self._cuts_changed = trio.Event()
        silent = False
        for (a, b), link in self._links.items():
            link.set_silent(self.cut(a, b))
            silent = silent or link.silent_since is not None
        if silent:
            self._nursery.start_soon(self._close_silent)

    async def _close_silent(self) -> None:
        await trio.sleep(SILENT_LINK_S)
        silent_by = trio.current_time() - SILENT_LINK_S + 1e-6
        for (a, b), link in list(self._links.items()):
            if link.silent_since is not None and link.silent_since <= silent_by:
                self.unlink(a, b, tell=(a, b))


@asynccontextmanager
async def open_fabric(
    seed: int = 0, profile: LinkProfile | None = None, directory: DirectoryProfile | None = None
) -> AsyncIterator[MemoryFabric]:
    """Open an in-memory network; its background tasks are cancelled at the end of the block."""
    async with trio.open_nursery() as nursery:
        yield MemoryFabric(nursery, seed, profile or LinkProfile(), directory or DirectoryProfile())
        nursery.cancel_scope.cancel()


def _pair(a: str, b: str) -> tuple[str, str]:
    return (a, b) if a < b else (b, a)
