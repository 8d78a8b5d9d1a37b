"""The bodies of a swarm's calls, sans I/O: bytes in, values out, and `ProtocolError` for anything else.

Statements are signed envelopes, each after its length in two bytes; what kind one is, its domain says. Numbers are
big-endian. A vector is what a table holds: for each member the first 8 bytes of its key and its number.

    swarm.tell      id[16] statements                            -> nothing
    swarm.probe     id[16] suspected[8] statements               -> statements
    swarm.table     id[16] count[2] vector[16 x count] statements -> count[2] wanted[8 x count] statements
    swarm.find      name or name#pin, as text; empty: yours      -> statements: records, then announcements
    swarm.manifest  hash[32]                                     -> the manifest's bytes

The id is the swarm's, and whoever is no member of it answers with the error `not_member`. `suspected` is the number
of the announcement under which the caller lost the callee, or 0: a callee whose present number it is says something
newer, and one that has forgotten it finds that announcement among the statements. `wanted` names the members whose
announcement in the caller's vector is news to the callee.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from p2p.errors import ProtocolError

TELL, PROBE, TABLE = "swarm.tell", "swarm.probe", "swarm.table"
FIND, MANIFEST = "swarm.find", "swarm.manifest"
NOT_MEMBER, MALFORMED = "not_member", "malformed"

ID_BYTES, KEY_BYTES, NUMBER_BYTES, HASH_BYTES = 16, 8, 8, 32
MAX_STATEMENT_BYTES = 4352  # a swarm record with its envelope; announcements are far smaller
MAX_BATCH_BYTES = 64 * 1024  # of statements that nobody asked for
MAX_TABLE_BYTES = 2**20  # of statements that were asked for
MAX_VECTOR = 4096
MAX_NAME_BYTES = 128
_COUNT_BYTES = 2
_ENTRY_BYTES = KEY_BYTES + NUMBER_BYTES


def pack(statements: Iterable[bytes]) -> bytes:
    """Statements one after another."""
    return b"".join(len(raw).to_bytes(_COUNT_BYTES) + raw for raw in statements)


def unpack(data: bytes, max_bytes: int) -> list[bytes]:
    """The statements in `data`; what they say is still unchecked."""
    if len(data) > max_bytes:
        raise ProtocolError(f"{len(data)} bytes of statements, more than {max_bytes}")
    found = []
    at = 0
    while at < len(data):
        start = at + _COUNT_BYTES
        length = int.from_bytes(data[at:start])
        at = start + length
        if not 0 < length <= MAX_STATEMENT_BYTES or at > len(data):
            raise ProtocolError("a statement is empty, too long or cut off")
        found.append(data[start:at])
    return found


def fitting(statements: Iterable[bytes], max_bytes: int) -> list[bytes]:
    """As many of the first statements as a body of `max_bytes` takes."""
    chosen, room = [], max_bytes
    for raw in statements:
        room -= len(raw) + _COUNT_BYTES
        if room < 0:
            break
        chosen.append(raw)
    return chosen


@dataclass(frozen=True)
class ProbeRequest:
    """Are you there? And what is new with me."""

    swarm: bytes
    suspected: int
    statements: list[bytes]

    def encode(self) -> bytes:
        """The body."""
        return self.swarm + self.suspected.to_bytes(NUMBER_BYTES) + pack(self.statements)

    @classmethod
    def decode(cls, body: bytes) -> ProbeRequest:
        """Read a body."""
        head = ID_BYTES + NUMBER_BYTES
        if len(body) < head:
            raise ProtocolError("a probe is cut off")
        suspected = int.from_bytes(body[ID_BYTES:head])
        return cls(body[:ID_BYTES], suspected, unpack(body[head:], MAX_BATCH_BYTES))


@dataclass(frozen=True)
class Tell:
    """What changed."""

    swarm: bytes
    statements: list[bytes]

    def encode(self) -> bytes:
        """The body."""
        return self.swarm + pack(self.statements)

    @classmethod
    def decode(cls, body: bytes) -> Tell:
        """Read a body."""
        if len(body) < ID_BYTES:
            raise ProtocolError("a message is cut off")
        return cls(body[:ID_BYTES], unpack(body[ID_BYTES:], MAX_BATCH_BYTES))


@dataclass(frozen=True)
class TableRequest:
    """This is what I know; tell me what I do not."""

    swarm: bytes
    vector: Mapping[bytes, int]
    statements: list[bytes]

    def encode(self) -> bytes:
        """The body."""
        entries = [key + number.to_bytes(NUMBER_BYTES) for key, number in self.vector.items()][:MAX_VECTOR]
        return self.swarm + len(entries).to_bytes(_COUNT_BYTES) + b"".join(entries) + pack(self.statements)

    @classmethod
    def decode(cls, body: bytes) -> TableRequest:
        """Read a body."""
        entries, rest = _counted(body[ID_BYTES:], _ENTRY_BYTES)
        vector = {entry[:KEY_BYTES]: int.from_bytes(entry[KEY_BYTES:]) for entry in entries}
        return cls(body[:ID_BYTES], vector, unpack(rest, MAX_BATCH_BYTES))


@dataclass(frozen=True)
class TableAnswer:
    """What you lack, and what I would like of yours."""

    wanted: list[bytes]
    statements: list[bytes]

    def encode(self) -> bytes:
        """The body."""
        wanted = self.wanted[:MAX_VECTOR]
        return len(wanted).to_bytes(_COUNT_BYTES) + b"".join(wanted) + pack(self.statements)

    @classmethod
    def decode(cls, body: bytes) -> TableAnswer:
        """Read a body."""
        wanted, rest = _counted(body, KEY_BYTES)
        return cls(wanted, unpack(rest, MAX_TABLE_BYTES))


def _counted(data: bytes, entry_bytes: int) -> tuple[list[bytes], bytes]:
    count = int.from_bytes(data[:_COUNT_BYTES])
    stop = _COUNT_BYTES + count * entry_bytes
    if len(data) < max(stop, _COUNT_BYTES) or count > MAX_VECTOR:
        raise ProtocolError("a list is too long or cut off")
    return [data[at : at + entry_bytes] for at in range(_COUNT_BYTES, stop, entry_bytes)], data[stop:]
