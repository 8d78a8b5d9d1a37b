"""Combines a model's tokenizer and chat template: turns a conversation into token ids and starts a reply to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from engine.errors import EngineError
from engine.sources.base import ModelSource
from engine.text.chat_template import ChatError, ChatTemplate
from engine.text.constraint import GrammarCompiler
from engine.text.reply import ReplySettings, ReplyWriter
from engine.text.tokenizer import Tokenizer


class ModelText:
    """The tokenizer, chat template, end tokens and context length of one model."""

    def __init__(self, source: ModelSource) -> None:
        self.tokenizer = Tokenizer(source.tokenizer)
        self._template = ChatTemplate(source.tokenizer)
        self._eos_text = source.tokenizer.eos_token
        self._context_length = source.config.context_length
        eos_id = self.tokenizer.eos_id
        self._end_ids = frozenset(source.config.eos_ids) | (frozenset() if eos_id is None else {eos_id})
        self.grammars = GrammarCompiler(self.tokenizer, source.config.vocab_size, self._end_ids)

    def prompt_ids(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the token ids of a conversation, up to where the assistant's reply begins; raises `ChatError`.

        If the last message is the assistant's, the reply continues it: its text follows the template's beginning of a
        reply.
        """
        if not messages or messages[-1].get("role") != "assistant":
            return self.tokenizer.encode(self._template.render(messages), add_special=False)
        if len(messages) == 1:
            raise ChatError("a conversation cannot begin with the reply to continue: send a message of the user first")
        text = self._template.render(messages[:-1]) + (messages[-1].get("content") or "")
        return self.tokenizer.encode(text, add_special=False)

    def conversation_pieces(self, messages: Sequence[Mapping[str, str]]) -> list[tuple[list[int], bool]]:
        """Return the tokens of a conversation in pieces, each with whether the assistant wrote it, end token included.

        Where the chat template changes earlier answers, as some do with thinking, only the last one counts.
        """
        made: list[tuple[list[int], bool]] = []
        done = ""
        for index, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            before = self._template.render(messages[:index])
            whole = self._template.render(messages[: index + 1], add_generation_prompt=False)
            if not whole.startswith(before):
                whole = before + (message.get("content") or "") + (self._eos_text or "")
            if not before.startswith(done):
                made, done = [], ""
            answer = self.tokenizer.encode(whole[len(before) :], add_special=False)
            stop = next((at + 1 for at, token in enumerate(answer) if token in self._end_ids), len(answer))
            made += [
                (self.tokenizer.encode(before[len(done) :], add_special=False), False),
                (answer[:stop], True),
                (answer[stop:], False),
            ]
            done = whole
        return made

    def document_ids(self, text: str) -> list[int]:
        """Return the tokens of a text, with the marks of its beginning and end where the model has them."""
        eos_id = self.tokenizer.eos_id
        return [*self.tokenizer.encode(text), *([] if eos_id is None else [eos_id])]

    def begin(self, prompt_ids: Sequence[int], settings: ReplySettings) -> ReplyWriter:
        """Start a reply that is at most as long as the rest of the context.

        Raises `EngineError` if the prompt is empty or fills the context.
        """
        room = self._context_length - len(prompt_ids)
        if not prompt_ids:
            raise EngineError("the prompt is empty: write a message")
        if room < 1:
            raise EngineError(
                f"the prompt has {len(prompt_ids)} tokens, but the model's context is {self._context_length}: "
                "shorten it"
            )
        settings = replace(settings, max_tokens=min(settings.max_tokens, room))
        return ReplyWriter(self.tokenizer, prompt_ids, settings, self._end_ids)
