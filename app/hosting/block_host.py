"""Hosts blocks in one swarm: chooses a span, loads it, serves it, and moves to another one when the swarm changes.

`engine.hosting` computes how many blocks fit and `app.hosting.placement` which ones; this module carries that out.
`app.serving.block_server` runs the sessions, `app.membership` spreads the announcements.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import trio

from app.core.compute import BlockRunner
from app.core.compute import Device as ComputeDevice
from app.core.errors import AppError
from app.core.network import Network
from app.core.reasons import Reason, because
from app.core.signal import Signal
from app.core.span import Span
from app.hosting.device_view import device_views
from app.hosting.memory import Free, MemoryChange, after_giving_back, blocks_of, fewer_blocks, kept_span
from app.hosting.placement import (
    HOLES,
    Candidate,
    Move,
    MoveTimer,
    decide,
    due,
    is_wanted,
    is_within,
    leave_for_hole,
    regrown,
    unserved,
)
from app.membership import Membership
from app.membership.member import Change
from app.routing.estimates import rates_to_announce, rtts_to_announce
from app.serving.adapters import AdapterSource
from app.serving.block_server import DRAIN_S, BlockServer
from app.session.frame import CHANGES, INT8
from app.snapshot.startup import StartupSteps
from app.snapshot.views import DeviceView, State
from app.swarm.coverage import coverage_of
from app.swarm.records import Announcement
from app.weights.extents import WeightsError
from engine.errors import DeviceFull

if TYPE_CHECKING:
    from trio_typing import TaskStatus

    from engine.budget import CacheFormat
    from engine.device.probe import Device
    from engine.hosting import Hosted, HostingPlan, HostingWish, Weights

log = logging.getLogger("shoal.hosting")

REFRESH_S = 30.0  # between two announcements of figures such as load and free cache
NEWS_S = 0.25  # changes of members within this time lead to one decision
HOLE_CERTAIN_S = 1.5  # shortest wait before filling a hole: by then it is clear if its holder is gone or only slow
FETCH_AGAIN_S = 600.0  # after blocks could not be stored
HOLE_DRAIN_S = 1.0  # short: while a block has no holder, no session makes progress until this node has moved


@dataclass(frozen=True)
class HostingOptions:
    """The user's settings for hosting."""

    device: str | None = None
    max_vram_bytes: int | None = None  # 0: host nothing
    blocks: Span | None = None  # host exactly these; None: choose
    weights: Weights = "auto"
    cache: CacheFormat = "own"
    failed_loads: int = 0  # one after the other, because memory was full: fewer blocks are tried each time


class CannotHost(AppError):
    """The blocks in the settings cannot be hosted on this machine."""

    code = "cannot_host"


@dataclass(frozen=True)
class HostedView:
    """The snapshot's fields about hosted blocks; without a block host, the defaults."""

    start: int | None = None
    stop: int | None = None
    device: str | None = None
    tokens_per_s: float = 0.0
    prefill_tokens_per_s: float = 0.0


class Loader(Protocol):
    """Plans, loads and frees blocks; `app.hosting.loader.BlockLoader` does it with the engine."""

    @property
    def device(self) -> ComputeDevice:
        """Runs the loaded blocks."""

    async def plan(self, wish: HostingWish) -> HostingPlan:
        """Return the device, and how many blocks fit on it."""

    async def held(self) -> tuple[Span, ...]:
        """Return the blocks whose weights are on disk, in spans with gaps between them."""

    async def fitting(self, span: Span) -> Span | None:
        """Return the longest part of a span that is on the disk or fits there; None if no block does."""

    async def fetch(self, span: Span) -> None:
        """Download the missing weights of these blocks, beside those of the loaded ones; raises `WeightsError`."""

    async def load(self, plan: HostingPlan, span: Span, on_grown: Callable[[Hosted, Span], Awaitable[None]]) -> Hosted:
        """Load all blocks of a span; awaits `on_grown` for each part of it that can be served before the end.

        Raises `WeightsError` if the weights cannot be stored or read, `DeviceFull` if the memory does not suffice.
        """

    async def memory_change(self, plan: HostingPlan, full: HostingPlan) -> MemoryChange:
        """Wait until the devices have too little memory for the plan, or enough for more of the `full` one again."""

    async def free_bytes(self, plan: HostingPlan) -> Free | None:
        """Return the free memory of the plan's devices; None if it cannot be read."""

    async def keep(self, hosted: Hosted, span: Span) -> Hosted:
        """Free all loaded blocks but these, and return their memory to the system."""

    async def release(self, plan: HostingPlan) -> None:
        """Return unused memory of the device to the system."""


Say = Callable[[State, Reason], None]

RAISE_CAP = "raise it: + in the dashboard, or `shoal config set max_vram SIZE`"
LIMIT_ZERO = because("limit_zero", "the memory limit is 0, so this node hosts nothing")


class BlockHost:
    """Hosts one span of blocks at a time in one swarm; `run` until cancelled."""

    def __init__(
        self,
        network: Network,
        swarm: Membership,
        loader: Loader,
        options: HostingOptions,
        say: Say,
        steps: StartupSteps | None = None,
        *,
        planned: Callable[[HostingPlan], Awaitable[None]] | None = None,
        on_hosted: Callable[[Hosted | None], Awaitable[None]] | None = None,
        adapters: AdapterSource | None = None,
        failing: Callable[[], Collection[str]] = frozenset,
    ) -> None:
        self._network, self._swarm, self._loader, self._options, self._say = network, swarm, loader, options, say
        self._failing = failing  # members at which this node's own replies fail
        self._steps = steps or StartupSteps(lambda: None)
        self._planned = planned  # runs while the first blocks are loaded
        self._on_hosted = on_hosted  # awaited once all blocks are served, and with None before they are given up
        self.server = BlockServer(network, None, loader.device, adapters=adapters)
        self._plan: HostingPlan | None = None
        self._full: HostingPlan | None = None  # the plan before blocks were given back
        self._memory_change: MemoryChange | None = None  # to be carried out
        self._watching = trio.CancelScope()  # for changes of memory, by the present plan
        self._whole: HostingPlan | None = None  # the plan to go back to once its blocks can be stored
        self._disk_failed = False  # blocks could not be stored: others are downloaded before those here are given up
        self._device_was_full = False  # while blocks were loaded beside those that were served
        self._hosted: Hosted | None = None
        self._seen: dict[str, Device] = {}  # the devices at the last reading of their sensors
        self._span: Span | None = None  # blocks that are served, a prefix of the span while it grows
        self._settled_at = self._announced_at = self._announced_busy_s = 0.0
        self._news = Signal()
        self._move_timer: MoveTimer | None = None
        self._unserved_since: dict[int, float] = {}  # blocks that no other member serves
        self._fetched: Span | None = None  # blocks that were downloaded for a move
        self._fetch_again_at = 0.0
        self._withdrawn = False
        self._memory_changed = Signal()  # `_memory_change` is None again
        self._choosing = trio.CancelScope()
        self.has_no_room = False  # nothing is hosted because nothing fits
        self.is_loading = False
        self._choosing_ended = trio.Event()  # set once no other span will be chosen

    def view(self) -> HostedView:
        """Return the hosted blocks for the snapshot."""
        return HostedView(
            start=None if self._span is None else self._span.start,
            stop=None if self._span is None else self._span.stop,
            device=None if self._plan is None else self._plan.device.id,
            tokens_per_s=self._tokens_per_s,
            prefill_tokens_per_s=0.0 if self._hosted is None else self._hosted.throughput.prefill_tokens_per_s,
        )

    @property
    def span(self) -> Span | None:
        """The blocks that are served; None while none are."""
        return self._span

    @property
    def runner(self) -> BlockRunner | None:
        """The runner that computes the hosted blocks; None while none are loaded."""
        return None if self._hosted is None else self._hosted.runner

    def devices(self) -> tuple[DeviceView, ...]:
        """Return the devices, their memory and their load for the snapshot; none before a plan is made."""
        if self._plan is None:
            return ()
        return device_views(self._seen, self._plan, self._hosted, self.server.stats, self._options)

    async def look_at_device(self) -> None:
        """Read the sensors of all devices, in a thread; one that cannot be read keeps the figures of the plan."""
        from engine.device.probe import probe_devices

        if self._plan is not None:
            found = await trio.to_thread.run_sync(probe_devices)
            self._seen = {device.id: device for device in found if device.usable}

    @property
    def _tokens_per_s(self) -> float:
        return 0.0 if self._hosted is None else self._hosted.throughput.decode_tokens_per_s

    async def run(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Choose, load and serve blocks, and move when the swarm changes; reports started once it serves.

        If nothing fits or the memory limit is 0, announce this node as a client and return. Raises `CannotHost` if the
        configured blocks do not fit.
        """
        try:
            self._plan = await self._make_plan()
        finally:
            if self._plan is None:
                self._choosing_ended.set()
        if self._plan is None:
            self._swarm.announce(state="client", span=None)
            task_status.started()
            return
        self._full = self._plan
        stop_listening = self._swarm.subscribe(self._on_change)
        try:
            async with trio.open_nursery() as nursery:
                if self._planned is not None:
                    nursery.start_soon(self._planned, self._plan)
                await nursery.start(self.server.run)
                nursery.start_soon(self._watch_memory)
                with self._choosing:
                    while self._span is None:
                        await self._follow_the_swarm(self._plan)
                    task_status.started()
                    while True:
                        await self._follow_the_swarm(self._plan)
                self._choosing_ended.set()
                await trio.sleep_forever()
        finally:
            self._choosing_ended.set()
            stop_listening()

    async def drain(self, within_s: float = DRAIN_S) -> None:
        """Announce `draining`, accept no new sessions, and wait up to `within_s` for the others to move."""
        if self._span is not None:
            self._swarm.announce(state="draining")
            await self._tell_hosted(None)
            await self.server.drain(within_s)

    async def retire(self, within_s: float = DRAIN_S) -> None:
        """Stop moving, then drain; waits for a running load, which cannot be interrupted."""
        self._choosing.cancel()
        await self._choosing_ended.wait()
        await self.drain(within_s)

    async def unload(self) -> None:
        """Free the memory of the blocks; remaining sessions end."""
        await self._tell_hosted(None)
        await self.server.host(None)
        plan, self._hosted, self._span = self._plan, None, None
        if plan is not None:
            await self._loader.release(plan)

    def withdraw(self) -> None:
        """Announce `loading` until `appear`, so that no new sessions come; blocks stay loaded and sessions continue."""
        self._withdrawn = True
        if self._span is not None:
            self._swarm.announce(state="loading")

    def appear(self) -> None:
        """Undo `withdraw`: announce the loaded blocks again."""
        self._withdrawn = False
        if self._hosted is not None:
            self._announce()

    def fetch_again(self) -> None:
        """Do not wait any longer before downloading blocks for a move that could not be stored."""
        self._fetch_again_at = 0.0
        self._news.notify()

    def _on_change(self, change: Change) -> None:
        # Not for newly met members or changed figures, which a large swarm reports all the time.
        if change.kind not in ("proven", "updated"):
            self._news.notify()

    # --- choosing -----------------------------------------------------------------------------------------------------

    async def _make_plan(self) -> HostingPlan | None:
        """Return the plan of device and number of blocks, or None if this node can only be a client."""
        from engine.hosting import HostingWish

        options, n_blocks = self._options, self._swarm.n_blocks
        if options.max_vram_bytes == 0:
            self._say("client", LIMIT_ZERO)
            return None
        if options.blocks is not None and options.blocks.stop > n_blocks:
            raise CannotHost(f"the setting `blocks` is {options.blocks}, but the model has {n_blocks} blocks")
        # Alone, the user can chat only if all blocks are here; others may still bring what a larger swarm lacks.
        wanted = n_blocks if not self._swarm.announcements() else 1
        if options.blocks is not None:
            wanted = len(options.blocks)
        wish = HostingWish(options.device, options.max_vram_bytes, options.weights, wanted, options.cache)
        plan = await self._loader.plan(wish)
        if options.blocks is not None and plan.blocks < len(options.blocks):
            raise CannotHost(f"blocks {options.blocks} do not fit here: {plan.budget.reason}")
        if plan.blocks == 0:
            self._steps.begin("load")
            self._steps.failed(plan.budget.reason)
            step = RAISE_CAP if plan.budget.is_capped else ""
            self._say("client", because("no_room", plan.budget.reason, next_step=step))
            self.has_no_room = True
            return None
        return plan if options.blocks is not None else fewer_blocks(plan, options.failed_loads)

    def _others(self) -> Sequence[Announcement]:
        """Return what other members announce, without those that say that they serve blocks and fail at it."""
        announced, failing = self._swarm.announcements(), self._failing()
        return [one for one in announced if one.peer not in failing] if failing else announced

    async def _decide(self, plan: HostingPlan) -> Move | None:
        if self._options.blocks is not None:
            if self._span is not None:
                return None
            return Move(self._options.blocks, 0.0, because("asked_for", "the setting `blocks` names these blocks"))
        me = await self._candidate(plan, self._span)
        move = decide(me, self._others(), self._swarm.n_blocks)
        return None if move is not None and move.fetch_first and trio.current_time() < self._fetch_again_at else move

    async def _candidate(self, plan: HostingPlan, span: Span | None) -> Candidate:
        """Return this node as input of a decision; `span` is served or being loaded."""
        held = await self._loader.held()
        # Blocks that are on disk are served in a moment.
        serves = span if span is not None and is_within(span, held) else self._span
        now, n_blocks = trio.current_time(), self._swarm.n_blocks
        since = self._unserved_since
        self._unserved_since = {block: since.get(block, now) for block in unserved(self._others(), n_blocks)}
        return Candidate(
            self._network.peer_id,
            plan.blocks,
            self._tokens_per_s,
            span,
            now - self._settled_at,
            held,
            {block: now - at for block, at in self._unserved_since.items()},
            is_needed=serves is not None
            and (self._disk_failed or any(block in serves for block in self._unserved_since)),
            fetched=self._fetched,
            homes=self._swarm.homes(),
        )

    async def _follow_the_swarm(self, plan: HostingPlan) -> None:
        """Decide on a move and carry it out once its wait is over; until then, wait for changes of members.

        A reason must last through the wait: each call decides again.
        """
        seen, now = self._news.version, trio.current_time()
        if self._memory_change is not None and self._hosted is not None and self._span is not None:
            await self._change_memory(plan, self._memory_change)
            return
        move = await self._decide(plan)
        if move is None and self._whole is not None and self._span is not None and now >= self._fetch_again_at:
            self._move_timer = None
            await self._grow_again(self._whole, self._span)
            return
        is_hole = move is not None and move.why.code in HOLES
        if move is not None and is_hole:
            move = replace(move, after_s=max(move.after_s, HOLE_CERTAIN_S))
        self._move_timer = due(self._move_timer, move, now)
        if self._move_timer is None or self._move_timer.at > now:
            await self._await_news(seen, self._move_timer)
            self._refresh_announcement()
            return
        move, self._move_timer = self._move_timer.move, None
        if move.fetch_first:
            await self._fetch_ahead(move.span, partial(self._is_wanted, plan, move))
            return
        if self._span is not None:
            self._say("loading", replace(move.why, text=f"moving to {move.span}: {move.why.text}"))
            await self.drain(HOLE_DRAIN_S if is_hole else DRAIN_S)
        await self._load(move)

    async def _await_news(self, seen: int, timer: MoveTimer | None) -> None:
        """Wait for changes of members after version `seen` of the news, until the timer or `REFRESH_S` is over."""
        refresh_at = trio.current_time() + REFRESH_S
        with trio.move_on_at(refresh_at if timer is None else min(refresh_at, timer.at)):
            await self._news.wait_beyond(seen)
            await trio.sleep(NEWS_S)

    def _refresh_announcement(self) -> None:
        if self._hosted is not None and trio.current_time() - self._announced_at >= REFRESH_S:
            self._announce()

    async def _fetch_ahead(self, span: Span, still: Callable[[], Awaitable[bool]]) -> None:
        """Download blocks while the present ones are served; stops if `still` ends or other programs need memory."""

        async def watch() -> None:
            while True:
                seen = self._news.version
                if self._memory_change is not None or not await still():
                    nursery.cancel_scope.cancel()
                await self._await_news(seen, None)
                self._refresh_announcement()

        log.info("downloading blocks %s, while %s are served here", span, self._span)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            try:
                await self._loader.fetch(span)
                self._fetched = span
            except WeightsError as error:
                log.warning("this node stays at blocks %s: %s", self._span, error)
                self._fetch_again_at = trio.current_time() + FETCH_AGAIN_S
            nursery.cancel_scope.cancel()

    async def _is_wanted(self, plan: HostingPlan, move: Move) -> bool:
        return is_wanted(move, await self._candidate(plan, self._span), self._others(), self._swarm.n_blocks)

    # --- hosting ------------------------------------------------------------------------------------------------------

    async def _load(self, move: Move) -> None:
        """Load the blocks of a move and serve them, or those of a hole that opens meanwhile, or as many as fit."""
        next_move: Move | None = move
        while next_move is not None:
            next_move = await self._load_unless_hole(self._plan_now, next_move)

    async def _load_unless_hole(self, plan: HostingPlan, move: Move) -> Move | None:
        """Load and serve blocks; if a hole opens that this node is to fill, stop and return the move to it instead.

        Also stops, with what is served by then, once some of that has to be given back, or if the disk or the device
        is full before the end; if nothing is served by then, returns the move to what the disk has room for.
        """
        span = move.span
        state: State = "loading" if is_within(span, await self._loader.held()) else "fetching"
        self._say(state, replace(move.why, text=f"blocks {span}: {move.why.text}"))
        self._swarm.announce(state=state, span=span, growing=None, device=plan.device_name)
        await self._tell_hosted(None)
        await self.server.host(None)
        self._hosted = self._span = None  # free the old blocks' memory before loading new ones
        self.is_loading = True
        hosted: Hosted | None = None
        urgent: Move | None = None
        failure: WeightsError | DeviceFull | None = None
        async with trio.open_nursery() as nursery:

            async def await_hole() -> None:
                nonlocal urgent
                urgent = await self._await_hole(plan, span)
                nursery.cancel_scope.cancel()

            async def await_shortage() -> None:
                await self._await_shortage(plan)
                nursery.cancel_scope.cancel()

            nursery.start_soon(await_hole)
            nursery.start_soon(await_shortage)
            try:
                hosted = await self._loader.load(plan, span, partial(self._serve_part, span, move))
            except (WeightsError, DeviceFull) as error:
                failure = error
            nursery.cancel_scope.cancel()
        if failure is not None and urgent is None:
            return await self._after_failure(plan, move, failure)
        self.is_loading = False
        if hosted is None:
            if urgent is None:
                self._end_early()
            return urgent
        self._forget_memory_change()  # it was about the blocks before
        if self._whole is not None and plan.blocks >= self._whole.blocks:
            self._whole = None
        self._disk_failed, self._device_was_full = self._whole is not None, False
        self._steps.done("load", f"blocks {span}")
        self._steps.done("measure", f"{hosted.throughput.decode_tokens_per_s:.1f} tokens/s")
        self._settled_at = trio.current_time()
        await self._serve(hosted, span, None)
        await self._tell_hosted(hosted)
        self._steps.done("announce")
        self._say("serving", move.why)
        return None

    async def _after_failure(self, plan: HostingPlan, move: Move, error: WeightsError | DeviceFull) -> Move | None:
        """Keep what is served of a span that could not be loaded whole; if nothing is, return the move to what fits.

        What is missing is downloaded later (`_grow_again`), or loaded once the device's memory is free again. Raises
        the error if there is nothing to serve.
        """
        if isinstance(error, WeightsError):
            self._whole = self._whole or plan
            self._disk_failed = True
            self._fetch_again_at = trio.current_time() + FETCH_AGAIN_S
        kept = self._span
        if kept is None:
            kept = await self._fallback(plan, move.span, error) if isinstance(error, WeightsError) else None
            if kept is None:
                raise error
            self._change_plan(plan.with_blocks(blocks_of(kept, kept, plan)))
            why = _shortage(kept, move.span, error)
            log.warning("%s", why.text)
            return Move(kept, 0.0, why)
        self.is_loading = False
        self._end_early()
        self._forget_memory_change()  # it was about the whole span
        if isinstance(error, DeviceFull):
            if self._device_was_full:
                self._full = plan.with_blocks(blocks_of(kept, kept, plan))  # the forecast is too low for this device
            self._device_was_full = True
        await self._keep(plan, kept, kept, _shortage(kept, move.span, error))
        self._change_plan(self._plan_now)
        return None

    def _end_early(self) -> None:
        """Note that no more blocks are loaded for now than those that are served."""
        self._settled_at = trio.current_time()
        self._steps.leave_out_hosting()
        self._steps.done("announce")

    async def _fallback(self, plan: HostingPlan, span: Span, error: WeightsError) -> Span | None:
        """Return blocks that can be hosted in place of a span that cannot be stored; None if there are none."""
        fits = await self._loader.fitting(span) if error.code == "disk_full" else None
        if fits is not None and fits != span:
            return fits
        # The disk takes less than it says, as with a quota.
        held = await self._loader.held()
        here = [both for one in held if (both := one.overlap(span)) is not None]
        if not here and self._options.blocks is None:
            here = [Span(one.start, min(one.stop, one.start + plan.blocks)) for one in held]
        longest = max(here, key=len, default=None)
        return None if longest == span else longest

    async def _grow_again(self, whole: HostingPlan, served: Span) -> None:
        """Download the blocks that could not be stored, while the others are served; load all once they are here."""
        me = await self._candidate(whole, served)
        span = self._options.blocks or regrown(me, self._others(), self._swarm.n_blocks)
        if not is_within(span, me.held):
            await self._fetch_ahead(span, self._has_no_move)
            return
        why = because("disk_back", "the disk has room again")
        self._say("loading", replace(why, text=f"blocks {span}: {why.text}"))
        self._change_plan(whole)
        await self.drain()
        await self._load(Move(span, 0.0, why))

    async def _await_hole(self, plan: HostingPlan, span: Span) -> Move:
        """Wait, while `span` is loaded, for a hole that this node is to fill instead: a download can take hours."""
        timer: MoveTimer | None = None
        while self._options.blocks is None:
            seen, now = self._news.version, trio.current_time()
            move = leave_for_hole(await self._candidate(plan, span), self._others(), self._swarm.n_blocks)
            if move is not None:
                move = replace(move, after_s=max(move.after_s, HOLE_CERTAIN_S))
            timer = due(timer, move, now)
            if timer is not None and timer.at <= now:
                return timer.move
            await self._await_news(seen, timer)
        return await trio.sleep_forever()

    async def _await_shortage(self, plan: HostingPlan) -> None:
        """Wait, while more blocks are loaded, until some of those that are served have to be given back."""
        while True:
            await self._news.wait_for(lambda: self._memory_change is not None)
            if self._span is not None and self._memory_change is not None and self._memory_change.total < plan.blocks:
                return
            self._forget_memory_change()  # nothing is served yet, or there is room for more than is being loaded

    async def _watch_memory(self) -> None:
        """Have blocks given back while other programs need the memory, and taken again later."""
        while True:
            plan, full = self._plan, self._full
            assert plan is not None, "memory is watched while blocks are hosted"
            assert full is not None, "a plan was made before"
            async with trio.open_nursery() as nursery:
                self._watching = nursery.cancel_scope
                nursery.start_soon(self._await_change, plan, full, nursery.cancel_scope)
                nursery.start_soon(self._await_full_device, plan, nursery.cancel_scope)
            self._news.notify()
            await self._memory_changed.wait_for(lambda: self._memory_change is None)

    async def _await_change(self, plan: HostingPlan, full: HostingPlan, waiting: trio.CancelScope) -> None:
        self._memory_change = await self._loader.memory_change(plan, full)
        waiting.cancel()

    async def _await_full_device(self, plan: HostingPlan, waiting: trio.CancelScope) -> None:
        """Wait for a step that fails because the device's memory is full: at least one block is given back then."""
        await self.server.device_full.wait()
        free = await self._loader.free_bytes(plan) or dict.fromkeys((share.device.id for share in plan.shares), 0)
        self._memory_change = after_giving_back(plan, free, at_least=1)
        waiting.cancel()

    async def _change_memory(self, plan: HostingPlan, change: MemoryChange) -> None:
        """Give blocks back, or load the span again with more of them; raises `DeviceFull` if none can be kept."""
        assert self._span is not None, "only a served span changes"
        fetch: Span | None = None
        try:
            if change.total > plan.blocks:
                fetch = await self._regrow(change, self._span)
            else:
                await self._give_back(plan, change, self._span)
        finally:
            if self._memory_change is change:  # else blocks were loaded again, and that had to stop for another one
                self._forget_memory_change()
        if fetch is not None:
            await self._fetch_ahead(fetch, self._has_no_move)

    @property
    def _plan_now(self) -> HostingPlan:
        assert self._plan is not None, "a plan was made before"
        return self._plan

    def _change_plan(self, plan: HostingPlan) -> None:
        """Host by another plan, and watch the memory by it from now on."""
        self._plan = plan
        self._watching.cancel()

    def _forget_memory_change(self) -> None:
        self._memory_change = None
        self._memory_changed.notify()

    async def _give_back(self, plan: HostingPlan, change: MemoryChange, span: Span) -> None:
        found = coverage_of(self._others(), self._swarm.n_blocks, homes=self._swarm.homes())
        kept = kept_span(span, plan, change, found.serving)
        if kept is None:
            await self.drain(HOLE_DRAIN_S)
            await self.unload()
            raise DeviceFull("other programs need the device's memory")
        of_span = f" of {span}" if kept != span else ""  # it is all that was loaded when memory became short
        text = f"blocks {kept}{of_span}: other programs need the device's memory"
        self._whole = None  # more is loaded again once there is memory for it
        await self._keep(plan, span, kept, because("memory_short", text))

    async def _keep(self, plan: HostingPlan, span: Span, kept: Span, why: Reason) -> None:
        """Serve only these blocks of a loaded span from now on, and free the memory of the others."""
        hosted = self._hosted
        assert hosted is not None, "a served span is loaded"
        self._span, self._plan = kept, plan.with_blocks(blocks_of(span, kept, plan))
        self._announce()  # first, so that askers look for others at once
        await self._tell_hosted(None)
        self._hosted = await self.server.shrink(kept, partial(self._loader.keep, hosted, kept))
        await self._tell_hosted(self._hosted)
        log.warning("%s", why.text)
        self._announce()
        self._say("serving", why)
        if self._planned is not None and self._plan.device != plan.device:
            await self._planned(self._plan)

    async def _regrow(self, change: MemoryChange, served: Span) -> Span | None:
        """Load more blocks than the served ones, or return those that have to be downloaded first.

        That is so if only this node serves some of its blocks. The free memory is judged again later.
        """
        assert self._full is not None, "a plan was made before"
        plan, span = self._full.with_blocks(change.blocks), self._options.blocks
        me = await self._candidate(plan, served)
        if span is None or len(span) > plan.blocks:
            span = regrown(me, self._others(), self._swarm.n_blocks)
        if me.is_needed and not is_within(span, me.held):
            return span if trio.current_time() >= self._fetch_again_at else None
        self._plan = plan
        await self.drain()
        await self._load(Move(span, 0.0, because("memory_back", "the device's memory is free again")))
        return None

    async def _has_no_move(self) -> bool:
        assert self._plan is not None, "a plan was made before"
        return await self._decide(self._plan) is None

    async def _tell_hosted(self, hosted: Hosted | None) -> None:
        if self._on_hosted is not None:
            await self._on_hosted(hosted)

    async def _serve_part(self, span: Span, move: Move, hosted: Hosted, part: Span) -> None:
        """Serve the loaded part of a span while the rest is downloaded."""
        await self._serve(hosted, part, span)
        text = f"blocks {part} of {span}, the rest follows: {move.why.text}"
        self._say("serving", because("growing", text))

    async def _serve(self, hosted: Hosted, span: Span, growing: Span | None) -> None:
        if self._hosted is None:
            await self.server.host(hosted.runner, hosted.throughput.prefill_tokens_per_s)
        self._hosted, self._span = hosted, span  # last: what is served may have to be given back at once
        self._announce(growing)

    def _announce(self, growing: Span | None = None) -> None:
        from engine.wire import wire_name

        assert self._hosted is not None, "only loaded blocks are announced"
        assert self._plan is not None, "only loaded blocks are announced"
        throughput = self._hosted.throughput
        self._swarm.announce(
            state="loading" if self._withdrawn else "serving",
            span=self._span,
            growing=growing,
            decode_tokens_per_s=throughput.decode_tokens_per_s,
            prefill_tokens_per_s=throughput.prefill_tokens_per_s,
            kv_free_tokens=self.server.kv_free_tokens,
            kv_total_tokens=self.server.kv_total_tokens,
            busy=self._busy_share(),
            dtype=wire_name(self._plan.dtype),
            quantisation=self._plan.quantisation,
            cache=self._plan.cache,
            rtts=rtts_to_announce(self._network.links(), self._span, self._swarm.announcements()),
            rates=rates_to_announce(self._network.links(), self._span, self._swarm.announcements()),
            wires=(INT8, CHANGES),
        )

    def _busy_share(self) -> float:
        """Return the share (0 to 1) of the time since the last call in which the device computed."""
        now, busy_s = trio.current_time(), self.server.stats.busy_s
        share = (busy_s - self._announced_busy_s) / max(now - self._announced_at, 1.0)
        self._announced_at, self._announced_busy_s = now, busy_s
        return min(max(share, 0.0), 1.0)


def _shortage(kept: Span, span: Span, error: WeightsError | DeviceFull) -> Reason:
    """Say which blocks are hosted in place of a span, and why no more."""
    text = f"blocks {kept} {'of' if span.covers(kept) else 'instead of'} {span}: {error}"
    if isinstance(error, DeviceFull):
        return because("memory_short", text)
    return because("disk_full" if error.code == "disk_full" else "weights_unstored", text)
