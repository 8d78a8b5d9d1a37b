"""The wire format `int8`: errors, repeatability, and rows that must be refused."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from app.session.frame import DTYPES, Frame, is_finite, root_mean_square, row_bytes
from app.session.wire import Kind
from engine import int8_rows
from engine.errors import SessionError
from engine.wire import to_bytes, to_tensor

WIDTH = 96  # two wide numbers
usual = st.floats(-100, 100, width=32)
finite = st.floats(-(2.0**127), 2.0**127, width=32)


def rows_of(elements: st.SearchStrategy[float], width: int = WIDTH) -> st.SearchStrategy[np.ndarray]:
    """Some rows of these numbers."""
    return st.integers(1, 4).flatmap(lambda count: arrays(np.float32, (count, width), elements=elements))


def scales(data: bytes, width: int = WIDTH) -> np.ndarray:
    """The scale of each row."""
    return np.array([struct.unpack_from("<f", data, at)[0] for at in range(0, len(data), int8_rows.row_bytes(width))])


@given(rows_of(finite) | rows_of(usual))
def test_each_number_is_off_by_half_a_scale_at_most(rows: np.ndarray) -> None:
    data = int8_rows.encode(rows)
    off = np.abs(int8_rows.decode(data, WIDTH).astype(np.float64) - rows.astype(np.float64))
    assert (off <= 0.5001 * scales(data).astype(np.float64)[:, None]).all()


@given(rows_of(usual), st.floats(0, 200, width=32), st.integers(0, WIDTH - 1))
def test_decoded_rows_are_encoded_to_the_same_bytes_again(rows: np.ndarray, times: float, index: int) -> None:
    rows[:, index] *= np.float32(times)  # an outlier
    narrow = np.sort(np.abs(rows), axis=1)[:, -1 - int8_rows.wide_count(WIDTH)]
    rows = rows[np.abs(rows).max(axis=1) <= 250 * narrow]
    data = int8_rows.encode(rows)
    assert int8_rows.encode(int8_rows.decode(data, WIDTH)) == data


@given(rows_of(usual), rows_of(usual))
def test_a_row_does_not_depend_on_those_beside_it(some: np.ndarray, others: np.ndarray) -> None:
    assert int8_rows.encode(np.concatenate((some, others))) == int8_rows.encode(some) + int8_rows.encode(others)


def test_large_numbers_do_not_take_precision_from_the_others() -> None:
    rows = np.full((1, 576), 0.5, np.float32)
    rows[0, [3, 100, 575]] = 60.0, -100.0, 7.0
    data = int8_rows.encode(rows)
    assert scales(data, 576)[0] <= 0.5 / 126
    assert np.abs(int8_rows.decode(data, 576) - rows).max() <= 0.5 / 252


@pytest.mark.parametrize("width", [1, 43, 64, 576, 4096])
def test_the_size_of_a_row(width: int) -> None:
    data = int8_rows.encode(np.ones((3, width), np.float32))
    assert len(data) == 3 * int8_rows.row_bytes(width) == 3 * row_bytes(DTYPES["int8"], width)
    assert width < 64 or int8_rows.row_bytes(width) <= 0.28 * 4 * width
    assert int8_rows.decode(data, width) == pytest.approx(1, abs=1 / 250)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_with_a_number_that_is_not_finite_is_refused_where_it_arrives(bad: float) -> None:
    rows = torch.ones(3, WIDTH)
    rows[1, 5] = bad
    data = to_bytes(rows, "int8")
    decoded = to_tensor([data], "int8", WIDTH)
    assert decoded[1].isnan().all()
    assert decoded[[0, 2]].isfinite().all()
    assert not is_finite(_frame(data))


@pytest.mark.parametrize("large", [2.0**127, float(np.finfo(np.float32).max)])
def test_no_number_is_too_large_for_whoever_passes_it_on(large: float) -> None:
    """A hop that accepts such rows, and sends what comes out, is not blamed for numbers that are refused."""
    rows = np.ones((3, WIDTH), np.float32)
    rows[0, 5], rows[1] = large, -large
    decoded = int8_rows.decode(int8_rows.encode(rows), WIDTH)
    assert np.isfinite(decoded).all()
    assert decoded[0, 5] == pytest.approx(2.0**127, rel=0.01)
    assert decoded[1] == pytest.approx(-(2.0**127), rel=0.01)
    again = to_bytes(to_tensor([memoryview(int8_rows.encode(rows))], "int8", WIDTH), "int8")
    assert is_finite(_frame(again)), "nor for the hop after that"


@pytest.mark.parametrize("scale", [0.0, -1.0, np.inf, np.nan, 1e38])
def test_a_scale_out_of_bounds_is_refused(scale: float) -> None:
    data = bytearray(int8_rows.encode(np.ones((1, WIDTH), np.float32)))
    struct.pack_into("<f", data, 0, scale)
    assert not is_finite(_frame(data))


def test_an_index_out_of_bounds_and_repeated_ones_that_overflow_are_refused() -> None:
    rows = np.ones((1, WIDTH), np.float32)
    beyond = bytearray(int8_rows.encode(rows))
    struct.pack_into("<H", beyond, 4, WIDTH)
    assert not is_finite(_frame(beyond))
    repeated = bytearray(int8_rows.encode(rows))
    struct.pack_into("<fHHbb", repeated, 0, 2.0**113, 0, 0, 127, 127)
    assert not is_finite(_frame(repeated))


@given(st.binary(min_size=int8_rows.row_bytes(WIDTH), max_size=int8_rows.row_bytes(WIDTH)))
def test_any_bytes_of_the_right_size_are_decoded_or_refused(data: bytes) -> None:
    numbers = int8_rows.decode(data, WIDTH)
    assert numbers.shape == (1, WIDTH)
    assert is_finite(_frame(data)) == bool(np.isfinite(numbers).all())


def test_the_wire_refuses_another_length() -> None:
    with pytest.raises(SessionError, match="do not make rows"):
        to_tensor([memoryview(bytes(int8_rows.row_bytes(WIDTH) - 1))], "int8", WIDTH)
    with pytest.raises(SessionError, match="unknown"):
        to_tensor([memoryview(bytes(64))], "int4", 8)


def test_the_size_of_a_frames_numbers() -> None:
    assert root_mean_square(_frame(to_bytes(torch.full((2, WIDTH), -3.0), "int8"))) == pytest.approx(3.0, rel=0.01)


def _frame(data: bytes | bytearray | memoryview) -> Frame:
    body = memoryview(bytes(data))
    return Frame(bytes(16), 1, 0, Kind.DATA, DTYPES["int8"], len(body) // int8_rows.row_bytes(WIDTH), WIDTH, body)
