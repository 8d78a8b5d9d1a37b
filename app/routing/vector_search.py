"""The search for the cheapest route that `app.routing.search` uses: all pairs of a block's hosts at once. Pure.

Gives routes of the same cost as trying each pair, and needs link times from `app.routing.estimates`: without claims,
the link between two peers takes as long as the way to the farther one. With members in the order of their distance, the
cheapest way into each of them is thus a running minimum over the nearer ones and another over the farther ones. The few
links that members made claims about are tried one by one. Computed in pieces (`app.core.pieces`), of a block each.

Loads numpy, so it is imported only when a route is searched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.core.pieces import CHUNK, Pieces
from app.core.span import MAX_BLOCKS, Span
from app.routing.estimates import LinkEstimates
from app.routing.route import RouteRequest, Visit, no_route
from app.swarm.records import Announcement, tail

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
Flags = NDArray[np.bool_]
_NOWHERE = Span(MAX_BLOCKS - 1, MAX_BLOCKS)  # of a member that hosts nothing; no model has so many blocks
_ROWS_AT_ONCE = 16  # of the table of who may run which block
_WINDOW = 8  # blocks for which the links that can be taken are looked up at once
_CLAIMANTS_AT_ONCE = 256
_FEW = 8  # targets for which a look at every source takes less time than a table of minima


def cheapest_visits(
    members: Sequence[Announcement],
    request: RouteRequest,
    links: LinkEstimates,
    block_s: Mapping[str, float],
    entry_s: Mapping[str, float],
) -> Pieces[list[Visit]]:
    """Return the visits of the cheapest path, the last one first; raises `NoRoute` at a block nobody may run."""
    hosts = yield from _hosts_of(members, request, links)
    yield
    entering_s, block_row_s = hosts.array(entry_s), hosts.array(block_s)
    claimed = yield from _claimed_links(hosts, links)
    ways = _Ways(hosts, claimed, entering_s)
    first_s = yield from hosts.links_s(0, request.origin, links)
    entered_s = [first_s + entering_s]  # for each block, (members,)
    costs_s = [entered_s[0] + hosts.compute_s(0, block_row_s)]  # of the cheapest path up to each block, by last member
    for index in range(1, len(request.wanted)):
        yield
        entered_s.append(ways.into(costs_s[-1], index) + entering_s)
        costs_s.append(np.minimum(costs_s[-1], entered_s[-1]) + hosts.compute_s(index, block_row_s))

    yield
    last_s = yield from hosts.links_s(-1, request.target, links)
    last = int(np.argmin(costs_s[-1] + last_s))
    visits: list[Visit] = []
    for index in range(len(request.wanted) - 1, 0, -1):
        if entered_s[index][last] < costs_s[index - 1][last]:
            visits.append((hosts.peers[last], request.wanted.start + index))
            last = int(np.argmin(costs_s[index - 1] + ways.links_to(last)))
            yield
    return [*visits, (hosts.peers[last], request.wanted.start)]


class _Hosts:
    """Usable members in the order of their distance from this node, as arrays; an index means one of them.

    Blocks are counted from the first wanted one.
    """

    def __init__(self, peers: list[str], away_s: Floats, start: Indices, stop: Indices, may_run: Flags) -> None:
        self.peers, self.away_s, self.start, self.stop = peers, away_s, start, stop
        self.may_run = may_run  # (blocks, members)

    def array(self, by_peer: Mapping[str, float]) -> Floats:
        """Return each member's value."""
        return np.array([by_peer[peer] for peer in self.peers], np.float64)

    def compute_s(self, index: int, block_s: Floats) -> Floats:
        """Return the time of a block at each member that may run it, infinity for the others."""
        return np.where(self.may_run[index], block_s, np.inf)

    def links_s(self, index: int, other: str, links: LinkEstimates) -> Pieces[Floats]:
        """Return the time of the link between a peer and each member that may run a block, infinity for the others."""
        if links.is_here(other):
            return np.where(self.may_run[index], self.away_s, np.inf)
        links_s = np.full(len(self.peers), np.inf)
        able = np.flatnonzero(self.may_run[index])
        for some in np.array_split(able, len(able) // CHUNK + 1):
            links_s[some] = [links(other, self.peers[member]) for member in some.tolist()]
            yield
        return links_s


def _hosts_of(members: Sequence[Announcement], request: RouteRequest, links: LinkEstimates) -> Pieces[_Hosts]:
    """Return the usable members; raises `NoRoute` at a block nobody may run."""
    wanted, privacy = request.wanted, request.privacy
    away: list[float] = []
    starts: list[int] = []
    stops: list[int] = []
    for first in range(0, len(members), CHUNK):
        some = members[first : first + CHUNK]
        away += links.all_away_s([m.peer for m in some])
        spans = [m.span or _NOWHERE for m in some]
        starts += [span.start for span in spans]
        stops += [span.stop for span in spans]
        yield
    away_s = np.array(away, np.float64)
    order = np.argsort(away_s, kind="stable")
    yield
    peers: list[str] = []
    for first in range(0, len(members), 4 * CHUNK):
        peers += [members[index].peer for index in order[first : first + 4 * CHUNK].tolist()]
        yield
    start, stop = (np.array(bounds, np.int64)[order] - wanted.start for bounds in (starts, stops))
    yield
    may_run = np.empty((len(wanted), len(peers)), np.bool_)
    trusted = np.array([peer in privacy.trusted for peer in peers], np.bool_) if privacy.edge else None
    for index, number in enumerate(wanted.blocks()):
        np.logical_and(start <= index, index < stop, out=may_run[index])
        if trusted is not None and privacy.is_private(number):
            may_run[index] &= trusted
        if not may_run[index].any():
            raise no_route(number, privacy)
        if index % _ROWS_AT_ONCE == 0:
            yield
    return _Hosts(peers, away_s[order], start, stop, may_run)


class _Links(NamedTuple):
    """Directed links between members, one in each row."""

    source: Indices
    target: Indices
    link_s: Floats

    def some(self, rows: Indices) -> _Links:
        """Return the links of some rows."""
        return _Links(self.source[rows], self.target[rows], self.link_s[rows])


class _ClaimedLinks(NamedTuple):
    """The links between two hosts that at least one of them made a claim about, in both directions.

    `into` has all of them, sorted by target: those into member i are the rows `begin[i]` to `begin[i + 1] - 1`.
    """

    into: _Links
    begin: Indices
    by_block: _LinksByBlock


class _TimedLinks(NamedTuple):
    """Links and the blocks at which a route can take them, sorted by the first one."""

    links: _Links  # with the shorter time, of the claim and without it
    is_longer: Flags  # the claim, than without it
    first: Indices
    stop: Indices

    def some(self, rows: Indices) -> _TimedLinks:
        """Return the links of some rows."""
        return _TimedLinks(self.links.some(rows), self.is_longer[rows], self.first[rows], self.stop[rows])


class _LinksByBlock:
    """The links that a route can take at each block; asked for in the order of the blocks."""

    def __init__(self, links: _TimedLinks) -> None:
        self._all = self._near = links
        self._window = range(0)  # the blocks at which those near can be taken

    def changing(self, cost_s: Floats, least_s: Floats, index: int) -> tuple[_Links, _Links]:
        """Return the links that change the least cost of entering a block on their target.

        First those that are shorter than without claims and lower it, then those that are longer and make it too low.
        """
        if index not in self._window:
            self._window = range(index, index + _WINDOW)
            rows = ((self._all.first < self._window.stop) & (self._all.stop > index)).nonzero()[0]
            self._near = self._all.some(rows) if len(rows) < len(self._all.first) else self._all
        links, is_longer, first, stop = self._near
        begun = int(first.searchsorted(index, side="right"))
        source, target, link_s = (column[:begun] for column in links)
        rows = ((stop[:begun] > index) & (cost_s[source] + link_s <= least_s[target])).nonzero()[0]
        longer = is_longer[rows]
        return links.some(rows[~longer]), links.some(rows[longer])


def _claimed_links(hosts: _Hosts, links: LinkEstimates) -> Pieces[_ClaimedLinks]:
    claims = yield from _claims(hosts, links)
    low, high, pair_s = yield from _claimed_pairs(hosts, links, claims)
    yield
    source, target, link_s = np.concatenate([low, high]), np.concatenate([high, low]), np.concatenate([pair_s, pair_s])
    order = yield from _sorted_by(source, target)
    into = _Links(source, target, link_s).some(order)
    begin: Indices = np.searchsorted(into.target, np.arange(len(hosts.peers) + 1))
    yield
    # A route can take a link at a block if its source runs the block before and its target runs this one.
    first = np.clip(np.maximum(hosts.start[into.source] + 1, hosts.start[into.target]), 0, MAX_BLOCKS)
    stop = np.minimum(hosts.stop[into.source] + 1, hosts.stop[into.target])
    order = yield from _sorted_by(first)
    unclaimed_s = np.maximum(hosts.away_s[into.source], hosts.away_s[into.target])
    yield
    least = _Links(into.source, into.target, np.minimum(into.link_s, unclaimed_s))
    timed = _TimedLinks(least, into.link_s > unclaimed_s, first, stop).some(order)
    yield
    return _ClaimedLinks(into, begin, _LinksByBlock(timed))


def _sorted_by(*keys: Indices) -> Pieces[Indices]:
    """Return the order of rows by their keys, of which the last one counts first; none of them is negative.

    Numbers of 16 bits are sorted in linear time, several times faster than longer ones.
    """
    order = np.arange(len(keys[0]))
    for key in keys:
        sortable = key.astype(np.uint16) if len(key) and key.max() < 2**16 else key
        order = order[np.argsort(sortable[order], kind="stable")]
        yield
    return order


def _claims(hosts: _Hosts, links: LinkEstimates) -> Pieces[_Links]:
    """Return the claims of hosts, as the source, about others that a route can join to them; times are one way."""
    hashes = []
    for first in range(0, len(hosts.peers), CHUNK):
        yield
        hashes += [hash(tail(peer)) for peer in hosts.peers[first : first + CHUNK]]
    yield
    named_so = np.array(hashes, np.int64)  # (members,) hashes of their tails, which several peers can share
    by_hash = np.argsort(named_so, kind="stable")
    known = named_so[by_hash]
    is_shared = bool((known[1:] == known[:-1]).any())
    here = hosts.peers.index(links.own_peer) if links.own_peer in hosts.peers else -1
    found = [_Links(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))]
    for first in range(0, len(hosts.peers), _CLAIMANTS_AT_ONCE):
        yield
        some = [links.claimants.get(peer) for peer in hosts.peers[first : first + _CLAIMANTS_AT_ONCE]]
        columns = [b"" if one is None else one.rtt_columns for one in some]
        halves = [len(column) // 2 for column in columns]
        source = np.repeat(np.arange(first, first + len(some)), [half // 8 for half in halves])
        named = np.frombuffer(b"".join([one[:half] for one, half in zip(columns, halves, strict=True)]), np.int64)
        rtt_s = np.frombuffer(b"".join([one[half:] for one, half in zip(columns, halves, strict=True)]), np.float64)
        begin = known.searchsorted(named)
        rows = (known[np.minimum(begin, len(known) - 1)] == named).nonzero()[0]
        source, named, rtt_s, begin = source[rows], named[rows], rtt_s[rows], begin[rows]
        if is_shared:
            copies = known.searchsorted(named, side="right") - begin
            nth = np.arange(copies.sum()) - np.repeat(np.cumsum(copies) - copies, copies)
            source, rtt_s, begin = np.repeat(source, copies), np.repeat(rtt_s, copies), np.repeat(begin, copies) + nth
        target = by_hash[begin]
        useful = (hosts.start[source] <= hosts.stop[target]) & (hosts.start[target] <= hosts.stop[source])
        useful &= (source != target) & (source != here) & (target != here)
        found.append(_Links(source[useful], target[useful], rtt_s[useful] / 2))
    yield
    return _Links(*(np.concatenate(columns) for columns in zip(*found, strict=True)))


def _claimed_pairs(hosts: _Hosts, links: LinkEstimates, claims: _Links) -> Pieces[tuple[Indices, Indices, Floats]]:
    """Return the pairs of hosts that have a claim: nearer one, farther one, link time."""
    source, target, claim_s = claims
    count = len(hosts.peers)
    near, far = np.minimum(source, target), np.maximum(source, target)
    order = yield from _sorted_by(far, near)
    key, claim_s = (near * count + far)[order], claim_s[order]
    begin = np.flatnonzero(np.diff(key, prepend=-1))
    claimants = np.diff(begin, append=len(key))  # one or both
    claimed_s = np.maximum.reduceat(claim_s, begin) if len(begin) else claim_s
    low, high = key[begin] // count, key[begin] % count
    yield
    # The same limits as in `LinkEstimates`.
    measured = np.array([peer in links.rtt_s for peer in hosts.peers], np.bool_)
    least_s = np.where(measured[low] & measured[high], hosts.away_s[high] - hosts.away_s[low], 0.0)
    least_s = np.where(claimants == 1, np.maximum(least_s, hosts.away_s[high] / 2), least_s)
    return low, high, np.maximum(claimed_s, least_s)


class _Ways:
    """The cheapest ways from the hosts of one block to those of the next."""

    def __init__(self, hosts: _Hosts, claimed: _ClaimedLinks, entry_s: Floats) -> None:
        self._hosts, self._claimed, self._entry_s = hosts, claimed, entry_s

    def into(self, cost_s: Floats, index: int) -> Floats:
        """Return the least of cost and link over all sources, for each member as the target.

        May be too low for a target where staying is cheaper anyway.
        """
        farther_s = cost_s + self._hosts.away_s  # (members,) from each source to targets that are nearer than it
        least_s: Floats = np.minimum.accumulate(cost_s) + self._hosts.away_s
        np.minimum(least_s, np.minimum.accumulate(farther_s[::-1])[::-1], out=least_s)
        shorter, longer = self._claimed.by_block.changing(cost_s, least_s, index)
        if len(longer.target):
            targets = longer.target
            targets = targets[least_s[targets] + self._entry_s[targets] < cost_s[targets]]
            targets = np.flatnonzero(np.bincount(targets))  # each once; `np.unique` loads masked arrays, for 60 ms
            if len(targets) <= _FEW:
                for target in targets.tolist():
                    least_s[target] = (cost_s + self.links_to(target)).min()
            else:
                least_s[targets] = self._into_exactly(targets, cost_s, farther_s)
        if len(shorter.target):
            np.minimum.at(least_s, shorter.target, cost_s[shorter.source] + shorter.link_s)
        return least_s

    def links_to(self, target: int) -> Floats:
        """Return the link time from each member to one of them."""
        link_s: Floats = np.maximum(self._hosts.away_s, self._hosts.away_s[target])
        claimed = slice(self._claimed.begin[target], self._claimed.begin[target + 1])
        link_s[self._claimed.into.source[claimed]] = self._claimed.into.link_s[claimed]
        return link_s

    def _into_exactly(self, targets: Indices, cost_s: Floats, farther_s: Floats) -> Floats:
        """Return the least of cost and link into each target, with its claimed links apart from the others.

        The claimed sources of a target cut the row of all sources into ranges, whose minima are looked up.
        """
        members, begin = len(cost_s), self._claimed.begin[targets]
        cuts = self._claimed.begin[targets + 1] - begin  # (targets,) claimed sources of each, at least one
        ranges = np.cumsum(cuts + 1) - (cuts + 1)  # (targets,) the first range of each
        which = np.repeat(np.arange(len(targets)), cuts)
        cut = np.arange(len(which)) + which  # the range that each claimed source ends
        rows = cut - ranges[which] + begin[which]
        source = self._claimed.into.source[rows]
        starts = np.zeros(len(which) + len(targets), np.int64)
        stops = np.full(len(starts), members)
        starts[cut + 1], stops[cut] = source + 1, source

        target = np.repeat(targets, cuts + 1)
        nearer_s = _RangeMinima(cost_s).within(starts, np.minimum(stops, target + 1)) + self._hosts.away_s[target]
        unclaimed_s = np.minimum(nearer_s, _RangeMinima(farther_s).within(np.maximum(starts, target), stops))
        claimed_s = cost_s[source] + self._claimed.into.link_s[rows]
        least_s: Floats = np.minimum(
            np.minimum.reduceat(unclaimed_s, ranges), np.minimum.reduceat(claimed_s, np.cumsum(cuts) - cuts)
        )
        return least_s


class _RangeMinima:
    """The minima of all ranges of a row whose length is a power of two; two of them cover any range."""

    def __init__(self, row: Floats) -> None:
        # (levels, row): the minima of the 2**level values from each index on, as far as there are so many
        self._levels: Floats = np.empty((len(row).bit_length(), len(row)))
        self._levels[0] = row
        for level in range(1, len(self._levels)):
            half, kept = 1 << (level - 1), len(row) - (1 << level) + 1
            below = self._levels[level - 1]
            np.minimum(below[:kept], below[half : half + kept], out=self._levels[level, :kept])

    def within(self, starts: Indices, stops: Indices) -> Floats:
        """Return the minimum of each range, infinity for empty ones."""
        minima = np.full(len(starts), np.inf)
        some = np.flatnonzero(starts < stops)
        start, stop = starts[some], stops[some]
        level = np.frexp((stop - start).astype(np.float64))[1].astype(np.int64) - 1  # floor of log2
        minima[some] = np.minimum(self._levels[level, start], self._levels[level, stop - (1 << level)])
        return minima
