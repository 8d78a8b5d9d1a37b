"""A fine-tuning job in this process: checked, loaded, trained step by step, paused and taken up again.

Blocks the thread that runs it. Everything that decides the result is in the job's record, and the number of a step says
which records it takes: a job that goes on computes what it would have computed without the pause, bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from app.core.errors import AppError
from app.core.units import format_size
from app.manifest.importing import hash_source
from app.training.adapter_store import AdapterStore
from app.training.job_store import ENDED, Job, JobSource, JobStore, Progress, Status
from app.training.material import DataTerms, Material, adapter_settings, back_at, read_material, require_unchanged
from app.training.record import JobRecord
from engine.budget import (
    TrainingBudget,
    TrainingTask,
    allowance_on,
    ends_bytes,
    loss_bytes,
    plan_training,
    unquantised,
)
from engine.device.dtypes import pick_dtype
from engine.device.probe import Device, find_device, probe_devices
from engine.errors import EngineError, NotFinite
from engine.model.block import WeightOptions
from engine.model.ends import load_ends
from engine.model.span import SpanOptions, load_span
from engine.sources.opening import open_source
from engine.training.head import TrainingEnds
from engine.training.local_trainer import LocalTrainer, MicroBatch, StepResult
from engine.training.optimiser import Schedule
from engine.training.peft_format import Adapter, peft_files
from engine.training.span import TrainedSpan

_SAVED_SHARE = 0.04  # of the time is spent on saving the state, at most
_SAVED_EVERY_S = 30.0  # and not more often than this
_TOLD_EVERY_S = 2.0  # how often `shoal jobs` can see that a job moves

LoadProgress = Callable[[int, int], None]  # (done, in all)


def gather(files: JobSource, terms: DataTerms, cache: Path, progress: LoadProgress) -> Material:
    """Open the model and read the data; raises `DataError` or `EngineError` for what cannot be used."""
    source = open_source(files.model, cache, progress)
    material = read_material(source, "", files, terms)
    total, done = sum(entry.length for part in source.parts.values() for entry in part), 0

    def count(read: int) -> None:
        nonlocal done
        done += read
        progress(min(done, total), total)

    return replace(material, model=hash_source(source, count).manifest.hash)


@dataclass(frozen=True)
class MachinePlan:
    """Where a job runs on this machine, and the memory that it takes."""

    device: Device
    dtype: torch.dtype
    budget: TrainingBudget
    ends_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes in all."""
        return self.budget.total_bytes + self.ends_bytes


def plan_machine(record: JobRecord, material: Material, device_name: str | None) -> MachinePlan:
    """Choose the device and divide its memory; raises `AppError` if the job does not fit."""
    config = material.source.config
    device = find_device(device_name, probe_devices())
    dtype = pick_dtype(device.id)
    precision = unquantised(dtype.itemsize)
    longest = max(len(example.token_ids) for example in (*material.trained.examples, *material.held.examples))
    rows = max(longest, min(record.rows, record.batch * longest))
    ends = ends_bytes(config, precision, embedding=True, head=True) + loss_bytes(config, precision, rows)
    usable = allowance_on(device, None).usable_bytes - ends
    task = TrainingTask(config.n_blocks, record.rank, record.targets, rows, under_way=1)
    budget = plan_training(config, precision, task, usable)
    if budget.total_bytes > usable:
        raise AppError(
            f"training {material.source.label} takes {format_size(budget.total_bytes + ends)}, but {device.id} has "
            f"{format_size(max(0, usable + ends))} to spare: give a smaller --length or --rank, or a smaller model"
        )
    return MachinePlan(device, dtype, budget, ends)


def load_trainer(record: JobRecord, material: Material, plan: MachinePlan) -> LocalTrainer:
    """Load the model and draw the adapters of a job."""
    source = material.source
    options = SpanOptions(torch.device(plan.device.id), plan.dtype)
    blocks = load_span(source, 0, source.config.n_blocks, options).blocks
    span = TrainedSpan(
        source.config,
        blocks,
        adapter_settings(record),
        WeightOptions(options.device, options.dtype),
        input_bytes=plan.budget.input_bytes,
        graph_bytes=plan.budget.graph_bytes,
    )
    ends = TrainingEnds(load_ends(source, options))
    return LocalTrainer(ends, [span], Schedule(record.rate, record.steps, record.warm_up), record.clip)


class LocalRun:
    """Runs a job until it is finished, or until it is asked to pause or to stop."""

    def __init__(self, job: Job, material: Material, trainer: LocalTrainer, jobs: JobStore) -> None:
        require_unchanged(job, material)
        self.record, self._material, self._trainer, self._jobs = job.record, material, trainer, jobs
        states = jobs.load_state(job.record.id)
        if states is not None:
            trainer.load(states)
        self.progress = back_at(trainer.version, job, material)

    def run(self, on_step: Callable[[StepResult, Progress], None], asked: Callable[[], str]) -> Progress:
        """Train; `asked` is called before each step and may return `pause` or `stop`.

        Raises `EngineError` if a step fails: the job then stays at the last good step and can go on from it.
        """
        saved_at = told_at = time.monotonic()
        cost_s = 0.0
        self._jobs.save_progress(self.record.id, self.progress)
        try:
            self._validate(at_start=True)
            while self.progress.step < self.record.steps:
                if wish := asked():
                    return self._leave(wish)
                result, seconds = self._step()
                self.progress = self.progress.after_step(result.version, result.loss, result.tokens, seconds)
                self._validate()
                on_step(result, self.progress)
                now = time.monotonic()
                if now - saved_at > max(_SAVED_EVERY_S, cost_s / _SAVED_SHARE):
                    self.save("running")
                    saved_at = told_at = time.monotonic()
                    cost_s = saved_at - now
                elif now - told_at > _TOLD_EVERY_S:
                    self._jobs.save_progress(self.record.id, self.progress)
                    told_at = now
        except EngineError as error:
            self.save("failed", f"{error}")
            raise
        self.save("running")
        return self.progress

    @property
    def is_complete(self) -> bool:
        """True if all steps are done."""
        return self.progress.step == self.record.steps

    def batches(self, step: int) -> list[MicroBatch]:
        """The micro-batches of a step, from 0."""
        return self._material.step(self.record, step)

    def adapter(self) -> Adapter:
        """The adapter as it is now."""
        span = self._trainer.spans[0]
        return Adapter(span.settings, {block: span.values(block) for block in span.blocks}, self.record.model)

    def files(self) -> dict[str, bytes]:
        """The adapter's files in PEFT's format."""
        source = self._material.source
        return peft_files(self.adapter(), source.config, source.label)

    def _step(self) -> tuple[StepResult, float]:
        began = time.perf_counter()
        record = self.record
        try:
            result = self._trainer.step(self.batches(self.progress.step))
        except NotFinite as error:
            raise NotFinite(
                f"the loss is not finite after step {self.progress.step}, so job {record.id} stopped there: "
                "start again with a smaller --lr"
            ) from error
        return result, time.perf_counter() - began

    def _validate(self, *, at_start: bool = False) -> None:
        """Compute the loss on data that is not trained on, before the first step and after each epoch."""
        step, record = self.progress.step, self.record
        due = (step == 0 or not at_start) and self._material.validates_at(record, step)
        if due and (not self.progress.validation or self.progress.validation[-1][0] != step):
            loss = self._trainer.loss(self._material.validation(record))
            self.progress = self.progress.validated(step, loss)

    def _leave(self, wish: str) -> Progress:
        self.save("stopped" if wish == "stop" else "paused")
        return self.progress

    def save(self, status: Status, why: str = "") -> None:
        """Write how far the job is, and the state to go on from unless it has ended."""
        self.progress = replace(self.progress, status=status, why=why)
        if status in ENDED:
            self._jobs.remove_state(self.record.id)
        else:
            self._jobs.save_state(self.record.id, self._trainer.states())
        self._jobs.save_progress(self.record.id, self.progress)


def finish(run: LocalRun, adapters: AdapterStore) -> Path:
    """Store the adapter of a job whose steps are done, then remove its state; returns the adapter's folder."""
    folder = adapters.save(run.record.out, run.files())
    run.save("finished")
    return folder
