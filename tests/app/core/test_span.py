"""What spans of blocks have in common."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from app.core.span import Span

SPANS = st.tuples(st.integers(0, 20), st.integers(1, 20)).map(lambda pair: Span(pair[0], pair[0] + pair[1]))


@given(SPANS, SPANS)
def test_an_overlap_has_the_blocks_of_both(one: Span, other: Span) -> None:
    both = one.overlap(other)
    assert ({*both.blocks()} if both else set()) == {*one.blocks()} & {*other.blocks()}
    assert (both is None) == {*one.blocks()}.isdisjoint(other.blocks())
