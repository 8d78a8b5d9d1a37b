"""Members are asked for training jobs some at a time, within a time, and a record is checked once and apart."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

import app.rounds.train_store
from app.rounds import job_search, wire
from app.rounds.job_search import ASKED_AT_ONCE, KEPT_CHECKED, MOST_BYTES, JobSearch
from app.rounds.record import sign_training
from app.rounds.train_store import require_record
from p2p.memory.fabric import MemoryFabric, open_fabric
from tests.app.rounds.island_swarm import in_place
from tests.app.rounds.statements import NOW_MS, PEOPLE, RECORD

SILENT = 10**9


@pytest.fixture(autouse=True)
def now(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of the record."""
    monkeypatch.setattr(app.rounds.train_store, "wall_ms", lambda: NOW_MS)


def signed(founder: int = 0, **more: Any) -> bytes:
    return sign_training(PEOPLE[founder], replace(RECORD, founder=PEOPLE[founder].peer_id, **more))


class Members:
    """Members that answer at once, after a while or never, and name some jobs."""

    def __init__(self, fabric: MemoryFabric, count: int, *more: str) -> None:
        self.names = [*(f"m{number}" for number in range(count)), *more]
        self.jobs: dict[str, list[bytes]] = {}
        self.waits: dict[str, float] = {}
        self.wait = 0.1
        self.asked: list[str] = []
        self.under_way = self.most_at_once = 0
        self.searching = fabric.node("me")
        for name in self.names:
            fabric.node(name).serve(wire.JOBS, self._answering(name))

    def _answering(self, name: str) -> Callable[[str, bytes], Awaitable[Any]]:
        async def answer(peer: str, body: bytes) -> Any:
            self.asked.append(name)
            self.under_way += 1
            self.most_at_once = max(self.most_at_once, self.under_way)
            try:
                await trio.sleep(self.waits.get(name, self.wait))
            finally:
                self.under_way -= 1
            return wire.pack(self.jobs.get(name, []))

        return answer

    def search(self) -> JobSearch:
        return JobSearch(self.searching, RECORD.swarm, in_place)


async def test_all_members_are_asked_some_at_a_time(autojump_clock: MockClock) -> None:
    async with open_fabric() as fabric:
        members = Members(fabric, 6 * ASKED_AT_ONCE)
        members.jobs[members.names[-1]] = [signed(name="cod"), signed()]
        found = await members.search().find("fish", members.names, ask_s=10, within_s=60)
        [one] = found.jobs.values()
        assert (one.job.name, one.raw, one.holders, found.not_asked) == ("fish", signed(), [members.names[-1]], 0)
        assert sorted(members.asked) == sorted(members.names)
        assert members.most_at_once <= ASKED_AT_ONCE


async def test_silent_members_make_a_search_no_longer_than_is_said(autojump_clock: MockClock) -> None:
    async with open_fabric() as fabric:
        members = Members(fabric, 9 * ASKED_AT_ONCE)
        members.wait = SILENT
        began = trio.current_time()
        found = await members.search().find("fish", members.names, ask_s=10, within_s=60)
        assert (found.jobs, trio.current_time() - began) == ({}, 60)
        assert 2 * ASKED_AT_ONCE <= found.not_asked <= 3 * ASKED_AT_ONCE


async def test_a_search_for_a_hash_ends_with_the_record_whoever_repeats_it(autojump_clock: MockClock) -> None:
    async with open_fabric() as fabric:
        members = Members(fabric, 3 * ASKED_AT_ONCE)
        members.wait = SILENT
        one = members.names[-1]
        members.jobs, members.waits = {one: [signed()]}, {one: 0.1}
        search = members.search()
        search._in_order = lambda members, first: list(members)  # type: ignore[method-assign]
        began = trio.current_time()
        found = await search.find(RECORD.id.hex(), members.names, ask_s=10, within_s=60)
        assert [job.holders for job in found.jobs.values()] == [[one]]
        assert 20 <= trio.current_time() - began < 21  # behind two batches of silent ones


async def test_all_holders_of_a_job_are_found_its_founder_among_the_first(autojump_clock: MockClock) -> None:
    founder, taken = PEOPLE[0].peer_id, dict[str, float]()
    async with open_fabric() as fabric:
        members = Members(fabric, 3 * ASKED_AT_ONCE, founder)
        members.wait = SILENT
        holders = [*members.names[:20], founder]
        members.jobs = {name: [signed(name="cod"), signed()] for name in holders}
        members.waits = dict.fromkeys(holders, 0.1)
        began = trio.current_time()
        await members.search().find_holders(
            RECORD, members.names, lambda peer: taken.update({peer: trio.current_time() - began})
        )
        assert taken.keys() == {*holders}
        assert taken[founder] < 1
        assert sorted(members.asked) == sorted(members.names)


async def test_a_search_for_a_name_ends_once_two_jobs_have_it(autojump_clock: MockClock) -> None:
    async with open_fabric() as fabric:
        members = Members(fabric, 3 * ASKED_AT_ONCE)
        members.wait = SILENT
        members.waits = dict.fromkeys(members.names[:2], 0.1)
        members.jobs = {members.names[0]: [signed()], members.names[1]: [signed(seed=9)]}
        search = members.search()
        search._in_order = lambda members, first: list(members)  # type: ignore[method-assign]
        began = trio.current_time()
        found = await search.find("fish", members.names, ask_s=10, within_s=60)
        assert len(found.jobs) == 2
        assert trio.current_time() - began < 1


async def test_members_that_named_a_job_before_are_asked_first(autojump_clock: MockClock) -> None:
    async with open_fabric() as fabric:
        members = Members(fabric, 9 * ASKED_AT_ONCE)
        members.wait = SILENT
        one = members.names[-1]
        members.jobs, members.waits = {one: [signed(), signed()]}, {one: 0.1}
        search = members.search()
        assert [job.name for job in await search.list_jobs([one], ask_s=3)] == ["fish"]
        for target in ("fish", RECORD.id.hex(), RECORD.id.hex()[:12]):
            members.asked.clear()
            found = await search.find(target, members.names, ask_s=10, within_s=1)
            assert [job.holders for job in found.jobs.values()] == [[one]]
            assert one in members.asked
            assert len(members.asked) <= ASKED_AT_ONCE + 1


async def test_a_record_is_checked_once_and_a_member_has_so_many_bytes_checked(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[bytes] = []
    check = require_record

    def counted(raw: bytes, swarm: str) -> Any:
        checked.append(raw)
        return check(raw, swarm)

    monkeypatch.setattr(job_search, "require_record", counted)
    large = {**RECORD.shape, "more": [0] * 15_000}
    async with open_fabric() as fabric:
        members = Members(fabric, 3)
        honest, flood, wrong = members.names
        members.jobs = {
            honest: [signed(name="cod")],
            flood: [signed(name=f"job{number}", shape=large) for number in range(20)],
            wrong: [b"what is this?", *(signed(name=f"hidden{number}") for number in range(9))],
        }
        search = members.search()
        for _ in range(2):
            names = {job.name for job in await search.list_jobs(members.names, ask_s=3)}
            taken = MOST_BYTES // len(members.jobs[flood][0])
            assert names == {"cod", *(f"job{number}" for number in range(taken))}
        assert len(checked) == 1 + taken + 2  # the wrong one again
        assert sum(map(len, checked)) < 2 * MOST_BYTES


async def test_records_that_were_checked_are_forgotten_beyond_a_number(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_search, "KEPT_CHECKED", 3)
    assert KEPT_CHECKED > 1000
    async with open_fabric() as fabric:
        members = Members(fabric, 3 * job_search.KEPT_NAMERS)
        search = members.search()
        members.jobs = {"m0": [signed(name=f"job{number}") for number in range(5)]}
        assert len(await search.list_jobs(["m0"], ask_s=3)) == 5
        assert [job.name for job in search._checked.values()] == ["job2", "job3", "job4"]
        members.jobs = {name: [signed(name="job4")] for name in members.names}
        await search.list_jobs(members.names, ask_s=3)
        assert max(len(job.namers) for job in search._checked.values()) == job_search.KEPT_NAMERS


async def test_records_are_checked_in_a_thread_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large one takes milliseconds, which replies that pass through this node would wait for."""
    under_way, threads, most = 0, set[threading.Thread](), 0
    check = require_record

    def noted(raw: bytes, swarm: str) -> Any:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        threads.add(threading.current_thread())
        found = check(raw, swarm)
        under_way -= 1
        return found

    monkeypatch.setattr(job_search, "require_record", noted)
    async with open_fabric() as fabric:
        members = Members(fabric, 8)
        members.wait = 0.0
        members.jobs = {name: [signed(name=f"job-{name}")] for name in members.names}
        found = await JobSearch(members.searching, RECORD.swarm).list_jobs(members.names, ask_s=60)
    assert len(found) == 8
    assert most == 1
    assert threading.current_thread() not in threads
