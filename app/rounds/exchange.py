"""The exchange of one attempt at a round: every member merges one share of all changes, and takes the others' shares.

Butterfly: two trips, and each share is seen from all members at once, which clipping needs. A change is checked against
the hash that its arrival committed to, so nobody can send one thing to one member and another to the next, or copy.
Merging is computed by the device; who failed whom is said in the result and decided by the one who leads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import trio

from app.core.compute import Device
from app.core.errors import AppError, RecordError
from app.core.network import Network, Priority
from app.core.signal import Signal
from app.manifest.merkle import leaf_hash, root_of
from app.rounds import wire
from app.rounds.decisions import merge_weights, share_ranges
from app.rounds.statements import Arrival, MemberList
from engine.errors import EngineError
from p2p.errors import DeadlineExceeded, P2PError, PeerUnreachable, Refused, RemoteError

RETRY_S = 0.5
UNREACHABLE_TRIES = 3


class MergingModel(Protocol):
    """What the exchange needs of an island's model; `engine.island.IslandModel` has it."""

    @property
    def leaves(self) -> int: ...
    def check(self, leaves: Sequence[bytes], first: int) -> None: ...
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


@dataclass
class ExchangeAttempt:
    """One attempt at a round as it is seen here; served to the other members."""

    members: MemberList
    merged: dict[int, bytes] = field(default_factory=dict)  # leaves by number
    report: dict[str, tuple[float, float]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    changed: Signal = field(default_factory=Signal)
    bytes_in: int = 0

    def fail(self, failed: Mapping[str, str]) -> ExchangeFailed:
        """Remember who failed, and tell those who wait for the share that is merged here."""
        self.failed.update(failed)
        self.changed.notify()
        return ExchangeFailed(self.failed)


class Exchange:
    """Runs attempts for one island."""

    def __init__(self, network: Network, device: Device, model: MergingModel, job: bytes) -> None:
        self._network, self._device, self._model, self._job = network, device, model, job

    async def run(self, attempt: ExchangeAttempt, own: OwnChange, deadline: float) -> list[bytes]:
        """Return all merged leaves, the same bytes for all members; raises `ExchangeFailed`."""
        members, me = attempt.members.members, self._network.peer_id
        ranges = share_ranges(self._model.leaves, len(members))
        mine = ranges[members.index(me)]
        rows: dict[str, list[bytes]] = {me: own.leaves[mine.start : mine.stop]}

        async def take(arrival: Arrival) -> None:
            rows[arrival.peer] = await self._change_of(attempt, arrival, mine, deadline)

        others = [arrival for arrival in attempt.members.arrivals if arrival.peer != me]
        await self._all(attempt, {arrival.peer: (take, arrival) for arrival in others})
        await self._merge(attempt, rows, mine)

        async def collect(index: int) -> None:
            leaves = await self._merged_by(members[index], attempt.members.hash, ranges[index], deadline, attempt)
            attempt.merged.update(zip(ranges[index], leaves, strict=True))

        wanted = {peer: (collect, index) for index, peer in enumerate(members) if peer != me and ranges[index]}
        await self._all(attempt, wanted)
        return [attempt.merged[leaf] for leaf in range(self._model.leaves)]

    async def merged_of(self, members: MemberList, deadline: float) -> list[bytes]:
        """Return the merged leaves of a round that others have finished; raises `ExchangeFailed`."""
        attempt = ExchangeAttempt(members)
        givers = [peer for peer in members.members if peer != self._network.peer_id]
        whole = range(self._model.leaves)
        failed: dict[str, str] = {}
        for peer in givers:
            try:
                return await self._merged_by(peer, members.hash, whole, deadline, attempt)
            except (P2PError, RecordError, EngineError, ExchangeFailed) as error:
                failed[peer] = str(error)
        raise ExchangeFailed(failed)

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

    async def _merge(self, attempt: ExchangeAttempt, rows: Mapping[str, list[bytes]], mine: range) -> None:
        members = attempt.members.members
        weights = merge_weights({arrival.peer: arrival.tokens for arrival in attempt.members.arrivals})
        try:
            found = await self._device.run_later(
                self._model.merge, [rows[peer] for peer in members], mine.start, [weights[peer] for peer in members]
            )
        except EngineError as error:
            raise attempt.fail({self._network.peer_id: str(error)}) from error
        attempt.merged.update(zip(mine, found.leaves, strict=True))
        if mine:
            attempt.report.update(zip(members, found.report, strict=True))
        attempt.changed.notify()

    async def _change_of(
        self, attempt: ExchangeAttempt, arrival: Arrival, leaves: range, deadline: float
    ) -> list[bytes]:
        """Return some leaves of a member's change, checked against what it committed to; raises `RecordError`."""
        if not leaves:
            return []
        where = {"list": attempt.members.hash.hex()}
        raw = await self._ask(arrival.peer, wire.HASHES, where, deadline)
        hashes = wire.unpack_hashes(raw)
        if len(hashes) != self._model.leaves or root_of(hashes) != arrival.change:
            raise RecordError("its change is not the one that it committed to")
        found: list[bytes] = []
        for first, count in wire.runs_of(leaves):
            raw = await self._ask(arrival.peer, wire.SHARE, where | {"first": first, "count": count}, deadline)
            attempt.bytes_in += len(raw)
            found += wire.unpack(raw, count)
        if [leaf_hash(leaf) for leaf in found] != hashes[leaves.start : leaves.stop]:
            raise RecordError("its change is not the one that it committed to")
        await self._device.run_later(self._model.check, found, leaves.start)
        return found

    async def _merged_by(
        self, peer: str, list_hash: bytes, leaves: range, deadline: float, attempt: ExchangeAttempt
    ) -> list[bytes]:
        found: list[bytes] = []
        for first, count in wire.runs_of(leaves):
            where = {"list": list_hash.hex(), "first": first, "count": count}
            raw = await self._ask(peer, wire.MERGED, where, deadline)
            attempt.bytes_in += len(raw)
            found += wire.unpack(raw, count)
        if len(found) != len(leaves):
            raise RecordError("it sent fewer leaves than asked for")
        await self._device.run_later(self._model.check, found, leaves.start)
        return found

    async def _ask(self, peer: str, method: str, values: dict[str, Any], deadline: float) -> bytes:
        """Ask until there is an answer or the deadline has come; raises the last error, or `ExchangeFailed`."""
        unreachable = 0
        while True:
            try:
                left = max(0.1, deadline - trio.current_time())
                body = wire.request(self._job, values)
                return await self._network.call(
                    peer, method, body, timeout_s=min(left, 4 * wire.WAIT_S), priority=Priority.BULK
                )
            except RemoteError as error:
                if error.code == wire.FAILED:
                    raise ExchangeFailed({}) from error
                if error.code not in (wire.NOT_YET, wire.UNKNOWN) or trio.current_time() >= deadline:
                    raise
            except P2PError as error:
                unreachable += isinstance(error, PeerUnreachable | Refused | DeadlineExceeded)
                if unreachable >= UNREACHABLE_TRIES or trio.current_time() >= deadline:
                    raise
            await trio.sleep(RETRY_S)
