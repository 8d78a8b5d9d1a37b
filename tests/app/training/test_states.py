"""States of blocks from their holders: one that falls silent is given up in time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from app.training.states import FETCH_S, METHODS, SLOWEST_BYTES_PER_S, StateStore
from app.training.wire import StatePart
from p2p.memory.fabric import open_fabric


@pytest.mark.parametrize("size_bytes", [1000, 10_000_000])
async def test_a_holder_that_falls_silent_is_given_up_within_a_minute_or_as_long_as_a_slow_link_takes(
    autojump_clock: MockClock, tmp_path: Path, size_bytes: int
) -> None:
    async def never(*_: Any) -> bytes:
        await trio.sleep_forever()
        return b""

    async with open_fabric() as fabric:
        network, frozen = fabric.node("me"), fabric.node("frozen")
        for method in METHODS:
            frozen.serve(method, never)
        states = StateStore(network, tmp_path, lambda peer: True)
        begun = trio.current_time()
        with pytest.raises(trio.TooSlowError):
            await states.obtain(b"run", [StatePart(bytes(32), size_bytes)], ["frozen"])
        allowed_s = FETCH_S + size_bytes / SLOWEST_BYTES_PER_S
        assert 0.9 * allowed_s <= trio.current_time() - begun <= 1.1 * allowed_s
        assert allowed_s < 60 or size_bytes > 1000
