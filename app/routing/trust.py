"""How far this node trusts a peer: a number from what was seen of it, and words that say why. Pure; the clock is given.

What was seen is a list of `TrustEvent`s. Each fades with time, so that a peer that was mended, or wronged, comes back;
and agreement with others makes up for doubt, but not for a lie. Being slow, busy or gone is never taken for lying. Who
lied is worked out by `app.asker.audit`; that somebody below `DISTRUSTED` is not used at all is up to `app.asker.asker`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from app.core.canonical_json import Fields, canonical, check_version, decode_object
from app.core.errors import RecordError
from p2p.platform import write_private

HOUR_S = 3600.0
DISTRUSTED = 0.2  # below it, a peer is not used
KEPT = 24  # outcomes of one peer
REMEMBERED_PEERS = 1024

Verdict = Literal["agreed", "doubted", "lied", "failed"]

# After so long, an outcome counts half.
HALF_LIFE_S: dict[Verdict, float] = {
    "agreed": 24 * HOUR_S,
    "doubted": 12 * HOUR_S,
    "lied": 7 * 24 * HOUR_S,
    "failed": 0.25 * HOUR_S,
}
# What a whole, fresh outcome leaves of the score; and how low all of its kind together can bring it.
LEAVES: dict[Verdict, float] = {"doubted": 0.5, "lied": 0.05, "failed": 0.9}
FLOOR: dict[Verdict, float] = {"doubted": 0.25, "lied": 0.0, "failed": 0.5}
FORGIVES = 0.25  # of a doubt, by one agreement
PENALTY_S = 0.05  # a token, for a peer at half the full score


class TrustEvent(NamedTuple):
    """One thing that was seen of a peer."""

    at_s: float  # wall clock
    verdict: Verdict
    weight: float = 1.0  # a doubt that others share weighs less
    note: str = ""


@dataclass(frozen=True)
class TrustScore:
    """Where a peer stands with this node."""

    score: float = 1.0  # 0 to 1
    why: str = ""

    @property
    def trusted(self) -> bool:
        """Whether it may be used."""
        return self.score >= DISTRUSTED

    @property
    def penalty_s(self) -> float:
        """Seconds a token that a route may take longer in order to go without it."""
        return PENALTY_S * (1 / max(self.score, 0.01) - 1)


def standing(outcomes: Iterable[TrustEvent], now_s: float) -> TrustScore:
    """What all that was seen of a peer amounts to."""
    sums: dict[Verdict, float] = {"agreed": 0.0, "doubted": 0.0, "lied": 0.0, "failed": 0.0}
    latest: dict[Verdict, TrustEvent] = {}
    for outcome in outcomes:
        age_s = max(now_s - outcome.at_s, 0.0)
        sums[outcome.verdict] += outcome.weight * 0.5 ** (age_s / HALF_LIFE_S[outcome.verdict])
        if outcome.verdict not in latest or outcome.at_s >= latest[outcome.verdict].at_s:
            latest[outcome.verdict] = outcome
    sums["doubted"] = max(sums["doubted"] - FORGIVES * sums["agreed"], 0.0)
    score = 1.0
    for verdict, leaves in LEAVES.items():
        score *= max(leaves ** sums[verdict], FLOOR[verdict])
    if score > 0.99:
        return TrustScore()
    worst = min(LEAVES, key=lambda verdict: LEAVES[verdict] ** sums[verdict])
    return TrustScore(round(score, 3), f"{latest[worst].note}, {_ago(now_s - latest[worst].at_s)}")


def added(outcomes: Sequence[TrustEvent], outcome: TrustEvent) -> tuple[TrustEvent, ...]:
    """With one more outcome, and the least telling of the old ones forgotten where there are too many."""
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
_MAX_FILE_BYTES = 16 * 2**20
_MAX_NOTE_CHARS = 400


class TrustBook:
    """The outcomes of all peers that were ever used or audited; without a path, for this process alone."""

    def __init__(self, path: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        self._path, self._clock = path, clock
        self._outcomes: dict[str, tuple[TrustEvent, ...]] = {}
        self._changed = False  # since it was last saved
        if path is not None and path.exists():
            self._load(path)

    def note(self, peer: str, verdict: Verdict, note: str, weight: float = 1.0) -> None:
        """Something was seen of a peer."""
        outcome = TrustEvent(self._clock(), verdict, weight, note[:_MAX_NOTE_CHARS])
        # The latest stand last, so that those of whom nothing was seen for longest are forgotten first.
        self._outcomes[peer] = added(self._outcomes.pop(peer, ()), outcome)
        if len(self._outcomes) > REMEMBERED_PEERS:
            del self._outcomes[min(self._outcomes, key=self._worth)]
        self._changed = True

    def standing(self, peer: str) -> TrustScore:
        """How far a peer is trusted now."""
        outcomes = self._outcomes.get(peer)
        return standing(outcomes, self._clock()) if outcomes else TrustScore()

    def agreed(self, peer: str) -> int:
        """How often a peer was audited and agreed with others."""
        return sum(outcome.verdict == "agreed" for outcome in self._outcomes.get(peer, ()))

    def _worth(self, peer: str) -> tuple[bool, float]:
        """Who is forgotten first: never a liar before others, else who was seen last longest ago."""
        outcomes = self._outcomes[peer]
        return any(outcome.verdict == "lied" for outcome in outcomes), outcomes[-1].at_s

    # --- the file -----------------------------------------------------------------------------------------------------

    def unsaved(self) -> bytes | None:
        """What is to be written, or None where nothing has changed."""
        if self._path is None or not self._changed:
            return None
        self._changed = False
        peers = {peer: [list(outcome) for outcome in outcomes] for peer, outcomes in self._outcomes.items()}
        return canonical({"version": VERSION, "peers": peers}) + b"\n"

    def write(self, document: bytes) -> None:
        """Replace the file; a failure is no reason to stop a node."""
        assert self._path is not None, "only what has a place is saved"
        try:
            write_private(self._path, document)
        except OSError as error:
            log.warning("%s cannot be written: %s", self._path, error.strerror or error)

    def _load(self, path: Path) -> None:
        try:
            fields = decode_object(path.read_bytes(), str(path), max_bytes=_MAX_FILE_BYTES)
            check_version(fields, "version", VERSION)
            peers = fields.inner("peers")
            for peer in list(peers.values)[-REMEMBERED_PEERS:]:
                outcomes = peers.items(peer, KEPT)
                self._outcomes[peer] = tuple(_outcome(peers, peer, item) for item in outcomes)
        except (OSError, RecordError) as error:
            log.warning("what was seen of peers is forgotten: %s", error)
            self._outcomes.clear()


def _outcome(fields: Fields, peer: str, item: object) -> TrustEvent:
    match item:
        case [int() | float() as at_s, str() as verdict, int() | float() as weight, str() as note]:
            if verdict in get_args(Verdict) and len(note) <= _MAX_NOTE_CHARS and 0 <= weight <= 1:
                return TrustEvent(float(at_s), verdict, float(weight), note)  # type: ignore[arg-type]
    fields.refuse(peer, "outcomes of the form [time, verdict, weight, note]")
