"""A trained model as the files of a Hugging Face folder, which `transformers` and Shoal itself open."""

from __future__ import annotations

import json
from collections.abc import Mapping

from torch import Tensor

from engine.config import ModelConfig
from engine.sources.base import TokenizerSpec
from engine.sources.huggingface import tensor_name
from engine.sources.layout import part_names
from engine.sources.safetensors import encode
from engine.sources.shape import config_values
from engine.training.parameters import views


def folder_files(config: ModelConfig, vectors: Mapping[str, Tensor], tokenizer: TokenizerSpec) -> dict[str, bytes]:
    """Return the files of a model's folder by name: its shape, its weights in float32 and its tokenizer."""
    tensors = {
        tensor_name(part, role): tensor.contiguous().numpy()
        for part in part_names(config)
        for role, tensor in views(config, part, vectors[part]).items()
    }
    tokens: dict[str, object] = dict(tokenizer.template_variables)
    tokens |= {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token, "add_bos_token": tokenizer.add_bos}
    tokens |= {"chat_template": tokenizer.chat_template, "tokenizer_class": "PreTrainedTokenizerFast"}
    texts = {
        "config.json": config_values(config),
        "tokenizer_config.json": {name: value for name, value in tokens.items() if value is not None},
    }
    files = {name: json.dumps(value, indent=1, sort_keys=True).encode() + b"\n" for name, value in texts.items()}
    files["tokenizer.json"] = tokenizer.tokenizer_json.encode()
    return {**files, "model.safetensors": encode(tensors, {"format": "pt"})}
