"""Room on the disk: unused parts go, the longest unused first; what any running node hosts never does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from app.weights.disk_space import DiskRoom, claiming, in_use, make_room
from app.weights.extents import WeightsError
from app.weights.part_store import PartFiles

SIZE = 64 * 1024


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Four parts, the first one used longest ago."""
    folder = PartFiles(tmp_path).folder
    folder.mkdir()
    for number in range(4):
        file = folder / name(number)
        file.write_bytes(os.urandom(SIZE))
        os.utime(file, ns=(number, number))
    return tmp_path


def name(number: int) -> str:
    return f"{number:064x}"


def left(cache: Path) -> list[str]:
    return [root for root, _ in PartFiles(cache).names()]


def test_nothing_goes_while_there_is_room(cache: Path) -> None:
    assert make_room(cache, SIZE, DiskRoom(5 * SIZE)) == 0
    assert make_room(cache, SIZE, DiskRoom(None)) == 0
    assert len(left(cache)) == 4


def test_the_longest_unused_go_first(cache: Path) -> None:
    assert make_room(cache, SIZE, DiskRoom(3 * SIZE)) == 2 * SIZE
    assert left(cache) == [name(2), name(3)]


def test_what_a_node_hosts_stays(cache: Path) -> None:
    with claiming(cache, "me") as claim:
        claim.replace([bytes.fromhex(name(0)), bytes.fromhex(name(2))])
        assert in_use(cache) == {name(0), name(2)}
        assert make_room(cache, SIZE, DiskRoom(3 * SIZE)) == 2 * SIZE
        assert left(cache) == [name(0), name(2)]
        with pytest.raises(WeightsError, match="cache_limit"):
            make_room(cache, SIZE, DiskRoom(2 * SIZE))
    assert in_use(cache) == set()


def test_what_does_not_fit_costs_nothing(cache: Path) -> None:
    with pytest.raises(WeightsError, match="do not fit"):
        make_room(cache, 5 * SIZE, DiskRoom(4 * SIZE))
    with pytest.raises(WeightsError, match="do not fit"):
        make_room(cache, 2**60, DiskRoom(None))
    assert len(left(cache)) == 4


def test_a_dead_nodes_claim_counts_for_nothing(cache: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from app.weights.disk_space import claiming\n"
        "with claiming(Path(sys.argv[1]), 'dead') as claim:\n"
        "    claim.replace([bytes.fromhex(sys.argv[2])]); print('held', flush=True); sys.stdin.read(1); os._exit(9)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(cache), name(1)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == b"held\n"
        assert in_use(cache) == {name(1)}
        other.stdin.write(b"x")
        other.stdin.flush()
        other.wait(10)
    assert in_use(cache) == set()
    assert not list((cache / "in_use").glob("*.roots"))


def test_the_floor_of_the_disk_is_left_free(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = 3 * SIZE
    monkeypatch.setattr("app.weights.disk_space.shutil.disk_usage", lambda path: SimpleNamespace(free=free))
    assert make_room(cache, SIZE, DiskRoom(floor_bytes=2 * SIZE)) == 0
    assert make_room(cache, SIZE, DiskRoom(floor_bytes=3 * SIZE)) == SIZE
    with pytest.raises(WeightsError, match="disk_floor"):
        make_room(cache, SIZE, DiskRoom(floor_bytes=10 * SIZE))
