"""Records, statements and the log: what is signed is read again, what is forged or wrong is refused."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.errors import RecordError
from app.rounds.decisions import leading_order
from app.rounds.grid import MOST_TOGETHER
from app.rounds.log import (
    ENTRY,
    MAX_ENTRY_BYTES,
    MAX_LEFT_OUT,
    RECENT_ROUNDS,
    RoundEntry,
    beginning,
    check_counts,
    codec_of,
    entry_bytes,
    follow,
    had_quorum,
    is_better,
    make_entry,
    most_entry_bytes,
    most_left_out,
    read_entry,
    replay,
    steps_s,
    took_part,
    up_to,
)
from app.rounds.record import DOMAIN, MAX_EVERY, MAX_STEPS, TrainingRecord, read_training, sign_training
from app.rounds.statements import (
    ARRIVAL,
    LIST,
    MAX_ARRIVAL_BYTES,
    MAX_ATTEMPTS,
    MAX_COUNTED_BYTES,
    MAX_MEMBERS,
    MAX_ROUNDS,
    MAX_TOKENS,
    MAX_WHY_CHARS,
    RESULT,
    Result,
    list_bytes,
    read_arrival,
    read_list,
    read_result,
    sign_arrival,
    sign_list,
    sign_result,
    signed,
    texts_of,
)
from app.rounds.testers import MOST_RATIO, MOST_TESTED
from app.rounds.train_jobs import terms_of
from p2p.envelope import MAX_PAYLOAD_BYTES, NEVER, parse, seal
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
    for read in (read_arrival, read_list, read_result, read_entry, partial(read_training, now_ms=NOW_MS)):
        with pytest.raises(RecordError):
            read(data)


def test_a_statement_with_the_time_of_another_clock_is_read_by_everybody() -> None:
    found = arrival(PEOPLE[0], START)
    for day in (-1000, 1, 10**6):
        ahead = sign_arrival(PEOPLE[0], found, NOW_MS + day * 86_400_000)
        assert read_arrival(ahead.raw) == replace(found, raw=ahead.raw, at_ms=ahead.at_ms)


@given(st.integers(0, 2000), st.integers(0, 255))
def test_a_changed_byte_is_noticed(at: int, byte: int) -> None:
    raw = members(START, PEOPLE[:2]).raw
    at %= len(raw)
    forged = raw[:at] + bytes([byte]) + raw[at + 1 :]
    if forged != raw:
        with pytest.raises(RecordError):
            read_list(forged)


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
    assert replace(sign_result(PEOPLE[0], made, NOW_MS), raw=b"", peer="", at_ms=0) == made


@pytest.mark.parametrize(
    "report", [{"p": 3}, {"p": [1]}, {"p": [-1, 0]}, {"p": [1, 7]}, {"p": ["a", "b"]}, {"p" * 500: [1, 0]}]
)
def test_a_report_that_is_none_is_refused(report: dict[str, Any]) -> None:
    found = members(START, PEOPLE[:2])
    raw = result(PEOPLE[0], found, b"r" * 32, {}).raw
    with pytest.raises(RecordError):
        read_result(changed(raw, "shoal/round/result", report=report))


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
        ({"codec": "int2"}, "does not allow"), ({"codec": "f32" * 9}, "codec"), ({"codec": 8}, "codec"),
        ({"every": 21}, "outside"), ({"every": 4}, "outside"), ({"every": 0}, "every"),
    ],
)  # fmt: skip
def test_an_entry_with_another_number_format_or_too_many_steps_is_refused(values: dict[str, Any], why: str) -> None:
    [entry] = history(1)
    assert follow(RECORD, START, entry).codec == "int8"
    with pytest.raises(RecordError, match=why):
        follow(RECORD, START, read_entry(changed(entry.raw, ENTRY, **values)))


def test_free_places_are_given_in_the_order_in_which_others_stand_in_line() -> None:
    record = replace(RECORD, grid=True, islands=3)
    standing = beginning(record)
    found = members(standing, PEOPLE[:1])
    results = [result(PEOPLE[0], found, b"r" * 32, {PEOPLE[0].peer_id: (1.0, 0.5)})]
    one, two, three = (who.peer_id for who in PEOPLE[1:4])
    for line in ([one, two, three], [three, PEOPLE[0].peer_id, one, two]):
        entry = make_entry(
            PEOPLE[0], record, standing, found, results, every=10, codec="int8", present=line, now_ms=NOW_MS
        )
        first = [peer for peer in line if peer != PEOPLE[0].peer_id][:2]
        assert {*entry.next} == {PEOPLE[0].peer_id, *first}


def test_who_took_part_lately_is_told_by_the_last_rounds() -> None:
    first, standing = round_of(START, PEOPLE[:1], present=[PEOPLE[1].peer_id])
    second, _ = round_of(standing, PEOPLE[1:2])
    assert took_part([]) == frozenset()
    assert took_part([first, second]) == {PEOPLE[0].peer_id, PEOPLE[1].peer_id}
    assert took_part([first] + RECENT_ROUNDS * [second]) == {PEOPLE[1].peer_id}


@pytest.mark.parametrize("name", ["", "somebody", "\x1b]0;a title\x07" + 40 * "x", PEOPLE[1].peer_id[:-1] + "0"])
def test_the_next_members_are_peers(name: str) -> None:
    """They are shown to people, asked and waited for; the one who leads could write anything there."""
    [entry] = history(1)
    named = leading_order(RECORD.id, 1, (*entry.next, name))
    with pytest.raises(RecordError, match="peer ids"):
        read_entry(changed(entry.raw, ENTRY, next=named))


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
    old = read_entry(signed(PEOPLE[0], ENTRY, payload, NOW_MS))
    assert follow(RECORD, START, old).codec == "int8"


def test_two_that_send_one_change_are_left_out_after_two_rounds() -> None:
    people, twins = PEOPLE[:4], [one.peer_id for one in PEOPLE[2:4]]
    entries = history(3, people, twins=twins)
    assert entries[1].doubted.keys() == {*twins}
    assert entries[2].left_out.keys() == {*twins}
    assert replay(RECORD, entries).members == entries[2].next
    forged = changed(entries[1].raw, ENTRY, BY_PEER[entries[1].list.leader], doubted={})
    with pytest.raises(RecordError, match="doubts"):
        replay(RECORD, [entries[0], read_entry(forged)])


def test_who_sends_the_last_merged_change_is_left_out_after_two_rounds() -> None:
    rider = PEOPLE[2].peer_id
    entries = history(3, rider=rider)
    assert entries[1].doubted.keys() == {rider}
    assert "merged one of the last round" in entries[2].left_out[rider]
    assert rider not in replay(RECORD, entries).members
    forged = changed(entries[1].raw, ENTRY, BY_PEER[entries[1].list.leader], doubted={})
    with pytest.raises(RecordError, match="doubts"):
        replay(RECORD, [entries[0], read_entry(forged)])


@pytest.mark.parametrize("past", [3, [1.5], [2000], [True], [0] * 17, ["a"]])
def test_a_likeness_that_is_none_is_refused(past: Any) -> None:
    raw = result(PEOPLE[0], members(START, PEOPLE[:2]), b"r" * 32, {}).raw
    with pytest.raises(RecordError):
        read_result(changed(raw, RESULT, past=past))
    payload = json.loads(parse(raw).payload)
    del payload["past"]  # of a version that did not know it
    assert read_result(signed(PEOPLE[0], RESULT, payload, NOW_MS)).past == ()


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
        follow(RECORD, standing, read_entry(raw))
    follow(RECORD, standing, read_entry(changed(entries[1].raw, ENTRY, leader)))


def test_an_entry_is_signed_by_who_led() -> None:
    entries = history(2)
    other = next(one for one in PEOPLE if one.peer_id != entries[1].list.leader)
    with pytest.raises(RecordError, match="led it"):
        read_entry(changed(entries[1].raw, ENTRY, other))


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


OLD, OLD_GRID = RECORD, replace(RECORD, grid=True)
NEW = replace(RECORD, grid=True, islands=MAX_MEMBERS)


@pytest.mark.parametrize(("record", "most"), [(OLD, 16), (OLD_GRID, 20), (NEW, 64)])
def test_the_largest_honest_round_is_made_and_followed(record: TrainingRecord, most: int) -> None:
    record = replace(record, steps=10**9)
    people = crowd(most)
    assert record.most_members == len(people)
    standing = replace(beginning(record), members=tuple(one.peer_id for one in people), tokens=2**49, step=10**8)
    why = "its change of the last round makes the loss on text that it read 1000.00 times as large"
    left_out = {str(at).zfill(PEER_ID_CHARS): why for at in range(most_left_out(record))}
    standing = replace(standing, left_out=left_out)
    more: dict[str, Any] = {"tokens": 320, "traces": b"t" * 32}
    arrivals = [
        arrival(one, standing, **more, job=record.id, network=most - 1 if record.grid else None) for one in people
    ]
    leader = people[0]
    found = sign_list(leader, record.id, MAX_ATTEMPTS, arrivals, NOW_MS)
    row = found.members[: MOST_TOGETHER if record.grid else None]
    report, past = {peer: (1.23456e-12, -0.123456) for peer in row}, (-1000,) * len(row)
    tested, errors = (MOST_RATIO,) * 2 * MOST_TESTED, (MOST_RATIO,) * MOST_TESTED
    results = [result(one, found, b"r" * 32, report, past, tested, errors) for one in people]
    for one in results:
        check_counts(record, len(people), one)
    entry = make_entry(leader, record, standing, found, results, every=10, codec="int8", present=(), now_ms=NOW_MS)
    assert len(parse(entry.raw, MAX_ENTRY_BYTES).payload) <= most_entry_bytes(record)
    after = follow(record, standing, entry)
    assert {*after.members} == {one.peer_id for one in people}
    assert len(after.banned) == most_left_out(record)


@pytest.mark.parametrize(
    ("record", "count"),
    [
        (record, count)
        for record in (OLD, OLD_GRID, NEW)
        for count in (1, 2, 9, 16, 17, 20, 21, 64)
        if count <= record.most_members
    ],
)
def test_whatever_is_accepted_fits_into_the_entry(record: TrainingRecord, count: int) -> None:
    """Every part of it is as long as its own bound allows."""
    people = crowd(count)
    whole = people[0]
    long = changed(arrival(whole, START).raw, ARRIVAL, whole, more="")
    long = changed(long, ARRIVAL, whole, more="x" * (MAX_ARRIVAL_BYTES - len(parse(long).payload)))
    read_arrival(long)
    assert len(parse(long).payload) == MAX_ARRIVAL_BYTES
    values = {
        "job": "f" * 64, "round": MAX_ROUNDS, "attempt": MAX_ATTEMPTS, "prev": "f" * 64,
        "arrivals": texts_of([long] * count),
    }  # fmt: skip
    members_raw = signed(whole, LIST, values, NOW_MS)
    assert len(parse(members_raw).payload) <= list_bytes(count) <= MAX_PAYLOAD_BYTES
    short = changed(result(whole, members(START, PEOPLE[:1]), b"r" * 32, {}).raw, RESULT, whole, more="")
    for size in range(MAX_COUNTED_BYTES, 0, -1):
        one = changed(short, RESULT, whole, more="x" * (size - len(parse(short).payload)))
        with contextlib.suppress(RecordError):
            check_counts(record, count, read_result(one))
            break
    else:
        pytest.fail("no result is accepted")
    assert size == MAX_COUNTED_BYTES or (record is OLD_GRID and count > 16)
    reasons = {str(at).zfill(PEER_ID_CHARS): "w" * MAX_WHY_CHARS for at in range(most_left_out(record))}
    values = {
        "job": "f" * 64, "round": MAX_ROUNDS, "prev": "f" * 64, "list": texts_of([members_raw]),
        "results": texts_of([one] * count), "root": "f" * 64, "doubted": dict([*reasons.items()][:count]),
        "left_out": reasons, "next": [one.peer_id for one in people], "every": MAX_EVERY, "codec": "int8",
        "step": MAX_STEPS + MAX_EVERY, "start": 2**62, "tokens": MAX_TOKENS,
    }  # fmt: skip
    if count > len(reasons):
        values["doubted"] = {one.peer_id: "w" * MAX_WHY_CHARS for one in people}
    raw = signed(whole, ENTRY, values, NOW_MS, most_entry_bytes(record))
    payload = parse(raw, MAX_ENTRY_BYTES).payload
    assert len(payload) <= entry_bytes(count, len(reasons), len(one)) <= most_entry_bytes(record)


def test_a_result_too_long_for_a_crowded_round_of_an_old_job_is_refused() -> None:
    found = members(START, PEOPLE[:1])
    long = read_result(changed(result(PEOPLE[0], found, b"r" * 32, {}).raw, RESULT, more="x" * 1100))
    check_counts(OLD_GRID, 16, long)
    check_counts(NEW, 64, long)
    with pytest.raises(RecordError, match="too long"):
        check_counts(OLD_GRID, 20, long)


def test_an_entry_longer_than_older_versions_read_ends_no_old_job() -> None:
    entry, _ = round_of(START, PEOPLE[:1])
    values = json.loads(parse(entry.raw).payload) | {"more": "x" * MAX_PAYLOAD_BYTES}
    with pytest.raises(RecordError, match="too large"):
        signed(PEOPLE[0], ENTRY, values, NOW_MS)
    long = read_entry(signed(PEOPLE[0], ENTRY, values, NOW_MS, MAX_ENTRY_BYTES))
    with pytest.raises(RecordError, match="too long for this job"):
        follow(RECORD, START, long)


@pytest.mark.parametrize("people", [PEOPLE[:1], PEOPLE[:5]])
def test_an_entry_is_no_longer_than_what_it_says(people: Sequence[Identity]) -> None:
    """Its members could else have those that read their log keep what they like in memory."""
    common = history(2, people, every=5)
    standing = replay(RECORD, common)
    entry, _ = round_of(standing, people, every=5)
    follow(RECORD, standing, entry)
    long = changed(entry.raw, ENTRY, BY_PEER[entry.list.leader], more="x" * 1000)
    with pytest.raises(RecordError, match="too long"):
        follow(RECORD, standing, read_entry(long))


def test_a_record_names_its_islands_only_with_a_grid() -> None:
    assert read_training(sign_training(PEOPLE[0], NEW), now_ms=NOW_MS) == NEW
    for wrong in (replace(NEW, grid=False), replace(NEW, islands=MAX_MEMBERS + 1)):
        with pytest.raises(RecordError, match="islands"):
            sign_training(PEOPLE[0], wrong)


def test_a_version_that_does_not_know_the_number_of_islands_refuses_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the previous version does, which takes `islands` for an unknown field."""
    raw = sign_training(PEOPLE[0], NEW)
    payload = TrainingRecord.payload
    monkeypatch.setattr(TrainingRecord, "payload", lambda self: payload(replace(self, islands=0)))
    with pytest.raises(RecordError, match="not canonical"):
        read_training(raw, now_ms=NOW_MS)


def test_reasons_of_others_never_make_a_result_too_long() -> None:
    people = crowd(MAX_MEMBERS)
    for why in ("plain", "x" * 1000, '"' * 1000, "\x00" * 1000, "\U0001f41f" * 1000):
        failed = {one.peer_id: why for one in people}
        report = {peer: (1.23456e-12, -0.123456) for peer in [*failed][:16]}
        made = Result(RECORD.id, MAX_ROUNDS, b"l" * 32, b"", failed, report, past=(-1000,) * 16)
        assert sign_result(people[0], made, NOW_MS).failed.keys() == failed.keys()


def test_a_statement_is_verified_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = members(START, PEOPLE[:1], steps=7)
    seen: list[bytes] = []

    def is_signed(key: bytes, data: bytes, signature: bytes) -> bool:
        seen.append(data)
        return False

    monkeypatch.setattr("p2p.envelope.is_signed", is_signed)
    assert read_list(found.raw) is found
    assert read_arrival(found.arrivals[0].raw) is found.arrivals[0]
    assert not seen
    for _ in range(2):  # what was refused is looked at again
        with pytest.raises(RecordError, match="forged"):
            read_arrival(found.arrivals[0].raw[:-1] + b"x")
    assert len(seen) == 2


def test_a_result_too_long_for_an_entry_is_refused() -> None:
    found = members(START, PEOPLE[:1])
    raw = result(PEOPLE[0], found, b"r" * 32, {}).raw
    with pytest.raises(RecordError, match="too long"):
        read_result(changed(raw, RESULT, more="x" * MAX_COUNTED_BYTES))
    with pytest.raises(RecordError, match="too large"):
        read_arrival(changed(found.arrivals[0].raw, ARRIVAL, more="x" * MAX_ARRIVAL_BYTES))


def test_a_round_with_more_newcomers_than_places_keeps_those_who_took_part() -> None:
    people = crowd(40)
    _, standing = round_of(START, PEOPLE[:1], present=[one.peer_id for one in PEOPLE[:3]])
    entry, after = round_of(standing, PEOPLE[:2], present=[one.peer_id for one in people])
    assert len(after.members) == 16
    assert {one.peer_id for one in PEOPLE[:3]} <= {*after.members}  # the third one was late
    assert {one.peer_id for one in PEOPLE[:2]} == {*entry.list.members}


def test_members_left_out_of_a_long_job_fit_into_its_entries() -> None:
    _, standing = round_of(START, PEOPLE[:1], present=[one.peer_id for one in PEOPLE[:4]])
    many = {f"peer{number:02}": "why" for number in range(MAX_LEFT_OUT)}
    standing = replace(standing, left_out=many, doubts=(frozenset({PEOPLE[3].peer_id}),))
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
    common = history(2, PEOPLE[:4], every=5)
    standing = replay(RECORD, common)
    few, after = round_of(standing, PEOPLE[:1], tokens=320, every=5, present=[PEOPLE[4].peer_id])
    more, _ = round_of(standing, PEOPLE[1:4], every=5)
    assert is_better([*common, few], [*common, more])
    assert not is_better([*common, more], [*common, few])
    # a long history of one member, or of strangers who came after the split, does not count before a quorum's
    longer = [*common, few]
    for people in (PEOPLE[:1], [PEOPLE[0], PEOPLE[4]]):
        entry, after = round_of(after, people, tokens=320, every=5, present=[PEOPLE[4].peer_id])
        longer.append(entry)
    assert is_better(longer, [*common, more])
    assert not is_better([*common, more], longer)
    assert is_better(common, [*common, few])
    assert not is_better([*common, few], common)
    assert not is_better(common, common)


def test_members_that_were_only_to_take_part_decide_nothing_where_histories_part() -> None:
    standing = replay(RECORD, history(2, PEOPLE[:3], every=5))
    common, (honest, named) = history(2, PEOPLE[:3], every=5), (PEOPLE[:3], PEOPLE[3:])
    entry, standing = round_of(standing, honest, every=5, present=[one.peer_id for one in named])
    common.append(entry)
    true, _ = round_of(standing, honest, every=5)
    made_up, after = round_of(standing, named, every=5)
    longer = [*common, made_up, round_of(after, named, every=5)[0]]
    assert had_quorum(common, [true])
    assert not is_better([*common, true], longer)
    assert is_better(longer, [*common, true])


def timed(arrived_s: list[list[float]], ended_s: list[list[float]]) -> list[RoundEntry]:
    """Rounds whose members arrived and ended at these times after the job was founded."""

    def dated(some: Any, times_s: list[float]) -> Any:
        pairs = zip(some, times_s, strict=True)
        return tuple(replace(one, at_ms=int(RECORD.created_ms + 1000 * at_s)) for one, at_s in pairs)

    entries = []
    for entry, arrived, ended in zip(history(len(arrived_s), PEOPLE[:2]), arrived_s, ended_s, strict=True):
        members = replace(entry.list, arrivals=dated(entry.list.arrivals, arrived))
        entries.append(replace(entry, list=members, results=dated(entry.results, ended)))
    return entries


def test_how_long_steps_take_is_read_from_the_log() -> None:
    assert steps_s(RECORD, [], 10) == 0
    assert steps_s(RECORD, timed([[30]], [[40]]), 10) == 30  # since the job was founded
    entries = timed([[30], [73, 70], [160, 165]], [[40], [99, 100], [200, 200]])
    assert steps_s(RECORD, entries, 10) == 30  # of 30, 30 and 60 for ten steps
    assert steps_s(RECORD, entries, 20) == 60


@pytest.mark.parametrize("wrong_s", [-1e6, 1e6])
def test_one_of_two_with_a_wrong_clock_does_not_make_steps_seem_longer(wrong_s: float) -> None:
    arrived = [[30.0], *([float(at), at + wrong_s] for at in (70, 110, 150))]
    ended = [[40.0], *([float(at), at + wrong_s] for at in (80, 120, 160))]
    assert 0 <= steps_s(RECORD, timed(arrived, ended), 10) <= 30
