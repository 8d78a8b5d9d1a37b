"""The home folder of a node: where it is, every file that Shoal keeps there, the API token, and the running node.

`HOME_FILES` is the one table of these files: `Home` takes its paths from it and `app.system.uninstall` removes what it
lists. The contents of most files belong to the modules named in it. All homes of a user share one cache of weights,
`cache_folder`.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import overload

import platformdirs

from app.core.canonical_json import decode_object
from app.core.errors import AlreadyRunning, HomeError, NotRunning, RecordError
from p2p.platform import FileLock, create_private, is_locked, private_directory, write_private


def home_folder(option: str | os.PathLike[str] | None = None) -> Path:
    """Path of the home folder: `--home` if given, else `SHOAL_HOME`, else the user's data folder."""
    return _absolute(option or os.environ.get("SHOAL_HOME") or platformdirs.user_data_path("shoal", appauthor=False))


def cache_folder() -> Path:
    """Path of the folder for weights: `SHOAL_CACHE`, else the user's cache folder."""
    return _absolute(os.environ.get("SHOAL_CACHE") or platformdirs.user_cache_path("shoal", appauthor=False))


def _absolute(path: str | os.PathLike[str]) -> Path:
    return Path(path).expanduser().absolute()


_MAX_FILE_BYTES = 64 * 1024
# `is_locked` takes the lock for a moment to test it, so a node that starts just then must try again.
_LOCK_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class NodeInfo:
    """The contents of `node.json`: process, API address and identity of the running node."""

    pid: int
    api_url: str
    peer_id: str
    listen_addrs: tuple[str, ...] = ()


@dataclass(frozen=True)
class HomeFile:
    """One file that Shoal keeps in a home folder; read through a `Home`, it is the file's path there."""

    name: str  # path within the home folder
    holds: str
    private: bool  # created with mode 0600 (a folder: 0700), so that other users of the machine cannot read it
    related: tuple[str, ...] = ()  # glob patterns of files made from it: backups, SQLite's journals, rotated logs
    is_folder: bool = False
    is_whole: bool = False  # a folder that holds nothing but Shoal's files, and is removed with them

    @overload
    def __get__(self, home: None, owner: type[Home]) -> HomeFile: ...
    @overload
    def __get__(self, home: Home, owner: type[Home]) -> Path: ...
    def __get__(self, home: Home | None, owner: type[Home]) -> HomeFile | Path:
        """Return the path in `home`, or this entry itself when read from the class."""
        return self if home is None else home.folder / self.name

    @property
    def patterns(self) -> tuple[str, ...]:
        """Glob patterns, relative to the home folder, of every path that belongs to this entry.

        Besides the file and `related`: the lock held while it is changed, and the temporary copies that are left behind
        if the machine stops during a write (`p2p.platform`).
        """
        if self.is_folder:
            return (self.name,)
        names = (self.name, *self.related)
        paths = [PurePosixPath(name) for name in names]
        return (*names, f"{self.name}.lock", *(str(path.with_name(f".{path.name}.*.tmp")) for path in paths))


def _sqlite_files(name: str) -> tuple[str, ...]:
    return tuple(f"{name}-{suffix}" for suffix in ("journal", "wal", "shm"))


@dataclass(frozen=True)
class Home:
    """One node's home folder and the paths of its files."""

    folder: Path

    config_file = HomeFile(
        "config.toml", "settings, edited by the user (`app.config.file`)", private=True, related=("config.toml.v*.bak",)
    )
    key_file = HomeFile(
        "identity.key",
        "the node's private key (`p2p.identity`); `shoal id import --replace` keeps the former one beside it",
        private=True,
        related=("identity-12D3KooW*.key",),
    )
    visit_key_file = HomeFile(
        "visit.key", "the private key with which this node asks in another swarm (`app.node.visits`)", private=True
    )
    visit_peers_file = HomeFile("visit-peers.json", "addresses of peers met on such visits", private=True)
    token_file = HomeFile("token", "bearer token of the control API", private=True)
    keys_file = HomeFile("keys.json", "hashes of programs' keys, and their limits (`app.config.keys`)", private=True)
    api_certificate_file = HomeFile(
        "api-certificate.pem",
        "certificate of the API on other addresses than loopback, for programs to trust (`app.api.certificate`)",
        private=True,
    )
    api_key_file = HomeFile("api-certificate.key", "the private key of that certificate", private=True)
    swarms_file = HomeFile(
        "swarms.json", "saved swarms and their secrets (`app.swarm.saved`)", private=True, related=("swarms.lock",)
    )
    admission_file = HomeFile(
        "admission.json",
        "invites made here, who used them, and revocation lists (`app.swarm.invitations`)",
        private=True,
    )
    peers_file = HomeFile(
        "peers.json", "addresses of peers that could be dialled (`p2p.discovery.known_peers`)", private=True
    )
    trust_file = HomeFile("trust.json", "observed failures and lies of peers (`app.routing.trust`)", private=True)
    sequence_file = HomeFile(
        "sequence",
        "last sequence number this node signed, so that they still rise after the clock was set back",
        private=True,
    )
    pause_file = HomeFile(
        "pause.json", "exists while the user has paused this node (`app.courtesy.pause`)", private=True
    )
    statistics_file = HomeFile(
        "statistics.db",
        "work done for and received from peers, by day (`app.node.statistics`)",
        private=False,
        related=(*_sqlite_files("statistics.db"), "statistics.db.damaged-*"),
    )
    forecasts_file = HomeFile(
        "forecasts.db",
        "past forecasts beside what was measured (`app.planning.history`)",
        private=True,
        related=_sqlite_files("forecasts.db"),
    )
    conversations_file = HomeFile(
        "conversations.db",
        "the dashboard's conversations and choices (`ui.state.conversations`)",
        private=True,
        related=_sqlite_files("conversations.db"),
    )
    responses_file = HomeFile(
        "responses.db",
        "responses of the last day, for `previous_response_id` (`app.api.response_store`)",
        private=True,
        related=_sqlite_files("responses.db"),
    )
    releases_file = HomeFile(
        "releases", "serial of the newest list of releases seen (`app.system.releases`)", private=True
    )
    lock_file = HomeFile(
        "node.lock", "locked by the running node until its process ends, however it ends", private=False
    )
    node_file = HomeFile(
        "node.json", "where the running node is reached; stale unless node.lock is locked", private=True
    )
    adapters_folder = HomeFile(
        "adapters", "finished adapters, a folder for each (`app.training.adapter_store`)", private=True, is_folder=True,
        is_whole=True,
    )  # fmt: skip
    jobs_folder = HomeFile(
        "jobs", "fine-tuning jobs, a folder for each (`app.training.job_store`)", private=True, is_folder=True,
        is_whole=True,
    )  # fmt: skip
    trainings_folder = HomeFile(
        "trainings", "training jobs, a folder for each (`app.rounds.train_store`)", private=True, is_folder=True,
        is_whole=True,
    )  # fmt: skip
    training_folder = HomeFile(
        "training", "states of running jobs, of this node and of others (`app.training.states`)", private=True,
        is_folder=True, is_whole=True,
    )  # fmt: skip
    log_folder = HomeFile("logs", "the folder of both logs", private=True, is_folder=True)
    log_file = HomeFile(
        "logs/node.log", "the node's log (`app.system.logs`)", private=False, related=("logs/node.log.*",)
    )
    start_log_file = HomeFile(
        "logs/start.log", "stderr of a node started by the dashboard (`app.cli.dashboard`)", private=False
    )
    task_file = HomeFile(
        "shoal.xml",
        "task of the Windows Task Scheduler (`app.system.service`); shoal-HASH.xml in a home other than the default",
        private=True,
        related=("shoal-????????.xml",),
    )

    @classmethod
    def open(cls, option: str | Path | None = None) -> Home:
        """Return the home named by `--home`, `SHOAL_HOME` or the system, created if missing; raises `HomeError`."""
        folder = home_folder(option)
        try:
            return cls(private_directory(folder))
        except OSError as error:
            raise HomeError(f"the home folder {folder} cannot be created: {error.strerror or error}") from error


HOME_FILES: tuple[HomeFile, ...] = tuple(entry for entry in vars(Home).values() if isinstance(entry, HomeFile))


# --- the token -------------------------------------------------------------------------------------------------------


def api_token(home: Home) -> str:
    """Return the home's API token, created on first use without a race between processes; raises `HomeError`."""
    try:
        if not home.token_file.exists():
            create_private(home.token_file, secrets.token_urlsafe(32).encode() + b"\n")
    except OSError as error:
        raise _unusable_token(home, error) from error
    token = kept_token(home)
    if token is None:
        raise HomeError(f"the token file {home.token_file} was removed just now: try again")
    return token


def kept_token(home: Home) -> str | None:
    """Return the home's API token, None if it has none; raises `HomeError` if the file cannot be read or is damaged."""
    try:
        token = _read(home.token_file).decode("ascii", "replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unusable_token(home, error) from error
    if len(token) < 16 or not (token.isascii() and token.isprintable()):
        raise HomeError(f"the token in {home.token_file} is damaged: delete the file and start the node again")
    return token


def _unusable_token(home: Home, error: OSError) -> HomeError:
    return HomeError(f"the token file {home.token_file} cannot be used: {error.strerror or error}")


# --- the running node ------------------------------------------------------------------------------------------------


def hold(home: Home) -> FileLock:
    """Lock the home for this process; raises `AlreadyRunning` if a node runs in it, `HomeError` if it is unusable.

    Removes the `node.json` of an earlier node, so that the file exists only once this node is reachable.
    """
    try:
        lock = FileLock.acquire(home.lock_file, timeout_s=_LOCK_TIMEOUT_S)
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
    """Publish where this node is reached, for other commands on this machine."""
    write_private(home.node_file, json.dumps(asdict(node)).encode() + b"\n")


def remove_node_file(home: Home) -> None:
    """Remove `node.json`, so that commands no longer try to reach a node that is stopping."""
    home.node_file.unlink(missing_ok=True)


def find_node(home: Home) -> NodeInfo | None:
    """Return the running node of this home; None if there is none, or it is not reachable yet.

    Decided by the lock, not by the process id: the system reuses ids, and releases a lock when its process ends.
    """
    return _node_in(home.node_file) if is_locked(home.lock_file) else None


def require_node(home: Home) -> NodeInfo:
    """Return the running node; raises `NotRunning`, which says how to start one."""
    node = find_node(home)
    if node is not None:
        return node
    if is_locked(home.lock_file):
        raise NotRunning(f"the node in {home.folder} is starting or stopping; try again in a moment")
    raise NotRunning(f"no node runs in {home.folder}: start one with `shoal serve`, or give its folder with --home")


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
    """Return the stored sequence number; 0 if it is missing or damaged, since the clock is nearly always enough."""
    try:
        text = _read(home.sequence_file).decode("ascii").strip()
    except (OSError, ValueError):
        return 0
    return int(text) if text.isdigit() and len(text) < 19 else 0


def write_sequence(home: Home, sequence: int) -> None:
    """Store the last sequence number; errors are ignored, because the node is stopping."""
    with contextlib.suppress(OSError):
        write_private(home.sequence_file, f"{sequence}\n".encode())


def _read(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(_MAX_FILE_BYTES)
