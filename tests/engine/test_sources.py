"""Model folders: every family and form is read as `transformers` wrote it; errors name the damaged file and the fix."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.config import Rope
from engine.errors import SourceError
from engine.sources.base import BLOCK_ROLES
from engine.sources.cache import publish
from engine.sources.hf_config import parse_config
from engine.sources.huggingface import open_folder
from engine.sources.safetensors import read_index
from engine.sources.tensors import load_part
from engine.text.tokenizer import Tokenizer
from tests.engine.models import SPECIAL, TEMPLATE, VARIANT, VARIANTS, Variant, read_ranges, write_folder

Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("shard_size", "variant"),
    [
        *(pytest.param(None, variant, id=f"single-{variant.name}") for variant in VARIANTS),
        pytest.param("60KB", VARIANT["llama"], id="sharded-llama"),
        *(
            pytest.param("60KB", variant, id=f"sharded-{variant.name}", marks=pytest.mark.soak)
            for variant in VARIANTS
            if variant.name != "llama"
        ),
    ],
)
def test_a_folder_gives_back_the_weights_and_the_config(
    variant: Variant, shard_size: str | None, tmp_path: Path
) -> None:
    model = write_folder(tmp_path, variant, shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size is not None)
    source = open_folder(tmp_path)
    expected = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    for part, entries in source.parts.items():
        values = load_part(source, part)
        assert list(values) == [entry.role for entry in entries]
        for entry in entries:
            assert torch.equal(values[entry.role], expected.pop(entry.name)), entry.name
    assert not expected
    assert [e.role for e in source.parts["block.0"]] == [r for r in BLOCK_ROLES if r in load_part(source, "block.0")]
    config, theirs = source.config, model.config
    assert (config.head_dim, config.norm_eps) == (model.model.layers[0].self_attn.head_dim, theirs.rms_norm_eps)
    assert (config.eos_ids, config.bos_id, config.context_length) == ((258,), 257, 256)
    for index, layer in enumerate(model.model.layers):
        assert config.window_of(index) == (getattr(layer.self_attn, "sliding_window", None) or _window(theirs))


def _window(config: Any) -> int | None:
    return config.sliding_window if config.model_type == "mistral" else None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_widened_exactly(dtype: torch.dtype, tmp_path: Path) -> None:
    model = write_folder(tmp_path, VARIANT["llama"], dtype=dtype)
    source = open_folder(tmp_path)
    assert torch.equal(load_part(source, "block.1")["up"], model.model.layers[1].mlp.up_proj.weight)
    assert load_part(source, "block.1", dtype)["up"].dtype is dtype


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama") / "model"
    write_folder(folder, VARIANT["llama"])
    return folder


@pytest.fixture
def folder(llama: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    copy = tmp_path / "model"
    copy.mkdir()
    for file in llama.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def edit(file: Path, change: Change) -> None:
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))


def test_the_older_form_of_a_config_means_the_same(llama: Path) -> None:
    newer = json.loads((llama / "config.json").read_text())
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    older = {**newer, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}, "torch_dtype": "float32"}
    del older["rope_parameters"], older["dtype"]
    newer["rope_parameters"] = {"rope_type": "llama3", "rope_theta": 5e5, **scaling}
    assert parse_config(older, "old", {}) == parse_config(newer, "new", {})
    assert parse_config(older, "old", {}).rope == Rope(5e5, "llama3", 8.0, 1.0, 4.0, 32)
    older["rope_scaling"] = None
    assert parse_config(older, "old", {}).rope == Rope(5e5)


def test_what_a_config_leaves_out_is_what_transformers_assumes() -> None:
    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 96,
             "vocab_size": 300}  # fmt: skip
    plain = parse_config({**shape, "architectures": ["LlamaForCausalLM"]}, "c", {"eos_token_id": [7, 8]})
    assert (plain.n_kv_heads, plain.head_dim, plain.context_length, plain.norm_eps) == (4, 16, 2048, 1e-6)
    assert (plain.tied_embeddings, plain.eos_ids, plain.qkv_bias) == (False, (7, 8), False)
    mistral = {**shape, "architectures": ["MistralForCausalLM"], "num_key_value_heads": 2}
    assert parse_config(mistral, "c", {}).sliding_window == 4096
    assert parse_config({**mistral, "sliding_window": None}, "c", {}).sliding_window is None
    qwen = {**shape, "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 8}
    assert parse_config(qwen, "c", {}).sliding_window is None  # no block is past the default of max_window_layers
    assert parse_config({**qwen, "max_window_layers": 1}, "c", {}).sliding_blocks == (1,)


def test_the_tokenizers_files_are_read(folder: Path) -> None:
    spec = open_folder(folder).tokenizer
    assert (spec.bos_token, spec.eos_token, spec.chat_template) == (SPECIAL[1], SPECIAL[2], TEMPLATE)
    assert spec.template_variables == {"unk_token": SPECIAL[0]}
    (folder / "chat_template.jinja").unlink()
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y"}]
    edit(folder / "tokenizer_config.json", lambda v: v.update(chat_template=named, bos_token={"content": "<b>"}))
    (folder / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\n# Hi\nlicense: mit\n")
    source = open_folder(folder)
    assert (source.tokenizer.chat_template, source.tokenizer.bos_token) == ("y", "<b>")
    assert source.licence == "apache-2.0"


def test_only_the_hosted_blocks_bytes_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path, VARIANT["llama"], shard_size="60KB")
    with read_ranges(monkeypatch) as opening:
        source = open_folder(tmp_path)
    entries = [entry for part in source.parts.values() for entry in part]
    first = {file: min(entry.offset for entry in entries if entry.file == file) for file in {e.file for e in entries}}
    assert all(stop <= first[path] for path, _, stop in opening if path in first)
    with read_ranges(monkeypatch) as loading:
        load_part(source, "block.1")
    wanted = {(entry.file, entry.offset, entry.offset + entry.length) for entry in source.parts["block.1"]}
    assert set(loading) == wanted


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda v: v.update(architectures=["BertModel"]), "'BertModel' is not supported; Shoal runs Llama"),
        (lambda v: v.update(architectures=[]), "architecture 'llama' is not supported"),
        (lambda v: v.update(hidden_size=32), r"shape \[272, 64\] where the config says \[272, 32\]"),
        (lambda v: v.update(num_hidden_layers=5), r"model\.layers\.4\.\S+ \(block\.4\) is missing"),
        (lambda v: v.update(num_hidden_layers=10**30), "num_hidden_layers is 10+, expected a whole number"),
        (lambda v: v.update(num_hidden_layers="4"), "num_hidden_layers is '4', expected a whole number"),
        (lambda v: v.pop("hidden_size"), "hidden_size is missing"),
        (lambda v: v.update(num_key_value_heads=3), "cannot share 3"),
        (lambda v: v.update(head_dim=15), "head size 15 is odd"),
        (lambda v: v.update(rms_norm_eps=float("nan")), "rms_norm_eps is nan"),
        (lambda v: v.update(rope_parameters={"rope_type": "longrope", "factor": 2.0}), "'longrope' is not supported"),
        (lambda v: v.update(rope_parameters={"rope_type": "yarn"}), "factor is missing"),
        (lambda v: v.update(rope_parameters=[1]), "expected an object"),
        (lambda v: v.update(quantization_config={"bits": 4}), "quantised in a form"),
        (lambda v: v.update(hidden_act="gelu"), "'gelu' is not supported"),
        (lambda v: v.update(attention_bias=True), "q_proj.bias .* is missing"),
        (lambda v: v.update(eos_token_id="x"), "eos_token_id is 'x'"),
    ],
)  # fmt: skip
def test_a_config_that_lies_is_refused_by_name(change: Change, complaint: str, folder: Path) -> None:
    edit(folder / "config.json", change)
    with pytest.raises(SourceError, match=complaint) as caught:
        open_folder(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "noise", "folder"])
def test_a_damaged_file_is_named(name: str, damage: str, folder: Path) -> None:
    path = folder / name
    data = path.read_bytes()
    path.unlink()
    if damage == "folder":
        path.mkdir()
    elif damage != "missing":
        path.write_bytes({"empty": b"", "cut": data[: len(data) * 2 // 3], "noise": b"\xff\xfe" + data}[damage])
    with pytest.raises(SourceError, match=name.replace(".", r"\.")):
        open_folder(folder)


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd", "C:\\x", "", 7, "a\0b", ".."])
def test_an_index_cannot_name_files_elsewhere(shard: Any, folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    index = {"weight_map": {"model.norm.weight": shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(SourceError, match="not a file name in this folder"):
        open_folder(folder)


def test_a_missing_shard_and_a_missing_tensor_are_named(tmp_path: Path) -> None:
    write_folder(tmp_path, VARIANT["llama"], shard_size="60KB")
    shard = tmp_path / "model-00003-of-00012.safetensors"
    kept = shard.read_bytes()
    shard.unlink()
    with pytest.raises(SourceError, match=r"model-00003-of-00012\.safetensors is missing"):
        open_folder(tmp_path)
    shard.write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(SourceError, match=r"model-00003-of-00012\.safetensors: tensor .* is missing"):
        open_folder(tmp_path)
    shard.write_bytes(kept)
    edit(tmp_path / "model.safetensors.index.json", lambda v: v["weight_map"].pop("model.norm.weight"))
    with pytest.raises(SourceError, match=r"model\.norm\.weight \(head\) is missing"):
        open_folder(tmp_path)


@pytest.mark.parametrize(
    "entry",
    [
        None, [], {}, {"dtype": "F32"}, {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}, {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 9]}, {"dtype": 3, "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [True, 2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [1 << 61, 1 << 61], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [1 << 40, (1 << 40) + 8]},
        {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]},
    ],
)  # fmt: skip
def test_a_header_that_lies_is_refused(entry: Any, tmp_path: Path) -> None:
    header = json.dumps({"t": entry}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(SourceError, match=r"x\.safetensors"):
        read_index(path)


@pytest.mark.parametrize("length", [1 << 63, 1 << 40, 101_000_000, 9])
def test_a_header_longer_than_the_file_is_refused(length: int, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write(length.to_bytes(8, "little") + b"{}")
        if length > 1 << 20:
            file.truncate(200_000_000)  # sparse: long, but takes no disk space
    with pytest.raises(SourceError, match="cut short"):
        read_index(path)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_mutated_files_never_raise_anything_else(data: st.DataObject, folder: Path, llama: Path) -> None:
    name = data.draw(st.sampled_from(["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]))
    mutated = bytearray((llama / name).read_bytes())
    reach = min(len(mutated) - 1, 4500)  # the header of the weights
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, reach))
        patch = data.draw(
            st.one_of(st.binary(min_size=1, max_size=8), st.sampled_from([b"null", b"[[[[", b"1e999", b"-1"]))
        )
        mutated[at : at + len(patch)] = patch
    (folder / name).write_bytes(mutated)
    with contextlib.suppress(SourceError):
        source = open_folder(folder)
        for part in source.parts:
            load_part(source, part)
        Tokenizer(source.tokenizer)
    (folder / name).write_bytes((llama / name).read_bytes())


def test_a_file_that_windows_holds_open_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(13, "The process cannot access the file")

    ready, target = tmp_path / "ready", tmp_path / "target"
    ready.write_bytes(b"new")
    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(PermissionError):
        publish(ready, target)
    target.write_bytes(b"another process was faster")
    publish(ready, target)
    assert target.read_bytes() == b"another process was faster"
