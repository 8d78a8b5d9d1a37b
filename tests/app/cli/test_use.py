"""`shoal use`: what programs' settings become, what is kept of them, and how it is undone."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

import app.cli.use
from app.cli import main
from app.cli.use import PROGRAMS, Endpoint
from app.config.home import Home
from app.config.keys import PREFIX, digest_of, read_keys

TO = Endpoint("http://127.0.0.1:7465", "sk-x", "reef", 4096)


def test_settings_are_merged_with_those_that_are_there() -> None:
    claude = json.loads(PROGRAMS["claude"].settings('{"theme": "dark", "env": {"A": "1"}}', TO))
    assert claude["theme"] == "dark"
    assert claude["env"]["A"] == "1"
    assert (claude["env"]["ANTHROPIC_BASE_URL"], claude["env"]["ANTHROPIC_MODEL"]) == (TO.url, "reef")
    assert [claude["env"][f"ANTHROPIC_DEFAULT_{tier}_MODEL"] for tier in ("OPUS", "SONNET", "HAIKU")] == ["reef"] * 3
    assert claude["env"]["ANTHROPIC_API_KEY"] == "", "a key of the user's environment would go to this node"
    opencode = json.loads(PROGRAMS["opencode"].settings("", TO))
    assert opencode["model"] == "shoal/reef"
    assert opencode["provider"]["shoal"]["options"] == {"baseURL": f"{TO.url}/v1", "apiKey": "sk-x"}
    before = 'model = "other"  # mine\n\n[model_providers.own]\nname = "Own"\n'
    for text in (before, PROGRAMS["codex"].settings(before, TO)):  # and once more
        codex = PROGRAMS["codex"].settings(text, TO)
        parsed = tomllib.loads(codex)
        assert "# mine" in codex
        assert (parsed["model"], parsed["model_provider"]) == ("reef", "shoal")
        assert set(parsed["model_providers"]) == {"own", "shoal"}
        assert parsed["model_providers"]["shoal"]["base_url"] == f"{TO.url}/v1"
    assert tomllib.loads(PROGRAMS["codex"].settings("", TO))["model"] == "reef"
    aider = PROGRAMS["aider"].settings("dark-mode: true\nmodel: x\n", TO)
    assert aider.splitlines()[:2] == ["dark-mode: true", 'model: "openai/reef"']
    assert PROGRAMS["aider"].settings(aider, TO) == aider
    for name in ("continue", "open-webui", "zed"):
        assert f"{TO.url}/v1" in PROGRAMS[name].settings("", TO)
    assert opencode["provider"]["shoal"]["models"]["reef"]["limit"] == {"context": 4096, "output": 2048}
    large = replace(TO, context_length=131_072)
    opencode = json.loads(PROGRAMS["opencode"].settings("", large))
    assert opencode["provider"]["shoal"]["models"]["reef"]["limit"] == {"context": 131_072, "output": 8192}
    (zed,) = json.loads(PROGRAMS["zed"].settings("", TO))["language_models"]["openai_compatible"]["Shoal"][
        "available_models"
    ]
    assert (zed["max_tokens"], zed["capabilities"]["images"]) == (4096, False), "images are refused"
    begun = PROGRAMS["continue"].settings("", TO).splitlines()
    assert begun[:4] == ["name: Shoal", "version: 0.0.1", "schema: v1", "models:"], "all four are required"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's home folder, and a node that runs in it."""
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr(app.cli.use, "_endpoint", lambda folder, key: Endpoint(TO.url, key, TO.model))
    return tmp_path


def test_settings_are_written_with_a_key_of_their_own_and_restored(home: Path) -> None:
    file, common = home / ".claude" / "settings.json", ["--home", str(home / "node")]
    file.parent.mkdir()
    file.write_text('{"theme": "dark"}')
    for _ in range(2):
        assert main(["use", "claude", *common]) == 0
    key = json.loads(file.read_text())["env"]["ANTHROPIC_AUTH_TOKEN"]
    keys = read_keys(Home(home / "node").keys_file)
    assert key.startswith(PREFIX)
    assert [one.digest for one in keys] == [digest_of(key)]
    assert main(["use", "claude", "--undo", *common]) == 0
    assert file.read_text() == '{"theme": "dark"}'
    assert read_keys(Home(home / "node").keys_file) == ()
    assert main(["use", "claude", "--undo", *common]) != 0
    assert main(["use", "codex", *common]) == 0
    assert (home / ".codex" / "config.toml").exists()
    assert main(["use", "codex", "--undo", *common]) == 0
    assert list((home / ".codex").iterdir()) == []


def test_what_cannot_be_changed_is_left_and_printing_writes_nothing(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--home", str(home / "node")]
    file = home / ".claude" / "settings.json"
    file.parent.mkdir()
    for damaged in ("{ // comment\n}", "[1]"):
        file.write_text(damaged)
        assert main(["use", "claude", *common]) != 0
        assert "--print" in capsys.readouterr().err
        assert file.read_text() == damaged
    assert main(["use", "claude", "--print", *common]) == 0
    assert "ANTHROPIC_BASE_URL" in capsys.readouterr().out
    assert main(["use", "zed", "--json", *common]) == 0
    assert "openai_compatible" in json.loads(capsys.readouterr().out)["settings"]
    assert main(["use", "zed", "--undo", *common]) != 0
    assert read_keys(Home(home / "node").keys_file) == ()
    assert [path.name for path in file.parent.iterdir()] == ["settings.json"]


def test_a_node_that_does_not_run_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["use", "claude", "--print", "--home", str(tmp_path)]) != 0
    assert "no node runs" in capsys.readouterr().err
