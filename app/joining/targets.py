"""Maps a user's argument (name, pinned name or invite) to a saved swarm, and makes invites. Pure.

Shared by a running node (`app.node.swarm_switcher`) and by commands without one (`app.joining.offline`). Only a name
that is not saved needs the network: `app.joining.name_lookup` resolves it.
"""

from __future__ import annotations

from collections.abc import Iterable

from app.core.errors import AppError, RecordError, UnknownSwarm, UsageError
from app.core.wall_clock import wall_ms
from app.snapshot.views import SwarmView
from app.swarm.invite import MAX_ADDRESSES, Invite, Pass, is_invite, parse_invite
from app.swarm.names import SwarmName, pinned
from app.swarm.saved import SavedSwarm, SavedSwarms
from p2p.addresses import Scope, parse_address, parse_known

_OWN_ADDRESSES = 4  # of this node in an invite; the rest of `MAX_ADDRESSES` is for other members


def view_of(swarm: SavedSwarm, *, active: bool) -> SwarmView:
    """Return a saved swarm as the API shows it, without its secret."""
    private = swarm.secret is not None
    return SwarmView(swarm.name, swarm.model_hash, str(swarm), private, active, swarm.joined_at_ms)


def target_swarm(known: SavedSwarms, target: str) -> SavedSwarm | SwarmName:
    """Return the swarm of an invite or saved name, or the parsed name if other peers have to be asked about it."""
    if is_invite(target):
        try:
            invite = parse_invite(target)
        except RecordError as error:
            raise UsageError(str(error)) from None
        return _invited(known, invite)
    wanted = SwarmName.parse(target)
    found = known.matching(wanted)
    if not found:
        return wanted
    return _only(found, wanted)


def _invited(known: SavedSwarms, invite: Invite) -> SavedSwarm:
    """Return the swarm of an invite; raises `AppError` if it is saved with another secret, as that may be right."""
    swarm = SavedSwarm.from_invite(invite, now_ms=wall_ms())
    old = next((one for one in known.swarms if one.id == swarm.id), None)
    if old is not None and (old.secret, old.creator) != (swarm.secret, swarm.creator):
        how = "as a public swarm" if old.secret is None else "with another secret"
        raise AppError(
            f"{old} is saved on this node {how}: if this invite is the right one, "
            f"remove the saved one first with `shoal leave {old}`",
            code="other_secret",
        )
    return swarm


def named(known: SavedSwarms, name: str | None) -> SavedSwarm:
    """Return a saved swarm by its name, or the active one if `name` is None."""
    if name is None:
        if known.active is None:
            raise AppError("this node is in no swarm: name one, or join one with `shoal join`", code="no_swarm")
        return known.active
    wanted = SwarmName.parse(name)
    found = known.matching(wanted)
    if not found:
        raise UnknownSwarm(f"unknown swarm {wanted}: `shoal swarms` lists those that this node has joined")
    return _only(found, wanted)


def _only(found: tuple[SavedSwarm, ...], wanted: SwarmName) -> SavedSwarm:
    if len(found) > 1:
        hashes = tuple(swarm.model_hash for swarm in found)
        names = ", ".join(pinned(swarm.name, swarm.model_hash, hashes) for swarm in found)
        raise UsageError(f"several swarms are called {wanted}: write one of {names}")
    return found[0]


def invite_to(swarm: SavedSwarm, own: Iterable[str], others: Iterable[str] = (), entry: Pass | None = None) -> Invite:
    """Return an invite with addresses of this node, `own`, and of other members as far as there is room.

    What others announce need not be an address. Such texts are left out, or one member could prevent all invites.

    One to a guarded swarm needs `entry`, the pass that `app.joining.admission.issue` made for it.
    """
    first = _best_first(own)[:_OWN_ADDRESSES]
    rest = [text for address in parse_known(others) if (text := str(address)) not in first]
    return Invite(swarm.name, swarm.model_hash, tuple([*first, *rest])[:MAX_ADDRESSES], swarm.secret, entry)


def _best_first(addresses: Iterable[str]) -> list[str]:
    """Sort addresses by reach: public, relayed, LAN, loopback; drops those of other scopes."""
    parsed = [parse_address(text) for text in dict.fromkeys(addresses)]
    rank = {Scope.PUBLIC: 0, Scope.RELAY: 1, Scope.LAN: 2, Scope.LOOPBACK: 3}
    usable = sorted((address for address in parsed if address.scope in rank), key=lambda one: rank[one.scope])
    return [str(address) for address in usable]
