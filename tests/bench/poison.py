"""A poisoned replica: three nodes hold a small model, and one of them hands over wrong sums.

    python -m tests.bench.poison [--json] [--steps 40] [--honest 10]

Each attack is trained through four times: with audits, with audits but begun late, after the liar has passed its first
ones, with centred clipping alone, and with plain averaging. The loss on text that is not trained on is compared with
that of three honest nodes. Then honest nodes train on other data, and nobody may be left out. `found_after` counts the
steps from the first wrong sums on. The nodes are real, on the in-memory network; the text is docstrings.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import trio

from app.training.audits import Caution
from app.training.trainer import JobHooks, Replicas, StepDone
from engine.sources.base import ModelSource
from engine.sources.tiny import open_tiny
from engine.training.adapters import AdapterSettings
from engine.training.head import IGNORED
from engine.training.local_trainer import MicroBatch
from tests.app.training.job_swarm import UNHURRIED, open_job_swarm

NODES, BATCHES, SEQUENCES, LENGTH, RATE = 3, 6, 4, 48, 3e-3
LIAR, LATE = "n1", 8  # it hands over right sums so many times before it lies late
Attack = Callable[[torch.Tensor], torch.Tensor]
ATTACKS: dict[str, Attack] = {
    "flipped": lambda sums: -sums,
    "flipped_x10": lambda sums: -10 * sums,
    "noise": lambda sums: torch.randn_like(sums) * sums.std(),
    "zeros": torch.zeros_like,
}
WAYS = {
    "audited": Caution(),
    "late": Caution(),
    "clipped": Caution(audit_every=None),
    "plain": Caution(clips=False, audit_every=None),
}


class Text:
    """Sequences of bytes, the last tenth of them to validate with."""

    def __init__(self) -> None:
        modules = (argparse, inspect, json, tempfile, trio)
        text = "\n".join(
            doc for module in modules for _, each in inspect.getmembers(module) if (doc := inspect.getdoc(each))
        )
        data = torch.tensor(list(text.encode()), dtype=torch.long)
        rows = data[: len(data) // LENGTH * LENGTH].reshape(-1, LENGTH)
        rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
        held = max(SEQUENCES, len(rows) // 10)
        self._trained, self._held = rows[held:], rows[:held]

    def batches(self, seed: int, version: int) -> list[MicroBatch]:
        """The micro-batches of a step."""
        generator = torch.Generator().manual_seed(1000 * seed + version)
        chosen = torch.randint(0, len(self._trained), (BATCHES, SEQUENCES), generator=generator)
        return [_batch(self._trained[indexes]) for indexes in chosen]

    def held(self) -> list[MicroBatch]:
        """The micro-batches to validate with."""
        return [_batch(rows) for rows in self._held[:32].split(SEQUENCES)]


def _batch(ids: torch.Tensor) -> MicroBatch:
    labels = ids.roll(-1, dims=1)
    labels[:, -1] = IGNORED
    return MicroBatch(ids, labels)


class Outcome(NamedTuple):
    """What became of a run."""

    validation: float
    left_out: dict[str, str]
    found_after: int | None  # the step that the liar was left out of
    audits: int


async def train(
    source: ModelSource,
    text: Text,
    steps: int,
    *,
    caution: Caution,
    attack: Attack | None = None,
    late: bool = False,
    seed: int = 0,
) -> Outcome:
    """Train through three nodes, one of them poisoned if there is an attack."""
    torch.manual_seed(seed)
    found_after: int | None = None
    validation: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        async with open_job_swarm(source, Path(folder), *[(0, source.config.n_blocks)] * NODES) as swarm:
            if attack is not None:
                swarm.poison(LIAR, attack, LATE if late else 0)
            owner = swarm.owner(
                every=steps,
                settings=AdapterSettings(rank=8, alpha=16.0, seed=seed),
                replicas=Replicas(swarm.holders),
                rate_of=lambda step: RATE,
                terms={"caution": caution},
                rows=SEQUENCES * LENGTH,
                patience=UNHURRIED,
            )

            def on_step(step: StepDone) -> None:
                nonlocal found_after
                if owner.figures.left_out and found_after is None:
                    found_after = step.version

            def held(version: int) -> Sequence[MicroBatch]:
                return text.held() if version == steps else ()

            hooks = JobHooks(validation=held, on_validation=validation.__setitem__)
            await owner.run(steps, lambda version: text.batches(seed, version), on_step, hooks)
            return Outcome(validation[steps], owner.figures.left_out, found_after, owner.figures.audits)


def measure(steps: int, honest_runs: int) -> dict[str, float]:
    """Train every way and return the figures; `found_after` is NaN if a liar was not found, or somebody else was."""
    torch.set_num_threads(1)
    text = Text()
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        source = open_tiny(Path(folder))

        def run(**more: object) -> Outcome:
            async def once() -> Outcome:
                return await train(source, text, steps, **more)  # type: ignore[arg-type]

            return trio.run(once)

        honest = run(caution=Caution())
        figures["honest_validation_loss"] = honest.validation
        figures["honest_plain_ratio"] = run(caution=WAYS["plain"]).validation / honest.validation
        for name, attack in ATTACKS.items():
            for way, caution in WAYS.items():
                outcome = run(attack=attack, caution=caution, late=way == "late")
                figures[f"{name}_{way}_loss_ratio"] = outcome.validation / honest.validation
                if caution.audit_every:
                    is_right = set(outcome.left_out) == {LIAR} and outcome.found_after is not None
                    # Four of the first rounds of sums are audits, so the late liar begins with step 5 at the earliest.
                    begun = 4 if way == "late" else 0
                    figures[f"{name}_{way}_found_after"] = (outcome.found_after or 0) - begun if is_right else math.nan
        others = [run(caution=Caution(), seed=seed) for seed in range(1, honest_runs + 1)]
        audited = [(name, way) for name in ATTACKS for way in ("audited", "late")]
        figures["poison_found_after"] = max(figures[f"{name}_{way}_found_after"] for name, way in audited)
        figures["poison_loss_ratio"] = max(figures[f"{name}_{way}_loss_ratio"] for name, way in audited)
        figures["honest_runs"] = honest_runs
        figures["honest_left_out"] = sum(len(outcome.left_out) for outcome in (honest, *others))
        figures["honest_audits_per_step"] = sum(outcome.audits for outcome in others) / max(1, len(others) * steps)
    return figures


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--honest", type=int, default=10)
    arguments = parser.parse_args()
    figures = measure(arguments.steps, arguments.honest)
    if arguments.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:>34}  {value:.3f}")


if __name__ == "__main__":
    main()
