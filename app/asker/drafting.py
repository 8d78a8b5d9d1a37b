"""Runs a draft model for replies: opens its cache, reads the prompt while the swarm does, and asks it for guesses.

Everything runs in the device's thread, in short calls, so that replies and hops that share the thread wait for none of
them long. A draft model that fails costs a reply nothing but its guesses: torch raises errors of every kind, and all of
them are caught here. `engine.draft_model` computes, `app.asker.guessing` decides how many guesses are worth it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import trio

from app.core.compute import Device, DraftReply

log = logging.getLogger("shoal.replies")


class Draft:
    """A draft model's view of one reply; `run` must be running, and ends after `end`."""

    def __init__(self, device: Device, open_reply: Callable[[], DraftReply | None]) -> None:
        self._device, self._open = device, open_reply
        self._reply: DraftReply | None = None
        self._ended = trio.Event()

    @property
    def is_ready(self) -> bool:
        """True once the prompt was read; until then there are no guesses."""
        return self._reply is not None and not self._ended.is_set()

    async def run(self, prompt_ids: Sequence[int]) -> None:
        """Read the prompt, then wait for the end of the reply."""
        try:
            reply = await self._device.run(self._open)
        except Exception:
            log.exception("the draft model failed")
            return
        if reply is None:
            return
        try:
            while not self._ended.is_set() and not await self._device.run_later(reply.read, prompt_ids):
                pass
            self._reply = reply
            await self._ended.wait()
        except Exception:
            log.exception("the draft model failed")
        finally:
            self._reply = None
            with trio.CancelScope(shield=True):
                await self._device.run(reply.close)

    def end(self) -> None:
        """Free the draft model's cache of this reply."""
        self._ended.set()

    async def guess(self, tokens: Sequence[int], count: int) -> tuple[int, ...]:
        """Return at most `count` guesses of the tokens that follow `tokens`."""
        guesses: list[int] = []
        while len(guesses) < count and (reply := self._reply) is not None:
            try:
                more = await self._device.run(reply.guess, [*tokens, *guesses], 1)
            except Exception:
                log.exception("the draft model failed")
                self.end()
                break
            if not more:
                break
            guesses += more
        return tuple(guesses)
