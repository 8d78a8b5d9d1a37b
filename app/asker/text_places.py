"""The threads in which chat template, tokenizer and compiler of grammars compute: who has one next, and for how long.

A text can take seconds, and one of a hostile model for ever; nothing stops a thread, so one that nobody waits for any
more keeps its place. The node's owner has places of its own. Programs with keys share the others, each has one at a
time, and they take turns: no program keeps the others waiting by many texts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import trio

from app.core.errors import AppError
from app.core.left_behind import left_behind

T = TypeVar("T")

NODE_OWNER = "token"  # whoever has the API's token
NODE_OWNER_TEXTS = 2
KEYS_TEXTS = 2  # of all programs with keys together
TEXT_S = 60.0  # for one text, from when it has its place
PLACE_S = 300.0  # for a place


class NoPlaceForText(AppError):
    """A text has waited too long for those before it."""

    code = "busy"


class TextPlaces:
    """The places of all owners; an owner is whoever a `ReplyRequest` names."""

    def __init__(self) -> None:
        self._node_owner = trio.CapacityLimiter(NODE_OWNER_TEXTS)
        self._keys = trio.CapacityLimiter(KEYS_TEXTS)
        self._turns: defaultdict[str, trio.CapacityLimiter] = defaultdict(partial(trio.CapacityLimiter, 1))  # by key

    async def run(self, owner: str, function: Callable[..., T], *args: Any) -> T:
        """Call a function in a place of an owner's; raises as `run_left_behind` does."""
        is_node_owner = owner in (NODE_OWNER, "")
        limiters = [self._node_owner] if is_node_owner else [self._turns[owner], self._keys]
        return await run_left_behind(limiters, function, *args)


async def run_left_behind(limiters: Sequence[trio.CapacityLimiter], function: Callable[..., T], *args: Any) -> T:
    """Call a function in a thread that has passed all these limiters, and is left behind if the caller is cancelled.

    Raises `TooSlowError` if it takes longer than `TEXT_S`, and `NoPlaceForText` if it cannot begin within `PLACE_S`.
    """
    has_begun = False

    def begin() -> None:
        nonlocal has_begun
        has_begun, scope.deadline = True, trio.current_time() + TEXT_S

    with trio.move_on_after(PLACE_S) as scope:
        return await left_behind(_AllOf(limiters, begin), PLACE_S + TEXT_S, function, *args)  # type: ignore[arg-type]
    if has_begun:
        raise trio.TooSlowError
    raise NoPlaceForText("this node is still busy with texts that were sent before: ask again once they are done")


class _AllOf:
    """Several limiters in the place of one, passed in order; calls `begin` after the last."""

    def __init__(self, limiters: Sequence[trio.CapacityLimiter], begin: Callable[[], None]) -> None:
        self._limiters, self._begin = limiters, begin

    async def acquire_on_behalf_of(self, borrower: object) -> None:
        """Wait for all of them."""
        with ExitStack() as taken:
            for limiter in self._limiters:
                await limiter.acquire_on_behalf_of(borrower)
                taken.callback(limiter.release_on_behalf_of, borrower)
            taken.pop_all()
        self._begin()

    def release_on_behalf_of(self, borrower: object) -> None:
        """Give all of them back, once the thread has ended."""
        for limiter in self._limiters:
            limiter.release_on_behalf_of(borrower)
