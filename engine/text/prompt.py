"""Combines a model's tokenizer and chat template: turns a conversation into token ids and starts a reply to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from engine.errors import ContextExceeded, EngineError
from engine.sources.base import ModelSource
from engine.text.chat_template import ChatError, ChatTemplate
from engine.text.constraint import GrammarCompiler
from engine.text.output_form import Constraint, Tool, ToolUse
from engine.text.reply import ReplySettings, ReplyWriter
from engine.text.tokenizer import Tokenizer
from engine.text.tool_calls import (
    FALLBACK,
    THINK,
    ReplyReader,
    call_constraint,
    call_format,
    has_thought_tokens,
    marks_of,
    messages_for,
)


@dataclass(frozen=True)
class PreparedChat:
    """A conversation's prompt, the form of the reply to it, the special tokens that a reader sees, and the reader."""

    prompt_ids: list[int]
    constraint: Constraint | None
    shown: frozenset[int]
    new_reader: Callable[[], ReplyReader]
    end_ids: frozenset[int] = frozenset()  # that end the reply besides the model's own


class ModelText:
    """The tokenizer, chat template, end tokens and context length of one model."""

    def __init__(self, source: ModelSource) -> None:
        self.tokenizer = Tokenizer(source.tokenizer)
        self._template = ChatTemplate(source.tokenizer)
        self.calls = call_format(source.tokenizer.chat_template)
        self._eos_text = source.tokenizer.eos_token
        self._context_length = source.config.context_length
        eos_id = self.tokenizer.eos_id
        self._end_ids = frozenset(source.config.eos_ids) | (frozenset() if eos_id is None else {eos_id})
        self.grammars = GrammarCompiler(self.tokenizer, source.config.vocab_size, self._end_ids)

    def prompt_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the token ids of a conversation, up to where the assistant's reply begins; raises `ChatError`.

        If the last message is the assistant's, the reply continues it: its text follows the template's beginning of a
        reply.
        """
        return self.tokenizer.encode(self._prompt(messages), add_special=False)

    def _prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Tool] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        given = [tool.as_json() for tool in tools] if tools and self.calls is not FALLBACK else None
        if not messages or messages[-1].get("role") != "assistant" or messages[-1].get("tool_calls"):
            return self._template.render(messages, tools=given, variables=variables)
        if len(messages) == 1:
            raise ChatError("a conversation cannot begin with the reply to continue: send a message of the user first")
        begun = self._template.render(messages[:-1], tools=given, variables=variables)
        return begun + (messages[-1].get("content") or "")

    def prepare(
        self,
        messages: Sequence[Mapping[str, Any]],
        use: ToolUse | None = None,
        answer: Constraint | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> PreparedChat:
        """Return what a reply to a conversation needs: the prompt, the form of the reply, and how it is read.

        Raises `ChatError` if the template refuses the conversation, `ConstraintError` if the form is wrong.
        """
        tools = () if use is None else use.tools
        has_calls = bool(tools) or any(one.get("tool_calls") or one.get("role") == "tool" for one in messages)
        whole = messages_for(self.calls, messages, tools) if has_calls else messages
        prompt = self._prompt(whole, tools, variables)
        self.check_length(prompt)
        thinking = prompt.rstrip().endswith(THINK)
        form = None if use is None else self.calls
        constraint = answer
        if use is not None:
            constraint = call_constraint(self.calls, use, self.tokenizer, thinking=thinking, answer=answer)
        marks = map(self.tokenizer.token_id, marks_of(form))
        shown = frozenset(index for index in marks if index is not None)
        ids = self.tokenizer.encode(prompt, add_special=False)
        has_tokens = has_thought_tokens(self.tokenizer, thinking=thinking)
        new_reader = partial(ReplyReader, form, thinking=thinking, has_thought_tokens=has_tokens)
        return PreparedChat(ids, constraint, shown, new_reader)

    def check_length(self, prompt: str) -> None:
        """Raise `ContextExceeded` if a prompt cannot fit into the context, before seconds are spent on its tokens."""
        context = self._context_length
        fewest = self.tokenizer.fewest_tokens(prompt) if len(prompt) > context else 0
        if fewest > context:
            raise ContextExceeded(
                f"the prompt has {fewest} tokens or more, but the model's context is {context}: shorten it", fewest
            )

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
