"""Builds one reply: takes logits, samples tokens, and returns text until a stop condition is met.

It does not know where the logits come from, so local models and replies over the swarm share it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from engine.errors import EngineError
from engine.text.constraint import Grammar
from engine.text.output_form import ConstraintError
from engine.text.sampler import SampleRequest, Sampling, sample_rows
from engine.text.tokenizer import Tokenizer

FinishReason = Literal["stop", "length", "failed"]


@dataclass(frozen=True)
class ReplySettings:
    """Length, sampling, stop strings and form of a reply; raises `EngineError` for impossible values."""

    max_tokens: int = 512
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    grammar: Grammar | None = None
    shown: frozenset[int] = frozenset()  # special tokens that appear in the text
    logprobs: int | None = None  # so many likeliest tokens are told beside each token; None: no probabilities
    end_ids: frozenset[int] = frozenset()  # tokens that end the reply besides the model's own

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise EngineError("max_tokens must be 1 or more")
        if any(not text for text in self.stop):
            raise EngineError("a stop string must not be empty")


class ReplyWriter:
    """The tokens of one reply so far, and the text that is held back; `finish_reason` is set once it is finished."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], settings: ReplySettings, end_ids: Collection[int]
    ) -> None:
        self._stream = tokenizer.stream(shown=settings.shown)
        self._history, self._prompt_tokens = list(prompt_ids), len(prompt_ids)
        self._settings = settings
        self.max_tokens, self.logprobs = settings.max_tokens, settings.logprobs
        self._end_ids = frozenset(end_ids) | settings.end_ids
        self._grammar = None if settings.grammar is None else settings.grammar.begin(self._end_ids)
        self._held = ""  # text that may be the beginning of a stop string
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_string: str | None = None  # that ended the reply

    def choose(self, logits: Tensor) -> str:
        """Sample the next token from logits (vocab,) of the last position; return the text that can be shown now."""
        return self.accept(int(sample_rows(logits[None], self.requests())))

    def requests(self, guesses: Sequence[int] = ()) -> list[SampleRequest]:
        """The requests to sample the next token, and the one after each guess as if all guesses up to it were right."""
        history, sampling = self._history, self._settings.sampling
        places = range(len(history), len(history) + len(guesses) + 1)
        masks = [None] * len(places) if self._grammar is None else self._grammar.masks(guesses)
        known = [history] * len(places)
        if sampling.looks_back:
            known = [history, *([*history, *guesses[: place + 1]] for place in range(len(guesses)))]
        return [
            SampleRequest(before, sampling, place, mask, self._prompt_tokens)
            for before, place, mask in zip(known, places, masks, strict=True)
        ]

    def request_after(self) -> SampleRequest | None:
        """The request to sample the token after the next; None if it depends on the next, or the next is the last."""
        sampling = self._settings.sampling
        if sampling.looks_back or not self.is_plain or len(self.token_ids) + 1 >= self._settings.max_tokens:
            return None
        return SampleRequest((), sampling, len(self._history) + 1)

    def accept_run(self, sampled: Sequence[int], guesses: Sequence[int]) -> list[str]:
        """Append sampled tokens, the first and those after guesses that were right; return the text of each.

        `sampled` has one token more than there are guesses. A token that was sampled after a wrong guess belongs to
        another text, so the first wrong guess is the last place that counts; so is the end of the reply.
        """
        texts = []
        for place, token in enumerate(sampled):
            texts.append(self.accept(token))
            if self.finish_reason is not None or place == len(guesses) or guesses[place] != token:
                break
        return texts

    def accept(self, token: int) -> str:
        """Append a sampled token; return the text that can be shown now."""
        assert self.finish_reason is None, "the reply is finished"
        if self.problem is not None:
            self.finish_reason = "failed"
            return self._finish()
        self._history.append(token)
        self.token_ids.append(token)
        if token in self._end_ids:
            self.finish_reason = "stop"
            return self._finish()
        text = self._release(self._stream.push(token))
        if self._grammar is not None and self.finish_reason is None:
            self._grammar.accept(token)
            if self._grammar.is_complete:
                self.finish_reason = "stop"
                return text + self._finish()
        if self.finish_reason is None and len(self.token_ids) >= self._settings.max_tokens:
            self.finish_reason = "length"
            text += self._finish()
        return text

    @property
    def is_plain(self) -> bool:
        """True if nothing but the sampled tokens is needed: no probabilities, and no grammar to compute masks for."""
        return self.logprobs is None and self._grammar is None

    @property
    def problem(self) -> ConstraintError | None:
        """The reason why the reply failed: its grammar became too complex."""
        return None if self._grammar is None else self._grammar.problem

    @property
    def last_token(self) -> int:
        """Last token of the prompt and reply, which is the input of the next step."""
        return self._history[-1]

    def _finish(self) -> str:
        text = self._release(self._stream.flush())
        rest, self._held = self._held, ""
        return text + rest

    def _release(self, new: str) -> str:
        """Return the text to show: cut before a stop string, and without an end that might begin one."""
        text = self._held + new
        found = [(at, stop) for stop in self._settings.stop if (at := text.find(stop)) >= 0]
        if found:
            at, self.stop_string = min(found)
            self.finish_reason = "stop"
            self._held = ""
            return text[:at]
        held_chars = max((_overlap(text, stop) for stop in self._settings.stop), default=0)
        self._held = text[len(text) - held_chars :]
        return text[: len(text) - held_chars]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
