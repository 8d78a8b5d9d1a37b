"""Messages of hand-overs: what is written is read back, a chunk stands for itself alone, and one error is raised."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.canonical_json import canonical
from app.core.errors import RecordError
from app.core.span import Span
from app.session.cache_wire import (
    CHUNK_BYTES,
    CacheChunk,
    CacheRequest,
    chunk_tokens,
    decode_answer,
    decode_chunk,
    decode_request,
    encode_answer,
    encode_chunk,
    encode_request,
)

REQUEST = CacheRequest(bytes(range(16)), Span(3, 5), 10, 100, "f32 2x4 none")
BODY = memoryview(bytes(range(60)))


def chunk() -> bytes:
    """Three tokens of 20 bytes, from position 10 on."""
    return b"".join(encode_chunk(REQUEST, CacheChunk(10, 3, BODY)))


def test_messages_come_back() -> None:
    assert decode_request(encode_request(REQUEST)) == REQUEST
    assert decode_answer(encode_answer(90), REQUEST) == (90, "")
    assert decode_answer(encode_answer(0, "not \x1b[31m now"), REQUEST) == (0, "not  [31m now")
    assert decode_chunk(chunk(), REQUEST, 10, 90, 20) == CacheChunk(10, 3, BODY)


def test_a_chunk_is_of_bounded_size_and_has_a_token_at_least() -> None:
    assert chunk_tokens(1000) == CHUNK_BYTES // 1000
    assert chunk_tokens(10**9) == 1


@pytest.mark.parametrize("field", ["v", "session", "start", "stop", "first", "tokens", "format"])
@pytest.mark.parametrize("value", [None, -1, 2**40, [], "x" * 65])
def test_odd_requests_are_refused(field: str, value: object) -> None:
    with pytest.raises(RecordError):
        decode_request(canonical(json.loads(encode_request(REQUEST)) | {field: value}))


def test_more_tokens_than_were_asked_for_are_refused() -> None:
    with pytest.raises(RecordError):
        decode_answer(encode_answer(101), REQUEST)


@given(st.data())
def test_any_changed_byte_of_a_chunk_is_found(data: st.DataObject) -> None:
    message = bytearray(chunk())
    message[data.draw(st.integers(0, len(message) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(RecordError):
        decode_chunk(bytes(message), REQUEST, 10, 90, 20)


@pytest.mark.parametrize(
    "other",
    [
        replace(REQUEST, session=bytes(16)),
        replace(REQUEST, span=Span(2, 5)),
        replace(REQUEST, span=Span(3, 6)),
    ],
)
def test_a_chunk_does_not_stand_for_another(other: CacheRequest) -> None:
    with pytest.raises(RecordError, match="hash"):
        decode_chunk(chunk(), other, 10, 90, 20)


@pytest.mark.parametrize(("position", "stop", "token_bytes"), [(0, 90, 20), (13, 90, 20), (10, 12, 20), (10, 90, 21)])
def test_a_chunk_in_another_place_or_of_another_size_is_refused(position: int, stop: int, token_bytes: int) -> None:
    with pytest.raises(RecordError):
        decode_chunk(chunk(), REQUEST, position, stop, token_bytes)


@given(st.binary(max_size=200))
def test_any_bytes_raise_only_the_one_error(message: bytes) -> None:
    for read in (
        decode_request,
        lambda given: decode_answer(given, REQUEST),
        lambda given: decode_chunk(given, REQUEST, 0, 9, 1),
    ):
        with contextlib.suppress(RecordError):
            read(message)
