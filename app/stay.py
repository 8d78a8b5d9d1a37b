"""A node's time in one swarm: from looking for it, over taking part, to saying goodbye.

It knows how a swarm is entered (its record, its manifest, its members) and what can be seen of it. Which swarm it is,
and when it is left for another, is decided by `app.node`.
"""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import trio

from app import self_probe
from app.block_server import DRAIN_S
from app.config import Config
from app.errors import AppError, UnknownSwarm
from app.guidance import Wishes
from app.hosting import LIMIT_ZERO, CannotHost, Hosting, HostingWish
from app.joining import record_of
from app.loading import fetching_text
from app.manifest_store import ManifestStore
from app.membership import Change, Member, Swarm, SwarmService, SwarmSetup, fetch_manifest, resolve_swarm
from app.model_manifest import Manifest
from app.neighbours import route_neighbours
from app.network import FrameStream, Network
from app.node_network import told_peers
from app.pausing import Pause, Pausing
from app.reason import Reason, because
from app.records import SwarmRecord
from app.refusals import Refusals
from app.remembered import Memberships, Remembered
from app.replying import Replying
from app.snapshot import PeerView, State
from app.span import Span
from app.steps import Steps
from app.swarm_name import SwarmName
from app.troubles import reason_of
from app.trust_book import TrustBook
from app.weights.extents import WeightsError
from app.weights.keeping import Room
from app.weights.stock import ENDS, Stock
from engine.errors import EngineError
from p2p.envelope import Sequence
from p2p.errors import P2PError, WrongSecret
from p2p.identity import Identity
from p2p.node import Libp2pNetwork

LOOK_AGAIN_S = 0.5
# A newcomer looks around for so long before it takes a place: it may be alone.
COMPANY_S = 2.0

log = logging.getLogger("shoal.node")


@dataclass(frozen=True)
class Surroundings:
    """What a stay needs of its node."""

    identity: Identity
    manifests: ManifestStore
    sequence: Sequence
    config: Callable[[], Config]
    known: Callable[[], Memberships]
    app_version: str
    changed: Callable[[], None]  # something that can be seen has changed
    note: Callable[[str, str], None]  # (kind, text): something happened
    remember: Callable[[Remembered], Awaitable[None]]
    pausing: Pausing
    api_url: Callable[[], str]
    trust: TrustBook


class Stay:
    """One membership, and how far it has come."""

    def __init__(self, swarm: Remembered, around: Surroundings) -> None:
        self.swarm = swarm
        self._around = around
        self.state: State = "joining"
        self._told = told_peers(around.config(), swarm)
        self.why = because("looking", f"looking for members of {swarm}", *self._told)
        self.settled = trio.Event()  # it has joined, or failed, or both will take longer than anybody waits
        self.joined = False
        self.failure: AppError | P2PError | None = None
        self.manifest: Manifest | None = None
        self.membership: Swarm | None = None
        self.hosting: Hosting | None = None
        self.replying: Replying | None = None
        self.stock: Stock | None = None
        self.source_name: str | None = None  # of the model's files on this machine
        self.steps = Steps(around.changed)
        self.steps.done("identity", around.identity.peer_id)
        self._refusals = Refusals(self._told)

    # --- what can be seen --------------------------------------------------------------------------------------------

    def members(self) -> tuple[Member, ...]:
        """The other members that are known."""
        return () if self.membership is None else self.membership.members()

    def peers(self, network: Network) -> tuple[PeerView, ...]:
        """The other members as a person sees them."""
        links, trust = {link.peer: link for link in network.links()}, self._around.trust
        unused = {} if self.replying is None else self.replying.unused()
        views = []
        for member in self.members():
            link, said = links.get(member.peer), member.announcement
            measured = None if link is None else link.rtt_s
            view = PeerView(
                peer=member.peer,
                name=said.name,
                start=said.span.start if said.span else None,
                stop=said.span.stop if said.span else None,
                rtt_s=member.rtt_s if measured is None else measured,
                link=None if link is None else link.kind,
                state=said.state if member.state == "alive" else member.state,
                device=said.device,
                tokens_per_s=said.decode_tokens_per_s,
                score=trust.standing(member.peer).score,
                why=trust.standing(member.peer).why,
                up_bytes=0 if link is None else link.bytes_out,
                down_bytes=0 if link is None else link.bytes_in,
                unused=member.absence or unused.get(member.peer),
            )
            views.append(view)
        return tuple(sorted(views, key=lambda view: (view.start is None, view.start or 0, view.peer)))

    def hosted(self) -> dict[str, Any]:
        """The snapshot's fields about blocks and sessions."""
        if self.hosting is not None:
            return self.hosting.facts()
        return {"sessions": 0 if self.replying is None else self.replying.active}

    # --- its course --------------------------------------------------------------------------------------------------

    async def run(self, network: Libp2pNetwork, service: SwarmService) -> None:
        """Enter the swarm and take part until cancelled; `service` then answers strangers who ask for it."""
        for peer, addresses in self._told.items():
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
        if self.hosting is not None:
            self._say("draining", because("leaving", "sessions move to other members"))
            await self.hosting.retire()
        if self.membership is not None:
            await self.membership.leave()

    def refused(self, error: WrongSecret) -> None:
        """A peer that this node dialled holds another secret; it matters if it was to lead into this swarm."""
        self._refusals.hear(error)

    def watch_routes(self) -> None:
        """Probe most closely those whom this node's routes depend on."""
        if self.membership is None:
            return
        sessions = () if self.replying is None else self.replying.figures().sessions
        hops = [hop.peer for session in sessions for hop in session.route]
        announcements = [member.announcement for member in self.members() if member.present]
        hosted = None if self.hosting is None else self.hosting.span
        self.membership.set_neighbours(route_neighbours(hosted, hops, announcements))

    def announce_name(self, name: str) -> None:
        """Tell the members what this node is called now."""
        if self.membership is not None:
            self.membership.announce(name=name)

    async def _weigh_refusals(self, network: Network) -> None:
        self.failure = refusal = await self._refusals.conclusive(network)
        self._say("joining", reason_of(refusal))
        self.settled.set()

    async def _enter(self, network: Network) -> tuple[SwarmRecord, Manifest, tuple[str, ...]]:
        """The swarm's record and its model's manifest, from this machine or from members; and whom to ask first."""
        store, model_hash = self._around.manifests, self.swarm.model_hash
        record = record_of(self.swarm)
        manifest = await trio.to_thread.run_sync(store.load, model_hash)
        self.source_name = await trio.to_thread.run_sync(self._source)
        peers = tuple(self._told)
        wanted = SwarmName(self.swarm.name, model_hash)
        while record is None or manifest is None:
            try:
                found = await resolve_swarm(network, wanted, via=self._told, secret=self.swarm.secret)
                record, peers = record or found.record, (*found.peers, *self._told)
                if manifest is None:
                    self.steps.done("peers")
                    self.steps.begin("manifest")
                    manifest = await fetch_manifest(network, peers, model_hash)
                    await trio.to_thread.run_sync(store.save, manifest)
            except (UnknownSwarm, P2PError) as error:
                log.info("%s: %s", self.swarm, error)
                await trio.sleep(LOOK_AGAIN_S)
        self.steps.done("peers")
        self.steps.done("manifest", model_hash[:8])
        self.swarm = replace(self.swarm, record=record.raw)
        return record, manifest, peers

    async def _take_part(
        self,
        network: Network,
        service: SwarmService,
        what: tuple[SwarmRecord, Manifest],
        peers: tuple[str, ...],
    ) -> None:
        around, (record, manifest) = self._around, what
        setup = SwarmSetup(secret=self.swarm.secret, sequence=around.sequence)
        membership = Swarm(network, around.identity, record, manifest.config.n_blocks, setup)
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
            self.stock = Stock(network, membership, manifest, around.manifests.cache, self._room)
            await nursery.start(self.stock.run)
            self.replying = Replying(
                network,
                membership,
                partial(self.stock.need, ENDS),
                partial(fetching_text, self.stock),
                self._attend_self,
                wishes=self._wishes,
                book=around.trust,
            )
            await nursery.start(self.replying.run)
            while True:
                await self._host_until_paused(network, membership, self.stock)
                await self._rest(membership)

    async def _host_until_paused(self, network: Network, membership: Swarm, stock: Stock) -> None:
        """Host as long as nothing says otherwise; then let the sessions move on and give the memory back."""
        pausing = self._around.pausing
        if pausing.current is not None:
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._host, network, membership, stock)
            nursery.start_soon(self._probe_self, network, membership, nursery.cancel_scope)
            while pausing.current is None:
                await pausing.wait_change()
            if self.hosting is not None:
                await self._retire(self.hosting)
            nursery.cancel_scope.cancel()
        self.hosting = None

    async def _probe_self(self, network: Network, membership: Swarm, hosts: trio.CancelScope) -> None:
        """Try now and then what this node offers; where it fails, withdraw, say why, and host anew."""
        while True:
            await trio.sleep(self_probe.EVERY_S)
            hosting = self.hosting
            runner = None if hosting is None or self.state != "serving" else hosting.runner
            if hosting is None or runner is None:
                continue
            trouble = await self_probe.span_trouble(network, hosting.server.attend, runner)
            trouble = trouble or await self_probe.api_trouble(self._around.api_url())
            if trouble is not None and self.state == "serving" and hosting.runner is runner:
                log.error("%s: this node failed its own test and starts hosting anew: %s", self.swarm, trouble)
                membership.announce(state="loading", span=None)
                self._say("loading", because("probe_blocks", f"this node failed its own test: {trouble}"))
                await hosting.unload()
                hosts.cancel()
                return

    async def _retire(self, hosting: Hosting) -> None:
        pause = self._around.pausing.current
        assert pause is not None, "who retires is paused"
        self._say("draining", pause.why)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._until_called_off, pause, nursery.cancel_scope)
            await hosting.retire(math.inf if pause.patient else DRAIN_S)
            nursery.cancel_scope.cancel()
        await hosting.unload()

    async def _until_called_off(self, pause: Pause, scope: trio.CancelScope) -> None:
        """Sessions are not waited for once the pause is over, or a quicker one than a patient one is wanted."""
        pausing = self._around.pausing
        while pausing.current is not None and pausing.current.patient == pause.patient:
            await pausing.wait_change()
        scope.cancel()

    async def _rest(self, membership: Swarm) -> None:
        """Be a member that hosts nothing, as long as the node is paused."""
        pausing = self._around.pausing
        while (pause := pausing.current) is not None:
            membership.announce(state="paused", span=None)
            self._take_no_part("paused", pause.why)
            await pausing.wait_change()

    async def _host(self, network: Network, membership: Swarm, stock: Stock) -> None:
        """Host blocks until cancelled; a node that cannot, or shall not, stays as a client and says why."""
        settings = self._around.config().settings
        if settings.max_vram == 0:
            self._take_no_part("client", LIMIT_ZERO)
            return
        blocks = None if settings.blocks is None else Span.parse(settings.blocks)
        wish = HostingWish(None if settings.device == "auto" else settings.device, settings.max_vram, blocks)
        try:
            self._say("joining", because("looking_around", "looking at what the others host"))
            async with trio.open_nursery() as nursery:
                # Torch takes seconds to load, which go by while the members are met.
                nursery.start_soon(trio.to_thread.run_sync, importlib.import_module, "engine.hosting")
                with trio.move_on_after(0 if blocks is not None else COMPANY_S):
                    await membership.joined()
            self.hosting = Hosting(network, membership, stock, wish, self._settle, self.steps)
            await self.hosting.run()
        except (CannotHost, EngineError, WeightsError) as error:
            log.warning("%s: this node hosts nothing: %s", self.swarm, error)
            self.hosting = None
            membership.announce(state="client", span=None)
            self.steps.failed(str(error))
            self._settle("client", because("cannot_host", f"this node hosts nothing: {error}"))

    async def _attend_self(self, stream: FrameStream) -> None:
        """This node's own questions to its own blocks."""
        if self.hosting is not None:
            await self.hosting.server.attend(stream)

    def _wishes(self) -> Wishes:
        settings = self._around.config().settings
        return Wishes(settings.private_blocks, frozenset(settings.trusted))

    def _room(self) -> Room:
        settings = self._around.config().settings
        return Room(settings.cache_limit, settings.disk_floor or 0)

    def _source(self) -> str | None:
        return self._around.manifests.source(self.swarm.model_hash)

    def _on_change(self, change: Change) -> None:
        if change.kind in ("joined", "dead", "left", "draining", "moved"):
            self._around.note("peer", f"{change.member.peer} {change.kind}")
        else:
            self._around.changed()

    def _take_no_part(self, state: State, why: Reason) -> None:
        """This node hosts nothing, and the others know it."""
        self.steps.leave_out_hosting()
        self.steps.done("announce")
        self._settle(state, why)

    def _settle(self, state: State, why: Reason) -> None:
        self._say(state, why)
        self.settled.set()

    def _say(self, state: State, why: Reason) -> None:
        self.state, self.why = state, why
        self._around.note("state", f"{state}: {why.text}")
