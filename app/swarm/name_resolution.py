"""Decides which swarm a name means, from the records that peers sent; never guesses. Pure.

All records of one name and one model are the same swarm, whoever signed them; the one that most peers sent is used,
then the earliest. Records of one name and *different* models are a conflict that only the user
can resolve. `app.membership.swarm_search` collects the records; a name of a swarm that this node has saved is not
resolved again (`app.joining.targets`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from app.core.errors import NameConflict, UnknownSwarm
from app.swarm.names import PIN_DIGITS, SwarmName, pinned
from app.swarm.records import SwarmRecord

_LISTED = 8  # candidates in the message of a conflict


@dataclass(frozen=True)
class NameCandidate:
    """A swarm that a name may mean, and the number of peers that sent a record of it."""

    record: SwarmRecord
    votes: int


@dataclass(frozen=True)
class Resolution:
    """The swarms that match a name, those with the most votes first."""

    wanted: SwarmName
    candidates: tuple[NameCandidate, ...]

    def one(self) -> SwarmRecord:
        """Return the only match; raises `NameConflict`, which lists them, for several and `UnknownSwarm` for none."""
        if len(self.candidates) == 1:
            return self.candidates[0].record
        if not self.candidates:
            raise UnknownSwarm(
                f"no reachable peer knows the swarm {_shown(self.wanted)}: "
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
        raise NameConflict(f"several swarms are called {_shown(self.wanted)}; join one of: {', '.join(shown)}{tail}")


def _shown(wanted: SwarmName) -> str:
    """A name as a person reads it: with `PIN_DIGITS` digits of its pin."""
    return wanted.name if wanted.pin is None else f"{wanted.name}#{wanted.pin[:PIN_DIGITS]}"


def resolve(wanted: SwarmName, records_by_peer: Mapping[str, Iterable[SwarmRecord]]) -> Resolution:
    """Match `wanted` against the verified records that each peer sent.

    Of several records of one swarm, a public one counts before a private one, then the one that most peers sent, then
    the earliest. The creation time and the private mark are the signer's own claims, so they alone must not decide.
    """
    votes: Counter[str] = Counter()
    record_votes: Counter[bytes] = Counter()
    found: dict[bytes, SwarmRecord] = {}
    for records in records_by_peer.values():
        fitting = [one for one in records if one.name == wanted.name and wanted.allows(one.model_hash)]
        if wanted.pin is not None:  # one model fits a pin: a peer that names several lies
            fitting = [one for one in fitting if one.model_hash == fitting[0].model_hash]
        votes.update({record.model_hash for record in fitting})  # a peer counts once for each model
        record_votes.update({record.raw for record in fitting})
        found |= {record.raw: record for record in fitting}
    best: dict[str, SwarmRecord] = {}
    for record in sorted(
        found.values(), key=lambda one: (one.private, -record_votes[one.raw], one.created_ms, one.creator)
    ):
        best.setdefault(record.model_hash, record)
    candidates = [NameCandidate(record, votes[model_hash]) for model_hash, record in best.items()]
    candidates.sort(key=lambda candidate: (-candidate.votes, candidate.record.model_hash))
    return Resolution(wanted, tuple(candidates))
