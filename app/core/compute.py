"""What serving needs of an engine, declared by its consumer: bytes in, bytes out, no tensors.

`engine.session_runner` implements `BlockRunner` and `engine.swarm_ends` implements `ReplyEnds` without knowing this
file. Both are plain synchronous objects; who calls them and on which thread is decided here and by the callers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

T = TypeVar("T")


class StepWork(NamedTuple):
    """One session's share of a device step: `rows` tokens, the first at `position`, through blocks start to stop."""

    session: bytes
    start: int
    stop: int
    position: int
    rows: int
    data: memoryview  # rows x hidden numbers of format `dtype`
    dtype: str
    wire: str  # the format wanted back; empty: the device's own


class StepOutput(Protocol):
    """What one session's rows became."""

    @property
    def data(self) -> bytes: ...
    @property
    def dtype(self) -> str: ...


class BlockRunner(Protocol):
    """Hosted blocks on one device, with a cache for sessions; never called from two threads at once."""

    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def context_length(self) -> int: ...
    @property
    def kv_free_tokens(self) -> int: ...
    @property
    def kv_total_tokens(self) -> int: ...
    def open(self, session: bytes, tokens: int) -> None:
        """Lease cache for a session of this many tokens; raises `engine.errors.CacheFull` where there is no room."""

    def close(self, session: bytes) -> None:
        """Give a session's cache back; unknown ones are fine."""

    def truncate(self, session: bytes, length: int) -> None:
        """Forget a session's tokens from position `length` on."""

    def step(self, work: Sequence[StepWork]) -> Sequence[StepOutput]:
        """Advance all these sessions, or raise `engine.errors.EngineError` and advance none."""


class TextPiece(Protocol):
    """One more token of a reply: the text that it completes (maybe none), and its embedding unless it is the last."""

    @property
    def token_id(self) -> int: ...
    @property
    def text(self) -> str: ...
    @property
    def finish_reason(self) -> str | None: ...
    @property
    def embedding(self) -> bytes: ...


class TokenChoice(NamedTuple):
    """A reply that waits for its next token, with the last block's output behind its last one."""

    reply: Any  # what `ReplyEnds.begin` gave
    hidden: memoryview  # of several rows the last one counts
    dtype: str


class ReplyEnds(Protocol):
    """The two ends of a model, run by the asker: tokens to hidden states, hidden states to tokens."""

    @property
    def n_blocks(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def context_length(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    def embed(self, token_ids: Sequence[int]) -> bytes:
        """Hidden states of these tokens in format `dtype`."""

    def begin(self, prompt_ids: Sequence[int], settings: Any) -> Any:
        """A new reply to this prompt."""

    def choose(self, choices: Sequence[TokenChoice]) -> Sequence[TextPiece]:
        """The next token of each of these replies; they share one pass through the head."""

    def deviation(self, one: Sequence[Any], other: Sequence[Any]) -> tuple[float, float]:
        """How far hidden states (`data`, `dtype`) lie apart: mean relative distance, and common factor less 1."""


class Device(Protocol):
    """Where synchronous work runs, one piece at a time."""

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Run `function(*args)` and wait for its result."""
