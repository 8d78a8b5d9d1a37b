"""Peers cannot fill a log: repeated warnings are left out, and counted."""

from __future__ import annotations

import logging

from p2p.channel import yamux
from p2p.host import connection, host
from p2p.link import link
from p2p.rate_limit import BURST, PER_S, LogLimit


def record(level: int, message: str, *arguments: object) -> logging.LogRecord:
    return logging.LogRecord("shoal.p2p", level, "", 0, message, arguments, None)


def test_a_flood_is_cut_short_and_counted_and_other_lines_are_not_touched() -> None:
    now = 0.0
    limit = LogLimit(lambda: now)
    written = sum(limit.filter(record(logging.WARNING, "%s misbehaves", peer)) for peer in range(1000))
    assert written == BURST
    assert limit.filter(record(logging.WARNING, "something else"))
    assert all(limit.filter(record(logging.INFO, "%s misbehaves", peer)) for peer in range(100))
    now += 1 / PER_S
    late = record(logging.ERROR, "%s misbehaves", "it")
    assert limit.filter(late)
    assert late.getMessage() == "it misbehaves (and 980 more like it)"
    assert not limit.filter(record(logging.WARNING, "%s misbehaves", "it"))


def test_what_peers_can_make_this_node_say_is_limited() -> None:
    for log in (host.log, link.log, connection.log, yamux.logger):
        assert any(isinstance(one, LogLimit) for one in log.filters)
