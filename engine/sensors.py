"""What the operating system and NVIDIA's driver say about the hardware. Knows no torch; never raises."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

log = logging.getLogger("shoal.device")

T = TypeVar("T")
# Where a CPU's temperature is found, by the names its drivers go by.
_CPU_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "cpu-thermal", "soc_thermal", "acpitz")


@dataclass(frozen=True)
class Reading:
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
    reading: Reading


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
    reading = Reading(
        temperature_c=celsius,
        power_w=None if milliwatts is None else milliwatts / 1000,
        utilisation=None if percent is None else percent / 100,
        others_bytes=ask(lambda: _others_bytes(nvml, handle)),
    )
    name = ask(lambda: str(nvml.nvmlDeviceGetName(handle))) or "NVIDIA card"
    total_bytes = ask(lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).total)) or 0
    return NvidiaCard(str(nvml.nvmlDeviceGetUUID(handle)), name, total_bytes, reading)


def _others_bytes(nvml: Any, handle: Any) -> int:
    # One process may appear as a compute and as a graphics process. Windows does not tell the bytes (None).
    running = nvml.nvmlDeviceGetComputeRunningProcesses(handle) + nvml.nvmlDeviceGetGraphicsRunningProcesses(handle)
    by_process = {process.pid: process.usedGpuMemory or 0 for process in running}
    by_process.pop(os.getpid(), None)
    return int(sum(by_process.values()))


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


def cpu_reading(interval_s: float = 0.05) -> Reading:
    """The processor's temperature where the system tells it, and its utilisation over `interval_s`."""
    percent = _or_none(lambda: float(psutil.cpu_percent(interval=interval_s)))
    return Reading(temperature_c=_or_none(_cpu_temperature), utilisation=None if percent is None else percent / 100)


def _cpu_temperature() -> float | None:
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
