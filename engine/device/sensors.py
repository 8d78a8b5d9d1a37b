"""What the operating system and NVIDIA's driver say about the hardware. Knows no torch; never raises."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

log = logging.getLogger("shoal.device")

T = TypeVar("T")
_LOAD_WINDOW_S = 3.0
# Where a CPU's temperature is found, by the names its drivers go by.
_CPU_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "cpu-thermal", "soc_thermal", "acpitz")


class Unavailable(Exception):
    """This machine has no such sensor; the text says which."""


@dataclass(frozen=True)
class SensorReading:
    """A device's state at one moment; None where nobody tells."""

    temperature_c: float | None = None
    power_w: float | None = None
    utilisation: float | None = None  # 0 to 1
    others_bytes: int | None = None  # device memory that other processes hold


@dataclass(frozen=True)
class NvidiaCard:
    """A card as the driver sees it, whether torch can use it or not."""

    uuid: str
    name: str
    total_bytes: int
    reading: SensorReading


@dataclass(frozen=True)
class CardUse:
    """What other processes do on a card; None where the driver does not tell, or not whose it is."""

    uuid: str
    others_load: float | None = None  # 0 to 1
    others_bytes: int | None = None
    temperature_c: float | None = None


def nvidia_cards() -> list[NvidiaCard]:
    """All cards of NVIDIA's driver; empty where there is no driver or it does not answer."""
    cards: list[NvidiaCard] = []
    try:
        with _nvml() as nvml:
            for index in range(nvml.nvmlDeviceGetCount()):
                with contextlib.suppress(nvml.NVMLError):  # one broken card must not hide the others
                    cards.append(_card(nvml, nvml.nvmlDeviceGetHandleByIndex(index)))
    except Exception as error:
        log.debug("no answer from NVIDIA's driver: %s", error)
    return cards


def driver_version() -> str | None:
    """NVIDIA's driver, or None where none answers."""
    try:
        with _nvml() as nvml:
            return str(nvml.nvmlSystemGetDriverVersion())
    except Exception as error:
        log.debug("no answer from NVIDIA's driver: %s", error)
        return None


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    import pynvml

    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _card(nvml: Any, handle: Any) -> NvidiaCard:
    def ask(question: Callable[[], T]) -> T | None:
        # Each question is unsupported on some card, and in some virtual machine.
        try:
            return question()
        except nvml.NVMLError:
            return None

    milliwatts = ask(lambda: int(nvml.nvmlDeviceGetPowerUsage(handle)))
    percent = ask(lambda: int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu))
    celsius = ask(lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)))
    reading = SensorReading(
        temperature_c=celsius,
        power_w=None if milliwatts is None else milliwatts / 1000,
        utilisation=None if percent is None else percent / 100,
        others_bytes=ask(lambda: _others_bytes(nvml, handle)),
    )
    name = ask(lambda: str(nvml.nvmlDeviceGetName(handle))) or "NVIDIA card"
    total_bytes = ask(lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).total)) or 0
    return NvidiaCard(str(nvml.nvmlDeviceGetUUID(handle)), name, total_bytes, reading)


def _others_bytes(nvml: Any, handle: Any) -> int:
    by_process = _held_bytes(nvml, handle)
    by_process.pop(os.getpid(), None)
    return sum(by_process.values())


def _held_bytes(nvml: Any, handle: Any) -> dict[int, int]:
    # One process may appear as a compute and as a graphics process. Windows does not tell the bytes (None).
    running = nvml.nvmlDeviceGetComputeRunningProcesses(handle) + nvml.nvmlDeviceGetGraphicsRunningProcesses(handle)
    return {int(process.pid): int(process.usedGpuMemory or 0) for process in running}


def card_uses(*, needs_own: bool = False) -> list[CardUse]:
    """What others do on each card; with `needs_own`, only where this process, which uses a card, is seen on one.

    In a container the driver numbers processes as the host does: what is this process's own work would then look like
    somebody else's.
    """
    try:
        with _nvml() as nvml:
            handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
            seen = not needs_own or any(os.getpid() in _held_bytes(nvml, handle) for handle in handles)
            return [_card_use(nvml, handle, seen) for handle in handles]
    except Exception as error:
        log.debug("no answer from NVIDIA's driver: %s", error)
        return []


def _card_use(nvml: Any, handle: Any, tells_apart: bool) -> CardUse:
    reading = _card(nvml, handle).reading
    load = _or_none(lambda: _others_load(nvml, handle)) if tells_apart else None
    others_bytes = reading.others_bytes if tells_apart else None
    return CardUse(str(nvml.nvmlDeviceGetUUID(handle)), load, others_bytes, reading.temperature_c)


def _others_load(nvml: Any, handle: Any) -> float:
    """The share of the card's time that other processes took in the last seconds."""
    since_us = int((time.time() - _LOAD_WINDOW_S) * 10**6)
    try:
        samples = nvml.nvmlDeviceGetProcessUtilization(handle, since_us)
    except nvml.NVMLError_NotFound:  # nobody used it
        return 0.0
    newest: dict[int, tuple[int, int]] = {}
    for sample in samples:
        if sample.pid not in (0, os.getpid()):
            newest[sample.pid] = max(newest.get(sample.pid, (0, 0)), (int(sample.timeStamp), int(sample.smUtil)))
    return min(1.0, sum(percent for _, percent in newest.values()) / 100)


class ProcessorShare:
    """The share of the machine's processors that other processes take, between two looks."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._last = self._look()

    def others_share(self) -> float:
        """0 to 1, since the last time this was asked."""
        before, self._last = self._last, self._look()
        all_s, busy_s, own_s = (now - then for now, then in zip(self._last, before, strict=True))
        return min(1.0, max(0.0, (busy_s - own_s) / all_s)) if all_s > 0 else 0.0

    def _look(self) -> tuple[float, float, float]:
        """Seconds since the start of the system: all, busy, and this process's own."""
        times, own = psutil.cpu_times(), self._process.cpu_times()
        parts = times._asdict()
        # A guest's time is part of the user's, and what a hypervisor took was nobody's here.
        uncounted = sum(parts.get(name, 0.0) for name in ("guest", "guest_nice", "steal"))
        everything = sum(times) - uncounted
        resting = times.idle + parts.get("iowait", 0.0)
        return everything, everything - resting, own.user + own.system


def disk_free_bytes(folder: Path) -> int:
    """What is free on the disk of a folder, which need not exist yet."""
    return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free


def memory_total_bytes() -> int:
    """This machine's memory, or this container's where it has less."""
    limits = [limit for limit, _ in cgroup_limits()]
    return min([int(psutil.virtual_memory().total), *limits])


def memory_free_bytes() -> int:
    """Memory that can be had without swapping, within the control group's limits."""
    rooms = [max(0, limit - used) for limit, used in cgroup_limits()]
    return min([int(psutil.virtual_memory().available), *rooms])


def cgroup_limits(
    membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> list[tuple[int, int]]:
    """(limit, used) in bytes of each control group (v2) above this process that has a memory limit."""
    try:
        lines = membership.read_text().splitlines()
        inner = next(line[3:] for line in lines if line.startswith("0::"))
    except (OSError, StopIteration):
        return []
    # In a container the path may name a folder of the host that is not visible here; the root then holds the limit.
    group = root / inner.strip("/")
    limits = []
    for folder in (group, *group.parents):
        with contextlib.suppress(OSError, ValueError):
            # "max", for no limit, is a ValueError too.
            limit = int((folder / "memory.max").read_text())
            limits.append((limit, _cgroup_used(folder)))
        if folder == root:
            break
    return limits


def _cgroup_used(folder: Path) -> int:
    used = int((folder / "memory.current").read_text())
    for line in (folder / "memory.stat").read_text().splitlines():
        key, _, value = line.partition(" ")
        if key == "inactive_file":  # cached file pages, given back when somebody asks for memory
            return max(0, used - int(value))
    return used


def cpu_reading(interval_s: float = 0.05) -> SensorReading:
    """The processor's temperature where the system tells it, and its utilisation over `interval_s`."""
    percent = _or_none(lambda: float(psutil.cpu_percent(interval=interval_s)))
    return SensorReading(
        temperature_c=_or_none(cpu_temperature), utilisation=None if percent is None else percent / 100
    )


def cpu_temperature() -> float | None:
    """The hottest that the processor's sensors say, or None where the system has none."""
    sensors = psutil.sensors_temperatures() if hasattr(psutil, "sensors_temperatures") else {}
    for name in _CPU_SENSORS:
        if values := [float(entry.current) for entry in sensors.get(name, ()) if entry.current]:
            return max(values)
    return None


def cpu_name() -> str:
    """The processor's name and its number of cores."""
    name = _or_none(_cpu_model) or platform.processor() or platform.machine() or "processor"
    return f"{name} ({os.cpu_count()} cores)"


def _cpu_model() -> str | None:
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, timeout=2, check=True).stdout.strip()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return None


def _or_none(question: Callable[[], T]) -> T | None:
    try:
        return question()
    except Exception as error:  # sensors fail in ways of their own on every system
        log.debug("a sensor does not answer: %s", error)
        return None
