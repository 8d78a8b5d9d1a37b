"""The sensors: each asked in a thread of its own with a deadline, so that a broken one costs nothing but its answer.

Which there are is given from outside; `machine_sources` are those of this machine. What the answers mean for hosting
is decided in `app.courtesy.rules`.
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
from app.courtesy.idle import idle_s
from app.courtesy.rules import Readings
from engine.device import sensors
from engine.device.sensors import Unavailable

log = logging.getLogger("shoal.courtesy")

T = TypeVar("T")
PATIENCE_S = 4.0
_OF_THE_DEVICE = {"others_load", "others_bytes", "temperature_c"}
Source = Callable[[], Any]
Ask = Callable[[Source], Awaitable[Any]]


async def ask_in_thread(source: Source) -> Any:
    """The answer of one sensor, left alone when the caller is cancelled: a driver may hang for good."""
    return await trio.to_thread.run_sync(source, abandon_on_cancel=True)  # type: ignore[call-arg]


class Sensors:
    """Asks sensors by the name of the reading that they give; never raises, never hangs."""

    def __init__(self, sources: Mapping[str, Source], ask: Ask = ask_in_thread) -> None:
        self._sources, self._ask = sources, ask
        self._running: set[str] = set()  # asked, and silent since
        self.troubles: dict[str, str] = {}  # of those asked last: why one did not say anything

    async def read(self, wanted: Collection[str], now: datetime) -> Readings:
        """What these sensors say; those that do not are None, and `troubles` says why."""
        answers: dict[str, Any] = {}
        asked = {*wanted, "device"} if _OF_THE_DEVICE & set(wanted) else set(wanted)
        names = [name for name in self._sources if name in asked]
        self.troubles = {name: text for name, text in self.troubles.items() if name in names}
        async with trio.open_nursery() as nursery:
            for name in names:
                nursery.start_soon(self._read_one, name, answers)
        return Readings(now=now, **answers)

    async def _read_one(self, name: str, answers: dict[str, Any]) -> None:
        if name in self._running:
            return  # one silent thread for each sensor is enough
        with trio.move_on_after(PATIENCE_S) as patience:
            try:
                answers[name] = await self._ask(self._guarded(name))
                self.troubles.pop(name, None)
            except Unavailable as error:
                self.troubles[name] = str(error)
            except Exception as error:  # sensors fail in ways of their own on every system
                self._complain(name, f"its sensor failed: {type(error).__name__}: {error}")
        if patience.cancelled_caught:
            self._complain(name, "its sensor does not answer")

    def _guarded(self, name: str) -> Source:
        source = self._sources[name]

        def ask() -> Any:
            self._running.add(name)
            try:
                return source()
            finally:
                self._running.discard(name)

        return ask

    def _complain(self, name: str, text: str) -> None:
        if self.troubles.get(name) != text:
            log.warning("%s: %s", name, text)
        self.troubles[name] = text


# --- this machine's ---------------------------------------------------------------------------------------------------


def machine_sources(device: Callable[[], str | None], disk: Path) -> dict[str, Source]:
    """The sensors of this machine, for what computes on `device` and is stored in `disk`."""
    processor = sensors.ProcessorShare()

    def others_load() -> float:
        card = _card(device())
        return processor.others_share() if card is None else _said(card.others_load, "the driver tells no GPU shares")

    def others_bytes() -> int:
        card = _card(device())
        return _said(None if card is None else card.others_bytes, "only NVIDIA's driver tells what others hold")

    def temperature_c() -> float:
        card = _card(device())
        reading = sensors.cpu_temperature() if card is None else card.temperature_c
        return _said(reading, "this system tells no temperature")

    return {
        "device": lambda: "processor" if _card(device()) is None else "GPU",
        "others_load": others_load,
        "others_bytes": others_bytes,
        "idle_s": idle_s,
        "on_battery": on_battery,
        "temperature_c": temperature_c,
        "programs": running_programs,
        "disk_free_bytes": lambda: sensors.disk_free_bytes(disk),
    }


def on_battery() -> bool:
    """Whether the machine runs on its battery now."""
    probe = getattr(psutil, "sensors_battery", None)  # not on every system
    battery = probe() if probe is not None else None
    plugged = _said(None if battery is None else battery.power_plugged, "this machine has no battery that it tells of")
    return not plugged


def running_programs() -> frozenset[str]:
    """The names of all processes, as rules compare them."""
    names = set()
    for process in psutil.process_iter(["name"]):
        name = process.info["name"]
        if name and name.isprintable() and name.strip():
            names.add(program_name(name))
    return frozenset(names)


def _card(device: str | None) -> sensors.CardUse | None:
    """The card behind a device, or None for the processor; before a device is chosen, the busiest card."""
    if device is not None and not device.startswith("cuda"):
        return None
    cards = sensors.card_uses(needs_own=_has_context())
    if not cards:
        return None
    chosen = [card for card in cards if device is not None and _uuid(device) in card.uuid] or cards
    return max(chosen, key=lambda card: (card.others_load or 0.0, card.others_bytes or 0))


def _uuid(device: str) -> str:
    """The card's own name, which joins torch's numbers with the driver's; empty, which fits all, where none tells."""
    torch = sys.modules.get("torch")  # whoever hosts on a card has loaded it
    if torch is None or not torch.cuda.is_initialized():
        return ""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))


def _has_context() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def _said(value: T | None, otherwise: str) -> T:
    if value is None:
        raise Unavailable(otherwise)
    return value
