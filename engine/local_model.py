"""A whole model in this process: what `shoal chat --local` talks to, and the yardstick of every swarm."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.budget import Precision, block_bytes
from engine.model.attention import Segment
from engine.model.ends import EmbeddingAndHead, load_ends
from engine.model.kv_cache import KVLease, token_bytes
from engine.model.span import LoadProgress, SpanOptions, SpanRunner, load_span
from engine.sources.base import ModelSource
from engine.text.prompt import ModelText
from engine.text.reply import ReplySettings, ReplyWriter

PREFILL_ROWS = 512
KV_SHARE = 0.25  # of the free memory, at most, for the cache of one conversation


@dataclass(frozen=True)
class LocalStats:
    """How a reply went."""

    ttft_s: float
    tokens_per_s: float | None  # None where only one token was written


class LocalModel:
    """Embedding, all blocks, head and tokenizer of one model on one device."""

    def __init__(self, source: ModelSource, ends: EmbeddingAndHead, span: SpanRunner) -> None:
        self.config = source.config
        self._text = ModelText(source)
        self.ends = ends
        self.span = span

    def prompt_ids(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The token ids of a conversation, ready for the assistant's reply."""
        return self._text.prompt_ids(messages)

    def logits_after(self, lease: KVLease, token_ids: Sequence[int]) -> Tensor:
        """Run a session's next tokens through all blocks, in chunks: the logits (vocab,) behind the last one."""
        for begin in range(0, len(token_ids), PREFILL_ROWS):
            chunk = token_ids[begin : begin + PREFILL_ROWS]
            hidden = self.span.step(self.ends.embed(chunk), [Segment(lease, lease.length, len(chunk))])
        return self.ends.logits(hidden[-1:])[0]

    def reply(self, prompt_ids: Sequence[int], settings: ReplySettings) -> LocalReply:
        """Begin a reply; iterate over it to get its text as it is written."""
        return LocalReply(self, list(prompt_ids), self._text.begin(prompt_ids, settings))


class LocalReply:
    """An iterator over the pieces of one reply's text; its figures are there when it ends."""

    def __init__(self, model: LocalModel, prompt_ids: list[int], writer: ReplyWriter) -> None:
        self._model, self._prompt_ids = model, prompt_ids
        self.writer = writer
        self.stats: LocalStats | None = None

    def __iter__(self) -> Iterator[str]:
        model, writer = self._model, self.writer
        begin = time.perf_counter()
        lease = model.span.open(len(self._prompt_ids) + writer.max_tokens)
        try:
            yield writer.choose(model.logits_after(lease, self._prompt_ids))
            first = time.perf_counter()
            while writer.finish_reason is None:
                yield writer.choose(model.logits_after(lease, [writer.last_token]))
            decoded, seconds = len(writer.token_ids) - 1, time.perf_counter() - first
            self.stats = LocalStats(first - begin, decoded / seconds if decoded else None)
        finally:
            lease.close()


def local_options(source: ModelSource, device: torch.device, dtype: torch.dtype, free_bytes: int) -> SpanOptions:
    """Options for one conversation at a time: a cache for the whole context, or what a share of the memory holds."""
    config = source.config
    whole = config.context_length * token_bytes(config, config.n_blocks, dtype)
    weights = config.n_blocks * block_bytes(config, Precision(dtype.itemsize, dtype.itemsize))
    # A second copy of the weights reads prompts faster; it is worth memory that nobody else needs.
    roomy = device.type == "cpu" and 4 * weights < free_bytes
    return SpanOptions(device, dtype, packed=roomy, kv_bytes=min(whole, int(free_bytes * KV_SHARE)))


def load_local(source: ModelSource, options: SpanOptions, progress: LoadProgress | None = None) -> LocalModel:
    """Load a whole model."""
    span = load_span(source, 0, source.config.n_blocks, options, progress)
    return LocalModel(source, load_ends(source, options), span)
