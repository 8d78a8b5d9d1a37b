"""Training frames: what is written is read back, and no bytes raise anything but the one error."""

from __future__ import annotations

import contextlib
import cProfile
import json
import math
import struct
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.errors import RecordError
from app.core.span import Span
from app.session.frame import (
    DTYPES,
    Frame,
    HopError,
    decode_hop_error,
    header,
    is_finite,
    plain,
    root_mean_square,
    with_json,
)
from app.training import wire
from app.training.wire import HopWay, JobOrder, Kind, Pass, ReduceOrder, StatePart, StepOrder, Tally

RUN = bytes(range(16))
ORDER = JobOrder(Span(0, 2), "", "", 8, 16.0, ("q",), 0.0, 0, 0.0, 64, 4, "f32", shared=(Span(0, 2),))
numbers = st.frozensets(st.integers(0, wire.MAX_MICRO_BATCHES - 1), max_size=8)
names = st.text(st.characters(codec="ascii", categories=("L", "N")), max_size=60)
spans = st.builds(lambda start, more: Span(start, start + more), st.integers(0, 4000), st.integers(1, 4))
parts = st.builds(StatePart, st.binary(min_size=32, max_size=32), st.integers(1, wire.MAX_STATE_BYTES))
finite = st.floats(0, 1, allow_nan=False)


@st.composite
def orders(draw: st.DrawFn) -> tuple[int, JobOrder]:
    span, version = draw(spans), draw(st.integers(0, 1000))
    count = len(span) if version else 0
    order = JobOrder(
        span,
        draw(names),
        draw(names),
        draw(st.integers(1, 256)),
        draw(st.floats(0.5, 512)),
        ("q", "v"),
        draw(st.floats(0, 0.9)),
        draw(st.integers(0, 2**63)),
        draw(finite),
        draw(st.integers(1, 4096)),
        draw(st.integers(1, 256)),
        draw(st.sampled_from(sorted(DTYPES))),
        tuple(draw(parts) for _ in range(count)),
        ("a", "b"),
    )
    if draw(st.booleans()):
        runs = [Span(block, block + 1) for block in span.blocks()]
        shared = tuple(run for run in runs if draw(st.booleans()))
        numbers = draw(st.lists(st.integers(0, wire.MAX_WAYS - 1), unique=True, max_size=5))
        ways = tuple(HopWay(number, draw(st.sampled_from([span, *runs])), draw(names), "z") for number in numbers)
        order = replace(order, shared=shared, ways=ways)
    if draw(st.booleans()):
        order = replace(order, keeps=True, states=())
    if draw(st.booleans()):
        shape = draw(st.dictionaries(names, st.integers(0, 10**6), max_size=4))
        full: dict[str, Any] = {"rank": 0, "alpha": 0.0, "targets": (), "dropout": 0.0, "seed": 0, "shape": shape}
        order = replace(order, **full, optimiser=draw(st.sampled_from(wire.OPTIMISERS)))
    return version, order


def test_a_hop_that_trains_adapters_only_refuses_an_order_for_all_weights() -> None:
    full = wire.full_order({"a": 1}, blocks=2, optimiser="muon", weight_decay=0.1, rows=64, wire="f32")
    values = json.loads(bytes(wire.decode(wire.encode_open(RUN, 1, 0, full)).body))
    assert wire.decode_open(wire.decode(with_json(Kind.OPEN, RUN, 1, 0, values))) == full
    del values["shape"]  # which an older version does not know
    with pytest.raises(RecordError, match="rank"):
        wire.decode_open(wire.decode(with_json(Kind.OPEN, RUN, 1, 0, values)))
    with pytest.raises(RecordError, match="optimiser"):
        wire.decode_open(wire.decode(with_json(Kind.OPEN, RUN, 1, 0, {**values, "shape": {}, "optimiser": "sgd"})))


@given(orders(), st.integers(0, 2**32 - 1))
def test_orders_come_back(versioned: tuple[int, JobOrder], epoch: int) -> None:
    version, order = versioned
    frame = wire.decode(wire.encode_open(RUN, epoch, version, order))
    assert (frame.session, frame.epoch, frame.position, frame.kind) == (RUN, epoch, version, Kind.OPEN)
    assert wire.decode_open(frame) == order


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("shared", [[0, 2], [1, 3]]),  # one block twice
        ("shared", [[2, 9]]),
        ("shared", [[2, 2]]),
        ("shared", "all"),
        ("ways", [[0, 0, 4, "a", "b"], [0, 0, 4, "a", "b"]]),  # one number twice
        ("ways", [[wire.MAX_WAYS, 0, 4, "", ""]]),
        ("ways", [[1, 0, 5, "", ""]]),
        ("ways", [[1, 0, 3, "", ""]]),  # through half of a run
        ("ways", [[1, 0, 4, "", "a" * 129]]),
        ("ways", [[1, 0, 4, "", ""]] * 65),
        ("keep", 1),
    ],
)
def test_orders_with_wrong_ways_are_refused(field: str, value: object) -> None:
    order = JobOrder(Span(0, 4), "", "", 8, 16.0, ("q",), 0.0, 0, 0.0, 64, 4, "f32", shared=(Span(2, 4),))
    values = json.loads(bytes(wire.decode(wire.encode_open(RUN, 1, 0, order)).body))
    frame = wire.decode(with_json(Kind.OPEN, RUN, 1, 0, {**values, field: value}))
    with pytest.raises(RecordError, match=field):
        wire.decode_open(frame)


def test_an_order_with_many_ways_and_runs_is_read_in_few_steps() -> None:
    """Each way was compared with each run: 48 kB kept a node from everything else for a quarter of a second."""
    runs, ways = [[at, at + 1] for at in range(4096)], [[way, 0, 4096, "", ""] for way in range(wire.MAX_WAYS)]
    order = replace(ORDER, span=Span(0, 4096), ways=(), shared=())
    values = json.loads(wire.decode(wire.encode_open(RUN, 1, 0, order)).body.tobytes())
    frame = wire.decode(with_json(Kind.OPEN, RUN, 1, 0, {**values, "shared": runs, "ways": ways}))
    with cProfile.Profile() as profile:
        assert len(wire.decode_open(frame).ways) == wire.MAX_WAYS
    assert sum(entry.callcount for entry in profile.getstats()) < 20 * (len(runs) + len(ways))


def test_long_orders_count_as_many_frames() -> None:
    """One of 48 kB takes as long to read as a thousand small frames."""
    long = wire.decode(with_json(Kind.OPEN, RUN, 1, 0, {"states": [0] * 24_000}))
    small = wire.decode(plain(Kind.PROBE, RUN, 1))
    assert (wire.reading_cost(small), wire.reading_cost(long) > 700) == (1, True)


def test_one_way_needs_no_list() -> None:
    order = JobOrder(Span(0, 4), "a", "b", 8, 16.0, ("q",), 0.0, 0, 0.0, 64, 4, "f32")
    assert (order.way(0), order.way(1)) == (HopWay(0, Span(0, 4), "a", "b"), None)
    assert order.runs() == [Span(0, 4)]
    assert order.neighbours == {"a", "b"}
    body = bytes(wire.decode(wire.encode_open(RUN, 1, 0, order)).body)
    assert not any(name in body for name in (b"ways", b"shared", b"keep"))  # as older nodes know it


@given(st.integers(0, 70), st.lists(st.sampled_from([Span(0, 1), Span(1, 3), Span(3, 4)]), unique=True))
def test_orders_to_reduce_come_back(number: int, wanted: list[Span]) -> None:
    order = replace(
        JobOrder(Span(0, 4), "", "", 8, 16.0, ("q",), 0.0, 0, 0.0, 64, 4, "f32"),
        shared=(Span(0, 1), Span(1, 3), Span(3, 4)),
    )
    asked = ReduceOrder(number, tuple(sorted(wanted)))
    frame = wire.decode(wire.encode_reduce(RUN, 1, 7, asked))
    assert wire.decode_reduce(frame, order) == asked
    if wanted:
        with pytest.raises(RecordError, match="wanted"):
            wire.decode_reduce(frame, replace(order, shared=()))


@given(st.integers(1, 40))
def test_sums_come_back_in_slices(numbers: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "SLICE_BYTES", 16)
        data = bytes(range(4 * numbers))
        frames = [wire.decode(head + body) for head, body in wire.sums_frames(RUN, 1, 7, 3, data)]
        assert {(frame.position, frame.width) for frame in frames} == {(7, 3)}
        buffer = wire.SumsBuffer(len(data))
        for _ in range(2):  # the first slice begins anew
            *early, last = [buffer.add(frame) for frame in frames]
            assert (early, last) == ([None] * (len(frames) - 1), data)
        if len(frames) > 1:
            with pytest.raises(RecordError, match="slice"):
                wire.SumsBuffer(len(data)).add(frames[1])
            with pytest.raises(RecordError, match="slice"):
                wire.SumsBuffer(8).add(frames[0])


@pytest.mark.parametrize(("dtype", "length"), [(2, 8), (1, 0), (1, 6), (1, wire.SLICE_BYTES + 4)])
def test_slices_of_sums_are_bounded(dtype: int, length: int) -> None:
    with pytest.raises(RecordError, match="no slice of sums"):
        wire.decode(header(Kind.SUMS, RUN, 1, 0, dtype=dtype, length=length) + bytes(length))


@given(spans, st.lists(numbers, min_size=4, max_size=4), st.lists(st.floats(0, 1e300), min_size=4, max_size=4))
def test_tallies_come_back(span: Span, counted: list[frozenset[int]], norms: list[float]) -> None:
    runs = tuple((Span(block, block + 1), counted[block - span.start]) for block in span.blocks())
    tally = Tally(runs, tuple(norms[: len(span)]), (("", 7), ("12D3KooWpeer", 2**61)))
    assert wire.decode_tally(wire.decode(wire.encode_tally(RUN, 1, 7, tally)), [run for run, _ in runs]) == tally


def test_a_tally_must_be_about_the_blocks_of_its_hop() -> None:
    tally = Tally(((Span(2, 4), frozenset({0})),), (1.0, 1.0))
    frame = wire.decode(wire.encode_tally(RUN, 1, 7, tally))
    for others in ([(2, 5)], [(1, 4)], [(2, 3)], [(0, 2)], [(2, 3), (3, 4)], [(2, 4), (4, 6)], []):
        with pytest.raises(RecordError, match="tally"):
            wire.decode_tally(frame, [Span(*other) for other in others])


def test_a_tally_without_all_norms_is_refused() -> None:
    frame = wire.decode(wire.encode_tally(RUN, 1, 7, Tally(((Span(2, 4), frozenset({0})),), (1.0,))))
    with pytest.raises(RecordError, match="a norm for each block"):
        wire.decode_tally(frame, [Span(2, 4)])


@pytest.mark.parametrize(
    "sent", [[["a", -1]], [["a"]], [[1, 1]], [["a", 2**62]], [["a", 1]] * (wire.MAX_NEIGHBOURS + 1)]
)
def test_bytes_of_a_tally_are_of_peers_and_bounded(sent: object) -> None:
    values = {"counted": [[0, 1, ""]], "norms": [1.0], "sent": sent}
    with pytest.raises(RecordError, match="sent"):
        wire.decode_tally(wire.decode(with_json(Kind.TALLY, RUN, 1, 7, values)), [Span(0, 1)])


@pytest.mark.parametrize("norm", [-1.0, 1e301, True, "1", None])
def test_norms_of_a_tally_are_finite_numbers(norm: object) -> None:
    frame = wire.decode(with_json(Kind.TALLY, RUN, 1, 7, {"counted": [[0, 1, ""]], "norms": [norm]}))
    with pytest.raises(RecordError, match="norms"):
        wire.decode_tally(frame, [Span(0, 1)])


@given(finite, finite, finite, st.lists(parts, max_size=3))
def test_steps_and_parts_come_back(rate: float, scale: float, clip: float, states: list[StatePart]) -> None:
    order = StepOrder(rate, scale, clip)
    assert wire.decode_step(wire.decode(wire.encode_step(RUN, 1, 7, order))) == order
    frame = wire.decode(wire.encode_parts(Kind.KEEP, RUN, 1, 7, states, ["a"]))
    assert wire.decode_parts(frame) == (tuple(states), ("a",))


@given(
    st.sampled_from([Kind.FORWARD, Kind.BACK]),
    st.integers(0, wire.MAX_STEPS),
    st.integers(0, wire.MAX_MICRO_BATCHES - 1),
    st.integers(0, wire.MAX_ATTEMPTS - 1),
    st.integers(0, wire.MAX_WAYS - 1),
    st.tuples(st.integers(1, 5), st.integers(1, 7)),
)
def test_passes_come_back(
    kind: Kind, version: int, number: int, attempt: int, way: int, shape: tuple[int, int]
) -> None:
    sequences, length = shape
    body = bytes(range(4 * 3)) * sequences * length
    heading = Pass(version, number, attempt, way)
    frame = wire.decode(
        wire.pass_header(kind, RUN, 9, heading, dtype="f32", rows=length, width=3, length=len(body)) + body
    )
    assert (wire.pass_of(frame), wire.sequences_of(frame), bytes(frame.body)) == (heading, sequences, body)
    assert wire.length_of(frame) == length


@pytest.mark.parametrize(
    ("rows", "width", "dtype", "length"),
    [
        (4, 3, 1, 0),  # no sequence
        (4, 3, 1, 47),  # not whole sequences
        (4, 3, 1, 72),  # one and a half sequences
        (0, 3, 1, 48),
        (4, 0, 1, 48),
        (4, 3, 9, 48),  # an unknown format
        (4097, 1, 2, 2 * 4097),
    ],
)
def test_wrong_shapes_are_refused(rows: int, width: int, dtype: int, length: int) -> None:
    message = header(Kind.FORWARD, RUN, 1, 0, dtype=dtype, rows=rows, width=width, length=length) + bytes(length)
    with pytest.raises(RecordError, match="training frame"):
        wire.decode(message)


@pytest.mark.parametrize("kind", [0, 14, 17, 255])
def test_unknown_kinds_are_refused(kind: int) -> None:
    with pytest.raises(RecordError, match="not understood"):
        wire.decode(plain(kind, RUN, 1))


def test_only_some_kinds_have_a_body() -> None:
    with pytest.raises(RecordError, match="not understood"):
        wire.decode(with_json(Kind.COMMIT, RUN, 1, 0, {}))


def test_troubles_come_back() -> None:
    trouble = HopError("busy", "no memory", "train_memory")
    assert decode_hop_error(wire.decode(wire.encode_trouble(RUN, 1, 0, trouble))) == trouble


@given(st.binary(max_size=200) | st.builds(lambda kind, body: header(kind, RUN, 1, 0, length=len(body)) + body,
                                           st.sampled_from(Kind), st.binary(max_size=60)))  # fmt: skip
def test_arbitrary_bytes_raise_nothing_else(message: bytes) -> None:
    with contextlib.suppress(RecordError):
        frame = wire.decode(message)
        for read in (
            wire.decode_open,
            wire.decode_step,
            wire.decode_parts,
            decode_hop_error,
            lambda frame: wire.decode_tally(frame, [Span(0, 2)]),
            lambda frame: wire.decode_reduce(frame, ORDER),
            wire.SumsBuffer(64).add,
        ):
            with contextlib.suppress(RecordError):
                read(frame)


@pytest.mark.parametrize(
    ("dtype", "body"),
    [("f32", struct.pack("<2f", 3, -4)), ("f16", struct.pack("<2e", 3, -4)), ("bf16", b"\x40\x40\x80\xc0")],
)
def test_sizes_are_of_any_format(dtype: str, body: bytes) -> None:
    frame = Frame(RUN, 0, 0, 0, DTYPES[dtype], 1, 2, memoryview(body))
    assert root_mean_square(frame) == pytest.approx(math.sqrt(12.5))
    assert is_finite(frame)
