"""From a memory limit to hosted blocks on this machine's CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine import hosting
from engine.budget import BFLOAT16, FLOAT32, block_bytes, workspace_bytes
from engine.device.probe import Device, Kind
from engine.hosting import HostingWish, Weights, load_blocks, measured_host, plan_hosting
from engine.model.attention import Segment
from engine.model.kv_cache import KVLease
from engine.model.span import SpanRunner
from engine.sources.base import ModelSource
from engine.sources.opening import open_source


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return open_source("tiny-random", Path(tmp_path_factory.mktemp("cache")))


def test_a_limit_decides_how_many_blocks_are_hosted(tiny: ModelSource) -> None:
    assert plan_hosting(tiny.config, "F32", HostingWish("cpu")).blocks == tiny.config.n_blocks
    assert plan_hosting(tiny.config, "F32", HostingWish("cpu", 0)).blocks == 0
    plan = plan_hosting(tiny.config, "F32", HostingWish("cpu", 3_000_000))
    assert 0 < plan.blocks < tiny.config.n_blocks
    assert plan.budget.total_bytes <= 3_000_000


@pytest.mark.parametrize(
    ("kind", "weights", "wanted", "quantised"),
    [
        ("mps", "own", 4, False),
        ("mps", "int8", 0, True),
        ("mps", "auto", 1, False),  # fits as it is
        ("mps", "auto", 2, True),  # fits only in int8
        ("mps", "auto", 8, False),  # does not fit either way
        ("cpu", "auto", 2, False),
        ("cpu", "int8", 2, True),
    ],
)
def test_int8_is_chosen_where_it_makes_the_difference(
    tiny: ModelSource, monkeypatch: pytest.MonkeyPatch, kind: Kind, weights: Weights, wanted: int, quantised: bool
) -> None:
    monkeypatch.setattr(hosting, "probe_devices", lambda: [Device(kind, kind, "a device", 8 << 30, 8 << 30)])
    monkeypatch.setattr(hosting, "pick_dtype", lambda device, own: torch.bfloat16)
    room = int(1.5 * block_bytes(tiny.config, BFLOAT16)) + workspace_bytes(tiny.config, BFLOAT16, 512, head=False)
    plan = plan_hosting(tiny.config, "BF16", HostingWish(kind, int(room / 0.75), weights, wanted))
    assert plan.quantised is quantised


def test_hosted_blocks_run_and_stay_within_the_limit(tiny: ModelSource) -> None:
    plan = plan_hosting(tiny.config, "F32", HostingWish("cpu", 3_000_000))
    seen: list[tuple[int, int]] = []
    hosted = measured_host(load_blocks(tiny, 2, 2 + plan.blocks, plan, lambda done, total: seen.append((done, total))))
    assert seen[-1] == (plan.blocks, plan.blocks)
    assert hosted.weight_bytes <= plan.blocks * block_bytes(tiny.config, FLOAT32)
    assert hosted.throughput.decode_tokens_per_s > 0
    runner = hosted.runner
    assert (runner.start, runner.stop) == (2, 2 + plan.blocks)
    assert runner.kv_free_tokens == runner.kv_total_tokens > 0, "measuring left something in the cache"


def test_blocks_that_come_later_change_nothing_for_sessions_that_are_open(tiny: ModelSource) -> None:
    plan = plan_hosting(tiny.config, "F32", HostingWish("cpu"))
    whole, growing = load_blocks(tiny, 1, 5, plan), measured_host(load_blocks(tiny, 1, 3, plan, grows_to=5))
    span = growing.span
    hidden = torch.randn(6, tiny.config.hidden_size, generator=torch.Generator().manual_seed(1))
    old = {each: each.open(8) for each in (whole, span)}

    def step(each: SpanRunner, lease: KVLease, rows: slice, stop: int) -> torch.Tensor:
        return each.step(hidden[rows], [Segment(lease, rows.start, rows.stop - rows.start)], (1, stop))

    for each, lease in old.items():
        step(each, lease, slice(0, 4), 3)
    growing.grow(tiny)
    growing.grow(tiny)
    assert growing.runner.stop == 5
    for stop, leases in ((3, old), (5, {each: each.open(8) for each in old})):
        rows = slice(4, 6) if leases is old else slice(0, 6)
        results = [step(each, lease, rows, stop) for each, lease in leases.items()]
        assert torch.equal(*results)
    assert growing.measured().throughput.decode_tokens_per_s > 0
