"""Two ends of a channel in one process: over sockets, over something that is no socket, honest or not."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import trio
import trio.testing

from p2p.channel.noise import NOISE_ID, NoiseTransport, security_options
from p2p.channel.noise_session import NoiseSession
from p2p.channel.raw import ConnectionClosed, RawConnection, SocketConnection
from p2p.channel.yamux import YamuxConnection
from p2p.channel.yamux_wire import FrameParser, YamuxFrame, pack_header
from p2p.identity import Identity


class MemoryConnection:
    """A raw connection without a socket, as a relayed one."""

    socket = None
    remote = None

    def __init__(self, stream: trio.abc.Stream, *, is_initiator: bool) -> None:
        self.is_initiator = is_initiator
        self._stream = stream

    async def read(self, n: int | None = None) -> bytes:
        return bytes(await self._stream.receive_some(n))

    async def write(self, data: bytes) -> None:
        await self._stream.send_all(data)

    async def close(self) -> None:
        await self._stream.aclose()

    def abort(self) -> None:
        raise NotImplementedError("no test aborts one in memory")


def memory_pair() -> tuple[RawConnection, RawConnection]:
    """Two raw connections joined in memory, with room for little, as a network has."""
    left, right = trio.testing.lockstep_stream_pair()
    return MemoryConnection(left, is_initiator=True), MemoryConnection(right, is_initiator=False)


class FarConnection:
    """One end of a raw connection on which everything arrives `delay_s` after it was sent."""

    socket = None
    remote = None

    def __init__(
        self,
        outgoing: trio.MemorySendChannel[tuple[float, bytes]],
        incoming: trio.MemoryReceiveChannel[tuple[float, bytes]],
        delay_s: float,
        *,
        is_initiator: bool,
    ) -> None:
        self.is_initiator, self._delay_s = is_initiator, delay_s
        self._outgoing, self._incoming, self._unread = outgoing, incoming, b""

    async def read(self, n: int | None = None) -> bytes:
        if not self._unread:
            arrives_at, self._unread = await self._incoming.receive()
            await trio.sleep_until(arrives_at)
        data, self._unread = self._unread[:n], self._unread[n or len(self._unread) :]
        return data

    async def write(self, data: bytes) -> None:
        await self._outgoing.send((trio.current_time() + self._delay_s, data))

    async def close(self) -> None:
        await self._outgoing.aclose()

    def abort(self) -> None:
        self._outgoing.close()


def far_pair(delay_s: float) -> tuple[RawConnection, RawConnection]:
    """Two raw connections joined over a long way."""
    there, here = (trio.open_memory_channel[tuple[float, bytes]](100) for _ in range(2))
    left = FarConnection(there[0], here[1], delay_s, is_initiator=True)
    return left, FarConnection(here[0], there[1], delay_s, is_initiator=False)


def socket_pair() -> tuple[RawConnection, RawConnection]:
    """Two raw connections joined by the kernel."""
    sockets = socket.socketpair()
    _opened.extend(sockets)
    left, right = (trio.SocketStream(trio.socket.from_stdlib_socket(sock)) for sock in sockets)
    return SocketConnection(left, is_initiator=True), SocketConnection(right, is_initiator=False)


@pytest.fixture(autouse=True)
def close_sockets() -> Iterator[None]:
    """Close what a test left open; import this fixture to use it."""
    yield
    while _opened:
        _opened.pop().close()


_opened: list[socket.socket] = []
PAIRS = {"socket": socket_pair, "memory": memory_pair}


def transport(identity: Identity, protocol: str = NOISE_ID, secret: bytes | None = None) -> NoiseTransport:
    """One of the variants a node offers."""
    return security_options(identity, secret=secret)[protocol]


@dataclass
class Sessions:
    """Both ends of a secured connection, and the raw connections under them."""

    dialler: NoiseSession
    listener: NoiseSession
    raw: tuple[RawConnection, RawConnection]


async def secure(raw: tuple[RawConnection, RawConnection], protocol: str = NOISE_ID) -> Sessions:
    """Shake hands over a pair of raw connections."""
    dialling, listening = Identity.generate(), Identity.generate()
    found: dict[str, Any] = {}

    async def listen() -> None:
        found["listener"] = await transport(listening, protocol).secure_inbound(raw[1])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(listen)
        found["dialler"] = await transport(dialling, protocol).secure_outbound(raw[0], listening.peer_id)
    assert (found["dialler"].peer, found["listener"].peer) == (listening.peer_id, dialling.peer_id)
    return Sessions(found["dialler"], found["listener"], raw)


@dataclass
class Connections:
    """Both ends of a multiplexed connection."""

    dialler: YamuxConnection
    listener: YamuxConnection
    sessions: Sessions


@asynccontextmanager
async def connected(kind: str = "socket") -> AsyncIterator[Connections]:
    """Two running connections, joined."""
    sessions = await secure(PAIRS[kind]())
    ends = [YamuxConnection(end) for end in (sessions.dialler, sessions.listener)]
    async with trio.open_nursery() as nursery:
        for end in ends:
            nursery.start_soon(end.start)
            await end.event_started.wait()
        yield Connections(ends[0], ends[1], sessions)
        for end in ends:
            await end.close()
        nursery.cancel_scope.cancel()


class Hostile:
    """The other end of a connection, speaking frames by hand."""

    def __init__(self, session: NoiseSession) -> None:
        self.session = session
        self._parser = FrameParser()

    async def send(self, kind: int, flags: int, stream_id: int, length: int, body: bytes = b"") -> None:
        await self.session.write(pack_header(kind, flags, stream_id, length) + body)

    async def receive(self) -> list[YamuxFrame]:
        return list(self._parser.feed(await self.session.receive()))


@asynccontextmanager
async def attacked(kind: str = "socket") -> AsyncIterator[tuple[YamuxConnection, Hostile]]:
    """A running connection whose peer does as it likes."""
    sessions = await secure(PAIRS[kind]())
    victim = YamuxConnection(sessions.listener)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(victim.start)
        await victim.event_started.wait()
        yield victim, Hostile(sessions.dialler)
        await victim.close()
        nursery.cancel_scope.cancel()


async def echo(connection: YamuxConnection) -> None:
    """Answer every stream of a connection with what it sends."""

    async def answer(stream: Any) -> None:
        try:
            while True:
                await stream.write(await stream.read(1 << 18))
        except Exception:
            await stream.close()

    async with trio.open_nursery() as nursery:
        with contextlib.suppress(ConnectionClosed):
            while True:
                nursery.start_soon(answer, await connection.accept_stream())
