"""Tool calls: the format that a model's chat template teaches, its grammar, and the reading of calls as they come.

A template that knows no tools, or whose calls have a format that is not known here, gets a prompt of our own
(`FALLBACK`), which is the one that SmolLM2 was trained with. Whether the model calls by itself or has to, the grammar
keeps every call whole: a known name and a JSON object, by the tool's schema where the request asks for it.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.text.constraint import WHITESPACE
from engine.text.output_form import (
    CallPiece,
    Constraint,
    ConstraintError,
    ReplyPart,
    SaidText,
    ThoughtText,
    Tool,
    ToolUse,
)
from engine.text.tokenizer import Tokenizer

MAX_CALLS = 16  # in one reply
THINK, END_THINK = "<think>", "</think>"
FALLBACK_PROMPT = """You are an expert in composing functions. You are given a question and a set of possible functions.
Based on the question, you will need to make one or more function/tool calls to achieve the purpose.
If none of the functions can be used, point it out and refuse to answer.
If the given question lacks the parameters required by the function, also point it out.

You have access to the following tools:
<tools>{tools}</tools>

The output MUST strictly adhere to the following format, and NO other text MUST be included.
The example format is as follows. Please make sure the parameter type is correct. If no function call is needed, please
make the tool calls an empty list '[]'.
<tool_call>[
{{"name": "func_name1", "arguments": {{"argument1": "value1", "argument2": "value2"}}}},
... (more tool calls as required)
]</tool_call>"""


@dataclass(frozen=True)
class CallFormat:
    """How a family of models writes calls: `mark` begins each group of calls, `close` ends it."""

    name: str
    mark: str
    close: str = ""
    is_list: bool = False  # the calls of a group are a JSON list; otherwise a group has one call
    several: bool = True  # a reply may have several calls
    arguments: str = "arguments"  # the key of the arguments; empty: the name stands before [ARGS]


HERMES = CallFormat("hermes", "<tool_call>", "</tool_call>")  # and Qwen
MISTRAL = CallFormat("mistral", "[TOOL_CALLS]", is_list=True)
MISTRAL_ARGS = CallFormat("mistral-args", "[TOOL_CALLS]", arguments="")
LLAMA = CallFormat("llama", "<|python_tag|>", several=False, arguments="parameters")  # the mark is optional
FALLBACK = CallFormat("fallback", "<tool_call>", "</tool_call>", is_list=True)
_ARGS = "[ARGS]"
_LLAMA_STARTS = ('{"name"', '{"type": "function"')


def call_format(template: str | None) -> CallFormat:
    """Return the format that a chat template teaches."""
    text = template or ""
    if "tools" not in text:
        return FALLBACK
    if MISTRAL.mark in text:
        return MISTRAL_ARGS if _ARGS in text else MISTRAL
    if HERMES.mark in text and "<function=" not in text:
        return HERMES
    if '"parameters": ' in text and "ipython" in text:
        return LLAMA
    return FALLBACK


# --- the prompt -------------------------------------------------------------------------------------------------------


def messages_for(
    form: CallFormat, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]
) -> list[dict[str, Any]]:
    """Return a conversation as the template takes it: calls with arguments as objects, ids that it accepts."""
    made = [_parsed(form, message) for message in messages]
    if form is LLAMA:
        return _one_call_each(made)
    return _spelled_out(made, tools) if form is FALLBACK else made


def _parsed(form: CallFormat, message: Mapping[str, Any]) -> dict[str, Any]:
    made = dict(message)
    if made.get("tool_calls"):
        made["tool_calls"] = [
            {
                "id": _short_id(call["id"]) if form.mark == MISTRAL.mark else call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": json.loads(call["arguments"])},
            }
            for call in made["tool_calls"]
        ]
    if form.mark == MISTRAL.mark and "tool_call_id" in made:
        made["tool_call_id"] = _short_id(made["tool_call_id"])
    return made


def _short_id(call_id: str) -> str:
    """Mistral's templates take ids of nine letters and digits only."""
    return hashlib.blake2b(call_id.encode()).hexdigest()[:9]


def _one_call_each(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Llama's template takes one call in a message: each is followed by its result."""
    made: list[dict[str, Any]] = []
    results = {message.get("tool_call_id"): message for message in messages if message["role"] == "tool"}
    moved: set[int] = set()
    for message in messages:
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            made += [] if id(message) in moved else [message]
            continue
        for call in calls:
            made.append({**message, "tool_calls": [call]})
            if (result := results.get(call["id"])) is not None:
                made.append(result)
                moved.add(id(result))
    return made


def _spelled_out(messages: Sequence[dict[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Write tools, calls and results into plain messages, for templates that know none of them."""
    made: list[dict[str, Any]] = []
    for message in messages:
        text = message.get("content") or ""
        if message.get("tool_calls"):
            calls = json.dumps([call["function"] for call in message["tool_calls"]], ensure_ascii=False)
            made.append({"role": "assistant", "content": f"{text}{FALLBACK.mark}{calls}{FALLBACK.close}"})
        elif message["role"] == "tool":
            result = f"<tool_response>\n{text}\n</tool_response>"
            if made and made[-1].get("role") == "user" and made[-1]["content"].endswith("</tool_response>"):
                made[-1]["content"] += f"\n{result}"
            else:
                made.append({"role": "user", "content": result})
        else:
            made.append(message)
    if tools:
        listed = json.dumps([tool.as_json() for tool in tools], ensure_ascii=False)
        prompt = FALLBACK_PROMPT.format(tools=listed)
        if made and made[0].get("role") == "system":
            made[0] = {**made[0], "content": f"{prompt}\n\n{made[0]['content']}"}
        else:
            made.insert(0, {"role": "system", "content": prompt})
    return made


# --- the grammar ------------------------------------------------------------------------------------------------------


def marks_of(form: CallFormat | None) -> tuple[str, ...]:
    """Return the marks that a reader must see, even where they are special tokens."""
    calls = () if form is None else (form.mark, form.close, _ARGS)
    return tuple(mark for mark in (*calls, THINK, END_THINK) if mark)


def has_thought_tokens(tokenizer: Tokenizer, *, thinking: bool) -> bool:
    """True if a thought begins and ends with tokens of its own; `thinking` says that the prompt has begun it."""
    return tokenizer.token_id(END_THINK) is not None and (thinking or tokenizer.token_id(THINK) is not None)


def call_constraint(
    form: CallFormat, use: ToolUse, tokenizer: Tokenizer, *, thinking: bool, answer: Constraint | None = None
) -> Constraint:
    """Return the grammar of a reply that may or must call tools.

    `thinking` says that the prompt ends inside a thought; `answer` is the form of a reply that is no call. Raises
    `ConstraintError` if that form does not go together with tools.
    """
    if answer is not None and answer.kind != "json":
        raise ConstraintError(answer.field, "cannot be used together with tools")
    grammar = _CallGrammar(form, use, tokenizer, thinking)
    return Constraint("lark", grammar.text(None if answer is None else answer.text), "tools")


class _CallGrammar:
    """Writes a grammar in `llguidance`'s dialect of Lark.

    Where thoughts have tokens of their own, no text spells their marks: `ReplyReader` sees thoughts where they are.
    """

    def __init__(self, form: CallFormat, use: ToolUse, tokenizer: Tokenizer, thinking: bool) -> None:
        self._form, self._use, self._thinking = form, use, thinking
        self._has_thoughts = has_thought_tokens(tokenizer, thinking=thinking)
        self._ids = {mark: tokenizer.token_id(mark) for mark in marks_of(form)}
        named = {index for index in self._ids.values() if index is not None}
        self._other_ids = sorted(tokenizer.plain_added_ids - named)
        self._several = form.several and use.parallel and use.name is None

    def text(self, answer: str | None) -> str:
        calls = self._calls()
        if self._use.is_forced:
            body = "calls"
        elif answer is not None:
            calls.append(f"answer: %json {_schema(json.loads(answer), lenient=False)}")
            body = "calls | answer"
        elif self._form is LLAMA:
            starts = "|".join(map(_escaped, (self._form.mark, *_LLAMA_STARTS, *self._unspelled())))
            calls += [f"SAID: /(.|\\n)+/ & ~/[ \\t\\r\\n]*({starts})(.|\\n)*/", f"said: SAID {self._others()}"]
            body = "calls | said?"
        else:
            calls += self._lazy_mark()
            body = "free | opened"
        rules = ["%llguidance {}", f"start: {self._thought()} ({body})", *calls]
        without = "".join(f" & ~/(.|\\n)*{_escaped(mark)}(.|\\n)*/" for mark in self._unspelled())
        return "\n".join([*rules, f"free: TEXT {self._others()}", f"TEXT: /(.|\\n)*/{without}"])

    def _thought(self) -> str:
        if not self._has_thoughts:
            return ""
        rest = f"TEXT <[{self._ids[END_THINK]}]> /[\\n ]{{0,3}}/"
        return rest if self._thinking else f"(<[{self._ids[THINK]}]> {rest})?"

    def _unspelled(self) -> tuple[str, ...]:
        """The marks that stand in a reply as tokens alone."""
        return (THINK, END_THINK) if self._has_thoughts else ()

    def _others(self) -> str:
        """Other tokens of the vocabulary that are no text to the grammar may stand in a text."""
        return f"(<[{self._listed_others()}]> TEXT)*" if self._other_ids else ""

    def _listed_others(self) -> str:
        return ",".join(map(str, self._other_ids))

    def _mark(self, mark: str) -> str:
        spelled, index = json.dumps(mark), self._ids[mark]
        return spelled if index is None else f"(<[{index}]> | {spelled})"

    def _lazy_mark(self) -> list[str]:
        """A text up to the first mark, which then belongs to a group of calls."""
        index, spelled = self._ids[self._form.mark], json.dumps(self._form.mark)
        token = "" if index is None else f"free <[{index}]> groups | "
        others = f"(TEXT <[{self._listed_others()}]>)*" if self._other_ids else ""
        return [f"opened: {token}{others} until_mark groups", f"until_mark[lazy]: TEXT {spelled}"]

    def _calls(self) -> list[str]:
        """The rules `calls`, and `groups`: the same without the first mark."""
        form, more = self._form, f"{{0,{MAX_CALLS - 1}}}"
        comma = '("," | ", " | ",\\n")'
        if form is LLAMA:
            index = self._ids[form.mark]
            calls = f"{'' if index is None else f'<[{index}]>? '}call"
            return [f"calls: {calls}", *self._call_rules()]
        close = self._mark(form.close) if form.close else ""
        if form.is_list:
            listed = f"({comma} call){more}" if self._several else ""
            group = f'" "? "[" "\\n"? call {listed} "\\n"? "]" {close}'
        else:
            gap = "" if form is MISTRAL_ARGS else '"\\n"?'
            group = f"{gap} call {gap} {close}"
        again = f'("\\n"? mark {group}){more}' if self._several and not form.is_list else ""
        rules = ["calls: mark groups", f"groups: {group} {again}", f"mark: {self._mark(form.mark)}"]
        return [*rules, *self._call_rules()]

    def _call_rules(self) -> list[str]:
        tools = self._use.callable_tools
        rules = [f"call: {' | '.join(f'call_{number}' for number in range(len(tools)))}"]
        for number, tool in enumerate(tools):
            forced = tool.strict or self._use.is_forced
            schema = json.loads(tool.parameters) if forced else {"type": "object"}
            arguments = f"%json {_schema(schema, lenient=not tool.strict)}"
            rules += [f"call_{number}: {self._head(tool.name)} arguments_{number} {self._tail()}"]
            rules += [f"arguments_{number}: {arguments}"]
        return rules

    def _head(self, name: str) -> str:
        if not self._form.arguments:
            return f"{json.dumps(name)} {self._mark(_ARGS)}"
        key = f'"{self._form.arguments}":'
        if self._form is LLAMA:  # one expression, for a text may begin with the same letters
            head = f'"name": ?{re.escape(json.dumps(name))}, ?{key} ?'
            return f'/\\{{("type": "function", )?{head.replace("/", "[/]")}/'
        return f'"{{\\"name\\":" " "? {json.dumps(json.dumps(name))} "," " "? {json.dumps(key)} " "?'

    def _tail(self) -> str:
        return '"}"' if self._form.arguments else ""


def _schema(schema: Any, *, lenient: bool) -> str:
    whole: dict[str, Any] = schema if isinstance(schema, dict) else {}
    options = {"whitespace_pattern": WHITESPACE, **({"lenient": True} if lenient else {})}
    if lenient and "type" not in whole and "properties" in whole:
        whole = {**whole, "type": "object"}
    return json.dumps({**whole, "x-guidance": options})


def _escaped(text: str) -> str:
    """Return a regular expression of just this text."""
    return re.escape(text).replace("/", "\\/")


# --- reading ----------------------------------------------------------------------------------------------------------

MOST_HEAD_CHARS = 512  # between two calls, the name of the second included; names have up to 128
MOST_SPACE_CHARS = 64  # before a thought or a call at the beginning of a reply
_SPACE = " \t\r\n"
# No part of it gives back what it took (`*+`), and each attempt ends where the next may begin: it takes linear time.
_HEAD = re.compile(r'"name"\s*+:\s*+"((?:[^"\\]|\\.)*+)"\s*+,\s*+"(?:arguments|parameters)"\s*+:\s*+')


class ReplyReader:
    """Splits a reply into text, thoughts and tool calls as it comes; the parts joined are the whole reply.

    Without a format there are no calls. `thinking` says that the prompt ends inside a thought, and `has_thought_tokens`
    that no text spells the marks of one. Where texts do, the grammar takes the first mark of calls for one even in what
    is spelled as a thought, and so does this. What is held between two pieces is short, whatever the model writes.
    """

    def __init__(self, form: CallFormat | None, *, thinking: bool = False, has_thought_tokens: bool = True) -> None:
        self._form, self._has_thought_tokens = form, has_thought_tokens
        self._held = ""
        self._read: Callable[[bool], list[ReplyPart]] = self._read_thought_begins if thinking else self._read_start
        self._count = 0
        self._id = ""
        self._arguments = _JsonScanner()

    @property
    def has_calls(self) -> bool:
        """True once a call has begun."""
        return self._count > 0

    def feed(self, text: str, *, last: bool = False) -> list[ReplyPart]:
        """Take more of the reply's text, and return the parts that are certain now."""
        self._held += text
        parts: list[ReplyPart] = []
        before = None
        while before != (self._read, len(self._held)):
            before = self._read, len(self._held)
            parts += self._read(last)
        return parts

    def _read_start(self, last: bool) -> list[ReplyPart]:
        """Decide how the reply begins."""
        text = self._held.lstrip(_SPACE)
        if len(self._held) - len(text) > MOST_SPACE_CHARS:
            self._read = self._read_text
            return []
        starts = (THINK, *((LLAMA.mark, *_LLAMA_STARTS) if self._form is LLAMA else ()))
        if not last and any(start.startswith(text) and start != text for start in starts):
            return []
        if text.startswith(THINK):
            self._held, self._read = text[len(THINK) :], self._read_thought_begins
        elif self._form is LLAMA and text.startswith(starts[1:]):
            self._read = self._read_calls
        else:
            self._read = self._read_text
        return []

    def _read_thought_begins(self, last: bool) -> list[ReplyPart]:
        """Drop the empty lines before a thought."""
        self._held = self._held.lstrip("\n")
        if self._held:
            self._read = self._read_thought
        return []

    def _read_thought(self, last: bool) -> list[ReplyPart]:
        if self._form is None or self._form is LLAMA or self._has_thought_tokens:
            marks = [END_THINK]
        else:
            marks = [END_THINK, self._form.mark]
        thought, mark = self._until(marks, last)
        if mark:
            self._read = self._read_after_thought if mark == END_THINK else self._read_calls
        return [ThoughtText(thought)] if thought else []

    def _read_after_thought(self, last: bool) -> list[ReplyPart]:
        """Drop the empty lines between thought and answer."""
        self._held = self._held.lstrip("\n")
        if self._held or last:
            may_call = self._form is LLAMA and self._has_thought_tokens
            self._read = self._read_start if may_call else self._read_text
        return []

    def _read_text(self, last: bool) -> list[ReplyPart]:
        if self._form is None or self._form is LLAMA:
            said, self._held = self._held, ""
        else:
            said, found = self._until([self._form.mark], last)
            self._read = self._read_calls if found else self._read_text
        return [SaidText(said)] if said else []

    def _until(self, marks: Sequence[str], last: bool) -> tuple[str, str]:
        """Return the text before the first of some marks, and that mark, and take both off.

        Without one, return all that cannot be the beginning of one.
        """
        found = [(at, mark) for mark in marks if (at := self._held.find(mark)) >= 0]
        at, mark = min(found, default=(len(self._held), ""))
        if not mark and not last:
            beginnings = (mark[:n] for mark in marks for n in range(1, len(mark)))
            at -= max((len(one) for one in beginnings if self._held.endswith(one)), default=0)
        text, self._held = self._held[:at], self._held[at + len(mark) :]
        return text, mark

    def _read_calls(self, last: bool) -> list[ReplyPart]:
        """Find the name of the next call; what is too long to be one is text."""
        head = self._next_name(self._held[:MOST_HEAD_CHARS])
        if head is None:
            if len(self._held) >= MOST_HEAD_CHARS:
                self._read = self._read_text
            return []
        name, end = head
        self._held, self._read = self._held[end:], self._read_arguments
        self._id, self._arguments = f"call_{secrets.token_hex(12)}", _JsonScanner()
        self._count += 1
        return [CallPiece(self._count - 1, self._id, name, "")]

    def _next_name(self, text: str) -> tuple[str, int] | None:
        """Return the first name of a function in a text, and where its arguments begin."""
        assert self._form is not None, "without a format there are no calls"
        if self._form.arguments:
            head = _HEAD.search(text)
            return None if head is None else (json.loads(f'"{head[1]}"'), head.end())
        before, found, _ = text.partition(_ARGS)
        return (before.rpartition(self._form.mark)[2].strip(), len(before + found)) if found else None

    def _read_arguments(self, last: bool) -> list[ReplyPart]:
        if not self._arguments.has_begun:
            self._held = self._held.lstrip()
        size = self._arguments.scan(self._held)
        piece, self._held = self._held[:size], self._held[size:]
        if self._arguments.is_over:
            self._read = self._read_calls
        return [CallPiece(self._count - 1, self._id, None, piece)] if piece else []


class _JsonScanner:
    """Finds the end of a JSON object in a text that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False
        self.is_over = False

    @property
    def has_begun(self) -> bool:
        """True after the first bracket."""
        return self._depth > 0 or self.is_over

    def scan(self, text: str) -> int:
        """Return how many characters of the text belong to the object."""
        for place, letter in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif letter == "\\":
                    self._escaped = True
                elif letter == '"':
                    self._in_string = False
            elif letter == '"':
                self._in_string = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.is_over = True
                    return place + 1
        return len(text)
