"""Whom an island greets in each period: those of its job, and by lot a few others of the swarm. Pure.

It knows peers and times. The island says hello to those chosen, and reports whether they answered for the job.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from p2p.rate_limit import backoff_s

MOST_WAITING = 32  # islands that are there but not expected, in a period: those not heard for longest
MOST_AWAY = 16  # acquaintances that were not heard lately, in a period
STRANGERS, STRANGERS_ALONE = 8, 16  # others of the swarm in a period; while nobody of the job is heard
MOST_FIRST = 64  # acquaintances that an island begins with
NAMED = 4  # others of the job that a hello or its answer names
MOST_NAMED = 16  # that are read
# How long whoever does not know the job is not asked again, and who did not answer; doubled each time.
UNKNOWN_S, UNKNOWN_MOST_S = 180.0, 3600.0
SILENT_S, SILENT_MOST_S = 5.0, 300.0


@dataclass(frozen=True)
class Heard:
    """What another island said of itself last."""

    at: float
    round: int
    head: bytes
    others: tuple[str, ...] = ()  # of the job, as it says
    is_known: bool = False  # it once named a round that is in the log here


class JobPeers(NamedTuple):
    """The peers of a job as an island knows them now; itself is not among them."""

    expected: Collection[str]  # in this round
    recent: Collection[str]  # that took part in one of the last rounds
    alive: Collection[str]
    heard: Mapping[str, Heard]
    swarm: Collection[str]  # all other members of the swarm


class _Vain(NamedTuple):
    """Questions in a row to which a peer did not answer for the job."""

    times: int
    is_unknown: bool  # the last time: it answered that it does not know the job
    until: float  # when it may be asked again


class Greetings:
    """Chooses whom to greet, so that all of a job meet and the rest of a swarm, however large, is asked seldom."""

    def __init__(self, first: Iterable[str], rng: random.Random) -> None:
        """`first` are peers that had the job when this node joined it."""
        self._first = frozenset([*first][:MOST_FIRST])
        self._rng = rng
        self._vain: dict[str, _Vain] = {}

    def answered(self, peer: str) -> None:
        """Note that a peer spoke for the job."""
        self._vain.pop(peer, None)

    def failed(self, peer: str, now: float, *, is_unknown: bool) -> None:
        """Note that a peer did not answer, or that it does not know the job."""
        before = self._vain.get(peer)
        times = 1 + (before.times if before is not None and before.is_unknown == is_unknown else 0)
        first_s, most_s = (UNKNOWN_S, UNKNOWN_MOST_S) if is_unknown else (SILENT_S, SILENT_MOST_S)
        self._vain[peer] = _Vain(times, is_unknown, now + backoff_s(first_s, times, most_s))

    def have_all_answered(self, swarm: Collection[str], heard: Collection[str], now: float) -> bool:
        """True if every one of these members has said how far it is, or that it does not know the job."""
        unheard = {*swarm}.difference(heard)
        return bool(swarm) and all(self._knows_nothing(peer, now) for peer in unheard)

    def due(self, now: float, peers: JobPeers) -> list[str]:
        """Return whom to greet now.

        They are those expected in this round, some that wait for a place, some acquaintances that are away, and a few
        others of the swarm: up to half of these are peers that islands of the job name, or that were heard once. Such a
        name is asked once, so that a liar's names cost little; after that it waits its turn like all who were asked in
        vain, which come after those that were not asked yet.
        """
        away = ({*peers.recent} | self._first) - {*peers.alive} - {*peers.expected}
        self._vain = {peer: one for peer, one in self._vain.items() if peer in peers.swarm or peer in away}
        waiting = sorted({*peers.alive} - {*peers.expected}, key=lambda peer: peers.heard[peer].at)[:MOST_WAITING]
        known = {*peers.expected, *peers.alive} | away
        named = {name for one in peers.heard.values() for name in one.others} | peers.heard.keys()
        hinted = (named & {*peers.swarm}) - known - self._vain.keys()
        most = STRANGERS if peers.alive else STRANGERS_ALONE
        asked = self._drawn(hinted, most // 2)
        strangers = {*peers.swarm} - known - {*asked}
        asked += self._drawn(strangers - self._vain.keys(), most - len(asked))
        again = [peer for peer in strangers & self._vain.keys() if self._vain[peer].until <= now]
        asked += sorted(again, key=lambda peer: (self._vain[peer].until, peer))[: most - len(asked)]
        absent = {peer for peer in away if not self._knows_nothing(peer, now)}
        return [*peers.expected, *waiting, *self._drawn(absent, MOST_AWAY), *asked]

    def named(self, others: Collection[str]) -> list[str]:
        """Return a few of those that take part and are there, to name them to another peer."""
        return sorted(self._drawn(others, NAMED))

    def _drawn(self, peers: Collection[str], most: int) -> list[str]:
        return self._rng.sample(sorted(peers), min(most, len(peers)))

    def _knows_nothing(self, peer: str, now: float) -> bool:
        """True if a peer said lately that it does not know the job."""
        return peer in self._vain and self._vain[peer].is_unknown and self._vain[peer].until > now
