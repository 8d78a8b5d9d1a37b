"""Exponentially weighted averages and trends of measured figures. Pure."""

from __future__ import annotations


class Ewma:
    """An average in which each new value weighs `share` and all earlier ones the rest; the first value is taken whole.

    `value` is 0.0 before the first value.
    """

    __slots__ = ("_known", "_share", "value")

    def __init__(self, share: float) -> None:
        assert 0 < share <= 1, "a share is above 0 and at most 1"
        self._share = share
        self._known = False
        self.value = 0.0

    def __bool__(self) -> bool:
        return self._known

    def add(self, value: float) -> float:
        """Take one more value in; returns the new average."""
        self.value = self.value + self._share * (value - self.value) if self._known else value
        self._known = True
        return self.value


class LinearTrend:
    """A line through measured points (x, y), by least squares; each point weighs `memory` times what the next does."""

    __slots__ = ("_memory", "_n", "_x", "_xx", "_xy", "_y")

    def __init__(self, memory: float) -> None:
        assert 0 < memory < 1, "a memory is between 0 and 1"
        self._memory = memory
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, x: float, y: float) -> None:
        """Take one more point in."""
        memory = self._memory
        self._n = memory * self._n + 1.0
        self._x, self._y = memory * self._x + x, memory * self._y + y
        self._xx, self._xy = memory * self._xx + x * x, memory * self._xy + x * y

    @property
    def slope(self) -> float | None:
        """Growth of y with each further x; None while all points have about the same x."""
        spread = self._n * self._xx - self._x * self._x
        if spread <= 0.01 * self._xx * self._n:
            return None
        return (self._n * self._xy - self._x * self._y) / spread

    def at(self, x: float) -> float | None:
        """The line's y at this x; None while the slope is unknown."""
        slope = self.slope
        return None if slope is None else (self._y + slope * (self._n * x - self._x)) / self._n
