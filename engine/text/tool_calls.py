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


def call_constraint(
    form: CallFormat, use: ToolUse, tokenizer: Tokenizer, *, thinking: bool, answer: Constraint | None = None
) -> Constraint:
    """Return the grammar of a reply that may or must call tools.

    `thinking` says that the prompt ends inside a thought; `answer` is the form of a reply that is no call. Raises
    `ConstraintError` if that form does not go together with tools.
    """
    if answer is not None and answer.kind != "json":
        raise ConstraintError(answer.field, "cannot be used together with tools")
    grammar = _CallGrammar(form, use, tokenizer)
    return Constraint("lark", grammar.text(thinking, None if answer is None else answer.text), "tools")


class _CallGrammar:
    """Writes a grammar in `llguidance`'s dialect of Lark."""

    def __init__(self, form: CallFormat, use: ToolUse, tokenizer: Tokenizer) -> None:
        self._form, self._use = form, use
        self._ids = {mark: tokenizer.token_id(mark) for mark in marks_of(form)}
        named = {index for index in self._ids.values() if index is not None}
        self._other_ids = sorted(tokenizer.plain_added_ids - named)
        self._several = form.several and use.parallel and use.name is None

    def text(self, thinking: bool, answer: str | None) -> str:
        calls = self._calls()
        if self._use.is_forced:
            body = "calls"
        elif answer is not None:
            calls.append(f"answer: %json {_schema(json.loads(answer), lenient=False)}")
            body = "calls | answer"
        elif self._form is LLAMA:
            calls += [f"SAID: /{_avoiding(_LLAMA_STARTS)}/", f"said: SAID {self._others()}"]
            body = "calls | said?"
        else:
            calls += self._lazy_mark()
            body = "free | opened"
        rules = ["%llguidance {}", f"start: {self._thought(thinking)} ({body})", *calls]
        return "\n".join([*rules, f"free: TEXT {self._others()}", "TEXT: /(.|\\n)*/"])

    def _thought(self, thinking: bool) -> str:
        begin, end = (self._ids[mark] for mark in (THINK, END_THINK))
        if end is None or (begin is None and not thinking):
            return ""
        gap = "/[\\n ]{0,3}/"
        return f"TEXT <[{end}]> {gap}" if thinking else f"(<[{begin}]> TEXT <[{end}]> {gap})?"

    def _others(self) -> str:
        """Other tokens of the vocabulary that are no text to the grammar may stand in a text."""
        ids = ",".join(map(str, self._other_ids))
        return f"(<[{ids}]> TEXT)*" if ids else ""

    def _mark(self, mark: str) -> str:
        spelled, index = json.dumps(mark), self._ids[mark]
        return spelled if index is None else f"(<[{index}]> | {spelled})"

    def _lazy_mark(self) -> list[str]:
        """A text up to the first mark, which then belongs to a group of calls."""
        index, spelled = self._ids[self._form.mark], json.dumps(self._form.mark)
        token = "" if index is None else f"free <[{index}]> groups | "
        return [f"opened: {token}{self._others()} until_mark groups", f"until_mark[lazy]: TEXT {spelled}"]

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


def _avoiding(words: Sequence[str]) -> str:
    """Return a regular expression of all texts that begin with none of these words."""
    firsts = sorted({word[0] for word in words})
    options = [f"[^{''.join(map(re.escape, firsts))}](.|\\n)*"]
    for first in firsts:
        rests = [word[1:] for word in words if word[0] == first]
        if "" not in rests:
            options.append(f"{re.escape(first)}({_avoiding(rests)})?")
    return "|".join(options)


# --- reading ----------------------------------------------------------------------------------------------------------

_HEAD = re.compile(r'"name"\s*:\s*"((?:[^"\\]|\\.)*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*')
_ARGS_HEAD = re.compile(r"(?:\[TOOL_CALLS\])?\s*([^\[\]]+)\[ARGS\]")


class ReplyReader:
    """Splits a reply into text, thoughts and tool calls as it comes; the parts joined are the whole reply.

    Without a format there are no calls. `thinking` says that the prompt ends inside a thought.
    """

    def __init__(self, form: CallFormat | None, *, thinking: bool = False) -> None:
        self._form = form
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
        text = self._held.lstrip()
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
        thought, found = self._until(END_THINK, last)
        if found:
            self._read = self._read_after_thought
        return [ThoughtText(thought)] if thought else []

    def _read_after_thought(self, last: bool) -> list[ReplyPart]:
        """Drop the empty lines between thought and answer."""
        self._held = self._held.lstrip("\n")
        if self._held or last:
            self._read = self._read_start if self._form is LLAMA else self._read_text
        return []

    def _read_text(self, last: bool) -> list[ReplyPart]:
        if self._form is None or self._form is LLAMA:
            said, self._held = self._held, ""
        else:
            said, found = self._until(self._form.mark, last)
            self._read = self._read_calls if found else self._read_text
        return [SaidText(said)] if said else []

    def _until(self, mark: str, last: bool) -> tuple[str, bool]:
        """Return the text before a mark and take both off; without a mark, all that cannot be its beginning."""
        before, found, rest = self._held.partition(mark)
        if found:
            self._held = rest
            return before, True
        kept = 0 if last else next((n for n in range(len(mark) - 1, 0, -1) if self._held.endswith(mark[:n])), 0)
        text, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return text, False

    def _read_calls(self, last: bool) -> list[ReplyPart]:
        has_key = self._form is not None and self._form.arguments
        head = (_HEAD if has_key else _ARGS_HEAD).search(self._held)
        if head is None:
            return []
        name = json.loads(f'"{head[1]}"') if has_key else head[1].strip()
        self._held, self._read = self._held[head.end() :], self._read_arguments
        self._id, self._arguments = f"call_{secrets.token_hex(12)}", _JsonScanner()
        self._count += 1
        return [CallPiece(self._count - 1, self._id, name, "")]

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
