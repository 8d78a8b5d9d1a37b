"""Announces this node on the local network by multicast DNS, and finds others there, with the zeroconf library.

The service is `_shoal._udp.local.`; the TXT entries `a0` to `a7` are the node's addresses, each with its peer id.
Zeroconf runs in threads of its own; the names it finds are passed to trio through a bounded queue. It speaks on those
IPv4 addresses that the machine has when it starts, so it is started again whenever they change. What to do with a found
peer is up to the caller.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from p2p.addresses import Address, BadAddress, IPAddress, Scope, parse_address
from p2p.sockets import own_ips, recent_interfaces

if TYPE_CHECKING:
    from zeroconf import ServiceInfo, Zeroconf

SERVICE = "_shoal._udp.local."
MAX_ADDRESSES = 8
MAX_PENDING = 256
_RESOLVE_MS = 2000
_CHECK_S = 10.0
_NETWORK_CHECK_S = 2.0  # no event that all systems have tells of a change of the network
_RESOLVERS = 4

log = logging.getLogger("shoal.p2p.mdns")

Found = Callable[[str, list[Address]], None]


class LocalNetwork:
    """Announces this node on the LAN and calls `found` for each other node."""

    def __init__(self, peer_id: str, addresses: Callable[[], Sequence[Address]], found: Found) -> None:
        self._peer_id = peer_id
        self._addresses = addresses
        self._found = found

    async def run(self) -> None:
        """Announce and browse until cancelled, also on networks that this machine joins later."""
        while True:
            addresses = _own_ipv4()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._take_part)
                while _own_ipv4() == addresses:  # noqa: ASYNC110
                    await trio.sleep(_NETWORK_CHECK_S)
                log.info("mDNS: starting again, as the addresses of this machine have changed")
                nursery.cancel_scope.cancel()

    async def _take_part(self) -> None:
        """Announce and browse until cancelled; the announcement is updated when the node's addresses change."""
        import zeroconf

        names_in, names = trio.open_memory_channel[str](MAX_PENDING)
        token = trio.lowlevel.current_trio_token()

        def on_service(zeroconf: Zeroconf, service_type: str, name: str, state_change: Any) -> None:
            if state_change.name in ("Added", "Updated"):
                token.run_sync_soon(_enqueue, names_in, name)

        daemon = await trio.to_thread.run_sync(zeroconf.Zeroconf)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._announce, daemon)
                for _ in range(_RESOLVERS):
                    nursery.start_soon(self._resolve, daemon, names.clone())
                # Browsing sends its first query at once, so it starts after the resolvers.
                await trio.to_thread.run_sync(lambda: zeroconf.ServiceBrowser(daemon, SERVICE, handlers=[on_service]))
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(daemon.close)

    async def _announce(self, daemon: Zeroconf) -> None:
        announced: list[Address] = []
        while True:
            direct = [address for address in self._addresses() if address.ip is not None and address.relay is None]
            addresses = sorted(direct, key=lambda address: address.scope)[:MAX_ADDRESSES]  # local ones first
            if addresses and addresses != announced:
                info = self._info(addresses)
                if announced:
                    await trio.to_thread.run_sync(daemon.update_service, info)
                else:
                    # The name is derived from the peer id, so it is unique and the check for conflicts can be skipped.
                    await trio.to_thread.run_sync(partial(daemon.register_service, info, cooperating_responders=True))
                announced = addresses
            await trio.sleep(_CHECK_S)

    def _info(self, addresses: list[Address]) -> ServiceInfo:
        from zeroconf import ServiceInfo

        # A DNS label has at most 63 characters; the whole peer id is in the TXT record.
        label = self._peer_id[-32:]
        return ServiceInfo(
            SERVICE,
            f"{label}.{SERVICE}",
            port=addresses[0].port,
            properties={f"a{index}": str(address) for index, address in enumerate(addresses)},
            server=f"{label}.local.",
            parsed_addresses=[address.host for address in addresses],  # others cannot resolve the name without one
        )

    async def _resolve(self, daemon: Zeroconf, names: trio.MemoryReceiveChannel[str]) -> None:
        async for name in names:
            try:
                info = await trio.to_thread.run_sync(daemon.get_service_info, SERVICE, name, _RESOLVE_MS)
            except Exception as error:  # anybody on the LAN makes up names, and the library refuses some of them
                log.debug("mDNS: %r cannot be resolved: %s", name, error)
                continue
            if info is not None:
                self._report(info.properties)

    def _report(self, properties: dict[bytes, bytes | None]) -> None:
        """Pass the addresses of one announcement on: those of the first peer in it that are in this network."""
        said: list[Address] = []
        for index in range(MAX_ADDRESSES):
            try:
                said.append(parse_address((properties.get(b"a%d" % index) or b"").decode()))
            except (BadAddress, UnicodeDecodeError):
                continue
        peer = said[0].peer if said else None
        near = [address for address in said if address.peer == peer and _is_near(address)]
        if peer is not None and peer != self._peer_id and near:
            log.debug("mDNS: %s at %s", peer, near)
            self._found(peer, near)


def _own_ipv4() -> set[IPAddress]:
    return {ip for ip in own_ips() if ip.version == 4}


def _is_near(address: Address) -> bool:
    """True for an address of a local network; a public one only if it is in a network of this machine."""
    if address.scope in (Scope.LOOPBACK, Scope.LAN):
        return True
    ip = address.ip if address.scope is Scope.PUBLIC else None
    return ip is not None and any(ip in own.network for own in recent_interfaces())


def _enqueue(names: trio.MemorySendChannel[str], name: str) -> None:
    try:
        names.send_nowait(name)
    except (trio.WouldBlock, trio.ClosedResourceError, trio.BrokenResourceError):
        log.debug("dropped an mDNS answer: too many at once")
