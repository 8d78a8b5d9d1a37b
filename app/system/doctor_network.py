"""The doctor's lines about the network: facts in, one line each out; measuring is left to a running node.

Where no node runs, only what can be seen without one is said: whether the usual ports are free, and the clock.
"""

from __future__ import annotations

import errno
import socket
import statistics
from collections.abc import Iterator, Sequence

from app.snapshot.views import PeerView, Snapshot
from app.system.doctor import Check, Status

MAX_PEERS = 50  # lines of single members
# Reasons that a person should look at; the others are as they should be.
TROUBLED = frozenset({"wrong_secret", "probe_blocks", "probe_api", "cannot_host", "no_room", "looking"})
WORRYING = frozenset({"peer_suspect", "peer_dead", "distrusted"})
CLOCK_TOLERANCE_S = 60.0
CLOCK_LIMIT_S = 600.0  # beyond this the other members refuse what this node signs
# No correct clock shows a time before Shoal existed.
_BEGINNING_MS = 1_735_689_600_000


def check_listening(addresses: Sequence[str]) -> Check:
    """Where the node listens."""
    if not addresses:
        return Check("listen", "fail", "the node listens nowhere", "give it an address with --listen, then restart it")
    return Check("listen", "ok", " ".join(addresses))


def check_port(label: str, port: int, *, free: bool) -> Check:
    """Whether a port that a node would use can be had."""
    if free:
        return Check(label, "ok", f"TCP port {port} is free")
    mend = "a node would use any free one instead; forward that, or stop the other program"
    return Check(label, "warn", f"TCP port {port} is taken by another program", mend)


def check_addresses(advertised: Sequence[str], verified: Sequence[str], reach: str) -> Check:
    """What others are told, and whether it was seen to work."""
    if not advertised:
        return Check("addresses", "warn", "none can be told to others", "connect this machine to a network")
    shown = " ".join(f"{one} ({'verified' if _is_among(one, verified) else 'unverified'})" for one in advertised)
    return Check("addresses", "ok", f"{shown}; reachability from outside: {reach}")


def check_nat(reach: str, *, relayed: bool, relaying: bool) -> Check:
    """Whether peers on the internet can dial in."""
    if reach == "verified":
        return Check("nat", "ok", "peers on the internet can dial in" + (", and use this node as a relay" * relaying))
    if reach == "unverified" and relayed:
        return Check("nat", "ok", "behind a NAT: reached through a relay, and directly where hole punching works")
    if reach == "unverified":
        mend = "forward the listening port in the router and name it with --advertise, or let a public node join"
        return Check("nat", "warn", "peers on the internet cannot dial in, and no relay is known", mend)
    return Check("nat", "ok", "not known yet: no peer on the internet is connected that could try")


def check_clock(now_ms: int, last_said_ms: int, heard_ms: Sequence[int]) -> Check:
    """Whether this machine's clock is believable: members' newest statements bear the times of their own clocks."""
    if now_ms < _BEGINNING_MS:
        return Check("clock", "fail", "the clock shows a time long past", "set it, best by switching time service on")
    behind_s = (statistics.median(heard_ms) - now_ms) / 1000 if heard_ms else 0.0
    set_back_s = (last_said_ms - now_ms) / 1000
    mend = "set the clock, best by switching the system's time service on"
    if behind_s > CLOCK_LIMIT_S:
        return Check("clock", "fail", f"{behind_s:.0f} s behind the other members: they refuse this node's word", mend)
    if behind_s > CLOCK_TOLERANCE_S:
        return Check("clock", "warn", f"{behind_s:.0f} s behind the other members", mend)
    if set_back_s > CLOCK_TOLERANCE_S:
        return Check("clock", "warn", f"it was set back by {set_back_s:.0f} s since this node last ran", mend)
    return Check("clock", "ok", "agrees with the other members" if heard_ms else "nothing speaks against it")


def check_peers(links: int, members: int, swarm: str | None, discovery: Sequence[str]) -> Check:
    """Whether there is company."""
    if swarm is None:
        return Check("peers", "ok", f"{links} connected; the node is in no swarm")
    detail = f"{links} connected, {members} other members of {swarm}"
    if links or members:
        return Check("peers", "ok", detail)
    means = ", ".join(discovery) or "nothing"
    mend = "ask a member for an invite (`shoal invite`), or name one with --peer"
    return Check("peers", "warn", f"{detail}; looked for by {means}", mend)


def check_peer(peer: PeerView) -> Check:
    """How one member is reached."""
    name = f"peer {peer.peer[-8:]}"
    rtt = "" if peer.rtt_s is None else f", {peer.rtt_s * 1000:.1f} ms there and back"
    detail = f"{peer.link or 'no link is open'}{rtt}; {peer.state}"
    if peer.unused is None:
        return Check(name, "ok", detail)
    status: Status = "warn" if peer.unused.code in WORRYING else "ok"
    return Check(name, status, f"{detail}; not used: {peer.unused.text}", peer.unused.next_step)


def check_state(snapshot: Snapshot) -> Check:
    """What the node does, and why, in the words that it says everywhere."""
    mend = "" if snapshot.why is None else snapshot.why.next_step
    failing = snapshot.why is not None and snapshot.why.code in TROUBLED
    return Check("state", "warn" if failing else "ok", f"{snapshot.state}: {snapshot.reason}", mend)


def running_checks(snapshot: Snapshot, *, now_ms: int, last_said_ms: int, heard_ms: Sequence[int]) -> Iterator[Check]:
    """The lines of a running node."""
    network = snapshot.network
    relayed = any("/p2p-circuit" in address for address in network.advertised)
    yield check_state(snapshot)
    yield check_listening(snapshot.listen_addrs)
    yield check_addresses(network.advertised, network.verified, network.reach)
    yield check_nat(network.reach, relayed=relayed, relaying=network.relaying)
    yield check_clock(now_ms, last_said_ms, heard_ms)
    yield check_peers(network.links, len(snapshot.peers), snapshot.swarm, network.discovery)
    yield from (check_peer(peer) for peer in snapshot.peers[:MAX_PEERS])


def resting_checks(listen_ports: Sequence[int], api_port: int, *, now_ms: int, last_said_ms: int) -> Iterator[Check]:
    """The lines where no node runs."""
    for port in dict.fromkeys(port for port in listen_ports if port):
        yield check_port("listen", port, free=is_free("0.0.0.0", port))
    if api_port:
        yield check_port("api", api_port, free=is_free("127.0.0.1", api_port))
    yield check_clock(now_ms, last_said_ms, ())
    yield Check("peers", "ok", "no node runs here: `shoal serve` starts one, which can say more")


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.setsockopt(socket.SOL_SOCKET, getattr(socket, "SO_EXCLUSIVEADDRUSE", socket.SO_REUSEADDR), 1)
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            return error.errno not in (errno.EADDRINUSE, errno.EACCES)
    return True


def _is_among(address: str, verified: Sequence[str]) -> bool:
    return any(address == proven or address.startswith(f"{proven}/") for proven in verified)
