"""The seven limits of training among many machines, each shown by an example that runs here in under a minute.

    python -m tests.bench.limits [--json] [--only bandwidth,…]

`value` is the number by which the planner judges the limit, `threshold` its bound, `shown` whether the example went as
it should: the limit was met in one way of training, and not in another. `facts` says both.

`bandwidth`    two islands exchange their real bytes through a proxy of 20 Mbit/s: after every step, and after every 100
`stragglers`   three islands make rounds on the in-memory network, then again with one at a tenth of the speed
`unlike_data`  four islands learn four kinds of text, mixed or one kind each
`memory`       a process that may use 2.5 GB begins to train the starter model: all weights, and adapters
`cost`         a kilowatt-hour at 0.30 on this machine, beside an H100 at 2.50 an hour for the same flop
`poisoning`    one of four islands sends ten times its change with the sign flipped: averaged plainly, and found out
`provenance`   a text without a licence is founded in a public swarm, and one with a licence
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
import trio
from trio.testing import MockClock

from app.core.errors import AppError
from app.core.pieces import at_once
from app.joining.offers import look_at_machine
from app.planning.forecast import Terms, forecast_training
from app.planning.machines import Fleet
from app.planning.rounds import steps_needed, utilisation
from app.planning.training_step import StepTask
from app.planning.verdicts import DISHONEST, POISONED, STRAGGLERS, UNLIKE, dishonest_majority
from app.rounds.founding import TrainWish
from engine.sources.layout import part_names
from engine.sources.starter import SHAPE
from engine.training.parameters import drawn_model, part_weights
from tests.app.rounds.founded import founded
from tests.app.rounds.island_swarm import open_islands
from tests.bench.delay import delay_proxy
from tests.bench.train import (
    CONFIG,
    HELD,
    LIES,
    Corpus,
    Islands,
    common,
    cut,
    island,
    terms,
)

MBIT_20 = 2.5e6  # bytes/s
MEMORY_BYTES = 2_500 * 10**6
SELDOM = 100  # steps between two exchanges
ENOUGH = 0.9  # share of the time that islands should compute, as `steps_needed` takes it
STEPS = 150
WATTS, KWH, HOUR = 100.0, 0.30, 2.50

Shown = tuple[float, float, bool, dict[str, Any]]  # value, threshold, whether it went as it should, facts


def bandwidth() -> Shown:
    """Steps needed to compute nine tenths of the time; and that share after every step and after every 100."""
    model = island(drawn_model(CONFIG, 0), terms())
    drawn = Random(0)
    text = [[drawn.randrange(256) for _ in range(64)]]
    at_once(model.step(text, 0))
    began = time.perf_counter()
    for number in range(1, 11):
        at_once(model.step(text, number))
    step_s = (time.perf_counter() - began) / 10
    # Of two islands each sends half of its change and half of the merged one, and receives as much.
    size = sum(map(len, model.change()))
    exchange_s = trio.run(_exchanged_s, size)
    shares = {every: utilisation(every * step_s, exchange_s) for every in (1, SELDOM)}
    needed = steps_needed(step_s, exchange_s)
    facts = {"step_s": step_s, "exchange_s": exchange_s, "bytes": size, "computing_share": shares}
    return needed, 1, needed > 1 and shares[1] < ENOUGH <= shares[SELDOM], facts


async def _exchanged_s(size: int) -> float:
    """Seconds in which two sides send each other so many bytes through a proxy of 20 Mbit/s each way."""
    listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]

    async def take(stream: trio.abc.ReceiveStream) -> None:
        left = size
        while left > 0:
            left -= len(await stream.receive_some(1 << 16))

    async def both(stream: trio.SocketStream) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(take, stream)
            nursery.start_soon(stream.send_all, bytes(size))

    async with trio.open_nursery() as serving:
        serving.start_soon(partial(trio.serve_listeners, both, [listener]))
        async with delay_proxy(listener.socket.getsockname()[1], 0.0, 2 * MBIT_20) as proxy:
            began = trio.current_time()
            async with await trio.open_tcp_stream("127.0.0.1", proxy.port) as stream:
                await both(stream)
            took_s = trio.current_time() - began
        serving.cancel_scope.cancel()
    return took_s


def stragglers() -> Shown:
    """Time of five rounds of three islands, with one at a tenth of the speed over that with all alike."""
    seconds = {}
    for name, slow_s in (("alike", 0.1), ("one_slow", 1.0)):
        with tempfile.TemporaryDirectory() as folder:
            seconds[name] = trio.run(_rounds_s, Path(folder), slow_s, clock=MockClock(autojump_threshold=0.01))
    ratio = seconds["one_slow"] / seconds["alike"]
    return ratio, STRAGGLERS, ratio > STRAGGLERS, {"seconds": seconds}


async def _rounds_s(folder: Path, slow_s: float) -> float:
    async with open_islands(folder, 0, 1) as swarm:
        swarm.add(2, step_s=slow_s)
        await swarm.until(lambda: len(swarm.nodes[0].island.standing.members) == 3)
        began, first = trio.current_time(), swarm.nodes[0].island.standing.round
        await swarm.until(lambda: swarm.nodes[0].island.standing.round >= first + 3)
        return trio.current_time() - began


def unlike_data() -> Shown:
    """Loss where each island has a kind of text of its own, over that where all have all kinds."""
    data = _kinds()
    start = common(data, 0)
    like, unlike = (Islands(unlike=unlike)(data, start, STEPS, 0).loss for unlike in (False, True))
    return unlike / like - 1, UNLIKE, unlike / like - 1 > UNLIKE, {"mixed_loss": like, "unlike_loss": unlike}


def _kinds() -> Corpus:
    """Four kinds of text that every machine with Python has, and a tenth of each to validate with."""
    sources = [Path(module.__file__ or "").read_text("utf-8") for module in (argparse, ast, json, subprocess)]
    drawn = Random(0)
    code = "\n".join(sources)
    words = "\n".join(ast.get_docstring(ast.parse(text)) or "" for text in sources) + Path("LICENSE").read_text()
    kinds = [
        code,
        (words + "\n") * 20,
        "\n".join(f"{drawn.random():.6f},{drawn.randrange(10**6)}" for _ in range(8000)),
        "\n".join(f"<td class='{name}'><b>{value}</b></td>" for name, value in _cells(drawn)),
    ]
    size = min(len(text) for text in kinds) // 64 * 64
    cuts = [cut(text.encode()[:size]) for text in kinds]
    held = [sequence for kind in cuts for sequence in kind[::10]]
    step = max(1, len(held) // HELD)
    return Corpus(tuple([row for n, row in enumerate(kind) if n % 10] for kind in cuts), held[::step][:HELD])


def _cells(drawn: Random) -> list[tuple[str, int]]:
    return [(drawn.choice(("fish", "reef", "tide")), drawn.randrange(1000)) for _ in range(4000)]


def memory() -> Shown:
    """Share of the memory that training needs which a process has; one tries for real, with a limit."""
    need = forecast_training(_fleet(MEMORY_BYTES), SHAPE, StepTask(rank=None, rows=256), Terms(1)).lacking_bytes
    outcomes = {way: _limited(way) for way in ("all_weights", "adapters")}
    share = MEMORY_BYTES / (MEMORY_BYTES + need)
    right = outcomes == {"all_weights": False, "adapters": True}
    return share, 1.0, right and share < 1, {"lacking_bytes": need, "steps_done": outcomes}


def _fleet(cap_bytes: int | None = None) -> Fleet:
    here = replace(look_at_machine("cpu", None).spec(), cap_bytes=cap_bytes, watts=WATTS)
    return Fleet(here, (here,))


def _limited(way: str) -> bool:
    """True if a process of its own makes a step within the limit."""
    command = [sys.executable, "-m", "tests.bench.limits", "--step", way]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    words = ("allocate memory", "not enough memory", "MemoryError")  # it depends on the processor
    assert answer.returncode == 0 or any(one in answer.stderr for one in words), answer.stderr
    return answer.returncode == 0


def one_step(way: str) -> None:
    """Make one step with the starter model's shape; the process may take `MEMORY_BYTES` more than it has now."""
    from engine.model.block import WeightOptions
    from engine.training.full import FullModel
    from tests.bench.finetune import Shoal

    torch.mm(torch.ones(8, 8), torch.ones(8, 8))
    used = 4096 * int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    if way == "adapters":
        Shoal().begin(0).step_s()
        return
    weights = {part: torch.zeros(part_weights(SHAPE, part)) for part in part_names(SHAPE)}
    model = FullModel(SHAPE, weights, WeightOptions(torch.device("cpu"), torch.float32), graph_bytes=0)
    model.vectors()


def cost() -> Shown:
    """Price of the energy of fine-tuning here as a share of renting the same computation."""
    found = forecast_training(_fleet(), SHAPE, StepTask(rows=256), Terms(10**6, price_kwh=KWH, rent_hour=HOUR))
    (verdict,) = (verdict for verdict in found.verdicts if verdict.name == "cost")
    assert verdict.value is not None
    assert found.swarm is not None
    facts = {"flops_per_s": _fleet().here.flops_per_s, "cost": found.swarm.cost, "limit": found.limit}
    return verdict.value, verdict.threshold, verdict.passed is False, facts


def poisoning() -> Shown:
    """Loss with a liar among four islands over that without, averaged plainly and with the liar left out."""
    data = _kinds()
    start = common(data, 0)
    plainly = Islands(lie=LIES["flip10"], leaves_out=False, changes={"robust": False})
    honest, plain, found = (run(data, start, STEPS, 0) for run in (Islands(), plainly, Islands(lie=LIES["flip10"])))
    ratios = {"plain": plain.loss / honest.loss, "left_out": found.loss / honest.loss}
    odds = dishonest_majority(1, DISHONEST)
    right = not ratios["plain"] < 1.2 and ratios["left_out"] < 1.1  # a loss that is not a number is no small one
    facts = {"loss_ratio": ratios, "found_after_rounds": found.found_after}
    return odds, POISONED, right and odds > POISONED, facts


def provenance() -> Shown:
    """Share of the text with a licence; without one a public swarm refuses it."""
    answers = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "words.txt"
        file.write_text("Nobody knows who wrote this, or who may use it. " * 200)
        for licence in ("", "CC0-1.0"):
            wish = TrainWish("fish", (str(file),), model="tiny-random", batch=256, length=64, licence=licence)
            try:
                founded(wish, Path(folder), "")
                answers[licence] = "accepted"
            except AppError as error:
                answers[licence] = str(error)
    right = "--licence" in answers[""] and answers["CC0-1.0"] == "accepted"
    return 0.0, 1.0, right, {"without": answers[""], "with": answers["CC0-1.0"]}


LIMITS: dict[str, Callable[[], Shown]] = {
    "bandwidth": bandwidth, "stragglers": stragglers, "unlike_data": unlike_data, "memory": memory, "cost": cost,
    "poisoning": poisoning, "provenance": provenance,
}  # fmt: skip


def main() -> int:
    """Run and print; fails if an example did not go as it should."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default=",".join(LIMITS))
    parser.add_argument("--step", choices=("all_weights", "adapters"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.step:
        one_step(arguments.step)
        return 0
    found = {}
    for name in arguments.only.split(","):
        began = time.perf_counter()
        value, threshold, shown, facts = LIMITS[name]()
        seconds = round(time.perf_counter() - began, 1)
        found[name] = {
            "value": value if math.isfinite(value) else None,
            "threshold": threshold,
            "shown": shown,
            "seconds": seconds,
            "facts": facts,
        }
        if not arguments.json:
            print(f"{name}: {found[name]}", flush=True)
    if arguments.json:
        print(json.dumps(found))
    return 0 if all(one["shown"] for one in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
