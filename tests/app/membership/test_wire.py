"""The bodies of a swarm's calls: what was written is read again, and nothing else gets through."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.membership import wire
from app.membership.gossip_queue import FAN_OUT, PIGGYBACK_PER_MESSAGE, PIGGYBACK_REPEATS, GossipQueue, targets
from p2p.errors import ProtocolError

STATEMENTS = st.lists(st.binary(min_size=1, max_size=300), max_size=8)
IDS = st.binary(min_size=16, max_size=16)
KEYS = st.binary(min_size=8, max_size=8)
NUMBERS = st.integers(0, 2**64 - 1)
READERS: list[Callable[[bytes], object]] = [
    wire.Tell.decode,
    wire.ProbeRequest.decode,
    wire.TableRequest.decode,
    wire.TableAnswer.decode,
    wire.AdmitRequest.decode,
    lambda body: wire.unpack(body, wire.MAX_TABLE_BYTES),
]


@given(IDS, STATEMENTS, NUMBERS, st.dictionaries(KEYS, NUMBERS, max_size=20), st.lists(KEYS, max_size=20))
def test_what_is_written_is_read_again(
    swarm: bytes, statements: list[bytes], number: int, vector: dict[bytes, int], wanted: list[bytes]
) -> None:
    for body in (
        wire.Tell(swarm, statements),
        wire.ProbeRequest(swarm, number, statements),
        wire.TableRequest(swarm, vector, statements),
        wire.TableAnswer(wanted, statements),
        wire.AdmitRequest(swarm, swarm, "anna's mühle"),
    ):
        assert type(body).decode(body.encode()) == body


@given(st.binary(max_size=400))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    for read in READERS:
        try:
            read(body)
        except ProtocolError:
            pass


@pytest.mark.parametrize(
    ("read", "body"),
    [
        (wire.Tell.decode, bytes(15)),
        (wire.Tell.decode, bytes(16) + b"\0\5four"),
        (wire.Tell.decode, bytes(16) + b"\0\0"),
        (
            wire.Tell.decode,
            bytes(16) + (wire.MAX_STATEMENT_BYTES + 1).to_bytes(2) + bytes(wire.MAX_STATEMENT_BYTES + 1),
        ),
        (wire.Tell.decode, bytes(16) + wire.pack([bytes(1000)]) * (wire.MAX_BATCH_BYTES // 1000 + 1)),
        (wire.ProbeRequest.decode, bytes(23)),
        (wire.TableRequest.decode, bytes(16)),
        (wire.TableRequest.decode, bytes(16) + b"\0\2" + bytes(31)),
        (wire.TableRequest.decode, bytes(16) + (wire.MAX_VECTOR + 1).to_bytes(2) + bytes(16 * (wire.MAX_VECTOR + 1))),
        (wire.TableAnswer.decode, b""),
        (wire.AdmitRequest.decode, bytes(31)),
        (wire.AdmitRequest.decode, bytes(32) + b"a" * (wire.MAX_NAME_BYTES + 1)),
        (wire.AdmitRequest.decode, bytes(32) + b"\x1b[2J"),
        (wire.AdmitRequest.decode, bytes(32) + "\u202e".encode()),
    ],
    ids=range(14),
)
def test_what_is_cut_off_or_too_long_is_refused(read: Callable[[bytes], object], body: bytes) -> None:
    with pytest.raises(ProtocolError):
        read(body)


def test_a_body_takes_as_many_statements_as_fit() -> None:
    statements = [bytes(100)] * 10
    assert len(wire.fitting(statements, 510)) == 5
    assert len(wire.pack(wire.fitting(statements, 509))) == 408


# --- what is passed on, and to whom ----------------------------------------------------------------------------------


def test_a_change_is_pushed_once_and_a_newer_one_takes_its_place() -> None:
    gossip_queue = GossipQueue()
    gossip_queue.add(("announcement", "a"), b"old", urgent=True)
    gossip_queue.add(("announcement", "a"), b"new", urgent=True)
    gossip_queue.add(("suspicion", "a"), b"doubt", urgent=True)
    gossip_queue.add(("announcement", "b"), b"lesser", urgent=False)
    assert gossip_queue.has_urgent
    assert gossip_queue.take_batch() == [b"new", b"doubt"]
    assert not gossip_queue.has_urgent
    assert sorted(gossip_queue.take_piggyback()) == [b"doubt", b"lesser", b"new"]


def test_every_rumour_rides_a_few_times_and_all_get_their_turn() -> None:
    gossip_queue = GossipQueue()
    names = [b"%d" % number for number in range(3 * PIGGYBACK_PER_MESSAGE)]
    for name in names:
        gossip_queue.add(("announcement", name.decode()), name, urgent=False)
    ridden = [raw for _ in range(3) for raw in gossip_queue.take_piggyback()]
    assert sorted(ridden) == sorted(names)
    while riders := gossip_queue.take_piggyback():
        ridden += riders
    assert sorted(ridden) == sorted(names * PIGGYBACK_REPEATS)
    assert len(gossip_queue) == 0


def test_a_batch_fits_a_message() -> None:
    gossip_queue = GossipQueue()
    for number in range(500):
        gossip_queue.add(("announcement", str(number)), bytes(400), urgent=True)
    sizes = []
    while gossip_queue.has_urgent:
        sizes.append(len(wire.pack(gossip_queue.take_batch())))
    assert sum(sizes) == 500 * 402
    assert max(sizes) <= wire.MAX_BATCH_BYTES


@given(st.integers(2, 60), st.integers(0, 2**32))
def test_whoever_starts_a_push_it_reaches_everybody(count: int, seed: int) -> None:
    rng = random.Random(seed)
    everybody = sorted(f"peer {rng.random()}" for _ in range(count))
    reached, ahead = {everybody[0]}, [everybody[0]]
    while ahead:
        pusher = ahead.pop()
        others = [name for name in everybody if name != pusher]
        chosen = targets(pusher, others, others, rng)
        assert len(chosen) == len(set(chosen)) == min(FAN_OUT, count - 1)
        ahead += [name for name in chosen if name not in reached]
        reached |= set(chosen)
    assert reached == set(everybody)
