"""Join, leave and invite while no node runs, by changing the home folder only.

A running node does the same in `app.node.swarm_switcher`.
"""

from __future__ import annotations

from collections.abc import Mapping

from app.config.file import load_config
from app.config.home import Home, hold
from app.joining.admission import MadeInvite, issue
from app.joining.targets import invite_to, named, target_swarm
from app.swarm.invitations import InviteLimits
from app.swarm.names import SwarmName
from app.swarm.saved import SavedSwarm, load, update
from p2p.addresses import advertised, parse_address
from p2p.identity import load_or_create


def join_offline(home: Home, target: str, environment: Mapping[str, str]) -> SavedSwarm:
    """Make `target`, a name or an invite, the active swarm of a home folder; asks the network for an unknown name."""
    meant = target_swarm(load(home), target)
    if isinstance(meant, SwarmName):
        from app.joining.name_lookup import resolve_blocking

        config = load_config(home.config_file, environment)
        with hold(home):  # no node may start meanwhile, as this uses its identity
            meant = resolve_blocking(home, config, meant)
    joined: SavedSwarm = meant
    update(home, lambda known: known.joined(joined))
    return joined


def leave_offline(home: Home, name: str) -> SavedSwarm:
    """Remove a saved swarm and return it; raises `UnknownSwarm` if there is none of this name."""
    swarm = named(load(home), name)
    update(home, lambda known: known.left(swarm.id))
    return swarm


def invite_offline(
    home: Home, name: str | None, environment: Mapping[str, str], limits: InviteLimits | None = None
) -> MadeInvite:
    """Make an invite with the addresses that a node here would listen on, and those from its own invite."""
    from p2p.sockets import own_ips

    swarm = named(load(home), name)
    settings = load_config(home.config_file, environment).settings
    identity = load_or_create(home.key_file)
    peer = identity.peer_id
    listening = [address for text in settings.listen if (address := parse_address(text)).port]
    own = advertised(listening, own_ips(), [parse_address(text) for text in settings.advertise])
    entry, invitation = issue(home, identity, swarm, limits)
    made = invite_to(swarm, [str(address.of(peer)) for address in own], swarm.addresses, entry)
    return MadeInvite(made, invitation)
