"""A node for tests, in a process of its own: says its peer id and addresses, then answers lines of commands.

`echo PEER TEXT`, `provide HEX`, `find HEX`, `links`, `kinds`, `addresses`, `reach`, `learn PEER ADDRESS`, `cpu`; the
end of input stops it. `--netns` moves it into a network namespace first.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import socket
import time
from pathlib import Path
from typing import Any

import trio

from p2p.discovery.seeker import MEANS
from p2p.errors import P2PError
from p2p.identity import Identity, load_or_create
from p2p.network import Libp2pNetwork, NetworkConfig
from tests.p2p.nodes import GENEROUS, LOOPBACK


async def echo(peer: str, body: bytes) -> bytes:
    return body


async def answer(network: Libp2pNetwork, words: list[str]) -> str:
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
            case ["cpu"]:
                return str(time.process_time())
    except P2PError as error:
        return f"failed: {error}"
    return "unknown command"


async def main(arguments: argparse.Namespace, lines: trio.SocketStream) -> None:
    config = NetworkConfig(
        listen=tuple(arguments.listen or LOOPBACK),
        advertise=tuple(arguments.advertise),
        peers=tuple(arguments.peer),
        discovery=frozenset(name for name in MEANS if name in arguments.discovery.split(",")),
        remember_at=arguments.home / "peers.json" if arguments.home else None,
        secret=arguments.secret.encode() if arguments.secret else None,
        connections=GENEROUS,
    )
    identity = load_or_create(arguments.home / "key.json") if arguments.home else Identity.generate()
    network = Libp2pNetwork(identity, config)
    network.serve("echo", echo)
    if arguments.unread:
        muxer: Any = network.host.channel.muxers["/yamux/1.0.0"]
        muxer.keywords["unread"].limit = arguments.unread
    async with network.running():
        await lines.send_all(" ".join([network.peer_id, *network.addresses()]).encode() + b"\n")
        pending = b""
        async for chunk in lines:
            *whole, pending = (pending + chunk).split(b"\n")
            for line in whole:
                await lines.send_all((await answer(network, line.decode().split())).encode() + b"\n")


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", action="append", default=[])
    parser.add_argument("--advertise", action="append", default=[])
    parser.add_argument("--peer", action="append", default=[])
    parser.add_argument("--discovery", default="")
    parser.add_argument("--home", type=Path)
    parser.add_argument("--secret")
    parser.add_argument("--netns", type=Path)
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
