"""How fast a channel is, py-libp2p's own and ours, each between two processes on loopback.

    python -m tests.bench.channel --json

Each runs under its own host and is used through the same interface, the multiplexed stream itself. `shoal_noise` is
ours under the cipher that every libp2p speaks, `shoal` under the one that two Shoal nodes choose. Rounds alternate and
the best one counts, since other programs can only make a round slower.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import trio
from libp2p import new_host
from libp2p.custom_types import TProtocol
from libp2p.peer.peerinfo import info_from_p2p_addr
from multiaddr import Multiaddr

from p2p.addresses import parse_address
from p2p.channel.noise import NOISE_ID
from p2p.channel.upgrade import Channel, channel_of
from p2p.host.address_book import AddressBook
from p2p.host.host import Host, HostConfig
from p2p.identity import Identity
from tests.bench.delay import delay_proxy

STACKS = ("stock", "shoal_noise", "shoal")
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
ECHO = "/bench/echo"
SINK = "/bench/sink"
CHUNK = 256 << 10
DELAY_RTT_S = 0.05
DELAY_BYTES = 4 << 20
BULK_BYTES = {"stock": 24 << 20, "shoal_noise": 64 << 20, "shoal": 64 << 20}

Open = Callable[[str], Awaitable[Any]]  # a multiplexed stream under a protocol


def make_host(stack: str) -> Host:
    """A host of ours with the channel to measure."""
    identity = Identity.generate()
    channel = channel_of(identity)
    if stack == "shoal_noise":
        channel = Channel({NOISE_ID: channel.security[NOISE_ID]}, channel.muxers)
    return Host(identity, channel, HostConfig((LOOPBACK,)), AddressBook())


async def _read_all(stream: Any, size: int) -> None:
    while size:
        size -= len(await stream.read(size))


async def _echo(stream: Any) -> None:
    while True:
        await stream.write(await stream.read(CHUNK))


async def _sink(stream: Any) -> None:
    while True:
        header = b""
        while len(header) < 8:
            header += await stream.read(8 - len(header))
        await _read_all(stream, int.from_bytes(header, "big"))
        await stream.write(b"!")


def _until_the_end(handler: Callable[[Any], Any]) -> Callable[[Any], Any]:
    async def run(stream: Any) -> None:
        try:
            await handler(stream.muxed_stream if hasattr(stream, "muxed_stream") else stream.muxed)
        except Exception:
            return

    return run


async def serve(stack: str) -> None:
    """Print an address and answer until killed."""
    handlers = {ECHO: _until_the_end(_echo), SINK: _until_the_end(_sink)}
    if stack == "stock":
        stock = new_host()
        async with stock.run([Multiaddr(LOOPBACK)]):
            for protocol, handler in handlers.items():
                stock.set_stream_handler(TProtocol(protocol), handler)
            print(stock.get_addrs()[0], flush=True)
            await trio.sleep_forever()
    host = make_host(stack)
    async with trio.open_nursery() as nursery:
        for protocol, handler in handlers.items():
            host.handle(protocol, handler)
        await nursery.start(host.run)
        print(host.addresses[0], flush=True)


@asynccontextmanager
async def _connected(stack: str, address: str) -> AsyncIterator[Open]:
    if stack == "stock":
        stock, info = new_host(), info_from_p2p_addr(Multiaddr(address))

        async def open_stock(protocol: str) -> Any:
            stream: Any = await stock.new_stream(info.peer_id, [TProtocol(protocol)])
            return stream.muxed_stream

        async with stock.run([]):
            await stock.connect(info)
            yield open_stock
        return
    host, place = make_host(stack), parse_address(address)
    assert place.peer is not None
    async with trio.open_nursery() as nursery:
        await nursery.start(host.run)
        connection = await host.connect(place.peer, [place])

        async def open_ours(protocol: str) -> Any:
            return (await connection.open_stream(protocol)).muxed

        yield open_ours
        await host.goodbye()
        nursery.cancel_scope.cancel()


async def _send_and_wait(stream: Any, size: int) -> float:
    """Seconds until the other side has all of `size` bytes and said so."""
    chunk = bytes(CHUNK)
    begun = time.perf_counter()
    await stream.write(size.to_bytes(8, "big"))
    for _ in range(size // CHUNK):
        await stream.write(chunk)
    await _read_all(stream, 1)
    return time.perf_counter() - begun


async def _round_trips(stream: Any, size: int, times: int) -> float:
    message, taken = bytes(size), []
    for _ in range(times):
        begun = time.perf_counter()
        await stream.write(message)
        await _read_all(stream, size)
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken) * 1000


async def measure(stack: str, address: str) -> dict[str, float]:
    """One round of round-trip times and bulk."""
    async with _connected(stack, address) as open_stream:
        echo = await open_stream(ECHO)
        await _round_trips(echo, 1024, 50)
        rtt_1k_ms = await _round_trips(echo, 1024, 300)
        rtt_256k_ms = await _round_trips(echo, 256 << 10, 20)
        sink = await open_stream(SINK)
        await _send_and_wait(sink, CHUNK * 8)
        size = BULK_BYTES[stack]
        bulk_mb_s = max([size / 1e6 / await _send_and_wait(sink, size) for _ in range(3)])
        return {"rtt_1k_ms": rtt_1k_ms, "rtt_256k_ms": rtt_256k_ms, "bulk_mb_s": bulk_mb_s}


async def measure_delayed(stack: str, address: str) -> dict[str, float]:
    """The first 4 MiB on a new stream, as a node that just opened one would send them."""
    async with _connected(stack, address) as open_stream:
        sink = await open_stream(SINK)
        return {"delayed_s": await _send_and_wait(sink, DELAY_BYTES)}


class _PlainStream:
    """A bare TCP connection with the interface of a stream: what the wire itself needs."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.muxed_stream = self
        self.write = stream.send_all
        self.read = stream.receive_some


async def _measure_wire(port: int) -> float:
    return await _send_and_wait(_PlainStream(await trio.open_tcp_stream("127.0.0.1", port)), DELAY_BYTES)


def _run(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tests.bench.channel", *arguments]


@contextmanager
def serving(stack: str) -> Iterator[str]:
    """A server in a process of its own: its address."""
    process = subprocess.Popen(_run("--serve", stack), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


def run_client(stack: str, address: str, mode: str) -> dict[str, float]:
    """One round in a process of its own."""
    done = subprocess.run(_run(mode, stack, "--peer", address), stdout=subprocess.PIPE, text=True, check=True)
    outcome: dict[str, float] = json.loads(done.stdout)
    return outcome


async def _delay_figures(stack: str, address: str) -> float:
    """Round trips that a stack needs beyond what bare TCP needs through the same proxy."""
    multiaddr = Multiaddr(address)
    port = int(multiaddr.value_for_protocol("tcp"))
    async with delay_proxy(port, DELAY_RTT_S) as proxy:
        through = address.replace(f"/tcp/{port}", f"/tcp/{proxy.port}")
        outcome = await trio.to_thread.run_sync(run_client, stack, through, "--delayed")
    async with trio.open_nursery() as nursery:

        async def plain(stream: trio.SocketStream) -> None:
            await _until_the_end(_sink)(_PlainStream(stream))

        listeners = await nursery.start(trio.serve_tcp, plain, 0)
        async with delay_proxy(listeners[0].socket.getsockname()[1], DELAY_RTT_S) as proxy:
            wire_s = await _measure_wire(proxy.port)
        nursery.cancel_scope.cancel()
    return (outcome["delayed_s"] - wire_s) / DELAY_RTT_S


def compare(rounds: int) -> dict[str, Any]:
    """All figures of all stacks."""
    figures: dict[str, list[dict[str, float]]] = {stack: [] for stack in STACKS}
    for _ in range(rounds):
        for stack in STACKS:
            with serving(stack) as address:
                figures[stack].append(run_client(stack, address, "--client"))
    best: dict[str, Any] = {}
    for stack, taken in figures.items():
        best[stack] = {
            "rtt_1k_ms": round(min(figure["rtt_1k_ms"] for figure in taken), 3),
            "rtt_256k_ms": round(min(figure["rtt_256k_ms"] for figure in taken), 3),
            "bulk_mb_s": round(max(figure["bulk_mb_s"] for figure in taken), 1),
        }
    best["rtt_ratio"] = round(best["stock"]["rtt_1k_ms"] / best["shoal"]["rtt_1k_ms"], 2)
    best["bulk_ratio"] = round(best["shoal"]["bulk_mb_s"] / best["stock"]["bulk_mb_s"], 2)
    extra = []
    for _ in range(rounds):
        with serving("shoal") as address:
            extra.append(trio.run(_delay_figures, "shoal", address))
    best["delay_4mib_extra_rtts"] = round(min(extra), 2)
    return best


def main() -> None:
    """Parse the command line and run what it names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--rounds", type=int, default=3)
    for role in ("--serve", "--client", "--delayed"):
        parser.add_argument(role, metavar="STACK", choices=STACKS, help=argparse.SUPPRESS)
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        trio.run(serve, arguments.serve)
    elif arguments.client:
        print(json.dumps(trio.run(measure, arguments.client, arguments.peer)))
    elif arguments.delayed:
        print(json.dumps(trio.run(measure_delayed, arguments.delayed, arguments.peer)))
    else:
        best = compare(arguments.rounds)
        print(json.dumps(best) if arguments.json else "\n".join(f"{name}: {value}" for name, value in best.items()))


if __name__ == "__main__":
    main()
