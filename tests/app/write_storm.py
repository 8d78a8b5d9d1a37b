"""A process that does nothing but write what a home folder and a cache hold, to be killed at any moment.

Run as `python -m tests.app.write_storm HOME CACHE`, where the cache holds one manifest;
it prints a line when it begins.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from app.config import set_value
from app.home import Home, write_sequence
from app.manifest_store import ManifestStore
from app.statistics import Statistics
from p2p.identity import load_or_create


def storm(folder: Path, cache: Path) -> None:
    """Write config, identity, statistics and manifest again and again."""
    home = Home.open(folder)
    store = ManifestStore(cache)
    [manifest] = [store.load(model_hash) for model_hash in store.hashes()]
    assert manifest is not None
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


if __name__ == "__main__":
    storm(Path(sys.argv[1]), Path(sys.argv[2]))
