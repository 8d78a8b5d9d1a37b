"""Nothing that others wrote reaches the terminal as a command."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from app.core.terminal_text import without_controls


def test_escapes_are_taken_out_and_text_stays() -> None:
    assert without_controls("a\x1b[2J\x1b]0;title\x07b\r\n\tné日本🌊\x9b31m\x7f") == "a[2J]0;titleb\n\tné日本🌊31m"


@given(st.text())
def test_only_new_lines_and_tabs_are_left_of_the_controls(text: str) -> None:
    left = [character for character in without_controls(text) if ord(character) < 32 or 127 <= ord(character) < 160]
    assert set(left) <= {"\n", "\t"}
