"""The chat, driven by keys against a scripted node."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from textual import events
from textual.pilot import Pilot
from textual.widgets import Markdown, OptionList

from app.api.client import Hangup
from app.core.errors import AppError
from app.snapshot.views import SwarmView
from tests.ui.driving import DrivenDashboard, ScriptedNode, driven, press_at_once, until
from tests.ui.fixed import HEALTHY, HOLE, ME, PEERS
from tests.ui.rendering import look_of_screen, settle, text_of_screen
from ui.draw.rows import text_of
from ui.draw.theme import THEMES
from ui.screens.chat import Chat
from ui.state.conversations import Conversations, Message
from ui.state.follower import START_AGAIN
from ui.state.store import ConnectionState
from ui.widgets import transcript
from ui.widgets.ask_box import AskBox
from ui.widgets.chat_side import ConversationList
from ui.widgets.transcript import Transcript


def box_of(app: DrivenDashboard) -> AskBox:
    return app.screen.query_one(AskBox)


def is_idle(app: DrivenDashboard) -> bool:
    return isinstance(app.screen, Chat) and app.screen._thread is None


async def say(app: DrivenDashboard, pilot: Pilot[None], node: ScriptedNode, *keys: str) -> None:
    """Type something, send it, and wait for the reply's end."""
    before = len(node.chats)
    await pilot.press(*keys, "enter")
    await until(app, pilot, lambda: len(node.chats) > before and is_idle(app))


def test_typing_in_the_chat_never_reaches_the_node() -> None:
    node = ScriptedNode()

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("3", "escape", "1", "3", *"pond")
        assert box_of(app).text == "pond"
        await pilot.press("escape", *"quid +-wzjci")
        assert box_of(app).text == "pondquid +-wzjci"
        await pilot.press("escape", "ctrl+o", "escape", "p")
        assert (len(app.screen_stack), node.asked, app.is_running) == (1, [], True)
        assert box_of(app).text.endswith("cip")
        await pilot.press("escape", "1", "p")  # elsewhere it is a command
        await until(app, pilot, lambda: "Pause hosting?" in text_of_screen(app))

    driven(node, drive)


@pytest.mark.parametrize("question", ["pond", "1pint", "3pm"])
def test_what_is_typed_right_after_the_chats_key_never_reaches_the_node(question: str) -> None:
    """The letters came while the key still waited: the `p` of a question paused the node."""
    node = ScriptedNode()

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        press_at_once(app, "3", *question)
        await until(app, pilot, lambda: isinstance(app.screen, Chat) and box_of(app).text == question)
        assert (len(app.screen_stack), node.asked) == (1, [])

    driven(node, drive)


def test_a_key_typed_right_after_that_of_a_tab_acts_there() -> None:
    """The letter took the focus back to the chat's input before the digit was handled."""
    node = ScriptedNode()

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("3", "escape")
        press_at_once(app, "1", "p")
        await until(app, pilot, lambda: "Pause hosting?" in text_of_screen(app))
        await pilot.press("escape", "3")
        await until(app, pilot, lambda: isinstance(app.screen, Chat))
        assert box_of(app).text == ""

    driven(node, drive)


def test_keys_that_do_nothing_in_the_chat_are_not_offered_there() -> None:
    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("3", "escape")
        await pilot.pause()
        footer = text_of_screen(app).splitlines()[-1]
        assert "pause" not in footer
        assert "q quit" not in footer

    driven(ScriptedNode(), drive, size=(200, 40))


@pytest.mark.parametrize("size", [(80, 24), pytest.param((120, 40), marks=pytest.mark.soak)], ids=str)
def test_the_sampling_form_shows_its_values_and_what_is_typed(size: tuple[int, int]) -> None:
    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("3", "ctrl+s")
        await until(app, pilot, lambda: "always takes the likeliest" in text_of_screen(app))
        lines = [line for line in text_of_screen(app).splitlines() if "  temperature  " in line]
        assert len(lines) == 1
        assert "0.7" in lines[0]
        assert all(name in text_of_screen(app) for name in ("max tokens", "seed", "system", "⏎ save"))
        await pilot.press("end", "backspace", "5", "3")
        await until(app, pilot, lambda: "0.53" in text_of_screen(app))
        await pilot.press("enter")
        await until(app, pilot, lambda: isinstance(app.screen, Chat) and app.screen.sampling.temperature == 0.53)

    driven(ScriptedNode(), drive, size=size)


def test_an_edit_that_is_given_up_changes_nothing(tmp_path: Path) -> None:
    node = ScriptedNode()

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("3")
        await say(app, pilot, node, *"why")
        await pilot.press(*"draft", "ctrl+e")
        assert box_of(app).text == "why"
        await pilot.press("escape")
        assert box_of(app).text == "draft"
        await pilot.press("ctrl+e", "ctrl+n")
        await until(app, pilot, lambda: box_of(app).text == "")  # an edit follows nobody into another conversation

    driven(node, drive, tmp_path)
    kept = Conversations(tmp_path)
    (talk,) = kept.all()
    assert [message.content for message in kept.messages(talk.id)] == ["why", "Because."]
    assert talk.draft == "draft"
    kept.close()


def test_a_second_edit_key_does_not_drop_a_changed_text() -> None:
    """Ctrl+e, which moves to the end of a line elsewhere, replaced the text by the question before it."""
    node = ScriptedNode()

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("3")
        await say(app, pilot, node, *"first")
        await say(app, pilot, node, *"second")
        await pilot.press("ctrl+e", *" one", "ctrl+e")
        assert box_of(app).text == "second one"
        assert app.said == ["this version is not sent yet: ⏎ sends it, esc keeps the old"]
        await pilot.press("escape", "ctrl+e", "ctrl+e")
        assert box_of(app).text == "first"

    driven(node, drive)


def test_an_edited_question_is_a_new_version_and_the_old_one_can_be_gone_back_to(tmp_path: Path) -> None:
    node = ScriptedNode()

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("3")
        await say(app, pilot, node, *"why")
        node.reply = [{"text": "So."}]
        await say(app, pilot, node, "ctrl+e", *" not")
        assert [m["content"] for m in node.chats[-1]["messages"]] == ["why not"]
        assert "version 2 of 2" in text_of_screen(app)
        await pilot.press("ctrl+b")
        await until(app, pilot, lambda: "versions of this conversation" in text_of_screen(app))
        await pilot.press("up", "enter")
        await until(app, pilot, lambda: "Because." in text_of_screen(app) and "version 1 of 2" in text_of_screen(app))
        assert "why not" not in text_of_screen(app)

    driven(node, drive, tmp_path)


def test_another_reply_says_at_its_end_which_version_it_is() -> None:
    """It said so only after the conversation was opened again."""
    node = ScriptedNode()

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("3")
        await say(app, pilot, node, *"why")
        await say(app, pilot, node, "ctrl+r")
        await until(app, pilot, lambda: "version 2 of 2 · read 12 tokens" in text_of_screen(app))

    driven(node, drive)


def test_another_reply_is_kept_beside_the_first() -> None:
    node = ScriptedNode()

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("3")
        await say(app, pilot, node, *"why")
        node.reply = [{"text": "Otherwise."}]
        await pilot.press("ctrl+r")
        await until(app, pilot, lambda: len(node.chats) == 2 and is_idle(app))
        await until(app, pilot, lambda: "Otherwise." in text_of_screen(app))
        assert [m["content"] for m in node.chats[-1]["messages"]] == ["why"]
        node.reply = [AppError("no route")]
        await pilot.press("ctrl+r")
        await until(app, pilot, lambda: len(node.chats) == 3 and is_idle(app))
        await until(app, pilot, lambda: "× no route" in text_of_screen(app))
        assert "^r asks again" in text_of_screen(app)
        assert "Otherwise." in text_of_screen(app)  # a reply that never came replaces none
        await pilot.press("ctrl+b", "up", "enter")
        await until(app, pilot, lambda: "Because." in text_of_screen(app))

    driven(node, drive)


def test_a_draft_belongs_to_its_conversation(tmp_path: Path) -> None:
    node = ScriptedNode()

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("3")
        await say(app, pilot, node, *"one")
        await pilot.press("ctrl+n")
        await say(app, pilot, node, *"two")
        await pilot.press(*"of two", "ctrl+l")
        await until(app, pilot, lambda: len(app.screen_stack) == 2)
        await pilot.press("down", "enter")
        await until(app, pilot, lambda: len(app.screen_stack) == 1 and box_of(app).text == "")
        await pilot.press(*"of one", "ctrl+n", *"of new", "ctrl+l")
        await until(app, pilot, lambda: len(app.screen_stack) == 2)
        await pilot.press("enter")
        await until(app, pilot, lambda: box_of(app).text == "of two")
        await pilot.press("ctrl+n")
        await until(app, pilot, lambda: box_of(app).text == "of new")

    driven(node, drive, tmp_path)
    kept = Conversations(tmp_path)
    assert {talk.title: talk.draft for talk in kept.all()} == {"one": "of one", "two": "of two"}
    kept.close()


def test_a_system_prompt_belongs_to_its_conversation() -> None:
    node = ScriptedNode()

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("3")
        await say(app, pilot, node, *"one")
        await pilot.press("ctrl+s", "shift+tab", *"be brief", "enter")
        await until(app, pilot, lambda: len(app.screen_stack) == 1)
        await say(app, pilot, node, *"more")
        assert node.chats[-1]["messages"][0] == {"role": "system", "content": "be brief"}
        await pilot.press("ctrl+n")
        await say(app, pilot, node, *"two")
        assert node.chats[-1]["messages"] == [{"role": "user", "content": "two"}]

    driven(node, drive)


@pytest.mark.parametrize("size", [(80, 24), pytest.param((120, 40), marks=pytest.mark.soak)], ids=str)
def test_conversations_are_searched_renamed_and_forgotten(size: tuple[int, int]) -> None:
    node = ScriptedNode()

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("3")
        await say(app, pilot, node, *"gulls")
        await pilot.press("ctrl+n")
        await say(app, pilot, node, *"terns")
        await pilot.press("ctrl+l", *"albatross")
        await until(app, pilot, lambda: "no conversation contains “albatross”" in text_of_screen(app))
        await pilot.press("down", "enter", "f8")  # nothing to open or forget
        assert "no conversation contains" in text_of_screen(app)
        await pilot.press("escape", "ctrl+l", *"GULL")
        await until(app, pilot, lambda: app.screen.query_one(OptionList).option_count == 1)
        await pilot.press("f2")
        await until(app, pilot, lambda: "Rename this conversation" in text_of_screen(app))
        await pilot.press("escape")  # back to the list, and to what was searched for
        await until(app, pilot, lambda: "GULL" in text_of_screen(app) and "f2 rename" in text_of_screen(app))
        assert app.screen.query_one(OptionList).option_count == 1
        await pilot.press("f2")
        await until(app, pilot, lambda: "Rename this conversation" in text_of_screen(app))
        await pilot.press(*["backspace"] * 5, *"of birds", "enter")
        await until(app, pilot, lambda: len(app.screen_stack) == 1)
        await pilot.press("ctrl+l", *"birds", "enter")
        await until(app, pilot, lambda: len(app.screen_stack) == 1 and "of birds" in text_of_screen(app))
        assert app.focused is box_of(app)
        await pilot.press("ctrl+l", *"terns", "f8")
        await until(app, pilot, lambda: "Forget the conversation" in text_of_screen(app))
        await pilot.press("escape")
        await until(app, pilot, lambda: "f8 forget" in text_of_screen(app))
        await pilot.press("f8")
        await until(app, pilot, lambda: "Forget the conversation" in text_of_screen(app))
        await pilot.press("enter")
        await until(app, pilot, lambda: len(app.screen_stack) == 1)
        assert isinstance(app.screen, Chat)
        assert [talk.title for talk in app.screen._kept.all()] == ["of birds"]

    driven(node, drive, size=size)


@pytest.mark.parametrize("size", [(80, 24), pytest.param((120, 40), marks=pytest.mark.soak)], ids=str)
def test_a_text_file_is_sent_with_the_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    node = ScriptedNode()
    monkeypatch.chdir(tmp_path)  # a short name: every key takes a while
    (tmp_path / "notes.txt").write_text("herring")

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("3", "ctrl+f", *"gone", "enter")
        await until(app, pilot, lambda: "no such file" in text_of_screen(app))
        await pilot.press("escape", "ctrl+f", *"notes.txt", "enter")
        await until(app, pilot, lambda: "with notes.txt" in text_of_screen(app))
        await say(app, pilot, node, *"which fish")
        (sent,) = node.chats[-1]["messages"]
        assert "herring" in sent["content"]
        assert sent["content"].endswith("which fish")
        assert "+ notes.txt" in text_of_screen(app)
        assert "herring" not in text_of_screen(app)
        await say(app, pilot, node, *"more")
        assert "herring" in node.chats[-1]["messages"][0]["content"]
        assert node.chats[-1]["messages"][-1]["content"] == "more"
        await pilot.press("ctrl+f", *"notes.txt", "enter")
        await until(app, pilot, lambda: "with notes.txt" in text_of_screen(app))
        await pilot.press("ctrl+e")
        assert "with notes.txt" not in text_of_screen(app)  # "more" had no file
        await pilot.press("escape")
        assert "with notes.txt" in text_of_screen(app)

    driven(node, drive, size=size)


def test_a_click_opens_the_conversation_under_it_in_a_scrolled_list(tmp_path: Path) -> None:
    kept = Conversations(tmp_path)
    for number in range(60):
        begun = kept.begin(f"question {number}")
        kept.add(begun.id, None, "user", f"question {number}")
    kept.close()

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("3")
        listed = app.screen.query_one(ConversationList)
        listed.action_move(59)
        wanted = text_of(listed._rows[2])
        assert "question 57" not in wanted  # which is in the third row of the list that is not scrolled
        await pilot.click(listed, offset=(3, 3))  # the third row below the frame
        await until(app, pilot, lambda: text_of(listed._rows[2]) == f"▌{wanted[1:]}")
        before = listed.current
        await pilot.click(listed, offset=(3, listed.size.height))  # the row that names the keys
        await pilot.pause()
        assert listed.current == before
        listed.action_move(59)
        listed.conversations = listed.conversations[:2]  # the others were forgotten in the dialog
        listed.show()
        listed.action_open()
        await until(app, pilot, lambda: listed.current == listed.conversations[1].id)

    driven(ScriptedNode(), drive, tmp_path)


@pytest.mark.parametrize("pieces", [["<th", "ink>I won", "der</think>", "Yes."], ["I won", "der</think>Yes", "."]])
def test_thinking_is_folded_and_not_sent_again(pieces: list[str]) -> None:
    node = ScriptedNode()
    node.reply = [{"text": piece} for piece in pieces]

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("3")
        await say(app, pilot, node, *"why")
        await until(app, pilot, lambda: "thinking · 2 words" in text_of_screen(app) and "Yes." in text_of_screen(app))
        assert "wonder" not in text_of_screen(app)
        await say(app, pilot, node, *"more")
        assert node.chats[-1]["messages"][1] == {"role": "assistant", "content": "Yes."}

    driven(node, drive)


def test_code_in_a_reply_is_readable_and_searched_by_no_highlighter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their patterns take hours for some texts, such as a bash string that begins with 90 backslashes."""

    def search(*_: object) -> Iterator[Any]:
        raise AssertionError("a reply's code was searched")

    monkeypatch.setattr("pygments.lexer.RegexLexer.get_tokens_unprocessed", search)
    node = ScriptedNode()
    node.reply = [{"text": "Sure:\n\n```bash\necho $'"}, {"text": "x'\n```\n\nor\n\n    indented\n"}]

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("3")
        await say(app, pilot, node, *"why")
        for theme in THEMES:
            app.theme = theme.name
            await settle(app, pilot)
            cells = [cell for line in look_of_screen(app) for cell in line]
            styles = {style for text, style in cells if text.strip() in ("echo $'x'", "indented")}
            assert {style.split()[0] for style in styles} == {theme.foreground}

    driven(node, drive)


def test_a_reply_that_takes_long_to_draw_is_drawn_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, busy_s = [100.0], [5.0]
    clock = SimpleNamespace(
        monotonic=lambda: now_s[0], thread_time=lambda: busy_s[0], strftime=time.strftime, localtime=time.localtime
    )
    monkeypatch.setattr(transcript, "time", clock)

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("3")
        said = app.screen.query_one(Transcript)
        await said.ask(Message(1, "user", "why", 0, {}))

        async def shown(piece: str, waited_s: float, drew_s: float) -> str:
            now_s[0] += waited_s
            busy_s[0] += drew_s
            await said.add(piece)
            await pilot.pause()
            return said.query_one(Markdown).source

        assert await shown("one", 0, 0) == "one"
        assert await shown(" two", 0.1, 0.02) == "one two"
        assert await shown(" three", 0.1, 0.09) == "one two", "to draw the last piece took most of the time since then"
        assert await shown("", 0.2, 0) == "one two three"
        assert await shown(" four", 9.0, 9.0) == "one two three four", (
            "it is drawn now and then however busy the app is"
        )
        assert await shown(" five", 0, 0.1) == "one two three four"
        await said.finish(Message(2, "assistant", "one two three four five", 0, {}))
        assert said.query_one(Markdown).source == "one two three four five"

    driven(ScriptedNode(), drive)


def test_a_chat_that_others_have_read_does_not_become_private_again() -> None:
    node = ScriptedNode()

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("3")
        node.reply = [{"text": "So.", "route": [{"peer": ME, "start": 0, "stop": 80}]}]
        node.done = {"route": [{"peer": ME, "start": 0, "stop": 80}]}
        await say(app, pilot, node, *"one")
        await until(app, pilot, lambda: "hops can read your next message." in text_of_screen(app))
        app.store.take(replace(HEALTHY, start=0, stop=80, peers=()))
        app.show_now()
        await until(app, pilot, lambda: "This chat stays on this machine." in text_of_screen(app))
        assert text_of_screen(app).count("This chat stays") == 1  # it stood in the panel of the sampling, too
        app.store.take(HEALTHY)
        app.show_now()
        await until(app, pilot, lambda: "hops can read your next message." in text_of_screen(app))
        node.done = {"route": [{"peer": PEERS[0].peer, "start": 0, "stop": 80}]}
        await say(app, pilot, node, *"two")
        await until(app, pilot, lambda: "“tern” can read this chat." in text_of_screen(app))
        node.done = {"route": [{"peer": ME, "start": 0, "stop": 80}]}
        await say(app, pilot, node, *"three")
        await until(app, pilot, lambda: "“tern” can read this chat." in text_of_screen(app))
        assert "stays on this machine" not in text_of_screen(app)

    driven(node, drive)


def test_a_question_that_others_have_read_stays_so_in_its_other_versions() -> None:
    node = ScriptedNode()

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        app.store.take(replace(HEALTHY, start=0, stop=80, peers=(PEERS[0],)))
        await pilot.press("3")
        node.done = {"route": [{"peer": PEERS[0].peer, "start": 0, "stop": 80}]}
        await say(app, pilot, node, *"one")
        await until(app, pilot, lambda: "“tern” can read this chat." in text_of_screen(app))
        app.store.take(replace(HEALTHY, start=0, stop=80, peers=()))
        node.done = {"route": [{"peer": ME, "start": 0, "stop": 80}]}
        await say(app, pilot, node, "ctrl+r")
        assert "“tern” can read this chat." in text_of_screen(app)
        assert "on this machine ─" in text_of_screen(app)  # the route of this version
        await pilot.press("ctrl+n")
        await until(app, pilot, lambda: "This chat stays on this machine." in text_of_screen(app))

    driven(node, drive)


def test_a_hop_that_left_the_route_has_read_the_chat() -> None:
    node = ScriptedNode()
    mine = [{"peer": ME, "start": 0, "stop": 80}]
    node.reply = [{"text": "So", "route": [{"peer": PEERS[0].peer, "start": 0, "stop": 80}]}]
    node.reply += [{"text": " it", "route": mine}, {"text": " is."}]
    node.done = {"route": mine}

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("3")
        await say(app, pilot, node, *"one")
        await until(app, pilot, lambda: "“tern” dropped out · you took 0:80" in text_of_screen(app))
        assert "“tern” can read this chat." in text_of_screen(app)
        await pilot.press("ctrl+n")
        await until(app, pilot, lambda: "Hops can read this chat." in text_of_screen(app))
        await pilot.press("ctrl+l")
        await pilot.press("enter")
        await until(app, pilot, lambda: "“tern” can read this chat." in text_of_screen(app))

    driven(node, drive)


def test_a_hop_that_dropped_out_stays_in_the_transcript(tmp_path: Path) -> None:
    """The line about it was gone after the next question, and after the dashboard's next start."""
    node = ScriptedNode()
    mine = [{"peer": ME, "start": 0, "stop": 80}]
    node.reply = [{"text": "So", "route": [{"peer": PEERS[0].peer, "start": 0, "stop": 80}]}]
    node.reply += [{"text": " it", "route": mine}, {"text": " is."}]
    node.done = {"route": mine}
    line = "▼ at token 2: “tern” dropped out · you took 0:80 · the reply continues"

    async def ask_twice(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("3")
        await say(app, pilot, node, *"one")
        node.reply, node.done = [{"text": "Yes."}], {}
        await say(app, pilot, node, *"two")
        await say(app, pilot, node, "ctrl+r")
        await until(app, pilot, lambda: "Yes." in text_of_screen(app) and line in text_of_screen(app))

    async def look(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("3")
        await until(app, pilot, lambda: line in text_of_screen(app))

    driven(node, ask_twice, tmp_path)
    driven(node, look, tmp_path)


def test_a_question_without_a_node_says_which_key_starts_one() -> None:
    node = ScriptedNode()

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        app.store.connected(ConnectionState("away", "the node has ended", next_step=START_AGAIN))
        await settle(app, pilot)
        await pilot.press("3", *"why", "enter")
        words = "× not connected to the node: press F5 to start it · ^r asks again"
        await until(app, pilot, lambda: words in text_of_screen(app))
        assert node.chats == []
        assert "^y copy" not in text_of_screen(app)  # there is no reply

    driven(node, drive)


def test_a_reply_says_what_it_waits_for_and_what_it_cost() -> None:
    node = ScriptedNode()
    node.reply = [{"text": "So"}]

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("3")
        await say(app, pilot, node, *"why")
        await until(app, pilot, lambda: "read 12 tokens in 0.5 s" in text_of_screen(app))
        node.reply.insert(0, {"waiting": {"block": 15, "text": "nobody serves block 15 now"}})
        await say(app, pilot, node, *"and now")
        await until(app, pilot, lambda: "first after 0.5 s" in text_of_screen(app))  # most of it was the wait

    driven(node, drive)


class SlowNode(ScriptedNode):
    """Sends the first piece of a reply at once, and the others when told."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def chat(
        self, request: dict[str, Any], *, silence_s: float = 1.0, hangup: Hangup | None = None
    ) -> Iterator[dict[str, Any]]:
        yield {"text": "Because "}
        assert self.go_on.wait(20.0)
        yield from super().chat(request)


class WaitingNode(ScriptedNode):
    """Replies to the first question; says of the others that they wait when told so, and goes on when told so."""

    def __init__(self) -> None:
        super().__init__()
        self.wait, self.go_on = threading.Event(), threading.Event()

    def chat(
        self, request: dict[str, Any], *, silence_s: float = 1.0, hangup: Hangup | None = None
    ) -> Iterator[dict[str, Any]]:
        if self.chats:
            assert self.wait.wait(20.0)
            yield {"waiting": {"block": 60, "text": "waiting up to 15 s for a member that serves block 60"}}
            assert self.go_on.wait(20.0)
        yield from super().chat(request)


def test_a_question_stays_in_view_while_its_reply_waits() -> None:
    """The second line of the wait covered it: the input was empty, and the question was nowhere."""
    node = WaitingNode()
    node.reply = [{"text": "\n\n".join(f"Paragraph {number}." for number in range(20))}]

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("3")
        await say(app, pilot, node, *"long")
        app.store.take(replace(HOLE, state="paused", start=None, stop=None))
        await pilot.press(*"and ports", "enter")
        await until(app, pilot, lambda: "waiting for the first token" in text_of_screen(app))
        await until(app, pilot, lambda: "and ports" in text_of_screen(app))
        node.wait.set()
        await until(app, pilot, lambda: "Resume hosting: then this node may host them" in text_of_screen(app))
        await until(app, pilot, lambda: "and ports" in text_of_screen(app))
        app.screen.query_one(Transcript).scroll_home(animate=False, immediate=True)
        await until(app, pilot, lambda: "and ports" not in text_of_screen(app))
        app.store.take(HEALTHY)
        await settle(app, pilot)
        await until(app, pilot, lambda: "Resume hosting" not in text_of_screen(app))
        assert "Paragraph 0." in text_of_screen(app)  # whoever has scrolled up stays there
        node.go_on.set()
        await until(app, pilot, lambda: is_idle(app))
        assert "Paragraph 0." in text_of_screen(app)

    driven(node, drive, size=(80, 24))


def test_leaving_the_dashboard_keeps_what_has_come_of_a_reply(tmp_path: Path) -> None:
    node = SlowNode()

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("3", *"why", "enter")
        await until(app, pilot, lambda: "Because" in text_of_screen(app))
        await pilot.press("ctrl+q")

    driven(node, drive, tmp_path)
    node.go_on.set()
    kept = Conversations(tmp_path)
    question, reply = kept.messages(kept.all()[0].id)
    assert (question.content, reply.content) == ("why", "Because ")
    assert (reply.figures["stopped"], len(reply.figures["token_ids"])) == (True, 1)
    kept.close()


def test_other_tabs_are_looked_at_while_a_reply_arrives() -> None:
    node = SlowNode()
    node.reply = [{"text": "of the sea."}]

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("3", *"why", "enter")
        await until(app, pilot, lambda: "Because" in text_of_screen(app))
        await pilot.press("ctrl+o", "2")
        await until(app, pilot, lambda: app.current_mode == "swarm")
        await pilot.press("3")
        node.go_on.set()
        await until(app, pilot, lambda: "Because of the sea." in text_of_screen(app))
        assert "stopped" not in text_of_screen(app)
        assert box_of(app).text == ""

    driven(node, drive)


def test_the_error_of_a_reply_is_in_words_and_names_peers() -> None:
    node = ScriptedNode()
    peer = "12D3KooWKvD5skenJUi6C5ugy573EGZHosN3YT8Zte5PccyRguJw"
    node.reply = [AppError(f"no route: {peer} could not be reached: [Errno 111] Connection refused")]

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("3")
        await say(app, pilot, node, *"why")
        await until(app, pilot, lambda: "× no route: yRguJw could not be reached: " in text_of_screen(app))
        assert "Errno" not in text_of_screen(app)

    driven(node, drive)


def test_a_conversation_that_outgrew_the_context_says_which_keys_help() -> None:
    node = ScriptedNode()
    words = "the prompt has 12725 tokens, but the model's context is 8192: shorten it"
    node.reply = [AppError(words, code="context_length_exceeded")]

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("3", *"hi", "enter")
        await until(app, pilot, lambda: "context is 8192" in text_of_screen(app))
        shown = " ".join(text_of_screen(app).split())
        assert "^e edits yours, ^n begins a new conversation" in shown
        assert "^r asks again" not in shown  # that would fail again

    driven(node, drive, size=(80, 24))


def test_each_version_has_one_row_however_long_it_is() -> None:
    node = ScriptedNode()
    node.reply = [{"text": "A very long reply. " * 40}]

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("3", *"why", "enter")
        await until(app, pilot, lambda: "1 token" in text_of_screen(app))
        await pilot.press("ctrl+r")
        await until(app, pilot, lambda: "version 2 of 2" in text_of_screen(app))
        await pilot.press("ctrl+b")
        await until(app, pilot, lambda: "versions of this conversation" in text_of_screen(app))
        listed = app.screen.query_one(OptionList)
        assert listed.option_count == 2
        assert listed.size.height == 2

    driven(node, drive, size=(80, 24))


def test_an_adapter_or_another_swarm_can_reply() -> None:
    node = ScriptedNode()

    async def choose(app: DrivenDashboard, pilot: Pilot[None], *keys: str) -> None:
        await pilot.press("ctrl+g")
        await until(app, pilot, lambda: "who replies?" in text_of_screen(app))
        await pilot.press(*keys, "enter")
        await until(app, pilot, lambda: isinstance(app.screen, Chat))

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        app.store.take(
            replace(HEALTHY, swarms=(*HEALTHY.swarms, SwarmView("birds", "ff" * 32, "birds#ffffffffffffffffffff")))
        )
        await pilot.press("3")
        await choose(app, pilot, "down")
        assert "sonnets" in text_of_screen(app)
        await say(app, pilot, node, *"why")
        assert (node.chats[-1]["adapter"], "swarm" in node.chats[-1]) == ("sonnets", False)
        await choose(app, pilot, "down", "down")
        assert "birds#fffff" in text_of_screen(app)
        await say(app, pilot, node, *"why")
        assert (node.chats[-1]["swarm"], "adapter" in node.chats[-1]) == ("birds#ffffffffffffffffffff", False)
        await choose(app, pilot)
        await say(app, pilot, node, *"why")
        assert not {"swarm", "adapter"} & node.chats[-1].keys()

    driven(node, drive)


@pytest.mark.parametrize("typed", ["is it? yes", "a?b?c 1 2", "q p?circadian"])
def test_letters_typed_at_once_after_esc_all_reach_the_input(typed: str) -> None:
    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("3")
        box = app.screen.query_one(AskBox)
        assert app._driver is not None
        for key in ["escape", *typed, *"zzz", *["backspace"] * 3]:  # none waits for the one before
            name = {" ": "space", "?": "question_mark"}.get(key, key)
            app._driver.send_message(events.Key(name, key if len(key) == 1 else None))
        await until(app, pilot, lambda: box.text == typed)
        assert app.screen.focused is box

    driven(ScriptedNode(), drive)


def test_a_digit_typed_right_after_the_jump_key_goes_to_its_tab() -> None:
    """It went into the input if the machine was too busy to show the letters in time."""

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("3")
        app.post_message(events.Key("ctrl+o", "\x0f"))
        press_at_once(app, "1")
        await until(app, pilot, lambda: app.current_mode == "overview")
        await pilot.press("3")
        assert box_of(app).text == ""

    driven(ScriptedNode(), drive)
