"""Reads the sensors, each in its own thread with a deadline, so that a broken one costs only its own reading.

The sources are passed in; `machine_sources` returns those of this machine. What readings mean for hosting is decided in
`app.courtesy.rules`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Awaitable, Callable, Collection, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import psutil
import trio

from app.config.settings import program_name
from app.courtesy.full_screen import full_screen
from app.courtesy.idle import idle_s
from app.courtesy.rules import Readings
from engine.device import sensors
from engine.device.sensors import Unavailable

log = logging.getLogger("shoal.courtesy")

T = TypeVar("T")
TIMEOUT_S = 4.0  # for one reading
_NEEDS_DEVICE = {"others_load", "others_bytes", "temperature_c"}
Source = Callable[[], Any]
Ask = Callable[[Source], Awaitable[Any]]


async def ask_in_thread(source: Source) -> Any:
    """Read one sensor in a thread, which is abandoned on cancellation: a driver may hang forever."""
    return await trio.to_thread.run_sync(source, abandon_on_cancel=True)  # type: ignore[call-arg]


class Sensors:
    """Reads sensors by the name of their field in `Readings`; never raises, never hangs."""

    def __init__(self, sources: Mapping[str, Source], ask: Ask = ask_in_thread) -> None:
        self._sources, self._ask = sources, ask
        self._running: set[str] = set()  # names whose thread has not returned yet
        self.troubles: dict[str, str] = {}  # why sensors of the last `read` gave nothing

    async def read(self, wanted: Collection[str], now: datetime) -> Readings:
        """Read these sensors; those that give nothing are None, and `troubles` says why."""
        answers: dict[str, Any] = {}
        asked = {*wanted, "device"} if _NEEDS_DEVICE & set(wanted) else set(wanted)
        names = [name for name in self._sources if name in asked]
        self.troubles = {name: text for name, text in self.troubles.items() if name in names}
        async with trio.open_nursery() as nursery:
            for name in names:
                nursery.start_soon(self._read_one, name, answers)
        return Readings(now=now, **answers)

    async def _read_one(self, name: str, answers: dict[str, Any]) -> None:
        if name in self._running:
            return  # its last thread still hangs; do not start another
        with trio.move_on_after(TIMEOUT_S) as deadline:
            try:
                answers[name] = await self._ask(self._guarded(name))
                self.troubles.pop(name, None)
            except Unavailable as error:
                self.troubles[name] = str(error)
            except Exception as error:  # sensors raise different errors on every system
                self._record_trouble(name, f"its sensor failed: {error}")
        if deadline.cancelled_caught:
            self._record_trouble(name, f"its sensor did not answer within {TIMEOUT_S:.0f} s")

    def _guarded(self, name: str) -> Source:
        source = self._sources[name]

        def ask() -> Any:
            self._running.add(name)
            try:
                return source()
            finally:
                self._running.discard(name)

        return ask

    def _record_trouble(self, name: str, text: str) -> None:
        if self.troubles.get(name) != text:
            log.warning("%s: %s", name, text)
        self.troubles[name] = text


# --- sensors of this machine ------------------------------------------------------------------------------------------


def machine_sources(
    device: Callable[[], str | None], disk: Path, unused_s: Callable[[], float | None] = lambda: None
) -> dict[str, Source]:
    """Return the sensors of this machine, for the device that computes and the disk that stores.

    `unused_s` gives the seconds since the blocks were used; None outside of a node.
    """
    processor = sensors.ProcessorShare()

    def others_load() -> float:
        card = _card(device())
        if card is None:
            return processor.others_share()
        return _require(card.others_load, "the driver does not report other programs' use")

    def others_bytes() -> int:
        card = _card(device())
        held = None if card is None else card.others_bytes
        return _require(held, "only NVIDIA's driver reports other programs' memory")

    def temperature_c() -> float:
        card = _card(device())
        reading = sensors.cpu_temperature() if card is None else card.temperature_c
        return _require(reading, "this system reports no temperature")

    return {
        "device": lambda: "processor" if _card(device()) is None else "GPU",
        "others_load": others_load,
        "others_bytes": others_bytes,
        "idle_s": idle_s,
        "on_battery": on_battery,
        "temperature_c": temperature_c,
        "programs": running_programs,
        "disk_free_bytes": lambda: sensors.disk_free_bytes(disk),
        "full_screen": full_screen,
        "unused_s": lambda: _require(unused_s(), "only a running node knows"),
    }


def on_battery() -> bool:
    """True if the machine runs on its battery; raises `Unavailable` if it reports none."""
    probe = getattr(psutil, "sensors_battery", None)  # not on every system
    battery = probe() if probe is not None else None
    plugged = _require(None if battery is None else battery.power_plugged, "no battery found")
    return not plugged


def running_programs() -> frozenset[str]:
    """Names of all processes, in the form that rules compare."""
    names = set()
    for process in psutil.process_iter(["name"]):
        name = process.info["name"]
        if name and name.isprintable() and name.strip():
            names.add(program_name(name))
    return frozenset(names)


def _card(device: str | None) -> sensors.CardUse | None:
    """Return the card of a device, or None for the processor; before a device is chosen, the busiest card."""
    if device is not None and not device.startswith("cuda"):
        return None
    cards = sensors.card_uses(needs_own=_has_context())
    if not cards:
        return None
    chosen = [card for card in cards if device is not None and _uuid(device) in card.uuid] or cards
    return max(chosen, key=lambda card: (card.others_load or 0.0, card.others_bytes or 0))


def _uuid(device: str) -> str:
    """Return the card's UUID, which links torch's device numbers to the driver's; empty (matches all) if unknown."""
    torch = sys.modules.get("torch")  # already imported if this process hosts on a card
    if torch is None or not torch.cuda.is_initialized():
        return ""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))


def _has_context() -> bool:
    """True if this process uses CUDA, so that its own share must be subtracted."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def _require(value: T | None, otherwise: str) -> T:
    if value is None:
        raise Unavailable(otherwise)
    return value
