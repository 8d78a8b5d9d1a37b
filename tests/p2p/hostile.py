"""Peers that mean harm, against a live node in a process of its own, while somebody honest is served."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil
import trio

from p2p.addresses import Address, parse_address
from p2p.channel import multistream
from p2p.channel.raw import SocketConnection
from p2p.channel.upgrade import channel_of
from p2p.channel.yamux import YamuxConnection
from p2p.errors import P2PError
from p2p.identity import Identity
from p2p.link.frames import PREFACE
from p2p.network import Libp2pNetwork
from tests.p2p.channels import Hostile
from tests.p2p.nodes import Process, make_network, node_process, until

MIB = 1 << 20


@dataclass
class Victim:
    """A node under attack, and how well it served somebody honest meanwhile."""

    process: Process
    friend: Libp2pNetwork
    answers: int = 0
    slowest_s: float = 0.0
    rss_before: int = 0
    grown_bytes: int = 0  # at the worst moment
    door: trio.CapacityLimiter = field(default_factory=lambda: trio.CapacityLimiter(8))  # handshakes at once
    _ps: psutil.Process = field(init=False)

    def __post_init__(self) -> None:
        self._ps = psutil.Process(self.process.pid)
        self.rss_before = self._ps.memory_info().rss

    @property
    def peer(self) -> str:
        return self.process.peer_id

    @property
    def address(self) -> Address:
        return parse_address(self.process.addresses[0])

    def weigh(self) -> None:
        """See how much memory the node has now."""
        self.grown_bytes = max(self.grown_bytes, int(self._ps.memory_info().rss) - self.rss_before)

    @property
    def files(self) -> int:
        return int(self._ps.num_fds())

    @property
    def cpu_s(self) -> float:
        times = self._ps.cpu_times()
        return float(times.user + times.system)

    async def keep_asking(self) -> None:
        """The honest peer: one small call after another, each answered soon."""
        while True:
            asked_at = time.perf_counter()
            assert await self.friend.call(self.peer, "echo", b"still there?", timeout_s=10) == b"still there?"
            self.slowest_s = max(self.slowest_s, time.perf_counter() - asked_at)
            self.answers += 1
            self.weigh()
            await trio.sleep(0.02)


@asynccontextmanager
async def under_attack(*arguments: str, grows_by: int, slowest_s: float = 2.0) -> AsyncIterator[Victim]:
    """A victim that must go on serving its friend, and whose memory must at no moment grow by more than `grows_by`."""
    friend = make_network()
    async with node_process(*(arguments or ("--discovery", "dht"))) as process, friend.running():
        friend.learn(process.peer_id, process.addresses)
        await friend.call(process.peer_id, "echo", b"", timeout_s=10)
        victim = Victim(process, friend)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(victim.keep_asking)
            yield victim
            seen = victim.answers
            await until(lambda: victim.answers >= seen + 3)
            nursery.cancel_scope.cancel()
        assert victim.grown_bytes <= grows_by, f"{victim.grown_bytes / MIB:.0f} MiB"
        assert victim.slowest_s <= slowest_s, f"somebody honest waited {victim.slowest_s:.2f} s"


@asynccontextmanager
async def raw_session(victim: Victim, identity: Identity | None = None) -> AsyncIterator[Hostile]:
    """A secured connection on which the attacker speaks yamux frames by hand."""
    address = victim.address
    async with victim.door:
        socket = await trio.open_tcp_stream(address.host, address.port)
        try:
            raw = SocketConnection(socket, is_initiator=True)
            secured = await channel_of(identity or Identity.generate()).secure(raw, victim.peer)
            await multistream.propose(secured, ["/yamux/1.0.0"])
        except BaseException:
            await trio.aclose_forcefully(socket)
            raise
    try:
        yield Hostile(secured)
    finally:
        await trio.aclose_forcefully(socket)


@asynccontextmanager
async def connection_to(victim: Victim, identity: Identity | None = None) -> AsyncIterator[YamuxConnection]:
    """A whole connection of an attacker with a name of its own."""
    async with raw_session(victim, identity) as hostile:
        connection = YamuxConnection(hostile.session)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connection.start)
            await connection.event_started.wait()
            try:
                yield connection
            finally:
                connection.abort()
                nursery.cancel_scope.cancel()


async def open_protocol(connection: YamuxConnection, protocol: str) -> Any:
    """A stream under a protocol, to be misused."""
    stream: Any = await connection.open_stream()
    await multistream.propose(stream, [protocol])
    return stream


async def open_lane(connection: YamuxConnection, lane: str = "/shoal/1/live") -> Any:
    """A stream that speaks the link protocol so far."""
    stream = await open_protocol(connection, lane)
    await stream.write(PREFACE)
    return stream


async def until_cut(stream: Any, data: bytes, times: int) -> int:
    """Write `data` so many times, or until the victim has had enough; how many times it was taken."""
    done = 0
    with contextlib.suppress(P2PError):
        for _ in range(times):
            await stream.write(data)
            done += 1
    return done
