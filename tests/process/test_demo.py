"""`shoal demo`: who asks, what is shown, and the whole of it between real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.cli.demo import DemoOutput
from app.cli.demo_swarm import Place as DemoPlace
from app.cli.demo_swarm import choose_asker, memory_for
from engine import hosting
from engine.hosting import HostingWish, plan_hosting, source_kind
from engine.sources.opening import open_source
from engine.stored_form import source_bytes
from tests.engine.gguf_models import write_gguf
from tests.engine.models import VARIANT
from tests.process.node_process import Place


def places(*spans: tuple[int, int]) -> list[DemoPlace]:
    return [DemoPlace(number, f"peer{number}", *span) for number, span in enumerate(spans, 1)]


@pytest.mark.parametrize(
    ("spans", "asker"),
    [
        (((0, 20), (10, 30), (10, 30)), 1),
        (((0, 20), (10, 30), (0, 20)), 2),
        (((10, 30), (0, 20), (5, 25)), 1),  # no one suits: the lost blocks are taken over by whoever is left
    ],
)
def test_the_asker_can_spare_either_of_the_others(spans: tuple[tuple[int, int], ...], asker: int) -> None:
    assert choose_asker(places(*spans), 30) == asker


def test_a_node_has_no_room_for_a_whole_model_of_few_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each node held all of the starter model, so that no other one was on the route, and none could be killed."""
    monkeypatch.setattr(hosting, "computes_grids", lambda kind: True)
    write_gguf(tmp_path / "model.gguf", VARIANT["llama"], "Q4_0")
    source = open_source(str(tmp_path / "model.gguf"), tmp_path)
    memory_bytes, blocks = memory_for(str(tmp_path / "model.gguf"), 0.5)
    wish = HostingWish("cpu", memory_bytes)
    assert plan_hosting(source.config, source_kind(source), wish, source_bytes(source)).blocks == -(-blocks // 2)


def test_the_map_is_plain_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    DemoOutput(quiet=False).show_map(places((0, 2), (1, 3)), 3, asker=1)
    lines = capsys.readouterr().out.splitlines()
    assert "\x1b" not in "".join(lines)
    assert lines[2].endswith("blocks 0:2  asks")
    assert len(set(lines[2].split()[2])) == 2


@pytest.mark.soak
def test_a_node_dies_in_the_middle_and_the_reply_is_finished(tmp_path: Path) -> None:
    place = Place(tmp_path / "home", tmp_path / "cache")
    answer = place.shoal(
        *("demo", "tell me of shoals", "--model=tiny-random", "--max-tokens=40", "--json"), patience_s=110
    )
    facts = answer.facts
    assert len(facts["token_ids"]) == 40
    assert facts["recoveries"] >= 1
    assert facts["same_as_undisturbed"]
    dead = next(node["peer"] for node in facts["nodes"] if node["number"] == facts["killed"])
    assert dead in {hop["peer"] for hop in facts["route_before"]}
    assert dead not in {hop["peer"] for hop in facts["route"]}
    assert all(node["stop"] - node["start"] < facts["blocks_total"] for node in facts["nodes"])
    assert not (tmp_path / "home" / "node.json").exists()  # nothing was done in the person's own home
