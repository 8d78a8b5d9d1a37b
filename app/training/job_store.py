"""Jobs on disk: `jobs/ID/` with the record, the progress, the state to go on from, and what the user asked of it.

record.json     the job's record (`app.training.record`)
source.json     the model's name and the files of the data, as the user gave them
progress.json   how far it is
state           adapters and moments of all blocks after some step; only of a job that is not finished
wish            `pause` or `stop`, read by the process that runs the job
lock            locked by that process
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from app.config.home import Home
from app.core.canonical_json import Fields, decode_object
from app.core.errors import AppError, RecordError
from app.training.record import JobRecord, decode_record
from p2p.platform import FileLock, is_locked, private_directory, write_private

log = logging.getLogger("shoal.training")

Status = Literal["running", "paused", "finished", "stopped", "failed"]
STATUSES: tuple[Status, ...] = ("running", "paused", "finished", "stopped", "failed")
ENDED = ("finished", "stopped")
MAX_LOSSES = 10_000
MAX_LEFT_OUT = 256
MAX_LINKS = 256
_MAX_PROGRESS_BYTES = 4 * 2**20
_MAX_SOURCE_BYTES = 64 * 1024
_STATE_MAGIC = b"shoal job state 1\n"


@dataclass(frozen=True)
class Progress:
    """How far a job is."""

    status: Status = "paused"
    step: int = 0
    tokens: int = 0  # counted, over all steps
    seconds: float = 0.0  # of training, over all runs
    losses: tuple[float, ...] = ()  # of each step, the last `MAX_LOSSES`
    validation: tuple[tuple[int, float], ...] = ()  # the last (step, loss on data not trained on)
    why: str = ""  # the error of a failed job
    waiting: str = ""  # what keeps a running job from its next step; it goes on by itself
    left_out: tuple[tuple[str, str], ...] = ()  # (hop that trained wrongly, or may have; how that was found)
    links: tuple[tuple[str, str, int], ...] = ()  # (sender, receiver, bytes of hidden states and gradients)
    snapshots_s: float = 0.0  # that snapshots took besides `seconds`, over all runs

    def with_links(self, links: Mapping[tuple[str, str], int]) -> Progress:
        """Return the progress with these bytes of links; only the links with the most are kept."""
        most = sorted(links.items(), key=lambda item: -item[1])[:MAX_LINKS]
        return replace(self, links=tuple((*pair, size) for pair, size in most))

    def after_step(self, step: int, loss: float, tokens: int, seconds: float) -> Progress:
        """Return the progress after one more step, which counted so many tokens."""
        return replace(
            self,
            step=step,
            tokens=self.tokens + tokens,
            seconds=self.seconds + seconds,
            losses=(*self.losses, loss)[-MAX_LOSSES:],
        )

    def validated(self, step: int, loss: float) -> Progress:
        """Return the progress with the loss on data that is not trained on; one that is not finite is left out."""
        if not math.isfinite(loss):
            return self
        return replace(self, validation=(*self.validation, (step, loss))[-MAX_LOSSES:])


@dataclass(frozen=True)
class JobSource:
    """Where the model and the data are on this machine."""

    model: str
    data: str
    validation_file: str | None = None
    swarm: str = ""  # id of the swarm that trains it; empty: one process does
    wire: str = "auto"  # number format between the hops


@dataclass(frozen=True)
class Job:
    """A job as it is on disk."""

    record: JobRecord
    source: JobSource
    progress: Progress = field(default_factory=Progress)


def require_unfinished(job: Job) -> Job:
    """Return the job; raises `AppError` if it has ended."""
    if job.progress.status in ENDED:
        raise AppError(f"job {job.record.id} is {job.progress.status} already")
    return job


class JobStore:
    """The jobs in a home folder."""

    def __init__(self, home: Home) -> None:
        self._folder = home.jobs_folder
        self._statuses: dict[str, Status] = {}  # of jobs, as written here last

    def folder(self, job_id: str) -> Path:
        """Folder of a job."""
        return self._folder / job_id

    def create(self, record: JobRecord, source: JobSource) -> Job:
        """Write a new job."""
        job = Job(record, source)
        folder = private_directory(self.folder(record.id))
        write_private(folder / "source.json", json.dumps(asdict(source)).encode())
        self.save_progress(record.id, job.progress)
        write_private(folder / "record.json", record.encoded())  # last: a job that is found is complete
        return job

    def all(self) -> list[Job]:
        """All jobs, the newest first; damaged ones are left out."""
        found = []
        for path in self._folder.glob("*/record.json"):
            with contextlib.suppress(AppError):
                found.append(self._read(path.parent))
        return sorted(found, key=lambda job: job.record.created_ms, reverse=True)

    def find(self, text: str) -> Job:
        """Return the job whose id begins so; raises `AppError` if none or several do."""
        ids = [path.parent.name for path in self._folder.glob("*/record.json") if path.parent.name.startswith(text)]
        if len(ids) != 1:
            words = f"several jobs begin with {text}" if ids else f"no job has the id {text}"
            raise AppError(f"{words}: `shoal jobs` lists them")
        return self._read(self.folder(ids[0]))

    def hold(self, job_id: str) -> FileLock:
        """Lock a job for this process; raises `AppError` if another one runs it, or if its folder refuses."""
        lock = None
        try:
            lock = FileLock.try_acquire(self.folder(job_id) / "lock")
            if lock is not None:
                (self.folder(job_id) / "wish").unlink(missing_ok=True)
        except OSError as error:
            if lock is not None:
                lock.release()
            raise AppError(f"job {job_id} cannot go on: {error.strerror or error}") from error
        if lock is None:
            raise AppError(f"job {job_id} is running in another process: `shoal jobs pause {job_id}` pauses it")
        return lock

    def is_running(self, job_id: str) -> bool:
        """True if a process runs this job."""
        return is_locked(self.folder(job_id) / "lock")

    def wish(self, job_id: str, wish: Literal["pause", "stop"]) -> None:
        """Ask the process that runs a job to pause or to stop it."""
        write_private(self.folder(job_id) / "wish", wish.encode())

    def wished(self, job_id: str) -> str:
        """What the user asked of a running job; empty for nothing."""
        with contextlib.suppress(OSError):
            return (self.folder(job_id) / "wish").read_text("ascii", "replace")[:16]
        return ""

    def end(self, job: Job, wish: Literal["pause", "stop"]) -> bool:
        """Ask the process that runs a job to pause or stop it; without one, that is done here. True if it runs.

        Raises `AppError` if the job has ended.
        """
        job_id = require_unfinished(job).record.id
        lock = FileLock.try_acquire(self.folder(job_id) / "lock")
        if lock is None:
            self.wish(job_id, wish)
            return True
        with lock:  # nobody begins to run it while it is stopped
            if wish == "stop":
                self.save_progress(job_id, replace(job.progress, status="stopped"))
                self.remove_state(job_id)
            elif job.progress.status == "paused":  # else a node would take it up, if its process was killed
                self.save_progress(job_id, job.progress)
        return False

    def interrupted(self, swarm: str) -> list[Job]:
        """Jobs of a swarm that ran when their process ended."""
        return [
            job
            for job in self.all()
            if job.source.swarm == swarm
            and not self.is_running(job.record.id)
            and self._progress(self.folder(job.record.id)).status == "running"
        ]

    def save_progress(self, job_id: str, progress: Progress) -> None:
        """Write how far a job is; flushed to disk, unless it runs as it did before."""
        durable = not progress.status == self._statuses.get(job_id) == "running"
        write_private(self.folder(job_id) / "progress.json", json.dumps(asdict(progress)).encode(), durable=durable)
        self._statuses[job_id] = progress.status

    def save_state(self, job_id: str, states: dict[int, bytes]) -> None:
        """Replace the state that a job goes on from."""
        lengths = b"".join(len(states[block]).to_bytes(8, "little") for block in sorted(states))
        head = _STATE_MAGIC + len(states).to_bytes(4, "little") + lengths
        write_private(self.folder(job_id) / "state", head + b"".join(states[block] for block in sorted(states)))

    def load_state(self, job_id: str) -> dict[int, bytes] | None:
        """Return the state of each block; None if there is none. Raises `AppError` if it is damaged."""
        path = self.folder(job_id) / "state"
        try:
            raw = path.read_bytes()
        except FileNotFoundError:
            return None
        at = len(_STATE_MAGIC) + 4
        count = int.from_bytes(raw[at - 4 : at], "little")
        lengths = [int.from_bytes(raw[at + 8 * i : at + 8 * i + 8], "little") for i in range(min(count, len(raw) // 8))]
        at += 8 * count
        if raw[: len(_STATE_MAGIC)] != _STATE_MAGIC or at + sum(lengths) != len(raw):
            raise AppError(f"{path} is damaged: start the job again with `shoal finetune`")
        states = {}
        for block, length in enumerate(lengths):
            states[block] = raw[at : at + length]
            at += length
        return states

    def remove_state(self, job_id: str) -> None:
        """Remove the state of a job that has ended; it stays if Windows refuses, as while it is read."""
        try:
            (self.folder(job_id) / "state").unlink(missing_ok=True)
        except OSError as error:
            log.warning("the state of job %s cannot be removed: %s", job_id, error)

    def _read(self, folder: Path) -> Job:
        try:
            record = decode_record((folder / "record.json").read_bytes())
            fields = decode_object((folder / "source.json").read_bytes(), "source.json", max_bytes=_MAX_SOURCE_BYTES)
            progress = self._progress(folder)
        except OSError as error:
            raise RecordError(f"the job in {folder} cannot be read: {error.strerror or error}") from error
        if progress.status == "running" and not self.is_running(record.id):
            progress = replace(progress, status="paused", waiting="")  # its process was killed
        source = JobSource(
            fields.text("model", 4096),
            fields.text("data", 4096),
            fields.optional_text("validation_file", 4096),
            fields.optional_text("swarm", 128) or "",
            fields.optional_text("wire", 16) or "auto",
        )
        return Job(record, source, progress)

    def _progress(self, folder: Path) -> Progress:
        """Return the progress as it was written; raises `OSError` or `RecordError`.

        A power cut can damage the file while the job runs, and only then: what it goes on from is in `state`.
        """
        raw = (folder / "progress.json").read_bytes()
        try:
            fields = decode_object(raw, "progress.json", max_bytes=_MAX_PROGRESS_BYTES)
        except RecordError:
            return Progress("running")
        return _progress(fields)


def _progress(fields: Fields) -> Progress:
    status = fields.text("status", 16)
    if status not in STATUSES:
        fields.refuse("status", ", ".join(STATUSES))
    losses = fields.items("losses", MAX_LOSSES)
    validation = fields.items("validation", MAX_LOSSES)
    numbers = (int, float)
    if not all(type(loss) in numbers for loss in losses) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(type(each) in numbers for each in pair) for pair in validation
    ):
        fields.refuse("losses", "numbers")
    left_out = fields.items("left_out", MAX_LEFT_OUT, [])
    if not all(isinstance(pair, list) and len(pair) == 2 and all(type(e) is str for e in pair) for pair in left_out):
        fields.refuse("left_out", "pairs of a peer and a reason")
    return Progress(
        status=status,
        step=fields.integer("step", 0, 10**9),
        tokens=fields.integer("tokens", 0, 10**15),
        seconds=fields.number("seconds", 0, 1e12),
        losses=tuple(losses),
        validation=tuple((int(step), float(loss)) for step, loss in validation),
        why=fields.text("why", 4096),
        waiting=fields.text("waiting", 4096, ""),
        left_out=tuple((peer, why) for peer, why in left_out),
        links=tuple(_link(fields, item) for item in fields.items("links", MAX_LINKS, [])),
        snapshots_s=fields.number("snapshots_s", 0, 1e12, 0.0),
    )


def _link(fields: Fields, item: object) -> tuple[str, str, int]:
    match item:
        case [str(sender), str(receiver), int(size)]:
            return sender, receiver, size
    fields.refuse("links", "lists of a sender, a receiver and a number of bytes")
