"""The one place where a statement of a member is taken or refused. Pure, but for remembering what was verified."""

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

_SMALL_BYTES = 2048  # every statement that is worth something


@dataclass(frozen=True)
class SwarmTerms:
    """What every statement of a swarm must fit."""

    swarm: str
    n_blocks: int


def check_announcement(raw: bytes, terms: SwarmTerms, now_ms: int) -> Announcement:
    """The announcement in `raw`, or `EnvelopeError`.

    Refused are: what is malformed or not signed by whom it names, expired or from the future, of another swarm, or
    about blocks that the model does not have.
    """
    check_times(statement(raw), ANNOUNCEMENT_RULE.max_lifetime_ms, now_ms)
    said = _verified_announcement(raw)
    if said.swarm != terms.swarm:
        raise EnvelopeError(f"the announcement of {said.peer} belongs to another swarm")
    spans = [span for span in (said.span, said.growing, *said.held) if span is not None]
    if any(span.stop > terms.n_blocks for span in spans):
        raise EnvelopeError(f"{said.peer} announces blocks beyond the model's {terms.n_blocks}")
    return said


def check_suspicion(raw: bytes, terms: SwarmTerms, now_ms: int) -> Suspicion:
    """The suspicion in `raw`, or `EnvelopeError`."""
    check_times(statement(raw), SUSPICION_RULE.max_lifetime_ms, now_ms)
    said = _verified_suspicion(raw)
    if said.swarm != terms.swarm:
        raise EnvelopeError(f"the suspicion of {said.peer} belongs to another swarm")
    return said


def statement(raw: bytes) -> Envelope:
    """The fields of a statement whose form is right, or `EnvelopeError`; nothing is verified yet."""
    return _parsed(raw) if len(raw) <= _SMALL_BYTES else parse(raw)


# Most of what a node hears it has heard before, from another member.
_parsed = lru_cache(maxsize=2048)(parse)


# A statement comes from several members, and is verified once: what its bytes are worth never changes, only the
# time does, which is why it is read here as of the moment it was made.
@lru_cache(maxsize=2048)
def _verified_announcement(raw: bytes) -> Announcement:
    return read_announcement(raw, now_ms=statement(raw).sequence)


@lru_cache(maxsize=1024)
def _verified_suspicion(raw: bytes) -> Suspicion:
    return read_suspicion(raw, now_ms=statement(raw).sequence)
