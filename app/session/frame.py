"""The frame that sessions and training share: a fixed binary header of 40 bytes, then raw bytes. No I/O.

    offset  size  field
    0       16    session   8 random bytes, then 8 that bind them to the peer that made them (`new_session_id`)
    16      4     epoch
    20      4     position
    24      1     kind
    25      1     dtype     of the numbers in the body (0: no numbers)
    26      2     revision  as the protocol says
    28      4     rows
    32      4     width     numbers in a row
    36      4     length    bytes that follow

All integers are little-endian. What a kind means and which fields it uses is defined by each protocol:
`app.session.wire` and `app.training.wire`.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

from app.core.canonical_json import canonical, decode_object
from app.core.errors import RecordError

SESSION_BYTES = 16
MAX_ROWS = 4096  # in one frame
CHUNK_ROWS = 256  # of a prompt that an asker sends at once
MAX_WIDTH = 2**16
MAX_JSON_BYTES = 1024
MAX_DATA_BYTES = 48 * 2**20

_HEADER = struct.Struct("<16sIIBBHIII")
HEADER_BYTES = _HEADER.size

# Number formats and their codes; new formats get new codes, and 5 is that of `CHANGES`. `engine.int8_rows` defines the
# rows of `int8`.
INT8 = "int8"
CHANGES = "changes"  # of training alone, see `app.training.wire`
DTYPES = {"f32": 1, "bf16": 2, "f16": 3, INT8: 4}
DTYPE_NAMES = {code: name for name, code in DTYPES.items()}
_ITEM_BYTES = {1: 4, 2: 2, 3: 2}
_INT8 = DTYPES[INT8]


class Frame(NamedTuple):
    """One decoded frame; `body` is a view into the message, not a copy."""

    session: bytes
    epoch: int
    position: int
    kind: int
    dtype: int
    rows: int
    width: int
    body: memoryview
    revision: int = 0


@dataclass(frozen=True)
class HopError:
    """An error at a hop: a code that the asker acts on, and a text for the user."""

    # busy, refused, draining; gap, link, missing, closed, failed; input (it received numbers that are not finite);
    # evicted (kept outputs, for information); stale (another epoch or version than the hop's)
    code: str
    text: str
    why: str = ""  # reason code, if it is more specific than `code`; or the peer or direction that it is about


def new_session_id(asker: str, nonce: bytes | None = None) -> bytes:
    """Return an id for a session of this asker: eight random bytes, and eight that bind them to its peer id.

    Every hop of a route learns the id, and hidden states carry nothing else: a hop that opened the same id elsewhere
    could read or change what goes there.
    """
    nonce = secrets.token_bytes(SESSION_BYTES // 2) if nonce is None else nonce
    return nonce + hashlib.sha256(b"shoal session" + nonce + asker.encode()).digest()[: SESSION_BYTES // 2]


def belongs_to(session: bytes, asker: str) -> bool:
    """True if this asker made the session's id."""
    return session == new_session_id(asker, session[: SESSION_BYTES // 2])


def row_bytes(dtype: int, width: int) -> int:
    """Bytes of one token's hidden state on the wire."""
    if dtype == _INT8:
        from engine import int8_rows  # loads numpy, which light starts do without

        return int8_rows.row_bytes(width)
    return _ITEM_BYTES[dtype] * width


# For each number format: the integers that its bytes are read as, and the bits that are all set in NaN and infinity.
_NOT_FINITE = {1: ("<u4", 0x7F800000), 2: ("<u2", 0x7F80), 3: ("<u2", 0x7C00)}


def is_finite(frame: Frame) -> bool:
    """True if no number of a frame's body is NaN or infinity."""
    import numpy

    if frame.dtype == _INT8:
        return bool(numpy.isfinite(_int8_numbers(frame)).all())
    kind, exponent = _NOT_FINITE[frame.dtype]
    numbers = numpy.frombuffer(frame.body, kind)
    return bool((numbers & exponent).max(initial=0) < exponent)


def root_mean_square(frame: Frame) -> float:
    """Return the root mean square of a frame's numbers; not finite if one of them is not."""
    import numpy

    if frame.dtype == _INT8:
        numbers = _int8_numbers(frame)
    elif frame.dtype == DTYPES["bf16"]:  # the upper half of a float32
        numbers = (numpy.frombuffer(frame.body, "<u2").astype("<u4") << 16).view("<f4")
    else:
        numbers = numpy.frombuffer(frame.body, "<f4" if frame.dtype == DTYPES["f32"] else "<f2")
    with numpy.errstate(all="ignore"):
        return math.sqrt(float(numpy.square(numbers, dtype="<f8").mean()))


def _int8_numbers(frame: Frame) -> Any:
    from engine import int8_rows

    return int8_rows.decode(frame.body, frame.width)


def header(
    kind: int,
    session: bytes,
    epoch: int,
    position: int,
    *,
    dtype: int = 0,
    revision: int = 0,
    rows: int = 0,
    width: int = 0,
    length: int,
) -> bytes:
    """Encode the header of a frame whose body has `length` bytes."""
    return _HEADER.pack(session, epoch, position, kind, dtype, revision, rows, width, length)


def plain(
    kind: int, session: bytes, epoch: int, position: int = 0, rows: int = 0, width: int = 0, revision: int = 0
) -> bytes:
    """Encode a frame without a body."""
    return _HEADER.pack(session, epoch, position, kind, 0, revision, rows, width, 0)


def with_json(kind: int, session: bytes, epoch: int, position: int, values: dict[str, object]) -> bytes:
    """Encode a frame whose body is a JSON object."""
    body = canonical(values)
    return header(kind, session, epoch, position, length=len(body)) + body


def split(message: bytes, what: str) -> Frame:
    """Decode a message's header; raises `RecordError`, which names the protocol as `what`, if the length is wrong.

    Kind and body are not checked.
    """
    if len(message) < HEADER_BYTES:
        raise RecordError(f"{what} frame: {len(message)} bytes are less than a header")
    session, epoch, position, kind, dtype, revision, rows, width, length = _HEADER.unpack_from(message)
    if length != len(message) - HEADER_BYTES:
        raise RecordError(f"{what} frame: its header says {length} bytes follow, but {len(message) - HEADER_BYTES} do")
    return Frame(session, epoch, position, kind, dtype, rows, width, memoryview(message)[HEADER_BYTES:], revision)


def check_numbers(frame: Frame, what: str, rows: int) -> None:
    """Raise `RecordError` unless the body is `rows` rows of the frame's width and format, within the bounds."""
    if frame.dtype not in DTYPE_NAMES:
        raise RecordError(f"{what} frame: number format {frame.dtype} is not understood; update Shoal")
    if not (0 < rows <= MAX_ROWS and 0 < frame.width <= MAX_WIDTH):
        raise RecordError(f"{what} frame: {rows} rows of {frame.width} numbers at {frame.position} are out of bounds")
    length = len(frame.body)
    if length != rows * row_bytes(frame.dtype, frame.width) or length > MAX_DATA_BYTES:
        raise RecordError(f"{what} frame: {length} bytes do not match {rows} rows of {frame.width} numbers")


def encode_error(kind: int, session: bytes, epoch: int, position: int, trouble: HopError) -> bytes:
    """Encode a hop's error as a frame of this kind; its text is cut to 400 bytes, so that it is always understood."""
    values: dict[str, object] = {"code": trouble.code, "text": trouble.text.encode()[:400].decode(errors="ignore")}
    if trouble.why:
        values["why"] = trouble.why
    return with_json(kind, session, epoch, position, values)


def decode_hop_error(frame: Frame) -> HopError:
    """Decode a hop's error, with unprintable characters of its text blanked; raises `RecordError`."""
    fields = decode_object(bytes(frame.body), "trouble", max_bytes=MAX_JSON_BYTES)
    text = "".join(c if c.isprintable() else " " for c in fields.text("text", 400, ""))
    return HopError(fields.printable("code", 16), text, fields.printable("why", 64, ""))
