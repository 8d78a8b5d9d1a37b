"""The swarm of `shoal demo`: three `shoal serve` processes on this machine, each with a home folder of its own.

It starts and ends the processes and asks them through their API; `app.cli.demo` prints what happens.
"""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.api.client import Client, client_of
from app.core.errors import AppError
from p2p.platform import apart_from_terminal, module_command

NODES = 3
SWARM = "demo"
READY_S = 180.0  # for a node to print `ready`
COVERED_S = 90.0  # for all nodes to see all blocks hosted
END_S = 5.0  # for all nodes to leave, before they are killed


class DemoFailed(AppError):
    """The demo could not be set up; the message says why, with a node's last output if it ended."""


@dataclass(frozen=True)
class Place:
    """The blocks `start:stop` that one node hosts."""

    number: int  # from 1
    peer: str
    start: int
    stop: int


class DemoNode:
    """One `shoal serve` process with a home folder of its own."""

    def __init__(self, number: int, home: Path) -> None:
        self.number, self.home = number, home
        self.peer = ""
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str] = queue.Queue()
        self._last_errors: list[str] = []

    def start(self, memory_bytes: int, invite: str | None) -> None:
        """Start the process, which hosts what fits in `memory_bytes`; `wait_ready` waits for it."""
        flags = ["--listen=/ip4/127.0.0.1/tcp/0", "--api-port=0", "--discovery=invite", "--device=cpu"]
        self._process = subprocess.Popen(
            module_command("app.cli", "serve", *flags, f"--max-vram={memory_bytes}"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(self.home, {} if invite is None else {"SHOAL_INVITE": invite}),
            text=True,
            **apart_from_terminal(),  # so that Ctrl-C reaches only the demo, which ends its nodes itself
        )
        for stream, on_line in ((self._process.stdout, self._lines.put), (self._process.stderr, self._keep_error)):
            threading.Thread(target=_read, args=(stream, on_line), daemon=True).start()

    def _keep_error(self, line: str) -> None:
        self._last_errors = [*self._last_errors[-4:], line]

    def wait_ready(self) -> None:
        """Wait for the node's `ready` line; raises `DemoFailed` if it ends or takes longer than `READY_S`."""
        assert self._process is not None, "`start` comes first"
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                if self._lines.get(timeout=0.2).startswith("ready "):
                    self.peer = self.client.snapshot().peer_id
                    return
            if self._process.poll() is not None:
                raise DemoFailed(f"node {self.number} failed to start: {' '.join(self._last_errors) or 'no output'}")
        raise DemoFailed(f"node {self.number} was not ready after {READY_S:.0f} s: is this machine very busy?")

    @property
    def client(self) -> Client:
        """A client for the node's API."""
        return client_of(self.home)

    def kill(self) -> None:
        """Kill the process, which cannot say goodbye to the swarm."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def ask_to_end(self) -> None:
        """Ask the process to leave the swarm and end; `close` kills it if that takes too long."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def close(self, by: float) -> None:
        """Wait for the process to end until the monotonic time `by`, then kill it."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(max(0.0, by - time.monotonic()))
            self.kill()


def _read(stream: Any, on_line: Any) -> None:
    with stream:
        for line in stream:
            on_line(line.rstrip("\n"))


def environment(home: Path, more: Mapping[str, str]) -> dict[str, str]:
    """Return a demo node's environment: without the user's `SHOAL_` settings, except the cache of weights."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_") or name == "SHOAL_CACHE"}
    # The nodes share this machine's cores: more threads than cores would wait for each other.
    threads = str(max(1, (os.cpu_count() or 1) // NODES))
    return {"OMP_NUM_THREADS": threads, **kept, "SHOAL_HOME": str(home), **more}


class DemoSwarm:
    """The demo's nodes; `open_demo` makes and ends it."""

    def __init__(self, folder: Path) -> None:
        self.nodes = [DemoNode(number, folder / f"node{number}") for number in range(1, NODES + 1)]

    def found(self, model: str) -> None:
        """Create the swarm in the first node's home folder; raises `DemoFailed` if the model cannot be opened."""
        command = module_command("app.cli", "create", SWARM, "--model", model)
        done = subprocess.run(
            command, env=environment(self.nodes[0].home, {}), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise DemoFailed(f"cannot use the model {model}: {done.stderr.strip().removeprefix('shoal: ')}")

    def start(self, memory_bytes: int) -> Iterator[DemoNode]:
        """Start all nodes with this memory limit each; yields each node once it is ready."""
        first, *others = self.nodes
        first.start(memory_bytes, None)
        first.wait_ready()
        yield first
        invite = str(first.client.post("/control/invite", {})["invite"])
        for node in others:
            node.start(memory_bytes, invite)
        for node in others:
            node.wait_ready()
            yield node
        self._wait_covered()

    def _wait_covered(self) -> None:
        deadline = time.monotonic() + COVERED_S
        while not all(self._sees_all(node) for node in self.nodes):
            if time.monotonic() > deadline:
                raise DemoFailed(f"the nodes did not cover all blocks within {COVERED_S:.0f} s: run the demo again")
            time.sleep(0.1)

    def _sees_all(self, node: DemoNode) -> bool:
        holders = [block["holders"] for block in node.client.get("/control/blocks")]
        return all(holders) and len({holder["peer"] for held in holders for holder in held}) == NODES

    def places(self) -> list[Place]:
        """Return the blocks that each node hosts now."""
        places = []
        for node in self.nodes:
            seen = node.client.snapshot()
            if seen.start is not None and seen.stop is not None:
                places.append(Place(node.number, node.peer, seen.start, seen.stop))
        return places

    def node(self, number: int) -> DemoNode:
        """Return the node with this number, from 1."""
        return self.nodes[number - 1]

    def ask(self, asker: int, prompt: str, max_tokens: int) -> Iterator[dict[str, Any]]:
        """Yield the pieces of a greedy reply that one node asks for."""
        messages = [{"role": "user", "content": prompt}]
        return self.node(asker).client.chat({"messages": messages, "max_tokens": max_tokens, "temperature": 0.0})


def choose_asker(places: Sequence[Place], blocks: int) -> int:
    """Choose the node that asks: one that with any single other node holds all blocks, so that any other may die."""
    for asker in places:
        others = [place for place in places if place is not asker]
        if all(_cover(asker, other, blocks) for other in others):
            return asker.number
    return places[0].number


def _cover(a: Place, b: Place, blocks: int) -> bool:
    first, second = sorted((a, b), key=lambda place: place.start)
    return first.start == 0 and first.stop >= second.start and max(first.stop, second.stop) == blocks


def memory_for(model: str, share: float) -> tuple[int, int]:
    """Return a memory limit with which a node hosts this share of a model's blocks, and the number of its blocks."""
    from app.config.home import cache_folder
    from engine.hosting import HostingWish, plan_hosting, source_kind
    from engine.sources.opening import open_source
    from engine.stored_form import source_bytes

    source = open_source(model, cache_folder())
    config = source.config
    budget = plan_hosting(config, source_kind(source), HostingWish("cpu"), source_bytes(source)).budget
    if not budget.blocks:
        raise DemoFailed(f"this machine has no room for the model: {budget.reason}")
    wanted = -(-config.n_blocks * share // 1)
    # A quarter of a node's memory is for the KV cache; half a block to spare absorbs rounding.
    return int((budget.workspace_bytes + (wanted + 0.5) * budget.weight_bytes_per_block) / 0.75), config.n_blocks


@contextlib.contextmanager
def open_demo() -> Iterator[DemoSwarm]:
    """Make a demo swarm in a temporary folder; its processes and files are removed afterwards, even after an error."""
    with tempfile.TemporaryDirectory(prefix="shoal-demo-", ignore_cleanup_errors=True) as folder:
        swarm = DemoSwarm(Path(folder))
        try:
            yield swarm
        finally:
            for node in swarm.nodes:
                node.ask_to_end()
            deadline = time.monotonic() + END_S
            for node in swarm.nodes:
                node.close(deadline)
