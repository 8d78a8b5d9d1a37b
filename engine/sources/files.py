"""Reads a model's small files and the fields in them, with every size bounded and every type checked.

Knows nothing about models. Errors become `SourceError`s that name the file and the fix.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import SourceError

AGAIN = "download the model again"
MAX_JSON_BYTES = 256 << 20  # the largest tokenizer.json known is about 35 MB


def shown(value: object) -> str:
    """Return an untrusted value as short, printable text; a long one keeps both ends, as a path's end matters."""
    text = repr(value) if not isinstance(value, int) else str(value) if abs(value) < 10**40 else "a huge number"
    return text if len(text) <= 80 else f"{text[:30]}...{text[-47:]}"


def file_size(path: Path) -> int:
    """Size of a regular file in bytes; raises `SourceError` if it is missing, not a file or not readable."""
    try:
        if not path.is_file():
            raise SourceError(f"{path} is missing or not a file: {AGAIN}")
        return path.stat().st_size
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> SourceError:
    """Return the error for a file that the system cannot read."""
    return SourceError(f"{path} cannot be read ({error.strerror or error}): check its permissions and the disk")


def read_text(path: Path, max_bytes: int = MAX_JSON_BYTES) -> str:
    """Read a whole UTF-8 file; raises `SourceError` above `max_bytes`."""
    size = file_size(path)
    if size > max_bytes:
        raise SourceError(f"{path} has {size} bytes, more than the {max_bytes} such a file may have: {AGAIN}")
    try:
        with path.open("rb") as file:
            return file.read(max_bytes).decode("utf-8")
    except UnicodeDecodeError as error:
        raise SourceError(f"{path} is not text in UTF-8 (byte {error.start}): {AGAIN}") from error
    except OSError as error:
        raise unreadable(path, error) from error


def read_at(path: Path, offset: int, length: int) -> bytes:
    """Read a part of a file, less where it ends before; the caller bounds the length. Raises `SourceError`."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(length)
    except OSError as error:
        raise unreadable(path, error) from error


def parse_json_object(text: str, origin: str) -> dict[str, Any]:
    """Parse a JSON object; `origin` names the text's file in an error."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{origin} is not valid JSON ({shown(str(error))}): {AGAIN}") from error
    if not isinstance(value, dict):
        raise SourceError(f"{origin} is not a JSON object: {AGAIN}")
    return value


def read_json_object(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read the JSON object in a file."""
    return parse_json_object(read_text(path, max_bytes), str(path))


class Fields:
    """Typed and bounded access to the fields of an untrusted mapping; null counts as missing.

    A field of the wrong type or out of bounds raises `SourceError`, as does a missing one without a default.
    """

    def __init__(self, values: Mapping[str, Any], origin: str) -> None:
        self.values = values
        self.origin = origin

    def get(self, name: str) -> Any:
        """Return the raw value, or None."""
        return self.values.get(name)

    def wrong(self, name: str, wanted: str) -> SourceError:
        """Return the error for a field that is missing or not as `wanted`."""
        value = self.values.get(name)
        found = "is missing" if value is None else f"is {shown(value)}"
        return SourceError(f"{self.origin}: {name} {found}, expected {wanted}: {AGAIN}")

    def integer(self, name: str, high: int, *, low: int = 1, default: int | None = None) -> int:
        """Return an integer from `low` to `high`."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(name, f"a whole number from {low} to {high}")
        return value

    def number(self, name: str, *, low: float = 0.0, high: float = 1e12, default: float | None = None) -> float:
        """Return a finite number from `low` to `high`."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise self.wrong(name, f"a number from {low:g} to {high:g}")
        if not math.isfinite(value):
            raise self.wrong(name, "a finite number")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a boolean."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """Return a string."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self.wrong(name, "text")
        return value
