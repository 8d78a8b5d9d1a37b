"""Real nodes in real processes on loopback: coming up, finding each other, being refused, dying and coming back."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from app.api.client import Client, client_of
from app.cli.swarms import STILL_TRYING
from app.config.home import Home
from app.core.errors import AppError
from app.membership.swarm_search import FIND_TIMEOUT_S
from app.swarm.invite import Invite, new_secret, parse_invite
from app.swarm.saved import load
from p2p.identity import Identity
from tests.process.node_process import FRESH, LOOPBACK, Place, Serving, wait_until

# Nothing but what a test names: no stray node of the same machine takes part.
ALONE = "--discovery=invite"
STATUS_FIELDS = {
    *("peer_id", "state", "reason", "swarm", "manifest", "blocks_total", "start", "stop"),
    *("listen_addrs", "api_url", "device", "sessions"),
}
PEER_FIELDS = {"peer", "name", "start", "stop", "rtt_s", "link", "score", "state"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nodes")


def place(folder: Path, name: str) -> Place:
    return Place(folder / name, folder / "cache")


@pytest.fixture(scope="module")
def founder(folder: Path) -> Iterator[Serving]:
    """A node that founded the public swarm `home`."""
    here = place(folder, "founder")
    assert here.shoal("create", "home", "--model", "tiny-random").status == 0
    with Serving(here, ALONE, program=FRESH, SHOAL_NAME="attic") as node:
        assert node.ready().startswith("ready client swarm=home#")
        yield node


@pytest.fixture(scope="module")
def private_founder(folder: Path) -> Iterator[Serving]:
    """A node that founded the private swarm `den`."""
    here = place(folder, "private")
    assert here.shoal("create", "den", "--model", "tiny-random", "--private").status == 0
    with Serving(here, ALONE) as node:
        node.ready()
        yield node


@pytest.fixture(scope="module")
def guest(folder: Path) -> Iterator[Serving]:
    """A node that is in no swarm yet."""
    with Serving(place(folder, "guest"), ALONE) as node:
        node.up()
        yield node


def client(node: Serving) -> Client:
    return client_of(node.place.home)


def knows(node: Serving, other: Serving) -> bool:
    peer_id = other.place.node_file()["peer_id"]
    return any(peer.peer == peer_id and peer.link is not None for peer in client(node).snapshot().peers)


def test_status_and_node_file(founder: Serving) -> None:
    status = founder.place.facts("status")
    assert STATUS_FIELDS <= status.keys()
    assert (status["state"], status["swarm"], status["name"]) == ("client", "home", "attic")
    assert status["blocks_total"] > 0
    node = founder.place.node_file()
    assert node == {
        "pid": founder.process.pid,
        "api_url": status["api_url"],
        "peer_id": status["peer_id"],
        "listen_addrs": status["listen_addrs"],
    }
    assert node["listen_addrs"][0].startswith("/ip4/127.0.0.1/tcp/")
    assert node["listen_addrs"][0].endswith(f"/p2p/{node['peer_id']}")
    [swarm] = founder.place.facts("swarms")
    assert (swarm["name"], swarm["manifest"], swarm["active"]) == ("home", status["manifest"], True)
    assert founder.place.facts("id") == {"peer_id": node["peer_id"]}
    assert {check["status"] for check in client(founder).get("/control/doctor")} <= {"ok", "warn", "skip"}


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's list of loaded libraries")
def test_a_node_that_hosts_nothing_does_without_torch(founder: Serving) -> None:
    assert "libtorch" not in Path(f"/proc/{founder.process.pid}/maps").read_text()


def test_a_joiner_by_invite_meets_the_founder_dies_and_comes_back(founder: Serving, folder: Path) -> None:
    here = place(folder, "invited")
    invite = founder.place.shoal("invite").out.strip()
    with Serving(here, ALONE, SHOAL_INVITE=invite) as node:
        node.ready()
        wait_until(lambda: knows(node, founder) and knows(founder, node), "both know each other")
        [peer] = here.facts("peers")
        assert PEER_FIELDS <= peer.keys()
        assert (peer["name"], peer["state"], peer["link"], peer["start"]) == ("attic", "client", "lan", None)
        node.end(signal.SIGKILL)
    assert (here.home / "node.json").exists()  # nobody was left to remove it
    answer = here.shoal("status")
    assert (answer.status, answer.err.count("\n")) == (1, 1)
    assert "no node runs in" in answer.err
    with Serving(here, ALONE) as node:
        node.ready()
        wait_until(lambda: knows(node, founder), "it finds its way back")
        assert node.end() == 0
    assert not (here.home / "node.json").exists()


def test_a_joiner_by_name_finds_the_swarm_through_a_peer(founder: Serving, folder: Path) -> None:
    here = place(folder, "named")
    address = founder.place.node_file()["listen_addrs"][0]
    with Serving(here, "--discovery=", f"--peer={address}", "--join=home") as node:
        node.ready()
        wait_until(lambda: knows(node, founder), "it knows the founder")
        assert here.facts("swarms")[0]["pinned"] == founder.place.facts("swarms")[0]["pinned"]
        assert here.shoal("stop").out == "stopped\n"
        assert node.ended() == 0


def test_an_unknown_name_is_one_line(founder: Serving, folder: Path) -> None:
    here = place(folder, "lost")
    address = founder.place.node_file()["listen_addrs"][0]
    with Serving(here, "--discovery=", f"--peer={address}", "--join=nowhere") as node:
        assert node.ended() == 1
    assert len(node.errors) == 1
    assert node.errors[0].startswith("shoal: no reachable peer knows the swarm nowhere")
    assert load(Home(here.home)).swarms == ()


def test_a_wrong_secret_is_refused_at_once(private_founder: Serving, guest: Serving) -> None:
    wrong = replace(parse_invite(private_founder.place.shoal("invite").out), secret=new_secret())
    api = client(guest)
    began = time.monotonic()
    with pytest.raises(AppError, match="has another swarm secret, or none; ask a member"):
        api.post("/control/join", {"target": str(wrong)})
    assert time.monotonic() - began < FIND_TIMEOUT_S  # no search was waited for
    snapshot = api.snapshot()
    assert (snapshot.state, snapshot.swarms) == ("idle", ())


def test_a_running_node_is_sent_around(founder: Serving, private_founder: Serving, guest: Serving) -> None:
    here = guest.place
    for command in ("peers", "blocks", "swarms"):
        assert here.shoal(command).out.startswith("This node is in no swarm: join one with")
    assert here.facts("status")["state"] == "idle"
    # A wrong secret is refused at once, by name, and leaves nothing behind.
    right = parse_invite(private_founder.place.shoal("invite").out)
    wrong = replace(right, secret=new_secret())
    refused = here.shoal("join", "-", text=str(wrong))
    assert refused.status == 1
    assert "secret" in refused.err
    assert refused.err.count("\n") == 1
    assert here.facts("status")["state"] == "idle"
    assert here.facts("swarms") == []
    # So is no secret at all.
    public = here.shoal("join", str(replace(right, secret=None, entry=None)))
    assert (public.status, "secret" in public.err) == (1, True)
    # The right one is let in, over another network on the same port.
    before = here.facts("status")["listen_addrs"]
    assert here.shoal("join", "-", "--json", text=str(right)).facts["state"] == "client"
    wait_until(lambda: knows(guest, private_founder), "it knows the private swarm's founder")
    status = here.facts("status")
    assert (status["swarm"], status["private"], status["listen_addrs"]) == ("den", True, before)
    # And on to another swarm, out of it, and back by its name.
    invite = founder.place.shoal("invite").out.strip()
    assert here.shoal("join", invite).status == 0
    wait_until(lambda: knows(guest, founder), "it knows the public swarm's founder")
    assert [swarm["active"] for swarm in here.facts("swarms")] == [False, True]
    assert here.shoal("leave", "home").status == 0
    assert here.facts("status")["state"] == "idle"
    assert here.shoal("join", "den").status == 0
    wait_until(lambda: knows(guest, private_founder), "it knows the private swarm's founder again")


def test_joining_a_dead_swarm_stays_where_it_works(founder: Serving, folder: Path) -> None:
    here = place(folder, "mover")
    dead = f"/ip4/127.0.0.1/tcp/9/p2p/{Identity.generate().peer_id}"
    ghost = str(Invite("ghost", "ab" * 32, (dead,)))
    with Serving(here, ALONE, SHOAL_INVITE=founder.place.shoal("invite").out.strip()) as node:
        node.ready()
        answer = here.shoal("join", ghost)
        assert (answer.status, answer.out, answer.err.count("\n")) == (1, "", 1)
        assert f"ghost: no member answers (1 tried: {dead[-6:]})" in answer.err
        assert "--force" in answer.err
        assert here.facts("status")["swarm"] == "home"
        moved = here.shoal("join", ghost, "--force")
        assert (moved.status, moved.err) == (STILL_TRYING, "")
        assert moved.out.startswith("not joined yet: ghost: no member answers")
        assert moved.out.endswith("still trying\n")
        assert here.facts("status")["swarm"] == "ghost"


def test_settings_of_a_running_node(guest: Serving) -> None:
    here = guest.place
    assert "name = cellar" in here.shoal("config", "set", "name", "cellar").out
    assert here.facts("status")["name"] == "cellar"
    assert "after a restart" in here.shoal("config", "set", "device", "cpu").out
    assert "the flag overrides it" in here.shoal("config", "set", "api_port", "7000").out
    assert here.shoal("config", "set", "api_port", "x").status == 2
    deny = here.shoal("config", "set", "deny", "192.0.2.0/24,198.51.100.7")
    assert (deny.status, "192.0.2.0/24,198.51.100.7/32" in deny.out) == (0, True)


def test_resume_names_the_rule_that_keeps_a_node_paused(founder: Serving) -> None:
    here = founder.place
    assert here.shoal("config", "set", "pause_times", "mon-sun 00:00-24:00").status == 0
    wait_until(lambda: client(founder).snapshot().courtesy.paused, "the rule pauses it")
    said = 'still paused by a rule (by timetable): `shoal config set pause_times ""` turns this rule off\n'
    assert here.shoal("resume").out == said
    assert here.shoal("config", "unset", "pause_times").status == 0
    wait_until(lambda: not client(founder).snapshot().courtesy.paused, "the rule is off")
    assert here.shoal("resume").out == "resumed\n"


def test_a_second_node_in_the_same_home_is_refused(guest: Serving) -> None:
    second = guest.place.shoal("serve")
    assert second.status == 1
    assert "a node already runs in" in second.err
    assert str(guest.process.pid) in second.err
    assert second.err.count("\n") == 1


def test_a_wrong_token_is_said(guest: Serving) -> None:
    answer = guest.place.shoal("status", SHOAL_TOKEN="not-the-token-of-this-node")
    assert (answer.status, "token" in answer.err) == (1, True)


@pytest.mark.skipif(os.name == "nt", reason="no program can tell another one to end there")
@pytest.mark.parametrize("how", ["stop", "restart"])
def test_a_node_whose_token_is_gone_can_be_ended_and_started_again(how: str, folder: Path) -> None:
    here = place(folder, f"token-{how}")
    with Serving(here, ALONE) as node:
        node.up()
        token = here.home / "token"
        token.unlink()
        answer = here.shoal("status")
        assert (answer.status, "`shoal restart` makes a new one" in answer.err) == (1, True)
        token.write_text("of-another-node-altogether\n")
        assert "the token is missing or wrong" in here.shoal("status").err
        token.unlink()
        answer = here.shoal(how, SHOAL_LISTEN=LOOPBACK, SHOAL_API_PORT="0", SHOAL_DISCOVERY="invite")
        assert answer.status == 0, answer.err
        assert node.ended() == 0
    if how == "restart":
        assert here.facts("status")["state"] == "idle"
        assert here.shoal("stop").status == 0


@pytest.mark.parametrize(
    ("flag", "words"), [("--api-port={}", "the API's port"), ("--listen=/ip4/127.0.0.1/tcp/{}", "is in use")]
)
def test_a_chosen_port_that_is_taken_fails(flag: str, words: str, folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        answer = place(folder, "no-port").shoal("serve", ALONE, flag.format(taken.getsockname()[1]))
    assert answer.status == 1
    assert words in answer.err
    assert answer.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--join", "shoal:nonsense"], 2, "the invite is mistyped"),
        (["--join", "not a name"], 2, "is not a swarm's name"),
        (["--discovery", "carrier-pigeon"], 2, "is not one of mdns, dht, invite, remembered, public"),
        (["--listen", "here"], 2, "the setting listen cannot be"),
        (["--api-port", "70000"], 2, "0 to 65535"),
        (["--blocks", "9:3"], 2, "the setting blocks cannot be '9:3'"),
    ],
)
def test_bad_usage_is_said_before_anything_starts(arguments: list[str], status: int, words: str, folder: Path) -> None:
    answer = place(folder, "misused").shoal("serve", *arguments)
    assert answer.status == status
    assert words in answer.err
    assert answer.err.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there_is_said_also_without_a_swarm(folder: Path) -> None:
    with Serving(place(folder, "no-card"), ALONE, "--device=cuda", max_vram="1GB") as node:
        wait_until(lambda: any("has no device 'cuda'" in line for line in node.errors), "the device is missed")


def test_a_follower_is_told_and_released_when_the_node_ends(guest: Serving) -> None:
    api = client(guest)
    states: list[str] = []
    following = threading.Event()

    def follow() -> None:
        for event in api.events():
            if event.name == "snapshot":
                states.append(event.data["state"])
                following.set()

    follower = threading.Thread(target=follow)
    follower.start()
    assert following.wait(30)
    assert guest.end() == 0
    follower.join(10)
    assert not follower.is_alive()
    assert states[-1] == "stopping"
    assert guest.errors == [line for line in guest.errors if "WARNING" in line]
