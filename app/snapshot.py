"""The node's state at one moment, as values that travel: the API sends them, the command line and dashboard read them.

Only the standard library is needed to read one. Fields that a reader does not know are ignored and missing ones have
their defaults, so that a client and a node of neighbouring versions understand each other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

State = Literal[
    "starting", "idle", "joining", "fetching", "loading", "serving", "client", "paused", "draining", "stopping"
]
STATES: tuple[State, ...] = get_args(State)
JOINED: frozenset[str] = frozenset({"fetching", "loading", "serving", "client", "paused"})

_T = TypeVar("_T")


@dataclass(frozen=True)
class PeerView:
    """Another member of the swarm as this node sees it; a figure that is not known is None."""

    peer: str
    name: str = ""
    start: int | None = None
    stop: int | None = None
    rtt_s: float | None = None
    link: str | None = None  # direct, lan, relayed; None: no connection is open
    score: float = 1.0
    state: str = ""
    device: str = ""
    tokens_per_s: float = 0.0
    why: str = ""  # what the score is about


@dataclass(frozen=True)
class SwarmView:
    """A swarm that this node remembers."""

    name: str
    manifest: str
    pinned: str
    private: bool = False
    active: bool = False
    joined_at_ms: int = 0


@dataclass(frozen=True)
class NetworkView:
    """How this node hangs on the network."""

    advertised: tuple[str, ...] = ()
    reach: str = "unknown"  # unknown, verified, unverified: whether others were seen to dial in
    verified: tuple[str, ...] = ()
    relaying: bool = False
    links: int = 0
    discovery: tuple[str, ...] = ()


@dataclass(frozen=True)
class Snapshot:
    """Everything that a person can see of a running node."""

    peer_id: str
    state: State
    reason: str
    api_url: str
    name: str = ""
    swarm: str | None = None
    manifest: str | None = None
    private: bool = False
    blocks_total: int | None = None
    start: int | None = None
    stop: int | None = None
    device: str | None = None
    sessions: int = 0
    tokens_per_s: float = 0.0
    listen_addrs: tuple[str, ...] = ()
    version: str = ""
    pid: int = 0
    started_at_ms: int = 0
    network: NetworkView = NetworkView()
    peers: tuple[PeerView, ...] = ()
    swarms: tuple[SwarmView, ...] = ()


STATUS_FIELDS = (
    "peer_id",
    "name",
    "state",
    "reason",
    "swarm",
    "manifest",
    "private",
    "blocks_total",
    "start",
    "stop",
    "listen_addrs",
    "api_url",
    "device",
    "sessions",
    "version",
    "pid",
    "started_at_ms",
)


def facts(value: Any) -> dict[str, Any]:
    """A value of this module as JSON has it."""
    return dataclasses.asdict(value)


def status_facts(snapshot: Snapshot) -> dict[str, Any]:
    """What `shoal status` says: the snapshot without the lists that have commands of their own."""
    return {name: getattr(snapshot, name) for name in STATUS_FIELDS}


def coverage(snapshot: Snapshot) -> list[dict[str, Any]]:
    """What `shoal blocks` says: for every block who serves it, the fastest first."""
    serving = [peer for peer in snapshot.peers if peer.state == "serving"]
    if snapshot.state == "serving":
        own = PeerView(snapshot.peer_id, start=snapshot.start, stop=snapshot.stop, tokens_per_s=snapshot.tokens_per_s)
        serving.append(own)
    serving.sort(key=lambda peer: (-peer.tokens_per_s, peer.peer))
    return [{"block": block, "holders": _holders(block, serving)} for block in range(snapshot.blocks_total or 0)]


def _holders(block: int, serving: Sequence[PeerView]) -> list[dict[str, Any]]:
    return [
        {"peer": peer.peer, "tokens_per_s": peer.tokens_per_s}
        for peer in serving
        if peer.start is not None and peer.stop is not None and peer.start <= block < peer.stop
    ]


def snapshot_from(values: Mapping[str, Any]) -> Snapshot:
    """The snapshot in what a node sent."""
    inner = dict(values)
    inner["network"] = _read(NetworkView, values.get("network") or {})
    inner["peers"] = tuple(_read(PeerView, item) for item in _items(values, "peers"))
    inner["swarms"] = tuple(_read(SwarmView, item) for item in _items(values, "swarms"))
    return _read(Snapshot, inner)


def _items(values: Mapping[str, Any], name: str) -> Sequence[Mapping[str, Any]]:
    return values.get(name) or ()


def _read(kind: type[_T], values: Mapping[str, Any]) -> _T:
    known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return kind(**{name: value for name, value in given.items() if name in known})
