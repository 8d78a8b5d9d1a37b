"""What is left of a training job: memory after its end, files after a kill."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from app.rounds import train_jobs, wire
from app.rounds.founding import TrainWish
from app.rounds.log import took_part
from app.rounds.train_store import _write_states
from p2p.memory.fabric import open_fabric
from tests.app.rounds.test_own_data import Node, made_up
from tests.app.rounds.test_rejoining import found_and_train, run_alone, some_rounds, wish_in
from tests.app.swarms import identity


@pytest.mark.parametrize(("is_member", "number"), [(False, 0), (True, 0), (True, 1)], ids=["new", "late", "done"])
async def test_a_finished_job_is_kept_in_memory_for_members_that_are_late_but_not_for_ever(
    tmp_path: Path, patient_clock: MockClock, *, is_member: bool, number: int
) -> None:
    (tmp_path / "text.txt").write_text(made_up(1))
    wish = TrainWish(
        "fish", (str(tmp_path / "text.txt"),), model="tiny-random", steps=2, every=2, batch=32, length=16, licence="MIT"
    )
    everybody = [identity(number).peer_id for number in range(2)]
    greeting, kept_s = {"round": number, "head": bytes(32).hex()}, 0.0
    async with open_fabric(1) as fabric, trio.open_nursery() as nursery:
        node, other = Node(fabric, 0, tmp_path / "0", everybody), fabric.node(everybody[1])
        await nursery.start(node.jobs.run)
        await node.jobs.found(wish)
        [running] = node.jobs.running.values()
        await running.ended.wait()
        ended_s, job = trio.current_time(), running.job.record.id
        if is_member:  # as after a round that both made
            entry = running.island.log[-1]
            arrivals = (*entry.list.arrivals, replace(entry.list.arrivals[0], peer=everybody[1]))
            running.island.recent = took_part([replace(entry, list=replace(entry.list, arrivals=arrivals))])
        while job in node.jobs._server.islands:  # one greeting in half of the time
            await other.call(everybody[0], wire.HELLO, wire.request(job, greeting), timeout_s=5)
            kept_s = trio.current_time() - ended_s
            await trio.sleep(train_jobs.KEPT_FINISHED_S / 2)
        nursery.cancel_scope.cancel()
    most_s = train_jobs.KEPT_FINISHED_MOST_S if is_member and not number else train_jobs.KEPT_FINISHED_S
    assert most_s / 2 <= kept_s <= most_s


class Killed(BaseException):
    """The process ends here."""


async def test_what_a_killed_node_was_writing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state has 8 bytes for each weight, and is written after each round."""

    def killed(*args: Any) -> None:
        raise Killed

    async def go_on(jobs: train_jobs.TrainJobs) -> None:
        await some_rounds(jobs, 1)

    await found_and_train(tmp_path, wish_in(tmp_path))
    [record] = (tmp_path / "0").glob("home/trainings/*/record")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", killed)
        patched.setattr(os, "unlink", killed)  # nor does it clear up
        with pytest.raises(Killed):
            _write_states(record.parent, [bytes(1000)])
    assert len(list(record.parent.glob(".state.*.tmp"))) == 1
    await run_alone(tmp_path, go_on)
    assert list(record.parent.glob("*.tmp")) == []
