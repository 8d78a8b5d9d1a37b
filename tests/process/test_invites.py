"""Limited invites between real processes: one node gets in, the next does not, one waits, one is removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.api.client import Client, client_of
from app.cli.swarms import STILL_TRYING
from app.config.home import Home
from app.core.errors import AppError
from tests.process.node_process import Place, Serving, wait_until

ALONE = "--discovery=invite"


def members(client: Client) -> set[str]:
    """The members that a node has met."""
    return {peer.peer for peer in client.snapshot().peers if peer.link is not None}


def test_an_invite_is_used_once_approved_and_revoked(tmp_path: Path) -> None:
    places = [Place(tmp_path / name, tmp_path / "cache") for name in ("creator", "guest", "other")]
    assert places[0].shoal("create", "den", "--model", "tiny-random", "--private").status == 0
    with (
        Serving(places[0], ALONE) as first,
        Serving(places[1], ALONE, SHOAL_NAME="guest") as second,
        Serving(places[2], ALONE, SHOAL_NAME="other") as third,
    ):
        for node in (first, second, third):
            node.up()
        creator, guest, other = (client_of(place.home) for place in places)
        guest_id, other_id = (client.snapshot().peer_id for client in (guest, other))
        made = places[0].shoal("invite")
        assert "one node can join with this invite" in made.err
        joined = places[1].shoal("join", "-", text=made.out)
        assert (joined.status, joined.err) == (0, "")
        wait_until(lambda: members(creator) == {guest_id}, "the guest is a member")
        with pytest.raises(AppError, match="the invite was used already") as used:
            other.post("/control/join", {"target": made.out})
        assert (used.value.code, other.snapshot().state, other.snapshot().swarms) == ("invite_used", "idle", ())
        with pytest.raises(AppError, match="may not invite"):
            guest.post("/control/invite", {})
        # The next one has to be let in.
        line = creator.post("/control/invite", {"approve": True, "delegate": True})["invite"]
        asked = places[2].shoal("join", "-", text=line)
        assert (asked.status, "has to let this node in" in asked.out) == (STILL_TRYING, True)
        assert [request.name for request in creator.snapshot().requests] == ["other"]
        assert "asks     " in places[0].shoal("invites").out
        assert places[0].shoal("invites", "approve", "other").status == 0
        wait_until(lambda: other_id in members(creator), "the other one is a member")
        assert other.post("/control/invite", {})["limits"]["delegate"] is False
        # And out again.
        assert places[0].shoal("revoke", "guest").status == 0
        assert creator.get("/control/revoked") == {"revoked": [guest_id]}
        wait_until(lambda: guest_id not in members(creator) | members(other), "the guest is out")
        wait_until(lambda: guest.snapshot().warnings != (), "the guest knows it")
        [warning] = guest.snapshot().warnings
        assert (warning.code, warning.text) == ("revoked", "this node was removed from den")
        assert second.end() == 0
    # Under another identity its certificate is worth nothing, which is said.
    Home(places[1].home).key_file.unlink()
    with Serving(places[1], ALONE) as again:
        again.up()
        guest = client_of(places[1].home)
        wait_until(lambda: "only the certificate of another identity" in guest.snapshot().reason, "it says why")
        why = guest.snapshot().why
        assert why is not None
        assert why.next_step == "ask for a new invite (`shoal invite`)"
