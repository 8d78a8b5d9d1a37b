"""The ledger of invites: limits hold whoever asks in whatever order, and the file never spends a token twice."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.config.home import Home
from app.core.errors import AppError, HomeError
from app.swarm import invitations
from app.swarm.invitations import (
    MAX_INVITATIONS,
    MAX_WAITING,
    Invitation,
    InviteLimits,
    SwarmLedger,
    Verdict,
    hash_of,
    new_invitation,
)

NOW_MS = 1_800_000_000_000
TOKEN = b"t" * 16
DAY_S = 86400.0


def ledger(**limits: object) -> SwarmLedger:
    made = new_invitation(TOKEN, InviteLimits(**limits), NOW_MS)  # type: ignore[arg-type]
    return SwarmLedger().issued(made, NOW_MS)


def ask(held: SwarmLedger, peer: str, now_ms: int = NOW_MS, token: bytes = TOKEN) -> tuple[SwarmLedger, Verdict]:
    changed, verdict, _ = held.admit(token, peer, peer, now_ms)
    return changed, verdict


def test_a_token_admits_one_peer_which_may_ask_again() -> None:
    held, verdict = ask(ledger(), "anna")
    assert verdict is Verdict.ADMITTED
    for late in (0, 10**12):
        assert ask(held, "anna", NOW_MS + late) == (held, Verdict.ADMITTED)
    assert ask(held, "ben") == (held, Verdict.USED)


def test_an_expired_a_cancelled_and_a_foreign_token() -> None:
    held = ledger(expires_in_s=DAY_S)
    assert ask(held, "anna", NOW_MS + 86_400_000)[1] is Verdict.EXPIRED
    assert ask(held, "anna", NOW_MS + 86_399_999)[1] is Verdict.ADMITTED
    assert ask(held, "anna", token=b"x" * 16)[1] is Verdict.UNKNOWN
    assert ask(held.cancelled(hash_of(TOKEN)[:8]), "anna")[1] is Verdict.UNKNOWN
    with pytest.raises(AppError, match="unknown invite"):
        held.cancelled("00000000")


def test_a_newcomer_waits_for_approval() -> None:
    held, verdict = ask(ledger(approve=True), "anna")
    assert verdict is Verdict.PENDING
    held, verdict = ask(held, "ben")
    assert verdict is Verdict.PENDING
    held = held.decide("anna", approve=True)
    assert ask(held, "anna")[1] is Verdict.ADMITTED
    with pytest.raises(AppError, match="no use left"):
        held.decide("ben", approve=True)
    held = held.decide("ben", approve=False)
    assert ask(held, "ben")[1] is Verdict.REFUSED
    with pytest.raises(AppError, match="does not wait"):
        held.decide("ben", approve=True)


def test_who_asked_in_time_may_wait_beyond_the_expiry() -> None:
    late = NOW_MS + 2 * 86_400_000
    held, _ = ask(ledger(approve=True, expires_in_s=DAY_S), "anna")
    assert ask(held, "ben", late)[1] is Verdict.EXPIRED
    assert ask(held, "anna", late)[1] is Verdict.PENDING
    assert ask(held.decide("anna", approve=True), "anna", late)[1] is Verdict.ADMITTED


def test_those_that_wait_are_bounded() -> None:
    held = ledger(approve=True)
    for n in range(MAX_WAITING):
        held, verdict = ask(held, f"peer {n}")
        assert verdict is Verdict.PENDING
    assert ask(held, "one more") == (held, Verdict.CROWDED)
    assert ask(held, "peer 0") == (held, Verdict.PENDING)


def test_closed_invites_make_room_and_open_ones_do_not() -> None:
    held = ledger()
    for n in range(1, MAX_INVITATIONS):
        held = held.issued(new_invitation(n.to_bytes(16), InviteLimits(), NOW_MS), NOW_MS)
    another = new_invitation(b"a" * 16, InviteLimits(), NOW_MS)
    with pytest.raises(AppError, match="cancel some"):
        held.issued(another, NOW_MS)
    held, _ = ask(held, "anna")
    held = held.cancelled(held.invitations[5].id).issued(another, NOW_MS)
    assert len(held.invitations) == MAX_INVITATIONS
    assert ask(held, "anna")[1] is Verdict.ADMITTED  # the one that nobody had used went
    much_later = held.issued(replace(another, token_hash="b" * 64), NOW_MS + 90 * 86_400_000)
    assert [one.token_hash for one in much_later.invitations] == [hash_of(TOKEN), "b" * 64]
    full = held.issued(replace(another, token_hash="c" * 64), NOW_MS)
    assert ask(full, "anna")[1] is Verdict.UNKNOWN  # nothing else was closed


peers = st.sampled_from(["anna", "ben", "cleo", "dora"])
steps = st.one_of(
    st.tuples(st.just("ask"), peers, st.integers(0, 2 * 86_400_000)),
    st.tuples(st.sampled_from(["approve", "refuse"]), peers, st.just(0)),
    st.tuples(st.just("cancel"), peers, st.just(0)),
)


@given(st.integers(1, 3), st.booleans(), st.lists(steps, max_size=30))
def test_no_order_of_events_breaks_a_limit(uses: int, approve: bool, events: list[tuple[str, str, int]]) -> None:
    held = ledger(uses=uses, approve=approve, expires_in_s=DAY_S)
    approved: set[str] = set()
    inside: set[str] = set()
    for what, peer, late_ms in events:
        if what == "ask":
            held, verdict = ask(held, peer, NOW_MS + late_ms)
            if verdict is Verdict.ADMITTED:
                assert peer in inside or late_ms < 86_400_000 or peer in approved
                assert not approve or peer in approved
                inside.add(peer)
            else:
                assert peer not in inside  # once in, always answered
        elif what == "cancel":
            held = held.cancelled(hash_of(TOKEN)[:8])
        else:
            try:
                held = held.decide(peer, approve=what == "approve")
                approved |= {peer} if what == "approve" else set()
            except AppError:
                pass
        (one,) = held.invitations
        assert len(one.admitted) <= uses
        assert len({guest.peer for guest in one.admitted}) == len(one.admitted)
        assert inside <= {guest.peer for guest in one.admitted}


# --- the file --------------------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home.open(tmp_path)


def test_the_file_keeps_everything_and_is_private(home: Home) -> None:
    held = ledger(approve=True, uses=2, delegate=True)
    held, _ = ask(held, "anna")
    held = replace(held.decide("anna", approve=True), lists=(b"a list",))
    held, _ = ask(held, "ben")
    assert invitations.update(home, "one", lambda before: held) == held
    assert invitations.load(home, "one") == held
    assert invitations.load(home, "another") == SwarmLedger()
    assert home.admission_file.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "text", ["", "[]", '{"version":2,"swarms":{}}', '{"version":1,"swarms":{"one":{"invites":3}}}']
)
def test_a_damaged_file_is_said_and_not_overwritten(home: Home, text: str) -> None:
    home.admission_file.write_text(text)
    with pytest.raises(HomeError, match=r"admission\.json|version|invites"):
        invitations.update(home, "one", lambda before: SwarmLedger((Invitation("a" * 64, NOW_MS, NOW_MS + 1),)))
    assert home.admission_file.read_text() == text


def test_a_token_is_spent_once_by_threads_that_race(home: Home) -> None:
    invitations.update(home, "one", lambda before: ledger(uses=2))
    verdicts: list[Verdict] = []

    def use(peer: str) -> None:
        def change(before: SwarmLedger) -> SwarmLedger:
            changed, verdict = ask(before, peer)
            verdicts.append(verdict)
            return changed

        invitations.update(home, "one", change)

    threads = [threading.Thread(target=use, args=(f"peer {n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(verdict.value for verdict in verdicts) == ["admitted"] * 2 + ["invite_used"] * 6
