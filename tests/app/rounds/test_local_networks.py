"""Islands on one local network pass merged shares on to each other, and depend on nobody for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from app.rounds import wire
from app.rounds.decisions import taken_from
from p2p.errors import RemoteError
from p2p.memory.fabric import LinkProfile
from tests.app.rounds.island_swarm import IslandSwarm, open_islands
from tests.app.swarms import identity

PEERS = st.lists(st.text("abcdefgh", min_size=1, max_size=3), min_size=2, max_size=16, unique=True)
LAN = LinkProfile(delay_s=0.001, kind="lan")
HERE, THERE = (0, 1, 2), (3, 4, 5)


@given(PEERS, st.data(), st.binary(max_size=4))
def test_nobody_waits_in_a_circle_whoever_is_near_to_whom(peers: list[str], data: st.DataObject, seed: bytes) -> None:
    merger, *others = peers
    near = {me: data.draw(st.sets(st.sampled_from(peers))) - {me} for me in others}
    for me in others:
        seen = {me}
        while (me := taken_from(merger, me, near[me], seed)) != merger:
            assert me not in seen
            seen.add(me)


def test_one_of_a_local_network_takes_a_share_for_all() -> None:
    here = ["a", "b", "c"]
    for merger in "xyz":
        takers = [me for me in here if taken_from(merger, me, {*here} - {me}, b"list") == merger]
        assert len(takers) == 1
        assert all(taken_from(merger, me, {*here} - {me}, b"list") in (merger, *takers) for me in here)
    assert all(taken_from("b", me, {*here} - {me}, b"list") == "b" for me in ("a", "c"))
    assert taken_from("x", "a", set(), b"list") == "x"


def test_the_work_is_divided() -> None:
    givers = [taken_from(f"far{at}", "a", {"b", "c"}, b"list") for at in range(300)]
    assert all(70 <= givers.count(peer) <= 130 for peer in ("b", "c"))
    assert all(giver in ("b", "c", f"far{at}") for at, giver in enumerate(givers))


@asynccontextmanager
async def two_networks(folder: Path, profile: LinkProfile = LAN, **changes: Any) -> AsyncIterator[IslandSwarm]:
    """Six islands, of which three each are on one local network."""
    async with open_islands(folder, **changes) as swarm:
        for group in (HERE, THERE):
            for one in group:
                for other in group:
                    if one < other:
                        swarm.fabric.set_link(identity(one).peer_id, identity(other).peer_id, profile)
        for number in (*HERE, *THERE):
            swarm.add(number)
        yield swarm


def count_far(swarm: IslandSwarm) -> Counter[str]:
    """Count the bytes of leaves that come from far islands, by the method with which they are asked for."""
    group_of = {swarm.nodes[number].name: group for group in (HERE, THERE) for number in group}
    found = Counter[str]()

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        async def counting(peer: str, method: str, *args: Any, **more: Any) -> Any:
            answer = await call(peer, method, *args, **more)
            if group_of[peer] != group_of[name]:
                found[method] += len(answer)
            return answer

        return counting

    for name in group_of:
        node: Any = swarm.fabric.nodes[name]
        node.call = counted(name, node.call)
    return found


async def test_a_merged_share_crosses_the_slow_link_once(
    tmp_path: Path, patient_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.rounds.testers.ROUNDS_A_TEST", 2**70)  # testers would take whole changes over it as well
    merged, moved = [], []
    for kind in ("direct", "lan"):
        profile = LinkProfile(delay_s=0.001, kind=kind)
        async with two_networks(tmp_path / kind, profile, steps=30) as swarm:
            await swarm.until(lambda swarm=swarm: len(swarm.nodes[0].island.standing.members) == 6)  # type: ignore[misc]
            island = swarm.nodes[0].island
            first, bytes_of = island.standing.round, count_far(swarm)
            await swarm.finished(*HERE, *THERE)
            assert all(len(entry.list.members) == 6 for entry in island.log[first:])
            assert island.figures.repeated == 0
            rounds = len(island.log) - first
            assert rounds >= 3
            merged.append(bytes_of[wire.MERGED] / rounds)
            moved.append((bytes_of[wire.MERGED] + bytes_of[wire.SHARE]) / rounds)
    # every share of the other network is taken by one of three instead of by each
    assert merged[1] <= merged[0] * 0.36
    assert moved[1] <= moved[0] * 0.72


async def silent(honest: Callable[[], Any]) -> Any:
    await trio.sleep_forever()


async def refuse(honest: Callable[[], Any]) -> Any:
    raise RemoteError("not here", wire.WRONG)


async def fail(honest: Callable[[], Any]) -> Any:
    raise RemoteError("could not be merged here", wire.FAILED)


async def other_leaves(honest: Callable[[], Any]) -> Any:
    found = await honest()
    return [bytes(len(piece)) if len(piece) > 4 else piece for piece in found]


@pytest.mark.parametrize(
    "answer",
    [silent, *(pytest.param(answer, marks=pytest.mark.soak) for answer in (refuse, fail)), other_leaves],
)
async def test_who_passes_nothing_on_costs_nobody_its_place(
    answer: Any, tmp_path: Path, patient_clock: MockClock
) -> None:
    """It gives the share that it merged itself, but none of the others."""
    async with two_networks(tmp_path, steps=30) as swarm:
        liar, asked = swarm.nodes[1], Counter[tuple[str, int]]()
        honest = liar.island._on_exchange

        async def answered(method: str, peer: str, fields: Any) -> Any:
            if method == wire.MERGED:
                attempt = liar.island._attempts.get(fields.hex_bytes("list", 32))
                members = [] if attempt is None else attempt.members.members
                first = fields.integer("first", 0, 10**6)
                own = members.index(liar.name) if liar.name in members else -1
                leaves = liar.model.leaves
                if own < 0 or not leaves * own // len(members) <= first < leaves * (own + 1) // len(members):
                    asked[peer, first] += 1
                    return await answer(lambda: honest(method, peer, fields))
            return await honest(method, peer, fields)

        liar.island._on_exchange = answered  # type: ignore[method-assign]
        await swarm.finished(*HERE, *THERE, within_s=2000)
        log = swarm.nodes[0].island.log
        assert asked
        assert not any(node.failure for node in swarm.nodes.values())
        assert [len(entry.list.members) for entry in log][-3:] == [6, 6, 6]
        if answer is not fail:  # which is what an honest island says whose exchange has failed
            assert max(asked.values()) <= 2  # for each share, in all rounds: it is asked once more at most


async def test_one_that_dies_while_others_wait_for_it_costs_its_own_place_only(
    tmp_path: Path, patient_clock: MockClock
) -> None:
    async with two_networks(tmp_path, steps=30) as swarm:
        await swarm.until(lambda: len(swarm.nodes[0].island.standing.members) == 6)
        waiting, dying = trio.Event(), swarm.nodes[1]
        honest = dying.island._on_exchange

        async def answered(method: str, peer: str, fields: Any) -> Any:
            if method == wire.MERGED and peer in {swarm.nodes[0].name, swarm.nodes[2].name}:
                waiting.set()
                await trio.sleep_forever()
            return await honest(method, peer, fields)

        dying.island._on_exchange = answered  # type: ignore[method-assign]
        await waiting.wait()
        swarm.kill(1)
        await swarm.finished(0, 2, *THERE, within_s=2000)
