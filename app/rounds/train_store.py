"""Training jobs on disk: `trainings/ID/` with the signed record, the text, the log, the newest state and the figures.

record          the signed record (`app.rounds.record`)
tokens, held    the text as token ids, 32 bits each, little-endian; to train on and to validate with
tokenizer.json  the tokenizer, as the record names it by hash
acquaintances.json  peers that had the job when the node joined it
own_data.json   source and licence of the text, if it is this node's own and the node has joined the job with it
joining.json    what the user has said of the text, while that is not all here
log             the signed entries of all rounds, one a line in base64; rounds are appended
newest          the last of them once more, for a log that is damaged there
state           the states of all parts after the last round, or before the first, in their order (blobs of
                `app.rounds.wire`)
facts.json      figures for people, written after each round
log.damaged     what was cut off a damaged log, and state.damaged the state that no entry left in it leads to: nothing
                here reads them
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import json
import logging
import os
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from app.config.home import Home
from app.core.canonical_json import canonical, decode_object
from app.core.errors import AppError, HomeError, RecordError
from app.core.wall_clock import wall_ms
from app.rounds import wire
from app.rounds.greetings import MOST_FIRST
from app.rounds.log import RoundEntry, read_entry
from app.rounds.record import TrainingRecord, read_training
from app.rounds.statements import GENESIS, MAX_DATA_BYTES, MAX_LICENCE_CHARS, MAX_SOURCE_CHARS
from p2p.identity import PEER_ID_CHARS
from p2p.platform import private_directory, replace_file, write_private

log = logging.getLogger("shoal.rounds")

ID_DIGITS = 12
RUNNING, FINISHED, LEFT, FAILED = "running", "finished", "left", "failed"
PAUSED = "paused"  # it goes on once the node is in the job's swarm again
OWN_DATA_FILE = "own_data.json"
JOINING_FILE = "joining.json"
_ACQUAINTANCES_FILE = "acquaintances.json"
_MAX_ACQUAINTANCES_BYTES = 2 * MOST_FIRST * PEER_ID_CHARS
_MAX_FILES, _MAX_PATH_CHARS, _MAX_JOINING_BYTES = 10_000, 32_768, 2**24
KEPT_ENTRIES = 16  # the newest of a job that stay in memory: one of a round with 64 islands takes half a megabyte
_REMOVED_LAST = {"record": 1, "facts.json": 2}
_ANY_TIME_MS = 2**62  # what is on disk was checked when it came, and the clock may have been set back since

T = TypeVar("T")


class NoTraining(AppError):
    """This home has no training job of a name."""


@dataclass(frozen=True)
class StoredTraining:
    """A training job of this home."""

    record: TrainingRecord
    raw: bytes
    folder: Path

    @property
    def id(self) -> str:
        """The beginning of the job's hash."""
        return short_id(self.record.id)


class JoinWords(NamedTuple):
    """What a user has said who joins a job: the files of an own text, and its licence."""

    data: tuple[str, ...] = ()
    licence: str = ""


class _Written(NamedTuple):
    """What a log on disk has: how many rounds, the hash of the last one, and the bytes of their lines."""

    rounds: int
    head: bytes
    size: int


class StoredEntry:
    """An entry of a log on disk: its hash and root are known, all else is read again whenever it is asked for."""

    def __init__(self, path: Path, offset: int, entry: RoundEntry) -> None:
        """Its line begins at `offset`."""
        self._path, self._offset, self.line_bytes = path, offset, len(_lines([entry]))
        self.round, self.hash, self.root = entry.round, entry.hash, entry.root

    @property
    def raw(self) -> bytes:
        """Its signed bytes; raises `RecordError` if they are not there any more."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                raw = base64.b64decode(file.read(self.line_bytes - 1))
        except (OSError, binascii.Error) as error:
            raise RecordError(f"round {self.round} cannot be read from the log: {error}") from error
        if hashlib.sha256(raw).digest() != self.hash:
            raise RecordError(f"the log has another round {self.round} by now")
        return raw

    def __getattr__(self, name: str) -> Any:
        return getattr(read_entry(self.raw), name)


class TrainStore:
    """The training jobs in a home folder."""

    def __init__(self, home: Home) -> None:
        self._folder = home.trainings_folder
        self._written: dict[Path, _Written] = {}  # logs that were read or written here
        self._statuses: dict[Path, tuple[str, int]] = {}  # of jobs, as written here last, and how often begun

    def create(self, raw: bytes, texts: dict[str, bytes], states: list[bytes] | None = None) -> StoredTraining:
        """Write a job that begins here, or that this node joins; `texts` are its files by name.

        `states` are those before the first round, which nobody but the founder has.
        """
        record = read_training(raw, now_ms=wall_ms())
        folder = private_directory(self._folder / short_id(record.id))
        for name, data in texts.items():
            write_private(folder / name, data)
        if states is not None:
            _write_states(folder, states)
        write_private(folder / "record", raw)  # last: a job that is found is complete
        return StoredTraining(record, raw, folder)

    def begin_joining(self, raw: bytes, words: JoinWords) -> StoredTraining:
        """Write a job that this node joins, and whose text is still to be fetched or read."""
        folder = private_directory(self._folder / short_id(read_training(raw, now_ms=_ANY_TIME_MS).id))
        write_private(folder / JOINING_FILE, canonical(words._asdict()))
        return self.create(raw, {})

    def end_joining(self, job: StoredTraining) -> None:
        """Note that the text of a job is all here."""
        (job.folder / JOINING_FILE).unlink(missing_ok=True)

    def joining(self, job: StoredTraining) -> JoinWords | None:
        """Return what was said when this node joined a job whose text is not all here; None for any other job."""
        try:
            fields = decode_object((job.folder / JOINING_FILE).read_bytes(), JOINING_FILE, max_bytes=_MAX_JOINING_BYTES)
            return JoinWords(
                fields.texts("data", _MAX_FILES, _MAX_PATH_CHARS), fields.text("licence", MAX_LICENCE_CHARS)
            )
        except FileNotFoundError:
            return None
        except (OSError, RecordError) as error:
            log.warning("what was said to join training %s is lost: %s", job.record.name, error)
            return JoinWords()

    def note_acquaintances(self, job: StoredTraining, peers: Collection[str]) -> None:
        """Write down some of the peers that had a job when this node joined it."""
        some = random.sample(sorted(peers), min(MOST_FIRST, len(peers)))
        write_private(job.folder / _ACQUAINTANCES_FILE, canonical({"peers": some}))

    def acquaintances(self, job: StoredTraining) -> tuple[str, ...]:
        """Return these peers; nobody if that is not known."""
        try:
            raw = (job.folder / _ACQUAINTANCES_FILE).read_bytes()
            fields = decode_object(raw, _ACQUAINTANCES_FILE, max_bytes=_MAX_ACQUAINTANCES_BYTES)
            return fields.texts("peers", MOST_FIRST, PEER_ID_CHARS)
        except (OSError, RecordError) as error:
            log.debug("the peers that had %s are not known: %s", job.record.name, error)
            return ()

    def has_text(self, job: StoredTraining) -> bool:
        """True if all files of a job's text are here, and whoever joined it with a text of its own was done with it."""
        return self.joining(job) is None and all((job.folder / name).exists() for name in text_files(job.record))

    def all(self) -> list[StoredTraining]:
        """All jobs, the newest first; damaged ones are left out."""
        found = []
        for path in self._folder.glob("*/record"):
            with contextlib.suppress(AppError, OSError):
                raw = path.read_bytes()
                found.append(StoredTraining(read_training(raw, now_ms=_ANY_TIME_MS), raw, path.parent))
        return sorted(found, key=lambda job: job.record.created_ms, reverse=True)

    def find(self, text: str) -> StoredTraining:
        """Return the job of this name, or whose hash begins so; raises `AppError` if none or several are."""
        found = [job for job in self.all() if job.record.name == text or job.record.id.hex().startswith(text)]
        return one_of([(job.record.id, job) for job in found], text)

    def own_data(self, job: StoredTraining) -> tuple[str, str] | None:
        """Return source and licence of this node's own text; None if the text is the job's. Raises `RecordError`."""
        if not job.record.own_data:
            return None
        try:
            raw = (job.folder / OWN_DATA_FILE).read_bytes()
        except FileNotFoundError:  # the founder's are in the record
            return job.record.source, job.record.licence
        fields = decode_object(raw, OWN_DATA_FILE, max_bytes=MAX_DATA_BYTES)
        return fields.text("source", MAX_SOURCE_CHARS), fields.text("licence", MAX_LICENCE_CHARS)

    def log(self, job: StoredTraining) -> list[RoundEntry]:
        """Return the entries of a job up to the first damaged line, of which this node's log tells.

        A line without an end is not counted: the node died, or is at it, while it was written.
        """
        return self._read_log(job)[0]

    def repair_log(self, job: StoredTraining) -> tuple[list[RoundEntry], bool]:
        """Return the entries as `log` does, and if a line was damaged: then the log is cut off there.

        So rounds can be appended to it. If it was the line of the newest round, that is taken from `newest`.
        """
        entries, size, is_damaged = self._read_log(job)
        if is_damaged:
            path = job.folder / "log"
            write_private(job.folder / "log.damaged", path.read_bytes()[size:])
            with contextlib.suppress(OSError, binascii.Error, RecordError):
                newest = read_entry(base64.b64decode((job.folder / "newest").read_bytes(), validate=True))
                if (newest.job, newest.round) == (job.record.id, len(entries)) and newest.prev == _head(entries):
                    entries.append(newest)
            lines = _lines(entries)
            write_private(path, lines)
            self._written[path] = _written(entries, len(lines))
        return entries, is_damaged

    def _read_log(self, job: StoredTraining) -> tuple[list[RoundEntry], int, bool]:
        """Return the entries before the first damaged line, the bytes of their lines, and if there is such a line."""
        path = job.folder / "log"
        try:
            *lines, _ = path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return [], 0, False
        entries, size = list[RoundEntry](), 0
        for number, line in enumerate(lines):
            try:
                entries.append(read_entry(base64.b64decode(line, validate=True)))
            except (binascii.Error, RecordError) as error:
                words = "the log of training %s is damaged at round %s, of which there is no more from there on: %s"
                log.warning(words, job.record.name, number, error)
                break
            size += len(line) + 1
        self._written[path] = _written(entries, size)
        return entries, size, len(entries) < len(lines)

    def states(self, job: StoredTraining) -> list[bytes] | None:
        """Return the states after the newest entry, or before the first round; None if there are none yet."""
        try:
            with (job.folder / "state").open("rb") as file:
                return list(wire.read_blobs(file))
        except FileNotFoundError:
            return None

    def set_state_aside(self, job: StoredTraining) -> None:
        """Keep a state that no entry of the log leads to, as it may be all that is left of what was learned."""
        kept = job.folder / "state.damaged"
        words = (
            "training %s goes on from what others have, or begins again: its log does not lead to its state, kept in %s"
        )
        log.warning(words, job.record.name, kept)
        replace_file(job.folder / "state", kept)

    def save(self, job: StoredTraining, entries: list[RoundEntry], states: list[bytes]) -> None:
        """Write the log, and then the states after its last entry."""
        self._write_log(job.folder / "log", entries)
        write_private(job.folder / "newest", _lines(entries[-1:])[:-1], durable=False)
        _write_states(job.folder, states)

    def on_disk(self, job: StoredTraining, entries: Sequence[RoundEntry]) -> list[RoundEntry]:
        """Return a log that was saved with all but its newest entries left on disk."""
        path, offset, left = job.folder / "log", 0, list[Any]()
        for entry in cast(Sequence[Any], entries[:-KEPT_ENTRIES]):
            left.append(entry if isinstance(entry, StoredEntry) else StoredEntry(path, offset, entry))
            offset += left[-1].line_bytes
        return [*left, *entries[-KEPT_ENTRIES:]]

    def _write_log(self, path: Path, entries: list[RoundEntry]) -> None:
        """Append the entries that are not in the file yet; write it anew if it has another history."""
        known = self._written.get(path)
        if known is not None and known == _written(entries[: known.rounds], known.size):
            added = _lines(entries[known.rounds :])
            with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
                file.truncate(known.size)  # of what was written when the disk was full, or the node died
                file.seek(known.size)
                file.write(added)
                file.flush()
                os.fsync(file.fileno())
                self._written[path] = _written(entries, known.size + len(added))
                return
        whole = _lines(entries)
        write_private(path, whole)
        self._written[path] = _written(entries, len(whole))

    def save_facts(self, job: StoredTraining, facts: dict[str, Any]) -> None:
        """Write the figures of a job; flushed to disk, unless it runs as it did before."""
        status = facts["status"], facts.get("begun", 0)
        durable = status[0] != RUNNING or status != self._statuses.get(job.folder)
        write_private(job.folder / "facts.json", json.dumps(facts).encode(), durable=durable)
        self._statuses[job.folder] = status

    def facts(self, job: StoredTraining) -> dict[str, Any]:
        """Return the figures of a job as they were written last.

        Without them a job counts as running: a power cut can damage the file only then, and a node that was killed
        while the job began has none yet.
        """
        facts = self.stored_facts(job)
        at_ms = facts.pop("checkpoint_ms", None)
        age = None if not isinstance(at_ms, int) else max(0.0, (wall_ms() - at_ms) / 1000)
        return {**facts, "checkpoint_age_s": age}

    def stored_facts(self, job: StoredTraining) -> dict[str, Any]:
        """Return the same as `save_facts` takes them, with the time of the checkpoint in place of its age."""
        try:
            facts = json.loads((job.folder / "facts.json").read_bytes())
        except (OSError, ValueError):
            facts = {}
        return {**facts_of(job.record), **(facts if isinstance(facts, dict) else {})}

    def machines(self, job: StoredTraining) -> list[str]:
        """Return the machines with which this node made steps of a job last, if it made them with others."""
        written = self.stored_facts(job)["machines"]
        hops = written if isinstance(written, list) else []
        return [hop[0] for hop in hops if isinstance(hop, list) and hop and isinstance(hop[0], str)]

    def remove_unfinished(self, job: StoredTraining) -> None:
        """Remove the files that a killed node was writing; only while nothing is written here."""
        for path in job.folder.glob(".*.tmp"):
            path.unlink(missing_ok=True)

    def leave(self, text: str) -> dict[str, Any]:
        """Note that this node takes no more part in a job, which does not run now, and return its figures.

        Raises `AppError` if it is over for other reasons, or cannot be written.
        """
        job = self.find(text)
        facts = self.stored_facts(job)
        if facts["status"] not in (RUNNING, LEFT):
            raise AppError(
                f"this node takes no part in {job.record.name}, which is {facts['status']}: "
                f"`shoal jobs stop {job.record.name}` removes its files"
            )
        with _changing(job):
            self.save_facts(job, {**facts, "status": LEFT, "why": "", "begun": 0})
        return self.idle_facts(job)

    def remove(self, text: str) -> dict[str, Any]:
        """Remove a job in which this node takes no part with its files, and return its figures; raises `AppError`."""
        job = self.find(text)
        facts = self.idle_facts(job)
        if facts["status"] == PAUSED:
            raise takes_part(job.record.name)
        with _changing(job):
            # The record last, so that a job of which files are left can be removed again; but before the figures,
            # without which it would count as running.
            for path in sorted(job.folder.iterdir(), key=lambda path: _REMOVED_LAST.get(path.name, 0)):
                path.unlink()
            job.folder.rmdir()
        self._statuses.pop(job.folder, None)
        self._written.pop(job.folder / "log", None)
        return facts

    def require_not_elsewhere(self, text: str, swarm: str) -> None:
        """Raise `AppError` if a stored job of this name, or whose hash begins so, is of another swarm than this one."""
        with contextlib.suppress(NoTraining):
            job = self.find(text)
            if job.record.swarm != swarm:
                raise AppError(
                    f"{job.record.name} is a training job of {self._swarm_of(job)}: join that swarm first, with "
                    "`shoal join`"
                )

    def _swarm_of(self, job: StoredTraining) -> str:
        """The name of a job's swarm, if this node has run the job there."""
        return f"the swarm {name}" if (name := self.stored_facts(job)["swarm"]) else "another swarm"

    def idle_facts(self, job: StoredTraining) -> dict[str, Any]:
        """Return the figures of a job that does not run in this node now."""
        facts = {**self.facts(job), "left_s": None}
        if facts["status"] != RUNNING:
            return facts
        name, swarm = job.record.name, facts["swarm"] or "its swarm"
        waiting = f"waits until this node is in {swarm} again; `shoal train leave {name}` gives it up"
        return {**facts, "status": PAUSED, "waiting": waiting}

    def all_idle_facts(self) -> list[dict[str, Any]]:
        """Return the figures of all jobs, the newest first, while none of them runs in this node."""
        return [self.idle_facts(job) for job in self.all()]


@contextlib.contextmanager
def _changing(job: StoredTraining) -> Iterator[None]:
    """Name a job's folder if it cannot be changed."""
    try:
        yield
    except OSError as error:
        raise HomeError(f"{job.folder} cannot be changed: {error.strerror or error}") from error


def _write_states(folder: Path, states: list[bytes]) -> None:
    write_private(folder / "state", wire.pack(states))


def _lines(entries: list[RoundEntry]) -> bytes:
    """The lines of a log."""
    return b"".join(base64.b64encode(entry.raw) + b"\n" for entry in entries)


def _written(entries: list[RoundEntry], size: int) -> _Written:
    return _Written(len(entries), _head(entries), size)


def _head(entries: list[RoundEntry]) -> bytes:
    """The hash that the next entry names."""
    return entries[-1].hash if entries else GENESIS


def text_files(record: TrainingRecord) -> set[str]:
    """Return the names of the files of a job's text."""
    return {"tokens", "held", *record.texts}


def short_id(job: bytes) -> str:
    """Return the beginning of a job's hash, which names its folder."""
    return job.hex()[:ID_DIGITS]


def facts_of(record: TrainingRecord) -> dict[str, Any]:
    """Return the figures of a job of which nothing is known but its record."""
    return {
        "job": short_id(record.id), "hash": record.id.hex(), "name": record.name, "founder": record.founder,
        "swarm": "", "status": RUNNING, "why": "", "round": 0, "step": 0, "steps": record.steps, "loss": None,
        "validation_loss": None, "tokens": 0, "tokens_per_s": None, "islands": [], "left_out": {},
        "bytes_per_round": 0, "utilisation": None, "waiting": "", "every": record.every, "wire": record.codecs[0],
        "losses": [], "validation": [], "doubted": {}, "resting": {}, "left_s": None,
        "machines": [],
    }  # fmt: skip


def takes_part(name: str) -> AppError:
    """Return why the files of a job cannot be removed."""
    return AppError(f"this node takes part in {name}: `shoal train leave {name}` ends that, then it can be removed")


def one_of(found: list[tuple[bytes, T]], text: str) -> T:
    """Return the only job found, each with its hash; raises `AppError` that names the hashes of several."""
    if not found:
        raise NoTraining(f"no training job is named {text}: `shoal jobs` lists those of this node")
    if len(hashes := sorted({job.hex() for job, _ in found})) > 1:
        raise AppError(f"two training jobs are named {text}: give the hash of one, {' and '.join(hashes)}")
    return found[0][1]


def require_record(raw: bytes, swarm: str) -> TrainingRecord:
    """Read a record that a peer sent; raises `RecordError` if it is of another swarm."""
    record = read_training(raw, now_ms=wall_ms())
    if record.swarm != swarm:
        raise RecordError("a training job of another swarm")
    return record
