"""Reads the header of a GGUF file: metadata and the table of tensors, without the tensors' bytes.

The `gguf` package's reader builds an array view for every string of the vocabulary (seconds for a small model) and
trusts every count in the file. This one takes a fraction of the time and bounds every count and length.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from engine.errors import SourceError
from engine.sources.base import TensorEntry
from engine.sources.files import AGAIN, file_size, read_at, shown, unreadable
from engine.sources.layout import byte_length

MAX_HEADER_BYTES = 256 << 20
MAX_FIELDS = 10_000
MAX_TENSORS = 200_000
MAX_ARRAY_ITEMS = 2_000_000
MAX_TEXT_BYTES = 16 << 20
_CHUNK = 1 << 20

# ggml's numbers for its types; those outside `KIND_SIZES` are listed so that an error can name them.
_KINDS = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
_TEXT, _ARRAY = 8, 9
# Value type -> (struct format, bytes).
_SCALARS = {
    0: ("B", 1), 1: ("b", 1), 2: ("H", 2), 3: ("h", 2), 4: ("I", 4), 5: ("i", 4), 6: ("f", 4), 7: ("?", 1),
    10: ("Q", 8), 11: ("q", 8), 12: ("d", 8),
}  # fmt: skip


@dataclass(frozen=True)
class GgufHeader:
    """Metadata and tensors of a GGUF file; the entries' roles are still empty."""

    file: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]


def read_header(path: Path) -> GgufHeader:
    """Read a file's metadata and its table of tensors; raises `SourceError` if the file is damaged."""
    size = file_size(path)
    try:
        with path.open("rb") as file:
            cursor = _Cursor(file, path, size)
            return _read(cursor, path, size)
    except OSError as error:
        raise unreadable(path, error) from error


class _Cursor:
    """Forward-only reader that never reads past the header limit or the file's end."""

    def __init__(self, file: BinaryIO, path: Path, size: int) -> None:
        self.file, self.path, self.size = file, path, size
        self.data = b""
        self.at = 0  # offset of the next value in `data`
        self.before = 0  # offset of `data` in the file

    @property
    def position(self) -> int:
        return self.before + self.at

    def ensure(self, count: int) -> None:
        """Read more of the file until `data` holds `count` bytes from `at` on."""
        if len(self.data) - self.at >= count:
            return
        if self.position + count > min(self.size, MAX_HEADER_BYTES):
            raise SourceError(f"{self.path} is cut short or damaged: incomplete header ({self.size} bytes): {AGAIN}")
        self.before, rest = self.position, self.data[self.at :]
        self.data, self.at = rest + self.file.read(max(count, _CHUNK)), 0
        if len(self.data) < count:
            raise SourceError(f"{self.path} became shorter while it was read: {AGAIN}")

    def scalar(self, kind: str, width: int) -> Any:
        self.ensure(width)
        (value,) = struct.unpack_from("<" + kind, self.data, self.at)
        self.at += width
        return value

    def text(self, max_bytes: int = MAX_TEXT_BYTES) -> str:
        length = self.scalar("Q", 8)
        if length > max_bytes:
            raise SourceError(
                f"{self.path} has a text of {shown(length)} bytes in its header, so it is damaged: {AGAIN}"
            )
        self.ensure(length)
        self.at += length
        try:
            return self.data[self.at - length : self.at].decode("utf-8")
        except UnicodeDecodeError as error:
            raise SourceError(f"{self.path} has a text in its header that is not UTF-8: {AGAIN}") from error

    def texts(self, count: int) -> list[str]:
        """Read many short strings, such as a vocabulary; those already in `data` are cut out in one fast loop."""
        found: list[str] = []
        length_of = struct.Struct("<Q").unpack_from
        while len(found) < count:
            data, at, end = self.data, self.at, len(self.data)
            while len(found) < count and at + 8 <= end and (stop := at + 8 + length_of(data, at)[0]) <= end:
                try:
                    found.append(data[at + 8 : stop].decode())
                except UnicodeDecodeError:
                    break  # the slow path below says what is wrong
                at = stop
            self.at = at
            if len(found) < count:
                found.append(self.text())  # fetches more of the file, or refuses
        return found

    def count(self, what: str, most: int) -> int:
        value: int = self.scalar("Q", 8)
        if value > most:
            raise SourceError(f"{self.path} claims {shown(value)} {what}, more than {most}, so it is damaged: {AGAIN}")
        return value


def _read(cursor: _Cursor, path: Path, size: int) -> GgufHeader:
    if size < 24:
        raise SourceError(f"{path} is cut short or not a GGUF file ({size} bytes): {AGAIN}")
    cursor.ensure(24)
    if cursor.data[:4] != b"GGUF":
        raise SourceError(f"{path} is not a GGUF file: give one, or a folder with config.json and safetensors")
    cursor.at = 4
    version = cursor.scalar("I", 4)
    if version not in (2, 3):
        raise SourceError(f"{path} is GGUF version {version}; Shoal reads 2 and 3, little-endian: convert it again")
    tensor_count = cursor.count("tensors", MAX_TENSORS)
    metadata: dict[str, Any] = {}
    for _ in range(cursor.count("metadata fields", MAX_FIELDS)):
        key = cursor.text(1 << 16)
        if key in metadata:
            raise SourceError(f"{path} has the field {shown(key)} twice and is damaged: {AGAIN}")
        metadata[key] = _value(cursor)
    raw = [_tensor(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= 1 << 20:
        raise SourceError(f"{path} has the impossible alignment {shown(alignment)}: {AGAIN}")
    start = -(-cursor.position // alignment) * alignment
    return GgufHeader(path, metadata, _table(raw, path, start, size))


def _value(cursor: _Cursor) -> Any:
    kind = cursor.scalar("I", 4)
    if kind in _SCALARS:
        return cursor.scalar(*_SCALARS[kind])
    if kind == _TEXT:
        return cursor.text()
    if kind != _ARRAY:
        raise SourceError(f"{cursor.path} has metadata of the unknown type {shown(kind)}: {AGAIN}")
    item, count = cursor.scalar("I", 4), cursor.count("items in an array", MAX_ARRAY_ITEMS)
    if item == _TEXT:
        return cursor.texts(count)
    if item not in _SCALARS:
        raise SourceError(f"{cursor.path} has an array of the unknown type {shown(item)}: {AGAIN}")
    form, width = _SCALARS[item]
    cursor.ensure(count * width)
    values = struct.unpack_from(f"<{count}{form}", cursor.data, cursor.at)
    cursor.at += count * width
    return list(values)


def _tensor(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.text(1024)
    dimensions = cursor.scalar("I", 4)
    if not 1 <= dimensions <= 4:
        raise SourceError(f"{cursor.path}: tensor {shown(name)} has {dimensions} dimensions, expected 1 to 4: {AGAIN}")
    # ggml lists the fastest-moving dimension first, torch lists it last.
    shape = tuple(cursor.scalar("Q", 8) for _ in range(dimensions))[::-1]
    return name, shape, cursor.scalar("I", 4), cursor.scalar("Q", 8)


def _table(
    raw: list[tuple[str, tuple[int, ...], int, int]], path: Path, start: int, size: int
) -> dict[str, TensorEntry]:
    tensors: dict[str, TensorEntry] = {}
    for name, shape, number, offset in raw:
        kind = _KINDS.get(number, f"number {number}")
        if name in tensors or math.prod(shape) >= 1 << 62 or offset >= 1 << 62:
            raise SourceError(f"{path}: tensor {shown(name)} is listed twice or has an impossible size: {AGAIN}")
        length = byte_length(kind, shape) or 0  # an unknown type is refused when the tensor is used
        if start + offset + length > size:
            end = start + offset + length
            raise SourceError(f"{path} is cut short: tensor {shown(name)} ends at byte {end} of {size}: {AGAIN}")
        tensors[name] = TensorEntry("", name, kind, shape, path, start + offset, length)
    return tensors


def read_floats(entry: TensorEntry) -> list[float]:
    """Read the values of a small F32 tensor (rope factors)."""
    if entry.kind != "F32" or entry.length > 1 << 16:
        raise SourceError(f"{entry.file}: tensor {entry.name} is not a short list of F32 numbers: {AGAIN}")
    data = read_at(entry.file, entry.offset, entry.length)
    return list(struct.unpack(f"<{len(data) // 4}f", data[: len(data) // 4 * 4]))
