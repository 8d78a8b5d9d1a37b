"""Admits newcomers to a guarded swarm: makes limited invites, exchanges their tokens for certificates, and revokes.

`AdmissionDesk` answers newcomers for a node that may sign certificates, `ask_admission` is what they call. Format and
reasoning are in `app.swarm.certificates`, the limits and the file in `app.swarm.invitations`; `app.membership.guard`
checks the certificates.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, TypeVar

import trio

from app.config.home import Home
from app.core.errors import AppError, HomeError, UsageError
from app.core.network import Network
from app.core.terminal_text import peer_words, peer_words_with_id, short_peer
from app.core.wall_clock import wall_ms
from app.membership import GuardedNetwork, wire
from app.snapshot.views import GuestView, InviteView
from app.swarm import invitations
from app.swarm.certificates import (
    MAX_REVOKED,
    Authority,
    RevocationBook,
    read_certificate,
    sign_certificate,
    sign_revocations,
)
from app.swarm.invitations import MAX_NAME_CHARS, Guest, Invitation, InviteLimits, SwarmLedger, Verdict, new_invitation
from app.swarm.invite import Invite, Pass, new_token
from app.swarm.saved import SavedSwarm
from p2p.addresses import Scope, parse_address
from p2p.envelope import parse
from p2p.errors import EnvelopeError, IdentityError, ProtocolError, Refused, RemoteError
from p2p.identity import Identity, public_key_of
from p2p.rate_limit import LogLimit, PeerRateLimit

TOKENS_AT_ONCE, TOKEN_EVERY_S = 8, 2  # that one peer may show
log = logging.getLogger("shoal.joining")
log.addFilter(LogLimit())  # peers can cause these lines

T = TypeVar("T")

ADMIT_TIMEOUT_S = 5.0
_MAX_REPORTED = 1000
_SHORTEST_ID = 6  # characters of a peer id's end, as they are shown
_AT_ONCE = 4  # newcomers whose tokens are looked up at a time
_TEXTS = {
    Verdict.PENDING.value: "{who} has to let this node in first",
    Verdict.UNKNOWN.value: "{who}, who made this invite, does not know it: it may have been cancelled",
    Verdict.EXPIRED.value: "the invite has expired: ask whoever sent it for a new one",
    Verdict.USED.value: "the invite was used already: ask whoever sent it for a new one",
    Verdict.REFUSED.value: "{who} refused to let this node in",
    Verdict.CROWDED.value: "too many others wait for approval with this invite",
    wire.REVOKED: "this node was removed from the swarm",
}


class NotAdmitted(AppError):
    """The member that made an invite does not admit this node, or not yet."""

    @property
    def is_pending(self) -> bool:
        """True if the issuer's owner has yet to decide."""
        return self.code == Verdict.PENDING.value


@dataclass(frozen=True)
class Signer:
    """A node's right to sign for a guarded swarm: its key, its own certificate, and the lists that it knows."""

    identity: Identity
    authority: Authority
    certificate: bytes | None
    book: RevocationBook

    @classmethod
    def of(cls, home: Home, identity: Identity, swarm: SavedSwarm) -> Signer:
        """Build it from the files of the home folder; raises `UsageError` if the swarm is not guarded. Blocks."""
        authority = _authority(swarm)
        book = RevocationBook(authority)
        for raw in invitations.load(home, authority.swarm).lists:
            book.keep(parse(raw))
        return cls(identity, authority, swarm.certificate, book)

    @property
    def is_creator(self) -> bool:
        """True if this node is the swarm's authority."""
        return self.identity.peer_id == self.authority.creator

    @property
    def may_admit(self) -> bool:
        """True if others accept the certificates that this node signs."""
        own = None if self.certificate is None else read_certificate(self.certificate, self.authority)
        return self.book.may_admit(self.identity.peer_id, own)

    def certify(self, peer: str, at_ms: int, *, delegate: bool) -> bytes:
        """Sign a certificate; the same peer, time and kind give the same bytes."""
        by = None if self.is_creator else self.certificate
        admits = delegate and self.is_creator
        return sign_certificate(self.identity, self.authority, peer, now_ms=at_ms, admits=admits, by=by)

    def revoke(self, peers: tuple[str, ...], now_ms: int) -> bytes:
        """Sign this node's list of revoked peers, newer than the last one."""
        by = None if self.is_creator else self.certificate
        sequence = max(now_ms, self.book.sequence_of(self.identity.peer_id) + 1)
        return sign_revocations(self.identity, self.authority, peers, sequence=sequence, by=by)


def unlimited_text(swarm: SavedSwarm) -> str:
    """Say why invites to a swarm cannot be limited."""
    if swarm.secret is None:
        return f"{swarm} is public: anybody can join it by name, so an invite to it has no limits"
    return (
        f"{swarm} was created before invites could be limited: whoever has an invite has its secret. "
        "To limit invites, create a new private swarm"
    )


# --- the commands of a member ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MadeInvite:
    """A new invite, and its limits if the swarm is guarded."""

    invite: Invite
    limits: Invitation | None = None

    def __str__(self) -> str:
        """Return the line to send to somebody."""
        return str(self.invite)


def only_here(invite: Invite) -> bool:
    """True if every address in an invite is a loopback address, which only this machine can dial."""
    return bool(invite.addresses) and all(
        parse_address(address).scope == Scope.LOOPBACK for address in invite.addresses
    )


def invite_facts(made: MadeInvite) -> dict[str, Any]:
    """Return a new invite as `--json` and the API show it; `limits` is null where it cannot be limited."""
    invite = made.invite
    return {
        "invite": str(invite),
        "name": invite.name,
        "manifest": invite.model_hash,
        "addresses": list(invite.addresses),
        "only_here": only_here(invite),
        "private": invite.secret is not None,
        "limits": None if made.limits is None else asdict(view_of_invite(made.limits)),
    }


def issue(
    home: Home, identity: Identity, swarm: SavedSwarm, limits: InviteLimits | None
) -> tuple[Pass | None, Invitation | None]:
    """Make the pass of a new invite and note its limits; nothing for a swarm that is not guarded. Blocks.

    Raises `AppError` if this node may not invite, and `UsageError` for `limits` on an invite that cannot be limited.
    """
    if swarm.authority is None and limits is None:
        return None, None
    signer = Signer.of(home, identity, swarm)
    limits = limits or InviteLimits()
    if not signer.may_admit:
        creator = short_peer(signer.authority.creator)
        raise AppError(
            f"this node may not invite to {swarm}: ask {creator}, who created it, or a member that may invite",
            code="may_not_invite",
        )
    if limits.delegate and not signer.is_creator:
        raise AppError(
            f"only the creator of {swarm} can make an invite whose guests may invite others", code="may_not_invite"
        )
    if not 1 <= limits.uses <= invitations.MAX_USES:
        raise UsageError(f"an invite can be used 1 to {invitations.MAX_USES} times, not {limits.uses} times")
    token, now_ms = new_token(), wall_ms()
    made = new_invitation(token, limits, now_ms)
    invitations.update(home, signer.authority.swarm, lambda ledger: ledger.issued(made, now_ms))
    return Pass(signer.authority.creator, identity.peer_id, token), made


def invite_views(home: Home, swarm: SavedSwarm) -> list[InviteView]:
    """List the limited invites that this node made for a swarm; none for one that is not guarded. Blocks."""
    authority = swarm.authority
    ledger = SwarmLedger() if authority is None else invitations.load(home, authority.swarm)
    return [view_of_invite(one) for one in ledger.invitations]


def view_of_invite(one: Invitation) -> InviteView:
    """Return an invite as the API shows it."""
    now_ms = wall_ms()
    if one.cancelled:
        state = "cancelled"
    elif len(one.admitted) >= one.uses:
        state = "used"
    else:
        state = "open" if one.is_open(now_ms) else "expired"
    return InviteView(
        id=one.id,
        state=state,
        made_at_ms=one.made_at_ms,
        expires_at_ms=one.expires_at_ms,
        uses=one.uses,
        approve=one.approve,
        delegate=one.delegate,
        admitted=tuple(guest_view(guest) for guest in one.admitted),
        waiting=tuple(guest_view(guest) for guest in one.waiting),
    )


def guest_view(guest: Guest) -> GuestView:
    """Return a guest as the API shows it."""
    return GuestView(guest.peer, guest.name, guest.at_ms)


def decide(home: Home, swarm: SavedSwarm, who: str, *, approve: bool) -> GuestView:
    """Let a waiting peer in or refuse it; `who` is its id, the end of it, or its name. Blocks.

    Raises `AppError` if it does not wait or the invite has no use left, `UsageError` if several are meant.
    """
    authority = _authority(swarm)
    waiting = [guest for one in invitations.load(home, authority.swarm).invitations for guest in one.waiting]
    guest = meant(who, waiting)
    invitations.update(home, authority.swarm, lambda ledger: ledger.decide(guest.peer, approve=approve))
    return guest_view(guest)


def meant(who: str, guests: Iterable[Guest]) -> Guest:
    """Return the one guest with this id, end of an id, or name.

    Raises `AppError` if there is none, `UsageError` if there are several.
    """
    found = {
        guest.peer: guest
        for guest in guests
        if who in (guest.peer, guest.name) or (len(who) >= _SHORTEST_ID and guest.peer.endswith(who))
    }
    if not found:
        raise AppError(f"{who!r} does not wait for approval: `shoal invites` lists those that do", code="not_found")
    if len(found) > 1:
        raise UsageError(f"several peers are called {who!r}: write the id of one of them: {', '.join(found)}")
    return next(iter(found.values()))


def cancel(home: Home, swarm: SavedSwarm, identifier: str) -> InviteView:
    """Make an invite useless; those that joined with it stay. Raises `AppError` for an unknown one. Blocks."""
    ledger = invitations.update(home, _authority(swarm).swarm, lambda ledger: ledger.cancelled(identifier))
    return next(view_of_invite(one) for one in ledger.invitations if one.id == identifier)


def revoked_here(home: Home, identity: Identity, swarm: SavedSwarm) -> tuple[str, ...]:
    """Return the peers on this node's revocation list. Blocks."""
    return Signer.of(home, identity, swarm).book.revoked_by(identity.peer_id)


def _authority(swarm: SavedSwarm) -> Authority:
    authority = swarm.authority
    if authority is None:
        raise UsageError(unlimited_text(swarm))
    return authority


def revoke(home: Home, identity: Identity, swarm: SavedSwarm, peer: str, *, remove: bool = False) -> bytes | None:
    """Add a peer to this node's revocation list, or remove it; returns the new list, None if nothing changed. Blocks.

    Raises `AppError` if this node has no right to.
    """
    signer = Signer.of(home, identity, swarm)
    if not signer.may_admit:
        raise AppError(f"this node may not remove members from {swarm}: its creator can", code="may_not_invite")
    try:
        public_key_of(peer)
    except IdentityError:
        raise UsageError(f"{peer!r} is not a peer id: `shoal peers` lists the members") from None
    if peer in (signer.authority.creator, identity.peer_id) and not remove:
        raise UsageError("neither this node nor the swarm's creator can be revoked")
    ledger = invitations.load(home, signer.authority.swarm)
    admitted = {guest.peer for one in ledger.invitations for guest in one.admitted}
    if not signer.is_creator and peer not in admitted and not remove:
        raise AppError(f"this node did not admit {short_peer(peer)}: ask the swarm's creator", code="may_not_invite")
    before = signer.book.revoked_by(identity.peer_id)
    after = tuple(one for one in before if one != peer) if remove else tuple(sorted({*before, peer}))
    if after == before:
        return None
    if len(after) > MAX_REVOKED:
        raise AppError(
            f"{MAX_REVOKED} peers are revoked, the most that a list holds: create a new swarm with a new secret",
            code="failed",
        )
    raw = signer.revoke(after, wall_ms())
    save_lists(home, signer.authority, [raw])
    return raw


def save_lists(home: Home, authority: Authority, lists: Iterable[bytes]) -> None:
    """Save revocation lists beside the others; of each signer the newest is kept. Blocks."""

    def change(ledger: SwarmLedger) -> SwarmLedger:
        book = RevocationBook(authority)
        for one in (*ledger.lists, *lists):
            book.keep(parse(one))
        return replace(ledger, lists=tuple(book.statements()))

    invitations.update(home, authority.swarm, change)


# --- the issuer ------------------------------------------------------------------------------------------------------


class RunsInThread(Protocol):
    """Runs a function that blocks; tests run it in place, as a simulated clock does not wait for threads."""

    async def __call__(self, function: Callable[[], T]) -> T: ...


class AdmissionDesk:
    """Answers `swarm.admit` on a guarded swarm's network, which `guard` wraps."""

    def __init__(
        self,
        network: Network,
        guard: GuardedNetwork,
        identity: Identity,
        home: Home,
        note: Callable[[str, str], None] = lambda kind, text: None,
        in_thread: RunsInThread | None = None,
    ) -> None:
        self._guard, self._identity, self._home, self._note = guard, identity, home, note
        self._slots = trio.CapacityLimiter(_AT_ONCE)
        self._in_thread = in_thread or self._run_in_thread
        self._asked = PeerRateLimit(burst=TOKENS_AT_ONCE, per_s=1 / TOKEN_EVERY_S)
        self._reported: set[str] = set()  # waiting peers that the user was told of
        self.waiting: tuple[Guest, ...] = ()  # for approval
        network.serve(wire.ADMIT, self._on_admit)

    async def _on_admit(self, peer: str, body: bytes) -> bytes:
        if not self._asked.take(peer, trio.current_time()):
            raise Refused("this node was asked too often; ask again in a few seconds")
        request = wire.AdmitRequest.decode(body)
        guard = self._guard
        if request.guard.hex() != guard.authority.swarm:
            raise RemoteError("this node is not a member of that swarm", code=wire.NOT_MEMBER)
        if not guard.may_admit:
            raise RemoteError("this node admits nobody", code=Verdict.UNKNOWN.value)
        if peer in guard.book.revoked_by(guard.authority.creator) + guard.book.revoked_by(self._identity.peer_id):
            raise RemoteError("the peer was removed from the swarm", code=wire.REVOKED)
        now_ms, name = wall_ms(), request.name[:MAX_NAME_CHARS]
        try:
            invitation, verdict = await self._in_thread(lambda: self._decide(request.token, peer, name, now_ms))
        except HomeError as error:
            log.warning("%s could not be admitted: %s", peer, error)
            raise Refused("this node cannot write its files; ask again later") from error
        if verdict is not Verdict.ADMITTED or invitation is None:
            self._report(peer, name, verdict)
            raise RemoteError(f"not admitted: {verdict.value}", code=verdict.value)
        guest = next(one for one in invitation.admitted if one.peer == peer)
        if guest.at_ms == now_ms:
            self._note("swarm", f"{peer_words(peer, name)} joined with the invite {invitation.id}")
        signer = Signer(self._identity, guard.authority, guard.certificate, guard.book)
        return signer.certify(peer, guest.at_ms, delegate=invitation.delegate)

    def _decide(self, token: bytes, peer: str, name: str, now_ms: int) -> tuple[Invitation | None, Verdict]:
        decided: tuple[Invitation | None, Verdict] = (None, Verdict.UNKNOWN)

        def change(ledger: SwarmLedger) -> SwarmLedger:
            nonlocal decided
            changed, verdict, invitation = ledger.admit(token, peer, name, now_ms)
            decided = (invitation, verdict)
            return changed

        self._look(invitations.update(self._home, self._guard.authority.swarm, change))
        return decided

    def reload(self) -> None:
        """Read again who waits for approval. Blocks."""
        self._look(invitations.load(self._home, self._guard.authority.swarm))

    def _look(self, ledger: SwarmLedger) -> None:
        self.waiting = tuple(guest for one in ledger.invitations if one.has_use for guest in one.waiting)

    async def _run_in_thread(self, function: Callable[[], T]) -> T:
        return await trio.to_thread.run_sync(function, limiter=self._slots)

    def _report(self, peer: str, name: str, verdict: Verdict) -> None:
        if verdict is Verdict.PENDING and peer not in self._reported and len(self._reported) < _MAX_REPORTED:
            self._reported.add(peer)
            who = peer_words_with_id(peer, name)
            self._note("request", f"{who} asks to join: `shoal invites approve {short_peer(peer)}` lets it in")


# --- the newcomer ----------------------------------------------------------------------------------------------------


async def ask_admission(
    network: Network, swarm: SavedSwarm, name: str, *, timeout_s: float = ADMIT_TIMEOUT_S
) -> SavedSwarm:
    """Exchange the token of a swarm's invite for a certificate, and return the swarm with it.

    `network` must have the swarm's secret. Raises `NotAdmitted`, or `P2PError` if the issuer does not answer.
    """
    authority, entry = swarm.authority, swarm.entry
    assert authority is not None, "only guarded swarms admit"
    assert entry is not None, "there is no token to exchange"
    request = wire.AdmitRequest(bytes.fromhex(authority.swarm), entry.token, name[:MAX_NAME_CHARS])
    try:
        raw = await network.call(entry.issuer, wire.ADMIT, request.encode(), timeout_s=timeout_s)
    except RemoteError as error:
        text = _TEXTS.get(error.code)
        if text is None:
            raise
        words = text.format(who=short_peer(entry.issuer))
        raise NotAdmitted(f"{swarm.name}: {words}", code=error.code, peers=(entry.issuer,)) from None
    try:
        certificate = read_certificate(raw, authority)
    except EnvelopeError as error:
        raise ProtocolError(f"{entry.issuer} sent a certificate that is not valid: {error}") from error
    if certificate.peer != network.peer_id or certificate.signer != entry.issuer:
        raise ProtocolError(f"{entry.issuer} sent a certificate of somebody else")
    return replace(swarm, certificate=raw, entry=None)
