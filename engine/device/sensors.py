"""Reads memory, load, temperature and power from the operating system and NVIDIA's driver (NVML), without torch.

A sensor that is missing or fails gives None or an empty list instead of an exception.
"""

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
# Names of the drivers that report a CPU's temperature, in order of preference.
_CPU_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "cpu-thermal", "soc_thermal", "acpitz")


class Unavailable(Exception):
    """This machine lacks a sensor; the message says which one."""


@dataclass(frozen=True)
class SensorReading:
    """Sensor values of a device at one moment; None if unknown."""

    temperature_c: float | None = None
    power_w: float | None = None
    utilisation: float | None = None  # 0 to 1
    others_bytes: int | None = None  # device memory that other processes hold


@dataclass(frozen=True)
class NvidiaCard:
    """An NVIDIA card as the driver reports it, even if torch cannot use it."""

    uuid: str
    name: str
    total_bytes: int
    reading: SensorReading


@dataclass(frozen=True)
class CardUse:
    """Use of a card by other processes; None if the driver does not report it or it cannot be told apart from ours."""

    uuid: str
    others_load: float | None = None  # 0 to 1
    others_bytes: int | None = None
    temperature_c: float | None = None


def nvidia_cards() -> list[NvidiaCard]:
    """Return all cards that NVIDIA's driver knows; empty if there is no driver or it does not answer."""
    cards: list[NvidiaCard] = []
    try:
        with _nvml() as nvml:
            for index in range(nvml.nvmlDeviceGetCount()):
                with contextlib.suppress(nvml.NVMLError):  # one broken card must not hide the others
                    cards.append(_card(nvml, nvml.nvmlDeviceGetHandleByIndex(index)))
    except Exception as error:
        log.debug("no answer from NVIDIA's driver: %s", error)
    return cards


def own_card_bytes(uuid: str) -> int | None:
    """Return the memory that this process holds on a card, or None if the driver does not list it there."""
    try:
        with _nvml() as nvml:
            for index in range(nvml.nvmlDeviceGetCount()):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                if uuid and uuid in str(nvml.nvmlDeviceGetUUID(handle)):
                    return _held_bytes(nvml, handle).get(os.getpid()) or None
    except Exception as error:
        log.debug("no answer from NVIDIA's driver: %s", error)
    return None


def driver_version() -> str | None:
    """Return the version of NVIDIA's driver, or None if there is none or it does not answer."""
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
        # Every query is unsupported on some card or in some virtual machine.
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
    # A process may be listed both as compute and as graphics process. On Windows the bytes are None.
    running = nvml.nvmlDeviceGetComputeRunningProcesses(handle) + nvml.nvmlDeviceGetGraphicsRunningProcesses(handle)
    return {int(process.pid): int(process.usedGpuMemory or 0) for process in running}


def card_uses(*, needs_own: bool = False) -> list[CardUse]:
    """Return the use of each card by other processes.

    Pass `needs_own=True` if this process uses a card: if it is then not in the driver's list, loads and bytes are None.
    This happens in containers, where the driver reports the host's process ids and our own work would look like that
    of another process.
    """
    try:
        with _nvml() as nvml:
            handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
            seen = not needs_own or any(os.getpid() in _held_bytes(nvml, handle) for handle in handles)
            return [_card_use(nvml, handle, seen) for handle in handles]
    except Exception as error:
        log.debug("no answer from NVIDIA's driver: %s", error)
        return []


def _card_use(nvml: Any, handle: Any, own_seen: bool) -> CardUse:
    reading = _card(nvml, handle).reading
    load = _or_none(lambda: _others_load(nvml, handle)) if own_seen else None
    others_bytes = reading.others_bytes if own_seen else None
    return CardUse(str(nvml.nvmlDeviceGetUUID(handle)), load, others_bytes, reading.temperature_c)


def _others_load(nvml: Any, handle: Any) -> float:
    """Share (0 to 1) of the card's time that other processes used in the last `_LOAD_WINDOW_S` seconds."""
    since_us = int((time.time() - _LOAD_WINDOW_S) * 10**6)
    try:
        samples = nvml.nvmlDeviceGetProcessUtilization(handle, since_us)
    except nvml.NVMLError_NotFound:  # no process used the card
        return 0.0
    newest: dict[int, tuple[int, int]] = {}
    for sample in samples:
        if sample.pid not in (0, os.getpid()):
            newest[sample.pid] = max(newest.get(sample.pid, (0, 0)), (int(sample.timeStamp), int(sample.smUtil)))
    return min(1.0, sum(percent for _, percent in newest.values()) / 100)


class ProcessorShare:
    """Measures the share of the machine's CPU time that other processes use between two calls.

    `cpu_seconds` returns CPU seconds since some moment: in all, busy, and of this process.
    """

    def __init__(self, cpu_seconds: Callable[[], tuple[float, float, float]] | None = None) -> None:
        self._cpu_seconds = cpu_seconds or machine_cpu_seconds
        self._last = self._cpu_seconds()

    def others_share(self) -> float:
        """Share (0 to 1) of CPU time that other processes used since the last call."""
        before, self._last = self._last, self._cpu_seconds()
        all_s, busy_s, own_s = (now - then for now, then in zip(self._last, before, strict=True))
        return min(1.0, max(0.0, (busy_s - own_s) / all_s)) if all_s > 0 else 0.0


def machine_cpu_seconds() -> tuple[float, float, float]:
    """Return CPU seconds of this machine since boot: in all, busy, and of this process."""
    times, own = psutil.cpu_times(), psutil.Process().cpu_times()
    parts = times._asdict()
    # Guest time is already part of user time, and stolen time was spent by the hypervisor on other machines.
    uncounted = sum(parts.get(name, 0.0) for name in ("guest", "guest_nice", "steal"))
    total = sum(times) - uncounted
    idle = times.idle + parts.get("iowait", 0.0)
    return total, total - idle, own.user + own.system


def disk_free_bytes(folder: Path) -> int:
    """Free bytes on the disk of a folder, which need not exist yet."""
    return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free


def memory_total_bytes() -> int:
    """Memory of this machine in bytes, or the container's limit if that is lower."""
    limits = [limit for limit, _ in cgroup_limits()]
    return min([int(psutil.virtual_memory().total), *limits])


def memory_free_bytes() -> int:
    """Bytes of memory available without swapping, within the limits of the control groups."""
    free = [max(0, limit - used) for limit, used in cgroup_limits()]
    return min([int(psutil.virtual_memory().available), *free])


def cgroup_limits(
    membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> list[tuple[int, int]]:
    """Return (limit, used) in bytes for each enclosing control group (v2) that has a memory limit."""
    try:
        lines = membership.read_text().splitlines()
        inner = next(line[3:] for line in lines if line.startswith("0::"))
    except (OSError, StopIteration):
        return []
    # In a container the path may be one of the host that is not visible here; the limit is then at the root.
    group = root / inner.strip("/")
    limits = []
    for folder in (group, *group.parents):
        with contextlib.suppress(OSError, ValueError):
            # "max" (no limit) also raises ValueError.
            limit = int((folder / "memory.max").read_text())
            limits.append((limit, _cgroup_used(folder)))
        if folder == root:
            break
    return limits


def _cgroup_used(folder: Path) -> int:
    used = int((folder / "memory.current").read_text())
    for line in (folder / "memory.stat").read_text().splitlines():
        key, _, value = line.partition(" ")
        if key == "inactive_file":  # cached file pages, which the kernel frees on demand
            return max(0, used - int(value))
    return used


def cpu_reading(interval_s: float = 0.05) -> SensorReading:
    """Return the processor's temperature, if known, and its utilisation over `interval_s`; blocks that long."""
    percent = _or_none(lambda: float(psutil.cpu_percent(interval=interval_s)))
    return SensorReading(
        temperature_c=_or_none(cpu_temperature), utilisation=None if percent is None else percent / 100
    )


def cpu_temperature() -> float | None:
    """Return the highest temperature of the processor's sensors in °C, or None if there are none."""
    sensors = psutil.sensors_temperatures() if hasattr(psutil, "sensors_temperatures") else {}
    for name in _CPU_SENSORS:
        if values := [float(entry.current) for entry in sensors.get(name, ()) if entry.current]:
            return max(values)
    return None


def cpu_name() -> str:
    """Return the processor's name and its number of cores."""
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
    except Exception as error:  # sensors raise different exceptions on every system
        log.debug("a sensor could not be read: %s", error)
        return None
