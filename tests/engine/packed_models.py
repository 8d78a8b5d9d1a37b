"""Small random AWQ and GPTQ checkpoints, packed integer by integer as the formats are described, and their numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.engine.models import Variant, write_folder

Method = Literal["awq", "gptq", "gptq_v2"]
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of each integer of a word


def pack_words(integers: np.ndarray, axis: int, columns: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Put eight neighbouring integers along an axis into each word, number i from `columns[i]`."""
    moved = np.moveaxis(integers.astype(np.uint32), axis, -1)
    words = np.zeros((*moved.shape[:-1], moved.shape[-1] // 8), np.uint32)
    for place, column in enumerate(columns):
        words |= moved[..., column::8] << np.uint32(4 * place)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(words, -1, axis)).view(np.int32))


def packed_matrix(
    method: Method, group: int, shape: tuple[int, int], random: np.random.Generator, *, middle: bool = False
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of a random matrix (out, in), and its numbers as float32."""
    n_out, n_in = shape
    integers = random.integers(0, 16, (n_in, n_out))
    zeros = np.full((n_in // group, n_out), 8) if middle else random.integers(1, 16, (n_in // group, n_out))
    scales = (0.02 + 0.02 * random.random((n_in // group, n_out))).astype(np.float16)
    numbers = scales.astype(np.float32).repeat(group, 0) * (integers - zeros.repeat(group, 0)).astype(np.float32)
    if method == "awq":
        tensors = {"qweight": pack_words(integers, 1, AWQ_COLUMNS), "qzeros": pack_words(zeros, 1, AWQ_COLUMNS)}
    else:
        kept = zeros - 1 if method == "gptq" else zeros
        order = torch.arange(n_in, dtype=torch.int32) // group
        tensors = {"qweight": pack_words(integers, 0), "qzeros": pack_words(kept, 1), "g_idx": order}
    tensors["scales"] = torch.from_numpy(scales)
    return tensors, torch.from_numpy(np.ascontiguousarray(numbers.T))


def quantisation_config(method: Method, group: int) -> dict[str, Any]:
    """What `config.json` says of such weights."""
    if method == "awq":
        return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    config = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False, "sym": False}
    return config | ({"checkpoint_format": "gptq_v2"} if method == "gptq_v2" else {})


def write_packed(folder: Path, variant: Variant, method: Method, group: int, *, middle: bool = False) -> Any:
    """Write a model folder with quantised blocks; return `transformers`' model with the numbers that they stand for."""
    model = write_folder(folder, variant)
    file, random = folder / "model.safetensors", np.random.default_rng(0)
    tensors = load_file(file)
    state = model.state_dict()
    for name in sorted(tensors):
        if not name.endswith("_proj.weight"):
            continue
        shape = (tensors[name].shape[0], tensors[name].shape[1])
        packed, numbers = packed_matrix(method, group, shape, random, middle=middle)
        del tensors[name]
        tensors |= {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in packed.items()}
        state[name].copy_(numbers)
    save_file(tensors, file)
    change_config(folder, quantization_config=quantisation_config(method, group))
    return model


def change_config(folder: Path, **changes: Any) -> None:
    """Change fields of `config.json`."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
