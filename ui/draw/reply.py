"""Rows and sentences about a reply: progress, route, changes of the route, figures at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.core.terminal_text import one_line
from app.snapshot.views import Snapshot
from ui.draw.numbers import count, duration, fine_rate, plural, rate
from ui.draw.rows import Row, row
from ui.state.coverage import Coverage, holders_in
from ui.state.reply_stream import ReplyProgress

NameOf = Callable[[str], str]


def prompt_of(snapshot: Snapshot | None) -> tuple[int | None, int] | None:
    """Prompt tokens read, None before the first report, and in total; None unless one session is in its prompt.

    A session without a route (`start` is None) still waits for one.
    """
    sessions = [] if snapshot is None else [s for s in snapshot.active_sessions if s.role == "asking"]
    sessions = [s for s in sessions if s.prompt_done is not None or s.tokens == s.prompt_tokens]
    found = [(s.prompt_done, s.tokens) for s in sessions if s.start is not None]
    return found[0] if len(found) == 1 else None


_SILENT_S = 2.0  # without a token before the line says what the reply waits for
NEW_ROUTE_S = 60.0  # the asker's `new_route_s`: a reply that has begun waits that long for another host
_ADVICE = "^p Memory cap: a higher one may let this node host them"
_ADVICE_PAUSED = "^p Resume hosting: then this node may host them"


@dataclass(frozen=True)
class Hole:
    """Blocks that nobody serves."""

    label: str  # the blocks in words
    left: tuple[str, ...] = ()  # names of the reply's hops that served them
    is_loading: bool = False  # this node fetches or loads blocks now
    resume: str = ""  # what ends the pause of this node; empty if it is not paused


def hole_in(
    snapshot: Snapshot | None, cover: Coverage | None, route: Sequence[Mapping[str, Any]], name_of: NameOf
) -> Hole | None:
    """The blocks that nobody serves, and which hops of a reply's route have left them; None if all are served."""
    if snapshot is None or cover is None or not cover.holes:
        return None
    serving = {peer.peer for peer in holders_in(snapshot)}
    lacks = [block for start, stop in cover.holes for block in range(start, stop)]
    hosted = [hop["peer"] for hop in route if any(hop["start"] <= block < hop["stop"] for block in lacks)]
    left = [peer for peer in hosted if peer not in serving]
    names = tuple(one_line(name_of(str(peer))) for peer in dict.fromkeys(left) if peer != snapshot.peer_id)
    return Hole(cover.lack, names, snapshot.state in ("fetching", "loading"), _resume_words(snapshot))


def _resume_words(snapshot: Snapshot) -> str:
    """What ends the pause of this node, which is not the same for a rule as for a pause by hand; empty if it hosts."""
    if snapshot.state != "paused":
        return ""
    if snapshot.courtesy.by == "rule" and snapshot.why is not None:
        return one_line(snapshot.why.next_step)
    return _ADVICE_PAUSED


def waiting_words(progress: ReplyProgress, hole: Hole | None) -> str:
    """What a silent reply waits for: as the node says, else blocks that nobody hosts, else the next token."""
    if progress.waiting:
        return one_line(progress.waiting)
    if hole is None:
        return "waiting for the next token" if progress.tokens else ""
    if not progress.tokens:
        return f"waiting for {hole.label}, which {'this node loads' if hole.is_loading else 'nobody hosts'} now"
    left = f"{', '.join(hole.left)} left: " if hole.left else ""
    if hole.is_loading:
        return f"{left}waiting up to {NEW_ROUTE_S:g} s for {hole.label}: this node is loading"
    return f"{left}waiting up to {NEW_ROUTE_S:g} s for another host of {hole.label}"


def live_rows(
    progress: ReplyProgress, prompt: tuple[int | None, int] | None, now: float, spark: str, hole: Hole | None = None
) -> list[Row]:
    """The line under the transcript while a reply is received, and what the user can do if a host is missing."""
    waited, silent_s = now - progress.began_at, progress.silent_s(now)
    is_silent = bool(progress.waiting) or silent_s >= _SILENT_S
    read, total = prompt or (None, 0)
    has_begun = read is not None and not progress.tokens  # whatever it waited for is there
    if is_silent and not has_begun and (words := waiting_words(progress, hole)):
        since_s = silent_s if progress.tokens else waited
        line = row(" ", ("◌", "warning"), (f" {words}", "warning"), (f" · {duration(since_s)}", "dim"))
        if hole is None or hole.is_loading or not (progress.tokens or hole.resume):
            return [line]
        return [line, row("   ", (f"{hole.resume or _ADVICE} · esc stops", "secondary"))]
    if progress.tokens == 0:
        words = "waiting for the first token"
        if total:
            words = f"reading the prompt: {count(read) + ' of ' if read is not None else ''}{plural(total, 'token')}"
        return [row(" ", ("◌", "success"), f" {words}", (f" · {duration(waited)}", "dim"))]
    speed = progress.speed(now)
    tail = f" {plural(progress.tokens, 'token')} · {duration(waited)}"
    return [row(" ", ("◌", "success"), (f" {fine_rate(speed)} tok/s ", "b"), (spark, "plot3"), (tail, "dim"))]


def readers_words(
    hops: Sequence[Mapping[str, Any]], snapshot: Snapshot | None, name_of: NameOf, *, is_visit: bool = False
) -> str:
    """Who could read the chat: the peers among the hops of all its replies, and those that the next one may pass.

    `is_visit` says that another swarm will reply.
    """
    if snapshot is None:
        return ""
    others = list(dict.fromkeys(str(hop["peer"]) for hop in hops if hop["peer"] != snapshot.peer_id))
    if not others and not is_visit and _is_only_host(snapshot):
        return "This chat stays on this machine."
    if hops and not others:
        return "Only this machine has read this chat; hops can read your next message."
    if others:
        names = ", ".join(one_line(name_of(peer)) for peer in others[:3])
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        return f"{names}{more} can read this chat."
    return "Members that host a hop can read this chat." if snapshot.private else "Hops can read this chat."


def _is_only_host(snapshot: Snapshot) -> bool:
    """True if this node serves every block and no other member serves any, so that replies cannot pass through one."""
    serving = holders_in(snapshot)
    own = [(peer.start, peer.stop) for peer in serving if peer.peer == snapshot.peer_id]
    return len(serving) == 1 and own == [(0, snapshot.blocks_total)]


def way_row(route: Sequence[Mapping[str, Any]], snapshot: Snapshot | None, name_of: NameOf) -> Row:
    """The route of a reply: the peers in order, with relayed links marked."""
    if not route:
        return []
    if snapshot is not None and all(hop["peer"] == snapshot.peer_id for hop in route):
        return row(("on this machine", "mine"))
    relays = {peer.peer for peer in snapshot.peers if peer.link == "relayed"} if snapshot is not None else set()
    line = row(("you", "mine"))
    for hop in route:
        name = one_line(name_of(str(hop["peer"])))
        arrow = (" ╍▸ ", "warning") if hop["peer"] in relays else (" ─▸ ", "dim")
        line += row(arrow, (name, "mine" if name == "you" else ""))
    return [*line, (" ─▸ ", "dim"), ("you", "mine")]


def done_words(figures: dict[str, Any]) -> str:
    """Figures of a reply that has ended: tokens read and written, times, hops, why it ended early."""
    parts = []
    if figures.get("ttft_s") is not None:
        parts.append(f"{_read_words(figures)} {figures['ttft_s']:.1f} s")
    parts.append(plural(len(figures.get("token_ids") or ()), "token"))
    if figures.get("tokens_per_s") is not None:
        parts.append(f"{rate(figures['tokens_per_s'])} tok/s")
    if figures.get("guessed_tokens"):
        parts.append(f"{figures['accepted_tokens']} of {plural(figures['guessed_tokens'], 'guess', 'guesses')} right")
    if figures.get("route"):
        parts.append(plural(len(figures["route"]), "hop"))
    if figures.get("finish_reason") == "length":
        parts.append("cut off: max tokens reached")
    if figures.get("stopped"):
        parts.append("stopped")
    return " · ".join(parts)


def _read_words(figures: Mapping[str, Any]) -> str:
    """Tokens of the prompt that were read before the first token of a reply; not if it waited for a host, too."""
    total, cached = int(figures.get("prompt_tokens") or 0), int(figures.get("cached_tokens") or 0)
    if not total or figures.get("has_waited"):
        return "first after"
    part = f"{count(total - cached)} of " if cached else ""
    return f"read {part}{plural(total, 'token')} in"


def recovery_words(figures: dict[str, Any]) -> str:
    """Number of hops that left a reply or failed, and the longest pause; empty if none did."""
    times = int(figures.get("recoveries") or 0)
    if not times:
        return ""
    gap = figures.get("longest_gap_s")
    pause = f" · longest pause {gap:.1f} s" if gap else ""
    return f"▼ {plural(times, 'hop')} left or failed; the reply continued{pause}"


def error_words(error: str, code: str = "") -> str:
    """The error that ended a reply, and the keys that help, by the error's code; empty if there was none."""
    if not error:
        return ""
    if code == "context_length_exceeded":  # to ask again would fail again
        return f"× {error} · earlier messages count too: ^e edits yours, ^n begins a new conversation"
    return f"× {error} · ^r asks again"


def lost_hops(
    before: Sequence[Mapping[str, Any]],
    after: Sequence[Mapping[str, Any]],
    name_of: NameOf,
    *,
    moved: bool = False,
) -> str:
    """Hops that left a reply's route, and the hops that took their blocks; empty if none left.

    `moved` says that the reply went over to another route although none had failed.
    """
    old, new = {hop["peer"] for hop in before}, {hop["peer"] for hop in after}
    gone = [hop for hop in before if hop["peer"] not in new]
    if not gone:
        return ""
    names = [one_line(name_of(str(hop["peer"]))) for hop in gone]
    # This node still answers itself: its blocks are left out where a route without the others cannot pass them.
    lost = ", ".join([name for name in names if name != "you"] or names)
    took = [hop for hop in after if hop["peer"] not in old]
    replacements = ", ".join(f"{one_line(name_of(str(hop['peer'])))} took {hop['start']}:{hop['stop']}" for hop in took)
    if moved:
        return f"moved away from {lost} · {replacements or 'the other hops took over'}"
    return f"{lost} dropped out · {replacements or 'the other hops took over'}"
