"""How large a `tokenizer.json` is, how much longer its rules can make a text, and how few tokens a text can have.

All of it is found without running the rules.

A swarm's creator writes these rules. The `tokenizers` library follows them without a limit, and where it gets no memory
it ends the whole process: ten replacements of one letter by ten make a gigabyte of one letter. A token of megabytes
makes gigabytes of a short reply. To find the tokens of a text that is far too long for a model takes seconds. While the
library reads a file nothing else of the node runs, and for each letter of an added token it takes 75 bytes and about a
microsecond: a few MB are minutes and gigabytes.

The limits are above the models known: the file of Gemma 3 has about 35 MB, 262,000 tokens, 515,000 merges and 6400
added tokens; models that speak have up to 65,536 added tokens of 11 to 24 letters, but fewer of the longer ones.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from engine.errors import SourceError

MOST_GROWTH = 100  # NFKC and the letters for bytes together, the most that known tokenizers have, are 90
MOST_SPECIAL = 1000  # tokens that are added to a text, besides
MOST_TOKEN_CHARS = 4096  # known vocabularies have none of more than a few hundred
MOST_RULE_CHARS = 1 << 16  # without SentencePiece's maps; a pattern takes 1200 times its length in memory
MOST_MAP_CHARS = 1 << 19  # known ones have 350,000
MOST_FILE_CHARS = 1 << 26
MOST_VALUES = 3_000_000  # of all kinds, about: an empty list takes 56 bytes, and Gemma 3 has 1.9 million
MOST_NAMES = 1 << 20  # each takes Python two microseconds
MOST_TOKENS = 400_000
MOST_MERGES = 600_000
MOST_VOCABULARY_CHARS = 1 << 23
MOST_SCORED_BYTES = 1 << 21  # of tokens with scores: the library takes 350 bytes of memory for each
MOST_ADDED_CHARS = 1 << 20
MOST_CHANGED_CHARS = 1 << 22  # that the rules for texts may make of added tokens

# The most characters that a rule makes of one; those that are not listed keep the length or have figures of their own.
_NORMALIZERS = {
    "BertNormalizer": 36,  # spaces around a character (3), NFD and lower case
    "ByteLevel": 4,  # a letter for each byte
    "Lowercase": 3,
    "NFC": 4,
    "NFD": 4,
    "NFKC": 18,
    "NFKD": 18,
    "Nmt": 1,
    "Strip": 1,
    "StripAccents": 1,
}
_PRE_TOKENIZERS = {"ByteLevel": 5, "Metaspace": 2}  # with a prefix before every word
STEPS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_KEEPING = ("ByteLevel", "Digits", "Metaspace")  # pre-tokenizers that drop nothing
_SPACE = "\u2581"  # that stands for a space in SentencePiece vocabularies
_INNER = ("normalizers", "pretokenizers", "processors", "decoders")  # the steps of a sequence


def check_size(text: str) -> None:
    """Raise `SourceError` if a `tokenizer.json` is far larger than those of known models; nothing is read of it."""
    _check("characters", len(text), MOST_FILE_CHARS)
    _check("values", sum(map(text.count, ",[{")), MOST_VALUES)
    _check("names", text.count(":"), MOST_NAMES)


def check_lengths(rules: Mapping[str, Any]) -> None:
    """Raise `SourceError` if a `tokenizer.json` has more or longer tokens or patterns than those of known models."""
    model = rules.get("model")
    words, merges = (model.get("vocab"), model.get("merges")) if isinstance(model, dict) else (None, None)
    listed = [one[0] for one in words if isinstance(one, list) and one] if isinstance(words, list) else []
    spelled = [one for one in (words if isinstance(words, dict) else listed) if isinstance(one, str)]
    contents = [one["content"] for one in _added(rules)]
    longest = max(map(len, (*spelled, *contents)), default=0)
    if longest > MOST_TOKEN_CHARS:
        raise SourceError(
            f"the tokenizer has a token of {longest} characters, more than {MOST_TOKEN_CHARS}, which no known model "
            "has: choose another model"
        )
    _check("tokens", len(spelled) + len(contents), MOST_TOKENS)
    _check("merges", len(merges) if isinstance(merges, list) else 0, MOST_MERGES)
    _check("characters of tokens", sum(map(len, spelled)), MOST_VOCABULARY_CHARS)
    scored = sum(len(one.encode(errors="replace")) for one in listed if isinstance(one, str))
    _check("bytes of tokens with scores", scored, MOST_SCORED_BYTES)
    _check("characters of added tokens", sum(map(len, contents)), MOST_ADDED_CHARS)
    given = [step.get("precompiled_charsmap") for step in steps_of(rules.get("normalizer"))]
    maps = sum(len(one) for one in given if isinstance(one, str))
    _check("characters of maps", maps, MOST_MAP_CHARS)
    chars = len(json.dumps([rules.get(name) for name in STEPS])) - maps
    _check("characters of rules for texts", chars, MOST_RULE_CHARS)


def check_added(rules: Mapping[str, Any], normalizer: Mapping[str, Any] | None) -> None:
    """Raise `SourceError` if a normalizer, as the library writes it, makes added tokens too long, or has a pattern.

    The library changes such tokens while it reads the file, and a pattern can compute for seconds at a letter.
    """
    changed = sum(len(one["content"]) for one in _added(rules) if one.get("normalized"))
    steps = list(steps_of(normalizer))
    if changed and any("Regex" in step.get("pattern", ()) for step in steps):
        raise SourceError(
            "the tokenizer changes added tokens by a pattern, which no known model does: choose another model"
        )
    longer = changed * math.prod(map(_normalizer_growth, steps))
    _check("characters of changed added tokens", longer, MOST_CHANGED_CHARS)


def _added(rules: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the added tokens of a `tokenizer.json` that have a text; the library refuses the others."""
    added = rules.get("added_tokens")
    listed = [one for one in added if isinstance(one, dict)] if isinstance(added, list) else []
    return [one for one in listed if isinstance(one.get("content"), str)]


def _check(what: str, count: int, most: int) -> None:
    if count > most:
        raise SourceError(
            f"the tokenizer has {count} {what}, more than {most}, which no known model has: choose another model"
        )


def check_growth(
    normalizer: Mapping[str, Any] | None, pre_tokenizer: Mapping[str, Any] | None, processor: Mapping[str, Any] | None
) -> None:
    """Raise `SourceError` if these rules, as the library writes them, can make a text far longer than it is."""
    factors = [_normalizer_growth(step) for step in steps_of(normalizer)]
    factors += [_PRE_TOKENIZERS.get(step["type"], 1) for step in steps_of(pre_tokenizer)]
    special = 0
    for step in steps_of(processor):
        copies, added = _template(step)
        special = special * copies + added
        factors.append(copies)
    if math.prod(factors) > MOST_GROWTH or special > MOST_SPECIAL:
        raise SourceError(
            f"the tokenizer can make a text more than {MOST_GROWTH} times as long, or adds more than {MOST_SPECIAL} "
            "tokens to it, which no known model needs: choose another model"
        )


def keeps_bytes(rules: Any, normalizer: Mapping[str, Any] | None, pre_tokenizer: Mapping[str, Any] | None) -> bool:
    """True if each byte of a text whose characters are composed (NFC) is in one of its tokens, or has no token at all.

    It need not be where a rule changes or drops characters, where a token takes in the spaces beside it, or where one
    token stands for all that is unknown.
    """
    model, added = rules["model"], rules.get("added_tokens") or []
    normal = all(
        step["type"] in ("NFC", "Prepend")
        or (step["type"] == "Replace" and step["pattern"].get("String") == " " and step["content"] == _SPACE)
        for step in steps_of(normalizer)
    )
    split = all(
        (step["type"] in _KEEPING or step.get("behavior", "Removed") != "Removed")
        and step.get("replacement", _SPACE) == _SPACE
        for step in steps_of(pre_tokenizer)
    )
    affixes = (model.get("continuing_subword_prefix"), model.get("end_of_word_suffix"))
    is_plain = model.get("type", "BPE") == "BPE" and "merges" in model and not any(affixes)
    if not (normal and split and is_plain) or any(one.get("lstrip") or one.get("rstrip") for one in added):
        return False
    if any(step["type"] == "ByteLevel" for step in steps_of(pre_tokenizer)):
        return True
    return model.get("byte_fallback") is True and all(f"<0x{byte:02X}>" in model["vocab"] for byte in range(256))


def least_shares(tokens: Iterable[bytes]) -> dict[int, float]:
    """Return for each byte the least share of a token that it can be: that of the longest token that has it.

    The shares of all bytes of a text add up to as many tokens as it has at least.
    """
    longest: dict[int, int] = {}
    for token in tokens:
        for byte in set(token):
            longest[byte] = max(longest.get(byte, 0), len(token))
    return {byte: 1 / length for byte, length in longest.items()}


def steps_of(rule: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the rules of a sequence of a `tokenizer.json`, or the only one; none of what is no rule."""
    if not isinstance(rule, dict):
        return
    inner = [rule[name] for name in _INNER if isinstance(rule.get(name), list)]
    if rule.get("type") != "Sequence" or not inner:
        yield rule
        return
    for one in inner[0]:
        yield from steps_of(one)


def _normalizer_growth(step: Mapping[str, Any]) -> int:
    kind = step["type"]
    if kind == "Prepend":
        return 1 + len(step["prepend"])
    if kind == "Replace":
        replaced = step["pattern"].get("String")
        if replaced:
            return max(1, math.ceil(len(step["content"]) / len(replaced)))
        return 1 + len(step["content"])  # a pattern may match between any two characters
    if kind == "Precompiled":
        return _longest_in(step["precompiled_charsmap"])
    if kind not in _NORMALIZERS:
        raise SourceError(f"the tokenizer changes texts by {kind[:40]!r}, which Shoal does not know: update Shoal")
    return _NORMALIZERS[kind]


def _longest_in(charsmap: str) -> int:
    """Bytes of the longest replacement in a SentencePiece map: the size of a trie, the trie, texts that end with 0."""
    try:
        raw = base64.b64decode(charsmap)
    except (binascii.Error, ValueError) as error:
        raise SourceError(f"the tokenizer is damaged ({error}): download the model again") from error
    texts = raw[4 + int.from_bytes(raw[:4], "little") :]
    return max(1, *map(len, texts.split(b"\0")))


def _template(step: Mapping[str, Any]) -> tuple[int, int]:
    """Return how often a text comes in what a step makes of it, once at least, and how many tokens the step adds."""
    if step["type"] != "TemplateProcessing":
        return 1, 2
    pieces, known = step["single"], step["special_tokens"]
    names = [piece["SpecialToken"]["id"] for piece in pieces if "SpecialToken" in piece]
    return max(1, len(pieces) - len(names)), sum(len(known[name]["ids"]) for name in names if name in known)
