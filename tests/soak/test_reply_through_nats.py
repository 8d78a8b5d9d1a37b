"""A reply between real nodes behind two NATs goes on while its link moves from a relay to a direct connection.

The networks are made of network namespaces, which takes root, `ip` and `nft`; without them this is skipped. That no
message of a link is lost is shown by `tests/p2p/test_relay_netns.py` in `make test`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from app.config.home import cache_folder
from engine.errors import EngineError
from engine.sources.opening import open_source
from tests.p2p.namespaces import Namespaces, made
from tests.p2p.test_relay_netns import NAT_A, NAT_B, make_internet
from tests.process.namespace_node import Inside
from tests.process.node_process import wait_until
from tests.process.process_swarm import MANY_READY_S, ProcessSwarm, Yardstick

pytestmark = pytest.mark.soak

TOKENS = 240
TEXT = "Write a long story about a lighthouse keeper and the sea."


@pytest.fixture
def internet() -> Iterator[Namespaces]:
    with made("shoalr", make_internet, "nft") as networks:
        yield networks


def let_nats_meet(networks: Namespaces, *, allowed: bool) -> None:
    """Let packets pass between the two NATs, or none."""
    for nat, other in (("nata", NAT_B), ("natb", NAT_A)):
        drop = f"ip daddr {other} drop"
        rules = f"table ip shut {{ chain through {{ type filter hook forward priority -10; {drop}; }}; }}\n"
        networks.inside(nat, "nft", "-f", "-", given="delete table ip shut\n" if allowed else rules)


@pytest.mark.timeout(600)
def test_a_reply_goes_on_while_its_link_moves(
    internet: Namespaces, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    try:
        open_source("starter", cache_folder())
    except EngineError as error:
        pytest.skip(f"the model cannot be had: {error}")
    relay = Inside(internet, "relay", tmp_path)
    host, asker = Inside(internet, "b", tmp_path, max_vram="2GB"), Inside(internet, "a", tmp_path)
    assert relay.place.shoal("create", "reef", "--model", "starter").status == 0
    let_nats_meet(internet, allowed=False)
    with relay.start() as public:
        public.ready(MANY_READY_S)
        invite = relay.invite()
        with host.start(SHOAL_INVITE=invite) as hosting:
            hosting.ready(MANY_READY_S)
            peer = str(host.place.node_file()["peer_id"])
            wait_until(lambda: host.run(host.has_relay), "the host can be reached through the relay")
            with asker.start(SHOAL_INVITE=invite) as asking:
                asking.ready(MANY_READY_S)
                links: list[str | None] = []

                def each(count: int, route: Sequence[str]) -> None:
                    if count == 3:
                        let_nats_meet(internet, allowed=True)
                    links.append(asker.link_to(peer))

                swarm = asker.run(lambda: ProcessSwarm(asking, []))
                moving = asker.run(lambda: swarm.chat(TEXT, TOKENS, each))
                direct = asker.run(lambda: swarm.chat(TEXT, TOKENS))
    record_property("relayed_tokens", links.index("direct") if "direct" in links else len(links))
    record_property("longest_gap_s", moving["longest_gap_s"])
    record_property("longest_gap_direct_s", direct["longest_gap_s"])
    assert (links[0], links[-1]) == ("relayed", "direct")
    assert moving["recoveries"] == 0
    expected = Yardstick("starter", cache_folder()).reply(TEXT, TOKENS)
    assert moving["token_ids"] == direct["token_ids"] == expected
