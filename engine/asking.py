"""The asker's half of a model: embedding, head, tokenizer and sampler, with bytes where the swarm lies between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from engine.block import Holding
from engine.chat_template import ChatTemplate
from engine.errors import EngineError
from engine.head import Ends, load_ends
from engine.reply import ReplySettings, ReplyWriter
from engine.sources.base import ModelSource
from engine.tokenizer import Tokenizer
from engine.wire import to_bytes, to_tensor, wire_name


class Token(NamedTuple):
    """One more token of a reply."""

    token_id: int
    text: str
    finish_reason: str | None
    embedding: bytes  # of this token; empty at the end


class SwarmEnds:
    """What an asker holds of a model that others run."""

    def __init__(self, source: ModelSource, ends: Ends, dtype: torch.dtype) -> None:
        self.config = source.config
        self.n_blocks = source.config.n_blocks
        self.hidden_size = source.config.hidden_size
        self.context_length = source.config.context_length
        self.dtype = wire_name(dtype)
        self.tokenizer = Tokenizer(source.tokenizer)
        self.template = ChatTemplate(source.tokenizer)
        self.ends = ends
        eos_id = self.tokenizer.eos_id
        self.end_ids = frozenset(source.config.eos_ids) | (frozenset() if eos_id is None else {eos_id})

    def prompt_ids(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The token ids of a conversation, ready for the assistant's reply."""
        return self.tokenizer.encode(self.template.render(messages), add_special=False)

    def embed(self, token_ids: Sequence[int]) -> bytes:
        """Hidden states of these tokens."""
        return bytes(to_bytes(self.ends.embed(token_ids), self.dtype))

    def begin(self, prompt_ids: Sequence[int], settings: ReplySettings) -> SwarmReply:
        """A new reply; raises `EngineError` where the prompt is empty or leaves no room in the context."""
        room = self.context_length - len(prompt_ids)
        if not prompt_ids:
            raise EngineError("the prompt is empty: say something")
        if room < 1:
            raise EngineError(
                f"the prompt has {len(prompt_ids)} tokens, but the model's context is {self.context_length}: shorten it"
            )
        settings = replace(settings, max_tokens=min(settings.max_tokens, room))
        return SwarmReply(self, ReplyWriter(self.tokenizer, prompt_ids, settings, tuple(self.end_ids)), settings)


class SwarmReply:
    """One reply in the making: hidden states in, tokens and text out."""

    def __init__(self, ends: SwarmEnds, writer: ReplyWriter, settings: ReplySettings) -> None:
        self._ends = ends
        self.writer = writer
        self.max_tokens = settings.max_tokens

    def choose(self, hidden: memoryview, dtype: str) -> Token:
        """The next token behind the last block's output; of several rows the last one counts."""
        rows = to_tensor([hidden], dtype, self._ends.hidden_size)
        text = self.writer.choose(self._ends.ends.logits(rows[-1:])[0])
        token, finish_reason = self.writer.last_token, self.writer.finish_reason
        return Token(token, text, finish_reason, b"" if finish_reason else self._ends.embed([token]))


def load_swarm_ends(source: ModelSource, how: Holding) -> SwarmEnds:
    """Read the embedding and the head of a model, and nothing else."""
    return SwarmEnds(source, load_ends(source, how), how.dtype)
