"""The bodies of the calls between nodes of a swarm. Sans I/O: bytes to values, `ProtocolError` for malformed bytes.

A statement is a signed envelope, preceded by its length in two bytes; the envelope's domain says which kind it is
(`app.swarm.records`). `app.membership.exchange` checks whether it is valid. Numbers are big-endian. A vector is a
summary of a table: for each member the first 8 bytes of its public key and the number of its latest announcement.

    swarm.tell      id[16] statements                            -> nothing
    swarm.probe     id[16] suspected[8] statements               -> statements
    swarm.table     id[16] count[2] vector[16 x count] statements -> count[2] wanted[8 x count] statements
    swarm.find      name or name#pin, as text; empty: your swarm -> statements: records, then announcements
    swarm.manifest  hash[32]                                     -> the manifest's bytes
    swarm.present   guard[16] statements                         -> statements
    swarm.admit     guard[16] token[16] name, as text            -> the caller's certificate

`id` is the swarm's; a node that is not a member of it answers with the error `not_member`. `suspected` is 0, or the
number of the callee's announcement that was the latest when the caller found it suspect, dead or left. A callee whose
current number it is announces again with a higher one; a callee that has lost its number finds that announcement among
the statements. `wanted` lists the keys for which the caller's vector has a newer announcement than the callee.

The last two calls are those of guarded swarms (`app.swarm.certificates`) and the only ones that peers without a
certificate may make there; all others are answered with the error `not_admitted`. `guard` is the `swarm` of
certificates. In `swarm.present` both sides send their own certificate, unless they are the creator, and the revocation
lists that they know; a caller that was revoked is answered with the lists alone. `swarm.admit` is answered by the
issuer of the token; its errors are the values of `app.swarm.invitations.Verdict`, and `revoked`.

Bounds: a statement has at most 4352 bytes, the statements of a request or of a probe's answer 64 KiB together, those of
a table's answer 1 MiB, and a vector 4096 entries. There are at most as many statements as would have 64 bytes each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from app.swarm.certificates import TOKEN_BYTES
from p2p.errors import ProtocolError

TELL, PROBE, TABLE = "swarm.tell", "swarm.probe", "swarm.table"
FIND, MANIFEST = "swarm.find", "swarm.manifest"
PRESENT, ADMIT = "swarm.present", "swarm.admit"
NOT_MEMBER, MALFORMED, NOT_ADMITTED, REVOKED = "not_member", "malformed", "not_admitted", "revoked"

ID_BYTES, KEY_BYTES, NUMBER_BYTES, HASH_BYTES = 16, 8, 8, 32
SMALLEST_BYTES = 64  # of a statement: its signature alone has so many
MAX_STATEMENT_BYTES = 4352  # a swarm record with its envelope; announcements are far smaller
MAX_BATCH_BYTES = 64 * 1024  # of statements that were not asked for
MAX_TABLE_BYTES = 2**20  # of statements that were asked for
MAX_VECTOR = 4096
MAX_NAME_BYTES = 128
_COUNT_BYTES = 2
_ENTRY_BYTES = KEY_BYTES + NUMBER_BYTES


def pack(statements: Iterable[bytes]) -> bytes:
    """Return the statements, each preceded by its length."""
    return b"".join(len(raw).to_bytes(_COUNT_BYTES) + raw for raw in statements)


def unpack(data: bytes, max_bytes: int) -> list[bytes]:
    """Split `data` into unverified statements; raises `ProtocolError` if it is too long, malformed or of too many."""
    if len(data) > max_bytes:
        raise ProtocolError(f"{len(data)} bytes of statements, more than {max_bytes}")
    found: list[bytes] = []
    at, most = 0, max_bytes // SMALLEST_BYTES
    while at < len(data):
        start = at + _COUNT_BYTES
        length = int.from_bytes(data[at:start])
        at = start + length
        if not 0 < length <= MAX_STATEMENT_BYTES or at > len(data):
            raise ProtocolError("a statement is empty, too long or cut off")
        found.append(data[start:at])
        if len(found) > most:
            raise ProtocolError(f"more than {most} statements")
    return found


def fitting(statements: Iterable[bytes], max_bytes: int) -> list[bytes]:
    """Return the longest prefix of the statements that fits into `max_bytes` when packed."""
    chosen, room = [], max_bytes
    for raw in statements:
        room -= len(raw) + _COUNT_BYTES
        if room < 0:
            break
        chosen.append(raw)
    return chosen


@dataclass(frozen=True)
class ProbeRequest:
    """Body of `swarm.probe`: asks whether the callee is alive, with statements for it."""

    swarm: bytes
    suspected: int
    statements: list[bytes]

    def encode(self) -> bytes:
        """Return the body as bytes."""
        return self.swarm + self.suspected.to_bytes(NUMBER_BYTES) + pack(self.statements)

    @classmethod
    def decode(cls, body: bytes) -> ProbeRequest:
        """Read the bytes of `encode`; raises `ProtocolError` if they are malformed."""
        head = ID_BYTES + NUMBER_BYTES
        if len(body) < head:
            raise ProtocolError("a probe is cut off")
        suspected = int.from_bytes(body[ID_BYTES:head])
        return cls(body[:ID_BYTES], suspected, unpack(body[head:], MAX_BATCH_BYTES))


@dataclass(frozen=True)
class Tell:
    """Body of `swarm.tell`: statements for the callee."""

    swarm: bytes
    statements: list[bytes]

    def encode(self) -> bytes:
        """Return the body as bytes."""
        return self.swarm + pack(self.statements)

    @classmethod
    def decode(cls, body: bytes) -> Tell:
        """Read the bytes of `encode`; raises `ProtocolError` if they are malformed."""
        if len(body) < ID_BYTES:
            raise ProtocolError("a message is cut off")
        return cls(body[:ID_BYTES], unpack(body[ID_BYTES:], MAX_BATCH_BYTES))


@dataclass(frozen=True)
class TableRequest:
    """Body of `swarm.table`: the caller's vector, with statements for the callee."""

    swarm: bytes
    vector: Mapping[bytes, int]
    statements: list[bytes]

    def encode(self) -> bytes:
        """Return the body as bytes."""
        entries = [key + number.to_bytes(NUMBER_BYTES) for key, number in self.vector.items()][:MAX_VECTOR]
        return self.swarm + len(entries).to_bytes(_COUNT_BYTES) + b"".join(entries) + pack(self.statements)

    @classmethod
    def decode(cls, body: bytes) -> TableRequest:
        """Read the bytes of `encode`; raises `ProtocolError` if they are malformed."""
        entries, rest = _counted(body[ID_BYTES:], _ENTRY_BYTES)
        vector = {entry[:KEY_BYTES]: int.from_bytes(entry[KEY_BYTES:]) for entry in entries}
        return cls(body[:ID_BYTES], vector, unpack(rest, MAX_BATCH_BYTES))


@dataclass(frozen=True)
class TableAnswer:
    """Answer to `swarm.table`: keys that the callee wants, and statements that the caller lacks."""

    wanted: list[bytes]
    statements: list[bytes]

    def encode(self) -> bytes:
        """Return the body as bytes."""
        wanted = self.wanted[:MAX_VECTOR]
        return len(wanted).to_bytes(_COUNT_BYTES) + b"".join(wanted) + pack(self.statements)

    @classmethod
    def decode(cls, body: bytes) -> TableAnswer:
        """Read the bytes of `encode`; raises `ProtocolError` if they are malformed."""
        wanted, rest = _counted(body, KEY_BYTES)
        return cls(wanted, unpack(rest, MAX_TABLE_BYTES))


@dataclass(frozen=True)
class AdmitRequest:
    """Body of `swarm.admit`: a token, and the caller's name for people."""

    guard: bytes
    token: bytes = field(repr=False)
    name: str = ""

    def encode(self) -> bytes:
        """Return the body as bytes."""
        return self.guard + self.token + self.name.encode()

    @classmethod
    def decode(cls, body: bytes) -> AdmitRequest:
        """Read the bytes of `encode`; raises `ProtocolError` if they are malformed."""
        head = ID_BYTES + TOKEN_BYTES
        if not head <= len(body) <= head + MAX_NAME_BYTES:
            raise ProtocolError("a request to be admitted is cut off or too long")
        name = body[head:].decode("utf-8", "replace")
        if not name.isprintable():
            raise ProtocolError("the name in a request to be admitted cannot be shown")
        return cls(body[:ID_BYTES], body[ID_BYTES:head], name)


def _counted(data: bytes, entry_bytes: int) -> tuple[list[bytes], bytes]:
    count = int.from_bytes(data[:_COUNT_BYTES])
    stop = _COUNT_BYTES + count * entry_bytes
    if len(data) < max(stop, _COUNT_BYTES) or count > MAX_VECTOR:
        raise ProtocolError("a list is too long or cut off")
    return [data[at : at + entry_bytes] for at in range(_COUNT_BYTES, stop, entry_bytes)], data[stop:]
