"""One secured, multiplexed connection to one peer, and the streams on it.

A connection owns every task that runs on it. An error in a stream's handler resets that stream only; the end of the
multiplexer, or `abort`, ends all tasks at once, even if the peer no longer reads.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import trio

from p2p.addresses import Address, BadAddress, IPAddress, Scope, address_of
from p2p.channel import multistream
from p2p.channel.raw import RawConnection
from p2p.channel.yamux import YamuxConnection
from p2p.channel.yamux_stream import StreamEOF, YamuxStream
from p2p.errors import P2PError, PeerUnreachable, StreamReset
from p2p.host.turns import Turns
from p2p.rate_limit import LogLimit
from p2p.values import Buffer

NEGOTIATION_TIMEOUT_S = 10.0
_GOODBYE_S = 0.5

T = TypeVar("T")

log = logging.getLogger("shoal.p2p.connection")
log.addFilter(LogLimit())  # peers can cause these lines


class Stream:
    """A byte stream to a peer under a negotiated protocol."""

    def __init__(self, connection: Connection, muxed: YamuxStream, protocol: str) -> None:
        self.connection = connection
        self.muxed = muxed  # for callers that bypass this class
        self.protocol = protocol

    @property
    def peer(self) -> str:
        """Id of the peer at the other end."""
        return self.connection.peer

    async def read(self, n: int | None = None) -> bytes:
        """Read some bytes, at most `n`; empty at the end of the stream. Raises `StreamReset`."""
        try:
            return await self.muxed.read(n)
        except StreamEOF:
            return b""
        except Exception as error:
            raise StreamReset(f"the stream to {self.peer} broke ({type(error).__name__})") from error

    async def write(self, data: bytes) -> None:
        """Send `data`, waiting while the peer's window is full; raises `StreamReset`."""
        await self.write_parts((data,))

    async def write_parts(self, parts: Sequence[Buffer]) -> None:
        """Send `parts` one after the other without copying them together; raises `StreamReset`."""
        try:
            await self.muxed.write_parts(parts)
        except Exception as error:
            raise StreamReset(f"the stream to {self.peer} broke ({type(error).__name__})") from error

    async def close(self) -> None:
        """Close this side for sending; the peer may still send."""
        try:
            await self.muxed.close()
        except Exception as error:
            log.debug("closing a stream to %s: %r", self.peer, error)

    async def reset(self) -> None:
        """End the stream in both directions; takes at most `_GOODBYE_S`, even when cancelled."""
        with trio.CancelScope(deadline=trio.current_time() + _GOODBYE_S, shield=True):
            try:
                await self.muxed.reset()
            except Exception as error:
                log.debug("resetting a stream to %s: %r", self.peer, error)


StreamHandler = Callable[[Stream], Awaitable[None]]


class Connection:
    """A connection to `peer`; `address` is where it was dialled, or where it came from.

    `ip` is what limits are counted for: the IP address that the socket is connected to, the peer's or its relay's. The
    host in `address` may be a name, and a relay's is whatever somebody wrote, if the relay was connected already.
    """

    def __init__(
        self, muxed: YamuxConnection, raw: RawConnection, address: Address, turns: Turns, *, max_streams: int
    ) -> None:
        self.muxed = muxed
        self.raw = raw
        self.peer = muxed.peer
        self.address = address.of(muxed.peer)
        self.ip = None if raw.remote is None else address_of(*raw.remote).ip
        self.initiated = raw.is_initiator
        self.opened_at = trio.current_time()
        self.rtt_s: float | None = None
        self.closed = trio.Event()
        self.ready = trio.Event()
        self.reason = "closed"
        self.inbound_streams = 0
        self._max_streams = max_streams
        self._turns = turns
        self._queue = trio.Lock()  # of its own streams, so that connections at one address have equal turns

    def __repr__(self) -> str:
        return f"<Connection {'to' if self.initiated else 'from'} {self.peer[-6:]} at {self.address}>"

    @property
    def relayed(self) -> bool:
        """True if the connection passes through a relay."""
        return self.address.scope is Scope.RELAY

    @property
    def local_ip(self) -> IPAddress | None:
        """This machine's IP address of the connection; None if it has no socket of its own, or that is closed."""
        sock = self.raw.socket
        try:
            return None if sock is None else address_of(*sock.getsockname()[:2]).ip
        except (OSError, BadAddress):
            return None

    @property
    def is_open(self) -> bool:
        """True if streams can still be opened."""
        return not self.closed.is_set() and not self.muxed.is_ending

    @property
    def heard_at(self) -> float:
        """Time at which bytes of the peer last came, of whatever stream."""
        return self.muxed.session.heard_at

    async def run(
        self,
        handlers: dict[str, StreamHandler],
        companions: list[Callable[[Connection], Awaitable[None]]],
        stream_delay_s: Callable[[], float],
    ) -> None:
        """Run the connection until it ends: the multiplexer, the companions, and a handler for each inbound stream.

        After each of these the next one waits for `stream_delay_s`: to choose its protocol takes time, whatever it is.
        """
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._abort_when_cancelled)
                nursery.start_soon(self._multiplex, nursery.cancel_scope)
                await self.muxed.event_started.wait()
                self.ready.set()
                for companion in companions:
                    nursery.start_soon(self._run_companion, companion)
                while True:
                    muxed_stream = await self.muxed.accept_stream()
                    if self.inbound_streams >= self._max_streams:
                        nursery.start_soon(Stream(self, muxed_stream, "").reset)
                    else:
                        self.inbound_streams += 1
                        nursery.start_soon(self._serve, muxed_stream, handlers)
                    await trio.sleep(stream_delay_s())
        except* Exception as errors:
            log.debug("connection to %s ended: %r", self.peer, errors.exceptions)
        finally:
            self.abort()
            self.ready.set()
            self.closed.set()

    async def ping(self) -> float:
        """Measure the round trip in seconds with the multiplexer's ping; raises `StreamReset`. Use a deadline."""
        try:
            return await self.muxed.ping()
        except Exception as error:
            raise StreamReset(f"the connection to {self.peer} broke ({type(error).__name__})") from error

    async def open_stream(self, protocol: str) -> Stream:
        """Open a stream under `protocol`.

        Raises `PeerUnreachable` if the connection is closing or the peer does not answer within 10 s, and
        another `P2PError` if the peer does not support the protocol.
        """
        muxed_stream = None
        try:
            with trio.fail_after(NEGOTIATION_TIMEOUT_S):
                try:
                    muxed_stream = await self.muxed.open_stream()
                except Exception as error:
                    raise PeerUnreachable(f"the connection to {self.peer} is closing") from error
                stream = Stream(self, muxed_stream, protocol)
                await multistream.propose(stream, [protocol])
            return stream
        except BaseException as error:
            if muxed_stream is not None:
                await Stream(self, muxed_stream, protocol).reset()
            if isinstance(error, trio.TooSlowError):
                raise PeerUnreachable(f"{self.peer} did not answer within {NEGOTIATION_TIMEOUT_S:.0f} s") from None
            raise

    async def in_turn(self, work: Callable[..., Coroutine[Any, Any, T]], *arguments: object) -> T:
        """Run `work` on something that the peer sent, once it is the turn of this connection at its address."""
        if self.ip is None:
            await trio.lowlevel.checkpoint()
            return await work(*arguments)
        async with self._queue:
            await self._turns.wait(self.ip)
        return await self._turns.measured(self.ip, work(*arguments))

    async def close(self, reason: str = "closed") -> None:
        """Send the multiplexer's go-away, then close the raw connection; takes at most `_GOODBYE_S`."""
        if not self.closed.is_set():
            self.reason = reason
            with trio.CancelScope(deadline=trio.current_time() + _GOODBYE_S, shield=True):
                try:
                    await self.muxed.close()
                except Exception as error:
                    log.debug("closing the connection to %s: %r", self.peer, error)
            self.abort()

    def abort(self, reason: str | None = None) -> None:
        """Close the raw connection at once; every task that waits on it ends."""
        if reason is not None and not self.closed.is_set():
            self.reason = reason
        self.muxed.abort()

    async def _abort_when_cancelled(self) -> None:
        # Writers shield themselves so that no record is cut short; with a frozen peer only a closed socket ends them.
        try:
            await trio.sleep_forever()
        finally:
            self.abort()

    async def _multiplex(self, scope: trio.CancelScope) -> None:
        try:
            await self.muxed.start()
        except Exception as error:
            log.debug("multiplexer to %s failed: %r", self.peer, error)
        finally:
            # Without the multiplexer nothing more can arrive, so all tasks of this connection end.
            scope.cancel()
            self.muxed.event_started.set()

    async def _run_companion(self, companion: Callable[[Connection], Awaitable[None]]) -> None:
        try:
            await companion(self)
        except* P2PError as errors:
            log.debug("%s: %s", self.peer, errors.exceptions)
        except* Exception:
            log.exception("a task of the connection to %s failed", self.peer)

    async def _serve(self, muxed_stream: YamuxStream, handlers: dict[str, StreamHandler]) -> None:
        stream = Stream(self, muxed_stream, "")
        served = False
        try:
            with trio.fail_after(NEGOTIATION_TIMEOUT_S):
                stream.protocol = await multistream.choose(stream, handlers)
            await handlers[stream.protocol](stream)
            served = True
        except* (P2PError, trio.TooSlowError) as errors:
            log.debug("stream from %s with protocol %r ended: %s", self.peer, stream.protocol, errors.exceptions)
        except* Exception:
            log.exception("the handler of %s failed on a stream from %s", stream.protocol, self.peer)
        finally:
            self.inbound_streams -= 1
            if served:
                # Else bytes that the handler left would count as unread until the connection ends.
                muxed_stream.stop_reading()
                await stream.close()
            else:
                await stream.reset()
