"""One swarm that this node joins, takes part in and leaves.

Joining needs the swarm's record, the model's manifest and the address of a member. After that, membership, downloads,
replies and hosting run until the swarm is left. `app.node.swarm_switcher` decides which swarm that is;
`app.node.network_owner` starts and leaves it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import trio

from app.asker.reply_service import DraftSource, ReplyService, UsableMembers
from app.core.compute import NextStep
from app.core.errors import AppError, HomeError, UnknownSwarm, first_error, reason_of
from app.core.network import FrameStream, Network
from app.core.reasons import Reason, because
from app.core.units import format_lead
from app.hosting.block_host import BlockHost, HostedView
from app.hosting.loader import fetching_text, obtain_ends
from app.joining.admission import NotAdmitted, ask_admission
from app.joining.name_lookup import no_issuer_text, no_member_text
from app.joining.network_setup import named_peers
from app.joining.offers import look_at_machine, shape_words
from app.joining.wrong_secret import SecretCheck
from app.manifest.manifest import Manifest
from app.membership import (
    Change,
    GuardedNetwork,
    Member,
    Membership,
    MembershipSetup,
    PeerClocks,
    QueryService,
    fetch_manifest,
    resolve_swarm,
)
from app.membership.member import describe
from app.node.context import NodeContext
from app.node.hosting_loop import HostingLoop
from app.node.peer_views import by_clocks, peer_views
from app.planning.machines import MachineSpec
from app.rounds.machines import Helpers
from app.rounds.place import TrainPlace
from app.rounds.train_jobs import TrainJobs
from app.routing.estimates import route_neighbours
from app.routing.planner import PrivacyPreferences
from app.serving.step_ahead import StepAhead
from app.snapshot.startup import StartupSteps
from app.snapshot.views import PeerView, State
from app.swarm.names import SwarmName
from app.swarm.records import Announcement, SwarmRecord
from app.swarm.saved import SavedSwarm, record_of
from app.system.doctor import CLOCK_LIMIT_S
from app.training.activations import ActivationDisk
from app.training.consent import job_replicas, job_routes, may_train, slow_wire
from app.training.forecasts import SwarmForecaster
from app.training.reply_adapters import HomeAdapters
from app.training.states import StateStore
from app.training.swarm_jobs import JobPlace, SwarmJobs
from app.weights.disk_space import DiskRoom
from app.weights.draft_models import find_draft
from app.weights.extents import WeightsError
from app.weights.manifest_store import model_name
from app.weights.model_weights import ENDS, ModelWeights
from p2p.errors import P2PError, WrongSecret
from p2p.network import Libp2pNetwork
from p2p.rate_limit import KeyedRateLimit

LOOK_AGAIN_S = 0.5  # between two searches for the swarm
ADMIT_AGAIN_S = 3.0  # between two requests to be admitted
ADMIT_PATIENCE_S = 5.0  # for the issuer of a second invite
JOIN_AGAIN_S = 10.0  # after a file of this node could not be written
# Events of members at one address: few enough that nobody displaces what the event log and the log file keep.
PEER_EVENTS_AT_ONCE = 40
PEER_EVENTS_PER_S = 0.1

log = logging.getLogger("shoal.node")


class ActiveSwarm:
    """Joins one swarm, then runs downloads, replies and hosting in it until it is left."""

    def __init__(self, swarm: SavedSwarm, context: NodeContext) -> None:
        self.swarm = swarm
        self._context = context
        self.state: State = "joining"
        self._named_peers = named_peers(context.config(), swarm)  # peer id to addresses
        self.why = because("looking", f"looking for members of {swarm}", *self._named_peers)
        # Set once joining has a first outcome, joined or failed: `shoal join` waits for it.
        self.settled = trio.Event()
        self.joined = False
        self.failure: AppError | P2PError | None = None
        self.manifest: Manifest | None = None
        self.membership: Membership | None = None
        self.hosting_loop: HostingLoop | None = None
        self.replies: ReplyService | None = None
        self.jobs: SwarmJobs | None = None
        self.trainings: TrainJobs | None = None
        self.weights: ModelWeights | None = None
        self._record: SwarmRecord | None = None
        self._source_name: str | None = None  # name of the model's files on this machine
        self.steps = StartupSteps(context.changed)
        self.steps.done("identity", context.identity.peer_id)
        self._secret_check = SecretCheck(self._named_peers, swarm)
        self._clocks = PeerClocks()
        self._network: Network | None = None  # on which it runs
        self._guard: GuardedNetwork | None = None
        self._peer_events = KeyedRateLimit[str](PEER_EVENTS_AT_ONCE, PEER_EVENTS_PER_S)

    # --- state for the snapshot ---------------------------------------------------------------------------------------

    @property
    def block_host(self) -> BlockHost | None:
        """The block host, or None while this node does not host."""
        return None if self.hosting_loop is None else self.hosting_loop.block_host

    @property
    def model_name(self) -> str:
        """The model's name: from the swarm's record, else from its files here, else its shape in words."""
        record = "" if self._record is None else self._record.model_name
        shape = "" if self.manifest is None else shape_words(self.manifest.config)
        return record or model_name(self._source_name) or shape

    @property
    def memory_limit_bytes(self) -> int | None:
        """The user's limit on the memory for hosting; None: no limit."""
        return self._context.config().settings.max_vram

    def members(self) -> tuple[Member, ...]:
        """Return the other known members, also those that only others tell of; empty before joining."""
        return () if self.membership is None else self.membership.members()

    def announcements(self) -> Sequence[Announcement]:
        """Return what members announce that this node itself met and that are there now: others may not exist."""
        return () if self.membership is None else self.membership.announcements()

    def peers(self, network: Network) -> tuple[PeerView, ...]:
        """Return the other members for the snapshot."""
        unused = {} if self.replies is None else self.replies.unused()
        if not self.clock_ahead_s(CLOCK_LIMIT_S):
            now = self._now()
            unused = by_clocks(unused, lambda peer: self._clocks.ahead_s({peer: peer}, *now, CLOCK_LIMIT_S))
        return peer_views(self.members(), network.links(), self._context.trust, unused)

    def hosted(self) -> HostedView:
        """Return the hosted blocks for the snapshot."""
        return HostedView() if self.block_host is None else self.block_host.view()

    @property
    def is_used(self) -> bool:
        """True while a session or a job of any member uses blocks of this node, or its user has a reply written.

        Also while the user fine-tunes: a job that waits for members may need these blocks.
        """
        served = trained = False
        if self.hosting_loop is not None and self.hosting_loop.block_host is not None:
            training = self.hosting_loop.training
            served = bool(self.hosting_loop.block_host.server.sessions)
            trained = training is not None and bool(training.jobs)
        own = (self.jobs is not None and self.jobs.has_jobs) or (self.replies is not None and bool(self.replies.active))
        return served or trained or own

    # --- joining and leaving ------------------------------------------------------------------------------------------

    async def run(self, network: Libp2pNetwork, service: QueryService, guard: GuardedNetwork | None = None) -> None:
        """Join the swarm and take part until cancelled; meanwhile `service` answers other peers' queries about it.

        `guard` checks the certificates of a guarded swarm. If the home or cache folder cannot be written, that is the
        state's reason, and joining starts again.
        """
        while True:
            try:
                await self._run_once(network, service, guard)
            except* (HomeError, WeightsError) as group:
                why = reason_of(first_error(group))
                if why != self.why:
                    log.warning("joining %s failed: %s; trying again every %.0f s", self.swarm, why.text, JOIN_AGAIN_S)
                    self.settle("joining", why)
            await trio.sleep(JOIN_AGAIN_S)

    async def _run_once(self, network: Libp2pNetwork, service: QueryService, guard: GuardedNetwork | None) -> None:
        self._guard, self._network = guard, network
        for peer, addresses in self._named_peers.items():
            network.learn(peer, addresses)
            for address in addresses:
                network.seek(address)
        self.steps.begin("peers")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._fail_on_wrong_secret, network)
            if guard is not None:
                await self._be_admitted(network, guard)
            record, manifest, peers = await self._find(guard or network)
            nursery.cancel_scope.cancel()
        service.keep(manifest)
        try:
            await self._take_part(guard or network, service, record, manifest, peers)
        finally:
            service.take_part(None)

    async def leave(self) -> None:
        """Let sessions move to other members (30 s at most), then announce the departure (2 s at most)."""
        if self.hosting_loop is not None:
            await self.hosting_loop.leave()
        if self.membership is not None:
            await self.membership.leave()

    def refused(self, error: WrongSecret) -> None:
        """Record that a dialled peer has another secret; it counts only for peers named in the invite or settings."""
        self._secret_check.hear(error)

    def warnings(self, network: Network) -> tuple[Reason, ...]:
        """Return what is wrong though this node takes part, the worst first."""
        clock = self._clock_trouble()
        found: list[Reason] = [] if clock is None else [clock]
        if self._guard is not None and self._guard.expelled:
            words = f"this node was removed from {self.swarm.name}"
            found.append(because("revoked", words, self._guard.authority.creator))
        elif (error := self._secret_check.refusal(network)) is not None:
            found.append(reason_of(error))
        if self.membership is not None and self.membership.has_twin:
            words = "another node uses this node's identity: each undoes what the other announces"
            found.append(because("twin", words))
        if self.weights is not None and (trouble := self.weights.trouble()) is not None:
            found.append(trouble)
        return tuple(found)

    def _trouble(self) -> Reason | None:
        """Return what keeps members or weights from this node."""
        clock = self._clock_trouble()
        return clock if clock is not None or self.weights is None else self.weights.trouble()

    def _clock_trouble(self) -> Reason | None:
        ahead_s = self.clock_ahead_s(CLOCK_LIMIT_S)
        return because("clock_off", f"this machine's clock is {format_lead(ahead_s)} its peers'") if ahead_s else None

    def clock_ahead_s(self, tolerance_s: float) -> float | None:
        """Return the seconds by which this machine's clock is ahead of its peers', as `PeerClocks.ahead_s` does."""
        if self._network is None:
            return None
        sources = {link.peer: self._network.source(link.peer) for link in self._network.links()}
        return self._clocks.ahead_s(sources, *self._now(), tolerance_s)

    def _now(self) -> tuple[float, float]:
        return time.time(), trio.current_time()

    def watch_routes(self) -> None:
        """Have the failure detector probe the members on this node's routes most often."""
        if self.membership is None:
            return
        sessions = () if self.replies is None else self.replies.stats().sessions
        hops = [hop.peer for session in sessions for hop in session.route]
        hosted = None if self.block_host is None else self.block_host.span
        self.membership.set_neighbours(route_neighbours(hosted, hops, self.announcements()))

    def follow_settings(self) -> None:
        """Announce this node's new name to the members, and host with the new memory limit."""
        if self.membership is not None:
            settings = self._context.config().settings
            self.membership.announce(name=settings.name, train=settings.train)
        if self.hosting_loop is not None:
            self.hosting_loop.follow_settings()

    async def _fail_on_wrong_secret(self, network: Network) -> None:
        self.failure = error = await self._secret_check.conclusive(network)
        self.say("joining", reason_of(error))
        self.settled.set()

    async def _be_admitted(self, network: Network, guard: GuardedNetwork) -> None:
        """Exchange the pass of an invite for a certificate; returns once this node has one.

        With an older certificate at hand, an invite that admits nobody now costs `ADMIT_PATIENCE_S` at most. Without
        one, a final refusal is the failure of joining, and this waits until another swarm is chosen.
        """
        give_up_at = trio.current_time() + ADMIT_PATIENCE_S
        while (entry := self.swarm.entry) is not None:
            try:
                self.swarm = await ask_admission(network, self.swarm, self._context.config().settings.name)
                guard.certificate = self.swarm.certificate
                await self._context.remember(self.swarm)
                return
            except (NotAdmitted, P2PError) as error:
                log.info("%s: %s", self.swarm, error)
                is_final = isinstance(error, NotAdmitted) and not error.is_pending
                why = reason_of(error)
                if not isinstance(error, NotAdmitted):
                    why = because("looking", f"{no_issuer_text(self.swarm)}; still trying", entry.issuer)
                if guard.certificate is not None and (is_final or trio.current_time() >= give_up_at):
                    self.swarm = replace(self.swarm, entry=None)
                    return
                if why != self.why:
                    self.say("joining", why)
                if is_final:
                    await self._fail(error)
                if isinstance(error, NotAdmitted):
                    self.settled.set()  # approval may take days: `shoal join` need not wait for it
            await trio.sleep(ADMIT_AGAIN_S)
        if guard.certificate is None and network.peer_id != guard.authority.creator:
            has = "no certificate" if self.swarm.certificate is None else "only the certificate of another identity"
            await self._fail(NotAdmitted(f"{self.swarm.name}: this node has {has}", code="invite_unknown"))

    async def _fail(self, error: AppError | P2PError) -> NoReturn:
        """Report that joining has failed for good, and wait to be cancelled."""
        self.failure = error
        self.settle("joining", reason_of(error))
        await trio.sleep_forever()

    async def _find(self, network: Network) -> tuple[SwarmRecord, Manifest, tuple[str, ...]]:
        """Return the swarm's record, the model's manifest and the peers to join through.

        Record and manifest are read from disk, else asked from peers every `LOOK_AGAIN_S` until both are there.
        """
        store, model_hash = self._context.manifests, self.swarm.model_hash
        record = record_of(self.swarm)
        manifest = await trio.to_thread.run_sync(store.load, model_hash)
        self._source_name = await trio.to_thread.run_sync(self._source)
        peers = tuple(self._named_peers)
        wanted = SwarmName(self.swarm.name, model_hash)
        while record is None or manifest is None:
            try:
                found = await resolve_swarm(
                    network, wanted, via=self._named_peers, secret=self.swarm.secret, clocks=self._clocks
                )
                record, peers = record or found.record, (*self._named_peers, *found.peers)
                if manifest is None:
                    self.steps.done("peers")
                    self.steps.begin("manifest")
                    manifest = await fetch_manifest(network, peers, model_hash)
                    await trio.to_thread.run_sync(store.save, manifest)
            except (UnknownSwarm, P2PError) as error:
                log.info("%s: %s", self.swarm, error)
                text = f"{no_member_text(self.swarm.name, tuple(self._named_peers))}; still trying"
                why = because("looking", text, *self._named_peers)
                if self.failure is None and why != self.why:
                    self.say("joining", why)
                    log.warning("%s", text)
                await trio.sleep(LOOK_AGAIN_S)
        self.steps.done("peers")
        self.steps.done("manifest", model_hash[:8])
        self.swarm, self._record = replace(self.swarm, record=record.raw), record
        return record, manifest, peers

    async def _take_part(
        self,
        network: Network,
        service: QueryService,
        record: SwarmRecord,
        manifest: Manifest,
        peers: tuple[str, ...],
    ) -> None:
        context = self._context
        setup = MembershipSetup(secret=self.swarm.secret, sequence=context.sequence, clocks=self._clocks)
        membership = Membership(network, context.identity, record, manifest.config.n_blocks, setup)
        settings = context.config().settings
        # `joining` tells other newcomers that this node will choose blocks too, so that they choose in turn
        # (`app.hosting.placement`).
        state = "client" if settings.max_vram == 0 else "joining"
        membership.announce(state=state, name=settings.name, app_version=context.app_version, train=settings.train)
        membership.join_via(peers)
        membership.subscribe(self._on_change)
        await context.remember(self.swarm)
        async with trio.open_nursery() as nursery:
            await nursery.start(membership.run)
            service.take_part(membership)
            self.manifest, self.membership, self.joined = manifest, membership, True
            self.weights = ModelWeights(network, membership, manifest, context.manifests.cache, self._disk_room)
            await nursery.start(self.weights.run)
            # One folder for each swarm: a store begins with an empty one, and another swarm may be visited meanwhile.
            states_folder = context.home.training_folder / self.swarm.id[:16]
            is_member, floor_bytes = self.weights.sharing.is_member, self._disk_floor_bytes
            states = StateStore(network, states_folder, is_member, floor_bytes=floor_bytes)
            states.serve()
            adapters = HomeAdapters(context.home, states, manifest.config, self.swarm.model_hash)
            nursery.start_soon(adapters.run)
            self.replies = ReplyService(
                network,
                membership,
                partial(obtain_ends, self.weights, self.steps),
                partial(fetching_text, self.weights, ENDS),
                self._serve_self,
                go_ahead=self._go_ahead,
                preferences=self._privacy,
                drafts=DraftSource(
                    lambda: context.config().settings.draft, partial(find_draft, context.manifests.cache)
                ),
                book=context.trust,
                count=context.count_reply,
                keep_sessions=lambda: context.config().settings.keep_sessions,
                adapters=adapters,
                loading=lambda: self.steps.advances,
                trouble=self._trouble,
            )
            await nursery.start(self.replies.run)
            folder = states_folder.with_suffix(".activations")  # a killed node may have left many files in it
            activations = await trio.to_thread.run_sync(ActivationDisk, folder, self._activation_bytes, floor_bytes)
            self.hosting_loop = HostingLoop(
                network, membership, self.weights, self.replies, states, activations, context, self
            )
            usable = UsableMembers(membership)
            place = JobPlace(
                swarm=self.swarm.id,
                model=self.swarm.model_hash,
                model_name=lambda: self.model_name,
                network=network,
                ends=self.replies,
                device=self.replies.device,
                states=states,
                activations=activations,
                routes=partial(job_routes, network, usable, self._privacy, book=context.trust),
                replicas=partial(job_replicas, network, usable, self._privacy, context.trust),
                own_server=self._train_self,
                slow_wire=partial(slow_wire, network, usable),
                forecaster=SwarmForecaster(network, usable, self._look_at_machine, self.replies.past_reply),
                pause=context.pause_control,
            )
            if not context.is_visit:
                self.jobs = SwarmJobs(context.home, place)
                nursery.start_soon(self.jobs.run)
                self.trainings = TrainJobs(context.home, self._train_place(network, states))
                nursery.start_soon(self.trainings.run)
            await self.hosting_loop.run()

    def _activation_bytes(self) -> int:
        limit = self._context.config().settings.train_disk
        return 2**62 if limit is None else limit

    def _train_place(self, network: Network, states: StateStore) -> TrainPlace:
        assert self.weights is not None
        return TrainPlace(
            swarm=self.swarm.id,
            public=self.swarm.secret is None,
            network=network,
            identity=self._context.identity,
            states=states,
            members=self._others,
            is_member=self.weights.sharing.is_member,
            cache=self._context.manifests.cache,
            memory_limit=lambda: self.memory_limit_bytes,
            look=self._look_at_machine,
            trust=self._context.trust,
            pause=self._context.pause_control,
            swarm_name=str(self.swarm),
            helpers=Helpers(
                network,
                lambda: [one.peer for one in self.announcements() if may_train(one)],
                partial(self._room_here, network.peer_id),
                self._train_self,
                is_trusted=lambda peer: peer in self._context.config().settings.trusted,
            ),
        )

    def _others(self) -> list[str]:
        """Members that are there now."""
        return [announced.peer for announced in self.announcements()]

    async def _room_here(self, peer: str) -> int:
        """Bytes that this node's training server gives to islands of its own."""
        training = self.hosting_loop.training if self.hosting_loop is not None else None
        return 0 if training is None else await training.room_for(peer)

    async def _serve_self(self, stream: FrameStream) -> None:
        """Serve a session that this node's own reply opens to its own blocks."""
        if self.block_host is not None:
            await self.block_host.server.attend(stream)

    def _go_ahead(self, steps: Sequence[NextStep], rows: Any) -> StepAhead | None:
        """Begin a step of this node's own replies at its own blocks before its input is known."""
        return None if self.block_host is None else self.block_host.server.go_ahead(steps, rows)

    async def _train_self(self, stream: FrameStream) -> None:
        """Serve a job of this node at its own blocks."""
        if self.hosting_loop is not None and self.hosting_loop.training is not None:
            await self.hosting_loop.training.attend(stream)

    def _look_at_machine(self) -> MachineSpec:
        """Measure this machine for a forecast of training; blocks a moment the first time."""
        settings = self._context.config().settings
        device, cap = settings.chosen_device, settings.max_vram
        return look_at_machine(device, cap or None).spec()  # a cap of 0 concerns hosting alone

    def _privacy(self) -> PrivacyPreferences:
        settings = self._context.config().settings
        return PrivacyPreferences(settings.private_blocks, frozenset(settings.trusted), settings.prefer_here / 100)

    def _disk_room(self) -> DiskRoom:
        return DiskRoom(self._context.config().settings.cache_limit, self._disk_floor_bytes())

    def _disk_floor_bytes(self) -> int:
        return self._context.config().settings.disk_floor or 0

    def _source(self) -> str | None:
        return self._context.manifests.source(self.swarm.model_hash)

    def _on_change(self, change: Change) -> None:
        before = None if change.before is None else change.before.announcement
        grows_on = change.kind == "moved" and before is not None and before.growing is not None
        if grows_on and change.member.announcement.growing is not None:
            self._context.changed()  # its blocks load one by one: the first and the last are events
        elif (text := describe(change)) and self._peer_events.take(change.member.home, trio.current_time()):
            self._context.note("peer", text)
        else:
            self._context.changed()

    def settle(self, state: State, why: Reason) -> None:
        """Set the state and reason, and set `settled`: joining has an outcome."""
        self.say(state, why)
        self.settled.set()

    def say(self, state: State, why: Reason) -> None:
        """Set the state and its reason, and record the event; blocks that load one by one are one event."""
        goes_on = (state, why.code) == (self.state, self.why.code) and why.code == "growing"
        self.state, self.why = state, why
        if goes_on:
            self._context.changed()
        else:
            self._context.note("state", f"{state}: {why.text}")
