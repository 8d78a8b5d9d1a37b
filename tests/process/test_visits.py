"""Asking in one swarm while hosting in another, between real processes."""

from __future__ import annotations

from pathlib import Path

from app.api.client import client_of
from app.config.home import Home
from app.swarm.saved import load
from tests.process.node_process import Place, Serving, wait_until

FLAGS = ("--discovery=invite", "--blocks=0:8", "--device=cpu")
PROMPT = ("Once upon a time", "--temperature=0", "--max-tokens=12")


def test_a_node_asks_in_another_swarm_and_goes_on_hosting_in_its_own(tmp_path: Path) -> None:
    here, there = (Place(tmp_path / name, tmp_path / "cache") for name in ("here", "there"))
    assert here.shoal("create", "pond", "--model", "tiny-random").status == 0
    assert there.shoal("create", "lake", "--model", "tiny-random", "--private").status == 0
    public = Place(tmp_path / "public", tmp_path / "cache")
    assert public.shoal("create", "river", "--model", "tiny-random").status == 0
    with (
        Serving(here, *FLAGS, max_vram="1GB") as own,
        Serving(there, *FLAGS, max_vram="1GB") as other,
        Serving(public, *FLAGS, max_vram="1GB") as third,
    ):
        for node in (own, other, third):
            assert node.ready().startswith("ready serving")
        expected = here.facts("chat", *PROMPT)
        pond = load(Home(here.home)).active
        assert pond is not None
        state = here.home / "training" / pond.id[:16] / "of-a-job"
        state.parent.mkdir(parents=True, exist_ok=True)
        state.write_bytes(b"kept")
        # An invite is enough, and the swarm is remembered by its name.
        river = public.shoal("invite").out.strip()
        visited = here.facts("chat", *PROMPT, "--swarm", river)
        assert visited["token_ids"] == expected["token_ids"]
        assert [hop["peer"] for hop in visited["route"]] == [public.node_file()["peer_id"]]
        assert here.facts("chat", *PROMPT, "--swarm", "river")["token_ids"] == expected["token_ids"]
        assert state.read_bytes() == b"kept"  # a visit leaves what jobs keep
        status = here.facts("status")
        assert (status["state"], status["swarm"]) == ("serving", "pond")
        visit, swarms = status["visit"], here.facts("swarms")
        assert (visit["swarm"], visit["state"], visit["members"]) == ("river", "client", 1)
        assert [(swarm["name"], swarm["active"]) for swarm in swarms] == [("pond", True), ("river", False)]
        # Members of the other swarm meet a client that they cannot tell to be this node.
        (visitor,) = client_of(public.home).snapshot().peers
        assert visitor.peer != here.node_file()["peer_id"]
        assert (visitor.state, visitor.start) == ("client", None)
        # A swarm with certificates admits the node's own key, and the first visit is over.
        lake = there.shoal("invite").out.strip()
        hosted = here.facts("chat", *PROMPT, "--swarm", lake)
        assert [hop["peer"] for hop in hosted["route"]] == [there.node_file()["peer_id"]]
        assert [peer.peer for peer in client_of(there.home).snapshot().peers] == [here.node_file()["peer_id"]]
        wait_until(lambda: not present(public), "the visitor has left")
        # The own swarm by its name is no visit.
        assert here.facts("chat", *PROMPT, "--swarm", "pond")["route"][0]["peer"] == here.node_file()["peer_id"]
        unknown = here.shoal("chat", "hello", "--swarm", "nowhere")
        assert (unknown.status, unknown.err.count("\n")) == (1, 1)
        assert "nowhere" in unknown.err
        # Whoever joins the visited swarm is no visitor of it any more.
        assert here.shoal("join", "lake").status == 0
        assert here.facts("status")["visit"] is None
        assert own.end() == 0


def present(place: Place) -> list[str]:
    """The members that a node believes to be there."""
    return [peer.peer for peer in client_of(place.home).snapshot().peers if peer.state != "left"]
