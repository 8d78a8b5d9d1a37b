"""Maps settings to the libp2p network: its configuration, changes at run time, and the view of its state.

`app.node.network_owner` opens and closes the network.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal, cast

from app.config.file import Config
from app.courtesy.rules import limits_at
from app.courtesy.watch import local_now
from app.snapshot.views import NetworkView, PublicView
from app.swarm.saved import SavedSwarm
from p2p.addresses import parse_address, parse_known
from p2p.host.admission import DenyList
from p2p.network import Libp2pNetwork, NetworkConfig

Means = Literal["mdns", "dht", "invite", "remembered", "public"]
MAX_STRANGERS = 16


def network_config(
    peers_file: Path, config: Config, swarm: SavedSwarm | None, bound: Sequence[str] = ()
) -> NetworkConfig:
    """Return the network configuration of a node in `swarm`; `bound` are the addresses that it listened on before.

    `bound` is reused, so that other peers find the node again. Without it and without a `listen` setting the default
    port is used, or any free one if that is taken; a port from the settings is used or fails.
    """
    settings = config.settings
    listen = settings.listen if config.explicit("listen") else ()
    discovery = frozenset(cast(tuple[Means, ...], settings.discovery))
    if not uses_public(config, private=swarm is not None and swarm.secret is not None):
        discovery -= {"public"}
    return NetworkConfig(
        listen=tuple(bound) or listen,
        advertise=settings.advertise,
        peers=settings.peers,
        discovery=discovery,
        public_entries=settings.public_entries,
        remember_at=peers_file,
        secret=swarm.secret if swarm is not None else None,
        map_port=settings.map_port,
        relay=None if settings.relay else False,
        deny=settings.deny,
    )


def uses_public(config: Config, *, private: bool) -> bool:
    """True if a swarm is to be looked up in the public directory; a private one only if the user said so."""
    return "public" in config.settings.discovery and (not private or config.settings.public_private)


def named_peers(config: Config, swarm: SavedSwarm | None) -> dict[str, list[str]]:
    """Return the peers named in the settings and in the swarm's invite: peer id to addresses."""
    addresses = [parse_address(text) for text in config.settings.peers]
    if swarm is not None and "invite" in config.settings.discovery:
        addresses += parse_known(swarm.addresses)
    found: dict[str, list[str]] = {}
    for address in addresses:
        if address.peer is not None:
            found.setdefault(address.peer, []).append(str(address))
    return found


async def apply_live(network: Libp2pNetwork, config: Config) -> None:
    """Apply the settings that can change at run time: public directory, bandwidth, relaying, and denied peers."""
    settings = config.settings
    network.use_public(uses_public(config, private=network.is_private))
    network.bandwidth.set_limits(*limits_at(settings, local_now()))
    network.allow_relaying(settings.relay)
    denied = network.host.admission.deny = DenyList.parse(settings.deny)
    for connection in network.host.connections():
        ip = connection.ip
        if connection.peer in denied.peers or (ip is not None and denied.denies_ip(ip)):
            await network.disconnect(connection.peer)


def network_view(network: Libp2pNetwork | None, config: Config, members: Collection[str] = ()) -> NetworkView:
    """Return the view of a node's network; linked peers that are not in `members` are listed as strangers."""
    if network is None:
        return NetworkView(discovery=config.settings.discovery)
    reach, public, mapper = network.reachability, network.public, network.traversal.mapper
    mapping = None if mapper is None else mapper.mapping
    return NetworkView(
        advertised=tuple(network.addresses()),
        reach=str(reach.state),
        verified=tuple(str(address) for address in reach.verified),
        relaying=network.relay.enabled,
        links=len(network.links()),
        discovery=config.settings.discovery,
        mapping="" if mapping is None else f"{mapping.method} {mapping.ip}:{mapping.port}",
        mapping_problem="" if mapper is None else mapper.problem,
        relays=tuple(network.traversal.client.places),
        public=None if public is None else PublicView(**dataclasses.asdict(public.status)),
        strangers=tuple(link.peer for link in network.links() if link.peer not in members)[:MAX_STRANGERS],
    )
