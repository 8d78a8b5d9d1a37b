"""The asker's half of a model: embedding, head, tokenizer and sampler, with bytes where the swarm lies between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from engine.errors import EngineError
from engine.model.block import WeightOptions
from engine.model.ends import EmbeddingAndHead, load_ends
from engine.sources.base import ModelSource
from engine.text.prompt import ModelText
from engine.text.reply import ReplySettings, ReplyWriter
from engine.wire import to_bytes, to_tensor, wire_name


class Token(NamedTuple):
    """One more token of a reply."""

    token_id: int
    text: str
    finish_reason: str | None
    embedding: bytes


class TokenChoice(Protocol):
    """A reply that waits for its next token, with the last block's output."""

    @property
    def reply(self) -> Any: ...
    @property
    def hidden(self) -> memoryview: ...
    @property
    def dtype(self) -> str: ...


class HiddenState(Protocol):
    """One token's hidden state as it crosses the wire."""

    @property
    def data(self) -> bytes: ...
    @property
    def dtype(self) -> str: ...


class SwarmEnds:
    """What an asker holds of a model that others run."""

    def __init__(self, source: ModelSource, ends: EmbeddingAndHead, dtype: torch.dtype) -> None:
        self.config = source.config
        self.n_blocks = source.config.n_blocks
        self.hidden_size = source.config.hidden_size
        self.context_length = source.config.context_length
        self.dtype = wire_name(dtype)
        self._text = ModelText(source)
        self._ends = ends

    def prompt_ids(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The token ids of a conversation, ready for the assistant's reply."""
        return self._text.prompt_ids(messages)

    def text_ids(self, text: str | Sequence[int]) -> list[int]:
        """The token ids of a text that is to be gone on with as it stands; ids are checked and stay as they are."""
        if isinstance(text, str):
            return self._text.tokenizer.encode(text)
        if not all(0 <= token_id < self.config.vocab_size for token_id in text):
            raise EngineError(f"a token id is not below {self.config.vocab_size}, which the model's vocabulary ends at")
        return list(text)

    def embed(self, token_ids: Sequence[int]) -> bytes:
        """Hidden states of these tokens."""
        return bytes(to_bytes(self._ends.embed(token_ids), self.dtype))

    def begin(self, prompt_ids: Sequence[int], settings: ReplySettings) -> ReplyWriter:
        """A new reply; raises `EngineError` where the prompt is empty or leaves no room in the context."""
        return self._text.begin(prompt_ids, settings)

    def choose(self, choices: Sequence[TokenChoice]) -> list[Token]:
        """The next token of each reply, behind the last row of its hidden states."""
        dtype = torch.float32 if len({choice.dtype for choice in choices}) > 1 else None
        rows = [to_tensor([choice.hidden], choice.dtype, self.hidden_size)[-1:] for choice in choices]
        logits = self._ends.logits(torch.cat([row.to(dtype) if dtype else row for row in rows]))
        writers: list[ReplyWriter] = [choice.reply for choice in choices]
        texts = [writer.choose(row) for writer, row in zip(writers, logits, strict=True)]
        embedded = self.embed([writer.last_token for writer in writers])
        size = len(embedded) // len(writers)
        return [
            Token(writer.last_token, text, writer.finish_reason, embedded[index * size : (index + 1) * size])
            for index, (writer, text) in enumerate(zip(writers, texts, strict=True))
        ]

    def deviation(self, one: Sequence[HiddenState], other: Sequence[HiddenState]) -> tuple[float, float]:
        """How far two runs' hidden states lie apart: mean relative distance, and their common factor less 1."""
        a, b = (
            torch.cat([to_tensor([memoryview(s.data)], s.dtype, self.hidden_size).double() for s in run])
            for run in (one, other)
        )
        distance = (a - b).norm(dim=1) / torch.minimum(a.norm(dim=1), b.norm(dim=1))
        return float(distance.mean()), float((a * b).sum() / (b * b).sum()) - 1


def load_swarm_ends(source: ModelSource, how: WeightOptions) -> SwarmEnds:
    """Read the embedding and the head of a model, and nothing else."""
    return SwarmEnds(source, load_ends(source, how), how.dtype)
