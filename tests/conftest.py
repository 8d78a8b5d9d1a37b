"""What every test shares: one torch thread each, reproducible hypothesis, and no folder of the person's own."""

from __future__ import annotations

import gc
import os
import signal

# Before torch is imported: small tensors lose time to a thread pool, and two cores serve all of a swarm's processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A shell starts background jobs with Ctrl-C ignored, which every process of a test would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from pathlib import Path

import pytest
from hypothesis import settings
from trio.testing import MockClock

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread the tests of whole processes among the others: together they would starve each other of the cores."""
    files = list(dict.fromkeys(item.path for item in items))
    processes = [file for file in files if file.parent.name == "process"]
    others = [file for file in files if file.parent.name != "process"]
    # The last of them comes before the last quarter of the others, so that no worker waits long for it at the end.
    at: dict[Path, float] = {file: index for index, file in enumerate(others)}
    at |= {file: index * 0.75 * len(others) / len(processes) for index, file in enumerate(processes)}
    items.sort(key=lambda item: at[item.path])


def pytest_collection_finish() -> None:
    """Take what was imported out of the garbage collector's sight: scanning it took a tenth of a second each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def patient_clock() -> MockClock:
    """A clock that jumps once nothing has happened for a while, because downloads are written by threads."""
    return MockClock(autojump_threshold=0.01)


@pytest.fixture(autouse=True)
def _own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that forgets to name a home folder must not find, or touch, the person's."""
    home: Path = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("SHOAL_HOME", str(home))
    monkeypatch.setenv("SHOAL_MAP_PORT", "false")  # nor ask anything of the router of this network
