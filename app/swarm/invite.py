"""Invites: one line of text, `shoal:…`, with all that a node needs to join a swarm. Pure.

After `shoal:` comes base32 in lower case without padding (upper case is read too; QR codes use it, because they encode
it in fewer modules) of: a version byte, 1; fields, each a tag byte, a length byte and a value; and the first four bytes
of the SHA-256 of all that, which detects typing errors. Unknown tags are ignored, other versions are rejected.

    1 name          2 manifest hash, 32 bytes          3 secret, 32 bytes, of a private swarm
    4 peer: Ed25519 public key; the addresses that follow are this peer's
    5 address: 4 or 16 bytes of IP and 2 of TCP port    6 address: any other multiaddr, as text

At most 8 addresses. An invite is not signed, as anybody could make one; the manifest's hash in it proves what a peer
sends. `app.joining.targets` makes invites and joins by them.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import ipaddress
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field

from app.core.errors import RecordError
from app.core.terminal_text import qr_code
from app.swarm.names import is_model_hash, is_swarm_name
from p2p.addresses import Address, BadAddress, parse_address
from p2p.identity import peer_id_of, public_key_of

PREFIX = "shoal:"
VERSION = 1
SECRET_BYTES = 32
MAX_ADDRESSES = 8
MAX_INVITE_CHARS = 3000
_CHECKSUM_BYTES = 4
_NAME, _MODEL, _SECRET, _PEER, _IP, _TEXT = range(1, 7)
_ALPHABET = frozenset("abcdefghijklmnopqrstuvwxyz234567")


def new_secret() -> bytes:
    """Return a random secret for a new private swarm."""
    return secrets.token_bytes(SECRET_BYTES)


@dataclass(frozen=True)
class Invite:
    """A swarm's name, model, secret and members' addresses; each address ends in `/p2p/` and a peer id."""

    name: str
    model_hash: str
    addresses: tuple[str, ...] = ()
    secret: bytes | None = field(default=None, repr=False)

    def __str__(self) -> str:
        """Return the line to send to somebody; it contains the secret."""
        body = bytes((VERSION,)) + b"".join(self._fields())
        text = base64.b32encode(body + _checksum(body)).decode().rstrip("=").lower()
        return PREFIX + text

    def _fields(self) -> Iterator[bytes]:
        yield _field(_NAME, self.name.encode())
        yield _field(_MODEL, bytes.fromhex(self.model_hash))
        if self.secret is not None:
            yield _field(_SECRET, self.secret)
        last = None
        for text in self.addresses[:MAX_ADDRESSES]:
            address = parse_address(text)
            if address.peer is None:
                raise RecordError(f"{text} names no peer; an address in an invite must end in /p2p/ and a peer id")
            if address.peer != last:
                last = address.peer
                yield _field(_PEER, public_key_of(last))
            yield _packed(address)

    def qr(self) -> str:
        """Return a QR code of the line, drawn with half-block characters for a terminal."""
        drawing = io.StringIO()
        qr_code(str(self)).terminal(drawing, compact=True)
        return drawing.getvalue()


def parse_invite(text: str) -> Invite:
    """Read an invite as a user pasted it; raises `RecordError` that says what is wrong with it."""
    line = "".join(text.split()).lower()
    if not line.startswith(PREFIX):
        raise RecordError(f"this is not an invite: it does not begin with {PREFIX!r}")
    if len(line) > MAX_INVITE_CHARS:
        raise RecordError("this is not an invite: it is too long")
    body = _body(line.removeprefix(PREFIX))
    if body[0] != VERSION:
        raise RecordError(f"the invite has version {body[0]}, this Shoal reads version {VERSION}; update Shoal")
    return _invite_from(body[1:])


def is_invite(text: str) -> bool:
    """True if a user's argument is meant as an invite, not as a name."""
    return text.strip().lower().startswith(PREFIX)


def _body(code: str) -> bytes:
    strange = next((letter for letter in code if letter not in _ALPHABET), None)
    if strange is not None:
        raise RecordError(f"the invite is mistyped: it contains {strange!r}; copy the whole line again")
    try:
        raw = base64.b32decode(code.upper() + "=" * (-len(code) % 8))
    except binascii.Error:
        raw = b""
    body, checksum = raw[:-_CHECKSUM_BYTES], raw[-_CHECKSUM_BYTES:]
    # The last test rejects other spellings of the same bytes: the last letter of base32 has unused bits.
    if not body or _checksum(body) != checksum or base64.b32encode(raw).decode().rstrip("=").lower() != code:
        raise RecordError("the invite is mistyped or cut off; copy the whole line again")
    return body


def _invite_from(raw: bytes) -> Invite:
    found: dict[int, bytes] = {}
    addresses: list[str] = []
    peer = None
    for tag, value in _values(raw):
        if tag == _PEER:
            peer = peer_id_of(_exactly(value, 32))
        elif tag in (_IP, _TEXT):
            if peer is None or len(addresses) == MAX_ADDRESSES:
                raise RecordError("the invite is damaged: it has too many addresses, or one without a peer")
            addresses.append(str(_address(tag, value).of(peer)))
        elif tag in (_NAME, _MODEL, _SECRET):
            if tag in found:
                raise RecordError("the invite is damaged: a field appears twice")
            found[tag] = value
    name = found.get(_NAME, b"").decode("ascii", "replace")
    model_hash = found.get(_MODEL, b"").hex()
    if not is_swarm_name(name) or not is_model_hash(model_hash):
        raise RecordError("the invite is damaged: it names no swarm")
    secret = _exactly(found[_SECRET], SECRET_BYTES) if _SECRET in found else None
    return Invite(name, model_hash, tuple(addresses), secret)


def _values(raw: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(raw):
        stop = at + 2 + raw[at + 1] if at + 1 < len(raw) else len(raw) + 1
        if stop > len(raw):
            raise RecordError("the invite is damaged: a field is cut off")
        yield raw[at], raw[at + 2 : stop]
        at = stop


def _address(tag: int, value: bytes) -> Address:
    if tag == _TEXT:
        try:
            return parse_address(value.decode("ascii", "replace"))
        except BadAddress as error:
            raise RecordError(f"the invite is damaged: {error}") from error
    if len(value) not in (6, 18):
        raise RecordError("the invite is damaged: an address has a wrong length")
    ip = ipaddress.ip_address(value[:-2])
    return Address(f"ip{ip.version}", str(ip), int.from_bytes(value[-2:]))


def _packed(address: Address) -> bytes:
    if address.relay is None and address.ip is not None:
        return _field(_IP, address.ip.packed + address.port.to_bytes(2))
    return _field(_TEXT, str(address.of(None)).encode())


def _field(tag: int, value: bytes) -> bytes:
    if len(value) > 255:
        raise RecordError("a field of an invite has at most 255 bytes; use a shorter address")
    return bytes((tag, len(value))) + value


def _exactly(value: bytes, length: int) -> bytes:
    if len(value) != length:
        raise RecordError("the invite is damaged: a field has a wrong length")
    return value


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()[:_CHECKSUM_BYTES]
