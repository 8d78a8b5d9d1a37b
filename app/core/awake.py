"""Waiting for a device by looking, without a thread that sleeps.

A card's step of one token takes milliseconds. To wake a thread that waits for it, and then an event loop that sleeps,
takes up to a tenth of that; to look costs microseconds. Used for what a card computes while tokens of a reply come; the
event loop serves everything else between two looks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol, TypeVar

import trio

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")

MIN_CORES = 4  # with fewer, the one that looks is missing elsewhere


class UnderWay(Protocol[T_co]):
    """Something that a device computes while the caller does something else."""

    @property
    def is_done(self) -> Callable[[], bool]:
        """Returns within microseconds; raises what the device did."""

    @property
    def result(self) -> Callable[[], T_co]:
        """Returns the result once it is done; to be called once."""


def may_stay_awake() -> bool:
    """True if this process may use a whole core while it waits for a card."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores >= MIN_CORES


async def result_of(started: UnderWay[T]) -> T:
    """Wait for a result; a cancelled caller waits too, because the device cannot be stopped."""
    await until(started.is_done)
    return started.result()


async def until(is_done: Callable[[], bool]) -> None:
    """Wait for a device; a cancelled caller waits too."""
    while not is_done():
        await trio.lowlevel.cancel_shielded_checkpoint()
