"""`shoal chat` in the terminal: what its commands do to a conversation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.cli.conversation import TerminalChat
from app.core.errors import AppError
from ui.state.conversations import Conversations


class Answers:
    """Fails the first time, and then repeats the question."""

    settings: dict[str, Any] = {}  # noqa: RUF012
    facts: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.asked: list[list[dict[str, str]]] = []

    def answer(self, messages: list[dict[str, str]]) -> Iterator[str]:
        self.asked.append(messages)
        if len(self.asked) == 1:
            raise AppError("no route")
        yield messages[-1]["content"]

    def waits_for(self) -> str:
        return ""

    def figures(self, *, is_whole: bool) -> dict[str, Any]:
        return {}


def test_a_question_without_a_reply_is_asked_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers: Any = Answers()
    store = Conversations(tmp_path)
    chat = TerminalChat(answers, store, {})
    with pytest.raises(AppError, match="no question"):
        chat._take("/regenerate")
    with pytest.raises(AppError, match="no route"):
        chat._take("why?")
    chat._take("/regenerate")
    chat._take("/regenerate")  # now it has a reply, which is replaced
    assert [one["content"] for asked in answers.asked for one in asked] == ["why?"] * 3
    assert capsys.readouterr().out.count("why?") == 2
    chat._take("/clear")
    with pytest.raises(AppError, match="no question"):
        chat._take("/regenerate")
    store.close()
