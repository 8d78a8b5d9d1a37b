"""Keys for programs that may ask this node for replies but not control it: `keys.json` in the home folder.

Of a key only the hash is kept, so it is shown once, when it is made. The command line writes the file; a running node
reads it again whenever it has changed (`app.api.keys`).
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from app.core.errors import AppError, UsageError
from p2p.platform import FileLock, write_private

PREFIX = "sk-shoal-"
MAX_KEYS = 1000
MAX_LIMIT = 10**9
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class ApiKey:
    """A key by its name: its hash, when it was made, and its limits, where None is no limit."""

    name: str
    digest: str
    created_at: int  # seconds since the epoch
    tokens_per_minute: int | None = None
    at_once: int | None = None  # requests under way


class KeyFileError(AppError):
    """The file of keys cannot be read or written; no key is accepted until it is repaired or deleted."""


def digest_of(key: str | bytes) -> str:
    """Return the hash by which a key is known."""
    return hashlib.sha256(key if isinstance(key, bytes) else key.encode()).hexdigest()


def read_keys(file: Path) -> tuple[ApiKey, ...]:
    """Return the keys; raises `KeyFileError` if the file is damaged or cannot be read."""
    try:
        rows = json.loads(file.read_bytes())
        keys = tuple(_checked(row) for row in rows["keys"])
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise KeyFileError(f"{file} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise KeyFileError(f"{file} is damaged: delete it and make new keys with `shoal keys add`") from error
    return keys


def add_key(file: Path, name: str, tokens_per_minute: int | None, at_once: int | None) -> tuple[ApiKey, str]:
    """Make a key and return it with its text, which is kept nowhere; raises `UsageError` if the name is taken."""
    if not _NAME.fullmatch(name):
        raise UsageError("a key's name is 1 to 64 letters, digits, dots, dashes or underscores")
    text = f"{PREFIX}{secrets.token_urlsafe(32)}"
    made = ApiKey(name, digest_of(text), int(time.time()), tokens_per_minute, at_once)
    with _locked(file):
        keys = read_keys(file)
        if any(key.name == name for key in keys):
            raise UsageError(f"a key named {name} exists: revoke it first with `shoal keys revoke {name}`")
        if len(keys) >= MAX_KEYS:
            raise UsageError(f"there are {MAX_KEYS} keys: revoke some first")
        _write(file, (*keys, made))
    return made, text


def revoke_key(file: Path, name: str) -> ApiKey:
    """Remove a key; raises `UsageError` if there is none of this name."""
    with _locked(file):
        keys = read_keys(file)
        found = next((key for key in keys if key.name == name), None)
        if found is None:
            raise UsageError(f"unknown key {name[:64]!r}: `shoal keys` lists them")
        _write(file, tuple(key for key in keys if key is not found))
    return found


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Keep other processes from changing the file meanwhile."""
    try:
        lock = FileLock.acquire(file.with_name(f"{file.name}.lock"), timeout_s=10.0)
    except (OSError, TimeoutError) as error:
        raise KeyFileError(f"{file} cannot be changed: {error}") from error
    with lock:
        yield


def _checked(row: dict[str, object]) -> ApiKey:
    key = ApiKey(**row)  # type: ignore[arg-type]
    limits = (key.tokens_per_minute, key.at_once)
    is_fine = isinstance(key.name, str) and isinstance(key.digest, str) and len(key.digest) == 64
    if not is_fine or not all(limit is None or type(limit) is int for limit in limits):
        raise ValueError("a field is wrong")
    return key


def _write(file: Path, keys: tuple[ApiKey, ...]) -> None:
    try:
        write_private(file, json.dumps({"keys": [asdict(key) for key in keys]}, indent=1).encode())
    except OSError as error:
        raise KeyFileError(f"{file} cannot be written: {error.strerror or error}") from error
