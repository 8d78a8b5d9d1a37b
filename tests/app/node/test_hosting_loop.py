"""Retries of hosting."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from app.config.settings import Settings
from app.node.hosting_loop import LONGEST_RETRY_S, HostingLoop
from app.weights.extents import WeightsError
from engine.errors import DeviceFull

DAY_S = 86400.0


class FailsDaily(HostingLoop):
    """Hosts for a day, then finds the device full, again and again."""

    def __init__(self) -> None:
        context: Any = SimpleNamespace(config=lambda: SimpleNamespace(settings=Settings(max_vram=None)))
        unused: Any = None
        membership: Any = SimpleNamespace(announce=lambda **fields: None)
        steps = SimpleNamespace(failed=lambda why: None)
        observer: Any = SimpleNamespace(steps=steps, settle=lambda state, why: None)
        super().__init__(unused, membership, unused, unused, unused, unused, context, observer)
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


class FailsAtOnce(FailsDaily):
    """The disk is full until a setting is changed."""

    error: Exception = WeightsError("66.5 MB of weights do not fit", code="disk_full")

    async def _host_once(self, failed_loads: int) -> None:
        self.began.append(trio.current_time())
        await trio.sleep(1)
        raise self.error


@pytest.mark.parametrize("when_s", [300.0, 31.5])
async def test_a_changed_setting_is_tried_at_once(when_s: float, autojump_clock: MockClock) -> None:
    """It was tried at the next turn, which is minutes away after some failures; 31.5 s: while it fails once more."""
    loop, began = FailsAtOnce(), trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(loop._host)
        await trio.sleep(when_s)
        tries = len(loop.began)
        loop.follow_settings()
        await trio.sleep(0.6)
        assert len(loop.began) == tries + 1
        nursery.cancel_scope.cancel()
    assert loop.began[-1] - began <= when_s + 0.6
