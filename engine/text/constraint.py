"""Constrains a reply to a JSON schema, a regular expression, a list of choices or a grammar, by `llguidance`.

A `Constraint` (`engine.text.output_form`) says what is wanted, a `Grammar` is the compiled form for one model's
tokenizer, and a `GrammarState` follows one reply and says which tokens may come next. The sampler draws among those
only.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from

from engine.errors import SourceError
from engine.text import grammar_trial
from engine.text.output_form import Constraint, ConstraintError
from engine.text.tokenizer import Tokenizer

MAX_CHARS = 1 << 18
TRUSTED_CHARS = 4096
REMEMBERED_TRIALS = 256
# Keywords of a schema that make nothing larger than they are: a number or a pattern of a few characters can make
# gigabytes, and a choice beside other keywords multiplies with them.
_NOTES = frozenset({"$schema", "default", "description", "title"})
_VALUES = frozenset({"const", "enum", "required", "type"})
_MAX_MESSAGE = 300
# One space, or a line break and its indentation: models write no other whitespace, and this much cannot go on for ever.
WHITESPACE = r"[\x20]|\x0A[\x20]{0,24}"
# Kinds of tokens whose masks are found once and for all: of `llguidance`'s own four, those that make masks faster.
SLICES = [r'[^"\\\x00-\x1F\x7F]{1,30}', r'[^"\\\x00-\x1F\x7F]+']
_BEFORE = "\x02"  # a character that no vocabulary joins with the next one


class Grammar:
    """A compiled constraint; replies that have the same one share it."""

    def __init__(self, matcher: LLMatcher, field: str) -> None:
        self._matcher, self._field = matcher, field

    def begin(self, end_ids: Collection[int]) -> GrammarState:
        """Return the state before the first token of a reply."""
        return GrammarState(self._matcher.deep_copy(), end_ids, self._field)


class GrammarState:
    """One reply's place in its grammar."""

    def __init__(self, matcher: LLMatcher, end_ids: Collection[int], field: str) -> None:
        self._matcher, self._end_ids, self._field = matcher, frozenset(end_ids), field
        self._is_lost = False  # the library failed

    def masks(self, guesses: Sequence[int] = ()) -> list[bytes | None]:
        """Return the tokens allowed next, and after each guess, one bit each; None where no token can count.

        No token counts after a guess that the grammar does not allow, nor after the end of the text.
        """
        masks: list[bytes | None] = [self._mask()]
        taken = 0
        for guess in guesses:
            if guess in self._end_ids or not self._try(self._matcher.validate_tokens, [guess]):
                break
            self._try(self._matcher.consume_token, guess)
            taken += 1
            if self._is_lost or self._matcher.is_stopped():
                break
            masks.append(self._mask())
        if taken:
            self._try(self._matcher.rollback, taken)
        return masks + [None] * (len(guesses) + 1 - len(masks))

    def _mask(self) -> bytes | None:
        """Return the allowed tokens; None if the grammar cannot be followed any more."""
        mask: bytes | None = None if self._matcher.is_error() else self._try(self._matcher.compute_bitmask)
        return None if self._is_lost or self._matcher.is_error() else mask

    def _try(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call the library; whatever it raises, and be it a Rust panic, this reply alone must fail."""
        try:
            return function(*arguments)
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException:
            self._is_lost = True
            return None

    def accept(self, token: int) -> None:
        """Take the token that was drawn."""
        self._try(self._matcher.consume_token, token)

    @property
    def is_complete(self) -> bool:
        """True if nothing can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def problem(self) -> ConstraintError | None:
        """The reason why the grammar cannot be followed any more, if it cannot."""
        if not (self._is_lost or self._matcher.is_error()):
            return None
        return ConstraintError(self._field, f"too complex to follow ({_line(self._matcher.get_error())}): simplify it")


class GrammarCompiler:
    """Compiles constraints for one model; safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Collection[int]) -> None:
        self._tokenizer, self._vocab_size, self._end_ids = tokenizer, vocab_size, sorted(end_ids)
        self._lock = threading.Lock()
        self._prepared: LLTokenizer | None = None
        self._refusal = ""  # why the library does not take this vocabulary
        self._tried: OrderedDict[bytes, None] = OrderedDict()  # hashes of texts that a trial has found good

    def compile(self, constraint: Constraint) -> Grammar:
        """Return the compiled constraint; raises `ConstraintError` if it is wrong."""
        if len(constraint.text) > MAX_CHARS:
            raise ConstraintError(constraint.field, f"longer than {MAX_CHARS} characters")
        vocabulary = self._vocabulary()
        try:
            text = _source(constraint)
            if not self.is_harmless(constraint):
                self._try_apart(text, constraint.field)
            matcher = LLMatcher(vocabulary, text, log_level=0, limits=LLParserLimits(verbose_errors=False))
        except (KeyboardInterrupt, SystemExit, MemoryError, ConstraintError):
            raise
        except BaseException as error:  # a Rust panic does not derive from Exception
            raise ConstraintError(constraint.field, _line(str(error))) from error
        if matcher.is_error():
            raise ConstraintError(constraint.field, _line(matcher.get_error()))
        return Grammar(matcher, constraint.field)

    @staticmethod
    def is_harmless(constraint: Constraint) -> bool:
        """True for what needs no trial: a few choices, or a short schema that only names types, fields and values."""
        if len(constraint.text) > TRUSTED_CHARS or constraint.kind not in ("choice", "json"):
            return False
        return constraint.kind == "choice" or _is_plain(constraint.text)

    def _try_apart(self, text: str, field: str) -> None:
        """Compile a text in another process first, once; raises `ConstraintError` if it is wrong or does harm."""
        digest = hashlib.sha256(text.encode(errors="surrogatepass")).digest()
        with self._lock:
            is_known = digest in self._tried
        if not is_known:
            problem = grammar_trial.problem_of(text, self._tokenizer.added_tokens, self._size)
            if problem is not None:
                raise ConstraintError(field, _line(problem))
        with self._lock:
            self._tried[digest] = None
            self._tried.move_to_end(digest)
            if len(self._tried) > REMEMBERED_TRIALS:
                self._tried.popitem(last=False)

    @property
    def _size(self) -> int:
        return max(self._vocab_size, self._tokenizer.vocab_size)

    def _vocabulary(self) -> LLTokenizer:
        """Return the tokenizer as `llguidance` needs it; the first call takes about a second for a large vocabulary."""
        with self._lock:
            if self._refusal:
                raise SourceError(self._refusal)
            if self._prepared is None:
                self._prepared = self._prepare()
            return self._prepared

    def _prepare(self) -> LLTokenizer:
        """Make it in two steps: no other thread runs during one of them, nor while the library reads rules as JSON."""
        vocabulary = TokenizerWrapper(_Vocabulary(self._tokenizer, self._size, self._end_ids))
        try:
            without_slices = LLTokenizer(vocabulary, eos_token=self._end_ids or None, slices=[])
            vocabulary.tokens = ()  # the library has copied them
            return without_slices.with_slices(SLICES)
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # a Rust panic does not derive from Exception
            self._refusal = f"this model's tokenizer allows no constrained replies ({_line(str(error))})"
            raise SourceError(self._refusal) from error


class _Vocabulary:
    """A tokenizer in the form in which `llguidance` takes it from Python: the bytes of each token, and how to encode.

    Special tokens are those that `llguidance` finds in a `tokenizer.json`. Ids without a token stay empty: no reply
    gets them.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, size: int, end_ids: Sequence[int]) -> None:
        added = {index: tokenizer.token_text(index) or "" for index in tokenizer.plain_added_ids}
        marks = {index for index, text in added.items() if text.startswith("<") and text.endswith(">")}
        special = {index: tokenizer.token_text(index) or "" for index in tokenizer.special_ids | marks}
        self.eos_token_id = end_ids[0] if end_ids else None
        self.special_token_ids = sorted(special)
        self.tokens = [
            special[index].encode() if index in special else tokenizer.token_bytes(index) for index in range(size)
        ]
        self._tokenizer, self._before = tokenizer, tokenizer.encode(_BEFORE, add_special=False)

    def __call__(self, text: str) -> list[int]:
        """Return the ids of a text within a reply: without the space that some tokenizers put before a text."""
        if not self._tokenizer.is_byte_level:
            ids = self._tokenizer.encode(_BEFORE + text, add_special=False)
            if ids[: len(self._before)] == self._before:
                return ids[len(self._before) :]
        return self._tokenizer.encode(text, add_special=False)


def _is_plain(text: str) -> bool:
    """True for a schema in which nothing can be larger than its text."""
    try:
        waiting = [json.loads(text)]
    except (ValueError, RecursionError):
        return False
    while waiting:
        schema = waiting.pop()
        if isinstance(schema, bool):
            continue
        if not isinstance(schema, dict):
            return False
        for keyword, value in schema.items():
            if keyword in ("items", "additionalProperties"):
                waiting.append(value)
            elif keyword == "properties" and isinstance(value, dict):
                waiting += value.values()
            elif keyword == "anyOf" and isinstance(value, list) and schema.keys() <= {"anyOf", *_NOTES}:
                waiting += value
            elif keyword not in _NOTES | _VALUES:
                return False
    return True


def _line(text: str) -> str:
    """Return a message of the library as one short line."""
    line = " ".join(text.split())
    return line if len(line) <= _MAX_MESSAGE else f"{line[:_MAX_MESSAGE]}…"


def _source(constraint: Constraint) -> str:
    """Return a constraint in `llguidance`'s own language; raises `ValueError` if it cannot be read."""
    if constraint.kind == "json":
        schema = json.loads(constraint.text)
        if not isinstance(schema, dict | bool):
            raise ValueError("a schema must be a JSON object")
        return json_grammar(schema)
    if constraint.kind == "choice":
        choices = json.loads(constraint.text)
        if not choices or not all(isinstance(choice, str) and choice for choice in choices):
            raise ValueError("choices must be strings, at least one, and none empty")
    return grammar_from(constraint.kind, constraint.text)


def json_grammar(schema: Mapping[str, Any] | bool) -> str:
    """Return the grammar of the JSON values that a schema allows."""
    whole: dict[str, Any] = {"not": {}} if schema is False else {} if schema is True else dict(schema)
    return LLMatcher.grammar_from_json_schema(json.dumps(whole), overrides={"whitespace_pattern": WHITESPACE})
