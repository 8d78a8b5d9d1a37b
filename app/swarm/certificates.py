"""Certificates of guarded swarms, and the lists that revoke them. Pure.

A private swarm is *guarded* if it has an authority: its creator's peer id, which an invite names and every member
saves. In a guarded swarm the secret opens a connection and nothing more: a peer is served, and called, only if it is
the creator or has a certificate on its peer id. The secure channel proves the peer id, so a certificate that another
peer copies is worth nothing to it. Swarms without an authority are older, or public; their members need no certificate.

    shoal/certificate   v, swarm, peer, and unless empty: admits (true), by
    shoal/revocations   v, swarm, peers (at most 64 peer ids), and unless empty: by

`swarm` is the first 16 bytes, in hex, of an HMAC-SHA-256 with the swarm's secret over the swarm's id and its authority:
another swarm of the same name, model and creator has another one. `by` is the signer's own certificate in base64, where
the signer is not the creator.

Who may sign. The creator signs with its node's key. A certificate with `admits` that the creator signed makes its
holder a delegate. A delegate signs certificates without `admits`, with its own certificate as `by`; so a chain has at
most one step, and everybody can check it without asking anybody. Any other signer is rejected.

Tokens. An invite names the member that made it, the *issuer*, and holds 16 random bytes. The newcomer sends them to the
issuer, and to nobody else, which signs a certificate for the peer id at the other end (`app.joining.admission`). A
token is spent only once although nobody coordinates the members: no other member knows of it or could sign for it, and
the issuer writes down who uses it (`app.swarm.invitations`) before it signs. The same peer may ask again, and gets the
same certificate. While the issuer is offline its invites wait; those of the creator and of other delegates work on.

Revocation. Each signer has one list, of which the newest replaces the older ones. The creator's list applies to
everyone. A delegate's list applies to those that it admitted. Whoever is on the creator's list can no longer sign:
those that a revoked delegate admitted are out too, as it could have signed for anybody, at any pretended time. Members
pass lists on by gossip, on first contact, and when they compare tables; a list is kept only if its signature and its
signer's right were checked, and there is room for 32 delegates' lists.

Clocks. Only the issuer's own clock decides whether an invite has expired. Certificates and lists do not expire, and
their times only order the lists of one signer, so clocks that differ do no harm.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from app.core.canonical_json import Fields, canonical, check_version, decode_object
from p2p.envelope import NEVER, Envelope, Rule, parse, seal, verify
from p2p.errors import EnvelopeError, IdentityError
from p2p.identity import Identity, public_key_of

VERSION = 1
CERTIFICATE_DOMAIN = "shoal/certificate"
REVOCATIONS_DOMAIN = "shoal/revocations"
MAX_CERTIFICATE_BYTES = 1024
MAX_LIST_BYTES = 4096
MAX_REVOKED = 64  # by one signer
MAX_DELEGATES_LISTS = 32
TOKEN_BYTES = 16
_ID_BYTES = 16
_EVER = 2**62  # as the time of reading: these statements neither expire nor come from the future


@dataclass(frozen=True)
class Authority:
    """The creator of a guarded swarm, and the id that binds its statements to this one swarm."""

    creator: str
    swarm: str  # 32 hex digits

    @classmethod
    def of(cls, swarm_id: str, secret: bytes, creator: str) -> Authority:
        """Return the authority of the swarm with this id and secret."""
        digest = hmac.digest(secret, f"shoal guard\0{swarm_id}\0{creator}".encode(), "sha256")
        return cls(creator, digest[:_ID_BYTES].hex())


@dataclass(frozen=True)
class Certificate:
    """A signer's statement that a peer is a member; with `admits` the peer is a delegate."""

    peer: str
    signer: str
    admits: bool = False
    raw: bytes = field(default=b"", repr=False, compare=False)


@dataclass(frozen=True)
class RevocationList:
    """The peers whose membership one signer has ended; `sequence` orders the lists of a signer."""

    signer: str
    sequence: int
    peers: tuple[str, ...]
    raw: bytes = field(default=b"", repr=False, compare=False)


# --- signing ---------------------------------------------------------------------------------------------------------


def sign_certificate(
    identity: Identity, authority: Authority, peer: str, *, now_ms: int, admits: bool = False, by: bytes | None = None
) -> bytes:
    """Return a signed certificate for `peer`; `by` is the signer's own certificate unless it is the creator."""
    payload: dict[str, Any] = {"v": VERSION, "swarm": authority.swarm, "peer": peer}
    if admits:
        payload["admits"] = True
    payload |= _signer(by)
    return seal(identity, CERTIFICATE_DOMAIN, canonical(payload), sequence=now_ms, expires_at_ms=NEVER)


def sign_revocations(
    identity: Identity, authority: Authority, peers: Iterable[str], *, sequence: int, by: bytes | None = None
) -> bytes:
    """Return this node's signed list of revoked peers; `by` is its own certificate unless it is the creator."""
    payload = {"v": VERSION, "swarm": authority.swarm, "peers": sorted(peers)} | _signer(by)
    return seal(identity, REVOCATIONS_DOMAIN, canonical(payload), sequence=sequence, expires_at_ms=NEVER)


def _signer(by: bytes | None) -> dict[str, str]:
    return {} if by is None else {"by": base64.b64encode(by).decode()}


# --- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Statement:
    """The fields of either kind before the signer's right is checked."""

    swarm: str
    peers: tuple[str, ...]
    admits: bool
    by: bytes | None


def _certificate_in(envelope: Envelope) -> _Statement:
    fields = _fields(envelope, MAX_CERTIFICATE_BYTES)
    peer = fields.text("peer", 64)
    _check_peers(fields, "peer", (peer,))
    return _Statement(_swarm(fields), (peer,), fields.flag("admits", default=False), _by(fields))


def _list_in(envelope: Envelope) -> _Statement:
    fields = _fields(envelope, MAX_LIST_BYTES)
    peers = fields.texts("peers", MAX_REVOKED, 64)
    _check_peers(fields, "peers", peers)
    return _Statement(_swarm(fields), peers, False, _by(fields))


_CERTIFICATE_RULE: Rule[_Statement] = Rule(CERTIFICATE_DOMAIN, _certificate_in, MAX_CERTIFICATE_BYTES)
_LIST_RULE: Rule[_Statement] = Rule(REVOCATIONS_DOMAIN, _list_in, MAX_LIST_BYTES)


def read_certificate(raw: bytes, authority: Authority) -> Certificate:
    """Verify a certificate and its signer's right; raises `EnvelopeError` if anything is wrong."""
    envelope = parse(raw)
    said = verify(envelope, _CERTIFICATE_RULE, now_ms=_EVER)
    _check_right(envelope.peer, said, authority)
    return Certificate(said.peers[0], envelope.peer, said.admits, raw)


def read_revocations(envelope: Envelope, authority: Authority) -> RevocationList:
    """Verify a list in a parsed envelope and its signer's right; raises `EnvelopeError` if anything is wrong."""
    said = verify(envelope, _LIST_RULE, now_ms=_EVER)
    _check_right(envelope.peer, said, authority)
    return RevocationList(envelope.peer, envelope.sequence, said.peers, envelope.raw)


def _check_right(signer: str, said: _Statement, authority: Authority) -> None:
    """Raise `EnvelopeError` unless the creator signed, or a delegate whose certificate by the creator is enclosed."""
    if said.swarm != authority.swarm:
        raise EnvelopeError(f"the statement of {signer} belongs to another swarm")
    if signer == authority.creator:
        return
    if said.admits or said.by is None:
        raise EnvelopeError(f"{signer} may not sign for this swarm")
    envelope = parse(said.by)
    right = verify(envelope, _CERTIFICATE_RULE, now_ms=_EVER, peer=authority.creator)
    if right.swarm != authority.swarm or right.peers != (signer,) or not right.admits:
        raise EnvelopeError(f"{signer} may not sign for this swarm: its certificate does not let it admit others")


def _fields(envelope: Envelope, max_bytes: int) -> Fields:
    fields = decode_object(envelope.payload, envelope.domain, max_bytes=max_bytes)
    check_version(fields, "v", VERSION)
    return fields


def _swarm(fields: Fields) -> str:
    return fields.hex_bytes("swarm", _ID_BYTES).hex()


def _check_peers(fields: Fields, name: str, peers: tuple[str, ...]) -> None:
    for peer in peers:
        try:
            public_key_of(peer)
        except IdentityError:
            fields.refuse(name, "peer ids")


def _by(fields: Fields) -> bytes | None:
    text = fields.optional_text("by", 2 * MAX_CERTIFICATE_BYTES)
    if text is None:
        return None
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        fields.refuse("by", "base64")


# --- the lists in force ----------------------------------------------------------------------------------------------


class RevocationBook:
    """The newest list of the creator and of up to `MAX_DELEGATES_LISTS` delegates."""

    def __init__(self, authority: Authority) -> None:
        self._authority = authority
        self._lists: dict[str, RevocationList] = {}  # by signer

    def keep(self, envelope: Envelope) -> bool:
        """Keep a list if it is newer than its signer's last one; raises `EnvelopeError` if it is not valid.

        Old lists cost no signature check. A delegate that the creator revoked is not heard.
        """
        signer = envelope.peer
        known = self._lists.get(signer)
        if known is not None and envelope.sequence <= known.sequence:
            return False
        delegates = self._lists.keys() - {self._authority.creator}
        is_new_delegate = known is None and signer != self._authority.creator
        if signer in self._by_creator() or (is_new_delegate and len(delegates) >= MAX_DELEGATES_LISTS):
            return False
        self._lists[signer] = read_revocations(envelope, self._authority)
        for delegate in self._by_creator():
            self._lists.pop(delegate, None)
        return True

    def refuses(self, certificate: Certificate) -> bool:
        """True if the creator revoked the peer or the certificate's signer, or the signer revoked the peer."""
        creators = self._by_creator()
        if certificate.peer in creators or certificate.signer in creators:
            return True
        signers = self._lists.get(certificate.signer)
        return signers is not None and certificate.peer in signers.peers

    def revoked_by(self, signer: str) -> tuple[str, ...]:
        """Return the peers on a signer's list."""
        known = self._lists.get(signer)
        return () if known is None else known.peers

    def sequence_of(self, signer: str) -> int:
        """Return the number of a signer's list, 0 if there is none."""
        known = self._lists.get(signer)
        return 0 if known is None else known.sequence

    def statements(self) -> Iterator[bytes]:
        """Yield the lists to pass on, the creator's first."""
        first = self._lists.get(self._authority.creator)
        if first is not None:
            yield first.raw
        yield from (one.raw for signer, one in self._lists.items() if signer != self._authority.creator)

    def may_admit(self, peer: str, certificate: Certificate | None) -> bool:
        """True if a peer with this certificate can sign others: it is the creator or an unrevoked delegate."""
        if peer == self._authority.creator:
            return True
        return certificate is not None and certificate.admits and not self.refuses(certificate)

    def _by_creator(self) -> tuple[str, ...]:
        return self.revoked_by(self._authority.creator)
