"""The answering half of a link: runs the handlers of what a peer asks, each at its own risk.

An exception in a handler costs that call or stream alone. A call that is over a limit, or names an unknown method, is
refused at its first chunk, before its body is read. A call counts until its answer has gone to the writer, so that a
peer that asks and does not read has used up its calls soon.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import trio

from p2p.errors import P2PError, ProtocolError, Refused, RemoteError
from p2p.link.frames import FIRST, Assembler, Frame, Kind
from p2p.link.outbox import Outgoing, spoken
from p2p.link.streams import MessageStream
from p2p.log_limit import LogLimit
from p2p.values import MAX_NAME_BYTES, buffers_of

if TYPE_CHECKING:
    from p2p.link.link import PeerLink

log = logging.getLogger("shoal.p2p.serving")
log.addFilter(LogLimit())  # peers can bring these lines about

BUSY, MALFORMED = "busy", "malformed"


@dataclass(eq=False)
class _Call:
    size: int
    scope: trio.CancelScope
    running: bool = False  # its handler is
    answer_size: int = 0


class Serving:
    """The calls and streams that one peer has under way here."""

    def __init__(self, link: PeerLink) -> None:
        self._link = link
        self._calls: dict[int, _Call] = {}
        self.nursery: trio.Nursery | None = None

    @property
    def busy(self) -> bool:
        """Whether a call is being answered."""
        return bool(self._calls)

    def on_request(self, frame: Frame, assembler: Assembler) -> Frame | None:
        """Take a chunk of a request; the whole of it once it is complete and admitted."""
        if frame.flags & FIRST and not self._admit(frame):
            return None
        return assembler.add(frame) if frame.id in self._calls else None

    def start(self, request: Frame) -> None:
        """Run the handler of a complete request."""
        call = self._calls[request.id]
        call.running = True
        assert self.nursery is not None
        self.nursery.start_soon(self._answer, request, call)

    def on_cancel(self, id: int) -> bool:
        """The caller gave up; whether there was a call to give up."""
        call = self._calls.get(id)
        if call is None:
            return False
        call.scope.cancel()
        if not call.running:
            self._finished(id, call)
        return True

    def on_ping(self, id: int) -> None:
        """Answer a ping, within the rate that requests have."""
        link = self._link
        refusal = link.services.quota.request(link.peer, trio.current_time())
        if refusal is None:
            link.post(Outgoing(Kind.PONG, id, 0))
        else:
            link.refuse(Kind.ERROR, id, refusal)

    def accept(self, stream: MessageStream, protocol: str) -> bool:
        """Run the handler of a stream that the peer opens, or refuse it."""
        link = self._link
        refusal = link.services.quota.request(link.peer, trio.current_time())
        if refusal is not None:
            link.refuse(Kind.RESET, stream.id, refusal)
            return False
        handler = link.services.protocols.get(protocol)
        if handler is None:
            link.post(spoken(Kind.RESET, stream.id, "unknown_protocol", f"this node does not accept {protocol}"))
            return False
        refusal = link.services.quota.begin_stream(link.peer, trio.current_time())
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
        """The link is gone, its handlers are cancelled: settle what never started."""
        for id, call in list(self._calls.items()):
            self._finished(id, call)

    def _admit(self, frame: Frame) -> bool:
        link = self._link
        if frame.id in self._calls or frame.id % 2 == link.own_parity:
            raise ProtocolError(f"request {frame.id} is not the peer's to make")
        now = trio.current_time()
        refusal = link.services.quota.begin_call(link.peer, frame.total, now)
        if refusal is not None:
            link.refuse(Kind.ERROR, frame.id, refusal)
            return False
        call = self._calls[frame.id] = _Call(frame.total, trio.CancelScope(deadline=now + frame.arg / 1000))
        if frame.name not in link.services.methods:
            link.post(spoken(Kind.ERROR, frame.id, "unknown_method", f"this node does not serve {frame.name}"))
            self._finished(frame.id, call)
            return False
        return True

    async def _answer(self, request: Frame, call: _Call) -> None:
        link, method, queued = self._link, request.name, False
        try:
            with call.scope:
                answer = await link.services.methods[method](link.peer, request.body)
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
        except ProtocolError as error:  # of this body; a stack trace for each would let a peer fill the log
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
        """Count an answer's bytes until it has left."""
        if not self._link.services.quota.hold_answer(self._link.peer, size, trio.current_time()):
            raise Refused("too many bytes of answers wait to be read")
        call.answer_size = size

    def _finished(self, id: int, call: _Call) -> None:
        if self._calls.get(id) is call:
            del self._calls[id]
            self._link.services.quota.end_call(self._link.peer, call.size, call.answer_size)


def failure_of(frame: Frame) -> P2PError:
    """The error that a peer answered with; its words are shown, never trusted."""
    text = "".join(c if c.isprintable() else "?" for c in frame.body.decode("utf-8", "replace"))
    return Refused(text) if frame.name == BUSY else RemoteError(text, frame.name)
