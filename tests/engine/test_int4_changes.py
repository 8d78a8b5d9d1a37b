"""Rows of changes in 4 bits: errors, repeatability, size, and rows that must be refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from engine import int4_changes, int8_rows

usual = st.floats(-100, 100, width=32)
large = st.floats(-(2.0**120), 2.0**120, width=32)


def rows_of(elements: st.SearchStrategy[float]) -> st.SearchStrategy[np.ndarray]:
    """Some rows of some width."""
    shapes = st.tuples(st.integers(1, 3), st.integers(1, 70))
    return shapes.flatmap(lambda shape: arrays(np.float32, shape, elements=elements))


@given(rows_of(usual) | rows_of(large))
def test_each_number_is_off_by_little_of_the_largest_beside_it(rows: np.ndarray) -> None:
    count, width = rows.shape
    decoded = int4_changes.decode(int4_changes.encode(rows), width)
    groups = -(-width // int4_changes.GROUP)
    wide = np.zeros((2, count, groups * int4_changes.GROUP))
    wide[0, :, :width], wide[1, :, :width] = rows, decoded
    exact, found = wide.reshape(2, count, groups, int4_changes.GROUP)
    largest = np.abs(exact).max(axis=2, keepdims=True)
    # Half of a scale, which is rounded up by an eighth at most; beside a far larger group, of the least scale of a row.
    least = np.maximum(2.0**-90, np.abs(rows).max(axis=1)[:, None, None] / int4_changes.MOST * 2.0**-31)
    scale = np.maximum(largest / int4_changes.MOST, least) * 1.1251
    assert (np.abs(found - exact) <= scale / 2).all()


@given(rows_of(usual), st.integers(0, 2**32 - 1))
def test_a_row_does_not_depend_on_those_beside_it(rows: np.ndarray, seed: int) -> None:
    others = np.random.default_rng(seed).normal(size=rows.shape).astype(np.float32)
    both = int4_changes.encode(np.concatenate((rows, others)))
    assert both == int4_changes.encode(rows) + int4_changes.encode(others)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3.4e38])
def test_a_row_with_a_number_that_is_not_finite_does_not_become_finite(bad: float) -> None:
    rows = np.ones((2, 40), np.float32)
    rows[1, 20] = bad
    decoded = int4_changes.decode(int4_changes.encode(rows), 40)
    assert np.isfinite(decoded[0]).all()
    assert np.isnan(decoded[1]).all()


@given(st.binary(min_size=25, max_size=25))
def test_any_bytes_are_decoded_to_finite_numbers_or_to_nan(data: bytes) -> None:
    assert int4_changes.row_bytes(40) == 25
    row = int4_changes.decode(data, 40)[0]
    assert np.isfinite(row).all() or np.isnan(row).all()


@pytest.mark.parametrize("width", [576, 2048, 4096, 8192])
def test_they_take_about_half_of_the_bytes_of_int8(width: int) -> None:
    assert 0.5 < int4_changes.row_bytes(width) / int8_rows.row_bytes(width) < 0.53
