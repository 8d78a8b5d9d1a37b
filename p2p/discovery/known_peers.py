"""Peers known from earlier runs, kept in `peers.json`, so that a restarted node can reconnect without an invite.

The file is `{"version": 1, "peers": [{"id": …, "addresses": […], "seen_at": unix seconds}, …]}`: at most 200 peers, the
last seen first, written atomically. A peer that connected to this node and was never dialled has `"reached": false`;
at most 50 such peers are kept, so that a crowd of strangers cannot displace the peers that this node reached itself. A
file that cannot be read is logged and ignored, because everything in it can be found again.
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

from p2p.addresses import MAX_ADDRESS_CHARS, MAX_ADDRESSES_PER_PEER, Address, is_peer_id, parse_known
from p2p.platform import write_private

if TYPE_CHECKING:
    from p2p.host.host import Host

MAX_REMEMBERED = 200
MAX_UNREACHED = 50
SAVE_S = 60.0
_MAX_FILE_BYTES = MAX_REMEMBERED * (MAX_ADDRESSES_PER_PEER + 1) * MAX_ADDRESS_CHARS  # more than is ever saved
_VERSION = 1

log = logging.getLogger("shoal.p2p.peers")


@dataclass(frozen=True)
class KnownPeer:
    """A peer, its addresses, and the unix time at which it was last connected."""

    peer: str
    addresses: tuple[Address, ...]
    seen_at: float
    reached: bool = True  # a dial of this node succeeded


def load_peers(path: Path) -> list[KnownPeer]:
    """Read the remembered peers, the last seen first; an empty list if the file is missing or damaged."""
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(_MAX_FILE_BYTES))
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError) as error:
        log.warning("the remembered peers in %s cannot be read (%s); starting without them", path, error)
        return []
    if not isinstance(content, dict) or content.get("version") != _VERSION:
        log.warning("the remembered peers in %s have an unknown file version; starting without them", path)
        return []
    entries = content.get("peers")
    found = [_from_json(entry) for entry in (entries if isinstance(entries, list) else [])[:MAX_REMEMBERED]]
    return [entry for entry in found if entry is not None]


def save_peers(path: Path, peers: Sequence[KnownPeer]) -> None:
    """Write the last seen of `peers`, within the limits on their number; raises OSError."""
    content = {"version": _VERSION, "peers": [_to_json(entry) for entry in _latest(peers)]}
    write_private(path, json.dumps(content, indent=1).encode())


def merge(old: Sequence[KnownPeer], new: Sequence[KnownPeer]) -> list[KnownPeer]:
    """Combine two lists, with the newer entry for each peer; a peer once reached stays marked as reached."""
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


def _to_json(entry: KnownPeer) -> dict[str, Any]:
    addresses = [str(address) for address in entry.addresses]
    plain = {"id": entry.peer, "addresses": addresses, "seen_at": round(entry.seen_at)}
    return plain if entry.reached else plain | {"reached": False}


def _from_json(entry: Any) -> KnownPeer | None:
    if not isinstance(entry, dict):
        return None
    peer, addresses, seen_at = entry.get("id"), entry.get("addresses"), entry.get("seen_at")
    if not (isinstance(peer, str) and is_peer_id(peer) and isinstance(addresses, list)):
        return None
    usable = parse_known([text for text in addresses[:64] if isinstance(text, str)], peer)
    at = float(seen_at) if isinstance(seen_at, int | float) else 0.0
    return KnownPeer(peer, tuple(usable), at, entry.get("reached") is not False)


class KnownPeers:
    """Keeps `peers.json` up to date with the peers of a host; with `path=None` nothing is read or written."""

    def __init__(self, path: Path | None, host: Host) -> None:
        self._path = path
        self._host = host
        self._known: list[KnownPeer] = []
        self._writing = trio.Lock()

    async def load(self) -> list[KnownPeer]:
        """Read the file and return its peers, the last seen first."""
        if self._path is not None:
            self._known = await trio.to_thread.run_sync(load_peers, self._path)
        return self._known

    async def run(self) -> None:
        """Save every `SAVE_S` seconds, until cancelled."""
        while True:
            await trio.sleep(SAVE_S)
            await self.save()

    async def save(self) -> None:
        """Add the peers that the host reached or is connected to, and write the file in a thread: a disk may be slow.

        A failure is only logged.
        """
        if self._path is None:
            return
        now, clock, book = time.time(), trio.current_time(), self._host.book
        reached = [KnownPeer(peer, tuple(where), now - (clock - at)) for peer, where, at in book.proven_peers()]
        connected = {connection.peer for connection in self._host.connections()}
        proven = {entry.peer for entry in reached}
        present = [KnownPeer(peer, tuple(book.addresses(peer)), now, peer in proven) for peer in connected]
        self._known = merge(self._known, [*reached, *(entry for entry in present if entry.addresses)])
        try:
            async with self._writing:  # the last of several writers writes the latest state
                await trio.to_thread.run_sync(save_peers, self._path, self._known)
        except OSError as error:
            log.warning("the known peers cannot be saved in %s: %s", self._path, error)
