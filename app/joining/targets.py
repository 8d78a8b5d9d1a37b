"""Which swarm a wish means, and the changes to the home folder that follow: what a node and a command share.

The `…_at_rest` functions act where no node runs. Only a bare name that is not remembered needs the network: its
members are asked in passing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from app.core.errors import AppError, UnknownSwarm, UsageError
from app.snapshot.views import SwarmView
from app.swarm.invite import MAX_ADDRESSES, Invite, is_invite, parse_invite
from app.swarm.names import SwarmName, pinned
from app.swarm.saved import SavedSwarm, SavedSwarms
from p2p.addresses import Scope, parse_address

_OWN_ADDRESSES = 4


def view_of(swarm: SavedSwarm, *, active: bool) -> SwarmView:
    """A remembered swarm without its secret."""
    private = swarm.secret is not None
    return SwarmView(swarm.name, swarm.model_hash, str(swarm), private, active, swarm.joined_at_ms)


def target_swarm(known: SavedSwarms, target: str) -> SavedSwarm | SwarmName:
    """The swarm that a person means, or the name that members have to be asked about."""
    if is_invite(target):
        return _invited(known, parse_invite(target))
    wanted = SwarmName.parse(target)
    found = known.matching(wanted)
    if not found:
        return wanted
    return _only(found, wanted)


def _invited(known: SavedSwarms, invite: Invite) -> SavedSwarm:
    """The swarm of an invite; one with another secret must not undo what this node knows and may be right."""
    swarm = SavedSwarm.from_invite(invite, now_ms=time.time_ns() // 10**6)
    old = next((one for one in known.swarms if one.id == swarm.id), None)
    if old is not None and old.secret != swarm.secret:
        raise AppError(
            f"this node knows {old} with another secret: if this invite is the right one, "
            f"forget the old one first with `shoal leave {old}`",
            code="other_secret",
        )
    return swarm


def named(known: SavedSwarms, name: str | None) -> SavedSwarm:
    """One remembered swarm by its name, or the active one."""
    if name is None:
        if known.active is None:
            raise UsageError("this node is in no swarm: say which one, or go to one with `shoal join`")
        return known.active
    wanted = SwarmName.parse(name)
    found = known.matching(wanted)
    if not found:
        raise UnknownSwarm(f"this node does not remember a swarm {wanted}: `shoal swarms` lists those it does")
    return _only(found, wanted)


def _only(found: tuple[SavedSwarm, ...], wanted: SwarmName) -> SavedSwarm:
    if len(found) > 1:
        hashes = tuple(swarm.model_hash for swarm in found)
        names = ", ".join(pinned(swarm.name, swarm.model_hash, hashes) for swarm in found)
        raise UsageError(f"several swarms are called {wanted}: write one of {names}")
    return found[0]


def invite_to(swarm: SavedSwarm, own: Iterable[str], others: Iterable[str] = ()) -> Invite:
    """The invite to a swarm through this node, and through other members where there is room."""
    first = _worth_telling(own)[:_OWN_ADDRESSES]
    rest = [address for address in dict.fromkeys(others) if address not in first]
    return Invite(swarm.name, swarm.model_hash, tuple([*first, *rest])[:MAX_ADDRESSES], swarm.secret)


def _worth_telling(addresses: Iterable[str]) -> list[str]:
    """The ones that reach furthest first; a loopback address only where there is no other."""
    parsed = [parse_address(text) for text in dict.fromkeys(addresses)]
    rank = {Scope.PUBLIC: 0, Scope.RELAY: 1, Scope.LAN: 2, Scope.LOOPBACK: 3}
    usable = sorted((address for address in parsed if address.scope in rank), key=lambda one: rank[one.scope])
    return [str(address) for address in usable]
