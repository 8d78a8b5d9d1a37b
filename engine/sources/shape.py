"""A model with a shape and no weights yet: a `config.json`, and the tokenizer beside it or bytes as tokens."""

from __future__ import annotations

import json
from pathlib import Path

from engine.config import ModelConfig
from engine.errors import SourceError
from engine.sources.base import ModelSource, TokenizerSpec
from engine.sources.files import read_json_object
from engine.sources.hf_config import FAMILIES, parse_config
from engine.sources.huggingface import MAX_CONFIG_BYTES, read_tokenizer
from engine.sources.tiny import byte_tokenizer, special_ids

_CLASSES = {family: name for name, family in FAMILIES.items()}


def open_shape(path: Path) -> ModelSource:
    """Read the shape in a `config.json`; raises `SourceError` if no family has it or its tokenizer does not fit.

    Without a `tokenizer.json` in the same folder, tokens are bytes and three special tokens.
    """
    if not path.is_file():
        raise SourceError(f"{path} is not a file: give the config.json of a model as Hugging Face writes it")
    config = parse_config(read_json_object(path, MAX_CONFIG_BYTES), str(path), {})
    if (path.parent / "tokenizer.json").is_file():
        return ModelSource(path.parent.name or path.stem, config, {}, read_tokenizer(path.parent))
    least = 256 + len(special_ids())
    if config.vocab_size < least:
        raise SourceError(f"{path}: a vocabulary of {config.vocab_size} is too small for bytes as tokens: give {least}")
    return ModelSource(path.stem, config, {}, _byte_spec())


def _byte_spec() -> TokenizerSpec:
    tokenizer, config = byte_tokenizer()
    return TokenizerSpec(
        tokenizer_json=json.dumps(tokenizer, indent=1, sort_keys=True),
        chat_template=str(config["chat_template"]),
        bos_token=str(config["bos_token"]),
        eos_token=str(config["eos_token"]),
        template_variables={"unk_token": config["unk_token"]},
    )


def config_values(config: ModelConfig) -> dict[str, object]:
    """Return the `config.json` of a shape, from which `parse_config` reads the same shape again."""
    rope: dict[str, object] = {"rope_type": config.rope.kind, "rope_theta": config.rope.theta}
    if config.rope.kind != "default":
        rope |= {"factor": config.rope.factor, "original_max_position_embeddings": config.rope.original_context}
    if config.rope.kind == "llama3":
        rope |= {"low_freq_factor": config.rope.low_freq_factor, "high_freq_factor": config.rope.high_freq_factor}
    if config.rope.kind == "yarn":
        rope |= {"beta_fast": config.rope.beta_fast, "beta_slow": config.rope.beta_slow}
        rope |= {} if config.rope.attention_factor is None else {"attention_factor": config.rope.attention_factor}
    values: dict[str, object] = {
        "architectures": [_CLASSES[config.family]], "model_type": config.family, "hidden_act": "silu",
        "num_hidden_layers": config.n_blocks, "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size, "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads, "head_dim": config.head_dim, "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length, "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta, "rope_parameters": rope, "tie_word_embeddings": config.tied_embeddings,
        "bos_token_id": config.bos_id, "eos_token_id": list(config.eos_ids) or None, "dtype": "float32",
        "torch_dtype": "float32",
    }  # fmt: skip
    if config.rope.kind != "default":
        values["rope_scaling"] = {name: value for name, value in rope.items() if name != "rope_theta"}
    if config.family in ("llama", "qwen3"):
        values["attention_bias"] = config.qkv_bias
    if config.family == "llama":
        values["mlp_bias"] = config.mlp_bias
    if config.family != "llama":
        values["sliding_window"] = config.sliding_window
    if config.family in ("qwen2", "qwen3"):
        windowed = [config.window_of(block) is not None for block in range(config.n_blocks)]
        values["use_sliding_window"] = config.sliding_window is not None
        values["layer_types"] = [f"{'sliding' if each else 'full'}_attention" for each in windowed]
        values["max_window_layers"] = windowed.index(True) if any(windowed) else config.n_blocks
    return values
