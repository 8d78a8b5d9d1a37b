"""What a visitor of another swarm has of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.config.file import load_config
from app.node.visits import visitor_config
from app.swarm.saved import SavedSwarm, SavedSwarms

POND, LAKE = (SavedSwarm(name, "ab" * 32, 1) for name in ("pond", "lake"))


@pytest.mark.parametrize(
    ("listen", "expected"),
    [
        ("", ("/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0")),
        ("/ip4/10.0.0.7/tcp/7000", ("/ip4/10.0.0.7/tcp/0",)),
        ("/ip4/127.0.0.1/tcp/0", ("/ip4/127.0.0.1/tcp/0",)),
    ],
)
def test_a_visitor_hosts_nothing_and_takes_no_chosen_port(listen: str, expected: tuple[str, ...]) -> None:
    environment = {"SHOAL_LISTEN": listen} if listen else {}
    config = load_config(Path("none"), {"SHOAL_MAX_VRAM": "4GB", **environment})
    visitor = visitor_config(config).settings
    assert (visitor.max_vram, visitor.listen) == (0, expected)
    assert config.settings.max_vram == 4 * 10**9  # the node's own stay


def test_a_visited_swarm_is_saved_and_another_one_stays_active() -> None:
    known = SavedSwarms().joined(POND).kept(LAKE)
    assert ([swarm.name for swarm in known.swarms], known.active) == (["pond", "lake"], POND)
    assert SavedSwarms().kept(LAKE).active is None
