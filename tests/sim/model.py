"""The quick simulator: the real decisions under modelled news. Announcements arrive after a random delay, each node
knows only what arrived, deaths are found out seconds later, and moving, loading and draining take their time.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from app.core.span import Span
from app.hosting.placement import Candidate, MoveTimer, decide_by, due
from app.swarm.coverage import COMING, CoverageTally
from app.swarm.records import Announcement
from tests.sim.judge import Judge, Verdict
from tests.sim.world import NodeSpec, World

NEWS_S = (0.2, 3.0)
DEATH_S = (5.0, 14.0)
TABLE_S = 0.5  # until a newcomer has somebody's table
DRAIN_S = (0.0, 5.0)
LEAVE_S = 5.0
THINK_S = 0.5  # news that comes together is thought about once
REFRESH_S = 30.0


@dataclass(eq=False)
class Node:
    """One simulated node: what it is, what it serves, and what it has heard."""

    spec: NodeSpec
    peer: str
    said: Announcement
    tally: CoverageTally  # of its view
    view: dict[str, Announcement] = field(default_factory=dict)
    serving: Span | None = None
    settled_at: float = 0.0
    busy: bool = True  # joining, moving or leaving: it does not think about places
    thinks_at: float = -1.0
    due: MoveTimer | None = None
    leaving: bool = False


def _holds(said: Announcement | None) -> bool:
    return said is not None and said.span is not None and said.state in COMING


Sampler = Callable[["Model", float], None]


class Model:
    """A swarm in simulated time."""

    def __init__(self, world: World, sampler: Sampler | None = None, sample_s: float = 300.0) -> None:
        self.world, self.judge = world, Judge(world.n_blocks)
        self.nodes: dict[str, Node] = {}
        self.now = 0.0
        self._rng = random.Random(f"model/{world.seed}")
        self._queue: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._number = 0
        for event in world.events():
            self._at(event.at_s, self._join if event.kind == "join" else self._go, event.spec, event.kind)
        if sampler is not None:
            self._at(sample_s, self._sample, sampler, sample_s)

    def run(self) -> Verdict:
        """Live through all of it."""
        while self._queue and self._queue[0][0] <= self.world.duration_s:
            self.now, _, function, arguments = heapq.heappop(self._queue)
            function(*arguments)
        return self.judge.verdict(self.world.duration_s)

    # --- coming and going --------------------------------------------------------------------------------------------

    def _join(self, spec: NodeSpec, _: str) -> None:
        peer = f"peer{spec.number}"
        node = Node(spec, peer, Announcement(peer, 0, 0, "", "joining"), CoverageTally(self.world.n_blocks))
        if self.nodes:
            teacher = self._rng.choice(list(self.nodes.values()))
            node.view = {name: said for name, said in teacher.view.items() if name in self.nodes}
            node.view[teacher.peer] = teacher.said
            node.tally = CoverageTally(self.world.n_blocks, node.view.values())
        self.nodes[peer] = node
        self.judge.came(self.now, spec.blocks, spec.tokens_per_s)
        self._tell(node, "joining", None)
        self._at(self.now + TABLE_S, self._begin, node)

    def _begin(self, node: Node) -> None:
        node.busy = False
        self._think(node)

    def _go(self, spec: NodeSpec, kind: str) -> None:
        node = self.nodes[f"peer{spec.number}"]
        self._cease(node)
        node.busy = node.leaving = True
        if kind == "leave":
            self._tell(node, "draining", node.said.span)
            self._at(self.now + LEAVE_S, self._vanish, node, NEWS_S)
        else:
            self._vanish(node, DEATH_S)

    def _vanish(self, node: Node, known_s: tuple[float, float]) -> None:
        del self.nodes[node.peer]
        self.judge.went(self.now, node.spec.blocks, node.spec.tokens_per_s)
        for other in self.nodes.values():
            self._at(self.now + self._rng.uniform(*known_s), self._forget, other, node.peer)

    # --- news --------------------------------------------------------------------------------------------------------

    def _tell(self, node: Node, state: str, span: Span | None) -> None:
        speed = node.spec.tokens_per_s if node.settled_at else 0.0  # measured when its first blocks are loaded
        node.said = Announcement(node.peer, node.said.sequence + 1, 0, "", state, span, speed, speed * 8, 100_000)
        for other in self.nodes.values():
            if other is not node:
                self._at(self.now + self._rng.uniform(*NEWS_S), self._hear, other, node.said)

    def _hear(self, node: Node, said: Announcement) -> None:
        known = node.view.get(said.peer)
        if said.peer in self.nodes and (known is None or known.sequence < said.sequence):
            if known is not None:
                node.tally.remove(known)
            node.view[said.peer] = said
            node.tally.add(said)
            self._consider(node, known, said)

    def _forget(self, node: Node, peer: str) -> None:
        known = node.view.pop(peer, None)
        if known is not None:
            node.tally.remove(known)
        self._consider(node, known, None)

    # --- thinking, as `app.hosting.block_host` does
    # --------------------------------------------------------------------

    def _consider(self, node: Node, before: Announcement | None, after: Announcement | None) -> None:
        """Think about news, unless neither the old nor the new is a holder: a node with a place decides the same."""
        if node.serving is None or _holds(before) or _holds(after):
            self._think_soon(node)

    def _think_soon(self, node: Node) -> None:
        if node.thinks_at < self.now and not node.busy:
            node.thinks_at = self.now + THINK_S
            self._at(node.thinks_at, self._think, node)

    def _think(self, node: Node) -> None:
        if node.busy:
            return
        speed = 0.0 if node.serving is None else node.spec.tokens_per_s
        me = Candidate(node.peer, node.spec.blocks, speed, node.serving, self.now - node.settled_at)
        move = decide_by(node.tally.coverage(speed), me, [*node.view.values()])
        node.due = due(node.due, move, self.now)
        if node.due is None:
            return
        if node.due.at <= self.now:
            self._move(node, node.due.move.span)
        else:
            self._at(node.due.at, self._think, node)

    def _refresh(self, node: Node) -> None:
        if not node.leaving:
            if self.now - node.thinks_at >= REFRESH_S:
                self._think_soon(node)
            self._at(self.now + REFRESH_S, self._refresh, node)

    def _move(self, node: Node, span: Span) -> None:
        node.busy, node.due = True, None
        if node.serving is None:
            self._load(node, span)
            return
        self.judge.moved(self.now)
        self._cease(node)
        self._tell(node, "draining", node.said.span)
        self._at(self.now + self._rng.uniform(*DRAIN_S), self._load, node, span)

    def _load(self, node: Node, span: Span) -> None:
        if not node.leaving:
            self._tell(node, "loading", span)
            self._at(self.now + node.spec.load_s, self._serve, node, span)

    def _serve(self, node: Node, span: Span) -> None:
        if node.leaving:
            return
        first = node.settled_at == 0.0
        node.serving, node.settled_at, node.busy = span, self.now, False
        self.judge.serves(self.now, span, node.spec.tokens_per_s)
        self._tell(node, "serving", span)
        if first:
            self._at(self.now + self._rng.uniform(0, REFRESH_S), self._refresh, node)
        self._think_soon(node)

    def _cease(self, node: Node) -> None:
        if node.serving is not None:
            self.judge.serves(self.now, node.serving, node.spec.tokens_per_s, -1)
            node.serving = None

    def _sample(self, sampler: Sampler, every_s: float) -> None:
        sampler(self, self.now)
        self._at(self.now + every_s, self._sample, sampler, every_s)

    def _at(self, at_s: float, function: Callable[..., None], *arguments: object) -> None:
        self._number += 1
        heapq.heappush(self._queue, (at_s, self._number, function, arguments))
