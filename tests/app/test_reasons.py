"""Reasons: every code, who gives it, and that it reaches whoever asks."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from app.cli.status import describe_peer
from app.core import troubles
from app.core.errors import AppError
from app.core.reasons import NEXT_STEPS, Reason, because
from app.core.span import Span
from app.membership.member import _GONE, Member
from app.routing import search as routing
from app.routing.planner import Guidance, SessionGuide
from app.routing.search import Demand, NoRoute, Privacy, find_route, why_unused
from app.routing.trust_book import TrustBook
from app.serving.admission import AdmissionLimits, Load, why_busy
from app.session.wire import REFUSALS, Trouble, decode, decode_trouble, encode_trouble, reason_told
from app.snapshot.views import PeerView, facts, snapshot_from
from app.swarm.records import Announcement
from app.system.doctor_network import TROUBLED, WORRYING, check_peer
from p2p.memory.fabric import open_fabric

HOUR_S = 3600.0
APP = Path(__file__).resolve().parents[2] / "app"

# Who decides what; a code that several functions give means the same in all of them.
GIVERS = {
    "starting": "node.node.__init__",
    "no_swarm": "node.node.<module> node.swarms.leave node.node.reply api.openai._check_model",
    "looking": "node.active_swarm.__init__ node.node._arrive",
    "looking_around": "node.hosting_loop._host",
    "leaving": "node.hosting_loop.leave node.node._wind_down",
    "left": "node.node._wind_down",
    "wrong_secret": "core.troubles.<module>",
    "probe_blocks": "node.self_check.span_trouble",
    "probe_api": "node.self_check.api_trouble",
    "cannot_host": "hosting.block_host.CannotHost node.hosting_loop._host",
    "limit_zero": "hosting.block_host.<module>",
    "no_room": "hosting.block_host._make_plan",
    "asked_for": "hosting.block_host._decide",
    "worst_served": "hosting.placement.decide",
    "hole": "hosting.placement._fill_hole",
    "make_way": "hosting.placement._make_way",
    "lone_holder": "hosting.placement._thicken",
    "gain": "hosting.placement._even_out",
    "pause_by_hand": "courtesy.pause.pause_by_hand",
    "drained_by_hand": "courtesy.pause.pause_by_hand",
    **dict.fromkeys(
        (
            "pause_busy",
            "pause_memory",
            "pause_active",
            "pause_battery",
            "pause_heat",
            "pause_program",
            "pause_schedule",
        ),
        "courtesy.rules.<module>",
    ),
    **dict.fromkeys(("peer_suspect", "peer_dead", "peer_left"), "membership.member.<module>"),
    **dict.fromkeys(("peer_paused", "peer_draining", "peer_loading"), "routing.search.<module>"),
    "peer_client": "routing.search.why_unused",
    "peer_full": "routing.search.<module>",
    "peer_private": "routing.search.why_unused",
    "distrusted": "routing.planner.shunned",
    "sessions_full": "serving.admission.why_busy",
    "asker_sessions_full": "serving.admission.why_busy",
    "cache_full": "serving.admission.why_busy serving.block_server._open core.troubles.<module>",
    "cache_reserved": "serving.admission.why_busy",
    "not_hosted": "serving.admission.why_not",
    "context_exceeded": "serving.admission.why_not",
    **{f"hop_{kind}": "session.wire.reason_told" for kind in ("busy", "refused", "draining")},
    **{f"hop_{kind}": "session.wire.reason_told" for kind in ("gap", "link", "missing", "closed", "evicted", "failed")},
    "hop_lost": "asker.route_hops.lost",
    "hop_unopened": "asker.route_hops.turn",
    "hop_silent": "asker.route_session._probe",
    "hop_stuck": "asker.overdue.loss",
    "hop_miscut": "asker.route_session._set_up",
    "hop_forgot": "asker.overdue.loss",
    "tokens_lost": "asker.overdue.loss",
    "answer_lost": "asker.overdue.loss",
    "no_route": "routing.search.NoRoute",
    "busy": "routing.search.__init__",
    "private_blocks": "routing.search._missing",
    "session_lost": "asker.route_session.SessionLost",
    "context_length_exceeded": "asker.asker.PromptTooLong",
    "model_not_here": "asker.reply_service.NoModelHere",
    "weights_missing": "weights.extents.WeightsError",
    "already_member": "joining.create.new_name",
    "other_secret": "joining.targets._invited",
    "private_swarm": "joining.name_lookup.resolve_name",
    "unknown_swarm": "core.errors.UnknownSwarm",
    "name_conflict": "core.errors.NameConflict",
    "bad_usage": "core.errors.UsageError",
    "bad_request": "api.failures._invalid api.failures._http api.openai_errors.__init__ api.openai_errors.invalid",
    "unsupported_parameter": "api.openai_errors.invalid",
    "model_not_found": "api.openai._check_model",
    "bad_record": "core.errors.RecordError",
    "bad_config": "core.errors.ConfigError",
    "bad_home": "core.errors.HomeError",
    "not_running": "core.errors.NotRunning",
    "already_running": "core.errors.AlreadyRunning",
    "port_in_use": "api.server.PortInUse",
    "no_such_address": "api.server.NoSuchAddress",
    "failed": "core.errors.AppError",
    "wrong_token": "api.guard._refusal api.client.WrongToken",
    "foreign_host": "api.guard._refusal",
    "foreign_origin": "api.guard._refusal",
    "internal": "api.failures._internal core.troubles.reason_of",
    **{code: "core.troubles.<module>" for _, code in troubles._CODES if code not in ("wrong_secret", "cache_full")},
}
_MAKERS = {"because", "AppError", "Refusal", "Trouble", "Rule"}


def _codes(node: ast.AST) -> Iterator[str]:
    """The codes that a statement or an expression gives: arguments of makers, class attributes, tables of codes."""
    if isinstance(node, ast.Call):
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        values: list[ast.AST] = [*node.args, *(word.value for word in node.keywords if word.arg == "code")]
        if name not in _MAKERS and name != "__init__" and not any(word.arg == "code" for word in node.keywords):
            return
    elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
        values = [node.value]
    elif isinstance(node, ast.FunctionDef):
        values = [*node.args.kw_defaults]  # type: ignore[list-item]
    else:
        return
    for value in values:
        for inner in ast.walk(value) if value is not None else ():
            if isinstance(inner, ast.Constant) and isinstance(inner.value, str) and inner.value in NEXT_STEPS:
                yield inner.value
            if isinstance(inner, ast.JoinedStr) and ast.unparse(inner) == "f'hop_{trouble.code}'":
                yield from (code for code in NEXT_STEPS if GIVERS.get(code) == "session.wire.reason_told")


def _walk(node: ast.AST, where: str, found: dict[str, set[str]]) -> None:
    for child in ast.iter_child_nodes(node):
        for code in _codes(child):
            found[code].add(child.name if isinstance(child, ast.FunctionDef) else where)
        named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        _walk(child, child.name if named else where, found)  # type: ignore[attr-defined]


def _givers() -> dict[str, set[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for path in APP.rglob("*.py"):
        module = ".".join(path.relative_to(APP).with_suffix("").parts)
        if module in ("reason", "doctor_network"):  # the table itself, and what a doctor worries about
            continue
        here: dict[str, set[str]] = defaultdict(set)
        _walk(ast.parse(path.read_text("utf-8")), "<module>", here)
        for code, names in here.items():
            found[code] |= {f"{module}.{name}" for name in names}
    return found


def test_every_code_is_given_by_the_functions_that_are_listed_and_has_a_next_step() -> None:
    found = _givers()
    assert set(GIVERS) == set(NEXT_STEPS)
    for code, names in GIVERS.items():
        assert set(names.split()) <= found[code], f"{code} is given by {sorted(found[code])}"
        assert NEXT_STEPS[code], code
    assert set(found) <= set(GIVERS)


def test_no_reason_is_made_without_its_code_being_in_the_table() -> None:
    for path in APP.rglob("*.py"):
        calls = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call)]
        made = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "Reason"]
        assert not made or path.name == "reasons.py", path
    with pytest.raises(KeyError):
        because("no_such_code", "")
    assert TROUBLED | WORRYING | REFUSALS <= set(NEXT_STEPS)


# --- from those who decide to those who read -------------------------------------------------------------------------

DEMAND = Demand(Span(0, 4), 100)
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
    ],
)
def test_why_a_member_is_not_used(member: Announcement, code: str | None) -> None:
    why = why_unused(member, DEMAND)
    assert (None if why is None else why.code) == code
    assert why is None or (why.peers == ("p",) and why.text and why.next_step)


def test_private_blocks_exclude_strangers_who_hold_nothing_else() -> None:
    demand = Demand(Span(0, 4), 1, privacy=Privacy(1, 4, frozenset({"friend"})))
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
    member = Member("p", said("p"), state, None, None, b"")  # type: ignore[arg-type]
    assert member.present is (member.absence is None)
    assert member.present is (state not in _GONE)
    assert member.absence is None or member.absence.peers == ("p",)


@pytest.mark.parametrize(
    ("load", "code"),
    [
        (Load(256, 0, 0, 0, 900, 1000), "sessions_full"),
        (Load(64, 64, 0, 0, 900, 1000), "asker_sessions_full"),
        (Load(1, 0, 1, 0, 99, 1000), "cache_full"),
        (Load(2, 1, 1, 700, 150, 1000), "cache_reserved"),
    ],
)
def test_a_hops_refusal_reaches_the_asker_with_its_code(load: Load, code: str) -> None:
    trouble = why_busy(load, 100, AdmissionLimits())
    assert trouble is not None
    told = reason_told("hop", decode_trouble(decode(encode_trouble(b"s" * 16, 1, 0, trouble))))
    assert told == because(code, trouble.text, "hop")


def test_a_hop_that_makes_codes_up_gets_the_kind_of_its_trouble_and_nothing_else() -> None:
    assert reason_told("hop", Trouble("busy", "full", "pause_by_hand")).code == "hop_busy"
    assert reason_told("hop", Trouble("busy", "full", "x" * 32)).code == "hop_busy"
    assert reason_told("hop", Trouble("lost", "")).text
    assert reason_told("hop", Trouble("nonsense", "?")).code == "hop_failed"


def test_an_error_of_any_package_is_a_reason() -> None:
    for kind, code in troubles._CODES:
        why = troubles.reason_of(kind("words"), "p")
        assert (why.code, why.text, why.peers) == (code, "words", ("p",))
    assert troubles.reason_of(AppError("words", code="no_swarm", peers=("q",))) == because("no_swarm", "words", "q")
    assert troubles.reason_of(NoRoute(3, busy=True, peers=["a", "b"])).peers == ("a", "b")
    assert troubles.reason_of(ValueError("x")).code == "internal"


def test_command_line_doctor_and_dashboard_have_the_same_words() -> None:
    why = because("peer_paused", "its owner has paused it", "p")
    view = PeerView("p", state="paused", unused=why)
    assert f"not used: {why.text} → {why.next_step}" in describe_peer(facts(view))
    check = check_peer(view)
    assert why.text in check.detail
    assert check.mend == why.next_step
    sent = {"peer_id": "me", "state": "serving", "reason": "", "api_url": "", "peers": [facts(view)]}
    assert snapshot_from(sent).peers[0].unused == Reason(why.code, why.text, ("p",), why.next_step)


async def test_what_an_asker_saw_of_hops_is_why_they_are_not_used(autojump_clock: MockClock) -> None:
    async with open_fabric() as fabric:
        node, book = fabric.node("me"), TrustBook()
        guidance = Guidance(node, lambda: [said(peer) for peer in ("me", "full", "liar", "well")], book=book)
        guide = SessionGuide(guidance, DEMAND)
        book.note("liar", "lied", "returned wrong activations")
        told = because("cache_full", "no room for 100 tokens", "full")
        guide.failed("full", told, busy=True)
        unused = guidance.unused(4)
        assert set(unused) == {"full", "liar"}
        assert unused["full"] == told
        assert (unused["liar"].code, unused["liar"].peers) == ("distrusted", ("liar",))
        assert unused["liar"].text.startswith("returned wrong activations")
        with pytest.raises(NoRoute) as refused:
            Guidance(node, lambda: [said("full")], book=book, wishes=None).find((), DEMAND, ["full"])
        assert refused.value.reason.peers == ("full",)
        await trio.sleep(HOUR_S)
        assert set(guidance.unused(4)) == {"liar"}, "who was full is tried again"
