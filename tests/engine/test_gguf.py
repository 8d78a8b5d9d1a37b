"""GGUF files give the weights, the config and the tokenizer that `transformers` takes from them; damage is named."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.config import Rope
from engine.errors import SourceError
from engine.sources.base import ModelSource, TensorEntry
from engine.sources.gguf import llama3_divisors, open_gguf
from engine.sources.gguf_header import read_header
from engine.sources.layout import KIND_SIZES
from engine.sources.tensors import decode, load_part
from tests.engine.gguf_models import gguf_name, random_blocks, write_gguf
from tests.engine.models import VARIANT, Variant, read_ranges

WIDE = Variant("wide", "llama", {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2})
GGUF_VARIANTS = [
    VARIANT[name]
    for name in ("llama", "llama-tied", "llama-wide-heads", "llama-mqa", "smollm", "mistral", "qwen2", "qwen2.5-tied",
                 "qwen3", "qwen3-tied")
]  # fmt: skip


def all_tensors(source: ModelSource) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for part, entries in source.parts.items():
        values = load_part(source, part)
        found |= {entry.name: values[entry.role] for entry in entries}
    return found


def by_transformers(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)


@pytest.mark.parametrize("variant", GGUF_VARIANTS, ids=lambda v: v.name)
def test_float_files_give_back_the_weights_and_the_config(variant: Variant, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = write_gguf(path, variant)
    source = open_gguf(path)
    found = all_tensors(source)
    expected = {gguf_name(name): values for name, values in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del expected["output.weight"]
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name], values), name
    config, theirs = source.config, model.config
    assert config.tied_embeddings == theirs.tie_word_embeddings
    assert (config.n_heads, config.n_kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    assert config.rope == Rope(theta=theirs.rope_parameters["rope_theta"])
    assert config.norm_eps == pytest.approx(theirs.rms_norm_eps)
    assert (config.eos_ids, config.bos_id, source.licence) == ((258, 256), 257, "mit")


@pytest.mark.parametrize("kind", sorted(KIND_SIZES))
def test_every_kind_decodes_to_what_transformers_loads(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, WIDE, kind)
    found = all_tensors(open_gguf(path))
    for name, values in by_transformers(path).state_dict().items():
        if name != "lm_head.weight" or "output.weight" in found:
            assert torch.equal(found[gguf_name(name)], values), name


@pytest.mark.parametrize("kind", sorted(set(KIND_SIZES) - {"F32", "F16", "BF16"}))
def test_decoding_agrees_with_the_gguf_package_across_slices(kind: str) -> None:
    rows, columns = 700, 1024  # more than one slice
    raw = random_blocks(kind, (rows, columns), seed=7)
    expected = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind])
    entry = TensorEntry("q", "t", kind, (rows, columns), Path("f"), 0, raw.size)
    found = decode(entry, torch.from_numpy(raw.reshape(-1)))
    assert np.array_equal(found.numpy(), expected)
    half = decode(entry, torch.from_numpy(raw.reshape(-1)), torch.bfloat16)
    assert half.dtype is torch.bfloat16
    assert torch.equal(half, found.to(torch.bfloat16))


def test_rope_scaling_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    scaling = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    write_gguf(path, VARIANT["llama"], extra=scaling)
    assert open_gguf(path).config.rope == Rope(10_000.0, "yarn", 4.0, original_context=256)
    write_gguf(path, VARIANT["llama"], extra={**scaling, "llama.rope.scaling.type": "linear"})
    assert open_gguf(path).config.rope.kind == "linear"
    write_gguf(path, VARIANT["llama"], extra={**scaling, "llama.rope.scaling.type": "longrope"})
    with pytest.raises(SourceError, match="longrope"):
        open_gguf(path)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_factors_are_recognised(factor: float, tmp_path: Path) -> None:
    rope = Rope(500_000.0, "llama3", factor, 1.0, 4.0, 8192)
    path = tmp_path / "model.gguf"
    variant = Variant(
        "l3", "llama", {"head_dim": 64, "rope_parameters": {"rope_theta": 500_000.0, "rope_type": "default"}}
    )
    write_gguf(path, variant, rope_factors=llama3_divisors(rope, 64))
    assert open_gguf(path).config.rope == rope
    # The same rule as transformers' own, from which the tables in such files were made.
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": factor, "low_freq_factor": 1.0,
                  "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(head_dim=64, rope_parameters=parameters), "cpu")
    plain = 1.0 / 500_000.0 ** (torch.arange(0, 64, 2).float() / 64)
    assert torch.allclose(plain / theirs, torch.tensor(llama3_divisors(rope, 64)), rtol=1e-4)
    write_gguf(path, variant, rope_factors=[2.0] * 31 + [5.0])
    with pytest.raises(SourceError, match=r"rope_freqs\.weight"):
        open_gguf(path)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(path, VARIANT["llama-tied"], "Q8_0")
    return path.read_bytes()


def test_only_the_hosted_blocks_bytes_are_read(small: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(small)
    with read_ranges(monkeypatch) as opening:
        source = open_gguf(path)
    with read_ranges(monkeypatch) as loading:
        load_part(source, "block.2")
    first = min(entry.offset for entries in source.parts.values() for entry in entries)
    # The header is read in large pieces; past it, no seek and no further read may happen.
    assert [start for _, start, _ in opening] == [0]
    wanted = sorted((entry.offset, entry.offset + entry.length) for entry in source.parts["block.2"])
    assert sorted((start, stop) for _, start, stop in loading) == wanted
    assert wanted[0][0] > first


def test_every_cut_gives_one_clear_error(small: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    header_end = min(entry.offset for entry in read_header_of(small, path).values())
    for length in [*range(0, 64), *range(64, header_end, 97), header_end, len(small) // 2, len(small) - 1]:
        path.write_bytes(small[:length])
        with pytest.raises(SourceError, match=r"cut\.gguf .*download the model again"):
            open_gguf(path)


def read_header_of(data: bytes, path: Path) -> dict[str, TensorEntry]:
    path.write_bytes(data)
    return dict(read_header(path).tensors)


def test_a_file_cut_after_opening_is_named_when_a_part_is_loaded(small: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(small)
    source = open_gguf(path)
    path.write_bytes(small[: source.parts["head"][0].offset - 10_000])
    with pytest.raises(SourceError, match="is cut short"):
        all_tensors(source)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (b"general.architecture" + struct.pack("<IQ", 8, 5) + b"llama",
         b"general.architecture" + struct.pack("<IQ", 8, 5) + b"mamba", "'mamba' is not supported; Shoal runs llama"),
        (b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight", "blk.1.ffn_up.weight .* is missing"),
        (b"llama.feed_forward_length" + struct.pack("<II", 4, 96),
         b"llama.feed_forward_length" + struct.pack("<II", 4, 128), "shape .* where the config says"),
        (b"llama.block_count" + struct.pack("<II", 4, 4),
         b"llama.block_count" + struct.pack("<II", 4, 5), r"blk\.4\.\S+ \(block.4\) is missing"),
        (b"llama.block_count" + struct.pack("<II", 4, 4),
         b"llama.block_count" + struct.pack("<II", 4, 1 << 31), "block_count is 2147483648, expected a whole number"),
        (b"llama.attention.head_count" + struct.pack("<II", 4, 4),
         b"llama.attention.head_count" + struct.pack("<II", 4, 3), "3 attention heads cannot share 2"),
        (b"GGUF\x03", b"GGUF\x01", "GGUF version 1"),
        (b"GGUF\x03", b"PK\x03\x04\x03", "not a GGUF file"),
        (b"tokenizer.ggml.model" + struct.pack("<IQ", 8, 4) + b"gpt2",
         b"tokenizer.ggml.model" + struct.pack("<IQ", 8, 4) + b"rwkv", "tokenizer 'rwkv' is not supported"),
    ],
)  # fmt: skip
def test_a_header_that_lies_is_refused_by_name(
    old: bytes, new: bytes, complaint: str, small: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    assert small.count(old) == 1
    path.write_bytes(small.replace(old, new))
    with pytest.raises(SourceError, match=complaint) as caught:
        open_gguf(path)
    assert "model.gguf" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("offset", [8, 16])
@pytest.mark.parametrize("count", [1 << 63, 1 << 40, 1 << 20])
def test_huge_counts_are_refused(offset: int, count: int, small: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(small[:offset] + struct.pack("<Q", count) + small[offset + 8 :])
    with pytest.raises(SourceError), bounded_memory():
        open_gguf(path)


def test_a_sparse_file_cannot_make_a_long_array(tmp_path: Path) -> None:
    """The file is as long as its counts claim, yet takes no room: lengths alone prove nothing."""
    path = tmp_path / "sparse.gguf"
    key = b"tokenizer.ggml.tokens"
    for item, count in ((8, 1 << 30), (8, 200_000), (0, 1 << 33), (9, 5)):
        with path.open("wb") as file:
            file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key)
            file.write(struct.pack("<IIQ", 9, item, count))
            file.truncate(1 << 36)
        with pytest.raises(SourceError, match=r"sparse\.gguf"), bounded_memory():
            open_gguf(path)


@contextlib.contextmanager
def bounded_memory(most: int = 32 << 20) -> Iterator[None]:
    """Python's own memory may not grow beyond `most` bytes in here."""
    tracemalloc.start()
    try:
        yield
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < most


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_a_mutated_header_never_raises_anything_else(data: st.DataObject, small: bytes, tmp_path: Path) -> None:
    path = tmp_path / "mutated.gguf"
    header_end = 14_000
    mutated = bytearray(small)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(4, header_end))
        patch = data.draw(st.one_of(st.binary(min_size=1, max_size=8), st.just(b"\xff" * 8), st.just(b"\0" * 8)))
        mutated[at : at + len(patch)] = patch
    path.write_bytes(mutated)
    with contextlib.suppress(SourceError), bounded_memory():
        all_tensors(open_gguf(path))


def test_an_entry_that_contradicts_the_config_is_refused_when_loaded(small: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(small)
    source = open_gguf(path)
    entries = source.parts["block.0"]
    for change in ({"kind": "F32"}, {"shape": (1, 1)}, {"length": 3}, {"role": "down"}, {"kind": "IQ2_XXS"}):
        lying = replace(source, parts={"block.0": (*entries[:-1], replace(entries[0], **change))})
        with pytest.raises(SourceError):
            load_part(lying, "block.0")
    with pytest.raises(SourceError, match="has no part"):
        load_part(source, "block.4")
