"""UPnP: what routers say is read, and a port is mapped, renewed and removed at a router of the test's own."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio

from p2p.addresses import Address
from p2p.nat import port_mapping, upnp
from p2p.nat.port_control import LIFETIME_S, Mapping, MappingRefused, PortControl
from p2p.nat.upnp import SERVICES, Page, UpnpRouter
from tests.p2p.routers import Lan, Router, description, found_at, http, say, serve

HOST = "192.168.1.1"
PAGE = Page(HOST, 80, "/")


@pytest.mark.parametrize(
    ("url", "base", "page"),
    [
        ("http://192.168.1.1:49152/root.xml?a=b#c", "", Page(HOST, 49152, "/root.xml?a=b")),
        ("http://192.168.1.1", "", Page(HOST, 80, "/")),
        ("/control", "http://192.168.1.1:5000/a/root.xml", Page(HOST, 5000, "/control")),
        ("control", "http://192.168.1.1:5000/a/root.xml", Page(HOST, 5000, "/a/control")),
        ("HTTP://192.168.1.1/c", "http://192.168.1.1:5000/", Page(HOST, 80, "/c")),
    ],
)
def test_the_pages_of_a_device(url: str, base: str, page: Page) -> None:
    assert upnp.page_at(url, HOST, base) == page


@pytest.mark.parametrize("target", upnp.TARGETS)
def test_every_kind_of_router_is_found(target: str) -> None:
    answer = found_at("http://192.168.1.1:80/root.xml", target).replace(b"LOCATION: ", b"location:")
    assert upnp.page_of_answer(answer, HOST) == Page(HOST, 80, "/root.xml")


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_that_forwards_ports_is_read_from_a_description(service: str) -> None:
    said = description("c", "<URLBase>http://192.168.1.1:99/b/</URLBase>", service)
    assert upnp.read_description(said, PAGE) == [(service, Page(HOST, 99, "/b/c"))]
    assert upnp.read_description(b"\xef\xbb\xbf" + said + b"\n\0", PAGE) == [(service, Page(HOST, 99, "/b/c"))]


async def test_of_several_services_that_which_leads_outside_is_used(
    nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    lan = Lan(nursery, monkeypatch)
    both = description("http://192.168.1.1:1/c").replace(b"Layer3Forwarding:1", b"WANPPPConnection:1")
    lan.devices = {(HOST, 80): say(http(both)), (HOST, 1): Router().answer}

    async def search(gateway: str, own_ip: str) -> list[Page]:
        return [PAGE]

    monkeypatch.setattr(upnp, "search", search)
    assert await upnp.find_router(HOST, "192.168.1.2") == UpnpRouter(Page(HOST, 1, "/c"), SERVICES[0], "192.168.1.2")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("718", "to another machine"),
        ("725", "for ever only"),
        ("999", "not say why"),
        ("-1", "error 0"),
        ("", "error 0"),
    ],
)
def test_a_refusal_is_told_in_words(code: str, words: str) -> None:
    said = f"<e><errorCode>{code}</errorCode></e>".encode()
    with pytest.raises(MappingRefused, match=words):
        upnp.read_outcome("AddPortMapping", 500, said, HOST)


@pytest.mark.parametrize("code", [725, 402])
def test_a_router_that_refuses_a_time_may_be_asked_without_one(code: int) -> None:
    with pytest.raises(upnp.ForEverOnly):
        upnp.read_outcome("AddPortMapping", 500, f"<e><errorCode>{code}</errorCode></e>".encode(), HOST)


@asynccontextmanager
async def on_loopback(router: Router, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """A router on sockets of loopback, where a search reaches it."""
    listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
    found = found_at(f"http://127.0.0.1:{listener.socket.getsockname()[1]}/root.xml")
    with trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        await sock.bind(("127.0.0.1", 0))
        monkeypatch.setattr(upnp, "GROUP", sock.getsockname())
        monkeypatch.setattr(upnp, "SEARCHES_S", (0.2,))
        monkeypatch.setattr(upnp, "is_neighbour", lambda *_: True)

        async def answer_searches() -> None:
            while True:
                said, sender = await sock.recvfrom(2000)
                assert said.startswith(b"M-SEARCH * HTTP/1.1\r\n")
                assert said.endswith(b"\r\n\r\n")
                await sock.sendto(found, sender)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer_searches)
            nursery.start_soon(partial(trio.serve_listeners, partial(serve, router.answer), [listener]))
            yield
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("router", "port", "lifetime_s"),
    [(Router(), 7464, LIFETIME_S), (Router(permanent=True, taken=(7464, 7465)), 7466, 0)],
)
async def test_a_port_is_mapped_renewed_and_removed(
    router: Router, port: int, lifetime_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise MappingRefused("no PCP")

    monkeypatch.setattr(PortControl, "map", refuse)
    changed, told = trio.Event(), list[Address | None]()

    def on_change(address: Address | None) -> None:
        told.append(address)
        changed.set()

    route = port_mapping.Route("127.0.0.1", "127.0.0.1")
    mapper = port_mapping.PortMapper(7464, b"key", on_change, lambda: route)
    with trio.fail_after(20):
        async with on_loopback(router, monkeypatch), trio.open_nursery() as nursery:
            nursery.start_soon(mapper.run)
            await changed.wait()
            assert router.forwarded == {str(port): ("127.0.0.1", "7464", str(lifetime_s))}
            assert mapper.mapping == Mapping("UPnP", "5.5.5.5", port, LIFETIME_S)
            router.forwarded.clear()
            assert await mapper._map_along(route) == LIFETIME_S / 2
            assert router.forwarded == {str(port): ("127.0.0.1", "7464", str(lifetime_s))}
            nursery.cancel_scope.cancel()
    assert router.forwarded == {}
    assert told == [Address("ip4", "5.5.5.5", port)]
