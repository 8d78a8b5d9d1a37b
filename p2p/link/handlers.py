"""The serving side of a link: runs handlers for the peer's calls and streams. `p2p.link.calls` is the other side.

An exception in a handler ends only its call or stream. A call that is over a limit, or has an unknown method, is
refused at its first chunk, before the rest of its body is read. The bytes of a body count as they arrive, and a body
that exceeds a limit ends its call. A call counts until the writer has taken its answer, so that a peer that does not
read the answers soon reaches its limit of calls.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import trio

from p2p.errors import P2PError, ProtocolError, Refused, RemoteError
from p2p.link.bandwidth import Bandwidth
from p2p.link.byte_stream import ByteStream
from p2p.link.frames import BUSY, FIRST, MALFORMED, Assembler, Frame, Kind, body_bytes
from p2p.link.outbox import Outgoing, spoken
from p2p.link.quota import Quota
from p2p.link.streams import MessageStream
from p2p.rate_limit import LogLimit
from p2p.values import MAX_NAME_BYTES, Payload, buffers_of

log = logging.getLogger("shoal.p2p.serving")
log.addFilter(LogLimit())  # peers can cause these lines


class LinkPort(Protocol):
    """The attributes and methods of a link that `Calls` and `Handlers` use."""

    services: Services
    exempt: bool

    @property
    def peer(self) -> str: ...
    @property
    def own_parity(self) -> int: ...
    @property
    def ended(self) -> bool: ...
    def post(self, message: Outgoing) -> None: ...
    def has_room(self, priority: int) -> bool: ...
    async def written(self) -> None: ...
    def consumed(self, size: int) -> None: ...
    def give_up(self, id: int) -> None: ...
    def drop_chunks(self, id: int) -> None: ...
    def refuse(self, kind: int, id: int, why: str, code: str = BUSY) -> None: ...


@dataclass(eq=False)
class _Call:
    size: int  # bytes of its body that have arrived
    scope: trio.CancelScope
    complete: bool = False  # all of its body has arrived
    running: bool = False  # its handler has started and not ended
    answer_size: int = 0


class Handlers:
    """The calls and streams of one peer that this node serves."""

    def __init__(self, link: LinkPort) -> None:
        self._link = link
        self._calls: dict[int, _Call] = {}
        self.nursery: trio.Nursery | None = None

    @property
    def busy(self) -> bool:
        """True if a call of the peer is in progress."""
        return bool(self._calls)

    def held(self) -> Iterator[tuple[int, int, bool]]:
        """Yield the id of each call of the peer that was not cancelled, the bytes held for it, and if it runs."""
        for id, call in self._calls.items():
            if not call.scope.cancel_called:
                yield id, call.size + call.answer_size, call.running

    def on_request(self, frame: Frame, assembler: Assembler) -> bool:
        """Process a chunk of a request, whose handler starts with the last one; False if no request waits for it."""
        if frame.flags & FIRST:
            if not self._admit(frame):
                return True
        elif (call := self._calls.get(frame.id)) is None or call.complete:
            return False
        elif not self._hold(frame, call):
            assembler.drop(frame.id)
            return True
        if (whole := assembler.add(frame)) is not None:
            self._start(whole)
        return True

    def give_up(self, id: int, why: str) -> None:
        """Refuse a call whose request is still incomplete."""
        call = self._calls.get(id)
        if call is not None and not call.complete:
            self._link.refuse(Kind.ERROR, id, why)
            self._finished(id, call)

    def _start(self, request: Frame) -> None:
        call = self._calls[request.id]
        call.complete = call.running = True
        assert self.nursery is not None
        self.nursery.start_soon(self._answer, request, call)

    def on_cancel(self, id: int) -> bool:
        """Stop a call that the peer cancelled; False if it is unknown."""
        call = self._calls.get(id)
        if call is None:
            return False
        call.scope.cancel()
        if not call.running:
            self._finished(id, call)
        return True

    def on_ping(self, id: int) -> None:
        """Answer a ping, which counts against the peer's request rate."""
        link = self._link
        refusal = link.services.quota.request(link.peer, trio.current_time())
        if refusal is None:
            link.post(Outgoing(Kind.PONG, id, 0))
        else:
            link.refuse(Kind.ERROR, id, refusal)

    def accept(self, stream: MessageStream, protocol: str) -> bool:
        """Start the handler of a stream that the peer opens; False, after a reset to the peer, if it is refused."""
        link = self._link
        refusal = link.services.quota.request(link.peer, trio.current_time())
        if refusal is not None:
            link.refuse(Kind.RESET, stream.id, refusal)
            return False
        handler = link.services.protocols.get(protocol)
        if handler is None:
            link.post(spoken(Kind.RESET, stream.id, "unknown_protocol", f"this node does not accept {protocol}"))
            return False
        refusal = link.services.quota.begin_stream(link.peer)
        if refusal is not None:
            link.refuse(Kind.RESET, stream.id, refusal)
            return False
        stream.opened.set()

        async def attend() -> None:
            try:
                await handler(stream)
                await stream.aclose()
                stream.abandon()
            except P2PError as error:
                log.debug("a stream of %s under %s ended: %s", link.peer, protocol, error)
                stream.abort("failed", "the stream's handler ended")
            except Exception:
                log.exception("the handler of %s failed on a stream of %s", protocol, link.peer)
                stream.abort("internal", "the stream's handler failed")

        assert self.nursery is not None
        self.nursery.start_soon(attend)
        return True

    def end(self) -> None:
        """Release the quota of calls whose handlers never started: the link has ended."""
        for id, call in list(self._calls.items()):
            self._finished(id, call)

    def _admit(self, frame: Frame) -> bool:
        link = self._link
        if frame.id in self._calls or frame.id % 2 == link.own_parity:
            raise ProtocolError(f"request {frame.id} uses an id that is not the peer's to choose")
        now = trio.current_time()
        size = body_bytes(frame)
        refusal = link.services.quota.begin_call(link.peer, size, now)
        if refusal is not None:
            link.refuse(Kind.ERROR, frame.id, refusal)
            return False
        call = self._calls[frame.id] = _Call(size, trio.CancelScope(deadline=now + frame.arg / 1000))
        if frame.name not in link.services.methods:
            link.post(spoken(Kind.ERROR, frame.id, "unknown_method", f"this node does not serve {frame.name}"))
            self._finished(frame.id, call)
            return False
        return True

    def _hold(self, frame: Frame, call: _Call) -> bool:
        """Count one more chunk of a request; False, and the call refused, if that exceeds a limit."""
        size = body_bytes(frame)
        if self._link.services.quota.hold(self._link.peer, size):
            call.size += size
            return True
        self.give_up(frame.id, "too many bytes in flight")
        return False

    async def _answer(self, request: Frame, call: _Call) -> None:
        link, method, queued = self._link, request.name, False
        try:
            with call.scope:
                answer = await link.services.methods[method](link.peer, request.body)
                if link.ended:  # and its calls count no more
                    return
                parts, size = buffers_of(answer)
                self._keep(call, size)
                while not link.has_room(request.priority):
                    await link.written()
                outgoing = Outgoing(Kind.ANSWER, request.id, request.priority, parts, size)
                outgoing.left = partial(self._finished, request.id, call)
                queued = not link.ended
                link.post(outgoing)
        except Refused as error:
            link.post(spoken(Kind.ERROR, request.id, BUSY, str(error)))
        except RemoteError as error:
            code = error.code if 0 < len(error.code) <= MAX_NAME_BYTES and error.code.isascii() else "internal"
            link.post(spoken(Kind.ERROR, request.id, code, str(error)))
        except ProtocolError as error:  # a malformed body; a stack trace for each would let a peer fill the log
            log.debug("%s sent a malformed %s: %s", link.peer, method, error)
            link.refuse(Kind.ERROR, request.id, str(error), MALFORMED)
        except Exception:
            log.exception("the handler of %s failed on a call of %s", method, link.peer)
            link.post(spoken(Kind.ERROR, request.id, "internal", f"the peer failed to answer {method}"))
        finally:
            call.running = False
            if not queued:
                self._finished(request.id, call)

    def _keep(self, call: _Call, size: int) -> None:
        """Count an answer's bytes until the writer has taken it; raises `Refused` if they exceed a limit."""
        if not self._link.services.quota.hold_answer(self._link.peer, size, trio.current_time()):
            raise Refused("too many bytes of answers wait to be read")
        call.answer_size = size

    def _finished(self, id: int, call: _Call) -> None:
        if self._calls.get(id) is call:
            del self._calls[id]
            self._link.services.quota.end_call(self._link.peer, call.size, call.answer_size)


RequestHandler = Callable[[str, bytes], Awaitable[Payload]]
StreamHandler = Callable[[MessageStream], Awaitable[None]]


@dataclass(eq=False)
class Services:
    """State shared by all links of a node: handlers, quotas, bandwidth, and a callback for misbehaving peers."""

    quota: Quota = field(default_factory=Quota)
    bandwidth: Bandwidth = field(default_factory=Bandwidth)
    methods: dict[str, RequestHandler] = field(default_factory=dict)
    protocols: dict[str, StreamHandler] = field(default_factory=dict)
    misbehaved: Callable[[str, str], None] = lambda peer, why: None
    # (peer, token) -> the byte stream that the peer opened for its link to move to, or None
    take_offer: Callable[[str, str], ByteStream | None] = lambda peer, token: None
