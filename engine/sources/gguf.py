"""Indexes a GGUF file of the llama, qwen2 or qwen3 architecture (Mistral files name themselves llama).

`gguf_header` reads the bytes, `gguf_tokenizer` builds the tokenizer.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from engine.config import Family, ModelConfig, Rope
from engine.errors import SourceError
from engine.sources.base import EMBEDDING_PART, HEAD_PART, ModelSource, TensorEntry
from engine.sources.files import Fields, shown
from engine.sources.gguf_header import GgufHeader, read_floats, read_header
from engine.sources.gguf_tokenizer import end_ids, token_id, tokenizer_spec
from engine.sources.layout import MAX_BLOCKS, MAX_CONTEXT, MAX_VOCABULARY, MAX_WIDTH, arrange, check_config

ARCHITECTURES: dict[str, Family] = {"llama": "llama", "mistral": "mistral", "qwen2": "qwen2", "qwen3": "qwen3"}

_BLOCK_NAMES = {
    "attn_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "o_bias": "attn_output.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "gate_bias": "ffn_gate.bias",
    "up_bias": "ffn_up.bias",
    "down_bias": "ffn_down.bias",
}
_OTHER_NAMES = {
    (EMBEDDING_PART, "embedding"): "token_embd.weight",
    (HEAD_PART, "final_norm"): "output_norm.weight",
    (HEAD_PART, "output"): "output.weight",
}


def open_gguf(path: Path) -> ModelSource:
    """Index a GGUF file; of the weights, only the table of rope factors is read, if there is one."""
    header = read_header(path)
    config = parse_config(header)
    licence = header.metadata.get("general.license")
    return ModelSource(
        label=path.stem,
        config=config,
        parts=arrange(config, _tensor_name, _tensors(header, config), path),
        tokenizer=tokenizer_spec(header),
        licence=licence[:64] if isinstance(licence, str) else None,
    )


def parse_config(header: GgufHeader) -> ModelConfig:
    """Derive the model's shape from the metadata and from which tensors exist."""
    fields = Fields(header.metadata, str(header.file))
    architecture = fields.text("general.architecture")
    if architecture not in ARCHITECTURES:
        raise SourceError(
            f"{header.file}: architecture {shown(architecture)} is not supported; Shoal runs "
            f"{', '.join(ARCHITECTURES)}: choose a model of one of these"
        )
    family, prefix = ARCHITECTURES[architecture], architecture + "."
    _refuse_experts(fields, prefix)
    hidden = fields.integer(prefix + "embedding_length", MAX_WIDTH)
    heads = fields.integer(prefix + "attention.head_count", MAX_WIDTH)
    context = fields.integer(prefix + "context_length", MAX_CONTEXT)
    head_dim = _head_dim(fields, prefix, max(hidden // heads, 1))
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    known = len(tokens) if isinstance(tokens, list) and tokens else None
    window = fields.get(prefix + "attention.sliding_window")
    config = ModelConfig(
        family=family,
        n_blocks=fields.integer(prefix + "block_count", MAX_BLOCKS),
        hidden_size=hidden,
        n_heads=heads,
        n_kv_heads=fields.integer(prefix + "attention.head_count_kv", MAX_WIDTH, default=heads),
        head_dim=head_dim,
        intermediate_size=fields.integer(prefix + "feed_forward_length", MAX_WIDTH),
        vocab_size=fields.integer(prefix + "vocab_size", MAX_VOCABULARY, default=known),
        context_length=context,
        norm_eps=fields.number(prefix + "attention.layer_norm_rms_epsilon", high=1.0),
        rope=_rope(header, fields, prefix, head_dim),
        qkv_bias="blk.0.attn_q.bias" in header.tensors,
        o_bias="blk.0.attn_output.bias" in header.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in header.tensors,
        qk_norm=family == "qwen3",
        sliding_window=fields.integer(prefix + "attention.sliding_window", MAX_CONTEXT) if window else None,
        tied_embeddings="output.weight" not in header.tensors,
        eos_ids=end_ids(header),
        bos_id=token_id(header, "bos_token_id"),
    )
    return check_config(config, str(header.file))


def _refuse_experts(fields: Fields, prefix: str) -> None:
    if fields.integer(prefix + "expert_count", MAX_WIDTH, low=0, default=0):
        raise SourceError(f"{fields.origin}: mixtures of experts are not supported: choose a dense model")


def _head_dim(fields: Fields, prefix: str, default: int) -> int:
    width = fields.integer(prefix + "attention.key_length", MAX_WIDTH, default=default)
    value_width = fields.integer(prefix + "attention.value_length", MAX_WIDTH, default=width)
    rotated = fields.integer(prefix + "rope.dimension_count", MAX_WIDTH, default=width)
    if value_width != width or rotated != width:
        raise SourceError(
            f"{fields.origin}: heads of {width} with values of {value_width} and {rotated} rotated dimensions "
            "are not supported: choose another model"
        )
    return width


def _rope(header: GgufHeader, fields: Fields, prefix: str, head_dim: int) -> Rope:
    theta = fields.number(prefix + "rope.freq_base", low=1.0, default=10_000.0)
    scaling = prefix + "rope.scaling."
    kind = fields.text(scaling + "type", default="none")
    original = fields.integer(scaling + "original_context_length", MAX_CONTEXT, low=0, default=0)
    if "rope_freqs.weight" in header.tensors:
        return _rope_from_factors(header.tensors["rope_freqs.weight"], theta, head_dim, original)
    if kind == "none":
        return Rope(theta=theta)
    factor = fields.number(scaling + "factor", low=1e-6, high=1e6)
    context = original or fields.integer(prefix + "context_length", MAX_CONTEXT)
    if kind == "linear":
        return Rope(theta, "linear", factor, original_context=context)
    if kind == "yarn":
        return Rope(
            theta, "yarn", factor, original_context=context,
            beta_fast=fields.number(scaling + "yarn_beta_fast", high=1e6, default=32.0),
            beta_slow=fields.number(scaling + "yarn_beta_slow", high=1e6, default=1.0),
            attention_factor=fields.number(scaling + "attn_factor", high=1e3) if fields.get(scaling + "attn_factor")
            else None,
        )  # fmt: skip
    raise SourceError(
        f"{header.file}: rope scaling {shown(kind)} is not supported; Shoal knows none, linear, yarn and llama3: "
        "choose another model"
    )


def _rope_from_factors(entry: TensorEntry, theta: float, head_dim: int, original: int) -> Rope:
    """Find the rule behind a table of divisors, which Llama 3 files store instead of the rule."""
    factors = read_floats(entry)
    plausible = factors and all(1.0 <= factor <= 1e6 for factor in factors)
    if len(factors) == head_dim // 2 and all(factor == 1.0 for factor in factors):
        return Rope(theta=theta)
    for context in filter(None, (original, 8192)) if plausible else ():
        rope = Rope(theta, "llama3", max(factors), 1.0, 4.0, context)
        rule = llama3_divisors(rope, head_dim)
        if len(rule) == len(factors) and all(map(_close, rule, factors)):
            return rope
    raise SourceError(f"{entry.file}: the rope factors in tensor {entry.name} are not supported: choose another model")


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-4)


def llama3_divisors(rope: Rope, head_dim: int) -> list[float]:
    """Divisors that Llama 3's rule applies to each rotary frequency."""
    divisors = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope.theta ** (index / head_dim)
        turns = rope.original_context / wavelength
        if turns > rope.high_freq_factor:
            divisors.append(1.0)
        elif turns < rope.low_freq_factor:
            divisors.append(rope.factor)
        else:
            smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
            divisors.append(1.0 / ((1.0 - smooth) / rope.factor + smooth))
    return divisors


def _tensor_name(part: str, role: str) -> str:
    if (part, role) in _OTHER_NAMES:
        return _OTHER_NAMES[part, role]
    return f"blk.{part.removeprefix('block.')}.{_BLOCK_NAMES[role]}"


def _tensors(header: GgufHeader, config: ModelConfig) -> dict[str, TensorEntry]:
    """Return the file's tensors; q and k of the llama architecture are marked as interleaved."""
    if config.family not in ("llama", "mistral"):
        return dict(header.tensors)
    heads = {"attn_q": config.n_heads, "attn_k": config.n_kv_heads}
    marked = dict(header.tensors)
    for name, entry in header.tensors.items():
        pieces = name.split(".")
        if len(pieces) == 4 and pieces[0] == "blk" and pieces[2] in heads:
            marked[name] = replace(entry, interleaved_heads=heads[pieces[2]])
    return marked
