"""The zip of `shoal doctor --bundle` for a bug report: findings of the doctor, node state, settings, end of the log.

If the node runs, the last ten minutes of its snapshots and events are in it too, for `shoal replay`. It contains no
prompts, replies or environment variables. As a second safeguard, every secret of the home folder is removed from all
texts before they are written.
"""

from __future__ import annotations

import base64
import io
import json
import platform
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from app.config.home import Home
from app.core.errors import AppError
from app.snapshot.recording import SUFFIX
from app.swarm.saved import load
from p2p.errors import P2PError
from p2p.identity import load_or_create
from p2p.platform import create_private

LOG_BYTES = 256 * 1024
RECORDING = f"last-minutes{SUFFIX}"
_INVITE = re.compile(r"shoal:[a-z0-9]{16,}", re.IGNORECASE)
_REMOVED = "[removed]"


def write_bundle(
    path: Path, home: Home, facts: Mapping[str, Any], recording: Sequence[Mapping[str, Any]] = ()
) -> list[str]:
    """Write the zip and return one line about each file in it; `facts` are JSON values by name.

    `recording` are the lines of a recording; without any, the zip has none. Raises `AppError` if the file exists or
    cannot be written.
    """
    texts = {f"{name}.json": json.dumps(value, indent=1, sort_keys=True) for name, value in facts.items()}
    texts["log.txt"] = log_tail(home.log_file)
    if recording:
        texts[RECORDING] = "".join(f"{json.dumps(line)}\n" for line in recording)
    hidden = secrets_of(home)
    clean = {name: without_secrets(text, hidden) for name, text in texts.items()}
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in clean.items():
            archive.writestr(name, text)
    try:
        written = create_private(path, packed.getvalue())
    except OSError as error:
        raise AppError(f"{path} cannot be written: {error.strerror or error}") from error
    if not written:
        raise AppError(f"{path} exists already: name another file, or remove it")
    return [f"{name}  {len(text.encode())} bytes" for name, text in clean.items()]


def about(version: str) -> dict[str, str]:
    """Return the versions of Shoal, Python and the operating system."""
    return {"shoal": version, "python": platform.python_version(), "system": platform.platform()}


def log_tail(path: Path) -> str:
    """Return the last `LOG_BYTES` of the log, starting at a whole line; empty if it cannot be read."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, io.SEEK_END)
            file.seek(max(0, size - LOG_BYTES))
            raw = file.read(LOG_BYTES)
    except OSError:
        return ""
    text = raw.decode("utf-8", "replace")
    return text.partition("\n")[2] if size > LOG_BYTES else text


def secrets_of(home: Home) -> list[str]:
    """List the secrets of a home folder in all encodings in which they might appear in a text."""
    found: list[bytes] = []
    texts: list[str] = []
    if home.token_file.exists():
        texts.append(home.token_file.read_text("ascii", "replace").strip())
    try:
        found += [swarm.secret for swarm in load(home).swarms if swarm.secret]
        if home.key_file.exists():
            found.append(load_or_create(home.key_file).seed)
    except (AppError, P2PError):  # the doctor reports damaged files
        pass
    for secret in found:
        shown = repr(secret)[2:-1]
        texts += [secret.hex(), shown, json.dumps(shown)[1:-1], base64.b32encode(secret).decode().strip("=")]
        texts += [form(secret).decode().strip("=") for form in (base64.b64encode, base64.urlsafe_b64encode)]
    return [text for text in texts if len(text) >= 8]


def without_secrets(text: str, hidden: Iterable[str]) -> str:
    """Return the text without these secrets, without invites, and with the user's home directory replaced by `~`."""
    for secret in hidden:
        text = re.sub(re.escape(secret), _REMOVED, text, flags=re.IGNORECASE)
    text = _INVITE.sub(_REMOVED, text)
    own = str(Path.home())
    if len(own) > 1:
        for form in (own, json.dumps(own)[1:-1], json.dumps(own, ensure_ascii=False)[1:-1]):
            text = text.replace(form, "~")  # JSON doubles the backslashes of Windows, and may escape other letters
    return text
