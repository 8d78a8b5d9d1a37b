"""Checks signed statements of members; no other module accepts or rejects one. Pure apart from caches of results.

The formats themselves are in `app.swarm.records`; this module adds the rules of one swarm (`SwarmTerms`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from app.swarm.records import (
    ANNOUNCEMENT_RULE,
    SUSPICION_RULE,
    Announcement,
    Suspicion,
    read_announcement,
    read_suspicion,
)
from p2p.envelope import Envelope, check_times, parse
from p2p.errors import EnvelopeError

_SMALL_BYTES = 2048  # valid announcements and suspicions are smaller; nothing larger is cached


@dataclass(frozen=True)
class SwarmTerms:
    """Facts of a swarm that its statements must match: its id, and the number of blocks of its model."""

    swarm: str
    n_blocks: int


def check_announcement(raw: bytes, terms: SwarmTerms, now_ms: int) -> Announcement:
    """Return the announcement in `raw`.

    Raises `EnvelopeError` if it is malformed, not signed by the peer that it names, expired, from the future, of
    another swarm, or about blocks that the model does not have.
    """
    check_times(statement(raw), ANNOUNCEMENT_RULE.max_lifetime_ms, now_ms)
    announcement = _verified_announcement(raw)
    if announcement.swarm != terms.swarm:
        raise EnvelopeError(f"the announcement of {announcement.peer} belongs to another swarm")
    spans = [span for span in (announcement.span, announcement.growing, *announcement.held) if span is not None]
    if any(span.stop > terms.n_blocks for span in spans):
        raise EnvelopeError(f"{announcement.peer} announces blocks beyond the model's {terms.n_blocks}")
    return announcement


def check_suspicion(raw: bytes, terms: SwarmTerms, now_ms: int) -> Suspicion:
    """Return the suspicion in `raw`; raises `EnvelopeError` for the same faults as `check_announcement`."""
    check_times(statement(raw), SUSPICION_RULE.max_lifetime_ms, now_ms)
    suspicion = _verified_suspicion(raw)
    if suspicion.swarm != terms.swarm:
        raise EnvelopeError(f"the suspicion of {suspicion.peer} belongs to another swarm")
    return suspicion


def statement(raw: bytes) -> Envelope:
    """Return the envelope in `raw` without verifying its signature; raises `EnvelopeError` if it is malformed."""
    return _parsed(raw) if len(raw) <= _SMALL_BYTES else parse(raw)


# The same statement arrives from several members, so most calls hit the cache.
_parsed = lru_cache(maxsize=2048)(parse)


# Verified once for each distinct statement: a signature's validity never changes. The age does, so it is left out here
# (the statement is read as of the moment when it was made) and checked by the callers.
@lru_cache(maxsize=2048)
def _verified_announcement(raw: bytes) -> Announcement:
    return read_announcement(raw, now_ms=statement(raw).sequence)


@lru_cache(maxsize=1024)
def _verified_suspicion(raw: bytes) -> Suspicion:
    return read_suspicion(raw, now_ms=statement(raw).sequence)
