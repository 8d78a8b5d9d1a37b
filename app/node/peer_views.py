"""The other members as a person sees them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from app.core.network import Link
from app.core.reasons import Reason
from app.membership import Member
from app.routing.trust import TrustBook
from app.snapshot.views import PeerView
from app.swarm.records import Announcement


def peer_views(
    members: Iterable[Member], links: Iterable[Link], trust: TrustBook, unused: Mapping[str, Reason]
) -> tuple[PeerView, ...]:
    """Every member with its link and its standing, in the order of their blocks; `unused`: who is not used, and why."""
    linked = {link.peer: link for link in links}
    views = [_view(member, linked.get(member.peer), trust, unused) for member in members]
    return tuple(sorted(views, key=lambda view: (view.start is None, view.start or 0, view.peer)))


def _view(member: Member, link: Link | None, trust: TrustBook, unused: Mapping[str, Reason]) -> PeerView:
    said, standing = member.announcement, trust.standing(member.peer)
    measured = None if link is None else link.rtt_s
    return PeerView(
        peer=member.peer,
        name=said.name,
        start=said.span.start if said.span else None,
        stop=said.span.stop if said.span else None,
        rtt_s=member.rtt_s if measured is None else measured,
        link=None if link is None else link.kind,
        state=said.state if member.state == "alive" else member.state,
        device=said.device,
        tokens_per_s=said.decode_tokens_per_s,
        score=standing.score,
        why=standing.why,
        up_bytes=0 if link is None else link.bytes_out,
        down_bytes=0 if link is None else link.bytes_in,
        unused=member.absence or unused.get(member.peer),
        fetched=fetched_share(said),
    )


def fetched_share(said: Announcement) -> float | None:
    """How much of the blocks that a member fetches has come, by its own word; None where it fetches none."""
    wanted = said.growing or (said.span if said.state == "fetching" else None)
    if wanted is None:
        return None
    held = {block for span in said.held for block in span.blocks() if block in wanted}
    return len(held) / len(wanted)
