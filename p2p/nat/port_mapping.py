"""Keeps this node's listening port open in the router, by PCP or NAT-PMP (`port_control`), else by UPnP (`upnp`).

The mapping is renewed at half of its lifetime, made again when this machine moves to another network or slept, and
removed on exit. What the router says is an address to try: peers test it by dialling back (`p2p.nat.reachability`).
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import trio

from p2p import sockets
from p2p.addresses import Address, Scope, scope_of
from p2p.nat.port_control import LIFETIME_S, Mapping, MappingRefused, PortControl
from p2p.nat.upnp import ForEverOnly, UpnpRouter, find_router
from p2p.platform import system_program
from p2p.rate_limit import backoff_s

_FIRST_RETRY_S = 20.0  # after a refusal, doubled each time up to
_LONGEST_RETRY_S = 600.0
_CHECK_S = 10.0  # for a change of the network
_SLEPT_S = 60.0  # if the wall clock has gone on for longer than trio's
_REMOVE_S = 2.0
_PORTS_TRIED = 4  # external ports, in case another machine has the first
_MIN_LIFETIME_S = 120

log = logging.getLogger("shoal.p2p.ports")


@dataclass(frozen=True)
class Route:
    """The way out of this network: the gateway and this machine's address towards it."""

    gateway: str
    own_ip: str


class PortMapper:
    """Keeps one port mapped while `run` runs; calls `changed` with its public address, or None when it is lost."""

    def __init__(
        self, port: int, key: bytes, changed: Callable[[Address | None], None], route: Callable[[], Route | None]
    ) -> None:
        self._port = port
        self._key = key
        self._changed = changed
        self._route = route
        self._control: PortControl | None = None
        self._upnp: UpnpRouter | None = None
        self._failures = 0
        self._made: Mapping | None = None  # at a router, whether or not it leads to the internet
        self.mapping: Mapping | None = None
        self.problem = "the router has not been asked yet"

    async def run(self) -> None:
        """Map the port, renew it and follow changes of the network, until cancelled; then remove the mapping."""
        try:
            while True:
                own_ips, ahead_s = set(sockets.own_ips()), _ahead_s()
                pause_s = await self._map_along(await trio.to_thread.run_sync(self._route))
                with trio.move_on_after(pause_s):
                    # No event reports that the machine moved to another network or slept, so both are polled.
                    while set(sockets.own_ips()) == own_ips and _ahead_s() < ahead_s + _SLEPT_S:  # noqa: ASYNC110
                        await trio.sleep(_CHECK_S)
        finally:
            with trio.CancelScope(deadline=trio.current_time() + _REMOVE_S, shield=True):
                await self._remove()

    async def _map_along(self, route: Route | None) -> float:
        """Make or renew the mapping and return the seconds after which to do it again."""
        try:
            if route is None:
                raise MappingRefused("this machine is in no network with a router")
            mapping = self._made = await self._map(route)
            if not mapping.port:
                raise MappingRefused("the router says that it forwards the port, but not which one leads to it")
            if scope_of(ipaddress.ip_address(mapping.ip)) is not Scope.PUBLIC:
                raise MappingRefused(f"the router forwards the port, but is behind a NAT itself ({mapping.ip})")
        except MappingRefused as error:
            level = logging.DEBUG if route is None else logging.INFO
            log.log(level, "the port %d is not mapped: %s", self._port, error)
            self._set(None, str(error))
            self._failures += 1
            return backoff_s(_FIRST_RETRY_S, self._failures, _LONGEST_RETRY_S)
        if self.mapping is None or (mapping.ip, mapping.port) != (self.mapping.ip, self.mapping.port):
            log.info("%s: the router forwards %s port %d to this node", mapping.method, mapping.ip, mapping.port)
        self._set(mapping, "")
        self._failures = 0
        return min(max(mapping.lifetime_s, _MIN_LIFETIME_S), LIFETIME_S) / 2  # whatever the router says

    def _set(self, mapping: Mapping | None, problem: str) -> None:
        before = None if self.mapping is None else (self.mapping.ip, self.mapping.port)
        self.mapping, self.problem = mapping, problem
        if before != (None if mapping is None else (mapping.ip, mapping.port)):
            self._changed(None if mapping is None else _address(mapping))

    async def _map(self, route: Route) -> Mapping:
        wanted = self._port if self.mapping is None else self.mapping.port
        if self._control is None or (self._control.gateway, self._control.own_ip) != (route.gateway, route.own_ip):
            self._control, self._upnp = PortControl(route.gateway, route.own_ip, self._port, self._key), None
        if self._upnp is None:
            try:
                return await self._control.map(wanted)
            except MappingRefused as error:
                log.debug("%s", error)
        return await self._map_by_upnp(route, wanted)

    async def _map_by_upnp(self, route: Route, wanted: int) -> Mapping:
        if self._upnp is None:
            self._upnp = await find_router(route.gateway, route.own_ip)
        failure = MappingRefused("the router forwards no port")
        for port in range(wanted, min(wanted + _PORTS_TRIED, 65536)):
            try:
                try:
                    return await self._upnp.map(self._port, port, LIFETIME_S)
                except ForEverOnly:
                    return replace(await self._upnp.map(self._port, port, 0), lifetime_s=LIFETIME_S)
            except MappingRefused as error:
                failure = error
        self._upnp = None  # it may be another router next time
        raise failure

    async def _remove(self) -> None:
        mapping, self._made, self.mapping = self._made, None, None
        if mapping is None:
            return
        try:
            if mapping.method == "UPnP" and self._upnp is not None:
                await self._upnp.remove(mapping.port)
            elif self._control is not None:
                await self._control.map(mapping.port, lifetime_s=0)
        except MappingRefused as error:
            log.info("the mapping of port %d stays until it expires: %s", mapping.port, error)


def _ahead_s() -> float:
    """Return how far the wall clock is ahead of trio's, which stands still while Linux and macOS sleep.

    Windows' goes on; the router's does in any case, and closes the port.
    """
    return time.time() - trio.current_time()


def _address(mapping: Mapping) -> Address:
    ip = ipaddress.ip_address(mapping.ip)
    return Address(f"ip{ip.version}", str(ip), mapping.port)


def route_out(uplink: int) -> Route | None:
    """Return a default IPv4 route of this machine, numbered from 0 by preference; None if there are not so many.

    A route does not count if the machine's address towards it is public. May run a command of the system and block for
    a moment: call it in a thread.
    """
    found: dict[str, Route] = {}
    near = [own for own in sockets.own_interfaces() if scope_of(own.ip) is Scope.LAN]
    for gateway in _linux_gateways() if sys.platform == "linux" else _netstat_gateways():
        with contextlib.suppress(OSError):
            own_ip = sockets.source_towards(gateway)  # of several in this network the one from which requests come
            if any(str(own.ip) == own_ip and ipaddress.ip_address(gateway) in own.network for own in near):
                found[gateway] = Route(gateway, own_ip)
    return list(found.values())[uplink] if uplink < len(found) else None


def _linux_gateways() -> list[str]:
    with contextlib.suppress(OSError):
        return parse_routes(Path("/proc/net/route").read_text())
    return []


def parse_routes(said: str) -> list[str]:
    """Return the gateways of the default routes in the text of `/proc/net/route`, that of the lowest metric first."""
    found: list[tuple[int, str]] = []
    for line in said.splitlines()[1:]:
        with contextlib.suppress(ValueError, IndexError):
            words = line.split()
            if words[1] == "00000000" and words[2] != "00000000":
                found.append((int(words[6]), str(ipaddress.IPv4Address(bytes.fromhex(words[2])[::-1]))))
    return [gateway for _, gateway in sorted(found, key=lambda entry: entry[0])]


def _netstat_gateways() -> list[str]:
    """Read the gateways from `netstat -rn`, which macOS, the BSDs and Windows have."""
    program = system_program("netstat")
    if program is None:
        return []
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        # Only digits and dots matter. Headings and names of cards are in a code page that Python does not expect.
        said = subprocess.run(
            [program, "-rn"], capture_output=True, encoding="ascii", errors="replace", timeout=5, check=False
        ).stdout
        return parse_netstat(said)
    return []


def parse_netstat(said: str) -> list[str]:
    """Return the gateways of the default IPv4 routes in the output of `netstat -rn`."""
    found = []
    for line in said.splitlines():
        words = line.split()
        after = words[1:] if words[:1] == ["default"] else words[2:] if words[:2] == ["0.0.0.0", "0.0.0.0"] else []
        with contextlib.suppress(ValueError, IndexError):
            found.append(str(ipaddress.IPv4Address(after[0])))
    return found
