"""The encoding of `ModelConfig` in a manifest: to plain JSON and back, with every number bounded.

Fields at their default are left out, so that a field added to `ModelConfig` later changes no existing hash. Floats are
written as text, the shortest decimal that reads back as the same 64-bit float (Python's `repr`, as in "1e-05" or
"10000.0"): JSON numbers have several spellings, and each would give another hash.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from typing import Any

from app.core.canonical_json import Fields
from app.core.errors import RecordError
from engine.config import ModelConfig
from engine.errors import SourceError
from engine.sources.layout import MAX_BLOCKS, MAX_CONTEXT, MAX_VOCABULARY, MAX_WIDTH, check_config

_MAX_IDS = 256
_MAX_INT = 2**31 - 1


def plain_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config as JSON values."""
    return _plain(ModelConfig, config)  # type: ignore[no-any-return]


def config_from(fields: Fields) -> ModelConfig:
    """Read the config from a manifest's fields; raises `RecordError`."""
    config: ModelConfig = _restored(ModelConfig, fields)
    check_numbers(config, fields.what)
    return config


def check_numbers(config: ModelConfig, what: str) -> None:
    """Raise `RecordError` for numbers that no model has, or that would make a reader allocate absurd memory."""
    bounds = {
        "n_blocks": MAX_BLOCKS, "hidden_size": MAX_WIDTH, "n_heads": MAX_WIDTH, "n_kv_heads": MAX_WIDTH,
        "head_dim": MAX_WIDTH, "intermediate_size": MAX_WIDTH, "vocab_size": MAX_VOCABULARY,
        "context_length": MAX_CONTEXT, "sliding_window": MAX_CONTEXT,
    }  # fmt: skip
    for name, high in bounds.items():
        value = getattr(config, name)
        if value is not None and not 1 <= value <= high:
            raise RecordError(f"{what}: {name} is {value}, expected 1 to {high}")
    ids = (*config.eos_ids, *(() if config.bos_id is None else (config.bos_id,)))
    if not 0 <= config.norm_eps <= 1 or any(not 0 <= token < config.vocab_size for token in ids):
        raise RecordError(f"{what}: norm_eps or a special token's id is out of range")
    if any(not 0 <= block < config.n_blocks for block in config.sliding_blocks):
        raise RecordError(f"{what}: sliding_blocks names a block that does not exist")
    try:
        check_config(config, what)
    except SourceError as error:
        raise RecordError(str(error)) from error


def _plain(kind: Any, value: Any) -> Any:
    if value is None:
        return None
    kind = _not_none(kind)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return {
            field.name: _plain(hints[field.name], getattr(value, field.name))
            for field in dataclasses.fields(kind)
            if getattr(value, field.name) != field.default
        }
    if kind is float:
        return repr(float(value))  # a model source may have an int here
    return list(value) if typing.get_origin(kind) is tuple else value


def _restored(kind: Any, fields: Fields) -> Any:
    hints = typing.get_type_hints(kind)
    return kind(
        **{
            field.name: _field(hints[field.name], fields, field.name)
            for field in dataclasses.fields(kind)
            if field.name in fields.values or field.default is dataclasses.MISSING
        }
    )


def _field(kind: Any, fields: Fields, name: str) -> Any:
    if type(None) in typing.get_args(kind) and name in fields.values and fields.values[name] is None:
        return None
    kind = _not_none(kind)
    if dataclasses.is_dataclass(kind):
        return _restored(kind, fields.inner(name))
    if typing.get_origin(kind) is typing.Literal:
        options = typing.get_args(kind)
        value = fields.text(name, 32)
        return value if value in options else fields.refuse(name, f"one of {', '.join(options)}")
    if typing.get_origin(kind) is tuple:
        return tuple(fields.integers(name, 0, _MAX_INT, max_items=max(_MAX_IDS, MAX_BLOCKS)))
    if kind is float:
        return _float(fields, name)
    return fields.flag(name) if kind is bool else fields.integer(name, 0, _MAX_INT)


def _float(fields: Fields, name: str) -> float:
    text = fields.text(name, 32)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or repr(value) != text:
        fields.refuse(name, "a number as text, in its shortest form")
    return value


def _not_none(kind: Any) -> Any:
    """Return `X` for the type `X | None`, any other type unchanged."""
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return next(option for option in typing.get_args(kind) if option is not type(None))
    return kind
