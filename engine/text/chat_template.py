"""Renders a conversation to a prompt with the model's own chat template.

Templates are untrusted programs that come with a model, so they run in jinja2's sandbox, in the dialect that
`transformers` defines, with bounds on steps, time, sizes and output. `engine.text.tokenizer` tokenizes the prompt (with
`add_special=False`, because a template writes its own begin marker).
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from engine.errors import EngineError, SourceError
from engine.sources.base import TokenizerSpec
from engine.sources.files import shown

# Used for base models, which have no template: a plain transcript of the conversation.
DEFAULT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize }}: {{ message['content'] }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
_ANOTHER = "choose another model"
MAX_SECONDS = 5.0
MAX_STEPS = 2_000_000
MAX_OUTPUT = 16 << 20
_MAX_NUMBER = 100_000  # bound on numeric arguments of string methods and filters, and on bases of powers
_MAX_TEXT = 16 << 20
_TEXT_FILTERS = ("format", "replace")


class ChatError(EngineError):
    """The model's chat template refuses this conversation or fails on it; the message contains the reason."""


class ChatTemplate:
    """A compiled chat template; raises `SourceError` if the model's template does not compile."""

    def __init__(self, spec: TokenizerSpec) -> None:
        self.is_default = spec.chat_template is None
        special = {"bos_token": spec.bos_token, "eos_token": spec.eos_token}
        self._variables = {
            **spec.template_variables,
            **{name: text for name, text in special.items() if text is not None},
        }
        try:
            self._template = _environment().from_string(spec.chat_template or DEFAULT_TEMPLATE)
        except (jinja2.TemplateError, RecursionError, ValueError, OverflowError) as error:
            raise SourceError(f"the model's chat template is damaged ({shown(str(error))}): {_ANOTHER}") from error

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None, variables: Mapping[str, Any] | None = None,
    ) -> str:  # fmt: skip
        """Return the prompt for a conversation; `variables` are options of the template (`enable_thinking`, …).

        Raises `ChatError` if the template refuses the conversation or fails, `SourceError` if it exceeds a bound.
        """
        values = {
            **self._variables, **(variables or {}), "messages": [dict(message) for message in messages],
            "tools": None if tools is None else [dict(tool) for tool in tools], "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }  # fmt: skip
        try:
            with _Budget():
                return self._collect(values)
        except _Refused as error:
            raise ChatError(f"the model's chat template refuses this conversation: {error}") from error
        except _Exhausted as error:
            raise SourceError(f"the model's chat template exceeds a limit ({error}): {_ANOTHER}") from error
        except Exception as error:  # a template can raise any exception that Python code can
            reason = shown(f"{type(error).__name__}: {error}")
            raise ChatError(
                f"the model's chat template fails on this conversation ({reason}): check the messages"
            ) from error

    def _collect(self, values: dict[str, Any]) -> str:
        pieces, length = [], 0
        for piece in self._template.generate(**values):
            pieces.append(piece)
            length += len(piece)
            if length > MAX_OUTPUT:
                raise _Exhausted(f"more than {MAX_OUTPUT} characters")
        return "".join(pieces)


class _Refused(jinja2.TemplateError):
    """The template called `raise_exception`."""


class _Exhausted(Exception):
    """The template exceeded a bound on time, steps or size."""


class _Budget:
    """Stops a runaway template: counts the lines that it executes in this thread, and checks the time."""

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        self._steps, self._deadline = MAX_STEPS, time.monotonic() + MAX_SECONDS
        sys.settrace(self._on_call)

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)

    def _on_call(self, frame: Any, event: str, argument: Any) -> Any:
        # Only lines of compiled templates and macros are counted; the functions that they call are short.
        return self._on_line if frame.f_code.co_filename == "<template>" else None

    def _on_line(self, frame: Any, event: str, argument: Any) -> Any:
        self._steps -= 1
        if self._steps < 0 or (self._steps % 256 == 0 and time.monotonic() > self._deadline):
            raise _Exhausted("too many steps or too much time")
        return self._on_line


class _BoundedCode(jinja2.compiler.CodeGenerator):
    """Compiles `a ~ b` to a call of the bounded `_Sandbox.concat`."""

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:
        self.write("environment.concat((")
        for part in node.nodes:
            self.write("str(")
            self.visit(part, frame)
            self.write("), ")
        self.write("))")


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, with bounds on the size of what one operation creates."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})
    code_generator_class = _BoundedCode

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """Join the output of a template, macro or block; raises `_Exhausted` if it is too long."""
        kept = list(pieces)
        _bound(sum(map(len, kept)))
        return "".join(kept)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and (abs(left) > _MAX_NUMBER or abs(right) > 64):
            raise _Exhausted("a huge power")
        if operator == "*" and any(hasattr(side, "__len__") for side in (left, right)):
            count = right if isinstance(right, int) else left
            sequence = left if count is right else right
            _bound(len(sequence) * max(int(count), 0))
        if operator == "*" and isinstance(left, int) and isinstance(right, int):
            _bound((left.bit_length() + right.bit_length()) << 8)
        if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            _bound(len(left) + len(right))
        if operator == "%" and isinstance(left, str):
            _bound_widths(left)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return jinja2's safe replacement for `str.format`, after checking the format's widths."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _bound_widths(value.__self__)
        return wrapped

    def call(self, context: Any, callee: Any, /, *args: Any, **options: Any) -> Any:
        text = getattr(callee, "__self__", None)
        if isinstance(text, str):
            _bound_text_call(getattr(callee, "__name__", ""), text, args, options)
        result = super().call(context, callee, *args, **options)
        _bound(len(result) if isinstance(result, str) else 0)
        return result


def _bound(size: int) -> None:
    if size > _MAX_TEXT:
        raise _Exhausted("a value that is too large")


def _bound_widths(text: str) -> None:
    """Raise `_Exhausted` for a format with a width of six digits or a width taken from an argument."""
    if re.search(r"\d{6}|%[^a-zA-Z%]*\*|:[^}]*\{", text):
        raise _Exhausted("a format of huge width")


def _bound_text_call(name: str, text: str, args: Sequence[Any], options: Mapping[str, Any]) -> None:
    if any(isinstance(value, int) and abs(value) > _MAX_NUMBER for value in (*args, *options.values())):
        raise _Exhausted("a huge width")
    if name == "format":  # the filter; `str.format` goes through `wrap_str_format`
        _bound_widths(text)
    if name == "replace" and len(args) > 1:
        _bound(text.count(str(args[0])) * len(str(args[1])))
    if name == "join" and args and hasattr(args[0], "__len__"):
        _bound(len(text) * len(args[0]))


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter so that huge numbers in its arguments and huge results are refused; its input may be any number."""
    skipped = 2 if hasattr(function, "jinja_pass_arg") else 1

    @functools.wraps(function)
    def bounded(*args: Any, **options: Any) -> Any:
        value, rest = args[skipped - 1 : skipped], args[skipped:]
        _bound_text_call(name, str(value[0]) if value and name in _TEXT_FILTERS else "", rest, options)
        if name == "join" and value and hasattr(value[0], "__len__"):
            _bound(len(value[0]) * len(str(rest[0] if rest else options.get("d", ""))))
        result = function(*args, **options)
        _bound(len(result) if isinstance(result, str) else 0)
        return result

    return bounded


class _TemplateNamespace(Namespace):
    """jinja2's namespace, without names that start with an underscore, which may have a meaning in Python."""

    def __init__(*args: Any, **options: Any) -> None:
        for name in dict(*args[1:], **options):
            _refuse_underscore(name)
        Namespace.__init__(*args, **options)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: Any) -> None:
    if str(name).startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template may not store {shown(name)}")


class _Generation(jinja2.ext.Extension):
    """The `{% generation %}` block, which marks the model's output in training; here only its content is rendered."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    extensions = [_Generation, jinja2.ext.loopcontrols]
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters = {name: _bounded_filter(name, function) for name, function in environment.filters.items()}
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "namespace": _TemplateNamespace,
    }
    return environment


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # jinja2's own filter escapes characters for HTML, which models were not trained on.
    if isinstance(indent, int) and indent > 64:
        raise _Exhausted("a huge indent")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> None:
    raise _Refused(shown(message) if len(str(message)) > 400 else str(message))


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
