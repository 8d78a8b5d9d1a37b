"""Real nodes for the swarm bench: three that share a model's blocks, an asker that hosts nothing, and delayed ways.

Every node is a `shoal serve` process of its own. Where a delay is asked for, each node advertises a proxy in its stead,
so that every connection goes through one.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from app.api.client import Client, client_of
from tests.bench.delay import DelayProxy, delay_proxy
from tests.process.node_process import Place, Serving, wait_until

READY_S = 240.0  # for nodes that load at once on a busy machine
MEMORY = "215MB"  # ten of the starter model's 30 blocks, and their cache


@dataclass
class Told:
    """One reply as its reader saw it."""

    times: list[float] = field(default_factory=list)  # of each token
    done: dict[str, Any] = field(default_factory=dict)


class BenchSwarm:
    """A running swarm."""

    def __init__(self, asker: Serving, nodes: Sequence[Serving], proxies: Sequence[DelayProxy]) -> None:
        self.proxies = proxies
        self.client = client_of(asker.place.home)
        self.nodes: list[Client] = [client_of(node.place.home) for node in nodes]

    def reply(self, text: str, tokens: int, told: Told | None = None) -> Told:
        """A whole greedy reply."""
        told = told or Told()
        request = {"messages": [{"role": "user", "content": text}], "max_tokens": tokens, "temperature": 0.0}
        for piece in self.client.chat(request):
            if "done" in piece:
                told.done = piece["done"]
            elif "text" in piece:
                told.times.append(time.perf_counter())
        return told

    def replies(self, texts: Sequence[str], tokens: int) -> tuple[list[Told], list[float]]:
        """Replies to all of these at once, and the mean rows of a step at each node in the middle of them."""
        told = [Told() for _ in texts]
        threads = [
            threading.Thread(target=self.reply, args=(text, tokens, own)) for text, own in zip(texts, told, strict=True)
        ]
        for thread in threads:
            thread.start()
        while threads[0].is_alive() and len(told[0].times) < tokens // 2:
            time.sleep(0.1)
        rows = [round(node.snapshot().flow.batch_rows, 2) for node in self.nodes]
        for thread in threads:
            thread.join()
        assert all(own.done for own in told), "a reply failed"
        return told, rows

    def carried_bytes(self) -> int:
        """All that went through the proxies."""
        return sum(proxy.carried_bytes for proxy in self.proxies)

    def spans(self) -> list[tuple[int, int]]:
        """What each node holds."""
        statuses = [node.get("/control/status") for node in self.nodes]
        return sorted((status["start"], status["stop"]) for status in statuses)


@contextmanager
def open_bench_swarm(
    folder: Path,
    cache: Path,
    model: str,
    *,
    nodes: int = 3,
    rtt_s: float = 0.0,
    memory: str = MEMORY,
    spans: Sequence[str] = (),
    keep_sessions: int | None = 0,
    apart: bool = False,
    variables: Mapping[str, str] = {},
) -> Iterator[BenchSwarm]:
    """A swarm that serves the whole model; `spans` pins the nodes' blocks, else their memory makes them share it.

    Replies to the same prompt are compared: unless `keep_sessions` says so, none begins with what another one read.
    None leaves that to the asker's setting. With `apart`, a node starts when the one before serves, so that it measures
    itself undisturbed. `variables` are for the environment of all nodes.
    """
    ports = [free_port() for _ in range(nodes + 1)]
    with ExitStack() as stack:
        proxies = stack.enter_context(open_proxies(ports, rtt_s)) if rtt_s else []
        ways = [
            [f"--listen=/ip4/127.0.0.1/tcp/{port}"]
            + ([f"--advertise=/ip4/127.0.0.1/tcp/{proxies[index].port}"] if proxies else [])
            for index, port in enumerate(ports)
        ]
        places = [Place(folder / f"node{index}", cache) for index in range(nodes + 1)]
        assert places[0].shoal("create", "bench", "--model", model).status == 0
        kept = {} if keep_sessions is None else {"SHOAL_KEEP_SESSIONS": str(keep_sessions)}
        kept |= variables
        asker = stack.enter_context(Serving(places[0], "--discovery=invite", *ways[0], **kept))
        asker.ready()
        invite = places[0].shoal("invite").out.strip()
        pins = [[f"--blocks={span}"] for span in spans] or [[]] * nodes
        servers = []
        for place, way, pin in zip(places[1:], ways[1:], pins, strict=True):
            flags = ("--discovery=invite", "--device=cpu", *way, *pin)
            servers.append(
                stack.enter_context(Serving(place, *flags, max_vram=memory, SHOAL_INVITE=invite, **variables))
            )
            if apart:
                servers[-1].ready(READY_S)
        for server in () if apart else servers:
            server.ready(READY_S)
        client = client_of(places[0].home)
        wait_until(lambda: is_covered(client, nodes), "every block is held")
        yield BenchSwarm(asker, servers, proxies)


def is_covered(client: Client, nodes: int) -> bool:
    """Whether every block is held and every node serves."""
    holders = [block["holders"] for block in client.get("/control/blocks")]
    return all(holders) and len({holder["peer"] for block in holders for holder in block}) == nodes


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def open_proxies(ports: Sequence[int], rtt_s: float, bytes_per_s: float = math.inf) -> Iterator[list[DelayProxy]]:
    """A proxy to each port, on a loop of their own."""
    proxies: list[DelayProxy] = []
    token: trio.lowlevel.TrioToken | None = None
    up, down = threading.Event(), trio.Event()

    async def run() -> None:
        nonlocal token
        token = trio.lowlevel.current_trio_token()
        async with AsyncExitStack() as stack:
            for port in ports:
                proxies.append(await stack.enter_async_context(delay_proxy(port, rtt_s, bytes_per_s)))
            up.set()
            await down.wait()

    thread = threading.Thread(target=trio.run, args=(run,), daemon=True)
    thread.start()
    up.wait()
    try:
        yield proxies
    finally:
        assert token is not None
        token.run_sync_soon(down.set)
        thread.join()
