"""Builds a `tokenizer.json` from GGUF metadata.

A GGUF file lists a vocabulary, merges or scores, and the name of the rule that splits text before merging. The rest of
a tokenizer (decoder, special tokens) follows from those, so that a text gets the same ids as from the model's own
`tokenizer.json`.
"""

from __future__ import annotations

import json
from typing import Any

from engine.errors import SourceError
from engine.sources.base import TokenizerSpec
from engine.sources.files import AGAIN, Fields, shown
from engine.sources.gguf_header import GgufHeader
from engine.sources.layout import MAX_VOCABULARY

_CONTROL, _USER_DEFINED = 3, 4  # ggml's token types
_SPACE = "\u2581"  # sentencepiece's character for a space

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _WORDS + r"|\p{N}{1,3}" + _REST
_QWEN2 = _WORDS + r"|\p{N}" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Splitting rule -> regular expression; a rule that is not listed splits like GPT-2.
_SPLITS = {
    "llama3": _LLAMA3, "llama-v3": _LLAMA3, "llama-bpe": _LLAMA3, "falcon3": _LLAMA3, "smaug-bpe": _LLAMA3,
    "dbrx": _LLAMA3, "tekken": _TEKKEN, "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2, "megrez": _QWEN2,
}  # fmt: skip
_WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "tekken")  # words of the vocabulary are never split
_WITH_BOS = ("llama3", "llama-v3", "llama-bpe", "tekken")
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell")
# Tokens that end a turn in the chat formats of the supported families, besides the ids that the file names.
_END_TEXTS = frozenset({"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>"})


def byte_alphabet() -> list[str]:
    """Return the character that byte-level vocabularies use for each of the 256 bytes."""
    shown_as_is = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet, spare = [], 0x100
    for byte in range(256):
        if byte in shown_as_is:
            alphabet.append(chr(byte))
        else:
            alphabet.append(chr(spare))
            spare += 1
    return alphabet


def tokenizer_spec(header: GgufHeader) -> TokenizerSpec:
    """Build the tokenizer that a file describes; raises `SourceError` if its type is not supported."""
    fields = Fields(header.metadata, str(header.file))
    tokens = _texts(fields, "tokenizer.ggml.tokens")
    kinds = fields.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise SourceError(f"{header.file}: the vocabulary and its token types differ in length: {AGAIN}")
    model = fields.text("tokenizer.ggml.model", default="")
    rule = fields.text("tokenizer.ggml.pre", default="default")
    if model == "gpt2":
        tokenizer = _byte_level(tokens, _merges(fields), kinds, rule)
    elif model == "llama":
        tokenizer = _sentencepiece(tokens, fields, kinds)
    else:
        raise SourceError(
            f"{header.file}: tokenizer {shown(model)} is not supported (only gpt2 and llama are): "
            "use the model as a folder with tokenizer.json"
        )
    template = fields.get("tokenizer.chat_template")
    names = {"bos_token": "bos_token_id", "eos_token": "eos_token_id",
             "unk_token": "unknown_token_id", "pad_token": "padding_token_id"}  # fmt: skip
    special = {name: tokens[index] for name, key in names.items() if (index := token_id(header, key)) is not None}
    add_bos = fields.flag("tokenizer.ggml.add_bos_token", default=model == "llama" or rule in _WITH_BOS)
    return TokenizerSpec(
        tokenizer_json=json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":")),
        chat_template=template if isinstance(template, str) and len(template) <= 1 << 20 else None,
        bos_token=special.get("bos_token"),
        eos_token=special.get("eos_token"),
        template_variables={name: special[name] for name in ("unk_token", "pad_token") if name in special},
        add_bos=add_bos and "bos_token" in special,
    )


def token_id(header: GgufHeader, key: str) -> int | None:
    """Return the id of a special token, or None if the file names none."""
    fields, name = Fields(header.metadata, str(header.file)), f"tokenizer.ggml.{key}"
    if fields.get(name) is None:
        return None
    tokens = fields.get("tokenizer.ggml.tokens")
    most = len(tokens) if isinstance(tokens, list) and tokens else MAX_VOCABULARY
    return fields.integer(name, most - 1, low=0)


def end_ids(header: GgufHeader) -> tuple[int, ...]:
    """Return the ids that end a reply: those the file names, and the turn markers of its vocabulary."""
    named = [token_id(header, key) for key in ("eos_token_id", "eot_token_id", "eom_token_id")]
    tokens, kinds = (header.metadata.get(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
    marked: list[int] = []
    if isinstance(tokens, list) and isinstance(kinds, list):
        pairs = enumerate(zip(tokens, kinds, strict=False))
        marked = [index for index, (text, kind) in pairs if kind == _CONTROL and text in _END_TEXTS]
    return tuple(dict.fromkeys([index for index in named if index is not None] + marked))


def _texts(fields: Fields, name: str) -> list[str]:
    value = fields.get(name)
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise fields.wrong(name, "a list of texts")
    return value


def _merges(fields: Fields) -> list[list[str]]:
    merges = [merge.split(" ") for merge in _texts(fields, "tokenizer.ggml.merges")]
    if any(len(merge) != 2 for merge in merges):
        raise fields.wrong("tokenizer.ggml.merges", "pairs with one space between")
    return merges


def _byte_level(tokens: list[str], merges: list[list[str]], kinds: list[int], rule: str) -> dict[str, Any]:
    alphabet = byte_alphabet()
    letters = set(alphabet)
    vocabulary: dict[str, int] = {}
    for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        plain = kind in (_CONTROL, _USER_DEFINED) or letters.issuperset(token)
        vocabulary[token if plain else "".join(alphabet[byte] for byte in token.encode())] = index
    known = [merge for merge in merges if all(piece in vocabulary for piece in (*merge, "".join(merge)))]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    split: list[dict[str, Any]] = []
    if rule in _SPLITS:
        split = [{"type": "Split", "pattern": {"Regex": _SPLITS[rule]}, "behavior": "Isolated", "invert": False}]
    elif rule in _SINGLE_DIGITS:
        split = [{"type": "Digits", "individual_digits": True}]
    splits = [*split, {**byte_level, "use_regex": rule not in _SPLITS}]
    return _tokenizer_json(
        model={"type": "BPE", "ignore_merges": rule in _WHOLE_WORDS, "vocab": vocabulary, "merges": known},
        normalizer={"type": "NFC"} if _SPLITS.get(rule) == _QWEN2 else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": splits},
        decoder={**byte_level, "use_regex": True},
        added=_added(tokens, kinds),
    )


def _sentencepiece(tokens: list[str], fields: Fields, kinds: list[int]) -> dict[str, Any]:
    scores = fields.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens) or isinstance(scores[0], str):
        raise fields.wrong("tokenizer.ggml.scores", "one score for each token")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    prefix = fields.flag("tokenizer.ggml.add_space_prefix", default=True)
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    scheme = "first" if prefix else "never"
    return _tokenizer_json(
        model={"type": "BPE", "fuse_unk": True, "byte_fallback": True, "vocab": vocabulary,
               "merges": _merges_from_scores(vocabulary, scores)},
        normalizer=None,
        pre_tokenizer={"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": scheme, "split": False},
        decoder={"type": "Sequence", "decoders": decoders},
        added=_added(tokens, kinds),
    )  # fmt: skip


def _merges_from_scores(vocabulary: dict[str, int], scores: list[float]) -> list[list[str]]:
    """Derive the merges from a scored vocabulary: best-scored result first, then longer pieces first."""
    merges: list[tuple[float, int, int, int, int, str, str]] = []
    for token, index in vocabulary.items():
        for cut in range(1, min(len(token), 256)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                rank = (-scores[index], -len(left), -len(right), index, vocabulary[left])
                merges.append((*rank, left, right))
    merges.sort()
    return [[left, right] for *_, left, right in merges]


def _added(tokens: list[str], kinds: list[int]) -> list[dict[str, Any]]:
    """List control and user-defined tokens, which are matched as a whole in the text."""
    return [
        {"id": index, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": kind == _CONTROL}
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (_CONTROL, _USER_DEFINED) and token
    ]  # fmt: skip


def _tokenizer_json(
    model: dict[str, Any],
    normalizer: dict[str, Any] | None,
    pre_tokenizer: dict[str, Any],
    decoder: dict[str, Any],
    added: list[dict[str, Any]],
) -> dict[str, Any]:
    defaults = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}  # fmt: skip
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer, "post_processor": None, "decoder": decoder,
        "model": {"type": "BPE", **defaults, **model},
    }  # fmt: skip
