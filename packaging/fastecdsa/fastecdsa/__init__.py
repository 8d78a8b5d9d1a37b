"""Stands in for fastecdsa: what py-libp2p imports of it exists, and every use raises `NotImplementedError`."""

from __future__ import annotations

from typing import Any, NoReturn


class Absent:
    """A name of fastecdsa."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._name}.{name}")

    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"{self._name}: ECDSA keys are not supported, fastecdsa is not installed")
