"""A small model that guesses the next tokens of a reply which a large model writes; both have the same tokenizer.

It draws with the sampling settings, the seed and the position of the reply, so with the same random number: wherever
its probabilities are like the large model's, it draws the same token. It decides nothing: a guess is kept only if the
large model draws the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import psutil
from torch import Tensor

from engine.budget import block_bytes, unquantised
from engine.errors import CacheFull, EngineError
from engine.local_model import local_options
from engine.model.block import WeightOptions
from engine.model.ends import EmbeddingAndHead, load_ends
from engine.model.kv_cache import Segment
from engine.model.span import SpanRunner, load_span
from engine.sources.base import ModelSource
from engine.text.reply import ReplySettings
from engine.text.sampler import Sampling, sample

READ_ROWS = 64  # tokens read in one call, so that other work of the device waits for no more
MEMORY_SHARE = 0.25
MAX_REPLIES = 4  # that have a cache at the same time


class DraftModel:
    """Embedding, all blocks and head of a small model."""

    def __init__(self, ends: EmbeddingAndHead, span: SpanRunner, vocabulary: int) -> None:
        self.ends, self.span, self.vocabulary = ends, span, vocabulary
        self.context_length = span.config.context_length

    def begin(self, tokens: int, settings: ReplySettings) -> DraftReply | None:
        """Begin a reply of at most `tokens` tokens with its prompt; None if the cache has no room for it."""
        try:
            return DraftReply(self, min(tokens, self.context_length), settings.sampling)
        except CacheFull:
            return None


class DraftReply:
    """The draft model's cache of one reply; `close` frees it."""

    def __init__(self, model: DraftModel, tokens: int, sampling: Sampling) -> None:
        self._model, self._sampling, self._room = model, sampling, tokens
        self._lease = model.span.open(tokens)
        self._read: list[int] = []  # tokens in the cache

    def close(self) -> None:
        """Free the cache."""
        self._lease.close()

    def read(self, tokens: Sequence[int]) -> bool:
        """Read a few more of these tokens, all but the last; True once all are read."""
        self._go_back_to(tokens)
        unread = tokens[len(self._read) : min(len(tokens) - 1, self._room)]
        if unread:
            self._feed(unread[:READ_ROWS])
        return len(unread) <= READ_ROWS

    def guess(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return up to `count` guesses of the tokens that follow; fewer where the cache ends."""
        history = list(tokens)
        while not self.read(history):
            pass
        count = min(count, self._room - len(history))
        for _ in range(count):
            hidden = self._feed(history[len(self._read) :])
            logits = self._model.ends.logits(hidden[-1:])[0, : self._model.vocabulary]
            history.append(sample(logits, history, self._sampling, len(history)))
        return history[len(tokens) :]

    def _go_back_to(self, tokens: Sequence[int]) -> None:
        """Drop what the cache holds of tokens that did not come."""
        most = min(len(self._read), len(tokens) - 1)
        same = next((at for at in range(most) if self._read[at] != tokens[at]), most)
        if same < len(self._read):
            del self._read[same:]
            self._lease.truncate(same)

    def _feed(self, tokens: Sequence[int]) -> Tensor:
        segment = Segment(self._lease, len(self._read), len(tokens))
        hidden = self._model.span.step(self._model.ends.embed(tokens), [segment])
        self._read += tokens
        return hidden


def load_draft(source: ModelSource, how: WeightOptions, vocabulary: int) -> DraftModel:
    """Load a small model; guesses stay below `vocabulary`, the large model's number of tokens.

    Raises `EngineError` if it would take more than `MEMORY_SHARE` of the free memory.
    """
    free_bytes = psutil.virtual_memory().available
    weights = source.config.n_blocks * block_bytes(source.config, unquantised(how.dtype.itemsize))
    if weights > MEMORY_SHARE * free_bytes:
        raise EngineError(f"{source.label} is too large to guess here: it takes {weights >> 20} MiB of memory")
    options = local_options(source, how.device, how.dtype, free_bytes)
    options = replace(options, kv_bytes=MAX_REPLIES * options.kv_bytes, packed=False)
    span = load_span(source, 0, source.config.n_blocks, options)
    return DraftModel(load_ends(source, options), span, min(vocabulary, source.config.vocab_size))
