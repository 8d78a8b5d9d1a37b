"""Requests between islands: calls whose body is the job's hash (32 bytes) and a JSON object or a signed statement.

    rounds.jobs    (no job)                    -> records of the jobs that this node takes part in (blobs)
    rounds.hello   round, head, others, data   -> the same of the one asked; `others` (absent: none) are a few peers
                                                  that took part lately and are there; `data`, in jobs of `own_data`
                                                  alone, is a list with what the sender has signed for its own text,
                                                  in base64
    rounds.say     a signed statement          -> empty, or the entry of its round where that is over already; for a
                                                  list, the arrival of a member that it leaves out without cause
    rounds.hashes  list                        -> hashes of all leaves of the change that its arrival committed to
    rounds.share   list, first, count          -> leaves of the change (blobs), for the member that merges them; all of
                                                  them for those who were drawn to test it in the next round
    rounds.row     list, first, count          -> leaves that it merged of the changes of its row (blobs), for the
                                                  member that merges those of all rows (`app.rounds.grid`)
    rounds.merged  list, first, count          -> merged leaves (blobs), for everybody; of the last rounds, and of all
                                                  since a state that somebody still fetches (`app.rounds.checkpoint`)
    rounds.signed  list, of (a peer or absent) -> what members signed for the shares that they merged (blobs): the one
                                                  asked, and those whose shares it has taken; with `of`, of that one
                                                  alone. Older versions do not know `of`
    rounds.traces  list                        -> traces of the steps (blobs) that its arrival committed to, for testers
    rounds.trace   list, first, count          -> leaves of the weights (blobs) before the step that the lot names, for
                                                  testers
    rounds.log     round, count                -> entries from a round on (blobs)
    rounds.parts   round                       -> `parts`: root and bytes of each part's state after the round before
    rounds.moments (nothing)                   -> `parts`: root and bytes of the moments of each part, as they were at
                                                  some moment of this round or the one before in the island asked;
                                                  `steps` that they are of, and `norms` of the first and the second

`list` is the hash of the signed member list. Requests for something that is not there yet wait for it, at most
`WAIT_S`, and then fail with the code `not_yet`; a member that could not merge its share answers `failed`. A checkpoint
is what `parts` and `moments` name: weights and outer momentum, which the log attests, and moments, which are each
island's own. They travel as parts by hash (`app.training.states`). Blobs are byte strings, each after its length (4
bytes, big endian); a leaf that waits for the next round is an empty one. Statements are specified in
`app.rounds.statements` and `app.rounds.log`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import IO, Any

from app.core.canonical_json import Fields, canonical, decode_object
from app.core.errors import RecordError
from app.manifest.merkle import HASH_BYTES

JOBS, HELLO, SAY = "rounds.jobs", "rounds.hello", "rounds.say"
HASHES, SHARE, ROW, MERGED = "rounds.hashes", "rounds.share", "rounds.row", "rounds.merged"
SIGNED, LOG, PARTS, MOMENTS = "rounds.signed", "rounds.log", "rounds.parts", "rounds.moments"
TRACES, TRACE = "rounds.traces", "rounds.trace"
OF_ISLANDS = (  # with a job, answered by its island
    HELLO, SAY, HASHES, SHARE, ROW, MERGED, SIGNED, TRACES, TRACE, LOG, PARTS, MOMENTS,
)  # fmt: skip
NOT_YET, FAILED, UNKNOWN, WRONG = "not_yet", "failed", "unknown_job", "bad_request"

WAIT_S = 2.0  # short: until the answer comes, nobody knows whether it is lost
RUN_LEAVES = 256  # most leaves of one request: 4 MiB in int8, 16 MiB in float32
RUN_ENTRIES = 16  # of one request: 4.2 MB at most
MOST_RUN_ENTRIES = 64  # of one answer; older versions ask for so many
MAX_LEAVES = 2**22
MAX_JOBS = 64
_LENGTH = struct.Struct(">I")
_MAX_JSON_BYTES = 2**16


def request(job: bytes, values: dict[str, Any]) -> bytes:
    """Return the body of a request about a job."""
    return job + canonical(values)


def read_request(body: bytes) -> tuple[bytes, bytes]:
    """Return the job and the rest of a request; raises `RecordError`."""
    if len(body) < HASH_BYTES:
        raise RecordError("a request names no job")
    return body[:HASH_BYTES], body[HASH_BYTES:]


def fields_of(rest: bytes, what: str) -> Fields:
    """Return the fields of a request or an answer; raises `RecordError`."""
    return decode_object(rest, what, max_bytes=_MAX_JSON_BYTES)


def pack(blobs: Iterable[bytes]) -> list[bytes]:
    """Return blobs, each after its length, as one payload."""
    return [piece for blob in blobs for piece in (_LENGTH.pack(len(blob)), blob)]


def read_blobs(file: IO[bytes]) -> Iterator[bytes]:
    """Return the blobs in a file, one at a time; raises `RecordError` if it is cut off."""
    while head := file.read(_LENGTH.size):
        length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else -1
        blob = file.read(max(0, length))
        if len(blob) != length:
            raise RecordError(f"{file.name} is cut off")
        yield blob


def unpack(raw: bytes, most: int) -> list[bytes]:
    """Return the blobs in an answer; raises `RecordError` if it is cut off or has more than `most`."""
    blobs: list[bytes] = []
    at = 0
    while at < len(raw):
        if at + _LENGTH.size > len(raw) or len(blobs) >= most:
            raise RecordError("an answer is cut off, or longer than asked for")
        (length,) = _LENGTH.unpack_from(raw, at)
        at += _LENGTH.size
        if length > len(raw) - at:
            raise RecordError("an answer is cut off")
        blobs.append(raw[at : at + length])
        at += length
    return blobs


def unpack_hashes(raw: bytes) -> list[bytes]:
    """Return the hashes in an answer; raises `RecordError`."""
    if len(raw) % HASH_BYTES or len(raw) > MAX_LEAVES * HASH_BYTES:
        raise RecordError("an answer is not a list of hashes")
    return [raw[at : at + HASH_BYTES] for at in range(0, len(raw), HASH_BYTES)]
