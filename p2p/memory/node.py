"""One node of the in-memory network: its handlers and its links. `p2p.memory.fabric` connects and breaks them."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NoReturn, Protocol, TypeVar

import trio

from p2p.errors import DeadlineExceeded, P2PError, PeerUnreachable, Refused, RemoteError
from p2p.host.pruning import ENOUGH_LINKS, surplus
from p2p.memory.directory import MemoryDirectory
from p2p.memory.link import MemoryLink, MemoryPipe, MemoryStream, Traffic
from p2p.rate_limit import backoff_s
from p2p.values import CONTROL, LinkInfo, Payload, joined

log = logging.getLogger("shoal.p2p.memory")

OPEN_BYTES = 64  # size of the messages that open a stream, each way

T = TypeVar("T")
RequestHandler = Callable[[str, bytes], Awaitable[Payload]]
StreamHandler = Callable[[MemoryStream], Awaitable[None]]


class Fabric(Protocol):
    """The network as a node sees it; `MemoryFabric` implements it."""

    directory: MemoryDirectory
    machine_of: dict[str, str]

    @property
    def nodes(self) -> dict[str, MemoryNode]: ...
    async def dial(self, node: MemoryNode, peer: str) -> MemoryLink: ...
    def unlink(self, a: str, b: str, *, tell: Sequence[str]) -> None: ...
    def start(self, task: Callable[[MemoryStream], Awaitable[None]], stream: MemoryStream) -> None: ...


class MemoryNode:
    """One node of the fabric; satisfies `app.core.network.Network`."""

    def __init__(self, fabric: Fabric, name: str) -> None:
        self.fabric = fabric
        self.traffic = Traffic()
        self.alive, self.frozen = True, False
        self.linked: dict[str, MemoryLink] = {}
        self._scopes: dict[trio.CancelScope, None] = {}  # of the running stream handlers, cancelled by `die`
        self._name = name
        self._handlers: dict[str, RequestHandler] = {}
        self._stream_handlers: dict[str, StreamHandler] = {}
        self._listeners: list[Callable[[str], None]] = []
        self._kept: frozenset[str] = frozenset()
        self._offences: dict[str, tuple[int, float]] = {}  # peer -> (number of offences, held off until)

    @property
    def peer_id(self) -> str:
        """Name of the node, which is its peer id here."""
        return self._name

    async def call(self, peer: str, method: str, body: Payload, *, timeout_s: float, priority: int = CONTROL) -> bytes:
        """Send a request and return the answer.

        Raises `PeerUnreachable`, `DeadlineExceeded`, `Refused`, or `RemoteError` if the handler failed.
        """
        data = joined(body)

        async def exchange(link: MemoryLink) -> bytes:
            await link.cross(self._name, len(data), priority)
            try:
                answer = await self._peer_of(peer).handle(self._name, method, data)
            except (RemoteError, Refused) as error:
                await link.cross(peer, len(str(error)), priority)
                raise
            await link.cross(peer, len(answer), priority)
            return answer

        return await self._over_link(peer, timeout_s, exchange)

    def serve(self, method: str, handler: RequestHandler) -> None:
        """Answer calls of `method` with `handler`."""
        self._handlers[method] = handler

    async def open(self, peer: str, protocol: str, *, timeout_s: float = 10.0) -> MemoryStream:
        """Open a message stream to `peer`; raises the same errors as `call`."""

        async def exchange(link: MemoryLink) -> MemoryStream:
            await link.cross(self._name, OPEN_BYTES, CONTROL)
            outgoing, incoming = MemoryPipe(link, self._name), MemoryPipe(link, peer)
            self._peer_of(peer).take(protocol, MemoryStream(self._name, incoming, outgoing))
            await link.cross(peer, OPEN_BYTES, CONTROL)
            return MemoryStream(peer, outgoing, incoming)

        return await self._over_link(peer, timeout_s, exchange)

    def accept(self, protocol: str, handler: StreamHandler) -> None:
        """Run `handler` for each stream opened under `protocol`."""
        self._stream_handlers[protocol] = handler

    async def provide(self, key: bytes) -> None:
        """Publish this node as a provider of `key`."""
        await self.fabric.directory.provide(self._name, key)

    async def find_providers(self, key: bytes, *, timeout_s: float) -> Sequence[str]:
        """Return the providers of `key`, including dead ones whose record has not expired."""
        return await self.fabric.directory.find_providers(self._name, key, timeout_s)

    async def put_value(self, key: bytes, value: bytes) -> None:
        """Store a value in the directory."""
        await self.fabric.directory.put_value(self._name, key, value)

    async def get_value(self, key: bytes, *, timeout_s: float) -> bytes | None:
        """Return the newest value that the directory has under `key`, or None."""
        return await self.fabric.directory.get_value(self._name, key, timeout_s)

    def addresses(self) -> Sequence[str]:
        """Return the node's only address."""
        return (f"/memory/{self._name}",)

    def learn(self, peer: str, addresses: Sequence[str]) -> None:
        """Do nothing: every node can be dialled by name."""

    def links(self) -> Sequence[LinkInfo]:
        """Return all open links with their round trip and bytes (received, sent)."""
        return tuple(
            LinkInfo(
                peer,
                link.profile.kind,
                2 * link.profile.delay_s,
                link.lanes[peer].sent_bytes - link.lanes[peer].waiting_bytes(link.profile),
                link.lanes[self._name].sent_bytes,
                link.lanes[peer].receive_rate.bytes_per_s,
            )
            for peer, link in self.linked.items()
        )

    def source(self, peer: str) -> str:
        """Return the machine that a linked peer runs on, which is its name unless a test says otherwise."""
        return self.fabric.machine_of.get(peer, peer) if peer in self.linked else ""

    def keep_links(self, peers: Iterable[str]) -> None:
        """Replace the set of peers whose links are never closed as surplus."""
        self._kept = frozenset(peers)

    def close_surplus(self, newest: str) -> None:
        """Close idle links beyond `ENOUGH_LINKS`, but not the one to `newest`."""
        if len(self.linked) > ENOUGH_LINKS:
            uses = [link.use(peer, self.source(peer)) for peer, link in self.linked.items()]
            for peer in surplus(uses, self._kept | {newest}):
                self.fabric.unlink(self._name, peer, tell=(peer,))

    def on_link_lost(self, listener: Callable[[str], None]) -> Callable[[], None]:
        """Call `listener` with each peer whose link was reset or fell silent; return a function that unsubscribes."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    async def disconnect(self, peer: str, *, misbehaved: bool = False) -> None:
        """Close the link to `peer`; if it misbehaved, refuse it for 30 s, 60 s, … up to an hour."""
        if misbehaved:
            times = self._offences.get(peer, (0, 0.0))[0] + 1
            self._offences[peer] = (times, trio.current_time() + backoff_s(30.0, times, 3600.0))
        self.fabric.unlink(self._name, peer, tell=(peer,))
        await trio.lowlevel.checkpoint()

    def held_off_until(self, peer: str) -> float:
        """Time (trio's clock) from which `peer` may connect again; 0 if it never misbehaved."""
        return self._offences.get(peer, (0, 0.0))[1]

    def lost(self, peer: str) -> None:
        """Call the lost-link listeners for `peer`."""
        for listener in tuple(self._listeners):
            listener(peer)

    async def handle(self, caller: str, method: str, body: bytes) -> bytes:
        """Run the handler of one call; raises `RemoteError` or `Refused` for the caller."""
        handler = self._handlers.get(method)
        if handler is None:
            raise RemoteError(f"{self._name} does not serve {method}", code="unknown_method")
        try:
            return joined(await handler(caller, body))
        except (RemoteError, Refused):
            raise
        except Exception as error:
            log.exception("the handler of %s failed", method)
            raise RemoteError(f"{self._name} failed to answer {method}", code="internal") from error

    def take(self, protocol: str, stream: MemoryStream) -> None:
        """Start the handler of a stream that a peer opened; raises `RemoteError` for an unknown protocol."""
        handler = self._stream_handlers.get(protocol)
        if handler is None:
            raise RemoteError(f"{self._name} does not accept {protocol}", code="unknown_protocol")

        async def run(stream: MemoryStream) -> None:
            with trio.CancelScope() as scope:
                self._scopes[scope] = None
                try:
                    await handler(stream)
                    await stream.aclose()
                except P2PError:
                    await stream.reset()
                except Exception:
                    log.exception("the handler of %s failed", protocol)
                    await stream.reset()
            del self._scopes[scope]

        self.fabric.start(run, stream)

    def die(self) -> None:
        """Mark the node as dead and cancel its stream handlers."""
        self.alive = False
        for scope in list(self._scopes):
            scope.cancel()

    async def _over_link(self, peer: str, timeout_s: float, exchange: Callable[[MemoryLink], Awaitable[T]]) -> T:
        if not self.alive:
            _raise_unreachable(peer)
        link = None
        with trio.CancelScope(deadline=trio.current_time() + timeout_s) as scope:
            link = self.linked.get(peer) or await self.fabric.dial(self, peer)
            link.calls[scope] = None
            try:
                return await exchange(link)
            finally:
                del link.calls[scope]
        if link is not None and link.broken:
            _raise_unreachable(peer)
        raise DeadlineExceeded(f"{peer} did not answer within {timeout_s:g} s")

    def _peer_of(self, name: str) -> MemoryNode:
        return self.fabric.nodes.get(name) or _raise_unreachable(name)


def _raise_unreachable(peer: str) -> NoReturn:
    raise PeerUnreachable(f"the link to {peer} broke; it may have stopped")
