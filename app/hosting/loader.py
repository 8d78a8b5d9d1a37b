"""Bringing a span's blocks onto the device: at once where they are on the disk, else one by one as they arrive.

Whoever waits for a whole span of many gigabytes serves nobody for hours: the first blocks are offered as soon as they
are there, and the span grows behind them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

import trio

from app.core.device_thread import DeviceThread
from app.core.span import Span
from app.core.units import format_size
from app.snapshot.startup import StartupSteps
from app.weights.extents import WeightsError
from app.weights.library import ENDS, span_parts
from app.weights.model_weights import ModelWeights

if TYPE_CHECKING:
    from engine.hosting import Hosted, HostingPlan
    from engine.sources.base import ModelSource

FIRST_SHARE = 4  # so many parts of a span are worth to be served before the rest is there
LOOK_S = 0.5

Grown = Callable[["Hosted", Span], Awaitable[None]]


class BlockLoader:
    """One span on its way onto the device."""

    def __init__(self, weights: ModelWeights, device: DeviceThread, plan: HostingPlan, steps: StartupSteps) -> None:
        self._weights, self._device, self._plan, self._steps = weights, device, plan, steps
        self._failure: WeightsError | None = None

    async def load(self, span: Span, grown: Grown) -> Hosted:
        """All blocks of a span; `grown` hears of each part of it that can be served already.

        Raises `WeightsError` where its parts cannot be had, `engine.errors.EngineError` where they cannot be loaded.
        """
        if not await trio.to_thread.run_sync(self._weights.library.missing, span_parts(span.start, span.stop)):
            self._steps.done("weights")
            return await self._first(span, span)
        hosted: Hosted | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._fetch, span)
            while (hosted is None or hosted.runner.stop < span.stop) and self._failure is None:
                ready = await trio.to_thread.run_sync(self._ready, span)
                self._told(span)
                hosted = await self._advance(hosted, span, ready)
                if hosted is None or hosted.runner.stop >= ready:
                    await trio.sleep(LOOK_S)
                elif hosted.runner.stop < span.stop:
                    await grown(hosted, Span(span.start, hosted.runner.stop))
            nursery.cancel_scope.cancel()
        if self._failure is not None:
            raise self._failure
        assert hosted is not None, "a fetch that did not fail brought all blocks"
        return await self._device.run(hosted.measured)

    async def _advance(self, hosted: Hosted | None, span: Span, ready: int) -> Hosted | None:
        """Load what can be loaded of the blocks up to `ready`, one more at a time once some are there."""
        if hosted is not None:
            if hosted.runner.stop < ready:
                source = await self._weights.need(span_parts(hosted.runner.stop, hosted.runner.stop + 1))
                await self._device.run(hosted.grow, source)
                self._loaded(hosted.runner.stop - span.start, len(span))
            return hosted
        enough = ready - span.start >= max(1, len(span) // FIRST_SHARE)
        return await self._first(Span(span.start, ready), span) if enough else None

    async def _first(self, part: Span, span: Span) -> Hosted:
        from engine.hosting import load_blocks, measured_host

        self._steps.begin("load", f"blocks {span}")
        source = await self._weights.need(span_parts(part.start, part.stop), hosted=True)
        load = partial(
            load_blocks, source, part.start, part.stop, self._plan, self._loaded_of(span), grows_to=span.stop
        )
        return await self._device.run(measured_host, await self._device.run_apart(load))

    async def _fetch(self, span: Span) -> None:
        """Have the parts on the disk; how far that is shows in the steps."""
        self._steps.begin("weights", f"blocks {span} from members")
        try:
            await self._weights.need(span_parts(span.start, span.stop), lambda name: self._told(span), hosted=True)
            self._steps.done("weights")
        except WeightsError as error:
            self._failure = error
            self._steps.failed(str(error))

    def _told(self, span: Span) -> None:
        progress = self._weights.progress(span_parts(span.start, span.stop))
        if progress is not None:
            self._steps.progress("weights", progress.bytes_done, progress.bytes_total)

    def _ready(self, span: Span) -> int:
        """Behind the last of the blocks that are here without a gap."""
        held = self._weights.library.held()
        stop = span.start
        while stop < span.stop and span_parts(stop, stop + 1)[0] in held:
            stop += 1
        return stop

    def _loaded_of(self, span: Span) -> Callable[[int, int], None]:
        return lambda done, total: self._loaded(done, len(span))

    def _loaded(self, done: int, total: int) -> None:
        """From the device's thread too."""
        self._steps.progress("load", done, total)


async def obtain_ends(weights: ModelWeights, steps: StartupSteps) -> ModelSource:
    """Tokenizer, embedding and head, from members where they are not here; how far they are shows in the steps.

    Raises `WeightsError` where they cannot be kept.
    """
    steps.begin_aside("ends", "from members")
    if not await trio.to_thread.run_sync(weights.library.missing, ENDS):
        steps.leave_out("ends")
        return await weights.need(ENDS)
    obtained: ModelSource | WeightsError
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_tell_ends, weights, steps)
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


async def _tell_ends(weights: ModelWeights, steps: StartupSteps) -> None:
    while True:
        progress = weights.progress(ENDS)
        if progress is not None:
            steps.progress("ends", progress.bytes_done, progress.bytes_total)
        await trio.sleep(LOOK_S)


def fetching_text(weights: ModelWeights, names: Iterable[str]) -> str:
    """How far a fetch of these parts is, in words; empty where none is under way."""
    progress = weights.progress(names)
    if progress is None:
        return ""
    if progress.wanted:
        return f"nobody who is here has {progress.wanted}"
    return f"{format_size(progress.bytes_done)} of {format_size(progress.bytes_total)}"
