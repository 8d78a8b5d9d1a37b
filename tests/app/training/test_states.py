"""States of blocks from their holders: silent ones are given up in time, honest ones not taken for liars."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from app.manifest.merkle import CHUNK_BYTES
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


@pytest.mark.parametrize("wrong_bytes", [-1, 1, -CHUNK_BYTES, CHUNK_BYTES])
async def test_who_names_a_wrong_size_of_a_state_does_not_part_two_honest_peers(
    patient_clock: MockClock, tmp_path: Path, wrong_bytes: int
) -> None:
    """A root says nothing of the size, and the owner of a job names both, and from whom a hop is to fetch the state."""
    async with open_fabric() as fabric:
        me, honest = fabric.node("me"), fabric.node("honest")
        given = StateStore(honest, tmp_path / "honest", lambda peer: True)
        given.serve()
        state = await given.keep(b"run", bytes(CHUNK_BYTES + 1000))
        states = StateStore(me, tmp_path / "me", lambda peer: True)
        with pytest.raises(trio.TooSlowError):
            await states.obtain(b"run", [StatePart(state.root, state.size_bytes + wrong_bytes)], ["honest"])
        assert me.held_off_until("honest") == 0
        await states.obtain(b"run", [state], ["honest"])
        assert await states.read(state) == bytes(CHUNK_BYTES + 1000)
