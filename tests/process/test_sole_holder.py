"""Commands that take blocks away from a swarm warn the only node that hosts them; and a node is restarted."""

from __future__ import annotations

from pathlib import Path

from app.api.client import client_of
from tests.process.node_process import LOOPBACK, Place, Serving, wait_until

ALONE = "--discovery=invite"
WARNING = "shoal: only this node hosts blocks 0:8 of pond: replies stop until another member hosts them\n"


def test_a_sole_holder_is_warned(tmp_path: Path) -> None:
    here, there = (Place(tmp_path / name, tmp_path / "cache") for name in ("here", "there"))
    assert here.shoal("create", "pond", "--model", "tiny-random").status == 0
    with Serving(here, ALONE, max_vram="1GB") as node:
        assert node.ready().startswith("ready serving")
        # Alone it takes nothing from anybody.
        assert here.shoal("pause").err == ""
        assert here.shoal("resume").status == 0
        wait_until(lambda: client_of(here.home).snapshot().state == "serving", "it hosts again")
        with Serving(there, ALONE, f"--join={here.shoal('invite').out.strip()}") as guest:
            guest.ready()
            wait_until(lambda: len(client_of(here.home).snapshot().peers) == 1, "it knows the guest")
            for command in (["pause"], ["drain"]):
                assert here.shoal(*command).err == WARNING
                assert here.shoal("resume").status == 0
                wait_until(lambda: client_of(here.home).snapshot().state == "serving", "it hosts again")
            assert here.shoal("config", "set", "max_vram", "2GB").err == ""
            assert here.shoal("config", "set", "max_vram", "1MB").err == WARNING
            assert there.shoal("pause").err == ""  # it hosts nothing
            peer = there.node_file()["peer_id"]
            assert here.facts("ban", peer[-6:])["deny"] == [peer]
            assert here.facts("ban", peer, "--remove")["deny"] == []
            wait_until(lambda: len(client_of(here.home).snapshot().peers) == 1, "it speaks with the guest again")
            assert [member["peer"] for member in here.facts("trust")["members"]] == [peer]
            assert here.shoal("leave", "pond").err == WARNING
        assert "pond" in here.shoal("logs").out
        stopped = here.shoal("stop", "--json")
        assert (stopped.facts, node.ended()) == ({"state": "stopped"}, 0)


def test_a_node_is_restarted_in_the_background(tmp_path: Path) -> None:
    here = Place(tmp_path / "here", tmp_path / "cache")
    for name, value in (("listen", LOOPBACK), ("api_port", "0"), ("discovery", "invite"), ("max_vram", "0")):
        assert here.shoal("config", "set", name, value).status == 0
    with Serving(here, ALONE) as node:
        node.up()
        first = here.node_file()["pid"]
        assert here.shoal("restart", "--json").facts == {"state": "started", "how": "in the background"}
        assert node.ended() == 0
    try:
        assert here.node_file()["pid"] != first
        assert here.shoal("restart").out == "restarted in the background; `shoal status` shows it\n"
        assert here.shoal("stop").status == 0
        started = "no node was running: started one in the background; `shoal status` shows it\n"
        assert here.shoal("restart").out == started
    finally:
        assert here.shoal("stop").status == 0
    assert here.shoal("config", "set", "listen", "/ip4/192.0.2.1/tcp/1").status == 0
    failed = here.shoal("restart")
    assert (failed.status, failed.err.count("\n")) == (1, 1)
    assert "cannot listen on /ip4/192.0.2.1/tcp/1" in failed.err
