"""Looks for the training jobs that members of a swarm take part in: asks some at a time, and checks each record once.

Members are asked in the order that finds a job soonest: those that named it before, those with a link, and the others
by lot. Records of strangers take milliseconds each to check, so that is done in a thread, one at a time.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import trio

from app.core.errors import RecordError
from app.core.network import Network
from app.rounds import wire
from app.rounds.record import TrainingRecord
from app.rounds.train_store import require_record
from p2p.errors import P2PError

log = logging.getLogger("shoal.rounds")

ASK_S = 10.0  # each member
FIND_S = 60.0  # that members are asked for a job that the user names, in all, until its record is here
ASKED_AT_ONCE = 48  # members: most of them have to be dialled first
MOST_BYTES = 256 * 1024  # of the records of one member, which is hundreds of usual ones
KEPT_CHECKED = 2048  # records
KEPT_NAMERS = 8  # of each, the latest


@dataclass
class NamedJob:
    """A job whose record was checked, and members that named it."""

    id: bytes
    name: str
    founder: str
    steps: int
    own_data: bool
    namers: list[str] = field(default_factory=list)

    @staticmethod
    def of(record: TrainingRecord) -> NamedJob:
        """The job of a record."""
        return NamedJob(record.id, record.name, record.founder, record.steps, record.own_data)

    def is_named(self, target: str) -> bool:
        """True if a user means this job by a name, a hash, or 8 characters or more of its beginning."""
        return self.name == target or (len(target) >= 8 and self.id.hex().startswith(target))


@dataclass
class FoundJob:
    """A job that was looked for: its signed record, and members that say that they take part in it."""

    job: NamedJob
    raw: bytes
    holders: list[str] = field(default_factory=list)


@dataclass
class Found:
    """What a search has found, by the job's hash, and how many members it had no time for."""

    jobs: dict[bytes, FoundJob] = field(default_factory=dict)
    not_asked: int = 0


class JobSearch:
    """Asks the members of one swarm for their training jobs."""

    def __init__(self, network: Network, swarm: str, in_thread: Callable[..., Awaitable[Any]] | None = None) -> None:
        self._network, self._swarm = network, swarm
        self._checked: OrderedDict[bytes, NamedJob] = OrderedDict()  # by the hash of the signed record, newest last
        self._in_thread = in_thread or partial(trio.to_thread.run_sync, limiter=trio.CapacityLimiter(1))

    async def find(self, target: str, members: Sequence[str], *, ask_s: float, within_s: float) -> Found:
        """Return the jobs that a user may mean by a name or a hash, within a time.

        Two of a name are enough, as nobody knows which is meant, and one of a whole hash, whoever repeats its record.
        """
        found = Found()
        hints = {peer for job in self._checked.values() if job.is_named(target) for peer in job.namers}

        def take(job: NamedJob, raw: bytes, peer: str) -> None:
            if not job.is_named(target):
                return
            holders = found.jobs.setdefault(job.id, FoundJob(job, raw)).holders
            if peer not in holders:
                holders.append(peer)
            if len(found.jobs) > 1 or job.id.hex() == target:
                scope.cancel()

        left = deque(self._in_order(members, hints))
        with trio.move_on_after(within_s) as scope:
            await self._ask(left, take, ask_s)
        found.not_asked = len(left)
        return found

    async def find_holders(self, record: TrainingRecord, members: Sequence[str], take: Callable[[str], None]) -> None:
        """Ask members for a job, and give those that name it as they answer; its founder is asked among the first.

        Anybody can name it, so this ends when all were asked, or is cancelled by whoever got the job's text.
        """
        named = (job.namers for job in self._checked.values() if job.id == record.id)
        left = deque(self._in_order(members, {record.founder}.union(*named)))
        await self._ask(left, lambda job, raw, peer: take(peer) if job.id == record.id else None, ASK_S)

    async def list_jobs(self, members: Sequence[str], *, ask_s: float) -> list[NamedJob]:
        """Return the jobs of these members, each once."""
        jobs: dict[bytes, NamedJob] = {}
        with trio.move_on_after(ask_s):
            await self._ask(deque(members), lambda job, raw, peer: jobs.update({job.id: job}), ask_s)
        return list(jobs.values())

    def _in_order(self, members: Sequence[str], first: Collection[str]) -> list[str]:
        linked = {link.peer for link in self._network.links()}
        drawn = random.sample(members, len(members))
        return sorted(drawn, key=lambda peer: (peer not in first, peer not in linked))

    async def _ask(self, left: deque[str], take: Callable[[NamedJob, bytes, str], None], ask_s: float) -> None:
        """Ask members, of which some are left, and give what they name."""

        async def ask_some() -> None:
            while left:
                await self._ask_one(left.popleft(), take, ask_s)

        async with trio.open_nursery() as nursery:
            for _ in range(min(ASKED_AT_ONCE, len(left))):
                nursery.start_soon(ask_some)

    async def _ask_one(self, peer: str, take: Callable[[NamedJob, bytes, str], None], ask_s: float) -> None:
        try:
            answer = await self._network.call(peer, wire.JOBS, b"", timeout_s=ask_s)
            size_bytes = 0
            for raw in wire.unpack(answer, wire.MAX_JOBS):
                size_bytes += len(raw)
                if size_bytes > MOST_BYTES:
                    raise RecordError(f"the records of more than {MOST_BYTES} bytes are not looked at")
                job = await self._check(raw)
                if peer not in job.namers:
                    job.namers[:] = [*job.namers[1 - KEPT_NAMERS :], peer]
                take(job, raw, peer)
        except (P2PError, RecordError) as error:
            log.debug("%s names no training jobs, or no more: %s", peer, error)

    async def _check(self, raw: bytes) -> NamedJob:
        """Return the job of a record; raises `RecordError`."""
        key = hashlib.sha256(raw).digest()
        if (known := self._checked.get(key)) is None:
            record: TrainingRecord = await self._in_thread(require_record, raw, self._swarm)
            known = NamedJob.of(record)
        self._checked[key] = known
        self._checked.move_to_end(key)
        while len(self._checked) > KEPT_CHECKED:
            self._checked.popitem(last=False)
        return known
