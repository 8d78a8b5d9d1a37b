"""Islands with a network between them: the figures of `tests.bench.train` that need one.

`nodes` and `slow_nodes` run a job on two real `shoal serve` processes, the second time through proxies of 50 ms and
20 Mbit/s (`tests.bench.delay`). `join` runs islands with real sockets and such proxies in this process, because one of
them has to lie. `live` and `grid` run real models on the in-memory network, whose clock jumps over the time that steps
take.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import trio
from trio.testing import MockClock

from app.api.client import Client, client_of
from app.core.pieces import at_once
from app.rounds.island import Island, RoundServer, RoundTiming, hashed
from app.rounds.steps import LocalSteps
from app.training.states import METHODS, StateStore
from engine.island import IslandModel, first_states
from engine.sources.shape import config_values
from engine.training.parameters import drawn_model
from p2p.envelope import parse
from p2p.network import Libp2pNetwork
from tests.app.hash_model import InlineDevice
from tests.app.rounds.grid_swarm import bytes_of_round
from tests.app.rounds.island_swarm import Lesson, lesson_of, open_islands
from tests.app.rounds.statements import RECORD
from tests.app.swarms import identity
from tests.bench import train
from tests.bench.delay import delay_proxy
from tests.bench.swarm_nodes import free_port, open_proxies
from tests.bench.train import Corpus, Outcome
from tests.p2p.nodes import make_network
from tests.process.node_process import Place, Serving, wait_until

RTT_S, LINK_BYTES_PER_S = 0.05, 20e6 / 8
BATCH_TOKENS = 1024  # of a step of a node
FIRST_ROUNDS, ROUNDS = 5, 6  # in which the job finds the number of steps; that are measured
POLL_S = 0.25  # long enough that asking for figures costs the nodes nothing
LOCAL_S = 5.0  # with each number of threads
KILL_EVERY_S, LIFE_STEP_S = 30.0, 0.5
JOIN_SHAPE = replace(train.CONFIG, n_blocks=6, hidden_size=96, head_dim=24, intermediate_size=320)


# --- two real nodes ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """A finished round as one node's figures show it."""

    at: float
    round: int
    tokens: int
    utilisation: float
    seconds: float  # that the round took


def nodes() -> dict[str, float]:
    """Speed of two nodes on this machine beside one process, and what a round costs them."""
    before = local_tokens_per_s()
    with open_nodes() as clients:
        seen_rounds(clients, FIRST_ROUNDS)
        rounds = seen_rounds(clients, ROUNDS)
        every = facts_of(clients[0])["every"]
    local = mean((before, local_tokens_per_s()))
    first, last = rounds[0], rounds[-1]
    both = (last.tokens - first.tokens) / (last.at - first.at)
    return {
        "islands2_vs_local": both / local, "islands2_every": every, "local_tokens_per_s": local,
        "round_overhead_s": median(one.seconds * (1 - one.utilisation) for one in rounds),
    }  # fmt: skip


def slow_nodes() -> dict[str, float]:
    """Share of the time in which two nodes make steps, over slow links."""
    with open_nodes(RTT_S, LINK_BYTES_PER_S) as clients:
        seen_rounds(clients, FIRST_ROUNDS)
        rounds = seen_rounds(clients, ROUNDS)
        facts = facts_of(clients[0])
    return {
        "utilisation_20mbit": mean(one.utilisation for one in rounds), "utilisation_20mbit_every": facts["every"],
        "utilisation_20mbit_bytes": facts["bytes_per_round"],
        "round_overhead_20mbit_s": median(one.seconds * (1 - one.utilisation) for one in rounds),
    }  # fmt: skip


def local_tokens_per_s() -> float:
    """Tokens a second of a process that makes the same steps alone, without rounds, with one thread or all of them.

    The faster one counts: on a busy machine, threads wait for each other.
    """
    model = train.island(drawn_model(train.CONFIG, 0), train.terms())
    rows = [[(7 * row + at) % 256 for at in range(train.LENGTH)] for row in range(BATCH_TOKENS // train.LENGTH)]
    threads, speeds = torch.get_num_threads(), list[float]()
    for count in (1, threads):
        torch.set_num_threads(count)
        tokens = at_once(model.step(rows, 0)).tokens
        began, steps = time.perf_counter(), 0
        while (took := time.perf_counter() - began) < LOCAL_S:
            at_once(model.step(rows, 1 + steps))
            steps += 1
        speeds.append(steps * tokens / took)
    return max(speeds)


@contextmanager
def open_nodes(rtt_s: float = 0.0, bytes_per_s: float = 0.0) -> Iterator[list[Client]]:
    """Two nodes that take part in a job together, behind a proxy each if there is a delay."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        data, shape = folder / "speeches.txt", folder / "shape.json"
        data.write_bytes(b"\n".join(text for _, text in train.speeches()[:20]))
        shape.write_text(json.dumps(config_values(replace(train.CONFIG, vocab_size=264))))
        places = [Place(folder / name, folder / "cache") for name in ("one", "two")]
        ports = [free_port() for _ in places]
        proxies = stack.enter_context(open_proxies(ports, rtt_s, bytes_per_s)) if rtt_s else []
        ways = [
            [f"--listen=/ip4/127.0.0.1/tcp/{port}"]
            + ([f"--advertise=/ip4/127.0.0.1/tcp/{proxies[index].port}"] if proxies else [])
            for index, port in enumerate(ports)
        ]
        assert places[0].shoal("create", "bench", "--model", "tiny-random").status == 0
        # Nodes on one machine share its cores: more threads than cores, or two on one core, would wait for each other.
        threads = {"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // len(places))), "OMP_PROC_BIND": "false"}
        stack.enter_context(Serving(places[0], "--discovery=invite", *ways[0], **threads)).ready()
        invite = places[0].shoal("invite").out.strip()
        second = Serving(places[1], "--discovery=invite", *ways[1], SHOAL_INVITE=invite, **threads)
        stack.enter_context(second).ready()
        clients = [client_of(place.home) for place in places]
        wish = {
            "name": "bench", "data": [str(data)], "shape": str(shape), "steps": 10**6, "every": train.EVERY,
            "batch": BATCH_TOKENS, "length": train.LENGTH, "licence": "MIT", "rate": train.RATE,
        }  # fmt: skip
        clients[0].post("/control/train", wish)
        wait_until(lambda: clients[0].get("/control/train")[0]["round"] >= 1, "a round is made alone")
        clients[1].post("/control/train/join", {"job": "bench"})
        wait_until(lambda: all(len(facts_of(client)["islands"]) == 2 for client in clients), "both take part", 120)
        yield clients


def facts_of(client: Client) -> dict[str, Any]:
    """A node's figures of the job."""
    found: dict[str, Any] = client.get("/control/train")[0]
    return found


def seen_rounds(clients: Sequence[Client], count: int) -> list[Seen]:
    """The next rounds of all nodes, in the order in which they were seen."""
    seen: list[Seen] = []
    begun = [facts_of(client)["round"] for client in clients]
    last = list(begun)
    deadline = time.monotonic() + 60 * count
    while min(last) < max(begun) + count:
        assert time.monotonic() < deadline, f"the nodes are at {last} after {60 * count} s"
        for index, client in enumerate(clients):
            facts = facts_of(client)
            if facts["round"] > last[index]:
                last[index] = facts["round"]
                tokens_per_s, share = facts["tokens_per_s"], facts["utilisation"]
                gained = sum(one["tokens"] for one in facts["islands"])
                if share is not None and tokens_per_s:
                    at = time.monotonic()
                    seen.append(Seen(at, facts["round"], facts["tokens"], share, gained / tokens_per_s))
        time.sleep(POLL_S)
    return seen


# --- lives ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Speeches:
    """The text of a job, and what it is validated with."""

    sequences: list[list[int]]
    held: list[list[int]]

    @property
    def count(self) -> int:
        """Number of sequences."""
        return len(self.sequences)

    def sequence(self, number: int) -> list[int]:
        """One of them."""
        return self.sequences[number]


def live(data: Corpus, start: dict[str, torch.Tensor], steps: int, seed: int, *, killing: bool, own: bool) -> Outcome:
    """Let four islands train on the in-memory network.

    With `killing`, one is killed every `KILL_EVERY_S` while another joins; with `own`, each has the text of an era.
    """
    clock = MockClock(autojump_threshold=0.005)  # downloads are written by threads
    return trio.run(_live, data, start, steps, seed, killing, own, clock=clock)


async def _live(
    data: Corpus, start: dict[str, torch.Tensor], steps: int, seed: int, killing: bool, own: bool
) -> Outcome:
    rng, deaths = random.Random(seed), 0
    terms: dict[str, Any] = {
        "every": train.EVERY, "least_every": train.EVERY, "most_every": train.EVERY, "steps": steps,
        "batch": train.BATCH, "length": train.LENGTH, "rate": train.RATE, "warm_up": 10, "seed": seed,
    }  # fmt: skip
    if own:
        terms |= {"own_data": True, "tokens": None, "held": None}
    eras = {number: Speeches(era, data.held) for number, era in enumerate(data.eras)}
    with tempfile.TemporaryDirectory() as folder:
        lesson = Lesson(train.CONFIG, start, Speeches(data.whole, data.held), eras)
        async with open_islands(
            Path(folder), *range(train.ISLANDS), lesson=lesson, timing=RoundTiming(), step_s=LIFE_STEP_S, **terms
        ) as swarm:

            def is_over() -> bool:
                return any(node.island.is_finished for node in swarm.nodes.values())

            while not is_over():
                with trio.move_on_after(KILL_EVERY_S):
                    await swarm.until(is_over, within_s=2 * KILL_EVERY_S)
                if killing and not is_over():
                    swarm.kill(rng.choice(sorted(swarm.nodes)))
                    swarm.add(train.ISLANDS + deaths, step_s=LIFE_STEP_S, has_model=False)
                    deaths += 1
                    assert not any(node.failure for node in swarm.nodes.values()), swarm.words()
            done = [number for number, node in swarm.nodes.items() if node.island.is_finished]
            swarm.agree(*done)
            node = swarm.nodes[done[0]]
            waits = [
                (parse(entry.raw).sequence - parse(arrival.raw).sequence) / 1000
                for entry in node.island.log
                for arrival in entry.list.arrivals
            ]
            return Outcome(at_once(node.model.loss(data.held)), killed=deaths, longest_wait_s=max(waits))


# --- many islands -----------------------------------------------------------------------------------------------------


def grid() -> dict[str, float]:
    """Bytes of a round of 16 islands in a grid, over those if all exchange with all; in all, and between networks."""
    networks = [range(at, at + 4) for at in range(0, 16, 4)]
    shape = replace(train.CONFIG, n_blocks=1, hidden_size=16, n_heads=1, n_kv_heads=1, head_dim=16, vocab_size=32_768)
    lesson = lesson_of(shape)

    def taken(near: Sequence[Sequence[int]], is_grid: bool) -> tuple[float, float]:
        with tempfile.TemporaryDirectory() as folder:
            run = partial(bytes_of_round, Path(folder), lesson, 16, near, is_grid=is_grid)
            return trio.run(run, clock=MockClock(autojump_threshold=0))

    (grid_bytes, _), (all_bytes, _) = taken((), True), taken((), False)
    (_, grid_slow), (_, all_slow) = taken(networks, True), taken(networks, False)
    return {"grid16_bytes_ratio": grid_bytes / all_bytes, "grid16_slow_bytes_ratio": grid_slow / all_slow}


# --- joining ----------------------------------------------------------------------------------------------------------


class SlowDevice(InlineDevice):
    """A device on which steps take a while, beside the event loop."""

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        if getattr(function, "__name__", "") == "step":
            await trio.sleep(self.seconds)
        return await trio.to_thread.run_sync(function, *args)


def join() -> dict[str, float]:
    """Seconds until a newcomer has the state, and until it takes part."""
    return trio.run(_joined)


async def _joined() -> dict[str, float]:
    givers, newcomer = range(3), 3
    every = 40
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        nursery = await stack.enter_async_context(trio.open_nursery())
        networks: list[Libp2pNetwork] = []
        for number in (*givers, newcomer):
            port = free_port()
            proxy = await stack.enter_async_context(delay_proxy(port, RTT_S, LINK_BYTES_PER_S))
            networks.append(
                make_network(
                    identity=identity(number),
                    listen=(f"/ip4/127.0.0.1/tcp/{port}",),
                    advertise=(f"/ip4/127.0.0.1/tcp/{proxy.port}",),
                )
            )
            await nursery.start(networks[-1].run)
        for network in networks:
            for other in networks:
                if other is not network:
                    network.learn(other.peer_id, other.addresses())
        swarm = JoinSwarm(networks, Path(folder), every)
        islands = [swarm.add(number) for number in givers]
        for island in islands:
            await island.begin()
            nursery.start_soon(island.run)
        await until(lambda: all(len(island.standing.members) == 3 for island in islands), 120)
        await until(lambda: islands[0].standing.round >= 2 and islands[0]._own is None, 120)
        swarm.lie(1)
        swarm.die_when_asked(2, nursery)
        late = swarm.add(newcomer, has_model=False)
        await late.begin()
        began, first_round = trio.current_time(), islands[0].standing.round
        nursery.start_soon(late.run)
        await until(lambda: late.figures.fetched > 0, 300)
        joined = trio.current_time()
        await until(lambda: late.figures.steps > 0, 300)
        entered = trio.current_time()
        lost = sum(
            every - arrival.steps
            for entry in islands[0].log
            if entry.round >= first_round
            for arrival in entry.list.arrivals
        )
        model = late._steps.whole
        assert model is not None
        assert model.has_moments
        state_bytes = sum(part.size_bytes for part in late.checkpoint.parts) + sum(model.moments_bytes)
        nursery.cancel_scope.cancel()
    return {
        "join_s": joined - began, "join_bound_s": 1.5 * state_bytes / LINK_BYTES_PER_S,
        "join_boundary_s": entered - joined, "join_lost_steps": lost,
    }  # fmt: skip


class JoinSwarm:
    """Islands with real networks in this process."""

    def __init__(self, networks: Sequence[Libp2pNetwork], folder: Path, every: int) -> None:
        self._networks, self._folder = networks, folder
        self._vectors = drawn_model(JOIN_SHAPE, 1)
        start, _ = hashed(first_states(JOIN_SHAPE, self._vectors))
        self.record = replace(
            RECORD, founder=identity(0).peer_id, start=start.hex(), created_ms=time.time_ns() // 10**6, steps=10**6,
            every=every, least_every=every, most_every=every, batch=1, length=train.LENGTH,
        )  # fmt: skip
        self._stores: list[StateStore] = []

    def add(self, number: int, *, has_model: bool = True) -> Island:
        """Make an island, which does not run yet."""
        network, record = self._networks[number], self.record
        vectors = self._vectors if has_model else drawn_model(JOIN_SHAPE, 2)
        store = StateStore(network, self._folder / str(number), lambda peer: True)
        store.serve()
        model = IslandModel(JOIN_SHAPE, vectors, train.CPU, train.terms())
        text = Speeches([[(row + at) % 256 for at in range(record.length)] for row in range(256)], [])
        device = SlowDevice(0.2)
        island = Island(
            network, identity(number), record, model, text, device, store, steps=LocalSteps(model, device),
            found=lambda: [one.peer_id for one in self._networks], wall_ms=lambda: time.time_ns() // 10**6,
        )  # fmt: skip
        server = RoundServer(network, lambda peer: True)
        server.islands[record.id] = island
        server.serve()
        self._stores.append(store)
        return island

    def lie(self, number: int) -> None:
        """Let an island send wrong bytes of the right length for every chunk of a state."""
        server = self._stores[number]._server

        async def wrong(peer: str, body: bytes) -> Any:
            right = await server._on_chunk(peer, body)
            joined = bytes(right) if isinstance(right, bytes | bytearray | memoryview) else b"".join(right)
            return joined[:64] + bytes(len(joined) - 64)

        self._networks[number].serve(METHODS.chunk, wrong)

    def die_when_asked(self, number: int, nursery: trio.Nursery) -> None:
        """Let an island stop for good at the first request for a chunk."""

        async def gone(peer: str, body: bytes) -> Any:
            nursery.start_soon(self._networks[number].stop)
            await trio.sleep_forever()

        self._networks[number].serve(METHODS.chunk, gone)


async def until(holds: Callable[[], bool], within_s: float) -> None:
    """Wait for something that no event tells."""
    with trio.fail_after(within_s):
        while not holds():  # noqa: ASYNC110
            await trio.sleep(0.02)
