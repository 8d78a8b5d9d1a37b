"""Restarts services that fail, after a growing pause, and contains errors of single tasks.

`except*` is needed: a cancelled nursery may end with a group of a cancellation and an error, and only the error may be
caught here.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import trio

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 30.0
_STEADY_S = 60.0

log = logging.getLogger("shoal.p2p.supervise")


async def supervise(name: str, service: Callable[[], Awaitable[None]]) -> None:
    """Run `service` until it returns and restart it after an exception.

    The pause before a restart doubles from 0.1 s to 30 s, and is 0.1 s again after a run of a minute or more.
    """
    pause_s = _FIRST_PAUSE_S
    while True:
        started_at = trio.current_time()
        try:
            await service()
            return
        except* Exception:
            log.exception("%s stopped with an error; it restarts in %.1f s", name, pause_s)
        if trio.current_time() - started_at >= _STEADY_S:
            pause_s = _FIRST_PAUSE_S
        await trio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


async def guarded(name: str, task: Callable[..., Awaitable[None]], *args: object) -> None:
    """Run `task` once; an exception is logged and does not reach the nursery."""
    try:
        await task(*args)
    except* Exception:
        log.exception("%s failed", name)
