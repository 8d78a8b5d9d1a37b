"""The interface that the application needs of an engine: bytes in, bytes out, no tensors.

`engine.session_runner` implements `BlockRunner` and `engine.swarm_ends` implements `ReplyEnds` without importing this
file. Both are synchronous and not thread-safe; callers run them through a `Device`, which `app.core.device_thread`
implements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, overload

from app.core.awake import UnderWay
from app.core.pieces import Pieces

T = TypeVar("T")


class StepWork(NamedTuple):
    """One session's share of a device step: `rows` tokens from `position` on, through blocks `start` to `stop - 1`."""

    session: bytes
    start: int
    stop: int
    position: int
    rows: int
    data: memoryview  # (rows, hidden_size) numbers of format `dtype`
    dtype: str
    wire: str  # number format of the output; empty: that of the device


class StepOutput(Protocol):
    """Hidden states of one session's rows after the step: (rows, hidden_size) numbers of format `dtype`."""

    @property
    def data(self) -> bytes: ...
    @property
    def dtype(self) -> str: ...


class StepUnderWay(UnderWay[Sequence[StepOutput]], Protocol):
    """A step under way with whose output the device can go on."""

    @property
    def rows(self) -> Any:
        """The output on the device, for `ReplyEnds.launch_ahead`; None: not there."""


MAX_AHEAD = 2  # steps that may be under way before the tokens of the first are known


class BlockRunner(Protocol):
    """Hosted blocks on one device with the KV cache of their sessions; never call it from two threads at once."""

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
    @property
    def kv_page_tokens(self) -> int:
        """Tokens of KV cache that are leased together: a session leases a multiple of them."""

    def adapter_bytes(self, rank: int, targets: tuple[str, ...]) -> int:
        """Return the bytes of one block's vector of such an adapter; raises `engine.errors.EngineError`."""

    def load_adapter(self, rank: int, alpha: float, targets: tuple[str, ...], vectors: Mapping[int, bytes]) -> object:
        """Load an adapter for the blocks of `vectors`, to be given to `open`; raises `engine.errors.EngineError`."""

    def open(self, session: bytes, tokens: int, adapter: Any = None) -> None:
        """Reserve KV cache for a session of this many tokens, all of which use the adapter if one is given.

        Raises `engine.errors.CacheFull`.
        """

    def fork(self, session: bytes, tokens: int, source: bytes, length: int) -> None:
        """Open a session that begins with the first `length` cached tokens of another, and has its adapter.

        Raises as `open` does.
        """

    def take_over(self, session: bytes, tokens: int, source: bytes, length: int) -> None:
        """Open a session with the cache of another, cut to `length` tokens, and its adapter; the other ends.

        Raises as `open` does.
        """

    def resize(self, session: bytes, tokens: int) -> None:
        """Reserve KV cache for this many tokens of an open session instead, or for what it holds if that is more."""

    def tokens_freed_by(self, sessions: Iterable[bytes]) -> int:
        """Tokens of KV cache that closing these sessions would free; what others share with them is not.

        Unknown sessions are ignored: this may be called while `take_over` runs in another thread.
        """

    def close(self, session: bytes) -> None:
        """Free a session's cache; an unknown session is ignored."""

    def truncate(self, session: bytes, length: int) -> None:
        """Drop a session's cached tokens from position `length` on; raises `engine.errors.CacheFull` and drops none."""

    @property
    def cache_format(self) -> str:
        """The form of the cache's numbers and of the weights that made them; a cache fits runners of the same form."""

    @property
    def cache_row_bytes(self) -> int:
        """Bytes of one token in the cache of one block."""

    def export_cache(self, session: bytes, blocks: tuple[int, int], start: int, stop: int) -> bytes | memoryview:
        """Return the cache of tokens [start, stop) in these blocks; raises `engine.errors.EngineError` without it."""

    def import_cache(self, session: bytes, blocks: tuple[int, int], position: int, data: memoryview) -> None:
        """Append tokens with a cache that was exported; raises `engine.errors.EngineError` and appends none."""

    def step(self, work: Sequence[StepWork]) -> Sequence[StepOutput]:
        """Run one step for all these sessions; raises `engine.errors.EngineError` and then advances none."""

    def launch(self, work: Sequence[StepWork]) -> UnderWay[Sequence[StepOutput]] | None:
        """Start a step without waiting for it where the device can; None: nothing was started, use `step`.

        Raises as `step` does. Until its result is taken, nothing else of this runner may be called.
        """

    def launch_ahead(self, work: Sequence[StepWork], rows: Any) -> StepUnderWay | None:
        """Start a step of one token for each session whose input, `ChoiceUnderWay.next_rows`, the device is to compute.

        The data of `work` is not looked at. No session advances but by `accept`. None: nothing was started. Raises as
        `step` does. `MAX_AHEAD` such steps may be under way; until all are done, nothing else may be called.
        """

    def accept(self, session: bytes, length: int) -> None:
        """Count the token that a step ahead computed for a session, which has `length` tokens now."""

    def prepare(self) -> bool:
        """Make one kind of step faster before it is needed (CUDA: capture a graph); False if none is left."""


class TextPiece(Protocol):
    """The next token of a reply: the text that it completes (may be empty), and its embedding unless it is the last."""

    @property
    def token_id(self) -> int: ...
    @property
    def text(self) -> str: ...
    @property
    def finish_reason(self) -> str | None: ...
    @property
    def embedding(self) -> bytes: ...
    @property
    def logprob(self) -> Any: ...


class NextStep(NamedTuple):
    """A step of this node's own blocks that follows once a token is chosen: the session's id, the token's position."""

    session: bytes
    position: int
    is_whole: bool  # its outputs are those of the last block, and come back as they are


class TokenChoice(NamedTuple):
    """A reply whose next token is to be sampled, with the last block's output for its latest token and for guesses."""

    reply: Any  # returned by `ReplyEnds.begin`
    hidden: memoryview  # (rows, hidden_size); only the last row, and one for each guess after it, are used
    dtype: str
    guesses: Sequence[int] = ()  # the tokens that were fed after the latest
    next_step: NextStep | None = None  # None: not known, or not here


class ChoiceUnderWay(Protocol):
    """Tokens that a device is about to choose."""

    @property
    def is_done(self) -> Callable[[], bool]:
        """Returns within microseconds; raises what the device did."""

    @property
    def take(self) -> Callable[[Sequence[int]], Sequence[Sequence[TextPiece]]]:
        """Returns the tokens of these choices, by their indices, once it is done; once for each."""

    @property
    def next_rows(self) -> Any:
        """Embeddings of all tokens, those after guesses too, on the device; None: not there. See `launch_ahead`."""


class ReplyEnds(Protocol):
    """Embedding, head and sampler of a model, which run on the asking node; blocks run on the hosts."""

    @property
    def n_blocks(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def context_length(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    def embed(self, token_ids: Sequence[int], wire: str = "") -> bytes:
        """Return the embeddings of these tokens: (tokens, hidden_size) numbers of format `wire`, or else `dtype`."""

    def begin(self, prompt_ids: Sequence[int], settings: Any) -> Any:
        """Create the state of a new reply to this prompt."""

    def choose(self, choices: Sequence[TokenChoice]) -> Sequence[Sequence[TextPiece]]:
        """Sample the next tokens of each of these replies, in one batch through the head.

        One token for each reply, and one more for each guess that equals the token sampled in its place.
        """

    def launch(self, choices: Sequence[TokenChoice]) -> ChoiceUnderWay | None:
        """Start what `choose` does without waiting for it; None: nothing was started, use `choose`.

        Until its result is taken, nothing else may be called for these replies.
        """

    def launch_ahead(self, choices: Sequence[TokenChoice], rows: Any) -> ChoiceUnderWay | None:
        """Start to choose the tokens after those that are being chosen now, from `StepUnderWay.rows`, one for each.

        None: nothing was started. What it chose may be taken after the tokens of `choices`.
        """

    def deviation(self, one: Sequence[Any], other: Sequence[Any]) -> tuple[float, float]:
        """Compare hidden states (`data`, `dtype`): mean relative distance, and their common scale factor minus 1."""


class DraftReply(Protocol):
    """A draft model's cache of one reply."""

    def read(self, tokens: Sequence[int]) -> bool:
        """Read a few more of these tokens; True once all but the last are read."""

    def guess(self, tokens: Sequence[int], count: int) -> Sequence[int]:
        """Return up to `count` guesses of the tokens that follow these."""

    def close(self) -> None:
        """Free the cache."""


class DraftModel(Protocol):
    """A small model with the tokenizer of the model that writes the replies."""

    def begin(self, tokens: int, settings: Any) -> DraftReply | None:
        """Begin a reply of at most `tokens` tokens with its prompt; None without room in the cache."""


class Device(Protocol):
    """Runs blocking work of one device, one call at a time."""

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Run `function(*args)` after all calls queued before it, and return its result."""

    @overload
    async def run_later(self, function: Callable[..., Pieces[T]], *args: Any) -> T: ...
    @overload
    async def run_later(self, function: Callable[..., T], *args: Any) -> T:
        """Run `function(*args)` once no call of `run` waits; such calls go between the pieces of a generator."""

    async def run_beside(self, function: Callable[..., T], *args: Any) -> T:
        """Run a long call that computes nothing on the device, beside `run` but not beside `run_later`."""
