"""Session frames: what is written is read back, and no bytes raise anything but the one error."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.canonical_json import canonical
from app.core.errors import RecordError
from app.core.span import Span
from app.session.adapter_index import MAX_INDEX_BYTES, AdapterRef
from app.session.frame import HEADER_BYTES, MAX_WIDTH, HopError, decode_hop_error, header, plain
from app.session.wire import (
    KEEP,
    MAX_TOKENS,
    CacheGrant,
    EpochOrder,
    Kind,
    Prefix,
    decode,
    decode_give,
    decode_turn,
    encode_give,
    encode_hop_error,
    encode_turn,
)

SESSION = bytes(range(16))
peers = st.text(st.characters(codec="ascii", categories=("L", "N")), max_size=60)
tokens = st.integers(0, MAX_TOKENS)
grants = st.builds(CacheGrant, peers, st.integers(1, 64))
turns = st.builds(
    EpochOrder,
    st.builds(lambda start, more: Span(start, start + more), st.integers(0, 4000), st.integers(1, 90)),
    peers,
    peers,
    st.integers(64, MAX_TOKENS),
    tokens,
    st.none() | tokens,
    st.booleans(),
    st.sampled_from(["", "f32", "bf16", "f16", "int8"]),
    st.none() | st.builds(Prefix, st.binary(min_size=16, max_size=16), st.integers(1, MAX_TOKENS), st.booleans()),
    st.none() | st.builds(AdapterRef, st.binary(min_size=32, max_size=32), st.integers(1, MAX_INDEX_BYTES)),
    st.none() | grants,
)


def read_all(message: bytes) -> None:
    frame = decode(message)
    if frame.kind == Kind.TURN:
        decode_turn(frame)
    elif frame.kind == Kind.TROUBLE:
        decode_hop_error(frame)
    elif frame.kind == Kind.GIVE:
        decode_give(frame)


@given(turns, st.integers(0, 2**32 - 1), st.sampled_from([0, 7, KEEP]))
def test_turns_come_back(turn: EpochOrder, epoch: int, cut_to: int) -> None:
    frame = decode(encode_turn(SESSION, epoch, cut_to, turn))
    assert (frame.session, frame.epoch, frame.position, frame.kind) == (SESSION, epoch, cut_to, Kind.TURN)
    assert decode_turn(frame) == turn


@pytest.mark.parametrize(
    ("field", "value"),
    [("from", "00"), ("from", "zz" * 16), ("from", 7), ("share", 0), ("share", -1), ("share", 2**40), ("take", 1)],
)
def test_a_prefix_out_of_bounds_is_refused(field: str, value: object) -> None:
    turn = EpochOrder(Span(0, 4), "", "", 16, 0, prefix=Prefix(SESSION, 3, True))
    values = json.loads(bytes(decode(encode_turn(SESSION, 1, KEEP, turn)).body)) | {field: value}
    body = canonical(values)
    with pytest.raises(RecordError, match=field):
        decode_turn(decode(header(Kind.TURN, SESSION, 1, KEEP, length=len(body)) + body))


@pytest.mark.parametrize(
    ("field", "value"),
    [("adapter", "00"), ("adapter", "zz" * 32), ("adapter", None), ("index", 0), ("index", 2**40), ("index", "9")],
)
def test_an_adapter_out_of_bounds_is_refused(field: str, value: object) -> None:
    turn = EpochOrder(Span(0, 4), "", "", 16, 0, adapter=AdapterRef(bytes(32), 9))
    body = canonical(json.loads(bytes(decode(encode_turn(SESSION, 1, KEEP, turn)).body)) | {field: value})
    with pytest.raises(RecordError, match=field):
        decode_turn(decode(header(Kind.TURN, SESSION, 1, KEEP, length=len(body)) + body))


def test_an_order_with_everything_fits_its_frame() -> None:
    """Hops refuse a longer one, so no field may be as long as the others leave room for."""
    turn = EpochOrder(
        Span(3999, 4000), "p" * 128, "q" * 128, MAX_TOKENS, MAX_TOKENS, MAX_TOKENS, True, "bf16",
        Prefix(SESSION, MAX_TOKENS, True), AdapterRef(bytes(32), MAX_INDEX_BYTES),
    )  # fmt: skip
    assert decode_turn(decode(encode_turn(SESSION, 2**32 - 1, KEEP, turn))) == turn


@given(grants)
def test_grants_come_back(grant: CacheGrant) -> None:
    frame = decode(encode_give(SESSION, 3, grant))
    assert (frame.session, frame.epoch, frame.kind) == (SESSION, 3, Kind.GIVE)
    assert decode_give(frame) == grant


@pytest.mark.parametrize(
    "cache",
    [7, None, [], {}, {"peer": "a"}, {"peer": "a", "tokens": 0}, {"peer": "a", "tokens": 17}, {"peer": 7, "tokens": 1}],
)
def test_a_cache_out_of_bounds_is_refused(cache: object) -> None:
    turn = EpochOrder(Span(0, 4), "", "", 16, 0)
    body = canonical(json.loads(bytes(decode(encode_turn(SESSION, 1, KEEP, turn)).body)) | {"cache": cache})
    with pytest.raises(RecordError):
        decode_turn(decode(header(Kind.TURN, SESSION, 1, KEEP, length=len(body)) + body))


@given(st.integers(1, 5), st.integers(1, 9), st.sampled_from([(1, 4), (2, 2), (3, 2)]), st.integers(0, 2**20))
def test_data_comes_back(rows: int, width: int, format: tuple[int, int], position: int) -> None:
    dtype, item_bytes = format
    body = bytes(range(rows * width * item_bytes))
    head = header(Kind.DATA, SESSION, 3, position, dtype=dtype, rows=rows, width=width, length=len(body))
    frame = decode(head + body)
    assert (frame.position, frame.rows, frame.width, frame.dtype, bytes(frame.body)) == (
        position, rows, width, dtype, body,
    )  # fmt: skip


def test_trouble_comes_back_in_bounds_and_printable() -> None:
    frame = decode(encode_hop_error(SESSION, 1, 5, HopError("busy", "full \x1b[31m" + "x" * 1000)))
    trouble = decode_hop_error(frame)
    assert trouble.code == "busy"
    assert trouble.text.startswith("full  [31mxx")
    assert len(trouble.text) == 400


@pytest.mark.parametrize("trouble", [HopError("\x1b]0;owned\x07", ""), HopError("busy", "", "\x1b[2J")])
def test_the_codes_of_a_trouble_are_printable_or_refused(trouble: HopError) -> None:
    """Whoever knows no text for a code shows the code itself, to the owner of a job for example."""
    with pytest.raises(RecordError, match="printable"):
        decode_hop_error(decode(encode_hop_error(SESSION, 1, 5, trouble)))


def test_a_long_trouble_in_any_script_is_understood() -> None:
    """It was longer than a frame's JSON may be, and cost the hop that was in trouble its stream."""
    trouble = decode_hop_error(decode(encode_hop_error(SESSION, 1, 5, HopError("failed", "\u65e0" * 500))))
    assert trouble.text == "\u65e0" * 133


@given(st.binary(max_size=200))
def test_any_bytes_raise_only_the_one_error(message: bytes) -> None:
    with contextlib.suppress(RecordError):
        read_all(message)


@given(turns, st.data())
def test_any_damage_raises_only_the_one_error(turn: EpochOrder, data: st.DataObject) -> None:
    message = bytearray(encode_turn(SESSION, 1, KEEP, turn))
    for _ in range(data.draw(st.integers(1, 4))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(RecordError):
        read_all(bytes(message))


@given(st.binary(max_size=100))
def test_any_body_raises_only_the_one_error(body: bytes) -> None:
    for kind in Kind:
        with contextlib.suppress(RecordError):
            read_all(header(kind, SESSION, 1, 0, dtype=1, rows=1, width=1, length=len(body)) + body)


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(b"", id="empty"),
        pytest.param(plain(Kind.GO, SESSION, 1)[:-1], id="short"),
        pytest.param(plain(Kind.GO, SESSION, 1) + b"x", id="a body that was not announced"),
        pytest.param(header(Kind.GO, SESSION, 1, 0, length=1) + b"x", id="a body where none belongs"),
        pytest.param(plain(77, SESSION, 1), id="unknown kind"),
        pytest.param(header(Kind.DATA, SESSION, 1, 0, dtype=9, rows=1, width=1, length=4) + bytes(4), id="format"),
        pytest.param(header(Kind.DATA, SESSION, 1, 0, dtype=1, rows=0, width=1, length=0), id="no rows"),
        pytest.param(header(Kind.DATA, SESSION, 1, 0, dtype=1, rows=2, width=1, length=4) + bytes(4), id="too little"),
        pytest.param(
            header(Kind.DATA, SESSION, 1, MAX_TOKENS, dtype=1, rows=1, width=1, length=4) + bytes(4), id="position"
        ),
        pytest.param(
            header(Kind.DATA, SESSION, 1, 0, dtype=2, rows=1, width=MAX_WIDTH + 1, length=2 * MAX_WIDTH + 2)
            + bytes(2 * MAX_WIDTH + 2),
            id="width",
        ),
    ],
)
def test_what_breaks_the_bounds_is_refused(message: bytes) -> None:
    assert HEADER_BYTES == 40
    with pytest.raises(RecordError):
        decode(message)
