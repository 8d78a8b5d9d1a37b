"""The directory's messages as bytes: JSON, version 1, at most 192 KiB. No sockets, no tables.

A request is `{"version": 1, "op": …, "key": 64 hex digits, …}`. The ops `peers`, `providers` and `values` are look-ups;
`provide` (with `addresses`) records the sender as a provider of the key; `store` (with `value`, base64 of at most
16 KiB) stores a value. An answer is `{"version": 1, "stored": …, "peers": […], "providers": […], "values": […]}` with
at most 20 peers, 32 providers and 4 values; a peer or provider is `{"id": …, "addresses": […]}`. `stored` is the
outcome of `provide` and `store`.
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
    """Operations that a directory node answers."""

    PEERS = "peers"
    PROVIDERS = "providers"
    VALUES = "values"
    PROVIDE = "provide"
    STORE = "store"


@dataclass(frozen=True)
class Contact:
    """A peer and the addresses at which it can be dialled."""

    peer: str
    addresses: tuple[Address, ...] = ()


@dataclass(frozen=True)
class Request:
    """A look-up, or a record to store; `addresses` belong to PROVIDE and `value` to STORE."""

    op: Op
    key: bytes
    addresses: tuple[Address, ...] = ()
    value: bytes = b""

    def encode(self) -> bytes:
        """Return the request's JSON."""
        fields: dict[str, Any] = {"version": VERSION, "op": self.op, "key": self.key.hex()}
        if self.op is Op.PROVIDE:
            fields["addresses"] = [str(address) for address in self.addresses]
        if self.op is Op.STORE:
            fields["value"] = base64.b64encode(self.value).decode()
        return _dump(fields)


@dataclass(frozen=True)
class Answer:
    """The answer of a directory node to any request."""

    peers: tuple[Contact, ...] = ()
    providers: tuple[Contact, ...] = ()
    values: tuple[bytes, ...] = field(default=())
    stored: bool = False

    def encode(self) -> bytes:
        """Return the answer's JSON."""
        fields: dict[str, Any] = {"version": VERSION, "stored": self.stored}
        for name, contacts in (("peers", self.peers), ("providers", self.providers)):
            fields[name] = [{"id": c.peer, "addresses": [str(address) for address in c.addresses]} for c in contacts]
        fields["values"] = [base64.b64encode(value).decode() for value in self.values]
        return _dump(fields)


def decode_request(body: bytes) -> Request:
    """Parse a request; raises `ProtocolError` if it is malformed."""
    fields = _load(body)
    try:
        op, key = Op(fields["op"]), bytes.fromhex(fields["key"])
    except (ValueError, KeyError, TypeError):
        raise ProtocolError("a directory request has no known op or no key") from None
    if len(key) != KEY_BYTES:
        raise ProtocolError(f"a directory key has {len(key)} bytes instead of {KEY_BYTES}")
    value = _value(fields.get("value")) if op is Op.STORE else b""
    addresses = tuple(parse_known(_texts(fields.get("addresses", [])))) if op is Op.PROVIDE else ()
    return Request(op, key, addresses, value)


def decode_answer(body: bytes) -> Answer:
    """Parse an answer, dropping malformed contacts; raises `ProtocolError` if the rest is malformed."""
    fields = _load(body)
    values = fields.get("values", [])
    if not isinstance(values, list):
        raise ProtocolError("the values in a directory answer are not a list")
    return Answer(
        _contacts(fields.get("peers", []), MAX_PEERS),
        _contacts(fields.get("providers", []), MAX_PROVIDERS),
        tuple(_value(value) for value in values[:MAX_VALUES]),
        fields.get("stored") is True,
    )


def _contacts(entries: Any, limit: int) -> tuple[Contact, ...]:
    if not isinstance(entries, list):
        raise ProtocolError("the peers in a directory answer are not a list")
    found: dict[str, Contact] = {}
    for entry in entries[:limit]:
        peer = entry.get("id") if isinstance(entry, dict) else None
        if isinstance(peer, str) and is_peer_id(peer):
            found[peer] = Contact(peer, tuple(parse_known(_texts(entry.get("addresses", [])), peer)))
    return tuple(found.values())


def _texts(entries: Any) -> list[str]:
    if not isinstance(entries, list):
        raise ProtocolError("the addresses in a directory message are not a list")
    return [entry for entry in entries[:64] if isinstance(entry, str)]


def _value(text: Any) -> bytes:
    if not isinstance(text, str) or len(text) > MAX_VALUE_BYTES * 4 // 3 + 4:
        raise ProtocolError(f"a directory value is not base64 of at most {MAX_VALUE_BYTES} bytes")
    try:
        value = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ProtocolError("a directory value is not base64") from None
    if len(value) > MAX_VALUE_BYTES:
        raise ProtocolError(f"a directory value has {len(value)} bytes; at most {MAX_VALUE_BYTES} are accepted")
    return value


def _load(body: bytes) -> dict[str, Any]:
    if len(body) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a directory message has {len(body)} bytes; at most {MAX_MESSAGE_BYTES} are accepted")
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        raise ProtocolError("a directory message is not JSON") from None
    if not isinstance(fields, dict) or fields.get("version") != VERSION:
        raise ProtocolError("a directory message has an unknown version")
    return fields


def _dump(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()
