"""Lets `python -m app.cli` run the program `shoal`."""

from __future__ import annotations

import sys

from app.cli import main

sys.exit(main())
