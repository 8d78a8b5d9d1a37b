"""The limited invites that this node has made for guarded swarms, who used them and who waits, and revocation lists.

They are saved in `admission.json` in the home folder. The values are immutable and every decision on them is pure;
`update` applies one to the file under a lock, so that a token is never spent twice, not even by two processes of one
node. `app.swarm.certificates` says how tokens, certificates and lists work together; `app.joining.admission` signs.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from app.config.home import Home
from app.core.canonical_json import Fields, canonical, check_version, decode_object
from app.core.errors import AppError, HomeError, RecordError
from app.swarm.certificates import MAX_DELEGATES_LISTS
from p2p.platform import FileLock, write_private

VERSION = 1
MAX_INVITATIONS = 256  # of one swarm, open or closed
MAX_USES = 100
MAX_EXPIRY_S = 366 * 24 * 3600.0
MAX_WAITING = 32  # for approval, by one invite
MAX_NAME_CHARS = 32
_MAX_SWARMS = 256
_MAX_MS = 2**62
_MAX_REFUSED = 256
_MAX_FILE_BYTES = 16 * 2**20
_KEPT_MS = 30 * 24 * 3600 * 1000  # how long an invite that nobody used stays listed after its expiry


@dataclass(frozen=True)
class InviteLimits:
    """Limits of a new invite: when it expires, how many may use it, and with what consequence."""

    expires_in_s: float = 7 * 24 * 3600.0
    uses: int = 1
    approve: bool = False  # each newcomer waits until the issuer's owner lets it in
    delegate: bool = False  # those that join with it may invite others; only the creator can make such an invite


@dataclass(frozen=True)
class Guest:
    """A peer that was admitted with an invite, or waits for it; `name` is its own word."""

    peer: str
    name: str
    at_ms: int


class Verdict(Enum):
    """The answer to a newcomer that shows a token."""

    ADMITTED = "admitted"
    PENDING = "approval_pending"
    UNKNOWN = "invite_unknown"
    EXPIRED = "invite_expired"
    USED = "invite_used"
    REFUSED = "invite_refused"
    CROWDED = "invite_crowded"


@dataclass(frozen=True)
class Invitation:
    """One invite that this node made, known by the hash of its token."""

    token_hash: str
    made_at_ms: int
    expires_at_ms: int
    uses: int = 1
    approve: bool = False
    delegate: bool = False
    cancelled: bool = False
    admitted: tuple[Guest, ...] = ()
    waiting: tuple[Guest, ...] = ()
    refused: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """The invite's name for people: 8 digits of its token's hash."""
        return self.token_hash[:8]

    @property
    def has_use(self) -> bool:
        """True if it was neither cancelled nor used up."""
        return not self.cancelled and len(self.admitted) < self.uses

    def is_open(self, now_ms: int) -> bool:
        """True if somebody can still be admitted with it who has not asked yet."""
        return self.has_use and now_ms < self.expires_at_ms

    def admit(self, peer: str, name: str, now_ms: int) -> tuple[Invitation, Verdict]:
        """Decide on a peer that shows this invite's token, and note it.

        An admitted peer may ask again at any time, and one that asked for approval in time may wait beyond the expiry.
        """
        if any(guest.peer == peer for guest in self.admitted):
            return self, Verdict.ADMITTED
        if peer in self.refused:
            return self, Verdict.REFUSED
        if self.cancelled:
            return self, Verdict.UNKNOWN
        if len(self.admitted) >= self.uses:
            return self, Verdict.USED
        if any(waiting.peer == peer for waiting in self.waiting):
            return self, Verdict.PENDING
        if now_ms >= self.expires_at_ms:
            return self, Verdict.EXPIRED
        guest = Guest(peer, name, now_ms)
        if not self.approve:
            return replace(self, admitted=(*self.admitted, guest)), Verdict.ADMITTED
        if len(self.waiting) >= MAX_WAITING:
            return self, Verdict.CROWDED
        return replace(self, waiting=(*self.waiting, guest)), Verdict.PENDING

    def decide(self, peer: str, *, approve: bool) -> Invitation:
        """Approve or refuse a waiting peer; raises `AppError` if the invite has no use left."""
        guest = next((one for one in self.waiting if one.peer == peer), None)
        if guest is None:
            return self
        rest = tuple(one for one in self.waiting if one.peer != peer)
        if not approve:
            return replace(self, waiting=rest, refused=(*self.refused, peer)[-_MAX_REFUSED:])
        if len(self.admitted) >= self.uses:
            raise AppError(f"the invite {self.id} has no use left: make a new one with `shoal invite`")
        return replace(self, waiting=rest, admitted=(*self.admitted, guest))


@dataclass(frozen=True)
class SwarmLedger:
    """The invites that this node made for one swarm, and the revocation lists that it knows of it."""

    invitations: tuple[Invitation, ...] = ()
    lists: tuple[bytes, ...] = field(default=(), repr=False)

    def issued(self, invitation: Invitation, now_ms: int) -> SwarmLedger:
        """Return a copy with one more invite, without those that expired long ago unused; raises `AppError` if full.

        Where there is no room, the oldest closed ones go first, those that nobody used before the others.
        """
        used_or_new = [one for one in self.invitations if one.admitted or now_ms - one.expires_at_ms < _KEPT_MS]
        closed = sorted((one for one in used_or_new if not one.is_open(now_ms)), key=lambda one: len(one.admitted) > 0)
        gone = {one.token_hash for one in closed[: max(0, len(used_or_new) - MAX_INVITATIONS + 1)]}
        kept = [one for one in used_or_new if one.token_hash not in gone]
        if len(kept) >= MAX_INVITATIONS:
            raise AppError(f"{MAX_INVITATIONS} invites are open: cancel some with `shoal invites cancel`")
        return replace(self, invitations=(*kept, invitation))

    def admit(self, token: bytes, peer: str, name: str, now_ms: int) -> tuple[SwarmLedger, Verdict, Invitation | None]:
        """Decide on a peer that shows a token, and note it."""
        wanted = hash_of(token)
        for at, one in enumerate(self.invitations):
            if one.token_hash == wanted:
                changed, verdict = one.admit(peer, name, now_ms)
                return self._with(at, changed), verdict, changed
        return self, Verdict.UNKNOWN, None

    def decide(self, peer: str, *, approve: bool) -> SwarmLedger:
        """Approve or refuse a peer wherever it waits; raises `AppError` if it waits nowhere."""
        waits = [at for at, one in enumerate(self.invitations) if any(guest.peer == peer for guest in one.waiting)]
        if not waits:
            raise AppError(f"{peer} does not wait for approval: `shoal invites` lists those that do", code="not_found")
        changed = self
        for at in waits:
            changed = changed._with(at, self.invitations[at].decide(peer, approve=approve))
        return changed

    def cancelled(self, identifier: str) -> SwarmLedger:
        """Return a copy in which an invite can no longer be used; raises `AppError` if there is no such invite."""
        found = [at for at, one in enumerate(self.invitations) if one.id == identifier]
        if not found:
            raise AppError(f"unknown invite {identifier!r}: `shoal invites` lists them", code="not_found")
        changed = self
        for at in found:
            changed = changed._with(at, replace(self.invitations[at], cancelled=True, waiting=()))
        return changed

    def _with(self, at: int, changed: Invitation) -> SwarmLedger:
        return replace(self, invitations=(*self.invitations[:at], changed, *self.invitations[at + 1 :]))


def hash_of(token: bytes) -> str:
    """Return the hash by which an invite's token is known."""
    return hashlib.sha256(b"shoal token\0" + token).hexdigest()


def new_invitation(token: bytes, limits: InviteLimits, now_ms: int) -> Invitation:
    """Return the invite of a new token."""
    expires_at_ms = now_ms + int(limits.expires_in_s * 1000)
    return Invitation(hash_of(token), now_ms, expires_at_ms, limits.uses, limits.approve, limits.delegate)


# --- the file --------------------------------------------------------------------------------------------------------


def load(home: Home, swarm: str) -> SwarmLedger:
    """Read what is saved of a swarm, named by its authority's id; raises `HomeError` for a damaged file."""
    return _read(home.admission_file).get(swarm, SwarmLedger())


def update(home: Home, swarm: str, change: Callable[[SwarmLedger], SwarmLedger]) -> SwarmLedger:
    """Apply a change to one swarm's part of the file under its lock and return it; raises `HomeError` if that fails."""
    path = home.admission_file
    try:
        with FileLock.acquire(path.with_name(path.name + ".lock"), timeout_s=10.0):
            ledgers = dict(_read(path))
            before = ledgers.get(swarm, SwarmLedger())
            after = change(before)
            if after != before:
                ledgers[swarm] = after
                write_private(path, _document(ledgers))
    except TimeoutError as error:
        raise HomeError(f"{error}; is another `shoal` command hanging?") from error
    except OSError as error:
        raise HomeError(f"{path} cannot be written: {error.strerror or error}") from error
    return after


def _read(path: Path) -> Mapping[str, SwarmLedger]:
    try:
        with open(path, "rb") as file:
            raw = file.read(_MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise HomeError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        fields = decode_object(raw, str(path), max_bytes=_MAX_FILE_BYTES)
        check_version(fields, "version", VERSION)
        swarms = fields.inner("swarms")
        return {name: _ledger(swarms.inner(name)) for name in list(swarms.values)[:_MAX_SWARMS]}
    except RecordError as error:
        raise HomeError(f"{error}; restore it from a backup, or move it away to forget all invites") from error


def _document(ledgers: Mapping[str, SwarmLedger]) -> bytes:
    def guests(some: tuple[Guest, ...]) -> list[dict[str, Any]]:
        return [{"peer": guest.peer, "name": guest.name, "at_ms": guest.at_ms} for guest in some]

    swarms = {
        name: {
            "invites": [
                {
                    "token_hash": one.token_hash,
                    "made_at_ms": one.made_at_ms,
                    "expires_at_ms": one.expires_at_ms,
                    "uses": one.uses,
                    "approve": one.approve,
                    "delegate": one.delegate,
                    "cancelled": one.cancelled,
                    "admitted": guests(one.admitted),
                    "waiting": guests(one.waiting),
                    "refused": list(one.refused),
                }
                for one in ledger.invitations
            ],
            "lists": [base64.b64encode(raw).decode() for raw in ledger.lists],
        }
        for name, ledger in ledgers.items()
    }
    return canonical({"version": VERSION, "swarms": swarms}) + b"\n"


def _ledger(fields: Fields) -> SwarmLedger:
    invitations = tuple(_invitation(Fields.of("an invite", item)) for item in fields.items("invites", MAX_INVITATIONS))
    return SwarmLedger(invitations, tuple(_decoded(fields, text) for text in _list_texts(fields)))


def _list_texts(fields: Fields) -> tuple[str, ...]:
    return fields.texts("lists", MAX_DELEGATES_LISTS + 1, 8192, [])


def _decoded(fields: Fields, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        fields.refuse("lists", "base64")


def _invitation(fields: Fields) -> Invitation:
    return Invitation(
        token_hash=fields.hex_bytes("token_hash", 32).hex(),
        made_at_ms=fields.integer("made_at_ms", 0, _MAX_MS),
        expires_at_ms=fields.integer("expires_at_ms", 0, _MAX_MS),
        uses=fields.integer("uses", 1, MAX_USES),
        approve=fields.flag("approve"),
        delegate=fields.flag("delegate"),
        cancelled=fields.flag("cancelled", default=False),
        admitted=_guests(fields, "admitted", MAX_USES),
        waiting=_guests(fields, "waiting", MAX_WAITING),
        refused=fields.texts("refused", _MAX_REFUSED, 64, []),
    )


def _guests(fields: Fields, name: str, most: int) -> tuple[Guest, ...]:
    items = [Fields.of(f"an invite: {name}", item) for item in fields.items(name, most, [])]
    return tuple(
        Guest(one.text("peer", 64), one.text("name", MAX_NAME_CHARS), one.integer("at_ms", 0, _MAX_MS)) for one in items
    )
