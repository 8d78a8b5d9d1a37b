"""Trust in peers: a score computed from what this node observed of each, with the reason in words.

Observations are `TrustEvent`s. Each fades with time, so that a peer that was fixed, or wrongly accused, recovers.
Agreement with other peers makes up for doubts, but not for a lie. Many doubts exclude a peer as a lie does, for a
shorter time. Being slow, busy or gone never counts as lying.
`app.asker.audit` finds out who lied; `app.routing.planner` avoids peers below `DISTRUSTED`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from app.core.canonical_json import Fields, canonical, check_version, decode_object
from app.core.errors import RecordError
from p2p.platform import write_private

HOUR_S = 3600.0
DISTRUSTED = 0.2  # a peer with a lower score is not used
KEPT = 24  # events per peer
REMEMBERED_PEERS = 1024

Verdict = Literal["agreed", "doubted", "lied", "failed"]

# After this long an event counts half.
HALF_LIFE_S: dict[Verdict, float] = {
    "agreed": 24 * HOUR_S,
    "doubted": 12 * HOUR_S,
    "lied": 7 * 24 * HOUR_S,
    "failed": 0.25 * HOUR_S,
}
# The factor of one fresh event of full weight on the score, and the lowest factor of all events of a verdict together.
LEAVES: dict[Verdict, float] = {"doubted": 0.5, "lied": 0.05, "failed": 0.9}
# Doubts alone can exclude a peer: one that recognises audits and lies in replies only is never caught in a lie.
FLOOR: dict[Verdict, float] = {"doubted": 0.1, "lied": 0.0, "failed": 0.5}
FORGIVES = 0.25  # part of a doubt that one agreement cancels
PENALTY_S = 0.05  # seconds per token for a peer with score 0.5


class TrustEvent(NamedTuple):
    """One observation of a peer."""

    at_s: float  # wall clock
    verdict: Verdict
    weight: float = 1.0  # a doubt that several peers share weighs less
    note: str = ""


@dataclass(frozen=True)
class TrustScore:
    """Trust in a peer, and the reason if it is not full."""

    score: float = 1.0  # 0 to 1
    why: str = ""

    @property
    def trusted(self) -> bool:
        """True if the peer may be used."""
        return self.score >= DISTRUSTED

    @property
    def penalty_s(self) -> float:
        """Seconds per token added to the peer's cost in the route search."""
        return PENALTY_S * (1 / max(self.score, 0.01) - 1)


def _faded(outcomes: Iterable[TrustEvent], now_s: float) -> dict[Verdict, float]:
    """Sum up the weights of events of each verdict, less the older they are."""
    sums: dict[Verdict, float] = {"agreed": 0.0, "doubted": 0.0, "lied": 0.0, "failed": 0.0}
    for outcome in outcomes:
        age_s = max(now_s - outcome.at_s, 0.0)
        sums[outcome.verdict] += outcome.weight * 0.5 ** (age_s / HALF_LIFE_S[outcome.verdict])
    return sums


def standing(outcomes: Iterable[TrustEvent], now_s: float) -> TrustScore:
    """Compute a peer's score from its events."""
    outcomes = tuple(outcomes)
    sums = _faded(outcomes, now_s)
    latest: dict[Verdict, TrustEvent] = {}
    for outcome in outcomes:
        if outcome.verdict not in latest or outcome.at_s >= latest[outcome.verdict].at_s:
            latest[outcome.verdict] = outcome
    sums["doubted"] = net_doubt(sums)
    score = 1.0
    for verdict, leaves in LEAVES.items():
        score *= max(leaves ** sums[verdict], FLOOR[verdict])
    if score > 0.99:
        return TrustScore()
    worst = min(LEAVES, key=lambda verdict: LEAVES[verdict] ** sums[verdict])
    return TrustScore(round(score, 3), f"{latest[worst].note}, {_ago(now_s - latest[worst].at_s)}")


def net_doubt(sums: Mapping[Verdict, float]) -> float:
    """The doubts that agreement with others has not made up for."""
    return max(sums["doubted"] - FORGIVES * sums["agreed"], 0.0)


def added(outcomes: Sequence[TrustEvent], outcome: TrustEvent) -> tuple[TrustEvent, ...]:
    """Return the events with one more; above `KEPT`, the oldest of the least important verdict is dropped."""
    kept = [*outcomes, outcome]
    if len(kept) > KEPT:
        order: tuple[Verdict, ...] = ("failed", "agreed", "doubted", "lied")
        kept.remove(min(kept[:-1], key=lambda old: (order.index(old.verdict), old.at_s)))
    return tuple(kept)


def _ago(age_s: float) -> str:
    for unit_s, name in ((24 * HOUR_S, "day"), (HOUR_S, "hour"), (60.0, "minute")):
        if age_s >= unit_s:
            count = int(age_s / unit_s)
            return f"{count} {name}{'s' if count > 1 else ''} ago"
    return "just now"


log = logging.getLogger("shoal.trust")

VERSION = 1
_MAX_FILE_BYTES = 16 * 2**20  # of the trust file
_MAX_NOTE_CHARS = 400


class TrustBook:
    """The events of all peers that were used or audited; kept in a file, or in memory only without a path."""

    def __init__(self, path: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        self._path, self._clock = path, clock
        self._outcomes: dict[str, tuple[TrustEvent, ...]] = {}
        self._changed = False  # since the last save
        if path is not None and path.exists():
            self._load(path)

    def note(self, peer: str, verdict: Verdict, note: str, weight: float = 1.0) -> None:
        """Add an event about a peer, at the present time."""
        outcome = TrustEvent(self._clock(), verdict, weight, note[:_MAX_NOTE_CHARS])
        # Reinsert the peer at the end: saved files are cut from the front, at the peers unseen for longest.
        self._outcomes[peer] = added(self._outcomes.pop(peer, ()), outcome)
        if len(self._outcomes) > REMEMBERED_PEERS:
            del self._outcomes[min(self._outcomes, key=self._drop_order)]
        self._changed = True

    def standing(self, peer: str) -> TrustScore:
        """Return a peer's score now; a peer without events is fully trusted."""
        outcomes = self._outcomes.get(peer)
        return standing(outcomes, self._clock()) if outcomes else TrustScore()

    def standings(self, peers: Iterable[str]) -> dict[str, TrustScore]:
        """Return the scores now of those peers that there are events about; the others are fully trusted."""
        now_s = self._clock()
        return {peer: standing(self._outcomes[peer], now_s) for peer in peers if peer in self._outcomes}

    def doubt(self, peer: str) -> float:
        """Number of doubts about a peer that still count; a doubt that several peers share counts in part."""
        return net_doubt(_faded(self._outcomes.get(peer, ()), self._clock()))

    def agreed(self, peer: str) -> int:
        """Number of remembered audits in which a peer agreed with others."""
        return sum(outcome.verdict == "agreed" for outcome in self._outcomes.get(peer, ()))

    def _drop_order(self, peer: str) -> tuple[bool, float]:
        """Sort key for dropping peers: those that never lied first, then those unseen for longest."""
        outcomes = self._outcomes[peer]
        return any(outcome.verdict == "lied" for outcome in outcomes), outcomes[-1].at_s

    # --- the file -----------------------------------------------------------------------------------------------------

    def unsaved(self) -> bytes | None:
        """Return the file's new content, or None if nothing changed; counts as saved from then on."""
        if self._path is None or not self._changed:
            return None
        self._changed = False
        peers = {peer: [list(outcome) for outcome in outcomes] for peer, outcomes in self._outcomes.items()}
        return canonical({"version": VERSION, "peers": peers}) + b"\n"

    def write(self, document: bytes) -> None:
        """Replace the file; a failure is only logged."""
        assert self._path is not None, "a book without a path is not saved"
        try:
            write_private(self._path, document)
        except OSError as error:
            log.warning(
                "%s cannot be written, so a restart forgets recent trust events: %s",
                self._path,
                error.strerror or error,
            )

    def _load(self, path: Path) -> None:
        try:
            fields = decode_object(path.read_bytes(), str(path), max_bytes=_MAX_FILE_BYTES)
            check_version(fields, "version", VERSION)
            peers = fields.inner("peers")
            for peer in list(peers.values)[-REMEMBERED_PEERS:]:
                outcomes = peers.items(peer, KEPT)
                self._outcomes[peer] = tuple(_outcome(peers, peer, item) for item in outcomes)
        except (OSError, RecordError) as error:
            log.warning("the trust history cannot be read and starts empty: %s", error)
            self._outcomes.clear()


def _outcome(fields: Fields, peer: str, item: object) -> TrustEvent:
    match item:
        case [int() | float() as at_s, str() as verdict, int() | float() as weight, str() as note]:
            if verdict in get_args(Verdict) and len(note) <= _MAX_NOTE_CHARS and 0 <= weight <= 1:
                return TrustEvent(float(at_s), verdict, float(weight), note)  # type: ignore[arg-type]
    fields.refuse(peer, "outcomes of the form [time, verdict, weight, note]")
