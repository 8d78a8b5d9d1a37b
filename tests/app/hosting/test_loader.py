"""Spans whose weights come slowly: what is loaded is served while the rest is downloaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from app.core.device_thread import DeviceThread
from app.core.span import Span
from app.hosting.loader import BlockLoader, SpanLoad
from app.snapshot.startup import StartupSteps
from app.weights.library import span_parts
from app.weights.model_weights import ModelWeights
from engine.hosting import Hosted, HostingPlan
from tests.app.hash_model import InlineDevice

PART_S = 60.0  # for each part to arrive


class SlowWeights:
    """Parts that arrive one after the other, in the order of their names in the request."""

    def __init__(self, held: set[str]) -> None:
        self.on_disk, self.hosted = held, set[str]()
        self.library = SimpleNamespace(
            missing=lambda names: [name for name in names if name not in self.on_disk], held=lambda: set(self.on_disk)
        )

    def progress(self, names: Sequence[str]) -> None:
        return None

    async def need(
        self, names: Sequence[str], on_part: Callable[[str], None] = lambda name: None, *, hosted: bool = False
    ) -> None:
        self.hosted |= set(names) if hosted else set()
        for name in names:
            if name not in self.on_disk:
                await trio.sleep(PART_S)
                self.on_disk.add(name)
                on_part(name)


class Growing:
    """Loaded blocks."""

    def __init__(self, part: Span) -> None:
        self.runner = SimpleNamespace(start=part.start, stop=part.stop)

    def grow(self, source: object) -> None:
        self.runner.stop += 1

    def measured(self) -> Growing:
        return self


class InstantLoad(SpanLoad):
    """Loads the first blocks at once, without an engine."""

    async def _load_first(self, part: Span, span: Span) -> Hosted:
        return cast(Hosted, Growing(part))


async def run_here(function: Callable[..., Any], *args: Any) -> Any:
    """A simulated clock does not wait for threads."""
    return function(*args)


async def test_blocks_are_served_while_a_slow_download_goes_on(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block is loaded long before the next one comes: a quarter is served at first, then block by block."""
    monkeypatch.setattr(trio.to_thread, "run_sync", run_here)
    weights, device = cast(ModelWeights, SlowWeights(set())), cast(DeviceThread, InlineDevice())
    served: list[tuple[float, int]] = []

    async def on_grown(hosted: Hosted, part: Span) -> None:
        served.append((trio.current_time() - begun, len(part)))

    span, begun = Span(0, 12), trio.current_time()
    load = InstantLoad(weights, device, cast(HostingPlan, None), StartupSteps(lambda: None))
    await load.load(span, on_grown)
    assert trio.current_time() - begun == pytest.approx(len(span_parts(0, 12)) * PART_S, abs=1)
    assert [length for _, length in served] == list(range(3, 12)), "each part is told once"
    assert [at for at, _ in served] == pytest.approx([length * PART_S for length in range(3, 12)])


async def test_blocks_are_downloaded_for_later(autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trio.to_thread, "run_sync", run_here)
    weights = SlowWeights({*span_parts(0, 2), *span_parts(4, 5), "embedding"})
    loader = BlockLoader(cast(ModelWeights, weights), StartupSteps(lambda: None))
    assert await loader.held() == (Span(0, 2), Span(4, 5))
    await loader.fetch(Span(1, 4))
    assert await loader.held() == (Span(0, 5),)
    assert not weights.hosted, "what is only downloaded is not kept from eviction"
