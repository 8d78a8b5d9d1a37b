"""Nodes that train real blocks of a small random model on the in-memory network, and the owner of a job."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
import trio

from app.core.network import Network
from app.core.span import Span
from app.routing.route import Hop, NoRoute, Route
from app.training.activations import ActivationDisk
from app.training.audits import Caution
from app.training.hop import TrainingServer, TrainingTerms
from app.training.states import StateStore
from app.training.trainer import JobTerms, Patience, RouteFinder, StepDone, SwarmTrainer
from app.training.wiring import blocks_of, order_of
from engine.model.ends import load_ends
from engine.model.span import SpanRunner, load_span
from engine.sources.base import ModelSource
from engine.training.adapters import AdapterSettings
from engine.training.head import TrainingEnds
from engine.training.local_trainer import LocalTrainer, MicroBatch
from engine.training.optimiser import AdamW
from engine.training_runner import OwnerEnds, StateSample, sums_bytes, version_of
from p2p.errors import PeerUnreachable
from p2p.memory.fabric import LinkProfile, MemoryFabric, open_fabric
from tests.app.hash_model import InlineDevice
from tests.engine.training import OPTIONS, SCHEDULE, micro_batch, trainer

SETTINGS = AdapterSettings(rank=4, alpha=8.0, seed=3)
PLAIN = {"caution": Caution(clips=False, audit_every=None)}  # terms of jobs whose sums are just added up
ALL = (0, 8)  # the blocks of the model
PATIENCE = Patience(open_s=1.0, quiet_s=0.2, probe_s=0.3, route_s=2.0)
UNHURRIED = replace(PATIENCE, open_s=5.0, quiet_s=2.0, probe_s=20.0)  # nobody is taken for dead on a busy machine


def batches_of(version: int) -> list[MicroBatch]:
    """Three micro-batches of unequal shape for each step."""
    shapes = ((2, 7), (1, 12), (3, 5))
    made = [micro_batch(batch, length, 100 * version + i) for i, (batch, length) in enumerate(shapes)]
    # within the vocabulary of the tiny model; labels that do not count are negative
    return [MicroBatch(ids % 256, torch.where(labels < 0, labels, labels % 256)) for ids, labels in made]


Batches = Callable[[int], Sequence[MicroBatch]]
States = dict[int, bytes]  # of all blocks

_STEPS: list[tuple[ModelSource, AdapterSettings, Batches, Iterator[tuple[Any, States]], list[tuple[Any, States]]]] = []


def undisturbed(
    source: ModelSource, steps: int, settings: AdapterSettings = SETTINGS, batches: Batches = batches_of
) -> tuple[list[Any], States]:
    """The first steps of one process, and the states after them; each step is made once for a source."""
    for known in _STEPS:
        if known[0] is source and known[1:3] == (settings, batches):
            break
    else:
        known = source, settings, batches, _steps(trainer(source, settings), batches), []
        _STEPS.append(known)
    *_, coming, made = known
    made += islice(coming, max(0, steps - len(made)))
    return [step for step, _ in made[:steps]], made[steps - 1][1]


def _steps(job: LocalTrainer, batches: Batches) -> Iterator[tuple[Any, States]]:
    for version in count():
        yield job.step(batches(version)), job.states()


_SPANS: list[tuple[ModelSource, int, int, SpanRunner]] = []


def loaded(source: ModelSource, start: int, stop: int) -> SpanRunner:
    """Blocks of a model, loaded once for all nodes and tests: training leaves a model's weights as they are."""
    for known in _SPANS:
        if known[0] is source and known[1:3] == (start, stop):
            return known[3]
    _SPANS.append((source, start, stop, load_span(source, start, stop, OPTIONS)))
    return _SPANS[-1][3]


class CountingDevice(InlineDevice):
    """Counts calls that go before replies, and calls that give way to them."""

    now = later = 0

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        self.now += 1
        return await super().run(function, *args)

    async def run_later(self, function: Callable[..., Any], *args: Any) -> Any:
        self.later += 1
        return await InlineDevice.run(self, function, *args)


@dataclass
class Node:
    """One node that trains blocks."""

    name: str
    span: Span
    server: TrainingServer
    device: CountingDevice
    states: StateStore
    blocks: list[Any]  # every `JobBlocks` that was made here
    scope: trio.CancelScope
    changes: list[Callable[[Any], None]] = field(default_factory=list)  # made to blocks when a job opens


class JobSwarm:
    """Nodes with blocks of one model, and jobs."""

    def __init__(self, fabric: MemoryFabric, nursery: trio.Nursery, source: ModelSource, folder: Path) -> None:
        self.fabric, self.nursery, self.source, self.folder = fabric, nursery, source, folder
        self.nodes: dict[str, Node] = {}
        self.before_step: Callable[[Any], None] = lambda blocks: None
        self.disks: dict[str, ActivationDisk] = {}
        self.disk_bytes: dict[str, int] = {}  # node -> its limit on activations, if it has one

    async def train(
        self,
        name: str,
        start: int,
        stop: int,
        terms: TrainingTerms | None = None,
        network: Network | None = None,
        device: CountingDevice | None = None,
    ) -> Node:
        """Start a node that trains these blocks, on the in-memory network unless another is given."""
        network = network or self.fabric.node(name)
        states = StateStore(network, self.folder / name, lambda peer: True, in_thread)
        device = device or CountingDevice()
        disk = self.activations(name)
        server = TrainingServer(network, device, states, lambda: terms or TrainingTerms(), activations=disk)
        scope: trio.CancelScope = await self.nursery.start(_run, server)
        node = Node(name, Span(start, stop), server, device, states, [], scope)
        make = blocks_of(loaded(self.source, start, stop))

        def remember(order: Any, spare: int) -> Any:
            blocks: Any = make(order, spare)
            step = blocks.step

            def stepped(*args: float) -> None:
                self.before_step(blocks)
                step(*args)

            blocks.step = stepped
            node.blocks.append(blocks)
            for change in node.changes:
                change(blocks)
            return blocks

        await server.host(remember)
        self.nodes[network.peer_id] = node
        return node

    def activations(self, name: str) -> ActivationDisk:
        """A new place for the activations that a node keeps, after an earlier one was killed if there was one."""
        self.disks[name] = ActivationDisk(self.folder / f"{name}.activations", lambda: self.disk_bytes.get(name, 2**40))
        return self.disks[name]

    def kill(self, name: str) -> None:
        """Crash a node."""
        self.fabric.kill(name)
        self.nodes.pop(name).scope.cancel()

    def kill_within(self, name: str, method: str, call: int) -> None:
        """Crash a node in a call of a method of a job's blocks, from 1; it does not come back."""
        calls = 0

        def change(blocks: Any) -> None:
            function = getattr(blocks, method)

            def dying(*args: Any) -> Any:
                nonlocal calls
                calls += 1
                result = function(*args)
                if calls == call:
                    self.kill(name)
                return result

            setattr(blocks, method, dying)

        self.nodes[name].changes.append(change)

    def separate(self, one: str, other: str) -> None:
        """Let two nodes fail to reach each other; everybody else reaches both."""
        for name, far in ((one, other), (other, one)):
            network = self.fabric.nodes[name]
            network.open = partial(_open_but, network.open, far)  # type: ignore[method-assign]

    def spoil(self, name: str, value: float, after_steps: int) -> None:
        """Let a node send wrong numbers backwards."""

        def change(blocks: Any) -> None:
            function, sent = blocks.backward, 0

            def spoilt(block: int, *args: Any) -> Any:
                nonlocal sent
                result = function(block, *args)
                sent += block == blocks.start
                return result * value if block == blocks.start and sent > after_steps * len(batches_of(0)) else result

            blocks.backward = spoilt
            blocks.data = lambda rows, wire: bytes(rows.numpy().tobytes())  # does not check what it sends

        self.nodes[name].changes.append(change)

    async def route(self, avoid: frozenset[str]) -> Route:
        """The first nodes, by name, that follow each other; those that died are still known."""
        hops: list[Hop] = []
        while (block := hops[-1].span.stop if hops else 0) < self.source.config.n_blocks:
            for name, node in sorted(self.nodes.items()):
                if name not in avoid and block in node.span:
                    hops.append(Hop(name, Span(block, node.span.stop)))
                    break
            else:
                raise NoRoute(block)
        return tuple(hops)

    def holders(self, route: Route, avoid: frozenset[str]) -> list[Hop]:
        """All nodes with all of their blocks."""
        return [Hop(name, node.span) for name, node in sorted(self.nodes.items()) if name not in avoid]

    def poison(self, name: str, attack: Callable[[torch.Tensor], torch.Tensor], after: int = 0) -> None:
        """Let a node hand over other sums than it has, after it handed over right ones so many times."""

        def change(blocks: Any) -> None:
            take, times = blocks.take_sums, 0

            def poisoned(block: int) -> bytes:
                nonlocal times
                times += block == blocks.start
                sums = torch.frombuffer(bytearray(take(block)), dtype=torch.float32)
                return bytes((attack(sums) if times > after else sums).numpy().tobytes())

            blocks.take_sums = poisoned

        self.nodes[name].changes.append(change)

    def owner(
        self, name: str = "owner", *, every: int = 10, settings: AdapterSettings = SETTINGS, **more: Any
    ) -> SwarmTrainer:
        """A node that owns a job; one of another name than the others trains nothing itself."""
        network: Network = more.pop("network", None) or self.fabric.nodes.get(name) or self.fabric.node(name)
        own = self.nodes.get(name)  # a node that trains blocks of its own job
        states = StateStore(network, self.folder / name, lambda peer: True, in_thread) if own is None else own.states
        states.serve()
        more |= {} if own is None else {"own_server": own.server.attend}
        config = self.source.config
        order = order_of(settings, blocks=config.n_blocks, rows=more.pop("rows", 64), wire=more.pop("wire", "f32"))
        rate_of = more.pop("rate_of", SCHEDULE.at)
        terms = JobTerms(
            order, rate_of, snapshot_every=every, sums_bytes=sums_bytes(settings, config),
            version_of=partial(version_of, settings=settings, config=config),
            sample_of=partial(StateSample, settings=settings, config=config, optimiser=AdamW()),
        )  # fmt: skip
        terms = replace(terms, **more.pop("terms", {}))
        ends = OwnerEnds(TrainingEnds(load_ends(self.source, OPTIONS)), config.hidden_size)
        routes: RouteFinder = more.pop("routes", self.route)
        patience = more.pop("patience", PATIENCE)
        more.setdefault("activations", self.activations(f"{name}-owns"))
        return SwarmTrainer(network, ends, InlineDevice(), states, routes, terms, patience=patience, **more)


async def in_thread(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function in a thread, for which a patient clock waits."""
    return await trio.to_thread.run_sync(function, *args)


async def _open_but(opened: Any, far: str, peer: str, protocol: str, *, timeout_s: float = 10.0) -> Any:
    if peer == far:
        raise PeerUnreachable(f"{peer} cannot be reached")
    return await opened(peer, protocol, timeout_s=timeout_s)


async def _run(server: TrainingServer, task_status: Any) -> None:
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            await nursery.start(server.run)
            task_status.started(scope)


@asynccontextmanager
async def open_job_swarm(
    source: ModelSource, folder: Path, *spans: tuple[int, int], delay_s: float = 0.0
) -> AsyncIterator[JobSwarm]:
    """A swarm of nodes `n0`, `n1`, … that train these spans."""
    async with open_fabric(profile=LinkProfile(delay_s=delay_s)) as fabric, trio.open_nursery() as nursery:
        swarm = JobSwarm(fabric, nursery, source, folder)
        for index, (start, stop) in enumerate(spans):
            await swarm.train(f"n{index}", start, stop)
        yield swarm
        nursery.cancel_scope.cancel()


class Losses:
    """The latest result of each step, and what happens after some of them."""

    def __init__(self, after: dict[int, Callable[[], object]] | None = None) -> None:
        self.steps: dict[int, StepDone] = {}
        self.repeated = 0
        self._after = dict(after or {})

    def __call__(self, step: StepDone) -> None:
        if step.version in self.steps:
            self.repeated += 1
            assert self.steps[step.version] == step, "a step that is repeated gives what it gave before"
        self.steps[step.version] = step
        self._after.pop(step.version, lambda: None)()

    def check(self, wanted: Sequence[Any]) -> None:
        """The steps are exactly these."""
        assert [self.steps[version] for version in sorted(self.steps)] == [
            StepDone(one.version, one.loss, one.tokens, one.norm, one.rate) for one in wanted
        ]
