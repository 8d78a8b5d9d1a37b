"""Torch's objects are out of the garbage collector's sight, and what is loaded later is not."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import gc
from app.core.engine_import import import_engine
import_engine()
frozen = gc.get_freeze_count()
assert frozen > 100_000, frozen
kept = [[] for _ in range(1000)]
import_engine()
assert gc.get_freeze_count() == frozen, "blocks that are loaded by now can still be freed"
"""


def test_what_torch_leaves_behind_is_not_looked_at_again() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
