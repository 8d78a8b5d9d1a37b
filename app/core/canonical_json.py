"""JSON from strangers: canonical encoding, strict decoding, and typed reading of one field at a time.

Canonical JSON is UTF-8 without spaces, keys sorted by code point, every character that JSON allows written as itself.
It is what Python's `json` writes with sorted keys and the tightest separators. Every refusal is a `RecordError` that
names the thing and the field. Fields nobody asks for are ignored; who stores or passes on a record does so byte for
byte, which keeps them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

from app.core.errors import RecordError

_ABSENT: Any = object()


def canonical(value: Any) -> bytes:
    """The canonical JSON of a value; raises `RecordError` for what JSON cannot say."""
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise RecordError(f"this cannot be written as canonical JSON: {error}") from error


def decode_object(raw: bytes, what: str, *, max_bytes: int, floats: bool = True) -> Fields:
    """The JSON object in `raw`, ready to be read field by field."""
    if len(raw) > max_bytes:
        raise RecordError(f"{what}: {len(raw)} bytes are too many, the bound is {max_bytes}")
    try:
        value = json.loads(
            raw.decode(), parse_constant=_refuse, parse_float=float if floats else _refuse, object_pairs_hook=_no_twins
        )
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{what}: not valid JSON ({str(error)[:100]})") from error
    if not isinstance(value, dict):
        raise RecordError(f"{what}: not a JSON object")
    return Fields(what, value)


def check_version(fields: Fields, name: str, understood: int) -> None:
    """Refuse another major version by name."""
    version = fields.integer(name, 1, 2**31)
    if version != understood:
        raise RecordError(
            f"{fields.what}: version {version} is not understood, this Shoal reads version {understood}; update Shoal"
        )


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"the number {text[:20]} is not allowed here")


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key appears twice")
    return result


class Fields:
    """One JSON object whose fields are taken out with their type and bounds checked."""

    def __init__(self, what: str, values: Mapping[str, Any]) -> None:
        self.what = what
        self.values = values

    def _take(self, name: str, default: Any) -> Any:
        value = self.values.get(name, _ABSENT)
        if value is _ABSENT and default is _ABSENT:
            raise RecordError(f"{self.what}: the field {name!r} is missing")
        return default if value is _ABSENT else value

    def refuse(self, name: str, expected: str) -> NoReturn:
        """Raise the refusal of one field."""
        shown = repr(self.values.get(name))
        raise RecordError(f"{self.what}: {name!r} is {shown[:60]}, expected {expected}")

    def integer(self, name: str, low: int, high: int, default: int = _ABSENT) -> int:
        """A whole number in `low..high`, both included."""
        value = self._take(name, default)
        if type(value) is not int or not low <= value <= high:
            self.refuse(name, f"a whole number from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float, default: float = _ABSENT) -> float:
        """A finite number in `low..high`, both included."""
        value = self._take(name, default)
        if type(value) not in (int, float) or not low <= value <= high or not math.isfinite(value):
            self.refuse(name, f"a number from {low} to {high}")
        return float(value)

    def flag(self, name: str, default: bool = _ABSENT) -> bool:
        """True or false."""
        value = self._take(name, default)
        if not isinstance(value, bool):
            self.refuse(name, "true or false")
        return value

    def text(self, name: str, max_chars: int, default: str = _ABSENT) -> str:
        """A text of at most `max_chars` characters that can be written as UTF-8."""
        value = self._take(name, default)
        if not isinstance(value, str) or len(value) > max_chars or not _is_unicode(value):
            self.refuse(name, f"a text of at most {max_chars} characters")
        return value

    def optional_text(self, name: str, max_chars: int) -> str | None:
        """A text, or None where it is null or missing."""
        return None if self._take(name, None) is None else self.text(name, max_chars)

    def hex_bytes(self, name: str, length: int) -> bytes:
        """Exactly `length` bytes in lower-case hex."""
        value = self.text(name, 2 * length)
        try:
            raw = bytes.fromhex(value)
        except ValueError:
            raw = b""
        if raw.hex() != value or len(raw) != length:
            self.refuse(name, f"{length} bytes in lower-case hex")
        return raw

    def items(self, name: str, max_items: int, default: list[Any] = _ABSENT) -> list[Any]:
        """A list of at most `max_items`; what is in it is still unchecked."""
        value = self._take(name, default)
        if not isinstance(value, list) or len(value) > max_items:
            self.refuse(name, f"a list of at most {max_items}")
        return value

    def integers(self, name: str, low: int, high: int, *, max_items: int, default: list[Any] = _ABSENT) -> list[int]:
        """A list of whole numbers in `low..high`."""
        value = self.items(name, max_items, default)
        if not all(type(item) is int and low <= item <= high for item in value):
            self.refuse(name, f"whole numbers from {low} to {high}")
        return value

    def texts(self, name: str, max_items: int, max_chars: int, default: list[Any] = _ABSENT) -> tuple[str, ...]:
        """A list of texts."""
        value = self.items(name, max_items, default)
        if not all(isinstance(item, str) and len(item) <= max_chars and _is_unicode(item) for item in value):
            self.refuse(name, f"texts of at most {max_chars} characters")
        return tuple(value)

    def inner(self, name: str) -> Fields:
        """An object inside this one."""
        return Fields.of(f"{self.what}: {name}", self._take(name, _ABSENT))

    @staticmethod
    def of(what: str, value: Any) -> Fields:
        """Any decoded JSON value as an object, or a refusal."""
        if not isinstance(value, dict):
            raise RecordError(f"{what}: not a JSON object")
        return Fields(what, value)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which JSON can escape and nothing can print
        return False
    return True
