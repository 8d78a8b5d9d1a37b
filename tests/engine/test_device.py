"""The device probe on what this machine has, on drivers that break, and on control groups with limits."""

from __future__ import annotations

import types
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch

from engine.device import probe, sensors
from engine.device.dtypes import CANDIDATES, ROUNDS, choose, dtype_times, measure_dtypes, pick_dtype, time_products
from engine.device.kinds import KINDS, UNTESTED
from engine.device.probe import Device, find_device, is_memory_full, probe_cuda, probe_devices
from engine.device.sensors import NvidiaCard, SensorReading, cgroup_limits
from engine.errors import DeviceError

GIB = 2**30
CARD = NvidiaCard("GPU-0c2a", "Card of Test", 8 * GIB, SensorReading(61.0, 120.5, 0.4, 3 * GIB))


def test_the_cpu_is_always_there_and_last() -> None:
    cpu = probe_devices()[-1]
    assert (cpu.id, cpu.kind, cpu.usable) == ("cpu", "cpu", True)
    assert 0 < cpu.free_bytes <= cpu.total_bytes
    assert cpu.utilisation is None or 0 <= cpu.utilisation <= 1
    assert "cores" in cpu.name


def test_a_broken_driver_costs_its_own_devices_only() -> None:
    def probe_broken() -> list[Device]:
        raise RuntimeError("driver/library version mismatch\nand a page of more")

    def probe_fine() -> list[Device]:
        return [Device("xpu:0", "xpu", "fine", 2, 1)]

    fine, cpu = probe_devices([probe_broken, probe_fine])
    assert fine.id == "xpu:0"
    assert cpu.note == "probe_broken failed: driver/library version mismatch"


def test_a_card_that_torch_cannot_use_is_shown_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sensors, "nvidia_cards", lambda: [CARD])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    (without_cuda,) = probe_cuda()
    assert not without_cuda.usable
    assert without_cuda.free_bytes == 0
    assert "built without CUDA" in without_cuda.note
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES hides it" in probe_cuda()[0].note
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert "update the NVIDIA driver" in probe_cuda()[0].note


def test_what_torch_warns_of_a_card_is_its_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_available() -> bool:
        warnings.warn("The NVIDIA driver on your system is too old\nmore", stacklevel=1)
        return False

    monkeypatch.setattr(sensors, "nvidia_cards", lambda: [CARD])
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert probe_cuda()[0].note == "torch says: The NVIDIA driver on your system is too old"


@pytest.fixture
def two_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that sees two cards, the second one broken."""

    def properties(index: int) -> types.SimpleNamespace:
        if index == 1:
            raise RuntimeError("CUDA error: unspecified launch failure\nCompile with TORCH_USE_CUDA_DSA")
        return types.SimpleNamespace(name="Card of Test", uuid="0c2a")

    monkeypatch.setattr(sensors, "nvidia_cards", lambda: [CARD])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (5 * GIB, 8 * GIB))


@pytest.mark.usefixtures("two_cards")
def test_several_cards_are_several_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    good, bad = probe_cuda()
    assert good == Device(
        "cuda:0", "cuda", "Card of Test", 8 * GIB, 5 * GIB, 61.0, 120.5, 0.4, 3 * GIB, KINDS["cuda"].context_bytes
    )
    assert not bad.usable
    assert bad.note == "CUDA error: unspecified launch failure"


@pytest.mark.usefixtures("two_cards")
def test_libraries_that_were_loaded_since_are_not_counted_as_the_drivers_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = iter([512, 512 + 244, 512 + 244 + 1000])
    monkeypatch.setattr(probe, "_fewest_bytes", {})
    monkeypatch.setattr(sensors, "own_card_bytes", lambda uuid: next(held) << 20)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 0)
    assert [probe_cuda()[0].context_bytes >> 20 for _ in range(3)] == [512, 512, 512]


@pytest.mark.usefixtures("two_cards")
def test_rocm_is_said_to_be_untested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert (probe_cuda()[0].kind, probe_cuda()[0].note) == ("rocm", UNTESTED)


def test_find_device() -> None:
    broken = Device("cuda:0", "cuda", "old", 8, 0, usable=False, note="update the driver")
    second = Device("cuda:1", "cuda", "new", 8, 8)
    cpu = Device("cpu", "cpu", "cpu", 8, 8)
    devices = [broken, second, cpu]
    assert find_device(None, devices) is second
    assert find_device("cpu", devices) is cpu
    assert find_device("cuda", [second, Device("cuda:0", "cuda", "c", 1, 1)]).id == "cuda:0"
    with pytest.raises(DeviceError, match=r"cuda:0 \(old\) cannot be used: update the driver"):
        find_device("cuda", devices)
    with pytest.raises(DeviceError, match=r"no device 'mps'; choose one of cuda:1, cpu"):
        find_device("mps", devices)


def write_group(folder: Path, limit: str, current: int, inactive_file: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(limit + "\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {inactive_file}\n")


def test_the_limits_of_all_control_groups_above_count(tmp_path: Path) -> None:
    root, membership = tmp_path / "cgroup", tmp_path / "membership"
    write_group(root / "outer" / "inner", "4000", 1500, 500)
    write_group(root / "outer", "max", 9000, 0)
    write_group(root, "3000", 2600, 100)
    membership.write_text("1:cpu:/old\n0::/outer/inner\n")
    assert cgroup_limits(membership, root) == [(4000, 1000), (3000, 2500)]


@pytest.mark.parametrize("text", ["", "nonsense", "0::/not/visible/here"])
def test_no_control_group_means_no_limit(tmp_path: Path, text: str) -> None:
    (tmp_path / "membership").write_text(text)
    assert cgroup_limits(tmp_path / "membership", tmp_path / "cgroup") == []
    assert cgroup_limits(tmp_path / "absent", tmp_path / "cgroup") == []


def test_a_container_has_less_memory_than_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sensors, "cgroup_limits", lambda: [(10**6, 4 * 10**5), (10**15, 0)])
    assert sensors.memory_total_bytes() == 10**6
    assert sensors.memory_free_bytes() == 6 * 10**5
    monkeypatch.setattr(sensors, "cgroup_limits", lambda: [(10**6, 2 * 10**6)])
    assert sensors.memory_free_bytes() == 0


def test_no_nvidia_driver_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> None:
        raise OSError("libnvidia-ml.so.1: cannot open shared object file")

    monkeypatch.setattr(sensors, "_nvml", no_driver)
    assert sensors.nvidia_cards() == []


F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("seconds", "own", "expected"),
    [
        ({F32: 1.0, BF16: 300.0, F16: 300.0}, BF16, F32),  # a CPU without bf16
        ({F32: 1.0, BF16: 0.5, F16: 0.5}, BF16, BF16),  # a recent card
        ({F32: 1.0, BF16: 0.5, F16: 0.5}, F16, F16),  # the model's own format
        ({F32: 1.0, BF16: 0.9, F16: 0.3}, BF16, BF16),  # never fp16 for a model that might overflow in it
        ({F32: 1.0, BF16: 4.0, F16: 0.5}, BF16, F32),  # a card that emulates bf16
        ({F32: 1.0, BF16: 4.0, F16: 0.5}, F16, F16),
        ({F32: 1.0, BF16: 0.5, F16: 64.0}, F16, BF16),  # the own format is clearly slower
        ({F32: 1.0, BF16: 1.1, F16: 64.0}, F32, BF16),  # near: half the memory
        ({F32: 1.0, F16: 64.0}, BF16, F32),
        ({F32: 1.0}, F16, F32),
        ({}, BF16, F32),
    ],
)
def test_choose(seconds: dict[torch.dtype, float], own: torch.dtype, expected: torch.dtype) -> None:
    assert choose(seconds, own) is expected


def test_a_format_that_fails_or_errs_is_left_out() -> None:
    def measure(dtype: torch.dtype, at_most_s: float) -> float | None:
        if dtype is BF16:
            raise RuntimeError("not implemented for 'BFloat16'")
        return None if dtype is F16 else 1.0

    choice = measure_dtypes(measure)
    assert choice.dtype is F32
    assert set(choice.seconds) == {F32}


def test_a_hopeless_format_is_stopped_early() -> None:
    limits: list[float] = []

    def measure(dtype: torch.dtype, at_most_s: float) -> float:
        limits.append(at_most_s)
        return {F32: 1.0, BF16: 0.5, F16: 9.0}[dtype]

    assert measure_dtypes(measure).dtype is BF16
    assert limits[:3] == [float("inf"), 4.0, 2.0]
    assert limits[3:] == [2.0, 2.0] * (ROUNDS - 1)  # the hopeless one is measured once


@pytest.mark.parametrize("disturbed", CANDIDATES)
@pytest.mark.parametrize("round", range(ROUNDS))
def test_another_program_does_not_change_the_choice(disturbed: torch.dtype, round: int) -> None:
    """One measurement takes as long as others take to get the processor; the next ones do not."""
    seconds = {F32: 0.1e-3, BF16: 0.15e-3, F16: 0.3e-3}
    measured: Counter[torch.dtype] = Counter()

    def measure(dtype: torch.dtype, at_most_s: float) -> float:
        measured[dtype] += 1
        return 20e-3 if dtype is disturbed and measured[dtype] == round + 1 else seconds[dtype]

    choice = measure_dtypes(measure)
    assert choice.dtype is F32
    assert choice.seconds[F32] == seconds[F32]


def test_products_on_the_processor_are_timed_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    right, before = torch.nn.functional.linear, torch.get_num_threads()
    threads: set[int] = set()

    def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        threads.add(torch.get_num_threads())
        return right(x, w)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    time_products("cpu", F32, 0.0)
    assert threads == {1}
    assert torch.get_num_threads() == before


def test_the_choice_is_measured_on_this_machine_and_remembered() -> None:
    choice = dtype_times("cpu")
    assert F32 in choice.seconds
    assert choice.dtype is pick_dtype("cpu") is choose(choice.seconds)
    assert dtype_times("cpu") is choice


@pytest.mark.parametrize("dtype", CANDIDATES)
def test_wrong_results_are_not_timed(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch.nn.functional.linear
    assert time_products("cpu", dtype, 0.0) is not None
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, w: right(x, w) * 1.05)
    assert time_products("cpu", dtype, 0.0) is None
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, w: right(x, w) * float("nan"))
    assert time_products("cpu", dtype, 0.0) is None


def test_full_memory_is_told_from_other_errors() -> None:
    with pytest.raises(RuntimeError) as machine:  # of a size that no machine has
        torch.empty(2**50)
    for full in (machine.value, torch.OutOfMemoryError(), MemoryError(), RuntimeError("MPS backend out of memory (…)")):
        assert is_memory_full(full)
    for other in (RuntimeError("CUDA error: device-side assert triggered"), ValueError("out of memory"), OSError(12)):
        assert not is_memory_full(other)
