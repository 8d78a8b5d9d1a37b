"""What is left of a training job: memory after its end, files after a kill."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import trio

from app.rounds import train_jobs, wire
from app.rounds.founding import TrainWish
from p2p.memory.fabric import open_fabric
from tests.app.rounds.test_own_data import Node, made_up
from tests.app.rounds.test_rejoining import found_and_train, run_alone, some_rounds, wish_in
from tests.app.swarms import identity

KEPT_S = 1.0


@pytest.mark.timeout(120)
async def test_a_member_that_greets_does_not_keep_a_finished_job_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_jobs, "KEPT_FINISHED_S", KEPT_S)
    (tmp_path / "text.txt").write_text(made_up(1))
    wish = TrainWish(
        "fish", (str(tmp_path / "text.txt"),), model="tiny-random", steps=2, every=2, batch=32, length=16, licence="MIT"
    )
    everybody = [identity(number).peer_id for number in range(2)]
    async with open_fabric(1) as fabric, trio.open_nursery() as nursery:
        node, other = Node(fabric, 0, tmp_path / "0", everybody), fabric.node(everybody[1])
        await nursery.start(node.jobs.run)
        await node.jobs.found(wish)
        [running] = node.jobs.running.values()
        with trio.fail_after(60):
            await running.ended.wait()
        job = running.job.record.id
        for _ in range(20):  # an island that never takes part, of no history, one greeting in half of the time
            if job not in node.jobs._server.islands:
                break
            body = wire.request(job, {"round": 0, "head": bytes(32).hex()})
            await other.call(everybody[0], wire.HELLO, body, timeout_s=5)
            await trio.sleep(KEPT_S / 2)
        assert job not in node.jobs._server.islands
        nursery.cancel_scope.cancel()


KILLED = """
import os, sys, threading, time
from pathlib import Path
from app.rounds.train_store import _write_states
sync = os.fsync
def slow(handle):
    print("writing", flush=True)
    time.sleep(60)
os.fsync = slow
_write_states(Path(sys.argv[1]), [bytes(10**6)])
"""


@pytest.mark.timeout(180)
async def test_what_a_killed_node_was_writing_is_removed(tmp_path: Path) -> None:
    """A state has 8 bytes for each weight, and is written after each round."""
    await found_and_train(tmp_path, wish_in(tmp_path))
    [record] = (tmp_path / "0").glob("home/trainings/*/record")
    for _ in range(3):
        command = [sys.executable, "-c", KILLED, str(record.parent)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"writing\n"
            process.kill()

        async def go_on(jobs: train_jobs.TrainJobs) -> None:
            await some_rounds(jobs, 1)

        await run_alone(tmp_path, go_on)
    left = [path.name for path in record.parent.iterdir() if path.name.endswith(".tmp")]
    assert left == []
