"""Rendezvous keys: members and joiners meet whatever the hour, and outsiders cannot compute a private swarm's."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.swarm.rendezvous import (
    ASK_AT_ONCE,
    CLOCK_TOLERANCE_S,
    HOUR_S,
    SHARDS,
    keys_to_ask,
    keys_to_provide,
    record_key,
    rendezvous_key,
    shard_of,
)
from p2p.identity import Identity

PEERS = [Identity(bytes([number % 256, number // 256]) * 16).peer_id for number in range(200)]
SECRET = b"s" * 32


@given(
    st.integers(0, 10**10),
    st.integers(-CLOCK_TOLERANCE_S, CLOCK_TOLERANCE_S),
    st.integers(0, HOUR_S // 2),
    st.booleans(),
)
def test_a_joiner_always_asks_a_key_that_a_member_provides(now: int, skew: int, age: int, private: bool) -> None:
    # The member provided its keys up to half an hour ago, by a clock that is up to ten minutes off.
    secret = SECRET if private else None
    provided = keys_to_provide("attic", PEERS[0], now - age + skew, secret)
    assert set(provided) & set(keys_to_ask("attic", PEERS[1], now, secret))


def test_keys_are_final_and_32_bytes() -> None:
    # A change of these values means that members of different versions no longer find each other.
    assert rendezvous_key("attic", 500_000, 3).hex().startswith("494061debe29acbc")
    assert rendezvous_key("attic", 500_000, 3, SECRET).hex().startswith("82d134afe9c702f2")
    assert len(rendezvous_key("attic", 500_000, 3)) == 32


def test_names_hours_shards_and_secrets_have_keys_of_their_own() -> None:
    keys = [
        rendezvous_key(name, hour, shard, secret)
        for name in ("attic", "attic1")
        for hour in (1, 11)
        for shard in (1, 11)
        for secret in (None, SECRET, b"t" * 32)
    ]
    assert len(set(keys)) == len(keys)


def test_members_spread_over_all_shards_and_move_every_hour() -> None:
    counts = Counter(shard_of(peer, 500_000) for peer in PEERS)
    assert set(counts) == set(range(SHARDS))
    assert max(counts.values()) < 3 * len(PEERS) / SHARDS
    stayed = sum(shard_of(peer, 500_000) == shard_of(peer, 500_001) for peer in PEERS)
    assert stayed < len(PEERS) / 4


def test_joiners_begin_at_different_shards_and_ask_each_once() -> None:
    middle = 500_000 * HOUR_S + HOUR_S // 2
    asked = [keys_to_ask("attic", peer, middle) for peer in PEERS]
    assert all(len(keys) == len(set(keys)) == SHARDS for keys in asked)
    assert len({keys[0] for keys in asked}) == SHARDS
    assert ASK_AT_ONCE < SHARDS


@pytest.mark.parametrize(("second", "other"), [(10, -1), (HOUR_S - 10, 1)])
def test_near_the_turn_of_the_hour_the_neighbour_is_asked_last(second: int, other: int) -> None:
    keys = keys_to_ask("attic", PEERS[0], 500_000 * HOUR_S + second)
    assert set(keys[:SHARDS]) == {rendezvous_key("attic", 500_000, shard) for shard in range(SHARDS)}
    assert set(keys[SHARDS:]) == {rendezvous_key("attic", 500_000 + other, shard) for shard in range(SHARDS)}


def test_record_keys() -> None:
    keys = {
        record_key("attic"),
        record_key("attic", "1a2b3c4d" * 8),
        record_key("attic", secret=SECRET),
        record_key("attic2"),
        rendezvous_key("attic", 0, 0),
    }
    assert len(keys) == 5
    assert record_key("attic", "0" * 20) == record_key("attic", "0" * 20 + "1" * 44)
