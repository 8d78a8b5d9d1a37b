"""Certificates and revocation lists: who may sign what, and that nothing forged, foreign or copied counts."""

from __future__ import annotations

import base64
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.canonical_json import canonical
from app.swarm.certificates import (
    CERTIFICATE_DOMAIN,
    MAX_DELEGATES_LISTS,
    MAX_REVOKED,
    REVOCATIONS_DOMAIN,
    Authority,
    Certificate,
    RevocationBook,
    read_certificate,
    read_revocations,
    sign_certificate,
    sign_revocations,
)
from app.swarm.records import swarm_id
from p2p.envelope import NEVER, parse, seal
from p2p.errors import EnvelopeError
from p2p.identity import Identity

CREATOR, DELEGATE, MEMBER, GUEST = (Identity(bytes([n]) * 32) for n in range(1, 5))
SWARM = swarm_id("attic", "1a2b3c4d" * 8)
HERE = Authority.of(SWARM, b"s" * 32, CREATOR.peer_id)
RECREATED = Authority.of(SWARM, b"t" * 32, CREATOR.peer_id)
NOW_MS = 1_800_000_000_000

DELEGATES = sign_certificate(CREATOR, HERE, DELEGATE.peer_id, now_ms=NOW_MS, admits=True)
MEMBERS = sign_certificate(CREATOR, HERE, MEMBER.peer_id, now_ms=NOW_MS)


def for_guest(signer: Identity, **how: object) -> bytes:
    return sign_certificate(signer, HERE, GUEST.peer_id, now_ms=NOW_MS, **how)  # type: ignore[arg-type]


def test_the_creator_and_its_delegates_sign() -> None:
    assert read_certificate(for_guest(CREATOR), HERE) == Certificate(GUEST.peer_id, CREATOR.peer_id)
    assert read_certificate(for_guest(DELEGATE, by=DELEGATES), HERE) == Certificate(GUEST.peer_id, DELEGATE.peer_id)
    assert read_certificate(DELEGATES, HERE).admits


def test_clocks_that_differ_do_no_harm() -> None:
    for now_ms in (0, NOW_MS, 2**60):
        raw = sign_certificate(CREATOR, HERE, GUEST.peer_id, now_ms=now_ms)
        assert read_certificate(raw, HERE).peer == GUEST.peer_id


FORGED: dict[str, Callable[[], bytes]] = {
    "by a stranger": lambda: for_guest(MEMBER),
    "by itself": lambda: for_guest(GUEST),
    "by a member that may not admit": lambda: for_guest(MEMBER, by=MEMBERS),
    "with a delegate's certificate of another peer": lambda: for_guest(MEMBER, by=DELEGATES),
    "by a delegate, to make a delegate": lambda: for_guest(DELEGATE, by=DELEGATES, admits=True),
    "by a delegate of a delegate": lambda: for_guest(
        MEMBER, by=sign_certificate(DELEGATE, HERE, MEMBER.peer_id, now_ms=NOW_MS, admits=True, by=DELEGATES)
    ),
    "by a delegate that appointed itself": lambda: for_guest(
        MEMBER, by=sign_certificate(MEMBER, HERE, MEMBER.peer_id, now_ms=NOW_MS, admits=True)
    ),
    "of the swarm that was created before": lambda: sign_certificate(CREATOR, RECREATED, GUEST.peer_id, now_ms=NOW_MS),
    "by a delegate of another swarm": lambda: for_guest(
        DELEGATE, by=sign_certificate(CREATOR, RECREATED, DELEGATE.peer_id, now_ms=NOW_MS, admits=True)
    ),
    "with a damaged signature": lambda: for_guest(CREATOR)[:-1] + b"\0",
    "of another kind": lambda: sign_revocations(CREATOR, HERE, [GUEST.peer_id], sequence=NOW_MS),
    "for no peer id": lambda: seal(
        CREATOR,
        CERTIFICATE_DOMAIN,
        canonical({"v": 1, "swarm": HERE.swarm, "peer": "nobody"}),
        sequence=1,
        expires_at_ms=NEVER,
    ),
    "with a certificate that is none": lambda: for_guest(MEMBER, by=b"\0" * 40),
    "with a list as the certificate": lambda: for_guest(
        MEMBER, by=sign_revocations(CREATOR, HERE, [MEMBER.peer_id], sequence=1)
    ),
}


@pytest.mark.parametrize("how", FORGED)
def test_a_certificate_without_right_is_rejected(how: str) -> None:
    with pytest.raises(EnvelopeError):
        read_certificate(FORGED[how](), HERE)


@given(st.binary(max_size=1200))
def test_any_bytes_are_rejected_with_one_error(raw: bytes) -> None:
    with pytest.raises(EnvelopeError):
        read_certificate(raw, HERE)


@given(st.integers(0, len(for_guest(DELEGATE, by=DELEGATES)) - 1), st.integers(1, 255))
def test_no_changed_byte_passes(at: int, by: int) -> None:
    raw = bytearray(for_guest(DELEGATE, by=DELEGATES))
    raw[at] ^= by
    with pytest.raises(EnvelopeError):
        read_certificate(bytes(raw), HERE)


# --- revocation ------------------------------------------------------------------------------------------------------


def book(*lists: bytes) -> RevocationBook:
    made = RevocationBook(HERE)
    for raw in lists:
        made.keep(parse(raw))
    return made


def listed(signer: Identity, *peers: Identity, sequence: int = NOW_MS, by: bytes | None = None) -> bytes:
    return sign_revocations(signer, HERE, [peer.peer_id for peer in peers], sequence=sequence, by=by)


def test_the_creator_revokes_anyone_and_a_delegate_those_it_admitted() -> None:
    guests, members = Certificate(GUEST.peer_id, DELEGATE.peer_id), Certificate(MEMBER.peer_id, CREATOR.peer_id)
    assert book(listed(CREATOR, GUEST)).refuses(guests)
    by_delegate = book(listed(DELEGATE, GUEST, MEMBER, by=DELEGATES))
    assert by_delegate.refuses(guests)
    assert not by_delegate.refuses(members)
    assert not book().refuses(guests)


def test_whom_a_revoked_delegate_admitted_is_out_too_and_its_list_counts_no_more() -> None:
    own = listed(DELEGATE, GUEST, by=DELEGATES)
    for order in ((own, listed(CREATOR, DELEGATE)), (listed(CREATOR, DELEGATE), own)):
        kept = book(*order)
        assert kept.refuses(Certificate(MEMBER.peer_id, DELEGATE.peer_id))
        assert kept.revoked_by(DELEGATE.peer_id) == ()


def test_a_newer_list_replaces_an_older_one_and_never_the_reverse() -> None:
    older, newer = listed(CREATOR, GUEST, sequence=5), listed(CREATOR, MEMBER, sequence=6)
    for order in ((older, newer), (newer, older)):
        assert book(*order).revoked_by(CREATOR.peer_id) == (MEMBER.peer_id,)


@given(st.permutations([(n, n % 3) for n in range(1, 7)]))
def test_the_order_in_which_lists_arrive_does_not_matter(order: list[tuple[int, int]]) -> None:
    peers = (GUEST, MEMBER, DELEGATE)
    kept = book(*(listed(CREATOR, peers[which], sequence=n) for n, which in order))
    assert kept.revoked_by(CREATOR.peer_id) == (peers[0].peer_id,)
    assert kept.sequence_of(CREATOR.peer_id) == 6


@pytest.mark.parametrize(
    "raw",
    [
        listed(MEMBER, GUEST),
        listed(MEMBER, GUEST, by=MEMBERS),
        listed(MEMBER, GUEST, by=DELEGATES),
        sign_revocations(CREATOR, RECREATED, [GUEST.peer_id], sequence=NOW_MS),
        listed(CREATOR, GUEST)[:-1] + b"\0",
        seal(
            CREATOR,
            REVOCATIONS_DOMAIN,
            canonical({"v": 1, "swarm": HERE.swarm, "peers": [GUEST.peer_id] * (MAX_REVOKED + 1)}),
            sequence=1,
            expires_at_ms=NEVER,
        ),
    ],
    ids=["a stranger's", "a member's", "a copied right", "another swarm's", "damaged", "too long"],
)
def test_a_list_without_right_is_not_kept(raw: bytes) -> None:
    kept = RevocationBook(HERE)
    with pytest.raises(EnvelopeError):
        kept.keep(parse(raw))
    assert list(kept.statements()) == []


def test_a_full_list_of_a_delegate_fits_into_its_bounds() -> None:
    peers = [Identity(n.to_bytes(32)) for n in range(100, 100 + MAX_REVOKED)]
    raw = listed(DELEGATE, *peers, by=DELEGATES)
    assert len(read_revocations(parse(raw), HERE).peers) == MAX_REVOKED
    assert len(raw) <= 4352


def test_the_lists_of_many_delegates_are_bounded_and_the_creators_has_its_place() -> None:
    kept = RevocationBook(HERE)
    for n in range(MAX_DELEGATES_LISTS + 3):
        who = Identity((1000 + n).to_bytes(32))
        right = sign_certificate(CREATOR, HERE, who.peer_id, now_ms=NOW_MS, admits=True)
        assert kept.keep(parse(listed(who, GUEST, by=right))) is (n < MAX_DELEGATES_LISTS)
    assert kept.keep(parse(listed(CREATOR, MEMBER)))
    assert len(list(kept.statements())) == MAX_DELEGATES_LISTS + 1
    assert next(kept.statements()) == listed(CREATOR, MEMBER)


def test_a_signed_statement_is_base64_in_another() -> None:
    assert base64.b64encode(DELEGATES) in parse(for_guest(DELEGATE, by=DELEGATES)).payload
