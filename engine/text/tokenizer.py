"""Encodes text to token ids, and decodes ids to text, all at once or as a stream.

The rules are those of the model's `tokenizer.json`, run by the `tokenizers` library. The streaming decoders here are
exact: their pieces joined are equal to the text of all ids decoded at once.
"""

from __future__ import annotations

import codecs
import json
import re
import unicodedata
from collections.abc import Callable, Collection, Sequence
from functools import cached_property, lru_cache
from typing import Any, Protocol, TypeVar

import tokenizers

from engine.errors import SourceError
from engine.sources.base import TokenizerSpec
from engine.sources.files import AGAIN, shown
from engine.sources.gguf_tokenizer import byte_alphabet
from engine.text.tokenizer_growth import (
    STEPS,
    check_added,
    check_growth,
    check_lengths,
    check_size,
    keeps_bytes,
    least_shares,
    steps_of,
)

_T = TypeVar("_T")
_SPACE = "\u2581"
_FALLBACK = re.compile(r"<0x([+0-9A-Fa-f][0-9A-Fa-f])>")  # what the library takes for a byte
# A run of byte tokens is held back until it ends, since one invalid byte turns the whole run into replacement
# characters. A valid run of this length is released earlier, so that a text that consists of byte tokens still streams.
_MAX_RUN = 64
_NO_MODEL = {"type": "BPE", "vocab": {}, "merges": []}


class Detokenizer(Protocol):
    """Decodes a stream of token ids to text, in pieces of whole characters."""

    def push(self, token_id: int) -> str:
        """Add a token and return the text that it completes, which may be empty."""

    def flush(self) -> str:
        """Return the text still held back and reset the decoder for a new text."""


class Tokenizer:
    """A model's tokenizer; raises `SourceError` if `tokenizer.json` is damaged or cannot be streamed."""

    def __init__(self, spec: TokenizerSpec) -> None:
        check_size(spec.tokenizer_json)
        rules = _read(spec.tokenizer_json)
        check_lengths(rules)
        # The rules for texts are read alone, and refused if need be, before those which take long.
        frame = _backend_of(json.dumps({name: rules.get(name) for name in STEPS} | {"model": _NO_MODEL}))
        normalizer, pre_tokenizer = _rules_of(frame.normalizer), _rules_of(frame.pre_tokenizer)
        check_growth(normalizer, pre_tokenizer, _rules_of(frame.post_processor))
        check_added(rules, normalizer)
        self._make_stream = _stream_maker(rules.get("decoder"))
        self._backend = _backend_of(spec.tokenizer_json)
        self._keeps_bytes = keeps_bytes(rules, normalizer, pre_tokenizer)
        # `tokenizer.json` may enable padding or truncation, which would silently change a prompt.
        self._backend.no_padding()
        self._backend.no_truncation()
        added = self._backend.get_added_tokens_decoder()
        self.added_tokens = tuple(token.content for token in added.values())
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self.plain_added_ids = frozenset(added) - self.special_ids  # that appear in texts, such as `<think>`
        self.bos_id = None if spec.bos_token is None else self._backend.token_to_id(spec.bos_token)
        self.eos_id = None if spec.eos_token is None else self._backend.token_to_id(spec.eos_token)
        self._add_bos = spec.add_bos
        self.is_byte_level = self._make_stream is _ByteLevelStream  # its vocabulary spells each byte as one letter

    @property
    def vocab_size(self) -> int:
        """Number of token ids, including added tokens."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Return the ids of a text; `add_special` adds the model's special tokens, such as the begin marker."""
        clean = _clean(text)
        # As a batch of one: `encode` would keep all other threads, and so the event loop, from running meanwhile.
        (encoding,) = _guarded(
            lambda: self._backend.encode_batch([clean], add_special_tokens=add_special), "this text cannot be encoded"
        )
        ids: list[int] = encoding.ids
        if add_special and self._add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def fewest_tokens(self, text: str) -> int:
        """Return how many tokens a text has at least, in a fraction of the time to find them; 0 if that is unknown."""
        clean = _clean(text)
        if not self._keeps_bytes or _SPACE in clean or not unicodedata.is_normalized("NFC", clean):
            return 0
        data = clean.encode()
        return int(sum(share * data.count(byte) for byte, share in self._least_shares.items()))

    @cached_property
    def _least_shares(self) -> dict[int, float]:
        """What each byte of a text counts in `fewest_tokens`; takes a second for a large vocabulary."""
        vocabulary = self._backend.get_vocab(with_added_tokens=False).values()
        added = (token.encode() for token in self.added_tokens)
        return least_shares((*map(self.token_bytes, vocabulary), *added))

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of token ids; unknown ids are skipped."""
        known = [index for index in ids if 0 <= index < 1 << 31]
        text: str = _guarded(
            lambda: self._backend.decode(known, skip_special_tokens=skip_special), "these token ids cannot be decoded"
        )
        return text

    def token_id(self, text: str) -> int | None:
        """Return the id of the token with exactly this text, or None."""
        index: int | None = self._backend.token_to_id(text)
        return index

    def token_text(self, token_id: int) -> str | None:
        """Return a token as the vocabulary spells it, or None if the id is unknown."""
        text: str | None = self._backend.id_to_token(token_id) if 0 <= token_id < 1 << 31 else None
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text; none if the id is unknown."""
        token = self.token_text(token_id)
        if token is None:
            return b""
        if self.is_byte_level:
            return _bytes_of(token)
        byte = _fallback_byte(token)
        return token.replace(_SPACE, " ").encode() if byte is None else bytes([byte])

    def stream(self, *, skip_special: bool = True, shown: Collection[int] = ()) -> Detokenizer:
        """Return a new streaming decoder; the special tokens of `shown` are never skipped."""
        hidden = self.special_ids - frozenset(shown) if skip_special else frozenset()

        def spelling(token_id: int) -> str | None:
            return None if token_id in hidden else self.token_text(token_id)

        return self._make_stream(spelling)


def _clean(text: str) -> str:
    """Return a text without halves of surrogate pairs, which JSON can have: they become replacement characters."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


Spelling = Callable[[int], str | None]  # id -> its spelling in the vocabulary; None: no text


class _ByteLevelStream:
    """Decoder for byte-level BPE vocabularies, which spell each byte as one letter."""

    def __init__(self, spelling: Spelling) -> None:
        self._spelling = spelling
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        token = self._spelling(token_id)
        return "" if token is None else self._decoder.decode(_bytes_of(token))

    def flush(self) -> str:
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


@lru_cache(maxsize=1)
def _byte_of_letter() -> dict[str, int]:
    return {letter: byte for byte, letter in enumerate(byte_alphabet())}


def _bytes_of(token: str) -> bytes:
    """Return a token's bytes; an added token, with letters outside the byte alphabet, is encoded as UTF-8."""
    table = _byte_of_letter()
    try:
        return bytes([table[letter] for letter in token])
    except KeyError:
        return token.encode()


class _SentencePieceStream:
    """Decoder for SentencePiece vocabularies, which spell a space as U+2581 and other bytes as `<0xNN>`."""

    def __init__(self, spelling: Spelling, *, byte_fallback: bool, leading: int) -> None:
        self._spelling = spelling
        self._byte_fallback = byte_fallback
        self._leading = leading  # number of spaces dropped at the start of a text
        self._to_drop = leading
        self._run = bytearray()

    def push(self, token_id: int) -> str:
        token = self._spelling(token_id)
        if token is None:
            return ""
        byte = _fallback_byte(token) if self._byte_fallback else None
        if byte is None:
            return self._drop_leading(self._end_run() + token.replace(_SPACE, " "))
        self._run.append(byte)
        if len(self._run) >= _MAX_RUN and _is_text(self._run):
            return self._drop_leading(self._end_run())
        return ""

    def flush(self) -> str:
        text = self._drop_leading(self._end_run())
        self._to_drop = self._leading
        return text

    def _end_run(self) -> str:
        run, self._run = self._run, bytearray()
        return run.decode() if _is_text(run) else "\ufffd" * len(run)

    def _drop_leading(self, text: str) -> str:
        while self._to_drop and text:
            if text[0] != " ":
                self._to_drop = 0
                break
            text, self._to_drop = text[1:], self._to_drop - 1
        return text


def _fallback_byte(token: str) -> int | None:
    found = _FALLBACK.fullmatch(token)
    return None if found is None else int(found[1], 16)


def _is_text(data: bytearray) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _stream_maker(decoder: Any) -> Callable[[Spelling], Detokenizer]:
    """Return a factory of streaming decoders equivalent to the `decoder` entry of a `tokenizer.json`."""
    steps = list(steps_of(decoder))
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return _ByteLevelStream
    strips = [step for step in steps if step.get("type") == "Strip"]
    replaces = [step for step in steps if step.get("type") == "Replace"]
    plain = kinds[:1] == ["Replace"] and set(kinds[1:]) <= {"ByteFallback", "Fuse", "Strip"} and len(strips) <= 1
    spaces = all(step.get("pattern") == {"String": _SPACE} and step.get("content") == " " for step in replaces)
    if plain and spaces and all(step.get("content") == " " and not step.get("stop") for step in strips):
        leading = strips[0].get("start", 0) if strips else 0
        fallback = "ByteFallback" in kinds
        return lambda spelling: _SentencePieceStream(spelling, byte_fallback=fallback, leading=leading)
    raise SourceError(f"the tokenizer decodes with {shown(kinds)}, which Shoal cannot stream: choose another model")


def _read(text: str) -> dict[str, Any]:
    rules = _guarded(lambda: json.loads(text, object_pairs_hook=_named_once), "the tokenizer is damaged")
    if not isinstance(rules, dict):
        raise SourceError(f"the tokenizer is damaged: {AGAIN}")
    return rules


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON; of a name that comes twice, the library and Python would read different values."""
    named = dict(pairs)
    if len(named) < len(pairs):
        raise ValueError("a name comes twice")
    return named


def _backend_of(text: str) -> tokenizers.Tokenizer:
    return _guarded(lambda: tokenizers.Tokenizer.from_str(text), "the tokenizer is damaged")


def _rules_of(component: Any) -> dict[str, Any] | None:
    """Return a part of the rules in the form in which the library writes them, however the file has spelled them."""
    if component is None:
        return None
    rules: dict[str, Any] = _guarded(lambda: json.loads(component.__getstate__()), "the tokenizer is damaged")
    return rules


def _guarded(action: Callable[[], _T], problem: str) -> _T:
    """Call the `tokenizers` library; its errors and its Rust panics become `SourceError`."""
    try:
        return action()
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a Rust panic does not derive from Exception
        raise SourceError(f"{problem} ({shown(str(error))}): {AGAIN}") from error
