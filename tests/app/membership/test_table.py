"""The membership table: what it takes, what it refuses, and who keeps a place when many want one."""

from __future__ import annotations

import dataclasses
import hashlib
import tracemalloc

import pytest

from app.core.span import Span
from app.membership.table import Table, TableLimits
from app.swarm.records import (
    MAX_LIFETIME_MS,
    Announcement,
    SwarmTerms,
    sign_announcement,
    swarm_id,
    verify_announcement,
)
from p2p.envelope import CLOCK_TOLERANCE_MS, parse
from p2p.errors import EnvelopeError
from p2p.identity import Identity
from tests.app.swarms import MODEL, N_BLOCKS, identity

NOW_MS = 1_800_000_000_000
LIFETIME_MS = 30 * 60 * 1000
SWARM = swarm_id("attic", MODEL)
TERMS = SwarmTerms(SWARM, N_BLOCKS)
OWN, ALICE, BOB, MALLORY = (identity(number) for number in range(4))


def said(who: Identity, **changes: object) -> Announcement:
    plain = Announcement(who.peer_id, NOW_MS, NOW_MS + LIFETIME_MS, SWARM, "serving", Span(0, 8))
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


def signed(who: Identity, **changes: object) -> bytes:
    return sign_announcement(who, said(who, **changes))


def later(who: Identity, ms: int = 1, **changes: object) -> bytes:
    return signed(who, sequence=NOW_MS + ms, expires_at_ms=NOW_MS + ms + LIFETIME_MS, **changes)


class Book:
    """A table with a clock."""

    def __init__(self, limits: TableLimits | None = None) -> None:
        self.table = Table(OWN.peer_id, limits)
        self.now = 100.0

    def offer(self, raw: bytes, sender: str = BOB.peer_id, now_ms: int = NOW_MS) -> str | None:
        """Verify an announcement and hand it to the table, as `MembershipExchange` does."""
        envelope = parse(raw)
        if not self.table.has_place(envelope.peer, sender=sender, now=self.now):
            return None
        announcement = verify_announcement(envelope, TERMS, now_ms)
        change = self.table.update(announcement, sender=sender, now=self.now)
        return change.kind if change else None

    def seen(self, who: Identity, rtt_s: float | None = None) -> str | None:
        change = self.table.seen(who.peer_id, self.now, rtt_s)
        return change.kind if change else None

    def failed(self, who: Identity) -> str | None:
        change = self.table.failed(who.peer_id, self.now)
        return change.kind if change else None

    def met(self, *members: Identity) -> Book:
        for who in members:
            assert self.offer(signed(who)) == "joined"
            assert self.seen(who) == "proven"
        return self


def tampered(raw: bytes, at: int) -> bytes:
    return raw[:at] + bytes((raw[at] ^ 1,)) + raw[at + 1 :]


def with_owner(raw: bytes, owner: Identity) -> bytes:
    """The same statement with somebody else's key in the place of its signer's."""
    at = 4 + raw[3]
    return raw[:at] + owner.public_key + raw[at + 32 :]


REFUSED = {
    "nothing": b"",
    "garbage": b"\x07" * 300,
    "a forged payload": tampered(signed(ALICE), 130),
    "a forged signature": tampered(signed(ALICE), -1),
    "somebody else's name": with_owner(signed(MALLORY), ALICE),
    "another swarm": signed(ALICE, swarm=swarm_id("cellar", MODEL)),
    "blocks beyond the model": signed(ALICE, span=Span(20, N_BLOCKS + 1)),
    "held blocks beyond the model": signed(ALICE, held=(Span(0, 4000),)),
    "expired": later(ALICE, -CLOCK_TOLERANCE_MS - LIFETIME_MS),
    "from the future": later(ALICE, CLOCK_TOLERANCE_MS + 1),
    "too long a life": signed(ALICE, expires_at_ms=NOW_MS + MAX_LIFETIME_MS + 1),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_valid_is_refused_even_of_a_known_member(what: str) -> None:
    book = Book()
    with pytest.raises(EnvelopeError):
        book.offer(REFUSED[what])
    assert len(book.table) == 0
    book.offer(signed(ALICE, sequence=NOW_MS - 3 * LIFETIME_MS // 2, expires_at_ms=NOW_MS - 1))
    with pytest.raises(EnvelopeError):
        book.offer(REFUSED[what])
    assert book.table.number(ALICE.peer_id) == NOW_MS - 3 * LIFETIME_MS // 2


def test_a_verified_statement_is_still_refused_once_it_has_expired() -> None:
    raw = signed(ALICE)
    assert Book().offer(raw) == "joined"
    with pytest.raises(EnvelopeError, match="expired"):
        Book().offer(raw, now_ms=NOW_MS + LIFETIME_MS + CLOCK_TOLERANCE_MS)


def test_only_newer_words_count() -> None:
    book = Book().met(ALICE)
    first = signed(ALICE)
    assert book.offer(first) is None
    assert book.offer(later(ALICE, 5, span=Span(8, 16))) == "moved"
    assert book.offer(later(ALICE, 4, span=Span(0, 4))) is None  # a replay
    assert book.offer(first) is None
    member = book.table.get(ALICE.peer_id)
    assert member is not None
    assert member.announcement.span == Span(8, 16)
    assert book.offer(signed(OWN)) is None


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"span": Span(8, 16)}, "moved"),
        ({"state": "paused", "span": None}, "moved"),
        ({"state": "draining"}, "draining"),
        ({"state": "left", "span": None}, "left"),
        ({"decode_tokens_per_s": 3.5}, "updated"),
        ({"kv_free_tokens": 12}, "updated"),
    ],
)
def test_changes_are_told_apart(changes: dict[str, object], kind: str) -> None:
    book = Book().met(ALICE)
    assert book.offer(later(ALICE, 1, **changes)) == kind


def test_a_member_is_lost_by_two_failures_and_comes_back_by_contact() -> None:
    book = Book().met(ALICE)
    assert book.failed(ALICE) == "suspected"
    assert book.table.present() == ()
    assert [member.state for member in book.table.members()] == ["suspect"]
    assert book.seen(ALICE) == "recovered"
    assert [book.failed(ALICE), book.failed(ALICE), book.failed(ALICE)] == ["suspected", "dead", None]
    assert book.table.members() == ()
    assert book.table.dead() == [ALICE.peer_id]
    assert book.offer(signed(ALICE)) is None  # what it said before its death brings nobody back
    assert book.seen(ALICE) == "joined"
    assert book.table.present() == (ALICE.peer_id,)


def test_a_newer_word_of_a_dead_member_makes_it_a_stranger_again() -> None:
    book = Book().met(ALICE)
    book.failed(ALICE), book.failed(ALICE)
    assert book.offer(later(ALICE)) == "joined"
    assert book.table.next_stranger({}) == ALICE.peer_id
    assert book.table.present() == ()
    assert book.failed(ALICE) == "dead"
    assert ALICE.peer_id not in book.table


def test_a_newer_word_ends_a_suspicion() -> None:
    book = Book().met(ALICE)
    book.failed(ALICE)
    assert book.offer(later(ALICE)) == "recovered"
    assert book.table.present() == (ALICE.peer_id,)


def test_who_left_stays_away_until_it_says_otherwise() -> None:
    book = Book().met(ALICE)
    assert book.offer(later(ALICE, 1, state="left", span=None)) == "left"
    assert book.seen(ALICE) is None
    assert book.failed(ALICE) is None
    assert book.table.dead() == []
    assert book.table.members() == ()
    assert book.offer(later(ALICE, 2)) == "joined"
    assert Book().offer(later(ALICE, 1, state="left", span=None)) is None


def test_a_stranger_that_does_not_answer_is_forgotten_and_kept_off_for_a_while() -> None:
    book = Book()
    book.offer(signed(ALICE))
    assert book.failed(ALICE) == "dead"
    assert ALICE.peer_id not in book.table
    assert book.offer(signed(ALICE)) is None
    book.now += TableLimits().held_off_s
    assert book.offer(signed(ALICE)) == "joined"
    book.failed(ALICE)
    assert book.offer(signed(ALICE), sender=ALICE.peer_id) == "joined"  # it speaks for itself: it is there


def test_a_peer_that_tells_of_strangers_that_do_not_answer_is_soon_not_believed() -> None:
    limits, book = TableLimits(), Book()
    (carol,) = crowd(1, first=900)
    book.met(carol)
    ghosts = iter(crowd(100))
    for _ in range(int(limits.vain_strangers)):
        ghost = next(ghosts)
        assert book.offer(signed(ghost), sender=MALLORY.peer_id) == "joined"
        book.failed(ghost)
    assert book.offer(signed(next(ghosts)), sender=MALLORY.peer_id) is None
    assert book.offer(later(carol), sender=MALLORY.peer_id) == "updated"  # no stranger
    assert book.offer(signed(ALICE), sender=BOB.peer_id) == "joined"
    assert book.offer(signed(MALLORY), sender=MALLORY.peer_id) == "joined"  # it is there
    book.now += 1 / limits.vain_strangers_per_s
    assert book.offer(signed(next(ghosts)), sender=MALLORY.peer_id) == "joined"


def test_round_trips_fall_at_once_and_rise_slowly() -> None:
    book = Book().met(ALICE)
    for rtt_s, expected in ((0.1, 0.1), (0.02, 0.02), (0.12, 0.04), (0.01, 0.01)):
        book.seen(ALICE, rtt_s)
        member = book.table.get(ALICE.peer_id)
        assert member is not None
        assert member.rtt_s == pytest.approx(expected)


def test_tables_compare_by_their_vectors() -> None:
    here, there = Book().met(ALICE, BOB), Book().met(BOB, MALLORY)
    there.offer(later(BOB, 7, span=Span(8, 16)))
    here.offer(signed(identity(9)))  # a stranger: had, but not passed on
    news = set(there.table.newer_than(here.table.vector()))
    assert news == {later(BOB, 7, span=Span(8, 16)), signed(MALLORY)}
    wanted = list(there.table.wanted_from(here.table.vector()))
    assert set(here.table.peers_of(iter(wanted))) == {ALICE.peer_id, identity(9).peer_id}
    assert set(here.table.newer_than({})) == {signed(ALICE), signed(BOB)}


def test_the_gone_are_forgotten_in_time_and_stale_words_end() -> None:
    book = Book().met(ALICE, BOB)
    book.failed(ALICE), book.failed(ALICE)
    book.now += TableLimits().gone_kept_s
    assert book.table.expire(book.now, NOW_MS) == []
    assert ALICE.peer_id not in book.table
    (change,) = book.table.expire(book.now, NOW_MS + LIFETIME_MS + CLOCK_TOLERANCE_MS)
    assert (change.kind, change.member.peer) == ("left", BOB.peer_id)


# --- crowds ----------------------------------------------------------------------------------------------------------


def crowd(count: int, first: int = 100) -> list[Identity]:
    return [Identity(hashlib.sha256(b"crowd %d" % number).digest()) for number in range(first, first + count)]


def test_ten_thousand_identities_evict_nobody_and_stay_within_bounds() -> None:
    book = Book()
    good = crowd(200, first=20_000)
    book.met(*good)
    newcomer = crowd(1, first=30_000)[0]
    for number, sybil in enumerate(crowd(10_000)):
        book.offer(signed(sybil), sender=MALLORY.peer_id)
        if number == 5000:
            assert book.offer(signed(newcomer), sender=BOB.peer_id) == "joined"
    assert set(book.table.present()) == {who.peer_id for who in good}
    assert len(book.table) <= 200 + TableLimits().strangers
    assert newcomer.peer_id in book.table  # told of by another: its place is its own
    # The newcomer is met next but one, however many strangers Mallory told of.
    assert newcomer.peer_id in (book.table.next_stranger({}), book.table.next_stranger({}))


def test_strangers_share_their_places_among_those_who_tell_of_them() -> None:
    book = Book(TableLimits(members=64, strangers=8))
    flood, few = crowd(20), crowd(4, first=500)
    for who in flood:
        book.offer(signed(who), sender=MALLORY.peer_id)
    assert len(book.table) == 8
    for who in few:
        assert book.offer(signed(who), sender=ALICE.peer_id) == "joined"
    assert len(book.table) == 8
    assert [change.kind for change in book.table.take_evicted()] == ["left"] * 4
    assert book.table.take_evicted() == []
    for who in flood:
        assert book.offer(signed(who), sender=MALLORY.peer_id) is None
    assert all(who.peer_id in book.table for who in few)


def test_the_tellers_of_one_home_share_the_places_of_one() -> None:
    """One machine has as many peer ids as it likes: its places are no more than those of a teller elsewhere."""
    table = Table(OWN.peer_id, TableLimits(members=64, strangers=8))
    tellers, flood, few = crowd(20, first=1000), crowd(20), crowd(4, first=500)

    def offer(who: Identity, sender: Identity, home: str) -> bool:
        return table.update(said(who), sender=sender.peer_id, now=1.0, home=home) is not None

    for teller, who in zip(tellers, flood, strict=True):
        offer(who, teller, "one home")
    assert len(table) == 8
    assert all(offer(who, ALICE, "Alice's") for who in few)
    assert len(table.take_evicted()) == 4
    assert not any(offer(who, teller, "one home") for teller, who in zip(tellers, flood, strict=True))
    turns = [table.next_stranger({}) for _ in range(4)]
    assert sum(peer in {who.peer_id for who in few} for peer in turns) == 2


def test_who_speaks_for_itself_on_a_link_needs_no_strangers_place() -> None:
    for members in (64, 8):  # there is room, or strangers fill the table
        table = Table(OWN.peer_id, TableLimits(members=members, strangers=8))
        for number, who in enumerate(crowd(8)):
            table.update(said(who), sender=MALLORY.peer_id, now=1.0, home=f"Mallory's {number}")
        assert table.update(said(BOB), sender=BOB.peer_id, now=1.0) is None
        assert table.update(said(BOB), sender=BOB.peer_id, now=1.0, home="Bob's") is not None
        assert table.seen(BOB.peer_id, 1.0, home="Bob's") is not None
        assert table.present() == (BOB.peer_id,)
        assert len(table) == min(members, 9)


def test_members_count_by_home_unless_all_are_of_one() -> None:
    table = Table(OWN.peer_id)
    for who, home in ((ALICE, "one"), (BOB, "one")):
        table.update(said(who), sender=who.peer_id, now=1.0, home=home)
        table.seen(who.peer_id, 1.0, home=home)
    assert table.homes() == {}
    table.update(said(MALLORY), sender=MALLORY.peer_id, now=1.0, home="another")
    assert table.homes() == {}, "a stranger's home does not count"
    table.seen(MALLORY.peer_id, 1.0, home="another")
    assert table.homes() == {ALICE.peer_id: "one", BOB.peer_id: "one", MALLORY.peer_id: "another"}


def test_a_full_table_gives_up_the_gone_but_no_member_that_was_met() -> None:
    book = Book(TableLimits(members=4, strangers=4))
    alive = crowd(4)
    book.met(*alive)
    late = crowd(1, first=500)[0]
    assert book.offer(signed(late)) is None
    book.failed(alive[0]), book.failed(alive[0])
    assert book.offer(signed(late)) == "joined"
    assert alive[0].peer_id not in book.table
    assert len(book.table) == 4


def test_the_gone_have_few_places() -> None:
    book = Book(TableLimits(gone=3))
    everybody = crowd(10)
    book.met(*everybody)
    for who in everybody:
        book.failed(who), book.failed(who)
    assert book.table.dead() == [who.peer_id for who in everybody[-3:]]
    assert len(book.table) == 3


def test_memory_is_linear_in_members() -> None:
    def bytes_for(count: int) -> int:
        announcements = [signed(who) for who in crowd(count)]
        tracemalloc.start()
        book = Book()
        for raw in announcements:
            book.offer(bytes(bytearray(raw)))  # a copy of its own, as from the wire
        taken = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert len(book.table) == count
        return taken

    bytes_for(10)  # what is made once
    small, large = bytes_for(100), bytes_for(400)
    assert large < 4.4 * small
    assert large / 400 < 8192
