"""A node for tests, in a process of its own: says its peer id and addresses, then answers lines of commands.

`echo PEER TEXT`, `provide HEX`, `find HEX`, `links`, `kinds`, `addresses`, `reach`, `learn PEER ADDRESS`, `cpu`,
`mapping`, `public`, `found NAME` (a swarm), `join NAME`, `count PEER` (numbers on a stream that PEER returns, until
`counted`; `count` alone says how many, and `broken` waits until the stream fails), `carrier PEER` (what its links run
over); the end of input stops it. `--netns` moves it into a network namespace first.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trio

from app.core.errors import AppError
from app.membership import Membership, QueryService, resolve_swarm
from app.membership.swarm_search import PUBLIC_TIMEOUT_S
from app.swarm.names import SwarmName
from app.swarm.records import SwarmRecord, sign_record
from p2p.discovery.seeker import MEANS
from p2p.errors import P2PError
from p2p.identity import Identity, load_or_create
from p2p.link.streams import MessageStream
from p2p.network import Libp2pNetwork, NetworkConfig, is_relayed
from tests.p2p.nodes import GENEROUS, LOOPBACK


async def echo(peer: str, body: bytes) -> bytes:
    return body


async def echo_stream(stream: MessageStream) -> None:
    """Return every message of a stream."""
    while True:
        await stream.send(await stream.receive())


class Counter:
    """Sends numbers on one stream, each after the last one has come back, and notes the longest wait for one."""

    def __init__(self, network: Libp2pNetwork) -> None:
        self._network = network
        self._stop = trio.Event()
        self._done = trio.Event()
        self.count = 0
        self.longest_s = 0.0
        self.result = ""

    async def run(self, peer: str) -> None:
        try:
            stream = await self._network.open(peer, "echo", timeout_s=10)
            while not self._stop.is_set():
                sent_at = trio.current_time()
                await stream.send(str(self.count).encode())
                answer = await stream.receive()
                if answer != str(self.count).encode():
                    self.result = f"failed: {answer!r} instead of {self.count}"
                    return
                self.count += 1
                self.longest_s = max(self.longest_s, trio.current_time() - sent_at)
                await trio.sleep(0.005)
            self.result = f"{self.count} {self.longest_s:.3f}"
        except P2PError as error:
            self.result = f"failed: {error} after {self.count}"
        finally:
            self._done.set()

    async def end(self, *, wanted: bool) -> str:
        if wanted:
            self._stop.set()
        await self._done.wait()
        return self.result


class Swarms:
    """The swarms of the node: founded or joined by their names alone."""

    def __init__(self, network: Libp2pNetwork, identity: Identity, nursery: trio.Nursery) -> None:
        self._network, self._identity, self._nursery = network, identity, nursery
        self._service = QueryService(network, self)
        self.counter = Counter(network)

    async def count(self, peer: str) -> None:
        self.counter = Counter(self._network)
        self._nursery.start_soon(self.counter.run, peer)

    async def counted(self, *, wanted: bool) -> str:
        return await self.counter.end(wanted=wanted)

    def load(self, model_hash: str) -> None:
        """No manifest: the models are of no interest here."""

    async def found(self, name: str) -> None:
        await self._take_part(sign_record(self._identity, name, "1a2b3c4d" * 8, now_ms=int(time.time() * 1000)))

    async def join(self, name: str) -> list[str]:
        found = await resolve_swarm(self._network, SwarmName(name), timeout_s=PUBLIC_TIMEOUT_S)
        swarm = await self._take_part(found.record, found.peers)
        await swarm.joined()
        return [member.peer for member in swarm.members()]

    async def _take_part(self, record: SwarmRecord, peers: Sequence[str] = ()) -> Membership:
        swarm = Membership(self._network, self._identity, record, n_blocks=4)
        swarm.join_via(peers)
        self._service.take_part(swarm)
        await self._nursery.start(swarm.run)
        return swarm


async def answer(network: Libp2pNetwork, swarms: Swarms, words: list[str]) -> str:
    try:
        match words:
            case ["echo", peer, text]:
                return (await network.call(peer, "echo", text.encode(), timeout_s=5)).decode()
            case ["provide", key]:
                await network.provide(bytes.fromhex(key))
                return "provided"
            case ["find", key]:
                return " ".join(await network.find_providers(bytes.fromhex(key), timeout_s=5)) or "nobody"
            case ["links"]:
                return " ".join(link.peer for link in network.links()) or "none"
            case ["learn", peer, address]:
                network.learn(peer, [address])
                return "learnt"
            case ["kinds"]:
                return " ".join(f"{link.peer}={link.kind}" for link in network.links()) or "none"
            case ["addresses"]:
                return " ".join(network.addresses())
            case ["reach"]:
                return f"{network.traversal.reachability.state} relay={network.traversal.server.enabled}"
            case ["mapping"] if (mapper := network.traversal.mapper) is not None:
                mapping = mapper.mapping
                return mapper.problem if mapping is None else f"{mapping.method} {mapping.ip}:{mapping.port}"
            case ["public"] if network.public is not None:
                return str(network.public.status)
            case ["found", name]:
                await swarms.found(name)
                return "founded"
            case ["join", name]:
                return " ".join(await swarms.join(name))
            case ["carrier", peer]:
                return "relayed" if any(is_relayed(link.stream) for link in network._board.links_to(peer)) else "direct"
            case ["count", peer]:
                await swarms.count(peer)
                return "counting"
            case ["count"]:
                return str(swarms.counter.count)
            case ["counted" | "broken" as how]:
                return await swarms.counted(wanted=how == "counted")
            case ["cpu"]:
                return str(time.process_time())
    except (P2PError, AppError) as error:
        return f"failed: {error}"
    return "unknown command"


async def main(arguments: argparse.Namespace, lines: trio.SocketStream) -> None:
    config = NetworkConfig(
        listen=tuple(arguments.listen or LOOPBACK),
        advertise=tuple(arguments.advertise),
        peers=tuple(arguments.peer),
        discovery=frozenset(name for name in (*MEANS, "public") if name in arguments.discovery.split(",")),
        map_port=arguments.map_port,
        public_entries=tuple(arguments.public_entry),
        remember_at=arguments.home / "peers.json" if arguments.home else None,
        secret=arguments.secret.encode() if arguments.secret else None,
        connections=GENEROUS,
    )
    identity = load_or_create(arguments.home / "key.json") if arguments.home else Identity.generate()
    network = Libp2pNetwork(identity, config)
    network.serve("echo", echo)
    network.accept("echo", echo_stream)
    if arguments.unread:
        muxer: Any = network.host.channel.muxers["/yamux/1.0.0"]
        muxer.keywords["unread"].limit = arguments.unread
    async with network.running(), trio.open_nursery() as nursery:
        swarms = Swarms(network, identity, nursery)
        await lines.send_all(" ".join([network.peer_id, *network.addresses()]).encode() + b"\n")
        pending = b""
        async for chunk in lines:
            *whole, pending = (pending + chunk).split(b"\n")
            for line in whole:
                await lines.send_all((await answer(network, swarms, line.decode().split())).encode() + b"\n")
        nursery.cancel_scope.cancel()


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", action="append", default=[])
    parser.add_argument("--advertise", action="append", default=[])
    parser.add_argument("--peer", action="append", default=[])
    parser.add_argument("--discovery", default="")
    parser.add_argument("--public-entry", action="append", default=[])
    parser.add_argument("--home", type=Path)
    parser.add_argument("--secret")
    parser.add_argument("--netns", type=Path)
    parser.add_argument("--map-port", action="store_true")
    parser.add_argument("--log", action="store_true")
    parser.add_argument("--unread", type=int)
    return parser.parse_args(words)


def enter_namespace(path: Path) -> None:
    with path.open() as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {path}")


def run(words: list[str], channel: socket.socket) -> None:
    """The whole life of the process."""

    arguments = parse(words)
    if arguments.log:
        logging.basicConfig(level=logging.DEBUG)
    if arguments.netns:
        enter_namespace(arguments.netns)

    async def begin() -> None:
        await main(arguments, trio.SocketStream(trio.socket.from_stdlib_socket(channel)))

    trio.run(begin)
