"""The model manifest: one canonical, unsigned document that describes a model down to the hash of every part.

Its SHA-256 names the model and depends only on the imported bytes: two users who import the same files get the same
hash. It is canonical JSON (`app.core.canonical_json`) without fractional numbers:

    kind        "shoal-manifest"
    version     1; any other is refused. Unknown fields are ignored, and survive because the raw bytes are kept
    model       the shape: `engine.config.ModelConfig`, encoded by `app.manifest.model_shape`
    text        chat_template, bos_token, eos_token (text or null), add_bos, and template_variables, which is
                canonical JSON inside a string because it may hold any value
    licence     one line of printable text, or null
    parts       in this order: embedding, block.0, …, head, tokenizer. Each has name, bytes, root (hex), and tensors:
                role, kind, shape, bytes, and interleaved_heads if not 0

A part's bytes are those of its tensors, unchanged and concatenated in the listed order, which is that of
`engine.sources.base.BLOCK_ROLES`; the tokenizer part is its canonical JSON. `app.manifest.merkle` defines the root. The
chunk hashes are *not* in the manifest: a model of 140 GB has 4.5 MB of them. They are requested per part (64 KiB for a
part of 2 GiB) from any member and checked against the root.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from app.core.canonical_json import Fields, canonical, check_version, decode_object
from app.core.errors import RecordError
from app.manifest.merkle import HASH_BYTES
from app.manifest.model_shape import check_numbers, config_from, plain_config
from engine.config import ModelConfig
from engine.sources.base import TokenizerSpec, block_part
from engine.sources.layout import byte_length, expected_shapes, part_names

VERSION = 1
KIND = "shoal-manifest"
TOKENIZER_PART = "tokenizer"
MAX_MANIFEST_BYTES = 4 * 2**20
MAX_PART_BYTES = 2**36  # 65,536 chunks, whose hashes take 2 MiB
MAX_TOKENIZER_BYTES = 2**26
_MAX_TEMPLATE_CHARS = 2**18
_MAX_TOKEN_CHARS = 1024
_MAX_TENSORS = 32


@dataclass(frozen=True)
class Tensor:
    """One tensor of a part; its bytes start where those of the tensor before it end."""

    role: str
    kind: str
    shape: tuple[int, ...]
    size_bytes: int
    interleaved_heads: int = 0


@dataclass(frozen=True)
class Part:
    """A content-addressed piece of a model; `root` is the Merkle root of its bytes."""

    name: str
    size_bytes: int
    root: bytes
    tensors: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class TextRules:
    """The chat template, its variables, and the special tokens that frame the model's text."""

    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    add_bos: bool = False
    template_variables: str = "{}"  # canonical JSON


@dataclass(frozen=True)
class Manifest:
    """A validated manifest; create it with `build` or `from_bytes` only, which check every field."""

    config: ModelConfig
    text: TextRules
    licence: str | None
    parts: tuple[Part, ...]
    raw: bytes = field(repr=False)

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the manifest's bytes, 64 hex digits; the model's name."""
        return hashlib.sha256(self.raw).hexdigest()

    @cached_property
    def by_name(self) -> Mapping[str, Part]:
        """All parts by name."""
        return {part.name: part for part in self.parts}

    @property
    def size_bytes(self) -> int:
        """Bytes of all parts together."""
        return sum(part.size_bytes for part in self.parts)

    def block(self, index: int) -> Part:
        """Return the part of block `index`."""
        return self.by_name[block_part(index)]

    def tokenizer_spec(self, part_bytes: bytes) -> TokenizerSpec:
        """Return the engine's tokenizer spec, from the already verified bytes of the tokenizer part."""
        text = self.text
        variables = json.loads(text.template_variables)
        return TokenizerSpec(
            tokenizer_json=part_bytes.decode(errors="replace"),  # of one that is no text, replies say so
            chat_template=text.chat_template,
            bos_token=text.bos_token,
            eos_token=text.eos_token,
            template_variables=variables,
            add_bos=text.add_bos,
        )

    @classmethod
    def from_bytes(cls, raw: bytes) -> Manifest:
        """Parse a manifest and check every field; raises `RecordError` for any other bytes."""
        fields = decode_object(raw, "manifest", max_bytes=MAX_MANIFEST_BYTES, floats=False)
        if fields.text("kind", 64) != KIND:
            raise RecordError("these bytes are not a model manifest")
        check_version(fields, "version", VERSION)
        if canonical(fields.values) != raw:
            raise RecordError("manifest: it is not in canonical form")
        manifest = cls(
            config=config_from(fields.inner("model")),
            text=_text_from(fields.inner("text")),
            licence=_licence_from(fields),
            parts=tuple(_part_from(item) for item in fields.items("parts", 2**13)),
            raw=raw,
        )
        check_parts(manifest.config, manifest.parts)
        return manifest


def build(config: ModelConfig, text: TextRules, licence: str | None, parts: tuple[Part, ...]) -> Manifest:
    """Build the manifest of these values; raises `RecordError` for anything that `from_bytes` would refuse."""
    check_numbers(config, "manifest: model")
    document = {
        "kind": KIND,
        "version": VERSION,
        "model": plain_config(config),
        "text": {
            "chat_template": text.chat_template,
            "bos_token": text.bos_token,
            "eos_token": text.eos_token,
            "add_bos": text.add_bos,
            "template_variables": text.template_variables,
        },
        "licence": None if licence is None else "".join(c if c.isprintable() else " " for c in licence),
        "parts": [_plain_part(part) for part in parts],
    }
    return Manifest.from_bytes(canonical(document))


def check_parts(config: ModelConfig, parts: tuple[Part, ...]) -> None:
    """Raise `RecordError` unless names, tensors and sizes of the parts are exactly those that the config implies."""
    expected = [*part_names(config), TOKENIZER_PART]
    if [part.name for part in parts] != expected:
        raise RecordError(f"manifest: the parts are not {', '.join(expected[:2])}, …, {expected[-1]} in this order")
    for part in parts[:-1]:
        shapes = expected_shapes(config, part.name)
        if [(tensor.role, tensor.shape) for tensor in part.tensors] != list(shapes.items()):
            raise RecordError(f"manifest: the tensors of {part.name} do not fit the model's shape")
        for tensor in part.tensors:
            _check_tensor(tensor, part.name)
        if part.size_bytes != sum(tensor.size_bytes for tensor in part.tensors):
            raise RecordError(f"manifest: the size of {part.name} is not the sum of its tensors")
    if parts[-1].tensors or parts[-1].size_bytes > MAX_TOKENIZER_BYTES:
        raise RecordError("manifest: the tokenizer holds tensors or is too large")


def _check_tensor(tensor: Tensor, part: str) -> None:
    if byte_length(tensor.kind, tensor.shape) != tensor.size_bytes:
        raise RecordError(
            f"manifest: {tensor.role} of {part} is {tensor.kind}, which this version of Shoal does not know, "
            f"or which does not have {tensor.size_bytes} bytes in this shape"
        )
    heads = tensor.interleaved_heads
    if heads and (tensor.shape[0] % heads or tensor.shape[0] // heads % 2):
        raise RecordError(f"manifest: {tensor.role} of {part} cannot be split into {heads} heads")


def _plain_part(part: Part) -> dict[str, Any]:
    tensors = []
    for tensor in part.tensors:
        plain = {"role": tensor.role, "kind": tensor.kind, "shape": tensor.shape, "bytes": tensor.size_bytes}
        tensors.append(plain | ({"interleaved_heads": tensor.interleaved_heads} if tensor.interleaved_heads else {}))
    return {"name": part.name, "bytes": part.size_bytes, "root": part.root.hex(), "tensors": tensors}


def _part_from(item: Any) -> Part:
    fields = Fields.of("manifest: a part", item)
    name = fields.text("name", 32)
    tensors = tuple(_tensor_from(tensor, name) for tensor in fields.items("tensors", _MAX_TENSORS))
    return Part(name, fields.integer("bytes", 1, MAX_PART_BYTES), fields.hex_bytes("root", HASH_BYTES), tensors)


def _tensor_from(item: Any, part: str) -> Tensor:
    fields = Fields.of(f"manifest: a tensor of {part}", item)
    return Tensor(
        role=fields.text("role", 32),
        kind=fields.text("kind", 32),
        shape=tuple(fields.integers("shape", 1, 2**31, max_items=4)),
        size_bytes=fields.integer("bytes", 1, MAX_PART_BYTES),
        interleaved_heads=fields.integer("interleaved_heads", 0, 2**20, default=0),
    )


def _licence_from(fields: Fields) -> str | None:
    """Read the licence; it is shown on terminals, so it must have no escape sequences or line breaks."""
    licence = fields.optional_text("licence", 256)
    if licence is not None and not licence.isprintable():
        fields.refuse("licence", "printable text")
    return licence


def _text_from(fields: Fields) -> TextRules:
    variables = fields.text("template_variables", _MAX_TEMPLATE_CHARS)
    raw = variables.encode()
    parsed = decode_object(raw, f"{fields.what}: template_variables", max_bytes=4 * _MAX_TEMPLATE_CHARS)
    if canonical(parsed.values) != raw:
        fields.refuse("template_variables", "canonical JSON")
    return TextRules(
        chat_template=fields.optional_text("chat_template", _MAX_TEMPLATE_CHARS),
        bos_token=fields.optional_text("bos_token", _MAX_TOKEN_CHARS),
        eos_token=fields.optional_text("eos_token", _MAX_TOKEN_CHARS),
        add_bos=fields.flag("add_bos"),
        template_variables=variables,
    )
