"""Envelopes under attack: arbitrary bytes, forgery, somebody else's name, replays, wrong times, wrong kinds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p import envelope as envelopes
from p2p.envelope import (
    CLOCK_TOLERANCE_MS,
    MAX_ENVELOPE_BYTES,
    MAX_PAYLOAD_BYTES,
    NEVER,
    Envelope,
    Rule,
    Sequence,
    domain_of,
    envelope_bytes,
    open_envelope,
    parse,
    seal,
)
from p2p.errors import EnvelopeError
from p2p.identity import Identity

NOW = 1_800_000_000_000
HOUR = 3_600_000
ALICE, MALLORY = Identity(b"a" * 32), Identity(b"m" * 32)


def payload_of(envelope: Envelope) -> bytes:
    """The reader of a domain whose payload means itself."""
    return envelope.payload


RULE = Rule("test", payload_of, max_payload_bytes=1000, max_lifetime_ms=HOUR)


def statement(payload: bytes = b"hello", *, at: int = NOW, lifetime: int = HOUR, who: Identity = ALICE) -> bytes:
    return seal(who, "test", payload, sequence=at, expires_at_ms=at + lifetime)


@given(st.binary(max_size=1000), st.integers(0, 2**62), st.integers(1, HOUR))
def test_what_was_sealed_opens_the_same(payload: bytes, at: int, lifetime: int) -> None:
    raw = statement(payload, at=at, lifetime=lifetime)
    assert raw == statement(payload, at=at, lifetime=lifetime)
    envelope, value = open_envelope(raw, RULE, now_ms=at, peer=ALICE.peer_id)
    assert value == payload
    assert envelope == Envelope("test", ALICE.public_key, at, at + lifetime, payload, raw)
    assert envelope.peer == ALICE.peer_id


@given(st.one_of(st.binary(max_size=400), st.binary(max_size=400).map(lambda tail: b"sE\x01\x04test" + tail)))
def test_arbitrary_bytes_raise_the_one_error(raw: bytes) -> None:
    with pytest.raises(EnvelopeError):
        open_envelope(raw, RULE, now_ms=NOW)


@given(st.data())
def test_any_change_of_any_bit_is_refused(data: st.DataObject) -> None:
    raw = bytearray(statement())
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(EnvelopeError):
        open_envelope(bytes(raw), RULE, now_ms=NOW)


@given(st.integers(0, 200), st.binary(min_size=1, max_size=8))
def test_cut_or_lengthened_bytes_are_refused(cut: int, more: bytes) -> None:
    raw = statement()
    for changed in (raw[: max(0, len(raw) - 1 - cut)], raw + more):
        with pytest.raises(EnvelopeError):
            open_envelope(changed, RULE, now_ms=NOW)


def test_somebody_elses_name_cannot_be_taken() -> None:
    genuine, forged = statement(), statement(who=MALLORY)
    # Mallory's statement with Alice's key written over her own, and Alice's with Mallory's payload and signature.
    with pytest.raises(EnvelopeError, match="forged"):
        open_envelope(forged.replace(MALLORY.public_key, ALICE.public_key), RULE, now_ms=NOW)
    with pytest.raises(EnvelopeError, match="forged"):
        open_envelope(genuine[:-64] + forged[-64:], RULE, now_ms=NOW)
    with pytest.raises(EnvelopeError, match=f"signed by {MALLORY.peer_id}, not by {ALICE.peer_id}"):
        open_envelope(forged, RULE, now_ms=NOW, peer=ALICE.peer_id)


def test_one_kind_of_statement_never_passes_for_another() -> None:
    other = Rule("other", payload_of)
    with pytest.raises(EnvelopeError, match="expected a statement of 'other'"):
        open_envelope(statement(), other, now_ms=NOW)
    # The domain is signed: renaming it in place does not help.
    raw = seal(ALICE, "othes", b"hello", sequence=NOW, expires_at_ms=NOW + HOUR).replace(b"othes", b"other")
    with pytest.raises(EnvelopeError, match="forged"):
        open_envelope(raw, other, now_ms=NOW)


def test_a_newer_version_is_refused_by_name() -> None:
    raw = bytearray(statement())
    raw[2] = 3
    with pytest.raises(EnvelopeError, match="version 3 is not understood; this Shoal reads versions 1 and 2"):
        open_envelope(bytes(raw), RULE, now_ms=NOW)


@pytest.mark.parametrize(
    ("at", "lifetime", "refusal"),
    [
        (NOW, HOUR, None),
        (NOW + CLOCK_TOLERANCE_MS, HOUR, None),
        (NOW + CLOCK_TOLERANCE_MS + 1, HOUR, "from the future"),
        (NOW + 50 * 365 * 24 * HOUR, HOUR, "from the future"),
        (NOW - HOUR - CLOCK_TOLERANCE_MS + 1, HOUR, None),
        (NOW - HOUR - CLOCK_TOLERANCE_MS, HOUR, "expired"),
        (0, HOUR, "expired"),
        (NOW, HOUR + 1, "may last"),
        (NOW, NEVER - NOW, "may last"),
    ],
)
def test_times(at: int, lifetime: int, refusal: str | None) -> None:
    raw = statement(at=at, lifetime=lifetime)
    if refusal is None:
        open_envelope(raw, RULE, now_ms=NOW)
    else:
        with pytest.raises(EnvelopeError, match=refusal):
            open_envelope(raw, RULE, now_ms=NOW)


def signed_as_is(sequence: int, expires_at_ms: int) -> bytes:
    """A correctly signed statement with times that `seal` refuses to write."""
    head = b"sE\x01\x04test"
    body = head + envelopes._MIDDLE.pack(ALICE.public_key, sequence, expires_at_ms, 0)
    return body + ALICE.sign(b"shoal envelope\0" + body)


@pytest.mark.parametrize(("sequence", "expires"), [(NOW, NOW), (NOW, NOW - 1), (NOW, 2**64 - 1), (2**64 - 1, 0)])
def test_impossible_times_are_refused_though_signed(sequence: int, expires: int) -> None:
    open_envelope(signed_as_is(NOW, NOW + 1), RULE, now_ms=NOW)
    with pytest.raises(EnvelopeError, match="impossible"):
        open_envelope(signed_as_is(sequence, expires), Rule("test", payload_of), now_ms=NOW)


def test_a_statement_may_last_for_ever_where_the_rule_allows() -> None:
    raw = seal(ALICE, "test", b"", sequence=NOW, expires_at_ms=NEVER)
    open_envelope(raw, Rule("test", payload_of), now_ms=NOW + 100 * 365 * 24 * HOUR)


def test_payloads_are_bounded_by_the_format_and_by_the_rule() -> None:
    with pytest.raises(EnvelopeError, match="too large"):
        statement(b"x" * (MAX_PAYLOAD_BYTES + 1))
    largest = statement(b"x" * MAX_PAYLOAD_BYTES)
    assert parse(largest).payload == b"x" * MAX_PAYLOAD_BYTES
    with pytest.raises(EnvelopeError, match="too large"):
        open_envelope(largest, RULE, now_ms=NOW)
    with pytest.raises(EnvelopeError, match="too large"):
        parse(b"sE\x01\x01" + b"x" * MAX_ENVELOPE_BYTES)


LONG = Rule("test", payload_of, max_payload_bytes=200_000)


def long_statement(payload: bytes) -> bytes:
    times = {"sequence": NOW, "expires_at_ms": NOW + HOUR}
    return seal(ALICE, "test", payload, max_payload_bytes=LONG.max_payload_bytes, **times)


@pytest.mark.parametrize(
    ("size", "version"), [(0, 1), (MAX_PAYLOAD_BYTES, 1), (MAX_PAYLOAD_BYTES + 1, 2), (LONG.max_payload_bytes, 2)]
)
def test_a_domain_may_have_longer_payloads(size: int, version: int) -> None:
    raw = long_statement(b"x" * size)
    assert raw[2] == version
    assert len(raw) == envelope_bytes(len("test"), size)
    assert open_envelope(raw, LONG, now_ms=NOW)[1] == b"x" * size
    assert domain_of(raw) == "test"


def test_longer_payloads_are_refused_where_no_rule_allows_them() -> None:
    with pytest.raises(EnvelopeError, match="too large"):
        long_statement(b"x" * (LONG.max_payload_bytes + 1))
    for size in (MAX_PAYLOAD_BYTES + 1, LONG.max_payload_bytes):
        raw = long_statement(b"x" * size)
        with pytest.raises(EnvelopeError, match="too large"):
            parse(raw)
        with pytest.raises(EnvelopeError, match="too large"):
            open_envelope(raw, RULE, now_ms=NOW)
        with pytest.raises(EnvelopeError, match="expected a statement of 'other'"):
            open_envelope(raw, Rule("other", payload_of, LONG.max_payload_bytes), now_ms=NOW)


def test_a_short_payload_has_one_form_only() -> None:
    body = b"sE\x02\x04test" + envelopes._LONG_MIDDLE.pack(ALICE.public_key, NOW, NOW + HOUR, 5) + b"hello"
    with pytest.raises(EnvelopeError, match="not one of version 2"):
        open_envelope(body + ALICE.sign(b"shoal envelope\0" + body), LONG, now_ms=NOW)


@given(st.binary(max_size=400).map(lambda tail: b"sE\x02\x04test" + tail))
def test_arbitrary_bytes_of_the_long_form_raise_the_one_error(raw: bytes) -> None:
    with pytest.raises(EnvelopeError):
        open_envelope(raw, LONG, now_ms=NOW)


def test_nothing_is_sealed_that_could_not_be_opened() -> None:
    for sequence, expires in ((NOW, NOW), (-1, NOW), (NOW, NEVER + 1)):
        with pytest.raises(EnvelopeError):
            seal(ALICE, "test", b"", sequence=sequence, expires_at_ms=expires)


def test_the_reader_sees_only_verified_payloads_and_may_refuse() -> None:
    seen: list[bytes] = []

    def read(envelope: Envelope) -> None:
        seen.append(envelope.payload)
        raise ValueError("no such thing")

    rule = Rule("test", read)
    with pytest.raises(EnvelopeError, match=f"test of {ALICE.peer_id} was refused: no such thing"):
        open_envelope(statement(b"one"), rule, now_ms=NOW)
    with pytest.raises(EnvelopeError, match="forged"):
        open_envelope(statement(b"two")[:-1] + b"\0", rule, now_ms=NOW)
    assert seen == [b"one"]


@given(st.lists(st.integers(-2 * CLOCK_TOLERANCE_MS, 2 * CLOCK_TOLERANCE_MS), max_size=30))
def test_numbers_rise_unless_the_last_was_beyond_belief(jumps: list[int]) -> None:
    numbers, now = Sequence(), NOW
    for jump in jumps:
        now, before = now + jump, numbers.last
        number = numbers.next(now)
        assert number == numbers.last
        assert now <= number <= now + CLOCK_TOLERANCE_MS
        assert number > before or before >= now + CLOCK_TOLERANCE_MS


def test_numbers_go_on_where_the_last_run_ended() -> None:
    assert Sequence(last=NOW + 5).next(NOW) == NOW + 6
    assert Sequence(last=NOW + HOUR).next(NOW) == NOW
