"""The grid of a round: which members merge with which, as a pure function of the round's signed list.

Up to eight members are one group: each merges its share of all changes. More of them are rows of four to eight, as in
Moshpit SGD, and a round has two stages:

    rows     each member takes its share of the changes of its own row, and merges them by the job's rule
    columns  each takes a smaller share of what every row has merged, and merges those by the same rule, where a row
             weighs as much as its members together

Then everybody takes the shares that were merged at last: one of another row from the member of its own row that merges
the same numbers, which takes it for the whole row. This moves as many bytes as if all exchanged with all, in the mean
2(n-1)/n of a change for each of n members, but between fewer pairs (6 of 15 others for 16 members, 14 of 63 for 64);
and of r rows no more than 2(r-1)/n of a change for a member cross from row to row.

Who is in a row is drawn from the hash of the last round, but members on one local network are put together if they are
at least four: so they merge among themselves first, and one change of theirs goes on over the slow links. Eight members
or fewer are a grid only if all of them are on such networks. Members say themselves which network they are on.

What rows merged is rounded to the round's number format once more. No error feedback keeps that, nor what is rounded at
last; it is the smaller of the two, since the errors of the rows are averaged.

Clipping bounds less in a grid. It bounds members that are fewer than half of those whose changes it sees together: here
fewer than half of a row, and rows that are fewer than half of three or more; two rows are averaged. So half of the
members of half of the rows, a quarter of all, can move the merged change at will, and with two rows half of one, which
is two of nine. Where all merge with all it takes half of all. Only members of a row see its changes, and say which of
them are unlike the others. That a row was merged rightly is not checked; neither is it of shares.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from app.rounds.decisions import share_ranges
from app.rounds.statements import MemberList

MOST_TOGETHER = 8  # members that merge without a grid, and members of a row
LEAST_TOGETHER = 4  # members of a row: of fewer, the middle of the others' changes may be a liar's

Rows = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Grid:
    """The rows of a round, members in the order of its list; one row is a round in which all merge with all."""

    rows: Rows

    def row_of(self, peer: str) -> tuple[str, ...]:
        """The row of a member; empty for one that is none."""
        return next((row for row in self.rows if peer in row), ())

    def row_shares(self, leaves: int) -> Mapping[str, range]:
        """The leaves that each member merges of its row's changes."""
        return _row_shares(self.rows, leaves)

    def shares(self, leaves: int) -> Mapping[str, range]:
        """The leaves that each member merges at last, for all: as far as sizes of rows allow, of its row's share."""
        return _shares(self.rows, leaves)

    def sources(self, peer: str, leaves: int) -> list[dict[str, range]]:
        """From whom a member takes which leaves of what each row has merged; itself among them."""
        wanted, merged = self.shares(leaves)[peer], self.row_shares(leaves)
        parts = [{one: _overlap(wanted, merged[one]) for one in row} for row in self.rows]
        return [{one: part for one, part in of_row.items() if part} for of_row in parts]

    def giver(self, merger: str, me: str, leaves: int) -> str:
        """The member from which another one takes what a third has merged: that one, or one of its own row."""
        share = self.shares(leaves)[merger]
        row, middle = self.row_of(me), (share.start + share.stop) // 2
        if merger in row or not share:
            return merger
        drawn = next(peer for peer, part in self.row_shares(leaves).items() if peer in row and middle in part)
        return merger if drawn == me else drawn

    def circles(self, leaves: int) -> dict[str, list[set[str]]]:
        """The others that see a member fail: those of its row, and those that take what it merged of its row."""
        found = {peer: [{*row} - {peer}, set[str]()] for row in self.rows for peer in row}
        for taker in found:
            for source in {peer for of_row in self.sources(taker, leaves) for peer in of_row} - {*self.row_of(taker)}:
                found[source][1].add(taker)
        return found


def grid_of(members: MemberList, *, is_grid: bool) -> Grid:
    """Return the grid of a round; without `is_grid`, which a job's record says, it is always one row."""
    if not is_grid:
        return Grid((tuple(members.members),))
    networks = {arrival.peer: arrival.network for arrival in members.arrivals}
    return Grid(rows_of(networks, members.prev))


def rows_of(networks: dict[str, int | None], seed: bytes) -> Rows:
    """Return the rows of a round for members that name their networks; each row is in the members' order."""
    order = list(networks)
    lot = sorted(order, key=lambda peer: hashlib.sha256(seed + peer.encode()).digest())
    groups = [
        group
        for number in sorted({one for one in networks.values() if one is not None})
        if len(group := [peer for peer in lot if networks[peer] == number]) >= LEAST_TOGETHER
    ]
    rest = [peer for peer in lot if not any(peer in group for group in groups)]
    if len(order) <= MOST_TOGETHER:
        return tuple(map(tuple, _in_order(groups, order))) if len(groups) > 1 and not rest else (tuple(order),)
    if len(rest) >= LEAST_TOGETHER:
        groups.append(rest)
    else:
        for peer in rest:
            min(groups, key=len).append(peer)
    wanted = round(math.sqrt(len(order)))  # as many rows as columns
    rows = [row for group in groups for row in _divided(group, round(len(group) * wanted / len(order)))]
    return tuple(map(tuple, _in_order(rows, order)))


def network_of(me: str, near: Collection[str], expected: Sequence[str]) -> int | None:
    """Return the number by which members of one local network name it: the place of the first of them; None if alone.

    `near` are members on the same local network. Members that do not see the same others name different networks.
    """
    found = [at for at, peer in enumerate(expected) if peer == me or peer in near]
    return found[0] if len(found) > 1 else None


@lru_cache(maxsize=8)  # every request of an exchange needs them
def _row_shares(rows: Rows, leaves: int) -> Mapping[str, range]:
    return {peer: share for row in rows for peer, share in zip(row, share_ranges(leaves, len(row)), strict=True)}


@lru_cache(maxsize=8)
def _shares(rows: Rows, leaves: int) -> Mapping[str, range]:
    places = {peer: (2 * at + 1) / len(row) for row in rows for at, peer in enumerate(row)}
    ordered = sorted(places, key=places.__getitem__)  # equal ones stay in the order of rows
    return dict(zip(ordered, share_ranges(leaves, len(ordered)), strict=True))


def _divided(group: Sequence[str], wanted: int) -> list[Sequence[str]]:
    """Divide at least four members into about so many rows, each of four to eight."""
    rows = max(-(-len(group) // MOST_TOGETHER), min(len(group) // LEAST_TOGETHER, wanted))
    return [group[part.start : part.stop] for part in share_ranges(len(group), rows)]


def _in_order(rows: Iterable[Collection[str]], order: Sequence[str]) -> list[list[str]]:
    return [[peer for peer in order if peer in row] for row in rows]


def _overlap(first: range, second: range) -> range:
    return range(max(first.start, second.start), min(first.stop, second.stop))
