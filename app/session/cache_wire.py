"""Wire format of hand-overs: a hop that joins a session's route takes the cache of the hop that leaves it. No I/O.

The asker orders it on its session streams (`app.session.wire`): GIVE tells the old hop who may fetch a session's cache,
and `cache` in TURN tells the new hop where it is. The new hop then opens a stream of protocol `/shoal/1/cache` to the
old one. The first two messages are JSON objects, the others are chunks:

    new>old  {"v": 1, "session": id in hex, "start", "stop": blocks, "first", "tokens": positions [first, tokens),
              "format": the form of the new hop's cache}
    old>new  {"v": 1, "tokens": positions [first, tokens) follow, as far as they are cached, "why": the reason for none}
    old>new  position (4 bytes), rows (4), SHA-256 (32), then the cache of `rows` tokens from `position` on

Chunks come in order and without gaps. A chunk's body has for each block the keys and then the values, each as (heads,
rows, numbers of a head), in the form that both name. Its hash is over the session, the blocks, the position and the
rows besides the body (`chunk_hash`), so that no chunk can stand for another. All integers are little-endian.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import NamedTuple

from app.core.canonical_json import canonical, check_version, decode_object
from app.core.errors import RecordError
from app.core.span import MAX_BLOCKS, Span
from app.session.frame import MAX_JSON_BYTES, SESSION_BYTES
from app.session.wire import MAX_TOKENS

PROTOCOL = "/shoal/1/cache"
VERSION = 1
HANDOVER_S = 20.0  # the longest that a hop fetches a session's cache
MIN_TOKENS = 64  # fewer are read sooner than fetched
CHUNK_BYTES = 2**20
_MAX_FORMAT_CHARS = 64

_HEAD = struct.Struct("<II32s")
_PLACE = struct.Struct("<16sIIII")


@dataclass(frozen=True)
class CacheRequest:
    """A new hop's request for the cache of positions [first, tokens) of a session in the blocks of `span`."""

    session: bytes
    span: Span
    first: int
    tokens: int
    format: str


class CacheChunk(NamedTuple):
    """The cache of `rows` tokens from `position` on."""

    position: int
    rows: int
    body: memoryview


def chunk_tokens(token_bytes: int) -> int:
    """Tokens of a chunk, if each of them has so many bytes of cache."""
    return max(CHUNK_BYTES // token_bytes, 1)


def encode_request(request: CacheRequest) -> bytes:
    """Encode a request."""
    return canonical(
        {
            "v": VERSION, "session": request.session.hex(), "start": request.span.start, "stop": request.span.stop,
            "first": request.first, "tokens": request.tokens, "format": request.format,
        }
    )  # fmt: skip


def decode_request(message: bytes) -> CacheRequest:
    """Decode a request; raises `RecordError` if a field is missing or out of bounds."""
    fields = decode_object(message, "cache request", max_bytes=MAX_JSON_BYTES)
    check_version(fields, "v", VERSION)
    start, stop = fields.integer("start", 0, MAX_BLOCKS), fields.integer("stop", 0, MAX_BLOCKS)
    if not Span.is_possible(start, stop):
        fields.refuse("stop", "more than start")
    return CacheRequest(
        fields.hex_bytes("session", SESSION_BYTES),
        Span(start, stop),
        fields.integer("first", 0, MAX_TOKENS),
        fields.integer("tokens", 1, MAX_TOKENS),
        fields.text("format", _MAX_FORMAT_CHARS),
    )


def encode_answer(tokens: int, why: str = "") -> bytes:
    """Encode the answer to a request: positions up to `tokens` follow, or none for the reason `why`."""
    return canonical({"v": VERSION, "tokens": tokens, "why": why[:200]})


def decode_answer(message: bytes, request: CacheRequest) -> tuple[int, str]:
    """Decode an answer: the end of the positions that follow, and the reason for none; raises `RecordError`."""
    fields = decode_object(message, "cache answer", max_bytes=MAX_JSON_BYTES)
    check_version(fields, "v", VERSION)
    why = "".join(c if c.isprintable() else " " for c in fields.text("why", 200, ""))
    return fields.integer("tokens", 0, request.tokens), why


def chunk_hash(request: CacheRequest, chunk: CacheChunk) -> bytes:
    """The hash of a chunk in its place."""
    span = request.span
    made = hashlib.sha256(b"shoal cache")
    made.update(_PLACE.pack(request.session, span.start, span.stop, chunk.position, chunk.rows))
    made.update(chunk.body)
    return made.digest()


def encode_chunk(request: CacheRequest, chunk: CacheChunk) -> tuple[bytes, memoryview]:
    """Encode a chunk: its head and its body."""
    return _HEAD.pack(chunk.position, chunk.rows, chunk_hash(request, chunk)), chunk.body


def decode_chunk(message: bytes, request: CacheRequest, position: int, stop: int, token_bytes: int) -> CacheChunk:
    """Decode the chunk at `position`; raises `RecordError` if it is another, too long, or does not match its hash."""
    if len(message) < _HEAD.size:
        raise RecordError(f"cache chunk: {len(message)} bytes are less than its head")
    at, rows, promised = _HEAD.unpack_from(message)
    chunk = CacheChunk(at, rows, memoryview(message)[_HEAD.size :])
    if at != position or not 0 < rows <= stop - position:
        raise RecordError(f"cache chunk: tokens {at}:{at + rows} came instead of {position}:{stop}")
    if len(chunk.body) != rows * token_bytes:
        raise RecordError(f"cache chunk: {len(chunk.body)} bytes do not match {rows} tokens of {token_bytes}")
    if chunk_hash(request, chunk) != promised:
        raise RecordError(f"cache chunk: the tokens from {position} on do not match their hash")
    return chunk
