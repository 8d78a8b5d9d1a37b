"""A tokenizer that somebody else wrote can compute for days for a text: that costs its job, and nothing else.

Whoever founds a job with `--own-data` gives those who join it a tokenizer; a model's author gives one to all its jobs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from app.config.home import Home
from app.core.errors import AppError, RecordError
from app.manifest.manifest import MAX_TOKENIZER_BYTES
from app.rounds import founding
from app.rounds.record import sign_training
from app.training import material, reading
from app.training.reading import READ_AT_ONCE, READ_BYTES_PER_S, TextReading
from app.training.swarm_jobs import SwarmJobs
from app.training.wire import StatePart
from tests.app.rounds.statements import PEOPLE, RECORD
from tests.app.rounds.test_own_data import made_up, open_nodes, wish_in

WITHIN_S = 20.0  # of a busy machine's time; none of it is waited for


class Endless:
    """A reading of a text that does not end before the test does."""

    def __init__(self) -> None:
        self.begun, self._over = threading.Semaphore(0), threading.Event()

    def __call__(self, *args: Any) -> Any:
        self.begun.release()
        self._over.wait(60)
        raise RuntimeError("the test is over")

    async def wait_begun(self) -> None:
        """Return once it was called, for each call once."""
        assert await trio.to_thread.run_sync(self.begun.acquire, True, WITHIN_S)

    def end(self) -> None:
        self._over.set()


@pytest.fixture
def endless() -> Iterator[Endless]:
    made = Endless()
    yield made
    made.end()


async def test_a_text_that_is_never_read_holds_up_neither_leaving_nor_the_nodes_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, endless: Endless
) -> None:
    """Leaving the job did not return, and the node had to be killed; it began again at the next start."""
    monkeypatch.setattr(founding, "own_texts", endless)
    (tmp_path / "two.txt").write_text(made_up(2))

    async def join() -> None:
        with pytest.raises(AppError, match="was left before it began"):
            await jobs.join("fish", [str(tmp_path / "two.txt")], "CC0-1.0")

    with trio.fail_after(3 * WITHIN_S):
        async with open_nodes(tmp_path) as nodes:
            jobs = nodes[1].jobs
            await nodes[0].jobs.found(wish_in(tmp_path, "one"))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(join)
                await endless.wait_begun()
                with trio.fail_after(WITHIN_S):
                    facts = await jobs.leave("fish")
            assert facts["status"] == "left"
            async with trio.open_nursery() as nursery:
                nursery.start_soon(jobs.join, "fish", [str(tmp_path / "two.txt")], "CC0-1.0")
                await endless.wait_begun()
                nursery.cancel_scope.cancel()


def endless_founding(folder: Path, monkeypatch: pytest.MonkeyPatch, endless: Endless) -> Callable[[], Any]:
    """Found a job in rounds."""
    monkeypatch.setattr(founding, "read_texts", endless, raising=False)
    monkeypatch.setattr(founding, "_ids", endless)

    async def found() -> None:
        async with open_nodes(folder) as nodes:
            await nodes[0].jobs.forecast(wish_in(folder, "one"))

    return found


def endless_tuning(folder: Path, monkeypatch: pytest.MonkeyPatch, endless: Endless) -> Callable[[], Any]:
    """Fine-tune a swarm's model."""
    monkeypatch.setattr(material, "read_material", endless)

    async def ends() -> tuple[Any, Any]:
        return None, None

    place: Any = SimpleNamespace(ends=SimpleNamespace(training_ends=ends), model="0" * 64)
    jobs = SwarmJobs(Home.open(folder), place)
    wish: Any = SimpleNamespace(out="sevens", source=SimpleNamespace(data="data.jsonl", validation_file=None))
    return lambda: jobs.forecast(wish)


@pytest.mark.parametrize("job", [endless_founding, endless_tuning])
async def test_a_text_that_is_never_read_can_be_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, endless: Endless, job: Callable[..., Callable[[], Any]]
) -> None:
    begin = job(tmp_path, monkeypatch, endless)
    with trio.fail_after(2 * WITHIN_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(begin)
            await endless.wait_begun()
            nursery.cancel_scope.cancel()


async def test_texts_that_are_never_read_end_their_jobs_and_take_nobody_elses_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, endless: Endless
) -> None:
    monkeypatch.setattr(reading, "READ_S", 0.05)
    text, threads = tmp_path / "text.txt", TextReading()
    text.write_bytes(bytes(READ_BYTES_PER_S // 20))  # another 0.05 s
    free = trio.to_thread.current_default_thread_limiter().available_tokens
    for _ in range(2 * READ_AT_ONCE):
        with pytest.raises(AppError, match="takes more than 0 s: give less text"):
            await threads.run([str(text), str(tmp_path / "none")], endless)
    assert trio.to_thread.current_default_thread_limiter().available_tokens == free
    assert sum(endless.begun.acquire(blocking=False) for _ in range(2 * READ_AT_ONCE)) == READ_AT_ONCE


def test_the_tokenizer_of_a_job_is_as_large_as_that_of_a_swarm_at_most() -> None:
    """It could have 8 GiB, all of which is in memory at once."""
    sign_training(PEOPLE[0], replace(RECORD, tokenizer=StatePart(bytes(32), MAX_TOKENIZER_BYTES)))
    with pytest.raises(RecordError, match="tokenizer"):
        sign_training(PEOPLE[0], replace(RECORD, tokenizer=StatePart(bytes(32), MAX_TOKENIZER_BYTES + 1)))
