"""PEFT's names and files for adapters."""

from __future__ import annotations

from engine.budget import ADAPTER_ROLES

_MODULES = {"q": "self_attn", "k": "self_attn", "v": "self_attn", "o": "self_attn"}


def module_names() -> dict[str, str]:
    """Return the name of each role's module within a block, as Hugging Face names it."""
    return {role: f"{_MODULES.get(role, 'mlp')}.{role}_proj" for role in ADAPTER_ROLES}
