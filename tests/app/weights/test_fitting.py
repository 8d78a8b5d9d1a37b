"""Which blocks of a span a disk has room for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.span import Span
from app.weights.model_weights import longest_run


@pytest.mark.parametrize(
    ("sizes", "most", "run"),
    [
        ([5, 5, 5, 5], 10, Span(8, 10)),
        ([5, 5, 0, 0], 4, Span(10, 12)),  # those that are here
        ([5, 5, 0, 5], 5, Span(9, 11)),
        ([5, 4, 4, 5], 9, Span(9, 11)),  # of two as long, the smaller
        ([5, 5], 4, None),
        ([], 4, None),
    ],
)
def test_the_longest_run_that_fits(sizes: list[int], most: int, run: Span | None) -> None:
    assert longest_run(8, sizes, most) == run


@given(st.lists(st.integers(0, 9), max_size=8), st.integers(0, 30))
def test_no_longer_run_fits(sizes: list[int], most: int) -> None:
    fits = [
        stop - start for start in range(len(sizes)) for stop in range(start + 1, len(sizes) + 1)
        if sum(sizes[start:stop]) <= most
    ]  # fmt: skip
    found = longest_run(0, sizes, most)
    assert (0 if found is None else len(found)) == max(fits, default=0)
    assert found is None or sum(sizes[found.start : found.stop]) <= most
