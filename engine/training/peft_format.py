"""Finished adapters as files, in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

Shoal keeps its own adapters in this format too. The hash of the model that an adapter was trained for is in the
metadata of the weights' file, where PEFT does not mind it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.budget import ADAPTER_ROLES, adapter_shapes
from engine.config import ModelConfig
from engine.errors import TrainingError
from engine.sources.base import TensorEntry
from engine.sources.files import Fields, read_json_object, shown
from engine.sources.safetensors import encode, read_index, read_metadata
from engine.sources.tensors import read_tensor
from engine.training.adapters import MAX_RANK, AdapterSettings, layout, named, weight_count

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
MODEL_KEY = "shoal_model"  # the hash of the model, in the metadata
_NAME = re.compile(r"base_model\.model\.model\.layers\.(\d{1,5})\.(\w+\.\w+)\.lora_([AB])\.weight")
# Kinds of LoRA that compute something else than `alpha / r · B A x`, or change more than the seven matrices.
_UNSUPPORTED = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "fan_in_fan_out")


@dataclass(frozen=True)
class Adapter:
    """A finished adapter: its settings and the vector of each block."""

    settings: AdapterSettings
    vectors: Mapping[int, Tensor]
    model: str | None = None  # hash of the model it was trained for; None: not known


def module_names() -> dict[str, str]:
    """Return the name of each role's module within a block, as Hugging Face names it."""
    return {role: f"{'self_attn' if role in 'qkvo' else 'mlp'}.{role}_proj" for role in ADAPTER_ROLES}


def peft_files(adapter: Adapter, config: ModelConfig, base: str) -> dict[str, bytes]:
    """Return the two files of an adapter by name; `base` is the model's name for people."""
    settings, modules = adapter.settings, module_names()
    alpha = int(settings.alpha) if float(settings.alpha).is_integer() else settings.alpha  # PEFT's is whole
    values = {
        "alpha_pattern": {}, "base_model_name_or_path": base, "bias": "none", "fan_in_fan_out": False,
        "inference_mode": True, "lora_alpha": alpha, "lora_dropout": settings.dropout, "modules_to_save": None,
        "peft_type": "LORA", "r": settings.rank, "rank_pattern": {},
        "target_modules": [modules[role].rpartition(".")[2] for role in settings.targets],
        "task_type": "CAUSAL_LM", "use_dora": False, "use_rslora": False,
    }  # fmt: skip
    groups = layout(config, settings.rank, settings.targets)
    tensors = {}
    for block, vector in sorted(adapter.vectors.items()):
        for role, pair in named(groups, vector.float().cpu()).items():
            for which, tensor in zip("AB", pair, strict=True):
                tensors[_tensor_name(block, modules[role], which)] = tensor.contiguous().numpy()
    metadata = {"format": "pt"} | ({MODEL_KEY: adapter.model} if adapter.model else {})
    return {
        CONFIG_FILE: json.dumps(values, indent=2, sort_keys=True).encode() + b"\n",
        WEIGHTS_FILE: encode(tensors, metadata),
    }


def read_peft(folder: Path, config: ModelConfig, model: str | None = None) -> Adapter:
    """Read an adapter's folder for a model of this shape and, if it is given, this hash.

    Raises `TrainingError` or `SourceError` if it is none, is damaged, is of a kind that Shoal does not run, or does not
    fit the model. Blocks that have no adapter get one that changes nothing.
    """
    settings = _settings(folder)
    trained_for = read_metadata(folder / WEIGHTS_FILE).get(MODEL_KEY)
    if model is not None and trained_for not in (None, model):
        raise TrainingError(f"the adapter in {folder} belongs to the model {trained_for}, but this one is {model}")
    entries = read_index(folder / WEIGHTS_FILE)
    roles = {name: role for role, name in module_names().items()}
    found: dict[tuple[int, str, str], TensorEntry] = {}
    for name, entry in entries.items():
        match = _NAME.fullmatch(name)
        if match is None or match[2] not in roles or int(match[1]) >= config.n_blocks:
            raise TrainingError(f"{folder}: tensor {shown(name)} is not part of an adapter for this model")
        found[int(match[1]), roles[match[2]], match[3]] = entry
    settings = AdapterSettings(settings.rank, settings.alpha, tuple({role for _, role, _ in found}), settings.dropout)
    groups = layout(config, settings.rank, settings.targets)
    vectors = {block: torch.zeros(weight_count(groups)) for block in range(config.n_blocks)}
    shapes = adapter_shapes(config)
    for (block, role, which), entry in found.items():
        expected = (settings.rank, shapes[role][1]) if which == "A" else (shapes[role][0], settings.rank)
        if entry.shape != expected or (block, role, "B" if which == "A" else "A") not in found:
            raise TrainingError(
                f"{folder}: {shown(entry.name)} has shape {list(entry.shape)}, but this model needs {list(expected)}, "
                "with its other half: the adapter belongs to another model"
            )
        values = read_tensor(entry)
        if not bool(torch.isfinite(values).all()):
            raise TrainingError(f"{folder}: {shown(entry.name)} has numbers that are not finite")
        named(groups, vectors[block])[role]["AB".index(which)].copy_(values)
    return Adapter(settings, vectors, trained_for)


def _tensor_name(block: int, module: str, which: str) -> str:
    return f"base_model.model.model.layers.{block}.{module}.lora_{which}.weight"


def _settings(folder: Path) -> AdapterSettings:
    """Read the rank, alpha and dropout of an adapter's config."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise TrainingError(f"{folder} has no {CONFIG_FILE}: give the folder of an adapter in PEFT's format")
    values = read_json_object(path, MAX_CONFIG_BYTES)
    if values.get("peft_type") != "LORA":
        raise TrainingError(f"{path} is of the kind {shown(values.get('peft_type'))}: only LORA is supported")
    for name in _UNSUPPORTED:
        if values.get(name):
            raise TrainingError(f"{path} sets {name}, which Shoal does not support")
    if values.get("bias", "none") != "none":
        raise TrainingError(f"{path} changes biases, which Shoal does not support")
    fields = Fields(values, str(path))
    alpha, dropout = fields.number("lora_alpha"), fields.number("lora_dropout", default=0.0)
    return AdapterSettings(fields.integer("r", MAX_RANK), alpha, dropout=dropout)
