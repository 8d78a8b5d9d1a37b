"""A network on which only admitted peers are served and called: the check of certificates beside the swarm's secret.

`GuardedNetwork` wraps the `Network` of a guarded swarm (`app.swarm.certificates`); every part of the application that
takes a `Network` works on it unchanged, and `p2p` knows nothing of certificates. The peer id that the secure channel
proved is looked up at every call and at every stream, in both directions. Two peers that meet exchange certificates and
revocation lists in one call, `swarm.present`; a peer without a certificate is answered nothing else, and its link is
closed after a while. Gossip passes lists on (`app.membership.exchange`); `app.joining.admission` admits newcomers.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import trio

from app.core.network import (
    FrameStream,
    Link,
    LinkListener,
    Network,
    Payload,
    Priority,
    RequestHandler,
    StreamHandler,
)
from app.membership import wire
from app.swarm.certificates import (
    CERTIFICATE_DOMAIN,
    REVOCATIONS_DOMAIN,
    Authority,
    Certificate,
    RevocationBook,
    read_certificate,
)
from p2p.envelope import Envelope, parse
from p2p.errors import DeadlineExceeded, EnvelopeError, P2PError, ProtocolError, Refused, RemoteError
from p2p.rate_limit import LogLimit, PeerRateLimit

log = logging.getLogger("shoal.membership")
log.addFilter(LogLimit())  # peers can cause these lines

PRESENT_TIMEOUT_S = 5.0
ASK_AGAIN_S = 5.0  # before a peer that had no certificate is asked for one again
SWEEP_S = 10.0
GRACE_S = 30.0  # for which a linked peer may be without a certificate
_MAX_CERTIFICATES = 4096
_MAX_STATEMENTS = 64
LISTS_AT_ONCE, LISTS_PER_S = 64, 1.0  # revocation lists of one peer that are looked at because they may be news


@dataclass
class _Asking:
    """One exchange of certificates with a peer, for all who wait for it."""

    done: trio.Event = field(default_factory=trio.Event)
    failure: P2PError | None = None


class GuardedNetwork:
    """The calls and streams of a guarded swarm; satisfies `app.core.network.Network`.

    `certificate` is this node's own, None for the creator and for a newcomer; one that is of another identity, as after
    `shoal id import`, is none. The listeners are called with every revocation list that is new here, so that it can be
    saved and passed on.
    """

    def __init__(
        self, network: Network, authority: Authority, certificate: bytes | None = None, lists: Iterable[bytes] = ()
    ) -> None:
        self.authority = authority
        self.certificate = None if certificate is None else _own(certificate, authority, network.peer_id)
        self.book = RevocationBook(authority)
        self.listeners: list[Callable[[Envelope], None]] = []
        self._network = network
        self._guard = bytes.fromhex(authority.swarm)
        self._certificates: OrderedDict[str, Certificate] = OrderedDict()
        self._refused_until: OrderedDict[str, float] = OrderedDict()
        self._asking: dict[str, _Asking] = {}
        self._presented = PeerRateLimit(burst=16, per_s=1.0)
        self._lists_told = PeerRateLimit(LISTS_AT_ONCE, LISTS_PER_S)
        self._without_since: dict[str, float] = {}  # linked peers without a certificate
        for raw in lists:
            try:
                self.book.keep(parse(raw))
            except EnvelopeError as error:
                log.warning("a saved revocation list is not valid: %s", error)
        network.serve(wire.PRESENT, self._on_present)

    # --- who is admitted ----------------------------------------------------------------------------------------------

    def is_admitted(self, peer: str) -> bool:
        """True if the peer is this node, the creator, or has shown a certificate that is not revoked."""
        if peer in (self.authority.creator, self._network.peer_id):
            return True
        certificate = self._certificates.get(peer)
        return certificate is not None and not self.book.refuses(certificate)

    def is_revoked(self, peer: str) -> bool:
        """True if the creator revoked the peer, or it has shown a certificate that is revoked."""
        certificate = self._certificates.get(peer)
        if certificate is not None:
            return self.book.refuses(certificate)
        return peer != self.authority.creator and peer in self.book.revoked_by(self.authority.creator)

    @property
    def own(self) -> Certificate | None:
        """This node's own certificate."""
        return None if self.certificate is None else read_certificate(self.certificate, self.authority)

    @property
    def expelled(self) -> bool:
        """True if this node's own certificate is revoked."""
        own = self.own
        return own is not None and self.book.refuses(own)

    @property
    def may_admit(self) -> bool:
        """True if this node can sign certificates that others accept: it is the creator or a delegate."""
        return self.book.may_admit(self._network.peer_id, self.own)

    def keep(self, envelope: Envelope) -> bool:
        """Keep a revocation list if it is news, and report it; raises `EnvelopeError` if it is not valid."""
        if not self.book.keep(envelope):
            return False
        for listener in tuple(self.listeners):
            listener(envelope)
        return True

    def keep_from(self, peer: str, envelope: Envelope) -> None:
        """Keep a list as `keep` does, but look at no more of one peer than its limit allows: the rest comes again."""
        is_older = envelope.sequence <= self.book.sequence_of(envelope.peer)
        if not is_older and self._lists_told.take(peer, trio.current_time()):
            self.keep(envelope)

    async def run(self) -> None:
        """Sweep every `SWEEP_S` seconds, until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                await trio.sleep(SWEEP_S)
                self._sweep(nursery)

    def _sweep(self, nursery: trio.Nursery) -> None:
        """Check each linked peer without a certificate, in a task of its own so that none delays the next sweep."""
        now = trio.current_time()
        without = [link.peer for link in self._network.links() if not self.is_admitted(link.peer)]
        self._without_since = {peer: self._without_since.get(peer, now) for peer in without}
        for peer, since in self._without_since.items():
            nursery.start_soon(self._check, peer, since)

    async def _check(self, peer: str, since: float) -> None:
        """Ask a linked peer for its certificate, until the next sweep at most; close its link if it shows none.

        The link of a revoked peer is closed at once, that of another one if it has had none for `GRACE_S`.
        """
        with trio.move_on_after(SWEEP_S):
            try:
                await self._require(peer)
            except P2PError as error:
                log.debug("%s is not admitted: %s", peer, error)
        revoked = self.is_revoked(peer)
        if not self.is_admitted(peer) and (revoked or trio.current_time() - since >= GRACE_S):
            await self._network.disconnect(peer, misbehaved=revoked)

    # --- certificates -------------------------------------------------------------------------------------------------

    def _statements(self) -> list[bytes]:
        own = [] if self.certificate is None else [self.certificate]
        return wire.fitting([*own, *self.book.statements()], wire.MAX_BATCH_BYTES)

    async def present(self, peer: str, timeout_s: float = PRESENT_TIMEOUT_S) -> None:
        """Exchange certificates and revocation lists with a peer; raises `P2PError` if it does not take part."""
        body = wire.Tell(self._guard, self._statements()).encode()
        answer = await self._network.call(peer, wire.PRESENT, body, timeout_s=timeout_s)
        await self._receive(wire.unpack(answer, wire.MAX_BATCH_BYTES), peer, asked=True)

    async def _on_present(self, peer: str, body: bytes) -> bytes:
        if not self._presented.take(peer, trio.current_time()):
            raise Refused("certificates are exchanged too often; wait a second")
        request = wire.Tell.decode(body)
        if request.swarm != self._guard:
            raise RemoteError("this node is not a member of that swarm", code=wire.NOT_MEMBER)
        await self._receive(request.statements, peer)
        if self.is_admitted(peer):
            return wire.pack(self._statements())
        if self.is_revoked(peer):  # it may see why
            return wire.pack(wire.fitting(self.book.statements(), wire.MAX_BATCH_BYTES))
        raise RemoteError("no valid certificate was shown", code=wire.NOT_ADMITTED)

    async def _receive(self, statements: Sequence[bytes], peer: str, *, asked: bool = False) -> None:
        """Keep the peer's certificate, which comes first, and the lists that follow.

        Unless this node `asked` for them, lists of peers without a certificate are not looked at: checking signatures
        takes CPU time, which strangers must not waste. The first invalid statement ends it.
        """
        try:
            for number, raw in enumerate(statements[:_MAX_STATEMENTS]):
                envelope = parse(raw)
                if envelope.domain == CERTIFICATE_DOMAIN and number == 0:
                    self._remember(read_certificate(raw, self.authority), peer)
                elif envelope.domain == REVOCATIONS_DOMAIN and (asked or self.is_admitted(peer)):
                    self.keep_from(peer, envelope)
                    await trio.lowlevel.checkpoint()  # to verify a list takes half a millisecond
        except EnvelopeError as error:
            log.info("a certificate or list from %s was rejected: %s", peer, error)

    def _remember(self, certificate: Certificate, peer: str) -> None:
        if certificate.peer != peer:
            raise EnvelopeError(f"it is the certificate of {certificate.peer}")
        self._certificates.pop(peer, None)
        self._certificates[peer] = certificate
        if len(self._certificates) > _MAX_CERTIFICATES:
            self._certificates.popitem(last=False)
        self._refused_until.pop(peer, None)

    async def _require(self, peer: str) -> None:
        """Return once the peer is admitted, after asking it for its certificate if need be.

        Calls that wait for the same peer share one exchange and its failure: in turn, each would wait for those of all
        others before its own. Raises `RemoteError` with the code `not_admitted`, or the `P2PError` for which the peer
        could not be asked.
        """
        while not self.is_admitted(peer):
            if trio.current_time() < self._refused_until.get(peer, 0.0):
                raise RemoteError(f"{peer} has no valid certificate of this swarm", code=wire.NOT_ADMITTED)
            asking = self._asking.get(peer)
            if asking is None:
                await self._ask(peer)
            else:
                await asking.done.wait()
                if asking.failure is not None and not self.is_admitted(peer):
                    raise asking.failure.with_traceback(None)  # else it grows with every one that waited

    async def _ask(self, peer: str) -> None:
        asking = self._asking[peer] = _Asking()
        try:
            await self.present(peer)
        except (RemoteError, ProtocolError) as error:
            log.debug("%s showed no certificate: %s", peer, error)
        except P2PError as error:
            asking.failure = error
            raise
        finally:
            self._asking.pop(peer).done.set()
        if not self.is_admitted(peer):
            self._refuse(peer)

    async def _require_within(self, peer: str, timeout_s: float) -> float:
        """Return the seconds left once the peer is admitted; raises `DeadlineExceeded` and the errors of `_require`."""
        deadline = trio.current_time() + timeout_s
        with trio.CancelScope(deadline=deadline) as scope:
            await self._require(peer)
        if scope.cancelled_caught:
            raise DeadlineExceeded(f"{peer} did not show a certificate within {timeout_s:g} s")
        return max(deadline - trio.current_time(), 0.001)

    def _refuse(self, peer: str) -> None:
        self._refused_until.pop(peer, None)
        self._refused_until[peer] = trio.current_time() + ASK_AGAIN_S
        if len(self._refused_until) > _MAX_CERTIFICATES:
            self._refused_until.popitem(last=False)

    # --- the methods of `Network` -------------------------------------------------------------------------------------

    @property
    def peer_id(self) -> str:
        """This node's peer id."""
        return self._network.peer_id

    async def call(
        self, peer: str, method: str, body: Payload, *, timeout_s: float, priority: Priority = Priority.CONTROL
    ) -> bytes:
        """Call an admitted peer; raises `RemoteError` with the code `not_admitted` for others."""
        left_s = await self._require_within(peer, timeout_s)
        return await self._network.call(peer, method, body, timeout_s=left_s, priority=priority)

    def serve(self, method: str, handler: RequestHandler) -> None:
        """Answer calls of `method` by admitted peers."""

        async def guarded(peer: str, body: bytes) -> Payload:
            await self._require(peer)
            return await handler(peer, body)

        self._network.serve(method, guarded)

    async def open(self, peer: str, protocol: str, *, timeout_s: float = 10.0) -> FrameStream:
        """Open a stream to an admitted peer; raises the errors of `call`."""
        left_s = await self._require_within(peer, timeout_s)
        return await self._network.open(peer, protocol, timeout_s=left_s)

    def accept(self, protocol: str, handler: StreamHandler) -> None:
        """Run `handler` for each stream that an admitted peer opens; streams of others are closed."""

        async def guarded(stream: FrameStream) -> None:
            await self._require(stream.peer)
            await handler(stream)

        self._network.accept(protocol, guarded)

    async def provide(self, key: bytes) -> None:
        """Publish in the DHT that this node can be found under `key`."""
        await self._network.provide(key)

    async def find_providers(self, key: bytes, *, timeout_s: float) -> Sequence[str]:
        """Return the peers that provide `key`, admitted or not."""
        return await self._network.find_providers(key, timeout_s=timeout_s)

    async def put_value(self, key: bytes, value: bytes) -> None:
        """Store a value in the DHT."""
        await self._network.put_value(key, value)

    async def get_value(self, key: bytes, *, timeout_s: float) -> bytes | None:
        """Look a value up in the DHT."""
        return await self._network.get_value(key, timeout_s=timeout_s)

    def addresses(self) -> Sequence[str]:
        """Addresses at which others may dial this node."""
        return self._network.addresses()

    def learn(self, peer: str, addresses: Sequence[str]) -> None:
        """Remember addresses at which a peer may be dialled."""
        self._network.learn(peer, addresses)

    def links(self) -> Sequence[Link]:
        """List the open links, also those to peers that are not admitted."""
        return self._network.links()

    def source(self, peer: str) -> str:
        """Return the address that a linked peer comes from; empty without a link."""
        return self._network.source(peer)

    def keep_links(self, peers: Iterable[str]) -> None:
        """Protect the links to these peers from being closed."""
        self._network.keep_links(peers)

    def on_link_lost(self, listener: LinkListener) -> Callable[[], None]:
        """Call `listener` with each peer whose last link was lost."""
        return self._network.on_link_lost(listener)

    async def disconnect(self, peer: str, *, misbehaved: bool = False) -> None:
        """Close the link to a peer."""
        await self._network.disconnect(peer, misbehaved=misbehaved)


def _own(certificate: bytes, authority: Authority, peer: str) -> bytes | None:
    """Return a saved certificate if it is this peer's."""
    try:
        named = read_certificate(certificate, authority).peer
    except EnvelopeError as error:
        log.warning("the saved certificate is not valid: %s", error)
        return None
    return certificate if named == peer else None
