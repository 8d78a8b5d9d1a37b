"""Members that send list after list of a round and finish none: each has the time of two exchanges, and comes last."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from app.core.errors import RecordError
from app.rounds.statements import MAX_ATTEMPTS, Arrival, sign_arrival, sign_list
from tests.app.rounds.island_swarm import ONE_STEP, TIMING, IslandSwarm, open_islands
from tests.app.swarms import identity

NOW_MS = 1_800_000_000_000


async def make_lists(swarm: IslandSwarm, number: int, every_s: float, *, follows: bool = True) -> None:
    """Let an island arrive as it should, and make lists all the time whose exchanges come to nothing.

    Others ask it in vain for what it merges, and each list replaces the one before in time. If it `follows` no others
    while it makes lists, theirs come to nothing as well.
    """
    node = swarm.nodes[number]
    island, attempts = node.island, dict[int, int]()

    async def lead(*args: Any) -> int:
        await trio.sleep(0.1)
        return 1

    island._lead = lead  # type: ignore[method-assign, assignment]
    if not follows:
        note, most = island._note_list, MAX_ATTEMPTS // 4
        island._note_list = (  # type: ignore[method-assign]
            lambda members: note(members) if attempts.get(members.round, 0) > most else b""
        )
    while True:
        arrivals = [one for one in island._arrivals.values() if one.peer in island.standing.members]
        if island._own is not None and len(arrivals) > 1:
            attempt = attempts.setdefault(island.standing.round, 0)
            attempts[island.standing.round] = attempt + 1
            if attempt <= MAX_ATTEMPTS:
                found = sign_list(identity(number), swarm.record.id, attempt, arrivals, NOW_MS + attempt)
                for peer in found.members:
                    if peer != node.name:
                        swarm._nursery.start_soon(island._say, peer, found.raw)
            await trio.sleep(every_s)
        else:
            await trio.sleep(0.1)


@pytest.mark.parametrize("liars", [(3,), pytest.param((5, 6), marks=pytest.mark.soak)])
async def test_lists_that_replace_one_another_stop_a_round_for_a_limited_time(
    tmp_path: Path, patient_clock: MockClock, liars: tuple[int, ...]
) -> None:
    honest = (0, 1, 2) if len(liars) == 1 else (0, 1, 2, 3, 4)
    async with open_islands(tmp_path, *honest, *liars, **ONE_STEP) as swarm, trio.open_nursery() as nursery:
        island = swarm.nodes[0].island
        await swarm.until(lambda: len(island.recent) == len(honest) + len(liars))
        for number in liars:
            nursery.start_soon(make_lists, swarm, number, TIMING.exchange_s / 2)
        took, before = list[float](), island.standing.round

        def is_beyond(count: int) -> bool:
            return island.standing.round > count

        while len(took) < 24:
            count, at = len(took) + before, trio.current_time()
            await swarm.until(partial(is_beyond, count), within_s=1000)
            took.append(trio.current_time() - at)
        limit = 3 * (TIMING.exchange_s + TIMING.lead_s)  # of who leads, and of the exchange that begins last
        assert max(took) < limit, took
        assert sum(took) < 2 * limit * len(liars), took  # once, and not in every round that it could lead
        nursery.cancel_scope.cancel()


async def test_lists_after_the_time_of_their_leader_are_not_the_first_again(
    tmp_path: Path, patient_clock: MockClock
) -> None:
    """Each list of the others gave it another such time, so that it stopped a round for many minutes."""
    async with open_islands(tmp_path, 0, 1, 2, 3, 4, **ONE_STEP) as swarm, trio.open_nursery() as nursery:
        honest = [swarm.nodes[number].island for number in range(4)]
        liar = swarm.nodes[4].name
        await swarm.until(lambda: len(honest[0].recent) == 5)
        first = partial(lambda island: island._leaders(island.standing.members)[0] == liar, honest[0])
        await swarm.until(first)
        number, at = honest[0].standing.round, trio.current_time()
        nursery.start_soon(partial(make_lists, swarm, 4, 0.7 * TIMING.exchange_s, follows=False))
        await swarm.until(lambda: all(island.standing.round > number for island in honest), within_s=1000)
        assert trio.current_time() - at < 5 * (TIMING.exchange_s + TIMING.lead_s)  # two of its own, and those of others
        assert all(island._times_in_vain(liar) for island in honest)
        nursery.cancel_scope.cancel()


async def test_a_list_of_somebody_who_takes_no_part_is_not_verified(tmp_path: Path, patient_clock: MockClock) -> None:
    """With 64 members it has 65 signatures, for which the statements of others would wait."""
    async with open_islands(tmp_path, 0, 1) as swarm:
        island, verified = swarm.nodes[0].island, list[str]()
        await swarm.until(lambda: len(island.recent) == 2)

        async def noted(peer: str, *args: Any) -> Any:
            verified.append(peer)
            raise RecordError("enough")

        island._verified = noted  # type: ignore[method-assign, assignment]
        stranger, job, standing = identity(5), swarm.record.id, island.standing
        made = sign_arrival(stranger, Arrival(job, standing.round, standing.prev, 1, 1, b"c" * 32), NOW_MS)
        found = sign_list(stranger, job, 0, [made], NOW_MS)
        assert await island._on_statement(stranger.peer_id, found.raw) == b""
        assert not verified
