"""A disk that is full, a cache that vanishes, two processes that fill one cache: clear words, and nothing corrupt."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import trio

from app.weights import download as fetching
from app.weights import wire
from app.weights.extents import WeightsError
from app.weights.library import span_parts
from p2p.errors import RemoteError
from tests.app.weights.models import empty_library, import_model
from tests.app.weights.test_exchange import ALL, world

BLOCKS = span_parts(0, 4)

# Brings blocks from one cache into another, chunk by chunk, as a fetch does; backwards where it is told to.
FILL = """
import json, sys
from pathlib import Path
from app.weights.manifest_store import ManifestStore
from app.weights.extents import WeightsError
from app.weights.library import Library

seed, cache, order, *names = sys.argv[1:]
store = ManifestStore(Path(seed))
manifest = store.load(store.hashes()[0])
source, target = Library(Path(seed), manifest), Library(Path(cache), manifest)
print("ready", flush=True)
sys.stdin.readline()
words = ""
try:
    for name in names:
        part = manifest.by_name[name]
        new = target.open_new(part, source.leaves(part))
        for index in new.missing()[:: int(order)]:
            assert new.take(index, source.chunk(part, index))
        target.finish(new)
except WeightsError as error:
    words = str(error)
    new.close()
print(json.dumps({"words": words, "held": sorted(target.held()), "right": sorted(new.have)}))
"""


def fill(*arguments: str | Path, before: Sequence[str] = ()) -> subprocess.Popen[str]:
    """A process that fills a cache, once it is told to."""
    command = [*before, sys.executable, "-c", FILL, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def outcome(process: subprocess.Popen[str]) -> dict[str, object]:
    out, _ = process.communicate("\n", timeout=60)
    facts: dict[str, object] = json.loads(out.splitlines()[-1])
    return facts


def can_mount() -> bool:
    probe = ["unshare", "--mount", "true"]
    return shutil.which("unshare") is not None and subprocess.run(probe, capture_output=True).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="needs the right to mount a small disk")
def test_a_disk_that_is_really_full_is_named_and_keeps_only_right_chunks(tmp_path: Path) -> None:
    import_model(tmp_path / "model", tmp_path / "seed")
    small = tmp_path / "small"
    small.mkdir()
    mounted = ("unshare", "--mount", "sh", "-c", f'mount -t tmpfs -o size=2560k tmpfs "{small}" && exec "$@"', "sh")
    facts = outcome(fill(tmp_path / "seed", small, "1", *BLOCKS, before=mounted))
    assert "the disk is full" in str(facts["words"])
    assert "SHOAL_CACHE" in str(facts["words"])
    assert facts["held"] == []
    assert facts["right"] == [0, 1]  # 2.5 MiB: the third of four chunks did not fit


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
def test_a_file_that_may_not_grow_is_named(tmp_path: Path) -> None:
    import_model(tmp_path / "model", tmp_path / "seed")
    limited = ("sh", "-c", 'ulimit -f 3072 && exec "$@"', "sh")  # 1.5 MiB, in units of 512 bytes
    facts = outcome(fill(tmp_path / "seed", tmp_path / "cache", "1", "block.0", before=limited))
    assert "block.0" in str(facts["words"])
    assert "cannot be written" in str(facts["words"])
    assert facts["held"] == []
    assert facts["right"] == [0]


def test_two_processes_fill_one_cache(tmp_path: Path) -> None:
    """At once, from both ends: each finishes, whoever of them is first, and every byte is right."""
    studied = import_model(tmp_path / "model", tmp_path / "seed")
    both = [fill(tmp_path / "seed", tmp_path / "cache", control_frame, *BLOCKS) for control_frame in ("1", "-1")]
    for process in both:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in both:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in both:
        facts = outcome(process)
        assert (facts["words"], facts["held"]) == ("", list(BLOCKS))
    library = empty_library(tmp_path / "cache", studied)
    assert library.check(BLOCKS, again=True) == []
    assert not list(library.files.folder.glob("*.new"))


async def test_a_getters_cache_deleted_in_the_middle_is_a_clear_error_and_it_can_go_on(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        peer = here.peer("newcomer")

        def empty(name: str) -> None:
            shutil.rmtree(tmp_path / "newcomer", ignore_errors=True)

        with pytest.raises(WeightsError, match=r"emptied while part|cannot be written"), trio.fail_after(30):
            await peer.fetching.fetch(ALL, empty)
        again = here.peer("newcomer-again", empty_library(tmp_path / "newcomer", here.studied))
        with trio.fail_after(30):
            await again.fetching.fetch(ALL)
        assert again.library.check(ALL, again=True) == []


async def test_a_givers_cache_deleted_under_it_costs_nobody_a_fetch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "LOOK_AGAIN_S", 0.05)
    async with world(tmp_path) as here:
        giver = here.peer("giver")
        with trio.fail_after(30):
            await giver.fetching.fetch(ALL)
        here.holders["giver"] = set(ALL)
        shutil.rmtree(tmp_path / "giver")
        asker = here.fabric.node("asker")
        request = wire.ChunkRequest(here.studied.manifest.by_name["block.0"].root, 0)
        with pytest.raises(RemoteError) as refused:
            await asker.call("giver", wire.CHUNK, request.encode(), timeout_s=5)
        assert refused.value.code == wire.ABSENT
        assert giver.library.held() == frozenset()
        peer = here.peer("newcomer")
        with trio.fail_after(30):
            await peer.fetching.fetch(ALL)
        assert "giver" not in peer.fetching.progress.from_peers
