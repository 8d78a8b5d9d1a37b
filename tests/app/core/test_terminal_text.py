"""Nothing that others wrote reaches the terminal as a command."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from app.core.terminal_text import qr_code, quoted, without_controls


def test_escapes_are_taken_out_and_text_stays() -> None:
    assert without_controls("a\x1b[2J\x1b]0;title\x07b\r\n\tné日本🌊\x9b31m\x7f") == "a[2J]0;titleb\n\tné日本🌊31m"


def test_a_qr_code_holds_an_invite_in_upper_case() -> None:
    line = "shoal:" + "mfrggzdfmztwq2lk" * 10
    code = qr_code(line)
    assert code.mode == "alphanumeric"
    assert code.matrix == qr_code(line.upper()).matrix


@given(st.text())
def test_only_new_lines_and_tabs_are_left_of_the_controls(text: str) -> None:
    left = [character for character in without_controls(text) if ord(character) < 32 or 127 <= ord(character) < 160]
    assert set(left) <= {"\n", "\t"}


@given(st.text("you”“\"'\n\u202e\uff02 "))
def test_a_name_in_quotes_ends_at_the_last_of_them(name: str) -> None:
    shown = quoted(name)
    assert (shown[0], shown[-1]) == ("“", "”")
    assert not set(shown[1:-1]) & set('“”"\n\u202e\uff02')
