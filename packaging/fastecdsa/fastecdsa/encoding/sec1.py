"""Every name of `fastecdsa.encoding.sec1` is absent."""

from __future__ import annotations

from fastecdsa import Absent


def __getattr__(name: str) -> Absent:
    if name.startswith("__"):
        raise AttributeError(name)
    return Absent(f"fastecdsa.encoding.sec1.{name}")
