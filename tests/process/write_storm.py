"""A process that does nothing but write what a home folder and a cache hold, to be killed at any moment.

Run as `python -m tests.process.write_storm HOME CACHE`, where the cache holds one manifest;
it prints a line when it begins.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from app.config.file import set_value
from app.config.home import Home, write_sequence
from app.manifest.manifest import Part
from app.manifest.merkle import CHUNK_BYTES, ChunkHasher, root_of
from app.node.statistics import Statistics
from app.weights.manifest_store import ManifestStore
from app.weights.part_store import PartFiles
from app.weights.source_index import SourceIndex
from engine.sources.base import Extent
from p2p.identity import load_or_create

PARTS = 3


def made_up_part(number: int) -> tuple[Part, Sequence[bytes], list[bytes]]:
    """A part of four chunks, the hashes of these, and their bytes."""
    chunks = [hashlib.shake_256(b"%d %d" % (number, index)).digest(CHUNK_BYTES) for index in range(3)] + [b"the end"]
    hasher = ChunkHasher()
    for chunk in chunks:
        hasher.update(chunk)
    leaves = hasher.finish()
    return Part(f"part{number}", sum(map(len, chunks)), root_of(leaves)), leaves, chunks


def fetch_parts(files: PartFiles) -> Iterator[SourceIndex]:
    """Write parts as they come from peers, chunk by chunk, finish them and forget them again, for ever."""
    made_up = [made_up_part(number) for number in range(PARTS)]
    for number in itertools.count():
        part, leaves, chunks = made_up[number % PARTS]
        new = files.open_new(part, leaves)
        for index, chunk in enumerate(chunks):
            if not new.take(index, chunk):
                raise AssertionError("a chunk does not fit its own hash")
        files.finish(new)
        yield SourceIndex.of({part.name: (Extent(files.path(part.root), 0, part.size_bytes),)})
        if number % 2:
            files.remove([part.root.hex()])


def storm(folder: Path, cache: Path) -> None:
    """Write config, identity, statistics, manifest, parts and index again and again."""
    home = Home.open(folder)
    store = ManifestStore(cache)
    [manifest] = [store.load(model_hash) for model_hash in store.hashes()]
    assert manifest is not None
    fetched = fetch_parts(PartFiles(cache))
    sys.stdout.write("begun\n")
    sys.stdout.flush()
    for number in itertools.count(1):
        load_or_create(home.key_file)
        set_value(home.config_file, "api_port", str(1024 + number % 60000))
        set_value(home.config_file, "name", f"node {number}")
        write_sequence(home, number)
        statistics = Statistics(home.statistics_file)
        statistics.add_served("ann", 1)
        statistics.add_asked(1, ["bob"])
        statistics.write()
        store.save(manifest)
        store.save_index(manifest.hash, next(fetched))


if __name__ == "__main__":
    storm(Path(sys.argv[1]), Path(sys.argv[2]))
