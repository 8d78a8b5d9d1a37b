"""Swarms of a home folder where no node runs: founding, joining by invite, leaving, listing, inviting."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

import app.cli
from app.config.home import Home
from app.swarm.invite import Invite, new_secret, parse_invite
from app.swarm.saved import load
from app.weights.manifest_store import ManifestStore
from p2p.identity import Identity

HASH = "ab" * 32


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _own_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(cache))


def shoal(home: Path, *arguments: str) -> int:
    return app.cli.main(["--home", str(home), *arguments])


def facts(home: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """What a command that works says with --json."""
    capsys.readouterr()
    assert shoal(home, *arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def an_invite(name: str = "home", secret: bytes | None = None, model_hash: str = HASH) -> Invite:
    return Invite(name, model_hash, (f"/ip4/127.0.0.1/tcp/4/p2p/{Identity.generate().peer_id}",), secret)


def test_create_signs_a_swarm_and_makes_it_the_active_one(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = facts(tmp_path, capsys, "create", "Home", "--model", "tiny-random")
    assert made["swarm"]["name"] == "home"
    [swarm] = facts(tmp_path, capsys, "swarms")
    assert (swarm["active"], swarm["private"]) == (True, False)
    manifest = ManifestStore(cache).load(swarm["manifest"])
    assert manifest is not None
    assert ManifestStore(cache).source(manifest.hash) == "tiny-random"
    remembered = load(Home(tmp_path)).active
    assert remembered is not None
    assert remembered.record is not None


def test_a_private_swarm_has_a_secret_that_only_its_invite_tells(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shoal(tmp_path, "create", "den", "--model", "tiny-random", "--private") == 0
    active = load(Home(tmp_path)).active
    assert active is not None
    assert active.secret is not None
    said = capsys.readouterr()
    assert facts(tmp_path, capsys, "swarms")[0]["private"] is True
    assert active.secret.hex() not in said.out + said.err + json.dumps(facts(tmp_path, capsys, "swarms"))
    assert shoal(tmp_path, "invite") == 0
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1
    assert parse_invite(captured.out).secret == active.secret
    assert "no node runs here" in captured.err


def test_an_invite_leads_here_and_where_this_node_was_invited(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    invite = an_invite()
    assert shoal(tmp_path, "config", "set", "advertise", "/dns4/example.org/tcp/7464") == 0
    assert shoal(tmp_path, "join", str(invite)) == 0
    peer = facts(tmp_path, capsys, "id")["peer_id"]
    passed_on = facts(tmp_path, capsys, "invite", "home")
    assert passed_on["addresses"] == [f"/dns4/example.org/tcp/7464/p2p/{peer}", *invite.addresses]
    assert parse_invite(passed_on["invite"]).model_hash == HASH
    assert shoal(tmp_path, "invite", "--qr") == 0
    assert len(capsys.readouterr().out.splitlines()) > 10


@pytest.mark.parametrize(("address", "is_said"), [("/ip4/127.0.0.1/tcp/7464", True), ("/ip4/10.0.0.7/tcp/7464", False)])
def test_an_invite_that_works_on_this_machine_alone_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], address: str, is_said: bool
) -> None:
    assert shoal(tmp_path, "config", "set", "advertise", address) == 0
    assert shoal(tmp_path, "join", str(an_invite())) == 0
    capsys.readouterr()
    assert shoal(tmp_path, "invite") == 0
    captured = capsys.readouterr()
    assert ("only nodes on this machine" in captured.err) == is_said
    assert len(captured.out.splitlines()) == 1


@pytest.mark.parametrize("pasted", ["{}", "\u201c{}\u201d", "Hi,\n> {}\nsee you"], ids=["bare", "quoted", "in a mail"])
@pytest.mark.parametrize("how", ["argument", "file", "input", "environment"])
def test_an_invite_need_not_be_an_argument(
    how: str, pasted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = new_secret()
    invite = an_invite(secret=secret)
    text = pasted.format(invite)
    file = tmp_path / "invite.txt"
    file.write_text(f"{text}\n")
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{text}\n"))
    monkeypatch.setenv("SHOAL_INVITE", text)
    arguments = {"argument": [text], "file": [str(file)], "input": ["-"], "environment": []}[how]
    assert shoal(tmp_path / "home", "join", *arguments) == 0
    active = load(Home(tmp_path / "home")).active
    assert active is not None
    assert (active.secret, active.addresses) == (secret, invite.addresses)
    assert "shoal serve" in capsys.readouterr().out


def test_another_secret_does_not_undo_the_known_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    right = an_invite(secret=new_secret())
    assert shoal(tmp_path, "join", str(right)) == 0
    for wrong in (an_invite(secret=new_secret()), an_invite(secret=None)):
        assert shoal(tmp_path, "join", str(wrong)) == 1
        assert "with another secret" in capsys.readouterr().err
    active = load(Home(tmp_path)).active
    assert active is not None
    assert active.secret == right.secret


def test_a_private_swarm_of_the_name_of_a_saved_public_one_is_not_said_to_have_another_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shoal(tmp_path, "join", str(an_invite(secret=None))) == 0
    assert shoal(tmp_path, "join", str(an_invite(secret=new_secret()))) == 1
    assert "is saved on this node as a public swarm" in capsys.readouterr().err


def test_whoever_has_an_invite_to_an_older_private_swarm_has_its_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shoal(tmp_path, "join", str(an_invite(secret=new_secret()))) == 0
    capsys.readouterr()
    assert shoal(tmp_path, "invite") == 0
    said = capsys.readouterr()
    assert said.out.startswith("shoal:")
    assert "whoever has this invite has the swarm's secret, for good" in said.err
    assert facts(tmp_path, capsys, "invite")["limits"] is None
    for limited in (["--uses", "2"], ["--expires", "1d"], ["--approve"], ["--delegate"]):
        assert shoal(tmp_path, "invite", *limited) == 2
        assert "created before invites could be limited" in capsys.readouterr().err
    assert shoal(tmp_path, "revoke") == 2
    assert facts(tmp_path, capsys, "invites") == []
    assert shoal(tmp_path, "join", str(an_invite("open"))) == 0
    assert shoal(tmp_path, "invite", "--uses", "2") == 2
    assert "is public" in capsys.readouterr().err


def test_a_private_swarm_created_here_has_limited_invites(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal(tmp_path, "create", "den", "--model", "tiny-random", "--private") == 0
    made = facts(tmp_path, capsys, "invite", "--uses", "3", "--expires", "2d")
    limits = made["limits"]
    assert (limits["state"], limits["uses"], limits["expires_at_ms"] - limits["made_at_ms"]) == ("open", 3, 172_800_000)
    entry = parse_invite(made["invite"]).entry
    assert entry is not None
    assert entry.issuer == entry.authority == facts(tmp_path, capsys, "id")["peer_id"]
    assert entry.token.hex() not in Home(tmp_path).admission_file.read_text()
    assert facts(tmp_path, capsys, "invites") == [limits]
    assert facts(tmp_path, capsys, "invites", "cancel", limits["id"])["state"] == "cancelled"
    for arguments, words in (
        (["invite", "--uses", "0"], "1 to 100 times"),
        (["invite", "--uses", "101"], "1 to 100 times"),
        (["revoke", "nobody"], "no member is called 'nobody'"),
        (["revoke", entry.issuer], "neither this node nor"),
        (["revoke", "--remove"], "name the peer"),
    ):
        assert shoal(tmp_path, *arguments) == 2
        assert words in capsys.readouterr().err
    assert shoal(tmp_path, "invites", "approve", "nobody") == 1
    assert "does not wait for approval" in capsys.readouterr().err
    gone = Identity.generate().peer_id
    assert facts(tmp_path, capsys, "revoke", gone) == {"revoked": [gone]}
    assert facts(tmp_path, capsys, "revoke", gone[-8:], "--remove") == {"revoked": []}


def test_swarms_are_switched_and_left_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two"):
        assert shoal(tmp_path, "join", str(an_invite(name))) == 0
    assert [swarm["active"] for swarm in facts(tmp_path, capsys, "swarms")] == [False, True]
    assert shoal(tmp_path, "join", "one") == 0
    assert [swarm["active"] for swarm in facts(tmp_path, capsys, "swarms")] == [True, False]
    assert facts(tmp_path, capsys, "leave", "one")["pinned"] == "one#abababababababababab"
    assert [swarm["name"] for swarm in facts(tmp_path, capsys, "swarms")] == ["two"]
    assert shoal(tmp_path, "leave", "two") == 0
    assert shoal(tmp_path, "swarms") == 0
    assert "in no swarm" in capsys.readouterr().out


def test_two_swarms_of_one_name_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for model_hash in ("ab" * 32, "cd" * 32):
        assert shoal(tmp_path, "join", str(an_invite(model_hash=model_hash))) == 0
    assert shoal(tmp_path, "leave", "home") == 2
    assert "write one of home#abababababababababab, home#cdcdcdcdcdcdcdcdcdcd" in capsys.readouterr().err
    assert shoal(tmp_path, "leave", "home#cdcdcdcdcdcdcdcdcdcd") == 0


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["create", "home", "--model", "/no/such/model"], 1, "unknown model"),
        (["create", "Not A Name", "--model", "tiny-random"], 2, "is not a swarm's name"),
        (["create", "home#abababababababababab", "--model", "tiny-random"], 2, "has no '#'"),
        (["create", "known", "--model", "tiny-random"], 1, "already a member of known#abababababababababab"),
        (["join", "shoal:nonsense"], 2, "the invite is mistyped"),
        (["join", "not a name"], 2, "is not a swarm's name"),
        (["join"], 2, "name the swarm to join"),
        (["leave", "unheard-of"], 1, "unknown swarm unheard-of"),
        (["invite", "unheard-of"], 1, "unknown swarm unheard-of"),
        (["status"], 1, "no node runs in"),
        (["peers"], 1, "start one with `shoal serve`"),
        (["stop"], 1, "no node runs in"),
    ],
)
def test_what_is_wrong_is_one_line(
    arguments: list[str], status: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shoal(tmp_path, "join", str(an_invite("known"))) == 0
    capsys.readouterr()
    assert shoal(tmp_path, *arguments) == status
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_nowhere_to_invite_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal(tmp_path, "invite") == 1
    assert "in no swarm" in capsys.readouterr().err


def test_status_without_a_node_is_json_for_monitors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal(tmp_path, "status", "--json") == 1
    captured = capsys.readouterr()
    assert (json.loads(captured.out), captured.err) == ({"state": "stopped"}, "")
