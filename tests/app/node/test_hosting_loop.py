"""Retries of hosting."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import trio
from trio.testing import MockClock

from app.node.hosting_loop import LONGEST_RETRY_S, HostingLoop
from engine.errors import DeviceFull

DAY_S = 86400.0


class FailsDaily(HostingLoop):
    """Hosts for a day, then finds the device full, again and again."""

    def __init__(self) -> None:
        unused: Any = None
        membership: Any = SimpleNamespace(announce=lambda **fields: None)
        steps = SimpleNamespace(failed=lambda why: None)
        observer: Any = SimpleNamespace(steps=steps, settle=lambda state, why: None)
        super().__init__(unused, membership, unused, unused, unused, unused, unused, observer)
        self.began: list[float] = []

    async def _host_once(self, failed_loads: int) -> None:
        self.began.append(trio.current_time())
        await trio.sleep(DAY_S)
        raise DeviceFull("a game took the memory")


async def test_a_node_that_hosted_for_a_day_comes_back_soon_after_every_failure(autojump_clock: MockClock) -> None:
    loop = FailsDaily()
    with trio.move_on_after(14 * DAY_S):
        await loop._host()
    pauses = [later - earlier - DAY_S for earlier, later in zip(loop.began, loop.began[1:], strict=False)]
    assert len(pauses) > 10
    assert max(pauses) < LONGEST_RETRY_S / 20
