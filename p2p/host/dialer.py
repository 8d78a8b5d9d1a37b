"""Orders a peer's addresses and dials them "happy eyeballs" style: staggered, several at once, the first success wins.

`order` is pure. `first_of` knows no sockets: the caller passes in the function that dials one address.
"""

from __future__ import annotations

import ipaddress
import logging
import os
from collections.abc import Awaitable, Callable, Container, Iterable, Sequence
from typing import TypeVar

import trio

from p2p.addresses import Address, Scope, same_lan, scope_of
from p2p.channel.raw import ConnectionClosed
from p2p.errors import P2PError, PeerUnreachable

STAGGER_S = 0.15
_RELAY_HEAD_START_S = 0.6
MAX_ATTEMPTS = 16
MAX_NAMES = 2  # of these with a host name: a look-up takes a thread
MAX_RELAYED = 4  # of these through a relay, which may have to be dialled first
TOLD_FIRST = 2  # told direct addresses that are dialled before a peer's own relayed ones: it may be in this LAN by now

log = logging.getLogger("shoal.p2p.dialer")

Interface = ipaddress.IPv4Interface | ipaddress.IPv6Interface
Result = TypeVar("Result")


def order(
    addresses: Iterable[Address], interfaces: Sequence[Interface], told: Container[Address] = ()
) -> list[Address]:
    """Return the usable addresses in dialling order: loopback, own LAN, other private networks, public, relayed.

    Those in `told`, which only others have named, come after the peer's own, but `TOLD_FIRST` before its relayed ones.
    Among the public ones IPv6 comes first if this machine has a public IPv6 address, since it needs no NAT, and last if
    it has none. Otherwise the given order is kept within each of these groups. Loopback comes first only if the peer
    seems to run on this machine (it has one of our IPs, or no other address); otherwise it comes after the public
    addresses. At most `MAX_ATTEMPTS` addresses are returned, at most `MAX_NAMES` of them with a host name and at most
    `MAX_RELAYED` through relays.
    """
    usable = [address for address in dict.fromkeys(addresses) if address.scope is not Scope.UNUSABLE and address.port]
    relayed = [address for address in usable if address.relay is not None]
    names = [address for address in usable if address.ip is None]
    too_many = {*relayed[MAX_RELAYED:], *names[MAX_NAMES:]}
    usable = [address for address in usable if address not in too_many]
    own_ips = {own.ip for own in interfaces}
    elsewhere = [address for address in usable if address.scope in (Scope.LAN, Scope.PUBLIC)]
    on_this_machine = not elsewhere or any(address.ip in own_ips for address in elsewhere)

    has_ipv6 = any(own.version == 6 and scope_of(own.ip) is Scope.PUBLIC for own in interfaces)

    def rank(address: Address) -> float:
        ip = address.ip
        match address.scope:
            case Scope.LOOPBACK:
                return 0 if on_this_machine else 4
            case Scope.LAN:
                return 1 if ip is not None and same_lan(ip, interfaces) else 2
            case Scope.PUBLIC:
                return 3 if ip is None or ip.version == 4 else 2.5 if has_ipv6 else 3.5
        return 5

    ranked = sorted(usable, key=rank)
    own = [address for address in ranked if address not in told]
    others = [address for address in ranked if address in told]
    early = [address for address in others if address.relay is None][:TOLD_FIRST]
    direct = [address for address in own if address.relay is None]
    return list(dict.fromkeys((*direct, *early, *own, *others)))[:MAX_ATTEMPTS]


def delay_before(address: Address, previous: Address | None) -> float:
    """Seconds to give `previous` before `address` is dialled in parallel; longer before the first relayed address."""
    if previous is None:
        return 0.0
    if address.scope is Scope.RELAY and previous.scope is not Scope.RELAY:
        return _RELAY_HEAD_START_S
    return STAGGER_S


async def first_of(
    peer: str,
    attempts: Sequence[Address],
    dial: Callable[[Address], Awaitable[Result]],
    discard: Callable[[Result], None],
) -> Result:
    """Return the result of the first dial that succeeds.

    The next attempt starts when the last one fails or takes longer than `delay_before`. A second success that comes
    too late to be cancelled goes to `discard`. Raises `PeerUnreachable` with each kind of failure once.
    """
    won: list[Result] = []
    failures: list[tuple[Address, str]] = []

    async def attempt(address: Address, done: trio.Event, scope: trio.CancelScope) -> None:
        try:
            result = await dial(address)
            if won:
                discard(result)
            else:
                won.append(result)
                scope.cancel()
        except (P2PError, OSError) as error:
            log.debug("dialling %s: %s", address, error)
            failures.append((address, _words(error)))
        except trio.TooSlowError:
            failures.append((address, "no answer in time"))
        except Exception as error:
            log.exception("dialling %s", address)
            failures.append((address, repr(error)))
        finally:
            done.set()

    async with trio.open_nursery() as nursery:
        done, previous = trio.Event(), None
        for address in attempts:
            with trio.move_on_after(delay_before(address, previous)):
                if previous is not None:
                    await done.wait()
            done, previous = trio.Event(), address
            nursery.start_soon(attempt, address, done, nursery.cancel_scope)
    if won:
        return won[0]
    if not attempts:
        raise PeerUnreachable(f"no address of {peer} is known")
    raise PeerUnreachable(f"{peer} could not be reached: {_summary(failures)}")


def _words(error: P2PError | OSError) -> str:
    """An attempt's error in words; the system's own for a socket, whose errors repeat the address and a number.

    A peer that refuses this node takes the connection and closes it without a word.
    """
    if isinstance(error, ConnectionClosed):
        return "the peer closed the connection, as one does that has banned this node or is full,"
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno).lower()
    return str(error)


def _summary(failures: Iterable[tuple[Address, str]]) -> str:
    """Each kind of failure once, with the first address where it happened and how many others share it."""
    places: dict[str, list[str]] = {}
    for address, words in failures:
        host = f"[{address.host}]" if address.kind == "ip6" else address.host
        relayed = " through a relay" if address.relay is not None else ""
        places.setdefault(words, []).append(f"{host}:{address.port}{relayed}")
    return "; ".join(
        f"{words} at {first}{f' and {len(more)} more' if more else ''}" for words, (first, *more) in places.items()
    )
