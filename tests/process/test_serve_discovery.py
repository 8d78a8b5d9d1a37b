"""A swarm is found by each means alone, between real processes; `test_serve` shows the invite."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from app.api.client import client_of
from app.snapshot.codec import prospects_from
from app.snapshot.views import OfferView
from tests.process.node_process import PATIENCE_S, Place, Serving, wait_until

FOUND_WITHIN_S = 5.0


@pytest.fixture
def nodes() -> Iterator[ExitStack]:
    """Every process of a test ends with it."""
    with ExitStack() as stack:
        yield stack


def founded(folder: Path, name: str) -> Place:
    """A home folder with a swarm of its own."""
    place = Place(folder / "founder", folder / "cache")
    assert place.shoal("create", name, "--model", "tiny-random").status == 0
    return place


def found_in_time(joiner: Serving, founder: Serving) -> None:
    """The joiner, which has just said that it is ready, knows the founder soon."""
    began = time.monotonic()
    wanted, api = founder.place.node_file()["peer_id"], client_of(joiner.place.home)
    wait_until(lambda: wanted in {peer.peer for peer in api.snapshot().peers}, "the founder is found", FOUND_WITHIN_S)
    assert time.monotonic() - began < FOUND_WITHIN_S


@pytest.mark.skipif(sys.platform == "win32", reason="multicast on loopback needs a firewall rule there")
def test_by_mdns_alone(tmp_path: Path, nodes: ExitStack) -> None:
    name = f"mdns-{secrets.token_hex(4)}"  # other tests on this machine may be heard too
    founder = nodes.enter_context(Serving(founded(tmp_path, name), "--discovery=mdns"))
    joiner = nodes.enter_context(
        Serving(Place(tmp_path / "joiner", tmp_path / "cache"), "--discovery=mdns", f"--join={name}")
    )
    founder.ready()
    joiner.ready()
    found_in_time(joiner, founder)


@pytest.mark.skipif(sys.platform == "win32", reason="multicast on loopback needs a firewall rule there")
def test_a_node_in_no_swarm_is_told_of_one_nearby_by_mdns_alone(tmp_path: Path, nodes: ExitStack) -> None:
    name = f"near-{secrets.token_hex(4)}"
    founder = nodes.enter_context(Serving(founded(tmp_path, name), "--discovery=mdns"))
    founder.ready()
    looker = nodes.enter_context(Serving(Place(tmp_path / "looker", tmp_path / "other"), "--discovery=mdns"))
    looker.up()
    api, found = client_of(looker.place.home), list[OfferView]()

    def look() -> bool:
        offers = prospects_from(api.get("/control/prospects", timeout_s=PATIENCE_S)).offers
        found[:] = [offer for offer in offers if offer.target.startswith(f"{name}#")]
        return bool(found)

    wait_until(look, "the swarm nearby is offered")
    (offer,) = found
    assert (offer.nearby, offer.members) == ("lan", 1)
    assert (offer.tokens_per_s, offer.missing_block) == (None, 0)  # its founder hosts nothing
    assert offer.fetch_bytes
    assert offer.alone_tokens_per_s
    assert not [path for path in (tmp_path / "other").rglob("*") if path.is_file()]  # nothing was fetched for that


@pytest.mark.soak
def test_by_the_directory_through_a_node_that_is_no_member(tmp_path: Path, nodes: ExitStack) -> None:
    cache = tmp_path / "cache"
    bootstrap = nodes.enter_context(Serving(Place(tmp_path / "bootstrap", cache), "--discovery=dht"))
    place = founded(tmp_path, "home")
    bootstrap.up()
    flags = ("--discovery=dht", f"--peer={bootstrap.place.node_file()['listen_addrs'][0]}")
    founder = nodes.enter_context(Serving(place, *flags))
    founder.ready()
    joiner = nodes.enter_context(Serving(Place(tmp_path / "joiner", cache), *flags, "--join=home"))
    joiner.ready()
    found_in_time(joiner, founder)
    assert client_of(bootstrap.place.home).snapshot().state == "idle"


def test_by_a_peer_remembered_from_before_a_restart(tmp_path: Path, nodes: ExitStack) -> None:
    founder = nodes.enter_context(Serving(founded(tmp_path, "home"), "--discovery="))
    founder.ready()
    place = Place(tmp_path / "joiner", tmp_path / "cache")
    door = founder.place.node_file()["listen_addrs"][0]
    with Serving(place, "--discovery=remembered", f"--peer={door}", "--join=home") as joiner:
        joiner.ready()
        assert joiner.end() == 0
    again = nodes.enter_context(Serving(place, "--discovery=remembered"))
    again.ready()
    found_in_time(again, founder)
