"""Room on the disk: unused parts go, the longest unused first; what any running node hosts never does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from app.weights.disk_space import DiskRoom, claiming, in_use, make_room, room_beside_used
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


def test_the_room_that_can_be_made_is_that_of_all_that_nobody_uses(cache: Path) -> None:
    with claiming(cache, "me") as claim:
        claim.replace([bytes.fromhex(name(0))])
        room = room_beside_used(cache, DiskRoom(3 * SIZE))
        assert room == 2 * SIZE
        assert room_beside_used(cache, DiskRoom(0)) == 0
        with pytest.raises(WeightsError, match="cache_limit"):
            make_room(cache, room + 1, DiskRoom(3 * SIZE))
        make_room(cache, room, DiskRoom(3 * SIZE))
        assert left(cache) == [name(0)]


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


def with_disk(monkeypatch: pytest.MonkeyPatch, free: int, total: int = 2**50) -> None:
    usage = SimpleNamespace(free=free, total=total)
    monkeypatch.setattr("app.weights.disk_space.shutil.disk_usage", lambda path: usage)


def test_the_floor_of_the_disk_is_left_free(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_disk(monkeypatch, free=3 * SIZE)
    assert make_room(cache, SIZE, DiskRoom(floor_bytes=2 * SIZE)) == 0
    assert make_room(cache, SIZE, DiskRoom(floor_bytes=3 * SIZE)) == SIZE
    with pytest.raises(WeightsError, match="disk_floor"):
        make_room(cache, SIZE, DiskRoom(floor_bytes=10 * SIZE))


MB = 10**6


@pytest.mark.parametrize(
    ("free", "total", "room", "why"),
    [
        (
            38 * MB,
            40 * MB,
            DiskRoom(floor_bytes=1000 * MB),
            "38.0 MB of its disk of 40.0 MB are free, and the setting disk_floor keeps 1.0 GB free: "
            "set SHOAL_CACHE to a folder on a larger disk",
        ),
        (
            900 * MB,
            2000 * MB,
            DiskRoom(floor_bytes=1000 * MB),
            "the setting disk_floor keeps 1.0 GB of its disk free, of which 900.0 MB are: "
            "lower it by 166.0 MB, or free as much disk space",
        ),
        (
            38 * MB,
            2000 * MB,
            DiskRoom(floor_bytes=1000 * MB),
            "38.0 MB of its disk of 2.0 GB are free, and the setting disk_floor keeps 1.0 GB free: "
            "free 28.0 MB of it and set disk_floor to 0",
        ),
        (38 * MB, 2000 * MB, DiskRoom(), "38.0 MB of its disk of 2.0 GB are free: free 28.0 MB of it"),
        (2000 * MB, 2000 * MB, DiskRoom(50 * MB), "the setting cache_limit allows it 50.0 MB: raise it by 16.0 MB"),
        (
            38 * MB,
            2000 * MB,
            DiskRoom(50 * MB),
            "38.0 MB of its disk of 2.0 GB are free: free 28.0 MB of it; and the setting cache_limit allows it "
            "50.0 MB: raise it by 16.0 MB",
        ),
    ],
)
def test_what_keeps_weights_out_is_named_with_its_remedy(
    tmp_path: Path, free: int, total: int, room: DiskRoom, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_disk(monkeypatch, free, total)
    with pytest.raises(WeightsError) as refused:
        make_room(tmp_path, 66 * MB, room)
    assert str(refused.value) == f"66.0 MB of weights do not fit in {tmp_path}: {why}"
    assert refused.value.code == "disk_full"
