"""Limited invites between real processes: one node gets in, the next does not, one waits, one is removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.api.client import client_of
from app.cli.swarms import STILL_TRYING
from tests.process.node_process import Place, Serving, wait_until

ALONE = "--discovery=invite"


@pytest.fixture
def places(tmp_path: Path) -> list[Place]:
    return [Place(tmp_path / name, tmp_path / "cache") for name in ("creator", "guest", "other")]


def members(node: Serving) -> set[str]:
    """The members that a node has met."""
    return {peer.peer for peer in client_of(node.place.home).snapshot().peers if peer.link is not None}


def id_of(node: Serving) -> str:
    return str(node.place.node_file()["peer_id"])


def test_an_invite_is_used_once_approved_and_revoked(places: list[Place]) -> None:
    creator, guest, other = places
    assert creator.shoal("create", "den", "--model", "tiny-random", "--private").status == 0
    offline = creator.shoal("invite", "--expires", "1h", "--uses", "2")
    assert "2 nodes can join with this invite" in offline.err
    assert creator.shoal("invites", "cancel", creator.facts("invites")[0]["id"]).status == 0
    with (
        Serving(creator, ALONE) as first,
        Serving(guest, ALONE, SHOAL_NAME="guest") as second,
        Serving(other, ALONE, SHOAL_NAME="other") as third,
    ):
        for node in (first, second, third):
            node.up()
        made = creator.shoal("invite")
        assert "one node can join with this invite" in made.err
        joined = guest.shoal("join", "-", text=made.out)
        assert (joined.status, joined.err) == (0, "")
        wait_until(lambda: members(first) == {id_of(second)}, "the guest is a member")
        late = other.shoal("join", "-", text=made.out)
        assert (late.status, late.out, "the invite was used already" in late.err) == (1, "", True)
        assert (other.facts("status")["state"], other.facts("swarms")) == ("idle", [])
        cancelled, used = creator.facts("invites")
        assert (cancelled["state"], used["state"], [one["name"] for one in used["admitted"]]) == (
            "cancelled",
            "used",
            ["guest"],
        )
        assert "may not invite" in guest.shoal("invite").err
        # Somebody has to be asked.
        line = creator.facts("invite", "--approve", "--delegate")
        assert (line["limits"]["uses"], line["limits"]["approve"], line["limits"]["delegate"]) == (1, True, True)
        asked = other.shoal("join", "-", "--json", text=line["invite"])
        assert (asked.status, "has to let this node in" in asked.out) == (STILL_TRYING, True)
        assert [one["name"] for one in client_of(creator.home).get("/api/snapshot")["requests"]] == ["other"]
        assert "asks     " in creator.shoal("invites").out
        assert creator.shoal("invites", "approve", "nobody").status == 1
        assert creator.shoal("invites", "approve", "other").status == 0
        wait_until(lambda: id_of(third) in members(first), "the other one is a member")
        assert other.facts("invite")["limits"]["delegate"] is False
        # And out again.
        assert creator.shoal("revoke", "guest").status == 0
        assert creator.facts("revoke") == {"revoked": [id_of(second)]}
        wait_until(lambda: id_of(second) not in members(first) | members(third), "the guest is out")
        wait_until(lambda: "removed from den" in guest.shoal("status").out, "the guest knows it")
