"""Indexes a Hugging Face folder: `config.json`, safetensors files and the tokenizer's files.

`hf_config` interprets the config, `safetensors` reads the headers of the weight files, and `packed` finds the quantised
matrices of AWQ and GPTQ checkpoints in them.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from engine.errors import SourceError
from engine.sources.base import EMBEDDING_PART, HEAD_PART, ModelSource, TensorEntry, TokenizerSpec
from engine.sources.files import AGAIN, Fields, parse_json_object, read_json_object, read_text, shown
from engine.sources.hf_config import parse_config
from engine.sources.layout import arrange
from engine.sources.packed import find_packed, parse_packing
from engine.sources.safetensors import read_index

MAX_CONFIG_BYTES = 16 << 20
MAX_SHARDS = 4096
MAX_TEMPLATE_BYTES = 1 << 20

_BLOCK_NAMES = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "o_bias": "self_attn.o_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "gate_bias": "mlp.gate_proj.bias",
    "up_bias": "mlp.up_proj.bias",
    "down_bias": "mlp.down_proj.bias",
}
_OTHER_NAMES = {
    (EMBEDDING_PART, "embedding"): "model.embed_tokens.weight",
    (HEAD_PART, "final_norm"): "model.norm.weight",
    (HEAD_PART, "output"): "lm_head.weight",
}


def open_folder(folder: Path) -> ModelSource:
    """Index a model folder; no weights are read. Raises `SourceError` if files are missing or damaged."""
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise SourceError(f"{folder} has no config.json, so it is not a model folder: give the folder of a model")
    generation_file = folder / "generation_config.json"
    generation = read_json_object(generation_file, MAX_CONFIG_BYTES) if generation_file.is_file() else {}
    values = read_json_object(config_file, MAX_CONFIG_BYTES)
    config, packing = parse_config(values, str(config_file), generation), parse_packing(values, str(config_file))
    tensors = _tensors(folder)
    packed = None if packing is None else partial(find_packed, packing, tensors)
    return ModelSource(
        label=folder.name,
        config=config,
        parts=arrange(config, tensor_name, tensors, folder, packed),
        tokenizer=read_tokenizer(folder),
        licence=_licence(folder / "README.md"),
    )


def tensor_name(part: str, role: str) -> str:
    """Return Hugging Face's name of a part's tensor."""
    if (part, role) in _OTHER_NAMES:
        return _OTHER_NAMES[part, role]
    return f"model.layers.{part.removeprefix('block.')}.{_BLOCK_NAMES[role]}"


def _tensors(folder: Path) -> dict[str, TensorEntry]:
    single, index_file = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return read_index(single)
    if not index_file.is_file():
        raise SourceError(
            f"{folder} has neither model.safetensors nor model.safetensors.index.json: "
            "take a model whose weights are safetensors, or a GGUF file"
        )
    weight_map = read_json_object(index_file, 4 * MAX_CONFIG_BYTES).get("weight_map")
    if not isinstance(weight_map, dict):
        raise SourceError(f"{index_file} has no weight_map: {AGAIN}")
    shards: dict[str, dict[str, TensorEntry]] = {}
    tensors: dict[str, TensorEntry] = {}
    for name, shard in weight_map.items():
        if not _is_plain_name(shard) or len(shards) > MAX_SHARDS:
            raise SourceError(f"{index_file} names {shown(shard)}, which is not a file name in this folder: {AGAIN}")
        if shard not in shards:
            shards[shard] = read_index(folder / shard)
        if name not in shards[shard]:
            raise SourceError(f"{folder / shard}: tensor {shown(name)} is missing although the index lists it: {AGAIN}")
        tensors[name] = shards[shard][name]
    return tensors


def _is_plain_name(name: Any) -> bool:
    """True if a shard's name cannot lead outside the folder."""
    return isinstance(name, str) and 0 < len(name) < 256 and not set(name) & set("/\\:\0") and name not in (".", "..")


def read_tokenizer(folder: Path) -> TokenizerSpec:
    """Read the tokenizer's files of a model folder; raises `SourceError` if they are missing or damaged."""
    tokenizer_file, config_file = folder / "tokenizer.json", folder / "tokenizer_config.json"
    if not tokenizer_file.is_file():
        raise SourceError(f"{folder} has no tokenizer.json: {AGAIN}, with all its files")
    text = read_text(tokenizer_file)
    parse_json_object(text, str(tokenizer_file))
    values = read_json_object(config_file, MAX_CONFIG_BYTES) if config_file.is_file() else {}
    fields = Fields(values, str(config_file))
    tokens = {name: _token_text(value) for name, value in values.items() if name.endswith("_token")}
    texts = {name: value for name, value in tokens.items() if value is not None}
    return TokenizerSpec(
        tokenizer_json=text,
        chat_template=_chat_template(folder, values),
        bos_token=texts.get("bos_token"),
        eos_token=texts.get("eos_token"),
        template_variables={name: text for name, text in texts.items() if name not in ("bos_token", "eos_token")},
        add_bos=fields.flag("add_bos_token") and "bos_token" in texts,
    )


def _token_text(value: Any) -> str | None:
    """Return the text of a special token, which is given as text or as an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _chat_template(folder: Path, values: dict[str, Any]) -> str | None:
    template_file = folder / "chat_template.jinja"
    if template_file.is_file():
        return read_text(template_file, MAX_TEMPLATE_BYTES)
    template = values.get("chat_template")
    if isinstance(template, list):  # several named templates
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    return template if isinstance(template, str) and len(template) <= MAX_TEMPLATE_BYTES else None


def _licence(readme: Path) -> str | None:
    """Return the `license:` line in the front matter of a model's README, or None."""
    try:
        with readme.open("rb") as file:
            head = file.read(8192).decode("utf-8", errors="replace")
    except OSError:
        return None
    lines = head.splitlines()
    if not lines or lines[0].strip() != "---":
        return None
    for line in lines[1:]:
        if line.strip() == "---":
            break
        key, _, value = line.partition(":")
        if key == "license" and value.strip():
            return value.strip()[:64]
    return None
