"""Reasons: every code, who gives it, and that it reaches whoever asks."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from app.cli.status import describe_peer
from app.core import errors
from app.core.errors import AppError
from app.core.reasons import NEXT_STEPS, Reason, because
from app.core.span import Span
from app.membership.member import _GONE, Member
from app.routing import search as routing
from app.routing.planner import RoutePlanner, SessionRoutes
from app.routing.route import NoRoute, Privacy, RouteRequest
from app.routing.search import find_route, why_unused
from app.routing.trust import TrustBook
from app.serving.admission import AdmissionLimits, HopLoad, why_busy
from app.session.frame import HopError, decode_hop_error
from app.session.wire import REFUSALS, decode, encode_hop_error, hop_error_reason
from app.snapshot.codec import snapshot_from, to_json
from app.snapshot.views import PeerView
from app.swarm.records import Announcement
from app.system.doctor import FAILED, NORMAL, TROUBLED, WORRYING, check_peer
from engine.errors import EngineError
from p2p.errors import P2PError, StreamReset, WrongSecret
from p2p.memory.fabric import open_fabric

HOUR_S = 3600.0
APP = Path(__file__).resolve().parents[3] / "app"


def _modules() -> Iterator[Path]:
    """Every module that can give a reason; the table itself and the doctor's lists of codes give none."""
    for path in (*APP.rglob("*.py"), APP.parent / "p2p" / "errors.py", APP.parent / "engine" / "errors.py"):
        if path not in (APP / "core" / "reasons.py", APP / "system" / "doctor.py"):
            yield path


def _calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call):
            yield node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", ""), node


def _texts(path: Path) -> set[str]:
    tree = ast.parse(path.read_text("utf-8"))
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_every_code_of_the_table_is_given_somewhere_and_has_a_next_step() -> None:
    given = set().union(*(_texts(path) for path in _modules()))
    given |= {f"hop_{code}" for code in given}  # `hop_error_reason` makes these of what a hop said
    assert set(NEXT_STEPS) - given == set()
    assert all(NEXT_STEPS.values())


def test_every_code_that_is_given_is_in_the_table() -> None:
    given = [
        (path.name, call.args[0].value)
        for path in _modules()
        for name, call in _calls(path)
        if name == "because" and isinstance(call.args[0], ast.Constant)
    ]
    assert len(given) > 40
    assert [(where, code) for where, code in given if code not in NEXT_STEPS] == []


def test_no_reason_is_made_without_its_code_being_in_the_table() -> None:
    for path in _modules():
        assert "Reason" not in {name for name, _ in _calls(path)}, path
    with pytest.raises(KeyError):
        because("no_such_code", "")
    assert FAILED | NORMAL | TROUBLED | WORRYING | REFUSALS <= set(NEXT_STEPS)


# --- from those who decide to those who read -------------------------------------------------------------------------

DEMAND = RouteRequest(Span(0, 4), 100)
ALL = Span(0, 4)


def said(peer: str, state: str = "serving", span: Span | None = ALL, room: int = 1000) -> Announcement:
    return Announcement(peer, 1, 2, "s", state, span, 10.0, kv_free_tokens=room)


@pytest.mark.parametrize(
    ("member", "code"),
    [
        (said("p"), None),
        (said("p", "paused", None), "peer_paused"),
        (said("p", "draining"), "peer_draining"),
        (said("p", "loading"), "peer_loading"),
        (said("p", "fetching"), "peer_loading"),
        (said("p", "joining", None), "peer_loading"),
        (said("p", "client", None), "peer_client"),
        (said("p", "something new"), "peer_client"),
        (said("p", room=99), "peer_full"),
        (replace(said("p"), kv_total_tokens=100), None),
        (replace(said("p"), kv_total_tokens=99), "cache_exceeded"),
    ],
)
def test_why_a_member_is_not_used(member: Announcement, code: str | None) -> None:
    why = why_unused(member, DEMAND)
    assert (None if why is None else why.code) == code
    assert why is None or (why.peers == ("p",) and why.text and why.next_step)


def test_private_blocks_exclude_strangers_who_hold_nothing_else() -> None:
    demand = RouteRequest(Span(0, 4), 1, privacy=Privacy(1, 4, frozenset({"friend"})))
    edge, all_of_it = said("p", span=Span(0, 1)), said("p")
    assert getattr(why_unused(edge, demand), "code", None) == "peer_private"
    assert why_unused(all_of_it, demand) is None
    assert why_unused(said("friend", span=Span(0, 1)), demand) is None
    with pytest.raises(NoRoute) as refused:
        find_route([all_of_it], demand, lambda a, b: 0.0)
    assert refused.value.reason.code == "private_blocks"


def test_a_full_member_is_used_where_there_is_no_other() -> None:
    assert [hop.peer for hop in find_route([said("full", room=1)], DEMAND, lambda a, b: 0.0)] == ["full"]
    both = [said("full", room=1), said("roomy")]
    assert [hop.peer for hop in find_route(both, DEMAND, lambda a, b: 0.0)] == ["roomy"]
    assert routing.FULL in NEXT_STEPS


@pytest.mark.parametrize("state", ["alive", "draining", "suspect", "dead", "left"])
def test_a_member_is_present_exactly_where_nothing_speaks_against_it(state: str) -> None:
    member = Member("p", said("p"), state, None, None)  # type: ignore[arg-type]
    assert member.present is (member.absence is None)
    assert member.present is (state not in _GONE)
    assert member.absence is None or member.absence.peers == ("p",)


@pytest.mark.parametrize(
    ("load", "code"),
    [
        (HopLoad(256, 0, 0, 128, 0, 500, 900, 1000), "sessions_full"),
        (HopLoad(64, 64, 64, 128, 0, 500, 900, 1000), "asker_sessions_full"),
        (HopLoad(1, 0, 0, 85, 0, 333, 99, 1000), "cache_full"),
        (HopLoad(2, 1, 1, 85, 700, 333, 150, 1000), "cache_reserved"),
    ],
)
def test_a_hops_refusal_reaches_the_asker_with_its_code(load: HopLoad, code: str) -> None:
    trouble = why_busy(load, 100, AdmissionLimits())
    assert trouble is not None
    told = hop_error_reason("hop", decode_hop_error(decode(encode_hop_error(b"s" * 16, 1, 0, trouble))))
    assert told == because(code, trouble.text, "hop")


def test_a_hop_that_makes_codes_up_gets_the_kind_of_its_trouble_and_nothing_else() -> None:
    assert hop_error_reason("hop", HopError("busy", "full", "pause_by_hand")).code == "hop_busy"
    assert hop_error_reason("hop", HopError("busy", "full", "x" * 32)).code == "hop_busy"
    assert hop_error_reason("hop", HopError("lost", "")).text
    assert hop_error_reason("hop", HopError("nonsense", "?")).code == "hop_failed"


def test_an_error_of_any_package_is_a_reason() -> None:
    for base in (P2PError, EngineError):
        own = [kind for kind in base.__subclasses__() if kind.__module__ == base.__module__]
        for kind in (base, *own):
            why = errors.reason_of(kind("words"), "p")
            assert (why.code, why.text, why.peers) == (kind.reason_code, "words", ("p",))
            assert kind is base or kind.reason_code != base.reason_code, "each kind of error has a code of its own"
    wrong = WrongSecret("words")
    wrong.peer = "q"
    assert errors.reason_of(wrong) == because("wrong_secret", "words", "q")
    assert errors.reason_of(StreamReset("words")).code == "stream_broke"
    assert errors.reason_of(AppError("words", code="no_swarm", peers=("q",))) == because("no_swarm", "words", "q")
    assert errors.reason_of(NoRoute(3, busy=True, peers=["a", "b"])).peers == ("a", "b")
    assert errors.reason_of(ValueError("x")).code == "internal"


def test_command_line_doctor_and_dashboard_have_the_same_words() -> None:
    why = because("peer_paused", "its owner has paused it", "p")
    view = PeerView("p", state="paused", unused=why)
    assert f"not used: {why.text} → {why.next_step}" in describe_peer(to_json(view))
    doubted = replace(view, score=0.5, why="failed: its stream broke, 2 minutes ago")
    assert ", score 0.50 (failed: its stream broke, 2 minutes ago); not used" in describe_peer(to_json(doubted))
    check = check_peer(view)
    assert why.text in check.detail
    assert check.mend == why.next_step
    sent = {"peer_id": "me", "state": "serving", "reason": "", "api_url": "", "peers": [to_json(view)]}
    assert snapshot_from(sent).peers[0].unused == Reason(why.code, why.text, ("p",), why.next_step)


async def test_what_an_asker_saw_of_hops_is_why_they_are_not_used(autojump_clock: MockClock) -> None:
    async with open_fabric() as fabric:
        node, book = fabric.node("me"), TrustBook()
        planner = RoutePlanner(node, lambda: [said(peer) for peer in ("me", "full", "liar", "well")], book=book)
        guide = SessionRoutes(planner, DEMAND)
        book.note("liar", "lied", "returned wrong activations")
        guide.failed("full", because("cache_full", "no room for 100 tokens", "full"), busy=True)
        assert set(planner.unused(4)) == {"liar"}, "there may be room for less"
        told = because("sessions_full", "256 sessions are open already", "full")
        guide.failed("full", told, busy=True)
        unused = planner.unused(4)
        assert set(unused) == {"full", "liar"}
        assert unused["full"] == told
        assert (unused["liar"].code, unused["liar"].peers) == ("distrusted", ("liar",))
        assert unused["liar"].text.startswith("returned wrong activations")
        with pytest.raises(NoRoute) as refused:
            await RoutePlanner(node, lambda: [said("full")], book=book, preferences=None).find((), DEMAND, ["full"])
        assert refused.value.reason.peers == ("full",)
        await trio.sleep(HOUR_S)
        assert set(planner.unused(4)) == {"liar"}, "who was full is tried again"
