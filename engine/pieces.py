"""Long computations in pieces: a generator yields wherever it may be interrupted, and returns its result."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Pieces = Generator[None, None, T]  # of a computation with this result


def at_once(pieces: Pieces[T]) -> T:
    """Compute all pieces without a break, and return the result."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            result: T = end.value
            return result


def unbroken(pieces: Pieces[T]) -> Pieces[T]:
    """Compute pieces that must not be left half done: if this is closed between two of them, the rest comes first."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            result: T = end.value
            return result
        try:
            yield
        except GeneratorExit:
            at_once(pieces)
            raise
