"""An in-memory twin of the network: whole swarms in one process, with bad links and deaths on demand.

    async with open_fabric(seed=1) as fabric:
        a, b = fabric.node("a"), fabric.node("b")
        fabric.set_link("a", "b", LinkProfile(delay_s=0.05, loss=0.01))

A node has the same methods and raises the same errors as the libp2p one. No codec runs here: messages pass as they are,
and are counted, so that 200 nodes go through hours in seconds under trio's autojumping clock. What happens to a
message is a function of the seed, the link and its number. A remote handler runs in its caller's task (cheap, and a
caller that gives up cancels it), so a handler that shields itself also holds its caller.
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
    """The wires between all nodes, and the hand that cuts them."""

    def __init__(self, nursery: trio.Nursery, seed: int, profile: LinkProfile, directory: DirectoryProfile) -> None:
        self.seed, self.default_profile = seed, profile
        self.nodes: dict[str, MemoryNode] = {}
        self.directory = MemoryDirectory(directory, seed)
        self._nursery = nursery
        self._timer = Timer()
        nursery.start_soon(self._timer.run)
        self._profiles: dict[tuple[str, str], LinkProfile] = {}
        self._group_of: dict[str, int] = {}
        self._links: dict[tuple[str, str], MemoryLink] = {}
        self._recut = trio.Event()  # set, and replaced, when partitions or frozen nodes change
        self._dials: dict[tuple[str, str], int] = {}

    def node(self, name: str) -> MemoryNode:
        """A new node, or a new life of one that was killed."""
        if name in self.nodes:
            raise ValueError(f"{name} is alive; kill it first")
        node = self.nodes[name] = MemoryNode(self, name)
        return node

    def set_link(self, a: str, b: str, profile: LinkProfile) -> None:
        """Change how the link between two nodes behaves, from the next message on."""
        self._profiles[_pair(a, b)] = profile
        if link := self._links.get(_pair(a, b)):
            link.profile = profile

    def partition(self, *groups: Iterable[str]) -> None:
        """Cut the network into these groups; nodes not named form one more."""
        self._group_of = {name: number for number, group in enumerate(groups, 1) for name in group}
        self.directory.partition(self._group_of, trio.current_time())
        self._review_silence()

    def heal(self) -> None:
        """Undo the partition."""
        self.partition()

    def kill(self, name: str) -> None:
        """Crash a node: its peers see resets at once, later dials are refused."""
        node = self.nodes.pop(name)
        node.die()
        for peer in list(node.linked):
            self.unlink(name, peer, tell=(peer,))

    def freeze(self, name: str) -> None:
        """Stop a node's traffic both ways, as SIGSTOP would: silence, and after 15 s its links are given up."""
        self.nodes[name].frozen = True
        self._review_silence()

    def resume(self, name: str) -> None:
        """Let a frozen node go on; what waited on links that still stand arrives now."""
        self.nodes[name].frozen = False
        self._review_silence()

    def cut(self, a: str, b: str) -> bool:
        """Whether nothing passes between two nodes now."""
        frozen = any(node is not None and node.frozen for node in (self.nodes.get(a), self.nodes.get(b)))
        return frozen or self._group_of.get(a, 0) != self._group_of.get(b, 0)

    def profile_of(self, a: str, b: str) -> LinkProfile:
        """How the link between two nodes behaves."""
        return self._profiles.get(_pair(a, b), self.default_profile)

    async def dial(self, source: MemoryNode, name: str) -> MemoryLink:
        """Connect two nodes: one round trip, or the failure a real dial would meet."""
        with trio.move_on_after(DIAL_TIMEOUT_S):
            while self.cut(source.peer_id, name):
                await self._recut.wait()
            await trio.sleep(2 * self.profile_of(source.peer_id, name).delay_s)
            target = self.nodes.get(name)
            if target is None or not source.alive or name == source.peer_id:
                raise PeerUnreachable(f"no address of {name} answers; it may be gone")
            if trio.current_time() < max(target.held_off_until(source.peer_id), source.held_off_until(name)):
                raise Refused(f"{name} refuses this node for now; ask another peer")
            return self._link(source, target)
        raise PeerUnreachable(f"{name} did not answer within {DIAL_TIMEOUT_S:g} s")

    def unlink(self, a: str, b: str, tell: Iterable[str]) -> None:
        """Break the link between two nodes and tell these ones that they lost it."""
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
        """Run a stream handler beside everything else."""
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

    def _review_silence(self) -> None:
        self._recut.set()
        self._recut = trio.Event()
        silent = False
        for (a, b), link in self._links.items():
            link.set_silent(self.cut(a, b))
            silent = silent or link.silent_since is not None
        if silent:
            self._nursery.start_soon(self._reap_silent)

    async def _reap_silent(self) -> None:
        await trio.sleep(SILENT_LINK_S)
        given_up = trio.current_time() - SILENT_LINK_S + 1e-6
        for (a, b), link in list(self._links.items()):
            if link.silent_since is not None and link.silent_since <= given_up:
                self.unlink(a, b, tell=(a, b))


@asynccontextmanager
async def open_fabric(
    seed: int = 0, profile: LinkProfile | None = None, directory: DirectoryProfile | None = None
) -> AsyncIterator[MemoryFabric]:
    """A fabric whose background tasks end with the block."""
    async with trio.open_nursery() as nursery:
        yield MemoryFabric(nursery, seed, profile or LinkProfile(), directory or DirectoryProfile())
        nursery.cancel_scope.cancel()


def _pair(a: str, b: str) -> tuple[str, str]:
    return (a, b) if a < b else (b, a)
