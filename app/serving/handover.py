"""Hand-overs of cached sessions between hops: what a hop gives to another, and what it takes from one.

`CacheGiver` answers a peer that the session's asker has named, and nobody else. `CacheTaker` fetches a session's cache
from the hop that leaves its route, as long as that is faster than to compute it again (`is_faster`), checks it, and
keeps what arrived in order. Both leave the cache itself to the block server, through `SessionCaches`; orders of askers
are in `app.session.wire`, the messages in `app.session.cache_wire`.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import NamedTuple, Protocol

import trio

from app.core.errors import RecordError
from app.core.network import FrameStream, Network, Payload, Priority
from app.core.span import Span
from app.serving.hop_session import HopSession
from app.session.cache_wire import (
    HANDOVER_S,
    MIN_TOKENS,
    PROTOCOL,
    CacheChunk,
    CacheRequest,
    chunk_tokens,
    decode_answer,
    decode_chunk,
    decode_request,
    encode_answer,
    encode_chunk,
    encode_request,
)
from app.session.wire import CacheGrant
from engine.errors import EngineError
from p2p.errors import P2PError, QueueFull
from p2p.rate_limit import LogLimit, PeerRateLimit
from p2p.shares import Holder, Shares

log = logging.getLogger("shoal.sessions.handover")
log.addFilter(LogLimit())  # peers can cause these lines

OPEN_S = 3.0  # to reach the old hop
REQUEST_S = 5.0  # for the request on a new stream
ORDER_S = 2.0  # for the asker's order, which may arrive after the request that it allows
GIVE_S = HANDOVER_S + OPEN_S
MAX_GIVEN = 6  # sessions at once, shared among homes as those below
MAX_TAKEN = 8
MAX_TAKEN_PER_ASKER = 2
# An asker chooses the peer that is dialled, so dials are bounded like those to successors (`app.session.outbound`).
DIALS_BURST = 16.0
DIALS_PER_S = 0.5
JUDGE_AFTER_S = 0.3  # the pace of an earlier moment says little
UNMEASURED_TOKENS_PER_S = 1000.0  # of a prompt, while this node has not measured its own speed


def is_faster(arrived: int, seconds: float, read_tokens_per_s: float) -> bool:
    """True while a cache arrives faster than this node would read the same tokens again.

    `arrived` tokens came in `seconds`. What arrived is kept, so only the rest counts: it is as fast as what came.
    """
    return seconds < JUDGE_AFTER_S or arrived > seconds * read_tokens_per_s


class CacheForm(NamedTuple):
    """The form of this node's cache, and the bytes of a token in the cache of one block."""

    format: str
    row_bytes: int


class SessionCaches(Protocol):
    """What hand-overs need of the block server."""

    def session(self, id: bytes) -> HopSession | None:
        """Return an open session."""

    def cache_form(self) -> CacheForm | None:
        """The form of the cache; None while nothing is hosted."""

    async def export(self, session: HopSession, span: Span, start: int, stop: int) -> memoryview:
        """Return the cache of these tokens; raises `EngineError` if the session does not have them any more."""

    async def load(self, session: HopSession, epoch: int, chunk: CacheChunk) -> None:
        """Append tokens to a session's cache; raises `EngineError` if it does not fit or the epoch is over."""


class CacheGiver:
    """Gives sessions' caches to the hops that take their place."""

    def __init__(self, caches: SessionCaches) -> None:
        self._caches = caches
        self._giving: Counter[Holder] = Counter()
        # (session, peer) -> set once the asker allows that peer to fetch it; nobody else is woken by an asker's order.
        self._awaited: dict[tuple[bytes, str], trio.Event] = {}

    def allowed(self, session: HopSession, peer: str) -> None:
        """Note that a session's asker allows a peer to fetch its cache."""
        awaited = self._awaited.get((session.id, peer))
        if awaited is not None:
            awaited.set()

    async def attend(self, stream: FrameStream) -> None:
        """Answer one request on a peer's stream."""
        with trio.move_on_after(GIVE_S):
            try:
                with trio.fail_after(REQUEST_S):
                    request = decode_request(await stream.receive())
                await self._answer(stream, request)
                return
            except RecordError as error:
                log.warning("%s asked for a cache in vain: %s", stream.peer, error)
            except (P2PError, trio.TooSlowError):
                pass
        await stream.reset()

    async def _answer(self, stream: FrameStream, request: CacheRequest) -> None:
        session = await self._allowed_session(stream.peer, request)
        form = self._caches.cache_form()
        why = ""
        if session is None or form is None:
            why = "the asker has not allowed it"
        elif not session.turn.span.covers(request.span):
            why = f"blocks {session.turn.span} are cached here"
        elif form.format != request.format:
            why = f"the cache here is {form.format}"
        elif not Shares(MAX_GIVEN, self._giving.items()).fits(_holder_of(session), 1):
            why = "too many sessions move at once"
        if why or session is None or form is None:
            await stream.send(encode_answer(0, why), Priority.CONTROL)
            return
        holder = _holder_of(session)
        self._giving[holder] += 1
        try:
            await self._give(stream, session, request, form)
        finally:
            self._giving -= Counter({holder: 1})

    async def _allowed_session(self, peer: str, request: CacheRequest) -> HopSession | None:
        """The session, once its asker allows this peer to fetch it; None if it does not do so in time."""

        def allowed() -> HopSession | None:
            session = self._caches.session(request.session)
            return session if session is not None and peer in session.given_to else None

        if allowed() is None:
            awaited = self._awaited.setdefault((request.session, peer), trio.Event())
            try:
                with trio.move_on_after(ORDER_S):
                    await awaited.wait()
            finally:
                if self._awaited.get((request.session, peer)) is awaited:
                    del self._awaited[request.session, peer]
        return allowed()

    async def _give(self, stream: FrameStream, session: HopSession, request: CacheRequest, form: CacheForm) -> None:
        stop = min(request.tokens, session.given_to.get(stream.peer, 0), session.length)
        if stop <= request.first:
            await stream.send(encode_answer(0, "nothing more is cached here"), Priority.CONTROL)
            return
        await stream.send(encode_answer(stop), Priority.CONTROL)
        at_once = chunk_tokens(len(request.span) * form.row_bytes)
        try:
            for first in range(request.first, stop, at_once):
                rows = min(at_once, stop - first)
                body = await self._caches.export(session, request.span, first, first + rows)
                await _send(stream, encode_chunk(request, CacheChunk(first, rows, body)))
        except EngineError as error:
            log.info("session %s is not given any more: %s", session.id.hex()[:8], error)
            await stream.reset()
            return
        log.info("session %s: gave %d tokens to %s", session.id.hex()[:8], stop - request.first, stream.peer)


def _holder_of(session: HopSession) -> Holder:
    return Holder(session.home, session.asker)


async def _send(stream: FrameStream, message: Payload) -> None:
    """Send one message once there is room for it; tokens of replies overtake it."""
    while True:
        try:
            await stream.send(message, Priority.PREFILL)
            return
        except QueueFull:
            await stream.wait_room(Priority.PREFILL)


class CacheTaker:
    """Fetches the caches of sessions that move here."""

    def __init__(self, network: Network, caches: SessionCaches) -> None:
        self._network, self._caches = network, caches
        self._taking: dict[HopSession, Holder] = {}
        self._dial_limit = PeerRateLimit(DIALS_BURST, DIALS_PER_S)

    def reserve(self, session: HopSession) -> CacheGrant | None:
        """Return the cache elsewhere that a session's order names, if few enough others are fetched now; `take` it."""
        source = session.turn.cache
        if source is None or source.tokens < session.length + MIN_TOKENS or source.peer == self._network.peer_id:
            return None
        holder, taking = _holder_of(session), Counter(self._taking.values())
        if taking[holder] >= MAX_TAKEN_PER_ASKER or not Shares(MAX_TAKEN, taking.items()).fits(holder, 1):
            return None
        if not self._dial_limit.take(session.asker, trio.current_time()):
            return None
        self._taking[session] = holder
        return source

    async def take(self, session: HopSession, source: CacheGrant, read_tokens_per_s: float) -> bool:
        """Fetch as much of a session's cache as arrives in order, in time, and faster than it would be read.

        `source` is what `reserve` returned; the session may have another order by now. False if the source sent
        something wrong: nothing of what it sent should be used then.
        """
        begin, before = trio.current_time(), session.length
        reading_s = (source.tokens - before) / read_tokens_per_s
        why = "it took too long"
        try:
            with trio.move_on_after(max(min(HANDOVER_S, reading_s), JUDGE_AFTER_S)):
                why = await self._fetch(session, source.peer, source.tokens, read_tokens_per_s)
            sound = True
        except P2PError as error:
            why, sound = str(error), True
        except (RecordError, EngineError) as error:
            why, sound = str(error), False
            log.warning("the cache of session %s from %s is refused: %s", session.id.hex()[:8], source.peer, error)
        finally:
            del self._taking[session]
        text = f"took {session.length - before} of {source.tokens - before} tokens from {source.peer}"
        log.info("session %s: %s in %.2f s %s", session.id.hex()[:8], text, trio.current_time() - begin, why)
        return sound

    async def _fetch(self, session: HopSession, peer: str, tokens: int, read_tokens_per_s: float) -> str:
        """Fetch chunk by chunk; returns why not all tokens were fetched, if so."""
        form, epoch, span = self._caches.cache_form(), session.epoch, session.turn.span
        if form is None:
            return "nothing is hosted here"
        request = CacheRequest(session.id, span, session.length, tokens, form.format)
        stream = await self._network.open(peer, PROTOCOL, timeout_s=OPEN_S)
        try:
            await stream.send(encode_request(request), Priority.CONTROL)
            stop, why = decode_answer(await stream.receive(), request)
            begin, position = trio.current_time(), request.first
            while position < stop:
                message = await stream.receive()
                chunk = decode_chunk(message, request, position, stop, len(span) * form.row_bytes)
                await self._caches.load(session, epoch, chunk)
                position += chunk.rows
                seconds = trio.current_time() - begin
                if position < stop and not is_faster(position - request.first, seconds, read_tokens_per_s):
                    return f"it is faster to read the others ({seconds:.1f} s so far)"
            return why
        finally:
            with trio.CancelScope(shield=True):
                await stream.reset()
