"""Constrained replies: whatever the logits are, the text has the form that was asked for, with guesses or without."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import jsonschema_rs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer
from torch import Tensor

from engine.sources.base import ModelSource, TokenizerSpec
from engine.sources.opening import open_source
from engine.text import grammar_trial
from engine.text.constraint import GrammarCompiler, GrammarState
from engine.text.output_form import Constraint, ConstraintError, ConstraintKind, Tool, ToolUse
from engine.text.reply import ReplySettings, ReplyWriter
from engine.text.sampler import Sampling, sample_rows
from engine.text.tokenizer import Tokenizer
from engine.text.tool_calls import HERMES, call_constraint
from tests.engine.test_tokenizer import byte_level_file, sentencepiece_file

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b\n", "é"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
SAMPLINGS = [Sampling(temperature=0), Sampling(temperature=1.0, seed=5), Sampling(1.0, 20, 0.9, 0.01, 1.2, 6)]


class Written(NamedTuple):
    """A whole reply."""

    tokens: list[int]
    text: str
    finish_reason: str | None


class Model:
    """A tokenizer, its compiler, and logits that a seed and a position determine."""

    def __init__(self, spec: TokenizerSpec, end_ids: tuple[int, ...] = ()) -> None:
        self.tokenizer = Tokenizer(spec)
        eos = self.tokenizer.eos_id
        self.end_ids = frozenset(end_ids) | (frozenset() if eos is None else {eos})
        self.width = self.tokenizer.vocab_size + 5  # padded, as the heads of many models are
        self.compiler = GrammarCompiler(self.tokenizer, self.width, self.end_ids)

    def logits(self, seed: int, position: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed * 10_007 + position)
        return torch.randn(self.width, generator=generator) * 3

    def write(self, constraint: Constraint, sampling: Sampling, seed: int = 0, guesses: int = 0) -> Written:
        """A reply to an empty prompt; with guesses, some of which are wrong, of what a reply without them has."""
        how = ReplySettings(2000, sampling, grammar=self.compiler.compile(constraint))
        right = self.write(constraint, sampling, seed).tokens if guesses else []
        writer = ReplyWriter(self.tokenizer, (), how, self.end_ids)
        text = ""
        while writer.finish_reason is None:
            place = len(writer.token_ids)
            guessed = right[place : place + guesses]
            if place % 3 == 2:
                guessed[-1:] = [place % self.width]
            rows = torch.stack([self.logits(seed, place + row) for row in range(len(guessed) + 1)])
            sampled = sample_rows(rows, writer.requests(guessed)).tolist()
            text += "".join(writer.accept_run(sampled, guessed))
        return Written(writer.token_ids, text, writer.finish_reason)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    folder: Path = tmp_path_factory.mktemp("tokenizers")
    source: ModelSource = open_source("tiny-random", folder)
    return {
        "huggingface": Model(source.tokenizer, tuple(source.config.eos_ids)),
        "byte-level gguf": Model(byte_level_file(folder / "bytes.gguf", "qwen2")),
        "llama3 gguf": Model(byte_level_file(folder / "llama.gguf", "llama-bpe")),
        "sentencepiece gguf": Model(sentencepiece_file(folder / "pieces.gguf")),
    }


KINDS = ["huggingface", "byte-level gguf", "llama3 gguf", "sentencepiece gguf"]
CASES: list[tuple[ConstraintKind, str, str]] = [
    ("regex", r"[A-C]{2,5}-\d{3}", r"[A-C]{2,5}-\d{3}"),
    ("choice", json.dumps(["yes", "no", 'per"haps', "ünklar"]), 'yes|no|per"haps|ünklar'),
    ("grammar", 'root ::= "x" ("+" [0-9]){1,4}', r"x(\+[0-9]){1,4}"),
    ("grammar", 'start: "a" (","  "b"){0,3}', r"a(,b){0,3}"),
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_tokenizer_writes_the_form(models: dict[str, Model], kind: str, sampling: Sampling) -> None:
    model = models[kind]
    for wanted, text, pattern in CASES:
        written = model.write(Constraint(wanted, text, "f"), sampling)
        assert written.finish_reason == "stop"
        assert re.fullmatch(pattern, written.text), written.text
    written = model.write(Constraint("json", json.dumps(PERSON), "f"), sampling, seed=1)
    assert written.finish_reason == "stop"
    jsonschema_rs.validate(PERSON, json.loads(written.text))


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_guesses_change_no_token(models: dict[str, Model], kind: str, sampling: Sampling) -> None:
    model = models[kind]
    for wanted, text, _ in [*CASES, ("json", json.dumps(PERSON), "")]:
        constraint = Constraint(wanted, text, "f")
        alone = model.write(constraint, sampling, seed=2)
        for guesses in (1, 4, 9):
            assert model.write(constraint, sampling, seed=2, guesses=guesses) == alone


@pytest.mark.parametrize("kind", KINDS)
def test_a_vocabulary_is_the_one_that_the_library_reads_from_a_file(models: dict[str, Model], kind: str) -> None:
    tokenizer, ends = models[kind].tokenizer, sorted(models[kind].end_ids)
    own = GrammarCompiler(tokenizer, tokenizer.vocab_size, ends)._vocabulary()
    read = LLTokenizer(tokenizer._backend.to_str(), tokenizer.vocab_size, ends or None)
    ids = range(tokenizer.vocab_size)
    assert [own.decode_bytes([index]) for index in ids] == [read.decode_bytes([index]) for index in ids]
    assert [own.is_special_token(index) for index in ids] == [read.is_special_token(index) for index in ids]
    for text in ("", "a", " a", "  a\nb", '{"name": "é"', *tokenizer.added_tokens):
        assert own.tokenize_str(text) == read.tokenize_str(text)


def test_a_reply_without_room_ends_by_its_length(models: dict[str, Model]) -> None:
    model = models["huggingface"]
    how = ReplySettings(3, grammar=model.compiler.compile(Constraint("regex", "a{20}", "f")))
    writer = ReplyWriter(model.tokenizer, (), how, model.end_ids)
    pieces = [writer.choose(model.logits(0, place)) for place in range(3)]
    assert (writer.finish_reason, "".join(pieces)) == ("length", "aaa")


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("json", '{"type": "nope"}', "nope"),
        ("json", '{"type": "string", "if": {}}', "if"),
        ("json", "[1]", "JSON object"),
        ("json", "{", "Expecting"),
        ("json", '{"$ref": "http://example.org/other.json"}', "f: "),
        ("json", '{"a":' * 5000, "f: "),
        ("regex", "([", "unclosed"),
        ("regex", "(?=x)y", "f: "),
        ("choice", "[]", "at least one"),
        ("choice", '["a", 3]', "strings"),
        ("grammar", "root ::= nothing", "f: "),
        ("grammar", "", "f: "),
        ("regex", "a" * (1 << 18) + "a", "longer"),
    ],
)
def test_a_wrong_constraint_is_refused(models: dict[str, Model], kind: ConstraintKind, text: str, words: str) -> None:
    with pytest.raises(ConstraintError, match=re.escape(words)) as caught:
        models["huggingface"].compiler.compile(Constraint(kind, text, "f"))
    assert caught.value.field == "f"
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


def chain(levels: int, link: Callable[[str], dict[str, Any]]) -> str:
    """A schema whose definitions refer to each other, one to the next."""
    parts = {f"a{level}": link(f"#/$defs/a{level + 1}") for level in range(levels)}
    return json.dumps({"$defs": {**parts, f"a{levels}": {"type": "string"}}, "$ref": "#/$defs/a0"})


def any_of(name: str) -> dict[str, Any]:
    return {"anyOf": [{"$ref": name}, {"$ref": name}]}


HARMFUL: dict[str, tuple[ConstraintKind, str]] = {
    "choices of references": ("json", chain(1500, any_of)),
    "fields of references": ("json", chain(2500, lambda name: {"type": "object", "properties": {"x": {"$ref": name}}})),
    "rules": ("grammar", "start: a0\n" + "".join(f"a{n}: a{n + 1} a{n + 1}\n" for n in range(9000)) + 'a9000: "a"'),
    "nested tokens": ("grammar", "start: A0\n" + "".join(f"A{n}: A{n + 1}\n" for n in range(9000)) + 'A9000: "a"'),
    "a long token": ("grammar", "start: A0\n" + "".join(f"A{n}: A{n + 1} A{n + 1}\n" for n in range(18)) + 'A18: "a"'),
    "intersections": ("grammar", "start: A\nA: " + " & ".join(f"/.*{n}.*/" for n in range(300))),
    "a divisor": ("json", '{"type": "integer", "multipleOf": 99999989}'),
    "a repetition": ("regex", "a{1000000000}"),
    "patterns": ("json", json.dumps({"type": "string", "allOf": [{"pattern": f".*{n}.*"} for n in range(150)]})),
}


LONG = ("patterns", "intersections")  # they compute until their time is over, as a divisor does


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.soak) if name in LONG else name for name in HARMFUL]
)
def test_a_constraint_that_would_end_or_occupy_the_process_is_refused(models: dict[str, Model], name: str) -> None:
    compiler = models["huggingface"].compiler
    with pytest.raises(ConstraintError, match="f: too complex to compile"):
        compiler.compile(Constraint(*HARMFUL[name], "f"))
    compiler.compile(Constraint("json", chain(20, any_of), "f"))


def test_a_schema_of_tools_that_would_end_the_process_is_refused(models: dict[str, Model]) -> None:
    model = models["huggingface"]
    use = ToolUse((Tool("look", parameters=HARMFUL["choices of references"][1], strict=True),), "required")
    constraint = call_constraint(HERMES, use, model.tokenizer, thinking=False)
    with pytest.raises(ConstraintError, match="tools: too complex to compile"):
        model.compiler.compile(constraint)


def test_grammars_with_special_tokens_pass_the_trial(models: dict[str, Model]) -> None:
    model = models["huggingface"]
    name = next(iter(model.tokenizer.added_tokens))
    model.compiler.compile(
        Constraint("grammar", f'start: "a" {name} "b" | "a" <[{model.tokenizer.vocab_size - 1}]>', "f")
    )


def test_a_grammar_that_becomes_too_complex_fails_its_own_reply_only(models: dict[str, Model]) -> None:
    model = models["huggingface"]
    rules = "".join(f'\nr{n}: "a" r{n} "b" | "a" "{n}"' for n in range(1500))
    grammar = "start: " + " | ".join(f"r{n}" for n in range(1500)) + rules
    how = ReplySettings(500, grammar=model.compiler.compile(Constraint("grammar", grammar, "f")))
    bad, good = (ReplyWriter(model.tokenizer, (), one, model.end_ids) for one in (how, ReplySettings(500, Sampling(0))))
    for place in range(500):
        rows = torch.stack([model.logits(1, place)] * 2)
        first, second = sample_rows(rows, [*bad.requests(), *good.requests()]).tolist()
        bad.accept(first)
        assert second == int(rows[1].argmax())
        if bad.finish_reason is not None:
            break
    assert bad.finish_reason == "failed"
    assert isinstance(bad.problem, ConstraintError)
    assert "too complex" in str(bad.problem)


names = st.text("abcdefé ", min_size=1, max_size=6)
bounded = st.one_of(
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 20)),
    st.builds(
        lambda a, b: {"type": "integer", "minimum": a, "maximum": a + b}, st.integers(-99, 99), st.integers(0, 99)
    ),
    st.builds(
        lambda a, b: {"type": "number", "minimum": a, "maximum": a + b, "multipleOf": 1}, *[st.integers(0, 9)] * 2
    ),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"const": {"a": [1]}}, {"enum": ["x", 1, None]}]),
    st.sampled_from([{"type": "string", "pattern": "^[a-z]{2,4}$"}, {"type": "string", "format": "date"}]),
)


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    properties = st.dictionaries(names, inner, min_size=1, max_size=4)
    return st.one_of(
        st.builds(
            lambda items, low, more: {"type": "array", "items": items, "minItems": low, "maxItems": low + more},
            inner,
            st.integers(0, 2),
            st.integers(0, 2),
        ),
        st.builds(
            lambda fields, closed, needed: {
                "type": "object",
                "properties": fields,
                "required": list(fields)[:needed],
                "additionalProperties": False,
                **({"title": "t"} if closed else {}),
            },
            properties,
            st.booleans(),
            st.integers(0, 4),
        ),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
    )


class Panic(BaseException):
    """As Rust's panics come to Python."""


@pytest.mark.parametrize("panics", ["compute_bitmask", "validate_tokens", "consume_token", "rollback"])
def test_a_panic_of_the_library_ends_its_reply_alone(models: dict[str, Model], panics: str) -> None:
    """Such an error passes by handlers of exceptions: it would end the node."""
    model = models["huggingface"]
    matcher = model.compiler.compile(Constraint("choice", json.dumps(["aaaa", "aaab"]), "f"))._matcher

    class Panics:
        def __getattr__(self, name: str) -> Any:
            return self._panic if name == panics else getattr(matcher, name)

        def _panic(self, *arguments: Any) -> Any:
            raise Panic

    (guess,) = model.tokenizer.encode("a", add_special=False)[:1]
    state = GrammarState(cast(Any, Panics()), model.end_ids, "f")
    assert len(state.masks([guess])) == 2
    if panics == "consume_token":
        state.accept(guess)
    assert state.problem is not None
    assert state.masks() == [None]


@settings(max_examples=80, deadline=None)
@given(schema=st.recursive(bounded, nested, max_leaves=8), seed=st.integers(0, 9999))
def test_generated_schemas_are_followed(models: dict[str, Model], schema: dict[str, Any], seed: int) -> None:
    model = models[KINDS[seed % len(KINDS)]]
    with patch.object(grammar_trial, "problem_of", return_value=None):  # a process for each schema would take a minute
        written = model.write(Constraint("json", json.dumps(schema), "f"), Sampling(1.0, seed=seed), seed)
    assert written.finish_reason == "stop"
    jsonschema_rs.validate(schema, json.loads(written.text))
