"""Restarts services that fail, after a growing pause, and contains errors of single tasks.

`except*` is needed: a cancelled nursery may end with a group of a cancellation and an error, and only the error may be
caught here.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import trio

from p2p.rate_limit import backoff_s

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 30.0
_STEADY_S = 60.0

log = logging.getLogger("shoal.p2p.supervise")


async def supervise(name: str, service: Callable[[], Awaitable[None]]) -> None:
    """Run `service` until it returns and restart it after an exception.

    The pause before a restart doubles from 0.1 s to 30 s, and is 0.1 s again after a run of a minute or more.
    """
    failures = 0
    while True:
        started_at = trio.current_time()
        try:
            await service()
            return
        except* Exception:
            was_steady = trio.current_time() - started_at >= _STEADY_S
            failures = 1 if was_steady else failures + 1
            pause_s = backoff_s(_FIRST_PAUSE_S, failures, _LONGEST_PAUSE_S)
            log.exception("%s stopped with an error; it restarts in %.1f s", name, pause_s)
        await trio.sleep(pause_s)


async def guarded(name: str, task: Callable[..., Awaitable[None]], *args: object) -> None:
    """Run `task` once; an exception is logged and does not reach the nursery."""
    try:
        await task(*args)
    except* Exception:
        log.exception("%s failed", name)
