"""What the application needs of a network, declared by its consumer.

`p2p` implements it twice without knowing this file: over libp2p (`p2p.network`) and in memory (`p2p.memory.fabric`, for
simulated swarms under an autojumping clock); `tests/p2p/network_contract.py` is what both must pass. Peers are named
by their libp2p peer id in text form. Bytes go in and come out; what they mean is decided elsewhere. Every failure is a
`p2p.errors.P2PError`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from enum import IntEnum
from typing import Literal, Protocol

# What can be sent: one buffer, or several that arrive joined. It belongs to the network until it has been written:
# do not change a mutable buffer after handing it over.
Payload = bytes | bytearray | memoryview | Sequence[bytes | bytearray | memoryview]

MAX_BODY_BYTES = 64 * 2**20  # a request, an answer or one message of a stream; more is refused with `ValueError`


class Priority(IntEnum):
    """Who goes first on a link; a lower number overtakes a higher one at every 256 KiB chunk."""

    CONTROL = 0
    DECODE = 1
    PREFILL = 2
    BULK = 3


class Link(Protocol):
    """What is known of the link to one peer."""

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


class FrameStream(Protocol):
    """A long-lived, two-way, bounded stream of byte messages to one peer; equal priorities keep their order."""

    @property
    def peer(self) -> str: ...
    async def send(self, message: Payload, priority: Priority = Priority.DECODE) -> None:
        """Queue one message; raises `QueueFull` at once where it has no room, `StreamClosed` at the end."""

    async def wait_room(self) -> None:
        """Wait until the queue has drained enough to take a message again."""

    async def receive(self) -> bytes:
        """The next message; raises `StreamClosed` at the end, `StreamReset` where the link or the peer broke."""

    async def aclose(self) -> None:
        """End this side in order: what was queued still arrives, then the peer's `receive` raises `StreamClosed`."""

    async def reset(self) -> None:
        """Break both directions at once and drop what is queued."""


# A handler that raises `p2p.errors.RemoteError` chooses the code the caller sees; `Refused` arrives as `Refused`.
RequestHandler = Callable[[str, bytes], Awaitable[Payload]]  # (peer, body) -> answer
StreamHandler = Callable[[FrameStream], Awaitable[None]]  # the stream is closed when the handler returns
LinkListener = Callable[[str], None]  # (peer); must not block


class Network(Protocol):
    """Call, serve, stream and look up: all that a node asks of its network."""

    @property
    def peer_id(self) -> str: ...
    async def call(
        self, peer: str, method: str, body: Payload, *, timeout_s: float, priority: Priority = Priority.CONTROL
    ) -> bytes:
        """One request, one answer, dialling where there is no link.

        Raises `PeerUnreachable`, `DeadlineExceeded` (the remote handler is then cancelled), `RemoteError` (with a
        stable `code`), `Refused` (the peer is busy or bars us), `QueueFull` (our own queue to it is full).
        """

    def serve(self, method: str, handler: RequestHandler) -> None:
        """Answer calls of `method`; an exception in the handler costs that call alone."""

    async def open(self, peer: str, protocol: str, *, timeout_s: float = 10.0) -> FrameStream:
        """A new stream, once the peer accepted it; raises as `call` does."""

    def accept(self, protocol: str, handler: StreamHandler) -> None:
        """Run `handler` for each stream a peer opens under `protocol`."""

    async def provide(self, key: bytes) -> None:
        """Tell the directory that this node can be found under `key` (32 bytes)."""

    async def find_providers(self, key: bytes, *, timeout_s: float) -> Sequence[str]:
        """Peers that provide `key`; their addresses are remembered for dialling."""

    async def put_value(self, key: bytes, value: bytes) -> None: ...
    async def get_value(self, key: bytes, *, timeout_s: float) -> bytes | None: ...
    def addresses(self) -> Sequence[str]:
        """Where others may dial this node, for announcements and invites."""

    def learn(self, peer: str, addresses: Sequence[str]) -> None:
        """Remember where a peer may be dialled."""

    def links(self) -> Sequence[Link]:
        """Every open link, with its measured round-trip time."""

    def keep_links(self, peers: Iterable[str]) -> None:
        """Hold on to the links to these peers, and to no others of earlier calls.

        Beyond a few dozen, links on which nothing runs are closed, the longest unused first; the next call dials anew.
        """

    def on_link_lost(self, listener: LinkListener) -> Callable[[], None]:
        """Tell `listener` of each peer whose last link was reset or fell silent; call what is returned to stop that."""

    async def disconnect(self, peer: str, *, misbehaved: bool = False) -> None:
        """Close the link; a peer that misbehaved is held off with a growing backoff."""
