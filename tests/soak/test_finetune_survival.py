"""Fine-tuning between real processes in which a hop is killed, one freezes, and the owner dies: no step's loss changes.

Three spans with two holders each, so that holders share micro-batches (short form: `tests/soak/test_training.py`).
"""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from app.api.client import client_of
from app.core.errors import AppError
from tests.process.node_process import Place, Serving, wait_until
from tests.process.process_swarm import Node, ProcessSwarm, open_process_swarm

pytestmark = pytest.mark.soak

SEEDS = 20
SPANS = ("0:3", "3:6", "6:8")
RECORDS, BATCH, LENGTH, EPOCHS = 64, 8, 256, 4  # each record a sequence, two micro-batches a step
STEPS = EPOCHS * RECORDS // BATCH
TOLERANCE = 1e-3  # holders add up in another order than one process
FINISHED_S = 300.0


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, rng = tmp_path_factory.mktemp("data") / "texts.jsonl", random.Random(7)
    texts = ["".join(rng.choices("abcdefgh ", k=LENGTH - 8)) for _ in range(RECORDS)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


class Owner:
    """A node that hosts nothing and owns the jobs; it can die and come back."""

    def __init__(self, folder: Path, swarm: ProcessSwarm) -> None:
        self.place, self._swarm = Place(folder / "owner", swarm.asker.place.cache), swarm
        self._serving: Serving | None = None
        self.start()

    def start(self) -> None:
        """Begin, or begin again after it died."""
        flags = ("--discovery=invite,remembered",)
        self._serving = Serving(self.place, *flags, SHOAL_INVITE=self._swarm.invite())
        self._serving.ready()

    def die(self) -> None:
        """End without a word."""
        assert self._serving is not None
        with self._serving:
            self._serving.process.send_signal(signal.SIGKILL)

    def job(self, out: str) -> dict[str, Any]:
        """What the owner says of a job; nothing while it comes up."""
        with suppress(AppError):
            jobs: list[dict[str, Any]] = client_of(self.place.home).get("/control/jobs")
            return next((one for one in jobs if one["out"] == out), {})
        return {}

    def wait_step(self, out: str, step: int) -> None:
        """Wait until a job has made so many steps."""
        wait_until(lambda: self.job(out).get("step", 0) >= step, f"{out} reaches step {step}", FINISHED_S)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ProcessSwarm, Owner]]:
    folder = tmp_path_factory.mktemp("nodes")
    with open_process_swarm(folder, SPANS * 2, train="members") as swarm:
        swarm.wait_covered(2)
        owner = Owner(folder, swarm)
        try:
            yield swarm, owner
        finally:
            owner.die()


@pytest.fixture(scope="module")
def undisturbed(stage: tuple[ProcessSwarm, Owner], data: Path) -> list[float]:
    """The losses of one process."""
    words = ("--rank=4", f"--batch={BATCH}", f"--length={LENGTH}", f"--epochs={EPOCHS}", "--lr=1e-3", "--validation=0")
    order = ("finetune", "--data", str(data), "--out=alone", *words, "--local", "--model=tiny-random", "--device=cpu")
    losses: list[float] = stage[1].place.shoal(*order, "--json", patience_s=FINISHED_S).facts["losses"]
    assert len(losses) == STEPS
    return losses


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_losses_are_those_of_one_process(
    stage: tuple[ProcessSwarm, Owner], undisturbed: list[float], data: Path, seed: int
) -> None:
    (swarm, owner), rng, out = stage, random.Random(seed), f"job{seed}"
    order = {
        "out": out, "data": str(data), "rank": 4, "batch": BATCH, "length": LENGTH, "epochs": EPOCHS, "rate": 1e-3,
        "validation": 0.0,
    }  # fmt: skip
    client_of(owner.place.home).post("/control/jobs", order)
    at = sorted(rng.sample(range(2, STEPS - 4), 3))
    happenings = rng.sample(["killed", "frozen", "owner"], 3)
    for step, happening in zip(at, happenings, strict=True):
        owner.wait_step(out, step)
        victim = rng.choice(swarm.nodes)
        print(f"seed {seed}: {happening} behind step {step}, {victim.span}", flush=True)
        if happening == "owner":
            owner.die()
            owner.start()
        elif happening == "killed":
            victim.signal(signal.SIGKILL)
            victim.ended()
            swarm.revive(victim)
        else:
            freeze(owner, out, victim)
    # A job whose owner has just come back is paused until that one has joined the swarm.
    wait_until(lambda: owner.job(out).get("status") in ("finished", "failed", "stopped"), f"{out} ends", FINISHED_S)
    ended = owner.job(out)
    assert ended["status"] == "finished", ended["why"]
    assert not ended["left_out"], "nobody lied"
    assert ended["losses"] == pytest.approx(undisturbed, abs=TOLERANCE)
    swarm.wait_covered(2)


def freeze(owner: Owner, out: str, victim: Node) -> None:
    """Stop a node until the job has gone on without it, or has ended."""
    begun = owner.job(out).get("step", 0)
    victim.signal(signal.SIGSTOP)
    try:
        owner.wait_step(out, min(begun + 3, STEPS))
    finally:
        victim.signal(signal.SIGCONT)
