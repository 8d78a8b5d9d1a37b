"""`shoal ban` and `shoal trust` without a node: the settings `deny` and `trusted`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.cli import main
from app.cli.bans import _peer_id
from app.core.errors import UsageError
from p2p.identity import Identity

PEER, OTHER = Identity(b"a" * 32).peer_id, Identity(b"b" * 32).peer_id


def facts(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("command", "setting"), [("ban", "deny"), ("trust", "trusted")])
def test_a_peer_is_added_listed_and_removed(
    command: str, setting: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = ("--home", str(tmp_path))
    assert facts(capsys, command, *home)[setting] == []
    assert main([command, PEER, *home]) == 0
    assert PEER in capsys.readouterr().out
    assert facts(capsys, command, OTHER, *home)[setting] == [PEER, OTHER]
    assert facts(capsys, command, PEER[-6:], "--remove", *home)[setting] == [OTHER]
    assert main([command, *home]) == 0
    assert OTHER in capsys.readouterr().out
    assert facts(capsys, command, OTHER, "--remove", *home)[setting] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("ban", "nobody"), "no member is called 'nobody'"),
        (("trust", "nobody"), "no member is called 'nobody'"),
        (("ban", "192.0.2.0/99"), "the setting deny cannot be"),
        (("trust", "192.0.2.0/24"), "the setting trusted cannot be"),
        (("ban", PEER, "--remove"), "is not in the setting deny"),
        (("trust", "--remove"), "name the peer to remove"),
    ],
)
def test_what_is_wrong_is_bad_usage(
    arguments: tuple[str, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--home", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err


def test_networks_can_be_banned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert facts(capsys, "ban", "192.0.2.0/24", "--home", str(tmp_path)) == {"deny": ["192.0.2.0/24"]}


def test_a_name_that_two_members_have_is_refused() -> None:
    members = [{"peer": PEER, "name": "attic"}, {"peer": OTHER, "name": "attic"}, {"peer": "12D3x", "name": "loft"}]
    assert _peer_id("loft", members, []) == "12D3x"
    assert _peer_id(OTHER[-8:], members, []) == OTHER
    assert _peer_id("192.0.2.1", members, []) == "192.0.2.1"
    with pytest.raises(UsageError, match="no member is called 'x'"):
        _peer_id("x", members, [])  # too short to be the end of an id
    with pytest.raises(UsageError, match="several peers are called 'attic'"):
        _peer_id("attic", members, [])
