"""Islands on the in-memory network, with models of plain numbers or real small ones."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import trio

from app.rounds.island import Island, RoundServer, RoundTiming, TrainingText, hashed
from app.rounds.log import RoundEntry, replay
from app.rounds.record import TrainingRecord, sign_training
from app.rounds.statements import OwnData, sign_data
from app.rounds.steps import LocalSteps, PipelinePlace, PipelineSteps, PipelineTerms, StepMaker
from app.training.states import StateStore
from app.training.trainer import Patience, RouteFinder
from app.training.wire import full_order
from engine.config import ModelConfig, Rope
from engine.island import IslandModel, IslandTerms, PipelineModel, first_states
from engine.model.block import WeightOptions
from engine.sources.shape import config_values
from engine.training.codecs import codec_named
from engine.training.optimiser import AdamW, Schedule
from engine.training.outer import Nesterov
from engine.training.parameters import drawn_model, part_weights
from p2p.memory.fabric import LinkProfile, MemoryFabric, open_fabric
from tests.app.hash_model import InlineDevice
from tests.app.rounds.plain_island import PLAIN, PlainIsland
from tests.app.rounds.statements import RECORD
from tests.app.swarms import identity, wall_clock

CONFIG = ModelConfig(
    family="llama", n_blocks=2, hidden_size=32, n_heads=2, n_kv_heads=1, head_dim=16, intermediate_size=64,
    vocab_size=260, context_length=64, norm_eps=1e-5, rope=Rope(),
)  # fmt: skip
SMALL = ModelConfig(
    family="llama", n_blocks=1, hidden_size=16, n_heads=1, n_kv_heads=1, head_dim=16, intermediate_size=16,
    vocab_size=260, context_length=64, norm_eps=1e-5, rope=Rope(), tied_embeddings=True,
)  # fmt: skip
CPU = WeightOptions(torch.device("cpu"), torch.float32)
TIMING = RoundTiming(
    hello_s=1.0, alive_s=4.0, grace_least_s=0.5, grace_most_s=6.0, lead_s=4.0, exchange_s=20.0, quorum_s=20.0
)
UNHURRIED = RoundTiming(hello_s=10.0, alive_s=35.0)
PATIENCE = Patience(open_s=1.0, quiet_s=0.2, probe_s=1.0, route_s=600.0)  # of pipelines
STEP_S = 0.1
LINK = LinkProfile(delay_s=0.01)
ONE_STEP: dict[str, Any] = {"every": 1, "least_every": 1, "most_every": 1, "steps": 10**5}  # rounds that cost little
WORDS = "the shoal swims and the shoal learns, fish by fish and round by round, until all of them know it. "


class Text:
    """Sequences of a short text."""

    def __init__(self, length: int = 16) -> None:
        data = (WORDS * 20).encode()
        self._sequences = [list(data[at : at + length]) for at in range(0, len(data) - length, 7)]
        self.held = self._sequences[:4]

    @property
    def count(self) -> int:
        """Number of sequences."""
        return len(self._sequences)

    def sequence(self, number: int) -> list[int]:
        """One of them."""
        return self._sequences[number]


@dataclass(frozen=True)
class Lesson:
    """What the islands of a job learn from: a shape, the weights before the first round, and a text."""

    config: ModelConfig
    vectors: Mapping[str, torch.Tensor]
    text: TrainingText
    own: Mapping[int, TrainingText] | None = None  # of each island, where texts are the members' own
    model: type[IslandModel] = IslandModel


def lesson_of(config: ModelConfig, length: int = 16) -> Lesson:
    """The usual text, learned by a real model of this shape."""
    return Lesson(config, drawn_model(config, 1), Text(length))


def plain_lesson(config: ModelConfig = PLAIN, length: int = 16) -> Lesson:
    """The usual text, learned by plain numbers, as many as a model of this shape has."""
    return replace(lesson_of(config, length), model=PlainIsland)


@dataclass
class Node:
    """One island."""

    name: str
    island: Island
    model: IslandModel
    device: InlineDevice
    scope: trio.CancelScope
    server: RoundServer
    failure: Exception | None = None
    ended: trio.Event = field(default_factory=trio.Event)  # its part, not its node


class IslandSwarm:
    """Islands of one job."""

    def __init__(
        self,
        fabric: MemoryFabric,
        nursery: trio.Nursery,
        folder: Path,
        record: TrainingRecord,
        lesson: Lesson,
        timing: RoundTiming,
    ) -> None:
        self.fabric, self._nursery, self._folder, self._lesson, self._timing = fabric, nursery, folder, lesson, timing
        founder = identity(0)
        start, _ = hashed(first_states(lesson.config, lesson.vectors))
        self.record = replace(record, founder=founder.peer_id, start=start.hex(), created_ms=int(wall_clock() * 1000))
        self.raw = sign_training(founder, self.record)
        self.nodes: dict[int, Node] = {}
        self._starts: dict[int, int] = {}

    def add(
        self,
        number: int,
        *,
        step_s: float = STEP_S,
        has_model: bool = True,
        change: Callable[[Any], None] | None = None,
        routes: RouteFinder | None = None,
        acquaintances: Iterable[str] = (),
    ) -> Node:
        """Start an island, with `routes` one of several machines; number 0 is the founder."""
        who = identity(number)
        network = self.fabric.node(who.peer_id)
        record = self.record
        terms = IslandTerms(
            Schedule(record.rate, record.steps, record.warm_up), record.clip, AdamW(weight_decay=record.weight_decay),
            Nesterov(record.outer_rate, record.outer_momentum), codec_named(record.codecs[0]),
            record.merging == "clip", rows=256, significance=record.significance,
        )  # fmt: skip
        config = self._lesson.config
        vectors = self._lesson.vectors if has_model else drawn_model(config, 2)
        model: Any = (self._lesson.model if routes is None else PipelineModel)(config, vectors, CPU, terms)
        if change is not None:
            change(model)
        device = SlowSteps(model, step_s)
        self._starts[number] = self._starts.get(number, 0) + 1
        states = StateStore(network, self._folder / f"{number}-{self._starts[number]}", lambda peer: True, in_place)
        states.serve()
        server = RoundServer(network, lambda peer: True)
        text, own_data = self._lesson.text, None
        if record.own_data:
            assert self._lesson.own is not None
            text = self._lesson.own[number]
            said = OwnData(record.id, text.count * record.length, f"text {number}", "MIT")
            own_data = sign_data(who, said, int(wall_clock() * 1000))
        steps: StepMaker = LocalSteps(model, device)
        if routes is not None:
            steps = self._pipeline(network, model, device, states, terms, routes)
        island = Island(
            network, who, record, model, text, device, states, found=self.peers, own_data=own_data, steps=steps,
            wall_ms=lambda: int(wall_clock() * 1000), timing=self._timing, in_thread=in_place,
            acquaintances=acquaintances, rng=random.Random(number),
        )  # fmt: skip
        if isinstance(steps, PipelineSteps):
            steps.validated = island.validated
        server.islands[record.id] = island
        server.records[record.id] = self.raw
        server.serve()
        node = self.nodes[number] = Node(who.peer_id, island, model, device, trio.CancelScope(), server)
        self._nursery.start_soon(self._run, node)
        return node

    def _pipeline(
        self,
        network: Any,
        model: PipelineModel,
        device: InlineDevice,
        states: StateStore,
        terms: IslandTerms,
        routes: RouteFinder,
    ) -> PipelineSteps:
        config = self._lesson.config
        order = full_order(
            config_values(config), blocks=config.n_blocks, optimiser="adamw", weight_decay=self.record.weight_decay,
            rows=terms.rows, wire="f32",
        )  # fmt: skip
        how = PipelineTerms(order, terms.schedule.at, terms.clip, 4 * part_weights(config, "block.0"))
        return PipelineSteps(network, model, device, states, how, PipelinePlace(routes, patience=PATIENCE))

    async def _run(self, node: Node) -> None:
        with node.scope:
            try:
                await node.island.begin()
                await node.island.run()
            except Exception as error:
                node.failure = error
            if not node.island.is_finished:  # others may still have to ask a finished one
                node.server.islands.clear()
            node.ended.set()

    def peers(self) -> list[str]:
        """Everybody in the swarm."""
        return [identity(number).peer_id for number in range(max(8, 1 + max(self._starts)))]

    def kill(self, number: int) -> None:
        """Crash an island."""
        node = self.nodes.pop(number)
        node.scope.cancel()
        self.fabric.kill(node.name)

    async def until(self, holds: Callable[[], bool], within_s: float = 600) -> None:
        """Wait until something holds; fails where it takes too long or an island failed."""
        deadline = trio.current_time() + within_s
        while not holds():
            assert trio.current_time() < deadline, f"not within {within_s} s: {self.words()}"
            await trio.sleep(0.25)

    async def finished(self, *numbers: int, within_s: float = 600) -> None:
        """Wait until islands have finished the job, and check that they agree."""
        islands = [self.nodes[number].island for number in numbers]
        await self.until(
            lambda: all(island.is_finished for island in islands) and len({island.head for island in islands}) == 1,
            within_s,
        )
        self.agree(*numbers)

    def agree(self, *numbers: int) -> None:
        """Logs and states are the same, and the logs can be replayed."""
        islands = [self.nodes[number].island for number in numbers]
        assert len({tuple(entry.hash for entry in island.log) for island in islands}) == 1, self.words()
        for number in numbers:
            node = self.nodes[number]
            standing = replay(self.record, node.island.log)
            assert hashed(node.model.states())[0] == standing.root == node.island.standing.root

    def words(self) -> str:
        """Where all islands are."""
        return "; ".join(
            f"{number}: round {node.island.standing.round} members {len(node.island.standing.members)} "
            f"{node.failure!r} {node.island.figures.waiting}"
            for number, node in self.nodes.items()
        )


async def in_place(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function without a thread, for which the simulated clock would not wait."""
    await trio.lowlevel.checkpoint()
    return function(*args)


class SlowSteps(InlineDevice):
    """A device on which steps take a while."""

    def __init__(self, model: IslandModel, step_s: float) -> None:
        super().__init__()
        self._model, self.step_s = model, step_s

    async def run_later(self, function: Callable[..., Any], *args: Any) -> Any:
        if getattr(function, "__name__", "") == "step":
            await trio.sleep(self.step_s)
        return await self.run(function, *args)


def members_of(log: list[RoundEntry]) -> list[int]:
    """How many took part in each round."""
    return [len(entry.list.members) for entry in log]


@asynccontextmanager
async def open_islands(
    folder: Path,
    *numbers: int,
    profile: LinkProfile = LINK,
    lesson: Lesson | None = None,
    timing: RoundTiming = TIMING,
    step_s: float = STEP_S,
    seed: int = 1,
    **changes: Any,
) -> AsyncIterator[IslandSwarm]:
    """Islands of a job whose rounds have five steps; `seed` is the network's, `changes` are to the record.

    Without a lesson their model is one of plain numbers, whose steps take the least time.
    """
    fixed: dict[str, Any] = {"every": 5, "least_every": 5, "most_every": 5, "steps": 25, "batch": 2, "rate": 1e-2}
    fixed |= {"warm_up": 0, "wire": "int8"}
    record = replace(RECORD, **{**fixed, **changes})
    lesson = lesson or plain_lesson(length=record.length)
    async with open_fabric(seed, profile) as fabric, trio.open_nursery() as nursery:
        swarm = IslandSwarm(fabric, nursery, folder, record, lesson, timing)
        for number in numbers:
            swarm.add(number, step_s=step_s)
        yield swarm
        nursery.cancel_scope.cancel()
