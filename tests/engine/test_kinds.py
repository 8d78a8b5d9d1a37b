"""The table of device kinds: what the untried kinds would run, tried on a CPU that takes their row."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.device import sensors
from engine.device.kinds import KINDS, UNTESTED, DeviceKind, kind_named, kind_of
from engine.device.probe import free_memory_bytes, probe_mps, probe_xpu
from engine.errors import DeviceError
from engine.model import attention, linear, span
from engine.model.kv_cache import Segment
from engine.model.span import SpanRunner
from tests.engine.random_spans import CASES, random_span

GIB = 2**30


class NoDoubles(TorchDispatchMode):
    """Fails on numbers of 64 bits, which Apple's GPUs lack."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else [out]:
            assert not isinstance(each, torch.Tensor) or each.dtype is not torch.float64, f"{func} makes doubles"
        return out


def run(model: SpanRunner) -> list[torch.Tensor]:
    """Prompts of three sessions, one of them in two chunks, then steps of all of them together."""
    torch.manual_seed(1)
    leases = [model.open(80) for _ in range(3)]
    outs = []
    for lease, lengths in zip(leases, ((60,), (5, 7), (1,)), strict=True):
        for length in lengths:
            x = torch.randn(length, model.config.hidden_size)
            outs.append(model.step(x, [Segment(lease, lease.length, length)]))
    for _ in range(3):
        x = torch.randn(3, model.config.hidden_size)
        outs.append(model.step(x, [Segment(lease, lease.length, 1) for lease in leases]))
    return outs


@pytest.mark.parametrize("case", sorted(CASES))
@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_an_untried_kind_computes_the_same(case: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    expected = run(random_span(CASES[case], quantisation="int8" if case == "int8" else "none"))
    for module in (attention, linear, span):
        monkeypatch.setattr(module, "kind_of", lambda device: KINDS[kind])
    monkeypatch.delattr(torch, "_weight_int8pack_mm")  # such a kind has none
    right = torch.nn.functional.scaled_dot_product_attention

    def ungrouped(*args: Any, enable_gqa: bool = False, **kwargs: Any) -> torch.Tensor:
        assert not enable_gqa
        return right(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", ungrouped)
    torch.manual_seed(0)
    with NoDoubles():  # type: ignore[no-untyped-call]
        found = run(random_span(CASES[case], quantisation="int8" if case == "int8" else "none"))
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm()


def test_the_row_of_a_device() -> None:
    assert kind_of(torch.device("cpu")) is KINDS["cpu"]
    assert kind_of(torch.device("mps")) is KINDS["mps"]
    assert kind_of(torch.device("xpu", 1)) is KINDS["xpu"]
    assert kind_named("gpu") == DeviceKind(torch_type=""), "a machine of a plan is a plain GPU"


def test_rocm_is_told_from_cuda_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    kind_of.cache_clear()
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert kind_of(torch.device("cuda", 0)) is KINDS["rocm"]
    kind_of.cache_clear()
    monkeypatch.setattr(torch.version, "hip", None)
    assert kind_of(torch.device("cuda", 0)) is KINDS["cuda"]
    kind_of.cache_clear()


def _fail(*_: Any) -> Any:
    raise RuntimeError("the driver does not say\nand more")


@pytest.fixture
def intel(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = types.SimpleNamespace(name="Arc of Test", total_memory=16 * GIB)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 1)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.xpu, "memory_reserved", lambda index: 3 * GIB)


@pytest.mark.usefixtures("intel")
@pytest.mark.parametrize(("query", "free"), [(lambda index: (9 * GIB, 16 * GIB), 9 * GIB), (_fail, 13 * GIB)])
def test_an_intel_gpu(query: Callable[[int], tuple[int, int]], free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.xpu, "mem_get_info", query)
    (device,) = probe_xpu()
    assert (device.id, device.total_bytes, device.free_bytes, device.note) == ("xpu:0", 16 * GIB, free, UNTESTED)
    assert free_memory_bytes("xpu:0") == free


def test_an_apple_gpu_shares_the_machines_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 10 * GIB)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 4 * GIB)
    for available, free in ((20 * GIB, 6 * GIB), (2 * GIB, 2 * GIB)):
        monkeypatch.setattr(sensors, "memory_free_bytes", lambda available=available: available)
        (device,) = probe_mps()
        assert (device.id, device.total_bytes, device.free_bytes, device.note) == ("mps", 10 * GIB, free, UNTESTED)
        assert free_memory_bytes("mps") == free


def test_a_driver_that_fails_is_an_error_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", _fail)
    with pytest.raises(DeviceError, match="free memory of cuda:1 cannot be read: the driver does not say"):
        free_memory_bytes("cuda:1")
    assert free_memory_bytes("cpu") > 0
