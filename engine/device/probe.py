"""Lists the devices of this machine that can run blocks: kind, name, total and free memory, sensor readings.

It asks torch and `engine.device.sensors`. `engine.device.dtypes` measures the best dtype of a device; `engine.budget`
and the caller decide how much of a device to use.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from engine.device import sensors
from engine.device.kinds import KINDS, UNTESTED, Kind
from engine.device.sensors import NvidiaCard, SensorReading
from engine.errors import DeviceError

log = logging.getLogger("shoal.device")


@dataclass(frozen=True)
class Device:
    """State of one device at one moment; `id` is the name that torch and `--device` use.

    If it is not `usable`, `note` says why and what to do.
    """

    id: str
    kind: Kind
    name: str
    total_bytes: int
    free_bytes: int
    temperature_c: float | None = None
    power_w: float | None = None
    utilisation: float | None = None  # 0 to 1
    others_bytes: int | None = None  # device memory that other processes hold
    context_bytes: int = 0  # device memory that this process holds besides its tensors: the driver's context
    usable: bool = True
    note: str = ""


Prober = Callable[[], list[Device]]
_fewest_bytes: dict[str, int] = {}  # of this process's context on each card


def probe_devices(probers: Sequence[Prober] | None = None) -> list[Device]:
    """Return all devices, GPUs first and the CPU last; a driver that fails is reported in the CPU's note."""
    devices: list[Device] = []
    failures: list[str] = []
    for prober in (probe_cuda, probe_xpu, probe_mps) if probers is None else probers:
        try:
            devices += prober()
        except Exception as error:  # drivers raise exceptions of any type
            log.debug("a device probe failed", exc_info=True)
            failures.append(f"{prober.__name__} failed: {first_line(error)}")
    return [*devices, probe_cpu(note="; ".join(failures))]


def find_device(name: str | None, devices: Sequence[Device]) -> Device:
    """Return the device called `name` (an index may be left out), or the first usable one if `name` is None.

    Raises `DeviceError` if it is unknown or cannot be used.
    """
    for device in devices:
        if device.usable and (name is None or device.id == name or device.id == f"{name}:0"):
            return device
    unusable = next((device for device in devices if device.id in (name, f"{name}:0")), None)
    if unusable is not None:
        raise DeviceError(f"device {unusable.id} ({unusable.name}) cannot be used: {unusable.note}")
    known = ", ".join(device.id for device in devices if device.usable)
    raise DeviceError(f"this machine has no device {name!r}; choose one of {known}")


def chosen_devices(names: str | None, devices: Sequence[Device]) -> list[Device]:
    """Return the devices to use, the preferred one first; raises `DeviceError` if one is unknown or not usable.

    Without names, all GPUs of one kind, those with the most free memory first: as many of them are used as the model
    needs. Devices that are named are all used; one that is named twice counts as two, each with half of its memory.
    """
    if names is None:
        best = find_device(None, devices)
        alike = [device for device in devices if device.usable and device.kind == best.kind]
        return sorted(alike, key=lambda device: -device.free_bytes)
    found = [find_device(name.strip(), devices) for name in names.split(",")]
    return [
        replace(
            device,
            total_bytes=device.total_bytes // found.count(device),
            free_bytes=device.free_bytes // found.count(device),
        )
        for device in found
    ]


def free_memory_bytes(device: str) -> int:
    """Return the free memory of a device now; quick enough to ask every second. Raises `DeviceError`."""
    kind, _, index = device.partition(":")
    try:
        if kind == "cuda":
            return int(torch.cuda.mem_get_info(int(index or 0))[0])
        if kind == "xpu":
            return _xpu_free_bytes(int(index or 0))
        if kind == "mps":
            return _mps_free_bytes()
    except Exception as error:  # drivers raise exceptions of any type
        raise DeviceError(f"the free memory of {device} cannot be read: {first_line(error)}") from error
    return sensors.memory_free_bytes()


def probe_cuda() -> list[Device]:
    """Return the CUDA or ROCm devices (torch uses the same names), also NVIDIA cards that torch cannot use."""
    cards = sensors.nvidia_cards()
    with warnings.catch_warnings(record=True) as warned:  # torch warns why it cannot use a card
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if not available:
        note = _why_no_cuda([str(warning.message) for warning in warned])
        return [_unusable(index, card, note) for index, card in enumerate(cards)]
    return [_cuda_device(index, cards) for index in range(torch.cuda.device_count())]


def _cuda_device(index: int, cards: Sequence[NvidiaCard]) -> Device:
    kind: Kind = "rocm" if torch.version.hip else "cuda"
    try:
        properties = torch.cuda.get_device_properties(index)
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    except Exception as error:
        return Device(f"cuda:{index}", kind, "unknown card", 0, 0, usable=False, note=first_line(error))
    # Torch numbers the visible cards by speed, the driver numbers all cards by slot: they are matched by UUID.
    uuid = str(getattr(properties, "uuid", ""))
    reading = next((card.reading for card in cards if uuid and uuid in card.uuid), SensorReading())
    name = str(properties.name)
    context_bytes = _context_bytes(index, uuid, KINDS[kind].context_bytes)
    return Device(
        f"cuda:{index}",
        kind,
        name,
        total_bytes,
        free_bytes,
        **asdict(reading),
        context_bytes=context_bytes,
        note=_note(kind),
    )


def _context_bytes(index: int, uuid: str, typical_bytes: int) -> int:
    """Bytes that the driver's context of this process takes on a card; asking torch for its memory created it.

    The fewest that were seen: later the libraries are there as well, for which plans have memory of their own.
    """
    own_bytes = sensors.own_card_bytes(uuid)
    if own_bytes is None:  # in some containers a process cannot find itself in the driver's list
        return typical_bytes
    seen = max(0, own_bytes - int(torch.cuda.memory_reserved(index)))
    _fewest_bytes[uuid] = min(seen, _fewest_bytes.get(uuid, seen))
    return _fewest_bytes[uuid]


def _unusable(index: int, card: NvidiaCard, note: str) -> Device:
    reading = asdict(card.reading)
    return Device(f"cuda:{index}", "cuda", card.name, card.total_bytes, 0, **reading, usable=False, note=note)


def _why_no_cuda(warned: Sequence[str]) -> str:
    if torch.version.cuda is None:
        return f"the installed torch ({torch.__version__}) is built without CUDA: install the CUDA build of torch"
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "the environment variable CUDA_VISIBLE_DEVICES hides it: unset it"
    if warned:
        return f"torch says: {warned[-1].splitlines()[0]}"
    return f"torch's CUDA {torch.version.cuda} does not run on this driver: update the NVIDIA driver"


def probe_xpu() -> list[Device]:
    """Return the Intel GPUs."""
    if not torch.xpu.is_available():
        return []
    devices = []
    for index in range(torch.xpu.device_count()):
        properties = torch.xpu.get_device_properties(index)
        total_bytes = int(properties.total_memory)
        free = _xpu_free_bytes(index)
        devices.append(Device(f"xpu:{index}", "xpu", str(properties.name), total_bytes, free, note=_note("xpu")))
    return devices


def _xpu_free_bytes(index: int) -> int:
    try:
        return int(torch.xpu.mem_get_info(index)[0])
    except Exception:  # some drivers do not report it; subtract at least what this process uses
        total_bytes = int(torch.xpu.get_device_properties(index).total_memory)
        return total_bytes - int(torch.xpu.memory_reserved(index))


def probe_mps() -> list[Device]:
    """Return Apple's GPU, which shares the machine's memory, if there is one."""
    if not torch.backends.mps.is_available():
        return []
    total_bytes = int(torch.mps.recommended_max_memory())
    name = f"{sensors.cpu_name()} GPU"
    return [Device("mps", "mps", name, total_bytes, _mps_free_bytes(), note=_note("mps"))]


def _mps_free_bytes() -> int:
    own_free_bytes = int(torch.mps.recommended_max_memory()) - int(torch.mps.driver_allocated_memory())
    return max(0, min(own_free_bytes, sensors.memory_free_bytes()))


def _note(kind: Kind) -> str:
    return "" if KINDS[kind].tried else UNTESTED


def probe_cpu(note: str = "") -> Device:
    """Return the processor, with the machine's memory."""
    total_bytes, free_bytes = sensors.memory_total_bytes(), sensors.memory_free_bytes()
    name, reading = sensors.cpu_name(), sensors.cpu_reading()
    return Device("cpu", "cpu", name, total_bytes, free_bytes, **asdict(reading), note=note)


def is_memory_full(error: BaseException) -> bool:
    """True if torch says that memory is full; that of a CPU or a Mac has no error of its own."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error) if isinstance(error, RuntimeError) else ""
    return "DefaultCPUAllocator" in text or "out of memory" in text


def first_line(error: BaseException) -> str:
    """Return the first line of a driver's error message, or the exception's type if it has no text."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
