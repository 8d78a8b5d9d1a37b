"""JSON from untrusted sources: canonical encoding, strict decoding, and typed reading of one field at a time.

Canonical JSON is UTF-8 without spaces, with keys sorted by code point and every character that JSON allows unescaped:
what Python's `json` writes with sorted keys and the tightest separators. Everything invalid raises a `RecordError` that
names the document and the field. Unknown fields are ignored; they survive because records are stored and forwarded as
raw bytes.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from typing import Any, NoReturn

from app.core.errors import RecordError

MAX_DEPTH = 64  # objects and lists in each other; whoever walks through a value, as `asdict` does, recurses as deep
_ABSENT: Any = object()
_SHOWN_CHARS = 60
# A peer chooses the value: Python's own `repr` fails on deep nesting, and takes long for a long list.
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 2 * _SHOWN_CHARS


def canonical(value: Any) -> bytes:
    """Encode a value as canonical JSON; raises `RecordError` for values that JSON cannot express."""
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise RecordError(f"this cannot be written as canonical JSON: {error}") from error


def decode_object(raw: bytes, what: str, *, max_bytes: int, floats: bool = True) -> Fields:
    """Parse a JSON object of at most `max_bytes`; raises `RecordError`, which names it as `what`.

    NaN, infinities, duplicate keys and nesting beyond `MAX_DEPTH` are refused, and fractional numbers too unless
    `floats`.
    """
    if len(raw) > max_bytes:
        raise RecordError(f"{what}: {len(raw)} bytes are too many, the limit is {max_bytes}")
    try:
        value = json.loads(
            raw.decode(),
            parse_constant=_refuse,
            parse_float=float if floats else _refuse,
            object_pairs_hook=_unique_keys,
        )
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{what}: not valid JSON ({str(error)[:100]})") from error
    if not isinstance(value, dict):
        raise RecordError(f"{what}: not a JSON object")
    if _is_deep(value):
        raise RecordError(f"{what}: more than {MAX_DEPTH} objects or lists in each other")
    return Fields(what, value)


def check_version(fields: Fields, name: str, understood: int) -> None:
    """Raise `RecordError` if the field `name` is any other version than `understood`."""
    version = fields.integer(name, 1, 2**31)
    if version != understood:
        raise RecordError(
            f"{fields.what}: version {version} is not understood, this Shoal reads version {understood}; update Shoal"
        )


def _is_deep(value: Any) -> bool:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        inner = (one.values() if isinstance(one, dict) else one for one in level)
        level = [child for children in inner for child in children if isinstance(child, dict | list)]
        if not level:
            return False
    return True


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"the number {text[:20]} is not allowed here")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key appears twice")
    return result


class Fields:
    """A decoded JSON object whose fields are read with type and bounds checked.

    Readers raise `RecordError` for a wrong value, and for a missing field that has no default.
    """

    def __init__(self, what: str, values: Mapping[str, Any]) -> None:
        self.what = what
        self.values = values

    def _take(self, name: str, default: Any) -> Any:
        value = self.values.get(name, _ABSENT)
        if value is _ABSENT and default is _ABSENT:
            raise RecordError(f"{self.what}: the field {name!r} is missing")
        return default if value is _ABSENT else value

    def refuse(self, name: str, expected: str) -> NoReturn:
        """Raise `RecordError` for one field, naming its value and what was expected."""
        shown = _SHORT.repr(self.values.get(name))
        raise RecordError(f"{self.what}: {name!r} is {shown[:_SHOWN_CHARS]}, expected {expected}")

    def integer(self, name: str, low: int, high: int, default: int = _ABSENT) -> int:
        """Read an integer in `low..high`, both included."""
        value = self._take(name, default)
        if type(value) is not int or not low <= value <= high:
            self.refuse(name, f"a whole number from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float, default: float = _ABSENT) -> float:
        """Read a finite number in `low..high`, both included."""
        value = self._take(name, default)
        if type(value) not in (int, float) or not low <= value <= high or not math.isfinite(value):
            self.refuse(name, f"a number from {low} to {high}")
        return float(value)

    def flag(self, name: str, default: bool = _ABSENT) -> bool:
        """Read a boolean."""
        value = self._take(name, default)
        if not isinstance(value, bool):
            self.refuse(name, "true or false")
        return value

    def text(self, name: str, max_chars: int, default: str = _ABSENT) -> str:
        """Read a string of at most `max_chars` characters without lone surrogates."""
        value = self._take(name, default)
        if not isinstance(value, str) or len(value) > max_chars or not _is_unicode(value):
            self.refuse(name, f"a text of at most {max_chars} characters")
        return value

    def printable(self, name: str, max_chars: int, default: str = _ABSENT) -> str:
        """Read a text that a terminal may show: no escape sequences, line breaks or invisible marks of direction."""
        text = self.text(name, max_chars, default)
        if not text.isprintable():
            self.refuse(name, "printable text")
        return text

    def optional_text(self, name: str, max_chars: int) -> str | None:
        """Read a string like `text`; None if it is null or missing."""
        return None if self._take(name, None) is None else self.text(name, max_chars)

    def hex_bytes(self, name: str, length: int) -> bytes:
        """Read exactly `length` bytes, written in lower-case hex."""
        value = self.text(name, 2 * length)
        try:
            raw = bytes.fromhex(value)
        except ValueError:
            raw = b""
        if raw.hex() != value or len(raw) != length:
            self.refuse(name, f"{length} bytes in lower-case hex")
        return raw

    def items(self, name: str, max_items: int, default: list[Any] = _ABSENT) -> list[Any]:
        """Read a list of at most `max_items`; its items are not checked."""
        value = self._take(name, default)
        if not isinstance(value, list) or len(value) > max_items:
            self.refuse(name, f"a list of at most {max_items}")
        return value

    def integers(self, name: str, low: int, high: int, *, max_items: int, default: list[Any] = _ABSENT) -> list[int]:
        """Read a list of at most `max_items` integers in `low..high`, both included."""
        value = self.items(name, max_items, default)
        if not all(type(item) is int and low <= item <= high for item in value):
            self.refuse(name, f"whole numbers from {low} to {high}")
        return value

    def texts(self, name: str, max_items: int, max_chars: int, default: list[Any] = _ABSENT) -> tuple[str, ...]:
        """Read a list of at most `max_items` strings of at most `max_chars` characters each."""
        value = self.items(name, max_items, default)
        if not all(isinstance(item, str) and len(item) <= max_chars and _is_unicode(item) for item in value):
            self.refuse(name, f"texts of at most {max_chars} characters")
        return tuple(value)

    def inner(self, name: str) -> Fields:
        """Read a nested object."""
        return Fields.of(f"{self.what}: {name}", self._take(name, _ABSENT))

    @staticmethod
    def of(what: str, value: Any) -> Fields:
        """Wrap a decoded JSON value; raises `RecordError` unless it is an object."""
        if not isinstance(value, dict):
            raise RecordError(f"{what}: not a JSON object")
        return Fields(what, value)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate: JSON can escape it, UTF-8 cannot encode it
        return False
    return True
