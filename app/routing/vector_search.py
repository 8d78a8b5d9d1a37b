"""The search for the cheapest route that `app.routing.search` uses: all pairs of a block's hosts at once. Pure.

Gives routes of the same cost as trying each pair, and needs link times from `app.routing.estimates`: without claims,
the link between two peers takes as long as the way to the farther one. With members in the order of their distance, the
cheapest way into each of them is thus a running minimum over the nearer ones and another over the farther ones. The few
links that members made claims about are tried one by one. Computed in pieces (`app.core.pieces`), of a block each.

Loads numpy, so it is imported only when a route is searched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, count, repeat
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
    entered_s = [hosts.links_s(0, lambda peer: links(request.origin, peer)) + entering_s]  # for each block, (members,)
    costs_s = [entered_s[0] + hosts.compute_s(0, block_row_s)]  # of the cheapest path up to each block, by last member
    for index in range(1, len(request.wanted)):
        yield
        entered_s.append(ways.into(costs_s[-1], index) + entering_s)
        costs_s.append(np.minimum(costs_s[-1], entered_s[-1]) + hosts.compute_s(index, block_row_s))

    yield
    last = int(np.argmin(costs_s[-1] + hosts.links_s(-1, lambda peer: links(peer, request.target))))
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

    def links_s(self, index: int, link_s: Callable[[str], float]) -> Floats:
        """Return the link time of each member that may run a block, infinity for the others."""
        able = np.flatnonzero(self.may_run[index])
        links_s = np.full(len(self.peers), np.inf)
        links_s[able] = [link_s(self.peers[member]) for member in able.tolist()]
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
    peers = [members[index].peer for index in order.tolist()]
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


class _ClaimedLinks:
    """The links between two hosts that at least one of them made a claim about, in both directions.

    `into` has all of them, sorted by target: those into member i are the rows `begin[i]` to `begin[i + 1] - 1`.
    """

    def __init__(self, hosts: _Hosts, low: Indices, high: Indices, link_s: Floats) -> None:
        count = len(hosts.peers)
        order = np.argsort(np.concatenate([high * count + low, low * count + high]))
        source, target = np.concatenate([low, high])[order], np.concatenate([high, low])[order]
        self.into = _Links(source, target, np.concatenate([link_s, link_s])[order])
        self.begin: Indices = np.searchsorted(target, np.arange(count + 1))

        # A route can take a link at a block if its source runs the block before and its target runs this one.
        first = np.maximum(hosts.start[source] + 1, hosts.start[target])
        stop = np.minimum(hosts.stop[source] + 1, hosts.stop[target])
        by_first = np.argsort(first, kind="stable")
        self._stop = stop[by_first]
        self._begun = np.searchsorted(first[by_first], np.arange(len(hosts.may_run)), side="right").tolist()
        unclaimed_s = np.maximum(hosts.away_s[source], hosts.away_s[target])
        self._least = _Links(source[by_first], target[by_first], np.minimum(self.into.link_s, unclaimed_s)[by_first])
        self._longer = (self.into.link_s > unclaimed_s)[by_first]

    def changing(self, cost_s: Floats, least_s: Floats, index: int) -> tuple[_Links, _Links]:
        """Return the links that change the least cost of entering a block on their target.

        First those that are shorter than without claims and lower it, then those that are longer and make it too low.
        """
        begun = self._begun[index]
        usable = self._stop[:begun] > index
        source, target, link_s = (column[:begun] for column in self._least)
        rows = (usable & (cost_s[source] + link_s <= least_s[target])).nonzero()[0]
        longer = self._longer[rows]
        shorter_rows, longer_rows = rows[~longer], rows[longer]
        return _Links(*(c[shorter_rows] for c in self._least)), _Links(*(c[longer_rows] for c in self._least))


def _claimed_links(hosts: _Hosts, links: LinkEstimates) -> Pieces[_ClaimedLinks]:
    claims = yield from _claims(hosts, links)
    low, high, link_s = yield from _claimed_pairs(hosts, links, claims)
    claimed = _ClaimedLinks(hosts, low, high, link_s)
    yield
    return claimed


def _claims(hosts: _Hosts, links: LinkEstimates) -> Pieces[_Links]:
    """Return the claims of hosts, as the source, about others that a route can join to them; times are one way."""
    tails = [tail(peer) for peer in hosts.peers]
    numbers = dict(zip(dict.fromkeys(tails), count(), strict=False))  # of the tails, which several peers can share
    number = np.array([numbers[name] for name in tails], np.int64)
    sharing = np.bincount(number, minlength=1)  # (tails,) how many peers have each
    by_number, begin = np.argsort(number, kind="stable"), np.cumsum(sharing) - sharing
    here = hosts.peers.index(links.own_peer) if links.own_peer in hosts.peers else -1
    found = [_Links(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))]
    for first in range(0, len(hosts.peers), CHUNK):
        yield
        claims = [links.claims.get(peer, {}) for peer in hosts.peers[first : first + CHUNK]]
        sizes = np.array([len(claim) for claim in claims], np.int64)
        named = np.fromiter(map(numbers.get, chain.from_iterable(claims), repeat(-1)), np.int64, sizes.sum())
        rtt_s = np.fromiter(chain.from_iterable(claim.values() for claim in claims), np.float64, sizes.sum())
        source, known = np.repeat(np.arange(first, first + len(claims)), sizes), named >= 0
        source, named, rtt_s = source[known], named[known], rtt_s[known]

        target = named
        if len(numbers) < len(tails):
            copies = sharing[named]
            nth = np.arange(copies.sum()) - np.repeat(np.cumsum(copies) - copies, copies)
            target = by_number[np.repeat(begin[named], copies) + nth]
            source, rtt_s = np.repeat(source, copies), np.repeat(rtt_s, copies)
        useful = (hosts.start[source] <= hosts.stop[target]) & (hosts.start[target] <= hosts.stop[source])
        useful &= (source != target) & (source != here) & (target != here)
        found.append(_Links(source[useful], target[useful], rtt_s[useful] / 2))
    yield
    return _Links(*(np.concatenate(columns) for columns in zip(*found, strict=True)))


def _claimed_pairs(hosts: _Hosts, links: LinkEstimates, claims: _Links) -> Pieces[tuple[Indices, Indices, Floats]]:
    """Return the pairs of hosts that have a claim: nearer one, farther one, link time."""
    source, target, claim_s = claims
    count = len(hosts.peers)
    key = np.minimum(source, target) * count + np.maximum(source, target)
    order = np.argsort(key, kind="stable")
    yield
    key, claim_s = key[order], claim_s[order]
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
        shorter, longer = self._claimed.changing(cost_s, least_s, index)
        if len(longer.target):
            targets = longer.target
            targets = np.unique(targets[least_s[targets] + self._entry_s[targets] < cost_s[targets]])
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
