"""Which swarm a name means, from the records that members sent: pure, and never a guess.

All records of one name and one model are the same swarm, whoever signed them; the earliest one counts, and among
equals the smallest creator. Records of one name and *different* models are a conflict, which only the person can
settle. A swarm that was joined before stays what it was then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from app.core.errors import NameConflict, UnknownSwarm
from app.swarm.names import SwarmName, pinned
from app.swarm.records import SwarmRecord

_LISTED = 8


@dataclass(frozen=True)
class NameCandidate:
    """One model that a name may mean, its record, and how many members said so."""

    record: SwarmRecord
    votes: int


@dataclass(frozen=True)
class Resolution:
    """The swarms that fit what was asked: one is the answer, several are a conflict, none is unknown."""

    wanted: SwarmName
    candidates: tuple[NameCandidate, ...]

    def one(self) -> SwarmRecord:
        """The swarm, or `NameConflict` with the list, or `UnknownSwarm`."""
        if len(self.candidates) == 1:
            return self.candidates[0].record
        if not self.candidates:
            raise UnknownSwarm(
                f"nobody that could be asked knows the swarm {self.wanted}: "
                "check the name, or ask a member for an invite (`shoal invite`)"
            )
        hashes = tuple(candidate.record.model_hash for candidate in self.candidates)
        shown = [
            f"{pinned(self.wanted.name, candidate.record.model_hash, hashes)} "
            f"(by {candidate.record.creator}, {candidate.votes} member{'s' * (candidate.votes != 1)})"
            for candidate in self.candidates[:_LISTED]
        ]
        more = len(self.candidates) - len(shown)
        tail = f", and {more} more" if more else ""
        raise NameConflict(f"several swarms are called {self.wanted}; join one of: {', '.join(shown)}{tail}")


def resolve(
    wanted: SwarmName, heard: Mapping[str, Iterable[SwarmRecord]], remembered: SwarmRecord | None = None
) -> Resolution:
    """What `wanted` means; `heard` holds the (verified) records that each peer sent.

    `remembered` is the record this node pinned when it first joined a swarm of this name: it wins over a bare name's
    newcomers, and is left aside where another model is pinned.
    """
    best: dict[str, SwarmRecord] = {}
    votes: Counter[str] = Counter()
    for records in heard.values():
        fitting = [one for one in records if one.name == wanted.name and wanted.allows(one.model_hash)]
        votes.update({record.model_hash for record in fitting})  # a peer counts once for each model
        for record in fitting:
            known = best.get(record.model_hash)
            if known is None or _rank(record) < _rank(known):
                best[record.model_hash] = record
    if remembered is not None and remembered.name == wanted.name and wanted.allows(remembered.model_hash):
        best = {remembered.model_hash: remembered}
    candidates = [NameCandidate(record, votes[model_hash]) for model_hash, record in best.items()]
    candidates.sort(key=lambda candidate: (-candidate.votes, candidate.record.model_hash))
    return Resolution(wanted, tuple(candidates))


def _rank(record: SwarmRecord) -> tuple[int, str]:
    return record.created_ms, record.creator
