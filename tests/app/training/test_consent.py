"""Whose jobs run where: a node's own settings, and routes that never ask who refuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from app.config.settings import Settings
from app.core.span import Span
from app.routing.planner import PrivacyPreferences
from app.routing.route import Hop, NoRoute
from app.routing.trust import TrustBook
from app.swarm.records import Announcement, read_announcement, sign_announcement, tail
from app.training.consent import job_replicas, job_routes, slow_wire, terms_of
from app.training.trainer import RouteFinder
from p2p.identity import Identity
from p2p.memory.fabric import MemoryFabric, open_fabric


@pytest.mark.parametrize(
    ("train", "served"), [("never", {"me"}), ("trusted", {"me", "friend"}), ("members", {"me", "friend", "member"})]
)
def test_whose_jobs_a_node_trains(train: str, served: set[str]) -> None:
    settings = Settings(train=train, trusted=("friend",))  # type: ignore[arg-type]
    refuses = terms_of(settings, "me", lambda peer: peer == "member").refuses
    assert {peer for peer in ("me", "friend", "member", "stranger") if refuses(peer) is None} == served


def test_limits_are_those_of_the_settings() -> None:
    terms = terms_of(Settings(train_jobs=3, train_memory=500), "me", bool)
    assert (terms.jobs, terms.memory_bytes) == (3, 500)
    assert terms_of(Settings(train_memory=None), "me", bool).memory_bytes > 2**60
    assert (Settings().train, Settings().train_jobs) == ("trusted", 1)


def test_the_announcement_says_it_and_older_ones_say_never() -> None:
    identity = Identity.generate()
    own = Announcement(identity.peer_id, 1_000, 60_000, "ab" * 16, "client")
    for train in ("never", "trusted", "members"):
        raw = sign_announcement(identity, replace(own, train=train))
        assert read_announcement(raw, now_ms=1_000).train == train
        assert (b'"train"' in raw) == (train != "never")  # as before, so that older nodes see no difference


def member(peer: str, start: int, stop: int, train: str) -> Announcement:
    return Announcement(peer, 1, 0, "", "serving", Span(start, stop), 100.0, 1000.0, 1 << 20, train=train)


def finder(fabric: MemoryFabric, members: Sequence[Announcement], private: int = 0) -> RouteFinder:
    preferences = PrivacyPreferences(private_blocks=private, trusted=frozenset({"friend"}))
    return job_routes(fabric.node("me"), lambda: members, lambda: preferences, 4)


async def test_who_refuses_is_never_asked() -> None:
    async with open_fabric() as fabric:
        members = [member("a", 0, 4, "never"), member("b", 0, 2, "members"), member("c", 2, 4, "trusted")]
        assert [hop.peer for hop in await finder(fabric, members)(frozenset())] == ["b", "c"]


async def test_this_nodes_own_blocks_need_no_consent() -> None:
    async with open_fabric() as fabric:
        assert [hop.peer for hop in await finder(fabric, [member("me", 0, 4, "never")])(frozenset())] == ["me"]


async def test_a_block_that_nobody_trains_is_named_with_who_holds_it() -> None:
    async with open_fabric() as fabric:
        members = [member("b", 0, 2, "members"), member("a", 2, 4, "never")]
        with pytest.raises(NoRoute, match="nobody serves block 2 for this job; it is hosted by a,"):
            await finder(fabric, members)(frozenset())


async def test_private_blocks_hold_for_jobs() -> None:
    async with open_fabric() as fabric:
        members = [member("a", 0, 4, "members"), member("friend", 0, 4, "members")]
        route = await finder(fabric, members, private=1)(frozenset())
        assert route[0].peer == route[-1].peer == "friend"
        alone = job_routes(fabric.nodes["me"], lambda: members[:1], lambda: PrivacyPreferences(private_blocks=1), 4)
        with pytest.raises(NoRoute, match="trusted peers"):
            await alone(frozenset())


async def test_who_may_train_beside_a_route() -> None:
    book = TrustBook(clock=lambda: 0.0)
    book.note("liar", "lied", "trained wrongly")
    rough = replace(member("rough", 0, 4, "members"), dtype="bf16")
    fast = replace(member("fast", 0, 4, "trusted"), prefill_tokens_per_s=5000.0)
    members = [
        member("a", 0, 2, "members"),
        member("b", 2, 4, "members"),
        member("c", 1, 4, "members"),
        fast,
        member("never", 0, 4, "never"),
        member("liar", 0, 4, "members"),
        member("lost", 0, 4, "members"),
        member("friend", 0, 4, "members"),
        rough,
    ]
    route = (Hop("a", Span(0, 2)), Hop("b", Span(2, 4)))
    async with open_fabric() as fabric:
        me = fabric.node("me")

        def found(private: int) -> list[Hop]:
            preferences = PrivacyPreferences(private_blocks=private, trusted=frozenset({"friend"}))
            replicas = job_replicas(me, lambda: members, lambda: preferences, book, 4)
            assert replicas.not_accused() == {"me", "friend"}
            return list(replicas.holders(route, frozenset({"lost"})))

        everybody = [Hop("fast", Span(0, 4)), Hop("a", Span(0, 2)), Hop("b", Span(2, 4)), Hop("c", Span(1, 4))]
        assert found(0) == [*everybody, Hop("friend", Span(0, 4))]
        assert found(1)[0] == Hop("fast", Span(1, 3))  # the first and the last block are for friends
        assert found(1)[-1] == Hop("friend", Span(0, 4))


async def test_a_member_that_trained_wrongly_is_no_hop() -> None:
    book = TrustBook(clock=lambda: 0.0)
    book.note("a", "lied", "trained wrongly")
    members = [member("a", 0, 4, "members"), member("b", 0, 4, "members")]
    async with open_fabric() as fabric:
        routes = job_routes(fabric.node("me"), lambda: members, PrivacyPreferences, 4, book=book)
        assert [hop.peer for hop in await routes(frozenset())] == ["b"]


async def test_a_job_with_rows_of_int8_goes_through_members_that_understand_them() -> None:
    async with open_fabric() as fabric:
        able = replace(member("able", 0, 4, "members"), wires=("int8",), decode_tokens_per_s=1.0)
        newer = replace(able, peer="newer", wires=("int8", "changes"), decode_tokens_per_s=0.5)
        members = [member("older", 0, 4, "members"), able, newer]
        me = fabric.node("me")
        for wire, expected in (("f32", "older"), ("int8", "able"), ("changes", "newer")):
            find = job_routes(me, lambda: members, PrivacyPreferences, 4, wire)
            assert [hop.peer for hop in await find(frozenset())] == [expected]
        with pytest.raises(NoRoute, match="will not train it"):
            await job_routes(me, lambda: members[:1], PrivacyPreferences, 4, "int8")(frozenset())


async def test_a_job_is_rounded_where_a_link_is_slow_and_all_hops_understand_it() -> None:
    async with open_fabric() as fabric:
        me = fabric.node("me")
        slow = replace(member("slow", 0, 2, "members"), wires=("int8",), rates=((tail("me"), 1e6),))
        other, older = replace(member("other", 2, 4, "members"), wires=("int8",)), member("older", 2, 4, "members")

        def asked_for(*hops: Announcement, epochs: int = 1) -> str | None:
            route = tuple(Hop(hop.peer, hop.span) for hop in hops if hop.span is not None)
            return slow_wire(me, lambda: [*hops, older], route, epochs)

        assert asked_for(slow, other) == "int8"
        assert asked_for(slow, older) is None
        assert asked_for(other) is None
        assert asked_for(slow, other, epochs=2) == "int8"  # they do not understand changes
        newer = [replace(one, wires=("int8", "changes")) for one in (slow, other)]
        assert (asked_for(*newer), asked_for(*newer, epochs=2)) == ("int8", "changes")
        faster = replace(newer[0], rates=((tail("me"), 10e6),))
        assert asked_for(faster, newer[1], epochs=2) == "int8"
