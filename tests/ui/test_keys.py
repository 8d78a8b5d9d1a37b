"""What keys do to the node, against a scripted one: bans, the memory cap, the first run; and what they do here."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from textual import events
from textual.pilot import Pilot
from textual.widget import Widget
from textual.widgets import Input, TextArea

from app.core.errors import AppError
from app.core.reasons import Reason
from app.snapshot.codec import to_json
from app.snapshot.views import (
    CourtesyView,
    DeviceView,
    FitView,
    GuestView,
    NetworkView,
    OfferView,
    PeerView,
    ProspectsView,
    RuleView,
    Snapshot,
    StepView,
    SwarmView,
)
from tests.ui.driving import GB, STARTER, DrivenDashboard, ScriptedDoor, ScriptedNode, driven, press_at_once, until
from tests.ui.fixed import EMPTY, HEALTHY, PEERS, Clock
from tests.ui.rendering import settle, text_of_screen
from ui.app import keeps_running
from ui.draw.first_run import PAUSES, FirstState, first_rows
from ui.draw.first_run_offers import choice_rows, ordered
from ui.draw.rows import Row, text_of
from ui.screens.first_run import ELSEWHERE_S, FirstRun
from ui.screens.frame import TABS
from ui.screens.invite import GuestList, invite_words, nobody_new
from ui.screens.memory_cap import cap_rows, moved
from ui.screens.settings import ValueField
from ui.state.follower import START_AGAIN, Follower
from ui.state.store import ConnectionState
from ui.widgets.ask_box import AskBox
from ui.widgets.dialogs import TextDialog
from ui.widgets.filter_field import FilterField
from ui.widgets.following_list import EventsPanel
from ui.widgets.footer import FooterKey, fitting

NEAR = OfferView("pond#1a2b3c4d1a2b3c4d1a2b", "a llama", FitView(8, 8), 5, nearby="lan", members=2, tokens_per_s=40.0)


def test_a_peer_is_banned_and_comes_back() -> None:
    node = ScriptedNode()

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("2", "down", "b")
        await until(app, pilot, lambda: "“Unban a peer” in the palette" in text_of_screen(app))
        await pilot.press("enter")
        await until(app, pilot, lambda: len(node.config["deny"]) == 2)
        assert node.config["deny"][0] == "10.0.0.0/8"
        assert node.config["deny"][1] in {peer.peer for peer in PEERS}
        await pilot.press("ctrl+p", *"unban")
        await until(app, pilot, lambda: "Speak again with one" in text_of_screen(app))
        await pilot.press("enter")
        await until(app, pilot, lambda: "speak with it again" in text_of_screen(app))
        await pilot.press("down", "enter")
        await until(app, pilot, lambda: node.config["deny"] == ["10.0.0.0/8"])

    driven(node, drive)


def test_the_cap_is_moved_and_holds_at_once() -> None:
    node = ScriptedNode()

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("minus")
        await until(app, pilot, lambda: "6.5 of 12.0 GB" in text_of_screen(app))
        await pilot.press("minus", "minus", "plus", "enter")
        await until(app, pilot, lambda: node.config["max_vram"] == str(6 * GB))
        assert node.asked == []  # the node applies it by itself

    driven(node, drive)


@pytest.mark.parametrize(
    ("typed", "expected"),
    [("10", 10 * GB), ("500mb", GB // 2), ("0.5", GB // 2), ("6gb", 6 * GB), ("250M", GB // 4), ("0", 0)],
)
def test_a_cap_can_be_typed(typed: str, expected: int) -> None:
    """A digit was a command of its own: the 0 of 10 set the cap to nothing."""
    node = ScriptedNode()

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("minus")
        await until(app, pilot, lambda: "or type a size" in text_of_screen(app))
        await pilot.press(*("full_stop" if key == "." else key for key in typed))
        assert typed.upper() in text_of_screen(app)
        await pilot.press("enter")
        await until(app, pilot, lambda: node.config["max_vram"] == str(expected))

    driven(node, drive, size=(80, 24))


def test_a_typed_cap_that_is_no_size_is_not_applied() -> None:
    node = ScriptedNode()

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("minus", *"5gg", "enter")
        await until(app, pilot, lambda: "5GG is not a size: type it like 6GB or 500MB" in text_of_screen(app))
        assert node.config["max_vram"] == 7 * GB
        await pilot.press("backspace", "enter")
        await until(app, pilot, lambda: node.config["max_vram"] == str(5 * GB))

    driven(node, drive, size=(80, 24))


@pytest.mark.parametrize(
    ("cap_bytes", "steps", "expected"),
    [
        (7 * GB, 1, 15 * GB // 2),
        (7_200_000_000, 1, 15 * GB // 2),
        (7_200_000_000, -1, 7 * GB),
        (0, -1, 0),
        (12 * GB, 3, 12 * GB),
    ],
)
def test_a_cap_moves_by_half_gigabytes(cap_bytes: int, steps: int, expected: int) -> None:
    device = DeviceView("cuda:0", "", 12 * GB, 4 * GB)
    assert moved(cap_bytes, device, steps) == expected


def test_a_cap_says_what_it_means() -> None:
    device = DeviceView("cuda:0", "", 12 * GB, 4 * GB, weights_bytes=GB)
    told = [text_of(cap_rows(cap, device)[1]) for cap in (None, 0, 9 * GB)]
    assert told == ["hosting takes 1.0 GB now", "this node would host nothing", "more than is free now"]
    filling = DeviceView("cpu", "", 12 * GB, 4 * GB, weights_bytes=GB, cache_bytes=2 * GB, cache_used_bytes=GB // 2)
    assert text_of(cap_rows(None, filling)[1]) == "hosting takes 1.5 GB now, 3.0 GB with a full cache"


def test_a_node_that_hosts_nothing_is_given_memory_again_by_the_same_key() -> None:
    node = ScriptedNode()
    node.prospects = ProspectsView((), DeviceView("cuda:0", "", 12 * GB, 9 * GB, 0))

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("minus", "0")
        await until(app, pilot, lambda: "this node would host nothing" in text_of_screen(app))
        await pilot.press("enter")
        await until(app, pilot, lambda: node.config["max_vram"] == "0")
        app.store.take(replace(HEALTHY, state="client", start=None, stop=None, hardware=None))
        app.show_now()
        await pilot.pause()
        assert "+/- cap" in text_of_screen(app)
        await pilot.press("plus")
        await until(app, pilot, lambda: "500 MB of 12.0 GB" in text_of_screen(app))
        await pilot.press("enter")
        await until(app, pilot, lambda: node.config["max_vram"] == str(GB // 2))
        await pilot.press("plus", "n")
        await until(app, pilot, lambda: "no limit: what is free" in text_of_screen(app))
        await pilot.press("enter")
        await until(app, pilot, lambda: node.config["max_vram"] is None)

    driven(node, drive)


def test_the_sole_host_of_blocks_is_warned_before_it_takes_them_away() -> None:
    node = ScriptedNode()
    alone = tuple(peer for peer in PEERS if peer.name not in ("puffin", "skua"))

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        app.store.take(replace(HEALTHY, peers=alone, active_sessions=()))
        warning = "36:46 have no other host"
        await pilot.press("p")
        await until(app, pilot, lambda: warning in " ".join(text_of_screen(app).split()))
        await pilot.press("escape")
        assert node.asked == []
        for opening in (("d",), ("minus", "0"), ("ctrl+p", *"leave the swarm"), ("ctrl+p", *"stop the node")):
            await pilot.press(*opening)
            if opening[0] == "ctrl+p":
                await until(
                    app, pilot, lambda: "And forget it" in text_of_screen(app) or "Drain and" in text_of_screen(app)
                )
                await pilot.press("enter")
            await until(app, pilot, lambda: "36:46 have no other" in " ".join(text_of_screen(app).split()))
            await pilot.press("escape")
            await until(app, pilot, lambda: len(app.screen_stack) == 1)
        await pilot.press("p")
        await until(app, pilot, lambda: warning in " ".join(text_of_screen(app).split()))
        await pilot.press("enter")
        await until(app, pilot, lambda: node.asked == ["/control/pause"])

    driven(node, drive)


def test_a_pause_that_takes_nothing_away_is_not_asked_about() -> None:
    node = ScriptedNode()

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        app.store.take(replace(HEALTHY, active_sessions=()))
        await pilot.press("p")
        await until(app, pilot, lambda: node.asked == ["/control/pause"])

    driven(node, drive)


class RulingNode(ScriptedNode):
    """A node that a rule keeps paused, whatever the user asks."""

    def post(self, path: str, body: dict[str, Any], *, timeout_s: float = 1.0) -> Any:
        super().post(path, body)
        rules = (
            RuleView("pause_heat", "too hot"),
            RuleView("pause_busy", "another program uses the device", True, True),
        )
        return to_json(CourtesyView(True, "rule", rules=rules))


def test_resuming_against_a_pause_rule_names_the_rule() -> None:
    """It said that hosting resumes, and nothing happened."""
    node = RulingNode()

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        app.store.take(replace(HEALTHY, state="paused", courtesy=CourtesyView(True, "rule")))
        await settle(app, pilot)
        await pilot.press("p")
        said = "still paused by a rule: another program uses the device; the state line says how to turn it off"
        await until(app, pilot, lambda: app.said == [said])
        assert node.asked == ["/control/resume"]

    driven(node, drive)


def test_the_palette_knows_the_chats_actions_and_settings_by_name() -> None:
    node = ScriptedNode()

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        app.store.settings = (("pause_busy", "Pause while others use it."), ("max_vram", "Most memory."))
        await pilot.press("ctrl+p", *"setting: max")
        await until(app, pilot, lambda: "Setting: max_vram" in text_of_screen(app))
        await pilot.press("enter")
        await until(app, pilot, lambda: "⏎ save" in text_of_screen(app) and app.screen.focused is not None)
        field = app.screen.query_one("#value", Input)
        await until(app, pilot, lambda: field.has_focus and field.value == str(7 * GB))
        await pilot.press("escape", "ctrl+p", *"chat: sampling")
        await until(app, pilot, lambda: "Chat: sampling" in text_of_screen(app))
        await pilot.press("enter")
        await until(app, pilot, lambda: "repetition penalty" in text_of_screen(app))

    driven(node, drive)


def test_a_theme_is_worn_while_it_is_looked_at_and_kept_when_chosen(tmp_path: Path) -> None:
    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("ctrl+p", *"theme: day")
        await until(app, pilot, lambda: app.theme == "shoal-day")
        await pilot.press("escape")
        await until(app, pilot, lambda: app.theme == "shoal-night")
        await pilot.press("ctrl+p", *"theme: contrast")
        await until(app, pilot, lambda: app.theme == "shoal-contrast")
        await pilot.press("enter")
        await until(app, pilot, lambda: len(app.screen_stack) == 1)
        assert app.theme == "shoal-contrast"

    driven(ScriptedNode(), drive, tmp_path)
    assert DrivenDashboard(ScriptedNode(), tmp_path).theme == "shoal-contrast"


def test_a_stray_print_is_a_row_of_the_log() -> None:
    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        print("a stray word")  # noqa: T201 (that is the point)
        await until(app, pilot, lambda: app.store.logs)
        assert (app.store.logs[-1].source, app.store.logs[-1].text) == ("dashboard", "a stray word")

    driven(ScriptedNode(), drive)


def test_a_node_that_did_not_start_is_started_again_after_its_settings_were_changed() -> None:
    node = ScriptedNode()

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        door = cast(ScriptedDoor, app.door)
        app._follower = Follower(door, lambda heard: None)
        app.store.connected(ConnectionState("away", "the node did not start: 7464 is in use", next_step=START_AGAIN))
        app.show_now()
        await pilot.pause()
        screen = text_of_screen(app)
        assert "7464 is in use" in screen
        assert "press F5 to start it" in screen
        assert "F5 start again" in screen
        await pilot.press("6")
        await until(app, pilot, lambda: "from the file" in text_of_screen(app))
        await pilot.press("enter")
        await until(app, pilot, lambda: "⏎ save" in text_of_screen(app) and "esc back" in text_of_screen(app))
        await pilot.press("end", *["backspace"] * 4, *"nonsense", "enter")
        await until(app, pilot, lambda: "cannot be 'nonsense'" in text_of_screen(app))
        await pilot.press(*["backspace"] * 8, *"7000", "enter")
        await until(app, pilot, lambda: door.file["listen"]["value"] == "7000")
        await until(app, pilot, lambda: "edit" in text_of_screen(app).splitlines()[-1])
        await pilot.press("s")
        assert door.started == 1
        await pilot.press("2", "s")  # where s sorts while peers are known
        assert door.started == 2
        await pilot.press("3", "s")  # where letters are text
        assert door.started == 2
        assert "F5 start again" in text_of_screen(app)
        await pilot.press("f5")
        assert door.started == 3
        assert node.asked == []

    driven(node, drive)


def test_a_setting_is_found_by_typing_a_part_of_its_name() -> None:
    """There was no such key: typing `max_vram` reset the first setting at its `x`, and `pause` paused the node."""
    node = ScriptedNode()

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("6")
        await until(app, pilot, lambda: "settings  3" in text_of_screen(app))
        await pilot.press("slash", *"BATTERY")
        await until(app, pilot, lambda: "settings  1 of 3" in text_of_screen(app))
        assert "max_vram" not in text_of_screen(app)
        await pilot.press("enter", "enter")
        await until(app, pilot, lambda: "⏎ save" in text_of_screen(app))
        await pilot.press(*["backspace"] * 4, *"false", "enter")
        await until(app, pilot, lambda: node.config["pause_on_battery"] == "false")
        await pilot.press("slash", "escape")
        await until(app, pilot, lambda: "max_vram" in text_of_screen(app))
        await pilot.press("slash", *"nothing")
        await until(app, pilot, lambda: "No setting matches: esc shows all." in text_of_screen(app))
        assert node.asked == []

    driven(node, drive)


@pytest.mark.parametrize(("tab", "field"), [("2", "#filter"), ("5", "#search"), ("6", "#filter"), ("6", "#value")])
def test_what_is_typed_right_after_a_field_is_opened_goes_there(tab: str, field: str) -> None:
    """The letters came while the key still waited: those of a filter paused the node or reset a setting."""
    node = ScriptedNode()

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press(tab)
        if tab == "6":
            await until(app, pilot, lambda: "settings  3" in text_of_screen(app))
        press_at_once(app, "\r" if field == "#value" else "/", *"xp6")
        await until(app, pilot, lambda: app.screen.query_one(field, Input).value.endswith("xp6"))
        assert (len(app.screen_stack), node.asked, app.said) == (1, [], [])

    driven(node, drive)


@pytest.mark.parametrize(("keys", "field"), [("3", AskBox), ("2/", FilterField), ("6\r", ValueField)])
def test_corrections_apply_in_the_order_of_typing(keys: str, field: type[Widget]) -> None:
    """Characters overtook backspace, which then deleted those typed after it."""

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press(keys[0])
        if field is ValueField:
            await until(app, pilot, lambda: "settings  3" in text_of_screen(app))
        press_at_once(app, *keys[1:], "ctrl+u", *"teh", "backspace", "backspace", *"he", "left", "x")
        await until(app, pilot, lambda: _text(app.screen.query_one(field)) == "thxe")

    driven(ScriptedNode(), drive)


def _text(field: Widget) -> str:
    return field.text if isinstance(field, TextArea) else cast(Input, field).value


def test_a_sampling_value_is_saved_as_it_was_typed() -> None:
    """Enter overtook the characters before it: the old value was saved."""

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("3", "ctrl+s")
        press_at_once(app, "ctrl+u", *"0.25", "\r")
        await until(app, pilot, lambda: len(app.screen_stack) == 1)
        await pilot.press("ctrl+s")
        assert app.screen.query_one("#field-temperature", Input).value == "0.25"

    driven(ScriptedNode(), drive)


def test_the_settings_show_a_cap_that_was_changed_in_its_dialog() -> None:
    """They showed the old value until `r` was pressed, though the node already used the new one."""
    node = ScriptedNode()

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("6")
        await until(app, pilot, lambda: f" {7 * GB} " in text_of_screen(app))
        await pilot.press("1", "minus")
        await until(app, pilot, lambda: "6.5 of 12.0 GB" in text_of_screen(app))
        await pilot.press("enter")
        await until(app, pilot, lambda: node.config["max_vram"] == str(13 * GB // 2))
        note = {"number": 9, "at_ms": 1_700_000_900_000, "kind": "setting", "text": "the setting max_vram was changed"}
        app.store.note(note)
        await pilot.press("6")
        await until(app, pilot, lambda: f" {13 * GB // 2} " in text_of_screen(app))
        node.config["max_vram"] = 5 * GB  # by a command, while the settings are shown
        app.store.note({**note, "number": 10})
        await settle(app, pilot)
        await until(app, pilot, lambda: f" {5 * GB} " in text_of_screen(app))

    driven(node, drive)


@pytest.mark.parametrize(("tab", "field"), [("2", "#filter"), ("5", "#search"), ("6", "#filter")])
def test_esc_clears_a_kept_filter(tab: str, field: str) -> None:
    """Esc did nothing after enter: the list stayed filtered."""

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press(tab)
        if tab == "6":
            await until(app, pilot, lambda: "settings  3" in text_of_screen(app))
        await pilot.press("slash", *"pause", "enter")
        found = app.screen.query_one(field, Input)
        assert (found.value, found.display, found.has_focus) == ("pause", True, False)
        await pilot.press("escape")
        assert (found.value, found.display) == ("", False)

    driven(ScriptedNode(), drive)


def test_a_setting_that_was_not_changed_is_not_written() -> None:
    """Enter in an empty field saved an empty value, and the setting counted as changed."""
    node = ScriptedNode()

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        written: list[str] = []
        node.set_config = lambda name, value: written.append(name)  # type: ignore[method-assign]
        await pilot.press("6")
        await until(app, pilot, lambda: "settings  3" in text_of_screen(app))
        await pilot.press("enter")
        await until(app, pilot, lambda: "⏎ save" in text_of_screen(app))
        await pilot.press("enter")
        await until(app, pilot, lambda: "⏎ edit" in text_of_screen(app))
        assert (written, app.said) == ([], [])

    driven(node, drive)


def test_the_reason_why_a_value_is_refused_is_shown_whole_in_a_small_window() -> None:
    """Its second line, which says what to write, was cut off."""

    class Strict(ScriptedNode):
        def get(self, path: str, *, timeout_s: float | None = None) -> Any:
            answer = super().get(path, timeout_s=timeout_s)
            return [{**entry, "help": "Peers never spoken with. " * 5} for entry in answer]

        def set_config(self, name: str, value: str | None) -> Any:
            raise AppError(f"the setting {name} cannot be {value!r}: {'it is no network, ' * 3}write it as 10.0.0.0/8")

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("6")
        await until(app, pilot, lambda: "settings  3" in text_of_screen(app))
        await pilot.press("enter", *"x", "enter")
        await until(app, pilot, lambda: "the setting deny cannot be" in text_of_screen(app))
        assert "write it as 10.0.0.0/8" in " ".join(text_of_screen(app).split())

    driven(Strict(), drive, size=(80, 24))


def test_a_reset_setting_says_what_it_was() -> None:
    node = ScriptedNode()

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("6")
        await until(app, pilot, lambda: "settings  3" in text_of_screen(app))
        await pilot.press("x")
        await until(app, pilot, lambda: app.said)
        assert app.said == ["deny is back at its default; it was 10.0.0.0/8"]

    driven(node, drive)


def test_the_parting_words_name_a_command_that_the_shell_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    own = tmp_path / ".venv" / "bin" / "shoal"
    monkeypatch.setattr(sys, "executable", str(own.with_name("python")))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "`shoal stop` ends it" in keeps_running()  # it has no such file: what else could be said
    own.touch()
    assert f"`{own} stop` ends it, `{own}` shows it again" in keeps_running()
    monkeypatch.chdir(tmp_path)
    assert f"`{Path('.venv/bin/shoal')} stop` ends it" in keeps_running()
    (tmp_path / "shoal").touch(0o755)
    assert "`shoal stop` ends it" in keeps_running()


@pytest.mark.parametrize("key", ["q", "ctrl+q"])
@pytest.mark.parametrize(("kind", "message"), [("live", keeps_running()), ("away", None)])
def test_the_terminal_says_afterwards_that_the_node_keeps_running(kind: Any, message: str | None, key: str) -> None:
    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        app.store.connected(ConnectionState(kind))
        await pilot.press(key)
        assert app._exit_renderables == ([message] if message else [])

    driven(ScriptedNode(), drive)


def test_keys_after_the_one_that_leaves_do_nothing() -> None:
    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        app.store.connected(ConnectionState("live"))
        press_at_once(app, "q", "i", "q", "d", "ctrl+q")
        await until(app, pilot, lambda: not app.is_running or app._exit)
        app.action_leave()  # as SIGTERM does
        assert app._exit_renderables == [keeps_running()]  # Textual calls a second one an error

    driven(ScriptedNode(), drive)


def test_ctrl_c_says_how_to_leave() -> None:
    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("3", "ctrl+c")
        assert app.said == ["^q leaves the dashboard; the node keeps running"]

    driven(ScriptedNode(), drive, size=(80, 24))


def test_the_first_run_says_which_pauses_this_machine_cannot_make() -> None:
    rules = (RuleView("pause_battery", "on battery", True, available=False, text="no battery found"),)
    state = FirstState(step=1, pauses={"pause_on_battery": True, "pause_busy": True})
    rows = first_rows(state, replace(EMPTY, courtesy=CourtesyView(rules=rules)), 80, 24)
    lines = [text_of(line).rstrip() for line in rows]
    assert any(line.endswith("■ on battery · without effect: no battery found") for line in lines)
    assert any(line.endswith("■ another program uses the device") for line in lines)


def test_the_first_run_does_not_promise_pauses_that_this_machine_cannot_make() -> None:
    """Sensors are only asked for rules that are on: of the others it is known after the second step."""
    names = ("pause_battery", "pause_heat", "pause_active", "pause_full_screen")
    rules = tuple(RuleView(name, name, True, available=False, text="no sensor") for name in names)
    state = FirstState(step=2, pauses={name: True for name, _, _, _ in PAUSES}, memory_bytes=7 * GB)
    rows = first_rows(state, replace(EMPTY, courtesy=CourtesyView(rules=rules)), 80, 24)
    shown = " ".join(" ".join(map(text_of, rows)).split())
    assert "✓ 2 7.0 GB · pauses: another program uses the device · without effect here: on battery, above 83" in shown
    assert "a program fills the screen, like a game" in shown


# --- the first run ---------------------------------------------------------------------------------------------------


def test_a_swarm_found_meanwhile_takes_no_other_choices_key() -> None:
    node = ScriptedNode()

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        app.store.take(EMPTY)
        first = FirstRun(app.store)
        await app.push_screen(first)
        await until(app, pilot, lambda: "Begin with the small starter model" in text_of_screen(app))
        assert "about 25 tok/s" in text_of_screen(app)
        node.prospects = ProspectsView((STARTER, NEAR), None, 9 * GB, 14.0 * GB)
        await until(app, pilot, lambda: "Join pond#1a2b3c4d1a2b3c4d1a2b" in text_of_screen(app))
        assert "found on this network" in text_of_screen(app)
        await pilot.press("1")
        assert (first.state.step, first.state.where) == (1, "pond#1a2b3c4d1a2b3c4d1a2b")
        await pilot.press("escape", "enter")
        assert (first.state.step, first.state.create) == (1, ("home", "starter"))
        await pilot.press("escape", "1", "enter")
        await until(app, pilot, lambda: first.state.step == 2)
        assert node.asked == ["/control/join pond#1a2b3c4d1a2b3c4d1a2b"]

    driven(node, drive)


def test_the_first_run_is_over_when_another_terminal_has_joined_a_swarm() -> None:
    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        clock = cast(Clock, app.store.now)
        app.store.take(EMPTY)
        first = FirstRun(app.store)
        await app.push_screen(first)
        await until(app, pilot, lambda: "Begin with the small starter model" in text_of_screen(app))
        await pilot.press("j")
        await until(app, pilot, lambda: isinstance(app.screen, TextDialog))
        app.store.take(HEALTHY)
        app.show_now()
        clock.at += ELSEWHERE_S
        app.show_now()
        assert app.screen is not first
        assert first.is_attached  # a name that is being typed is not taken away
        await pilot.press("escape")
        await until(app, pilot, lambda: not isinstance(app.screen, TextDialog))
        app.show_now()
        await until(app, pilot, lambda: not first.is_attached)

    driven(ScriptedNode(), drive)


def test_the_first_run_stays_while_it_enters_a_swarm_and_after_that_failed() -> None:
    node = ScriptedNode()
    node.dead = {NEAR.target}
    node.prospects = ProspectsView((NEAR,), None, 9 * GB, 14.0 * GB)

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        clock = cast(Clock, app.store.now)
        app.store.take(EMPTY)
        first = FirstRun(app.store)
        await app.push_screen(first)
        await until(app, pilot, lambda: "Join pond#1a2b3c4d1a2b3c4d1a2b" in text_of_screen(app))
        first.state.step, first.state.busy = 1, "joining pond"
        app.store.take(replace(EMPTY, swarm="pond", manifest="1a2b3c4d" * 8))
        for _ in range(3):
            app.show_now()
            clock.at += ELSEWHERE_S
        first._enter_failed("no member answers")
        app.show_now()  # its swarm is still that of the last snapshot
        app.store.take(EMPTY)
        app.show_now()
        clock.at += ELSEWHERE_S
        app.store.take(replace(EMPTY, swarm="lake", manifest="5e6f7a8b" * 8))  # seen for the first time
        app.show_now()
        await settle(app, pilot)
        assert first.is_attached
        assert "no member answers" in text_of_screen(app)

    driven(node, drive)


def test_of_a_pasted_text_a_field_takes_all_lines() -> None:
    node = ScriptedNode()

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        first = FirstRun(app.store)
        await app.push_screen(first)
        await pilot.press("j")
        await until(app, pilot, lambda: isinstance(app.screen, TextDialog))
        app.screen.query_one(Input).post_message(events.Paste("> shoal:go\n> od"))
        await until(app, pilot, lambda: app.screen.query_one(Input).value == "> shoal:go > od")
        await pilot.press("enter")
        await until(app, pilot, lambda: first.state.step == 1)
        assert first.state.target == "> shoal:go > od"

    driven(node, drive)


def test_esc_after_the_swarm_is_created_leads_to_the_dashboard() -> None:
    """It led back to the second step, where ⏎ created the same swarm again and failed."""
    node = ScriptedNode()

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        app.store.take(EMPTY)
        first = FirstRun(app.store)
        await app.push_screen(first)
        await until(app, pilot, lambda: "Begin with the small starter model" in text_of_screen(app))
        await pilot.press("enter", "enter")
        await until(app, pilot, lambda: first.state.step == 2)
        await settle(app, pilot)
        assert "esc look around first" in text_of_screen(app)
        await pilot.press(*"why")
        await pilot.press("escape")
        await until(app, pilot, lambda: not first.is_attached)
        assert len(node.created) == 1
        await pilot.press("3")
        await until(app, pilot, lambda: app.current_mode == "chat")
        await settle(app, pilot)
        assert app.screen.query_one(AskBox).text == "why"  # what was typed is not lost
        await pilot.press("1", *["backspace"] * 4)
        await pilot.press("ctrl+o", "1")
        await until(app, pilot, lambda: app.current_mode == "overview")
        await pilot.press("3")
        await until(app, pilot, lambda: app.current_mode == "chat")
        assert app.screen.query_one(AskBox).text == ""

    driven(node, drive, size=(80, 24))


def test_what_was_typed_in_a_first_run_over_the_chat_waits_there() -> None:
    """It was lost until another tab was visited."""
    node = ScriptedNode()

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("3")
        await until(app, pilot, lambda: app.current_mode == "chat")
        first = FirstRun(app.store)
        await app.push_screen(first)
        await until(app, pilot, lambda: "Begin with the small starter model" in text_of_screen(app))
        await pilot.press("enter", "enter")
        await until(app, pilot, lambda: first.state.step == 2)
        await pilot.press(*"why", "escape")
        await until(app, pilot, lambda: not first.is_attached)
        await until(app, pilot, lambda: app.screen.query_one(AskBox).text == "why")

    driven(node, drive, size=(80, 24))


def test_a_long_problem_of_the_first_run_is_read_to_its_end() -> None:
    problem = "this node is already a member of home#1a2b3c4d1a2b3c4d1a2b: leave it first, or choose another name"
    state = FirstState(problem=problem)
    state.take(ProspectsView((STARTER, NEAR), None, 9 * GB, 14.0 * GB))
    rows = first_rows(state, EMPTY, 80, 24)
    assert problem in " ".join(" ".join(map(text_of, rows)).split())
    assert len(rows) <= 24
    assert "q quit" in text_of(rows[-1])


def test_the_first_run_asks_before_it_uses_the_public_directory() -> None:
    node = ScriptedNode()
    node.config["discovery"] = ["mdns", "dht"]

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        app.store.take(EMPTY)
        first = FirstRun(app.store)
        await app.push_screen(first)
        await until(app, pilot, lambda: "Begin with the small starter model" in text_of_screen(app))
        await until(app, pilot, lambda: first.state.public is False)
        await pilot.press("enter", "up")
        assert "public libp2p directory" in text_of_screen(app)
        await pilot.press("space", "enter")
        await until(app, pilot, lambda: first.state.step == 2)
        assert node.config["discovery"] == "mdns,dht,public"

    driven(node, drive)


def test_the_first_run_says_that_its_node_has_ended_and_starts_it_again() -> None:
    node = ScriptedNode()

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        first = FirstRun(app.store)
        await app.push_screen(first)
        first.state.step = 2
        app.store.connected(ConnectionState("away", "the node was killed (signal 9)", next_step=START_AGAIN))
        await settle(app, pilot)
        assert "× the node was killed (signal 9) · press F5 to start it" in text_of_screen(app)
        assert "the node is starting" not in text_of_screen(app)
        app._follower = Follower(cast(Any, app.door), lambda heard: None)
        await pilot.press("f5")
        assert cast(ScriptedDoor, app.door).started == 1

    driven(node, drive)


def test_a_node_that_cannot_look_around_still_begins() -> None:
    node = ScriptedNode()
    node.prospects = AppError("the device is broken")

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        first = FirstRun(app.store)
        await app.push_screen(first)
        await until(app, pilot, lambda: "the device is broken" in text_of_screen(app))
        await pilot.press("enter")
        assert first.state.create == ("home", "starter")

    driven(node, drive)


def test_a_bad_invite_is_told_where_it_was_pasted_and_gets_no_tick() -> None:
    node = ScriptedNode()

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        first = FirstRun(app.store)
        await app.push_screen(first)
        first.post_message(events.Paste("shoal:notaninvite"))
        await until(app, pilot, lambda: "the invite is mistyped" in text_of_screen(app))
        assert first.state.step == 0
        assert "✓ 1" not in text_of_screen(app)
        first.post_message(events.Paste("shoal:good"))
        await until(app, pilot, lambda: first.state.step == 1)
        assert "✓ 1  reef#1a2b3c4d1a2b3c4d1a2b · Llama-8B · 16 GB · 3 members" in text_of_screen(app)
        assert node.asked == []  # nothing is joined yet
        await pilot.press("enter")
        await until(app, pilot, lambda: first.state.step == 2)
        assert node.asked == ["/control/join shoal:good"]

    driven(node, drive)


@pytest.mark.parametrize("last", ["", "\r"])
def test_an_invite_that_the_terminal_pastes_as_keys_is_no_row_of_commands(last: str) -> None:
    node = ScriptedNode()

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        first = FirstRun(app.store)
        await app.push_screen(first)
        press_at_once(app, *"shoal:cqjl2", *last)
        await until(app, pilot, lambda: first.state.step == 1)
        assert (first.state.target, node.asked, app.screen) == ("shoal:cqjl2", [], first)
        await pilot.press("escape", "s", "l")  # no invite
        await until(app, pilot, lambda: app.screen is not first)

    driven(node, drive)


def test_a_swarm_is_created_from_a_listed_model_under_a_checked_name() -> None:
    node = ScriptedNode()

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        first = FirstRun(app.store)
        await app.push_screen(first)
        await pilot.press("c")
        await until(app, pilot, lambda: "8 of 32 blocks fit: needs 3" in text_of_screen(app))
        assert "more machines like this one" in text_of_screen(app)
        assert "context 8 192 tokens" in text_of_screen(app)
        await pilot.press("enter")
        await until(app, pilot, lambda: "Name the swarm" in text_of_screen(app))
        await pilot.press(*["backspace"] * 4, "enter")
        await until(app, pilot, lambda: "type something" in text_of_screen(app))
        await pilot.press(*"Bad Name", "enter")
        await until(app, pilot, lambda: "no such thing" in text_of_screen(app))
        await pilot.press(*["backspace"] * 8, *"pond", "enter")
        await until(app, pilot, lambda: first.state.create == ("pond", "/m/llama.gguf"))

    driven(node, drive)


@pytest.mark.parametrize("is_private", [False, True])
def test_the_first_run_creates_a_private_swarm_if_asked_to(is_private: bool) -> None:
    node = ScriptedNode()

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        app.store.take(EMPTY)
        first = FirstRun(app.store)
        await app.push_screen(first)
        await until(app, pilot, lambda: "Begin with the small starter model" in text_of_screen(app))
        await until(app, pilot, lambda: first.state.pauses)
        await pilot.press("enter", "up", *["space"] * is_private)
        assert f"members  {'■' if is_private else '□'} only those whom you invite" in text_of_screen(app)
        await pilot.press("enter")
        await until(app, pilot, lambda: first.state.step == 2)
        assert [body["private"] for body in node.created] == [is_private]
        assert ("home, a private swarm of" in text_of_screen(app)) == is_private

    driven(node, drive, size=(80, 24))


def test_whoever_creates_a_swarm_says_who_may_join() -> None:
    node = ScriptedNode()

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        app.store.take(EMPTY)
        await pilot.press("c")
        await until(app, pilot, lambda: "context 8 192 tokens" in text_of_screen(app))
        await pilot.press("enter")
        await until(app, pilot, lambda: "Name the swarm" in text_of_screen(app))
        await pilot.press("enter")
        await until(app, pilot, lambda: "only those whom you invite" in text_of_screen(app))
        await pilot.press("down", "enter")
        await until(app, pilot, lambda: node.created)
        assert node.created == [{"name": "home", "model": "/m/llama.gguf", "private": True}]

    driven(node, drive)


def test_the_second_step_of_the_first_run_fits_into_a_small_window() -> None:
    state = FirstState(step=1, create=("home", "starter"), pauses={name: True for name, _, _, _ in PAUSES}, public=True)
    state.prospects = ProspectsView((STARTER,), DeviceView("cpu", "CPU", 16 * GB, 9 * GB), 9 * GB)
    state.memory_bytes = 7 * GB
    rows = first_rows(state, EMPTY, 80, 24)
    assert len(rows) <= 24
    assert "q quit" in text_of(rows[-1])


@pytest.mark.parametrize("is_by_mouse", [False, True])
def test_models_of_a_folder_and_of_the_hub_are_listed(is_by_mouse: bool) -> None:
    node = ScriptedNode()

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        app.store.take(EMPTY)
        await pilot.press("c")
        await until(app, pilot, lambda: "llama" in text_of_screen(app))
        await pilot.press(*"/big")
        await until(app, pilot, lambda: "⏎ lists this folder" in text_of_screen(app))
        assert "Hugging Face" not in text_of_screen(app)  # it offered to search the Hub for a path
        await pilot.press("enter")
        await until(app, pilot, lambda: "/control/models?folder=/big" in node.asked)
        await pilot.press(*["backspace"] * 4, *"qwen")
        await until(app, pilot, lambda: "search the Hugging Face Hub for “qwen”" in text_of_screen(app))
        await until(app, pilot, lambda: "lists this folder" not in text_of_screen(app))
        if is_by_mouse:
            await pilot.click("#found", offset=(2, 0))
        else:
            await pilot.press("enter")
        await until(app, pilot, lambda: "org/qwen" in text_of_screen(app))
        node.pulling.clear()
        await pilot.press("enter")
        await until(app, pilot, lambda: node.asked[-1] == "/control/pull org/qwen")
        step = StepView("fetch", "downloading the model", "running", "", 12 * 10**6, 93 * 10**6, 41.0)
        app.store.take(replace(EMPTY, preparing=step))
        await settle(app, pilot)
        assert "downloading the model: 12 MB of 93 MB · 41 s left" in text_of_screen(app)
        node.pulling.set()
        await until(app, pilot, lambda: "Name the swarm" in text_of_screen(app))

    driven(node, drive)


def test_a_search_of_the_hub_that_fails_gives_the_words_back() -> None:
    """The words were gone, and enter created a swarm of the model that was highlighted while the search ran."""

    class Offline(ScriptedNode):
        def get(self, path: str, *, timeout_s: float | None = None) -> Any:
            if path.startswith("/control/models/search"):
                assert self.pulling.wait(20.0)
                raise AppError("the Hugging Face Hub could not be searched (no route): check the network")
            return super().get(path, timeout_s=timeout_s)

    node = Offline()
    node.pulling.clear()

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        app.store.take(EMPTY)
        await pilot.press("c")
        await until(app, pilot, lambda: "llama" in text_of_screen(app))
        await until(app, pilot, lambda: "context " in text_of_screen(app))
        await pilot.press(*"lla", "down")
        await until(app, pilot, lambda: "context " not in text_of_screen(app))  # it is of the model, not of the search
        await pilot.press("enter")
        await until(app, pilot, lambda: "searching the Hugging Face Hub for “lla”…" in text_of_screen(app))
        await until(app, pilot, lambda: "llama" not in text_of_screen(app))
        await pilot.press("enter")
        node.pulling.set()
        await until(app, pilot, lambda: "could not be searched (no route)" in text_of_screen(app))
        await until(app, pilot, lambda: "search the Hugging Face Hub for “lla”" in text_of_screen(app))
        assert "llama" in text_of_screen(app)
        assert "Name the swarm" not in text_of_screen(app)

    driven(node, drive)


def test_a_saved_swarm_is_gone_to_by_one_key() -> None:
    node = ScriptedNode()
    other = SwarmView("birds", "ff" * 32, "birds#ffffffffffffffffffff", private=True, joined_at_ms=1)

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("g")
        assert len(app.screen_stack) == 1  # there is no other
        app.store.take(replace(HEALTHY, swarms=(*HEALTHY.swarms, other)))
        await pilot.press("g")
        await until(app, pilot, lambda: "birds#ffffffffffffffffffff · private" in text_of_screen(app))
        assert text_of_screen(app).count("· you are here") == 1
        await pilot.press("enter")
        await until(app, pilot, lambda: node.asked == ["/control/join birds#ffffffffffffffffffff"])

    driven(node, drive)


def test_a_swarm_without_members_is_joined_after_a_second_question() -> None:
    node = ScriptedNode()
    other = SwarmView("birds", "ff" * 32, "birds#ffffffffffffffffffff", joined_at_ms=1)
    node.dead.add(other.pinned)

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        app.store.take(replace(HEALTHY, swarms=(*HEALTHY.swarms, other)))
        for answer, asked in (("escape", 1), ("enter", 3)):
            await pilot.press("g")
            await until(app, pilot, lambda: "birds#ffffffffffffffffffff" in text_of_screen(app))
            await pilot.press("enter")
            await until(app, pilot, lambda: "no member was found. This node stays in reef. Move" in text_of_screen(app))
            assert "--force" not in text_of_screen(app)
            await pilot.press(answer)
            await until(app, pilot, lambda asked=asked: len(node.asked) == asked)  # type: ignore[misc]
        assert set(node.asked) == {"/control/join birds#ffffffffffffffffffff"}

    driven(node, drive)


def test_whoever_goes_to_another_swarm_is_told_what_becomes_of_this_one() -> None:
    """`join` and `create` of the palette left a swarm whose only host this node was without a word."""
    node = ScriptedNode()
    alone = tuple(peer for peer in PEERS if peer.name not in ("puffin", "skua"))
    loss = ("node leaves reading-club", "36:46 have no other")

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        app.store.take(replace(HEALTHY, peers=alone, active_sessions=()))

        def told(*words: str) -> bool:
            return all(word in text_of_screen(app) for word in words)

        await pilot.press("ctrl+p", *"join a swarm")
        await until(app, pilot, lambda: told("By name or invite"))
        await pilot.press("enter")
        await until(app, pilot, lambda: told("A swarm's name, or an invite"))
        await pilot.press(*"reef", "enter")
        await until(app, pilot, lambda: told("Join reef#1a2b3c4d1a2b3c4d1a2b? Llama-8B · 16 GB · 3 members.", *loss))
        await pilot.press("escape")
        await until(app, pilot, lambda: len(app.screen_stack) == 1)
        await pilot.press("ctrl+p", *"create a")
        await until(app, pilot, lambda: told("From a model on"))
        await pilot.press("enter")
        await until(app, pilot, lambda: told("context 8 192 tokens"))
        await pilot.press("enter")
        await until(app, pilot, lambda: told("Name the swarm"))
        await pilot.press("enter")
        await until(app, pilot, lambda: told("only those whom you invite"))
        await pilot.press("enter")
        await until(app, pilot, lambda: told("Create home?", *loss))
        assert node.created == []
        await pilot.press("enter")
        await until(app, pilot, lambda: node.created)

    driven(node, drive)


def test_whoever_has_to_be_let_in_first_can_wait_there() -> None:
    """A passing note said to run the same command again, and the dashboard stayed where it was for good."""

    class Guarded(ScriptedNode):
        def post(self, path: str, body: dict[str, Any], *, timeout_s: float = 1.0) -> Any:
            answer = super().post(path, body, timeout_s=timeout_s)
            if path == "/control/join" and not body.get("force"):
                text = "birds: ann has to let this node in first. This node stays in reef; run the same command again"
                raise AppError(text, code="approval_pending")
            return answer

    node = Guarded()
    other = SwarmView("birds", "ff" * 32, "birds#ffffffffffffffffffff", joined_at_ms=1)

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        app.store.take(replace(HEALTHY, swarms=(*HEALTHY.swarms, other)))
        await pilot.press("g")
        await until(app, pilot, lambda: "birds#ffffffffffffffffffff" in text_of_screen(app))
        await pilot.press("enter")
        await until(app, pilot, lambda: "wait there until you are let in?" in text_of_screen(app))
        assert "has to let this node in first. This node stays in reef." in text_of_screen(app)
        assert "the same command" not in text_of_screen(app)
        await pilot.press("enter")
        await until(app, pilot, lambda: app.said[-1:] == ["birds#ffffffffffffffffffff: joining"])
        assert node.asked == ["/control/join birds#ffffffffffffffffffff"] * 2

    driven(node, drive)


@pytest.mark.parametrize("tab", ["2", "5", "6"])
def test_a_filter_says_which_keys_keep_and_clear_it(tab: str) -> None:
    """The footer had only the key of the palette and the jump while one typed."""

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press(tab, "slash", *"pau")
        await until(app, pilot, lambda: "⏎ keep  esc clear" in text_of_screen(app).splitlines()[-1])
        await pilot.press("escape")
        await until(app, pilot, lambda: "/ f" in text_of_screen(app).splitlines()[-1])  # find, filter
        assert app.screen.query_one(FilterField).value == ""

    driven(ScriptedNode(), drive, size=(80, 24))


def test_the_first_run_proposes_memory_with_headroom() -> None:
    node = ScriptedNode()
    node.config["max_vram"] = None
    node.prospects = ProspectsView((STARTER,), DeviceView("cuda:0", "", 12 * GB, 10 * GB))

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        app.store.take(replace(EMPTY, hardware=None))
        first = FirstRun(app.store)
        await app.push_screen(first)
        await until(app, pilot, lambda: first.state.memory_bytes == 8 * GB)
        await pilot.press("enter")
        await until(app, pilot, lambda: "leaves you 2.0 of the 10.0 GB that are free" in text_of_screen(app))
        assert f"later in tab {TABS.index('settings') + 1}, settings" in text_of_screen(app)
        await pilot.press(*["left"] * 16)
        words = "hosts nothing: no replies until others join and host it"
        await until(app, pilot, lambda: words in text_of_screen(app))

    driven(node, drive)


def test_what_is_nearby_comes_first_and_later_finds_come_last() -> None:
    begin = ordered((), ProspectsView((STARTER, NEAR)))
    assert begin == (NEAR.target, "starter")
    assert ordered(begin, ProspectsView((STARTER, replace(NEAR, target="lake#2"), NEAR))) == (*begin, "lake#2")


@pytest.mark.parametrize(
    ("offer", "words"),
    [
        (NEAR, ["found on this network", "2 members · about 40 tok/s for you", "at most 5 B to fetch · fits now"]),
        (replace(NEAR, tokens_per_s=None, missing_block=3), ["block 3 has no holder yet"]),
        (OfferView("far#9", nearby="direct"), ["found through a peer", "not known yet", "— to fetch · fits —"]),
        (
            replace(NEAR, nearby="", alone_tokens_per_s=9.2),
            ["Go back to pond#1a2b3c4d1a2b3c4d1a2b", "alone about 9.2 tok/s"],
        ),
        (replace(NEAR, fit=FitView(2, 8, GB, True)), ["too large alone: 2 of 8 blocks fit"]),
    ],
)
def test_a_choice_says_all_that_is_known(offer: OfferView, words: list[str]) -> None:
    told = "\n".join(text_of(line) for line in choice_rows(1, offer, 70))
    assert all(word in told for word in words), told


# --- guests, keys ----------------------------------------------------------------------------------------------------


def test_guests_are_followed_from_their_knock_to_their_end() -> None:
    old, new = PEERS[0], PeerView("12D3KooWguest1", "guest")
    base = replace(HEALTHY, peers=(old,), network=NetworkView(strangers=("12D3KooWbystander",)))
    guests = GuestList(base)
    knocking = replace(base, network=NetworkView(strangers=("12D3KooWbystander", new.peer)))

    def told(known: Snapshot) -> list[str]:
        guests.look(known)
        return [text_of(line) for line in guests.rows(known)]

    def as_member(**fields: Any) -> list[str]:
        return told(replace(base, peers=(old, replace(new, **fields))))

    assert told(base) == []
    assert told(knocking) == ["◌ guest1 connecting"]
    assert told(base) == ["× guest1 failed: disconnected before it had joined"]
    assert as_member(state="joining") == ["◐ “guest” is choosing blocks"]
    assert as_member(state="fetching", start=4, stop=8, fetched=0.25) == ["◐ “guest” loading 4:8 25 %"]
    assert as_member(state="serving", start=4, stop=8, tokens_per_s=40.0) == ["● “guest” serving 4:8 · 40 tok/s"]
    silent = Reason("silent", "it does not answer any more")
    assert as_member(state="dead", unused=silent) == ["× “guest” failed: it does not answer any more"]
    assert told(base) == ["× “guest” failed: it does not answer any more"]


def test_a_guest_that_knocks_before_it_uses_its_invite_is_no_failure() -> None:
    """mDNS shows a guest this node before it has the secret; "invite it again" stood here, of a good invite."""

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("i")
        await until(app, pilot, lambda: "New ones appear here" in text_of_screen(app))
        text = "turned away a node outside the swarm: it has used no invite yet"
        app.store.note({"number": 1, "at_ms": 1 << 41, "kind": "knock", "text": text})
        await settle(app, pilot)
        await until(app, pilot, lambda: f"│  · {text}" in text_of_screen(app))
        guest = PeerView("12D3KooWguest1", "ann", state="joining")
        app.store.take(replace(HEALTHY, peers=(*HEALTHY.peers, guest)))
        await settle(app, pilot)
        await until(app, pilot, lambda: "◐ “ann” is choosing blocks" in text_of_screen(app))
        assert "│  · turned away" not in text_of_screen(app)

    driven(ScriptedNode(), drive, size=(80, 24))


def test_a_peer_that_asks_to_join_is_let_in_by_a_key() -> None:
    node = ScriptedNode()

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("i")
        await until(app, pilot, lambda: "One node can join with it" in text_of_screen(app))
        await pilot.press("a", "x")  # nobody asks: nothing is decided
        assert "let in" not in text_of_screen(app)
        await pilot.press("o")
        await until(app, pilot, lambda: "You are asked first" in text_of_screen(app))
        app.store.take(replace(HEALTHY, requests=(GuestView("12D3KooWxyGuest", "ann\x1b[2J"),)))
        await settle(app, pilot)
        await until(app, pilot, lambda: "“ann[2J” (yGuest) asks to join" in text_of_screen(app))
        await pilot.press("a")
        await until(app, pilot, lambda: len(node.asked) == 4)
        await pilot.press("x")
        await until(app, pilot, lambda: len(node.asked) == 5)
        assert node.asked == [
            "/control/invite",
            "/control/invites/cancel",
            "/control/invite",
            "/control/invites/approve 12D3KooWxyGuest",
            "/control/invites/refuse 12D3KooWxyGuest",
        ]

    driven(node, drive)


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (160, 48)])
def test_the_keys_of_an_invite_are_in_view(size: tuple[int, int]) -> None:
    """At 120x40 the QR code pushed them out of the window."""

    class Inviting(ScriptedNode):
        def post(self, path: str, body: dict[str, Any], *, timeout_s: float = 1.0) -> Any:
            answer = super().post(path, body, timeout_s=timeout_s)
            more = {"invite": "shoal:" + "a2b3" * 42, "only_here": True}
            return {**answer, **more} if path == "/control/invite" else answer

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("i")
        await until(app, pilot, lambda: "a2b3" in text_of_screen(app))
        assert "Only nodes on this machine" in " ".join(text_of_screen(app).replace("│", " ").split())
        await until(app, pilot, lambda: "y copy" in text_of_screen(app) and "esc close" in text_of_screen(app))
        known = app.store.snapshot
        assert known is not None
        assert nobody_new(known) in text_of_screen(app)  # who joined before the dialog was opened is counted

    driven(Inviting(), drive, size=size)


def test_a_copied_invite_can_be_had_where_the_terminal_has_no_clipboard() -> None:
    """A terminal that ignores the sequence says nothing: "the invite is in the clipboard" was not known to be true."""

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("i")
        await until(app, pilot, lambda: "shoal:a2b3" in text_of_screen(app))
        await pilot.press("y")
        assert app.clipboard == "shoal:a2b3"
        assert app.said == ["copied the invite; if it cannot be pasted, `shoal invite` prints one"]

    driven(ScriptedNode(), drive)


def test_an_invite_that_nobody_has_used_is_shown_again() -> None:
    """Each time that the dialog was opened, one more invite was left open."""

    class Inviting(ScriptedNode):
        used = False

        def get(self, path: str, *, timeout_s: float | None = None) -> Any:
            if path == "/control/invites":
                state = "used" if self.used else "open"
                return [{"id": "1a2b3c4d", "state": state, "admitted": [], "waiting": []}]
            return super().get(path, timeout_s=timeout_s)

    node = Inviting()

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        async def opened() -> None:
            await pilot.press("i")
            await until(app, pilot, lambda: "One node can join with it" in text_of_screen(app))
            await pilot.press("escape")
            await until(app, pilot, lambda: len(app.screen_stack) == 1)

        await opened()
        await opened()
        assert node.asked == ["/control/invite"]
        node.used = True
        await opened()
        assert len(node.asked) == 2
        node.used = False
        app.store.take(replace(HEALTHY, listen_addrs=("/ip4/192.0.2.7/tcp/7464",)))  # the old line leads elsewhere
        await opened()
        assert len(node.asked) == 3

    driven(node, drive)


def test_the_code_of_an_invite_appears_once_the_window_is_large_enough() -> None:
    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        await pilot.press("i")
        await until(app, pilot, lambda: "The QR code needs a window of" in text_of_screen(app))
        await pilot.resize_terminal(120, 40)
        await until(app, pilot, lambda: "█▀▀▀▀▀█" in text_of_screen(app))
        assert "The QR code needs" not in text_of_screen(app)

    driven(ScriptedNode(), drive, size=(80, 20))


def test_an_invite_without_arrivals_says_who_is_there_already() -> None:
    """It said that nobody had joined with it, also when it was opened again after somebody had."""
    known = replace(HEALTHY, peers=PEERS[:2])
    assert nobody_new(known) == "2 other members now. New ones appear here."
    gone = tuple(replace(peer, state=state) for peer, state in zip(known.peers, ("dead", "left"), strict=True))
    assert nobody_new(replace(known, peers=gone)) == "No other member yet. New ones appear here."


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"private": False}, "Send this line to whoever should join."),
        ({"private": True, "limits": None}, "Whoever has this line has the swarm's secret, for good"),
        ({"limits": {"uses": 3, "expires_at_ms": 3_600_000, "approve": False}}, "3 nodes can join with it, within 1 h"),
    ],
)
def test_an_invite_says_what_it_allows(answer: dict[str, Any], words: str) -> None:
    assert invite_words(answer, 0).startswith(words)


def test_keys_that_are_needed_least_give_way_in_a_narrow_window() -> None:
    keys = [
        FooterKey(word[0], word[0], word)
        for word in ("stop", "pause", "invite", "why", "zoom", "jump", "help", "leave")
    ]
    assert [key.words for key in fitting(keys, 200)] == [key.words for key in keys]
    assert [key.words for key in fitting(keys, 42)] == ["stop", "pause", "invite", "help", "leave"]
    assert [key.words for key in fitting(keys, 8)] == ["stop"]


def test_a_peer_that_takes_other_names_does_not_have_all_events_drawn_anew_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a full log that took half of a core."""

    async def drive(app: DrivenDashboard, pilot: Pilot[None]) -> None:
        peer, clock = "12D3KooW" + "a" * 44, cast(Clock, app.store.now)
        app.store.note({"number": 99, "at_ms": 0, "kind": "peer", "text": f"{peer} joined"})
        panel = app.screen.query_one(EventsPanel)
        panel.show()
        drawn: list[list[Row]] = []
        lines = panel.lines

        def counted() -> list[Row]:
            drawn.append(lines())
            return drawn[-1]

        monkeypatch.setattr(panel, "lines", counted)

        def take_name(number: int) -> str:
            app.store.take(replace(HEALTHY, peers=(*PEERS, replace(PEERS[0], peer=peer, name=f"name {number}"))))
            panel.show()
            return text_of(panel._lines[-1])

        assert "“name 1” joined" in take_name(1), "it was not known when it joined"
        for number in range(2, 20):
            take_name(number)
        assert len(drawn) == 1
        clock.at += 5
        assert "“name 20” joined" in take_name(20)

    driven(ScriptedNode(), drive)
