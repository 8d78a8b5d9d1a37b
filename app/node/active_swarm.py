"""A node's time in one swarm: from looking for it, over taking part, to saying goodbye.

It knows how a swarm is entered (its record, its manifest, its members) and what can be seen of it. Which swarm it is,
and when it is left for another, is decided by `app.node.node`.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import Any

import trio

from app.asker.reply_service import ReplyService
from app.core.errors import AppError, UnknownSwarm, reason_of
from app.core.network import FrameStream, Network
from app.core.reasons import Reason, because
from app.hosting.block_host import BlockHost
from app.hosting.loader import fetching_text, obtain_ends
from app.joining.network_setup import told_peers
from app.joining.wrong_secret import SecretCheck
from app.manifest.manifest import Manifest
from app.membership import Change, Member, Membership, MembershipSetup, QueryService, fetch_manifest, resolve_swarm
from app.membership.member import in_words
from app.node.context import NodeContext
from app.node.hosting_loop import HostingLoop
from app.node.peer_views import peer_views
from app.routing.estimates import route_neighbours
from app.routing.planner import PrivacyPreferences
from app.snapshot.startup import StartupSteps
from app.snapshot.views import PeerView, State
from app.swarm.names import SwarmName
from app.swarm.records import SwarmRecord
from app.swarm.saved import SavedSwarm, record_of
from app.weights.disk_space import DiskRoom
from app.weights.model_weights import ENDS, ModelWeights
from p2p.errors import P2PError, WrongSecret
from p2p.network import Libp2pNetwork

LOOK_AGAIN_S = 0.5

log = logging.getLogger("shoal.node")


class ActiveSwarm:
    """One membership, and how far it has come."""

    def __init__(self, swarm: SavedSwarm, around: NodeContext) -> None:
        self.swarm = swarm
        self._context = around
        self.state: State = "joining"
        self._observer = told_peers(around.config(), swarm)
        self.why = because("looking", f"looking for members of {swarm}", *self._observer)
        self.settled = trio.Event()  # it has joined, or failed, or both will take longer than anybody waits
        self.joined = False
        self.failure: AppError | P2PError | None = None
        self.manifest: Manifest | None = None
        self.membership: Membership | None = None
        self.hosting_loop: HostingLoop | None = None
        self.replies: ReplyService | None = None
        self.weights: ModelWeights | None = None
        self.source_name: str | None = None  # of the model's files on this machine
        self.steps = StartupSteps(around.changed)
        self.steps.done("identity", around.identity.peer_id)
        self._refusals = SecretCheck(self._observer)

    # --- what can be seen --------------------------------------------------------------------------------------------

    @property
    def block_host(self) -> BlockHost | None:
        """What it hosts with, unless it rests."""
        return None if self.hosting_loop is None else self.hosting_loop.block_host

    def members(self) -> tuple[Member, ...]:
        """The other members that are known."""
        return () if self.membership is None else self.membership.members()

    def peers(self, network: Network) -> tuple[PeerView, ...]:
        """The other members as a person sees them."""
        unused = {} if self.replies is None else self.replies.unused()
        return peer_views(self.members(), network.links(), self._context.trust, unused)

    def hosted(self) -> dict[str, Any]:
        """The snapshot's fields about blocks and sessions."""
        if self.block_host is not None:
            return self.block_host.facts()
        return {"sessions": 0 if self.replies is None else self.replies.active}

    # --- its course --------------------------------------------------------------------------------------------------

    async def run(self, network: Libp2pNetwork, service: QueryService) -> None:
        """Enter the swarm and take part until cancelled; `service` then answers strangers who ask for it."""
        for peer, addresses in self._observer.items():
            network.learn(peer, addresses)
            for address in addresses:
                network.seek(address)
        self.steps.begin("peers")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._weigh_refusals, network)
            record, manifest, peers = await self._enter(network)
            nursery.cancel_scope.cancel()
        service.keep(manifest)
        try:
            await self._take_part(network, service, (record, manifest), peers)
        finally:
            service.take_part(None)

    async def leave(self) -> None:
        """Let sessions move on, half a minute at most, then say goodbye, two seconds at most."""
        if self.hosting_loop is not None:
            await self.hosting_loop.leave()
        if self.membership is not None:
            await self.membership.leave()

    def refused(self, error: WrongSecret) -> None:
        """A peer that this node dialled holds another secret; it matters if it was to lead into this swarm."""
        self._refusals.hear(error)

    def watch_routes(self) -> None:
        """Probe most closely those whom this node's routes depend on."""
        if self.membership is None:
            return
        sessions = () if self.replies is None else self.replies.stats().sessions
        hops = [hop.peer for session in sessions for hop in session.route]
        announcements = [member.announcement for member in self.members() if member.present]
        hosted = None if self.block_host is None else self.block_host.span
        self.membership.set_neighbours(route_neighbours(hosted, hops, announcements))

    def announce_name(self, name: str) -> None:
        """Tell the members what this node is called now."""
        if self.membership is not None:
            self.membership.announce(name=name)

    async def _weigh_refusals(self, network: Network) -> None:
        self.failure = refusal = await self._refusals.conclusive(network)
        self.say("joining", reason_of(refusal))
        self.settled.set()

    async def _enter(self, network: Network) -> tuple[SwarmRecord, Manifest, tuple[str, ...]]:
        """The swarm's record and its model's manifest, from this machine or from members; and whom to ask first."""
        store, model_hash = self._context.manifests, self.swarm.model_hash
        record = record_of(self.swarm)
        manifest = await trio.to_thread.run_sync(store.load, model_hash)
        self.source_name = await trio.to_thread.run_sync(self._source)
        peers = tuple(self._observer)
        wanted = SwarmName(self.swarm.name, model_hash)
        while record is None or manifest is None:
            try:
                found = await resolve_swarm(network, wanted, via=self._observer, secret=self.swarm.secret)
                record, peers = record or found.record, (*found.peers, *self._observer)
                if manifest is None:
                    self.steps.done("peers")
                    self.steps.begin("manifest")
                    manifest = await fetch_manifest(network, peers, model_hash)
                    await trio.to_thread.run_sync(store.save, manifest)
            except (UnknownSwarm, P2PError) as error:
                log.info("%s: %s", self.swarm, error)
                why = because("looking", str(error), *self._observer)
                if self.failure is None and why != self.why:
                    self.say("joining", why)
                await trio.sleep(LOOK_AGAIN_S)
        self.steps.done("peers")
        self.steps.done("manifest", model_hash[:8])
        self.swarm = replace(self.swarm, record=record.raw)
        return record, manifest, peers

    async def _take_part(
        self,
        network: Network,
        service: QueryService,
        what: tuple[SwarmRecord, Manifest],
        peers: tuple[str, ...],
    ) -> None:
        around, (record, manifest) = self._context, what
        setup = MembershipSetup(secret=self.swarm.secret, sequence=around.sequence)
        membership = Membership(network, around.identity, record, manifest.config.n_blocks, setup)
        settings = around.config().settings
        # Whoever is about to choose a place says so: newcomers choose one after the other.
        state = "client" if settings.max_vram == 0 else "joining"
        membership.announce(state=state, name=settings.name, app_version=around.app_version)
        membership.join_via(peers)
        membership.subscribe(self._on_change)
        await around.remember(self.swarm)
        async with trio.open_nursery() as nursery:
            await nursery.start(membership.run)
            service.take_part(membership)
            self.manifest, self.membership, self.joined = manifest, membership, True
            self.weights = ModelWeights(network, membership, manifest, around.manifests.cache, self._room)
            await nursery.start(self.weights.run)
            self.replies = ReplyService(
                network,
                membership,
                partial(obtain_ends, self.weights, self.steps),
                partial(fetching_text, self.weights, ENDS),
                self._attend_self,
                preferences=self._wishes,
                book=around.trust,
            )
            await nursery.start(self.replies.run)
            self.hosting_loop = HostingLoop(network, membership, self.weights, around, self)
            await self.hosting_loop.run()

    async def _attend_self(self, stream: FrameStream) -> None:
        """This node's own questions to its own blocks."""
        if self.block_host is not None:
            await self.block_host.server.attend(stream)

    def _wishes(self) -> PrivacyPreferences:
        settings = self._context.config().settings
        return PrivacyPreferences(settings.private_blocks, frozenset(settings.trusted))

    def _room(self) -> DiskRoom:
        settings = self._context.config().settings
        return DiskRoom(settings.cache_limit, settings.disk_floor or 0)

    def _source(self) -> str | None:
        return self._context.manifests.source(self.swarm.model_hash)

    def _on_change(self, change: Change) -> None:
        if words := in_words(change):
            self._context.note("peer", words)
        else:
            self._context.changed()

    def settle(self, state: State, why: Reason) -> None:
        """This is as far as it comes for now."""
        self.say(state, why)
        self.settled.set()

    def say(self, state: State, why: Reason) -> None:
        """How it stands, and why."""
        self.state, self.why = state, why
        self._context.note("state", f"{state}: {why.text}")
