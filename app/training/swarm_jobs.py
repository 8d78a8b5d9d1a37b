"""The fine-tuning jobs that this node owns in its swarm: begins them, runs each in a task, and takes them up again.

A job outlives the node: its record, progress and state are in the home folder (`app.training.job_store`), and the state
is as old as the last snapshot. Jobs that ran when the node ended go on when it joins the same swarm again. While the
node is paused, while members that it needs are away, and while memory or disk are full, a job waits, and goes on by
itself. It is locked all the time, so that it can be paused and stopped like one that makes steps.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

import trio

from app.core.compute import Device
from app.core.errors import AppError
from app.core.network import Network
from app.core.wall_clock import wall_ms
from app.courtesy.pause import PauseControl
from app.planning.history import PastForecast, correction, past_forecasts, remember
from app.routing.route import Route
from app.training.activations import ActivationDisk
from app.training.consent import consenting
from app.training.forecasts import SwarmForecaster, usual_step
from app.training.job_store import ENDED, MAX_LEFT_OUT, Job, JobStore, Progress, require_unfinished
from app.training.reading import TextReading
from app.training.states import StateStore
from app.training.trainer import (
    HopsAway,
    JobHooks,
    JobTerms,
    OwnServer,
    Replicas,
    RouteFinder,
    Snapshot,
    StepDone,
    SwarmTrainer,
)
from app.training.waiting import AGAIN_MOST_S, AGAIN_S, EXPECTED, what_it_waits_for, why_ended

if TYPE_CHECKING:
    from trio_typing import TaskStatus

    from app.config.home import Home
    from app.training.adapter_store import AdapterStore
    from app.training.material import Material, TrainingWish
    from app.training.record import JobRecord
    from engine.sources.base import ModelSource
    from engine.swarm_ends import SwarmEnds
    from p2p.platform import FileLock

log = logging.getLogger("shoal.training")

SNAPSHOT_EVERY = 5  # steps, at least
SNAPSHOT_AFTER_S = 120.0  # after which fewer steps are enough
SNAPSHOT_SHARE = 0.03  # of the time between two; with the first and the last one it is more in short jobs
TOLD_EVERY_S = 2.0  # how often the progress is written
LOOK_S = 1.0  # how often it is looked whether a job is to be paused or stopped that makes no steps
AUTO = "auto"
FINETUNE = "finetune"  # these jobs among past forecasts


class Ends(Protocol):
    """Tokenizer, embedding and head of the swarm's model; `app.asker.reply_service` implements it."""

    async def training_ends(self) -> tuple[ModelSource, SwarmEnds]:
        """Return the files and the loaded ends; raises `AppError` while they are not here."""


@dataclass(frozen=True)
class JobPlace:
    """What the jobs of one swarm run with."""

    swarm: str  # its id
    model: str  # hash of the model
    model_name: Callable[[], str]
    network: Network
    ends: Ends
    device: Device
    states: StateStore
    activations: ActivationDisk
    routes: Callable[[int, str], RouteFinder]  # for a model of so many blocks, and a number format between hops
    replicas: Callable[[int, str], Replicas]  # likewise
    own_server: OwnServer
    slow_wire: Callable[[Route, int], str | None]  # the number format if a link is slow, for so many epochs
    forecaster: SwarmForecaster
    pause: PauseControl  # of the node


@dataclass(frozen=True)
class JobForecast:
    """What a job would be: its data and steps, and the hops that would train it now."""

    records: int
    validation_records: int
    cut: int
    dropped: int
    tokens_per_epoch: int
    steps: int
    route: Route
    step_s: float | None = None  # of one step; None: not known
    correction: float | None = None  # that the speed was multiplied by, from past forecasts

    @property
    def seconds(self) -> float | None:
        """Seconds of the whole job."""
        return None if self.step_s is None else self.steps * self.step_s


@dataclass
class RunningJob:
    """A job that is in memory, to make steps or to wait for members."""

    job: Job
    progress: Progress
    trainer: SwarmTrainer
    material: Material
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)  # of its steps
    step_s: list[float] = field(default_factory=list)  # of the latest steps
    expected_step_s: float | None = None  # as forecast when it began, before any correction
    correction: float | None = None  # of the forecast's speed, from past forecasts

    @property
    def snapshots_s(self) -> float:
        """Seconds that its snapshots took, over all runs."""
        return self.job.progress.snapshots_s + self.trainer.figures.snapshots_s

    @property
    def left_s(self) -> float | None:
        """Seconds until it is finished: from its latest steps, or as forecast before the first one is done."""
        left = self.job.record.steps - self.progress.step
        if self.step_s:
            return median(self.step_s) * left
        return None if self.expected_step_s is None else self.expected_step_s / (self.correction or 1.0) * left


@dataclass
class _LockedJob:
    """A job that runs here, or waits."""

    job: Job  # with its progress when it was last not in memory
    running: RunningJob | None = None

    @property
    def progress(self) -> Progress:
        return self.job.progress if self.running is None else self.running.progress

    def change(self, **changes: Any) -> None:
        """Change some of the progress."""
        progress = replace(self.progress, **changes)
        if self.running is None:
            self.job = replace(self.job, progress=progress)
        else:
            self.running.progress = progress


class SwarmJobs:
    """Begins, runs and ends this node's jobs in one swarm; `run` until cancelled."""

    def __init__(self, home: Home, place: JobPlace) -> None:
        self._place, self._jobs, self._home = place, JobStore(home), home
        self._nursery: trio.Nursery | None = None
        self._starting, self._reading = trio.Lock(), TextReading()
        self._locked: dict[str, _LockedJob] = {}

    @property
    def running(self) -> dict[str, RunningJob]:
        """The jobs that are in memory, by their ids."""
        return {job_id: one.running for job_id, one in self._locked.items() if one.running is not None}

    @property
    def has_jobs(self) -> bool:
        """True if a job runs here, or waits."""
        return bool(self._locked)

    async def run(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Go on with the jobs that ran when the node ended, then run those that are begun."""
        async with trio.open_nursery() as self._nursery:
            self._place.states.serve()
            self._nursery.start_soon(self._follow_wishes)
            task_status.started()
            for job in await trio.to_thread.run_sync(self._jobs.interrupted, self._place.swarm):
                self._nursery.start_soon(self._take_up, job.record.id)
            await trio.sleep_forever()

    async def _follow_wishes(self) -> None:
        """Interrupt jobs while the node is paused, and those that wait for members once they are to pause or stop."""
        while True:
            self._interrupt()
            await trio.sleep(LOOK_S)

    def _interrupt(self) -> None:
        for job_id, running in self.running.items():  # not in a task that lasts, where the name of the last would stay
            if self._place.pause.training_waits or (running.progress.waiting and self._jobs.wished(job_id)):
                running.scope.cancel()

    async def forecast(self, wish: TrainingWish) -> JobForecast:
        """Say what a job would be, without beginning it; raises `AppError` or `EngineError`."""
        from app.training.material import new_record

        material = await self._material(wish)
        record = new_record(wish, material)
        routes = self._place.routes(material.source.config.n_blocks, wish.source.wire)
        route = await consenting(self._place.network, routes)
        trained = material.trained
        wire = await self._wire(wish, route)
        step_s, factor = await self._expected(record, material, route, wire)
        return JobForecast(
            len(trained.examples), len(material.held.examples), trained.cut, trained.dropped, trained.tokens,
            record.steps, route, None if step_s is None else step_s / (factor or 1.0), factor,
        )  # fmt: skip

    async def _expected(
        self, record: JobRecord, material: Material, route: Route, wire: str
    ) -> tuple[float | None, float | None]:
        """Return the seconds that a forecast gives a step, and by what past forecasts say to multiply its speed."""
        task = usual_step(material.trained, record, wire)
        step_s = await self._place.forecaster.step_s(route, material.source.config, task)
        past = await trio.to_thread.run_sync(past_forecasts, self._home.forecasts_file)
        return step_s, correction(past, FINETUNE)

    async def start(self, wish: TrainingWish) -> Job:
        """Begin a job; raises `AppError` or `EngineError` if it cannot be."""
        from app.training.material import start

        material = await self._material(wish)  # others begin meanwhile
        async with self._starting:
            # Raises if nobody trains a block.
            route = await self._place.routes(material.source.config.n_blocks, wish.source.wire)(frozenset())
            wire = await self._wire(wish, route)
            source = replace(wish.source, swarm=self._place.swarm, model=self._place.model_name(), wire=wire)
            wish = replace(wish, source=source)
            job = await trio.to_thread.run_sync(start, wish, material, self._jobs, self._adapters)
            await self._begin(job, material)
        return job

    async def resume(self, job_id: str) -> Job:
        """Go on with a job that was paused, or that failed; one that waits goes on by itself."""
        async with self._starting:
            job = require_unfinished(self._own(self._jobs.find(job_id)))
            if job.record.id not in self._locked:
                await self._begin(job, None)
        return job

    # --- inside -------------------------------------------------------------------------------------------------------

    async def _wire(self, wish: TrainingWish, route: Route) -> str:
        """Return the number format between hops: what is wanted, or for `auto` what the links of the route ask for.

        It stays the same as long as the job lasts, so that a repeated step is the same step; of `changes` but for
        rounding, as they begin anew with each route.
        """
        if wish.source.wire != AUTO:
            return wish.source.wire
        _, ends = await self._place.ends.training_ends()
        return self._place.slow_wire(route, wish.epochs) or ends.dtype

    @property
    def _adapters(self) -> AdapterStore:
        from app.training.adapter_store import AdapterStore  # loads torch, which a node without jobs does without

        return AdapterStore(self._home)

    def _own(self, job: Job) -> Job:
        job_id = job.record.id
        if not job.source.swarm:
            raise AppError(f"job {job_id} trains in one process: `shoal jobs resume {job_id}` goes on with it")
        if job.source.swarm != self._place.swarm:
            raise AppError(f"job {job_id} was begun in another swarm: switch to that swarm to go on with it")
        return job

    async def _material(self, wish: TrainingWish) -> Material:
        self._adapters.require_free(wish.out)
        return await self._read(wish.source, wish)

    async def _read(self, files: Any, terms: Any) -> Material:
        from app.training.material import read_material

        source, _ = await self._place.ends.training_ends()
        data = [path for path in (files.data, files.validation_file) if path is not None]
        return await self._reading.run(data, read_material, source, self._place.model, files, terms)

    async def _begin(self, job: Job, material: Material | None) -> None:
        """Run a job in a task of its own, on its own files if there is no `material`; later if the node is paused.

        It is locked before all else: a wish to pause or stop it in the meantime waits for the run, or for its failure.
        """
        assert self._nursery is not None, "jobs need a running node"
        job_id = job.record.id
        lock = self._jobs.hold(job_id)
        try:
            job = require_unfinished(self._jobs.find(job_id))  # a command may have stopped it until now
            running = None if self._place.pause.training_waits else await self._prepared(job, material)
            await self._nursery.start(self._run_job, _LockedJob(job, running), lock)
        except BaseException:
            lock.release()
            if self._jobs.wished(job_id) == "stop":
                self._jobs.end(job, "stop")
            raise

    async def _prepared(self, job: Job, material: Material | None) -> RunningJob:
        """Make a job's trainer, with the state that it goes on from."""
        from app.training.material import adapter_settings, back_at, require_unchanged
        from app.training.wiring import order_of
        from engine.training.optimiser import AdamW, Schedule
        from engine.training_runner import StateSample, owner_ends, sums_bytes, version_of

        if material is None:
            material = await self._read(job.source, job.record)
            require_unchanged(job, material)
        place, record, config = self._place, job.record, material.source.config
        _, ends = await place.ends.training_ends()
        wire = ends.dtype if job.source.wire == AUTO else job.source.wire  # AUTO: jobs of older versions
        order = order_of(adapter_settings(record), blocks=config.n_blocks, rows=record.rows, wire=wire)
        schedule = Schedule(record.rate, record.steps, record.warm_up)
        sums = sums_bytes(adapter_settings(record), config)
        version_at = partial(version_of, settings=adapter_settings(record), config=config)
        optimiser = AdamW(weight_decay=order.weight_decay)
        sample_of = partial(StateSample, settings=adapter_settings(record), config=config, optimiser=optimiser)
        terms = JobTerms(
            order, schedule.at, record.clip,
            snapshot_every=SNAPSHOT_EVERY, snapshot_after_s=SNAPSHOT_AFTER_S, snapshot_share=SNAPSHOT_SHARE,
            sums_bytes=sums, version_of=version_at, sample_of=sample_of,
        )  # fmt: skip
        trainer = SwarmTrainer(
            place.network, owner_ends(ends), place.device, place.states, place.routes(config.n_blocks, wire), terms,
            own_server=place.own_server, replicas=place.replicas(config.n_blocks, wire), activations=place.activations,
        )  # fmt: skip
        states = await trio.to_thread.run_sync(self._jobs.load_state, record.id)
        if states is not None:
            blocks = [states[block] for block in sorted(states)]
            version = await trio.to_thread.run_sync(version_at, blocks[0])
            await trainer.resume(version, blocks)
        trainer.leave_out(job.progress.left_out)
        progress = back_at(trainer.version, job, material)
        running = RunningJob(job, progress, trainer, material)
        try:
            route = await place.routes(config.n_blocks, wire)(frozenset(peer for peer, _ in job.progress.left_out))
            running.expected_step_s, running.correction = await self._expected(record, material, route, wire)
        except AppError as error:  # nobody trains a block now: the job waits for somebody
            log.info("job %s has no forecast: %s", record.id, error)
        return running

    async def _take_up(self, job_id: str) -> None:
        """Go on with a job that ran when the node ended."""
        try:
            with self._jobs.hold(job_id) as lock:
                job = self._jobs.find(job_id)
                if job.progress.status == "running":
                    await self._run_job(_LockedJob(job), lock)
        except AppError as error:  # such as that a command has just taken it
            log.info("job %s is not taken up: %s", job_id, error)

    async def _run_job(
        self, one: _LockedJob, lock: FileLock, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Run a job until it is finished, paused, stopped or failed, write down which, and release its lock."""
        job_id = one.job.record.id
        with lock:
            self._locked[job_id] = one
            try:
                await self._note(one, status="running", why="", waiting="")
                task_status.started()
                try:
                    await self._run_and_wait(one)
                finally:
                    await self._close(one)
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(self._settle, one)
            finally:
                del self._locked[job_id]

    async def _run_and_wait(self, one: _LockedJob) -> None:
        """Run a job, and wait for whatever keeps it from going on and may pass, until it is over.

        While it waits for members it stays in memory; else it begins again from the disk.
        """
        job_id, again_s = one.job.record.id, AGAIN_S
        while not self._jobs.wished(job_id):
            if why := self._place.pause.training_waits:
                await self._let_go(one)
                await self._wait(one, why, math.inf)
                continue
            step, stays = one.progress.step, False
            try:
                if one.running is None:
                    one.running = await self._prepared(one.job, None)
                    step = one.progress.step
                if await self._trained(one.running):
                    return
            except Exception as error:  # torch raises errors of every kind; they must not end the node's other work
                why, stays = what_it_waits_for(error), isinstance(error, HopsAway)
                if not why:
                    failure, is_known = why_ended(error), isinstance(error, EXPECTED)
                    log.warning("job %s failed: %s", job_id, failure, exc_info=None if is_known else error)
                    one.change(status="failed", why=failure)
                    return
            again_s = AGAIN_S if one.progress.step != step else again_s
            if not stays:
                await self._let_go(one)
            if why:
                await self._wait(one, why, again_s)
                again_s = min(2 * again_s, AGAIN_MOST_S)

    async def _trained(self, running: RunningJob) -> bool:
        """Make a job's steps until it is over or asked to pause or stop; False if they were interrupted."""
        steps, watch = running.job.record.steps, _Watch(running, self._jobs)
        with trio.CancelScope() as running.scope:
            await running.trainer.run(steps, watch.batches, watch.on_step, watch.hooks())
            running.progress = replace(running.progress, snapshots_s=running.snapshots_s)
            if running.progress.step == steps:
                await self._finish(running)
            return True
        return False

    async def _wait(self, one: _LockedJob, why: str, seconds: float) -> None:
        """Let a job wait, and say for what; less long if a pause begins or ends, or if it is asked to pause or stop."""
        if one.progress.waiting != why:
            log.warning("job %s %s", one.job.record.id, why)
            await self._note(one, waiting=why)
        pause = self._place.pause.training_waits
        with trio.move_on_after(seconds):
            while True:
                await trio.sleep(LOOK_S)
                if self._jobs.wished(one.job.record.id) or self._place.pause.training_waits != pause:
                    return

    async def _note(self, one: _LockedJob, **changes: Any) -> None:
        """Change a job's progress, and write it."""
        one.change(**changes)
        await trio.to_thread.run_sync(self._write, one.job.record.id, one.progress)

    async def _let_go(self, one: _LockedJob) -> None:
        """Free the memory of a job; it goes on from what is on disk."""
        await self._close(one)
        one.job, one.running = replace(one.job, progress=one.progress), None

    async def _close(self, one: _LockedJob) -> None:
        if one.running is not None:
            with trio.CancelScope(shield=True):
                await one.running.trainer.close()

    def _settle(self, one: _LockedJob) -> None:
        """Write how a run ended, just before its lock is released: what is wished after that finds no run."""
        job_id, progress = one.job.record.id, replace(one.progress, waiting="")
        if progress.status == "running":
            progress = replace(progress, status="paused")
        self._write(job_id, progress)
        if progress.status != "finished" and self._jobs.wished(job_id) == "stop":
            progress = replace(progress, status="stopped")
            self._write(job_id, progress)
        if progress.status in ENDED:
            self._jobs.remove_state(job_id)

    async def _finish(self, running: RunningJob) -> None:
        """Store the adapter of a job whose steps are done, and how its forecast compares."""
        from app.training.material import adapter_settings
        from engine.training.peft_format import peft_files
        from engine.training_runner import adapter_of

        record, source = running.job.record, running.material.source
        states = await running.trainer.final_states()

        def save() -> None:
            adapter = adapter_of(adapter_settings(record), source.config, states, record.model)
            self._adapters.save(record.out, peft_files(adapter, source.config, source.label))

        await trio.to_thread.run_sync(save)
        running.progress = replace(running.progress, status="finished")
        await self._compare(running)

    async def _compare(self, running: RunningJob) -> None:
        """Keep the forecast of a finished job beside its speed."""
        record, progress, step_s = running.job.record, running.progress, running.expected_step_s
        if step_s is None or progress.seconds <= 0:
            return
        machines = len({hop.peer for hop in running.trainer.route})
        forecast, measured = progress.tokens / (record.steps * step_s), progress.tokens / progress.seconds
        ended = PastForecast(wall_ms(), FINETUNE, record.model, machines, forecast, measured)
        await trio.to_thread.run_sync(remember, self._home.forecasts_file, ended)

    def _write(self, job_id: str, progress: Progress) -> None:
        """Write how far a job is; a full disk must not end the node's other work."""
        try:
            self._jobs.save_progress(job_id, progress)
        except OSError as error:
            log.warning("the progress of job %s cannot be written: %s", job_id, error)


class _Watch:
    """Follows a job's steps: gives its data, keeps its progress, and writes both to disk now and then."""

    def __init__(self, running: RunningJob, jobs: JobStore) -> None:
        self._running, self._material, self._jobs = running, running.material, jobs
        self._record = running.job.record
        self._told_at = self._step_at = time.monotonic()
        links = running.job.progress.links  # before the trainer counted
        self._earlier = Counter({(sender, receiver): size for sender, receiver, size in links})

    def hooks(self) -> JobHooks:
        return JobHooks(self._asked, self._validation, self._on_validation, self._on_snapshot)

    def batches(self, version: int) -> Sequence[Any]:
        self._step_at = time.monotonic()
        return self._material.step(self._record, version)

    def on_step(self, done: StepDone) -> None:
        """Take a step; after a hop was lost, steps come again."""
        from app.training.material import back_at

        running, now = self._running, time.monotonic()
        progress = running.progress
        if done.version <= progress.step:
            progress = back_at(done.version - 1, replace(running.job, progress=progress), self._material)
        seconds = now - self._step_at
        running.step_s = [*running.step_s[-19:], seconds]
        figures = running.trainer.figures
        after = progress.after_step(done.version, done.loss, done.tokens, seconds)
        left_out = tuple(figures.left_out.items())[-MAX_LEFT_OUT:]
        after = after.with_links(self._earlier + figures.link_bytes)
        running.progress = replace(after, left_out=left_out, snapshots_s=running.snapshots_s, waiting="")
        if progress.waiting or now - self._told_at > TOLD_EVERY_S or done.version == self._record.steps:
            self._told_at = now
            self._save()

    def _asked(self) -> bool:
        return bool(self._jobs.wished(self._record.id))

    def _validation(self, version: int) -> Sequence[Any]:
        seen = {step for step, _ in self._running.progress.validation}
        if version in seen or not self._material.validates_at(self._record, version):
            return ()
        return self._material.validation(self._record)

    def _on_validation(self, version: int, loss: float) -> None:
        self._running.progress = self._running.progress.validated(version, loss)

    async def _on_snapshot(self, snapshot: Snapshot) -> None:
        """Write the state to go on from; a full disk does not end the job, which goes on with the state before."""
        states = await self._running.trainer.final_states()
        with suppress(OSError):
            await trio.to_thread.run_sync(self._jobs.save_state, self._record.id, dict(enumerate(states)))
        self._save()

    def _save(self) -> None:
        """Write the progress; a full disk does not end the job."""
        try:
            self._jobs.save_progress(self._record.id, self._running.progress)
        except OSError as error:
            log.warning("the progress of job %s cannot be written: %s", self._record.id, error)
