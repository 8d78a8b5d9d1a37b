"""JSON of peers: whatever a field holds, it is refused with one kind of error."""

from __future__ import annotations

from typing import Any

import pytest

from app.core.canonical_json import MAX_DEPTH, Fields, decode_object
from app.core.errors import RecordError


def nested(depth: int) -> list[Any]:
    """A list in a list in a list, and so on."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("value", [nested(100_000), list(range(10**6)), "x" * 10**6, 10**4000, {"a": nested(5000)}])
def test_a_value_of_any_size_and_depth_is_named_in_a_short_error(value: object) -> None:
    with pytest.raises(RecordError) as refused:
        Fields("a record", {"field": value}).flag("field")
    assert len(str(refused.value)) < 200
    assert str(refused.value).startswith("a record: 'field' is ")


def test_a_short_value_is_shown_whole() -> None:
    with pytest.raises(RecordError, match=r"'steps' is \[1, 'two', None\], expected a whole number from 0 to 9"):
        Fields("a record", {"steps": [1, "two", None]}).integer("steps", 0, 9)


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_objects_and_lists_are_nested_only_so_far(opening: bytes, closing: bytes) -> None:
    def document(depth: int) -> bytes:
        return b'{"a":' + opening * (depth - 1) + b"1"[: opening != b"["] + closing * (depth - 1) + b"}"

    assert decode_object(document(MAX_DEPTH), "a record", max_bytes=2000).values
    for depth in (MAX_DEPTH + 1, 200, 100_000):
        with pytest.raises(RecordError, match=r"in each other|recursion"):
            decode_object(document(depth), "a record", max_bytes=10**6)
