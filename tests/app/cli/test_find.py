"""`shoal find` against a node that answers: order, words, and a name that must be looked up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import app.api.client
from app.cli import main
from app.core.errors import UnknownSwarm
from app.snapshot.codec import to_json
from app.snapshot.views import FitView, OfferView, ProspectsView

OFFERS = (
    OfferView("slow", "small", FitView(3, 30), 0, members=2, tokens_per_s=4.0),
    OfferView("broken", "big", FitView(0, 80), 5 << 30, members=3, missing_block=7),
    OfferView("fast", "small", FitView(30, 30), 1 << 20, members=1, tokens_per_s=12.5),
    OfferView("starter", "tiny", FitView(30, 30), 90 << 20, alone_tokens_per_s=30.0),
)


class Node:
    """Answers what `shoal find` asks, and knows one swarm that is in no list."""

    def get(self, path: str, *, timeout_s: float) -> Any:
        assert path == "/control/prospects"
        return to_json(ProspectsView(OFFERS))

    def post(self, path: str, body: dict[str, Any]) -> Any:
        assert path == "/control/preview"
        if body["target"] != "far":
            raise UnknownSwarm("nobody knows it")
        return to_json(OfferView("far", "big", members=9, tokens_per_s=1.0))


def find(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], home: Path, *arguments: str) -> str:
    monkeypatch.setattr(app.api.client, "client_of", lambda folder: Node())
    assert main(["find", *arguments, "--home", str(home)]) == 0
    return capsys.readouterr().out


def test_the_fastest_complete_swarms_come_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = json.loads(find(monkeypatch, capsys, tmp_path, "--json"))
    assert [one["target"] for one in found] == ["starter", "fast", "slow", "broken"]
    starter, fast, slow, broken = find(monkeypatch, capsys, tmp_path).splitlines()
    assert "30.0 tokens/s on this machine alone" in starter
    assert "1 member  complete  about 12.5 tokens/s  30 of 30 blocks fit here" in fast
    assert "nothing to fetch" in slow
    assert "nobody serves block 7" in broken


def test_a_text_is_looked_for_and_a_name_looked_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    names = [line.split()[0] for line in find(monkeypatch, capsys, tmp_path, "SMALL").splitlines()]
    assert names == ["fast", "slow"]
    assert find(monkeypatch, capsys, tmp_path, "far").startswith("far  big  9 members  complete")
    assert "No swarm was found" in find(monkeypatch, capsys, tmp_path, "nowhere")
    assert find(monkeypatch, capsys, tmp_path, "slow").count("\n") == 1
