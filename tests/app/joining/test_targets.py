"""Which addresses an invite has, and whom a saved swarm names."""

from __future__ import annotations

from app.config.file import Config
from app.config.settings import Settings
from app.joining.network_setup import named_peers
from app.joining.targets import invite_to
from app.swarm.invite import parse_invite
from app.swarm.saved import SavedSwarm
from p2p.identity import Identity

HERE, THERE, LIAR = (Identity.generate().peer_id for _ in range(3))


def test_an_invite_leaves_out_what_members_announce_and_is_no_address() -> None:
    own, other = f"/ip4/192.0.2.1/tcp/7464/p2p/{HERE}", f"/ip4/192.0.2.2/tcp/7464/p2p/{THERE}"
    made = invite_to(
        SavedSwarm("a-swarm", "ab" * 32, 0),
        [own],
        [f"/nowhere/p2p/{LIAR}", f"/ip4/192.0.2.3/tcp/0/p2p/{LIAR}", other, own],
    )
    assert parse_invite(str(made)).addresses == (own, other)


def test_an_address_that_an_older_version_saved_and_is_none_is_left_out() -> None:
    """Older versions took a relay's name for a peer id if its letters were right."""
    good, bad = f"/ip4/192.0.2.1/tcp/7464/p2p/{HERE}", f"/ip4/192.0.2.1/tcp/7464/p2p/{'1' * 40}/p2p-circuit/p2p/{LIAR}"
    saved = SavedSwarm("a-swarm", "ab" * 32, 0, addresses=(bad, good))
    assert named_peers(Config(Settings(), {}), saved) == {HERE: [good]}
