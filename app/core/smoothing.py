"""Exponentially weighted averages of measured figures. Pure."""

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
