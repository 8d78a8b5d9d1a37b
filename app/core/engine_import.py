"""Importing torch and what needs it, outside of the event loop.

It takes seconds, and leaves a quarter of a million objects behind. A garbage collection that looks at all of them stops
the event loop for more than 100 ms, so they are taken out of its sight.
"""

from __future__ import annotations

import gc
import importlib
import sys


def import_engine() -> None:
    """Import the engine if it is not imported yet; to be called in a thread, before anything large is loaded."""
    if "torch" not in sys.modules:
        importlib.import_module("engine.hosting")
        gc.freeze()  # only now: what is frozen and lies in a circle is never freed, and blocks must be
