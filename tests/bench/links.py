"""What links cost and carry.

    python -m tests.bench.links [--json] [--no-wire]

- A call and a stream message in our own code, without libp2p and encryption: both sides run in this process, so a
  figure is the sum of both.
- `bandwidth_error_*`: how far the measured speed of a link between two real nodes is from that of the narrow proxy
  between them (`tests.bench.delay`), for several speeds; from single bursts as probes cause, and from a long transfer.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Awaitable, Callable

import trio

from app.core.network import FrameStream, Network, Priority
from app.membership.link_probe import BURST_BYTES
from p2p.link.quota import Limits
from tests.bench.delay import delay_proxy
from tests.p2p.network_contract import echo, echo_stream
from tests.p2p.networks import wired_world
from tests.p2p.nodes import libp2p_world

PROTOCOL = "/bench/1/echo"


async def _median_us(step: Callable[[], Awaitable[object]], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        await step()
        times.append(time.perf_counter() - started)
    return round(statistics.median(times) * 1e6, 1)


async def _round_trip(stream: FrameStream, body: bytes) -> None:
    await stream.send(body)
    await stream.receive()


async def _empty_pipe_us(repeats: int) -> float:
    """The floor: trio's memory pipe, two tasks, no link."""
    here, there = trio.testing.memory_stream_pair()

    async def answer() -> None:
        while True:
            await there.send_all(await there.receive_some(65536))

    async def step() -> None:
        await here.send_all(b"x")
        await here.receive_some(65536)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer)
        floor = await _median_us(step, repeats)
        nursery.cancel_scope.cancel()
    return floor


async def _one_way_us(sender: Network, receiver: Network, messages: int) -> float:
    """Microseconds a message, both sides together, when many small ones are sent in a row."""
    done = trio.Event()

    async def count(stream: FrameStream) -> None:
        for _ in range(messages):
            await stream.receive()
        done.set()

    receiver.accept("/bench/1/count", count)
    stream = await sender.open(receiver.peer_id, "/bench/1/count")
    started = time.perf_counter()
    for number in range(messages):
        await stream.send(b"x" * 1024)
        if number % 64 == 0:
            await stream.wait_room()
    await done.wait()
    return round((time.perf_counter() - started) / messages * 1e6, 1)


def _sockets() -> tuple[trio.SocketStream, trio.SocketStream]:
    here, there = trio.socket.socketpair()
    return trio.SocketStream(here), trio.SocketStream(there)


async def _bulk_mb_s(repeats: int) -> float:
    """Megabytes a second one way in calls of 16 MiB, over a pair of sockets: memory pipes slow down when they fill."""

    async def size(peer: str, body: bytes) -> bytes:
        return b"%d" % len(body)

    async with wired_world() as world:
        world.pipe = _sockets
        a, b = await world.node(), await world.node()
        b.serve("size", size)
        body = bytes(16 * 2**20)
        best_s = math.inf
        for _ in range(repeats):
            started = time.perf_counter()
            await a.call(b.peer_id, "size", body, timeout_s=60, priority=Priority.BULK)
            best_s = min(best_s, time.perf_counter() - started)
        return round(len(body) / best_s / 1e6, 1)


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
                await here.call(there.peer_id, "burst", b"", timeout_s=300, priority=Priority.BULK)
            [link] = here.links()
            assert link.down_bytes_per_s is not None, "the burst was too short"
            return float(link.down_bytes_per_s)


async def bandwidth_errors() -> dict[str, float]:
    """How far measured speeds are from the proxy's, as shares of it."""
    found = {}
    for name, rtt_s, size, bursts in (("probe", 0.02, BURST_BYTES, 1), ("bulk", 0.02, 4 * 2**20, 2)):
        for mbit in (10, 50, 100):
            real = mbit * 1e6 / 8
            measured = await measured_bandwidth(real, rtt_s, size, bursts)
            found[f"bandwidth_error_{name}_{mbit}mbit"] = round(abs(measured / real - 1), 3)
    return found


async def measure(repeats: int) -> dict[str, float]:
    """All figures."""
    async with wired_world() as world:
        world.limits = Limits(requests_per_s=1e9, request_burst=1e9)
        a, b = await world.node(), await world.node()
        b.serve("echo", echo)
        b.accept(PROTOCOL, echo_stream)
        stream = await a.open(b.peer_id, PROTOCOL)
        step = bytes(8192)
        return {
            "pipe_round_trip_us": await _empty_pipe_us(repeats),
            "stream_round_trip_8k_us": await _median_us(lambda: _round_trip(stream, step), repeats),
            "call_round_trip_8k_us": await _median_us(lambda: a.call(b.peer_id, "echo", step, timeout_s=5), repeats),
            "one_way_1k_us": await _one_way_us(a, b, repeats),
            "bulk_mb_s": await _bulk_mb_s(max(repeats // 250, 3)),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeats", type=int, default=5000)
    options = parser.parse_args()
    figures = trio.run(measure, options.repeats) | trio.run(bandwidth_errors)
    if options.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:28} {value}")


if __name__ == "__main__":
    main()
