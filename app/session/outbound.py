"""Ways out of a hop: messages go at once where there is room, else in order as soon as there is.

Knows streams and peers, not what the messages mean. A stream that breaks takes what it had not carried with it: the
session protocol repeats what matters.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

import trio

from app.core.network import FrameStream, Network, Priority
from p2p.errors import P2PError, QueueFull

log = logging.getLogger("shoal.sessions")

OPEN_TIMEOUT_S = 5.0
UNREACHABLE_S = 30.0  # for so long a peer that could not be reached is not dialled again


class Sendable(Protocol):
    """One message on its way out; whoever made it may keep more beside what is sent."""

    @property
    def parts(self) -> tuple[bytes, ...]: ...
    @property
    def priority(self) -> Priority: ...


class OutboundFrame(NamedTuple):
    """A message and nothing else."""

    parts: tuple[bytes, ...]
    priority: Priority


SendableT = TypeVar("SendableT", bound=Sendable)


class PeerOutbox:
    """Messages to one peer over one stream."""

    def __init__(self, stream: FrameStream, nursery: trio.Nursery) -> None:
        self.stream = stream
        self.broken = False
        self._nursery = nursery
        self._pending: deque[Sendable] = deque()

    async def push(self, frame: Sendable) -> None:
        """Send a message; never waits and never raises what the network did."""
        if self.broken:
            return
        if not self._pending:
            try:
                await self.stream.send(frame.parts, frame.priority)
                return
            except QueueFull:
                self._nursery.start_soon(self._flush)
            except P2PError:
                self.broken = True
                return
        self._pending.append(frame)

    async def _flush(self) -> None:
        try:
            while self._pending and not self.broken:
                await self.stream.wait_room()
                try:
                    await self.stream.send(self._pending[0].parts, self._pending[0].priority)
                except QueueFull:
                    continue
                self._pending.popleft()
        except P2PError:
            self.broken = True
        if self.broken:
            self._pending.clear()


class PeerOutboxes(Generic[SendableT]):
    """One stream to each successor, opened when it is first needed and kept."""

    def __init__(
        self,
        network: Network,
        protocol: str,
        nursery: trio.Nursery,
        *,
        lost: Callable[[str], None],
        undeliverable: Callable[[str, list[SendableT]], None],
    ) -> None:
        self._network, self._protocol, self._nursery = network, protocol, nursery
        self._lost, self._undeliverable = lost, undeliverable
        self._open: dict[str, PeerOutbox] = {}
        self._opening: dict[str, list[SendableT]] = {}
        self._unreachable: dict[str, float] = {}  # peer -> until when

    def prepare(self, peer: str) -> None:
        """Begin to open the stream to a peer that will be needed."""
        if peer not in self._open and peer not in self._opening and not self._barred(peer):
            self._opening[peer] = []
            self._nursery.start_soon(self._connect, peer)

    async def push(self, peer: str, frame: SendableT) -> bool:
        """Send a message, now or once the stream is open; False where the peer cannot be reached for the time being."""
        outbox = self._open.get(peer)
        if outbox is not None and not outbox.broken:
            await outbox.push(frame)
            return True
        self.prepare(peer)
        if peer not in self._opening:
            return False
        self._opening[peer].append(frame)
        return True

    def _barred(self, peer: str) -> bool:
        if len(self._unreachable) > 1024:
            self._unreachable.clear()
        return trio.current_time() < self._unreachable.get(peer, float("-inf"))

    async def _connect(self, peer: str) -> None:
        try:
            stream = await self._network.open(peer, self._protocol, timeout_s=OPEN_TIMEOUT_S)
        except P2PError as error:
            log.info("no way to the next hop %s: %s", peer, error)
            self._unreachable[peer] = trio.current_time() + UNREACHABLE_S
            self._undeliverable(peer, self._opening.pop(peer))
            return
        outbox = self._open[peer] = PeerOutbox(stream, self._nursery)
        for frame in self._opening.pop(peer):
            await outbox.push(frame)
        try:
            while True:
                await stream.receive()  # nobody speaks on this side: it only tells of the end
        except P2PError:
            outbox.broken = True
            if self._open.get(peer) is outbox:
                del self._open[peer]
            self._lost(peer)
