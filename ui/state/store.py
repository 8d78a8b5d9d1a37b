"""The dashboard's knowledge of its node: connection, latest snapshot, jobs, events, log rows, samples for the plots.

While the node is unreachable, snapshot and jobs are None: their figures may no longer be true. Events and log rows
stay, since each has its time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from app.core.terminal_text import peer_words
from app.snapshot.views import JobView, JoinableView, PeerView, Snapshot, TrainingView
from ui.state.coverage import Coverage, coverage_of

KEPT_SAMPLES = 600  # ten minutes at one a second
KEPT_NOTES = 1000
KEPT_ROWS = 5000
KEPT_NAMES = 2000
GLOW_S = 10.0
SESSION_SAMPLES = 60

LinkKind = Literal["starting", "connecting", "live", "away", "refused"]


@dataclass(frozen=True)
class ConnectionState:
    """State of the connection to the node, with the reason if it is not live."""

    kind: LinkKind
    text: str = ""
    retry_at: float = 0.0  # on the store's clock
    url: str = ""
    next_step: str = ""  # what the user can do about it


@dataclass(frozen=True)
class Event:
    """One event of the node, numbered from 1 in each run of it."""

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
    """A recent change of a peer, shown highlighted for `GLOW_S`: it is new, has moved to another span, or has gone."""

    kind: Literal["new", "moved", "gone"]
    at: float
    peer: PeerView


class Store:
    """The only state about the node in the dashboard; messages write it, panels read it."""

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 10**6,
        marker: str = "",
    ) -> None:
        self.now, self.now_ms = now, now_ms
        self.marker = marker  # shown on a line of its own: this is a recording, or nothing can be changed
        self.link = ConnectionState("connecting")
        self.snapshot: Snapshot | None = None
        self.jobs: tuple[JobView | TrainingView, ...] | None = None  # None: not known
        self.joinable: tuple[JoinableView, ...] = ()  # training jobs of other members
        self.notes: deque[Event] = deque(maxlen=KEPT_NOTES)
        self.served: deque[float | None] = deque(maxlen=KEPT_SAMPLES)
        self.up: deque[float | None] = deque(maxlen=KEPT_SAMPLES)
        self.down: deque[float | None] = deque(maxlen=KEPT_SAMPLES)
        self.speeds: dict[str, deque[float | None]] = {}
        self.changes: dict[str, PeerChange] = {}
        self.logs: deque[LogRow] = deque(maxlen=KEPT_ROWS)
        self.logs_seen = 0
        self.settings: tuple[tuple[str, str], ...] = ()  # name and help of each of the node's settings
        self.version = 0
        self._seen_notes: deque[tuple[int, int]] = deque(maxlen=KEPT_NOTES)
        self._coverage_cache: tuple[Snapshot | None, Coverage | None] = (None, None)
        self._peers: dict[str, PeerView] | None = None
        self._names: dict[str, str] = {}  # by peer id, those present first
        self._swarm: tuple[str, str | None] | None = None

    # --- writing -----------------------------------------------------------------------------------------------------

    def connected(self, link: ConnectionState) -> None:
        """Record a change of the connection; forgets the snapshot and the jobs unless it is live."""
        self.link = link
        if link.kind != "live":
            self.snapshot = self.jobs = None
            self.joinable = ()
        self.version += 1

    def take(self, snapshot: Snapshot) -> None:
        """Replace the snapshot and record which peers are new, moved or gone."""
        self._record_peer_changes(snapshot)
        named = {peer.peer: peer.name for peer in snapshot.peers}
        if not named.items() <= self._names.items():
            gone = {peer: name for peer, name in self._names.items() if peer not in named}
            self._names = dict(islice((named | gone).items(), max(KEPT_NAMES, len(named))))
        self.snapshot = snapshot
        self.version += 1

    def take_jobs(self, jobs: Sequence[JobView | TrainingView]) -> None:
        """Replace the jobs; an answer that arrives after the connection was lost is dropped."""
        if self.link.kind == "live":
            self.jobs = tuple(jobs)

    def take_joinable(self, jobs: Sequence[JoinableView]) -> None:
        """Replace the jobs that could be joined; an answer that arrives after the connection was lost is dropped."""
        if self.link.kind == "live":
            self.joinable = tuple(jobs)

    def note(self, data: Mapping[str, Any]) -> None:
        """Add an event, once: a reconnected stream repeats earlier ones."""
        event = Event(int(data["number"]), int(data["at_ms"]), str(data["kind"]), str(data["text"]))
        key = (event.at_ms, event.number)  # both: another run of the node counts from 1 again
        if key not in self._seen_notes:
            self._seen_notes.append(key)
            self.notes.append(event)
            self.version += 1

    def log(self, row: LogRow) -> None:
        """Add a row to the log."""
        self.logs.append(row)
        self.logs_seen += 1

    def sample(self) -> None:
        """Add one sample to each plot, called once a second; None while the figures are unknown."""
        known = self.snapshot
        self.served.append(None if known is None else known.flow.served_tokens_per_s)
        self.up.append(None if known is None else known.flow.up_bytes_per_s)
        self.down.append(None if known is None else known.flow.down_bytes_per_s)
        sessions = {} if known is None else {s.id: s.tokens_per_s for s in known.active_sessions}
        self.speeds = {key: self.speeds.get(key, deque(maxlen=SESSION_SAMPLES)) for key in sessions}
        for key, value in sessions.items():
            self.speeds[key].append(value)
        self.version += 1

    def rewind(self) -> None:
        """Forget events, plots and changes, to show another time of a recording; the next snapshot is the first."""
        self.notes.clear()
        self._seen_notes.clear()
        self.replace_plots((), (), ())
        self.speeds, self.changes = {}, {}
        self._peers = self._swarm = None

    def replace_plots(self, served: Iterable[float], up: Iterable[float], down: Iterable[float]) -> None:
        """Replace the samples of the three plots, one for each second."""
        for kept, values in ((self.served, served), (self.up, up), (self.down, down)):
            kept.clear()
            kept.extend(values)
        self.version += 1

    # --- reading -----------------------------------------------------------------------------------------------------

    def peer_name(self, peer: str) -> str:
        """A peer's name in quotes, or the end of its id if it has none; this node, and no other peer, is `you`."""
        known = self.snapshot
        if known is not None and peer == known.peer_id:
            return "you"
        return peer_words(peer, self._names.get(peer, ""))

    def names(self) -> frozenset[tuple[str, str]]:
        """The known peers with their names; those that have gone too, since replies and rows of the log name them."""
        return frozenset(self._names.items())

    def cover(self) -> Coverage | None:
        """Coverage of the current snapshot, computed once per snapshot."""
        if self._coverage_cache[0] is not self.snapshot:
            self._coverage_cache = (self.snapshot, coverage_of(self.snapshot))
        return self._coverage_cache[1]

    def glowing(self) -> dict[str, PeerChange]:
        """Peers that changed less than `GLOW_S` ago, by peer id; drops older changes."""
        at = self.now()
        self.changes = {peer: change for peer, change in self.changes.items() if at - change.at < GLOW_S}
        return self.changes

    def _record_peer_changes(self, snapshot: Snapshot) -> None:
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
