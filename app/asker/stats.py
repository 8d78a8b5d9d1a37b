"""What can be seen of an asker at one moment: its replies, their routes, and what it has asked and audited so far.

Values only; `app.asker.asker` fills them, whoever shows them reads them. Times that nobody measured are None.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class HopStats:
    """One hop of a reply's route, and where a token's time goes there."""

    peer: str
    start: int
    stop: int
    link_s: float | None = None  # one way into it
    compute_s: float | None = None  # a usual step, as the hop tells it
    queue_s: float | None = None  # and the wait for it


@dataclass(frozen=True)
class AskedSession:
    """One reply that is being written, or the latest one that was."""

    id: str  # the session's, in hex
    prompt_tokens: int = 0
    tokens: int = 0  # written so far
    prompt_done: int | None = None  # tokens of it that went through all blocks; None: not told, or the reply is begun
    age_s: float = 0.0
    tokens_per_s: float = 0.0
    recoveries: int = 0
    longest_gap_s: float = 0.0
    route: tuple[HopStats, ...] = ()
    return_s: float | None = None  # one way from the last hop back
    route_s: float | None = None  # a usual token's time on the route, measured
    ends_s: float | None = None  # and at this end: embedding, head and sampling


@dataclass(frozen=True)
class AuditCounts:
    """How much of the traffic was auditing, and what it found."""

    sessions: int = 0
    tokens: int = 0
    passed: int = 0
    failed: int = 0  # answers that differed from what others made of the same tokens


@dataclass(frozen=True)
class AskerStats:
    """All of it."""

    sessions: tuple[AskedSession, ...] = ()  # being written now
    latest: AskedSession | None = None  # the last one that ended
    replies: int = 0  # begun
    asked_tokens: int = 0  # written by all replies
    prompt_tokens: int = 0
    audits: AuditCounts = field(default_factory=AuditCounts)
