"""Figures of an asker: its replies and their routes, totals of tokens asked for, and audits.

Values only; `app.asker.asker` fills them. Times that were not measured are None.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class HopStats:
    """One hop of a reply's route, and the time that a token spends there."""

    peer: str
    start: int
    stop: int
    link_s: float | None = None  # one way into it
    compute_s: float | None = None  # an average step, as the hop reports it
    queue_s: float | None = None  # and the wait before it
    host_s: float | None = None  # and sending its output on


@dataclass(frozen=True)
class AskedSession:
    """One reply: being written now, or the latest one that ended."""

    id: str  # the session's, in hex
    prompt_tokens: int = 0
    tokens: int = 0  # written so far
    prompt_done: int | None = None  # prompt tokens that went through all blocks; None: unknown, or all of them
    age_s: float = 0.0
    tokens_per_s: float = 0.0
    recoveries: int = 0
    longest_gap_s: float = 0.0
    route: tuple[HopStats, ...] = ()
    return_s: float | None = None  # one way from the last hop back
    route_s: float | None = None  # an average token's time on the route, measured
    ends_s: float | None = None  # and on this node: embedding, head and sampling
    host_s: float | None = None  # and on this node: sending the token, coming back to the answer, passing the text on
    token_s: float | None = None  # from one token to the next, measured
    prompt_s: float | None = None  # until the hops had read the prompt, measured; None if one of them was lost
    cached_tokens: int = 0  # of the prompt, that the hops had cached
    guessed_tokens: int = 0
    accepted_tokens: int = 0  # guesses that were right


@dataclass(frozen=True)
class AuditCounts:
    """Totals of auditing; an audit whose formats differ too much for a comparison has neither passed nor failed."""

    sessions: int = 0
    tokens: int = 0
    passed: int = 0
    failed: int = 0  # audits whose answers differed from the reply's


@dataclass(frozen=True)
class AskerStats:
    """Figures of one asker."""

    sessions: tuple[AskedSession, ...] = ()  # being written now
    latest: AskedSession | None = None  # the last one that ended
    replies: int = 0  # begun
    asked_tokens: int = 0  # written by all replies
    prompt_tokens: int = 0  # of the prompts that were read
    cached_tokens: int = 0  # of these, that the hops had cached
    kept_sessions: int = 0  # whose cache rests at their hops now
    kept_tokens: int = 0
    audits: AuditCounts = field(default_factory=AuditCounts)
    guessed_tokens: int = 0  # sent through the hops along with others
    accepted_tokens: int = 0  # guesses that were right
    draft_model: str = ""  # that guesses now; empty: none
