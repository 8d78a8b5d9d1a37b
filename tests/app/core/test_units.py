"""Sizes as people write and read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.units import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("6GB", 6 * 10**9),
        ("6gb", 6 * 10**9),
        (" 6 GiB ", 6 * 2**30),
        ("6G", 6 * 10**9),
        ("1.5GB", 1_500_000_000),
        ("0.5kib", 512),
        ("0", 0),
        ("123", 123),
        ("12B", 12),
        ("900719925474099GB", 900719925474099 * 10**9),
        ("2TB", 2 * 10**12),
    ],
)
def test_parse(text: str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "6XB", "six", "1e9", "nan", "6IB", "٣GB", "1.GB", "9" * 99])
def test_nonsense_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size; write it like 6GB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("size_bytes", "expected"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_949, "999.9 kB"), (999_950, "1.0 MB"), (10**16, "10000.0 TB")],
)
def test_format(size_bytes: int, expected: str) -> None:
    assert format_size(size_bytes) == expected


@given(st.integers(0, 10**15 - 1))
def test_what_is_shown_reads_back_within_its_digits(size_bytes: int) -> None:
    assert abs(parse_size(format_size(size_bytes)) - size_bytes) <= 0.0501 * size_bytes
