"""What a visitor of another swarm has of its own."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import trio

from app.config.file import load_config
from app.core.errors import AppError
from app.node.visits import visitor_config
from app.swarm.saved import SavedSwarm, SavedSwarms
from p2p.errors import P2PError
from tests.app.node.test_node import cache, found_swarm, living
from tests.p2p.nodes import until

__all__ = ["cache"]

POND, LAKE = (SavedSwarm(name, "ab" * 32, 1) for name in ("pond", "lake"))
OTHER = SavedSwarm("other", "cd" * 32, 1)


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


async def test_a_reply_of_one_visit_is_not_broken_off_by_a_question_in_another(tmp_path: Path, cache: Path) -> None:
    """Visits are one at a time: the second swarm is refused while the first one's reply is written."""
    found_swarm(tmp_path / "a", cache, "home")
    async with living(tmp_path / "a", cache) as node:
        visits = node._visits
        async with trio.open_nursery() as nursery:

            async def ask_first() -> None:
                with contextlib.suppress(AppError, P2PError):  # nobody is there
                    async with visits.replies(POND):
                        await trio.sleep_forever()

            nursery.start_soon(ask_first)
            await until(lambda: visits._visit is not None and visits._visit.replies == 1, within_s=60)
            with pytest.raises(AppError, match="asks in pond at the moment") as refused:
                async with visits.replies(OTHER):
                    pass
            assert refused.value.reason.code == "busy"
            assert visits._visit is not None
            assert visits._visit.swarm.name == "pond"
            nursery.cancel_scope.cancel()
