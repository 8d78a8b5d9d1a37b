"""A training job over real processes: one node founds it, another joins and leaves, and exports what they made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.api.client import client_of
from engine.sources.huggingface import open_folder
from tests.process.node_process import Place, Serving, wait_until

SHAPE = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 264, "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}  # fmt: skip
FLAGS = ("--every=20", "--batch=64", "--length=32", "--lr=1e-2", "--seed=3")


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A text and a shape."""
    data, shape = tmp_path / "words.txt", tmp_path / "shape.json"
    data.write_text("The shoal swims, and every fish of it learns from all the others. " * 60)
    shape.write_text(json.dumps(SHAPE))
    return data, shape


def refused(place: Place, *words: str) -> str:
    """The one line with which a command fails."""
    answer = place.shoal("train", *words)
    assert (answer.status, answer.err.count("\n")) == (1, 1), answer
    return str(answer.err)


@pytest.mark.timeout(240)
def test_a_job_is_founded_joined_left_and_exported(tmp_path: Path, files: tuple[Path, Path]) -> None:
    data, shape = files
    places = [Place(tmp_path / name, tmp_path / "cache") for name in ("one", "two")]
    assert places[0].shoal("create", "home", "--model", "tiny-random").status == 0
    start: tuple[str, ...] = ("--data", str(data), "--shape", str(shape), *FLAGS)

    with Serving(places[0], "--discovery=invite", max_vram="0") as one:
        one.ready()
        assert "licence" in refused(places[0], "fish", *start)
        start = (*start, "--licence=CC0-1.0", "--steps=100000")
        assert "--every 0" in refused(places[0], "fish", *start, "--every=0")
        assert "smaller than one sequence" in refused(places[0], "fish", *start, "--batch=8")
        assert "no member" in refused(places[0], "join", "fish")
        forecast = places[0].facts("train", "fish", *start, "--dry-run")
        assert forecast["weights"] > 20_000
        assert forecast["seconds"] == pytest.approx(100_000 * forecast["step_s"])
        founded = places[0].facts("train", "fish", *start)
        assert founded["status"] == "running"
        assert founded["hash"] in refused(places[0], "fish", *start, "--seed=4")
        wait_until(lambda: job_of(places[0])["round"] >= 1, "a round is made alone")
        invite = places[0].shoal("invite").out.strip()
        with Serving(places[1], "--discovery=invite", max_vram="0", SHOAL_INVITE=invite) as two:
            two.ready()
            joined = places[1].facts("train", "join", "fish")
            assert joined["hash"] == founded["hash"]
            wait_until(lambda: len(job_of(places[1])["islands"]) == 2, "two islands train", 60)
            wait_until(lambda: both_trained(places[1]), "they make rounds together", 60)
            assert len(places[1].facts("jobs", "show", "fish")["islands"]) == 2
            left = places[1].facts("train", "leave", "fish")
            assert left["status"] == "left"
    past = places[0].facts("plan", "check")["forecasts"]
    assert any(one["task"] == "train" and one["machines"] == 1 for one in past)
    log = places[1].facts("train", "log", "fish")
    assert [entry["round"] for entry in log] == list(range(len(log)))
    assert any(len(entry["members"]) == 2 for entry in log)
    out = tmp_path / "exported"
    assert places[1].facts("train", "export", "fish", str(out))["round"] == len(log)
    assert open_folder(out).config.n_blocks == 2
    again = places[1].shoal("train", "export", "fish", str(out))
    assert (again.status, "not an empty folder" in again.err) == (1, True)


def job_of(place: Place) -> Any:
    """What the node says of its job; quicker than a command."""
    (job,) = client_of(place.home).get("/control/train")
    return job


def both_trained(place: Place) -> bool:
    """Whether two islands took part in the last round."""
    islands = job_of(place)["islands"]
    return len(islands) == 2 and all(island["steps"] for island in islands)
