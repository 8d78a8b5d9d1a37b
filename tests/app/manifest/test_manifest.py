"""Manifests: one hash for the same bytes, every lie about shapes refused, arbitrary bytes never more than refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.core.canonical_json import Fields, canonical
from app.core.errors import RecordError
from app.manifest.importing import hash_source, in_order, part_pieces, tokenizer_bytes
from app.manifest.manifest import Manifest
from app.manifest.merkle import leaves_from
from app.manifest.model_shape import config_from, plain_config
from engine.config import ModelConfig, Rope
from engine.sources.opening import open_source
from tests.app.tiny_source import CONFIG, tiny_source

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
COPY = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return hash_source(tiny_source(tmp_path_factory.mktemp("source"))).manifest


def test_the_hash_is_final(manifest: Manifest) -> None:
    # A change of this value means that every model of every swarm would get another name.
    assert manifest.hash == "9b8cdbeea228e4a81a33f24a87ef2f134ad4f6c29f758f755fc5f3398bd0b91c"


def test_the_hash_depends_on_the_bytes_only(manifest: Manifest, tmp_path: Path) -> None:
    elsewhere = tiny_source(tmp_path / "elsewhere", padding=13, backwards=True)
    again = hash_source(dataclasses.replace(elsewhere, label="another name")).manifest
    assert again.raw == manifest.raw
    assert again == manifest


def test_a_real_source_gives_the_same_manifest_wherever_it_lies(tmp_path: Path) -> None:
    first, second = (hash_source(open_source("tiny-random", tmp_path / name)).manifest for name in ("a", "b"))
    assert first == second
    assert first.config == open_source("tiny-random", tmp_path / "a").config


def test_one_changed_bit_of_a_tensor_changes_the_part_and_the_hash(manifest: Manifest, tmp_path: Path) -> None:
    source = tiny_source(tmp_path)
    entry = source.parts["block.1"][3]
    raw = bytearray(entry.file.read_bytes())
    raw[entry.offset + entry.length - 1] ^= 1
    entry.file.write_bytes(raw)
    changed = hash_source(source).manifest
    assert changed.hash != manifest.hash
    assert [part.name for part in changed.parts if part not in manifest.parts] == ["block.1"]


def test_bytes_and_values_agree(manifest: Manifest) -> None:
    assert Manifest.from_bytes(manifest.raw) == manifest
    assert manifest.config == CONFIG
    assert manifest.block(2).tensors[1].role == "q"
    assert manifest.by_name["tokenizer"].tensors == ()
    assert len(manifest.parts) == 6
    assert manifest.licence == "Apache-2.0"


def test_leaves_and_parts_fit_the_manifest(tmp_path: Path) -> None:
    source = tiny_source(tmp_path)
    read: list[int] = []
    found = hash_source(source, read.append)
    assert sum(read) == found.manifest.size_bytes
    for part in found.manifest.parts:
        raw = b"".join(found.leaves[part.name])
        assert leaves_from(raw, size_bytes=part.size_bytes, root=part.root) == found.leaves[part.name]
    block = b"".join(part_pieces(in_order(source, "block.0")))
    assert len(block) == found.manifest.block(0).size_bytes
    first = source.parts["block.0"][0]
    assert block.startswith(first.file.read_bytes()[first.offset : first.offset + first.length])


def test_the_tokenizer_comes_back(manifest: Manifest, tmp_path: Path) -> None:
    source = tiny_source(tmp_path)
    spec = manifest.tokenizer_spec(tokenizer_bytes(source))
    assert json.loads(spec.tokenizer_json) == json.loads(source.tokenizer.tokenizer_json)
    assert dataclasses.replace(spec, tokenizer_json="") == dataclasses.replace(source.tokenizer, tokenizer_json="")


def test_canonical_tokenizers_still_tokenize() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=["<unk>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(["the shoal swims, the shoal turns", "naïve café 東京"], trainer)
    text = "the shoal turns in 東京"
    again = Tokenizer.from_str(canonical(json.loads(tokenizer.to_str())).decode())
    assert again.encode(text).ids == tokenizer.encode(text).ids


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        ModelConfig(
            "qwen3", 2, 32, 4, 4, 8, 64, 50, 99, 1e-6,
            Rope(1e6, "yarn", 4.0, 1.0, 4.0, 32768, 32.0, 1.0, 1.0693),
            True, True, True, True, 16, (0,), False, (1,), None,
        ),
        ModelConfig("llama", 1, 2, 1, 1, 2, 1, 1, 1, 0, Rope(theta=10000)),
    ],
)  # fmt: skip
def test_every_field_of_a_config_comes_back(config: ModelConfig) -> None:
    plain = json.loads(canonical(plain_config(config)))
    assert config_from(Fields("model", plain)) == config


def test_numbers_are_spelt_in_one_way_and_defaults_left_out() -> None:
    config = dataclasses.replace(CONFIG, rope=Rope(theta=1_000_000), norm_eps=1e-5)
    plain = plain_config(config)
    assert plain["norm_eps"] == "1e-05"
    assert plain["rope"] == {"theta": "1000000.0"}
    assert "qkv_bias" not in plain
    for spelling in ("1e-5", "0.00001", "nan", "inf", "1e-05 ", "", 1e-5):
        with pytest.raises(RecordError, match="norm_eps"):
            config_from(Fields("model", plain | {"norm_eps": spelling}))


def change(manifest: Manifest, path: tuple[str | int, ...], value: Any) -> bytes:
    document: Any = json.loads(manifest.raw)
    target = document
    for step in path[:-1]:
        target = target[step]
    target[path[-1]] = value
    return canonical(document)


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (("kind",), "other", "not a model manifest"),
        (("version",), 2, "version 2 is not understood, this Shoal reads version 1"),
        (("model", "n_blocks"), 10**9, "n_blocks"),
        (("model", "n_blocks"), 2, "the parts are not"),
        (("model", "n_blocks"), True, "n_blocks"),
        (("model", "n_kv_heads"), 3, "key-value heads"),
        (("model", "n_kv_heads"), 0, "n_kv_heads"),
        (("model", "hidden_size"), 128, "do not fit the model's shape"),
        (("model", "family"), "gpt", "expected one of llama"),
        (("model", "eos_ids"), [100], "special token"),
        (("model", "eos_ids"), [0] * 10_000, "list of at most"),
        (("model", "rope", "theta"), "-1.0", "theta"),
        (("model", "sliding_blocks"), [3], "sliding_blocks"),
        (("text", "template_variables"), "{} ", "canonical"),
        (("text", "template_variables"), "[]", "not a JSON object"),
        (("text", "chat_template"), "x" * 300_000, "at most"),
        (("licence",), 5, "licence"),
        (("licence",), "MIT\x1b]0;owned\x07", "licence"),
        (("parts", 1, "root"), "AB" * 32, "lower-case hex"),
        (("parts", 1, "bytes"), 5, "not the sum of its tensors"),
        (("parts", 1, "bytes"), 2**60, "whole number"),
        (("parts", 1, "tensors", 1, "kind"), "Q9_X", "does not know"),
        (("parts", 1, "tensors", 1, "shape"), [64, 2**31], "do not fit"),
        (("parts", 1, "tensors", 1, "bytes"), 7, "does not have 7 bytes"),
        (("parts", 1, "tensors", 1, "interleaved_heads"), 3, "cannot be split"),
        (("parts", 1, "name"), "block.1", "the parts are not"),
        (("parts", 5, "bytes"), 2**30, "too large"),
        (("parts",), [], "the parts are not"),
        (("parts",), [[]] * 9000, "list of at most"),
    ],
)
def test_lies_are_refused(manifest: Manifest, path: tuple[str | int, ...], value: Any, reason: str) -> None:
    with pytest.raises(RecordError, match=reason):
        Manifest.from_bytes(change(manifest, path, value))


def test_unknown_fields_are_kept_and_ignored(manifest: Manifest) -> None:
    newer = Manifest.from_bytes(change(manifest, ("from_the_future",), {"a": 1}))
    assert newer.parts == manifest.parts
    assert b"from_the_future" in newer.raw
    assert newer.hash != manifest.hash


def test_only_the_canonical_form_is_taken(manifest: Manifest) -> None:
    text = manifest.raw.decode()
    for other in (
        text + "\n",
        text.replace('"version":1', '"version": 1'),
        text.replace("é", "\\u00e9"),
        text.replace('"version":1', '"version":1.0'),
        text.replace('"version":1', '"version":1,"version":1'),
    ):
        assert other != text
        with pytest.raises(RecordError):
            Manifest.from_bytes(other.encode())


@given(st.one_of(st.binary(max_size=200), JSON.map(lambda value: json.dumps(value).encode())))
def test_arbitrary_bytes_raise_the_one_error(raw: bytes) -> None:
    with pytest.raises(RecordError):
        Manifest.from_bytes(raw)


EXHAUSTING = {
    "deep lists": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "a long number": b"9" * 10_000,
    "too many bytes": b" " * (5 * 2**20),
    "a lone surrogate": b'{"kind":"\\ud800"}',
}


@pytest.mark.parametrize("raw", EXHAUSTING.values(), ids=EXHAUSTING)
def test_bytes_meant_to_exhaust_a_parser_are_refused(raw: bytes) -> None:
    with pytest.raises(RecordError):
        Manifest.from_bytes(raw)


def paths_of(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    steps = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, inner in steps for found in paths_of(inner, (*path, key)))]


@COPY
@given(data=st.data(), value=JSON)
def test_any_field_of_any_value_is_taken_or_refused(manifest: Manifest, data: st.DataObject, value: Any) -> None:
    path = data.draw(st.sampled_from(paths_of(json.loads(manifest.raw))[1:]))
    try:
        raw = change(manifest, path, value)
    except RecordError:
        return  # not a number or a lone surrogate: it cannot even be written
    try:
        taken = Manifest.from_bytes(raw)
    except RecordError:
        return
    assert taken.raw == raw
    assert taken.size_bytes == manifest.size_bytes


def test_a_source_that_ends_early_or_lacks_a_tensor_says_so(tmp_path: Path) -> None:
    source = tiny_source(tmp_path)
    lacking = dataclasses.replace(source, parts={**source.parts, "block.1": source.parts["block.1"][1:]})
    with pytest.raises(RecordError, match=r"part block\.1 must consist of attn_norm"):
        hash_source(lacking)
    file = source.parts["head"][0].file
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(RecordError, match="ends inside tensor"):
        hash_source(source)


def test_a_licence_cannot_speak_to_the_terminal(tmp_path: Path) -> None:
    source = dataclasses.replace(tiny_source(tmp_path), licence="MIT\x1b[2J\nand more")
    assert hash_source(source).manifest.licence == "MIT [2J and more"
