"""Names, pins and spans as people type them; and which swarm a name means."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.errors import NameConflict, UnknownSwarm, UsageError
from app.core.span import Span
from app.swarm.name_resolution import resolve
from app.swarm.names import SwarmName, is_swarm_name, pinned
from app.swarm.records import SwarmRecord, sign_record
from p2p.identity import Identity

NOW = 1_800_000_000_000
ALICE, BOB = Identity(b"a" * 32), Identity(b"b" * 32)
LLAMA, QWEN = "1a2b3c4d" + "0" * 56, "ffee0011" + "0" * 56


@pytest.mark.parametrize(
    ("text", "name", "pin"),
    [
        ("attic", "attic", None),
        (" Attic ", "attic", None),
        ("a", "a", None),
        ("my-swarm_2.0#" + LLAMA[:20].upper(), "my-swarm_2.0", LLAMA[:20]),
        ("x#" + LLAMA, "x", LLAMA),
    ],
)
def test_names_that_are_read(text: str, name: str, pin: str | None) -> None:
    parsed = SwarmName.parse(text)
    assert parsed == SwarmName(name, pin)
    assert SwarmName.parse(str(parsed)) == parsed


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-a",
        ".a",
        "a b",
        "a/b",
        "é",
        "a" * 64,
        "a#",
        "a#123",
        "a#1a2b3c4d",
        "a#" + "g" * 20,
        "a#" + "0" * 65,
        "a#1#2",
        "\u0430",
    ],
)
def test_names_that_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        SwarmName.parse(text)


@given(st.text(max_size=80))
def test_any_text_is_a_name_or_a_usage_error(text: str) -> None:
    try:
        name = SwarmName.parse(text).name
    except UsageError:
        return
    assert is_swarm_name(name)


def test_pins_have_as_many_digits_as_they_need() -> None:
    near = LLAMA[:24] + "f" * 40
    assert pinned("a", LLAMA) == "a#" + LLAMA[:20]
    assert pinned("a", LLAMA, (LLAMA, QWEN)) == "a#" + LLAMA[:20]
    assert pinned("a", LLAMA, (LLAMA, near)) == "a#" + LLAMA[:25]


@pytest.mark.parametrize("text", ["", "3", "5:5", "5:3", "-1:3", "0:4097", "a:b", "1:2:3", "0:99999"])
def test_spans_that_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Span.parse(text)


def test_spans() -> None:
    span = Span.parse("3:7")
    assert (str(span), len(span), list(span.blocks())) == ("3:7", 4, [3, 4, 5, 6])
    assert 3 in span
    assert 7 not in span


# --- resolving -------------------------------------------------------------------------------------------------------


def record(model: str, who: Identity = ALICE, at: int = NOW, name: str = "attic") -> SwarmRecord:
    return sign_record(who, name, model, now_ms=at)


def test_a_name_that_all_agree_on() -> None:
    known = record(LLAMA)
    assert resolve(SwarmName("attic"), {"p": [known], "q": [known], "r": []}).one() is known


def test_nobody_knows_it() -> None:
    for heard in ({}, {"p": [record(LLAMA, name="other")]}):
        with pytest.raises(UnknownSwarm, match=r"swarm attic: check the name, or ask a member for an invite"):
            resolve(SwarmName("attic"), heard).one()
    with pytest.raises(UnknownSwarm, match="attic#ffee0011000000000000:"):
        resolve(SwarmName("attic", QWEN), {"p": [record(LLAMA)]}).one()


def test_two_models_under_one_name_are_refused_with_a_list() -> None:
    heard = {"p": [record(LLAMA)], "q": [record(LLAMA)], "r": [record(QWEN, BOB)]}
    with pytest.raises(NameConflict) as refusal:
        resolve(SwarmName("attic"), heard).one()
    assert str(refusal.value) == (
        f"several swarms are called attic; join one of: attic#{LLAMA[:20]} (by {ALICE.peer_id}, 2 members), "
        f"attic#{QWEN[:20]} (by {BOB.peer_id}, 1 member)"
    )
    assert resolve(SwarmName("attic", QWEN[:20]), heard).one().model_hash == QWEN


def test_two_hashes_that_fit_a_pin_are_a_conflict_and_of_one_peer_the_first_counts() -> None:
    twins = [record(LLAMA[:20] + digit * 44, BOB) for digit in "ef"]
    wanted = SwarmName("attic", LLAMA[:20])
    with pytest.raises(NameConflict, match=rf"attic#{LLAMA[:20]}0.*attic#{LLAMA[:20]}e") as refusal:
        resolve(wanted, {"p": [record(LLAMA)], "q": twins}).one()
    assert "0f" not in str(refusal.value)


def test_a_flood_of_records_makes_a_short_list() -> None:
    flood = [record(f"{number:064x}", BOB) for number in range(1000)]
    with pytest.raises(NameConflict, match="and 993 more") as refusal:
        resolve(SwarmName("attic"), {"p": [record(LLAMA)], "q": [record(LLAMA)], "m": flood}).one()
    # What more members say comes first, so that a flood by one cannot hide it.
    assert "join one of: attic#1a2b3c4d" in str(refusal.value)


def test_records_of_one_model_are_one_swarm_and_the_first_counts() -> None:
    early, late = record(LLAMA, BOB, NOW - 5), record(LLAMA, ALICE, NOW)
    for control_frame in ([early, late], [late, early]):
        assert resolve(SwarmName("attic"), {"p": control_frame}).one() is early
    same_time = [record(LLAMA, who) for who in (ALICE, BOB)]
    chosen = resolve(SwarmName("attic"), {"p": same_time}).one()
    assert chosen.creator == min(ALICE.peer_id, BOB.peer_id)
