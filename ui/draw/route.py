"""The route of a reply hop by hop, and how the time of a token divides into links, queues and computing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from app.core.terminal_text import one_line
from app.snapshot.views import HopView, RouteView, Snapshot
from ui.draw.numbers import fine_rate, milliseconds, plural
from ui.draw.rows import UNKNOWN, Row, fit, row, shorten, width_of
from ui.state.coverage import holders_in

NameOf = Callable[[str], str]
_UNKNOWN = 0.1  # of a token's time; a larger part that nothing explains is named
_OVERHEAD = 0.01  # of a token's time; the speed without a relay or queue is named only if more than this remains


@dataclass(frozen=True)
class Share:
    """A part of a token's time."""

    kind: str  # link, relay, compute, queue, host (sending and receiving), ends (embedding, head and sampling), rest
    name: str
    seconds: float


def token_seconds(route: RouteView) -> float | None:
    """Seconds per token: as measured, but not less than its known parts together.

    None before the first token, as long as some hop has not reported its computing: links alone would look fast.
    """
    if route.token_s is None and not route.is_reported:
        return None
    return max(route.token_s or 0.0, route.known_s) or None


def shares_of(route: RouteView, name_of: NameOf) -> list[Share]:
    """Parts of a token's time in the order in which they occur; what no part explains comes last, as `rest`."""
    shares: list[Share] = []

    def add(kind: str, name: str, seconds: float | None) -> None:
        if seconds:
            shares.append(Share(kind, name, seconds))

    add("ends", "you", route.ends_s)
    for hop in route.hops:
        name = one_line(name_of(hop.peer))
        add("relay" if hop.link == "relayed" else "link", name, hop.link_s)
        add("queue", name, hop.queue_s)
        add("compute", name, hop.compute_s)
        add("host", name, hop.host_s)
    add("link", "you", route.return_s)
    add("host", "you", route.host_s)
    rest_s = (token_seconds(route) or 0.0) - route.known_s
    add("rest", "", rest_s if rest_s > 1e-9 else None)
    return shares


def title_row(snapshot: Snapshot | None) -> Row:
    """Title of the panel: hops, milliseconds per token, tokens per second; and if a hop no longer serves its blocks."""
    route = None if snapshot is None else snapshot.route
    if snapshot is None or route is None or not route.hops:
        return row("route")
    token_s = token_seconds(route)
    figures = [plural(len(route.hops), "hop"), f"{milliseconds(token_s)} ms a token"]
    figures.append(f"{fine_rate(1 / token_s)} tok/s" if token_s else f"{UNKNOWN} tok/s")
    over = (" · the next reply takes another", "warning") if not _is_served(route, snapshot) else ("", "")
    return row("route  ", (" · ".join(figures), "b"), over)


def _is_served(route: RouteView, snapshot: Snapshot) -> bool:
    """True if each hop still serves the blocks that it had in the route."""
    spans = {peer.peer: (peer.start or 0, peer.stop or 0) for peer in holders_in(snapshot)}
    served = (spans.get(hop.peer, (0, 0)) for hop in route.hops)
    return all(start <= hop.start and hop.stop <= stop for hop, (start, stop) in zip(route.hops, served, strict=True))


def route_rows(route: RouteView | None, name_of: NameOf, width: int, height: int) -> list[Row]:
    """The chain of hops, the same times drawn to scale, and the largest part in words; compact in a small panel."""
    if route is None or not route.hops:
        return [row(("No reply has been requested from here yet: its route will appear here.", "dim"))]
    chain = _chain(route, name_of)
    if height < 6 or width_of(chain[0]) > width:
        chain = _compact(route, name_of, width)
    rows = chain + (waterfall(route, name_of, width) if width >= 20 else [])
    words = sentence(route, name_of)
    if len(rows) + 1 > height:
        rows = [*chain[:1], *waterfall(route, name_of, width)[:1]][: max(1, height - 1)]
    return [*rows, fit(words, width)][:height]


def _arrow(hop_link: str | None, seconds: float | None) -> tuple[str, str]:
    line, style = ("╍", "warning") if hop_link == "relayed" else ("─", "dim")
    time_ms = milliseconds(seconds) if seconds is not None else UNKNOWN
    return f"{line}{line}{time_ms}{line}▸", style


def _chain(route: RouteView, name_of: NameOf) -> list[Row]:
    """Names joined by arrows with their milliseconds; spans and compute times below each name."""
    names, spans, computes = row(("you", "mine")), row("   "), row("   ")
    for hop in route.hops:
        arrow, style = _arrow(hop.link, hop.link_s)
        name, span, compute = shorten(_name(hop, name_of), 14), f"{hop.start}:{hop.stop}", _compute(hop)
        room = max(width_of([(text, "")]) for text in (name, span, compute))
        pad = " " * (len(arrow) + 2)
        names += row(" ", (arrow, style), " ", (_ljust(name, room), "mine" if name == "you" else "b"))
        spans += row(pad, (_ljust(span, room), "dim"))
        computes += row(pad, _ljust(compute, room))
    arrow, style = _arrow(None, route.return_s)
    names += row(" ", (arrow, style), " ", ("you", "mine"))
    return [names, spans, computes]


def _compact(route: RouteView, name_of: NameOf, width: int) -> list[Row]:
    """The chain on one line, its names shortened as far as it takes to fit."""
    room = 16
    while width_of(line := _line(route, name_of, room)) > width and room > 3:
        room -= 1
    return [fit(line, width)]


def _line(route: RouteView, name_of: NameOf, room: int) -> Row:
    line = row(("you", "mine"))
    for hop in route.hops:
        mark, style = ("╍", "warning") if hop.link == "relayed" else ("─", "dim")
        name = shorten(_name(hop, name_of), room)
        link_ms = milliseconds(hop.link_s) if hop.link_s is not None else ""
        line += row((f"{mark}{link_ms}▸", style), (name, "mine" if name == "you" else ""))
    return_ms = milliseconds(route.return_s) if route.return_s is not None else ""
    return [*line, (f"─{return_ms}▸", "dim"), ("you", "mine")]


def _name(hop: HopView, name_of: NameOf) -> str:
    return one_line(name_of(hop.peer))


def _compute(hop: HopView) -> str:
    return f"{milliseconds(hop.compute_s)} ms" if hop.compute_s is not None else UNKNOWN


def _ljust(text: str, room: int) -> str:
    return text + " " * (room - width_of([(text, "")]))


def waterfall(route: RouteView, name_of: NameOf, width: int) -> list[Row]:
    """One token's time to scale: computing solid, direct links thin, relays and queues hatched; names below."""
    shares = shares_of(route, name_of)
    total = sum(share.seconds for share in shares)
    if total <= 0 or token_seconds(route) is None:
        return []
    line: Row = []
    labels = [" "] * width
    at, exact = 0, 0.0
    for share in shares:
        exact += share.seconds / total * width
        cells = round(exact) - at
        mark, style = _look(share)
        line.append((mark * cells, style))
        if share.kind not in ("link", "host"):
            name = {"relay": "relay", "queue": "queue", "rest": "?"}.get(share.kind, share.name)
            text = name if len(name) == width_of([(name, "")]) <= cells else ""
            start = at + (cells - len(text)) // 2
            labels[start : start + len(text)] = text
        at += cells
    return [line, row(("".join(labels).rstrip(), "dim"))]


def _look(share: Share) -> tuple[str, str]:
    if share.kind in ("compute", "ends"):
        return "█", "mine" if share.name == "you" else "heat3"
    looks = {"relay": ("░", "warning"), "queue": ("▒", "warning"), "rest": ("░", "dim")}
    return looks.get(share.kind, ("─", "trackfg"))


def sentence(route: RouteView, name_of: NameOf) -> Row:
    """The largest known part of a token's time and, if that is a relay or a queue, the speed without it.

    Also how much of the time no part explains, if that is much.
    """
    shares = [share for share in shares_of(route, name_of) if share.kind != "rest"]
    total = token_seconds(route)
    if not shares or total is None:
        return row(("No token has been timed on this route yet.", "dim"))
    by_place: dict[tuple[str, str], float] = {}
    for share in shares:
        by_place[(share.kind, share.name)] = by_place.get((share.kind, share.name), 0.0) + share.seconds
    (kind, name), worst_s = max(by_place.items(), key=lambda item: item[1])
    relayed_s = sum(share.seconds for share in shares if share.kind == "relay")
    if relayed_s >= worst_s:
        kind, worst_s = "relay", relayed_s
    whose = "Your" if name == "you" else f"{name}'s"
    what = {
        "relay": "Relayed links",
        "link": "The link back" if name == "you" else f"The link to {name}",
        "queue": f"Waiting for {name}",
        "compute": f"{whose} blocks",
        "host": "Sending and receiving here" if name == "you" else f"Sending on at {name}",
        "ends": "Sampling",
    }[kind]
    verb = "take" if kind in ("relay", "compute") else "takes"
    words = f"{what} {verb} {milliseconds(worst_s)} of {milliseconds(total)} ms."
    style = "warning" if kind in ("relay", "queue") else ""
    rest = total - worst_s
    if kind in ("relay", "queue") and rest > _OVERHEAD * total:
        spared = "them" if kind == "relay" else "it"
        return row((words, style), f" Without {spared}: {fine_rate(1 / rest)} tok/s at most.")
    unknown_s = total - route.known_s
    if unknown_s <= _UNKNOWN * total:
        return row((words, style))
    why = "are not accounted for" if route.is_reported else "are not reported by the hops yet"
    return row((words, style), (f" {milliseconds(unknown_s)} ms {why}.", "dim"))
