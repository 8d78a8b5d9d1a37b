"""What the drawing functions say of values that are missing, hostile or at an edge."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.reasons import because
from app.core.terminal_text import one_line
from app.snapshot.views import (
    CourtesyView,
    DeviceView,
    GuestView,
    HopView,
    PeerView,
    RouteView,
    RuleView,
    SessionView,
    Snapshot,
    StepView,
    WeightsView,
)
from tests.ui.fixed import EMPTY, HEALTHY, HOLE, ME, PEERS, ROUTE, five_hundred
from ui.draw.bars import area, bar, ceiling, resample, spark
from ui.draw.coverage import strip_rows, weak_sentence
from ui.draw.events import happening_row
from ui.draw.first_run import FirstState, first_rows
from ui.draw.node import courtesy_rows, gauge_rows, given_rows, session_rows, step_rows
from ui.draw.numbers import clock, duration, gigabytes, known_rate, many, milliseconds, rate, size
from ui.draw.peers import SORTS, arranged, columns_for, look_of, peer_row, table_peers
from ui.draw.route import route_rows, sentence, shares_of, title_row, token_seconds, waterfall
from ui.draw.rows import cell, fit, shorten, text_of, width_of, wrap
from ui.draw.state_line import pill, state_row
from ui.screens.invite import qr_rows
from ui.screens.logs import log_rows
from ui.screens.settings import SettingView, value_text
from ui.state.coverage import coverage_of
from ui.state.store import ConnectionState, Event, LogRow

ALPHA = "12D3KooWKwNSFgUouenxnFKbXckmqFNGRzDAwHkN98ZXXbCaimSF"
NAMES = {peer.peer: peer.name for peer in PEERS}


def name_of(peer: str) -> str:
    return "you" if peer == ME else NAMES.get(peer, peer)


# --- figures and rows ------------------------------------------------------------------------------------------------


def test_what_is_not_known_is_a_dash() -> None:
    unknown = [rate(None), known_rate(0.0), many(None), gigabytes(None), size(None), milliseconds(None), clock(None)]
    assert {*unknown, duration(None)} == {"—"}


def test_figures_are_short() -> None:
    assert [rate(4.51), rate(43.2), rate(1204.0)] == ["4.5", "43", "1 204"]
    assert [size(98 * 10**6), size(5_500_000_000), size(12)] == ["98 MB", "5.5 GB", "12 B"]
    assert [milliseconds(0.0004), milliseconds(0.009), milliseconds(0.224)] == ["0.4", "9", "224"]
    assert [duration(7 * 86_400), duration(7200), duration(86_400 * 3 + 7200)] == ["7 d", "2 h", "3 d 2 h"]
    assert [clock(19), clock(662), duration(17_460), duration(41.2)] == ["0:19", "11:02", "4 h 51 m", "41 s"]


@given(st.text(), st.integers(0, 40))
def test_a_cell_has_its_width_whatever_is_written(text: str, width: int) -> None:
    assert width_of([(cell(one_line(text), width), "")]) == width


@given(st.lists(st.text(max_size=20), max_size=6), st.integers(0, 40))
def test_a_fitted_row_is_never_too_wide(texts: list[str], width: int) -> None:
    assert width_of(fit([(one_line(text), "") for text in texts], width)) <= width


@given(st.text())
def test_nothing_commands_the_terminal(text: str) -> None:
    assert all(character.isprintable() for character in one_line(text))


def test_cut_text_says_so() -> None:
    assert (shorten("reading-club", 6), shorten("読書会", 5)) == ("readi…", "読書…")
    assert [text_of(line) for line in wrap("one two three", 7)] == ["one two", "three"]


def test_bars_and_areas_keep_their_size() -> None:
    assert text_of(bar(0.5, 8, "mine")) == "████    "
    assert text_of(bar(None, 4, "mine")) == "    "
    assert [len(line) for line in area([None, 3.0, 9.0], 5, 2, 9.0)] == [5, 5]
    assert area([], 3, 1, 1.0) == ["   "]
    assert resample([1.0, None, 3.0, 5.0], 2) == [1.0, 4.0]
    assert (ceiling([28.0]), ceiling([None]), ceiling([0.02], 0.1)) == (30, 1, 0.1)
    assert spark([1.0, None, 8.0], 5) == "▁ █"


# --- coverage --------------------------------------------------------------------------------------------------------


def test_the_marks_of_two_halves_stand_side_by_side() -> None:
    """Where this node hosts half of a model that has one host for each block, the other mark was cut: `──we╰──`."""
    for theirs, own, marks in (
        ((0, 15), (15, 30), "╰─────weak────╯╰──you 15:30──╯"),
        ((0, 30), (10, 20), "╰──weak──╯╰──you───╯          "),
        ((0, 15), (0, 30), "╰──────────you 0:30──────────╯"),
    ):
        peer = replace(PEERS[0], start=theirs[0], stop=theirs[1], state="serving")
        cover = coverage_of(replace(HEALTHY, blocks_total=30, start=own[0], stop=own[1], peers=(peer,)))
        assert cover is not None
        assert text_of(strip_rows(cover, 30, gutter=False)[-1]) == marks


def test_the_weak_spot_is_the_stretch_with_the_fewest_holders() -> None:
    cover = coverage_of(HEALTHY)
    assert cover is not None
    assert cover.weak is not None
    assert (cover.weak.label, cover.weak.holders, cover.weak.names) == ("55:62", 1, ("“mako”",))
    assert cover.held == 80


def test_a_hole_is_named_and_never_averaged_away() -> None:
    cover = coverage_of(HOLE)
    assert cover is not None
    assert cover.holes == ((55, 62),)
    assert "55:62 without a holder" in text_of(weak_sentence(cover, 120))
    for width in (12, 20, 40, 80, 400):
        strip = [text_of(line) for line in strip_rows(cover, width, gutter=False)]
        assert "×" in strip[1], width
        assert "0" in strip[2], width
        assert {len(line) for line in strip} <= set(range(width + 1))


def test_claims_beyond_the_model_are_cut() -> None:
    liar = PeerView("p", "liar", 70, 10**9, state="serving", tokens_per_s=1.0)
    cover = coverage_of(replace(HEALTHY, peers=(liar,), start=None, stop=None))
    assert cover is not None
    assert sum(cover.holders) == 10


def test_only_those_that_serve_are_counted() -> None:
    peers = tuple(replace(peer, state="loading") for peer in PEERS)
    cover = coverage_of(replace(HEALTHY, peers=peers))
    assert cover is not None
    assert (cover.held, coverage_of(EMPTY), coverage_of(None)) == (12, None, None)


def test_a_small_model_gets_wider_blocks() -> None:
    small = replace(HEALTHY, blocks_total=8, start=2, stop=6, peers=())
    cover = coverage_of(small)
    assert cover is not None
    rows = [text_of(line) for line in strip_rows(cover, 60, gutter=False)]
    assert len(rows[1]) == 32
    assert rows[3] == "╰─hole─╯╰───you 2:6────╯╰─hole─╯"


# --- peers and routes ------------------------------------------------------------------------------------------------


def test_peers_are_sorted_and_found() -> None:
    peers = table_peers(HEALTHY, {})
    assert [peer.name for peer in arranged(peers, "span", "")[:3]] == ["petrel", "tern", "gannet"]
    assert [peer.name for peer in arranged(peers, "tok/s", "")[:2]] == ["tern", "heron"]
    assert [peer.name for peer in arranged(peers, "rtt", "")][-2:] == ["you", "dunlin"]
    assert [peer.name for peer in arranged(peers, "peer", "RELAY")] == ["mako"]
    assert all(len(arranged(peers, sort, "")) == 14 for sort in SORTS)


@pytest.mark.parametrize("width", [40, 78, 80, 120, 156, 300])
def test_a_peer_takes_one_row_of_any_width(width: int) -> None:
    columns = columns_for(width, [peer.name for peer in PEERS])
    look = look_of(HEALTHY, coverage_of(HEALTHY))
    widths = {width_of(peer_row(peer, columns, look, None)[:-1]) for peer in table_peers(HEALTHY, {})}
    assert len(widths) == 1  # every column begins at the same place


def test_a_name_that_fits_is_shown_with_both_of_its_quotes() -> None:
    peer = replace(PEERS[0], name="whimbrel-two")
    line = peer_row(peer, columns_for(156, [peer.name]), look_of(HEALTHY, None), None)
    assert "“whimbrel-two” " in text_of(line)


def test_the_route_says_where_the_time_goes() -> None:
    assert text_of(title_row(HEALTHY)) == "route  6 hops · 224 ms a token · 4.5 tok/s"
    said = text_of(sentence(ROUTE, name_of))
    assert said == "Relayed links take 79 of 224 ms. Without them: 6.9 tok/s at most."
    quick = RouteView("s", (HopView("me", 0, 8, None, 0.0, 0.012, 0.0),), 0.0, 0.0, 0.0098)
    assert text_of(sentence(quick, lambda peer: "you")) == "Your blocks take 12 of 12 ms."
    assert text_of(sentence(quick, lambda peer: "hL59")) == "hL59's blocks take 12 of 12 ms."  # names stay as they are
    slow = RouteView("s", (HopView("me", 0, 8, None, 0.0, 0.01, 0.0),), 0.0, 0.041, 0.192)
    assert text_of(sentence(slow, lambda peer: "you")) == ("Sampling takes 41 of 192 ms. 141 ms are not accounted for.")


def test_a_route_that_is_over_says_so() -> None:
    """After a hop had left or moved, the panel went on to show the old route as if it were the next one."""
    hop = ROUTE.hops[0]
    for change in ({"state": "dead"}, {"start": hop.start + 1}):
        peers = tuple(replace(peer, **change) if peer.peer == hop.peer else peer for peer in PEERS)
        assert text_of(title_row(replace(HEALTHY, peers=peers))).endswith("4.5 tok/s · the next reply takes another")


def test_the_parts_of_a_route_add_up_to_its_whole_time() -> None:
    unknown = RouteView("s", (HopView("me", 0, 30, None, 0.0),), 0.0, 0.057, 1.273, host_s=0.001)
    known = replace(unknown, hops=(HopView("me", 0, 30, None, 0.0, 1.2, 0.002, 0.003),))
    for route in (unknown, known, ROUTE, replace(ROUTE, token_s=0.001), replace(ROUTE, token_s=None)):
        total = token_seconds(route)
        assert total is not None
        assert sum(share.seconds for share in shares_of(route, name_of)) == pytest.approx(total)
        drawn, _ = waterfall(route, name_of, 60)
        assert width_of(drawn) == 60
    words = "Sampling takes 57 of 1273 ms. 1215 ms are not reported by the hops yet."
    assert text_of(sentence(unknown, lambda peer: "you")) == words
    assert text_of(sentence(known, lambda peer: "you")) == "Your blocks take 1200 of 1273 ms."
    mine = sum(text.count("█") for text, style in waterfall(unknown, lambda peer: "you", 60)[0])
    assert mine < 6, "what is not known is not drawn as this node's"


def test_a_route_of_which_nothing_was_measured_invents_nothing() -> None:
    bare = RouteView("s", (HopView(ME, 0, 4), HopView(PEERS[0].peer, 4, 8)))
    text = "\n".join(text_of(line) for line in route_rows(bare, name_of, 100, 8))
    assert "No token has been timed" in text
    assert not any(character.isdigit() for character in text.replace("0:4", "").replace("4:8", ""))
    title = text_of(title_row(replace(HEALTHY, route=bare)))
    assert title.startswith("route  2 hops · — ms a token · — tok/s")


def test_links_alone_are_no_speed() -> None:
    """While the prompt was still read, the time on the links was shown as a token's: 47 tok/s on the way to 2.6."""
    hops = (HopView(ME, 0, 4, None, 0.003), HopView(PEERS[0].peer, 4, 8, "lan", 0.018))
    linked = RouteView("s", hops, return_s=0.0005)
    assert token_seconds(linked) is None
    assert text_of(title_row(replace(HEALTHY, route=linked))).startswith("route  2 hops · — ms a token · — tok/s")
    rows = [text_of(line) for line in route_rows(linked, name_of, 100, 8)]
    assert "18" in rows[0]
    assert rows[-1] == "No token has been timed on this route yet."


# --- the node --------------------------------------------------------------------------------------------------------


def test_a_node_that_serves_in_vain_says_which_blocks_nobody_hosts() -> None:
    alone = replace(HEALTHY, peers=(), start=0, stop=29, blocks_total=30)
    live = ConnectionState("live")
    line = state_row(live, alone, 0.0, wide=False)
    assert text_of(line).endswith("· ▲ nobody hosts block 29: replies wait for a member that does")
    assert next(style for text, style in line if "serving 0:29" in text).endswith("on warning")
    assert "nobody hosts blocks 20:30" in text_of(state_row(live, replace(alone, stop=20), 0.0, wide=False))
    amid = state_row(live, replace(alone, start=7, stop=14), 0.0, wide=False)
    assert "nobody hosts blocks 0:7, 14:30: replies wait" in text_of(amid)
    whole = state_row(live, replace(alone, stop=30), 0.0, wide=False)
    assert "nobody" not in text_of(whole)
    assert next(style for text, style in whole if "serving 0:30" in text).endswith("on success")


def test_the_state_is_never_without_its_reason() -> None:
    for state in ("starting", "idle", "joining", "fetching", "loading", "serving", "client", "paused", "draining"):
        bare = Snapshot(ME, state, "", "")
        words, _ = pill(ConnectionState("live"), bare, 0.0)
        line = text_of(state_row(ConnectionState("live"), bare, 0.0, wide=True))
        assert len(line.replace(words, "").strip()) > 5, state


def test_a_warning_is_shown_whatever_the_state() -> None:
    wrong = because("wrong_secret", "mallory has another\x1b[2J swarm secret", "mallory")
    line = text_of(state_row(ConnectionState("live"), replace(HEALTHY, warnings=(wrong,)), 0.0, wide=False))
    assert "▲ mallory has another[2J swarm secret" in line
    assert "▲" not in text_of(state_row(ConnectionState("live"), HEALTHY, 0.0, wide=False))


def test_a_warning_names_a_peer_instead_of_its_id() -> None:
    """In a window of 80 columns the id took the place of what is wrong."""
    wrong = because("wrong_secret", f"{ALPHA} has another swarm secret", ALPHA)
    known = replace(HEALTHY, warnings=(wrong,))
    line = text_of(state_row(ConnectionState("live"), known, 0.0, wide=False, name_of={ALPHA: "alpha"}.__getitem__))
    assert "▲ alpha has another swarm secret" in line


def test_whoever_asks_to_join_is_let_in_by_a_key_of_the_dashboard() -> None:
    """The note named a command, and only the overview showed it."""
    note = Event(1, 0, "request", f"“ann” (CaimSF) asks to join: `shoal invites approve {ALPHA[-6:]}` lets it in")
    assert text_of(happening_row(note, str)).endswith(
        "“ann” (CaimSF) asks to join: i on the overview lets it in or refuses it"
    )
    known = replace(HEALTHY, requests=(GuestView(ALPHA, "ann"),))
    line = text_of(state_row(ConnectionState("live"), known, 0.0, wide=False))
    assert "“ann” (CaimSF) asks to join: i on the overview" in line


def test_the_speed_of_a_node_fits_into_a_narrow_panel() -> None:
    def speed(width: int, stop: int = 30) -> str:
        node = replace(HEALTHY, start=0, stop=stop, blocks_total=30, tokens_per_s=2.3)
        return next(text_of(line) for line in gauge_rows(node, width, 12) if text_of(line).startswith("speed"))

    assert speed(41) == "speed   2.3 tok/s alone · 30 of 30 blocks"
    assert speed(40) == "speed   2.3 tok/s alone · 30 of 30"
    assert speed(41, 15) == "speed   2.3 tok/s in your 15 of 30 blocks"
    assert speed(40, 15) == "speed   2.3 tok/s in your 15 of 30"


@pytest.mark.parametrize(
    ("held", "limit", "words"),
    [
        (23 * 10**6, 220 * 10**6, "23 of 220 MB cap"),
        (23 * 10**6, 6 * 10**9, "0.02 of 6.0 GB cap"),
        (5_200_000_000, 6 * 10**9, "5.2 of 6.0 GB cap"),
        (0, 220 * 10**6, "0 of 220 MB cap"),
    ],
)
def test_a_small_cap_is_shown_as_it_was_typed(held: int, limit: int, words: str) -> None:
    device = DeviceView("cpu", "", memory_total_bytes=8 * 10**9, limit_bytes=limit, weights_bytes=held)
    assert text_of(gauge_rows(replace(HEALTHY, hardware=device), 60, 12)[0]).endswith(words)


def test_the_first_run_says_whole_why_a_node_has_not_joined_yet() -> None:
    why = "home: no member answers (1 tried: Qw7d6Q). They may be offline; still trying"
    joining = replace(EMPTY, state="joining", reason=why, steps=())
    rows = [text_of(line) for line in first_rows(FirstState(step=2), joining, 80, 24)]
    assert why in " ".join(" ".join(rows).split())
    assert max(map(len, rows)) <= 80


def test_a_model_that_is_downloaded_for_a_new_swarm_is_shown_while_there_is_none() -> None:
    step = StepView("fetch", "downloading the model", "running", "", 12 * 10**6, 93 * 10**6, 41.0)
    live, idle = ConnectionState("live"), replace(EMPTY, preparing=step)
    line = text_of(state_row(live, idle, 0.0, wide=False))
    assert line.split("  ") == ["", "◐ preparing", "downloading the model: 12 MB of 93 MB · 41 s left"]
    assert "Not in a swarm" in text_of(state_row(live, EMPTY, 0.0, wide=False))
    assert "12 MB of 93 MB" in text_of(state_row(live, replace(HEALTHY, preparing=step), 0.0, wide=True))
    state = FirstState(step=1, create=("home", "starter"), busy="creating home", pauses={"pause_busy": True})
    text = "\n".join(text_of(line) for line in first_rows(state, idle, 80, 24))
    assert "downloading the model" in text
    assert "12 MB of 93 MB · 41 s left" in text
    assert "another program" not in text  # what was chosen cannot be changed any more


def test_a_node_that_is_away_is_said_to_be_tried_again() -> None:
    assert pill(ConnectionState("away", "x", retry_at=104.0), HEALTHY, 100.2)[0] == "× node away, retry in 4 s"
    assert pill(ConnectionState("away", "x", retry_at=90.0), None, 100.0)[0] == "× node away, retry in 0 s"


def test_loading_says_how_far_it_is() -> None:
    step = StepView("load", "load", "running", "", 5, 12, 41.0)
    loading = replace(EMPTY, state="loading", steps=(step,))
    assert pill(ConnectionState("live"), loading, 0.0)[0] == "◐ loading 5/12, 41 s"
    assert "5 of 12" in text_of(step_rows((step,), 100)[0])


def test_nothing_known_of_a_device_is_no_figure() -> None:
    bare = replace(HEALTHY, hardware=None, start=None, stop=None)
    text = "\n".join(text_of(line) for line in gauge_rows(bare, 60, 10))
    assert not any(character.isdigit() for character in text.partition("pauses")[0])


def test_no_two_rows_of_a_panel_have_the_same_name() -> None:
    """Tokens and weights were both said to be given."""
    weights = WeightsView(parts_total=33, parts_held=33, given_bytes=98 * 10**6)
    names = [text_of(line)[:8] for line in given_rows(replace(HEALTHY, weights=weights), 0, 40, 12)]
    assert len(set(names)) == len(names)
    assert "passed  " in names


def test_memory_that_is_only_reserved_is_not_shown_as_used() -> None:
    device = DeviceView("cpu", "", 25 * 10**9, 20 * 10**9, None, 2 * 10**6, 5 * 10**9, 0)
    for width, end in ((70, ""), (80, " GB")):
        shown = [text_of(line) for line in gauge_rows(replace(HEALTHY, hardware=device), width, 10)]
        assert "0.00 of 25.0 GB" in shown[0]
        assert shown[1].endswith(f"cache 0.0 ▒ others 5.0 free 20 ░ reserves 5.0{end}")


@pytest.mark.parametrize("kind", ["cpu", "cuda:0"])
@pytest.mark.parametrize("width", [46, 60, 80])
def test_the_parts_of_the_memory_add_up_to_all_of_it(kind: str, width: int) -> None:
    """The case of a reader who added them up: a reserve of 4.1 GB that was free was listed beside the free memory."""
    tenth = 10**8
    free = 238 * tenth if kind == "cpu" else 198 * tenth
    device = DeviceView(kind, "", 253 * tenth, free, 165 * tenth, 4 * tenth, 41 * tenth, tenth)
    shown = [text_of(line) for line in gauge_rows(replace(HEALTHY, hardware=device), width, 12)]
    figures = [float(word) for word in shown[1].partition(" ░")[0].split() if word.replace(".", "").isdigit()]
    assert sum(figures) == pytest.approx(25.3, abs=0.6), "free memory is rounded to whole gigabytes"
    held = figures[0] + figures[1]
    assert f"  {held:.1f} of 16.5 GB cap" in shown[0]
    assert ("░ reserves 4.0" in shown[1]) == (kind == "cpu" and width == 80)


def test_own_sessions_count_what_was_written_and_not_the_prompt() -> None:
    own = SessionView("a", "asking", ME, 86, prompt_tokens=49)
    rows = session_rows(replace(HEALTHY, active_sessions=(own,)), {}, name_of, 60, 4)
    assert "37" in text_of(rows[1])


def test_a_step_that_is_done_but_not_over_names_no_time_left() -> None:
    step = StepView("load", "load", "running", "", 30, 30, 0.0)
    assert "left" not in text_of(step_rows((step,), 80)[0])


def test_a_long_entry_of_the_log_is_shown_whole() -> None:
    words = " ".join(f"word{number}" for number in range(60))
    rows = log_rows(LogRow(0, "info", "shoal.node", words), 60, "word33")
    assert len(rows) > 5
    assert all(width_of(line) <= 60 for line in rows)
    assert words in " ".join(" ".join(text_of(line) for line in rows).split())
    assert any(text == "word33" and "mine" in style for line in rows for text, style in line)
    wide = log_rows(LogRow(0, "info", "x", "鳥" * 100), 40)
    assert all(width_of(line) <= 40 for line in wide)
    assert sum(text_of(line).count("鳥") for line in wide) == 100
    assert len(log_rows(LogRow(0, "info", "x", words), 10)) == 1  # too narrow to wrap


def test_more_sessions_than_rows_are_counted() -> None:
    sessions = HEALTHY.active_sessions * 5
    rows = session_rows(replace(HEALTHY, active_sessions=sessions), {}, name_of, 40, 6)
    assert (len(rows), text_of(rows[-1])) == (6, "and 11 more")


def test_sizes_of_settings_are_exact() -> None:
    setting = SettingView("max_vram", None, None, "file", False, "", "a size like 6GB or 500MB")
    values = [7 * 10**9, 6_500_000_000, 123_456_789, 500 * 10**6, 0]
    assert [value_text(setting, value) for value in values] == ["7GB", "6.5GB", "123456789", "500MB", "0"]


def test_a_qr_code_is_square_and_has_a_quiet_border() -> None:
    rows = qr_rows("shoal:" + "x" * 100)
    assert abs(2 * len(rows) - len(rows[0])) <= 1
    assert rows[0].strip() == ""
    assert all(line[:2] == "  " for line in rows)
    assert rows == qr_rows("SHOAL:" + "X" * 100)


def test_five_hundred_peers_are_drawn_quickly() -> None:
    snapshot = five_hundred()
    cover = coverage_of(snapshot)
    assert cover is not None
    assert len(arranged(table_peers(snapshot, {}), "tok/s", "")) == 501


def test_a_pause_by_hand_is_not_denied_below_and_a_rule_without_a_sensor_is_named() -> None:
    rules = (
        RuleView("disk_floor", "disk", True),
        RuleView("pause_battery", "on battery", True, available=False, text="no battery found"),
    )
    shown = [text_of(line) for line in courtesy_rows(CourtesyView(True, "hand", rules=rules), 58)]
    assert shown[1].strip() == "paused by hand · no sensor for: battery"
    unpaused = [text_of(line) for line in courtesy_rows(CourtesyView(rules=rules), 58)]
    assert unpaused[1].strip() == "now: no · no sensor for: battery"
    more = (*rules, *(RuleView(f"pause_{name}", name, True, available=False) for name in ("heat", "full_screen")))
    crowded = [text_of(line) for line in courtesy_rows(CourtesyView(rules=more), 44)]
    assert crowded[1].strip() == "now: no · no sensor for 3 rules"
    assert "paused by hand" in text_of(courtesy_rows(CourtesyView(True, "hand"), 58)[1])


def test_a_pause_by_hand_names_the_dashboards_key() -> None:
    why = because("pause_by_hand", "paused by hand")
    paused = replace(HEALTHY, state="paused", why=why, warnings=())
    words = text_of(state_row(ConnectionState("live"), paused, 0.0, wide=False))
    assert words.strip() == "‖ paused  by hand · p on the overview hosts again"
    draining = replace(paused, state="draining")
    assert "paused by hand" in text_of(state_row(ConnectionState("live"), draining, 0.0, wide=False))
