"""What the dashboard knows: the node's last word, what happened, and how its figures ran.

While the node is away nothing of its last snapshot is given out: what was true then need not be true now. What
happened stays, for it has its times.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from app.snapshot.views import PeerView, Snapshot
from ui.state.coverage import Coverage, coverage_of

KEPT_SAMPLES = 600  # one a second
KEPT_NOTES = 1000
KEPT_ROWS = 5000
GLOW_S = 10.0
SESSION_SAMPLES = 60

LinkKind = Literal["starting", "connecting", "live", "away", "refused"]


@dataclass(frozen=True)
class ConnectionState:
    """How the line to the node stands."""

    kind: LinkKind
    text: str = ""
    retry_at: float = 0.0  # of the store's clock
    url: str = ""


@dataclass(frozen=True)
class Event:
    """One thing that happened in the node."""

    number: int
    at_ms: int
    kind: str
    text: str


@dataclass(frozen=True)
class LogRow:
    """One row of a log: the node's or the dashboard's own."""

    at_ms: int
    level: str
    source: str
    text: str


@dataclass(frozen=True)
class PeerChange:
    """What became of a peer of late: new, moved or gone, and when."""

    kind: Literal["new", "moved", "gone"]
    at: float
    peer: PeerView


class Store:
    """The dashboard's only state of the node; events go in, panels read."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self.link = ConnectionState("connecting")
        self.snapshot: Snapshot | None = None
        self.notes: deque[Event] = deque(maxlen=KEPT_NOTES)
        self.served: deque[float | None] = deque(maxlen=KEPT_SAMPLES)
        self.up: deque[float | None] = deque(maxlen=KEPT_SAMPLES)
        self.down: deque[float | None] = deque(maxlen=KEPT_SAMPLES)
        self.speeds: dict[str, deque[float | None]] = {}
        self.changes: dict[str, PeerChange] = {}
        self.logs: deque[LogRow] = deque(maxlen=KEPT_ROWS)
        self.logs_seen = 0
        self.version = 0
        self._seen_notes: deque[tuple[int, int]] = deque(maxlen=KEPT_NOTES)
        self._covered: tuple[Snapshot | None, Coverage | None] = (None, None)
        self._peers: dict[str, PeerView] | None = None
        self._swarm: tuple[str, str | None] | None = None

    # --- what comes in -----------------------------------------------------------------------------------------------

    def connected(self, link: ConnectionState) -> None:
        """The line to the node stands otherwise than before."""
        self.link = link
        if link.kind != "live":
            self.snapshot = None
        self.version += 1

    def take(self, snapshot: Snapshot) -> None:
        """The node's state at this moment."""
        self._follow_peers(snapshot)
        self.snapshot = snapshot
        self.version += 1

    def note(self, data: Mapping[str, Any]) -> None:
        """One thing that happened; a reconnected stream tells again what was told."""
        happening = Event(int(data["number"]), int(data["at_ms"]), str(data["kind"]), str(data["text"]))
        key = (happening.at_ms, happening.number)
        if key not in self._seen_notes:
            self._seen_notes.append(key)
            self.notes.append(happening)
            self.version += 1

    def log(self, row: LogRow) -> None:
        """One more row of the log."""
        self.logs.append(row)
        self.logs_seen += 1

    def sample(self) -> None:
        """Once a second: the figures that are plotted; a gap while they are not known."""
        known = self.snapshot
        self.served.append(None if known is None else known.flow.served_tokens_per_s)
        self.up.append(None if known is None else known.flow.up_bytes_per_s)
        self.down.append(None if known is None else known.flow.down_bytes_per_s)
        sessions = {} if known is None else {s.id: s.tokens_per_s for s in known.active_sessions}
        self.speeds = {key: self.speeds.get(key, deque(maxlen=SESSION_SAMPLES)) for key in sessions}
        for key, value in sessions.items():
            self.speeds[key].append(value)
        self.version += 1

    # --- what is read ------------------------------------------------------------------------------------------------

    def peer_name(self, peer: str) -> str:
        """What a peer calls itself, or the end of its id; this node is `you`."""
        known = self.snapshot
        if known is not None and peer == known.peer_id:
            return "you"
        found = (self._peers or {}).get(peer)
        return (found.name if found is not None else "") or peer[-6:]

    def cover(self) -> Coverage | None:
        """The coverage of what is known now; worked out once for each snapshot."""
        if self._covered[0] is not self.snapshot:
            self._covered = (self.snapshot, coverage_of(self.snapshot))
        return self._covered[1]

    def glowing(self) -> dict[str, PeerChange]:
        """The peers whose change is fresh enough to be shown."""
        at = self.now()
        self.changes = {peer: change for peer, change in self.changes.items() if at - change.at < GLOW_S}
        return self.changes

    def _follow_peers(self, snapshot: Snapshot) -> None:
        before, self._peers = self._peers, {peer.peer: peer for peer in snapshot.peers}
        swarm, self._swarm = self._swarm, (snapshot.swarm or "", snapshot.manifest)
        if before is None or swarm != self._swarm:
            self.changes = {}
            return
        at = self.now()
        for key, peer in self._peers.items():
            old = before.get(key)
            if old is None:
                self.changes[key] = PeerChange("new", at, peer)
            elif (old.start, old.stop) != (peer.start, peer.stop):
                self.changes[key] = PeerChange("moved", at, peer)
        for key, old in before.items():
            if key not in self._peers:
                self.changes[key] = PeerChange("gone", at, old)
