"""What every test shares: one torch thread each, reproducible hypothesis, and no folder of the person's own."""

from __future__ import annotations

import gc
import math
import os
import re
import signal
import sys

# Before torch is imported: small tensors lose time to a thread pool, and two cores serve all of a swarm's processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A shell starts background jobs with Ctrl-C ignored, which every process of a test would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import settings
from trio.testing import MockClock

from app.core.device_thread import DeviceThread
from app.weights.chunk_writer import ChunkWriter

settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=50)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

# What files say that have `transformers` imported, or what `torch.optim` compiles with.
HEAVY = re.compile(r"(import|from) transformers|import peft|_equals_peft|tests\.engine\.(\w+_)?models |torch\.optim\.")


MEMORY_DISK, ROOM_BYTES = "/dev/shm", 6 * 2**30  # nodes leave some of a disk free


def pytest_sessionstart() -> None:
    """Let what is imported be: nearly all of it is kept, and to look at it again and again took two seconds.

    Tests write tens of thousands of small files, which a disk's file system takes five times as long to create: they
    are in memory where it has room.
    """
    gc.disable()
    if os.path.isdir(MEMORY_DISK) and os.access(MEMORY_DISK, os.W_OK):
        disk = os.statvfs(MEMORY_DISK)
        if disk.f_bavail * disk.f_frsize >= ROOM_BYTES and not disk.f_flag & os.ST_NOEXEC:
            os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY_DISK)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the tests of whole processes, of which two workers have half each: they take minutes."""
    items.sort(key=lambda item: item.path.parent.name != "process")


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let one worker have all files that import heavy libraries, which take each process seven seconds of CPU.

    Tests of whole processes go to two workers, each of which needs a fork server: more would be too many at a time.
    """
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

    processes = sorted((config.rootpath / "tests" / "process").glob("test_*.py"))

    class Files(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            path = config.rootpath / file
            if is_heavy(path):
                return "heavy"
            return f"processes {processes.index(path) % 2}" if path in processes else file

    @cache
    def is_heavy(file: Path) -> bool:
        return HEAVY.search(file.read_text("utf-8")) is not None

    return Files(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_finish() -> None:
    """Make what was imported cheap for small tests.

    Scanning it took the garbage collector a tenth of a second each time. On ARM, oneDNN takes longer to set up a
    product than tiny models take to compute it.
    """
    if "torch" in sys.modules:
        sys.modules["torch"].backends.mkldnn.enabled = False
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000, 10, 10)  # 700 is a fifth of the time of a dashboard's tests


@pytest.fixture
def patient_clock(monkeypatch: pytest.MonkeyPatch) -> MockClock:
    """A clock that jumps when all tasks wait and no thread works for one of them, however long threads take."""
    clock, working = MockClock(autojump_threshold=0), 0
    run_sync, opened, take = trio.to_thread.run_sync, ChunkWriter.opened, ChunkWriter.take

    def hold() -> None:
        nonlocal working
        working += 1
        clock.autojump_threshold = math.inf

    def release() -> None:
        nonlocal working
        working -= 1
        clock.autojump_threshold = math.inf if working else 0

    async def run_held(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        hold()
        try:
            return await function(*args, **options)
        finally:
            release()

    async def in_thread(function: Any, *args: Any, **options: Any) -> Any:
        # the thread of a writer waits for chunks most of the time: what it is given is held for below
        held = run_sync if getattr(function, "__func__", None) is ChunkWriter._work else partial(run_held, run_sync)
        return await held(function, *args, **options)

    @asynccontextmanager
    async def opened_until_its_thread_ends() -> AsyncIterator[ChunkWriter]:
        async with AsyncExitStack() as stack:
            stack.callback(release)
            writer = await stack.enter_async_context(opened())
            stack.callback(hold)
            yield writer

    def on_device(name: str) -> Callable[..., Any]:
        run = getattr(DeviceThread, name)
        return lambda device, *args: run_held(run, device, *args)

    for name in ("run", "run_later", "run_apart"):
        monkeypatch.setattr(DeviceThread, name, on_device(name))
    monkeypatch.setattr(trio.to_thread, "run_sync", in_thread)
    monkeypatch.setattr(ChunkWriter, "opened", opened_until_its_thread_ends)
    monkeypatch.setattr(ChunkWriter, "take", lambda writer, *chunks: run_held(take, writer, *chunks))
    return clock


@pytest.fixture(scope="session")
def _homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Empty folders; `mktemp` would look at all that there are to number each, which is slow among thousands."""
    folder = tmp_path_factory.mktemp("homes")

    def made() -> Iterator[Path]:
        for number in count():
            (home := folder / str(number)).mkdir()
            yield home

    return made()


@pytest.fixture(autouse=True)
def _own_home(_homes: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that forgets to name a home folder must not find, or touch, the person's."""
    monkeypatch.setenv("SHOAL_HOME", str(next(_homes)))
    monkeypatch.setenv("SHOAL_MAP_PORT", "false")  # nor ask anything of the router of this network
