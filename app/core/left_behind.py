"""Runs calls that nothing can stop in threads that are left behind: those of tokenizers that others chose, for one.

A pattern of a tokenizer can compute for days.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import trio

T = TypeVar("T")


async def left_behind(limiter: trio.CapacityLimiter, within_s: float, function: Callable[..., T], *args: Any) -> T:
    """Call a function in a thread; raises `TooSlowError` after `within_s`, the wait for a place in `limiter` included.

    The thread is left behind then, and if the caller is cancelled. It keeps its place in `limiter` until it is done.
    """
    with trio.fail_after(within_s):
        made: T = await trio.to_thread.run_sync(
            partial(function, *args),
            abandon_on_cancel=True,
            limiter=limiter,  # type: ignore[call-arg]
        )
        return made
