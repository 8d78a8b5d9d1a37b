"""Real nodes for tests: in this process, or each in its own that can be frozen and killed."""

from __future__ import annotations

import multiprocessing
import multiprocessing.process
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import trio

from p2p.channel.upgrade import channel_of
from p2p.discovery.seeker import Means
from p2p.host.address_book import AddressBook
from p2p.host.admission import ConnectionLimits
from p2p.host.host import Host, HostConfig
from p2p.identity import Identity
from p2p.network import Libp2pNetwork, NetworkConfig
from p2p.values import BULK
from tests.bench.delay import delay_proxy

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
# Everybody comes from 127.0.0.1 here, so what one address may do is what all of them may do.
GENEROUS = ConnectionLimits(
    connections=512,
    connections_per_ip=512,
    accepts_per_ip_s=10_000,
    accepts_per_ip_burst=10_000,
    streams_per_ip_s=10_000,
    streams_per_ip_burst=10_000,
)


def make_host(limits: ConnectionLimits = GENEROUS, listen: Sequence[str] = LOOPBACK, **config: Any) -> Host:
    """A host that only listens, dials and echoes."""
    identity = Identity.generate()
    return Host(identity, channel_of(identity), HostConfig(tuple(listen), limits=limits, **config), AddressBook())


def make_network(*means: Means, **config: Any) -> Libp2pNetwork:
    """A whole node of this process, with the given means of discovery only."""
    fields: dict[str, Any] = {"listen": LOOPBACK, "connections": GENEROUS, "discovery": frozenset(means)} | config
    return Libp2pNetwork(fields.pop("identity", None) or Identity.generate(), NetworkConfig(**fields))


async def until(is_so: Callable[[], bool], within_s: float = 10.0) -> None:
    """Wait for something that no event tells."""
    with trio.fail_after(within_s):
        while not is_so():  # noqa: ASYNC110
            await trio.sleep(0.01)


class Libp2pWorld:
    """Nodes of this process over real sockets."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._nodes: list[Libp2pNetwork] = []

    async def node(self) -> Libp2pNetwork:
        network = make_network()
        await self._nursery.start(network.run)
        self._nodes.append(network)
        return network

    async def kill(self, node: Any) -> None:
        await node.stop()

    async def stop(self) -> None:
        async with trio.open_nursery() as nursery:
            for network in self._nodes:
                nursery.start_soon(network.stop)


@asynccontextmanager
async def libp2p_world() -> AsyncIterator[Libp2pWorld]:
    """A world whose nodes are stopped at the end."""
    async with trio.open_nursery() as nursery:
        world = Libp2pWorld(nursery)
        yield world
        await world.stop()


async def measured_bandwidth(bytes_per_s: float, rtt_s: float, burst_bytes: int, bursts: int = 1) -> float:
    """Bytes a second that a node measures while a peer sends to it through a proxy of this speed."""

    async def burst(peer: str, body: bytes) -> bytes:
        return bytes(burst_bytes)

    async with libp2p_world() as world:
        here, there = await world.node(), await world.node()
        there.serve("burst", burst)
        [address] = [address for address in there.addresses() if "/127.0.0.1/" in address]
        port = int(address.split("/tcp/")[1].split("/")[0])
        async with delay_proxy(port, rtt_s, bytes_per_s) as proxy:
            here.learn(there.peer_id, [address.replace(f"/tcp/{port}", f"/tcp/{proxy.port}")])
            for _ in range(bursts):
                await here.call(there.peer_id, "burst", b"", timeout_s=300, priority=BULK)
            [link] = here.links()
            assert link.down_bytes_per_s is not None, "the burst was too short"
            return float(link.down_bytes_per_s)


class Process:
    """A node in a process of its own (see `tests.p2p.node_process`), spoken to in lines."""

    def __init__(self, process: multiprocessing.process.BaseProcess, lines: trio.SocketStream) -> None:
        self._process = process
        self._lines = lines
        self._buffer = bytearray()
        self.peer_id = ""
        self.addresses: list[str] = []

    async def ask(self, line: str) -> str:
        """Send one line and return the answer."""
        await self._lines.send_all(line.encode() + b"\n")
        return await self.line()

    async def line(self) -> str:
        """The next line it says."""
        while b"\n" not in self._buffer:
            chunk = await self._lines.receive_some()
            assert chunk, "the node process ended"
            self._buffer += chunk
        line, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer = bytearray(rest)
        return line.decode()

    def freeze(self) -> None:
        """Stop it as a debugger or a full disk would."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        os.kill(self.pid, signal.SIGCONT)

    async def quit(self) -> None:
        """Ask it to stop and wait for it."""
        await self._lines.send_eof()
        await trio.to_thread.run_sync(self._process.join)
        assert self._process.exitcode == 0

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process.pid is not None
        return self._process.pid


@asynccontextmanager
async def node_process(*arguments: str) -> AsyncIterator[Process]:
    """A node process that has reported where it listens; killed at the end, frozen or not.

    Where the system can fork, a server process imports everything once, so that a node starts in no time.
    """
    from tests.p2p import node_process as program

    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(["tests.p2p.node_process"])
    ours, theirs = socket.socketpair()
    process = context.Process(target=program.run, args=(list(arguments), theirs), daemon=True)
    await trio.to_thread.run_sync(process.start)
    theirs.close()
    node = Process(process, trio.SocketStream(trio.socket.from_stdlib_socket(ours)))
    try:
        node.peer_id, *node.addresses = (await node.line()).split()
        yield node
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(process.join)
        ours.close()
