"""The training jobs of this node in its swarm: founds and joins them, runs each in a task, and takes them up again.

A job outlives the node: record, text, log and the newest state are in the home folder (`app.rounds.train_store`). Jobs
that ran when the node ended go on when it joins the same swarm again. One for which memory or disk are full goes on by
itself, from what is on disk, once they are not.
"""

from __future__ import annotations

import logging
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import trio

from app.core.compute import Device
from app.core.device_thread import DeviceThread
from app.core.errors import AppError
from app.core.wall_clock import wall_ms
from app.planning.forecast import Terms, rounds_of
from app.planning.history import PastForecast, remember
from app.planning.machines import Fleet, MachineSpec
from app.rounds.island import Island, RoundServer, hashed
from app.rounds.job_search import ASK_S, FIND_S, Found, FoundJob, JobSearch, NamedJob
from app.rounds.job_text import JobText
from app.rounds.log import RoundEntry, codec_of, newly_left_out, up_to
from app.rounds.machines import NoMachines, machine_routes
from app.rounds.place import TrainPlace
from app.rounds.record import TrainingRecord, sign_training
from app.rounds.statements import OwnData, sign_data
from app.rounds.steps import LocalSteps, PipelinePlace, PipelineSteps, StepMaker
from app.rounds.train_store import (
    FAILED,
    FINISHED,
    LEFT,
    PAUSED,
    RUNNING,
    JoinWords,
    NoTraining,
    StoredTraining,
    TrainStore,
    facts_of,
    one_of,
    require_record,
    short_id,
    takes_part,
    text_files,
)
from app.routing.cost import ASSUMED_BYTES_PER_S
from app.snapshot.views import JoinableView
from app.training.forecasts import step_here_s
from app.training.reading import TextReading
from app.training.trainer import RouteFinder
from app.training.waiting import EXPECTED, what_it_waits_for, why_ended

if TYPE_CHECKING:
    from trio_typing import TaskStatus

    from app.config.home import Home
    from app.rounds.founding import DoesNotFit, Founded, TrainWish

log = logging.getLogger("shoal.rounds")
T = TypeVar("T")

FIND_OTHER_S = 20.0  # that members are asked for a job of a name that a new one is to have, or that is here
JOIN_S = 30.0  # that whoever joins a job waits for it to begin; from then on the job says what it waits for
ASK_FOR_LIST_S = 3.0  # each member, for a list that somebody waits for
ASKED_FOR_LIST = 32  # members, drawn anew each time: a dashboard asks again and again
LISTED = 32  # jobs that can be joined
TRAIN = "train"  # these jobs among past forecasts
# That a finished job, with its model in memory, is kept after an island that is late was heard, and in all.
KEPT_FINISHED_S, KEPT_FINISHED_MOST_S = 600.0, 3600.0
KEPT_VALIDATION = 200  # losses after the latest rounds, among the figures
MEMORY_AGAIN_S, MEMORY_AGAIN_MOST_S = 10.0, 300.0  # until a job for which memory or disk are full is tried again
KILLED_OFTEN = 2  # times in a row that a node was killed with a job, after which it does not begin it again at once


@dataclass
class RunningTraining:
    """A job that runs now."""

    job: StoredTraining
    island: Island
    machine: MachineSpec  # this one, measured before it began
    begun: int  # times that it was begun and the node killed before a round was over, this time included
    is_paused: bool = False
    ended: trio.Event = field(default_factory=trio.Event)

    def pause(self) -> None:
        """End it soon; it goes on once the node is not paused any more."""
        self.is_paused = True
        self.island.leave()


@dataclass
class _Waiting:
    """A job that ran when the node ended or was paused, or had no room, and does not go on yet."""

    why: str = ""  # empty if it is to go on at once, or after the pause
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)  # of the task that tries it
    ended: trio.Event = field(default_factory=trio.Event)


@dataclass(eq=False)
class _Beginning:
    """A job that is being founded or joined."""

    record: TrainingRecord
    text: JobText | None = None  # that it waits for, if it does
    error: Exception | None = None  # that a join has ended with
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    ended: trio.Event = field(default_factory=trio.Event)

    @property
    def waiting(self) -> str:
        """What it waits for, in words."""
        return (self.text and self.text.waiting) or "gets its model ready"


class TrainJobs:
    """Founds, joins, runs and leaves training jobs in one swarm; `run` until cancelled."""

    def __init__(self, home: Home, place: TrainPlace) -> None:
        self._place, self._store, self._home = place, TrainStore(home), home
        self._server = RoundServer(place.network, place.is_member)
        self._search = JobSearch(place.network, place.swarm)
        self._reading = TextReading()
        self._nursery: trio.Nursery | None = None
        self._founding = trio.Lock()  # names are compared
        self._locks: defaultdict[bytes, trio.Lock] = defaultdict(trio.Lock)  # of each job: who begins or removes it
        self._starting = trio.Lock()  # held briefly: each looks for memory, and then takes it
        self._beginnings: list[_Beginning] = []
        self._waiting: dict[bytes, _Waiting] = {}
        self._again_s: dict[bytes, float] = {}  # how long jobs that had no room wait, until they have made a round
        self._late: dict[bytes, trio.CancelScope] = {}  # finished jobs that are kept for islands that are late
        self.running: dict[bytes, RunningTraining] = {}

    async def run(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Go on with the jobs that ran when the node ended, then run those that are founded or joined."""
        async with trio.open_nursery() as self._nursery:
            self._server.serve()
            self._nursery.start_soon(self._follow_pauses)
            task_status.started()
            for job in await trio.to_thread.run_sync(self._store.all):
                facts = self._store.facts(job)
                if job.record.swarm == self._place.swarm and facts["status"] == RUNNING:
                    if (words := self._store.joining(job)) is not None:
                        self._nursery.start_soon(self._go_on_joining, job, words, self._new_beginning(job.record))
                        continue
                    if why := _killed_often(facts):
                        self._again_s[job.record.id] = MEMORY_AGAIN_MOST_S
                    self._wait_for_room(job, why)
            await trio.sleep_forever()

    async def forecast(self, wish: TrainWish) -> dict[str, Any]:
        """Say what a job would be, without founding it; raises `AppError` or `EngineError`."""
        from app.rounds.founding import config_of, usual_step

        founded = await self._prepared(wish)
        record, budget = founded.record, founded.budget
        here = await trio.to_thread.run_sync(self._place.look)
        step_s = step_here_s(here, config_of(record), usual_step(record))
        return {
            "name": record.name, "sequences": founded.sequences, "weights": budget.weights,
            "memory_bytes": budget.total_bytes, "steps": record.steps, "rounds": -(-record.steps // record.every),
            "tokens_per_step": record.batch * record.length, "step_s": step_s,
            "seconds": None if step_s is None else record.steps * step_s,
        }  # fmt: skip

    async def found(self, wish: TrainWish) -> dict[str, Any]:
        """Found a job and take part in it; raises `AppError` or `EngineError` if it cannot be."""
        async with self._founding:
            async with self._starting:
                founded = await self._prepared(wish)
            named = await self._named(wish.name, FIND_OTHER_S)
            others = [one.job for one in named.jobs.values() if one.job.name == wish.name]
            if others:
                hashes = f"{others[0].id.hex()} and the new one, {founded.record.id.hex()}"
                raise AppError(
                    f"two training jobs would be named {wish.name}: {hashes}; choose another name, or join it"
                )
            raw = sign_training(self._place.identity, founded.record)
            async with self._begins(self._new_beginning(founded.record)):
                job = await trio.to_thread.run_sync(lambda: self._store.create(raw, founded.texts, founded.states()))
                await self._start(job, founded.vectors)
        return self._facts(job.record)

    async def join(self, target: str, data: Sequence[str] = (), licence: str = "") -> dict[str, Any]:
        """Take part in a job of this swarm, by its name or hash; raises `AppError`.

        `data` are files to train on in a job whose members have texts of their own, under this licence; not needed
        again for a job that is stored here. Returns once the job has begun, or after `JOIN_S`: then its figures say
        what it waits for, and whatever it fails with later.
        """
        assert self._nursery is not None, "jobs need a running node"
        found = await self._wanted(target)
        record = await trio.to_thread.run_sync(require_record, found.raw, self._place.swarm)
        if record.id not in self.running:
            if not self._beginnings_of(record.id):
                beginning, words = self._new_beginning(record), JoinWords(tuple(data), licence)
                self._nursery.start_soon(self._join, beginning, found, words)
            [beginning, *_] = self._beginnings_of(record.id)
            with trio.move_on_after(JOIN_S):
                await beginning.ended.wait()
            if beginning.error is not None:
                raise beginning.error
        return self._facts(record)

    async def leave(self, target: str) -> dict[str, Any]:
        """Take no more part in a job; steps that were not yet merged are lost. Raises `AppError`."""
        record = await self._find(target)
        took_part = False
        # one that is being left may lack room just then, and one that waits for room may just have begun
        while True:
            running, waiting = self.running.get(record.id), self._stop_waiting(record.id)
            if running is not None:
                running.is_paused = False
                running.island.leave()
                await running.ended.wait()
            elif waiting is not None:
                await waiting.ended.wait()
            elif beginnings := self._beginnings_of(record.id):
                for beginning in beginnings:
                    beginning.scope.cancel()
                for beginning in beginnings:
                    await beginning.ended.wait()
            else:
                break
            took_part = True
        try:
            job = await trio.to_thread.run_sync(self._store.find, record.id.hex())
        except NoTraining:  # it was about to be written
            return self._unwritten_facts(record, LEFT)
        if not took_part or self._store.facts(job)["status"] == RUNNING:
            return await trio.to_thread.run_sync(self._store.leave, job.record.id.hex())
        return self._store.idle_facts(job)

    async def remove(self, target: str) -> dict[str, Any]:
        """Remove a job in which this node takes no part, with its files; raises `AppError`."""
        job = await trio.to_thread.run_sync(self._store.find, target)
        self._require_no_part(job.record)
        async with self._locks[job.record.id]:
            self._require_no_part(job.record)
            if (late := self._late.get(job.record.id)) is not None:  # its log is among the files
                late.cancel()
            return await trio.to_thread.run_sync(self._store.remove, job.record.id.hex())

    async def facts(self) -> list[dict[str, Any]]:
        """Return the figures of all training jobs of this home, the newest first."""
        return [self._facts(job.record, job) for job in await trio.to_thread.run_sync(self._store.all)]

    async def joinable(self) -> list[JoinableView]:
        """Return the jobs that other members train and that this node never took part in, by name."""
        own = {job.record.id for job in await trio.to_thread.run_sync(self._store.all)}
        members = list(self._place.members())
        asked = random.sample(members, min(ASKED_FOR_LIST, len(members)))
        others = [job for job in await self._search.list_jobs(asked, ask_s=ASK_FOR_LIST_S) if job.id not in own]
        found = [JoinableView(short_id(one.id), one.name, one.founder, one.steps, one.own_data) for one in others]
        return sorted(found, key=lambda one: (one.name, one.founder))[:LISTED]

    # --- inside -------------------------------------------------------------------------------------------------------

    def _new_beginning(self, record: TrainingRecord) -> _Beginning:
        beginning = _Beginning(record)
        self._beginnings.append(beginning)
        return beginning

    @asynccontextmanager
    async def _begins(self, beginning: _Beginning) -> AsyncIterator[None]:
        """Found or join a job, while nobody else begins or removes it; raises `AppError` if it is left meanwhile."""
        name = beginning.record.name
        try:
            with beginning.scope:
                async with self._locks[beginning.record.id]:
                    yield
            if beginning.scope.cancelled_caught:
                raise AppError(f"{name} was left before it began: `shoal train join {name}` begins again")
        finally:
            self._beginnings.remove(beginning)
            beginning.ended.set()

    async def _named(self, target: str, within_s: float) -> Found:
        """Return the jobs of this name or hash that members take part in, or that are stored here."""
        found = await self._search.find(target, self._place.members(), ask_s=ASK_S, within_s=within_s)
        for one in await self._named_here(target):
            found.jobs.setdefault(one.job.id, one)
        return found

    async def _named_here(self, target: str) -> list[FoundJob]:
        stored = await trio.to_thread.run_sync(self._store.all)
        jobs = [FoundJob(NamedJob.of(job.record), job.raw) for job in stored if job.record.swarm == self._place.swarm]
        return [one for one in jobs if one.job.is_named(target)]

    async def _wanted(self, target: str) -> FoundJob:
        """Return the only job of this name or hash; raises `AppError`."""
        within_s = FIND_OTHER_S if await self._named_here(target) else FIND_S
        found = await self._named(target, within_s)
        if found.jobs:
            return one_of([(one.job.id, one) for one in found.jobs.values()], target)
        await trio.to_thread.run_sync(self._store.require_not_elsewhere, target, self._place.swarm)
        if found.not_asked:
            raise AppError(
                f"no member that could be asked in {within_s:g} s trains a job named {target}: try again, as "
                f"{found.not_asked} others could not be asked"
            )
        raise AppError(
            f"no member of this swarm trains a job named {target}: `shoal jobs` lists those that can be joined"
        )

    async def _join(self, beginning: _Beginning, found: FoundJob, words: JoinWords) -> None:
        """Join a job; what keeps it from that is the beginning's error, and written down once the job is."""
        record = beginning.record
        with _told(beginning):
            async with self._begins(beginning):
                stored = [job for job in await trio.to_thread.run_sync(self._store.all) if job.record.id == record.id]
                if stored and self._store.facts(stored[0])["status"] == FINISHED:
                    raise AppError(
                        f"{record.name} is finished: `shoal train export {record.name} FOLDER` writes its model"
                    )
                if record.id in self.running:
                    return
                has_text = bool(stored) and self._store.has_text(stored[0]) and not words.data
                if stored and not words.data and (said := self._store.joining(stored[0])) is not None:
                    words = JoinWords(said.data, words.licence or said.licence)
                self._check_data(record, words, has_text=has_text)
                if has_text:
                    job = stored[0]
                    await self._text(job).note(found.holders)
                else:
                    job = await trio.to_thread.run_sync(self._store.begin_joining, found.raw, words)
                    await self._write(job, None, RUNNING)
                    await self._get_text(beginning, job, words, found.holders)
                await self._start(job)

    async def _go_on_joining(self, job: StoredTraining, words: JoinWords, beginning: _Beginning) -> None:
        """Get the text of a job that was being joined when the node ended, then go on like after any other restart."""
        with _told(beginning):
            async with self._begins(beginning):
                await self._get_text(beginning, job, words, ())
                self._wait_for_room(job, "")

    def _text(self, job: StoredTraining) -> JobText:
        return JobText(self._place, self._store, self._search, self._reading, job)

    async def _get_text(
        self, beginning: _Beginning, job: StoredTraining, words: JoinWords, holders: Sequence[str]
    ) -> None:
        """Let the text of a job be in its folder; what keeps it from that is raised, and written down."""
        beginning.text = self._text(job)
        try:
            await beginning.text.get(words, holders)
        except Exception as error:
            if job.record.id not in self._waiting:  # else it is tried again
                await self._write(job, None, FAILED, why_ended(error))
            raise

    def _beginnings_of(self, job: bytes) -> list[_Beginning]:
        return [one for one in self._beginnings if one.record.id == job]

    async def _find(self, target: str) -> TrainingRecord:
        """Return the record of a job that is stored here, or that begins; raises `AppError` if none or several are."""
        stored = [job.record for job in await trio.to_thread.run_sync(self._store.all)]
        known = {record.id: record for record in (*stored, *(one.record for one in self._beginnings))}
        named = [one for one in known.values() if one.name == target or one.id.hex().startswith(target)]
        return one_of([(record.id, record) for record in named], target)

    def _require_no_part(self, record: TrainingRecord) -> None:
        """Raise `AppError` if this node takes part in a job, or is about to."""
        if record.id in self.running or record.id in self._waiting or self._beginnings_of(record.id):
            raise takes_part(record.name)

    def _check_data(self, record: TrainingRecord, words: JoinWords, *, has_text: bool) -> None:
        data, licence = words
        if data and not record.own_data:
            raise AppError(f"{record.name} has one text for all members: leave out --data")
        if not record.own_data or has_text:
            return
        if not data:
            raise AppError(f"the members of {record.name} train on texts of their own: name yours with --data")
        if (record.licence or self._place.public) and not licence.strip():
            raise AppError(f"the members of {record.name} name the licence of their texts: give yours with --licence")

    async def _prepared(self, wish: TrainWish) -> Founded:
        from app.rounds.founding import DoesNotFit, plan, prepare, read_texts

        place = self._place
        planned = partial(plan, wish, public=place.public, cache=place.cache, limit_bytes=place.memory_limit())
        try:
            made = await _apart(partial(planned, alone=True))
        except DoesNotFit as error:
            try:
                await self._routes(error, own_data=wish.own_data)(frozenset())
            except NoMachines as lack:
                raise NoMachines(f"{error}. With other machines: {lack}") from error
            made = await _apart(partial(planned, alone=False))
        texts = await self._reading.run((*wish.data, *wish.validation), read_texts, wish, made.source)
        return await _apart(partial(prepare, wish, made, texts, swarm=place.swarm, founder=place.identity.peer_id))

    def _routes(self, error: DoesNotFit, *, own_data: bool, helped: Sequence[str] = ()) -> RouteFinder:
        """Return how to find machines for a model that is too large for this one; raises the error if none may help.

        `helped` are those of the job's last steps. Hops see the hidden states of what is trained on, so a text of this
        node's own is not trained on through others.
        """
        from app.rounds.founding import block_needs

        if self._place.helpers is None or own_data:
            raise error
        needs = block_needs(error.config, error.length)
        return machine_routes(self._place.helpers, error.config.n_blocks, needs, helped)

    def _wait_for_room(self, job: StoredTraining, why: str) -> None:
        """Let a job go on by itself: at once, or if it is said why not, after a while; not while the node is paused."""
        assert self._nursery is not None, "jobs need a running node"
        waiting = self._waiting[job.record.id] = _Waiting(why)
        self._nursery.start_soon(self._take_up, job, waiting)

    async def _take_up(self, job: StoredTraining, waiting: _Waiting) -> None:
        """Go on with a job from what is on disk; while there is no room for it, try again, more seldom each time."""
        from app.rounds.founding import give_memory_back

        name, key = job.record.name, job.record.id
        with waiting.scope:
            while True:
                if waiting.why:
                    log.warning("training %s %s", name, waiting.why)
                    again_s = self._again_s.get(key, MEMORY_AGAIN_S)
                    self._again_s[key] = min(2 * again_s, MEMORY_AGAIN_MOST_S)
                    await trio.sleep(again_s)  # out of the handler, whose error holds what was loaded
                    await trio.to_thread.run_sync(give_memory_back)
                await self._pause_over(name)
                try:
                    async with self._locks[key], self._starting:
                        if key not in self.running:  # as it is if somebody has joined it by now
                            await self._begin(job)
                    break
                except Exception as error:  # of torch, for one; it must not end the node's other work
                    waiting.why = _waits_for(error)
                    if not waiting.why:
                        with_trace = not isinstance(error, EXPECTED)
                        log.warning("training %s does not go on: %s", name, error, exc_info=with_trace)
                        await self._write(job, None, FAILED, why_ended(error))
                        break
        if self._waiting.get(key) is waiting:
            del self._waiting[key]
        waiting.ended.set()

    async def _follow_pauses(self) -> None:
        """End all jobs whenever the node is paused; they go on after it."""
        while True:
            await self._paused()
            self._pause_all()
            await self._place.pause.wait_change()

    def _pause_all(self) -> None:
        for running in self.running.values():  # not in a task that lasts, where the name of the last would keep it
            running.pause()

    async def _paused(self) -> None:
        """Return once the node is paused."""
        while self._place.pause.of_training is None:
            await self._place.pause.wait_change()

    async def _pause_over(self, name: str) -> None:
        """Wait while the node is paused."""
        from app.rounds.founding import give_memory_back

        if why := self._place.pause.training_waits:
            log.info("training %s %s", name, why)
            await trio.to_thread.run_sync(give_memory_back)
            while self._place.pause.of_training is not None:
                await self._place.pause.wait_change()

    async def _start(self, job: StoredTraining, vectors: Any = None) -> None:
        """Begin a job that was founded or joined; what keeps it from that is raised, and written down.

        While the node is paused, it waits.
        """
        if self._place.pause.training_waits:
            await self._write(job, None, RUNNING)
            if job.record.id not in self._waiting:
                self._wait_for_room(job, "")
            return
        try:
            async with self._starting:
                await self._begin(job, vectors)
        except Exception as error:
            if job.record.id not in self._waiting:  # else it is tried again
                await self._write(job, None, FAILED, why_ended(error))
            raise
        self._stop_waiting(job.record.id)

    def _stop_waiting(self, job: bytes) -> _Waiting | None:
        """Do not try again to go on with a job; None if that was not to be."""
        waiting = self._waiting.pop(job, None)
        self._again_s.pop(job, None)
        if waiting is not None:
            waiting.scope.cancel()
        return waiting

    async def _begin(self, job: StoredTraining, vectors: Any = None) -> None:
        """Make an island, with the state that it goes on from, and run it in a task of its own."""
        assert self._nursery is not None, "jobs need a running node"
        record, facts = job.record, self._store.facts(job)
        begun = _begun(facts) + 1  # a node that is killed has this on disk
        await self._write(job, None, facts["status"], facts["why"], begun=begun)
        try:
            island, machine = await self._island(job, vectors)
        except BaseException:
            await self._write(job, None, facts["status"], facts["why"])
            with trio.CancelScope(shield=True):
                await self._place.states.forget(record.id[:16])
            raise
        self._server.islands[record.id] = island
        self._server.records[record.id] = job.raw
        running = self.running[record.id] = RunningTraining(job, island, machine, begun)
        if self._place.pause.training_waits:  # since a moment ago
            running.pause()
        self._nursery.start_soon(self._run_job, running)

    async def _island(self, job: StoredTraining, vectors: Any) -> tuple[Island, MachineSpec]:
        """Make a job's island, with the state that it goes on from, and measure this machine."""
        from app.rounds.founding import TokenText

        place, record = self._place, job.record
        await trio.to_thread.run_sync(self._store.remove_unfinished, job)
        names = text_files(record)
        texts = {name: await trio.to_thread.run_sync((job.folder / name).read_bytes) for name in names}
        text = await trio.to_thread.run_sync(TokenText, texts["tokens"], texts["held"], record)
        model, device, steps = await self._model(job, vectors)
        machine = await trio.to_thread.run_sync(place.look)
        for name in record.texts:  # members fetch these by hash; a text of this node's own is not among them
            await place.states.keep(record.id[:16], texts[name])
        own_data: OwnData | None = None
        if (named := self._store.own_data(job)) is not None:
            claim = OwnData(record.id, text.count * record.length, *named)
            own_data = sign_data(place.identity, claim, wall_ms())
        island = Island(
            place.network, place.identity, record, model, text, device, place.states, found=place.members,
            timing=place.timing, wall_ms=wall_ms, own_data=own_data,
            steps=steps,
            acquaintances=await trio.to_thread.run_sync(self._store.acquaintances, job),
            settled=lambda entries, states: self._save(job, entries, states),
        )  # fmt: skip
        if isinstance(steps, PipelineSteps):
            steps.validated = island.validated
        entries, was_damaged = await trio.to_thread.run_sync(self._store.repair_log, job)
        states = await trio.to_thread.run_sync(self._store.states, job) if vectors is None else None
        if states is not None:
            root, _ = await trio.to_thread.run_sync(hashed, states)
            entries = up_to(entries, root)
            if not entries and root.hex() != record.start:  # of a history that is lost
                states = None
                if was_damaged:
                    await trio.to_thread.run_sync(self._store.set_state_aside, job)
        await island.begin(entries, states)
        return island, machine

    async def _model(self, job: StoredTraining, vectors: Any) -> tuple[Any, Device, StepMaker]:
        """Make an island's model, its device and what makes its steps: this machine, or several if it is too small."""
        from app.rounds.founding import DoesNotFit, make_model, make_pipeline

        place, record, limit = self._place, job.record, self._place.memory_limit()
        try:
            model, name = await _apart(make_model, record, vectors, limit)
        except DoesNotFit as error:
            helped = self._store.machines(job)
            routes = self._routes(error, own_data=record.own_data, helped=helped)
            owner, name, terms = await _apart(make_pipeline, record, vectors, limit)
            device = DeviceThread(name)
            machines = PipelinePlace(routes, own_server=None if place.helpers is None else place.helpers.own_server)
            return owner, device, PipelineSteps(place.network, owner, device, place.states, terms, machines)
        device = DeviceThread(name)
        return model, device, LocalSteps(model, device)

    async def _run_job(self, running: RunningTraining) -> None:
        """Run an island until the job is finished, left or failed, and write down which; or let it wait."""
        job, island, no_room = running.job, running.island, ""
        status, why = RUNNING, ""
        try:
            await self._write(job, island, RUNNING, begun=running.begun)
            await island.run()
            if not running.is_paused or island.is_finished:
                status = FINISHED if island.is_finished else LEFT
        except Exception as error:  # torch raises errors of every kind; they must not end the node's other work
            no_room = _waits_for(error)
            if not no_room:
                log.warning("training %s failed: %s", job.record.name, error, exc_info=not isinstance(error, EXPECTED))
                status, why = FAILED, why_ended(error)
        finally:
            await self._write(job, island, status, why)
            with trio.CancelScope(shield=True):
                await island.close()
                if status != FINISHED:
                    await self._forget(island)
            del self.running[job.record.id]
            if no_room or (running.is_paused and status == RUNNING):
                self._wait_for_room(job, no_room)
            running.ended.set()
            if status == FINISHED:
                assert self._nursery is not None, "this task is in it"
                scope = self._late[job.record.id] = trio.CancelScope()  # now: the job can be removed from here on
                self._nursery.start_soon(self._serve_the_late, island, scope)

    async def _serve_the_late(self, island: Island, scope: trio.CancelScope) -> None:
        """Keep a finished island until nobody late was heard for a while, the node is paused or the job is removed."""
        ended_s = last_s = trio.current_time()
        with scope:
            while (until_s := min(last_s + KEPT_FINISHED_S, ended_s + KEPT_FINISHED_MOST_S)) > trio.current_time():
                with trio.move_on_at(until_s):
                    await self._paused()
                    break
                behind = [(peer, one) for peer, one in island.heard.items() if one.round < island.standing.round]
                late = [one for peer, one in behind if peer in island.recent]
                last_s = max([last_s, *(one.at for one in late)])
        if self._late.get(island.record.id) is scope:
            del self._late[island.record.id]
        await self._forget(island)

    async def _forget(self, island: Island) -> None:
        """Answer no more requests of an island's job, and remove its states; not if another island is in its place."""
        job = island.record.id
        if self._server.islands.get(job) is island:
            del self._server.islands[job], self._server.records[job]
            await island.forget_states()

    async def _save(self, job: StoredTraining, entries: list[Any], states: list[bytes]) -> None:
        self._note_left_out(job.record, entries)
        self._again_s.pop(job.record.id, None)
        await trio.to_thread.run_sync(self._store.save, job, entries, states)
        if (running := self.running.get(job.record.id)) is not None:
            running.island.replace_entries(await trio.to_thread.run_sync(self._store.on_disk, job, entries))
            await self._write(job, running.island, RUNNING)
            measured = running.island.figures.measured_round
            # A forecast is for islands of one machine. Who joins before the first round is over has no entry yet.
            if entries and measured == entries[-1].round and not running.island.machines:
                await self._compare(running, entries)

    def _note_left_out(self, record: TrainingRecord, entries: Sequence[RoundEntry]) -> None:
        """Let who was left out of a job lose some of this node's trust, for other work too."""
        for peer, why in newly_left_out(entries).items():
            if self._place.trust is not None and peer != self._place.network.peer_id:
                self._place.trust.note(peer, "doubted", f"left out of training {record.name}: {why}")

    async def _compare(self, running: RunningTraining, entries: Sequence[RoundEntry]) -> None:
        """Keep the forecast of a job's last round, which the figures are of, beside its speed.

        The others are taken to be machines like this one, each with the connection that was measured.
        """
        from app.rounds.founding import config_of, usual_step

        island, record = running.island, running.job.record
        measured = island.figures.round_tokens_per_s
        rates = {link.peer: link.down_bytes_per_s for link in self._place.network.links()}
        machines = [
            replace(running.machine, name=one.peer, island=one.peer, up_bytes_per_s=rate, down_bytes_per_s=rate)
            for one in entries[-1].list.arrivals
            for rate in (rates.get(one.peer) or ASSUMED_BYTES_PER_S,)
        ]
        terms = terms_of(record, entries, island.held_tokens)
        islands = [Fleet(machine, (machine,)) for machine in machines]
        found = rounds_of(islands, config_of(record), usual_step(record), terms)
        if found is not None and terms.every > 0:
            now_ms = wall_ms()
            ended = PastForecast(
                now_ms, TRAIN, record.model or record.start, len(machines), found.tokens_per_s, measured
            )
            await trio.to_thread.run_sync(remember, self._home.forecasts_file, ended)

    def _facts(self, record: TrainingRecord, job: StoredTraining | None = None) -> dict[str, Any]:
        running = self.running.get(record.id)
        if running is not None:
            facts = figures_of(running.island, RUNNING) | {"swarm": self._place.swarm_name}
            facts.pop("checkpoint_ms")
            return facts
        try:
            facts = self._store.idle_facts(job or self._store.find(record.id.hex()))
        except NoTraining:  # it is about to be written
            facts = self._unwritten_facts(record, PAUSED)
        if facts["status"] == PAUSED and (beginnings := self._beginnings_of(record.id)):
            facts["waiting"] = beginnings[0].waiting
        elif (waiting := self._waiting.get(record.id)) is not None:
            facts["waiting"] = self._place.pause.training_waits or waiting.why
        elif record.swarm == self._place.swarm:
            facts["waiting"] = ""
        return facts

    def _unwritten_facts(self, record: TrainingRecord, status: str) -> dict[str, Any]:
        return {**facts_of(record), "status": status, "swarm": self._place.swarm_name, "checkpoint_age_s": None}

    async def _write(
        self, job: StoredTraining, island: Island | None, status: str, why: str = "", *, begun: int = 0
    ) -> None:
        facts = self._store.stored_facts(job) if island is None else figures_of(island, status)
        facts |= {"status": status, "why": why, "begun": begun, "swarm": self._place.swarm_name}
        if not facts["machines"]:  # those that helped are asked first, also after the next start
            facts["machines"] = self._store.stored_facts(job)["machines"]
        try:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(self._store.save_facts, job, facts)
        except OSError as error:
            log.warning("the figures of training %s cannot be written: %s", job.record.name, error)


@contextmanager
def _told(beginning: _Beginning) -> Iterator[None]:
    """Keep what a job fails with that begins for whoever waits for it; it must not end the node's other work."""
    try:
        yield
    except Exception as error:  # of torch, for one
        level = logging.INFO if beginning.scope.cancelled_caught else logging.WARNING
        with_trace = not isinstance(error, EXPECTED)
        log.log(level, "training %s does not begin: %s", beginning.record.name, error, exc_info=with_trace)
        beginning.error = error.with_traceback(None)  # whose frames hold what was loaded


async def _apart(function: Callable[..., T], *args: Any) -> T:
    """Make a model in a thread that ends then.

    torch's allocator for ARM does not give back what one thread has allocated and another frees, while the first lives.
    """
    return await DeviceThread().run_apart(function, *args)


def _waits_for(error: BaseException) -> str:
    """Say what a job waits for whose error may pass; nothing for any other error."""
    from app.rounds.founding import DoesNotFit

    return what_it_waits_for(error, DoesNotFit)


def _begun(facts: Mapping[str, Any]) -> int:
    """How often a job was begun since it has made a round, and the node killed then."""
    begun = facts.get("begun", 0)
    return begun if isinstance(begun, int) else 0


def _killed_often(facts: Mapping[str, Any]) -> str:
    """Say why a job that may be what the node is killed for is not begun at once; nothing for any other."""
    if (times := _begun(facts)) < KILLED_OFTEN:
        return ""
    name = facts["name"]
    return (
        f"waits a while: the node was killed {times} times while it trained this and had not yet made a round, as a "
        f"system does when its memory is full; `shoal train join {name}` goes on at once, `shoal train leave {name}` "
        "gives it up"
    )


def terms_of(record: TrainingRecord, entries: Sequence[RoundEntry], held_rows: int) -> Terms:
    """Return what a forecast of the last of these rounds begins with: its steps, and the format of its changes."""
    steps = max(one.steps for one in entries[-1].list.arrivals)
    return Terms(1, every=steps, wire=codec_of(record, entries, len(entries) - 1), held_rows=held_rows)


def figures_of(island: Island, status: str) -> dict[str, Any]:
    """Return the figures of an island that runs."""
    figures, standing, now = island.figures, island.standing, trio.current_time()
    alive = island.alive()
    islands = [
        {"peer": peer, "here": peer == island.peer, "alive": peer == island.peer or peer in alive}
        for peer in standing.members
    ]
    last = {arrival.peer: arrival for arrival in island.log[-1].list.arrivals} if island.log else {}
    for one in islands:
        arrival = last.get(str(one["peer"]))
        one["steps"], one["tokens"] = (arrival.steps, arrival.tokens) if arrival is not None else (0, 0)
        one["lag_s"], one["tokens_per_s"] = figures.paces.get(str(one["peer"]), (None, None))
        if (data := island.data_of.get(str(one["peer"]))) is not None:
            one["data"] = {"tokens": data.tokens, "source": data.source, "licence": data.licence}
    return {
        **facts_of(island.record),
        "status": status, "round": standing.round, "step": standing.step,
        "loss": figures.losses[-1] if figures.losses else None,
        "validation_loss": figures.validation[-1][1] if figures.validation else None,
        "tokens": standing.tokens, "tokens_per_s": figures.round_tokens_per_s or None, "islands": islands,
        "left_out": dict(standing.banned), "bytes_per_round": figures.bytes_in,
        "utilisation": figures.utilisation, "waiting": island.waiting,
        "every": standing.every,
        "wire": standing.codec, "losses": figures.losses, "validation": figures.validation[-KEPT_VALIDATION:],
        "doubted": dict(island.log[-1].doubted) if island.log else {}, "resting": island.resting,
        "left_s": figures.left_s if status == RUNNING else None,
        "machines": [[hop.peer, hop.span.start, hop.span.stop] for hop in island.machines],
        "checkpoint_age_s": now - island.checkpoint.at,
        "checkpoint_ms": wall_ms() - int(1000 * (now - island.checkpoint.at)),
    }  # fmt: skip
