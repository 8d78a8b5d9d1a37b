"""The folders of a node: which one is its home, which files lie in it, the API's token, and who runs there.

    config.toml    settings, for people (`app.config.file`)
    identity.key   the node's key, mode 0600 (`p2p.identity`)
    token          the control API's bearer token, mode 0600
    swarms.json    remembered swarms and their secrets, mode 0600 (`app.swarm.saved`)
    peers.json     addresses of peers that worked (`p2p`)
    trust.json     what was seen of peers (`app.routing.trust`)
    sequence       the last number this node gave a statement, so that a clock set back does not silence it
    pause.json     that a person paused this node, for as long as it is so (`app.courtesy.pause`)
    statistics.db  what this node gave and got (`app.node.statistics`)
    node.lock      held by the running node for as long as it lives, however it ends
    node.json      where that node is reached; without the lock held it is stale and means nothing
    logs/          what the node has to say

All homes of a user share one cache of weights, `cache_folder`.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

import platformdirs

from app.core.canonical_json import decode_object
from app.core.errors import AlreadyRunning, HomeError, NotRunning, RecordError
from p2p.platform import FileLock, create_private, is_locked, private_directory, write_private


def home_folder(option: str | os.PathLike[str] | None = None) -> Path:
    """The node's home: `--home` where given, else `SHOAL_HOME`, else the user's data folder."""
    return _absolute(option or os.environ.get("SHOAL_HOME") or platformdirs.user_data_path("shoal", appauthor=False))


def cache_folder() -> Path:
    """Where weights live: `SHOAL_CACHE`, else the user's cache folder."""
    return _absolute(os.environ.get("SHOAL_CACHE") or platformdirs.user_cache_path("shoal", appauthor=False))


def _absolute(path: str | os.PathLike[str]) -> Path:
    return Path(path).expanduser().absolute()


_MAX_FILE_BYTES = 64 * 1024
# Whoever looks whether the lock is held takes it for a moment; a node that starts just then tries again.
_LOCK_PATIENCE_S = 1.0


@dataclass(frozen=True)
class NodeInfo:
    """What `node.json` says about the running node."""

    pid: int
    api_url: str
    peer_id: str
    listen_addrs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Home:
    """One node's home folder."""

    folder: Path

    @classmethod
    def open(cls, option: str | Path | None = None) -> Home:
        """The home that `--home`, `SHOAL_HOME` or the system names, made if it is not there."""
        folder = home_folder(option)
        try:
            return cls(private_directory(folder))
        except OSError as error:
            raise HomeError(f"the home folder {folder} cannot be made: {error.strerror or error}") from error

    @property
    def config_file(self) -> Path:
        """The settings."""
        return self.folder / "config.toml"

    @property
    def key_file(self) -> Path:
        """The node's identity."""
        return self.folder / "identity.key"

    @property
    def token_file(self) -> Path:
        """The control API's bearer token."""
        return self.folder / "token"

    @property
    def swarms_file(self) -> Path:
        """The remembered swarms."""
        return self.folder / "swarms.json"

    @property
    def peers_file(self) -> Path:
        """The remembered peers."""
        return self.folder / "peers.json"

    @property
    def trust_file(self) -> Path:
        """What was seen of peers."""
        return self.folder / "trust.json"

    @property
    def node_file(self) -> Path:
        """Where the running node is reached."""
        return self.folder / "node.json"

    @property
    def lock_file(self) -> Path:
        """The lock that the running node holds."""
        return self.folder / "node.lock"

    @property
    def sequence_file(self) -> Path:
        """The last number given to a statement."""
        return self.folder / "sequence"

    @property
    def pause_file(self) -> Path:
        """That a person paused this node."""
        return self.folder / "pause.json"

    @property
    def statistics_file(self) -> Path:
        """What this node gave and got."""
        return self.folder / "statistics.db"

    @property
    def log_folder(self) -> Path:
        """The node's logs."""
        return self.folder / "logs"


# --- the token -------------------------------------------------------------------------------------------------------


def api_token(home: Home) -> str:
    """The bearer token of this home, made on first use; processes that ask at once get the same one."""
    try:
        if not home.token_file.exists():
            create_private(home.token_file, secrets.token_urlsafe(32).encode() + b"\n")
        token = _read(home.token_file).decode("ascii", "replace").strip()
    except OSError as error:
        raise HomeError(f"the token {home.token_file} cannot be used: {error.strerror or error}") from error
    if len(token) < 16 or not (token.isascii() and token.isprintable()):
        raise HomeError(f"the token in {home.token_file} is damaged: delete the file and start the node again")
    return token


# --- the running node ------------------------------------------------------------------------------------------------


def hold(home: Home) -> FileLock:
    """Take this home for the running node; raises `AlreadyRunning` where another one has it.

    What `node.json` an earlier node left behind is removed, so that it exists only once this node is reachable.
    """
    try:
        lock = FileLock.acquire(home.lock_file, timeout_s=_LOCK_PATIENCE_S)
    except TimeoutError:
        node = find_node(home)
        where = f" (process {node.pid}, {node.api_url})" if node else ""
        raise AlreadyRunning(
            f"a node already runs in {home.folder}{where}: stop it with `shoal stop`, or give this one another --home"
        ) from None
    except OSError as error:
        raise HomeError(f"the home folder {home.folder} cannot be used: {error.strerror or error}") from error
    home.node_file.unlink(missing_ok=True)
    return lock


def write_node_file(home: Home, node: NodeInfo) -> None:
    """Say where this node is reached."""
    write_private(home.node_file, json.dumps(asdict(node)).encode() + b"\n")


def remove_node_file(home: Home) -> None:
    """The node is leaving: nobody should try to reach it any more."""
    home.node_file.unlink(missing_ok=True)


def find_node(home: Home) -> NodeInfo | None:
    """The node that runs in this home and can be reached, or None.

    The lock decides, not the process id: an id may have gone to another process, and a lock dies with its holder.
    """
    return _node_in(home.node_file) if is_locked(home.lock_file) else None


def require_node(home: Home) -> NodeInfo:
    """The running node, or `NotRunning`, which says how to start one."""
    node = find_node(home)
    if node is not None:
        return node
    if is_locked(home.lock_file):
        raise NotRunning(f"the node in {home.folder} is starting or leaving; try again in a moment")
    raise NotRunning(f"no node runs in {home.folder}: start one with `shoal serve`, or name its folder with --home")


def _node_in(path: Path) -> NodeInfo | None:
    try:
        fields = decode_object(_read(path), "node.json", max_bytes=_MAX_FILE_BYTES)
        return NodeInfo(
            pid=fields.integer("pid", 1, 2**31),
            api_url=fields.text("api_url", 256),
            peer_id=fields.text("peer_id", 128),
            listen_addrs=fields.texts("listen_addrs", 64, 512, []),
        )
    except (OSError, RecordError):
        return None


# --- the sequence ----------------------------------------------------------------------------------------------------


def read_sequence(home: Home) -> int:
    """The last number that was stored, or 0; a damaged file counts as none, for the clock is nearly always enough."""
    try:
        text = _read(home.sequence_file).decode("ascii").strip()
    except (OSError, ValueError):
        return 0
    return int(text) if text.isdigit() and len(text) < 19 else 0


def write_sequence(home: Home, sequence: int) -> None:
    """Store the last number that was given; a failure is no reason to stop a node that is leaving."""
    with contextlib.suppress(OSError):
        write_private(home.sequence_file, f"{sequence}\n".encode())


def _read(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(_MAX_FILE_BYTES)
