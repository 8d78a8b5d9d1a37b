"""Under which keys the members of a swarm can be found in the DHT, and in which order a joiner asks for them.

A key is ``hash(name, hour, shard)``. The DHT keeps only the first 20 providers of a key, so a single one could be
filled by dead or hostile peers: there are 16 shards, a member's own one follows from its peer id and the hour, and
every key is used for an hour only. Members provide this hour's key and the next one's, so that nobody is lost at the
turn of the hour or by a clock that is ten minutes off. A private swarm's secret goes into the hash, so that outsiders
cannot even watch it. Pure: the time is given, nothing is sent.
"""

from __future__ import annotations

import hashlib
import hmac

SHARDS = 16
HOUR_S = 3600
CLOCK_TOLERANCE_S = 600
ASK_AT_ONCE = 4  # shards a joiner asks in its first round; more only while nobody was found


def rendezvous_key(name: str, hour: int, shard: int, secret: bytes | None = None) -> bytes:
    """The 32-byte key of one shard of a swarm in one hour."""
    return _keyed(f"shoal rendezvous\0{name}\0{hour}\0{shard}", secret)


def record_key(name: str, pin: str | None = None, secret: bytes | None = None) -> bytes:
    """The 32-byte key under which a swarm's record is stored: for its bare name, or for its name and pinned model.

    The pin counts with its first 8 digits, whatever its length.
    """
    return _keyed(f"shoal record\0{name}\0{(pin or '')[:8]}", secret)


def shard_of(peer: str, hour: int) -> int:
    """The shard in which a member can be found in one hour."""
    return hashlib.sha256(f"shoal shard\0{peer}\0{hour}".encode()).digest()[0] % SHARDS


def keys_to_provide(name: str, peer: str, now_s: float, secret: bytes | None = None) -> tuple[bytes, bytes]:
    """This hour's key and the next hour's, for one member."""
    hour = int(now_s // HOUR_S)
    this, following = (rendezvous_key(name, at, shard_of(peer, at), secret) for at in (hour, hour + 1))
    return this, following


def keys_to_ask(name: str, peer: str, now_s: float, secret: bytes | None = None) -> tuple[bytes, ...]:
    """Every key worth asking, the best first.

    Joiners begin at different shards, so that they spread over the members. Near the turn of an hour the neighbouring
    hour's keys follow: the members' clocks may be on its other side.
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
