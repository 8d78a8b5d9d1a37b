"""A swarm on this machine to look at: three nodes in processes of their own, one of which is killed in a reply.

It starts and ends the processes and asks them through their API; what is shown of it is for `app.cli.demo`.
"""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.api.client import Client, client_of
from app.core.errors import AppError

NODES = 3
SWARM = "demo"
READY_S = 180.0
COVERED_S = 30.0
END_S = 5.0


class DemoFailed(AppError):
    """A node of the demonstration did not come up; the message says what it said."""


@dataclass(frozen=True)
class Place:
    """One node's part of the map."""

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
        self._complaints: list[str] = []

    def start(self, memory_bytes: int, invite: str | None) -> None:
        """Begin to come up, hosting what fits in so much memory."""
        flags = ["--listen=/ip4/127.0.0.1/tcp/0", "--api-port=0", "--discovery=invite", "--device=cpu"]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "app.cli", "serve", *flags, f"--max-vram={memory_bytes}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(self.home, {} if invite is None else {"SHOAL_INVITE": invite}),
            text=True,
            start_new_session=True,  # Ctrl-C is for the demonstration, which ends its nodes itself
        )
        for stream, heard in ((self._process.stdout, self._lines.put), (self._process.stderr, self._complain)):
            threading.Thread(target=_read, args=(stream, heard), daemon=True).start()

    def _complain(self, line: str) -> None:
        self._complaints = [*self._complaints[-4:], line]

    def wait_ready(self) -> None:
        """Wait for its `ready` line."""
        assert self._process is not None, "only what was started gets ready"
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                if self._lines.get(timeout=0.2).startswith("ready "):
                    self.peer = self.client.snapshot().peer_id
                    return
            if self._process.poll() is not None:
                raise DemoFailed(f"node {self.number} ended at once: {' '.join(self._complaints) or 'it said nothing'}")
        raise DemoFailed(f"node {self.number} did not come up in {READY_S:.0f} s: is this machine very busy?")

    @property
    def client(self) -> Client:
        """Its API."""
        return client_of(self.home)

    def kill(self) -> None:
        """End it at once, without a goodbye."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def ask_to_end(self) -> None:
        """Let it leave in order; `kill` follows where it takes too long."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def close(self, by: float) -> None:
        """Wait for its end until then, and no longer."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(max(0.0, by - time.monotonic()))
            self.kill()


def _read(stream: Any, heard: Any) -> None:
    with stream:
        for line in stream:
            heard(line.rstrip("\n"))


def environment(home: Path, more: Mapping[str, str]) -> dict[str, str]:
    """What a node of the demonstration sees: none of the person's own settings but the cache of weights."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_") or name == "SHOAL_CACHE"}
    # Three nodes share this machine's cores: threads that wait for each other would slow all of them down.
    threads = str(max(1, (os.cpu_count() or 1) // NODES))
    return {"OMP_NUM_THREADS": threads, **kept, "SHOAL_HOME": str(home), **more}


class DemoSwarm:
    """Three nodes; made by `open_demo`."""

    def __init__(self, folder: Path) -> None:
        self.nodes = [DemoNode(number, folder / f"node{number}") for number in range(1, NODES + 1)]

    def found(self, model: str) -> None:
        """Let the first node found a swarm of a model; its progress goes to stderr."""
        command = [sys.executable, "-m", "app.cli", "create", SWARM, "--model", model]
        done = subprocess.run(
            command, env=environment(self.nodes[0].home, {}), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise DemoFailed(f"the model {model} cannot be had: {done.stderr.strip().removeprefix('shoal: ')}")

    def start(self, memory_bytes: int) -> Iterator[DemoNode]:
        """Start all nodes, each with so much memory; yields each when it serves."""
        first, *others = self.nodes
        first.start(memory_bytes, None)
        first.wait_ready()
        yield first
        invite = str(first.client.post("/api/invite", {})["invite"])
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
                raise DemoFailed("the nodes did not share the blocks out among themselves; run it again")
            time.sleep(0.1)

    def _sees_all(self, node: DemoNode) -> bool:
        holders = [block["holders"] for block in node.client.get("/api/blocks")]
        return all(holders) and len({holder["peer"] for held in holders for holder in held}) == NODES

    def places(self) -> list[Place]:
        """Who holds what now."""
        places = []
        for node in self.nodes:
            seen = node.client.snapshot()
            if seen.start is not None and seen.stop is not None:
                places.append(Place(node.number, node.peer, seen.start, seen.stop))
        return places

    def node(self, number: int) -> DemoNode:
        """The node with this number."""
        return self.nodes[number - 1]

    def ask(self, asker: int, prompt: str, max_tokens: int) -> Iterator[dict[str, Any]]:
        """The pieces of a greedy reply to one node's user."""
        messages = [{"role": "user", "content": prompt}]
        return self.node(asker).client.chat({"messages": messages, "max_tokens": max_tokens, "temperature": 0.0})


def choose_asker(places: Sequence[Place], blocks: int) -> int:
    """The node that asks: one that, with any one of the others, holds all blocks, so that either of them may die."""
    for asker in places:
        others = [place for place in places if place is not asker]
        if all(_cover(asker, other, blocks) for other in others):
            return asker.number
    return places[0].number


def _cover(a: Place, b: Place, blocks: int) -> bool:
    first, second = sorted((a, b), key=lambda place: place.start)
    return first.start == 0 and first.stop >= second.start and max(first.stop, second.stop) == blocks


def memory_for(model: str, share: float) -> tuple[int, int]:
    """A memory limit under which a node holds this share of a model's blocks, and how many blocks the model has."""
    from app.config.home import cache_folder
    from engine.hosting import plan_hosting
    from engine.sources.opening import open_source

    config = open_source(model, cache_folder()).config
    budget = plan_hosting(config, "cpu", None).budget
    if not budget.blocks:
        raise DemoFailed(f"this machine has no room for the model: {budget.reason}")
    wanted = -(-config.n_blocks * share // 1)
    # A quarter of what a node may take is for conversations; half a block to spare hides rounding.
    return int((budget.workspace_bytes + (wanted + 0.5) * budget.weight_bytes_per_block) / 0.75), config.n_blocks


@contextlib.contextmanager
def open_demo() -> Iterator[DemoSwarm]:
    """A place for a demonstration; all of it is gone afterwards, whatever happened."""
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
