"""The models that a swarm could be created of: what is listed, and what a look at one tells or refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.core.errors import UsageError
from app.joining import model_list
from app.joining.model_list import list_models, preview_model
from app.joining.offers import look_at_machine
from engine.errors import SourceError
from engine.sources import hub, starter
from engine.sources.tiny import open_tiny


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No models of other programs."""
    monkeypatch.setattr(model_list, "_USUAL_FOLDERS", (str(tmp_path / "none"),))


@pytest.mark.usefixtures("nowhere")
def test_models_are_listed_with_size_and_format(tmp_path: Path) -> None:
    cache, shelf = tmp_path / "cache", tmp_path / "shelf"
    built_in = [("starter", False), ("tiny-random", True)]  # the second needs no download
    assert [(model.name, model.here) for model in list_models(cache)] == built_in
    open_tiny(cache)
    assert [(model.name, model.here) for model in list_models(cache)] == built_in
    (shelf / "deep" / "models--org--name" / "snapshots").mkdir(parents=True)
    (shelf / "one.gguf").write_bytes(b"x" * 7)
    (shelf / ".hidden").mkdir()
    (shelf / ".hidden" / "two.gguf").write_bytes(b"x")
    (shelf / "broken.gguf").symlink_to(shelf / "gone")
    snapshot = shelf / "deep" / "models--org--name" / "snapshots"
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_bytes(b"x" * 5)
    found = {model.title: (model.size_bytes, model.format) for model in list_models(cache, str(shelf))}
    assert found == {"one": (7, "GGUF"), "broken": (None, "GGUF"), "org/name": (5, "safetensors")}


def test_a_folder_that_is_none_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a folder"):
        list_models(tmp_path, str(tmp_path / "gone"))


def test_a_look_at_a_model_tells_what_it_needs_and_fetches_nothing(tmp_path: Path) -> None:
    machine = look_at_machine("cpu", None)
    small = preview_model(machine, tmp_path, "starter")
    assert (small.model, small.fetch_bytes, small.context_length) == (
        starter.LABEL,
        starter.WHEEL_BYTES,
        starter.SHAPE.context_length,
    )
    assert not starter.starter_file(tmp_path).exists()
    tiny = preview_model(machine, tmp_path, "tiny-random")
    assert tiny.size_bytes
    assert tiny.fit is not None
    assert tiny.fit.blocks_total == 8
    with pytest.raises(SourceError, match="unknown model"):
        preview_model(machine, tmp_path, "no-such-model-at-all")


def test_the_hub_is_searched_and_its_failure_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx
    import huggingface_hub

    class Found:
        def __init__(self, id: str) -> None:
            self.id = id

    monkeypatch.setattr(
        huggingface_hub.HfApi, "list_models", lambda self, **wanted: [Found("org/name"), Found("../bad name")]
    )
    assert hub.search_hub("name") == ["org/name"]

    def offline(self: object, **wanted: object) -> None:
        raise httpx.ConnectError("[Errno -2] Name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "list_models", offline)
    with pytest.raises(SourceError) as caught:
        hub.search_hub("name")
    words = "the Hugging Face Hub could not be searched (Name or service not known): check the network, then try again"
    assert str(caught.value) == words
