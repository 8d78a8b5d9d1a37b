"""UPnP IGD: finds a router on the local network by SSDP, and asks it by SOAP over HTTP to forward a TCP port.

Any device of the local network may answer, with whatever it likes. So each answer is bounded in bytes and time, a
device is asked at the address that it answered from and nowhere else, and an answer that makes no sense raises
`MappingRefused`. Messages are decoded without I/O. When a port is mapped is decided in `p2p.nat.port_mapping`.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import urljoin, urlsplit
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

import h11
import trio

from p2p import sockets
from p2p.nat.port_control import Mapping, MappingRefused

IPInterface = ipaddress.IPv4Interface | ipaddress.IPv6Interface

DESCRIPTION = "Shoal"
GROUP = ("239.255.255.250", 1900)  # where devices listen for searches
SEARCHES_S = (0.5, 1.5)  # waits for answers, each after searching again
MAX_PAGES = 16
MAX_PAGES_OF_DEVICE = 4
MAX_DATAGRAM_BYTES = 2**12
MAX_URL_CHARS = 2**11
MAX_ANSWER_BYTES = 2**16  # with its headers
MAX_HEADER_BYTES = 2**13
MAX_SERVICES = 4
_READ_BYTES = 2**12
ANSWER_S = 5.0
FIND_S = 30.0

_DEVICE, _SERVICE = "urn:schemas-upnp-org:device:", "urn:schemas-upnp-org:service:"
SERVICES = tuple(_SERVICE + name for name in ("WANIPConnection:1", "WANIPConnection:2", "WANPPPConnection:1"))
TARGETS = (_DEVICE + "InternetGatewayDevice:1", _DEVICE + "InternetGatewayDevice:2", *SERVICES)
_SEARCH = 'M-SEARCH * HTTP/1.1\r\nHOST: {}:{}\r\nMAN: "ssdp:discover"\r\nMX: 1\r\nST: {}\r\n\r\n'
_ENVELOPE = (
    '<?xml version="1.0"?>\r\n<s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/"'
    ' s:encodingStyle="http://schemas.xmlsoap.org/soap/encoding/"><s:Body><u:{action} xmlns:u="{service}">{arguments}'
    "</u:{action}></s:Body></s:Envelope>\r\n"
)
_REASONS = {
    401: "it does not know this request",
    402: "it does not take these values",
    501: "it failed",
    606: "its settings do not allow it",
    714: "it does not forward this port",
    718: "it forwards this port to another machine",
    725: "it forwards ports for ever only",
    728: "it forwards as many ports as it can",
}
_FOR_EVER_ONLY = (725, 402)  # old routers have no code of its own for it


class ForEverOnly(MappingRefused):
    """The router forwards ports for ever only, not for a time."""


@dataclass(frozen=True)
class Page:
    """A page of a device: the IPv4 address and port to ask, and for what."""

    host: str
    port: int
    target: str


def page_at(url: str, host: str, base: str = "") -> Page:
    """Return the page that a device at `host` names by a URL, or one relative to `base`; raises `MappingRefused`.

    A device names pages of its own only: otherwise it could send this node to any host, or to programs of this machine.
    """
    both = base + url
    try:
        if not both.isascii() or not both.isprintable() or " " in both or len(both) > MAX_URL_CHARS:
            raise ValueError
        parts = urlsplit(urljoin(base, url))
        if parts.scheme != "http" or parts.hostname != host:
            raise ValueError
        query = f"?{parts.query}" if parts.query else ""
        return Page(host, 80 if parts.port is None else parts.port, (parts.path or "/") + query)
    except ValueError:
        raise MappingRefused(f"the device at {host} names a page that is not its own") from None


def page_of_answer(datagram: bytes, host: str) -> Page:
    """Return the page at which a device describes itself, from its answer to a search; raises `MappingRefused`."""
    first, *lines = datagram.decode("latin-1").split("\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if first.split()[1:2] != ["200"] or headers.get("st") not in TARGETS:
        raise MappingRefused(f"the device at {host} is no router")
    return page_at(headers.get("location", ""), host)


def is_neighbour(host: str, own_ip: str, interfaces: Sequence[IPInterface]) -> bool:
    """True for another machine of the network in which this machine has the address `own_ip`."""
    ip = ipaddress.ip_address(host)
    if ip.is_loopback or any(ip == own.ip for own in interfaces):
        return False
    return any(ip in own.network for own in interfaces if str(own.ip) == own_ip)


def has_place(page: Page, found: Sequence[Page], gateway: str) -> bool:
    """True if a page is new and not one too many: nobody takes the places of the gateway."""
    of_device = sum(one.host == page.host for one in found)
    of_others = sum(one.host != gateway for one in found)
    room = page.host == gateway or of_others < MAX_PAGES - MAX_PAGES_OF_DEVICE
    return page not in found and of_device < MAX_PAGES_OF_DEVICE and room


def read_xml(document: bytes, host: str) -> Element:
    """Parse what a device says, without attributes and namespaces; raises `MappingRefused`.

    No document type is taken, which could define endless entities. Namespaces are left out since a parser would write
    the whole one into each name.
    """
    text = document.decode("utf-8-sig", "replace").strip("\0 \t\r\n")
    builder, parser = TreeBuilder(), expat.ParserCreate()
    parser.StartElementHandler = lambda name, attributes: builder.start(name.rpartition(":")[2], {})
    parser.EndElementHandler = lambda name: builder.end(name.rpartition(":")[2])
    parser.CharacterDataHandler = builder.data
    with contextlib.suppress(expat.ExpatError):
        if "<!DOCTYPE" not in text:
            parser.Parse(text, True)
            return builder.close()
    raise MappingRefused(f"the answer of the device at {host} makes no sense")


def texts(elements: Iterable[Element]) -> dict[str, str]:
    """Return the texts of elements by their names, the first of each name."""
    found: dict[str, str] = {}
    for element in elements:
        found.setdefault(element.tag, (element.text or "").strip())
    return found


def read_description(document: bytes, page: Page) -> list[tuple[str, Page]]:
    """Return the services of a device that forward ports, and where to ask each; raises `MappingRefused`."""
    root = read_xml(document, page.host)
    base = texts(root.iter()).get("URLBase") or f"http://{page.host}:{page.port}{page.target}"
    services = [texts(element) for element in root.iter("service")]
    forwarding = [said for said in services if said.get("serviceType") in SERVICES][:MAX_SERVICES]
    return [(said["serviceType"], page_at(said.get("controlURL", ""), page.host, base)) for said in forwarding]


def read_outcome(action: str, status: int, document: bytes, host: str) -> dict[str, str]:
    """Return the values in a router's answer to an action; raises `MappingRefused` with its reason if it refuses."""
    said = texts(read_xml(document, host).iter())
    code = said.get("errorCode")
    if code is not None:
        number = int(code) if code.isascii() and code.isdecimal() and len(code) < 5 else 0
        reason = _REASONS.get(number, "it does not say why")
        kind = ForEverOnly if number in _FOR_EVER_ONLY else MappingRefused
        raise kind(f"the device at {host} refuses: {reason} (UPnP error {number})")
    if status != 200 or f"{action}Response" not in said:
        raise MappingRefused(f"the answer of the device at {host} makes no sense")
    return said


async def search(gateway: str, own_ip: str) -> list[Page]:
    """Return the pages at which devices of the local network describe themselves as routers, the gateway's first.

    Raises `MappingRefused` if this machine cannot search.
    """
    found: list[Page] = []
    with trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            await sock.bind((own_ip, 0))
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(own_ip))
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 2)
            for wait_s in SEARCHES_S:
                for target in TARGETS:
                    await sock.sendto(_SEARCH.format(*GROUP, target).encode(), GROUP)
                with trio.move_on_after(wait_s):
                    await _collect(sock, found, gateway, own_ip)
        except OSError as error:
            raise MappingRefused(f"no router can be searched for from {own_ip}: {error.strerror or error}") from None
    return sorted(found, key=lambda page: page.host != gateway)


async def _collect(sock: trio.socket.SocketType, found: list[Page], gateway: str, own_ip: str) -> None:
    """Add the pages of devices that answer, until cancelled."""
    interfaces = sockets.own_interfaces()
    while True:
        try:
            datagram, (host, _) = await sock.recvfrom(MAX_DATAGRAM_BYTES)
            if is_neighbour(host, own_ip, interfaces):
                page = page_of_answer(datagram, host)
                if has_place(page, found, gateway):
                    found.append(page)
        except MappingRefused:
            continue
        except OSError:  # Windows: an answer is too long, or a search did not arrive
            await trio.sleep(0.01)


async def ask(page: Page, headers: dict[str, str], body: bytes = b"") -> tuple[int, bytes]:
    """Ask a device for a page, or send it a body; returns status and body of its answer, raises `MappingRefused`."""
    try:
        with trio.fail_after(ANSWER_S):
            async with await sockets.connect(page.host, page.port) as stream:
                return await _exchange(stream, page, headers, body)
    except trio.TooSlowError:
        raise MappingRefused(f"the device at {page.host} does not answer within {ANSWER_S:.0f} s") from None
    except (OSError, trio.BrokenResourceError) as error:
        raise MappingRefused(f"the device at {page.host} does not answer: {error}") from None
    except h11.ProtocolError:
        raise MappingRefused(f"the answer of the device at {page.host} makes no sense") from None


async def _exchange(stream: trio.abc.Stream, page: Page, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
    http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEADER_BYTES)
    ours = {"Host": f"{page.host}:{page.port}", "Connection": "close", "Content-Length": str(len(body)), **headers}
    request = h11.Request(method="POST" if body else "GET", target=page.target, headers=list(ours.items()))
    await stream.send_all(b"".join(http.send(event) or b"" for event in (request, h11.Data(body), h11.EndOfMessage())))
    status, received, parts = 0, 0, list[bytes]()
    while not isinstance(event := http.next_event(), h11.EndOfMessage):
        if event is h11.NEED_DATA:
            data = await stream.receive_some(_READ_BYTES)
            received += len(data)
            if received > MAX_ANSWER_BYTES:
                raise MappingRefused(f"the device at {page.host} answers with more than {MAX_ANSWER_BYTES >> 10} KiB")
            http.receive_data(data)
        elif isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data):
            parts.append(bytes(event.data))
        elif not isinstance(event, h11.InformationalResponse):
            raise h11.RemoteProtocolError("neither a response nor a part of one")
    return status, b"".join(parts)


@dataclass(frozen=True)
class UpnpRouter:
    """A service of a router that forwards ports: where it is asked, and this machine's address towards it."""

    control: Page
    service: str
    own_ip: str

    async def map(self, port: int, external_port: int, lifetime_s: int) -> Mapping:
        """Forward `external_port` to `port` of this machine, for ever if the lifetime is 0; raises `MappingRefused`."""
        try:
            ip = await self.external_ip()
            values = {
                "NewRemoteHost": "",
                "NewExternalPort": external_port,
                "NewProtocol": "TCP",
                "NewInternalPort": port,
                "NewInternalClient": self.own_ip,
                "NewEnabled": 1,
                "NewPortMappingDescription": DESCRIPTION,
                "NewLeaseDuration": lifetime_s,
            }
            await self._request("AddPortMapping", values)
        except MappingRefused as error:
            raise type(error)(f"port {external_port} is not forwarded: {error}") from None
        return Mapping("UPnP", ip, external_port, lifetime_s)

    async def external_ip(self) -> str:
        """Return the IPv4 address that the router has outside; raises `MappingRefused`."""
        said = await self._request("GetExternalIPAddress", {})
        with contextlib.suppress(ValueError):
            ip = ipaddress.IPv4Address(said.get("NewExternalIPAddress", ""))  # empty at some routers without a line
            if not ip.is_unspecified:
                return str(ip)
        raise MappingRefused(f"the device at {self.control.host} has no address outside")

    async def remove(self, external_port: int) -> None:
        """Remove the mapping of a port; raises `MappingRefused`."""
        values = {"NewRemoteHost": "", "NewExternalPort": external_port, "NewProtocol": "TCP"}
        try:
            await self._request("DeletePortMapping", values)
        except MappingRefused as error:
            raise MappingRefused(f"port {external_port} is still forwarded: {error}") from None

    async def _request(self, action: str, values: dict[str, object]) -> dict[str, str]:
        arguments = "".join(f"<{name}>{value}</{name}>" for name, value in values.items())
        body = _ENVELOPE.format(action=action, service=self.service, arguments=arguments).encode()
        headers = {"Content-Type": 'text/xml; charset="utf-8"', "SOAPAction": f'"{self.service}#{action}"'}
        status, document = await ask(self.control, headers, body)
        return read_outcome(action, status, document, self.control.host)


async def find_router(gateway: str, own_ip: str) -> UpnpRouter:
    """Search for a router that knows its address outside, at the gateway first; raises `MappingRefused`."""
    failures = []
    pages = await search(gateway, own_ip)
    with trio.move_on_after(FIND_S):
        for page in pages:
            try:
                return await _router_at(page, own_ip)
            except MappingRefused as error:
                failures.append(error)
    raise failures[0] if failures else MappingRefused("no router answers, neither by PCP and NAT-PMP nor by UPnP")


async def _router_at(page: Page, own_ip: str) -> UpnpRouter:
    failure = MappingRefused(f"the device at {page.host} is no router")
    status, document = await ask(page, {})
    if status != 200:
        raise failure
    for service, control in read_description(document, page):
        router = UpnpRouter(control, service, own_ip)
        try:
            await router.external_ip()
            return router
        except MappingRefused as error:  # a router may have several services, of which one leads outside
            failure = error
    raise failure
