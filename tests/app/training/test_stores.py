"""Records and stores of jobs: there and back, damaged files, states."""

from __future__ import annotations

import errno
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import trio

import app.training.job_store
from app.config.home import Home
from app.core.errors import AppError, RecordError
from app.courtesy.pause import PauseControl
from app.training.adapter_store import FILES, AdapterStore
from app.training.job_store import MAX_LOSSES, Job, JobSource, JobStore, Progress, Status
from app.training.record import JobRecord, decode_record
from app.training.swarm_jobs import SwarmJobs, _Watch
from app.training.trainer import StepDone
from p2p.platform import write_private

RECORD = JobRecord(
    out="a", model="0" * 64, data="1" * 64, rank=8, alpha=16.0, targets=("q", "v"), dropout=0.0, epochs=1, batch=8,
    length=256, rows=1024, rate=2e-4, steps=10, warm_up=1, clip=1.0, validation=0.05, seed=0, created_ms=5,
)  # fmt: skip
SOURCE = JobSource("starter", "/data.jsonl")


@pytest.fixture
def jobs(tmp_path: Path) -> JobStore:
    return JobStore(Home(tmp_path))


def test_a_record_is_read_as_it_was_written_and_its_id_is_its_hash() -> None:
    assert decode_record(RECORD.encoded()) == RECORD
    assert decode_record(RECORD.encoded()).id == RECORD.id != replace(RECORD, seed=1).id


@pytest.mark.parametrize(
    "change",
    [
        {"rank": 0}, {"rank": 257}, {"targets": ["w"]}, {"targets": ["v", "q"]}, {"targets": []}, {"rate": 0},
        {"model": "z" * 64}, {"data": ""}, {"out": "../a"}, {"steps": 0}, {"batch": True}, {"seed": -1}, {"version": 2},
        {"alpha": "16"}, {"epochs": None},
    ],
)  # fmt: skip
def test_a_bad_record_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(AppError):
        decode_record(json.dumps(json.loads(RECORD.encoded()) | change).encode())


def test_jobs_are_found_by_the_beginning_of_their_id(jobs: JobStore) -> None:
    assert jobs.all() == []
    made = [jobs.create(replace(RECORD, created_ms=n), SOURCE) for n in (1, 3, 2)]
    assert [job.record.created_ms for job in jobs.all()] == [3, 2, 1]
    assert jobs.find(made[0].record.id[:8]) == made[0]
    with pytest.raises(AppError, match="no job has the id zz"):
        jobs.find("zz")
    with pytest.raises(AppError, match="several jobs begin with"):
        jobs.find("")


def test_a_job_whose_process_was_killed_is_paused(jobs: JobStore) -> None:
    job = jobs.create(RECORD, SOURCE)
    progress = Progress("running", 3, 30, 1.5, (2.0, 1.5, 1.0), ((0, 2.5),), left_out=(("them", "it lied"),))
    jobs.save_progress(RECORD.id, progress)
    with jobs.hold(RECORD.id):
        assert jobs.find(RECORD.id).progress == progress
        with pytest.raises(AppError, match="is running in another process"):
            jobs.hold(RECORD.id)
    assert jobs.find(job.record.id).progress == replace(progress, status="paused")


def test_nobody_begins_to_run_a_job_while_it_is_stopped(jobs: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    job = jobs.create(RECORD, SOURCE)
    save = jobs.save_progress

    def begun_meanwhile(job_id: str, progress: Progress) -> None:
        with pytest.raises(AppError, match="is running in another process"):
            jobs.hold(job_id)
        save(job_id, progress)

    monkeypatch.setattr(jobs, "save_progress", begun_meanwhile)
    assert not jobs.end(job, "stop")
    assert jobs.find(RECORD.id).progress.status == "stopped"
    jobs.hold(RECORD.id).release()  # it is free again


@pytest.mark.parametrize("wish", ["pause", "stop"])
def test_a_job_that_has_ended_stays_as_it_ended(jobs: JobStore, wish: Literal["pause", "stop"]) -> None:
    jobs.create(RECORD, SOURCE)
    jobs.save_progress(RECORD.id, Progress("finished", 10))
    with pytest.raises(AppError, match="is finished already"):
        jobs.end(jobs.find(RECORD.id), wish)
    assert jobs.find(RECORD.id).progress.status == "finished"


def test_a_state_is_read_as_it_was_written_or_refused(jobs: JobStore) -> None:
    jobs.create(RECORD, SOURCE)
    assert jobs.load_state(RECORD.id) is None
    states = {0: b"abc", 1: b"", 2: b"defg"}
    jobs.save_state(RECORD.id, states)
    assert jobs.load_state(RECORD.id) == states
    path = jobs.folder(RECORD.id) / "state"
    raw = path.read_bytes()
    for damaged in (raw[:-1], raw + b"x", b"y" + raw[1:], raw[:10], b"", raw[:18] + b"\xff" * 4 + raw[22:]):
        path.write_bytes(damaged)
        with pytest.raises(AppError, match="is damaged"):
            jobs.load_state(RECORD.id)


@pytest.mark.parametrize("left_out", [["a"], [["a"]], [["a", 1]], {"a": "b"}, [["a", "b"]] * 257])
def test_progress_with_what_is_no_list_of_hops_is_refused(jobs: JobStore, left_out: object) -> None:
    jobs.create(RECORD, SOURCE)
    path = jobs.folder(RECORD.id) / "progress.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "left_out": left_out}))
    with pytest.raises(RecordError, match="left_out"):
        jobs.find(RECORD.id)


def test_progress_after_more_steps_and_epochs_than_are_kept_is_read_again(jobs: JobStore) -> None:
    jobs.create(RECORD, SOURCE)
    each = tuple(float(step) for step in range(MAX_LOSSES))
    progress = Progress(losses=each, validation=tuple(enumerate(each)))
    progress = progress.after_step(MAX_LOSSES, 1.5, 1, 1.0).validated(MAX_LOSSES, 2.5)
    jobs.save_progress(RECORD.id, progress)
    found = jobs.find(RECORD.id).progress
    assert (found.losses[-1], found.validation[-1]) == (1.5, (MAX_LOSSES, 2.5))
    assert len(found.losses) == len(found.validation) == MAX_LOSSES


def test_progress_of_an_earlier_version_is_read(jobs: JobStore) -> None:
    jobs.create(RECORD, SOURCE)
    path = jobs.folder(RECORD.id) / "progress.json"
    values = json.loads(path.read_text())
    del values["left_out"]
    path.write_text(json.dumps(values))
    assert jobs.find(RECORD.id).progress.left_out == ()


def test_progress_is_flushed_to_disk_whenever_a_job_begins_or_ends(
    jobs: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs.create(RECORD, SOURCE)
    flushed: list[bool] = []

    def noted(path: Path, data: bytes, *, durable: bool = True) -> None:
        flushed.append(durable)
        write_private(path, data, durable=durable)

    monkeypatch.setattr(app.training.job_store, "write_private", noted)
    statuses: list[Status] = ["running", "running", "running", "paused", "running", "running", "failed", "failed"]
    for status in statuses:
        jobs.save_progress(RECORD.id, Progress(status))
    assert flushed == [True, False, False, True, True, False, True, True]


@pytest.mark.parametrize("content", [b"", b"\0" * 40, b'{"status": "runn'], ids=["empty", "zeros", "cut off"])
def test_a_job_whose_progress_a_power_cut_damaged_was_running(jobs: JobStore, content: bytes) -> None:
    job = jobs.create(RECORD, replace(SOURCE, swarm="s"))
    (jobs.folder(RECORD.id) / "progress.json").write_bytes(content)
    assert jobs.all() == jobs.interrupted("s") == [job]
    assert jobs.find(RECORD.id).progress.status == "paused"
    with jobs.hold(RECORD.id):
        assert jobs.find(RECORD.id).progress.status == "running"


@pytest.mark.parametrize(("file", "content"), [("progress.json", b"{}"), ("record.json", b"{}"), ("source.json", b"")])
def test_a_damaged_job_hides_no_other(jobs: JobStore, file: str, content: bytes) -> None:
    jobs.create(RECORD, SOURCE)
    other = jobs.create(replace(RECORD, seed=1), SOURCE)
    (jobs.folder(RECORD.id) / file).write_bytes(content)
    assert jobs.all() == [other]
    with pytest.raises(RecordError):
        jobs.find(RECORD.id)


def test_a_full_disk_does_not_end_a_job_at_its_next_step() -> None:
    def save_progress(job_id: str, progress: Progress) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    figures: Any = SimpleNamespace(left_out={}, link_bytes=Counter())
    running: Any = SimpleNamespace(
        job=SimpleNamespace(record=SimpleNamespace(id="a job", steps=1), progress=Progress()), material=None,
        progress=Progress(), step_s=[], trainer=SimpleNamespace(figures=figures), snapshots_s=0.0,
    )  # fmt: skip
    store: Any = SimpleNamespace(save_progress=save_progress)
    watch = _Watch(running, store)
    watch.on_step(StepDone(1, 1.5, 5, 1.0, 0.1))
    assert (running.progress.step, running.progress.losses) == (1, (1.5,))


@pytest.fixture
def in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows removes no file that a virus scanner reads."""

    def unlink(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EACCES, "the file is being used by another process", str(path))

    monkeypatch.setattr(Path, "unlink", unlink)


def test_a_job_whose_wish_cannot_be_removed_is_not_locked(jobs: JobStore, in_use: None) -> None:
    """It would do at once what was wished of an earlier run."""
    jobs.create(RECORD, SOURCE)
    with pytest.raises(AppError, match="is being used by another process"):
        jobs.hold(RECORD.id)
    assert not jobs.is_running(RECORD.id)


def test_a_job_whose_state_cannot_be_removed_ends_all_the_same(jobs: JobStore, in_use: None) -> None:
    job = jobs.create(RECORD, SOURCE)
    jobs.save_state(RECORD.id, {0: b"state"})
    jobs.end(job, "stop")
    assert jobs.find(RECORD.id).progress.status == "stopped"


def test_an_adapter_that_was_stored_just_before_its_process_ended_is_the_jobs_own(tmp_path: Path) -> None:
    """The job failed when it went on: there was an adapter of that name already."""
    adapters, files = AdapterStore(Home(tmp_path)), {name: name.encode() for name in FILES}
    for _ in range(2):
        assert {path.name for path in adapters.save("mine", files).iterdir()} == {*FILES}
    with pytest.raises(AppError, match="an adapter named mine already"):
        adapters.save("mine", {**files, FILES[0]: b"another"})


async def test_a_job_that_cannot_be_taken_up_ends_no_other_work(
    jobs: JobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card may have failed when the node starts again, and torch raises errors of its own."""
    jobs.create(RECORD, replace(SOURCE, swarm="s"))
    jobs.save_progress(RECORD.id, Progress("running"))
    pause = PauseControl(tmp_path / "pause.json", lambda: None)
    place: Any = SimpleNamespace(swarm="s", states=SimpleNamespace(serve=lambda: None), pause=pause)
    owned = SwarmJobs(Home(tmp_path), place)

    async def failing(job: Job, material: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(owned, "_prepared", failing)
    async with trio.open_nursery() as nursery:
        await nursery.start(owned.run)
        with trio.fail_after(60):
            while (progress := jobs.find(RECORD.id).progress).status != "failed":  # noqa: ASYNC110
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    assert progress.status == "failed"
    assert progress.why == "RuntimeError while computing: CUDA error: an illegal memory access was encountered"
