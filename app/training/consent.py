"""Whose jobs run where: what this node gives to the jobs of others, and the routes of its own jobs.

A hop sees the hidden states of the training data, so the limits on who may run the first and last blocks hold for jobs
as they do for replies. A member that announces that it does not train is never asked. One that trains for peers whom
its user trusts says only when it is asked whether this node is one of them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

import trio

from app.config.settings import Settings
from app.core.canonical_json import Fields, decode_object
from app.core.errors import AppError, RecordError
from app.core.network import Network
from app.core.span import Span
from app.routing.estimates import link_rates
from app.routing.planner import PrivacyPreferences, RoutePlanner
from app.routing.route import Hop, NoRoute, Route, RouteRequest
from app.routing.trust import TrustBook
from app.routing.wire_choice import SLOW_BYTES_PER_S, crossings
from app.session.frame import CHANGES, INT8
from app.swarm.records import Announcement
from app.training.hop import TrainingTerms
from app.training.trainer import Replicas, RouteFinder, TrainingStopped
from app.training.ways import stretches
from app.training.wire import ROOM
from p2p.errors import P2PError

log = logging.getLogger("shoal.training")

NEVER, TRUSTED = "never", "trusted"
CHANGES_BYTES_PER_S = 1.25e6  # 10 Mbit/s
CONSENT_S = 10.0  # for all members that are asked before a job
_MOST_ANSWER_BYTES = 4096


def terms_of(settings: Settings, own_peer: str, is_member: Callable[[str], bool]) -> TrainingTerms:
    """Return what this node gives to jobs; its own user's jobs are never refused, those of strangers always."""

    def refuses(owner: str) -> str | None:  # in words for the owner
        if owner == own_peer:
            return None
        if settings.train == NEVER:
            return "it trains for nobody: its setting `train` is never"
        if settings.train == TRUSTED and owner not in settings.trusted:
            return "it trains only for peers that its user trusts: `shoal trust` there adds this node"
        if owner not in settings.trusted and not is_member(owner):
            return "it trains only for members of its swarm"
        return None

    memory = 2**62 if settings.train_memory is None else settings.train_memory
    return TrainingTerms(jobs=settings.train_jobs, memory_bytes=memory, refuses=refuses)


def job_routes(
    network: Network,
    members: Callable[[], Sequence[Announcement]],
    preferences: Callable[[], PrivacyPreferences],
    n_blocks: int,
    wire: str = "",
    book: TrustBook | None = None,
) -> RouteFinder:
    """Return a function that finds routes of jobs through members that train, as private as those of replies.

    With `wire`, they are members that understand this number format.
    It raises `NoRoute`, which names the block that nobody trains and who holds it but does not train.
    """

    def willing(member: Announcement) -> bool:
        return _is_willing(member, network.peer_id, wire)

    planner = RoutePlanner(network, lambda: [member for member in members() if willing(member)], preferences, book)

    async def find(avoid: frozenset[str]) -> Route:
        request = RouteRequest(Span(0, n_blocks), 1, privacy=planner.privacy(n_blocks))
        try:
            return await planner.find((), request, sorted(avoid))
        except NoRoute as error:
            block = error.block
            holders = [m.peer for m in members() if m.serves and m.span is not None and block in m.span]
            refusing = [m.peer for m in members() if m.peer in holders and (not willing(m) or m.peer in avoid)]
            if refusing and len(refusing) == len(holders):
                words = f" for this job; it is hosted by {', '.join(refusing)}, which will not train it"
                raise NoRoute(block, words, who="nobody", peers=refusing) from error
            raise

    return find


async def consenting(network: Network, find: RouteFinder) -> Route:
    """Return a route whose hops do not refuse this node's jobs; raises `TrainingStopped` as the job would.

    Who does not answer within `CONSENT_S`, in which all are asked, is not taken to refuse.
    """
    refusals: dict[str, str] = {}
    until = trio.current_time() + CONSENT_S
    while True:
        try:
            route = await find(frozenset(refusals))
        except AppError as error:
            if not refusals:
                raise
            raise TrainingStopped(f"{error}{''.join(f'; {peer}: {why}' for peer, why in refusals.items())}") from error
        refusing = await _refusals(network, [hop.peer for hop in route if hop.peer != network.peer_id], until)
        if not refusing:
            return route
        refusals |= refusing


async def ask_room(network: Network, peer: str, *, timeout_s: float) -> Fields:
    """Ask a member what it would give to a job of this node; raises `P2PError` or `RecordError`."""
    answer = await network.call(peer, ROOM, b"", timeout_s=timeout_s)
    return decode_object(answer, "room", max_bytes=_MOST_ANSWER_BYTES)


async def _refusals(network: Network, peers: Sequence[str], until: float) -> dict[str, str]:
    """Ask members for consent; return those that refuse, and why."""
    found: dict[str, str] = {}

    async def ask(peer: str) -> None:
        try:
            answer = await ask_room(network, peer, timeout_s=max(0.0, until - trio.current_time()))
            why = answer.optional_text("refuses", 400)
        except (P2PError, RecordError) as error:  # it is gone, or of an older version
            log.debug("%s does not say whether it trains for this node: %s", peer, error)
        else:
            if why:
                found[peer] = "".join(one if one.isprintable() else " " for one in why)

    async with trio.open_nursery() as nursery:
        for peer in peers:
            nursery.start_soon(ask, peer)
    return found


def job_replicas(
    network: Network,
    members: Callable[[], Sequence[Announcement]],
    preferences: Callable[[], PrivacyPreferences],
    book: TrustBook,
    n_blocks: int,
    wire: str = "",
) -> Replicas:
    """Return who may train beside a job's route, as private and trusted as its hops, and where it is noted who lied."""
    planner = RoutePlanner(network, members, preferences, book)

    def holders(route: Route, avoid: frozenset[str]) -> list[Hop]:
        """The fastest first."""
        privacy, avoided = planner.privacy(n_blocks), {*avoid, *planner.avoided()}
        known = {member.peer: member for member in members() if member.serves}
        # All holders of a block compute in one number format: others would differ by more than rounding.
        formats = {
            block: known[hop.peer].training_format for hop in route if hop.peer in known for block in hop.span.blocks()
        }
        found = []
        for peer, member in known.items():
            if peer in avoided or member.span is None or not _is_willing(member, network.peer_id, wire):
                continue
            usable = [
                block
                for block in member.span.blocks()
                if privacy.allows(peer, block) and formats.get(block) == member.training_format
            ]
            if usable:
                found.append(Hop(peer, max(stretches(usable), key=len)))
        return sorted(found, key=lambda hop: (-known[hop.peer].prefill_tokens_per_s, hop.peer))

    return Replicas(holders, planner.not_accused, book)


def may_train(member: Announcement) -> bool:
    """False for a member that announces that it trains for nobody else."""
    return member.train != NEVER


def _is_willing(member: Announcement, own_peer: str, wire: str) -> bool:
    able = wire not in (INT8, CHANGES) or wire in member.wires
    return member.peer == own_peer or (may_train(member) and able)


def slow_wire(network: Network, members: Callable[[], Sequence[Announcement]], route: Route, epochs: int) -> str | None:
    """Return the number format of a job over a route with a slow link, as far as all hops understand it; else None.

    It is `CHANGES` where a link is so slow that writing and reading them takes less time than they save, and data
    comes again.
    """
    known = members()
    rates = link_rates(network.peer_id, network.links(), known)

    def understood(wire: str) -> bool:
        able = {network.peer_id, *(member.peer for member in known if wire in member.wires)}
        return {hop.peer for hop in route} <= able

    found = [rate for link in crossings(route) if (rate := rates(link.sender, link.receiver)) is not None]
    slowest = min(found, default=math.inf)
    if epochs > 1 and slowest < CHANGES_BYTES_PER_S and understood(CHANGES):
        return CHANGES
    return INT8 if slowest < SLOW_BYTES_PER_S and understood(INT8) else None
