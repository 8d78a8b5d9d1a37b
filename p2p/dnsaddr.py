"""Resolves `/dnsaddr/NAME` addresses, libp2p's way to keep lists of entry points in DNS.

The TXT records of `_dnsaddr.NAME` are texts of the form `dnsaddr=ADDRESS`; such an address may be another `/dnsaddr/…`.
A suffix `/p2p/PEER` selects the addresses of that peer. Only addresses that this node can dial are returned.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable

import trio

from p2p.addresses import Address, BadAddress, parse_address, parse_dnsaddr

MAX_NAMES = 16  # that are looked up for one list
MAX_FOUND = 64
TIMEOUT_S = 5.0

log = logging.getLogger("shoal.p2p.dns")

LookUp = Callable[[str], Awaitable[list[str]]]  # the TXT records of a name; raises OSError


async def resolve(entries: Iterable[str], look_up: LookUp | None = None) -> list[Address]:
    """Return the addresses with a peer id that `entries` lead to; entries that lead nowhere are logged and skipped."""
    waiting: list[tuple[str, str | None]] = [(entry, None) for entry in entries]
    found: dict[Address, None] = {}
    names: set[str] = set()
    while waiting and len(found) < MAX_FOUND:
        entry, wanted = waiting.pop(0)
        form = parse_dnsaddr(entry)
        if form is None:
            try:
                address = parse_address(entry)
            except BadAddress:
                continue  # of a transport that this node lacks, such as QUIC
            if address.peer is not None and wanted in (None, address.peer) and address.relay is None:
                found[address] = None
        elif form[0] not in names and len(names) < MAX_NAMES:
            names.add(form[0])
            try:
                with trio.fail_after(TIMEOUT_S):
                    texts = await (look_up or txt_records)(f"_dnsaddr.{form[0]}")
            except (OSError, trio.TooSlowError) as error:
                log.info("%s cannot be resolved: %s", entry, error or "no answer in time")
                continue
            said = [text.removeprefix("dnsaddr=") for text in texts if text.startswith("dnsaddr=")]
            waiting += [(text, form[1] or wanted) for text in said[:MAX_FOUND] if len(text) <= 512]
    return list(found)


async def txt_records(name: str) -> list[str]:
    """Return the TXT records of a DNS name, as this machine's resolver answers; raises OSError."""
    import dns.asyncresolver
    import dns.exception

    try:
        answer = await dns.asyncresolver.resolve(name, "TXT", lifetime=TIMEOUT_S)
    except dns.exception.DNSException as error:
        raise OSError(f"DNS: {error}") from error
    return [b"".join(record.strings).decode("utf-8", "replace") for record in answer]
