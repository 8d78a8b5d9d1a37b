"""Syntax of swarm names, and of `name#1a2b3c4d5e6f70819203`, which pins the model. Pure.

A name is 1 to 63 lower-case ASCII letters, digits, dashes, dots and underscores, and begins with a letter or a digit:
it can be typed on any keyboard and has no look-alikes in other scripts. The part after `#` is the beginning of the
hash of the model's manifest, 20 to 64 hex digits. A model with the same first 8 digits can be computed within minutes,
one with the same first 20 cannot.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from app.core.errors import UsageError

PIN_DIGITS = 20  # 80 bits; of a longer pin all digits count
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_PIN = re.compile(rf"[0-9a-f]{{{PIN_DIGITS},64}}")
_HASH = re.compile(r"[0-9a-f]{64}")


def is_swarm_name(text: str) -> bool:
    """True if `text` can be a swarm's name."""
    return _NAME.fullmatch(text) is not None


def is_model_hash(text: str) -> bool:
    """True if `text` is the whole hash of a manifest, 64 hex digits."""
    return _HASH.fullmatch(text) is not None


@dataclass(frozen=True)
class SwarmName:
    """A name as a user gave it, with the beginning of the model's hash if it was pinned."""

    name: str
    pin: str | None = None

    def __str__(self) -> str:
        return self.name if self.pin is None else f"{self.name}#{self.pin}"

    def allows(self, model_hash: str) -> bool:
        """True if there is no pin, or it matches this model."""
        return self.pin is None or model_hash.startswith(self.pin)

    @classmethod
    def parse(cls, text: str) -> SwarmName:
        """Read a user's input, in upper or lower case; raises `UsageError` if it is not a name."""
        name, hash_sign, pin = text.strip().lower().partition("#")
        if not is_swarm_name(name):
            raise UsageError(
                f"{text.strip()[:80]!r} is not a swarm's name: use up to 63 letters a-z, digits, '-', '.' and '_', "
                "beginning with a letter or digit"
            )
        if hash_sign and _PIN.fullmatch(pin) is None:
            raise UsageError(
                f"{pin[:80]!r} does not pin a model: write {PIN_DIGITS} to 64 hex digits after '#', because another "
                "model can be made to fit fewer. Members see them in `shoal status`"
            )
        return cls(name, pin if hash_sign else None)


def pinned(name: str, model_hash: str, others: tuple[str, ...] = ()) -> str:
    """Return `name#hash` with at least `PIN_DIGITS` digits, and as many as distinguish this model from `others`."""
    digits = PIN_DIGITS
    while digits < len(model_hash) and any(
        other != model_hash and other.startswith(model_hash[:digits]) for other in others
    ):
        digits += 1
    return f"{name}#{model_hash[:digits]}"
