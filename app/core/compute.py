"""What serving needs of an engine, declared by its consumer: bytes in, bytes out, no tensors.

`engine.session_runner` implements `BlockRunner` and `engine.swarm_ends` implements `ReplyEnds` without knowing this
file. Both are plain synchronous objects; who calls them and on which thread is decided here and by the callers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple, Protocol, TypeVar

import outcome
import trio

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


class Piece(Protocol):
    """One more token of a reply: the text that it completes (maybe none), and its embedding unless it is the last."""

    @property
    def token_id(self) -> int: ...
    @property
    def text(self) -> str: ...
    @property
    def finish_reason(self) -> str | None: ...
    @property
    def embedding(self) -> bytes: ...


class Choice(NamedTuple):
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

    def choose(self, choices: Sequence[Choice]) -> Sequence[Piece]:
        """The next token of each of these replies; they share one pass through the head."""

    def deviation(self, one: Sequence[Any], other: Sequence[Any]) -> tuple[float, float]:
        """How far hidden states (`data`, `dtype`) lie apart: mean relative distance, and common factor less 1."""


class Device(Protocol):
    """Where synchronous work runs, one piece at a time."""

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Run `function(*args)` and wait for its result."""


class DeviceThread:
    """The thread of one device, the same one for as long as the process lives: torch never runs on the event loop.

    On a CPU that is more than order. OpenMP keeps a team of helpers for each thread that ever computed; once the teams
    outnumber the cores, helpers sleep between any two operations, and every step takes a tenth longer.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Run it behind all that waits for this device; a cancelled caller still waits: a step cannot be undone."""
        return await _lasting(self.device).run(function, *args)

    async def run_apart(self, function: Callable[..., T], *args: Any) -> T:
        """Run something long in a thread that ends with it, and its helpers too, while the device goes on."""
        worker = _Worker("shoal apart")
        try:
            return await worker.run(function, *args)
        finally:
            worker.end()


class _Job(NamedTuple):
    function: Callable[..., Any]
    args: tuple[Any, ...]
    task: trio.lowlevel.Task
    loop: trio.lowlevel.TrioToken


class _Worker:
    """A thread that does one job after another for tasks that wait for them."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        Thread(target=self._work, name=name, daemon=True).start()

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        await trio.lowlevel.checkpoint_if_cancelled()
        task, loop = trio.lowlevel.current_task(), trio.lowlevel.current_trio_token()
        self._jobs.put(_Job(function, args, task, loop))
        result: T = await trio.lowlevel.wait_task_rescheduled(lambda _: trio.lowlevel.Abort.FAILED)
        return result

    def end(self) -> None:
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            result = outcome.capture(job.function, *job.args)
            with suppress(trio.RunFinishedError):
                job.loop.run_sync_soon(trio.lowlevel.reschedule, job.task, result)
            del job, result  # nothing that a step returned stays alive until the next one


@functools.cache
def _lasting(device: str) -> _Worker:
    return _Worker(f"shoal {device}")
