"""A swarm of real processes that can be hurt: nodes with fixed spans, and an asker that hosts nothing."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from app.api.client import Client, client_of
from app.core.errors import NotRunning
from engine.local_model import LocalModel, load_local, local_options
from engine.sources.opening import open_source
from engine.text.reply import ReplySettings
from engine.text.sampler import Sampling
from tests.process.node_process import Place, Serving, wait_until

Each = Callable[[int, Sequence[str]], None]
MANY_READY_S = 240.0  # for nodes that start at once, and load torch on the same few cores
# Replies are compared with those of float32. A processor with units for bf16 may choose either from start to start;
# without those units it is far slower.
FLOAT32 = {"ONEDNN_MAX_CPU_ISA": "AVX2"}
TIE = 1e-3  # two logits so close may change places where sums are taken in another order
WORDS = "tide reef kelp wave sand shell coral drift foam salt gull net hull mast oar sail deck rope buoy pier".split()


def prompt_of(seed: int) -> str:
    """Some words, others for each seed."""
    return " ".join(random.Random(seed).choices(WORDS, k=12))


class Node:
    """One place of the swarm: its process can end, and another can come in its stead."""

    def __init__(self, place: Place, span: str, memory: str) -> None:
        self.place, self.span, self._memory = place, span, memory
        self.serving: Serving | None = None
        self.peer = ""  # known when it has come up

    def start(self, invite: str) -> None:
        """Begin to come up."""
        pins = [f"--blocks={self.span}"] if self.span else []
        flags = ("--discovery=invite,remembered", "--device=cpu", *pins)
        self.serving = Serving(self.place, *flags, max_vram=self._memory, SHOAL_INVITE=invite, **FLOAT32)

    def ready(self) -> None:
        """Wait until it serves."""
        assert self.serving is not None
        self.serving.ready(MANY_READY_S)
        self.peer = str(self.place.node_file()["peer_id"])

    def signal(self, what: signal.Signals) -> None:
        """Send it a signal."""
        assert self.serving is not None
        self.serving.process.send_signal(what)

    def facts(self) -> dict[str, Any]:
        """What it says of itself."""
        status: dict[str, Any] = client_of(self.place.home).get("/control/status")
        return status

    def sessions(self) -> int:
        """How many sessions it serves; one that has gone, or is about to, serves none."""
        try:
            return int(self.facts()["sessions"]) if self.is_running else 0
        except NotRunning:
            return 0

    def ended(self) -> int:
        """Wait for its end; returns its exit status."""
        assert self.serving is not None
        return self.serving.ended()

    @property
    def is_running(self) -> bool:
        """Whether its process lives."""
        return self.serving is not None and self.serving.process.poll() is None

    def close(self) -> None:
        """End it, however it is."""
        if self.serving is not None:
            with self.serving:
                self.serving.process.kill()
            self.serving = None


@dataclass(frozen=True)
class Disturbance:
    """What happened in a reply, behind which token, and to whom."""

    at: int
    victim: Node


class ProcessSwarm:
    """Nodes under one folder; made by `open_process_swarm`."""

    def __init__(self, asker: Serving, nodes: Sequence[Node]) -> None:
        self.asker, self.nodes = asker, list(nodes)
        self.client: Client = client_of(asker.place.home)
        self._due: dict[int, Callable[[], object]] = {}  # behind which token of this reply
        self._count = 0  # tokens of this reply so far

    def invite(self) -> str:
        """A way in, through the asker."""
        return str(self.client.post("/control/invite", {})["invite"])

    def wait_covered(self, holders: int) -> None:
        """Wait until the asker knows of so many holders of every block."""
        wait_until(lambda: self._least_held() >= holders, f"every block has {holders} holders")

    def _least_held(self) -> int:
        blocks = self.client.get("/control/blocks")
        return min((len(block["holders"]) for block in blocks), default=0)

    def chat(self, text: str, tokens: int, each: Each | None = None, *, silence_s: float = 60.0) -> dict[str, Any]:
        """A whole greedy reply; `each` is called behind every token with their number and the route."""
        request = {"messages": [{"role": "user", "content": text}], "max_tokens": tokens, "temperature": 0.0}
        count = 0
        route: list[str] = []
        for piece in self.client.chat(request, silence_s=silence_s):
            if "done" in piece:
                done: dict[str, Any] = piece["done"]
                return done
            count += 1
            route = [hop["peer"] for hop in piece.get("route", ())] or route
            if each is not None:
                each(count, route)
        raise AssertionError("a reply ends with its figures")

    def hurt(
        self, seed: int, tokens: int, act: Callable[[Node], object], choose: Callable[[list[Node]], Node]
    ) -> tuple[dict[str, Any], Disturbance]:
        """A reply in which something happens to one of its hops behind a token that the seed says."""
        at = random.Random(seed).randrange(2, tokens // 2)
        hurt: list[Disturbance] = []
        self._due.clear()

        def each(count: int, route: Sequence[str]) -> None:
            self._count = count
            if count == at:
                hurt.append(Disturbance(at, choose([node for node in self.nodes if node.peer in route])))
                act(hurt[0].victim)
            if count in self._due:
                self._due.pop(count)()

        reply = self.chat(prompt_of(seed), tokens, each)
        for left in self._due.values():
            left()
        return reply, hurt[0]

    def later(self, tokens: int, act: Callable[[], object]) -> None:
        """Do something so many tokens after the disturbance, or at the reply's end."""
        self._due[self._count + tokens] = act

    def revive(self, node: Node) -> None:
        """Let a node that has ended come back."""
        node.close()
        node.start(self.invite())
        node.ready()

    def no_sessions(self) -> bool:
        """Whether no living node holds a session."""
        return not any(node.sessions() for node in self.nodes)


@contextmanager
def open_process_swarm(
    folder: Path,
    spans: Sequence[str],
    *,
    model: str = "tiny-random",
    spare_memory: int = 10**9,
    memory: str = "1GB",
    cache: Path | None = None,
    train: str = "trusted",
) -> Iterator[ProcessSwarm]:
    """A swarm whose nodes hold these spans in `memory`; one with the span "" chooses what fits in `spare_memory`.

    `train` says whose jobs they train.
    """
    place = Place(folder / "asker", cache or folder / "cache")
    assert place.shoal("create", "reef", "--model", model).status == 0
    with ExitStack() as stack, Serving(place, "--discovery=invite") as asker:
        asker.ready()
        nodes = [
            Node(Place(folder / f"n{index}", place.cache), span, memory if span else str(spare_memory))
            for index, span in enumerate(spans)
        ]
        swarm = ProcessSwarm(asker, nodes)
        invite = swarm.invite()
        for node in nodes:
            assert node.place.shoal("config", "set", "train", train).status == 0
        for chosen in (False, True):  # whoever chooses must see what the others have
            for node in nodes:
                if chosen is not bool(node.span):
                    stack.callback(node.close)
                    node.start(invite)
            for node in nodes:
                if chosen is not bool(node.span):
                    node.ready()
        yield swarm


class Yardstick:
    """The whole model in this process: how close two tokens were."""

    def __init__(self, model: str, cache: Path) -> None:
        source = open_source(model, cache)
        self._model: LocalModel = load_local(source, local_options(source, torch.device("cpu"), torch.float32, 1 << 33))

    def reply(self, text: str, tokens: int) -> list[int]:
        """The greedy reply of one process."""
        prompt = self._model.prompt_ids([{"role": "user", "content": text}])
        reply = self._model.reply(prompt, ReplySettings(tokens, Sampling(temperature=0)))
        for _ in reply:
            pass
        return list(reply.writer.token_ids)

    def lead(self, text: str, token_ids: Sequence[int]) -> float:
        """By how much the best logit behind a prompt and these tokens leads."""
        prompt = self._model.prompt_ids([{"role": "user", "content": text}])
        fed = [*prompt, *token_ids]
        lease = self._model.span.open(len(fed))
        try:
            best = torch.topk(self._model.logits_after(lease, fed), 2).values
        finally:
            lease.close()
        return float(best[0] - best[1])

    def is_tie(self, text: str, undisturbed: Sequence[int], other: Sequence[int]) -> bool:
        """Whether replies differ first where two tokens were all but equal; False where they do not differ."""
        for position, (a, b) in enumerate(zip(undisturbed, other, strict=False)):
            if a != b:
                return self.lead(text, undisturbed[:position]) <= TIE
        return False
