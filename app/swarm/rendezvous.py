"""DHT keys under which the members of a swarm can be found, and the order in which a joiner looks them up. Pure.

A key is ``hash(name, hour, shard)``. The DHT keeps only the first 20 providers of a key, so a single key could be
filled by dead or hostile peers: there are 16 shards, a member's shard follows from its peer id and the hour, and every
key is used for an hour only. Members provide this hour's key and the next one's, so that they are found around the
change of the hour and by clocks that are ten minutes off. A private swarm's secret is part of the hash, so that
outsiders cannot observe the swarm. `app.membership.bootstrap` provides the keys and looks them up.
"""

from __future__ import annotations

import hashlib
import hmac

from app.swarm.names import PIN_DIGITS

SHARDS = 16
HOUR_S = 3600
CLOCK_TOLERANCE_S = 600
ASK_AT_ONCE = 4  # shards that a joiner looks up at a time; it stops once somebody was found


def rendezvous_key(name: str, hour: int, shard: int, secret: bytes | None = None) -> bytes:
    """Return the 32-byte key of one shard of a swarm in one hour (hours since the epoch)."""
    return _keyed(f"shoal rendezvous\0{name}\0{hour}\0{shard}", secret)


def record_key(name: str, pin: str | None = None, secret: bytes | None = None) -> bytes:
    """Return the 32-byte key of a swarm's record, for its bare name or for its name and a pinned model.

    Only the first `PIN_DIGITS` digits of the pin are used, so that pins of any length lead to the same key.
    """
    return _keyed(f"shoal record\0{name}\0{(pin or '')[:PIN_DIGITS]}", secret)


def shard_of(peer: str, hour: int) -> int:
    """Return the shard that a member provides in one hour."""
    return hashlib.sha256(f"shoal shard\0{peer}\0{hour}".encode()).digest()[0] % SHARDS


def keys_to_provide(name: str, peer: str, now_s: float, secret: bytes | None = None) -> tuple[bytes, bytes]:
    """Return the keys that a member provides: this hour's and the next hour's."""
    hour = int(now_s // HOUR_S)
    this, following = (rendezvous_key(name, at, shard_of(peer, at), secret) for at in (hour, hour + 1))
    return this, following


def keys_to_ask(name: str, peer: str, now_s: float, secret: bytes | None = None) -> tuple[bytes, ...]:
    """Return the keys that a joiner looks up, in order.

    The order of the shards depends on the joiner's id, so that joiners spread over the members. Within ten minutes of
    a change of the hour the other hour's keys follow, because members' clocks may differ.
    """
    hour, second = divmod(int(now_s), HOUR_S)
    hours = [hour]
    if second < CLOCK_TOLERANCE_S:
        hours.append(hour - 1)
    elif second >= HOUR_S - CLOCK_TOLERANCE_S:
        hours.append(hour + 1)
    order = sorted(range(SHARDS), key=lambda shard: hashlib.sha256(f"{peer}\0{shard}".encode()).digest())
    return tuple(rendezvous_key(name, at, shard, secret) for at in hours for shard in order)


def _keyed(text: str, secret: bytes | None) -> bytes:
    if secret is None:
        return hashlib.sha256(text.encode()).digest()
    return hmac.digest(secret, text.encode(), "sha256")
