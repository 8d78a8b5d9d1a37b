"""A router that speaks UPnP, for tests: its answers, and a local network in memory whose devices answer on streams."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

import pytest
import trio
from trio.testing import lockstep_stream_pair

from p2p import sockets
from p2p.nat.upnp import SERVICES, TARGETS

Answer = Callable[[bytes, trio.abc.Stream], Awaitable[None]]

DESCRIPTION = """<?xml version="1.0"?>
<root xmlns="urn:schemas-upnp-org:device-1-0">{base}<device><deviceList><device><serviceList>
<service><serviceType>urn:schemas-upnp-org:service:Layer3Forwarding:1</serviceType><controlURL>/l</controlURL></service>
<service><serviceType>{service}</serviceType><controlURL>{control}</controlURL></service>
</serviceList></device></deviceList></device></root>"""
OUTCOME = """<?xml version="1.0"?><s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/"><s:Body>
<u:{action}Response xmlns:u="urn:schemas-upnp-org:service:WANIPConnection:1">{values}</u:{action}Response>
</s:Body></s:Envelope>"""
REFUSAL = """<s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/"><s:Body><s:Fault><detail><UPnPError
xmlns="urn:schemas-upnp-org:control-1-0"><errorCode>{code}</errorCode></UPnPError></detail></s:Fault></s:Body></s:Envelope>"""


def description(control: str = "/control", base: str = "", service: str = SERVICES[0]) -> bytes:
    """Return how a router describes itself."""
    return DESCRIPTION.format(base=base, control=control, service=service).encode()


def found_at(location: str, target: str = TARGETS[0]) -> bytes:
    """Return a device's answer to a search."""
    return f"HTTP/1.1 200 OK\r\nCACHE-CONTROL: max-age=9\r\nST: {target}\r\nLOCATION: {location}\r\n\r\n".encode()


def http(body: bytes, status: str = "200 OK") -> bytes:
    """Return an HTTP answer with its length."""
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status.encode(), len(body), body)


def say(answer: bytes) -> Answer:
    """Return a device that says one thing, whatever it is asked."""

    async def said(request: bytes, stream: trio.abc.Stream) -> None:
        await stream.send_all(answer)

    return said


class Router:
    """Forwards ports, for ever only if it is `permanent`, but those that another machine has."""

    def __init__(self, *, permanent: bool = False, taken: tuple[int, ...] = ()) -> None:
        self.permanent = permanent
        self.taken = taken
        self.forwarded: dict[str, tuple[str, str, str]] = {}  # by external port: the machine, its port, the lifetime

    async def answer(self, request: bytes, stream: trio.abc.Stream) -> None:
        """Answer one request."""
        await stream.send_all(self.said(request.decode()))

    def said(self, request: str) -> bytes:
        """Return the answer to a request."""
        if request.startswith("GET "):
            return http(description())
        [action] = re.findall(r"(?im)^soapaction: \".+#(\w+)\"\r$", request)
        values = dict(re.findall(r"<(New\w+)>([^<]*)</", request))
        if action == "GetExternalIPAddress":
            return http(
                OUTCOME.format(action=action, values="<NewExternalIPAddress>5.5.5.5</NewExternalIPAddress>").encode()
            )
        external = values["NewExternalPort"]
        if action == "DeletePortMapping":
            refused = 0 if self.forwarded.pop(external, None) else 714
        elif int(external) in self.taken:
            refused = 718
        elif self.permanent and values["NewLeaseDuration"] != "0":
            refused = 725
        else:
            refused = 0
            own = values["NewInternalClient"], values["NewInternalPort"], values["NewLeaseDuration"]
            self.forwarded[external] = own
        if refused:
            return http(REFUSAL.format(code=refused).encode(), "500 Internal Server Error")
        return http(OUTCOME.format(action=action, values="").encode())


async def serve(answer: Answer, stream: trio.abc.Stream) -> str:
    """Read one request from a stream, answer it and close the stream; returns the request's first line."""
    request = b""
    async with stream:
        try:
            while not whole(request):
                data = await stream.receive_some(4096)
                if not data:
                    break
                request += data
            await answer(request, stream)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the other side has had enough
    return request.partition(b"\r\n")[0].decode()


def whole(request: bytes) -> bool:
    """True if nothing is missing of a request."""
    head, end, body = request.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: (\d+)", head)
    return bool(end) and len(body) >= int(length[1] if length else 0)


class Lan:
    """A local network in memory: devices by their address and port; keeps what each was asked for."""

    def __init__(self, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
        self._nursery = nursery
        self.devices: dict[tuple[str, int], Answer] = {}
        self.asked: list[tuple[str, int]] = []
        monkeypatch.setattr(sockets, "connect", self._connect)

    async def _connect(self, host: str, port: int) -> trio.abc.Stream:
        self.asked.append((host, port))
        answer = self.devices.get((host, port))
        if answer is None:
            raise ConnectionRefusedError("connection refused")
        ours, theirs = lockstep_stream_pair()
        self._nursery.start_soon(serve, answer, theirs)
        return ours
