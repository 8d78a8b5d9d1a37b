"""JSON of peers: whatever a field holds, it is refused with one kind of error."""

from __future__ import annotations

from typing import Any

import pytest

from app.core.canonical_json import Fields
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
