"""States of blocks from their holders: silent ones are given up in time, honest ones not taken for liars."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from app.core.network import Network
from app.manifest.merkle import CHUNK_BYTES
from app.training.states import FETCH_S, METHODS, SILENT_S, SLOWEST_BYTES_PER_S, StateStore
from app.training.wire import StatePart
from app.weights.download import PartsAbsent
from app.weights.extents import WeightsError
from p2p.errors import DeadlineExceeded
from p2p.memory.fabric import LinkProfile, open_fabric


def store(network: Network, folder: Path) -> StateStore:
    """A store whose threads a patient clock waits for."""
    return StateStore(network, folder, lambda peer: True)


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


async def test_states_come_over_a_slow_link_in_the_time_that_their_bytes_take(
    patient_clock: MockClock, tmp_path: Path
) -> None:
    """The hashes of the next one waited behind chunks, and their holder was not asked for a minute each time."""
    async with open_fabric(profile=LinkProfile(delay_s=0.02, bytes_per_s=0.5e6)) as fabric:
        me, holder = fabric.node("me"), fabric.node("holder")
        given = store(holder, tmp_path / "holder")
        given.serve()
        parts = [await given.keep(b"run", bytes([number]) * (4 * CHUNK_BYTES)) for number in range(4)]
        begun = trio.current_time()
        await store(me, tmp_path / "me").obtain(b"run", parts, ["holder"])
        assert trio.current_time() - begun < 1.1 * 16 * CHUNK_BYTES / 0.5e6


async def test_it_is_said_how_much_of_states_has_come(patient_clock: MockClock, tmp_path: Path) -> None:
    async with open_fabric(profile=LinkProfile(delay_s=0.02, bytes_per_s=0.5e6)) as fabric, trio.open_nursery() as some:
        me, holder = fabric.node("me"), fabric.node("holder")
        given, taken = store(holder, tmp_path / "holder"), store(me, tmp_path / "me")
        given.serve()
        whole = 8 * CHUNK_BYTES + 5
        part = await given.keep(b"run", bytes(whole - 5) + b"fives")
        here = [taken.present_bytes([part])]
        some.start_soon(taken.obtain, b"run", [part], ["holder"])
        while here[-1] < whole:
            await trio.sleep(0.25 * CHUNK_BYTES / 0.5e6)
            here.append(taken.present_bytes([part, part]))
        assert here == sorted(here)
        assert (here[0], here[-1]) == (0, whole)
        assert len(set(here)) > 2


async def test_states_come_over_a_link_that_is_slower_than_others_accept_if_somebody_is_patient(
    patient_clock: MockClock, tmp_path: Path
) -> None:
    """An answer takes longer than a minute there, and all of them longer than a job of several hops would wait."""
    async with open_fabric(profile=LinkProfile(delay_s=0.02, bytes_per_s=60e3)) as fabric:
        me, holder = fabric.node("me"), fabric.node("holder")
        given = store(holder, tmp_path / "holder")
        given.serve()
        part = await given.keep(b"run", bytes(12 * CHUNK_BYTES))
        assert 12 * CHUNK_BYTES / 60e3 > FETCH_S + 12 * CHUNK_BYTES / SLOWEST_BYTES_PER_S
        begun = trio.current_time()
        await store(me, tmp_path / "me").obtain(b"run", [part], ["holder"], is_patient=True)
        assert trio.current_time() - begun < 1.1 * 12 * CHUNK_BYTES / 60e3


async def test_states_that_no_holder_has_are_given_up_at_once(patient_clock: MockClock, tmp_path: Path) -> None:
    async with open_fabric() as fabric:
        states = store(fabric.node("me"), tmp_path / "me")
        for name in ("a", "b"):
            store(fabric.node(name), tmp_path / name).serve()
        begun = trio.current_time()
        with pytest.raises(PartsAbsent):
            await states.obtain(b"run", [StatePart(bytes(32), 10**6)], ["a", "b"], is_patient=True)
        assert trio.current_time() - begun < FETCH_S


async def test_states_that_their_holder_drops_meanwhile_are_given_up_at_once(
    patient_clock: MockClock, tmp_path: Path
) -> None:
    async with open_fabric(profile=LinkProfile(bytes_per_s=1e6)) as fabric:
        given = store(fabric.node("giver"), tmp_path / "giver")
        state = await given.keep(b"run", bytes(40 * CHUNK_BYTES))
        given.serve()
        asked, honest = list[str](), given._server._on_chunk

        async def forgetful(peer: str, body: bytes) -> Any:
            asked.append(peer)
            if len(asked) == 3:
                await given.forget(b"run")
            return await honest(peer, body)

        fabric.nodes["giver"].serve(METHODS.chunk, forgetful)
        begun = trio.current_time()
        with pytest.raises(PartsAbsent):
            await store(fabric.node("me"), tmp_path / "me").obtain(b"run", [state], ["giver"], is_patient=True)
        assert trio.current_time() - begun < FETCH_S


async def test_the_patient_give_up_a_holder_that_falls_silent(autojump_clock: MockClock, tmp_path: Path) -> None:
    async def never(*_: Any) -> bytes:
        await trio.sleep_forever()
        return b""

    async with open_fabric() as fabric:
        network, frozen = fabric.node("me"), fabric.node("frozen")
        for method in METHODS:
            frozen.serve(method, never)
        states, begun = StateStore(network, tmp_path, lambda peer: True), trio.current_time()
        with pytest.raises(DeadlineExceeded):
            await states.obtain(b"run", [StatePart(bytes(32), 10**9)], ["frozen"], is_patient=True)
        assert trio.current_time() - begun <= 2 * SILENT_S


@pytest.mark.parametrize("wrong_bytes", [-1, 1, -CHUNK_BYTES, CHUNK_BYTES])
async def test_who_names_a_wrong_size_of_a_state_does_not_part_two_honest_peers(
    patient_clock: MockClock, tmp_path: Path, wrong_bytes: int
) -> None:
    """A root says nothing of the size, and the owner of a job names both, and from whom a hop is to fetch the state."""
    async with open_fabric() as fabric:
        me, honest = fabric.node("me"), fabric.node("honest")
        given = store(honest, tmp_path / "honest")
        given.serve()
        state = await given.keep(b"run", bytes(CHUNK_BYTES + 1000))
        states = store(me, tmp_path / "me")
        with pytest.raises(trio.TooSlowError):
            await states.obtain(b"run", [StatePart(state.root, state.size_bytes + wrong_bytes)], ["honest"])
        assert me.held_off_until("honest") == 0
        await states.obtain(b"run", [state], ["honest"])
        assert await states.read(state) == bytes(CHUNK_BYTES + 1000)


async def test_states_that_are_being_fetched_are_not_removed_as_old_ones_of_their_run(
    patient_clock: MockClock, tmp_path: Path
) -> None:
    """An island that fetches a state may end writing the one before at that moment, and then forgets older ones."""
    async with open_fabric() as fabric:
        given = store(fabric.node("giver"), tmp_path / "giver")
        state = await given.keep(b"run", bytes(5 * CHUNK_BYTES + 1000))
        given.serve()
        states = store(fabric.node("me"), tmp_path / "me")
        asked, honest = trio.Event(), given._server._on_chunk

        async def slow(peer: str, body: bytes) -> Any:
            asked.set()
            await trio.sleep(5)
            return await honest(peer, body)

        fabric.nodes["giver"].serve(METHODS.chunk, slow)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(states.obtain, b"run", [state], ["giver"])
            await asked.wait()
            await states.forget(b"run")
        assert await states.read(state) == bytes(5 * CHUNK_BYTES + 1000)
        await states.forget(b"run")
        assert not states._parts.files.names()


@pytest.mark.parametrize("wrong_bytes", [0, -1])
async def test_a_state_that_somebody_else_never_gets_holds_up_nobody(
    patient_clock: MockClock, tmp_path: Path, wrong_bytes: int
) -> None:
    """The owner of another job may name the same state, of another size, and somebody that never sends it."""

    async def never(*_: Any) -> bytes:
        await trio.sleep_forever()
        return b""

    data = bytes(CHUNK_BYTES + 1000)
    async with open_fabric() as fabric:
        silent = fabric.node("silent")
        for method in METHODS:
            silent.serve(method, never)
        given = store(fabric.node("giver"), tmp_path / "giver")
        given.serve()
        state = await given.keep(b"run", data)
        named = StatePart(state.root, state.size_bytes + wrong_bytes)
        for way in ("keep", "obtain"):
            states = store(fabric.node(way), tmp_path / way)

            async def other(states: StateStore = states) -> None:
                with contextlib.suppress(WeightsError):  # of a wrong size, if the right one is here by then
                    await states.obtain(b"other run", [named], ["silent"])

            async with trio.open_nursery() as nursery:
                nursery.start_soon(other)
                await trio.testing.wait_all_tasks_blocked()
                with trio.fail_after(5):
                    if way == "keep":
                        await states.keep(b"run", data)
                    else:
                        await states.obtain(b"run", [state], ["giver"])
                assert await states.read(state) == data
                nursery.cancel_scope.cancel()


async def test_a_wrong_size_is_not_named_again_once_the_state_is_here(patient_clock: MockClock, tmp_path: Path) -> None:
    """Whoever named it looked at the disk all the time that the download for another run took."""
    came, run_sync, calls = trio.Event(), trio.to_thread.run_sync, list[Any]()

    async def first_is_late(function: Any, *args: Any) -> Any:
        calls.append(function)
        if len(calls) == 1:
            await came.wait()
        return await run_sync(function, *args)

    data = bytes(CHUNK_BYTES + 1000)
    async with open_fabric() as fabric:
        given = store(fabric.node("giver"), tmp_path / "giver")
        given.serve()
        state = await given.keep(b"run", data)
        states = StateStore(fabric.node("me"), tmp_path / "me", lambda peer: True, first_is_late)

        async def named_wrongly() -> None:
            with pytest.raises(WeightsError, match="has 1049576 bytes, not 1049575"):
                await states.obtain(b"other run", [StatePart(state.root, state.size_bytes - 1)], ["giver"])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(named_wrongly)
            await trio.testing.wait_all_tasks_blocked()
            await states.obtain(b"run", [state], ["giver"])
            came.set()
        assert await states.read(state) == data


async def test_nothing_is_fetched_that_would_fill_the_disk(patient_clock: MockClock, tmp_path: Path) -> None:
    """The owner of a job names the sizes of states: a hop looks at its disk before it asks for the first byte."""
    asked: list[str] = []

    async def note(peer: str, body: bytes) -> bytes:
        asked.append(peer)
        return b""

    async with open_fabric() as fabric:
        me, holder = fabric.node("me"), fabric.node("holder")
        for method in METHODS:
            holder.serve(method, note)
        states, free = store(me, tmp_path / "me"), shutil.disk_usage(tmp_path).free
        with pytest.raises(WeightsError, match="no room on the disk"):
            await states.obtain(b"run", [StatePart(bytes(32), 2 * free)], ["holder"])
        assert not asked


async def test_states_leave_as_much_of_the_disk_free_as_the_user_says(
    patient_clock: MockClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node with less than 1 GiB to spare took part in no training job, whatever its setting `disk_floor` said."""
    floor_bytes, data = 900_000_000, bytes(1_000_000)
    monkeypatch.setattr("app.training.states.disk_free_bytes", lambda folder: 838_600_000)
    async with open_fabric() as fabric:
        me, given = fabric.node("me"), store(fabric.node("holder"), tmp_path / "holder")
        given.serve()
        part = await given.keep(b"run", data)
        states = StateStore(me, tmp_path / "me", lambda peer: True, floor_bytes=lambda: floor_bytes)
        words = "1.0 MB would leave less than 900.0 MB free: free 62.4 MB, or lower disk_floor"  # 1 + 900 - 838.6
        async with states.apart() as apart:
            for kept in (states, apart):
                with pytest.raises(WeightsError, match=words) as refused:
                    await kept.obtain(b"run", [part], ["holder"])
                assert refused.value.code == "disk_full"
        floor_bytes = 800_000_000  # lowered while the node runs
        assert await states.fetch(b"run", [part], ["holder"]) == [data]
