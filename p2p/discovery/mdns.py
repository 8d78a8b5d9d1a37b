"""Finding nodes on the same network by multicast DNS, with zeroconf; the node's addresses travel in the TXT record.

The service is `_shoal._udp.local.`; a TXT entry `a0`, `a1`, … is one address with the peer id in it. Zeroconf runs in
a thread of its own, and what it hears crosses into trio one call at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from p2p.addresses import Address, BadAddress, parse_address

if TYPE_CHECKING:
    from zeroconf import ServiceInfo, Zeroconf

SERVICE = "_shoal._udp.local."
MAX_ADDRESSES = 8
MAX_PENDING = 256
_RESOLVE_MS = 2000
_CHECK_S = 10.0
_RESOLVERS = 4

log = logging.getLogger("shoal.p2p.mdns")

Found = Callable[[str, list[Address]], None]


class LocalNetwork:
    """Announces this node on the LAN and reports others, until cancelled."""

    def __init__(self, peer_id: str, addresses: Callable[[], Sequence[Address]], found: Found) -> None:
        self._peer_id = peer_id
        self._addresses = addresses
        self._found = found

    async def run(self) -> None:
        """Announce and listen; the announcement follows the node's addresses."""
        import zeroconf

        names_in, names = trio.open_memory_channel[str](MAX_PENDING)
        token = trio.lowlevel.current_trio_token()

        def heard(zeroconf: Zeroconf, service_type: str, name: str, state_change: Any) -> None:
            if state_change.name in ("Added", "Updated"):
                token.run_sync_soon(_offer, names_in, name)

        daemon = await trio.to_thread.run_sync(zeroconf.Zeroconf)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._announce, daemon)
                for _ in range(_RESOLVERS):
                    nursery.start_soon(self._resolve, daemon, names.clone())
                # Browsing sends its first question at once, so it starts last.
                await trio.to_thread.run_sync(lambda: zeroconf.ServiceBrowser(daemon, SERVICE, handlers=[heard]))
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(daemon.close)

    async def _announce(self, daemon: Zeroconf) -> None:
        told: list[Address] = []
        while True:
            addresses = [address for address in self._addresses() if address.ip is not None][:MAX_ADDRESSES]
            if addresses and addresses != told:
                info = self._info(addresses)
                if told:
                    await trio.to_thread.run_sync(daemon.update_service, info)
                else:
                    # The name is this node's own, so nobody else can hold it and no time is spent asking.
                    await trio.to_thread.run_sync(partial(daemon.register_service, info, cooperating_responders=True))
                told = addresses
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
            parsed_addresses=[address.host for address in addresses],  # without one, nobody resolves the name
        )

    async def _resolve(self, daemon: Zeroconf, names: trio.MemoryReceiveChannel[str]) -> None:
        async for name in names:
            info = await trio.to_thread.run_sync(daemon.get_service_info, SERVICE, name, _RESOLVE_MS)
            if info is not None:
                self._report(info.properties)

    def _report(self, properties: dict[bytes, bytes | None]) -> None:
        found: dict[str, list[Address]] = {}
        for index in range(MAX_ADDRESSES):
            try:
                address = parse_address((properties.get(b"a%d" % index) or b"").decode())
            except (BadAddress, UnicodeDecodeError):
                continue
            if address.peer is not None and address.peer != self._peer_id:
                found.setdefault(address.peer, []).append(address)
        for peer, addresses in found.items():
            log.debug("mDNS: %s at %s", peer, addresses)
            self._found(peer, addresses)


def _offer(names: trio.MemorySendChannel[str], name: str) -> None:
    try:
        names.send_nowait(name)
    except (trio.WouldBlock, trio.ClosedResourceError, trio.BrokenResourceError):
        log.debug("an mDNS answer is dropped: too many at once")
