"""Small GGUF files, written by the `gguf` package from the random models of `tests.engine.models`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from engine.sources.gguf_tokenizer import byte_alphabet
from tests.engine.models import SPECIAL, TEMPLATE, VOCABULARY, Variant, oracle

CONTROL = 3
_NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
_OTHERS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
CORPUS = (
    "peer to peer networks share the load", "the model of the model", "don't we've I'LL 2024 12,345", "naïve café",
    "日本語のテキスト 漢字", "👩‍👩‍👧‍👦 🎉🎉", "def f(x):\n    return x ** 2\n",
)  # fmt: skip


def gguf_name(name: str) -> str:
    """The GGUF name of a tensor that `transformers` calls `name`."""
    stem, suffix = name.rsplit(".", 1)
    if stem in _OTHERS:
        return f"{_OTHERS[stem]}.{suffix}"
    _, _, index, rest = stem.split(".", 3)
    return f"blk.{index}.{_NAMES[rest]}.{suffix}"


def write_gguf(
    path: Path, variant: Variant, kind: str = "F32", *, extra: dict[str, Any] | None = None,
    rope_factors: list[float] | None = None,
) -> Any:  # fmt: skip
    """Write a model as GGUF with its matrices in `kind`, and return the oracle that it was made from."""
    model = oracle(variant)
    config, architecture = model.config, "llama" if variant.family == "mistral" else variant.family
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_name(variant.name)
    writer.add_license("mit")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if architecture == "llama":
        writer.add_rope_dimension_count(head_dim)
    for key, value in (extra or {}).items():
        writer.add_float32(key, value) if isinstance(value, float) else writer.add_string(key, value)
    add_byte_tokenizer(writer)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_factors, dtype=np.float32))
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, values in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        ours = gguf_name(name)
        piece = ours.split(".")[-2]
        array = values.numpy()
        if architecture == "llama" and piece in heads:
            array = interleave(values, heads[piece]).numpy()
        _add(writer, ours, array, kind if array.ndim == 2 else "F32")
    _finish(writer)
    return model


def interleave(values: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows in the order that llama.cpp's rotation wants."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, -1)
    return halves.transpose(1, 2).reshape(values.shape).contiguous()


def _add(writer: Any, name: str, array: Any, kind: str) -> None:
    quantised = gguf.GGMLQuantizationType[kind]
    if kind.endswith("_K"):
        raw = random_blocks(kind, array.shape, seed=len(name))
        writer.add_tensor(name, raw, raw_shape=raw.shape, raw_dtype=quantised)
    else:
        writer.add_tensor(name, gguf.quantize(array, quantised), raw_dtype=quantised)


def random_blocks(kind: str, shape: tuple[int, ...], seed: int = 0) -> Any:
    """Random blocks with small, finite scales, for the kinds that the `gguf` package reads but cannot write."""
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rows, columns = shape[0], shape[1] // elements
    blocks = np.random.default_rng(seed).integers(0, 256, (rows, columns, size), dtype=np.uint8)
    scales = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
    for offset in scales.get(kind, (0, 2) if kind.endswith("_1") else (0,)):
        blocks[..., offset + 1] &= 0x1B  # a float16 below 2 ** -8, of positive sign
    return blocks.reshape(rows, columns * size)


def add_byte_tokenizer(writer: Any) -> None:
    """The 256 bytes, the special tokens, and unused ids up to the vocabulary's size."""
    tokens = [*byte_alphabet(), *SPECIAL]
    tokens += [f"[PAD{index}]" for index in range(len(tokens), VOCABULARY)]
    kinds = [1] * 256 + [CONTROL] * len(SPECIAL) + [5] * (VOCABULARY - 256 - len(SPECIAL))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    writer.add_chat_template(TEMPLATE)


def _finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_tokenizer_gguf(path: Path, fields: dict[str, Any]) -> None:
    """A GGUF file that holds nothing but a tokenizer's metadata."""
    writer = gguf.GGUFWriter(str(path), "llama")
    for name, value in fields.items():
        key = name if "." in name else f"tokenizer.ggml.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    _finish(writer)
