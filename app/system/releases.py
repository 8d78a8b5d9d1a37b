"""The signed list of Shoal's releases, with which `shoal update --check` compares this program.

The list is a JSON object. Its signature lies beside it, as NAME.minisig in minisign's format (`minisign -V` checks it
too), made with the key whose public half is `RELEASE_KEY`:

| field | type | meaning |
|---|---|---|
| `format` | 1 | the version of this format |
| `serial` | integer | rises with every list, so that an older one is known as such |
| `issued_at`, `expires_at` | unix seconds | the time in which the list may be used |
| `releases` | list, at most 256 | `version` (`X.Y.Z`), `date`, `url` (where to get it), and `notes`, one line |

A list that is expired, or older than one that this home has seen, is refused: somebody may be holding back a newer one.
Nothing here runs by itself, fetches a release or installs one.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import http.client
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from app.core.canonical_json import Fields, check_version, decode_object
from app.core.errors import AppError, RecordError
from p2p.identity import is_signed
from p2p.platform import write_private

RELEASE_KEY = "RWRDe/LyTMhLRzrrMwlONDWyTbni1dj37WQ49Cf5ZtRyWgRdGOtCI+Yg"
SIGNATURE_SUFFIX = ".minisig"
MAX_LIST_BYTES = 1 << 20
_MAX_SIGNATURE_BYTES = 2048
_MAX_RELEASES = 256
_MAX_SERIAL = 2**53
_MAX_TIME = 2**40
_CLOCK_SLACK_S = 86_400.0
_TIMEOUT_S = 30.0
_VERSION = re.compile(r"\d{1,4}\.\d{1,4}\.\d{1,4}")

Fetch = Callable[[str, int], bytes]


class BadSignature(AppError):
    """The list of releases is not signed with the key of this program."""


class StaleList(AppError):
    """The list of releases is expired, or older than one seen before."""


@dataclass(frozen=True)
class Release:
    """One release; `version` is X.Y.Z, `date` is for people."""

    version: str
    date: str
    url: str
    notes: str = ""


@dataclass(frozen=True)
class ReleaseList:
    """A list whose signature and fields were checked; its times were not."""

    serial: int
    issued_at: int
    expires_at: int
    releases: tuple[Release, ...]

    @property
    def newest(self) -> Release:
        """The release with the highest version."""
        return max(self.releases, key=lambda release: version_number(release.version))


def version_number(text: str) -> tuple[int, ...]:
    """Return a version as numbers that compare; raises `RecordError`."""
    if not _VERSION.fullmatch(text):
        raise RecordError(f"{text[:40]!r} is not a version like 1.2.3")
    return tuple(int(part) for part in text.split("."))


# --- the signature ---------------------------------------------------------------------------------------------------


def check_signature(data: bytes, signature: bytes, key: str = RELEASE_KEY) -> None:
    """Check a minisign signature over the BLAKE2b hash of `data`; raises `BadSignature`."""
    trusted = _decoded(key, 42)
    lines = signature.decode("utf-8", "replace").splitlines() if len(signature) <= _MAX_SIGNATURE_BYTES else []
    if len(lines) != 4 or not lines[2].startswith("trusted comment: "):
        raise BadSignature("the signature of the list of releases is not in minisign's format")
    made = _decoded(lines[1], 74)
    comment = lines[2].removeprefix("trusted comment: ").encode()
    # Key and signature: two bytes of algorithm, eight of the key's number; "ED" signs the hash, not the data itself.
    is_whole = made[:2] == b"ED" and is_signed(trusted[10:], hashlib.blake2b(data).digest(), made[10:])
    if made[2:10] != trusted[2:10]:
        raise BadSignature("the list of releases was signed with another key than the one this Shoal trusts")
    if not is_whole or not is_signed(trusted[10:], made[10:] + comment, _decoded(lines[3], 64)):
        raise BadSignature("the signature of the list of releases is wrong: the list was changed or is damaged")


def _decoded(line: str, length: int) -> bytes:
    try:
        raw = base64.b64decode(line, validate=True)
    except (binascii.Error, ValueError):
        raw = b""
    if len(raw) != length:
        raise BadSignature("the signature of the list of releases is not in minisign's format")
    return raw


# --- the list --------------------------------------------------------------------------------------------------------


def parse_list(data: bytes) -> ReleaseList:
    """Read a list; raises `RecordError`."""
    fields = decode_object(data, "the list of releases", max_bytes=MAX_LIST_BYTES, floats=False)
    check_version(fields, "format", 1)
    entries = fields.items("releases", _MAX_RELEASES)
    if not entries:
        fields.refuse("releases", "at least one release")
    return ReleaseList(
        serial=fields.integer("serial", 1, _MAX_SERIAL),
        issued_at=fields.integer("issued_at", 0, _MAX_TIME),
        expires_at=fields.integer("expires_at", 0, _MAX_TIME),
        releases=tuple(_release(entry) for entry in entries),
    )


def _release(entry: object) -> Release:
    if not isinstance(entry, dict):
        raise RecordError("the list of releases has an entry that is not an object")
    fields = Fields("a release", entry)
    version = fields.text("version", 16)
    version_number(version)
    texts = [fields.text("date", 32), fields.text("url", 512), fields.text("notes", 200, "")]
    if not all(text.isprintable() for text in texts):
        raise RecordError(f"release {version} has a text with characters that cannot be shown")
    return Release(version, *texts)


def check_current(found: ReleaseList, now: float, seen_serial: int) -> None:
    """Raise `StaleList` if a list is expired, from the future, or older than one seen before."""
    day = time.strftime("%Y-%m-%d", time.gmtime(found.issued_at))
    if found.serial < seen_serial:
        raise StaleList(f"the list of releases of {day} is older than one seen before: take it from its usual place")
    if now > found.expires_at:
        raise StaleList(f"the list of releases of {day} has expired: take a newer one, and check this machine's clock")
    if found.issued_at > now + _CLOCK_SLACK_S:
        raise StaleList(f"the list of releases is of {day}, which is in the future: check this machine's clock")


def newest_release(address: str, seen_file: Path, *, fetch: Fetch | None = None, key: str = RELEASE_KEY) -> Release:
    """Return the newest release in the signed list at `address`, a URL or a file.

    `seen_file` holds the highest serial seen. Raises `AppError` if the list cannot be read, is not signed or is stale.
    """
    fetch = fetch or read_address
    data = fetch(address, MAX_LIST_BYTES)
    check_signature(data, fetch(address + SIGNATURE_SUFFIX, _MAX_SIGNATURE_BYTES), key)
    found = parse_list(data)
    seen = _seen_serial(seen_file)
    check_current(found, time.time(), seen)
    if found.serial > seen:
        write_private(seen_file, f"{found.serial}\n".encode())
    return found.newest


def _seen_serial(file: Path) -> int:
    try:
        text = file.read_text("ascii").strip()[:20]
    except (OSError, UnicodeDecodeError):
        return 0
    return int(text) if text.isdecimal() else 0


def read_address(address: str, at_most: int) -> bytes:
    """Read a URL or a file of at most `at_most` bytes; raises `AppError`."""
    try:
        if not address.startswith(("https://", "http://")):
            with open(address, "rb") as file:
                data = file.read(at_most + 1)
        else:
            data = _download(address, at_most)
    except (OSError, ValueError, http.client.HTTPException) as error:
        why = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise AppError(f"{address} cannot be read: {why}") from error
    if len(data) > at_most:
        raise AppError(f"{address} has more than {at_most} bytes: this is not a list of releases")
    return data


def _download(url: str, at_most: int) -> bytes:
    deadline, data = time.monotonic() + _TIMEOUT_S, bytearray()
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:
        while len(data) <= at_most and (piece := response.read1(1 << 16)):
            data += piece
            if time.monotonic() > deadline:
                raise TimeoutError(f"it took more than {_TIMEOUT_S:.0f} s")
    return bytes(data)
