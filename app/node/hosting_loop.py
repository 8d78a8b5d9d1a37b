"""Hosting in one swarm: runs a block host, stops it while paused, and restarts it if its memory limit is changed or if
its blocks fail the self-test.

`app.hosting.block_host` chooses, loads and serves the blocks; `app.courtesy.pause` knows when the node is paused.
"""

from __future__ import annotations

import logging
import math
import random
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import trio

from app.asker.reply_service import ReplyService
from app.core.engine_import import import_engine
from app.core.errors import HomeError, first_error
from app.core.network import Network
from app.core.reasons import Reason, because
from app.core.signal import Signal
from app.core.span import Span
from app.courtesy.pause import Pause
from app.hosting.block_host import LIMIT_ZERO, BlockHost, CannotHost, HostingOptions
from app.hosting.loader import BlockLoader
from app.membership import Membership
from app.node import self_check
from app.node.context import NodeContext
from app.serving.block_server import DRAIN_S
from app.snapshot.startup import StartupSteps
from app.snapshot.views import State
from app.training.activations import ActivationDisk
from app.training.consent import terms_of
from app.training.hop import TrainingServer, TrainingTerms
from app.training.reply_adapters import AdapterFetcher
from app.training.states import StateStore
from app.training.wiring import FullBlocksOn, blocks_of
from app.weights.extents import WeightsError
from app.weights.model_weights import ModelWeights
from engine.errors import DeviceFull, EngineError
from p2p.rate_limit import backoff_s

if TYPE_CHECKING:
    from engine.hosting import Hosted, HostingPlan

FIRST_RETRY_S = 30.0  # after hosting failed: a full disk or card may have room again
LONGEST_RETRY_S = 600.0
CROWDED_RETRY_S = 4.0  # the first retry if a device is full: two nodes that load at once must not do so again
MEET_MEMBERS_S = 2.0  # wait at most this long for other members before choosing blocks: this node may be alone

log = logging.getLogger("shoal.node")


class HostingObserver(Protocol):
    """Receives the state changes of hosting."""

    @property
    def state(self) -> State: ...
    @property
    def why(self) -> Reason: ...
    @property
    def steps(self) -> StartupSteps: ...
    def say(self, state: State, why: Reason) -> None:
        """Set the state and its reason."""

    def settle(self, state: State, why: Reason) -> None:
        """Set the state, which is a first outcome of joining: `shoal join` answers with it."""


class HostingLoop:
    """Hosts blocks in one swarm, except while paused; `run` until cancelled."""

    def __init__(
        self,
        network: Network,
        membership: Membership,
        weights: ModelWeights,
        replies: ReplyService,
        states: StateStore,
        activations: ActivationDisk,
        context: NodeContext,
        observer: HostingObserver,
    ) -> None:
        self._network, self._membership, self._weights, self._replies = network, membership, weights, replies
        self._context, self._observer = context, observer
        self.block_host: BlockHost | None = None
        self._states, self._activations = states, activations
        self.training: TrainingServer | None = None  # while blocks are hosted or chosen
        self._limit_bytes: int | None = None  # that hosting was begun with
        self._limit_changed = trio.Event()
        self._settings_changed = Signal()

    def follow_settings(self) -> None:
        """Have hosting restart if the memory limit is no longer the one that it was begun with.

        What failed and waits is tried again at once, whichever setting was changed.
        """
        self._settings_changed.notify()
        if self.block_host is not None:
            self.block_host.fetch_again()
        if self._context.config().settings.max_vram != self._limit_bytes:
            self._limit_changed.set()

    async def run(self) -> None:
        """Alternate between hosting and being paused; also restarts hosting after a failed self-test."""
        while True:
            await self._host_until_paused()
            await self._stay_paused()

    async def leave(self) -> None:
        """Let sessions move to other members, for 30 s at most."""
        if self.block_host is not None:
            self._observer.say("draining", because("leaving", "sessions move to other members"))
            await self.block_host.retire()

    async def _host_until_paused(self) -> None:
        """Host until the node is paused, then drain the sessions and free the memory; returns at once if paused.

        Also returns after a failed self-test and for another memory limit, with the blocks unloaded.
        """
        pause_control = self._context.pause_control
        if pause_control.current is not None:
            return
        self._limit_bytes, self._limit_changed = self._context.config().settings.max_vram, trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._host)
            nursery.start_soon(self._test_blocks, nursery.cancel_scope)
            nursery.start_soon(self._withdraw_without_api)
            nursery.start_soon(self._end_for_limit, nursery.cancel_scope)
            while pause_control.current is None:
                await pause_control.wait_change()
            if self.block_host is not None:
                await self._retire(self.block_host)
            nursery.cancel_scope.cancel()
        self.block_host = None

    async def _test_blocks(self, hosting: trio.CancelScope) -> None:
        """Send a token through the own blocks every `self_check.EVERY_S`; if it fails, unload them and end hosting."""
        while True:
            await trio.sleep(self_check.EVERY_S)
            block_host = self.block_host
            runner = None if block_host is None or self._observer.state != "serving" else block_host.runner
            if block_host is None or runner is None:
                continue
            trouble = await self_check.span_trouble(self._network, block_host.server, runner)
            if trouble is not None and self._observer.state == "serving" and block_host.runner is runner:
                log.error("%s; restarting hosting", trouble.text)
                self._membership.announce(state="loading", span=None)
                self._observer.say("loading", trouble)
                await block_host.unload()
                hosting.cancel()
                return

    async def _end_for_limit(self, hosting: trio.CancelScope) -> None:
        """Once the memory limit is changed, hand sessions over, unload the blocks and end hosting."""
        await self._limit_changed.wait()
        if self.block_host is not None:
            self._observer.say("draining", because("limit_changed", "the memory limit was changed"))
            await self.block_host.retire()
            await self.block_host.unload()
        hosting.cancel()

    async def _withdraw_without_api(self) -> None:
        """Take no new sessions while the node's API does not answer: the owner could not pause or stop the node."""
        api = self._context.api
        while True:
            while api.trouble is None:
                await api.wait_change()
            block_host, before = self.block_host, self._observer.why
            if block_host is not None and self._observer.state == "serving":
                block_host.withdraw()
                self._observer.say("loading", api.trouble)
            while api.trouble is not None:
                await api.wait_change()
            if block_host is not None and block_host is self.block_host:
                block_host.appear()
                if block_host.span is not None and self._observer.why.code == "probe_api":
                    self._observer.say("serving", before)

    async def _retire(self, block_host: BlockHost) -> None:
        pause = self._context.pause_control.current
        assert pause is not None, "only a pause retires the block host"
        self._observer.say("draining", pause.why)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._cancel_when_changed, pause, nursery.cancel_scope)
            await block_host.retire(math.inf if pause.patient else DRAIN_S)
            nursery.cancel_scope.cancel()
        await block_host.unload()
        await self._replies.place_head(None)

    async def _place_head(self, plan: HostingPlan) -> None:
        await self._replies.place_head(plan.head_options)

    async def _cancel_when_changed(self, pause: Pause, draining: trio.CancelScope) -> None:
        """Stop waiting for sessions once the pause is over or is replaced by one with another patience."""
        pause_control = self._context.pause_control
        while pause_control.current is not None and pause_control.current.patient == pause.patient:
            await pause_control.wait_change()
        draining.cancel()

    async def _stay_paused(self) -> None:
        """Announce the state `paused` until the pause ends."""
        pause_control = self._context.pause_control
        while (pause := pause_control.current) is not None:
            self._membership.announce(state="paused", span=None)
            self._settle_without_hosting("paused", pause.why)
            await pause_control.wait_change()

    async def _host(self) -> None:
        """Host blocks until cancelled; if that fails, be a client, report the reason, and try again after a pause."""
        failures = failed_loads = 0
        while True:
            error: BaseException | None = None
            began, settings = trio.current_time(), self._settings_changed.version
            try:
                await self._host_once(failed_loads)
            except* HomeError:
                raise  # that the cache cannot be written is the state of the whole node
            except* Exception as group:  # torch raises errors of every kind; they must not end the stay in the swarm
                error = first_error(group)
            if error is None and (self.block_host is None or not self.block_host.has_no_room):
                return
            failures = 1 if trio.current_time() - began > LONGEST_RETRY_S else failures + 1
            if error is None:  # other programs may end
                await self._await_settings(settings, backoff_s(FIRST_RETRY_S, failures, LONGEST_RETRY_S))
                continue
            crowded = isinstance(error, DeviceFull)
            was_loading = self.block_host is not None and self.block_host.is_loading
            failed_loads = failed_loads + 1 if crowded and was_loading else 0
            retry_s = backoff_s(CROWDED_RETRY_S if crowded else FIRST_RETRY_S, failures, LONGEST_RETRY_S)
            retry_s *= random.uniform(0.5, 1.0) if crowded else 1.0
            words = str(error)
            if not isinstance(error, CannotHost | EngineError | WeightsError):
                words = f"{type(error).__name__}: {error}"
                log.error("hosting failed", exc_info=error)
            error = error.with_traceback(None)  # its frames hold the blocks that were loaded
            log.warning("this node hosts nothing: %s; trying again in %.0f s", words, retry_s)
            self.block_host = None
            self._membership.announce(state="client", span=None)
            self._observer.steps.failed(words)
            codes = {getattr(error, "code", ""), getattr(error, "reason_code", "")}
            code = next((code for code in ("disk_full", "device_full") if code in codes), "cannot_host")
            self._observer.settle("client", because(code, f"this node hosts nothing: {words}"))
            await self._await_settings(settings, retry_s)

    async def _await_settings(self, seen: int, at_most_s: float) -> None:
        """Wait until a setting was changed after this version of them, or so long."""
        with trio.move_on_after(at_most_s):
            await self._settings_changed.wait_beyond(seen)

    async def _host_once(self, failed_loads: int) -> None:
        """Host until cancelled; returns at once if the user wants no hosting. Errors may come in an exception group."""
        settings = self._context.config().settings
        if settings.max_vram == 0:
            self._settle_without_hosting("client", LIMIT_ZERO)
            return
        blocks = None if settings.blocks is None else Span.parse(settings.blocks)
        options = HostingOptions(
            settings.chosen_device, settings.max_vram, blocks, settings.weights, settings.cache, failed_loads
        )
        self._observer.say("joining", because("looking_around", "looking at which blocks other members host"))
        async with trio.open_nursery() as nursery:
            # Importing torch takes seconds: do it while waiting for members.
            nursery.start_soon(trio.to_thread.run_sync, import_engine)
            with trio.move_on_after(0 if blocks is not None else MEET_MEMBERS_S):
                await self._membership.joined()
        loader = BlockLoader(self._weights, self._observer.steps)
        self.training = training = TrainingServer(
            self._network,
            loader.device,
            self._states,
            self._training_terms,
            FullBlocksOn(settings.chosen_device),
            self._activations,
        )
        self.block_host = BlockHost(
            self._network,
            self._membership,
            loader,
            options,
            self._observer.settle,
            self._observer.steps,
            planned=self._place_head,
            on_hosted=partial(_train_with, training),
            adapters=AdapterFetcher(self._states),
            failing=self._replies.failing,
        )
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(training.run)
                await self.block_host.run()
                nursery.cancel_scope.cancel()
        finally:
            self.training = None

    def _training_terms(self) -> TrainingTerms:
        settings = self._context.config().settings
        terms = terms_of(settings, self._network.peer_id, self._weights.sharing.is_member)
        # A job that began while sessions drain before a pause would end with them.
        return terms if self._context.pause_control.current is None else replace(terms, jobs=0)

    def _settle_without_hosting(self, state: State, why: Reason) -> None:
        """Drop the startup steps of hosting and settle in `state`."""
        self._observer.steps.leave_out_hosting()
        self._observer.steps.done("announce")
        self._observer.settle(state, why)


async def _train_with(training: TrainingServer, hosted: Hosted | None) -> None:
    """Offer the hosted blocks to jobs; a node with several cards does not train."""
    parts = [] if hosted is None else hosted.span.parts
    await training.host(blocks_of(parts[0]) if len(parts) == 1 else None)
