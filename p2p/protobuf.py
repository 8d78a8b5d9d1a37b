"""Protobuf's encoding of messages, as far as libp2p's protocols use it; no message is defined here.

A message is a sequence of fields. Each begins with the varint `number << 3 | kind`, where kind 0 is followed by a
varint and kind 2 by a length and as many bytes: bytes, text or another message. A varint has seven bits a byte, the
lowest first. The module of each protocol names its fields, and says how long a message may be.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Final, TypeVar

from p2p.errors import ProtocolError

MAX_FIELDS: Final = 256  # of one message, so that a peer's message of tiny fields takes little time
_MAX_NUMBER: Final = (1 << 29) - 1
_MAX_VARINT_BYTES: Final = 10
_MAX_TAG_BYTES: Final = 5
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

Value = int | bytes | str | Iterable[bytes | str] | None
T = TypeVar("T", bound=IntEnum)


def varint(value: int) -> bytes:
    """Encode a number that is not negative."""
    if value < 128:
        return bytes((value,))
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def encode(*fields: tuple[int, Value]) -> bytes:
    """Encode a message from the numbers and values of its fields; None leaves a field out, a list repeats it."""
    encoded = bytearray()
    for number, value in fields:
        if value is None:
            continue
        if isinstance(value, int):
            encoded += varint(number << 3 | _VARINT) + varint(value)
            continue
        for part in (value,) if isinstance(value, bytes | str) else value:
            data = part.encode() if isinstance(part, str) else part
            encoded += varint(number << 3 | _BYTES) + varint(len(data)) + data
    return bytes(encoded)


class Fields:
    """The fields of a message that a peer sent, by number; those of an unexpected kind count as absent."""

    __slots__ = ("_numbers", "_parts")

    def __init__(self, message: bytes) -> None:
        """Parse the message; raises `ProtocolError` if it is malformed or has more than `MAX_FIELDS` fields."""
        self._numbers: dict[int, int] = {}
        self._parts: dict[int, list[bytes]] = {}
        at, end, count = 0, len(message), 0
        while at < end:
            tag, at = _read_varint(message, at, _MAX_TAG_BYTES)
            number, kind = tag >> 3, tag & 7
            count += 1
            if not 0 < number <= _MAX_NUMBER or count > MAX_FIELDS:
                raise ProtocolError("a message has too many fields, or one without a valid number")
            if kind == _BYTES:
                length, at = _read_varint(message, at)
                self._parts.setdefault(number, []).append(message[at : at + length])
                at += length
            elif kind == _VARINT:
                self._numbers[number], at = _read_varint(message, at)
            elif kind in (_FIXED64, _FIXED32):
                at += 8 if kind == _FIXED64 else 4
            else:
                raise ProtocolError(f"a message has a field of the unsupported kind {kind}")
        if at > end:
            raise ProtocolError("a message ends in the middle of a field")

    def number(self, field: int) -> int:
        """Return a number, or 0 if the field is absent; of several the last one counts."""
        return self._numbers.get(field, 0)

    def type(self, field: int, types: type[T], what: str) -> T:
        """Return the type of a message, which `what` names for people; raises `ProtocolError` if it is unknown."""
        try:
            return types(self.number(field))
        except ValueError:
            raise ProtocolError(f"{what} has the unknown type {self.number(field)}") from None

    def data(self, field: int) -> bytes:
        """Return bytes, or b"" if the field is absent; of several the last one counts."""
        return self._parts[field][-1] if field in self._parts else b""

    def repeated(self, field: int) -> list[bytes]:
        """Return all the bytes of a field that may be there several times."""
        return self._parts.get(field, [])

    def message(self, field: int) -> Fields | None:
        """Return the message in a field, or None if it is absent; of several, protobuf joins the fields."""
        return Fields(b"".join(self._parts[field])) if field in self._parts else None


def _read_varint(data: bytes, at: int, at_most: int = _MAX_VARINT_BYTES) -> tuple[int, int]:
    """Return the number at an offset, and the offset after it; raises `ProtocolError` if it is cut off or too long."""
    value = shift = 0
    for byte in data[at : at + at_most]:
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            if value >> 64:
                break
            return value, at
        shift += 7
    raise ProtocolError("a message has a number that is cut off or too long")
