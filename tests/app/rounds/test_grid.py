"""Rows and columns of a round: everybody ends with the same weighted mean, and nobody exchanges with many."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from app.rounds.decisions import merge_weights, share_ranges, to_leave_out
from app.rounds.grid import LEAST_TOGETHER, MOST_TOGETHER, Grid, grid_of, network_of, rows_of
from app.rounds.log import beginning
from app.rounds.statements import MAX_MEMBERS
from engine.training.outer import merged
from tests.app.rounds.statements import PEOPLE, RECORD, members

PEERS = [f"peer{number}" for number in range(MAX_MEMBERS)]
NETWORKS = st.lists(st.none() | st.integers(0, 3), min_size=1, max_size=MAX_MEMBERS)
LEAVES = st.integers(1, 100)


def grid(*networks: int | None, seed: bytes = b"") -> Grid:
    """The grid of members that name these networks."""
    return Grid(rows_of(dict(zip(PEERS, networks, strict=False)), seed))


def sizes(found: Grid) -> list[int]:
    """How many members each row has, from the most to the fewest."""
    return sorted(map(len, found.rows), reverse=True)


# --- rows -------------------------------------------------------------------------------------------------------------


@given(NETWORKS, st.binary(max_size=4))
def test_every_member_is_in_one_row_of_four_to_eight(networks: list[int | None], seed: bytes) -> None:
    found, count = grid(*networks, seed=seed), len(networks)
    assert sorted(peer for row in found.rows for peer in row) == sorted(PEERS[:count])
    assert all(len(row) <= MOST_TOGETHER for row in found.rows)
    assert len(found.rows) <= max(1, count // LEAST_TOGETHER)
    if len(found.rows) > 1:
        assert all(len(row) >= LEAST_TOGETHER for row in found.rows)
    assert (len(found.rows) > 1) >= (count > MOST_TOGETHER)
    assert all(list(row) == sorted(row, key=PEERS.index) for row in found.rows)


ROWS = {
    1: [1], 8: [8], 9: [5, 4], 11: [6, 5], 12: [4, 4, 4], 16: [4] * 4, 18: [5, 5, 4, 4], 20: [5] * 4,
    21: [5, 4, 4, 4, 4], 28: [6, 6, 6, 5, 5], 36: [6] * 6, 48: [7] * 6 + [6], 63: [8] * 7 + [7], 64: [8] * 8,
}  # fmt: skip


@pytest.mark.parametrize(("count", "wanted"), ROWS.items())
def test_rows_are_about_as_many_as_columns(count: int, wanted: list[int]) -> None:
    assert sizes(grid(*[None] * count)) == wanted


@pytest.mark.parametrize(
    ("networks", "wanted"),
    [
        ([0] * 4 + [1] * 4, [4, 4]),
        ([0] * 3 + [1] * 5, [8]),  # three are no row
        ([0] * 4 + [None] * 4, [8]),
        ([0] * 8, [8]),
        ([0] * 6 + [1] * 6, [6, 6]),
        ([0] * 5 + [1] * 5 + [None] * 2, [6, 6]),
        ([0] * 4 + [None] * 8, [4, 4, 4]),
        ([0] * 8 + [1] * 8, [4, 4, 4, 4]),
        ([0] * 9, [5, 4]),
    ],
)
def test_members_of_one_network_are_rows_of_their_own(networks: list[int], wanted: list[int]) -> None:
    found = grid(*networks)
    assert sizes(found) == wanted
    if len(found.rows) > 1 and networks.count(None) == 0:  # type: ignore[arg-type]
        assert all(len({networks[PEERS.index(peer)] for peer in row}) == 1 for row in found.rows)


def test_the_rows_of_two_rounds_are_drawn_apart() -> None:
    together = Counter[frozenset[str]]()
    for number in range(200):
        for row in grid(*[None] * 16, seed=number.to_bytes(4, "big")).rows:
            together.update(frozenset((one, other)) for one in row for other in row if one < other)
    assert len(together) == 16 * 15 // 2
    assert all(15 <= count <= 75 for count in together.values())  # 40 in the mean


def test_members_that_see_each_other_name_one_network() -> None:
    assert network_of("b", {"a", "c"}, "xabc") == network_of("c", {"a", "b"}, "xabc") == 1
    assert network_of("a", {"b", "c"}, "xabc") == 1
    assert network_of("x", {"stranger"}, "xabc") is None


def test_a_job_without_a_grid_has_one_row_in_the_order_of_the_list() -> None:
    found = members(beginning(RECORD), PEOPLE[:1])
    assert grid_of(found, is_grid=False).rows == grid_of(found, is_grid=True).rows == ((PEOPLE[0].peer_id,),)


@given(st.integers(1, MOST_TOGETHER), LEAVES)
def test_up_to_eight_members_merge_as_without_a_grid(count: int, leaves: int) -> None:
    found, ranges = grid(*[None] * count), share_ranges(leaves, count)
    assert found.rows == (tuple(PEERS[:count]),)
    assert found.shares(leaves) == found.row_shares(leaves) == dict(zip(PEERS, ranges, strict=False))
    for peer in PEERS[:count]:
        assert all(found.giver(other, peer, leaves) == other for other in PEERS[:count])
        assert found.circles(leaves)[peer] == [{*PEERS[:count]} - {peer}, set()]


# --- who takes what ---------------------------------------------------------------------------------------------------


@given(NETWORKS, LEAVES)
def test_every_leaf_is_merged_once_in_each_row_and_once_at_last(networks: list[int | None], leaves: int) -> None:
    found = grid(*networks)
    for row in found.rows:
        assert sorted(leaf for peer in row for leaf in found.row_shares(leaves)[peer]) == list(range(leaves))
    assert sorted(leaf for share in found.shares(leaves).values() for leaf in share) == list(range(leaves))
    for peer, share in found.shares(leaves).items():
        for row, parts in zip(found.rows, found.sources(peer, leaves), strict=True):
            assert {*parts} <= {*row}
            assert [leaf for part in parts.values() for leaf in part] == list(share)
            assert all({*part} <= {*found.row_shares(leaves)[one]} for one, part in parts.items())


@given(NETWORKS, LEAVES)
def test_a_share_comes_into_each_row_once(networks: list[int | None], leaves: int) -> None:
    found = grid(*networks)
    for merger, share in found.shares(leaves).items():
        for row in found.rows:
            givers = {me: found.giver(merger, me, leaves) for me in row if me != merger}
            direct = [me for me, giver in givers.items() if giver == merger]
            if share and merger not in row:
                assert len(direct) == 1
                assert {*givers.values()} <= {merger, *direct}
            else:
                assert len(direct) == len(givers)


@given(NETWORKS, st.data())
def test_everybody_ends_with_the_weighted_mean_of_all(networks: list[int | None], data: st.DataObject) -> None:
    found, count = grid(*networks), len(networks)
    numbers = st.lists(st.integers(-9, 9), min_size=12, max_size=12)
    changes = {peer: torch.tensor(data.draw(numbers)).float() for peer in PEERS[:count]}
    tokens = {peer: data.draw(st.integers(1, 1000)) for peer in changes}
    weights = merge_weights(tokens)
    wanted = merged(torch.stack([*changes.values()]), [*weights.values()], clip=False)
    total = torch.zeros(12)
    of_row = [
        merged(torch.stack([changes[peer] for peer in row]), [weights[peer] for peer in row], clip=False)
        for row in found.rows
    ]
    for peer, share in found.shares(12).items():
        parts = [torch.zeros(12) for _ in found.rows]
        for at, sources in enumerate(found.sources(peer, 12)):
            for part in sources.values():
                parts[at][part.start : part.stop] = of_row[at][part.start : part.stop]
        by_row = [sum(weights[one] for one in row) for row in found.rows]
        total[share.start : share.stop] = merged(torch.stack(parts), by_row, clip=False)[share.start : share.stop]
    assert torch.allclose(total, wanted, atol=1e-4)


@given(NETWORKS)
def test_nobody_moves_more_than_where_all_exchange_with_all(networks: list[int | None]) -> None:
    leaves, found, count = 840, grid(*networks), len(networks)
    for me in PEERS[:count]:
        row, own = found.row_of(me), found.row_shares(leaves)[me]
        taken = Counter[str]()
        for mate in row:
            taken[mate] += len(own)
        for sources in found.sources(me, leaves):
            for peer, part in sources.items():
                taken[peer] += len(part)
        for merger, share in found.shares(leaves).items():
            taken[found.giver(merger, me, leaves)] += len(share)
        del taken[me]
        most = 2 * leaves * (count - 1) / count
        assert sum(taken.values()) <= (1.0 if len({*map(len, found.rows)}) == 1 else 1.35) * most + 2 * count
        assert len(taken) <= 2 * (MOST_TOGETHER - 1) + len(found.rows)


@pytest.mark.parametrize(("count", "others"), [(16, 6), (64, 14)])
def test_of_a_square_each_exchanges_with_its_row_and_column(count: int, others: int) -> None:
    found, peers, leaves = grid(*[None] * count), PEERS[:count], 10 * count
    for me in peers:
        partners = {*found.row_of(me), *(peer for row in found.sources(me, leaves) for peer in row)}
        partners |= {found.giver(merger, me, leaves) for merger in peers}
        assert len(partners - {me}) == others
    between = sum(len(part) for peer in peers for row in found.sources(peer, leaves) for part in row.values())
    assert between - leaves == leaves * (
        len(found.rows) - 1
    )  # in, and as much out again: 2(r-1)/n of a change for a member


# --- clipping ---------------------------------------------------------------------------------------------------------


def merged_in(found: Grid, changes: dict[str, torch.Tensor]) -> torch.Tensor:
    rows = [merged(torch.stack([changes[peer] for peer in row]), [1.0] * len(row), clip=True) for row in found.rows]
    return merged(torch.stack(rows), [float(len(row)) for row in found.rows], clip=True)


@pytest.mark.parametrize("lie", [-10.0, 1e6])
@pytest.mark.parametrize("count", [9, 12, 16])
def test_one_liar_moves_the_merged_change_by_a_bounded_length(lie: float, count: int) -> None:
    torch.manual_seed(1)
    changes = {peer: torch.ones(64) + torch.randn(64) for peer in PEERS[:count]}
    found = grid(*[None] * count)
    honest = merged_in(found, changes)
    for liar in PEERS[:count]:
        moved = merged_in(found, {**changes, liar: lie * changes[liar]}) - honest
        assert float(moved.norm()) < math.sqrt(64)  # the length of what all have in common


def test_of_four_rows_one_that_lies_is_bounded_and_of_two_it_is_not() -> None:
    torch.manual_seed(1)
    for count, bounded in ((16, True), (9, False)):
        changes, found = {peer: torch.ones(64) + torch.randn(64) for peer in PEERS[:count]}, grid(*[None] * count)
        lies = {peer: torch.full((64,), -1e6) for peer in found.rows[-1]}
        moved = merged_in(found, {**changes, **lies}) - merged_in(found, changes)
        assert (float(moved.norm()) < 2 * math.sqrt(64)) is bounded


# --- who failed -------------------------------------------------------------------------------------------------------


def accused(found: Grid, accusations: dict[str, list[str]]) -> set[str]:
    everybody = [peer for row in found.rows for peer in row]
    return to_leave_out(everybody, accusations, {}, found.circles(160))


def test_whom_its_row_or_column_accuses_is_left_out_alone() -> None:
    found = grid(*[None] * 16)
    victim = found.rows[0][0]
    mates, takers = found.circles(160)[victim]
    assert accused(found, {peer: [victim] for peer in mates}) == {victim}
    assert accused(found, {peer: [victim] for peer in takers}) == {victim}
    assert accused(found, {peer: [victim] for peer in [*mates][:2]}) == {victim}


def test_a_false_accusation_costs_the_accuser_its_place() -> None:
    found = grid(*[None] * 16)
    liar, victim = found.rows[0][:2]
    assert accused(found, {liar: [victim]}) == {liar, victim}
    assert accused(found, {liar: list(found.rows[0][1:])}) == {liar}
    strangers = [row[0] for row in found.rows[1:]]  # that never exchange with it
    far = next(peer for peer in found.rows[0] if not {*strangers} & found.circles(160)[peer][1])
    assert accused(found, {peer: [far] for peer in strangers}) == {far, *strangers}
