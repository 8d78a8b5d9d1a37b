"""The log of a training job on disk: appended round by round, whole after crashes, and damage is said."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest
import trio

import app.rounds.train_store
from app.config.home import Home
from app.core.errors import RecordError
from app.rounds import wire
from app.rounds.island import hashed
from app.rounds.log import RoundEntry, replay
from app.rounds.record import sign_training
from app.rounds.train_jobs import RunningTraining
from app.rounds.train_store import StoredEntry, StoredTraining, TrainStore
from p2p.platform import write_private
from tests.app.rounds.statements import NOW_MS, PEOPLE, RECORD, history, round_of
from tests.app.rounds.test_own_data import Node, made_up, open_nodes, wish_in

ENTRIES = history(4)
STATES = [b"state"]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainStore:
    """An empty store, at the time of the record."""
    monkeypatch.setattr(app.rounds.train_store, "wall_ms", lambda: NOW_MS)
    return TrainStore(Home.open(tmp_path))


@pytest.fixture
def job(store: TrainStore) -> StoredTraining:
    """A job without rounds."""
    return store.create(sign_training(PEOPLE[0], RECORD), {})


def hashes(entries: list[RoundEntry]) -> list[bytes]:
    return [entry.hash for entry in entries]


def reopened(tmp_path: Path) -> TrainStore:
    """The same folder, as the next run of the node sees it."""
    return TrainStore(Home.open(tmp_path))


def test_a_job_that_is_found_has_its_first_state(store: TrainStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """However soon the node is killed: the record is written last."""
    written: list[str] = []

    def noted(path: Path, data: bytes) -> None:
        written.append(path.name)
        write_private(path, data)

    monkeypatch.setattr(app.rounds.train_store, "write_private", noted)
    job = store.create(sign_training(PEOPLE[0], RECORD), {"tokens": b"text"}, STATES)
    assert written == ["tokens", "state", "record"]
    assert store.states(job) == STATES


def test_figures_are_flushed_to_disk_whenever_a_job_begins_or_ends(
    store: TrainStore, job: StoredTraining, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[bool] = []

    def noted(path: Path, data: bytes, *, durable: bool = True) -> None:
        flushed.append(durable)
        write_private(path, data, durable=durable)

    monkeypatch.setattr(app.rounds.train_store, "write_private", noted)
    for status in ("running", "running", "running", "left", "running", "running", "failed", "failed"):
        store.save_facts(job, {"status": status})
        assert store.facts(job)["status"] == status
    assert flushed == [True, False, False, True, True, False, True, True]


@pytest.mark.parametrize("status", ["running", "left", "failed", "finished"])
def test_a_job_that_does_not_run_has_no_time_to_go(store: TrainStore, job: StoredTraining, status: str) -> None:
    store.save_facts(job, {"status": status, "left_s": 9.0})
    assert store.idle_facts(job)["left_s"] is None


def test_rounds_are_appended(
    store: TrainStore, job: StoredTraining, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(job, ENTRIES[:1], STATES)
    rewritten: list[str] = []

    def noted(path: Path, data: bytes, *, durable: bool = True) -> None:
        rewritten.append(path.name)
        write_private(path, data, durable=durable)

    monkeypatch.setattr(app.rounds.train_store, "write_private", noted)
    for count in range(2, 4):
        before = (job.folder / "log").read_bytes()
        store.save(job, ENTRIES[:count], STATES)
        assert (job.folder / "log").read_bytes().startswith(before)
        assert hashes(reopened(tmp_path).log(job)) == hashes(ENTRIES[:count])
        store.save(job, ENTRIES[:count], STATES)  # nothing new
    later = reopened(tmp_path)
    later.log(job)
    later.save(job, ENTRIES, STATES)  # after a restart
    assert hashes(store.log(job)) == hashes(ENTRIES)
    assert set(rewritten) == {"state", "newest"}


@pytest.mark.skipif(os.name == "nt", reason="there the profile's own rights hold")
def test_nobody_else_may_read_a_log(store: TrainStore, job: StoredTraining) -> None:
    for count in (1, 2):
        store.save(job, ENTRIES[:count], STATES)
        assert (job.folder / "log").stat().st_mode & 0o077 == 0


def test_another_history_replaces_the_log(store: TrainStore, job: StoredTraining, tmp_path: Path) -> None:
    store.save(job, ENTRIES[:3], STATES)
    other, _ = round_of(replay(RECORD, ENTRIES[:1]), PEOPLE[:2])
    for entries in ([ENTRIES[0], other], ENTRIES[:2], ENTRIES[:1], []):
        store.save(job, entries, STATES)
        assert hashes(reopened(tmp_path).log(job)) == hashes(entries)


def test_a_torn_last_line_is_dropped_and_written_over(store: TrainStore, job: StoredTraining, tmp_path: Path) -> None:
    store.save(job, ENTRIES[:3], STATES)
    path = job.folder / "log"
    whole = path.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for size in (last + 1, (last + len(whole)) // 2, len(whole) - 1):
        for rest in (b"", b"\0" * 40):  # a file system may keep the size and lose the bytes
            path.write_bytes(whole[:size] + rest)
            again = reopened(tmp_path)
            assert hashes(again.log(job)) == hashes(ENTRIES[:2])
            again.save(job, ENTRIES[:3], STATES)
            assert path.read_bytes() == whole
    path.write_bytes(whole[: last - 1])  # of the second line, only its end is missing
    assert hashes(reopened(tmp_path).log(job)) == hashes(ENTRIES[:1])


def test_what_a_failed_write_left_is_written_over(store: TrainStore, job: StoredTraining) -> None:
    store.save(job, ENTRIES[:2], STATES)
    with (job.folder / "log").open("ab") as file:
        file.write(b"half a line")  # as if the disk had been full
    store.save(job, ENTRIES[:3], STATES)
    assert hashes(store.log(job)) == hashes(ENTRIES[:3])


def test_a_log_that_was_removed_is_written_again(store: TrainStore, job: StoredTraining) -> None:
    store.save(job, ENTRIES[:2], STATES)
    (job.folder / "log").unlink()
    store.save(job, ENTRIES[:3], STATES)
    assert hashes(store.log(job)) == hashes(ENTRIES[:3])


def damaged(log: bytes, number: int, damage: bytes = b"!") -> bytes:
    """A log with another byte in the middle of one of its lines."""
    lines = log.split(b"\n")
    middle = len(lines[number]) // 2
    assert lines[number][middle : middle + 1] != damage
    lines[number] = lines[number][:middle] + damage + lines[number][middle + 1 :]
    return b"\n".join(lines)


@pytest.mark.parametrize("damage", [b"!", b"A", b"\n"])
def test_a_damaged_log_is_cut_off_and_goes_on(
    store: TrainStore, job: StoredTraining, tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    store.save(job, ENTRIES[:4], STATES)
    path = job.folder / "log"
    whole = path.read_bytes()
    path.write_bytes(spoilt := damaged(whole, 1, damage))
    again = reopened(tmp_path)
    assert hashes(again.log(job)) == hashes(ENTRIES[:1])
    assert "the log of training fish is damaged at round 1" in caplog.text
    assert path.read_bytes() == spoilt, "who only looks changed it"
    assert again.repair_log(job)[1]
    kept = path.read_bytes()
    assert (kept + (job.folder / "log.damaged").read_bytes(), whole.startswith(kept)) == (spoilt, True)
    assert not again.repair_log(job)[1]
    again.save(job, ENTRIES[:3], STATES)
    assert hashes(reopened(tmp_path).log(job)) == hashes(ENTRIES[:3])
    again.set_state_aside(job)
    assert again.states(job) is None
    again.save_facts(job, {"status": "left"})
    again.remove(job.record.name)
    assert not job.folder.exists()


@pytest.mark.parametrize("number", [0, 3])
def test_a_damaged_newest_round_is_taken_from_beside_the_log(
    store: TrainStore, job: StoredTraining, tmp_path: Path, number: int
) -> None:
    store.save(job, ENTRIES[: number + 1], STATES)
    path = job.folder / "log"
    whole = path.read_bytes()
    path.write_bytes(damaged(whole, number))
    assert reopened(tmp_path).repair_log(job)[1]
    assert path.read_bytes() == whole


def test_what_does_not_follow_in_the_log_is_not_taken_from_beside_it(store: TrainStore, job: StoredTraining) -> None:
    store.save(job, ENTRIES[:4], STATES)
    path, newest = job.folder / "log", job.folder / "newest"
    spoilt, kept = damaged(path.read_bytes(), 3), newest.read_bytes()
    other, _ = round_of(replay(RECORD, ENTRIES[:2]), PEOPLE[:2])
    for content in (b"", b"\0" * 40, kept[:-9], base64.b64encode(other.raw), base64.b64encode(ENTRIES[1].raw), None):
        newest.unlink() if content is None else newest.write_bytes(content)
        path.write_bytes(spoilt)
        assert store.repair_log(job)[1]
        assert hashes(store.log(job)) == hashes(ENTRIES[:3])


def test_old_entries_are_read_from_disk(
    store: TrainStore, job: StoredTraining, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app.rounds.train_store, "KEPT_ENTRIES", 1)
    log: list[RoundEntry] = []
    for entry in ENTRIES:
        log.append(entry)
        store.save(job, log, STATES)
        log = store.on_disk(job, log)
    assert [isinstance(entry, StoredEntry) for entry in log] == [True, True, True, False]
    assert [entry.raw for entry in log] == [entry.raw for entry in ENTRIES]
    assert [entry.list.members for entry in log] == [entry.list.members for entry in ENTRIES]
    assert replay(RECORD, log).round == len(ENTRIES)
    assert hashes(reopened(tmp_path).log(job)) == hashes(ENTRIES)
    other = reopened(tmp_path)  # does not know what is in the file, and writes it anew
    other.save(job, log, STATES)
    assert hashes(store.log(job)) == hashes(ENTRIES)
    store.save(job, [log[0], round_of(replay(RECORD, ENTRIES[:1]), PEOPLE[:2])[0]], STATES)
    assert log[0].raw == ENTRIES[0].raw
    with pytest.raises(RecordError, match=r"another round 1 by now|round 1 cannot be read"):
        log[1].raw  # noqa: B018
    (job.folder / "log").unlink()
    with pytest.raises(RecordError, match="round 0 cannot be read"):
        log[0].list  # noqa: B018


async def test_a_newcomer_gets_the_rounds_that_a_member_has_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app.rounds.train_store, "KEPT_ENTRIES", 1)
    async with open_nodes(tmp_path) as nodes:
        await nodes[0].jobs.found(wish_in(tmp_path, "one"))
        [first] = nodes[0].jobs.running.values()
        await until_round(first, 4)
        (tmp_path / "two.txt").write_text(made_up(2))
        await nodes[1].jobs.join("fish", [str(tmp_path / "two.txt")], "MIT")
        [late] = nodes[1].jobs.running.values()
        await until_round(late, 6)
        with trio.fail_after(60):  # until it is on its disk too
            while not (late.island.log and isinstance(late.island.log[0], StoredEntry)):  # noqa: ASYNC110
                await trio.sleep(0.01)
        assert isinstance(first.island.log[0], StoredEntry)
        known = min(len(first.island.log), len(late.island.log))
        assert known >= 5
        assert hashes(first.island.log[:known]) == hashes(late.island.log[:known])


async def test_a_node_that_died_between_entry_and_state_goes_on_from_the_round_before(tmp_path: Path) -> None:
    async with open_nodes(tmp_path) as nodes:
        await nodes[0].jobs.found(wish_in(tmp_path, "one"))
        running = next(iter(nodes[0].jobs.running.values()))
        folder = running.job.folder
        await until_round(running, 2)
        state = (folder / "state").read_bytes()
        await until_round(running, running.island.standing.round + 2)
    root, _ = hashed(wire.unpack(state, 100))
    lines = (folder / "log").read_bytes().split(b"\n")
    known = reopened(tmp_path / "0" / "home").log(running.job)
    at = next(index for index, entry in enumerate(known) if entry.root == root)
    (folder / "state").write_bytes(state)
    (folder / "log").write_bytes(b"\n".join(lines[: at + 2]) + b"\nhalf a line")
    async with open_nodes(tmp_path) as nodes:
        with trio.fail_after(60):
            while not nodes[0].jobs.running:  # noqa: ASYNC110
                await trio.sleep(0.01)
        again = next(iter(nodes[0].jobs.running.values()))
        assert hashes(again.island.log[: at + 1]) == hashes(known[: at + 1])
        await until_round(again, at + 4)  # the newest one may not be written yet
    later = reopened(tmp_path / "0" / "home").log(running.job)
    assert hashes(later[: at + 1]) == hashes(known[: at + 1])
    assert replay(running.job.record, later).round == len(later) >= at + 3


async def test_a_node_alone_goes_on_though_the_newest_round_of_its_log_is_damaged(tmp_path: Path) -> None:
    async with open_nodes(tmp_path) as nodes:
        await nodes[0].jobs.found(wish_in(tmp_path, "one"))
        running = next(iter(nodes[0].jobs.running.values()))
        await until_round(running, 3)
    store, path = reopened(tmp_path / "0" / "home"), running.job.folder / "log"
    known = store.log(running.job)
    path.write_bytes(damaged(path.read_bytes(), len(known) - 1))
    async with open_nodes(tmp_path) as nodes:
        await until_begun(nodes[0])
        again = next(iter(nodes[0].jobs.running.values()))
        assert hashes(again.island.log[: len(known)]) == hashes(known)
        await until_round(again, len(known) + 2)


async def test_a_node_with_a_damaged_log_gets_the_rounds_from_others_or_begins_again(tmp_path: Path) -> None:
    (tmp_path / "two.txt").write_text(made_up(2))
    async with open_nodes(tmp_path) as nodes:
        await nodes[0].jobs.found(wish_in(tmp_path, "one"))
        await nodes[1].jobs.join("fish", [str(tmp_path / "two.txt")], "MIT")
        [first], [second] = (node.jobs.running.values() for node in nodes)
        path = second.job.folder / "log"
        with trio.fail_after(60):
            while not path.exists() or path.read_bytes().count(b"\n") < 4:  # noqa: ASYNC110
                await trio.sleep(0.01)
    known = reopened(tmp_path / "0" / "home").log(first.job)
    path.write_bytes(damaged(path.read_bytes(), 1))
    state = (second.job.folder / "state").read_bytes()
    async with open_nodes(tmp_path) as nodes:
        for node in nodes:
            await until_begun(node)
        [again] = nodes[1].jobs.running.values()
        await until_round(again, 4)
        assert hashes(again.island.log[:3]) == hashes(known[:3])
    assert (second.job.folder / "state.damaged").read_bytes() == state


async def until_begun(node: Node) -> None:
    with trio.fail_after(60):
        while not node.jobs.running:  # noqa: ASYNC110
            await trio.sleep(0.01)


async def until_round(running: RunningTraining, number: int) -> None:
    """Wait until a job stands at a round, in real time because it computes in threads."""
    with trio.fail_after(60):
        while running.island.standing.round < number:  # noqa: ASYNC110
            await trio.sleep(0.01)
