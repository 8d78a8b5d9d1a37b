"""The exchange of one attempt at a round: every member merges one share of all changes, and takes the others' shares.

An all-reduce in two trips: each member fetches its share (a range of leaves) of everybody's change and merges it, then
fetches the shares that the others merged. So it sees all versions of its share together, as clipping requires. A change
is checked against the hash that its arrival committed to: nobody can send different ones, or copy another's.
In a grid (`app.rounds.grid`) a member fetches and merges its share of the changes of its row first, and then its share
of what all rows merged. What a row merged goes to one member, so nobody could compare two versions of it, and it is not
signed.
Merged leaves are checked against what their merger has signed: if members end with different states, whoever signed two
versions of its share is known. That a share was merged rightly is not checked, but that it is not far larger than any
change: numbers with which no model can go on would end everybody's part.
Of members on one local network, one takes a far member's merged share and the others take it from that one, so that it
crosses the slow link once; the merger has signed it, so nobody needs to be believed. Whoever does not pass it on costs
some time once, and is not asked for a while.
Merging is computed by the device; who failed whom is said in the result and decided by the one who leads.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeVar

import trio

from app.core.compute import Device
from app.core.errors import AppError, RecordError
from app.core.network import Network, Priority
from app.core.signal import Signal
from app.manifest.merkle import HASH_BYTES, leaf_hash, root_of
from app.rounds import wire
from app.rounds.decisions import (
    PAST_UNITS,
    merge_weights,
    request_leaves,
    request_timeout_s,
    taken_from,
)
from app.rounds.grid import Grid, grid_of
from app.rounds.statements import (
    MAX_ARRIVAL_BYTES,
    MAX_MEMBERS,
    Arrival,
    MemberList,
    MergedShare,
    read_share,
    sign_share,
)
from app.rounds.traces import MOST_NUMBERS, MOST_TRACES
from engine.errors import EngineError
from p2p.errors import DeadlineExceeded, P2PError, PeerUnreachable, Refused, RemoteError
from p2p.identity import Identity

log = logging.getLogger("shoal.rounds")
A = TypeVar("A")
B = TypeVar("B")

RETRY_S = 0.5
UNREACHABLE_TRIES = 3
PASSED_OVER_ROUNDS = 16  # in which a member that did not pass a share on is not asked for one


class MergingModel(Protocol):
    """What the exchange needs of an island's model; `engine.island.IslandModel` has it."""

    @property
    def leaves(self) -> int: ...
    @property
    def leaf_bytes(self) -> int: ...
    @property
    def most_leaf_bytes(self) -> int: ...
    @property
    def traced_leaf_bytes(self) -> int: ...
    def check(self, leaves: Sequence[bytes], first: int) -> None: ...
    def check_merged(self, leaves: Sequence[bytes], first: int, times: float) -> None: ...
    def merge(self, rows: Sequence[Sequence[bytes]], first: int, weights: Sequence[float]) -> Any: ...


class ExchangeFailed(AppError):
    """An exchange could not be finished; `failed` names those at fault as far as they are known."""

    code = "exchange_failed"

    def __init__(self, failed: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"{peer}: {why}" for peer, why in failed.items()) or "others could not finish it")
        self.failed = dict(failed)


@dataclass
class OwnChange:
    """What this island sends in a round: its arrival, and the leaves that it committed to."""

    arrival: Arrival
    leaves: list[bytes]
    hashes: list[bytes]
    traces: list[bytes] = field(default_factory=list)  # of its steps, packed; empty if there are none
    traced: list[list[bytes]] = field(default_factory=list)  # leaves of the weights of each trace


@dataclass
class ExchangeAttempt:
    """One attempt at a round as it is seen here; served to the other members."""

    members: MemberList
    is_grid: bool = False  # as the job's record says
    of_row: dict[int, bytes] = field(default_factory=dict)  # leaves merged of the changes of the own row, in a grid
    merged: dict[int, bytes] = field(default_factory=dict)  # leaves by number
    shares: dict[str, MergedShare] = field(default_factory=dict)  # by the member that signed it
    report: dict[str, tuple[float, float]] = field(default_factory=dict)  # member -> norm and cosine of its change
    past: tuple[int, ...] = ()  # thousandths: cosine of each change of the row with the last merged one
    failed: dict[str, str] = field(default_factory=dict)
    has_failed: bool = False  # here, whether or not it is known who is at fault
    is_superseded: bool = False  # the one who leads has made another list
    changed: Signal = field(default_factory=Signal)
    bytes_in: int = 0

    @cached_property
    def grid(self) -> Grid:
        """Who merges with whom in this attempt."""
        return grid_of(self.members, is_grid=self.is_grid)

    def fail(self, failed: Mapping[str, str]) -> ExchangeFailed:
        """Remember who failed, and tell those who wait for the share that is merged here."""
        self.failed.update(failed)
        self.has_failed = True
        self.changed.notify()
        return ExchangeFailed(self.failed)


class Exchange:
    """Runs attempts for one island."""

    def __init__(
        self,
        network: Network,
        identity: Identity,
        device: Device,
        model: MergingModel,
        job: bytes,
        *,
        wall_ms: Callable[[], int],
        in_thread: Callable[..., Awaitable[Any]],
    ) -> None:
        self._network, self._identity, self._device, self._model = network, identity, device, model
        self._job, self._wall_ms, self._in_thread = job, wall_ms, in_thread
        self._passed_over: dict[str, int] = {}  # members that did not pass a share on, and the round to ask again

    async def run(self, attempt: ExchangeAttempt, own: OwnChange, deadline: float) -> list[bytes]:
        """Return all merged leaves, the same bytes for all members; raises `ExchangeFailed`."""
        grid, me = attempt.grid, self._network.peer_id
        weights = merge_weights({arrival.peer: arrival.tokens for arrival in attempt.members.arrivals})
        shares, is_grid = grid.shares(self._model.leaves), len(grid.rows) > 1
        # Stages end before the next ones: who waits for another hears that it failed, and does not take it for the one
        # at fault.
        left_s = deadline - trio.current_time()
        until = deadline - left_s / (2 if is_grid else 4)
        leaves = await self._merge_row(attempt, grid, own, weights, until)
        if is_grid:
            attempt.of_row.update(zip(grid.row_shares(self._model.leaves)[me], leaves, strict=True))
            attempt.changed.notify()
            leaves = await self._merge_rows(attempt, grid, weights, deadline - left_s / 4)
        if shares[me]:
            _, root = await self._in_thread(hashes_of, leaves)
            share = MergedShare(self._job, attempt.members.hash, root)
            attempt.shares[me] = sign_share(self._identity, share, self._wall_ms())
        attempt.merged.update(zip(shares[me], leaves, strict=True))
        attempt.changed.notify()

        times = _more_steps(attempt.members, me)

        async def collect(peer: str) -> None:
            share, leaves = await self._share_of(peer, grid, deadline, attempt)
            await self._device.run_beside(self._model.check_merged, leaves, shares[peer].start, times)
            attempt.shares[peer] = share
            attempt.merged.update(zip(shares[peer], leaves, strict=True))
            attempt.changed.notify()

        await self._all(attempt, {peer: (collect, peer) for peer in shares if peer != me and shares[peer]})
        return [attempt.merged[leaf] for leaf in range(self._model.leaves)]

    async def merged_of(self, members: MemberList, giver: str, deadline: float) -> list[bytes]:
        """Return the merged leaves of a round that others have finished; raises what asking one of them raises."""
        return await self._merged_by(giver, range(self._model.leaves), deadline, ExchangeAttempt(members))

    async def change_of(self, members: MemberList, arrival: Arrival, deadline: float) -> list[bytes]:
        """Return a member's whole change, which we were drawn to test; raises what asking it raises, or `RecordError`.

        That its leaves can be decoded is not checked.
        """
        return await self._committed(ExchangeAttempt(members), arrival, range(self._model.leaves), deadline)

    async def traces_of(self, members: MemberList, arrival: Arrival, deadline: float) -> list[bytes]:
        """Return the traces that a member committed to; raises what asking it raises, or `RecordError`."""
        where, size = {"list": members.hash.hex()}, MOST_TRACES * (HASH_BYTES + 4 * MOST_NUMBERS)
        raw = await self._ask(arrival.peer, wire.TRACES, where, deadline, ExchangeAttempt(members), size)
        found = wire.unpack(raw, MOST_TRACES)
        if not found or (await self._in_thread(hashes_of, found))[1] != arrival.traces:
            raise RecordError("its traces are not those that it committed to")
        return found

    async def traced_weights(self, members: MemberList, peer: str, root: bytes, deadline: float) -> list[bytes]:
        """Return the weights of a member's drawn trace as leaves; raises what asking it raises, or `RecordError`.

        That they are numbers is not checked.
        """
        leaves, size = range(self._model.leaves), self._model.traced_leaf_bytes
        found = await self._leaves_of(peer, wire.TRACE, leaves, deadline, ExchangeAttempt(members), size)
        if (await self._in_thread(hashes_of, found))[1] != root:
            raise RecordError("the weights of its step are not those that it committed to")
        return found

    async def two_faced(self, attempt: ExchangeAttempt, peer: str, deadline: float) -> set[str]:
        """Return the members that signed another share for this peer than for us; raises `P2PError` or `RecordError`.

        Both shares are signed by them, so the peer cannot make this up.
        """
        theirs = await self._signed_shares(peer, attempt, deadline)
        return {
            share.peer
            for share in theirs
            if share.peer in attempt.shares and share.root != attempt.shares[share.peer].root
        }

    # --- inside -------------------------------------------------------------------------------------------------------

    async def _all(self, attempt: ExchangeAttempt, tasks: Mapping[str, tuple[Callable[[Any], Any], Any]]) -> None:
        """Do something with every member at once; raises `ExchangeFailed` with those at fault, after all are done."""
        failed: dict[str, str] = {}
        unfinished = False

        async def attempted(peer: str, function: Callable[[Any], Any], argument: Any) -> None:
            nonlocal unfinished
            try:
                await function(argument)
            except ExchangeFailed:
                unfinished = True  # somebody else is at fault, whom that member names itself
            except (P2PError, RecordError, EngineError) as error:
                failed[peer] = str(error)

        async with trio.open_nursery() as nursery:
            for peer, (function, argument) in tasks.items():
                nursery.start_soon(attempted, peer, function, argument)
        if failed or unfinished:
            raise attempt.fail(failed)

    async def _merge_row(
        self, attempt: ExchangeAttempt, grid: Grid, own: OwnChange, weights: Mapping[str, float], until: float
    ) -> list[bytes]:
        """Take this member's share of the changes of its row, merge it and report on them."""
        me, row = self._network.peer_id, grid.row_of(self._network.peer_id)
        mine = grid.row_shares(self._model.leaves)[me]
        changes: dict[str, list[bytes]] = {me: own.leaves[mine.start : mine.stop]}

        async def take(arrival: Arrival) -> None:
            changes[arrival.peer] = await self._change_of(attempt, arrival, mine, until)

        others = [one for one in attempt.members.arrivals if one.peer in row and one.peer != me]
        await self._all(attempt, {arrival.peer: (take, arrival) for arrival in others})
        found = await self._merge(attempt, [changes[one] for one in row], mine, [weights[one] for one in row])
        if mine and found.report:
            attempt.report.update(zip(row, found.report, strict=True))
        attempt.past = tuple(round(PAST_UNITS * cosine) for cosine in found.past)
        return list(found.leaves)

    async def _merge_rows(
        self, attempt: ExchangeAttempt, grid: Grid, weights: Mapping[str, float], until: float
    ) -> list[bytes]:
        """Take this member's share of what all rows have merged, and merge it."""
        me = self._network.peer_id
        sources = grid.sources(me, self._model.leaves)
        parts = [{leaf: attempt.of_row[leaf] for leaf in row.get(me, ())} for row in sources]
        times = _more_steps(attempt.members, me)

        async def take(source: tuple[int, str]) -> None:
            number, peer = source
            wanted = sources[number][peer]
            leaves = await self._leaves_of(peer, wire.ROW, wanted, until, attempt)
            await self._device.run_beside(self._model.check, leaves, wanted.start)
            await self._device.run_beside(self._model.check_merged, leaves, wanted.start, times)
            parts[number].update(zip(wanted, leaves, strict=True))

        others = {peer: (number, peer) for number, row in enumerate(sources) for peer in row if peer != me}
        await self._all(attempt, {peer: (take, source) for peer, source in others.items()})
        mine = grid.shares(self._model.leaves)[me]
        rows = [[part[leaf] for leaf in mine] for part in parts]
        merged = await self._merge(attempt, rows, mine, [sum(weights[one] for one in row) for row in grid.rows])
        return list(merged.leaves)

    async def _merge(
        self, attempt: ExchangeAttempt, rows: Sequence[Sequence[bytes]], leaves: range, weights: Sequence[float]
    ) -> Any:
        try:
            return await self._device.run_beside(self._model.merge, rows, leaves.start, weights)
        except EngineError as error:
            raise attempt.fail({self._network.peer_id: str(error)}) from error

    async def _change_of(
        self, attempt: ExchangeAttempt, arrival: Arrival, leaves: range, deadline: float
    ) -> list[bytes]:
        """Return some leaves of a member's change, checked against what it committed to; raises `RecordError`."""
        found = await self._committed(attempt, arrival, leaves, deadline)
        await self._device.run_beside(self._model.check, found, leaves.start)
        return found

    async def _committed(
        self, attempt: ExchangeAttempt, arrival: Arrival, leaves: range, deadline: float
    ) -> list[bytes]:
        if not leaves:
            return []
        hashes, found = await _both(
            lambda: self._hashes_of(attempt, arrival, deadline),
            lambda: self._leaves_of(arrival.peer, wire.SHARE, leaves, deadline, attempt),
        )
        if (await self._in_thread(hashes_of, found))[0] != hashes[leaves.start : leaves.stop]:
            raise RecordError("its change is not the one that it committed to")
        return found

    async def _hashes_of(self, attempt: ExchangeAttempt, arrival: Arrival, deadline: float) -> list[bytes]:
        """Return the hashes of all leaves of a member's change, which its arrival committed to."""
        where, size = {"list": attempt.members.hash.hex()}, HASH_BYTES * self._model.leaves
        hashes = wire.unpack_hashes(await self._ask(arrival.peer, wire.HASHES, where, deadline, attempt, size))
        if len(hashes) != self._model.leaves or await self._in_thread(root_of, hashes) != arrival.change:
            raise RecordError("its change is not the one that it committed to")
        return hashes

    async def _share_of(
        self, merger: str, grid: Grid, deadline: float, attempt: ExchangeAttempt
    ) -> tuple[MergedShare, list[bytes]]:
        """Return a member's word for the share that it merged, and the share; raises `RecordError` if they differ."""
        leaves, giver = grid.shares(self._model.leaves)[merger], self._giver_of(merger, grid, attempt.members)
        if giver != merger:
            share = await self._signed_by(merger, attempt, deadline)
            passed_on = await self._passed_on(giver, share, leaves, deadline, attempt)
            if passed_on is not None:
                return share, passed_on
        share, found = await _both(
            lambda: self._signed_by(merger, attempt, deadline),
            lambda: self._merged_by(merger, leaves, deadline, attempt),
        )
        if (await self._in_thread(hashes_of, found))[1] != share.root:
            raise RecordError("its share is not the one that it signed")
        return share, found

    def _giver_of(self, merger: str, grid: Grid, members: MemberList) -> str:
        """The member to take a share from: the one that merged it, or one that takes it for the row or local network.

        Where all merge with all, every member knows for itself who is near.
        """
        me = self._network.peer_id
        asked = {one for one in members.members if self._passed_over.get(one, 0) <= members.round}
        if len(grid.rows) > 1:
            giver = grid.giver(merger, me, self._model.leaves)
            return giver if giver in asked else merger
        near = {link.peer for link in self._network.links() if link.kind == "lan"} & asked
        return taken_from(merger, me, near, members.hash)

    async def _passed_on(
        self, giver: str, share: MergedShare, leaves: range, deadline: float, attempt: ExchangeAttempt
    ) -> list[bytes] | None:
        """Return a share from a member that takes it for others; None if it does not, or not in time.

        It has as long as the whole merged change might take from the one who merged the share, because other shares
        come over the same link meanwhile. One that fails is not asked for some rounds.
        """
        now, size_bytes = trio.current_time(), self._model.leaves * self._model.leaf_bytes
        patience_s = request_timeout_s(
            size_bytes, self.speed_of(share.peer), wait_s=wire.WAIT_S, lost=0, left_s=deadline - now
        )
        with trio.move_on_after(patience_s):
            try:
                found = await self._merged_by(giver, leaves, now + patience_s, attempt)
                if (await self._in_thread(hashes_of, found))[1] == share.root:
                    return found
            except ExchangeFailed:
                return None  # the giver's exchange has failed, or this one is over
            except (P2PError, RecordError, EngineError) as error:
                log.info("%s does not pass on the share of %s: %s", giver, share.peer, error)
        self._passed_over[giver] = attempt.members.round + PASSED_OVER_ROUNDS
        return None

    async def _signed_by(self, peer: str, attempt: ExchangeAttempt, deadline: float) -> MergedShare:
        """Return a member's word for the share that it merges, once it has; raises `RecordError` if it gives none."""
        for share in await self._signed_shares(peer, attempt, deadline, of=peer):
            if share.peer == peer:
                return share
        raise RecordError("it does not sign the share that it merged")

    async def _signed_shares(
        self, peer: str, attempt: ExchangeAttempt, deadline: float, of: str | None = None
    ) -> list[MergedShare]:
        """Return what a peer shows of what members signed for their shares: of all, or `of` one of them."""
        where = {"list": attempt.members.hash.hex(), **({} if of is None else {"of": of})}
        size = MAX_MEMBERS * MAX_ARRIVAL_BYTES  # a share is bounded like an arrival
        raw = await self._ask(peer, wire.SIGNED, where, deadline, attempt, size)
        raws = wire.unpack(raw, MAX_MEMBERS)
        shares: list[MergedShare] = await self._in_thread(lambda: [read_share(one) for one in raws])
        if any((share.job, share.list) != (self._job, attempt.members.hash) for share in shares):
            raise RecordError("it sends what was signed for another list")
        return shares

    async def _merged_by(self, peer: str, leaves: range, deadline: float, attempt: ExchangeAttempt) -> list[bytes]:
        found = await self._leaves_of(peer, wire.MERGED, leaves, deadline, attempt)
        await self._device.run_beside(self._model.check, found, leaves.start)
        return found

    async def _leaves_of(
        self,
        peer: str,
        method: str,
        leaves: range,
        deadline: float,
        attempt: ExchangeAttempt,
        leaf_bytes: int | None = None,
    ) -> list[bytes]:
        """Ask for leaves, as many at a time as the link carries in a moment; raises `RecordError` for others.

        They are of a change if it is not said how large they are.
        """
        found: list[bytes] = []
        at, size = leaves.start, leaf_bytes or self._model.leaf_bytes
        while at < leaves.stop:
            count = min(request_leaves(size, self.speed_of(peer), wire.RUN_LEAVES), leaves.stop - at)
            where = {"list": attempt.members.hash.hex(), "first": at, "count": count}
            raw = await self._ask(peer, method, where, deadline, attempt, count * size)
            attempt.bytes_in += len(raw)
            leaves_now = wire.unpack(raw, count)
            # at once: what is kept until all have come must not be larger than a change
            if len(leaves_now) != count or any(len(leaf) > self._model.most_leaf_bytes for leaf in leaves_now):
                raise RecordError("it sent other leaves than asked for")
            found += leaves_now
            at += count
        return found

    def speed_of(self, peer: str) -> float | None:
        """Measured bytes a second from a peer."""
        return next((link.down_bytes_per_s for link in self._network.links() if link.peer == peer), None)

    async def _ask(
        self,
        peer: str,
        method: str,
        values: dict[str, Any],
        deadline: float,
        attempt: ExchangeAttempt,
        size_bytes: int,
    ) -> bytes:
        """Ask for some bytes until they come or the deadline does; raises the last error, or `ExchangeFailed`."""
        unreachable = 0
        while True:
            if attempt.is_superseded:
                raise ExchangeFailed({})
            try:
                timeout_s = request_timeout_s(
                    size_bytes,
                    self.speed_of(peer),
                    wait_s=wire.WAIT_S,
                    lost=unreachable,
                    left_s=deadline - trio.current_time(),
                )
                body = wire.request(self._job, values)
                return await self._network.call(peer, method, body, timeout_s=timeout_s, priority=Priority.BULK)
            except RemoteError as error:
                if error.code == wire.FAILED:
                    raise ExchangeFailed({}) from error
                unreachable += error.code == wire.UNKNOWN  # it has left, like one that is gone
                if error.code not in (wire.NOT_YET, wire.UNKNOWN):
                    raise
                if unreachable >= UNREACHABLE_TRIES or trio.current_time() >= deadline:
                    raise
            except P2PError as error:
                unreachable += isinstance(error, PeerUnreachable | Refused | DeadlineExceeded)
                if unreachable >= UNREACHABLE_TRIES or trio.current_time() >= deadline:
                    raise
            await trio.sleep(RETRY_S)


async def _both(first: Callable[[], Awaitable[A]], second: Callable[[], Awaitable[B]]) -> tuple[A, B]:
    """Return what two requests that need not wait for each other are answered; raises the error of the first to fail.

    The other one is given up then.
    """
    found: dict[int, Any] = {}
    failures: list[Exception] = []

    async def attempted(index: int, function: Callable[[], Awaitable[Any]]) -> None:
        try:
            found[index] = await function()
        except (P2PError, AppError, EngineError) as error:
            failures.append(error)
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(attempted, 0, first)
        nursery.start_soon(attempted, 1, second)
    if failures:
        raise failures[0]
    return found[0], found[1]


def _more_steps(members: MemberList, me: str) -> float:
    """Return how many times as many steps as this member any other one has made at most; at least one."""
    steps = {arrival.peer: arrival.steps for arrival in members.arrivals}
    return max(steps.values()) / max(steps[me], 1)


def hashes_of(leaves: Sequence[bytes]) -> tuple[list[bytes], bytes]:
    """Return the hashes of some leaves, and the root over them; a while for many of them: call it in a thread."""
    hashes = [leaf_hash(leaf) for leaf in leaves]
    return hashes, root_of(hashes)
