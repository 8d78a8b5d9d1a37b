"""What the application needs of a network, declared by its consumer.

`p2p` implements it twice without knowing this file: over libp2p (`p2p.node`) and in memory (`p2p.memory`, for
simulated swarms under an autojumping clock). Peers are named by their libp2p peer id in text form. Bytes go in and
come out; what they mean is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, Protocol


class Priority(IntEnum):
    """Who goes first on a link; a lower number overtakes a higher one at every chunk."""

    CONTROL = 0
    DECODE = 1
    PREFILL = 2
    BULK = 3


@dataclass(frozen=True)
class Link:
    """What is known of the link to one peer."""

    peer: str
    kind: Literal["direct", "lan", "relayed"]
    rtt_s: float | None
    bytes_in: int
    bytes_out: int


RequestHandler = Callable[[str, bytes], Awaitable[bytes]]  # (peer, body) -> answer


class FrameStream(Protocol):
    """A long-lived, ordered, bounded stream of byte messages to one peer."""

    @property
    def peer(self) -> str: ...
    async def send(self, message: bytes | Sequence[bytes | memoryview], priority: Priority = Priority.DECODE) -> None:
        """Queue one message; raises `p2p.errors.QueueFull` at once where the bounded queue has no room."""
    async def receive(self) -> bytes:
        """The next message; raises `p2p.errors.StreamClosed` at the end."""
    async def aclose(self) -> None: ...


StreamHandler = Callable[[FrameStream], Awaitable[None]]


class Network(Protocol):
    """Call, serve, stream and look up: all that a node asks of its network."""

    @property
    def peer_id(self) -> str: ...
    async def call(
        self, peer: str, method: str, body: bytes, *, timeout_s: float, priority: Priority = Priority.CONTROL
    ) -> bytes:
        """One request, one answer; raises `p2p.errors.PeerUnreachable`, `DeadlineExceeded`, `RemoteError`, …"""
    def serve(self, method: str, handler: RequestHandler) -> None:
        """Answer calls of `method`; an exception in the handler costs that call alone."""
    async def open(self, peer: str, protocol: str) -> FrameStream: ...
    def accept(self, protocol: str, handler: StreamHandler) -> None:
        """Run `handler` for each stream a peer opens under `protocol`."""
    async def provide(self, key: bytes) -> None:
        """Tell the directory that this node can be found under `key` (32 bytes)."""
    async def find_providers(self, key: bytes, *, timeout_s: float) -> Sequence[str]:
        """Peers that provide `key`; their addresses are remembered for dialling."""
    async def put_value(self, key: bytes, value: bytes) -> None: ...
    async def get_value(self, key: bytes, *, timeout_s: float) -> bytes | None: ...
    def links(self) -> Sequence[Link]:
        """Every open link, with its measured round-trip time."""
    async def disconnect(self, peer: str, *, misbehaved: bool = False) -> None:
        """Close the link; a peer that misbehaved is held off with a growing backoff."""
