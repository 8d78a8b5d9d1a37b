"""Forecasts of `shoal plan` beside what was then measured, with the starter model and real nodes, in one run.

    python -m tests.bench.plan [--json] [--only chat_alone,swarm3,…] [--tokens 64]

`*_error` is how far a forecast was from the measurement, as a share of the latter; both are under `pairs`. Machines are
described by what the app measures itself (blocks of the model's shape, announcements, round trips), and never by the
run that is forecast. All nodes share this machine's cores, which the forecasts of eight streams and of rounds are told.
Forecasts and measurements take turns, so that a noisy machine disturbs both alike, and the turn with the median ratio
counts. A turn in which other guests of the host had more than a tenth of the cores is made again, `MOST_TURNS` at most;
`notes` has all of them with the share that was taken, and the parts of each forecast.

`chat_alone`       a node with all blocks; forecast before it starts
`chat_swarm3`      three nodes with ten blocks each, and an asker without; forecast from their announcements
`chat_delay50`     the same with a round trip of 50 ms between all of them
`streams8`         eight replies at once over the three; forecast from a file of machines that share a host
`ttft512`          the first token after a prompt of 512 tokens over the three; the reply before it had 160
`finetune_local`, `finetune_swarm3`   steps of a job of ten facts in one process, and over the three: `--dry-run` first
`round_20mbit`     rounds of two islands that train all weights of a small model, 20 Mbit/s each way between them
`memory`           the peak of fine-tuning in one process, blocks recomputed and kept: the worse of both
`advice`           the six staged cases of `tests/app/planning/staged.py` for machines like this one
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from app.api.client import client_of
from app.config.home import cache_folder
from app.joining.offers import look_at_machine
from app.planning.forecast import Terms, rounds_of
from app.planning.machines import Fleet, MachineSpec
from app.planning.memory import TrainingMemory, tuning_peak_bytes
from app.planning.training_step import StepTask
from app.rounds.founding import HELD_MOST
from engine.config import ModelConfig
from engine.sources.hf_config import parse_config
from engine.sources.starter import SHAPE
from engine.stored_form import StoredForm, starter_form
from tests.app.planning.staged import CAP, staged_cases
from tests.bench.finetune import BATCH, LENGTH, RANK, added_bytes, write_facts
from tests.bench.handover import prompt_of
from tests.bench.stolen_time import StolenTime
from tests.bench.swarm import ANIMALS, QUESTION, together_tokens_per_s
from tests.bench.swarm_nodes import READY_S, BenchSwarm, free_port, open_bench_swarm, open_proxies
from tests.process.node_process import Place, Serving, wait_until

SPANS = ("0:10", "10:20", "20:30")
MEMORY = "500MB"
RTT_S = 0.05
ROUNDS = 3  # turns of each forecast and measurement that count
MOST_TURNS = 6
MOST_STOLEN = 0.1  # share of the cores' time that the hypervisor may give to others during a turn that counts
# Nodes share the cores here: a thread of torch that waits for its fellows soon leaves its core to another node.
SHARED_CORES = {"GOMP_SPINCOUNT": "10000"}
PLAIN = {"SHOAL_DRAFT": "off", "SHOAL_KEEP_SESSIONS": "0", "SHOAL_TRAIN": "members", **SHARED_CORES}
FACTS = ("--rank=8", "--epochs=6", "--batch=5", "--length=64", "--lr=1e-3", "--validation=0")
PATIENCE_S = 600.0

MBIT_20 = 2.5e6  # bytes/s
ISLAND_SHAPE = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 4, "hidden_size": 384, "intermediate_size": 1536,
    "num_attention_heads": 6, "num_key_value_heads": 6, "vocab_size": 264, "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}  # fmt: skip
ISLAND_FLAGS = ("--every=6", "--batch=512", "--length=128", "--steps=100000", "--lr=1e-3", "--licence=CC0-1.0")

Pairs = dict[str, tuple[float, float]]  # name -> (forecast, measured)


def facts_of(place: Place, *arguments: str) -> Any:
    """What a command says with --json, however long that takes on a busy machine."""
    answer = place.shoal(*arguments, "--json", patience_s=PATIENCE_S)
    assert answer.status == 0, answer.err
    return answer.facts


def this_machine(config: ModelConfig = SHAPE, form: StoredForm | None = None) -> MachineSpec:
    """This machine as `shoal plan` measures it; with `form` for replies."""
    return look_at_machine("cpu", None, config, form).spec()


class Bench:
    """The parts of the bench; each returns forecasts and measurements by name."""

    def __init__(self, folder: Path, tokens: int) -> None:
        self._folder, self._tokens, self._cache = folder, tokens, cache_folder()
        self.notes: dict[str, Any] = {"turns": {}, "parts": {}}

    def chat_alone(self) -> Pairs:
        """A node with the whole model that answers its own user; the forecast knows of no node."""
        place, elsewhere = Place(self._folder / "alone", self._cache), Place(self._folder / "before", self._cache)
        asked = ("--model=starter", "--context=64", f"--tokens={self._tokens}")
        assert place.shoal("create", "bench", "--model", "starter").status == 0
        with Serving(place, "--discovery=invite", "--device=cpu", max_vram="2GB", **PLAIN) as node:
            node.ready(READY_S)
            client = client_of(place.home)
            request = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": self._tokens}

            def measure() -> float:
                *_, last = client.chat(request | {"temperature": 0.0})
                return float(last["done"]["tokens_per_s"])

            measure()  # warms up
            forecast = partial(self._planned, "chat_alone", "tokens_per_s", elsewhere, "chat", *asked)
            return {"chat_alone": self._by_turns("chat_alone", forecast, measure)}

    def swarm3(self) -> Pairs:
        """Replies and a job over three nodes on loopback."""
        swarm3 = open_bench_swarm(
            self._folder / "near", self._cache, "starter", spans=SPANS, memory=MEMORY, apart=True, variables=PLAIN
        )
        with swarm3 as swarm:
            asker = Place(self._folder / "near" / "node0", self._cache)
            self._wait_measured(swarm)
            found = {"chat_swarm3": self._chat("chat_swarm3", swarm, asker)}
            text = prompt_of(swarm.client, 512)
            count = swarm.reply(text, 1).done["prompt_tokens"]
            asked, shorter = ("chat", f"--context={count}", "--tokens=2"), prompt_of(swarm.client, 160)

            def forecast() -> float:
                swarm.reply(shorter, 2)  # the latest reply, which a forecast begins with, is another one
                return self._planned("ttft512", "first_token_s", asker, *asked)

            found["ttft512"] = self._by_turns("ttft512", forecast, lambda: float(swarm.reply(text, 2).done["ttft_s"]))
            found["streams8"] = self._streams(swarm, asker)
            found["finetune_swarm3"] = self._finetune("finetune_swarm3", asker)
        return found

    def delay50(self) -> Pairs:
        """One reply over three nodes that are 50 ms apart."""
        far = open_bench_swarm(
            self._folder / "far",
            self._cache,
            "starter",
            rtt_s=RTT_S,
            spans=SPANS,
            memory=MEMORY,
            apart=True,
            variables=PLAIN,
        )
        with far as swarm:
            self._wait_measured(swarm)
            asker = Place(self._folder / "far" / "node0", self._cache)
            return {"chat_delay50": self._chat("chat_delay50", swarm, asker)}

    def finetune_local(self) -> Pairs:
        """A job in one process."""
        place = Place(self._folder / "tuner", self._cache)
        return {"finetune_local": self._finetune("finetune_local", place, "--local")}

    def round_20mbit(self) -> Pairs:
        """Rounds of two islands on this machine with a narrow connection between them."""
        folder = self._folder / "islands"
        folder.mkdir()
        (folder / "shape.json").write_text(json.dumps(ISLAND_SHAPE))
        (folder / "words.txt").write_text("The shoal swims, and every fish of it learns from all the others. " * 4000)
        places = [Place(folder / name, folder / "cache") for name in ("one", "two")]
        assert places[0].shoal("create", "home", "--model", "tiny-random").status == 0
        # Steps of this small model are short, so that its measurements differ: the middle one of three.
        machine = sorted((this_machine(island_config()) for _ in range(3)), key=lambda one: one.flops_per_s)[1]
        ports = [free_port() for _ in places]
        flags = (f"--data={folder / 'words.txt'}", f"--shape={folder / 'shape.json'}", *ISLAND_FLAGS)
        with ExitStack() as stack:
            # A proxy is as wide for both directions together as it says, and both are used alike.
            proxies = stack.enter_context(open_proxies(ports, 0.0, 2 * MBIT_20))
            ways = [
                ("--discovery=invite", f"--listen=/ip4/127.0.0.1/tcp/{port}",
                 f"--advertise=/ip4/127.0.0.1/tcp/{proxy.port}")
                for port, proxy in zip(ports, proxies, strict=True)
            ]  # fmt: skip
            stack.enter_context(Serving(places[0], *ways[0], **PLAIN)).ready(READY_S)
            invite = places[0].shoal("invite").out.strip()
            stack.enter_context(Serving(places[1], *ways[1], SHOAL_INVITE=invite, **PLAIN)).ready(READY_S)
            facts_of(places[0], "train", "fish", *flags)
            facts_of(places[1], "train", "join", "fish")
            client = client_of(places[0].home)
            rates: dict[int, float] = {}  # tokens/s of all islands by round; the last look in a round counts
            together: dict[int, int] = {}
            taken, stolen = StolenTime(), dict[int, float]()  # by round, as for the rates
            deadline = time.monotonic() + PATIENCE_S
            while not enough([stolen[number] for number in together if number in rates]):
                assert time.monotonic() < deadline, "they make no rounds together"
                time.sleep(1.0)
                (facts,) = client.get("/control/train")
                if facts["tokens_per_s"] is not None and facts["round"] - 1 not in rates:
                    time.sleep(1.0)  # the figure is written a moment after the round
                    (facts,) = client.get("/control/train")
                    rates[facts["round"] - 1] = facts["tokens_per_s"]
                    taken, stolen[facts["round"] - 1] = StolenTime(), taken.share
                    if len(rates) > ROUNDS:  # the command takes seconds, in which a short round could pass unseen
                        together = self._together(places[0])
        turns = [
            (self._round_rate(machine, steps), rates[number], stolen[number], steps)
            for number, steps in together.items()
            if number in rates
        ]
        self.notes["turns"]["round_20mbit"] = turns
        return {"round_20mbit": median_turn([turn[:3] for turn in turns])}

    def memory(self) -> Pairs:
        """Memory that fine-tuning takes at its fullest, the model included."""
        pairs = []
        machine = MachineSpec("here", 1, 1.0, 1.0, kind="cpu")
        for kept in (True, False):
            task = TrainingMemory(RANK, BATCH * LENGTH, 1, recomputed=not kept)
            pairs.append((float(tuning_peak_bytes(SHAPE, machine, task)), float(added_bytes(kept)[1])))
        self.notes["memory"] = pairs
        return {"memory": max(pairs, key=lambda pair: abs(pair[0] / pair[1] - 1))}

    # --- inside -------------------------------------------------------------------------------------------------------

    def _wait_measured(self, swarm: BenchSwarm) -> None:
        """Wait until the asker has measured the way to all nodes, and warm everything up."""
        swarm.reply(QUESTION, 8)
        wait_until(lambda: all(peer.rtt_s is not None for peer in swarm.client.snapshot().peers), "links are measured")
        self.notes.setdefault("rtt_s", []).append([peer.rtt_s for peer in swarm.client.snapshot().peers])

    def _by_turns(self, name: str, forecast: Callable[[], float], measure: Callable[[], float]) -> tuple[float, float]:
        """Forecast and measure by turns; return the turn with the median ratio, of those that were left alone most."""
        turns: list[tuple[float, float, float]] = []
        while not enough([stolen for *_, stolen in turns]):
            taken = StolenTime()
            turns.append((forecast(), measure(), taken.share))
        self.notes["turns"][name] = turns
        print(f"  {name}: {turns}", file=sys.stderr, flush=True)
        return median_turn(turns)

    def _planned(self, name: str, figure: str, place: Place, *asked: str) -> float:
        """One figure of a forecast by `shoal plan`; its parts are noted."""
        facts = facts_of(place, "plan", *asked)
        self.notes["parts"][name] = facts["parts"]
        return float(facts[figure])

    def _chat(self, name: str, swarm: BenchSwarm, asker: Place) -> tuple[float, float]:
        asked = ("chat", "--context=64", f"--tokens={self._tokens}")
        found = self._by_turns(
            name,
            partial(self._planned, name, "tokens_per_s", asker, *asked),
            lambda: float(swarm.reply(QUESTION, self._tokens).done["tokens_per_s"]),
        )
        route = swarm.client.snapshot().route
        self.notes["parts"][f"{name}_measured"] = None if route is None else asdict(route)
        return found

    def _streams(self, swarm: BenchSwarm, asker: Place) -> tuple[float, float]:
        """Eight replies at once, forecast from a file that describes the three nodes and the asker on one host."""
        file = self._folder / "machines.toml"
        told = ("--streams=8", "--context=64", f"--tokens={self._tokens}", "--model=starter", f"--machines={file}")
        stories = [f"Tell a very long story about {animal}." for animal in ANIMALS]

        def forecast() -> float:
            here, peers = this_machine(form=starter_form()), swarm.client.snapshot().peers
            memory = 1 + here.total_bytes - here.free_bytes
            asks = replace(here, name="asker", memory_bytes=memory, cap_bytes=1, host="this")
            nodes = [
                replace(here, name=f"node{n}", cap_bytes=CAP, host="this", rtt_s=peer.rtt_s or 0.0)
                for n, peer in enumerate(peers)
            ]
            file.write_text("\n".join(map(machine_table, (asks, *nodes))))
            return self._planned("streams8", "tokens_per_s", asker, "chat", *told)

        return self._by_turns(
            "streams8", forecast, lambda: together_tokens_per_s(swarm.replies(stories, self._tokens)[0])
        )

    def _finetune(self, name: str, place: Place, *more: str) -> tuple[float, float]:
        """Seconds of a step of the job of facts."""
        data = self._folder / "facts.jsonl"
        if not data.exists():
            write_facts(self._folder)
        outs = (f"--out=facts{number}" for number in range(MOST_TURNS))
        order = ("finetune", f"--data={data}", *FACTS, *more)

        def forecast() -> float:
            facts = facts_of(place, *order, "--out=dry", "--dry-run")
            return float(facts["seconds"] / facts["steps"])

        def measure() -> float:
            done = facts_of(place, *order, next(outs))
            return float(done["seconds"] / done["steps"])

        return self._by_turns(name, forecast, measure)

    def _together(self, place: Place) -> dict[int, int]:
        """The steps of each round that both islands made, by its number; the first one has still to begin alike."""
        log = facts_of(place, "train", "log", "fish")
        found = {}
        for entry in log:
            steps = {one["steps"] for one in entry["members"].values()}
            if len(entry["members"]) == 2 and len(steps) == 1:
                found[entry["round"]] = steps.pop()
        return dict(list(found.items())[1:])

    def _round_rate(self, machine: MachineSpec, steps: int) -> float:
        """Tokens/s that are forecast for rounds of so many steps."""
        islands = tuple(
            replace(machine, name=name, island=name, host="this", up_bytes_per_s=MBIT_20, down_bytes_per_s=MBIT_20)
            for name in ("one", "two")
        )
        task = StepTask(rank=None, rows=512, micro_batches=1)
        terms = Terms(10**6, every=steps, held_rows=HELD_MOST * 128)
        found = rounds_of([Fleet(one, (one,)) for one in islands], island_config(), task, terms)
        assert found is not None
        self.notes["round_parts"] = dict(found.parts)
        return found.tokens_per_s


def enough(stolen: list[float]) -> bool:
    """True if enough turns were left alone, or too many were made, by the share of the cores that each lost."""
    return sum(share <= MOST_STOLEN for share in stolen) >= ROUNDS or len(stolen) >= MOST_TURNS


def median_turn(turns: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Forecast and measurement of the turn with the median ratio, of those that were left alone most."""
    counted = sorted(turns, key=lambda turn: turn[2])[:ROUNDS]
    counted.sort(key=lambda turn: turn[0] / turn[1])
    return counted[len(counted) // 2][:2]


def island_config() -> ModelConfig:
    """The shape that the islands train."""
    return parse_config(ISLAND_SHAPE, "the bench", {})


def machine_table(machine: MachineSpec) -> str:
    """A machine as `--machines` reads it."""
    fields = ("memory_bytes", "reading_bytes_per_s", "flops_per_s", "few_rows_flops_per_s", "rtt_s", "cap_bytes")
    numbers = [f"{name} = {getattr(machine, name)}" for name in (*fields, "weight_bytes", "head_bytes_per_s")]
    links = ["up_bytes_per_s = 1e9", "down_bytes_per_s = 1e9"]
    words = [f'name = "{machine.name}"', f'kind = "{machine.kind}"', f'host = "{machine.host}"']
    return "\n".join(["[[machine]]", *words, *numbers, *links, ""])


PARTS = ("chat_alone", "swarm3", "delay50", "finetune_local", "round_20mbit", "memory")


def measure(only: tuple[str, ...], tokens: int) -> dict[str, Any]:
    """Everything, one after the other."""
    pairs: Pairs = {}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), tokens)
        parts: dict[str, Callable[[], Pairs]] = {name: getattr(bench, name) for name in PARTS}
        for name in only:
            pairs |= parts[name]()
            print(f"{name}: {pairs}", file=sys.stderr, flush=True)
    errors = {f"{name}_error": round(abs(forecast / measured - 1), 3) for name, (forecast, measured) in pairs.items()}
    cases = list(staged_cases(this_machine()))
    return {
        **errors,
        "advice_right": sum(case.is_right for case in cases),
        "advice": {case.name: [case.forecast.advice, case.forecast.limit, case.is_right] for case in cases},
        "pairs": pairs,
        "notes": bench.notes,
    }


def main() -> int:
    """Run and print; fails if advice is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    figures = measure(tuple(arguments.only.split(",")), arguments.tokens)
    print(json.dumps(figures) if arguments.json else "\n".join(f"{name:24} {value}" for name, value in figures.items()))
    return 0 if figures["advice_right"] == len(figures["advice"]) else 1


if __name__ == "__main__":
    sys.exit(main())
