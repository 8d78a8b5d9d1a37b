"""Founding a training job: what cannot be is refused in one line, and what is stored is found again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from app.cli import main
from app.config.home import Home
from app.core.errors import AppError, RecordError
from app.rounds import founding
from app.rounds.founding import (
    DoesNotFit,
    TokenText,
    TrainWish,
    config_of,
    export_files,
    make_model,
    plan_island,
    plan_owner,
    tokenizer_of,
)
from app.rounds.island import hashed
from app.rounds.record import read_training, sign_training
from app.rounds.traces import most_trace_bytes
from app.rounds.train_store import TrainStore, one_of
from engine.budget import ROUND_KEPT_BYTES, Allowance, FullBudget
from engine.device.probe import Device
from engine.errors import EngineError
from engine.island import first_states
from engine.sources.huggingface import open_folder
from engine.sources.shape import config_values
from tests.app.rounds.founded import founded
from tests.app.rounds.island_swarm import CONFIG, WORDS
from tests.app.rounds.statements import RECORD, history
from tests.app.swarms import identity

FOUNDER = identity(0)


@pytest.fixture
def wish(tmp_path: Path) -> TrainWish:
    """A job with a new model of a small shape."""
    (tmp_path / "words.txt").write_text(WORDS * 30)
    (tmp_path / "shape.json").write_text(json.dumps(config_values(CONFIG)))
    return TrainWish(
        "fish", (str(tmp_path / "words.txt"),), shape=str(tmp_path / "shape.json"), steps=40, every=10, batch=64,
        length=16, licence="MIT",
    )  # fmt: skip


def prepared(wish: TrainWish, tmp_path: Path, *, public: bool = True) -> founding.Founded:
    return founded(wish, tmp_path, FOUNDER.peer_id, public=public)


def test_a_wish_becomes_a_record_that_says_everything(wish: TrainWish, tmp_path: Path) -> None:
    made = prepared(wish, tmp_path)
    record = read_training(sign_training(FOUNDER, made.record), now_ms=made.record.created_ms)
    assert record == made.record
    assert config_of(record) == CONFIG
    assert (record.batch, record.length, record.model, record.licence) == (4, 16, "", "MIT")
    assert record.start == hashed(first_states(CONFIG, made.vectors))[0].hex()
    text = TokenText(made.texts["tokens"], made.texts["held"], record)
    assert text.count == made.sequences
    assert bytes(text.sequence(0)).decode() in WORDS * 2
    assert 1 <= len(text.held) <= 32
    held = {bytes(row) for row in text.held}
    assert text.count + len(held) <= len(WORDS * 30) // 16
    # the same wish gives the same text and weights
    again = prepared(wish, tmp_path)
    assert again.texts == made.texts
    model, _ = make_model(record, None)
    assert hashed(model.states())[0].hex() == record.start


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no licence": ({"licence": " "}, "--licence"),
    "no steps in a round": ({"every": 0}, "--every 0"),
    "no steps": ({"steps": 0}, "--steps 0"),
    "a small batch": ({"batch": 15}, "smaller than one sequence"),
    "a long sequence": ({"length": 128, "batch": 256}, "context of 64"),
    "a rate": ({"rate": 0.0}, "--lr 0"),
    "a share": ({"significance": 1.5}, "--significance 1.5"),
    "a name": ({"name": "../fish"}, "cannot be"),
    "a word of the command": ({"name": "join"}, "word of the command"),
    "both": ({"model": "tiny-random"}, "not both"),
    "no data": ({"data": ("nowhere.txt",)}, r"nowhere\.txt"),
    "little data": ({"batch": 16 * 10**4}, "fewer than"),
    "no shape": ({"shape": "nowhere.json"}, "not a file"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_founded_is_refused_in_one_line(wish: TrainWish, tmp_path: Path, what: str) -> None:
    changes, words = BAD[what]
    with pytest.raises((AppError, EngineError), match=words) as caught:
        prepared(replace(wish, **changes), tmp_path)
    assert "\n" not in str(caught.value)


def test_a_private_swarm_needs_no_licence(wish: TrainWish, tmp_path: Path) -> None:
    assert prepared(replace(wish, licence=""), tmp_path, public=False).record.licence == ""


def test_a_state_that_fits_nowhere_names_the_bytes() -> None:
    large = replace(CONFIG, hidden_size=8192, intermediate_size=65536, n_blocks=80)
    with pytest.raises(AppError, match=r"takes .*B, but cpu has .*B to spare"):
        plan_island(large, 16)
    with pytest.raises(DoesNotFit, match="even with other machines"):
        plan_owner(large, 16)


def test_traces_of_steps_count_where_an_island_is_trained_on_the_cpu() -> None:
    budget, device, _ = plan_island(CONFIG, 16)
    assert device.kind == "cpu"
    traces = most_trace_bytes(2 * budget.weights)
    assert budget.kept_bytes == ROUND_KEPT_BYTES * budget.weights + traces
    least = max(budget.step_bytes - budget.graph_bytes + budget.kept_bytes, budget.state_bytes + budget.round_bytes)
    assert plan_island(CONFIG, 16, least)[0].total_bytes == least
    with pytest.raises(DoesNotFit):
        plan_island(CONFIG, 16, least - 1)


def test_rounds_of_a_card_are_in_the_memory_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(card_bytes: int, memory_bytes: int) -> FullBudget:
        devices = [
            Device("cuda:0", "cuda", "a card", card_bytes, card_bytes),
            Device("cpu", "cpu", "the machine", memory_bytes, memory_bytes),
        ]
        monkeypatch.setattr(founding, "probe_devices", lambda: devices)
        return plan_island(CONFIG, 16)[0]

    monkeypatch.setattr(founding, "pick_dtype", lambda device: torch.bfloat16)
    monkeypatch.setattr(founding, "allowance_on", lambda device, cap: Allowance(device.free_bytes))
    large = plan(10**12, 10**12)
    least = large.step_bytes - large.graph_bytes
    assert plan(least, large.round_bytes).step_bytes == least
    with pytest.raises(DoesNotFit, match="but cuda:0 has"):
        plan(least - 1, 10**12)
    with pytest.raises(DoesNotFit, match="but cpu has"):
        plan(10**12, large.round_bytes - 1)


def test_the_limit_on_memory_holds_for_an_island_too(wish: TrainWish, tmp_path: Path) -> None:
    budget, _, _ = plan_island(CONFIG, 16)
    with pytest.raises(AppError, match=r"raise max_vram, which is .*B"):
        plan_island(CONFIG, 16, 4 * budget.weights)
    plan_island(CONFIG, 16, 0)  # hosts nothing, but may train
    with pytest.raises(AppError, match="max_vram"):
        founded(wish, tmp_path, FOUNDER.peer_id, limit_bytes=4 * budget.weights)


@pytest.mark.parametrize("text", [b"\1\0\0\0" * 17, b"\1\0\0", b"", b"\1\0\0\0" * 16])
def test_a_text_that_does_not_fit_its_record_is_refused(wish: TrainWish, tmp_path: Path, text: bytes) -> None:
    made = prepared(wish, tmp_path)
    with pytest.raises(AppError, match="the text of the job"):
        TokenText(text, made.texts["held"], made.record)


def test_a_shape_that_no_family_has_is_refused(wish: TrainWish, tmp_path: Path) -> None:
    Path(str(wish.shape)).write_text(json.dumps(config_values(CONFIG) | {"architectures": ["MambaForCausalLM"]}))
    with pytest.raises(EngineError, match="MambaForCausalLM"):
        prepared(wish, tmp_path)


def test_conversations_are_not_trained_on(wish: TrainWish, tmp_path: Path) -> None:
    path = tmp_path / "talk.jsonl"
    path.write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    with pytest.raises(AppError, match=r"talk\.jsonl, line 1 is a conversation"):
        prepared(replace(wish, data=(str(path),)), tmp_path)


def test_a_job_can_go_on_from_a_model(wish: TrainWish, tmp_path: Path) -> None:
    made = prepared(replace(wish, shape=None, model="tiny-random"), tmp_path)
    assert len(made.record.model) == 64
    assert made.budget.weights == sum(vector.numel() for vector in made.vectors.values())


def test_tokens_that_the_model_does_not_know_are_refused(wish: TrainWish, tmp_path: Path) -> None:
    made = prepared(wish, tmp_path)
    with pytest.raises(AppError, match="does not know"):
        TokenText(b"\xff" * 64, made.texts["held"], made.record)


def test_a_stored_job_is_found_and_exported(
    wish: TrainWish, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = prepared(wish, tmp_path)
    store = TrainStore(Home.open(tmp_path / "home"))
    job = store.create(sign_training(FOUNDER, made.record), made.texts, made.states())
    assert store.find("fish").record == store.find(job.id).record == made.record
    assert (store.log(job), store.states(job)) == ([], made.states())
    assert main(["train", "export", "fish", str(tmp_path / "none"), "--home", str(tmp_path / "home")]) == 1
    assert "no finished round" in capsys.readouterr().err
    tokenizer = (job.folder / "tokenizer.json").read_bytes()
    entries, states = history(2), first_states(CONFIG, made.vectors)
    store.save(job, entries, states)
    assert [entry.hash for entry in store.log(job)] == [entry.hash for entry in entries]
    assert store.states(job) == states
    out = tmp_path / "out"
    out.mkdir()
    for name, data in export_files(made.record, states, tokenizer).items():
        (out / name).write_bytes(data)
    assert open_folder(out).config == CONFIG
    facts = store.facts(job)
    assert (facts["round"], facts["islands"], facts["checkpoint_age_s"]) == (0, [], None)


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b'{"tokenizer_json": 5}', b'{"tokenizer_json": "", "more": 1}'])
def test_a_tokenizer_that_is_none_is_refused(raw: bytes) -> None:
    with pytest.raises(RecordError, match="tokenizer"):
        tokenizer_of(raw)


def test_two_jobs_of_one_name_are_told_apart_by_their_hashes() -> None:
    other = replace(RECORD, seed=9)
    with pytest.raises(AppError) as caught:
        one_of([(RECORD.id, 1), (other.id, 2)], "fish")
    assert RECORD.id.hex() in str(caught.value)
    assert other.id.hex() in str(caught.value)
    assert one_of([(RECORD.id, 1), (RECORD.id, 2)], "fish") == 1
    with pytest.raises(AppError, match="no training job"):
        one_of([], "fish")
