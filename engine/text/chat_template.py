"""Renders a conversation to a prompt with the model's own chat template.

Templates are untrusted programs that come with a model, so they run in jinja2's sandbox, in the dialect that
`transformers` defines, with bounds on length, steps, time, sizes and output. Nothing stops a call of C code, and no
other thread runs meanwhile. So templates are offered only the filters, tests, functions and methods that those of known
models use, none of which takes longer than about 0.1 s within the bounds on sizes. `engine.text.tokenizer` tokenizes
the prompt (with `add_special=False`, because a template writes its own begin marker).
"""

from __future__ import annotations

import datetime
import functools
import inspect
import json
import re
import sys
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, Sized, ValuesView
from contextvars import ContextVar
from itertools import chain, islice
from json.encoder import encode_basestring_ascii
from typing import Any, NoReturn, TypeVar, cast

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.nodes
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from engine.errors import EngineError, SourceError
from engine.sources.base import TokenizerSpec
from engine.sources.files import shown

T = TypeVar("T")

# Used for base models, which have no template: a plain transcript of the conversation.
DEFAULT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize }}: {{ message['content'] }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
_ANOTHER = "choose another model"
MAX_CHARS = 1 << 16  # the longest known has 20,000, and the time to compile grows with the square
MAX_PYTHON_CHARS = 3 << 16  # of the Python code that jinja2 makes of a template; of known ones 61,000
MAX_SECONDS = 5.0  # of this thread's own computing: on a busy machine an honest template takes several times as long
MAX_STEPS = 2_000_000
MAX_OUTPUT = 16 << 20
_MAX_NUMBER = 100_000  # bound on numeric arguments of string methods and filters, and on bases of powers
_MAX_TEXT = 4 << 20  # characters or elements of one value
_MAX_BUILT_BYTES = 512 << 20  # all values that one rendering creates, together
_MAX_DEPTH = 100
_CHUNK = 1 << 16
_FIXED, _PLAIN = (bool, float), (str, int, float)
_LISTS = (list, tuple, set, frozenset, range)
_CHARS_PER_ELEMENT = 16  # an element of a list counts as so many characters, because of the memory that it takes
_ELEMENT_BYTES = 72  # a short text or list and the reference to it
_OBJECT_BYTES = 512  # a namespace, an iterator
# What templates of known models use, and what goes with it.
_FILTERS = frozenset({
    "abs", "capitalize", "count", "d", "default", "dictsort", "first", "float", "format", "indent", "int", "items",
    "join", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "replace", "reverse",
    "safe", "select", "selectattr", "sort", "string", "title", "tojson", "trim", "unique", "upper",
})  # fmt: skip
# Tests that compare values. Python does that, like hashing, in one step which nothing interrupts, and which goes
# through everything that a value refers to, as often as it is referred to.
_COMPARING_TESTS = frozenset({
    "!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "ge", "greaterthan", "gt", "in", "le", "lessthan", "lt", "ne",
})  # fmt: skip
_TESTS = _COMPARING_TESTS | {
    "boolean", "defined", "divisibleby", "even", "false", "float", "integer", "iterable", "mapping", "none", "number",
    "odd", "sameas", "sequence", "string", "true", "undefined",
}  # fmt: skip
_METHODS = frozenset({
    "capitalize", "center", "count", "endswith", "find", "format", "get", "index", "isalnum", "isalpha", "isdigit",
    "islower", "isnumeric", "isspace", "isupper", "items", "join", "keys", "lower", "lstrip", "partition",
    "removeprefix", "removesuffix", "replace", "rfind", "rpartition", "rsplit", "rstrip", "split", "splitlines",
    "startswith", "strip", "title", "upper", "values",
    "changed", "cycle",  # of `loop`
})  # fmt: skip
# Filters that pass values on without writing them out as text; all others are bounded by the text of their input.
_LIST_FILTERS = frozenset({"dictsort", "items", "list", "sort", "unique"})
_STRUCTURAL_FILTERS = _LIST_FILTERS | {
    "abs", "count", "first", "last", "length", "map", "max", "min", "reject", "rejectattr", "reverse", "select",
    "selectattr",
}  # fmt: skip
_COMPARING_FILTERS = frozenset({"dictsort", "max", "min", "sort", "unique"})
_CASES = frozenset({"capitalize", "lower", "title", "upper"})  # filters and methods
_CASE_GROWTH = 3  # characters that one becomes at most
_SEARCHING_METHODS = ("lstrip", "rfind", "rpartition", "rsplit", "rstrip", "strip")
_MAX_SEARCH = 1 << 24  # characters of a text times those that are searched for in it, where Python compares all pairs
_HASH_BITS = 60  # larger numbers can have equal hashes, which makes a dict of them slow: each counts as
_LARGE_NUMBER_CHARS = 1024
_MAX_FORM = MAX_CHARS  # of a format
_MAX_DIGITS = 1 << 12  # characters of a text that is read as a number
_LINE_BREAKS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"


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
        text = spec.chat_template or DEFAULT_TEMPLATE
        if len(text) > MAX_CHARS:
            raise SourceError(f"the model's chat template has more than {MAX_CHARS} characters: {_ANOTHER}")
        try:
            with _Budget():
                self._template = _compiled(text)
        except _NotOffered as error:
            raise _unusable(error) from error
        except _Exhausted as error:
            raise SourceError(f"the model's chat template exceeds a limit ({error}): {_ANOTHER}") from error
        except Exception as error:  # of jinja2, or of Python, which compiles what jinja2 makes of the template
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
        except _NotOffered as error:
            raise _unusable(error) from error
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


class _Exhausted(BaseException):
    """The template exceeded a bound on time, steps or size; jinja2 goes on after exceptions of some kinds."""


class _NotOffered(BaseException):
    """The template uses a filter, test or method that is not on the lists above, and may take any time; names it."""


def _unusable(error: _NotOffered) -> SourceError:
    return SourceError(f"the model's chat template uses {error}, which Shoal does not offer to templates: {_ANOTHER}")


class _Budget:
    """Stops a runaway template: counts its lines in this thread, its computing time, and the bytes that it creates."""

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        self._steps, self._deadline = MAX_STEPS, time.thread_time() + MAX_SECONDS
        self._look_at = time.monotonic() + MAX_SECONDS  # no sooner can it have computed for so long
        self._bytes_left = _MAX_BUILT_BYTES
        self._token = _running.set(self)
        sys.settrace(self._on_call)

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)
        _running.reset(self._token)

    def spend(self, nbytes: int) -> None:
        """Count bytes of a value that was created, whether or not the template still holds it."""
        self._bytes_left -= nbytes
        if self._bytes_left < 0:
            raise _Exhausted("too much memory")

    def _on_call(self, frame: Any, event: str, argument: Any) -> Any:
        # Only lines of compiled templates and macros are counted. Filters of long lists make many calls within a line.
        # Python drops what is raised in a generator that it closes, and traces no further: a template would never end.
        if not frame.f_code.co_flags & inspect.CO_GENERATOR:
            self._check_time()
        return self._on_line if frame.f_code.co_filename == "<template>" else None

    def _on_line(self, frame: Any, event: str, argument: Any) -> Any:
        self._steps -= 1
        if self._steps < 0:
            raise _Exhausted("too many steps")
        self._check_time()  # one line may take long
        return self._on_line

    def _check_time(self) -> None:
        if time.monotonic() > self._look_at:
            left_s = self._deadline - time.thread_time()
            if left_s < 0:
                raise _Exhausted("too much time")
            self._look_at = time.monotonic() + left_s


_running: ContextVar[_Budget | None] = ContextVar("_running", default=None)


class _BoundedCode(jinja2.compiler.CodeGenerator):
    """Compiles `a ~ b` to a call of the bounded `_Sandbox.concat`, counts literals and slices as created values, and
    has what is compared or becomes a key of a dict checked first. Raises `_NotOffered`.
    """

    def visit_Filter(self, node: jinja2.nodes.Filter, frame: jinja2.compiler.Frame) -> None:
        self._visit_offered(super().visit_Filter, node, frame, _require_filter)

    def visit_Test(self, node: jinja2.nodes.Test, frame: jinja2.compiler.Frame) -> None:
        self._visit_offered(super().visit_Test, node, frame, _require_test)

    def _visit_offered(
        self, visit: Callable[[Any, jinja2.compiler.Frame], None], node: Any, frame: jinja2.compiler.Frame,
        require: Callable[[str], None],
    ) -> None:  # fmt: skip
        try:
            require(node.name)
        except _NotOffered as error:
            if not frame.soft_frame:
                raise
            self.write(f"environment.refuse({str(error)!r})")  # under a condition: only a reply that needs it fails
        else:
            visit(node, frame)

    def visit_ScopedEvalContextModifier(self, node: Any, frame: jinja2.compiler.Frame) -> None:
        raise _NotOffered("the tag autoescape")  # with it, texts are of a kind that escapes what is added to them

    def visit_Getitem(self, node: jinja2.nodes.Getitem, frame: jinja2.compiler.Frame) -> None:
        self._visit_counted(super().visit_Getitem, node, frame, isinstance(node.arg, jinja2.nodes.Slice))

    def visit_List(self, node: jinja2.nodes.List, frame: jinja2.compiler.Frame) -> None:
        self._visit_counted(super().visit_List, node, frame)

    def visit_Dict(self, node: jinja2.nodes.Dict, frame: jinja2.compiler.Frame) -> None:
        self.write("environment.built({")
        for item in node.items:
            self._visit_compared(item.key, frame, "key")
            self.write(": ")
            self.visit(item.value, frame)
            self.write(", ")
        self.write("})")

    def visit_Compare(self, node: jinja2.nodes.Compare, frame: jinja2.compiler.Frame) -> None:
        self.write("(")
        self._visit_compared(node.expr, frame)
        for operand in node.ops:
            self.visit(operand, frame)
        self.write(")")

    def visit_Operand(self, node: jinja2.nodes.Operand, frame: jinja2.compiler.Frame) -> None:
        self.write(f" {jinja2.compiler.operators[node.op]} ")
        self._visit_compared(node.expr, frame, "searched" if node.op in ("in", "notin") else "compared")

    def _visit_compared(self, node: jinja2.nodes.Node, frame: jinja2.compiler.Frame, check: str = "compared") -> None:
        self.write(f"environment.{check}(")
        self.visit(node, frame)
        self.write(")")

    def visit_Tuple(self, node: jinja2.nodes.Tuple, frame: jinja2.compiler.Frame) -> None:
        self._visit_counted(super().visit_Tuple, node, frame, node.ctx == "load")

    def _visit_counted(
        self, visit: Callable[[Any, jinja2.compiler.Frame], None], node: Any, frame: jinja2.compiler.Frame,
        counted: bool = True,
    ) -> None:  # fmt: skip
        self.write("environment.built(" if counted else "")
        visit(node, frame)
        self.write(")" if counted else "")

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:
        self.write("environment.concat((")
        for part in node.nodes:
            self.write("environment.text(")
            self.visit(part, frame)
            self.write("), ")
        self.write("))")


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, with bounds on the size of what one operation creates."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})
    code_generator_class = _BoundedCode

    @staticmethod
    def refuse(what: str) -> NoReturn:
        """Raise `_NotOffered` where a part of the template that is under a condition is reached."""
        raise _NotOffered(what)

    @staticmethod
    def built(value: Any) -> Any:
        """Count the memory of a value that the template created, and return it."""
        return _built(value)

    @staticmethod
    def compared(value: T) -> T:
        """Return a value that is compared or hashed next; raises `_Exhausted` if that may take long."""
        return _comparable(value)

    @staticmethod
    def key(value: T) -> T:
        """Return a key of a dict; raises `_NotOffered` for tuples, which can be chosen to have equal hashes."""
        if value is not None and not isinstance(value, _PLAIN):
            raise _NotOffered("a dict with keys that are neither texts nor numbers")
        return value

    @staticmethod
    def searched(value: T) -> T:
        """Return a value in which another one, which was measured, is looked for; as `compared`, but not for a dict.

        Looking up a key compares few others. Templates look into each message for each message before it.
        """
        return value if type(value) is dict else _comparable(value)

    @staticmethod
    def text(value: Any) -> str:
        """Return `str(value)`; raises `_Exhausted` instead of building a text that is too long."""
        if isinstance(value, str):
            return value
        _bound(_text_length(value))
        return _built(str(value))

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """Join the output of a template, macro or block; raises `_Exhausted` if it is too long."""
        kept = list(pieces)
        _bound(sum(map(len, kept)))
        return _built("".join(kept))

    def getitem(self, obj: Any, argument: Any) -> Any:
        if not isinstance(argument, str | int | slice):
            _bound(_text_length(argument))  # an error's text names the missing element
        return super().getitem(obj, argument)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and (abs(left) > _MAX_NUMBER or abs(right) > 64):
            raise _Exhausted("a huge power")
        if operator == "*" and any(hasattr(side, "__len__") for side in (left, right)):
            count = right if isinstance(right, int) else left
            sequence = left if count is right else right
            _bound(_weight(sequence) * max(int(count), 0))
        if operator == "*" and isinstance(left, int) and isinstance(right, int):
            _bound((left.bit_length() + right.bit_length()) << 8)
        if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            _bound(_weight(left) + _weight(right))
        if operator == "%" and isinstance(left, str):
            _bound_format(left, right if isinstance(right, tuple) else (right,))
        return _built(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return jinja2's safe replacement for `str.format`, which first checks the size of the result."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None or value.__name__ not in _METHODS:
            return None
        safe_format = wrapped

        def bounded(*args: Any, **options: Any) -> str:
            _bound_format(value.__self__, (*args, *options.values()))
            return _built(safe_format(*args, **options))

        return bounded

    def call(self, context: Any, callee: Any, /, *args: Any, **options: Any) -> Any:
        owner, name = getattr(callee, "__self__", None), getattr(callee, "__name__", "")
        if owner is not None and name not in _METHODS:
            raise _NotOffered(f"the method {shown(name)}")
        if isinstance(owner, str):
            args = _bound_method(name, owner, args, options)
        if not callable(callee):
            _bound(_text_length(callee))  # an error's text shows it
        if not isinstance(callee, Macro):  # whose own lines are counted
            compared = owner if name in ("count", "index") else None
            for value in (compared, *args, *options.values()):
                _comparable(value)
        return _built(super().call(context, callee, *args, **options), _ELEMENT_BYTES)

    def call_filter(self, name: str, *args: Any, **options: Any) -> Any:
        """Call a filter that the template names in a value, as `map` does."""
        _require_filter(name)
        return super().call_filter(name, *args, **options)

    def call_test(self, name: str, *args: Any, **options: Any) -> Any:
        """Call a test that the template names in a value, as `select` does."""
        _require_test(name)
        return super().call_test(name, *args, **options)


class _BoundedLoop(LoopContext):
    """The variable `loop`, which makes a list of a text to know its length."""

    def __init__(self, iterable: Any, *args: Any, **options: Any) -> None:
        if isinstance(iterable, str):
            _bound(len(iterable) * _CHARS_PER_ELEMENT)
        super().__init__(iterable, *args, **options)


def _require_filter(name: str) -> None:
    if name not in _FILTERS:
        raise _NotOffered(f"the filter {shown(name)}")


def _require_test(name: str) -> None:
    if name not in _TESTS:
        raise _NotOffered(f"the test {shown(name)}")


@jinja2.pass_context  # jinja2 then evaluates no output while it compiles, where there is no budget
def _finalize(context: Any, value: Any) -> str:
    """Turn the value of an output expression into text, within bounds."""
    return _Sandbox.text(value)


def _bound(size: int) -> None:
    """Refuse a value of `size` characters or elements before it is created."""
    if size > _MAX_TEXT:
        raise _Exhausted("a value that is too large")


def _comparable(value: T) -> T:
    """Return a value; raises `_Exhausted` if comparing or hashing it may take long."""
    if value is not None and not isinstance(value, _PLAIN):
        _bound(_text_length(value))
    return value


def _bound_search(text: Any, part: Any) -> None:
    """Refuse to search where each character of a text may be compared with each of `part`."""
    if isinstance(text, str) and isinstance(part, str) and len(text) * len(part) > _MAX_SEARCH:
        raise _Exhausted("a search that takes long")


def _built(value: T, element_bytes: int = 0) -> T:
    """Count the memory of a value that was created, and of its elements if they are new too; return the value."""
    budget = _running.get()
    if budget is not None:
        if isinstance(value, list | tuple | dict):
            budget.spend(sys.getsizeof(value) + element_bytes * len(value))
        elif isinstance(value, str):
            budget.spend(sys.getsizeof(value))
        elif not isinstance(value, int | float | None):
            budget.spend(_OBJECT_BYTES)
    return value


def _weight(value: Any) -> int:
    """Return a value's length as `_bound` takes it: characters, or elements by the characters that they count as."""
    return len(value) * (1 if isinstance(value, str) else _CHARS_PER_ELEMENT)


def _text_length(value: Any, indent: int = 0) -> int:
    """Return at least the length of `value` as text or as JSON, without building it.

    A container that is referred to many times is measured once for each depth. Raises `_Exhausted` if the length is
    beyond what `_bound` allows, or if values are nested deeper than `_MAX_DEPTH`, which includes those without end.
    """
    known: dict[tuple[int, int], int] = {}

    def measure(item: Any, depth: int) -> int:
        if depth > _MAX_DEPTH:
            raise _Exhausted("values nested too deeply")
        if item is None or isinstance(item, _FIXED):
            return 32
        if isinstance(item, int):
            large = _LARGE_NUMBER_CHARS if item.bit_length() > _HASH_BITS else 2
            return large + item.bit_length() // 3
        key = id(item), depth
        if key not in known:
            known[key] = _quoted_length(item) if isinstance(item, str) else total(_children(item), depth)
        return known[key]

    def total(children: Iterable[Any], depth: int) -> int:
        length = 256  # brackets, the name of a type, an address
        for child in children:
            length += 4 + indent * (depth + 1)
            # Most are short texts: a call for each would take longer than all else, as calls are watched.
            if type(child) is str and len(child) <= _CHUNK and depth < _MAX_DEPTH:
                length += max(len(repr(child)), len(encode_basestring_ascii(child)))
            else:
                length += measure(child, depth + 1)
            if length > _MAX_TEXT:
                _bound(length)
        return length

    return measure(value, 0)


def _children(value: Any) -> Iterable[Any]:
    """Return the values that are written out when `value` is; none for objects whose text has a fixed length."""
    if isinstance(value, _LISTS):
        return cast("Iterable[Any]", value)
    if isinstance(value, dict):  # most mappings: their abstract class is asked in Python, and calls are watched
        return chain(value, value.values())
    if isinstance(value, Namespace):
        value = object.__getattribute__(value, "_Namespace__attrs")
    if isinstance(value, KeysView | ValuesView | ItemsView):
        value = getattr(value, "mapping", ())
    if isinstance(value, Mapping):
        return chain(value.keys(), value.values())
    return ()


def _quoted_length(text: str) -> int:
    """Return at least the length of a text in quotes, with escapes, as `repr` or JSON writes it."""
    length = 2
    for start in range(0, len(text), _CHUNK):
        chunk = text[start : start + _CHUNK]
        length += max(len(repr(chunk)), len(encode_basestring_ascii(chunk)))
    return length


def _plain_length(value: Any) -> int:
    """Return at least the length of `str(value)`: that of a text itself, without quotes."""
    return len(value) if isinstance(value, str) else _text_length(value)


def _bound_format(text: str, args: Sequence[Any]) -> None:
    """Refuse a format whose result may be too long: huge widths, widths from arguments, many long arguments."""
    if len(text) > _MAX_FORM:
        raise _Exhausted("a format that is too long")
    # No expression goes on past the mark that it begins with: each character is looked at a few times at most.
    if re.search(r"\d{6}|%[^a-zA-Z%]*\*|:[^}:{]*\{", text):
        raise _Exhausted("a format of huge width")
    widths = sum(int(found[0]) for found in re.finditer(r"[0-9]+", text))
    quoted = re.search(r"![ra]|%[^a-zA-Z%]*[ra]|\)[^a-zA-Z%)]*[ra]", text)
    longest = max(map(_text_length if quoted else _plain_length, args), default=0)
    _bound(len(text) + widths + (text.count("%") + text.count("{")) * longest)


def _bound_numbers(args: Sequence[Any], options: Mapping[str, Any]) -> None:
    if any(isinstance(value, int) and abs(value) > _MAX_NUMBER for value in (*args, *options.values())):
        raise _Exhausted("a huge width")


def _bound_method(name: str, owner: str, args: tuple[Any, ...], options: Mapping[str, Any]) -> tuple[Any, ...]:
    """Refuse a call of a text's method with a huge result; return its arguments, iterators as lists."""
    _bound_numbers(args, options)
    if name in _CASES:
        _bound(_CASE_GROWTH * len(owner))
    if name in _SEARCHING_METHODS:
        _bound_search(owner, (*args, *options.values(), None)[0])
    if name == "replace" and len(args) > 1:
        _bound(len(owner) + _occurrences(owner, args[0]) * _plain_length(args[1]))
    if name == "join" and args:
        args = (_listed(args[0]), *args[1:])
        _bound_join(len(owner), args[0])
    if name in ("split", "rsplit", "splitlines"):  # a list of texts takes far more memory than their characters
        breaks = _LINE_BREAKS if name == "splitlines" else [(*args, *options.values(), None)[0]]
        pieces = sum(_occurrences(owner, mark) for mark in breaks)
        _bound(pieces * _CHARS_PER_ELEMENT)
    return args


def _occurrences(text: str, part: Any) -> int:
    """Return how often `part` is in a text; the most that is possible if `part` is no text."""
    return text.count(part) if isinstance(part, str) else len(text) // 2 + 1


def _listed(value: Any) -> Any:
    """Return an iterator's values as a list, any other value unchanged; raises `_Exhausted` if there are too many."""
    if not isinstance(value, Iterator):
        return value
    most = _MAX_TEXT // _CHARS_PER_ELEMENT
    values = list(islice(value, most + 1))
    _bound(len(values) * _CHARS_PER_ELEMENT)
    return _built(values, _ELEMENT_BYTES)


def _bound_join(separator_length: int, values: Any) -> None:
    if isinstance(values, str):
        _bound(len(values) * (_CHARS_PER_ELEMENT + separator_length))
    elif isinstance(values, Iterable):
        lengths: dict[int, int] = {}  # by id: a list may refer to one value many times
        length = 0
        for value in _children(values):
            if id(value) not in lengths:
                lengths[id(value)] = _plain_length(value)
            length += separator_length + lengths[id(value)]
            _bound(length)


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter so that huge results and huge numbers in its arguments are refused; its input may be any number."""
    skipped = 2 if hasattr(function, "jinja_pass_arg") else 1

    @functools.wraps(function)
    def bounded(*args: Any, **options: Any) -> Any:
        passed, value, rest = args[: skipped - 1], args[skipped - 1 : skipped], args[skipped:]
        _bound_numbers(rest, options)
        if name in _LIST_FILTERS | _COMPARING_FILTERS or name == "join":
            value = tuple(map(_listed, value))
        if value:
            _bound_filter(name, value[0], (*rest, *options.values()))
        return _built(function(*passed, *value, *rest, **options), _ELEMENT_BYTES)

    return bounded


def _bound_filter(name: str, value: Any, args: Sequence[Any]) -> None:
    """Refuse a filter whose result may be too long; `args` are its positional and named arguments."""
    if name in ("d", "default"):
        return None
    extra = sum(map(_plain_length, args))
    if name in _COMPARING_FILTERS:
        _comparable(value)
    if name in ("int", "float"):
        if isinstance(value, str) and len(value) > _MAX_DIGITS:
            raise _Exhausted("a number that is too long")
        return None
    if name == "trim" and args:
        _bound_search(_Sandbox.text(value), args[0])
    if name in _STRUCTURAL_FILTERS:  # an error's text may show arguments, and names of attributes are split
        elements = len(value) if name in _LIST_FILTERS and isinstance(value, Sized) else 0
        return _bound((extra + elements) * _CHARS_PER_ELEMENT)
    if name == "join":
        return _bound_join(extra, value)
    if name == "format":
        return _bound_format(_Sandbox.text(value), args)
    length = _plain_length(value)
    if name == "replace":
        text = _Sandbox.text(value)
        length += (text.count(_Sandbox.text(args[0])) if args else len(text) + 1) * extra
    elif name == "indent":
        width = max((arg for arg in args if isinstance(arg, int)), default=4)
        length += (1 + sum(_Sandbox.text(value).count(mark) for mark in _LINE_BREAKS)) * (width + extra)
    elif name in _CASES:
        length *= _CHARS_PER_ELEMENT if name == "title" else _CASE_GROWTH  # `title` makes a list of the words
    return _bound(length + extra)


def _bounded_test(function: Any) -> Callable[..., bool]:
    """Wrap a test so that values which take long to compare are refused."""

    @functools.wraps(function)
    def bounded(*args: Any) -> bool:
        for value in args:
            _comparable(value)
        return bool(function(*args))

    return bounded


class _TemplateNamespace(Namespace):
    """jinja2's namespace, without names that start with an underscore, which may have a meaning in Python."""

    def __init__(self, /, **options: Any) -> None:
        for name in options:
            _refuse_underscore(name)
        Namespace.__init__(self, **options)

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
    # Not optimized: jinja2 would evaluate constant expressions while it compiles, where there is no budget.
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions, optimized=False, finalize=_finalize
    )
    kept = {name: environment.filters[name] for name in _FILTERS}
    environment.filters = {name: _bounded_filter(name, function) for name, function in kept.items()}
    environment.filters |= {"tojson": _tojson, "safe": environment.filters["string"]}
    environment.tests = {name: environment.tests[name] for name in _TESTS}
    environment.tests |= {name: _bounded_test(environment.tests[name]) for name in _COMPARING_TESTS}
    environment.globals = {
        "dict": _dict,
        "namespace": _TemplateNamespace,
        "raise_exception": _raise_exception,
        "range": environment.globals["range"],
        "strftime_now": _strftime_now,
    }
    return environment


def _compiled(text: str) -> jinja2.Template:
    environment = _environment()
    python = environment.compile(text, raw=True)
    if len(python) > MAX_PYTHON_CHARS:
        raise _Exhausted("too many expressions")
    template = jinja2.Template.from_code(environment, compile(python, "<template>", "exec"), environment.globals)
    template.root_render_func.__globals__["LoopContext"] = _BoundedLoop
    return template


def _dict(**items: Any) -> dict[str, Any]:
    return items  # not from pairs, whose keys can be chosen to have equal hashes


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes characters for HTML, which models were not trained on.
    spaces = len(indent) if isinstance(indent, str) else int(indent or 0)
    if spaces > 64 or _text_length(separators) > 512:
        raise _Exhausted("a huge indent or separator")
    _bound(_text_length(value, max(spaces, 0)))
    return _built(
        json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    )


def _raise_exception(message: Any) -> None:
    text = _Sandbox.text(message)
    raise _Refused(shown(text) if len(text) > 400 else text)


def _strftime_now(form: str) -> str:
    if len(form) > 1000:  # the C library repeats directives and pads them to any width
        raise _Exhausted("a date format that is too long")
    return datetime.datetime.now().strftime(form)
