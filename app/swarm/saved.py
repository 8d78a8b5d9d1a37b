"""The swarms that a node has joined, saved in `swarms.json` in its home folder.

A swarm is saved with its name, its model's whole hash, the secret if it is private, the addresses from its invite, and
its creator's signed record once one was received. Of a guarded swarm (`app.swarm.certificates`) also its authority,
this node's certificate, and the issuer and token of an invite that was not used yet. At most one is active. The values
are immutable; `update` applies a function from old to new to the file under a lock, so that a command and a running
node never overwrite each other's changes. `app.joining` and `app.node` decide what to save.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from app.config.home import Home
from app.core.canonical_json import Fields, canonical, check_version, decode_object
from app.core.errors import HomeError, RecordError
from app.swarm.certificates import TOKEN_BYTES, Authority
from app.swarm.invite import SECRET_BYTES, Invite, Pass
from app.swarm.names import SwarmName, is_model_hash, is_swarm_name, pinned
from app.swarm.records import SwarmRecord, read_record, swarm_id
from p2p.errors import EnvelopeError
from p2p.platform import FileLock, write_private

VERSION = 1
MAX_SWARMS = 256
_MAX_FILE_BYTES = 4 * 2**20
_MAX_ADDRESSES = 16


@dataclass(frozen=True)
class SavedSwarm:
    """One swarm that this node has joined."""

    name: str
    model_hash: str
    joined_at_ms: int
    secret: bytes | None = field(default=None, repr=False)
    record: bytes | None = field(default=None, repr=False)  # the signed envelope of the swarm's record
    addresses: tuple[str, ...] = ()
    creator: str | None = None  # peer id of a guarded swarm's authority
    certificate: bytes | None = field(default=None, repr=False)
    entry: Pass | None = None  # an invite's pass that was not exchanged for a certificate yet

    @property
    def authority(self) -> Authority | None:
        """The authority of a guarded swarm, None for others."""
        if self.creator is None or self.secret is None:
            return None
        return Authority.of(self.id, self.secret, self.creator)

    @property
    def id(self) -> str:
        """The swarm's id."""
        return swarm_id(self.name, self.model_hash)

    def __str__(self) -> str:
        return pinned(self.name, self.model_hash)

    @classmethod
    def from_record(cls, record: SwarmRecord, *, now_ms: int, secret: bytes | None = None) -> SavedSwarm:
        """Make the entry of a swarm that was resolved by name or created here; one with a secret is guarded."""
        creator = None if secret is None else record.creator
        return cls(record.name, record.model_hash, now_ms, secret, record.raw, creator=creator)

    @classmethod
    def from_invite(cls, invite: Invite, *, now_ms: int) -> SavedSwarm:
        """Make the entry of a swarm from an invite; its record is not known yet."""
        creator = None if invite.entry is None else invite.entry.authority
        return cls(
            invite.name,
            invite.model_hash,
            now_ms,
            invite.secret,
            None,
            invite.addresses,
            creator=creator,
            entry=invite.entry,
        )


@dataclass(frozen=True)
class SavedSwarms:
    """All saved swarms, in the order joined, and the id of the active one."""

    swarms: tuple[SavedSwarm, ...] = ()
    active_id: str | None = None

    @property
    def active(self) -> SavedSwarm | None:
        """The swarm that this node takes part in, None if none."""
        return next((swarm for swarm in self.swarms if swarm.id == self.active_id), None)

    def matching(self, wanted: SwarmName) -> tuple[SavedSwarm, ...]:
        """Return the saved swarms with this name whose model matches the pin."""
        return tuple(s for s in self.swarms if s.name == wanted.name and wanted.allows(s.model_hash))

    def joined(self, swarm: SavedSwarm) -> SavedSwarms:
        """Return a copy with `swarm` saved and active; fields that it lacks keep their saved values."""
        known = next((old for old in self.swarms if old.id == swarm.id), None)
        if known is None:
            if len(self.swarms) >= MAX_SWARMS:
                raise HomeError(f"the limit of {MAX_SWARMS} saved swarms is reached: leave one with `shoal leave NAME`")
            return SavedSwarms((*self.swarms, swarm), swarm.id)
        merged = replace(
            known,
            secret=swarm.secret or known.secret,
            record=swarm.record or known.record,
            addresses=swarm.addresses or known.addresses,
            creator=swarm.creator or known.creator,
            certificate=swarm.certificate or known.certificate,
            # A new certificate has used up the pass.
            entry=swarm.entry or (known.entry if swarm.certificate is None else None),
        )
        return SavedSwarms(tuple(merged if old.id == swarm.id else old for old in self.swarms), swarm.id)

    def kept(self, swarm: SavedSwarm) -> SavedSwarms:
        """Return a copy with `swarm` saved, and the same one active as before."""
        return replace(self.joined(swarm), active_id=self.active_id)

    def left(self, identifier: str) -> SavedSwarms:
        """Return a copy without the swarm of this id."""
        rest = tuple(swarm for swarm in self.swarms if swarm.id != identifier)
        return SavedSwarms(rest, None if self.active_id == identifier else self.active_id)


def load(home: Home) -> SavedSwarms:
    """Read the saved swarms; raises `HomeError` for a damaged file, as it may hold the only copy of a secret."""
    path = home.swarms_file
    try:
        with open(path, "rb") as file:
            raw = file.read(_MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return SavedSwarms()
    except OSError as error:
        raise HomeError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        return _parse(raw, path)
    except RecordError as error:
        raise HomeError(f"{error}; restore it from a backup, or move it away to forget all swarms") from error


def update(home: Home, change: Callable[[SavedSwarms], SavedSwarms]) -> SavedSwarms:
    """Apply a change to the file under its lock and return the new value; raises `HomeError` if that fails."""
    try:
        with FileLock.acquire(home.swarms_file.with_suffix(".lock"), timeout_s=10.0):
            before = load(home)
            after = change(before)
            if after != before:
                write_private(home.swarms_file, _document(after))
    except TimeoutError as error:
        raise HomeError(f"{error}; is another `shoal` command hanging?") from error
    except OSError as error:
        raise HomeError(f"{home.swarms_file} cannot be written: {error.strerror or error}") from error
    return after


def _document(saved: SavedSwarms) -> bytes:
    swarms = [
        {
            "name": swarm.name,
            "model": swarm.model_hash,
            "joined_at_ms": swarm.joined_at_ms,
            "secret": swarm.secret.hex() if swarm.secret else None,
            "record": base64.b64encode(swarm.record).decode() if swarm.record else None,
            "addresses": list(swarm.addresses),
            "creator": swarm.creator,
            "certificate": base64.b64encode(swarm.certificate).decode() if swarm.certificate else None,
            "issuer": swarm.entry.issuer if swarm.entry else None,
            "token": swarm.entry.token.hex() if swarm.entry else None,
        }
        for swarm in saved.swarms
    ]
    return canonical({"version": VERSION, "active": saved.active_id, "swarms": swarms}) + b"\n"


def _parse(raw: bytes, path: Path) -> SavedSwarms:
    fields = decode_object(raw, str(path), max_bytes=_MAX_FILE_BYTES)
    check_version(fields, "version", VERSION)
    swarms = tuple(_swarm(Fields.of(f"{path}: a swarm", item)) for item in fields.items("swarms", MAX_SWARMS))
    return SavedSwarms(swarms, fields.optional_text("active", 64))


def _swarm(fields: Fields) -> SavedSwarm:
    name, model_hash = fields.text("name", 63), fields.text("model", 64)
    if not is_swarm_name(name):
        fields.refuse("name", "a swarm's name")
    if not is_model_hash(model_hash):
        fields.refuse("model", "the hash of a manifest")
    creator, issuer = fields.optional_text("creator", 64), fields.optional_text("issuer", 64)
    entry = None
    if creator is not None and issuer is not None:
        entry = Pass(creator, issuer, fields.hex_bytes("token", TOKEN_BYTES))
    return SavedSwarm(
        name=name,
        model_hash=model_hash,
        joined_at_ms=fields.integer("joined_at_ms", 0, 2**62, 0),
        secret=None if fields.values.get("secret") is None else fields.hex_bytes("secret", SECRET_BYTES),
        record=_base64(fields, "record"),
        addresses=fields.texts("addresses", _MAX_ADDRESSES, 512, []),
        creator=creator,
        certificate=_base64(fields, "certificate"),
        entry=entry,
    )


def _base64(fields: Fields, name: str) -> bytes | None:
    text: Any = fields.optional_text(name, 8192)
    if text is None:
        return None
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        fields.refuse(name, "base64")


def record_of(swarm: SavedSwarm) -> SwarmRecord | None:
    """Return the saved record of a swarm, None if there is none or it is damaged."""
    if swarm.record is None:
        return None
    try:
        # Read as of a far future time: a machine that starts with its clock set back still accepts its records.
        record = read_record(swarm.record, now_ms=2**62)
    except EnvelopeError:
        return None
    return record if record.id == swarm.id else None
