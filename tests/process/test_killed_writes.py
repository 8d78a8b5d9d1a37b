"""A process killed at a random moment while it writes: what is on the disk is whole each time."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from app.config.file import load_config
from app.config.home import Home
from app.manifest.importing import hash_source
from app.node.statistics import Statistics, read_days, read_peers
from app.weights.manifest_store import ManifestStore
from app.weights.part_store import PartFiles
from app.weights.source_index import SourceIndex
from engine.sources.opening import open_source
from p2p.identity import load_or_create
from tests.process.node_process import Place
from tests.process.write_storm import PARTS, made_up_part

KILLS = 5


def kill_while_it_writes(place: Place, after_s: float) -> None:
    """Let a storm of writes go on for a while, then end it without a word."""
    command = [sys.executable, "-m", "tests.process.write_storm", str(place.home), str(place.cache)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=place.environment()) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"begun\n"
            time.sleep(after_s)  # the moment is what is tried out
        finally:
            process.kill()


def look(place: Place) -> tuple[str, int]:
    """Read all of it as a node would; returns the peer id and the tokens served."""
    home = Home(place.home)
    config = load_config(home.config_file, {})
    assert config.unknown == ()
    assert config.settings.name.startswith("node ") or config.settings.name == ""
    statistics = Statistics(home.statistics_file)
    served = statistics.totals(ever=True).served_tokens
    assert served == statistics.totals(ever=True).asked_tokens
    assert served == sum(sums.served for _, sums in read_days(home.statistics_file, 9))
    assert sum(sums.served + sums.asked for _, sums in read_peers(home.statistics_file, 9)) == 2 * served
    assert list(place.home.glob("*.damaged-*")) == []
    store = ManifestStore(place.cache)
    assert all(store.load(model_hash) is not None for model_hash in store.hashes())
    look_at_parts(place, store)
    text = home.sequence_file.read_text() if home.sequence_file.exists() else "0\n"
    assert text.endswith("\n"), "a number is written whole"
    return load_or_create(home.key_file).peer_id, served


def look_at_parts(place: Place, store: ManifestStore) -> None:
    """A part that has its name is whole, one that is half fetched can be finished, and the index can be read."""
    files = PartFiles(place.cache)
    for number in range(PARTS):
        part, leaves, chunks = made_up_part(number)
        if files.holds(part):
            assert files.path(part.root).read_bytes() == b"".join(chunks)
            assert files.check(part), "its hashes are beside it"
        elif files.path(part.root).with_suffix(".new").exists():
            new = files.open_new(part, leaves)
            assert all(new.take(index, chunks[index]) for index in new.missing())
            files.finish(new)
            assert files.check(part)
    for name in store.hashes():
        raw = place.cache / "manifests" / f"{name}.index"
        assert not raw.exists() or len(SourceIndex.decode(raw.read_bytes()).extents) == 1


def survive(tmp_path: Path, kills: int, note: Callable[[str], None] = lambda text: None) -> None:
    """Kill it again and again; nothing is damaged, and what was written before is still there."""
    place, seed = Place(tmp_path / "home", tmp_path / "cache"), random.randrange(2**32)
    chance = random.Random(seed)
    ManifestStore(place.cache).save(hash_source(open_source("tiny-random", place.cache)).manifest)
    peer_ids, written = set(), 0
    for kill in range(kills):
        kill_while_it_writes(place, chance.uniform(0.0, 1.0))
        peer_id, served = look(place)
        peer_ids.add(peer_id)
        assert served >= written, f"seed {seed}, kill {kill}"
        written = served
    assert len(peer_ids) == 1
    assert written > 0, "it must have written something"
    note(f"{kills} kills, {written} rounds of writes, seed {seed}")


def test_what_is_written_is_whole_whenever_the_writer_is_killed(tmp_path: Path) -> None:
    survive(tmp_path, KILLS)
