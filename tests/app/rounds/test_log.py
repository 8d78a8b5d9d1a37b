"""Records, statements and the log: what is signed is read again, what is forged or wrong is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.errors import RecordError
from app.rounds.decisions import leading_order
from app.rounds.grid import MOST_TOGETHER
from app.rounds.log import (
    ENTRY,
    MAX_LEFT_OUT,
    RoundEntry,
    beginning,
    codec_of,
    follow,
    is_better,
    make_entry,
    most_members,
    read_entry,
    replay,
    up_to,
)
from app.rounds.record import DOMAIN, read_training, sign_training
from app.rounds.statements import (
    ARRIVAL,
    MAX_ARRIVAL_BYTES,
    MAX_COUNTED_BYTES,
    MAX_CROWDED_BYTES,
    MAX_MEMBERS,
    RESULT,
    Result,
    check_counts,
    read_arrival,
    read_list,
    read_result,
    sign_list,
    sign_result,
    signed,
)
from app.rounds.testers import MOST_RATIO, MOST_TESTED
from app.rounds.train_jobs import terms_of
from p2p.envelope import NEVER, parse, seal
from p2p.identity import PEER_ID_CHARS, Identity
from tests.app.rounds.statements import (
    BY_PEER,
    NOW_MS,
    PEOPLE,
    RECORD,
    arrival,
    history,
    members,
    result,
    round_of,
)
from tests.app.swarms import identity

START = beginning(RECORD)


def changed(raw: bytes, domain: str, who: Identity = PEOPLE[0], **values: Any) -> bytes:
    """The statement with other values, signed again."""
    payload = json.loads(parse(raw).payload) | values
    return signed(who, domain, payload, NOW_MS)


def test_a_record_is_signed_and_named_by_its_content() -> None:
    raw = sign_training(PEOPLE[0], RECORD)
    assert read_training(raw, now_ms=NOW_MS) == RECORD
    assert replace(RECORD, seed=2).id != RECORD.id
    assert read_training(raw, now_ms=NOW_MS).id == RECORD.id


@pytest.mark.parametrize(
    "values",
    [
        {"name": "../fish"}, {"name": ""}, {"every": 0}, {"every": 50}, {"batch": 0}, {"length": 1}, {"rate": 0.0},
        {"optimiser": "sgd"}, {"wire": "int2"}, {"tokens": ["xy", 3]}, {"tokens": ["ab" * 32, 0]}, {"start": "ab"},
        {"model": "zz"}, {"steps": 10**10}, {"v": 2}, {"shape": []}, {"more": 1}, {"founder": "me"},
    ],
)  # fmt: skip
def test_a_record_with_a_wrong_field_is_refused(values: dict[str, Any]) -> None:
    raw = sign_training(PEOPLE[0], RECORD)
    with pytest.raises(RecordError):
        read_training(changed(raw, DOMAIN, **values), now_ms=NOW_MS)


def test_nobody_signs_a_record_in_the_name_of_another() -> None:
    raw = seal(PEOPLE[1], DOMAIN, RECORD.payload(), sequence=NOW_MS, expires_at_ms=NEVER)
    with pytest.raises(RecordError, match="founder"):
        read_training(raw, now_ms=NOW_MS)


@given(st.binary(max_size=400))
def test_any_bytes_are_refused_and_never_crash(data: bytes) -> None:
    for read in (read_arrival, read_list, read_result, read_entry, lambda raw, now: read_training(raw, now_ms=now)):
        with pytest.raises(RecordError):
            read(data, NOW_MS)


@given(st.integers(0, 2000), st.integers(0, 255))
def test_a_changed_byte_is_noticed(at: int, byte: int) -> None:
    raw = members(START, PEOPLE[:2]).raw
    at %= len(raw)
    forged = raw[:at] + bytes([byte]) + raw[at + 1 :]
    if forged != raw:
        with pytest.raises(RecordError):
            read_list(forged, NOW_MS)


def test_a_list_names_arrivals_of_its_round_once() -> None:
    one, two = arrival(PEOPLE[0], START), arrival(PEOPLE[1], START)
    for wrong in (
        [one, one],
        [one, arrival(PEOPLE[1], replace(START, round=1))],
        [one, arrival(PEOPLE[1], START, job=b"j" * 32)],
    ):
        with pytest.raises(RecordError):
            sign_list(PEOPLE[0], RECORD.id, 0, wrong, NOW_MS)
    with pytest.raises(RecordError, match="signed it"):
        sign_list(PEOPLE[2], RECORD.id, 0, [one, two], NOW_MS)
    assert sign_list(PEOPLE[0], RECORD.id, 0, [one, two], NOW_MS).members == [PEOPLE[0].peer_id, PEOPLE[1].peer_id]


def test_a_result_is_read_as_it_was_signed() -> None:
    found = members(START, PEOPLE[:2])
    peer = PEOPLE[1].peer_id
    made = Result(found.job, 0, found.hash, b"", {peer: "it does not answer"}, {peer: (0.25, -0.5)}, past=(-12, 998))
    assert replace(sign_result(PEOPLE[0], made, NOW_MS), raw=b"", peer="") == made


@pytest.mark.parametrize(
    "report", [{"p": 3}, {"p": [1]}, {"p": [-1, 0]}, {"p": [1, 7]}, {"p": ["a", "b"]}, {"p" * 500: [1, 0]}]
)
def test_a_report_that_is_none_is_refused(report: dict[str, Any]) -> None:
    found = members(START, PEOPLE[:2])
    raw = result(PEOPLE[0], found, b"r" * 32, {}).raw
    with pytest.raises(RecordError):
        read_result(changed(raw, "shoal/round/result", report=report), NOW_MS)


def test_a_log_is_replayed() -> None:
    entries = history(4)
    standing = replay(RECORD, entries)
    assert (standing.round, standing.step, standing.tokens) == (4, 40, 100 + 3 * 300)
    assert standing.start == 10 * 4 * (1 + 3 + 3 + 3)
    assert standing.root == entries[-1].root
    assert set(standing.members) == {one.peer_id for one in PEOPLE[:3]}


def test_a_log_is_cut_after_the_round_whose_state_there_is() -> None:
    entries = history(3)
    assert up_to(entries, entries[2].root) == entries
    assert up_to(entries, entries[1].root) == entries[:2]
    assert up_to(entries, b"x" * 32) == []
    assert up_to([], entries[1].root) == []


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"codec": "int4"}, "does not allow"), ({"codec": "f32" * 9}, "codec"), ({"codec": 8}, "codec"),
        ({"every": 21}, "outside"), ({"every": 4}, "outside"), ({"every": 0}, "every"),
    ],
)  # fmt: skip
def test_an_entry_with_another_number_format_or_too_many_steps_is_refused(values: dict[str, Any], why: str) -> None:
    [entry] = history(1)
    assert follow(RECORD, START, entry).codec == "int8"
    with pytest.raises(RecordError, match=why):
        follow(RECORD, START, read_entry(changed(entry.raw, ENTRY, **values), NOW_MS))


@pytest.mark.parametrize("name", ["", "somebody", "\x1b]0;a title\x07" + 40 * "x", PEOPLE[1].peer_id[:-1] + "0"])
def test_the_next_members_are_peers(name: str) -> None:
    """They are shown to people, asked and waited for; the one who leads could write anything there."""
    [entry] = history(1)
    named = leading_order(RECORD.id, 1, (*entry.next, name))
    with pytest.raises(RecordError, match="peer ids"):
        read_entry(changed(entry.raw, ENTRY, next=named), NOW_MS)


def test_the_steps_of_a_round_at_most_double() -> None:
    few = replace(beginning(RECORD), every=5)
    entry, _ = round_of(few, PEOPLE[:1], every=10)
    assert entry.every == 10
    with pytest.raises(RecordError, match="too many after 5"):
        round_of(few, PEOPLE[:1], every=11)


def test_the_number_formats_of_rounds_are_those_of_the_record() -> None:
    assert round_of(START, PEOPLE[:1], codec="f32")[1].codec == "f32"
    assert beginning(replace(RECORD, wire="f32")).codec == "f32"
    assert [replace(RECORD, wire=wire).codecs for wire in ("f32", "int8", "int4")] == [("f32",), ("int8",), ("int4",)]


def test_the_number_format_of_a_round_is_named_by_the_entry_before() -> None:
    first, standing = round_of(START, PEOPLE[:1], codec="f32")
    second, _ = round_of(standing, PEOPLE[:1], codec="int8", steps=7)
    entries = [first, second]
    assert [codec_of(RECORD, entries, number) for number in range(3)] == ["int8", "f32", "int8"]
    assert [terms_of(RECORD, entries[:count], 9).wire for count in (1, 2)] == ["int8", "f32"]
    assert (terms_of(RECORD, entries, 9).every, terms_of(RECORD, entries, 9).held_rows) == (7, 9)


def test_entries_of_old_logs_have_the_number_format_of_the_first_round() -> None:
    [entry] = history(1)
    payload = json.loads(parse(entry.raw).payload)
    del payload["codec"]
    old = read_entry(signed(PEOPLE[0], ENTRY, payload, NOW_MS), NOW_MS)
    assert follow(RECORD, START, old).codec == "int8"


def test_two_that_send_one_change_are_left_out_after_two_rounds() -> None:
    people, twins = PEOPLE[:4], [one.peer_id for one in PEOPLE[2:4]]
    entries = history(3, people, twins=twins)
    assert entries[1].doubted.keys() == {*twins}
    assert entries[2].left_out.keys() == {*twins}
    assert replay(RECORD, entries).members == entries[2].next
    forged = changed(entries[1].raw, ENTRY, BY_PEER[entries[1].list.leader], doubted={})
    with pytest.raises(RecordError, match="doubts"):
        replay(RECORD, [entries[0], read_entry(forged, NOW_MS)])


def test_who_sends_the_last_merged_change_is_left_out_after_two_rounds() -> None:
    rider = PEOPLE[2].peer_id
    entries = history(3, rider=rider)
    assert entries[1].doubted.keys() == {rider}
    assert "merged one of the last round" in entries[2].left_out[rider]
    assert rider not in replay(RECORD, entries).members
    forged = changed(entries[1].raw, ENTRY, BY_PEER[entries[1].list.leader], doubted={})
    with pytest.raises(RecordError, match="doubts"):
        replay(RECORD, [entries[0], read_entry(forged, NOW_MS)])


@pytest.mark.parametrize("past", [3, [1.5], [2000], [True], [0] * 17, ["a"]])
def test_a_likeness_that_is_none_is_refused(past: Any) -> None:
    raw = result(PEOPLE[0], members(START, PEOPLE[:2]), b"r" * 32, {}).raw
    with pytest.raises(RecordError):
        read_result(changed(raw, RESULT, past=past), NOW_MS)
    payload = json.loads(parse(raw).payload)
    del payload["past"]  # of a version that did not know it
    assert read_result(signed(PEOPLE[0], RESULT, payload, NOW_MS), NOW_MS).past == ()


def test_a_liar_is_left_out_after_two_rounds_and_stays_out() -> None:
    liar = PEOPLE[2].peer_id
    entries = history(3, liar=liar)
    assert entries[1].doubted.keys() == {liar}
    assert not entries[1].left_out
    standing = replay(RECORD, entries)
    assert standing.banned.keys() == {liar}
    assert liar not in standing.members
    with pytest.raises(RecordError, match="was left out"):
        round_of(standing, PEOPLE[:3])
    entry, standing = round_of(standing, PEOPLE[:2], present=[liar])
    assert liar not in entry.next
    assert standing.banned.keys() == {liar}


WRONG: dict[str, Callable[[RoundEntry], dict[str, Any]]] = {
    "another round": lambda entry: {"round": 5},
    "another past": lambda entry: {"prev": "ab" * 32},
    "another root": lambda entry: {"root": "ab" * 32},
    "tokens": lambda entry: {"tokens": entry.tokens + 1},
    "steps": lambda entry: {"step": entry.step + 1},
    "positions": lambda entry: {"start": 0},
    "too many steps": lambda entry: {"every": 21},
    "a result is missing": lambda entry: {"results": json.loads(parse(entry.raw).payload)["results"][1:]},
    "doubts": lambda entry: {"doubted": {PEOPLE[0].peer_id: "I do not like it"}},
    "left out": lambda entry: {"left_out": {PEOPLE[0].peer_id: "I do not like it"}},
    "drops a member": lambda entry: {"next": list(entry.next[1:])},
    "another order": lambda entry: {"next": list(reversed(entry.next))},
    "no list": lambda entry: {"list": []},
}


@pytest.mark.parametrize("what", WRONG)
def test_an_entry_that_does_not_follow_is_refused(what: str) -> None:
    entries = history(2)
    standing = replay(RECORD, entries[:1])
    leader = BY_PEER[entries[1].list.leader]
    raw = changed(entries[1].raw, ENTRY, leader, **WRONG[what](entries[1]))
    with pytest.raises(RecordError):
        follow(RECORD, standing, read_entry(raw, NOW_MS))
    follow(RECORD, standing, read_entry(changed(entries[1].raw, ENTRY, leader), NOW_MS))


def test_an_entry_is_signed_by_who_led() -> None:
    entries = history(2)
    other = next(one for one in PEOPLE if one.peer_id != entries[1].list.leader)
    with pytest.raises(RecordError, match="led it"):
        read_entry(changed(entries[1].raw, ENTRY, other), NOW_MS)


def test_claims_beyond_the_assigned_data_are_refused() -> None:
    standing = replay(RECORD, history(1))
    most = standing.every * RECORD.batch * RECORD.length
    round_of(standing, PEOPLE[:2], tokens=most)
    with pytest.raises(RecordError, match="more tokens"):
        round_of(standing, PEOPLE[:2], tokens=most + 1)
    with pytest.raises(RecordError, match="more tokens"):
        round_of(standing, PEOPLE[:2], steps=standing.every + 1)


def test_a_round_counts_only_those_who_were_to_take_part_in_it() -> None:
    standing = replay(RECORD, history(1, PEOPLE[:3]))
    with pytest.raises(RecordError, match="was not to take part"):
        round_of(standing, [PEOPLE[0], PEOPLE[4]])
    with pytest.raises(RecordError, match="was not to take part"):
        round_of(standing, PEOPLE[3:5])  # strangers alone, as many as a quorum


def crowd(count: int) -> list[Identity]:
    """Identities of many islands."""
    people = [identity(number) for number in range(count)]
    BY_PEER.update({one.peer_id: one for one in people})
    return people


@pytest.mark.parametrize("is_grid", [False, True])
def test_the_largest_round_fits_into_its_entry(is_grid: bool) -> None:
    record = replace(RECORD, grid=is_grid)
    people = crowd(most_members(record))
    _, standing = round_of(START, PEOPLE[:1], present=[one.peer_id for one in people])
    left_out = {"x" * PEER_ID_CHARS: "its change has the norm 1.23e+10, the median is 1.23e+10"}
    standing = replace(
        standing, left_out={peer[:-1] + str(at): why for at in range(9) for peer, why in left_out.items()}
    )
    found = members(standing, people, tokens=2**40, traces=b"t" * 32, network=MAX_MEMBERS - 1)
    tested = (MOST_RATIO,) * 2 * MOST_TESTED
    errors = (MOST_RATIO,) * MOST_TESTED
    row = found.members[: MOST_TOGETHER if is_grid else None]
    report, past = {peer: (1.23456e-12, -0.123456) for peer in row}, (-1000,) * len(row)
    results = [result(BY_PEER[peer], found, b"r" * 32, report, past, tested, errors) for peer in found.members]
    most = MAX_CROWDED_BYTES if is_grid else MAX_COUNTED_BYTES + len(results[0].raw) - len(payload_of(results[0]))
    fullest = max(len(one.raw) for one in results)
    assert fullest <= most
    padded = [changed(one.raw, RESULT, BY_PEER[one.peer], more="x" * (most - fullest - 10)) for one in results]
    for raw in padded:
        check_counts(read_result(raw, NOW_MS), len(people))
    entry = make_entry(
        BY_PEER[found.leader], record, standing, found, [read_result(raw, NOW_MS) for raw in padded], every=10,
        codec="int8", present=(), now_ms=NOW_MS,
    )  # fmt: skip
    assert len(entry.list.members) == len(people) == (MAX_MEMBERS if is_grid else 16)


def payload_of(one: Result) -> bytes:
    return parse(one.raw).payload


def test_a_result_too_long_for_a_crowded_round_is_refused() -> None:
    found = members(START, PEOPLE[:1])
    long = read_result(changed(result(PEOPLE[0], found, b"r" * 32, {}).raw, RESULT, more="x" * 1100), NOW_MS)
    check_counts(long, 16)
    with pytest.raises(RecordError, match="too long"):
        check_counts(long, 17)


def test_a_result_too_long_for_an_entry_is_refused() -> None:
    found = members(START, PEOPLE[:1])
    raw = result(PEOPLE[0], found, b"r" * 32, {}).raw
    with pytest.raises(RecordError, match="too long"):
        read_result(changed(raw, RESULT, more="x" * MAX_COUNTED_BYTES), NOW_MS)
    with pytest.raises(RecordError, match="too large"):
        read_arrival(changed(found.arrivals[0].raw, ARRIVAL, more="x" * MAX_ARRIVAL_BYTES), NOW_MS)


def test_a_round_with_more_newcomers_than_places_keeps_those_who_took_part() -> None:
    people = crowd(2 * MAX_MEMBERS)
    _, standing = round_of(START, PEOPLE[:1], present=[one.peer_id for one in PEOPLE[:3]])
    entry, after = round_of(standing, PEOPLE[:2], present=[one.peer_id for one in people])
    assert len(after.members) == 16
    assert {one.peer_id for one in PEOPLE[:3]} <= {*after.members}  # the third one was late
    assert {one.peer_id for one in PEOPLE[:2]} == {*entry.list.members}


def test_members_left_out_of_a_long_job_fit_into_its_entries() -> None:
    _, standing = round_of(START, PEOPLE[:1], present=[one.peer_id for one in PEOPLE[:4]])
    many = {f"peer{number:02}": "why" for number in range(MAX_LEFT_OUT)}
    standing = replace(standing, left_out=many, doubts=((PEOPLE[3].peer_id,),))
    _, after = round_of(standing, PEOPLE[:4], liar=PEOPLE[3].peer_id)
    assert len(after.banned) == MAX_LEFT_OUT
    assert PEOPLE[3].peer_id in after.banned


def test_reports_on_made_up_peers_frame_nobody() -> None:
    _, standing = round_of(START, PEOPLE[:1], present=[one.peer_id for one in PEOPLE[:3]])
    found = members(standing, PEOPLE[:3])
    honest = {peer: (1.0, 0.5) for peer in found.members}
    ghosts = {f"ghost{number}": (1e9, 1.0) for number in range(12)}
    root = b"r" * 32
    results = [result(BY_PEER[peer], found, root, honest | (ghosts if at else {})) for at, peer in enumerate(honest)]
    entry = make_entry(
        BY_PEER[found.leader], RECORD, standing, found, results, every=10, codec="int8", present=(), now_ms=NOW_MS
    )
    assert not entry.doubted


def test_members_with_different_roots_make_no_round() -> None:
    standing = replay(RECORD, history(1))
    found = members(standing, PEOPLE[:2])
    results = [result(BY_PEER[peer], found, peer[-32:].encode(), {}) for peer in found.members]
    entry = make_entry(
        BY_PEER[found.leader], RECORD, standing, found, results, every=10, codec="int8", present=(), now_ms=NOW_MS
    )
    with pytest.raises(RecordError, match="same state"):
        follow(RECORD, standing, entry)


def test_of_two_histories_the_one_with_more_known_tokens_goes_on() -> None:
    common = history(1, PEOPLE[:4])
    standing = replay(RECORD, common)
    few, after = round_of(standing, PEOPLE[:1], tokens=600, present=[PEOPLE[4].peer_id])
    more, _ = round_of(standing, PEOPLE[1:3])
    assert is_better([*common, few], [*common, more])
    assert not is_better([*common, more], [*common, few])
    # a long history of one member, or of strangers who came after the split, does not count before a quorum's
    longer = [*common, few]
    for people in (PEOPLE[:1], [PEOPLE[0], PEOPLE[4]]):
        entry, after = round_of(after, people, tokens=600, present=[PEOPLE[4].peer_id])
        longer.append(entry)
    assert is_better(longer, [*common, more])
    assert not is_better([*common, more], longer)
    assert is_better(common, [*common, few])
    assert not is_better([*common, few], common)
    assert not is_better(common, common)
