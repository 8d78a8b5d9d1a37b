"""Reads the header of a safetensors file: a length of eight bytes, then JSON with the place of each tensor; writes one.

Offsets are checked against the file's size, so that a cut-short file is found without reading the weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from engine.errors import SourceError
from engine.sources.base import TensorEntry
from engine.sources.files import AGAIN, file_size, parse_json_object, shown, unreadable

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2,
    "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip


def read_index(path: Path) -> dict[str, TensorEntry]:
    """Return every tensor of one file by name; roles are still empty."""
    size = file_size(path)
    header_bytes, header = _read_header(path, size)
    origin = f"the header of {path}"
    entries: dict[str, TensorEntry] = {}
    for name, value in parse_json_object(header, origin).items():
        if name != "__metadata__":
            entries[name] = _entry(name, value, path, (8 + header_bytes, size))
    return entries


def read_metadata(path: Path) -> dict[str, str]:
    """Return the texts that a file says about itself; empty if there are none."""
    values = parse_json_object(_read_header(path, file_size(path))[1], f"the header of {path}").get("__metadata__")
    return {k: v for k, v in values.items() if isinstance(v, str)} if isinstance(values, dict) else {}


def encode(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return a file of float32 tensors, in the order given."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, values in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [offset, offset + values.nbytes]}
        offset += values.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(values.astype("<f4", copy=False).tobytes() for values in tensors.values())
    return len(text).to_bytes(8, "little") + text + data


def _read_header(path: Path, size: int) -> tuple[int, str]:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise SourceError(f"{path} is cut short or not a safetensors file ({size} bytes): {AGAIN}")
            return length, file.read(length).decode("utf-8")
    except UnicodeDecodeError as error:
        raise SourceError(f"the header of {path} is not text: {AGAIN}") from error
    except OSError as error:
        raise unreadable(path, error) from error


def _entry(name: str, value: Any, path: Path, data: tuple[int, int]) -> TensorEntry:
    start, end = data
    wrong = SourceError(f"the header of {path} has an invalid entry for tensor {shown(name)} ({shown(value)}): {AGAIN}")
    if not isinstance(value, dict):
        raise wrong
    kind, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not (_is_naturals(shape) and len(shape) <= 8 and _is_naturals(offsets) and len(offsets) == 2):
        raise wrong
    first, last = offsets
    if not isinstance(kind, str) or first > last:
        raise wrong
    if kind in ITEM_BYTES and math.prod(shape) * ITEM_BYTES[kind] != last - first:
        raise wrong
    if start + last > end:
        raise SourceError(f"{path} is cut short: tensor {shown(name)} ends at byte {start + last} of {end}: {AGAIN}")
    return TensorEntry("", name, kind, tuple(shape), path, start + first, last - first)


def _is_naturals(value: object) -> TypeGuard[list[int]]:
    """True if the value is a list of integers that a file offset can hold."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 62 for item in value)
