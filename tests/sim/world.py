"""What a simulated swarm consists of and what happens to it, drawn from a seed. Knows nothing of how it is run."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Literal

CRASHES = 0.5  # the share of leaving nodes that say nothing


@dataclass(frozen=True)
class NodeSpec:
    """One machine: how much it holds, how fast it is, how long it loads, and where it stands."""

    number: int
    blocks: int
    tokens_per_s: float  # through all the blocks that fit
    load_s: float  # for all the blocks that fit, from its disk or from others
    place: tuple[float, float]  # on a map of link delays, in seconds

    def link_s(self, other: NodeSpec) -> float:
        """One way between two machines."""
        return 0.002 + math.dist(self.place, other.place)


@dataclass(frozen=True)
class Churn:
    """A machine comes or goes."""

    at_s: float
    kind: Literal["join", "crash", "leave"]
    spec: NodeSpec


@dataclass(frozen=True)
class World:
    """How many machines of which kinds, holding a model of how many blocks, for how long."""

    seed: int = 1
    nodes: int = 200
    n_blocks: int = 80
    hours: float = 6.0
    churn_s: float = 30.0  # between two nodes that come or go; 0: nobody does
    memory: tuple[int, int] = (2, 40)
    tokens_per_s: tuple[float, float] = (5.0, 50.0)
    shared_work: bool = False  # tokens/s falls with the number of blocks held, as it does on one kind of device
    arrival_s: float = 20.0  # the first nodes come within this time

    @property
    def duration_s(self) -> float:
        """Seconds from the first node to the end."""
        return self.hours * 3600

    def events(self) -> list[Churn]:
        """All that happens, in order."""
        rng = random.Random(f"world/{self.seed}")
        events: list[Churn] = []
        present: list[NodeSpec] = []
        for number in range(self.nodes):
            present.append(self._machine(number, rng))
            events.append(Churn(rng.uniform(0, self.arrival_s) if number else 0.0, "join", present[-1]))
        number, at_s = self.nodes, self.churn_s
        while self.churn_s and at_s < self.duration_s:
            if rng.random() < 0.5 + (self.nodes - len(present)) / self.nodes * 4:
                present.append(self._machine(number, rng))
                events.append(Churn(at_s, "join", present[-1]))
                number += 1
            else:
                gone = present.pop(rng.randrange(len(present)))
                events.append(Churn(at_s, "crash" if rng.random() < CRASHES else "leave", gone))
            at_s += self.churn_s
        return sorted(events, key=lambda event: event.at_s)

    def _machine(self, number: int, rng: random.Random) -> NodeSpec:
        blocks = round(_between(self.memory, rng))
        speed = _between(self.tokens_per_s, rng)
        if self.shared_work:
            speed *= math.sqrt(self.memory[0] * self.memory[1]) / blocks
        load_s = 2.0 + blocks * _between((0.1, 2.0), rng)
        return NodeSpec(number, blocks, speed, load_s, (rng.uniform(0, 0.05), rng.uniform(0, 0.05)))


def _between(bounds: tuple[float, float], rng: random.Random) -> float:
    """Small ones are as common as large ones, counted by size."""
    return math.exp(rng.uniform(math.log(bounds[0]), math.log(bounds[1])))
