"""A whole model in this process: `shoal chat --local` uses it, and tests compare swarms with it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.budget import Allowance, block_bytes, kv_bytes_per_token, unquantised
from engine.model.ends import EmbeddingAndHead, load_ends
from engine.model.kv_cache import KVLease, Segment
from engine.model.onnx_graph import grids_pay
from engine.model.span import BlockAdapter, LoadProgress, SpanOptions, SpanRunner, load_span
from engine.sources.base import ModelSource, block_part
from engine.sources.grid import GRID_KINDS
from engine.text.prompt import ModelText
from engine.text.reply import ReplySettings, ReplyWriter
from engine.training.peft_format import Adapter
from engine.training.serving import ServedAdapter

PREFILL_ROWS = 512


@dataclass(frozen=True)
class LocalStats:
    """Time to the first token and decode speed of one reply."""

    ttft_s: float
    tokens_per_s: float | None  # None if only one token was generated


class LocalModel:
    """Embedding, all blocks, head and tokenizer of one model, on one device."""

    def __init__(
        self, source: ModelSource, ends: EmbeddingAndHead, span: SpanRunner, adapter: BlockAdapter | None = None
    ) -> None:
        self.config = source.config
        self._text = ModelText(source)
        self.ends = ends
        self.span = span
        self._adapter = adapter

    def prompt_ids(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the token ids of a conversation, ready for the assistant's reply."""
        return self._text.prompt_ids(messages)

    def logits_after(self, lease: KVLease, token_ids: Sequence[int]) -> Tensor:
        """Run the session's next tokens through all blocks, in chunks; return the logits (vocab,) after the last."""
        for begin in range(0, len(token_ids), PREFILL_ROWS):
            chunk = token_ids[begin : begin + PREFILL_ROWS]
            segment = Segment(lease, lease.length, len(chunk))
            hidden = self.span.step(self.ends.embed(chunk), [segment], adapter=self._adapter)
        return self.ends.logits(hidden[-1:])[0]

    def reply(self, prompt_ids: Sequence[int], settings: ReplySettings) -> LocalReply:
        """Prepare a reply; iterating over it generates the text. Raises `EngineError` if the prompt does not fit."""
        return LocalReply(self, list(prompt_ids), self._text.begin(prompt_ids, settings))


class LocalReply:
    """Iterator over the text pieces of one reply; `stats` is set when it ends."""

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
    """Return options for one conversation at a time.

    On a CPU, weights stay in the grid of their file where that is faster. The cache holds the whole context, or as much
    of it as the KV cache's share of the free memory allows.
    """
    has_grids = any(entry.kind in GRID_KINDS for entry in source.parts[block_part(0)])
    in_grid = device.type == "cpu" and has_grids and grids_pay()
    dtype = torch.float32 if in_grid else dtype
    config, precision = source.config, unquantised(dtype.itemsize)
    whole = config.context_length * config.n_blocks * kv_bytes_per_token(config, precision)
    weights = config.n_blocks * block_bytes(config, precision)
    # A second, packed copy of the weights speeds up prompts; make it only if memory is plentiful.
    roomy = device.type == "cpu" and not in_grid and 4 * weights < free_bytes
    kv_bytes = min(whole, Allowance(free_bytes).kv_bytes)
    return SpanOptions(device, dtype, "stored" if in_grid else "none", roomy, kv_bytes=kv_bytes)


def load_local(
    source: ModelSource, options: SpanOptions, progress: LoadProgress | None = None, adapter: Adapter | None = None
) -> LocalModel:
    """Load all blocks, the embedding and the head of a model; replies use the adapter if one is given."""
    span = load_span(source, 0, source.config.n_blocks, options, progress)
    blocks = range(span.start, span.stop)
    served = None if adapter is None else ServedAdapter(adapter, source.config, dict.fromkeys(blocks, options))
    return LocalModel(source, load_ends(source, options), span, served)
