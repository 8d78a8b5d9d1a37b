"""The messages of the directory, as bytes: JSON of bounded size, version 1. No sockets, no tables.

A request is `{"version": 1, "op": …, "key": 64 hex digits, …}` with `op` one of `peers`, `providers`, `values`
(look-ups), `provide` (with `addresses`: the sender can be found under the key) and `store` (with `value`, base64).
An answer is `{"version": 1, "peers": […], "providers": […], "values": […]}`, where a peer is
`{"id": …, "addresses": […]}`, and `{"version": 1, "stored": true}` to the last two.
"""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from p2p.addresses import Address, is_peer_id, parse_known
from p2p.errors import ProtocolError

VERSION = 1
KEY_BYTES = 32
MAX_VALUE_BYTES = 16 * 1024
MAX_VALUES = 4
MAX_PEERS = 20
MAX_PROVIDERS = 32
MAX_MESSAGE_BYTES = 192 * 1024


class Op(StrEnum):
    """What is asked of a node of the directory."""

    PEERS = "peers"
    PROVIDERS = "providers"
    VALUES = "values"
    PROVIDE = "provide"
    STORE = "store"


@dataclass(frozen=True)
class Contact:
    """A peer and where it may be dialled."""

    peer: str
    addresses: tuple[Address, ...] = ()


@dataclass(frozen=True)
class Request:
    """One question, or one thing to keep."""

    op: Op
    key: bytes
    addresses: tuple[Address, ...] = ()
    value: bytes = b""

    def encode(self) -> bytes:
        """The request as bytes."""
        fields: dict[str, Any] = {"version": VERSION, "op": self.op, "key": self.key.hex()}
        if self.op is Op.PROVIDE:
            fields["addresses"] = [str(address) for address in self.addresses]
        if self.op is Op.STORE:
            fields["value"] = base64.b64encode(self.value).decode()
        return _dump(fields)


@dataclass(frozen=True)
class Answer:
    """What a node of the directory knows."""

    peers: tuple[Contact, ...] = ()
    providers: tuple[Contact, ...] = ()
    values: tuple[bytes, ...] = field(default=())
    stored: bool = False

    def encode(self) -> bytes:
        """The answer as bytes."""
        fields: dict[str, Any] = {"version": VERSION, "stored": self.stored}
        for name, contacts in (("peers", self.peers), ("providers", self.providers)):
            fields[name] = [{"id": c.peer, "addresses": [str(address) for address in c.addresses]} for c in contacts]
        fields["values"] = [base64.b64encode(value).decode() for value in self.values]
        return _dump(fields)


def decode_request(body: bytes) -> Request:
    """Read a request; raises `ProtocolError` for anything else."""
    fields = _load(body)
    try:
        op, key = Op(fields["op"]), bytes.fromhex(fields["key"])
    except (ValueError, KeyError, TypeError):
        raise ProtocolError("a directory request without a known op or a key") from None
    if len(key) != KEY_BYTES:
        raise ProtocolError(f"a directory key of {len(key)} bytes instead of {KEY_BYTES}")
    value = _value(fields.get("value")) if op is Op.STORE else b""
    addresses = tuple(parse_known(_texts(fields.get("addresses", [])))) if op is Op.PROVIDE else ()
    return Request(op, key, addresses, value)


def decode_answer(body: bytes) -> Answer:
    """Read an answer; raises `ProtocolError` for anything else. Malformed contacts in it are left out."""
    fields = _load(body)
    values = fields.get("values", [])
    if not isinstance(values, list):
        raise ProtocolError("a directory answer whose values are not a list")
    return Answer(
        _contacts(fields.get("peers", []), MAX_PEERS),
        _contacts(fields.get("providers", []), MAX_PROVIDERS),
        tuple(_value(value) for value in values[:MAX_VALUES]),
        fields.get("stored") is True,
    )


def _contacts(entries: Any, limit: int) -> tuple[Contact, ...]:
    if not isinstance(entries, list):
        raise ProtocolError("a directory answer whose peers are not a list")
    found: dict[str, Contact] = {}
    for entry in entries[:limit]:
        peer = entry.get("id") if isinstance(entry, dict) else None
        if isinstance(peer, str) and is_peer_id(peer):
            found[peer] = Contact(peer, tuple(parse_known(_texts(entry.get("addresses", [])), peer)))
    return tuple(found.values())


def _texts(entries: Any) -> list[str]:
    if not isinstance(entries, list):
        raise ProtocolError("a list of addresses that is not a list")
    return [entry for entry in entries[:64] if isinstance(entry, str)]


def _value(text: Any) -> bytes:
    if not isinstance(text, str) or len(text) > MAX_VALUE_BYTES * 4 // 3 + 4:
        raise ProtocolError(f"a directory value that is not base64 of at most {MAX_VALUE_BYTES} bytes")
    try:
        value = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ProtocolError("a directory value that is not base64") from None
    if len(value) > MAX_VALUE_BYTES:
        raise ProtocolError(f"a directory value of {len(value)} bytes; at most {MAX_VALUE_BYTES} are kept")
    return value


def _load(body: bytes) -> dict[str, Any]:
    if len(body) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a directory message of {len(body)} bytes; at most {MAX_MESSAGE_BYTES} are read")
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        raise ProtocolError("a directory message that is not JSON") from None
    if not isinstance(fields, dict) or fields.get("version") != VERSION:
        raise ProtocolError("a directory message of an unknown version")
    return fields


def _dump(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()
