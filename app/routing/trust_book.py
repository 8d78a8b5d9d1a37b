"""What this node has seen of its peers, across restarts: `trust.json` in its home folder.

A damaged file counts as none: trust is earned again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args

from app.core.canonical_json import Fields, canonical, check_version, decode_object
from app.core.errors import RecordError
from app.routing.trust import KEPT, REMEMBERED_PEERS, Outcome, Standing, Verdict, added, standing
from p2p.platform import write_private

log = logging.getLogger("shoal.trust")

VERSION = 1
_MAX_FILE_BYTES = 16 * 2**20
_MAX_NOTE_CHARS = 400


class TrustBook:
    """The outcomes of all peers that were ever used or audited; without a path, for this process alone."""

    def __init__(self, path: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        self._path, self._clock = path, clock
        self._outcomes: dict[str, tuple[Outcome, ...]] = {}
        self._changed = False  # since it was last saved
        if path is not None and path.exists():
            self._load(path)

    def note(self, peer: str, verdict: Verdict, note: str, weight: float = 1.0) -> None:
        """Something was seen of a peer."""
        outcome = Outcome(self._clock(), verdict, weight, note[:_MAX_NOTE_CHARS])
        # The latest stand last, so that those of whom nothing was seen for longest are forgotten first.
        self._outcomes[peer] = added(self._outcomes.pop(peer, ()), outcome)
        if len(self._outcomes) > REMEMBERED_PEERS:
            del self._outcomes[min(self._outcomes, key=self._worth)]
        self._changed = True

    def standing(self, peer: str) -> Standing:
        """How far a peer is trusted now."""
        outcomes = self._outcomes.get(peer)
        return standing(outcomes, self._clock()) if outcomes else Standing()

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


def _outcome(fields: Fields, peer: str, item: object) -> Outcome:
    match item:
        case [int() | float() as at_s, str() as verdict, int() | float() as weight, str() as note]:
            if verdict in get_args(Verdict) and len(note) <= _MAX_NOTE_CHARS and 0 <= weight <= 1:
                return Outcome(float(at_s), verdict, float(weight), note)  # type: ignore[arg-type]
    fields.refuse(peer, "outcomes of the form [time, verdict, weight, note]")
