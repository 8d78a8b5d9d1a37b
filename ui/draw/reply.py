"""Rows and sentences about a reply: progress, route, changes of the route, figures at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from app.core.terminal_text import one_line
from app.snapshot.views import Snapshot
from ui.draw.numbers import count, duration, fine_rate, plural, rate
from ui.draw.rows import Row, row
from ui.state.coverage import holders_in
from ui.state.reply_stream import ReplyProgress

NameOf = Callable[[str], str]


def prompt_of(snapshot: Snapshot | None) -> tuple[int, int] | None:
    """Prompt tokens processed and in total; None unless exactly one session of this node is in its prompt."""
    sessions = () if snapshot is None else snapshot.active_sessions
    found = [(s.prompt_done, s.tokens) for s in sessions if s.role == "asking" and s.prompt_done is not None]
    return found[0] if len(found) == 1 else None


_SILENT_S = 2.0  # without a token before the line says what the reply waits for


def waiting_words(progress: ReplyProgress, holes: Sequence[tuple[int, int]], now: float) -> str:
    """What a reply without tokens waits for: as the node says, else blocks that nobody hosts; empty while it flows."""
    if progress.waiting:
        return one_line(progress.waiting)
    if progress.silent_s(now) < _SILENT_S:
        return ""
    if holes:
        start, stop = holes[0]
        return f"waiting for block {start}" if stop == start + 1 else f"waiting for blocks {start}:{stop}"
    return "waiting for the next token" if progress.tokens else ""


def live_row(
    progress: ReplyProgress,
    prompt: tuple[int, int] | None,
    now: float,
    spark: str,
    holes: Sequence[tuple[int, int]] = (),
) -> Row:
    """The line under the transcript while a reply is received."""
    waited = now - progress.began_at
    if words := waiting_words(progress, holes, now):
        why = ", which nobody hosts now" if holes and not progress.waiting else ""
        return row(" ", ("◌", "warning"), (f" {words}{why}", "warning"), (f" · {duration(waited)}", "dim"))
    if progress.tokens == 0:
        if prompt is not None and not progress.waiting:
            read = f"prompt {count(prompt[0])} of {count(prompt[1])} tokens"
            return row(" ", ("◌", "success"), f" {read}", (f" · {duration(waited)}", "dim"))
        words = progress.waiting or "waiting for the first token"
        return row(" ", ("◌", "success"), f" {words}", (f" · {duration(waited)}", "dim"))
    speed = progress.speed(now)
    tail = f" {plural(progress.tokens, 'token')} · {duration(waited)}"
    return row(" ", ("◌", "success"), (f" {fine_rate(speed)} tok/s ", "b"), (spark, "plot3"), (tail, "dim"))


def readers_words(
    hops: Sequence[Mapping[str, Any]], snapshot: Snapshot | None, name_of: NameOf, *, is_visit: bool = False
) -> str:
    """Who could read the chat: the peers among the hops of all its replies, and those that the next one may pass.

    `is_visit` says that another swarm will reply.
    """
    if snapshot is None:
        return ""
    others = list(dict.fromkeys(str(hop["peer"]) for hop in hops if hop["peer"] != snapshot.peer_id))
    if hops and not others:
        if not is_visit and _is_only_host(snapshot):
            return "This chat stays on this machine."
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
    """Tokens of the prompt that were read before the first token of a reply."""
    total, cached = int(figures.get("prompt_tokens") or 0), int(figures.get("cached_tokens") or 0)
    if not total:
        return "first after"
    part = f"{count(total - cached)} of " if cached else ""
    return f"read {part}{plural(total, 'token')} in"


def recovery_words(figures: dict[str, Any]) -> str:
    """Number of hops that failed during a reply, and the longest pause; empty if none failed."""
    times = int(figures.get("recoveries") or 0)
    if not times:
        return ""
    gap = figures.get("longest_gap_s")
    pause = f" · longest pause {gap:.1f} s" if gap else ""
    return f"▼ {plural(times, 'hop')} failed; the reply continued{pause}"


def lost_hops(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]], name_of: NameOf) -> str:
    """Hops that left a reply's route, and the hops that took their blocks; empty if none left."""
    old, new = {hop["peer"] for hop in before}, {hop["peer"] for hop in after}
    gone = [hop for hop in before if hop["peer"] not in new]
    if not gone:
        return ""
    lost = ", ".join(one_line(name_of(str(hop["peer"]))) for hop in gone)
    took = [hop for hop in after if hop["peer"] not in old]
    replacements = ", ".join(f"{one_line(name_of(str(hop['peer'])))} took {hop['start']}:{hop['stop']}" for hop in took)
    return f"{lost} dropped out · {replacements or 'the other hops took over'}"
