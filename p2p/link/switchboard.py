"""Calls and streams by peer id: opens, shares and replaces the links to each peer.

Each peer has two lanes, each one byte stream that is opened on first use: the live lane for calls and message streams,
and the bulk lane for calls of bulk priority. The download limit slows down only the reader of the bulk lane. Byte
streams come from the `dial` function that is passed in, so this runs over libp2p, sockets and memory alike. A link
outlives the byte stream it began on: it moves to another one when there is a better connection.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from p2p.errors import DeadlineExceeded, P2PError, PeerUnreachable, ProtocolError, Refused, StreamReset
from p2p.link.bandwidth import Bandwidth
from p2p.link.byte_stream import ByteStream
from p2p.link.handlers import RequestHandler, Services, StreamHandler
from p2p.link.link import PeerLink
from p2p.link.quota import Limits, Quota, Resource
from p2p.link.streams import MessageStream
from p2p.rate_limit import LogLimit
from p2p.shares import Holder, alone
from p2p.values import BULK, CONTROL, Payload, check_name

if TYPE_CHECKING:
    from trio_typing import TaskStatus

LIVE_LANE = "/shoal/1/live"
BULK_LANE = "/shoal/1/bulk"
LANES = (LIVE_LANE, BULK_LANE)
MAX_LINKS_A_LANE = 4
MOVE = "/move"  # after a lane's name: a byte stream for a link of this lane to move to
_TOKEN_BYTES = 16
_MOVE_S = 5.0  # to agree on a move
_SWITCH_S = 60.0  # for the switch to arrive after everything that was sent before it

log = logging.getLogger("shoal.p2p.rpc")
log.addFilter(LogLimit())  # peers can cause these lines

Dial = Callable[[str, str], Awaitable[ByteStream]]  # (peer, lane) -> a byte stream; raises P2PError


class _Dialling:
    def __init__(self) -> None:
        self.done = trio.Event()
        self.link: PeerLink | None = None
        self.failure: P2PError | None = None


@dataclass(eq=False)
class _Offer:
    """A byte stream that a peer opened for one of its links of a lane to move to."""

    peer: str
    lane: str
    stream: ByteStream
    taken: trio.Event = field(default_factory=trio.Event)


class Switchboard:
    """All links of a node, by peer and lane."""

    def __init__(self, dial: Dial, *, limits: Limits | None = None, bandwidth: Bandwidth | None = None) -> None:
        self.services = Services(
            Quota(limits, lambda peer: self.holder_of(peer), self._make_way),
            bandwidth or Bandwidth(),
            misbehaved=self._report,
            take_offer=self._take_offer,
        )
        self.holder_of: Callable[[str], Holder] = alone
        self.is_lan: Callable[[str], bool] = lambda peer: False
        self.on_misbehaved: Callable[[str, str], None] = lambda peer, why: None
        self._dial = dial
        self._links: dict[tuple[str, str], list[PeerLink]] = {}
        self._dialling: dict[tuple[str, str], _Dialling] = {}
        self._listeners: list[Callable[[str], None]] = []
        self._offers: dict[tuple[str, str], _Offer] = {}  # by peer and token
        self._nursery: trio.Nursery | None = None

    async def run(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the links that this node dials; cancel it to end them."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            try:
                await trio.sleep_forever()
            finally:
                self._nursery = None

    async def attend(self, peer: str, lane: str, stream: ByteStream) -> None:
        """Run a link over a byte stream that a peer opened, until it ends; the oldest of too many links is closed."""
        present = self._links.get((peer, lane), [])
        # The oldest, because a restarted peer reconnects before its old links are known to be dead.
        for link in present[: max(len(present) - MAX_LINKS_A_LANE + 1, 0)]:
            link.close()
        if self._nursery is None:
            raise PeerUnreachable("the network of this node is not running")
        link = self._link(peer, lane, stream, initiator=False)
        # Not in this task, which ends with the connection of `stream`: the link may have moved to another one by then.
        self._nursery.start_soon(self._run_link, link, lane)
        await _attach(link, stream)

    async def attend_move(self, peer: str, lane: str, stream: ByteStream) -> None:
        """Let a link of `peer` move to a byte stream that it opened, and wait until it has moved on or ended.

        Raises `P2PError` if no link does so in time.
        """
        with trio.move_on_after(_SWITCH_S):
            token = await _read_exactly(stream, _TOKEN_BYTES)
            links = [link for link in self._links.get((peer, lane), ()) if not link.initiated]
            open_offers = sum((offer.peer, offer.lane) == (peer, lane) for offer in self._offers.values())
            if open_offers >= len(links) or (peer, token.hex()) in self._offers:
                raise Refused(f"{peer} has no link to move, or moves it already")
            offer = self._offers[peer, token.hex()] = _Offer(peer, lane, stream)
            try:
                await stream.write_parts((token,))
                await offer.taken.wait()
            finally:
                del self._offers[peer, token.hex()]
        moved = next((link for link in self._links.get((peer, lane), ()) if link.uses(stream)), None)
        if moved is None:
            raise DeadlineExceeded(f"no link of {peer} moved within {_SWITCH_S:g} s")
        moved.exempt = self.is_lan(peer)
        await _attach(moved, stream)

    def serve(self, method: str, handler: RequestHandler) -> None:
        """Answer calls of `method` with `handler`."""
        check_name(method)
        self.services.methods[method] = handler

    def accept(self, protocol: str, handler: StreamHandler) -> None:
        """Run `handler` for each stream that a peer opens with `protocol`."""
        check_name(protocol)
        self.services.protocols[protocol] = handler

    async def call(self, peer: str, method: str, body: Payload, *, timeout_s: float, priority: int = CONTROL) -> bytes:
        """Send one request and return its answer; `timeout_s` includes dialling. Raises `P2PError`."""
        deadline = trio.current_time() + timeout_s
        link = await self._linked(peer, BULK_LANE if priority >= BULK else LIVE_LANE, timeout_s)
        return await link.call(method, body, timeout_s=max(deadline - trio.current_time(), 0), priority=priority)

    async def open(self, peer: str, protocol: str, *, timeout_s: float = 10.0) -> MessageStream:
        """Open a stream to a peer; `timeout_s` includes dialling. Raises `P2PError`."""
        deadline = trio.current_time() + timeout_s
        link = await self._linked(peer, LIVE_LANE, timeout_s)
        return await link.open(protocol, timeout_s=max(deadline - trio.current_time(), 0))

    def on_link_lost(self, listener: Callable[[str], None]) -> Callable[[], None]:
        """Call `listener` with each peer whose last link broke or was closed by the peer; returns the unsubscriber."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def links_to(self, peer: str) -> list[PeerLink]:
        """Return the open links to one peer, on all lanes."""
        return [link for lane in LANES for link in self._links.get((peer, lane), ())]

    def renew(self, peer: str, is_outdated: Callable[[ByteStream], bool]) -> None:
        """Move the links that this node opened, and whose byte streams are outdated, to a better connection.

        If the peer cannot move links, a new live link is dialled; calls and streams on the old one continue there.
        """
        for lane in LANES:
            for link in self._links.get((peer, lane), ()):
                if self._nursery is not None and link.initiated and is_outdated(link.stream):
                    self._nursery.start_soon(self._move, link, lane)

    def hang_up(self, peer: str) -> None:
        """Close every link to a peer; listeners of lost links are not called."""
        for link in self.links_to(peer):
            link.hung_up = True
            link.close()

    def _report(self, peer: str, why: str) -> None:
        self.hang_up(peer)
        self.on_misbehaved(peer, why)

    def _make_way(self, peer: str, resource: Resource, amount: int) -> None:
        """End the call or stream for which a peer holds most, so that others find room.

        First one that leaves enough at once: whoever asks is refused where it would have to wait.
        """
        enough = amount if resource is Resource.BYTES else 0
        held = [one for link in self.links_to(peer) for one in link.held(resource)]
        if held:
            max(held, key=lambda one: (one.ends_at_once and one.size >= enough, one.size)).end()

    def _take_offer(self, peer: str, token: str) -> ByteStream | None:
        offer = self._offers.get((peer, token))
        if offer is None or offer.taken.is_set():
            return None
        offer.taken.set()
        return offer.stream

    async def _move(self, link: PeerLink, lane: str) -> None:
        peer, token, stream = link.peer, os.urandom(_TOKEN_BYTES), None
        try:
            with trio.fail_after(_MOVE_S):
                stream = await self._dial(peer, lane + MOVE)
                await stream.write_parts((token,))
                if await _read_exactly(stream, _TOKEN_BYTES) != token:
                    raise ProtocolError(f"{peer} returned another token than it was sent")
        except (P2PError, trio.TooSlowError) as error:
            log.debug("the link to %s does not move: %s", peer, error)
            if stream is not None:
                await stream.reset()
            if lane == LIVE_LANE and (peer, lane) not in self._dialling:
                dialling = self._dialling[(peer, lane)] = _Dialling()
                await self._dial_and_run(peer, lane, dialling)
            return
        link.exempt = self.is_lan(peer)
        if not link.move(stream, token.hex()):
            await stream.reset()

    def _link(self, peer: str, lane: str, stream: ByteStream, *, initiator: bool) -> PeerLink:
        link = PeerLink(
            peer, stream, self.services, initiator=initiator, paced=lane == BULK_LANE, exempt=self.is_lan(peer)
        )
        self._links.setdefault((peer, lane), []).append(link)
        return link

    async def _run_link(self, link: PeerLink, lane: str) -> None:
        try:
            await link.run()
        finally:
            self._unlist(link, lane)

    def _unlist(self, link: PeerLink, lane: str) -> None:
        key = (link.peer, lane)
        self._links[key].remove(link)
        if not self._links[key]:
            del self._links[key]
        if link.hung_up or self.links_to(link.peer):
            return
        for listener in tuple(self._listeners):
            try:
                listener(link.peer)
            except Exception:
                log.exception("a listener failed on the loss of the link to %s", link.peer)

    async def _linked(self, peer: str, lane: str, timeout_s: float) -> PeerLink:
        # Two peers that dial each other at once have two links: both serve, new calls use the newest.
        for link in reversed(self._links.get((peer, lane), ())):
            if not link.ended:
                return link
        dialling = self._dialling.get((peer, lane))
        if dialling is None:
            if self._nursery is None:
                raise PeerUnreachable("the network of this node is not running")
            dialling = self._dialling[(peer, lane)] = _Dialling()
            self._nursery.start_soon(self._dial_and_run, peer, lane, dialling)
        with trio.move_on_after(max(timeout_s, 0)):
            await dialling.done.wait()
            if dialling.link is None:
                raise dialling.failure or PeerUnreachable(f"{peer} could not be reached")
            return dialling.link
        raise DeadlineExceeded(f"{peer} could not be reached within {timeout_s:g} s")

    async def _dial_and_run(self, peer: str, lane: str, dialling: _Dialling) -> None:
        # In a task of its own: callers share one dial, which must continue if one of them gives up.
        try:
            stream = await self._dial(peer, lane)
            dialling.link = self._link(peer, lane, stream, initiator=True)
        except P2PError as error:
            dialling.failure = error
        except Exception as error:
            log.exception("dialling %s failed", peer)
            dialling.failure = PeerUnreachable(f"{peer} could not be reached ({type(error).__name__})")
        finally:
            del self._dialling[(peer, lane)]
            dialling.done.set()
        if dialling.link is not None:
            await self._run_link(dialling.link, lane)


async def _attach(link: PeerLink, stream: ByteStream) -> None:
    """Wait until a link has ended or moved away from `stream`; if this is cancelled before, the link is closed."""
    try:
        await link.left(stream)
    finally:
        if link.uses(stream):
            link.close()


async def _read_exactly(stream: ByteStream, count: int) -> bytes:
    data = b""
    while len(data) < count:
        chunk = await stream.read(count - len(data))
        if not chunk:
            raise StreamReset("the byte stream ended too early")
        data += chunk
    return data
