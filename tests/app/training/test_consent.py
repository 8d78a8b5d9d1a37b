"""Whose jobs run where: a node's own settings, and routes that never ask who refuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from app.config.home import Home
from app.config.settings import Settings
from app.core.span import Span
from app.routing.planner import PrivacyPreferences
from app.routing.route import Hop, NoRoute, Route
from app.routing.trust import TrustBook
from app.swarm.records import Announcement, read_announcement, sign_announcement, tail
from app.training.consent import CONSENT_S, consenting, job_replicas, job_routes, slow_wire, terms_of
from app.training.hop import TrainingTerms
from app.training.swarm_jobs import SwarmJobs
from app.training.trainer import RouteFinder, TrainingStopped
from app.training.wire import ROOM
from engine.sources.base import ModelSource
from engine.sources.tiny import open_tiny
from p2p.identity import Identity
from p2p.memory.fabric import MemoryFabric, open_fabric
from tests.app.training.job_swarm import Losses, batches_of, open_job_swarm


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


# --- before a job begins ----------------------------------------------------------------------------------------------

REFUSES = TrainingTerms(refuses=lambda owner: "it trains only for peers that its user trusts")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return open_tiny(tmp_path_factory.mktemp("model"))


async def test_a_dry_run_fails_in_the_words_in_which_the_job_would(source: ModelSource, tmp_path: Path) -> None:
    """It promised a route that was refused as soon as the job began."""
    async with open_job_swarm(source, tmp_path) as swarm:
        await swarm.train("a", 0, 8, REFUSES)
        owner = swarm.owner()
        with pytest.raises(TrainingStopped) as begun:
            await owner.run(1, batches_of, Losses())
        with pytest.raises(TrainingStopped, match="a: it trains only for peers that its user trusts") as foreseen:
            await consenting(swarm.fabric.nodes["owner"], swarm.route)
        assert str(foreseen.value) == str(begun.value)


async def test_a_dry_run_names_the_members_that_consent(source: ModelSource, tmp_path: Path) -> None:
    async with open_job_swarm(source, tmp_path) as swarm:
        await swarm.train("a", 0, 8, REFUSES)
        await swarm.train("b", 0, 4)
        await swarm.train("c", 4, 8)
        me = swarm.fabric.node("me")
        assert [hop.peer for hop in await consenting(me, swarm.route)] == ["b", "c"]
        own = swarm.fabric.nodes["a"]
        assert [hop.peer for hop in await consenting(own, swarm.route)] == ["a"]  # a node does not ask itself


async def test_members_that_do_not_answer_or_say_nothing_of_it_hold_up_no_dry_run(autojump_clock: MockClock) -> None:
    """Older versions do not say it; whoever delays its answer to refuse at last costs some seconds, with all others."""
    begun = trio.current_time()
    async with open_fabric() as fabric:

        async def late(peer: str, body: bytes) -> bytes:
            await trio.sleep(CONSENT_S - 1)
            return b'{"bytes":0,"refuses":"no"}'

        async def silent(peer: str, body: bytes) -> bytes:
            await trio.sleep_forever()
            return b""

        answers: dict[str, Any] = {"late": late, "later": late, "silent": silent}
        for number, text in enumerate((b'{"bytes":5}', b"nonsense", b'{"bytes":0,"refuses":7}')):
            answers[f"old{number}"] = partial(_answer, text)
        members = []
        for name, answer in answers.items():
            fabric.node(name).serve(ROOM, answer)
            members.append(member(name, 0, 4, "members"))
        asked = list[frozenset[str]]()

        async def find(avoid: frozenset[str]) -> Route:
            asked.append(avoid)
            return tuple(Hop(one.peer, Span(0, 4)) for one in members if one.peer not in avoid)[:1]

        assert [hop.peer for hop in await consenting(fabric.node("me"), find)] == ["later"]
        assert asked == [frozenset(), frozenset({"late"})]
        assert trio.current_time() - begun <= CONSENT_S + 0.1
        del members[:2]
        for name in ("silent", "old0", "old1", "old2"):
            assert [hop.peer for hop in await consenting(fabric.nodes["me"], find)] == [name]
            del members[0]


async def _answer(text: bytes, peer: str, body: bytes) -> bytes:
    return text


async def test_the_forecast_of_a_job_is_of_a_route_that_consents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_fabric() as fabric:
        me = fabric.node("me")
        fabric.node("a").serve(ROOM, partial(_answer, b'{"bytes":0,"refuses":"it trains for nobody"}'))

        async def find(avoid: frozenset[str]) -> Route:
            if "a" in avoid:
                raise NoRoute(0)
            return (Hop("a", Span(0, 4)),)

        place: Any = SimpleNamespace(network=me, routes=lambda blocks, wire: find)
        jobs = SwarmJobs(Home(tmp_path), place)
        config: Any = SimpleNamespace(source=SimpleNamespace(config=SimpleNamespace(n_blocks=4)))

        async def material(wish: Any) -> Any:
            return config

        monkeypatch.setattr(jobs, "_material", material)
        monkeypatch.setattr("app.training.material.new_record", lambda wish, material: None)
        wish: Any = SimpleNamespace(source=SimpleNamespace(wire="f32"))
        with pytest.raises(TrainingStopped, match="; a: it trains for nobody"):
            await jobs.forecast(wish)
