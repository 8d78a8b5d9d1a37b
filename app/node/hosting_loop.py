"""Hosting in one swarm for as long as nothing says otherwise: pauses, tests of itself, and coming back.

What to host, and loading it, is for `app.hosting.block_host`; whether the node shall rest is for `app.courtesy.pause`.
"""

from __future__ import annotations

import importlib
import logging
import math
from typing import Protocol

import trio

from app.core.network import Network
from app.core.reasons import Reason, because
from app.core.span import Span
from app.courtesy.pause import Pause
from app.hosting.block_host import LIMIT_ZERO, BlockHost, CannotHost, HostingOptions
from app.membership import Membership
from app.node import self_check
from app.node.context import NodeContext
from app.serving.block_server import DRAIN_S
from app.snapshot.startup import StartupSteps
from app.snapshot.views import State
from app.weights.extents import WeightsError
from app.weights.model_weights import ModelWeights
from engine.errors import EngineError

# A newcomer looks around for so long before it takes a place: it may be alone.
COMPANY_S = 2.0

log = logging.getLogger("shoal.node")


class HostingObserver(Protocol):
    """Who is told how hosting goes."""

    @property
    def state(self) -> State: ...
    @property
    def why(self) -> Reason: ...
    @property
    def steps(self) -> StartupSteps: ...
    def say(self, state: State, why: Reason) -> None:
        """The state has changed."""

    def settle(self, state: State, why: Reason) -> None:
        """The same, and this is as far as it comes for now."""


class HostingLoop:
    """One node's hosting in one swarm; `run` until cancelled."""

    def __init__(
        self,
        network: Network,
        membership: Membership,
        weights: ModelWeights,
        around: NodeContext,
        told: HostingObserver,
    ) -> None:
        self._network, self._membership, self._weights = network, membership, weights
        self._context, self._observer = around, told
        self.block_host: BlockHost | None = None

    async def run(self) -> None:
        """Host, rest while the node is paused, and host again."""
        while True:
            await self._host_until_paused()
            await self._rest()

    async def leave(self) -> None:
        """Let sessions move on, half a minute at most."""
        if self.block_host is not None:
            self._observer.say("draining", because("leaving", "sessions move to other members"))
            await self.block_host.retire()

    async def _host_until_paused(self) -> None:
        """Host as long as nothing says otherwise; then let the sessions move on and give the memory back."""
        pause_control = self._context.pause_control
        if pause_control.current is not None:
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._host)
            nursery.start_soon(self._try_blocks, nursery.cancel_scope)
            nursery.start_soon(self._heed_api)
            while pause_control.current is None:
                await pause_control.wait_change()
            if self.block_host is not None:
                await self._retire(self.block_host)
            nursery.cancel_scope.cancel()
        self.block_host = None

    async def _try_blocks(self, hosts: trio.CancelScope) -> None:
        """Send a token through its own blocks now and then; where that fails, withdraw, say why, and host anew."""
        while True:
            await trio.sleep(self_check.EVERY_S)
            block_host = self.block_host
            runner = None if block_host is None or self._observer.state != "serving" else block_host.runner
            if block_host is None or runner is None:
                continue
            trouble = await self_check.span_trouble(self._network, block_host.server.attend, runner)
            if trouble is not None and self._observer.state == "serving" and block_host.runner is runner:
                log.error("%s; hosting starts anew", trouble.text)
                self._membership.announce(state="loading", span=None)
                self._observer.say("loading", trouble)
                await block_host.unload()
                hosts.cancel()
                return

    async def _heed_api(self) -> None:
        """Offer nothing while the node's API does not answer: whoever owns this node could not command it."""
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
        assert pause is not None, "who retires is paused"
        self._observer.say("draining", pause.why)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._until_called_off, pause, nursery.cancel_scope)
            await block_host.retire(math.inf if pause.patient else DRAIN_S)
            nursery.cancel_scope.cancel()
        await block_host.unload()

    async def _until_called_off(self, pause: Pause, scope: trio.CancelScope) -> None:
        """Sessions are not waited for once the pause is over, or a quicker one than a patient one is wanted."""
        pause_control = self._context.pause_control
        while pause_control.current is not None and pause_control.current.patient == pause.patient:
            await pause_control.wait_change()
        scope.cancel()

    async def _rest(self) -> None:
        """Be a member that hosts nothing, as long as the node is paused."""
        pause_control = self._context.pause_control
        while (pause := pause_control.current) is not None:
            self._membership.announce(state="paused", span=None)
            self._take_no_part("paused", pause.why)
            await pause_control.wait_change()

    async def _host(self) -> None:
        """Host blocks until cancelled; a node that cannot, or shall not, stays as a client and says why."""
        settings = self._context.config().settings
        if settings.max_vram == 0:
            self._take_no_part("client", LIMIT_ZERO)
            return
        blocks = None if settings.blocks is None else Span.parse(settings.blocks)
        wish = HostingOptions(None if settings.device == "auto" else settings.device, settings.max_vram, blocks)
        try:
            self._observer.say("joining", because("looking_around", "looking at what the others host"))
            async with trio.open_nursery() as nursery:
                # Torch takes seconds to load, which go by while the members are met.
                nursery.start_soon(trio.to_thread.run_sync, importlib.import_module, "engine.hosting")
                with trio.move_on_after(0 if blocks is not None else COMPANY_S):
                    await self._membership.joined()
            told = self._observer
            self.block_host = BlockHost(self._network, self._membership, self._weights, wish, told.settle, told.steps)
            await self.block_host.run()
        except (CannotHost, EngineError, WeightsError) as error:
            log.warning("this node hosts nothing: %s", error)
            self.block_host = None
            self._membership.announce(state="client", span=None)
            self._observer.steps.failed(str(error))
            self._observer.settle("client", because("cannot_host", f"this node hosts nothing: {error}"))

    def _take_no_part(self, state: State, why: Reason) -> None:
        """This node hosts nothing, and the others know it."""
        self._observer.steps.leave_out_hosting()
        self._observer.steps.done("announce")
        self._observer.settle(state, why)
