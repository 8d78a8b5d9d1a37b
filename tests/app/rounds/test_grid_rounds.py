"""Rounds of more than eight islands on the in-memory network: they end alike, whoever dies or lies between stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from trio.testing import MockClock

from app.rounds import wire
from app.rounds.decisions import merge_weights
from app.rounds.grid import Grid, grid_of
from app.rounds.island import LeftOut
from app.rounds.statements import MAX_MEMBERS, MemberList
from engine.training.codecs import encode
from engine.training.outer import merged
from p2p.envelope import LONG_VERSION
from p2p.errors import RemoteError
from tests.app.rounds.grid_swarm import bytes_of_round, count_bytes, open_grid
from tests.app.rounds.island_swarm import Node, members_of, plain_lesson
from tests.app.rounds.test_endurance import WIDE

LEAF = 32  # numbers, so that a small model has leaves for all


@pytest.fixture(autouse=True)
def _small_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.island.LEAF", LEAF)


def grid_in(members: MemberList) -> Grid:
    return grid_of(members, is_grid=True)


def on_exchange(node: Node, answer: Callable[[str, str, MemberList, Callable[[], Any]], Any]) -> None:
    """Let something else answer what others ask an island in an exchange: method, asker, list and honest answer."""
    honest = node.island._on_exchange

    async def answered(method: str, peer: str, fields: Any) -> Any:
        attempt = node.island._attempts.get(fields.hex_bytes("list", 32))
        if attempt is None:
            return await honest(method, peer, fields)
        return await answer(method, peer, attempt.members, lambda: honest(method, peer, fields))

    node.island._on_exchange = answered  # type: ignore[method-assign]


# --- all goes well ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "count"), [(4, 10), pytest.param(10, 34, marks=pytest.mark.soak)])
async def test_each_of_many_islands_is_counted_soon_after_it_came(
    tmp_path: Path, first: int, count: int, patient_clock: MockClock
) -> None:
    soon = 1
    short: dict[str, Any] = {"every": 3, "least_every": 3, "most_every": 3, "steps": 18}
    async with open_grid(tmp_path, 0, islands=MAX_MEMBERS, **short) as swarm:
        for number in range(first):
            swarm.add(number, step_s=1.0)
        island = swarm.nodes[0].island
        await swarm.until(lambda: len(island.standing.members) == first)
        came = island.standing.round
        for number in range(first, count):
            swarm.add(number, step_s=1.0, has_model=False)
        await swarm.finished(*range(count))
        names = {node.name for node in swarm.nodes.values()}
        assert len(island.log) > came + soon
        assert all({*entry.list.members} == names for entry in island.log[came + soon :])
        assert all(node.island.figures.repeated == 0 for node in swarm.nodes.values())
        assert (island.log[-1].raw[2] == LONG_VERSION) == (count == 34)  # it does not fit into 64 KiB
        counted = sum(arrival.tokens for entry in island.log for arrival in entry.list.arrivals)
        assert counted == island.standing.tokens
        assert counted >= 0.8 * sum(node.island.figures.tokens for node in swarm.nodes.values())


@pytest.mark.parametrize("count", [9, *(pytest.param(count, marks=pytest.mark.soak) for count in (16, 20))])
async def test_many_islands_end_every_round_alike(tmp_path: Path, count: int, patient_clock: MockClock) -> None:
    async with open_grid(tmp_path, count, steps=15) as swarm:
        await swarm.until(lambda: len(swarm.nodes[0].island.standing.members) == count)
        taken = count_bytes(swarm)
        await swarm.finished(*range(count))
        log = swarm.nodes[0].island.log
        assert members_of(log) == [1, count, count]
        assert all(node.island.figures.repeated == 0 for node in swarm.nodes.values())
        assert not any(entry.doubted for entry in log)
        for entry in log[1:]:
            rows = grid_in(entry.list).rows
            assert len(rows) > 1
            for result in entry.results:  # on its own row alone
                assert {*result.report} == {*next(row for row in rows if result.peer in row)}
        assert len({grid_in(entry.list).rows for entry in log[1:]}) == 2
        for entry in log[1:]:
            grid, leaves = grid_in(entry.list), swarm.nodes[0].model.leaves
            for me in entry.list.members:
                givers = {*grid.row_of(me), *(peer for row in grid.sources(me, leaves) for peer in row)}
                givers |= {grid.giver(peer, me, leaves) for peer in entry.list.members}
                asked = {peer for found, asker, peer in taken if (found, asker) == (entry.list.hash, me)}
                assert asked == givers - {me}
                assert len(asked) <= 9
        losses = [loss for _, loss in swarm.nodes[0].island.figures.validation]
        assert losses[-1] < losses[0]


async def test_small_changes_wait_in_a_grid(tmp_path: Path, patient_clock: MockClock) -> None:
    async with open_grid(tmp_path, 9, steps=15, wire="int4", significance=1.0) as swarm:
        await swarm.finished(*range(9))
        assert members_of(swarm.nodes[0].island.log) == [1, 9, 9]
        assert all(node.island.figures.repeated == 0 for node in swarm.nodes.values())


async def test_the_merged_change_is_the_weighted_mean_of_all(tmp_path: Path, patient_clock: MockClock) -> None:
    async with open_grid(tmp_path, 9, steps=10, wire="f32", merging="mean") as swarm:
        await swarm.until(lambda: len(swarm.nodes[0].island.standing.members) == 9)
        sent: dict[tuple[str, int], torch.Tensor] = {}
        got: dict[tuple[str, int], torch.Tensor] = {}
        for node in swarm.nodes.values():
            spy(node, sent, got)
        await swarm.finished(*range(9))
        rounds = [entry for entry in swarm.nodes[0].island.log if (swarm.nodes[0].name, entry.round) in sent]
        assert rounds
        for entry in rounds:
            weights = merge_weights({one.peer: one.tokens for one in entry.list.arrivals})
            changes = torch.stack([sent[peer, entry.round] for peer in entry.list.members])
            wanted = merged(changes, [weights[peer] for peer in entry.list.members], clip=False)
            for peer in entry.list.members:
                assert torch.allclose(got[peer, entry.round], wanted, atol=1e-6)


def spy(node: Node, sent: dict[tuple[str, int], torch.Tensor], got: dict[tuple[str, int], torch.Tensor]) -> None:
    """Note the change that an island sends in each round, and the merged one that it goes on from."""
    model: Any = node.model
    change, advance = model.change, model.advance

    def numbers(leaves: Sequence[bytes]) -> torch.Tensor:
        return torch.cat([torch.frombuffer(bytearray(leaf), dtype=torch.float32) for leaf in leaves])

    def noted_change() -> Any:
        leaves = change()
        sent[node.name, node.island.standing.round] = numbers(leaves)
        return leaves

    def noted_advance(leaves: Sequence[bytes]) -> Any:
        got[node.name, node.island.standing.round] = numbers(leaves)
        return advance(leaves)

    model.change, model.advance = noted_change, noted_advance


# --- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.soak
async def test_sixteen_in_a_grid_move_no_more_bytes_than_all_with_all(
    tmp_path: Path, patient_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.island.LEAF", 4096)  # large beside its hash
    lesson = plain_lesson(WIDE)
    flat, _ = await bytes_of_round(tmp_path / "all", lesson, 16, (), is_grid=False)
    grid, _ = await bytes_of_round(tmp_path / "grid", lesson, 16, (), is_grid=True)
    assert 1.8 < grid < flat  # shares are as many; the hashes of changes come from 3 others, not 15


@pytest.mark.parametrize(("count", "most"), [(8, 0.5), pytest.param(16, 0.45, marks=pytest.mark.soak)])
async def test_networks_merge_among_themselves_first(
    tmp_path: Path, count: int, most: float, patient_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.island.LEAF", 4096)  # large beside its hash
    networks = [range(at, at + 4) for at in range(0, count, 4)]
    lesson = plain_lesson(WIDE)
    _, flat = await bytes_of_round(tmp_path / "all", lesson, count, networks, is_grid=False)
    _, grid = await bytes_of_round(tmp_path / "grid", lesson, count, networks, is_grid=True)
    assert grid < most * flat
    rows = count // 4
    assert grid == pytest.approx(2 * (rows - 1) / count, rel=0.1)


# --- deaths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("whole_row", "count"), [(False, 9), (True, 12)])
async def test_who_dies_between_the_stages_costs_its_own_place_only(
    tmp_path: Path, whole_row: bool, count: int, patient_clock: MockClock
) -> None:
    async with open_grid(tmp_path, count) as swarm:
        await swarm.until(lambda: len(swarm.nodes[0].island.standing.members) == count)
        numbers = {node.name: number for number, node in swarm.nodes.items()}
        killed: set[str] = set()
        lists: list[MemberList] = []

        def dying(node: Node) -> Any:
            merge = node.model.merge

            def merge_and_die(*args: Any) -> Any:
                found = merge(*args)
                attempt = list(node.island._attempts.values())[-1]
                if not lists:
                    lists.append(attempt.members)
                row = next(one for one in grid_in(lists[0]).rows if lists[0].leader not in one)
                if attempt.members == lists[0] and node.name in (row if whole_row else row[:1]):
                    killed.add(node.name)
                    swarm.kill(numbers[node.name])
                return found

            return merge_and_die

        for node in swarm.nodes.values():
            node.model.merge = dying(node)  # type: ignore[method-assign]
        await swarm.until(lambda: len(killed) == (4 if whole_row else 1))
        alive = sorted(swarm.nodes)
        await swarm.finished(*alive, within_s=2000)
        log = swarm.nodes[alive[0]].island.log
        made = next(entry for entry in log if entry.round == lists[0].round)
        assert {*lists[0].members} - {*made.list.members} == killed
        assert made.list.attempt == 1


# --- lies -------------------------------------------------------------------------------------------------------------


async def silent(method: str, peer: str, members: MemberList, honest: Callable[[], Any]) -> Any:
    if method == wire.SHARE:
        await trio.sleep_forever()
    return await honest()


async def late(method: str, peer: str, members: MemberList, honest: Callable[[], Any]) -> Any:
    if method == wire.SHARE:
        raise RemoteError("it is coming", wire.NOT_YET)
    return await honest()


async def other_change(method: str, peer: str, members: MemberList, honest: Callable[[], Any]) -> Any:
    return zeroed(await honest()) if method == wire.SHARE else await honest()


async def other_share(method: str, peer: str, members: MemberList, honest: Callable[[], Any]) -> Any:
    return zeroed(await honest()) if method == wire.MERGED else await honest()


async def cut_row(method: str, peer: str, members: MemberList, honest: Callable[[], Any]) -> Any:
    answer = await honest()
    return wire.pack([b"x"] * (len(answer) // 2)) if method == wire.ROW else answer


async def huge_row(method: str, peer: str, members: MemberList, honest: Callable[[], Any]) -> Any:
    answer = await honest()
    if method != wire.ROW:
        return answer
    return wire.pack(encode(torch.full((len(leaf) - 4,), 1e9), "int8") for leaf in answer[1::2])


def zeroed(answer: Any) -> Any:
    return [bytes(len(piece)) if len(piece) > 4 else piece for piece in answer]


@pytest.mark.parametrize(
    "lie",
    [
        silent,
        other_change,
        cut_row,
        *(pytest.param(lie, marks=pytest.mark.soak) for lie in (late, other_share, huge_row)),
    ],
)
async def test_who_fails_in_a_stage_is_left_out_alone(tmp_path: Path, lie: Any, patient_clock: MockClock) -> None:
    async with open_grid(tmp_path, 9, steps=15) as swarm:
        await swarm.until(lambda: len(swarm.nodes[0].island.standing.members) == 9)
        liar, since = swarm.nodes[5], swarm.nodes[0].island.standing.round
        on_exchange(liar, lie)
        others = [number for number in range(9) if number != 5]
        await swarm.finished(*others, within_s=2000)
        made = [entry.list for entry in swarm.nodes[0].island.log if entry.round >= since]
        led_by_others = [one for one in made if one.leader != liar.name]
        assert led_by_others
        assert all({*one.members} == {swarm.nodes[number].name for number in others} for one in led_by_others)


async def test_wrong_numbers_for_a_row_do_little(tmp_path: Path, patient_clock: MockClock) -> None:
    """Nobody can tell what a row's share should be, but the shares of three rows are clipped."""
    async with open_grid(tmp_path, 9) as swarm:
        await swarm.until(lambda: len(swarm.nodes[0].island.standing.members) == 9)

        async def flipped(method: str, peer: str, members: MemberList, honest: Callable[[], Any]) -> Any:
            answer = await honest()
            if method != wire.ROW:
                return answer
            return wire.pack(leaf[:4] + bytes(-byte % 256 for byte in leaf[4:]) for leaf in answer[1::2])

        on_exchange(swarm.nodes[5], flipped)
        await swarm.finished(*range(9))
        log = swarm.nodes[0].island.log
        assert members_of(log) == [1, 9, 9, 9]
        losses = [loss for _, loss in swarm.nodes[0].island.figures.validation]
        assert losses[-1] < losses[1]


@pytest.mark.soak
async def test_a_poisoner_in_a_grid_is_left_out(tmp_path: Path, patient_clock: MockClock) -> None:
    def flip(model: Any) -> None:
        honest = model.change

        def lie() -> list[bytes]:
            honest()
            return [encode(leaf, "int8") for leaf in (-10 * model._sent).split(LEAF)]

        model.change = lie

    async with open_grid(tmp_path, 11, steps=60) as swarm:
        liar = swarm.add(11, change=flip)
        await swarm.until(lambda: liar.failure is not None)
        assert isinstance(liar.failure, LeftOut)
        await swarm.finished(*range(11))
        log = swarm.nodes[0].island.log
        assert len([entry for entry in log if liar.name in entry.list.members]) <= 3
        assert log[-1].left_out.keys() == {liar.name}


async def test_members_see_only_what_they_merge(tmp_path: Path, patient_clock: MockClock) -> None:
    async with open_grid(tmp_path, 9, steps=10) as swarm:
        await swarm.until(lambda: len(swarm.nodes[0].island.standing.members) == 9)
        node, lists, done = swarm.nodes[1], list[MemberList](), trio.Event()
        honest, merged_row = node.island._on_exchange, trio.Event()

        async def paused(method: str, peer: str, members: MemberList, answer: Callable[[], Any]) -> Any:
            if method == wire.ROW:
                lists.append(members)
                merged_row.set()
                await done.wait()
            return await answer()

        on_exchange(node, paused)
        await merged_row.wait()
        members, grid, leaves = lists[0], grid_in(lists[0]), node.model.leaves

        async def is_shown(method: str, peer: str, leaf: int) -> bool:
            where = wire.request(b"", {"list": members.hash.hex(), "first": leaf, "count": 1})
            try:
                return bool(await honest(method, peer, wire.fields_of(where, method)))
            except RemoteError:
                return False

        for peer in members.members:
            if peer != node.name:
                shown = [leaf for leaf in range(leaves) if await is_shown(wire.SHARE, peer, leaf)]
                assert shown == (list(grid.row_shares(leaves)[peer]) if peer in grid.row_of(node.name) else [])
                shown = [leaf for leaf in grid.row_shares(leaves)[node.name] if await is_shown(wire.ROW, peer, leaf)]
                assert shown == [
                    leaf for leaf in grid.shares(leaves)[peer] if leaf in grid.row_shares(leaves)[node.name]
                ]
        assert not await is_shown(wire.ROW, "stranger", grid.row_shares(leaves)[node.name].start)
        done.set()
        await swarm.finished(*range(9))
