"""A whole reply made of its events, and the names of request fields without effect: what all API families share."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Protocol

import trio
from pydantic import BaseModel

from app.api.bodies import aside
from app.api.control import Control
from app.api.keys import CHARS_PER_TOKEN, current_owner, metered
from app.asker.reply import ReplyDone, ReplyEvent, ReplyStats, ReplyText
from app.asker.reply_service import ReplyRequest
from engine.text.output_form import CallPiece, ReplyPart, SaidText, ThoughtText, TokenLogprob

Events = AsyncGenerator[ReplyEvent, None]
IGNORED_HEADER = "x-shoal-ignored-fields"
_MOST_IGNORED = 1000


@dataclass
class MadeCall:
    """A tool call, as far as it has come."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class WholeReply:
    """A reply's text, thoughts, calls and probabilities, as far as they have come; `stats` are set at its end."""

    text: str = ""
    thought: str = ""
    calls: list[MadeCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    stats: ReplyStats | None = None
    _logprob_sum: float = 0.0

    def add(self, event: ReplyText) -> tuple[ReplyPart, ...]:
        """Take the next piece and return its parts."""
        for part in event.read_parts:
            if isinstance(part, SaidText):
                self.text += part.text
            elif isinstance(part, ThoughtText):
                self.thought += part.text
            else:
                self._add_call(part)
        if event.logprob is not None:
            self.logprobs.append(event.logprob)
            self._logprob_sum += event.logprob.logprob
        return event.read_parts

    def _add_call(self, part: CallPiece) -> None:
        if part.name is not None:
            self.calls.append(MadeCall(part.id, part.name))
        self.calls[part.index].arguments += part.arguments

    @property
    def mean_logprob(self) -> float:
        """Mean log probability of its tokens."""
        return self._logprob_sum / max(len(self.logprobs), 1)

    @property
    def finish_reason(self) -> str | None:
        """`tool_calls` for a reply that ended with calls; otherwise why it ended."""
        reason = None if self.stats is None else self.stats.finish_reason
        return "tool_calls" if reason == "stop" and self.calls else reason


def owned(request: ReplyRequest) -> ReplyRequest:
    """Return a request as one of whoever sends the present one."""
    return replace(request, owner=current_owner())


def metered_reply(control: Control, request: ReplyRequest) -> Events:
    """Return the events of a reply, which takes its turn and whose tokens count for the key of the present request."""
    prompt = request.prompt
    if prompt is None:
        texts = (message.get("content") for message in request.messages)
        chars = sum(len(text) if isinstance(text, str) else CHARS_PER_TOKEN for text in texts)
    else:
        chars = len(prompt) if isinstance(prompt, str) else len(prompt) * CHARS_PER_TOKEN
    return metered(control.reply(owned(request)), chars)


async def whole_reply(events: Events) -> WholeReply:
    """Return a reply once it is complete."""
    reply = WholeReply()
    async with aclosing(events):
        async for event in events:
            if isinstance(event, ReplyText):
                reply.add(event)
            elif isinstance(event, ReplyDone):
                reply.stats = event.stats
    return reply


async def side_by_side(all_events: Sequence[Events]) -> list[WholeReply]:
    """Return several replies that are written at the same time; the first error ends all of them."""
    replies = [WholeReply() for _ in all_events]

    async def fill(place: int, events: Events) -> None:
        replies[place] = await whole_reply(events)

    if len(all_events) == 1:
        await fill(0, all_events[0])
        return replies
    try:
        async with trio.open_nursery() as nursery:
            for place, events in enumerate(all_events):
                nursery.start_soon(fill, place, events)
    except BaseExceptionGroup as group:
        failures = group.subgroup(lambda error: isinstance(error, Exception))
        if failures is None:
            raise
        raise _first_of(failures) from group
    return replies


def _first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    first = group.exceptions[0]
    return _first_of(first) if isinstance(first, BaseExceptionGroup) else first


class Asking(Protocol):
    """The body of a request for a reply."""

    def request(self) -> ReplyRequest:
        """Convert to the node's own request."""


async def converted(body: Asking) -> tuple[ReplyRequest, dict[str, str]]:
    """Return the node's own request, and the response header that names fields without effect."""
    return await aside(lambda: (body.request(), unread_header(body)))


def unread_header(body: Any) -> dict[str, str]:
    """Return the response header that names the fields of a body that nothing reads."""
    return ignored_header(ignored_fields(body))


def ignored_fields(body: BaseModel) -> list[str]:
    """Name the fields of a request that nothing reads, those of its parts as `messages.name`; some of very many."""
    return sorted(set(islice(_unread(body, ""), _MOST_IGNORED)))


def ignored_header(names: Iterable[str]) -> dict[str, str]:
    """Return the response header that names fields without effect."""
    listed = ", ".join(name for name in names if name.isascii() and name.isprintable())
    return {IGNORED_HEADER: listed[:1000]} if listed else {}


def _unread(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, BaseModel):
        yield from (f"{path}{name}" for name in value.model_extra or ())
        for name in type(value).model_fields:
            yield from _unread(getattr(value, name), f"{path}{name}.")
    elif isinstance(value, list) and value and isinstance(value[0], BaseModel | list):  # not ids, which may be many
        for item in value:
            yield from _unread(item, path)
