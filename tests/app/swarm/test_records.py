"""Swarm records, announcements and suspicions: compact, signed by their owner, and refused where they lie."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.canonical_json import canonical
from app.core.span import Span
from app.swarm.records import (
    ANNOUNCEMENT_DOMAIN,
    MAX_LIFETIME_MS,
    MAX_RATES,
    MAX_RTTS,
    SUSPICION_DOMAIN,
    SWARM_DOMAIN,
    Announcement,
    read_announcement,
    read_record,
    read_suspicion,
    sign_announcement,
    sign_record,
    sign_suspicion,
    swarm_id,
)
from app.weights.model_weights import runs
from p2p.envelope import CLOCK_TOLERANCE_MS, NEVER, parse, seal
from p2p.errors import EnvelopeError
from p2p.identity import Identity

NOW = 1_800_000_000_000
LIFETIME_MS = 10 * 60 * 1000
ALICE, MALLORY = Identity(b"a" * 32), Identity(b"m" * 32)
MODEL = "1a2b3c4d" * 8
SWARM = swarm_id("attic", MODEL)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)

TYPICAL = Announcement(
    peer=ALICE.peer_id,
    sequence=NOW,
    expires_at_ms=NOW + LIFETIME_MS,
    swarm=SWARM,
    state="serving",
    span=Span(8, 24),
    decode_tokens_per_s=129.25,
    prefill_tokens_per_s=4011.5,
    kv_free_tokens=131072,
    kv_total_tokens=262144,
    quantisation="int8",
    cache="int8",
    device="cuda",
    name="attic gaming box",
    addresses=(
        f"/ip4/192.168.178.21/tcp/7464/p2p/{ALICE.peer_id}",
        f"/ip4/203.0.113.77/tcp/7464/p2p/{ALICE.peer_id}",
        f"/ip6/2001:db8:1234:5678:9abc:def0:1234:5678/tcp/7464/p2p/{ALICE.peer_id}",
    ),
    app_version="0.1.0",
    held=(Span(0, 30),),
    holds_ends=True,
)


def announced(payload: bytes, who: Identity = ALICE) -> bytes:
    return seal(who, ANNOUNCEMENT_DOMAIN, payload, sequence=NOW, expires_at_ms=NOW + 1000)


def test_an_announcement_comes_back_and_is_compact() -> None:
    raw = sign_announcement(ALICE, TYPICAL)
    assert read_announcement(raw, now_ms=NOW, peer=ALICE.peer_id) == TYPICAL
    assert len(raw) <= 600
    assert TYPICAL.serves


def test_round_trip_times_are_compact_and_bounded() -> None:
    rtts = tuple((f"{number:08}", number / 100) for number in range(MAX_RTTS))
    raw = sign_announcement(ALICE, dataclasses.replace(TYPICAL, rtts=rtts))
    assert read_announcement(raw, now_ms=NOW).rtts == rtts
    assert len(raw) <= 600 + 18 * MAX_RTTS
    beyond = dataclasses.replace(TYPICAL, rtts=(("tail", 1e9),))
    assert read_announcement(sign_announcement(ALICE, beyond), now_ms=NOW).rtts == (("tail", 60.0),)


def test_speeds_of_links_are_compact_and_bounded() -> None:
    rtts = tuple((f"{number:08}", number / 100) for number in range(MAX_RTTS))
    rates = tuple((f"{number:08}", 1e6 * (number + 1)) for number in range(MAX_RATES))
    said = dataclasses.replace(TYPICAL, rtts=rtts, rates=rates, wires=("int8",))
    raw = sign_announcement(ALICE, said)
    assert read_announcement(raw, now_ms=NOW) == said
    assert len(raw) <= 1000
    edges = dataclasses.replace(TYPICAL, rates=(("slow", 1.0), ("fast", 1e18)))
    assert read_announcement(sign_announcement(ALICE, edges), now_ms=NOW).rates == (("fast", 1e11), ("slow", 1e4))


@pytest.mark.parametrize(
    "fields",
    [
        {"rate": []},
        {"rate": {"a": 0}},
        {"rate": {"a": 10**9}},
        {"rate": {"a": 1.5}},
        {"rate": {"123456789": 1}},
        {"rate": {str(number): 1 for number in range(MAX_RATES + 1)}},
        {"wires": "int8"},
        {"wires": ["int8\x1b"]},
        {"wires": ["a format with a long name"]},
        {"wires": ["int8"] * 9},
    ],
)
def test_speeds_and_formats_out_of_bounds_are_refused(fields: dict[str, object]) -> None:
    payload = {"v": 1, "swarm": TYPICAL.swarm, "state": "client", **fields}
    with pytest.raises(EnvelopeError):
        read_announcement(announced(canonical(payload)), now_ms=NOW)


@pytest.mark.parametrize(
    "rtt",
    [
        [],
        {"a": -1},
        {"a": 600_001},
        {"a": 1.5},
        {"a": True},
        {"a": "1"},
        {"123456789": 1},
        {str(number): 1 for number in range(MAX_RTTS + 1)},
    ],
)
def test_impossible_round_trip_times_are_refused(rtt: Any) -> None:
    payload = canonical({"v": 1, "swarm": SWARM, "state": "serving", "rtt": rtt})
    with pytest.raises(EnvelopeError, match="announcement: "):
        read_announcement(announced(payload), now_ms=NOW)


@pytest.mark.parametrize(
    "device",
    ["NVIDIA GeForce RTX 4090 Laptop GPU", "Intel(R) Xeon(R) Processor @ 2.50GHz (2 cores)", "a\x1b[31mcard\n"],
)
def test_any_device_name_can_be_announced(device: str) -> None:
    raw = sign_announcement(ALICE, dataclasses.replace(TYPICAL, device=device))
    heard = read_announcement(raw, now_ms=NOW).device
    assert heard.isprintable()
    assert heard[:8] == "".join(character for character in device if character.isprintable())[:8]


def test_a_client_says_next_to_nothing() -> None:
    client = Announcement(ALICE.peer_id, NOW, NOW + 1000, SWARM, "client")
    raw = sign_announcement(ALICE, client)
    assert read_announcement(raw, now_ms=NOW) == client
    assert len(raw) <= 250
    assert not client.serves


spans = st.tuples(st.integers(0, 100), st.integers(1, 100)).map(lambda pair: Span(pair[0], pair[0] + pair[1]))
words = st.text("abc xyz-é東", max_size=12)
announcements = st.builds(
    Announcement,
    peer=st.just(ALICE.peer_id),
    sequence=st.just(NOW),
    expires_at_ms=st.integers(NOW + 1, NOW + MAX_LIFETIME_MS),
    swarm=st.just(SWARM),
    state=st.sampled_from(["joining", "serving", "client", "draining", "left", "something new"]),
    span=st.none() | spans,
    decode_tokens_per_s=st.integers(0, 10**6).map(lambda hundredths: hundredths / 100),
    kv_free_tokens=st.integers(0, 2**48),
    kv_total_tokens=st.integers(0, 2**48),
    name=words,
    held=st.sets(st.integers(0, 40), max_size=16).map(lambda blocks: runs(sorted(blocks))),
    holds_ends=st.booleans(),
)


@given(announcements)
def test_every_announcement_comes_back(said: Announcement) -> None:
    assert read_announcement(sign_announcement(ALICE, said), now_ms=NOW) == said


def test_fields_from_the_future_are_ignored_and_kept() -> None:
    raw = announced(canonical({"v": 1, "swarm": SWARM, "state": "serving", "span": [0, 2], "mood": ["good"]}))
    assert read_announcement(raw, now_ms=NOW).span == Span(0, 2)
    assert b'"mood":["good"]' in parse(raw).payload


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"v": 2}, "version 2 is not understood, this Shoal reads version 1"),
        ({"v": None}, "'v'"),
        ({"swarm": "attic"}, "'swarm'"),
        ({"swarm": SWARM.upper()}, "'swarm'"),
        ({"state": 1}, "'state'"),
        ({"state": "\x1b[2J"}, "printable"),
        ({"name": "a\u202eb"}, "printable"),
        ({"name": "x" * 33}, "'name'"),
        ({"span": [3, 3]}, "'span'"),
        ({"span": [-1, 3]}, "'span'"),
        ({"span": [0, 10**9]}, "'span'"),
        ({"span": [0, True]}, "'span'"),
        ({"span": [0.0, 1.0]}, "'span'"),
        ({"span": [1]}, "'span'"),
        ({"span": None}, "'span'"),
        ({"decode": -1}, "'decode'"),
        ({"decode": 1e300}, "'decode'"),
        ({"decode": True}, "'decode'"),
        ({"decode": "fast"}, "'decode'"),
        ({"kv": 1.5}, "'kv'"),
        ({"kv": 2**60}, "'kv'"),
        ({"kvall": -1}, "'kvall'"),
        ({"held": [[0, 1]] * 17}, "'held'"),
        ({"held": [5]}, "'held'"),
        ({"held": [[4, 9], [0, 2], [1, 3]]}, "no block in common"),
        ({"addrs": ["/ip4/1.2.3.4/tcp/1"] * 7}, "'addrs'"),
        ({"addrs": ["x"]}, "'addrs'"),
        ({"addrs": ["/ip4/\n"]}, "'addrs'"),
        ({"addrs": "/ip4/1.2.3.4/tcp/1"}, "'addrs'"),
        ({"ends": 1}, "'ends'"),
        ({"more": "x" * 1024}, "too large"),
    ],
)
def test_lies_are_refused_though_signed(change: dict[str, Any], reason: str) -> None:
    base = {"v": 1, "swarm": SWARM, "state": "serving", "span": [0, 2]}
    with pytest.raises(EnvelopeError, match=reason):
        read_announcement(announced(canonical(base | change)), now_ms=NOW)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none_are_refused(number: str) -> None:
    payload = f'{{"v":1,"swarm":"{SWARM}","state":"serving","decode":{number}}}'
    with pytest.raises(EnvelopeError, match="refused"):
        read_announcement(announced(payload.encode()), now_ms=NOW)


@given(st.one_of(st.binary(max_size=200), JSON.map(lambda value: json.dumps(value).encode())))
def test_any_signed_payload_raises_the_one_error(payload: bytes) -> None:
    for domain, read in ((ANNOUNCEMENT_DOMAIN, read_announcement), (SWARM_DOMAIN, read_record)):
        raw = seal(ALICE, domain, payload, sequence=NOW, expires_at_ms=NOW + 1000)
        with pytest.raises(EnvelopeError):
            read(raw, now_ms=NOW)


@given(st.sampled_from(["v", "swarm", "state", "span", "held", "decode", "kv", "name", "addrs", "ends", "app"]), JSON)
def test_any_value_in_any_field_is_taken_or_refused(name: str, value: Any) -> None:
    payload = {"v": 1, "swarm": SWARM, "state": "serving"} | {name: value}
    try:
        said = read_announcement(announced(canonical(payload)), now_ms=NOW)
    except EnvelopeError:
        return
    assert read_announcement(sign_announcement(ALICE, said), now_ms=NOW).peer == ALICE.peer_id


# --- hostile senders -------------------------------------------------------------------------------------------------


def test_a_forged_announcement_is_refused() -> None:
    mallorys = sign_announcement(MALLORY, dataclasses.replace(TYPICAL, peer=MALLORY.peer_id))
    in_alices_name = mallorys.replace(MALLORY.public_key, ALICE.public_key)
    with pytest.raises(EnvelopeError, match="forged"):
        read_announcement(in_alices_name, now_ms=NOW)
    with pytest.raises(EnvelopeError, match="signed by"):
        read_announcement(mallorys, now_ms=NOW, peer=ALICE.peer_id)


def test_a_node_can_only_sign_for_itself() -> None:
    with pytest.raises(AssertionError):
        sign_announcement(MALLORY, TYPICAL)


def test_addresses_always_lead_to_the_speaker() -> None:
    victim = f"/ip4/203.0.113.5/tcp/7464/p2p/{ALICE.peer_id}"
    raw = announced(canonical({"v": 1, "swarm": SWARM, "state": "serving", "addrs": [victim]}), MALLORY)
    assert read_announcement(raw, now_ms=NOW).addresses == (f"{victim}/p2p/{MALLORY.peer_id}",)


@pytest.mark.parametrize(
    ("at", "lifetime", "reason"),
    [
        (NOW - LIFETIME_MS - CLOCK_TOLERANCE_MS, LIFETIME_MS, "expired"),
        (NOW + CLOCK_TOLERANCE_MS + 1, LIFETIME_MS, "future"),
        (NOW, MAX_LIFETIME_MS + 1, "may last"),
        (NOW, NEVER - NOW, "may last"),
    ],
)
def test_expired_far_future_and_everlasting_announcements_are_refused(at: int, lifetime: int, reason: str) -> None:
    said = dataclasses.replace(TYPICAL, sequence=at, expires_at_ms=at + lifetime)
    with pytest.raises(EnvelopeError, match=reason):
        read_announcement(sign_announcement(ALICE, said), now_ms=NOW)


def test_a_swarm_record_cannot_pass_for_an_announcement() -> None:
    record = sign_record(ALICE, "attic", MODEL, now_ms=NOW)
    with pytest.raises(EnvelopeError, match="expected a statement of 'shoal/announcement'"):
        read_announcement(record.raw, now_ms=NOW)


# --- swarm records and suspicions ------------------------------------------------------------------------------------


def test_a_swarm_record_comes_back_for_ever() -> None:
    record = sign_record(ALICE, "attic", MODEL, now_ms=NOW, private=True, settings={"kv": 5, "hint": "é", "x": True})
    again = read_record(record.raw, now_ms=NOW + 10**12)
    assert again == record
    assert (again.creator, again.created_ms, again.private) == (ALICE.peer_id, NOW, True)
    assert again.settings == {"kv": 5, "hint": "é", "x": True}
    assert str(again) == "attic#1a2b3c4d1a2b3c4d1a2b"
    assert again.id == SWARM


@pytest.mark.parametrize(
    "change",
    [
        {"name": "Attic"},
        {"name": ""},
        {"name": "a" * 64},
        {"name": "../etc"},
        {"model": "1a2b3c4d"},
        {"model": MODEL.upper()},
        {"private": "yes"},
        {"settings": []},
        {"settings": {"a": 1.5}},
        {"settings": {"a": None}},
        {"settings": {"a": "x" * 300}},
        {"settings": {"a": "\x1b"}},
        {"settings": {f"s{number}": 1 for number in range(33)}},
        {"v": 7},
    ],
)
def test_a_bad_swarm_record_is_refused_though_signed(change: dict[str, Any]) -> None:
    base = {"v": 1, "name": "attic", "model": MODEL, "private": False, "settings": {}}
    raw = seal(ALICE, SWARM_DOMAIN, canonical(base | change), sequence=NOW, expires_at_ms=NEVER)
    with pytest.raises(EnvelopeError, match="refused"):
        read_record(raw, now_ms=NOW)


def test_a_suspicion_comes_back_and_dies_soon() -> None:
    raw = sign_suspicion(ALICE, SWARM, MALLORY.peer_id, NOW - 5, sequence=NOW)
    said = read_suspicion(raw, now_ms=NOW)
    assert (said.peer, said.accused, said.number, said.swarm) == (ALICE.peer_id, MALLORY.peer_id, NOW - 5, SWARM)
    with pytest.raises(EnvelopeError, match="expired"):
        read_suspicion(raw, now_ms=NOW + CLOCK_TOLERANCE_MS + 2 * 60 * 1000)
    payload = canonical({"v": 1, "swarm": SWARM, "accused": "somebody", "number": 1})
    with pytest.raises(EnvelopeError, match="a peer id"):
        read_suspicion(seal(ALICE, SUSPICION_DOMAIN, payload, sequence=NOW, expires_at_ms=NOW + 1), now_ms=NOW)


def test_swarms_differ_by_name_and_by_model() -> None:
    ids = {swarm_id("attic", MODEL), swarm_id("attic2", MODEL), swarm_id("attic", "0" * 64)}
    assert len(ids) == 3
    assert all(len(identifier) == 32 for identifier in ids)
