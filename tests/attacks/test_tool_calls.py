"""Replies that a hostile hop or model writes where tools may be called: the reader finds what the grammar allows.

A hop that lies can choose each token among those that the grammar allows; a creator chooses the vocabulary besides.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable

import pytest

from engine.text.output_form import ReplyPart, SaidText, ToolUse
from engine.text.tool_calls import (
    HERMES,
    LLAMA,
    MISTRAL_ARGS,
    MOST_HEAD_CHARS,
    MOST_SPACE_CHARS,
    CallFormat,
    ReplyReader,
    call_constraint,
    has_thought_tokens,
    marks_of,
)
from tests.engine.test_tool_calls import ALL_FORMATS, FAMILIES, TOOLS, WITH_MARKS, WITHOUT_MARKS, Family, merged, read

MARKS = (
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<|other|>",
)
PIECES = (
    "evil[ARGS]{}",
    "clock[ARGS]{}",
    "clock",
    '{"name": "evil", "arguments": {}}',
    '{"name": "evil", "parameters": {}}',
    '{"name": "clock", "arguments": {}}',
    '{"name": "clock", "parameters": {}}',
    '[{"name": "clock", "arguments": {}}]',
    '"name": "evil", "arguments": {}',
    *(" ", "\n", "{", "}", '"', ": ", ", ", '{"', '": "', '"}', "a"),
)
Spoken = tuple[str, bool]  # a text, and True if its marks are spelled letter by letter


def token_ids(family: Family, text: str, is_spelled: bool) -> list[int]:
    """The tokens of a text."""
    encode = family.tokenizer.encode
    return [token for part in (text if is_spelled else [text]) for token in encode(part, add_special=False)]


def allowed_reply(family: Family, form: CallFormat, wanted: Iterable[Spoken], thinking: bool) -> list[ReplyPart]:
    """What is read of a reply of these pieces, each as far as the grammar allows it."""
    constraint = call_constraint(form, ToolUse(TOOLS), family.tokenizer, thinking=thinking)
    state = family.compiler.compile(constraint).begin(family.end_ids)
    shown = frozenset(token for mark in marks_of(form) if (token := family.tokenizer.token_id(mark)) is not None)
    stream = family.tokenizer.stream(shown=shown)
    has_tokens = has_thought_tokens(family.tokenizer, thinking=thinking)
    reader = ReplyReader(form, thinking=thinking, has_thought_tokens=has_tokens)
    parts: list[ReplyPart] = []
    for text, is_spelled in wanted:
        for token in token_ids(family, text, is_spelled):
            mask = None if state.is_complete else state.masks()[0]
            if mask is None or not mask[token // 8] >> (token % 8) & 1:
                break
            state.accept(token)
            parts += reader.feed(stream.push(token))
    return parts + reader.feed(stream.flush(), last=True)


def check_random_replies(family: Family, form: CallFormat, seeds: range) -> None:
    """Whatever the grammar lets through, calls are those of the tools."""
    for seed in seeds:
        draw = random.Random(seed)
        wanted = [
            (draw.choice(MARKS), draw.random() < 0.5) if draw.random() < 0.45 else (draw.choice(PIECES), True)
            for _ in range(25)
        ]
        _, _, calls = merged(allowed_reply(family, form, wanted, thinking=seed % 2 == 0))
        assert {name for name, _ in calls} <= {tool.name for tool in TOOLS}, (seed, calls)


@FAMILIES
@ALL_FORMATS
def test_no_reply_that_the_grammar_allows_calls_an_unknown_tool(form: CallFormat, family: Family) -> None:
    """The reader and the grammar disagreed about where a thought ends, and what follows a token such as `<|other|>`."""
    check_random_replies(family, form, range(10))


@pytest.mark.soak
@FAMILIES
@ALL_FORMATS
def test_none_of_many_replies_that_the_grammar_allows_calls_an_unknown_tool(form: CallFormat, family: Family) -> None:
    check_random_replies(family, form, range(10, 300))


EVIL = {HERMES: '{"name": "evil", "arguments": {}}', MISTRAL_ARGS: "evil[ARGS]{}"}


@pytest.mark.parametrize("form", [HERMES, MISTRAL_ARGS], ids=["hermes", "mistral-args"])
@pytest.mark.parametrize(
    "before",
    [[("<think>", False), ("a</think>", True)], [("a", True), ("<|other|>", False)], [("<think>", True)]],
    ids=["the spelled end of a thought", "a token beside the text", "a spelled thought"],
)
def test_nothing_puts_the_reader_where_the_grammar_is_not(form: CallFormat, before: list[Spoken]) -> None:
    end = [] if before[-1][1] is False else [("</think>", True)]
    wanted = [*before, *end, (form.mark, True), (EVIL[form], True)]
    assert merged(allowed_reply(WITH_MARKS, form, wanted, thinking=False))[2] == []


@pytest.mark.parametrize("start", [" ", "\n\n", "", "<|python_tag|>"], ids=repr)
def test_what_is_read_as_a_call_of_llama_is_one_to_the_grammar(start: str) -> None:
    wanted = [(start, True), ('{"name": "evil", "parameters": {}}', True)]
    assert merged(allowed_reply(WITH_MARKS, LLAMA, wanted, thinking=False))[2] == []


def test_a_model_without_tokens_for_thoughts_may_spell_them() -> None:
    """A call within what is spelled as a thought is one to the grammar, which knows no thought there."""
    call = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    after = allowed_reply(WITHOUT_MARKS, HERMES, [(f"<think>hm</think>\n\n{call}", True)], thinking=False)
    assert merged(after) == ("", "hm", [("clock", "{}")])
    within = allowed_reply(WITHOUT_MARKS, HERMES, [(f"<think>hm {call}</think>", True)], thinking=False)
    assert merged(within) == ("", "hm ", [("clock", "{}")])
    begun = allowed_reply(WITHOUT_MARKS, HERMES, [(f"hm {call}", True)], thinking=True)
    assert merged(begun) == ("", "hm ", [("clock", "{}")])


def test_many_spaces_where_a_name_is_expected_take_no_time() -> None:
    """700 spaces took seconds, 5000 minutes, on the loop that all of the node shares."""
    reader = ReplyReader(MISTRAL_ARGS)
    reader.feed("[TOOL_CALLS]")
    begin = time.thread_time()
    reader.feed(700 * " ")
    assert time.thread_time() - begin < 0.2


@ALL_FORMATS
@pytest.mark.parametrize("letter", ["a", '"name": "', '"', "["])
def test_what_is_too_long_for_the_name_of_a_call_is_text(form: CallFormat, letter: str) -> None:
    """All of it was held until the end, and searched again from its beginning for each token."""
    reader = ReplyReader(form)
    start = '{"name"' if form is LLAMA else f"So: {form.mark}"
    told = merged(reader.feed(start))[0]
    for _ in range(200):
        told += "".join(part.text for part in reader.feed(16 * letter) if isinstance(part, SaidText))
    assert 3200 * len(letter) + len(start) - len(told) <= MOST_HEAD_CHARS
    assert not reader.has_calls


@ALL_FORMATS
def test_spaces_before_a_reply_are_told_at_last(form: CallFormat) -> None:
    """They were held without an end, and looked at again for each token."""
    reader = ReplyReader(form)
    told = sum(len(merged(reader.feed(" "))[0]) for _ in range(200))
    assert 200 - told <= MOST_SPACE_CHARS
    assert merged(read(form, "\n <think>a</think>b")) == ("b", "a", [])
