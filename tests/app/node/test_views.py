"""What can be seen of a node's work: rates from counters that restart, steps that stay failed, routes, names."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from app.asker.stats import AskedSession, AskerStats, HopStats
from app.cli.bench import explained_share, node_facts, node_lines, unexplained_s
from app.core.reasons import because
from app.core.span import Span
from app.membership import Member
from app.node.peer_views import by_clocks, fetched_share, peer_views
from app.node.rates import WINDOW_S, Counters, RateMeter, RateReading
from app.node.views import NodeViews, reading_of, route_view
from app.serving.stats import ServerStats, SessionStats
from app.snapshot.startup import ModelPreparation, StartupSteps
from app.snapshot.views import HopView, RouteView, Snapshot, StepView
from app.swarm.records import Announcement
from app.weights.manifest_store import model_name


def test_rates_are_of_the_last_seconds_and_survive_counters_that_start_anew() -> None:
    flow = RateMeter()
    assert flow.view(queued=3).queued == 3
    for second in range(60):
        served = 100 * (second + 1) if second < 50 else 100 * (second - 49)  # another server took over
        links = {"a": (1000 * second, 0)} | ({"b": (500, 500)} if second > 52 else {})
        flow.note(
            float(second), RateReading(Counters(served, 0, second, second, 3 * second), links, {"s": 10 * second})
        )
    view = flow.view()
    assert view.served_tokens_per_s == pytest.approx(100)
    assert view.up_bytes_per_s == pytest.approx(1000 + 500 / WINDOW_S)
    assert view.down_bytes_per_s == pytest.approx(500 / WINDOW_S)
    assert (view.steps_per_s, view.batch_rows) == (1.0, 3.0)
    assert flow.session_rate("s") == pytest.approx(10)
    assert flow.session_rate("another") == 0


def test_members_that_this_node_has_not_met_are_not_shown() -> None:
    """Anybody can make up a thousand of them, and say something new of each all the time."""
    met, told_of = (
        Member(name, Announcement(name, 1, 2, "", "serving"), "alive", seen_at, None)
        for name, seen_at in (("met", 1.0), ("told of", None))
    )
    trust: Any = SimpleNamespace(standing=lambda peer: SimpleNamespace(score=0.0, why=None))
    assert [view.peer for view in peer_views([met, told_of], (), trust, {})] == ["met"]


def test_nothing_that_happens_is_no_rate() -> None:
    flow = RateMeter()
    for second in range(5):
        flow.note(float(second), RateReading(Counters(7, 7, 7, 7, 7)))
    assert flow.view() == flow.view(0)
    assert (flow.view().served_tokens_per_s, flow.view().batch_rows) == (0, 0)


def test_what_a_node_computes_for_itself_is_served_to_nobody() -> None:
    served = ServerStats(served={"me": 40, "other": 2}, steps=5)
    reading = reading_of("me", served, AskerStats(asked_tokens=9), {})
    assert (reading.counters.served_tokens, reading.counters.asked_tokens, reading.counters.steps) == (2, 9, 5)


def test_a_session_that_this_node_asks_and_serves_is_one_session() -> None:
    def session(id: str, asker: str) -> SessionStats:
        return SessionStats(id, asker, 0, 8, 12, 1.0, 0.0, 0.01, 0.0, 0, 0)

    stats = ServerStats(sessions=(session("reply", "me"), session("audit", "me"), session("reply", "other")))
    served = NodeViews("me")._serving(stats, {"reply"})
    assert [(one.id, one.asker) for one in served] == [("audit", "me"), ("reply", "other")], "ids are each asker's own"


def test_a_route_tells_where_a_tokens_time_goes() -> None:
    hops = (HopStats("a", 0, 4, 0.001, 0.01, 0.002, 0.001), HopStats("me", 4, 8, None, 0.001, 0.0))
    asked = AskedSession("s", route=hops, return_s=0.003, ends_s=0.004, host_s=0.002, token_s=0.025)
    view = route_view(asked, {"a": "lan"})
    assert [hop.link for hop in view.hops] == ["lan", None]
    assert view.token_s == pytest.approx(0.025)
    assert unexplained_s(view) == pytest.approx(0.001)
    assert explained_share(view) == pytest.approx(0.96)
    unknown = route_view(replace(asked, route=(HopStats("a", 0, 8, 0.001),)), {})
    assert (unexplained_s(unknown), explained_share(unknown)) == (None, None), "a hop that has not said its times yet"
    assert route_view(AskedSession("s"), {}).token_s is None
    busy = (HopStats("me", 0, 8, 0.0, 0.012, 0.001),)
    more = route_view(AskedSession("s", route=busy, return_s=0.0, ends_s=0.0, token_s=0.0098), {})
    assert more.token_s == pytest.approx(0.013), "no part is more than the whole"
    assert unexplained_s(more) == pytest.approx(0)
    assert explained_share(more) == pytest.approx(1)


def test_the_bench_says_why_a_reply_is_slower_than_its_tokens() -> None:
    route = RouteView("s", (HopView("me", 0, 30, None, 0.0, 0.3, 0.0, 0.0),), 0.0, 0.02, 0.328, 0.008)
    snapshot = Snapshot("me", "serving", "", "", swarm="home", route=route)
    done = {"tokens_per_s": 2.3, "ttft_s": 0.5, "recoveries": 0, "longest_gap_s": 1.9}
    lines = node_lines(snapshot, node_facts(snapshot, {**done, "guessed_tokens": 12, "accepted_tokens": 3}))
    assert lines[-2:] == [
        "  in all 328.0 ms, of which 100% are accounted for",
        "  over the whole reply 434.8 ms: 3 of 12 guesses were right, the longest wait was 1900.0 ms",
    ]
    same = node_lines(snapshot, node_facts(snapshot, {**done, "tokens_per_s": 1 / 0.328}))
    assert same[-1] == lines[-2], "nothing to explain"


def test_a_models_name_is_what_its_files_are_called() -> None:
    assert [model_name(name) for name in ("starter", "/models/Llama-8B/", "/m/x.gguf", None)] == [
        "SmolLM2-135M-Instruct",
        "Llama-8B",
        "x",
        "",
    ]


def states(steps: StartupSteps) -> dict[str, str]:
    return {view.key: view.state for view in steps.views()}


def test_steps_are_one_list_in_which_a_failure_stays() -> None:
    now = [0.0]
    steps = StartupSteps(lambda: None, lambda: now[0])
    assert set(states(steps).values()) == {"pending"}
    steps.done("identity")
    steps.begin("peers")
    steps.done("peers")
    steps.begin("load")
    now[0] = 10.0
    steps.progress("load", 2, 8)
    [load] = [view for view in steps.views() if view.key == "load"]
    assert (load.done, load.total, load.seconds_left) == (2, 8, 30.0)
    steps.failed("out of memory")
    steps.failed("again")  # nothing is under way any more
    [load] = [view for view in steps.views() if view.key == "load"]
    assert (load.state, load.detail) == ("failed", "out of memory")
    steps.leave_out_hosting()  # the user wants no hosting any more: the list must not show a failure for ever
    assert not {"weights", "load", "measure"} & states(steps).keys()
    steps.begin("weights")
    assert list(states(steps)) == ["identity", "peers", "manifest", "weights", "load", "measure", "announce"]
    assert states(steps)["load"] == "pending"


def test_the_time_left_of_a_download_counts_from_what_was_there() -> None:
    now = [0.0]
    steps = ModelPreparation(lambda: now[0])
    steps.fetching(50, 100)  # an interrupted download goes on
    assert (steps.view and steps.view.seconds_left) is None
    now[0] = 10.0
    steps.fetching(75, 100)
    assert steps.view == StepView("fetch", "downloading the model", "running", "", 75, 100, 10.0)
    steps.reading(0, 100)
    now[0] = 12.0
    steps.reading(20, 100)
    assert steps.view == StepView("read", "reading the model", "running", "", 20, 100, 8.0)
    steps.over()
    assert steps.view is None


def test_a_step_beside_the_others_leaves_them_as_they_are() -> None:
    steps = StartupSteps(lambda: None)
    steps.begin("manifest")
    steps.begin_aside("ends", "from members")
    steps.leave_out_hosting()  # a client
    steps.progress("ends", 1, 4)
    steps.failed("of the manifest")
    assert states(steps) == {
        "identity": "pending",
        "peers": "pending",
        "manifest": "failed",
        "announce": "pending",
        "ends": "running",
    }
    steps.begin("peers")  # another try
    assert states(steps)["ends"] == "running"
    steps.done("ends")
    assert [(view.done, view.total) for view in steps.views() if view.key == "ends"] == [(1, 4)]
    steps.leave_out("ends")
    assert "ends" not in states(steps)


def test_a_peer_whose_clock_is_wrong_is_not_said_to_serve_in_a_moment() -> None:
    loading, full = because("peer_loading", "joining"), because("peer_full", "full")
    ahead_s = {"a": -10_800.0, "b": 0.0, "c": 5400.0, "d": None, "serving": -10_800.0}
    told = by_clocks({"a": loading, "b": full, "c": loading, "d": loading}, ahead_s.get)
    assert told["a"].code == told["c"].code == "peer_clock"
    assert told["a"].text == "its clock is about 3.0 h ahead of this machine's: what it says of itself is refused"
    assert told["c"].text.startswith("its clock is about 90 min behind this machine's")
    assert (told["a"].peers, "set its clock" in told["a"].next_step) == (("a",), True)
    assert (told["b"], told["d"], "serving" in told) == (full, loading, False)


def test_the_share_that_a_member_has_downloaded_counts_the_blocks_that_it_wants() -> None:
    fetching = Announcement("p", 1, 2, "s", "fetching", span=Span(4, 12), held=(Span(10, 40), Span(0, 3), Span(5, 7)))
    assert fetched_share(fetching) == 4 / 8
    assert fetched_share(replace(fetching, growing=Span(0, 4))) == 3 / 4
    assert fetched_share(replace(fetching, state="serving")) is None
