"""Turns a `config.json`, as written by transformers 4 or 5, into a `ModelConfig`.

Its `quantization_config` is left to `engine.sources.packed`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.config import Family, ModelConfig, Rope
from engine.errors import SourceError
from engine.sources.files import AGAIN, Fields, shown
from engine.sources.layout import MAX_BLOCKS, MAX_CONTEXT, MAX_VOCABULARY, MAX_WIDTH, check_config

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_LAYER_TYPES = ("full_attention", "sliding_attention")
# Transformers' defaults for configs without the field.
_CONTEXT: dict[Family, int] = {"llama": 2048, "mistral": 131_072, "qwen2": 32_768, "qwen3": 32_768}


def parse_config(values: Mapping[str, Any], origin: str, generation: Mapping[str, Any]) -> ModelConfig:
    """Return the model's shape; `generation` is the content of `generation_config.json` (may be empty).

    Raises `SourceError` for an unsupported model or a field that is missing or out of bounds.
    """
    fields = Fields(values, origin)
    family = _family(fields)
    _refuse_unsupported(fields)
    hidden = fields.integer("hidden_size", MAX_WIDTH)
    heads = fields.integer("num_attention_heads", MAX_WIDTH)
    blocks = fields.integer("num_hidden_layers", MAX_BLOCKS)
    context = fields.integer("max_position_embeddings", MAX_CONTEXT, default=_CONTEXT[family])
    attention_bias = family in ("llama", "qwen3") and fields.flag("attention_bias")
    window, windowed = _sliding(fields, family, blocks)
    config = ModelConfig(
        family=family,
        n_blocks=blocks,
        hidden_size=hidden,
        n_heads=heads,
        n_kv_heads=fields.integer("num_key_value_heads", MAX_WIDTH, default=8 if family == "mistral" else heads),
        head_dim=fields.integer("head_dim", MAX_WIDTH, default=128 if family == "qwen3" else max(hidden // heads, 1)),
        intermediate_size=fields.integer("intermediate_size", MAX_WIDTH),
        vocab_size=fields.integer("vocab_size", MAX_VOCABULARY),
        context_length=context,
        norm_eps=fields.number("rms_norm_eps", high=1.0, default=1e-6),
        rope=_rope(fields, context),
        qkv_bias=attention_bias or family == "qwen2",
        o_bias=attention_bias,
        mlp_bias=family == "llama" and fields.flag("mlp_bias"),
        qk_norm=family == "qwen3",
        sliding_window=window,
        sliding_blocks=windowed,
        tied_embeddings=fields.flag("tie_word_embeddings"),
        eos_ids=_ids(Fields(generation, origin), fields),
        bos_id=_one_id(fields, "bos_token_id"),
    )
    return check_config(config, origin)


def _family(fields: Fields) -> Family:
    named = fields.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    if not isinstance(name, str) or name not in FAMILIES:
        found = shown(name if name is not None else fields.get("model_type"))
        raise SourceError(
            f"{fields.origin}: architecture {found} is not supported; Shoal runs {', '.join(FAMILIES)}: "
            "choose a model of one of these"
        )
    return FAMILIES[name]


def _refuse_unsupported(fields: Fields) -> None:
    activation = fields.text("hidden_act", default="silu")
    if activation not in ("silu", "swish"):
        raise SourceError(f"{fields.origin}: activation {shown(activation)} is not supported, only silu is")


def _rope(fields: Fields, context: int) -> Rope:
    """Read both forms: `rope_theta` next to `rope_scaling`, or both inside `rope_parameters`."""
    nested = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(nested, dict):
        raise fields.wrong("rope_scaling", "an object")
    # transformers 5 has the base frequency inside, transformers 4 next to it.
    values = {"rope_theta": fields.get("rope_theta"), **nested}
    rope = Fields(values, f"{fields.origin} (rope)")
    theta = rope.number("rope_theta", low=1.0, default=10_000.0)
    kind = rope.text("rope_type", default=rope.text("type", default="default"))
    partial = values.get("partial_rotary_factor", fields.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0) or values.get("truncate") is False or values.get("mscale") is not None:
        raise SourceError(f"{fields.origin}: this form of rotary positions is not supported: choose another model")
    if kind == "default":
        return Rope(theta=theta)
    original = rope.integer("original_max_position_embeddings", MAX_CONTEXT, default=context)
    factor = rope.number("factor", low=1e-6, high=1e6)
    if kind == "linear":
        return Rope(theta, "linear", factor, original_context=original)
    if kind == "llama3":
        low = rope.number("low_freq_factor", low=1e-6, high=1e6)
        high = rope.number("high_freq_factor", low=1e-6, high=1e6)
        if high <= low:
            raise rope.wrong("high_freq_factor", f"a number above low_freq_factor, {low:g}")
        return Rope(theta, "llama3", factor, low, high, original)
    if kind == "yarn":
        attention = rope.get("attention_factor")
        return Rope(
            theta, "yarn", factor, original_context=original,
            beta_fast=rope.number("beta_fast", high=1e6, default=32.0) or 32.0,
            beta_slow=rope.number("beta_slow", high=1e6, default=1.0) or 1.0,
            attention_factor=None if attention is None else rope.number("attention_factor", high=1e3),
        )  # fmt: skip
    raise SourceError(
        f"{fields.origin}: rope scaling {shown(kind)} is not supported; Shoal knows default, linear, llama3 and yarn: "
        "choose another model"
    )


def _sliding(fields: Fields, family: Family, blocks: int) -> tuple[int | None, tuple[int, ...]]:
    """Return the attention window and the blocks that use it (empty: all)."""
    if family == "mistral":  # null switches the window off, a missing field means the default
        null = "sliding_window" in fields.values and fields.get("sliding_window") is None
        return None if null else fields.integer("sliding_window", MAX_CONTEXT, default=4096), ()
    if family == "llama" or fields.get("sliding_window") is None or not fields.flag("use_sliding_window"):
        return None, ()
    window = fields.integer("sliding_window", MAX_CONTEXT)
    kinds = fields.get("layer_types")
    if kinds is None:
        first = fields.integer("max_window_layers", 1 << 31, low=0, default=28)
        windowed = tuple(range(min(first, blocks), blocks))
    elif isinstance(kinds, list) and len(kinds) == blocks and set(map(str, kinds)) <= set(_LAYER_TYPES):
        windowed = tuple(index for index, kind in enumerate(kinds) if kind == "sliding_attention")
    else:
        raise fields.wrong("layer_types", f"one of {', '.join(_LAYER_TYPES)} for each of the {blocks} blocks")
    if not windowed:
        return None, ()
    return window, () if len(windowed) == blocks else windowed


def _ids(*places: Fields) -> tuple[int, ...]:
    """Return the ids that end a reply, merged from all given files."""
    found: dict[int, None] = {}
    for fields in places:
        value = fields.get("eos_token_id")
        for item in value if isinstance(value, list) else [value]:
            if item is None:
                continue
            if type(item) is not int or not 0 <= item < MAX_VOCABULARY:
                raise SourceError(f"{fields.origin}: eos_token_id is {shown(value)}, expected token ids: {AGAIN}")
            found[item] = None
    return tuple(found)


def _one_id(fields: Fields, name: str) -> int | None:
    return None if fields.get(name) is None else fields.integer(name, MAX_VOCABULARY, low=0)
