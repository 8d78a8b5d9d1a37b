"""The interface that the application needs of a network.

`p2p` implements it twice without importing this file: over libp2p (`p2p.network`) and in memory (`p2p.memory.fabric`,
for simulated swarms under an autojumping clock); both must pass `tests/p2p/network_contract.py`. Peers are named by
their libp2p peer id as text. Messages are opaque bytes; each room that sends them defines their format. Every failure
is a `p2p.errors.P2PError`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from enum import IntEnum
from typing import Literal, Protocol

# One buffer, or several that arrive concatenated. The network may read it until it has been written out: do not change
# a mutable buffer after passing it.
Payload = bytes | bytearray | memoryview | Sequence[bytes | bytearray | memoryview]

MAX_BODY_BYTES = 64 * 2**20  # limit of a request, an answer or one stream message; beyond it `ValueError`


class Priority(IntEnum):
    """Sending order on a link: a lower number overtakes a higher one at every boundary of 256 KiB."""

    CONTROL = 0
    DECODE = 1
    PREFILL = 2
    BULK = 3


class Link(Protocol):
    """State of the connection to one peer; times and speeds are None until they were measured."""

    @property
    def peer(self) -> str: ...
    @property
    def kind(self) -> Literal["direct", "lan", "relayed"]: ...
    @property
    def rtt_s(self) -> float | None: ...
    @property
    def bytes_in(self) -> int: ...
    @property
    def bytes_out(self) -> int: ...
    @property
    def down_bytes_per_s(self) -> float | None:
        """Bytes a second that come from the peer when it sends as fast as it can."""


class FrameStream(Protocol):
    """A long-lived two-way stream of messages to one peer with a bounded send queue; equal priorities stay in order."""

    @property
    def peer(self) -> str: ...
    async def send(self, message: Payload, priority: Priority = Priority.DECODE) -> None:
        """Queue one message; raises `QueueFull` at once if there is no room, `StreamClosed` after the end."""

    def is_clear(self, priority: Priority = Priority.DECODE) -> bool:
        """True if next to nothing of this priority waits in the send queue: what is sent next leaves soon."""

    async def wait_room(self, priority: Priority = Priority.DECODE) -> None:
        """Wait until the send queue has room for a message of this priority again, and is clear."""

    async def receive(self) -> bytes:
        """Return the next message; raises `StreamClosed` at the end, `StreamReset` if the link or the peer failed."""

    async def aclose(self) -> None:
        """Close this side: queued messages still arrive, then the peer's `receive` raises `StreamClosed`."""

    async def reset(self) -> None:
        """Abort both directions at once and drop queued messages."""


# A handler may raise `p2p.errors.RemoteError`, whose code the caller sees, or `Refused`, which arrives as `Refused`.
RequestHandler = Callable[[str, bytes], Awaitable[Payload]]  # (peer, body) -> answer
StreamHandler = Callable[[FrameStream], Awaitable[None]]  # the stream is closed when the handler returns
LinkListener = Callable[[str], None]  # (peer); must not block


class Network(Protocol):
    """Calls, streams, the DHT and connections, as seen by one node."""

    @property
    def peer_id(self) -> str: ...
    async def call(
        self, peer: str, method: str, body: Payload, *, timeout_s: float, priority: Priority = Priority.CONTROL
    ) -> bytes:
        """Send one request and return its answer; dials the peer if there is no link.

        Raises `PeerUnreachable`, `DeadlineExceeded` (the remote handler is then cancelled), `RemoteError` (with a
        stable `code`), `Refused` (the peer is busy or does not serve us), `QueueFull` (our own queue to it is full).
        """

    def serve(self, method: str, handler: RequestHandler) -> None:
        """Answer calls of `method`; an exception in the handler fails only that call."""

    async def open(self, peer: str, protocol: str, *, timeout_s: float = 10.0) -> FrameStream:
        """Open a stream and return it once the peer has accepted it; raises the errors of `call`."""

    def accept(self, protocol: str, handler: StreamHandler) -> None:
        """Run `handler` for each stream that a peer opens for `protocol`."""

    async def provide(self, key: bytes) -> None:
        """Publish in the DHT that this node can be found under `key` (32 bytes)."""

    async def find_providers(self, key: bytes, *, timeout_s: float) -> Sequence[str]:
        """Return the peers that provide `key`; their addresses are remembered for dialling."""

    async def put_value(self, key: bytes, value: bytes) -> None:
        """Store a value in the DHT."""

    async def get_value(self, key: bytes, *, timeout_s: float) -> bytes | None:
        """Look a value up in the DHT; None if it is not found."""

    def addresses(self) -> Sequence[str]:
        """Addresses at which others may dial this node, for announcements and invites."""

    def learn(self, peer: str, addresses: Sequence[str]) -> None:
        """Remember addresses at which a peer may be dialled."""

    def links(self) -> Sequence[Link]:
        """List the open links."""

    def source(self, peer: str) -> str:
        """Return the address that a linked peer comes from, or its relay (IPv6: the /64); empty without a link.

        Whoever has one address may have any number of peer ids.
        """

    def keep_links(self, peers: Iterable[str]) -> None:
        """Protect the links to these peers from being closed; replaces the peers of earlier calls.

        Beyond a few dozen links, unprotected idle ones are closed, least recently used first; a later call dials again.
        """

    def on_link_lost(self, listener: LinkListener) -> Callable[[], None]:
        """Call `listener` with each peer whose last link was reset or timed out; the returned function unsubscribes."""

    async def disconnect(self, peer: str, *, misbehaved: bool = False) -> None:
        """Close the link; a peer that misbehaved is refused for a while, longer each time."""
