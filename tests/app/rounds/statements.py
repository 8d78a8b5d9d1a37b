"""Signed rounds of a small job, for the tests of the log and of the network."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from app.rounds.decisions import leading_order
from app.rounds.log import RoundEntry, Standing, beginning, follow, make_entry
from app.rounds.record import TrainingRecord
from app.rounds.statements import Arrival, MemberList, Result, sign_arrival, sign_list, sign_result
from app.training.wire import StatePart
from p2p.identity import Identity
from tests.app.swarms import identity

NOW_MS = 1_800_000_000_000
PEOPLE = [identity(number) for number in range(5)]
STRANGERS = [identity(100 + number) for number in range(3)]
BY_PEER = {one.peer_id: one for one in (*PEOPLE, *STRANGERS)}
PART = StatePart(b"p" * 32, 1000)
RECORD = TrainingRecord(
    name="fish", founder=PEOPLE[0].peer_id, swarm="s" * 32, model="", shape={"hidden_size": 64}, start="ab" * 32,
    tokens=PART, held=PART, tokenizer=PART, source="made up", licence="MIT", length=16, batch=4, steps=40, every=10,
    least_every=5, most_every=20, optimiser="adamw", rate=1e-3, warm_up=2, weight_decay=0.1, clip=1.0, wire="auto",
    merging="clip", outer_rate=0.7, outer_momentum=0.9, seed=1, created_ms=NOW_MS,
)  # fmt: skip


def arrival(who: Identity, standing: Standing, tokens: int = 100, **more: Any) -> Arrival:
    """One island's arrival."""
    change = hashlib.sha256(who.peer_id.encode()).digest()
    made = Arrival(RECORD.id, standing.round, standing.prev, standing.every, tokens, change)
    return sign_arrival(who, replace(made, **more), NOW_MS)


def members(standing: Standing, people: Sequence[Identity], twins: Sequence[str] = (), **more: Any) -> MemberList:
    """A list of some islands, signed by the first in order; twins have one change."""
    order = leading_order(RECORD.id, standing.round, (one.peer_id for one in people))
    one: dict[str, Any] = {"change": b"t" * 32}
    arrivals = [arrival(BY_PEER[peer], standing, **more, **(one if peer in twins else {})) for peer in order]
    return sign_list(BY_PEER[order[0]], RECORD.id, 0, arrivals, NOW_MS)


def result(
    who: Identity,
    found: MemberList,
    root: bytes,
    report: Mapping[str, tuple[float, float]],
    past: tuple[int, ...] = (),
    tested: tuple[int, ...] = (),
    recomputed: tuple[int, ...] = (),
) -> Result:
    """One member's result."""
    made = Result(
        found.job, found.round, found.hash, root, {}, report, past=past, tested=tested, recomputed=recomputed
    )  # fmt: skip
    return sign_result(who, made, NOW_MS)


def round_of(
    standing: Standing,
    people: Sequence[Identity],
    liar: str = "",
    present: Sequence[str] = (),
    every: int = 10,
    codec: str = "int8",
    rider: str = "",
    tested: Mapping[str, tuple[int, ...]] | None = None,
    **more: Any,
) -> tuple[RoundEntry, Standing]:
    """A whole round; a liar's change is unlike the others', a free rider's is the last merged one."""
    found = members(standing, people, **more)
    report = {peer: (1.0, -0.5 if peer == liar else 0.5) for peer in found.members}
    past = tuple(998 if peer == rider else 600 for peer in found.members)
    root = hashlib.sha256(found.raw).digest()
    told = tested or {}
    results = [result(BY_PEER[peer], found, root, report, past, tested=told.get(peer, ())) for peer in found.members]
    leader = BY_PEER[found.leader]
    entry = make_entry(
        leader, RECORD, standing, found, results, every=every, codec=codec, present=present, now_ms=NOW_MS
    )
    return entry, follow(RECORD, standing, entry)


def history(count: int, people: Sequence[Identity] = PEOPLE[:3], **more: Any) -> list[RoundEntry]:
    """Some rounds, the first of the founder alone."""
    present = [one.peer_id for one in people]
    entry, standing = round_of(beginning(RECORD), people[:1], present=present)
    entries = [entry]
    for _ in range(count - 1):
        entry, standing = round_of(standing, people, **more)
        entries.append(entry)
    return entries
