"""Which links a node closes when it has many."""

from __future__ import annotations

from p2p.host.pruning import LinkUse, surplus


def test_the_idle_links_used_longest_ago_are_closed() -> None:
    links = [LinkUse(name, name, used_at, busy=name == "a") for used_at, name in enumerate("abcdef")]
    assert surplus(links, {"b"}, enough=4) == ["c", "d"]
    assert surplus(links, {"b"}, enough=1) == ["c", "d", "e", "f"]
    assert surplus(links, {"b"}, enough=6) == []


def test_an_address_with_many_peers_loses_its_links_first() -> None:
    """Its links are the newest, and some of them are in use."""
    friends = [LinkUse(f"friend {number}", f"home {number}", number, busy=False) for number in range(3)]
    crowd = [LinkUse(f"one of {number}", "crowd", 10 + number, busy=number < 2) for number in range(5)]
    assert surplus([*friends, *crowd], (), enough=5) == ["one of 2", "one of 3", "one of 4"]
    assert surplus([*friends, *crowd], (), enough=4) == ["one of 2", "one of 3", "one of 4", "friend 0"]
