"""The table of peers: choice of columns, order, filter, and one row per peer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.core.terminal_text import one_line, peer_words
from app.snapshot.views import PeerView, Snapshot
from ui.draw.bars import bar
from ui.draw.numbers import known_rate, milliseconds
from ui.draw.rows import UNKNOWN, Row, cell, row
from ui.state.coverage import Coverage
from ui.state.store import PeerChange

_MAP = 20
_SIGNS = {"serving": ("●", "success"), "client": ("○", "dim"), "paused": ("‖", "warning")}
_GLOW = {"new": "success", "moved": "warning", "gone": "s dim"}


@dataclass(frozen=True)
class Columns:
    """Widths in cells of the columns that vary; 0 leaves a column out."""

    peer: int
    device: int
    with_map: bool
    with_bar: bool
    with_score: bool


def columns_for(width: int, names: Sequence[str]) -> Columns:
    """Choose columns: name, span, tok/s, rtt, link and state always; map, device, bar and score if they fit."""
    longest = max((len(name) for name in names), default=0) + len("“”")
    room = width - 2 - 9 - 6 - 8 - 9 - 12  # sign, span, tok/s, rtt, link, state
    peer = max(8, min(longest, 10 if width < 120 else 24, room))
    room -= peer + 1
    with_map = room >= _MAP + 2
    room -= _MAP + 2 if with_map else 0
    device = min(18, room) if room >= 14 else 0
    room -= device
    with_bar = room >= 8
    room -= 8 if with_bar else 0
    return Columns(peer, device, with_map, with_bar, room >= 7)


def table_peers(snapshot: Snapshot | None, changes: Mapping[str, PeerChange]) -> list[PeerView]:
    """Every member including this node, and peers that have just gone."""
    if snapshot is None:
        return []
    own = PeerView(
        snapshot.peer_id,
        "you",
        snapshot.start,
        snapshot.stop,
        link="you",
        state=snapshot.state,
        device=snapshot.hardware.name if snapshot.hardware is not None else snapshot.device or "",
        tokens_per_s=snapshot.tokens_per_s,
    )
    gone = [change.peer for change in changes.values() if change.kind == "gone"]
    return [*snapshot.peers, *gone, own] if snapshot.swarm is not None else list(gone)


def arranged(peers: Sequence[PeerView], sort: str, wanted: str) -> list[PeerView]:
    """The peers that match the filter `wanted`, sorted by a column of `SORTS`."""
    wanted = wanted.casefold().strip()
    found = [peer for peer in peers if wanted in searched_text(peer)] if wanted else peers
    value = _SORT_VALUES[sort]
    return sorted(found, key=lambda peer: (value(peer), _start(peer), peer.stop or 0, peer.name, peer.peer))


def searched_text(peer: PeerView) -> str:
    """The text of a peer that the filter searches."""
    span = f"{peer.start}:{peer.stop}" if peer.start is not None else ""
    return f"{peer.name} {peer.peer} {span} {peer.link or ''} {peer.state} {peer.device}".casefold()


def _start(peer: PeerView) -> float:
    return _NOWHERE if peer.start is None else peer.start


_NOWHERE = float("inf")
_SORT_VALUES: Mapping[str, Callable[[PeerView], Any]] = {
    "span": _start,
    "peer": lambda peer: (peer.name or peer.peer).casefold(),
    "tok/s": lambda peer: -peer.tokens_per_s,
    "rtt": lambda peer: _NOWHERE if peer.rtt_s is None else peer.rtt_s,
    "link": lambda peer: peer.link or "~",
    "score": lambda peer: peer.score,
    "state": lambda peer: peer.state,
}
SORTS = tuple(_SORT_VALUES)


def header_row(columns: Columns, blocks: int | None) -> Row:
    """The header of the table."""
    text = "  " + cell("peer", columns.peer + 1) + cell("span", 9)
    if columns.with_map:
        end = str(blocks - 1) if blocks else ""
        text += "0" + end.rjust(_MAP - 1) + "  "
    text += cell("device", columns.device) if columns.device else ""
    text += cell("tok/s", 6 + (8 if columns.with_bar else 0)) + cell("rtt", 8) + cell("link", 9)
    text += cell("score", 7) if columns.with_score else ""
    return row((text + "state", "dim"))


@dataclass(frozen=True)
class TableLook:
    """Figures of the whole table that each row is drawn with."""

    own: str
    blocks: int | None
    fastest: float
    weak_peers: frozenset[str]


def look_of(snapshot: Snapshot, cover: Coverage | None) -> TableLook:
    """Figures of the whole table: the fastest peer, and the peers that are the only holders of the weak stretch."""
    fastest = max((peer.tokens_per_s for peer in snapshot.peers), default=0.0)
    weak: frozenset[str] = frozenset()
    if cover is not None and cover.weak is not None and cover.weak.holders == 1:
        start, stop = cover.weak.start, cover.weak.stop
        weak = frozenset(
            peer.peer
            for peer in snapshot.peers
            if peer.state == "serving" and (peer.start or 0) < stop and (peer.stop or 0) > start
        )
    return TableLook(snapshot.peer_id, snapshot.blocks_total, max(fastest, snapshot.tokens_per_s), weak)


def peer_row(peer: PeerView, columns: Columns, look: TableLook, change: PeerChange | None) -> Row:
    """The row of one peer."""
    is_own = peer.peer == look.own
    tint = "mine" if is_own else "warning" if peer.peer in look.weak_peers else ""
    glow = _GLOW[change.kind] if change is not None else ""
    sign, sign_style = _SIGNS.get(peer.state, ("◐", "warning"))
    if change is not None and change.kind == "gone":
        sign, sign_style = "×", "dim"
    name = "you" if is_own else peer_words(peer.peer, peer.name)
    span = f"{peer.start}:{peer.stop}" if peer.start is not None else UNKNOWN
    line = row(
        (f"{sign} ", sign_style), (cell(name, columns.peer), f"b {glow or tint}"), " ", (cell(span, 9), glow or tint)
    )
    if columns.with_map:
        line += [*_map(peer, look.blocks, tint or "heat3"), ("  ", "")]
    if columns.device:
        line.append((cell(one_line(peer.device) or UNKNOWN, columns.device - 1) + " ", "dim"))
    line.append((cell(known_rate(peer.tokens_per_s), 5, ">") + " ", glow if glow.startswith("s") else ""))
    if columns.with_bar:
        share = peer.tokens_per_s / look.fastest if look.fastest and peer.tokens_per_s else None
        line += [*bar(share, 6, tint or "heat2"), ("  ", "")]
    time = "·" if is_own else UNKNOWN if peer.rtt_s is None else f"{milliseconds(peer.rtt_s)} ms"
    line.append((cell(time, 6, ">") + "  ", "dim" if is_own or peer.rtt_s is None else ""))
    relayed = peer.link == "relayed"
    line.append((cell("relay" if relayed else one_line(peer.link or UNKNOWN), 9), "warning" if relayed else "dim"))
    if columns.with_score:
        line.append((cell("" if is_own else f"{peer.score:.2f}", 7), "dim"))
    state = "gone" if change is not None and change.kind == "gone" else one_line(peer.state) or UNKNOWN
    line.append((state, "dim" if state in ("serving", "client", "gone") else "warning"))
    return line


def _map(peer: PeerView, blocks: int | None, style: str) -> Row:
    """A line of `_MAP` cells that shows where a peer's span lies in the model."""
    if not blocks or peer.start is None or peer.stop is None:
        return row(("·" * _MAP, "trackfg"))
    first = min(_MAP - 1, max(0, peer.start * _MAP // blocks))
    last = min(_MAP, max(first + 1, -(-peer.stop * _MAP // blocks)))
    return row(("·" * first, "trackfg"), ("━" * (last - first), style), ("·" * (_MAP - last), "trackfg"))


def peer_facts(peer: PeerView) -> list[tuple[str, str]]:
    """Everything known about one peer, as names and values."""
    return [
        ("name", one_line(peer.name) or UNKNOWN),
        ("peer id", one_line(peer.peer)),
        ("state", one_line(peer.state) or UNKNOWN),
        *([("not used", one_line(peer.unused.text))] if peer.unused is not None else []),
        ("span", f"{peer.start}:{peer.stop}" if peer.start is not None else UNKNOWN),
        ("device", one_line(peer.device) or UNKNOWN),
        ("tok/s", f"{known_rate(peer.tokens_per_s)} (reported by the peer)"),
        ("rtt", f"{milliseconds(peer.rtt_s)} ms (measured here)" if peer.rtt_s is not None else "not measured"),
        ("link", one_line(peer.link or "no connection is open")),
        ("score", f"{peer.score:.2f}" + (f": {one_line(peer.why)}" if peer.why else "")),
    ]
