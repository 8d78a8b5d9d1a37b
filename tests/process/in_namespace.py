"""`shoal` inside a network namespace: its file, then the arguments of `shoal`."""

from __future__ import annotations

import sys
from pathlib import Path

from app.cli import main
from tests.p2p.node_process import enter_namespace

if __name__ == "__main__":
    enter_namespace(Path(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
