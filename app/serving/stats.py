"""Figures of a block server and its sessions, as frozen values; `app.serving.block_server` counts them.

Rates are computed by readers, from two readings and the time between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SessionStats:
    """Figures of one session at this hop."""

    session: str  # the session's id in hex
    asker: str
    start: int  # blocks that it uses here
    stop: int
    tokens: int  # computed here, those of the prompt included
    age_s: float
    quiet_s: float  # since its asker or predecessor sent something
    step_s: float  # average device step of single tokens
    queue_s: float  # average wait of a token before its step
    bytes_in: int
    bytes_out: int
    rests: bool = False  # its reply has ended, its cache stays for a while


@dataclass(frozen=True)
class ServerStats:
    """Totals of a block server since it started, and its present load."""

    steps: int = 0
    rows: int = 0  # tokens that went through the hosted blocks
    urgent_steps: int = 0  # of single tokens that a reply waits for
    urgent_rows: int = 0
    busy_s: float = 0.0
    dropped_frames: int = 0
    bytes_in: int = 0  # hidden states received, headers included
    bytes_out: int = 0
    opened: int = 0  # sessions
    askers: int = 0  # different peers that opened them
    usual_step_s: float = 0.0
    queued_rows: int = 0
    queued_sessions: int = 0
    kv_free_tokens: int = 0
    kv_resting_tokens: int = 0  # held by resting sessions alone, which make way for others
    kv_total_tokens: int = 0
    reused_tokens: int = 0  # cached tokens that new sessions began with
    sessions: tuple[SessionStats, ...] = ()  # in use
    resting_sessions: int = 0
    served: Mapping[str, int] = field(default_factory=dict)  # tokens by asker

    @property
    def batch_rows(self) -> float:
        """Average number of sessions in an urgent step."""
        return self.urgent_rows / self.urgent_steps if self.urgent_steps else 0.0
