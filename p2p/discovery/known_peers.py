"""Peers that were reached before, kept in one small file, so that a node finds its way back without help.

`peers.json` is `{"version": 1, "peers": [{"id": …, "addresses": […], "seen_at": unix seconds}, …]}`, the latest
first, at most 200, written atomically. A peer that only came here itself has `"reached": false`; such peers have 50
places at most, so that a crowd of strangers cannot make a node forget where it was at home. A file that cannot be read
is as good as none: it is only a memory.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from p2p.addresses import Address, is_peer_id, parse_known
from p2p.platform import write_private

if TYPE_CHECKING:
    from p2p.host.host import Host

MAX_REMEMBERED = 200
MAX_UNREACHED = 50
SAVE_S = 60.0
_MAX_FILE_BYTES = 1 << 20
_VERSION = 1

log = logging.getLogger("shoal.p2p.peers")


@dataclass(frozen=True)
class KnownPeer:
    """A peer, where it was reached, and when."""

    peer: str
    addresses: tuple[Address, ...]
    seen_at: float
    reached: bool = True  # this node dialled it, and it was there


def load_peers(path: Path) -> list[KnownPeer]:
    """The remembered peers, the latest first; none where the file is missing or damaged."""
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(_MAX_FILE_BYTES))
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError) as error:
        log.warning("the remembered peers in %s cannot be read (%s); starting without them", path, error)
        return []
    if not isinstance(content, dict) or content.get("version") != _VERSION:
        log.warning("the remembered peers in %s are of another version; starting without them", path)
        return []
    entries = content.get("peers")
    found = [_read(entry) for entry in (entries if isinstance(entries, list) else [])[:MAX_REMEMBERED]]
    return [entry for entry in found if entry is not None]


def save_peers(path: Path, peers: Sequence[KnownPeer]) -> None:
    """Write the latest of `peers`; raises OSError."""
    content = {"version": _VERSION, "peers": [_plain(entry) for entry in _latest(peers)]}
    write_private(path, json.dumps(content, indent=1).encode())


def merge(old: Sequence[KnownPeer], new: Sequence[KnownPeer]) -> list[KnownPeer]:
    """Both, the newer word on each peer."""
    peers = {entry.peer: entry for entry in old}
    for entry in new:
        known = peers.get(entry.peer)
        if known is None or entry.seen_at >= known.seen_at:
            peers[entry.peer] = replace(entry, reached=entry.reached or (known is not None and known.reached))
    return _latest(peers.values())


def _latest(peers: Iterable[KnownPeer]) -> list[KnownPeer]:
    latest = sorted(peers, key=lambda entry: -entry.seen_at)
    unreached = [entry for entry in latest if not entry.reached][:MAX_UNREACHED]
    reached = [entry for entry in latest if entry.reached][: MAX_REMEMBERED - len(unreached)]
    return sorted([*reached, *unreached], key=lambda entry: -entry.seen_at)


def _plain(entry: KnownPeer) -> dict[str, Any]:
    addresses = [str(address) for address in entry.addresses]
    plain = {"id": entry.peer, "addresses": addresses, "seen_at": round(entry.seen_at)}
    return plain if entry.reached else plain | {"reached": False}


def _read(entry: Any) -> KnownPeer | None:
    if not isinstance(entry, dict):
        return None
    peer, addresses, seen_at = entry.get("id"), entry.get("addresses"), entry.get("seen_at")
    if not (isinstance(peer, str) and is_peer_id(peer) and isinstance(addresses, list)):
        return None
    usable = parse_known([text for text in addresses[:64] if isinstance(text, str)], peer)
    at = float(seen_at) if isinstance(seen_at, int | float) else 0.0
    return KnownPeer(peer, tuple(usable), at, entry.get("reached") is not False)


class KnownPeers:
    """Keeps the file in step with whom a host reaches; None as path remembers nothing."""

    def __init__(self, path: Path | None, host: Host) -> None:
        self._path = path
        self._host = host
        self._known: list[KnownPeer] = []

    async def load(self) -> list[KnownPeer]:
        """The peers of earlier days."""
        if self._path is not None:
            self._known = await trio.to_thread.run_sync(load_peers, self._path)
        return self._known

    async def run(self) -> None:
        """Save now and then."""
        while True:
            await trio.sleep(SAVE_S)
            self.save()

    def save(self) -> None:
        """Write whom this host reached; a failure is logged, it is only a memory."""
        if self._path is None:
            return
        now, clock, book = time.time(), trio.current_time(), self._host.book
        reached = [KnownPeer(peer, tuple(where), now - (clock - at)) for peer, where, at in book.proven_peers()]
        connected = {connection.peer for connection in self._host.connections()}
        proven = {entry.peer for entry in reached}
        present = [KnownPeer(peer, tuple(book.addresses(peer)), now, peer in proven) for peer in connected]
        self._known = merge(self._known, [*reached, *(entry for entry in present if entry.addresses)])
        try:
            save_peers(self._path, self._known)
        except OSError as error:
            log.warning("the peers cannot be remembered in %s: %s", self._path, error)
