"""AWQ and GPTQ checkpoints: the very numbers that they stand for, in 4 bits, and refusals by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from app.manifest.importing import hash_source, tokenizer_bytes
from app.manifest.manifest import Manifest
from app.weights.library import Library, remember_source, span_parts
from app.weights.manifest_store import ManifestStore
from engine.errors import SourceError
from engine.model.kv_cache import Segment
from engine.model.linear import GridLinear
from engine.model.span import SpanOptions, load_span
from engine.sources.base import block_part
from engine.sources.huggingface import open_folder
from engine.sources.layout import byte_length
from engine.sources.tensors import PartReader, load_part
from engine.stored_form import source_bytes
from tests.app.weights.models import empty_library
from tests.app.weights.test_library import copy_part
from tests.engine.models import VARIANT, Variant
from tests.engine.packed_models import Method, change_config, packed_matrix, quantisation_config, write_packed
from tests.engine.test_families import assert_close, load, tokens

METHODS: tuple[Method, ...] = ("awq", "gptq", "gptq_v2")
WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
FAMILIES = [Variant(name, VARIANT[name].family, VARIANT[name].settings | WIDE) for name in ("llama", "qwen2", "qwen3")]
STORED = SpanOptions(torch.device("cpu"), torch.float32, "stored", kv_bytes=1 << 24)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("method", METHODS)
def test_weights_are_the_numbers_of_the_checkpoint(method: Method, group: int, tmp_path: Path) -> None:
    model = write_packed(tmp_path, FAMILIES[0], method, group)
    source, state = open_folder(tmp_path), model.state_dict()
    part = load_part(source, block_part(1))
    reader = PartReader(source, block_part(1))
    for role, name in (("q", "self_attn.q_proj"), ("up", "mlp.up_proj"), ("down", "mlp.down_proj")):
        expected = state[f"model.layers.1.{name}.weight"]
        assert torch.equal(part[role], expected), role
        grid = reader.grid(role)
        assert grid is not None
        assert (grid.bits, grid.group) == (4, group)
        assert torch.equal(grid.dense(torch.float32), expected), role
    assert source_bytes(source) == 0.5 + 8 / group


@pytest.mark.parametrize("method", METHODS)
def test_zero_points_in_the_middle_need_no_minima(method: Method, tmp_path: Path) -> None:
    model = write_packed(tmp_path, FAMILIES[0], method, 64, middle=True)
    grid = PartReader(open_folder(tmp_path), block_part(0)).grid("gate")
    assert grid is not None
    assert grid.minimum is None
    assert grid.scale.dtype == torch.float16
    assert torch.equal(grid.dense(torch.float32), model.state_dict()["model.layers.0.mlp.gate_proj.weight"])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("variant", FAMILIES, ids=lambda variant: variant.name)
def test_every_family_equals_transformers(variant: Variant, method: Method, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("engine.model.onnx_block.runtime", lambda: None)  # which would round the rows
    monkeypatch.setattr("engine.model.linear.runtime", lambda: None)
    model = write_packed(tmp_path, variant, method, 32)
    source, ids = open_folder(tmp_path), tokens(24)
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    ends, numbers = load(source)
    grids = load_span(source, 0, source.config.n_blocks, STORED)
    assert all(isinstance(linear, GridLinear) for block in grids.blocks for linear in block.linears)
    for span in (numbers, grids):
        lease = span.open()
        first = span.step(ends.embed(ids[:20]), [Segment(lease, 0, 20)])
        rest = [span.step(ends.embed([ids[at]]), [Segment(lease, at, 1)]) for at in range(20, 24)]
        assert_close(ends.logits(torch.cat((first, *rest))), expected)


def test_a_module_that_is_not_quantised_is_read_as_it_is(tmp_path: Path) -> None:
    write_packed(tmp_path, FAMILIES[0], "awq", 32)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for part in ("qweight", "qzeros", "scales"):
        del tensors[f"model.layers.0.self_attn.v_proj.{part}"]
    plain = torch.randn(64, 128).half()
    save_file(tensors | {"model.layers.0.self_attn.v_proj.weight": plain}, file)
    source = open_folder(tmp_path)
    assert torch.equal(load_part(source, block_part(0))["v"], plain.float())
    assert [e.kind for e in source.parts[block_part(0)] if e.role in ("k", "v")] == ["AWQ_32", "F16"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    write_packed(folder, FAMILIES[0], "gptq", 32)
    return folder


def test_a_manifest_describes_it_and_a_part_is_its_bytes(folder: Path, tmp_path: Path) -> None:
    source = open_folder(folder)
    studied = hash_source(source)
    again = Manifest.from_bytes(studied.manifest.raw)
    assert {tensor.kind for tensor in again.block(0).tensors} == {"GPTQ_32", "F32"}
    assert again.block(0).size_bytes == sum(entry.length for entry in source.parts[block_part(0)])
    cache = tmp_path / "cache"
    ManifestStore(cache).save_survey(studied, str(folder))
    remember_source(cache, studied.manifest, source, tokenizer_bytes(source))
    library, other = Library(cache, studied.manifest), empty_library(tmp_path / "other", studied)
    copy_part(library, other, block_part(0))
    expected = load_part(source, block_part(0))
    for each in (library, other):  # in the model's own files, and in the cache of a peer, where a part is one file
        found = load_part(each.source(span_parts(0, 1)), block_part(0))
        assert all(torch.equal(found[role], tensor) for role, tensor in expected.items())


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"quant_method": "bitsandbytes"}, "form that Shoal does not read"),
        ({"quant_method": None}, "form that Shoal does not read"),
        ({"bits": 8}, "8 bits in groups of 32 is not supported"),
        ({"bits": 3}, "3 bits"),
        ({"group_size": -1}, "groups of -1"),
        ({"group_size": 64}, r"tensor \S+ is I32 .* where its config says I32"),
        ({"desc_act": True}, "desc_act"),
        ({"desc_act": "no"}, "expected true or false"),
        ({"checkpoint_format": "marlin"}, "'marlin' is not supported"),
        ({"quant_method": "awq"}, r"tensor \S+ is I32 .* where its config says I32"),
        ({"quant_method": "awq", "version": "gemv"}, "'gemv' is not supported"),
    ],
)
def test_other_forms_are_refused_by_name(changes: dict[str, Any], complaint: str, folder: Path) -> None:
    right = quantisation_config("gptq", 32)
    try:
        change_config(folder, quantization_config=right | changes)
        with pytest.raises(SourceError, match=complaint) as caught:
            open_folder(folder)
        assert str(folder) in str(caught.value)
        change_config(folder, quantization_config=[4])
        with pytest.raises(SourceError, match="expected an object"):
            open_folder(folder)
    finally:
        change_config(folder, quantization_config=right)


@pytest.mark.parametrize("part", ["qweight", "qzeros", "scales"])
@pytest.mark.parametrize("damage", ["missing", "another type", "another shape"])
def test_a_damaged_matrix_is_refused(part: str, damage: str, tmp_path: Path) -> None:
    write_packed(tmp_path, FAMILIES[0], "gptq", 32)
    file, name = tmp_path / "model.safetensors", f"model.layers.1.mlp.down_proj.{part}"
    tensors = load_file(file)
    tensor = tensors.pop(name)
    if damage == "another type":
        tensors[name] = tensor.float()
    elif damage == "another shape":
        tensors[name] = tensor[:-1].contiguous()
    save_file(tensors, file)
    with pytest.raises(SourceError, match=r"down_proj\.\S+"):
        open_folder(tmp_path)


def test_columns_in_another_order_are_refused(tmp_path: Path) -> None:
    write_packed(tmp_path, FAMILIES[0], "gptq", 32)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    order = tensors["model.layers.0.mlp.up_proj.g_idx"]
    tensors["model.layers.0.mlp.up_proj.g_idx"] = order.flip(0).contiguous()
    save_file(tensors, file)
    with pytest.raises(SourceError, match="order of their activations"):
        open_folder(tmp_path)


def test_a_file_that_is_cut_short_later_gives_no_weights(tmp_path: Path) -> None:
    write_packed(tmp_path, FAMILIES[0], "awq", 32)
    source, file = open_folder(tmp_path), tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 3])
    last = max(range(2), key=lambda index: max(entry.offset for entry in source.parts[block_part(index)]))
    with pytest.raises(SourceError, match="cut short"):
        load_part(source, block_part(last))


@pytest.mark.parametrize("shape", [(12, 128), (8, 48), (0, 32), (8, 0), (8, 32, 2), (8,)])
def test_shapes_that_cannot_be_packed_have_no_length(shape: tuple[int, ...]) -> None:
    assert byte_length("AWQ_32", shape) is None


def test_the_length_of_a_matrix_is_that_of_its_three_tensors() -> None:
    tensors, _ = packed_matrix("awq", 64, (24, 192), np.random.default_rng(0))
    assert byte_length("AWQ_64", (24, 192)) == sum(tensor.nbytes for tensor in tensors.values())
