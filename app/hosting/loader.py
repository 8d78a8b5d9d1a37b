"""Loads a span's blocks onto the device: all at once if they are on disk, else one by one as they are downloaded.

A span can have many gigabytes and take hours to download, so its first blocks are served as soon as they are loaded,
and the served part grows. `app.weights` downloads; `engine.hosting` loads.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from threading import Event
from typing import TYPE_CHECKING

import trio

from app.core.device_thread import DeviceThread
from app.core.signal import Signal
from app.core.span import Span
from app.core.units import format_size
from app.hosting.memory import LOOK_S, Free, MemoryChange, MemoryWatch
from app.snapshot.startup import StartupSteps
from app.weights.extents import WeightsError
from app.weights.library import ENDS, span_parts
from app.weights.model_weights import ModelWeights, runs
from engine.errors import DeviceFull
from engine.sources.layout import block_index

if TYPE_CHECKING:
    from engine.config import ModelConfig
    from engine.hosting import Hosted, HostingPlan, HostingWish
    from engine.sources.base import ModelSource

log = logging.getLogger("shoal.hosting")

SERVE_FROM_FRACTION = 1 / 4  # start serving once this much of the span is downloaded
REPORT_S = 0.5  # between two updates of a download's progress

OnGrown = Callable[["Hosted", Span], Awaitable[None]]


class BlockLoader:
    """Plans, loads and frees the blocks of one model on this machine; loading runs in a thread of its own."""

    def __init__(self, weights: ModelWeights, steps: StartupSteps) -> None:
        self._weights, self._steps = weights, steps
        self.device = DeviceThread()

    async def plan(self, wish: HostingWish) -> HostingPlan:
        """Return the devices, and how many blocks fit on them; raises `engine.errors.DeviceError`."""
        from engine.hosting import plan_hosting
        from engine.stored_form import stored_bytes

        manifest = self._weights.manifest
        largest = max(manifest.block(0).tensors, key=lambda tensor: tensor.size_bytes)
        stored = stored_bytes(manifest.block(index).tensors for index in range(manifest.config.n_blocks))
        plan = await self.device.run_apart(plan_hosting, manifest.config, largest.kind, wish, stored)
        self.device.device = plan.device.id
        return plan

    async def held(self) -> tuple[Span, ...]:
        """Return the blocks whose weights are on disk, in spans with gaps between them."""
        names = await trio.to_thread.run_sync(self._weights.library.held)
        return runs(sorted(index for name in names if (index := block_index(name)) is not None))

    async def fitting(self, span: Span) -> Span | None:
        """Return the longest part of a span whose weights are on the disk or fit there; None if no block does."""
        return await self._weights.fitting(span)

    async def fetch(self, span: Span) -> None:
        """Download the missing weights of these blocks, beside those of the loaded ones; raises `WeightsError`."""
        await self._weights.need(span_parts(span.start, span.stop))

    async def load(self, plan: HostingPlan, span: Span, on_grown: OnGrown) -> Hosted:
        """Load all blocks of a span; awaits `on_grown` for each part of it that can be served before the end.

        Raises `WeightsError` if the weights cannot be downloaded, `engine.errors.EngineError` if they do not load: all
        that could be loaded by then has been given to `on_grown`.
        """
        self._weights.host(span_parts(span.start, span.stop))
        return await SpanLoad(self._weights, self.device, plan, self._steps).load(span, on_grown)

    async def memory_change(self, plan: HostingPlan, full: HostingPlan) -> MemoryChange:
        """Wait until other programs leave too little memory for the plan, or enough for more of the `full` one again.

        A device whose free memory cannot be read is not watched.
        """
        watch = MemoryWatch(plan, full)
        while True:
            await trio.sleep(LOOK_S)
            free = await self.free_bytes(full)
            change = None if free is None else watch.look(free, trio.current_time())
            if change is not None:
                return change

    async def free_bytes(self, plan: HostingPlan) -> Free | None:
        """Return the free memory of the plan's devices; None if a driver does not answer."""
        from engine.device.probe import free_memory_bytes
        from engine.errors import DeviceError

        devices = {share.device.id for share in plan.shares}
        try:
            return await trio.to_thread.run_sync(lambda: {device: free_memory_bytes(device) for device in devices})
        except DeviceError as error:
            log.debug("%s", error)
            return None

    async def keep(self, hosted: Hosted, span: Span) -> Hosted:
        """Free all loaded blocks but these, and return their memory to the system; raises `DeviceFull`."""
        self._weights.host(span_parts(span.start, span.stop))
        return await self.device.run(hosted.keep, span.start, span.stop)

    async def release(self, plan: HostingPlan) -> None:
        """Return unused memory of the devices to the system."""
        from engine.hosting import release

        for device in {share.device.id for share in plan.shares}:
            await self.device.run(release, device)


class SpanLoad:
    """One span being loaded; reports progress in the startup steps."""

    def __init__(self, weights: ModelWeights, device: DeviceThread, plan: HostingPlan, steps: StartupSteps) -> None:
        self._weights, self._device, self._plan, self._steps = weights, device, plan, steps
        self._failure: WeightsError | DeviceFull | None = None
        self._held: set[str] = set()  # names of parts that are on disk
        self._changed = Signal()  # a part was stored, or the download failed

    async def load(self, span: Span, on_grown: OnGrown) -> Hosted:
        """Load the span, as `BlockLoader.load` says."""
        if not await trio.to_thread.run_sync(self._weights.library.missing, span_parts(span.start, span.stop)):
            self._steps.done("weights")
            return await self._load_first(span, span)
        self._held = set(await trio.to_thread.run_sync(self._weights.library.held))
        hosted: Hosted | None = None
        told = span.start  # the end of the part that `on_grown` knows of
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._fetch, span)
            nursery.start_soon(self._report_download, span)
            while self._failure is None or (hosted is not None and hosted.runner.stop < self._ready(span)):
                ready = self._ready(span)
                try:
                    hosted = await self._advance(hosted, span, ready)
                except (WeightsError, DeviceFull) as error:
                    self._failure = error
                    break
                loaded = span.start if hosted is None else hosted.runner.stop
                if loaded == span.stop:
                    break
                if hosted is not None and loaded > told:
                    await on_grown(hosted, Span(span.start, loaded))
                    told = loaded
                else:
                    await self._wait_for_part(span, ready)
            nursery.cancel_scope.cancel()
        if hosted is None or hosted.runner.stop < span.stop:
            assert self._failure is not None, "a download that did not fail has all blocks"
            raise self._failure
        return await self._device.run(hosted.measured)

    async def _advance(self, hosted: Hosted | None, span: Span, ready: int) -> Hosted | None:
        """Load downloaded blocks before `ready`: the first `SERVE_FROM_FRACTION` together, then one per call."""
        if hosted is not None:
            if hosted.runner.stop < ready:
                source = await self._weights.need(span_parts(hosted.runner.stop, hosted.runner.stop + 1))
                await self._device.run(hosted.grow, source)
                self._steps.progress("load", hosted.runner.stop - span.start, len(span))
            return hosted
        enough = ready - span.start >= max(1, int(len(span) * SERVE_FROM_FRACTION))
        return await self._load_first(Span(span.start, ready), span) if enough else None

    async def _load_first(self, part: Span, span: Span) -> Hosted:
        from engine.hosting import load_blocks, measured_host

        self._steps.begin("load", f"blocks {span}")
        source = await self._weights.need(span_parts(part.start, part.stop))
        on_loaded = self._load_progress(span)
        is_warm = Event()
        load = partial(
            load_blocks, source, part.start, part.stop, self._plan, on_loaded, grows_to=span.stop,
            before_cache=is_warm.wait,
        )  # fmt: skip
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._warm_kernels, source.config, is_warm)
            loaded = await self._device.run_apart(load)
        if part == span:
            self._steps.done("load", f"blocks {span}")
            self._steps.begin("measure")
        return await self._device.run(measured_host, loaded)

    async def _warm_kernels(self, config: ModelConfig, is_warm: Event) -> None:
        """Warm up kernels in the memory that is kept for the KV cache, and say when it is free again."""
        from engine.hosting import warm_kernels

        try:
            await self._device.run(warm_kernels, config, self._plan)
        finally:
            is_warm.set()

    async def _fetch(self, span: Span) -> None:
        """Download the span's parts; keeps a `WeightsError` in `_failure` for `load` to raise."""
        self._steps.begin("weights", f"blocks {span} from members")
        try:
            parts = span_parts(span.start, span.stop)
            await self._weights.need(parts, self._on_part)
            self._held.update(parts)
            self._steps.done("weights")
        except WeightsError as error:
            self._failure = error
            self._steps.failed(str(error))
        self._changed.notify()

    def _on_part(self, name: str) -> None:
        self._held.add(name)
        self._changed.notify()

    async def _wait_for_part(self, span: Span, ready: int) -> None:
        """Wait until more blocks than those before `ready` are on disk, or the download failed."""
        await self._changed.wait_for(lambda: self._failure is not None or self._ready(span) > ready)

    async def _report_download(self, span: Span) -> None:
        await _report_progress(self._weights, span_parts(span.start, span.stop), self._steps, "weights")

    def _ready(self, span: Span) -> int:
        """Return the end of the gapless run of downloaded blocks from the span's start."""
        stop = span.start
        while stop < span.stop and span_parts(stop, stop + 1)[0] in self._held:
            stop += 1
        return stop

    def _load_progress(self, span: Span) -> Callable[[int, int], None]:
        """Return a callback for `load_blocks` that counts against the whole span; called from another thread."""
        return lambda done, total: self._steps.progress("load", done, len(span))


async def obtain_ends(weights: ModelWeights, steps: StartupSteps) -> ModelSource:
    """Return tokenizer, embedding and head, downloading missing ones with progress in the startup steps.

    Raises `WeightsError` if they cannot be stored.
    """
    steps.begin_aside("ends", "from members")
    if not await trio.to_thread.run_sync(weights.library.missing, ENDS):
        steps.leave_out("ends")
        return await weights.need(ENDS)
    obtained: ModelSource | WeightsError
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_report_progress, weights, ENDS, steps, "ends")
        try:
            obtained = await weights.need(ENDS)
        except WeightsError as error:
            obtained = error
        nursery.cancel_scope.cancel()
    if isinstance(obtained, WeightsError):
        steps.fail("ends", str(obtained))
        raise obtained
    steps.done("ends")
    return obtained


async def _report_progress(weights: ModelWeights, names: Sequence[str], steps: StartupSteps, step: str) -> None:
    """Show a download's bytes in a startup step until cancelled."""
    while True:
        progress = weights.progress(names)
        if progress is not None:
            steps.progress(step, progress.bytes_done, progress.bytes_total)
        await trio.sleep(REPORT_S)


def fetching_text(weights: ModelWeights, names: Iterable[str]) -> str:
    """Describe the progress of downloading these parts to the user; empty if no download runs."""
    progress = weights.progress(names)
    if progress is None:
        return ""
    return f"{format_size(progress.bytes_done)} of {format_size(progress.bytes_total)}"
