"""`shoal keys` without a node: keys are made, listed and revoked, and wrong use is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.cli import main
from app.config.keys import PREFIX


def test_a_key_is_made_listed_and_revoked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = ("--home", str(tmp_path))
    assert main(["keys", *home]) == 0
    assert "There are no keys" in capsys.readouterr().out
    assert main(["keys", "add", "editor", "--limit", "500", "--at-once", "2", *home]) == 0
    key = capsys.readouterr().out.strip()
    assert key.startswith(PREFIX)
    assert main(["keys", "add", "agent", "--json", *home]) == 0
    assert json.loads(capsys.readouterr().out)["key"].startswith(PREFIX)
    assert main(["keys", "list", "--json", *home]) == 0
    editor, agent = json.loads(capsys.readouterr().out)
    assert (editor["name"], editor["tokens_per_minute"], editor["at_once"]) == ("editor", 500, 2)
    assert (agent["name"], agent["tokens_per_minute"]) == ("agent", None)
    assert main(["keys", *home]) == 0
    out = capsys.readouterr().out
    assert "500 tokens a minute, 2 at once" in out
    assert key not in out
    assert main(["keys", "revoke", "editor", *home]) == 0
    assert main(["keys", "--json", *home]) == 0
    assert "editor" not in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["add"], "keys add NAME"),
        (["add", "a b"], "letters"),
        (["add", "a", "--limit", "0"], "1 or more"),
        (["revoke", "nobody"], "unknown key"),
        (["revoke", "a", "--limit", "5"], "--limit"),
        (["list", "a"], "unknown action"),
    ],
)
def test_wrong_use_is_refused(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", *arguments, "--home", str(tmp_path)]) != 0
    assert words in capsys.readouterr().err
