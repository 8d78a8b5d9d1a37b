"""Makes the manifest of a model from its files, by reading every byte once in part order and hashing it.

The file formats are read by `engine.sources`; the result is stored by `app.weights.manifest_store`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from app.core.canonical_json import canonical, decode_object
from app.core.errors import RecordError
from app.manifest.manifest import MAX_TOKENIZER_BYTES, TOKENIZER_PART, Manifest, Part, Tensor, TextRules, build
from app.manifest.merkle import CHUNK_BYTES, ChunkHasher, root_of
from engine.sources.base import ModelSource, TensorEntry
from engine.sources.layout import expected_shapes, part_names


@dataclass(frozen=True)
class HashedSource:
    """The manifest of a model source, and the chunk hashes (leaves) of each part by its name."""

    manifest: Manifest
    leaves: Mapping[str, tuple[bytes, ...]]


def hash_source(source: ModelSource, on_bytes: Callable[[int], None] = lambda count: None) -> HashedSource:
    """Read and hash the whole source; `on_bytes` is called with the length of each piece read and may raise to stop.

    Raises `RecordError` if a file is cut off or a part lacks tensors.
    """
    leaves: dict[str, tuple[bytes, ...]] = {}
    parts: list[Part] = []
    for name in part_names(source.config):
        entries = in_order(source, name)
        leaves[name] = _hashes(part_pieces(entries), on_bytes)
        tensors = tuple(_tensor(entry) for entry in entries)
        parts.append(Part(name, sum(tensor.size_bytes for tensor in tensors), root_of(leaves[name]), tensors))
    tokenizer = tokenizer_bytes(source)
    leaves[TOKENIZER_PART] = _hashes(iter((tokenizer,)), on_bytes)
    parts.append(Part(TOKENIZER_PART, len(tokenizer), root_of(leaves[TOKENIZER_PART])))
    spec = source.tokenizer
    variables = canonical(dict(spec.template_variables)).decode()
    text = TextRules(spec.chat_template, spec.bos_token, spec.eos_token, spec.add_bos, variables)
    return HashedSource(build(source.config, text, source.licence, tuple(parts)), leaves)


def in_order(source: ModelSource, part: str) -> tuple[TensorEntry, ...]:
    """Return a part's tensors in manifest order, however the source lists them; raises `RecordError`."""
    by_role = {entry.role: entry for entry in source.parts.get(part, ())}
    roles = list(expected_shapes(source.config, part))
    if sorted(by_role) != sorted(roles):
        raise RecordError(f"{source.label}: part {part} must consist of {', '.join(roles)}; download the model again")
    return tuple(by_role[role] for role in roles)


def part_pieces(entries: tuple[TensorEntry, ...]) -> Iterator[bytes]:
    """Yield a part's bytes from the model files in pieces of up to 1 MiB; raises `RecordError` if a file is cut off."""
    for entry, extent in ((each, extent) for each in entries for extent in each.extents):
        with open(extent.file, "rb") as file:
            file.seek(extent.offset)
            left = extent.length
            while left:
                piece = file.read(min(left, CHUNK_BYTES))
                if not piece:
                    raise RecordError(f"{extent.file} ends inside tensor {entry.name}; download it again")
                left -= len(piece)
                yield piece


def tokenizer_bytes(source: ModelSource) -> bytes:
    """Return the bytes of the tokenizer part: canonical JSON, independent of the file's spacing and key order."""
    raw = source.tokenizer.tokenizer_json.encode("utf-8", "surrogatepass")
    what = f"{source.label}: the tokenizer"
    result = canonical(decode_object(raw, what, max_bytes=4 * MAX_TOKENIZER_BYTES).values)
    if len(result) > MAX_TOKENIZER_BYTES:
        raise RecordError(f"{what} has {len(result)} bytes; the limit is {MAX_TOKENIZER_BYTES}")
    return result


def _hashes(pieces: Iterator[bytes], on_bytes: Callable[[int], None]) -> tuple[bytes, ...]:
    hasher = ChunkHasher()
    for piece in pieces:
        hasher.update(piece)
        on_bytes(len(piece))
    return hasher.finish()


def _tensor(entry: TensorEntry) -> Tensor:
    return Tensor(entry.role, entry.kind, entry.shape, entry.length, entry.interleaved_heads)
