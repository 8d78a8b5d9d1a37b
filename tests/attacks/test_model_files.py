"""Hostile model files from a creator: templates and tokenizers that take all memory, a manifest that cannot run."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
import torch
from llguidance import LLTokenizer

from app.core.canonical_json import Fields
from app.core.errors import RecordError
from app.manifest.model_shape import config_from, plain_config
from engine.config import Rope
from engine.errors import EngineError, SourceError
from engine.model.rope import RotaryTable
from engine.sources.base import TokenizerSpec
from engine.sources.gguf_tokenizer import byte_alphabet
from engine.sources.layout import MAX_BLOCKS, expected_shapes
from engine.stored_form import stored_bytes
from engine.text import chat_template, constraint
from engine.text.chat_template import MAX_SECONDS, ChatError, ChatTemplate
from engine.text.constraint import GrammarCompiler
from engine.text.output_form import Constraint
from engine.text.tokenizer import Tokenizer
from tests.app.tiny_source import CONFIG

ROOT = Path(__file__).resolve().parents[2]


# --- tokenizers -------------------------------------------------------------------------------------------------------

BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
TEN_TIMES = {"type": "Replace", "pattern": {"String": "a"}, "content": 10 * "a"}
WHOLE_TEXT = {"Sequence": {"id": "A", "type_id": 0}}


def tokenizer_of(vocabulary: dict[str, int] | None = None, **rules: Any) -> TokenizerSpec:
    """A tokenizer with a token for every byte, some more, and these rules."""
    letters = {letter: number for number, letter in enumerate(byte_alphabet())}
    model = {"type": "BPE", "vocab": letters | (vocabulary or {}), "merges": []}
    made = {"version": "1.0", "added_tokens": [], "model": model, "pre_tokenizer": BYTES, "decoder": BYTES} | rules
    return TokenizerSpec(json.dumps(made), None, None, None, {}, False)


def template(single: list[Any], ids: int = 1) -> dict[str, Any]:
    """A rule that makes a text to these pieces, where the special token x is so many tokens."""
    special = {"x": {"id": "x", "ids": ids * [1], "tokens": ids * ["a"]}}
    return {"type": "TemplateProcessing", "single": single, "pair": [WHOLE_TEXT], "special_tokens": special}


@pytest.mark.parametrize(
    "rules",
    [
        {"normalizer": {"type": "Sequence", "normalizers": 9 * [TEN_TIMES]}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": 3 * [TEN_TIMES]}]}},
        {"normalizer": {"type": "Sequence", "normalizers": 9 * [TEN_TIMES]}, "post_processor": template([])},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": ""}, "content": 1000 * "a"}},
        {"normalizer": {"type": "Sequence", "normalizers": 9 * [{"type": "ByteLevel"}]}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": 9 * [BYTES]}},
        {"post_processor": template(1000 * [WHOLE_TEXT])},
        {"post_processor": template([WHOLE_TEXT, *(100 * [{"SpecialToken": {"id": "x", "type_id": 0}}])], ids=100)},
        {"post_processor": {"type": "Sequence", "processors": 9 * [template(10 * [WHOLE_TEXT])]}},
    ],
)
def test_a_tokenizer_that_makes_texts_far_longer_is_refused(rules: dict[str, Any]) -> None:
    """The library that follows its rules ends the whole process where it gets no memory."""
    with pytest.raises(SourceError, match="times as long"):
        Tokenizer(tokenizer_of(**rules))


@pytest.mark.parametrize(
    "rules",
    [
        {"normalizer": {"type": "NFKC"}},
        {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [
                    {"type": "Prepend", "prepend": "\u2581"},
                    {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
                ],
            }
        },
        {"post_processor": template([{"SpecialToken": {"id": "x", "type_id": 0}}, WHOLE_TEXT])},
        {"post_processor": BYTES},
    ],
)
def test_tokenizers_of_known_kinds_are_not_refused(rules: dict[str, Any]) -> None:
    assert Tokenizer(tokenizer_of(**rules)).encode("a text")


LONG = 5000 * "a"
ADDED = {"id": 256, "content": LONG, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


@pytest.mark.parametrize(
    "rules",
    [
        {"vocabulary": {LONG: 256}},
        {"added_tokens": [{**ADDED, "special": False}]},
        {"model": {"type": "Unigram", "unk_id": 0, "vocab": [["a", 0.0], [LONG, -1.0]]}},
    ],
    ids=["vocabulary", "added", "unigram"],
)
def test_a_tokenizer_with_a_token_of_any_length_is_refused(rules: dict[str, Any]) -> None:
    """One of 60 million letters made 60 MB of each token of a reply, and 4 GB and 10 s of itself if it was added."""
    with pytest.raises(SourceError, match="a token of 5000 characters"):
        Tokenizer(tokenizer_of(**rules))


def spelled(count: int, chars: int) -> list[str]:
    """So many texts of so many characters."""
    return [f"{number:a>{chars}}" for number in range(count)]


def added(count: int, chars: int, **how: bool) -> list[dict[str, Any]]:
    """So many added tokens of so many characters."""
    texts = enumerate(spelled(count, chars))
    return [{**ADDED, "id": 256 + number, "content": text, "special": False, **how} for number, text in texts]


class Reads:
    """The library, which reads nothing longer than this."""

    longest = 10_000

    @classmethod
    def from_str(cls, text: str) -> tokenizers.Tokenizer:
        assert len(text) <= cls.longest
        return tokenizers.Tokenizer.from_str(text)


MANY: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "long added tokens": ("1052000 characters of added tokens", lambda: {"added_tokens": added(263, 4000)}),
    "values": ("values", lambda: {"model": {"vocab": {}, "merges": 1_600_000 * [[]]}}),
    "names": ("names", lambda: {"model": {"vocab": dict.fromkeys(map(str, range(1_100_000)))}}),
    "tokens": ("tokens", lambda: {"model": {"vocab": dict.fromkeys(map(str, range(400_001)))}}),
    "merges": ("merges", lambda: {"model": {"vocab": {}, "merges": 600_001 * ["a a"]}}),
    "long tokens": ("characters of tokens", lambda: {"model": {"vocab": dict.fromkeys(spelled(2100, 4000))}}),
    "scores": ("bytes of tokens", lambda: {"model": {"vocab": [[one, 0] for one in spelled(530, 4000)]}}),
    "a map": ("characters of maps", lambda: {"normalizer": {"precompiled_charsmap": 600_000 * "A"}}),
    "growth": ("times as long", lambda: {"normalizer": {"type": "Sequence", "normalizers": 6 * [TEN_TIMES]}}),
}


@pytest.mark.parametrize("what", MANY)
def test_a_tokenizer_that_is_far_larger_than_known_ones_is_refused_before_the_library_reads_it(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread runs while it does: 24 MiB of added tokens held a node for 46 s, cost its links and took 1.9 GB."""
    words, rules = MANY[what]
    spec = tokenizer_of(**({"added_tokens": added(10, 1000, normalized=True)} | rules()))
    monkeypatch.setattr("engine.text.tokenizer.tokenizers", SimpleNamespace(Tokenizer=Reads))
    with pytest.raises(SourceError, match=words):
        Tokenizer(spec)


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        ("characters of changed added tokens", [TEN_TIMES]),
        ("by a pattern", [{"type": "Replace", "pattern": {"Regex": "(a|aa)+b"}, "content": "a"}]),
    ],
)
def test_a_tokenizer_that_changes_its_added_tokens_much_is_refused(words: str, steps: list[dict[str, Any]]) -> None:
    """The library does that while it reads them: 0.1 MiB took 0.6 s of computing, and could take any time."""
    normalizer = {"type": "Sequence", "normalizers": steps}
    with pytest.raises(SourceError, match=words):
        Tokenizer(tokenizer_of(added_tokens=added(110, 4000, normalized=True), normalizer=normalizer))
    Tokenizer(tokenizer_of(added_tokens=added(110, 4000), normalizer=normalizer))


def test_a_tokenizer_with_a_name_that_comes_twice_is_refused() -> None:
    """The library would read both, and what is checked is the last one."""
    text = json.dumps({"added_tokens": added(1, 1)})[:-1] + "," + tokenizer_of().tokenizer_json[1:]
    with pytest.raises(SourceError, match="a name comes twice"):
        Tokenizer(TokenizerSpec(text, None, None, None, {}, False))


@pytest.mark.soak
def test_a_tokenizer_as_large_as_the_largest_known_is_not_refused() -> None:
    """It has 262,000 tokens, 515,000 merges and 6400 added tokens; others have 65,536 added tokens."""
    letters = byte_alphabet()
    shorter = [*letters, *map("".join, product(letters[:96], repeat=2))]
    words = dict.fromkeys([*shorter, *("".join(pair) for pair in product(shorter[256:], letters[:27]))])
    vocabulary = {word: number for number, word in enumerate([*words][:262_144])}
    pairs = [(word[:cut], word[cut:]) for word in vocabulary for cut in range(1, len(word))]
    merges = [[one, other] for one, other in pairs if one in vocabulary and other in vocabulary][:515_000]
    assert len(merges) > 450_000
    more = added(65_536, 11, normalized=True)
    model = {"type": "BPE", "vocab": vocabulary, "merges": merges}
    made = Tokenizer(tokenizer_of(model=model, added_tokens=more, normalizer={"type": "NFC"}))
    assert made.vocab_size > 300_000


@pytest.mark.parametrize("step", ["normalizer", "pre_tokenizer"])
def test_a_tokenizer_with_a_pattern_of_any_length_is_refused(step: str) -> None:
    """One of 9 MB was compiled for 7 s, in which no other thread ran, and took 1.4 GB; it could have 64 MB."""
    pattern = {"pattern": {"Regex": 400_000 * "ab?"}}
    split: dict[str, Any] = {"type": "Split", **pattern, "behavior": "Isolated", "invert": False}
    replaced: dict[str, Any] = {"type": "Replace", **pattern, "content": ""}
    rules: dict[str, Any] = {step: replaced if step == "normalizer" else split}
    with pytest.raises(SourceError, match="characters of rules for texts"):
        Tokenizer(tokenizer_of(**rules))


SENTENCE_PIECE = {
    "type": "Sequence",
    "decoders": [{"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}, {"type": "ByteFallback"}],
}


@pytest.mark.parametrize("token", ["<0x-1>", "<0x 1>", "<0x+1>", "<0x41>"])
def test_a_token_that_looks_like_a_byte_is_read_as_the_library_reads_it(token: str) -> None:
    """The byte -1 failed every reply that was being written when one of them had it."""
    made = Tokenizer(tokenizer_of({token: 256}, decoder=SENTENCE_PIECE))
    stream = made.stream()
    assert stream.push(256) + stream.flush() == made.decode([256])
    assert made.token_bytes(256) == made.decode([256]).encode()


def count_vocabularies(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Note the seconds of computing of each step in which the library makes a vocabulary; no other thread runs then."""
    steps: list[float] = []

    def timed(step: Callable[[], LLTokenizer]) -> Vocabulary:
        began = time.thread_time()
        try:
            return Vocabulary(step())
        finally:
            steps.append(time.thread_time() - began)

    @dataclass
    class Vocabulary:
        made: LLTokenizer

        def with_slices(self, slices: list[str]) -> Vocabulary:
            return timed(partial(self.made.with_slices, slices))

    monkeypatch.setattr(
        constraint, "LLTokenizer", lambda *args, **settings: timed(partial(LLTokenizer, *args, **settings))
    )
    return steps


def test_a_vocabulary_for_constraints_is_not_made_in_one_long_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first reply with a schema kept all other threads from running for 1.5 s of computing, for 110,000 tokens."""
    words = ["".join(letters) for letters in product("abcdefghijklmnopqrstuvwxyz", repeat=3)]
    tokenizer = Tokenizer(tokenizer_of({word: 256 + number for number, word in enumerate(words)}))
    began = time.thread_time()
    LLTokenizer(tokenizer._backend.to_str(), tokenizer.vocab_size)
    as_json_s = time.thread_time() - began
    steps = count_vocabularies(monkeypatch)
    GrammarCompiler(tokenizer, 300, [0])._vocabulary()
    assert max(steps) < 0.7 * as_json_s


def test_a_tokenizer_that_allows_no_constraints_costs_their_replies_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library for constraints panics, and did so again, after seconds, at every such request."""
    steps = count_vocabularies(monkeypatch)
    compiler = GrammarCompiler(Tokenizer(tokenizer_of({4000 * "a": 256})), 300, [0])
    for _ in range(3):
        with pytest.raises(SourceError, match="allows no constrained replies"):
            compiler.compile(Constraint("json", '{"type": "string"}', "response_format"))
    assert len(steps) == 1


def test_a_token_with_a_high_id_costs_no_memory_of_constraints() -> None:
    """The library for constraints takes memory for every id up to the highest one."""
    compiler = GrammarCompiler(Tokenizer(tokenizer_of({"aa": 2**31})), 300, [0])
    grammar = compiler.compile(Constraint("json", '{"type": "string"}', "response_format")).begin([0])
    assert [len(mask or b"") for mask in grammar.masks()] == [40]


# --- M-6: chat templates ---------------------------------------------------------------------------------------------

# 100 GB of text in references to one hundred characters.
NESTED = "{% set a = ['x' * 100] * 1000 %}{% set b = [a] * 1000 %}{% set c = [b] * 1000 %}"
GROWTH_MIB = 256  # a rendered text may have 16 million characters of up to 4 bytes, and is copied once or twice
LIMIT_MIB = 512  # above what the child has at its start: it gets a MemoryError there, and the machine stays well

# Renders the template of its argument and says what came of it; the names of modules are those of the objects above.
RENDER = f"""
import json, resource, sys, time
from {ChatTemplate.__module__} import ChatTemplate
from {TokenizerSpec.__module__} import TokenizerSpec

def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

template = ChatTemplate(TokenizerSpec("{{}}", sys.argv[1], None, None, {{}}, False))
before_mib = peak_mib()
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + {LIMIT_MIB} * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
begun_at, error, cause = time.process_time(), "", ""
try:
    template.render([{{"role": "user", "content": "hi"}}])
except Exception as failure:
    error, cause = type(failure).__name__, type(failure.__cause__).__name__
took_s = time.process_time() - begun_at
facts = {{"error": error, "cause": cause, "seconds": took_s, "grown_mib": peak_mib() - before_mib}}
print(json.dumps(facts))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit on a process's memory")
@pytest.mark.parametrize(
    "expression",
    ["c | string | length", "c | tojson | length", "(c ~ 'x') | length", "c", "('%s' % [c]) | length"],
    ids=["string", "tojson", "concatenation", "output", "format"],
)
def test_a_template_that_writes_out_nested_lists_is_stopped_before_it_takes_memory(expression: str) -> None:
    """A creator's template nests references and turns them into text: it is refused early, in time and in memory."""
    command = [sys.executable, "-c", RENDER, f"{NESTED}{{{{ {expression} }}}}"]
    child = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True, timeout=60)
    facts = json.loads(child.stdout)
    assert facts["error"] in (ChatError.__name__, SourceError.__name__)
    assert facts["cause"] != MemoryError.__name__
    assert facts["grown_mib"] < GROWTH_MIB
    assert facts["seconds"] < 2 * MAX_SECONDS


@pytest.mark.parametrize("expression", ["('a' * 4000000) | map('upper') | list", "[('a' * 4000000) | min]"])
def test_a_filter_of_a_template_keeps_to_its_time_too(monkeypatch: pytest.MonkeyPatch, expression: str) -> None:
    """Such filters took 25 and 40 s, most of it within one line of the template."""
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.2)
    template = ChatTemplate(TokenizerSpec("{}", f"{{{{ ({expression}) | length }}}}", None, None, {}, False))
    begun_at = time.process_time()
    with pytest.raises(SourceError, match="too much time"):
        template.render([{"role": "user", "content": "hi"}])
    assert time.process_time() - begun_at < 5


def longest_hold_s(work: Callable[[], None]) -> float:
    """Do some work and return the longest that it computed in one go, while no other thread could run."""
    clock = time.pthread_getcpuclockid(threading.get_ident())
    looks, is_over = threading.Event(), threading.Event()
    longest_s = 0.0

    def look() -> None:
        nonlocal longest_s
        before = time.clock_gettime(clock)
        while not is_over.is_set():
            looks.set()
            now = time.clock_gettime(clock)
            longest_s, before = max(longest_s, now - before), now
            time.sleep(1e-3)  # or this thread would compute as much as the other
        longest_s = max(longest_s, time.clock_gettime(clock) - before)

    other = threading.Thread(target=look)
    other.start()
    looks.wait()
    try:
        work()
    finally:
        is_over.set()
        other.join()
    return longest_s


# The longest steps within the bounds on sizes: 20 to 80 ms of computing where they were measured.
LONG_STEPS = [
    "('ß' * 1398100) | upper",
    "('ß' * 1398100).upper()",
    "('ß ' * 690000).title()",
    "('ß ' * 130000) | title",
    "('Σ' * 1398100).lower()",
    "('Ф' * 4194303).strip('ѤҤӤФ')",
    "('Ф' * 4190000) | trim('жФ')",
    "('Ф' * 4194303).find('ФФФФж')",
    "('𐐀' * 4194303).find('𐐀' * 1000000 ~ '𐐁')",
    "('Ф' * 2000000).count('ФФ')",
    "('ab' * 1300000).replace('ab', 'Ф')",
    "('ab' * 800000) | replace('ab', 'Ф')",
    "('Ф' * 4194303)[::-1]",
    "('Ф' * 262143) | list | length",
    "('Ф ' * 262143).split() | length",
    "('Ф\n' * 26000).splitlines() | length",
    "('\n' * 600000) | indent(1)",
    "('Ф' * 650000) | tojson",
    "([1] * 100000) | tojson",
    "([1] * 100000) | string",
    "([[1] * 30] * 5000) | sort | length",
    "([1.5, 1] * 20000) | sort | length",
    "([1] * 50000) == ([1] * 50000)",
    "('Ф' * 200000) | join(',')",
    "(['ab'] * 50000) | join(',')",
    "('%s' * 2000) % (('a' * 2000,) * 2000)",
    "('{}' * 2000).format(*['a' * 2000] * 2000)",
    "messages | map(attribute='.' * 262000) | list",
    "('9' * 4096) | int(0, 36)",
    "strftime_now('%9999999Y' * 100)",
]
REFUSED_STEPS = [
    ("(')' * 40000 ~ 'a)') | urlize", "uses the filter 'urlize'"),
    ("('<>' * 100000) | striptags", "uses the filter 'striptags'"),
    ("[')' * 40000 ~ 'a)'] | map('urlize') | list", "uses the filter 'urlize'"),
    ("1 if messages is mapping else (')' * 40000 ~ 'a)') | urlize", "uses the filter 'urlize'"),
    ("'urlize' is filter", "uses the test 'filter'"),
    ("[1] | select('upper') | list", "uses the test 'upper'"),
    ("'a'.encode()", "uses the method 'encode'"),
    ("{}.fromkeys([1])", "uses the method 'fromkeys'"),
    ("{(1, 2): 3}", "uses a dict with keys that are neither texts nor numbers"),
    ("1 }}{% autoescape true %}{% endautoescape %}{{ 1", "uses the tag autoescape"),
    ("('f' * 4000000) | int(0, 16)", "a number that is too long"),
    ("('Ф' * 4194303) | list", "a value that is too large"),
    ("1 }}{% for a in 'Ф' * 4194303 %}{{ loop.length }}{% endfor %}{{ 1", "a value that is too large"),
    ("[" + "a," * 20000 + "]", "too many expressions"),
]


def render_expression(expression: str) -> None:
    template = ChatTemplate(TokenizerSpec("{}", f"{{{{ {expression} }}}}", None, None, {}, False))
    template.render([{"role": "user", "content": "hi"}])


@pytest.mark.skipif(not hasattr(time, "pthread_getcpuclockid"), reason="needs the computing time of another thread")
def test_no_step_of_a_template_keeps_other_threads_from_running_for_long() -> None:
    """Forty characters, `{{ (')' * 40000 ~ 'a)') | urlize }}`, stopped the whole node for 68 s: nothing ends such a
    step, and the event loop, with all links, waits for it.
    """

    def render_all() -> None:
        for step in LONG_STEPS:
            with suppress(ChatError):  # as of a text that is too long for a number
                render_expression(step)
        for step, why in REFUSED_STEPS:
            with pytest.raises(SourceError, match=why):
                render_expression(step)
        render_expression("a }}{{" * 1800 + "a")

    assert longest_hold_s(render_all) < 0.5


@pytest.mark.parametrize("pairs", ["dict([(1, 2)])", "namespace([(1, 2)])"])
def test_a_template_makes_no_dict_of_chosen_keys(pairs: str) -> None:
    """Python takes the square of their number for keys of equal hashes, in one step."""
    with pytest.raises(ChatError, match="TypeError"):
        render_expression(pairs)


def test_what_is_not_offered_costs_only_the_conversations_that_need_it() -> None:
    """Some templates use filters of other programs, for calls of tools alone."""
    render_expression("1 if messages else messages | from_json")


def branching(chars: int) -> str:
    """A template of so many characters with as many names as branches, which jinja2 compares with each other."""
    names = "".join(f"{{{{a{number:x}}}}}" for number in range(chars // 20))
    return names + "{%if b%}{%endif%}" * ((chars - len(names)) // 17)


@pytest.mark.parametrize("chars", [1 << 18, 1 << 16])
def test_a_template_that_takes_long_to_compile_is_refused(monkeypatch: pytest.MonkeyPatch, chars: int) -> None:
    """One of 262,144 characters took 91 s, in which nothing stopped it, nor the node that loaded it."""
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.2)
    begun_at = time.thread_time()
    with pytest.raises(SourceError, match=r"more than 65536 characters|exceeds a limit"):
        ChatTemplate(TokenizerSpec("{}", branching(chars), None, None, {}, False))
    assert time.thread_time() - begun_at < 2


def test_a_limit_is_not_lost_in_a_generator_that_is_closed() -> None:
    """Python drops what is raised there, and traces no further: a template that makes many could run for ever."""

    def close_one_and_go_on() -> None:
        budget, numbers = chat_template._Budget(), iter(number for number in range(2))
        next(numbers)
        with budget:
            budget._look_at = budget._deadline = -math.inf
            del numbers
            branching(0)

    with pytest.raises(chat_template._Exhausted):
        close_one_and_go_on()


# --- M-7: manifests --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rope",
    [
        Rope(kind="yarn", factor=2.0, original_context=0),
        Rope(kind="yarn", factor=2.0, original_context=512, theta=1.0),
        Rope(kind="yarn", factor=2.0, original_context=512, theta=1.0000000000000002),
        Rope(kind="yarn", factor=2.0, original_context=512, beta_slow=5e-324),
        Rope(kind="yarn", factor=2.0, original_context=512, beta_fast=1e308),
        Rope(kind="yarn", factor=2.0, original_context=512, attention_factor=1e300),
        Rope(kind="linear", factor=1e-320),
        Rope(kind="llama3", factor=1e-320, original_context=512),
    ],
    ids=["no original context", "theta 1", "theta near 1", "beta 0", "beta huge", "amplitude", "linear", "llama3"],
)
def test_a_manifest_is_refused_or_its_model_can_be_hosted(rope: Rope) -> None:
    """A creator publishes impossible rope settings: a host refuses them in words, or computes finite angles."""
    published = plain_config(replace(CONFIG, rope=rope))
    try:
        config = config_from(Fields("manifest: model", published))
        table = RotaryTable(config.rope, config.head_dim, torch.device("cpu"), torch.float32)
    except (RecordError, EngineError):
        return
    cosines, sines = table.turns(torch.arange(4))
    assert cosines.isfinite().all()
    assert sines.isfinite().all()


@dataclass(frozen=True)
class Described:
    """A tensor of a manifest."""

    role: str
    kind: str
    shape: tuple[int, ...]


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_the_form_of_thousands_of_blocks_is_found_in_a_moment(kind: str) -> None:
    """A node that looks for swarms finds it for every manifest that a peer shows."""
    shapes = expected_shapes(CONFIG, "block.0").items()
    block = [Described(role, kind if len(shape) == 2 else "F32", shape) for role, shape in shapes]
    began = time.process_time()
    assert stored_bytes([block] * MAX_BLOCKS) is not None
    assert time.process_time() - began < 1.5
