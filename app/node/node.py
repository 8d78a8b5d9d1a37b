"""The composition root of a node: builds its parts, starts and stops them, and implements the API's `Control`.

`app.node.network_owner` runs the network and the active swarm, `app.node.swarm_switcher` switches between swarms,
`app.node.upkeep` applies courtesy rules and counts, `app.node.views` derives the figures of the snapshot.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import trio

from app.api import server
from app.api.control import Joining
from app.api.event_log import EventLog
from app.api.guard import Application
from app.api.keys import KeyRing
from app.api.response_store import ResponseStore
from app.api.routes import build_application
from app.api.supervisor import ApiHealth, ApiSupervisor
from app.asker.reply import ReplyEvent
from app.asker.reply_service import ReplyRequest, ReplyService
from app.config.file import Config
from app.config.home import Home, NodeInfo, api_token, read_sequence, remove_node_file, write_node_file, write_sequence
from app.config.live import LiveSettings
from app.config.settings import Value
from app.core.errors import AppError
from app.core.reasons import Reason, because
from app.core.wall_clock import wall_ms
from app.courtesy.pause import PauseControl
from app.hosting.block_host import HostedView
from app.joining.admission import MadeInvite
from app.joining.create import new_name
from app.joining.nearby import NearbySwarm, NearbySwarms
from app.joining.network_setup import apply_live, named_peers, network_view
from app.joining.targets import target_swarm
from app.node.admissions import Admissions
from app.node.context import NodeContext
from app.node.network_owner import NetworkOwner
from app.node.swarm_switcher import SwarmSwitcher
from app.node.upkeep import Upkeep
from app.node.views import NodeViews
from app.node.visits import Visits
from app.routing.trust import TrustBook
from app.serving.block_server import DRAIN_S
from app.snapshot.codec import to_json
from app.snapshot.recording import RecentFrames
from app.snapshot.views import (
    CourtesyView,
    GuestView,
    InviteView,
    JobView,
    JoinableView,
    ModelView,
    OfferView,
    ProspectsView,
    Snapshot,
    State,
    SwarmView,
)
from app.swarm.invitations import InviteLimits
from app.swarm.names import SwarmName
from app.swarm.saved import SavedSwarm
from app.system.doctor import CLOCK_TOLERANCE_S, Check, running_checks
from app.weights.manifest_store import ManifestStore
from p2p import envelope
from p2p.identity import load_or_create
from p2p.platform import stop_signals
from p2p.supervise import supervise

if TYPE_CHECKING:
    from trio_typing import TaskStatus

    from app.joining.offers import Machine
    from app.rounds.founding import TrainWish
    from app.rounds.train_jobs import TrainJobs
    from app.rounds.train_store import TrainStore
    from app.training.job_store import Job
    from app.training.material import TrainingWish
    from app.training.swarm_jobs import JobForecast, SwarmJobs

READY = ("serving", "client", "paused")
MEET_S = 5.0  # to reach a member that an invite names, before its swarm is described without it
MEET_AGAIN_S = 0.3
TICK_S = 2.0  # between two updates of figures that change without an event
WARN_AGAIN_S = 600.0
RECENT_APART_S = 5.0  # between two snapshots that are kept for a bug report
RECENT_S = 600.0
RECENT_BYTES = 4 * 2**20
NO_SWARM = because("no_swarm", "not in a swarm")

NO_SWARM_TEXT = "this node has not joined a swarm yet: join one with `shoal join`, or wait until it has joined"
log = logging.getLogger("shoal.node")

T = TypeVar("T")


def leaving_words(open_sessions: int) -> str:
    """Say what a node that ends waits for: the sessions that use its blocks, for `DRAIN_S` seconds at most."""
    if not open_sessions:
        return "leaving the swarm"
    sessions = "1 session ends or moves" if open_sessions == 1 else f"{open_sessions} sessions end or move"
    return f"leaving: {sessions} to another member first, within {DRAIN_S:.0f} s; Ctrl-C again ends at once"


class Node:
    """The whole node; satisfies `app.api.control.Control`."""

    def __init__(
        self,
        home: Home,
        config: Config,
        cache: Path,
        on_ready: Callable[[Snapshot], None] = lambda snapshot: None,
        on_step: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._home, self._cache, self._on_ready, self._on_step = home, cache, on_ready, on_step
        self._trust = TrustBook(home.trust_file)
        self._settings = LiveSettings(home.config_file, config, self._follow, self._note)
        self._identity = load_or_create(home.key_file)
        self._swarms = SwarmSwitcher(home, cache, self.config, self._note, self._say)
        self._last_sequence_ms = read_sequence(home)
        self._sequence = envelope.Sequence(self._last_sequence_ms)
        self._version = importlib.metadata.version("shoal")
        self._started_at_ms = wall_ms()
        self._api_url = self._token = ""
        self._lan: server.LanListener | None = None
        self._state: State = "starting"
        self._why = because("starting", "the node is starting")
        self.event_log = EventLog()
        self._recent, self._recent_lock = RecentFrames(round(RECENT_S * 1000), RECENT_BYTES), trio.Lock()
        self._pause_control = PauseControl(home.pause_file, self.event_log.touch)
        self._api_health = ApiHealth()
        context = self._context()
        self._swarms.network_owner = self._network_owner = NetworkOwner(context)
        self._admissions = Admissions(home, self._identity, lambda: self._swarms.known, self._network_owner, self._note)
        self._upkeep = Upkeep(context, self._network_owner)
        self._visits = Visits(context)
        self._views = NodeViews(self._identity.peer_id)
        self._nearby = NearbySwarms()
        self._stop_asked, self._network_closed = trio.Event(), trio.Event()
        self._written_addresses: tuple[str, ...] = ()
        self._is_reachable = self._was_ready = False
        self._warned_at: dict[str, float] = {}  # code of a warning -> when it was last true

    def _context(self) -> NodeContext:
        return NodeContext(
            identity=self._identity,
            home=self._home,
            peers_file=self._home.peers_file,
            manifests=ManifestStore(self._cache),
            sequence=self._sequence,
            config=self.config,
            reload=self._settings.reload,
            known=lambda: self._swarms.known,
            app_version=self._version,
            changed=self.event_log.touch,
            note=self._note,
            remember=self._swarms.remember,
            remember_aside=self._swarms.remember_aside,
            count_reply=lambda tokens, peers: self._upkeep.count_reply(tokens, peers),
            pause_control=self._pause_control,
            api=self._api_health,
            trust=self._trust,
        )

    # --- starting and stopping ----------------------------------------------------------------------------------------

    async def run(self, target: str | None = None) -> None:
        """Run until `stop` or a signal; joins the swarm `target`, or the last active one if `target` is None."""
        settings = self.config().settings
        self._token = api_token(self._home)  # before the node file: whoever finds the node needs it
        explicit = self.config().explicit("api_port")
        host = settings.api_host if server.is_loopback(settings.api_host) else server.HOST
        sock = server.open_socket(settings.api_port, explicit=explicit, host=host)
        try:
            self._lan = server.open_lan(self._home, settings.api_host, sock.getsockname()[1])
        except BaseException:
            sock.close()
            raise
        api = ApiSupervisor(sock, self._application, self._api_health, self._lan)
        self._api_url, active = api.url, self._swarms.known.active
        if target is None and active is not None:
            self._network_owner.switch_to(active)
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(self._handle_signals, nursery.cancel_scope)
                await nursery.start(self._own_network)
                await nursery.start(api.run)
                await self._write_node_file()
                self._is_reachable = True
                self._report_ready()
                for name, part in (
                    ("the update of figures", self._tick),
                    ("the recording of the last minutes", self._record),
                    ("the pause timer", self._pause_control.run),
                    ("courtesy and statistics", self._upkeep.run),
                    ("visits of other swarms", self._visits.run),
                ):
                    nursery.start_soon(supervise, name, part)
                nursery.start_soon(self._join_first_swarm, target)
                await self._stop_asked.wait()
                await self._shut_down(api)
                nursery.cancel_scope.cancel()
        finally:
            api.close()
            remove_node_file(self._home)
            write_sequence(self._home, self._sequence.last)

    async def _own_network(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        await self._network_owner.run(task_status=task_status)
        self._network_closed.set()

    def _application(self) -> Application:
        return build_application(
            self,
            self._token,
            self._version,
            everywhere=self._lan is not None,
            store=ResponseStore(self._home.responses_file),
            keys=KeyRing(self._home.keys_file),
        )

    async def _shut_down(self, api: ApiSupervisor) -> None:
        """Leave the swarm while the API still reports it, then end the event streams, then the API."""
        before = self.snapshot()
        self._say("draining", because("leaving", "leaving the swarm"))
        if self._was_ready:
            self._on_step(leaving_words(before.sessions if before.start is not None else 0))
        self._network_owner.close()
        await self._visits.end()
        await self._network_closed.wait()
        self._say("stopping", because("left", "the node has left"))
        self.event_log.close()
        await api.end()

    async def _handle_signals(
        self, node_scope: trio.CancelScope, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        with trio.open_signal_receiver(*stop_signals()) as signals:
            task_status.started()
            async for _ in signals:
                if self._stop_asked.is_set():
                    node_scope.cancel()  # the second signal: end without draining
                self.stop()

    async def _tick(self) -> None:
        while True:
            await trio.sleep(TICK_S)
            await self._views.look(self._network_owner.active_swarm, self._network_owner.network)
            if self._network_owner.active_swarm is not None:
                self._network_owner.active_swarm.watch_routes()
            self._log_warnings()
            self.event_log.touch()
            await self._write_node_file()

    async def _record(self) -> None:
        """Keep the snapshots of the last minutes in memory, for `shoal doctor --bundle`."""
        while True:
            # In a thread: to convert hundreds of peers takes milliseconds, in which no token would be sent.
            async with self._recent_lock:
                await trio.to_thread.run_sync(self._keep_recent, self.snapshot(), wall_ms())
            await trio.sleep(RECENT_APART_S)

    def _keep_recent(self, snapshot: Snapshot, at_ms: int) -> None:
        self._recent.take(at_ms, to_json(snapshot))

    async def recent(self) -> list[dict[str, Any]]:
        """Return the lines of a recording of the last minutes, with the events of that time."""
        notes = [asdict(note) for note in self.event_log.notes_after(0)]
        async with self._recent_lock:
            return await trio.to_thread.run_sync(self._recent.entries, self._version, notes)

    async def _join_first_swarm(self, target: str | None) -> None:
        if (pause := self._pause_control.current) is not None:
            log.warning("this node is up and hosts nothing for now: %s; %s", pause.why.text, pause.why.next_step)
        if target is not None:
            self._say("joining", because("looking", "looking for the swarm"))
            await self.join(target)
        elif self._network_owner.active_swarm is None:
            self._say("idle", NO_SWARM)
            log.warning(
                "this node is in no swarm: join one with `shoal join NAME|INVITE` or create one with `shoal create`"
            )

    # --- state --------------------------------------------------------------------------------------------------------

    def _note(self, kind: str, text: str) -> None:
        log.info("%s", text)
        self.event_log.note(kind, text)
        if kind == "state" and not self._was_ready:
            self._on_step(text)
        self._report_ready()

    def _report_ready(self) -> None:
        """Call `on_ready` once, when the node has joined a swarm and its API answers."""
        active_swarm = self._network_owner.active_swarm
        if active_swarm is not None and active_swarm.state in READY and self._is_reachable and not self._was_ready:
            self._was_ready = True
            self._on_ready(self.snapshot())

    def _say(self, state: State, why: Reason) -> None:
        self._state, self._why = state, why
        self._note("state", f"{state}: {why.text}")

    def snapshot(self) -> Snapshot:
        """Return the node's visible state at this moment."""
        active_swarm, network = self._network_owner.active_swarm, self._network_owner.network
        if active_swarm is None or self._stop_asked.is_set():
            state, why = self._state, self._why
        else:
            state, why = active_swarm.state, active_swarm.why
        manifest = active_swarm.manifest if active_swarm is not None else None
        hosted = active_swarm.hosted() if active_swarm is not None else HostedView()
        work = self._views.work(active_swarm, network)
        upkeep = self._upkeep.view()
        return Snapshot(
            peer_id=self._identity.peer_id,
            state=state,
            reason=why.text,
            why=why,
            warnings=self._warnings(),
            courtesy=upkeep.courtesy,
            today=upkeep.today,
            ever=upkeep.ever,
            api_url=self._api_url,
            lan_url="" if self._lan is None else self._lan.url,
            lan_fingerprint="" if self._lan is None else self._lan.certificate.fingerprint,
            name=self.config().settings.name,
            swarm=active_swarm.swarm.name if active_swarm is not None else None,
            manifest=active_swarm.swarm.model_hash if active_swarm is not None else None,
            private=active_swarm is not None and active_swarm.swarm.secret is not None,
            blocks_total=manifest.config.n_blocks if manifest is not None else None,
            start=hosted.start,
            stop=hosted.stop,
            device=hosted.device,
            tokens_per_s=hosted.tokens_per_s,
            prefill_tokens_per_s=hosted.prefill_tokens_per_s,
            sessions=len(work.active_sessions),
            model=work.model,
            context_length=work.context_length,
            active_sessions=work.active_sessions,
            route=work.route,
            flow=work.flow,
            weights=work.weights,
            steps=work.steps,
            hardware=work.hardware,
            devices=work.devices,
            reuse=work.reuse,
            guesses=work.guesses,
            trained=work.trained,
            listen_addrs=self._network_owner.listen_addrs(),
            version=self._version,
            pid=os.getpid(),
            started_at_ms=self._started_at_ms,
            network=network_view(
                network, self.config(), {m.peer for m in active_swarm.members()} if active_swarm is not None else ()
            ),
            peers=active_swarm.peers(network) if active_swarm is not None and network is not None else (),
            swarms=self._swarms.views(),
            visit=self._visits.view(),
            requests=self._admissions.requests(),
            preparing=self._swarms.preparation.view,
        )

    def _warnings(self) -> tuple[Reason, ...]:
        active_swarm, network = self._network_owner.active_swarm, self._network_owner.network
        return () if active_swarm is None or network is None else active_swarm.warnings(network)

    def _log_warnings(self) -> None:
        """Log each warning once, and again only if it comes back after it was gone for `WARN_AGAIN_S`."""
        now = trio.current_time()
        self._warned_at = {code: at for code, at in self._warned_at.items() if now - at < WARN_AGAIN_S}
        for warning in self._warnings():
            if warning.code not in self._warned_at:
                log.warning("%s: %s", warning.text, warning.next_step)
                self.event_log.note("problem", warning.text)
            self._warned_at[warning.code] = now

    async def prospects(self) -> ProspectsView:
        """List the swarms and models that this node could join or start, and how much of each fits here."""
        # Imported here because it loads the engine, which an idle node does without.
        from app.joining.offers import look_around

        network = self._network_owner.network_of(None)
        machine = await trio.to_thread.run_sync(self._machine)
        nearby = [] if network is None else await self._nearby.look(network)
        return await trio.to_thread.run_sync(look_around, machine, self._cache, self._swarms.known.swarms, nearby)

    async def preview(self, target: str | None, name: str | None, model: str | None) -> OfferView:
        """Check an invite or a swarm's name, the name of a new swarm, or its model, and return what is known of it."""
        from app.joining.model_list import preview_model
        from app.joining.offers import nearby_offer, saved_offer

        if name is not None:
            await trio.to_thread.run_sync(new_name, self._home, name)
        swarm = None if target is None else target_swarm(self._swarms.known, target)
        if isinstance(swarm, SwarmName):
            swarm = await self._swarms.resolve(swarm)
        if swarm is None and model is None:
            return OfferView(name or "")
        machine = await trio.to_thread.run_sync(self._machine)
        if swarm is None:
            return await trio.to_thread.run_sync(preview_model, machine, self._cache, model)
        near = None if swarm.secret is not None else await self._meet(swarm)
        if near is not None:
            return await trio.to_thread.run_sync(nearby_offer, machine, self._cache, near)
        return await trio.to_thread.run_sync(saved_offer, machine, self._cache, swarm)

    async def _meet(self, swarm: SavedSwarm) -> NearbySwarm | None:
        """Connect to the members that an invite names and ask them about the swarm; None if none answers in time."""
        network = self._network_owner.network_of(None)
        if network is None:
            return None
        for peer, addresses in named_peers(self.config(), swarm).items():
            network.learn(peer, addresses)
            for address in addresses:
                network.seek(address, keep=False)  # an invite that is only looked at must not be dialled for ever
        with trio.move_on_after(MEET_S):
            while True:
                found = await self._nearby.look(network)
                near = next((one for one in found if one.record.id == swarm.id), None)
                if near is not None and near.manifest is not None:
                    return near
                await trio.sleep(MEET_AGAIN_S)
        return None

    def _machine(self) -> Machine:
        from app.joining.offers import look_at_machine

        settings = self.config().settings
        return look_at_machine(settings.chosen_device, settings.max_vram)

    async def models(self, folder: str | None) -> list[ModelView]:
        """List the models on this machine, or those below one folder."""
        from app.joining.model_list import list_models

        return await trio.to_thread.run_sync(list_models, self._cache, folder)

    async def search_models(self, words: str) -> list[ModelView]:
        """List the models of the Hugging Face Hub that match some words."""
        from app.joining.model_list import search_models

        return await trio.to_thread.run_sync(search_models, words)

    async def pull(self, model: str) -> ModelView:
        """Download a model of the hub unless it is here, and return it."""
        from engine.sources.opening import fetch_source

        steps = self._swarms.preparation
        try:
            await trio.to_thread.run_sync(fetch_source, model, self._cache, steps.fetching)
        finally:
            steps.over()
        return ModelView(model, model, here=True)

    def network_checks(self) -> Sequence[Check]:
        """Return the checks of `shoal doctor` that only a running node can make."""
        active_swarm = self._network_owner.active_swarm
        ahead_s = None if active_swarm is None else active_swarm.clock_ahead_s(CLOCK_TOLERANCE_S)
        last_said_ms = self._last_sequence_ms
        return list(running_checks(self.snapshot(), now_ms=wall_ms(), last_said_ms=last_said_ms, ahead_s=ahead_s))

    # --- commands of the API ------------------------------------------------------------------------------------------

    async def create(self, name: str, model: str, *, private: bool) -> Joining:
        """Create a swarm for a model on this machine, and join it."""
        return await self._swarms.create(name, model, private=private)

    async def join(self, target: str, *, force: bool = False) -> Joining:
        """Leave the active swarm and join the one that a name or an invite stands for.

        Unless `force`, this node stays where it is if no member of the other swarm answers.
        """
        await self._visits.end()  # of the same swarm, perhaps
        return await self._swarms.join(target, force=force)

    async def leave(self, name: str) -> SwarmView:
        """Remove a swarm from the remembered ones, leaving it first if it is active."""
        return await self._swarms.leave(name)

    async def invite(self, name: str | None, limits: InviteLimits | None = None) -> MadeInvite:
        """Make an invite to a remembered swarm; None means the active one."""
        return await self._swarms.invite(name, limits)

    async def invites(self, name: str | None) -> list[InviteView]:
        """List the limited invites that this node made for a swarm; None means the active one."""
        return await self._admissions.invites(name)

    async def decide(self, peer: str, *, approve: bool) -> GuestView:
        """Let a peer in that waits for approval, or refuse it."""
        return await self._admissions.decide(peer, approve=approve)

    async def cancel_invite(self, identifier: str) -> InviteView:
        """Make an invite useless."""
        return await self._admissions.cancel(identifier)

    async def revoked(self) -> tuple[str, ...]:
        """Return the peers that this node removed from the active swarm."""
        return await self._admissions.revoked()

    async def revoke(self, peer: str, *, remove: bool) -> tuple[str, ...]:
        """Remove a peer from the active swarm, or let it join again; return those that are removed."""
        return await self._admissions.revoke(peer, remove=remove)

    def reply(self, request: ReplyRequest) -> AsyncGenerator[ReplyEvent, None]:
        """Return the swarm's reply to a conversation; raises `AppError` if this node has not joined a swarm."""
        if request.swarm is not None:
            return self._reply_elsewhere(request.swarm, request)
        return self._replies().reply(request)

    async def tokenize(self, request: ReplyRequest, *, add_special: bool = True) -> list[int]:
        """Return the token ids of a request's prompt; raises as `reply` does."""
        async with self._replies_of(request.swarm) as replies:
            return await replies.tokenize(request, add_special=add_special)

    async def detokenize(self, token_ids: Sequence[int], owner: str = "") -> str:
        """Return the text of token ids; raises as `reply` does."""
        return await self._replies().detokenize(token_ids, owner)

    async def embed(self, prompt: str | tuple[int, ...], owner: str = "") -> tuple[list[float], int]:
        """Return the embedding of a text and its number of tokens; raises as `reply` does."""
        return await self._replies().embed(prompt, owner)

    def _replies(self) -> ReplyService:
        active_swarm = self._network_owner.active_swarm
        if active_swarm is None or active_swarm.replies is None:
            raise AppError(NO_SWARM_TEXT, code="no_swarm")
        self._upkeep.use()
        return active_swarm.replies

    @asynccontextmanager
    async def _replies_of(self, target: str | None) -> AsyncIterator[ReplyService]:
        """Yield what replies in the swarm that a name or an invite stands for; None is the active one."""
        active_swarm = self._network_owner.active_swarm
        swarm = None if target is None else await self._swarms.find(target)
        if swarm is None or (active_swarm is not None and active_swarm.swarm.id == swarm.id):
            yield self._replies()
        else:
            async with self._visits.replies(swarm) as replies:
                yield replies

    async def _reply_elsewhere(self, target: str, request: ReplyRequest) -> AsyncGenerator[ReplyEvent, None]:
        async with self._replies_of(target) as replies, aclosing(replies.reply(request)) as events:
            async for event in events:
                yield event

    async def adapters(self) -> list[str]:
        """Name the adapters of this home that were trained for the active swarm's model."""
        active_swarm, home = self._network_owner.active_swarm, self._home
        if active_swarm is None or not home.adapters_folder.is_dir():
            return []
        from app.training.adapter_store import AdapterStore  # loads torch, which an idle node does without

        return await trio.to_thread.run_sync(AdapterStore(home).fitting, active_swarm.swarm.model_hash)

    def _swarm_jobs(self) -> SwarmJobs:
        active_swarm = self._network_owner.active_swarm
        if active_swarm is None or active_swarm.jobs is None:
            raise AppError(NO_SWARM_TEXT, code="no_swarm")
        return active_swarm.jobs

    @property
    def _trainings_here(self) -> TrainJobs | None:
        """The training jobs of the active swarm, once this node has joined it."""
        active_swarm = self._network_owner.active_swarm
        return None if active_swarm is None else active_swarm.trainings

    def _trainings(self) -> TrainJobs:
        if (trainings := self._trainings_here) is None:
            raise AppError(NO_SWARM_TEXT, code="no_swarm")
        return trainings

    async def _in_train_store(self, function: Callable[[TrainStore], T]) -> T:
        """Return what a function finds or changes among the training jobs on disk, outside of any swarm."""
        from app.rounds.train_store import TrainStore

        return await trio.to_thread.run_sync(function, TrainStore(self._home))

    async def trainings(self) -> list[dict[str, Any]]:
        """List the training jobs of this home, the newest first."""
        if (trainings := self._trainings_here) is not None:
            return await trainings.facts()
        if not self._home.trainings_folder.is_dir():
            return []
        return await self._in_train_store(lambda store: store.all_idle_facts())

    async def joinable_trainings(self) -> list[JoinableView]:
        """List the training jobs of other members of the active swarm that this node could join."""
        return [] if (trainings := self._trainings_here) is None else await trainings.joinable()

    async def found_training(self, wish: TrainWish) -> dict[str, Any]:
        """Found a training job in the active swarm and take part in it."""
        return await self._trainings().found(wish)

    async def forecast_training(self, wish: TrainWish) -> dict[str, Any]:
        """Say what a training job would be."""
        return await self._trainings().forecast(wish)

    async def join_training(self, job: str, data: Sequence[str] = (), licence: str = "") -> dict[str, Any]:
        """Take part in a training job of the active swarm, by its name or hash, with a text of one's own if it asks."""
        if self._trainings_here is None:
            await self._in_train_store(lambda store: store.require_not_elsewhere(job, ""))
        return await self._trainings().join(job, data, licence)

    async def leave_training(self, job: str) -> dict[str, Any]:
        """Take no more part in a training job of any swarm."""
        if self._trainings_here is None:
            left = await self._in_train_store(lambda store: store.leave(job))
            if self._trainings_here is None:  # else the job may have begun meanwhile
                return left
        return await self._trainings().leave(job)

    async def remove_training(self, job: str) -> dict[str, Any]:
        """Remove a training job in which this node takes no part, with its files."""
        if (trainings := self._trainings_here) is not None:
            return await trainings.remove(job)
        return await self._in_train_store(lambda store: store.remove(job))

    async def jobs(self) -> list[JobView]:
        """List the fine-tuning jobs of this home, the newest first."""
        from app.training.job_store import JobStore

        return [self._job_view(job) for job in await trio.to_thread.run_sync(JobStore(self._home).all)]

    def _job_view(self, job: Job) -> JobView:
        from app.training.job_view import job_view

        active_swarm = self._network_owner.active_swarm
        running = {} if active_swarm is None or active_swarm.jobs is None else active_swarm.jobs.running
        return job_view(job, running.get(job.record.id))

    async def start_job(self, wish: TrainingWish) -> JobView:
        """Begin a fine-tuning job over the active swarm."""
        return self._job((await self._swarm_jobs().start(wish)).record.id)

    async def forecast_job(self, wish: TrainingWish) -> JobForecast:
        """Say what a fine-tuning job over the active swarm would be."""
        return await self._swarm_jobs().forecast(wish)

    async def resume_job(self, job: str) -> JobView:
        """Go on with a paused or failed job of the active swarm."""
        return self._job((await self._swarm_jobs().resume(job)).record.id)

    async def end_job(self, job: str, wish: Literal["pause", "stop"]) -> JobView:
        """Pause or stop a job of this home after the step that it is at; one that does not run is stopped at once."""
        from app.training.job_store import JobStore

        jobs = JobStore(self._home)
        found = jobs.find(job)
        await trio.to_thread.run_sync(jobs.end, found, wish)
        return self._job(found.record.id)

    def _job(self, job_id: str) -> JobView:
        """A job as it is now: one that was just begun may be over already."""
        from app.training.job_store import JobStore

        return self._job_view(JobStore(self._home).find(job_id))

    def config(self) -> Config:
        """Return the settings in force."""
        return self._settings.current

    async def set_config(self, name: str, text: str | None) -> Value:
        """Save one setting, and apply it at once if it can change while running; None resets it."""
        return await self._settings.change(name, text)

    async def pause(self, for_s: float | None) -> CourtesyView:
        """Pause hosting for `for_s` seconds, or until `resume` if None."""
        await self._pause_control.by_hand(for_s)
        return self._upkeep.courtesy()

    async def drain(self) -> CourtesyView:
        """Let sessions finish, however long they take, then pause hosting until `resume`."""
        await self._pause_control.by_hand(None, patient=True)
        return self._upkeep.courtesy()

    async def resume(self) -> CourtesyView:
        """End the pause by hand; a courtesy rule that applies still keeps this node paused."""
        await self._pause_control.resume()
        return self._upkeep.courtesy()

    def stop(self) -> None:
        """Begin to leave the swarm and end the node; returns at once."""
        self._stop_asked.set()

    # --- changes to follow --------------------------------------------------------------------------------------------

    async def _follow(self, config: Config) -> None:
        """Apply changed settings to the network, the announced name, hosting and the courtesy rules."""
        active_swarm, network = self._network_owner.active_swarm, self._network_owner.network
        if network is not None:
            await apply_live(network, config)
        if active_swarm is not None:
            active_swarm.follow_settings()
        self._upkeep.settings_changed()

    async def _write_node_file(self) -> None:
        """Write the node file again if the listening addresses changed, as they do with the machine's networks.

        In a thread: a disk may be slow, and the event loop must not wait for it.
        """
        addresses = self._network_owner.listen_addrs()
        if not addresses or addresses == self._written_addresses:
            return
        try:
            info = NodeInfo(os.getpid(), self._api_url, self._identity.peer_id, addresses)
            await trio.to_thread.run_sync(write_node_file, self._home, info)
            self._written_addresses = addresses
        except OSError as error:
            log.warning("%s cannot be written, trying again soon: %s", self._home.node_file, error)
