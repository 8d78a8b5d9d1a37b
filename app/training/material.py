"""What a fine-tuning job is made of: the user's wish, the data as sequences of the model, and the job's record.

The same for a job in this process and for one over the swarm.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from app.core.errors import AppError
from app.core.wall_clock import wall_ms
from app.session.frame import CHANGES
from app.training.adapter_store import AdapterStore
from app.training.dataset import (
    Dataset,
    Example,
    grouped,
    read_records,
    split,
    step_batches,
    steps_per_epoch,
    tokenised,
    tokens_before,
)
from app.training.job_store import ENDED, Job, JobSource, JobStore, Progress
from app.training.record import JobRecord, checked_name
from engine.sources.base import ModelSource
from engine.text.prompt import ModelText
from engine.training.adapters import AdapterSettings
from engine.training.local_trainer import MicroBatch, micro_batch
from engine.training.optimiser import Schedule

ROWS = 1024  # of a micro-batch, unless one sequence is longer
CLIP = 1.0


@dataclass(frozen=True)
class TrainingWish:
    """A job as the user asks for it."""

    out: str
    source: JobSource
    adapter: AdapterSettings
    epochs: int
    batch: int
    length: int
    rate: float
    validation: float  # share of the data, if there is no validation file
    device: str | None = None

    @property
    def seed(self) -> int:
        """The seed of the adapter, of the order of the records and of the choice of those to validate with."""
        return self.adapter.seed


def wish_of(values: Mapping[str, Any]) -> TrainingWish:
    """Return a wish from the fields of an API request; raises `AppError` or `EngineError` for what cannot be."""
    adapter = AdapterSettings(
        values["rank"], values["alpha"], tuple(values["targets"]), values["dropout"], values["seed"]
    )
    if not 0 < values["rate"] < math.inf:
        raise AppError(f"the learning rate must be a positive number, not {values['rate']}")
    if values["wire"] == CHANGES and values["epochs"] < 2:
        raise AppError("--wire changes sends changes of data that was seen before: use it with --epochs 2 or more")
    source = JobSource("", values["data"], values["validation_file"], wire=values["wire"])
    return TrainingWish(
        out=checked_name(values["out"]),
        source=source,
        adapter=adapter,
        epochs=values["epochs"],
        batch=values["batch"],
        length=values["length"],
        rate=values["rate"],
        validation=0.0 if values["validation_file"] is not None else values["validation"],
    )


class DataTerms(Protocol):
    """How the data is cut and divided; both a wish and a record have it."""

    @property
    def length(self) -> int: ...
    @property
    def validation(self) -> float: ...
    @property
    def seed(self) -> int: ...


@dataclass(frozen=True)
class Material:
    """The model, its hash, and the data as sequences."""

    source: ModelSource
    model: str
    data: str  # hash of the files
    trained: Dataset
    held: Dataset  # to validate with; may be empty

    def step(self, record: JobRecord, number: int) -> list[MicroBatch]:
        """Return the micro-batches of a step, from 0."""
        groups = step_batches(self.trained, number, batch=record.batch, seed=record.seed, rows=record.rows)
        return [_batch(group) for group in groups]

    def validation(self, record: JobRecord) -> list[MicroBatch]:
        """Return the micro-batches to validate with."""
        return [_batch(group) for group in grouped(self.held.examples, record.rows)]

    def validates_at(self, record: JobRecord, step: int) -> bool:
        """True if the loss on the validation data is due: before the first step and after each epoch."""
        return bool(self.held.examples) and step % steps_per_epoch(len(self.trained.examples), record.batch) == 0


def read_material(source: ModelSource, model: str, files: JobSource, terms: DataTerms) -> Material:
    """Read the data for a model; raises `DataError` or `AppError` for what cannot be used."""
    records = read_records(Path(files.data))
    digest = hashlib.sha256(Path(files.data).read_bytes())
    if terms.length > source.config.context_length:
        raise AppError(f"--length {terms.length} is more than the model's context of {source.config.context_length}")
    text = ModelText(source)
    trained = tokenised(records, text, terms.length)
    if files.validation_file is not None:
        held = tokenised(read_records(Path(files.validation_file)), text, terms.length)
        digest.update(Path(files.validation_file).read_bytes())
    else:
        trained, held = split(trained, terms.validation, terms.seed)
    return Material(source, model, digest.hexdigest(), trained, held)


def new_record(wish: TrainingWish, material: Material) -> JobRecord:
    """Return the record of a new job."""
    Schedule(wish.rate, 1)  # raises for a rate that is none
    steps = wish.epochs * steps_per_epoch(len(material.trained.examples), wish.batch)
    return JobRecord(
        out=wish.out,
        model=material.model,
        data=material.data,
        rank=wish.adapter.rank,
        alpha=wish.adapter.alpha,
        targets=wish.adapter.targets,
        dropout=wish.adapter.dropout,
        epochs=wish.epochs,
        batch=wish.batch,
        length=wish.length,
        rows=max(ROWS, wish.length),
        rate=wish.rate,
        steps=steps,
        warm_up=steps // 20,
        clip=CLIP,
        validation=wish.validation,
        seed=wish.adapter.seed,
        created_ms=wall_ms(),
    )


def start(wish: TrainingWish, material: Material, jobs: JobStore, adapters: AdapterStore) -> Job:
    """Write a new job; raises `AppError` if its name is taken by an adapter or by a job that has not ended."""
    adapters.require_free(wish.out)
    for job in jobs.all():
        if job.record.out == wish.out and job.progress.status not in ENDED:
            raise AppError(
                f"job {job.record.id} makes an adapter named {wish.out} already: go on with `shoal jobs resume "
                f"{job.record.id}`, end it with `shoal jobs stop {job.record.id}`, or choose another name"
            )
    return jobs.create(new_record(wish, material), wish.source)


def require_unchanged(job: Job, material: Material) -> None:
    """Raise `AppError` if the model or the data of a job is not what it began with."""
    if (material.model, material.data) != (job.record.model, job.record.data):
        what = "model" if material.model != job.record.model else "data"
        raise AppError(
            f"the {what} of job {job.record.id} has changed since it began, so it cannot go on: "
            "start a new one with `shoal finetune`"
        )


def adapter_settings(record: JobRecord) -> AdapterSettings:
    """Return the shape and start of a job's adapter."""
    return AdapterSettings(record.rank, record.alpha, record.targets, record.dropout, record.seed)


def back_at(step: int, job: Job, material: Material) -> Progress:
    """Return a job's progress as it was after a step; it may be newer than the state that the job goes on from."""
    progress = job.progress
    ahead = progress.step - step
    return replace(
        progress,
        status="running",
        step=step,
        tokens=tokens_before(material.trained, step, batch=job.record.batch, seed=job.record.seed),
        why="",
        losses=progress.losses[: len(progress.losses) - ahead] if ahead > 0 else progress.losses,
        validation=tuple(pair for pair in progress.validation if pair[0] <= step),
    )


def _batch(group: Sequence[Example]) -> MicroBatch:
    return micro_batch([(example.token_ids, example.counted) for example in group])
