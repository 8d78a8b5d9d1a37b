"""A zip for a bug report: what the doctor found, the node's state, the settings and the end of the log.

No prompt, no reply and no variable of the environment goes into it, and whatever this home folder holds as a secret is
taken out of all of it once more before it is written.
"""

from __future__ import annotations

import base64
import io
import json
import platform
import re
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from app.config.home import Home
from app.core.errors import AppError
from app.swarm.saved import load
from p2p.errors import P2PError
from p2p.identity import load_or_create
from p2p.platform import create_private

LOG_BYTES = 256 * 1024
_INVITE = re.compile(r"shoal:[a-z0-9]{16,}", re.IGNORECASE)
_REMOVED = "[removed]"


def write_bundle(path: Path, home: Home, facts: Mapping[str, Any]) -> list[str]:
    """Write the zip, which must not exist yet; `facts` are named JSON values. Returns what is in it, a line each."""
    texts = {f"{name}.json": json.dumps(value, indent=1, sort_keys=True) for name, value in facts.items()}
    texts["log.txt"] = log_tail(home.log_folder / "node.log")
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
    """What runs on what."""
    return {"shoal": version, "python": platform.python_version(), "system": platform.platform()}


def log_tail(path: Path) -> str:
    """The end of the log, from a whole line on."""
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
    """Every secret of a home folder in every form in which it could be written."""
    found: list[bytes] = []
    texts: list[str] = []
    if home.token_file.exists():
        texts.append(home.token_file.read_text("ascii", "replace").strip())
    try:
        found += [swarm.secret for swarm in load(home).swarms if swarm.secret]
        if home.key_file.exists():
            found.append(load_or_create(home.key_file).seed)
    except (AppError, P2PError):  # a damaged file is the doctor's to tell
        pass
    for secret in found:
        shown = repr(secret)[2:-1]
        texts += [secret.hex(), shown, json.dumps(shown)[1:-1], base64.b32encode(secret).decode().strip("=")]
        texts += [form(secret).decode().strip("=") for form in (base64.b64encode, base64.urlsafe_b64encode)]
    return [text for text in texts if len(text) >= 8]


def without_secrets(text: str, hidden: Iterable[str]) -> str:
    """The text without these, without invites, and without the name of the person's own folder."""
    for secret in hidden:
        text = re.sub(re.escape(secret), _REMOVED, text, flags=re.IGNORECASE)
    text = _INVITE.sub(_REMOVED, text)
    own = str(Path.home())
    return text.replace(own, "~") if len(own) > 1 else text
