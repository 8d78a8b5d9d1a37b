"""Askers of one address are one home; what is known of an asker outlives its link."""

from __future__ import annotations

import pytest

from app.serving import homes
from app.serving.homes import Homes
from p2p.values import LinkInfo


class Sources:
    """A network of which only addresses are known."""

    peer_id = "this node"

    def __init__(self, *relayed: str, **found: str) -> None:
        self.relayed, self.found = relayed, found

    def source(self, peer: str) -> str:
        """The address of a peer."""
        return self.found.get(peer, "")

    def links(self) -> list[LinkInfo]:
        """The links, some of them through a relay."""
        return [LinkInfo(peer, "relayed" if peer in self.relayed else "direct", None, 0, 0) for peer in self.found]


def test_who_has_one_address_is_one_home() -> None:
    known = Homes(Sources(one="203.0.113.5", two="203.0.113.5", three="203.0.113.6", four="machine 4"))
    assert known.of("one") == known.of("two") == "203.0.113.5"
    assert (known.of("three"), known.of("four"), known.of("this node")) == ("203.0.113.6", "machine 4", "this node")


def test_all_that_a_provider_may_give_one_customer_is_one_home() -> None:
    known = Homes(Sources(one="2001:db8:7:1::", two="2001:db8:7:ff00::", three="2001:db8:8::", four="fd00::"))
    assert known.of("one") == known.of("two") == "2001:db8:7::/48"
    assert (known.of("three"), known.of("four")) == ("2001:db8:8::/48", "fd00::/48")


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.3.3", "::1"])
def test_programs_of_this_machine_are_a_home_each(address: str) -> None:
    known = Homes(Sources(one=address, two=address))
    assert (known.of("one"), known.of("two")) == ("one", "two")


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_strangers_behind_a_relay_on_this_machine_are_one_home(address: str) -> None:
    known = Homes(Sources("one", "two", one=address, two=address, program=address))
    assert known.of("one") == known.of("two") == address
    assert known.of("program") == "program"


def test_a_home_is_known_after_the_link_was_closed_and_follows_a_new_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(homes, "REMEMBERED", 2)
    network = Sources(one="203.0.113.5", two="203.0.113.6")
    known = Homes(network)
    assert known.of("one") == "203.0.113.5"
    network.found.clear()
    assert known.of("one") == "203.0.113.5"
    assert known.of("never seen") == known.of("nor this one") == ""
    network.found.update(one="203.0.113.9", two="203.0.113.6", three="203.0.113.7")
    assert [known.of(name) for name in ("one", "two", "three")] == ["203.0.113.9", "203.0.113.6", "203.0.113.7"]
    network.found.clear()
    assert [known.of(name) for name in ("one", "two")] == ["", "203.0.113.6"]
