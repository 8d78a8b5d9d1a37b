"""How much of the cores' time others took during a measurement, on a machine that is a guest among others."""

from __future__ import annotations

import psutil


class StolenTime:
    """The share of the cores' time that the hypervisor gave to others since this was made; 0 where it does not say."""

    def __init__(self) -> None:
        self._begun = psutil.cpu_times()

    @property
    def share(self) -> float:
        passed = [now - before for now, before in zip(psutil.cpu_times(), self._begun, strict=True)]
        stolen = dict(zip(self._begun._fields, passed, strict=True)).get("steal", 0.0)
        return round(float(stolen / max(sum(passed), 1e-9)), 3)
