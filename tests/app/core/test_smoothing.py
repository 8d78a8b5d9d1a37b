"""Averages and trends of measured figures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.smoothing import LinearTrend


def test_a_trend_is_unknown_until_points_differ() -> None:
    trend = LinearTrend(0.9)
    assert (trend.slope, trend.at(1)) == (None, None)
    for _ in range(5):
        trend.add(3, 0.5)
        assert (trend.slope, trend.at(1)) == (None, None)
    trend.add(5, 0.7)
    assert trend.slope == pytest.approx(0.1)


@given(st.floats(-5, 5), st.floats(-5, 5), st.lists(st.integers(1, 64), min_size=2, max_size=60))
def test_points_on_a_line_give_the_line(base: float, slope: float, places: list[int]) -> None:
    trend = LinearTrend(0.95)
    for x in places:
        trend.add(x, base + slope * x)
    if trend.slope is not None:
        assert trend.slope == pytest.approx(slope, abs=1e-6)
        assert trend.at(7) == pytest.approx(base + 7 * slope, abs=1e-4)


def test_old_points_fade() -> None:
    trend = LinearTrend(0.8)
    for x in (1, 4) * 20:
        trend.add(x, 10 * x)
    for x in (1, 4) * 20:
        trend.add(x, 2 * x)
    assert trend.slope == pytest.approx(2, abs=0.01)
