"""Who may open a page: each secret opens what it was made for, as often and as long as it was made for."""

from __future__ import annotations

import pytest

from app.web.links import CODE_S, MAX_SESSIONS, Links
from tests.ui.fixed import Clock


def test_a_code_opens_once_and_its_session_again_and_again() -> None:
    links = Links(Clock())
    code = links.one_time_code()
    admitted = links.admit(code=code)
    assert admitted is not None
    assert (admitted.mode, admitted.session != code) == ("own", True)
    assert links.admit(code=code) is None
    assert [links.admit(session=admitted.session) for _ in range(2)] == [admitted] * 2


def test_a_code_that_is_too_old_opens_nothing() -> None:
    clock = Clock()
    links = Links(clock)
    first, second = links.one_time_code(), links.one_time_code()
    clock.at += CODE_S
    assert links.admit(code=first) is not None
    clock.at += 0.1
    assert links.admit(code=second) is None


def test_a_view_opens_views_only() -> None:
    links = Links(Clock())
    token, code = links.view_token(), links.one_time_code()
    admitted = links.admit(view=token)
    assert admitted is not None
    assert admitted.mode == "view"
    assert links.admit(view=token) == admitted
    assert links.admit(session=token) is links.admit(code=token) is None
    assert links.admit(view=code) is None
    assert links.admit(code=code) is not None  # asking for a view did not use it up


@pytest.mark.parametrize("secret", [None, "", 5, [], {}, "x" * 10_000, "\ud800", b"x", True])
def test_nonsense_opens_nothing(secret: object) -> None:
    links = Links(Clock())
    links.one_time_code()
    links.view_token()
    assert links.admit() is None
    for name in ("code", "session", "view"):
        assert links.admit(**{name: secret}) is None


def test_the_oldest_session_ends_when_there_are_too_many() -> None:
    links = Links(Clock())
    admitted = [links.admit(code=links.one_time_code()) for _ in range(MAX_SESSIONS + 1)]
    sessions = [one.session for one in admitted if one is not None]
    assert links.admit(session=sessions[0]) is None
    assert all(links.admit(session=session) for session in sessions[1:])


def test_secrets_of_another_run_open_nothing() -> None:
    ours, theirs = Links(Clock()), Links(Clock())
    assert ours.admit(code=theirs.one_time_code()) is None
    assert ours.admit(view=theirs.view_token()) is None
