"""The checks behind `shoal doctor`: facts in, one line each out, ok / warn / fail with the mend.

Each check is a pure function of what was measured. `examine_machine` measures this machine and runs them; what
concerns the network is measured elsewhere and adds its own checks.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from app.core.units import format_size
from app.snapshot.views import RuleView
from engine.budget import Allowance, Precision, default_headroom, plan_blocks
from engine.config import ModelConfig

if TYPE_CHECKING:  # importing it loads torch, which may be what is broken
    from engine.device.probe import Device

Status = Literal["ok", "warn", "fail"]
GB = 10**9
HOT_C = 87.0  # consumer cards throttle from about here
_ON_BY_DEFAULT = ("pause_on_battery", "disk_floor")  # a machine without a battery needs no rule about it
CROWDED = 0.2  # of a device's memory held by other programs


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str
    status: Status
    detail: str
    mend: str = ""


def check_python(version: tuple[int, ...], text: str) -> Check:
    """Whether this Python is one that Shoal is made for."""
    if (3, 11) <= version[:2] <= (3, 13):
        return Check("python", "ok", text)
    return Check("python", "warn", f"{text} is untried", "use Python 3.11, 3.12 or 3.13")


def check_torch(version: str | None, trouble: str = "") -> Check:
    """Whether torch can be imported at all."""
    if version is None:
        return Check("torch", "fail", f"cannot be imported: {trouble}", "run `make clean setup`, or reinstall torch")
    return Check("torch", "ok", version)


def check_driver(version: str | None, cards: int) -> Check:
    """NVIDIA's driver, where there is one."""
    if version is None:
        return Check("driver", "ok", "no driver of NVIDIA's answers; other devices bring their own")
    return Check("driver", "ok", f"NVIDIA {version}, {cards} card{'s' * (cards != 1)}")


def check_settings(path: Path, unknown: Sequence[str], trouble: str = "") -> Check:
    """Whether the configuration file is understood."""
    if trouble:
        return Check("settings", "fail", trouble, "mend the file, or move it away to begin anew")
    if unknown:
        mend = f"`shoal config list` shows what there is; take the lines out of {path}"
        return Check("settings", "warn", f"there is no setting {', '.join(unknown)}", mend)
    return Check("settings", "ok", str(path) if path.exists() else f"{path} is not there yet: all is as by default")


def check_sensor(rule: RuleView, setting: str) -> Check:
    """Whether a courtesy rule has the sensor that it needs."""
    name = f"rule {setting}"
    if rule.available and not rule.enabled:
        return Check(name, "ok", "off; its sensor answers")
    if rule.available:
        return Check(name, "ok", f"on{', and applies now' * rule.applies}; {rule.text}")
    if rule.enabled and setting not in _ON_BY_DEFAULT:
        return Check(name, "warn", f"on, but {rule.text}", f"it cannot pause this node: `shoal config unset {setting}`")
    return Check(name, "ok", f"cannot be used here: {rule.text}")


def check_device(device: Device) -> Check:
    """A device, its memory and its state."""
    facts = [f"{device.name}: {format_size(device.free_bytes)} of {format_size(device.total_bytes)} free"]
    if device.utilisation is not None:
        facts.append(f"{device.utilisation:.0%} busy")
    if device.temperature_c is not None:
        facts.append(f"{device.temperature_c:.0f} °C")
    if device.power_w is not None:
        facts.append(f"{device.power_w:.0f} W")
    if device.others_bytes:
        facts.append(f"{format_size(device.others_bytes)} held by other programs")
    detail = ", ".join(facts)
    if not device.usable:
        return Check(device.id, "warn", f"{device.name} cannot be used", device.note)
    if device.note:
        return Check(device.id, "warn", detail, device.note)
    if device.temperature_c is not None and device.temperature_c >= HOT_C:
        return Check(device.id, "warn", detail, "it is hot and will slow down: improve its cooling or lower its load")
    if device.others_bytes and device.others_bytes > CROWDED * device.total_bytes:
        return Check(device.id, "warn", detail, "close the programs that hold its memory to host more blocks")
    return Check(device.id, "ok", detail)


def check_format(device_id: str, chosen: str, seconds: Mapping[str, float]) -> Check:
    """The number format a device computes in, with the timings that chose it."""
    timings = ", ".join(f"{name} {value * 1000:.2g} ms" for name, value in seconds.items())
    return Check(f"{device_id} format", "ok", f"{chosen}, by measurement ({timings})")


def check_disk(folder: Path, free_bytes: int, *, writable: bool) -> Check:
    """Whether weights can be kept."""
    detail = f"{format_size(free_bytes)} free for weights in {folder}"
    if not writable:
        return Check("disk", "fail", f"{folder} cannot be written", "change its owner or mode, or set SHOAL_CACHE")
    if free_bytes < GB:
        return Check("disk", "warn", detail, "free some space, or set SHOAL_CACHE to a folder on another disk")
    return Check("disk", "ok", detail)


def check_model(label: str, config: ModelConfig, device: Device, precision: Precision, cap_bytes: int | None) -> Check:
    """How many of a model's blocks a device can host."""
    headroom = default_headroom(device.kind, device.total_bytes)
    budget = plan_blocks(config, Allowance(device.free_bytes, headroom, cap_bytes), precision)
    name = f"{device.id} hosts"
    if budget.blocks == 0:
        mend = "free memory on the device or choose a smaller model; without blocks this node is a client"
        return Check(name, "warn", f"none of the {config.n_blocks} blocks of {label}: {budget.reason}", mend)
    size = format_size(budget.weight_bytes_per_block)
    room = f"{size} a block, {format_size(budget.kv_bytes)} for the cache of {budget.kv_tokens} tokens"
    return Check(name, "ok", f"{budget.blocks} of {config.n_blocks} blocks of {label} ({room})")


def disk_of(folder: Path) -> Check:
    """The disk check of a folder that need not exist yet."""
    present = next(path for path in (folder, *folder.parents) if path.exists())
    return check_disk(folder, shutil.disk_usage(present).free, writable=os.access(present, os.W_OK | os.X_OK))


def examine_machine(devices: list[Device], models: Mapping[str, ModelConfig], cap_bytes: int | None) -> Iterator[Check]:
    """The checks of these devices, and of each model on each of them."""
    from engine.device.dtypes import pick_dtype

    for device in devices:
        yield check_device(device)
        if not device.usable:
            continue
        choice = pick_dtype(device.id)
        seconds = {str(dtype).removeprefix("torch."): value for dtype, value in choice.seconds.items()}
        yield check_format(device.id, str(choice.dtype).removeprefix("torch."), seconds)
        precision = Precision(choice.dtype.itemsize, choice.dtype.itemsize)
        for label, config in models.items():
            yield check_model(label, config, device, precision, cap_bytes)
