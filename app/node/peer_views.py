"""The other members as the snapshot shows them: announcement, link, trust score and reason for not being used. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from app.core.network import Link
from app.core.reasons import Reason, because
from app.core.units import format_lead
from app.membership import Member
from app.routing.trust import TrustBook
from app.snapshot.views import PeerView
from app.swarm.records import Announcement


def peer_views(
    members: Iterable[Member], links: Iterable[Link], trust: TrustBook, unused: Mapping[str, Reason]
) -> tuple[PeerView, ...]:
    """Return a view of every member that this node has met, ordered by first block: others may not exist.

    `unused` gives the reason for each peer not used.
    """
    linked = {link.peer: link for link in links}
    views = [_view(member, linked.get(member.peer), trust, unused) for member in members if member.proven]
    return tuple(sorted(views, key=lambda view: (view.start is None, view.start or 0, view.peer)))


def _view(member: Member, link: Link | None, trust: TrustBook, unused: Mapping[str, Reason]) -> PeerView:
    announced, standing = member.announcement, trust.standing(member.peer)
    measured = None if link is None else link.rtt_s
    return PeerView(
        peer=member.peer,
        name=announced.name,
        start=announced.span.start if announced.span else None,
        stop=announced.span.stop if announced.span else None,
        rtt_s=member.rtt_s if measured is None else measured,
        link=None if link is None else link.kind,
        state=announced.state if member.state == "alive" else member.state,
        device=announced.device,
        tokens_per_s=announced.decode_tokens_per_s,
        prefill_tokens_per_s=announced.prefill_tokens_per_s,
        host=announced.host,
        score=standing.score,
        why=standing.why,
        up_bytes=0 if link is None else link.bytes_out,
        down_bytes=0 if link is None else link.bytes_in,
        unused=member.absence or unused.get(member.peer),
        fetched=fetched_share(announced),
        down_bytes_per_s=None if link is None else link.down_bytes_per_s,
    )


def fetched_share(announced: Announcement) -> float | None:
    """Announced share (0 to 1) of a member's blocks that it has downloaded; None if it downloads none."""
    wanted = announced.growing or (announced.span if announced.state == "fetching" else None)
    if wanted is None:
        return None
    held = [both for span in announced.held if (both := span.overlap(wanted)) is not None]
    return sum(map(len, held)) / len(wanted)


def by_clocks(unused: Mapping[str, Reason], here_ahead_s: Callable[[str], float | None]) -> dict[str, Reason]:
    """Return the reasons for not using peers, with the clock of a peer in place of others if it is wrong.

    What such a peer says of itself is refused, so what it said last is no news. `here_ahead_s` is how far this
    machine's clock is ahead of a peer's; 0 or None if that is little or not known.
    """
    off = {peer: -ahead_s for peer in unused if (ahead_s := here_ahead_s(peer))}
    words = "what it says of itself is refused"
    return {**unused} | {
        peer: because("peer_clock", f"its clock is {format_lead(ahead_s)} this machine's: {words}", peer)
        for peer, ahead_s in off.items()
    }
