"""Invites: one line of text, `shoal:…`, with all that a node needs to join a swarm. Pure.

After `shoal:` comes base32 in lower case without padding (upper case is read too; QR codes use it, because they encode
it in fewer modules) of: a version byte; fields, each a tag byte, a length byte and a value; and the first four bytes of
the SHA-256 of all that, which detects typing errors. Unknown tags are ignored, other versions are rejected.

    1 name          2 manifest hash, 32 bytes          3 secret, 32 bytes, of a private swarm
    4 peer: Ed25519 public key; the addresses that follow are this peer's
    5 address: 4 or 16 bytes of IP and 2 of TCP port    6 address: any other multiaddr, as text
    7 authority: the creator's Ed25519 public key       8 issuer: the public key of the member that made the invite
    9 token, 16 bytes

Invites of guarded swarms have version 2 and the fields 3, 7, 9, and 8 unless the creator made them
(`app.swarm.certificates`); others have version 1 and none of the last three. At most 8 addresses. An invite is not
signed, as anybody could make one; the manifest's hash in it proves what a peer sends. `app.joining.targets` makes
invites and joins by them.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import ipaddress
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from app.core.errors import RecordError
from app.core.terminal_text import qr_code
from app.swarm.certificates import TOKEN_BYTES
from app.swarm.names import is_model_hash, is_swarm_name
from p2p.addresses import Address, BadAddress, parse_address
from p2p.identity import peer_id_of, public_key_of

PREFIX = "shoal:"
VERSION, GUARDED_VERSION = 1, 2
SECRET_BYTES = 32
MAX_ADDRESSES = 8
MAX_INVITE_CHARS = 3000
_CHECKSUM_BYTES = 4
_NAME, _MODEL, _SECRET, _PEER, _IP, _TEXT, _AUTHORITY, _ISSUER, _TOKEN = range(1, 10)
_ADDED = re.compile(r"[\s\u2500-\u259f]+")  # spaces, and what frames are drawn with
_WORD = re.compile(r"[a-z0-9]+")
_MAX_PIECES = 300  # into which lines, frames and quotation marks break an invite
_ALPHABET = frozenset("abcdefghijklmnopqrstuvwxyz234567")


def new_secret() -> bytes:
    """Return a random secret for a new private swarm."""
    return secrets.token_bytes(SECRET_BYTES)


def new_token() -> bytes:
    """Return a random token for a new invite to a guarded swarm."""
    return secrets.token_bytes(TOKEN_BYTES)


@dataclass(frozen=True)
class Pass:
    """The part of an invite to a guarded swarm that is exchanged for a certificate: `issuer` takes the token."""

    authority: str
    issuer: str
    token: bytes = field(repr=False)


@dataclass(frozen=True)
class Invite:
    """A swarm's name, model, secret and members' addresses; each address ends in `/p2p/` and a peer id."""

    name: str
    model_hash: str
    addresses: tuple[str, ...] = ()
    secret: bytes | None = field(default=None, repr=False)
    entry: Pass | None = None  # of a guarded swarm

    def __str__(self) -> str:
        """Return the line to send to somebody; it contains the secret."""
        body = bytes((VERSION if self.entry is None else GUARDED_VERSION,)) + b"".join(self._fields())
        text = base64.b32encode(body + _checksum(body)).decode().rstrip("=").lower()
        return PREFIX + text

    def _fields(self) -> Iterator[bytes]:
        yield _field(_NAME, self.name.encode())
        yield _field(_MODEL, bytes.fromhex(self.model_hash))
        if self.secret is not None:
            yield _field(_SECRET, self.secret)
        if self.entry is not None:
            yield _field(_AUTHORITY, public_key_of(self.entry.authority))
            if self.entry.issuer != self.entry.authority:
                yield _field(_ISSUER, public_key_of(self.entry.issuer))
            yield _field(_TOKEN, self.entry.token)
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
    """Read the invite in a text that a user pasted; raises `RecordError` that says what is wrong with it."""
    line = invite_in(text)
    if not line.startswith(PREFIX):
        raise RecordError(f"this is not an invite: it does not begin with {PREFIX!r}")
    if len(line) > MAX_INVITE_CHARS:
        raise RecordError("this is not an invite: it is too long")
    body = _body(line.removeprefix(PREFIX))
    if body[0] not in (VERSION, GUARDED_VERSION):
        raise RecordError(f"the invite has version {body[0]}, this Shoal reads up to {GUARDED_VERSION}; update Shoal")
    return _invite_from(body[1:], guarded=body[0] == GUARDED_VERSION)


def is_invite(text: str) -> bool:
    """True if a user's argument is meant as an invite, not as a name."""
    return PREFIX in _bare(text)


def invite_in(text: str) -> str:
    """Return the one invite in a pasted text as a line, without quotes, marks of a mail's quotation and other words.

    Raises `RecordError` if there are several. If none is whole, what may be meant is returned as it is.
    """
    found = dict.fromkeys(_whole_invites(text.lower()))
    if len(found) > 1:
        raise RecordError(f"there are {len(found)} invites in this text: give one of them")
    bare = _bare(text)
    return next(iter(found), bare[max(0, bare.find(PREFIX)) :])


def _whole_invites(text: str) -> Iterator[str]:
    """Yield each invite whose checksum is right; that tells where it ends, as its lines may be broken."""
    for rest in text.split(PREFIX)[1:]:
        code = ""
        for word in islice(_WORD.finditer(rest), _MAX_PIECES):
            code += word[0]
            if len(code) > MAX_INVITE_CHARS:
                break
            if _decoded(code) is not None:
                yield PREFIX + code
                break


def _bare(text: str) -> str:
    """Take out what a terminal adds: breaks of lines, and the frame of a dialog that was selected with it."""
    return _ADDED.sub("", text).lower()


def _body(code: str) -> bytes:
    body = _decoded(code)
    if body is not None:
        return body
    strange = next((letter for letter in code if letter not in _ALPHABET), None)
    if strange is not None:
        raise RecordError(f"the invite is mistyped: it contains {strange!r}; copy the whole line again")
    raise RecordError("the invite is mistyped or cut off; copy the whole line again")


def _decoded(code: str) -> bytes | None:
    """Return what an invite's letters stand for, without the checksum; None if it is wrong."""
    try:
        raw = base64.b32decode(code.upper() + "=" * (-len(code) % 8))
    except (ValueError, binascii.Error):
        return None
    body, checksum = raw[:-_CHECKSUM_BYTES], raw[-_CHECKSUM_BYTES:]
    # The last test rejects other spellings of the same bytes: the last letter of base32 has unused bits.
    is_right = body and _checksum(body) == checksum and base64.b32encode(raw).decode().rstrip("=").lower() == code
    return body if is_right else None


def _invite_from(raw: bytes, *, guarded: bool) -> Invite:
    unique = (_NAME, _MODEL, _SECRET, *((_AUTHORITY, _ISSUER, _TOKEN) if guarded else ()))
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
        elif tag in unique:
            if tag in found:
                raise RecordError("the invite is damaged: a field appears twice")
            found[tag] = value
    name = found.get(_NAME, b"").decode("ascii", "replace")
    model_hash = found.get(_MODEL, b"").hex()
    if not is_swarm_name(name) or not is_model_hash(model_hash):
        raise RecordError("the invite is damaged: it names no swarm")
    secret = _exactly(found[_SECRET], SECRET_BYTES) if _SECRET in found else None
    return Invite(name, model_hash, tuple(addresses), secret, _pass_in(found) if guarded else None)


def _pass_in(found: dict[int, bytes]) -> Pass:
    if not found.keys() >= {_SECRET, _AUTHORITY, _TOKEN}:
        raise RecordError("the invite is damaged: a field is missing")
    authority = peer_id_of(_exactly(found[_AUTHORITY], 32))
    issuer = peer_id_of(_exactly(found[_ISSUER], 32)) if _ISSUER in found else authority
    return Pass(authority, issuer, _exactly(found[_TOKEN], TOKEN_BYTES))


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
