"""A few machines with thousands of peer ids, each of which calls once, says that it serves everything, and is gone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from app.core.pieces import Pieces, at_once
from app.core.reasons import because
from app.core.span import Span
from app.hosting.block_host import BlockHost, HostingOptions
from app.membership import wire
from app.membership.exchange import HOME_TABLES_AT_ONCE
from app.membership.table import Table, TableLimits
from app.routing.bans import FAILING
from app.routing.planner import RoutePlanner, SessionRoutes
from app.routing.route import Hop, Route, RouteRequest
from app.routing.search import search_in_order
from app.routing.strangers import LONGEST_ASIDE_S, WARIEST_S, WARY_S, Strangers
from app.serving.homes import Homes
from app.session.wire import PROTOCOL
from app.swarm.records import Announcement, sign_announcement
from engine.hosting import Hosted, HostingPlan
from p2p.errors import P2PError, Refused
from p2p.identity import Identity
from p2p.memory.fabric import MemoryStream
from tests.app.hash_model import HashRunner, greedy
from tests.app.session_swarm import PROMPT, SessionSwarm, ask, open_swarm
from tests.app.swarms import N_BLOCKS, Sim, SimNode, identity, open_sim, wall_clock
from tests.sim.twin import SimLoader
from tests.sim.world import NodeSpec

ONE_MACHINE = "192.0.2.7"
LIMITS = TableLimits()


def serving(who: Identity, swarm: str, now_ms: int) -> Announcement:
    return Announcement(who.peer_id, now_ms, now_ms + 3_000_000, swarm, "serving", Span(0, N_BLOCKS), 1e6, 1e7, 1 << 20)


async def call_once(sim: Sim, victim: SimNode, numbers: range, machine: str = ONE_MACHINE) -> None:
    """Let identities of one machine announce themselves to the victim, and vanish."""
    for number in numbers:
        who = identity(number)
        sim.fabric.machine_of[who.peer_id] = machine
        network = sim.fabric.node(who.peer_id)
        said = sign_announcement(who, serving(who, sim.record.id, int(wall_clock() * 1000)))
        body = wire.Tell(bytes.fromhex(sim.record.id), [said]).encode()
        try:
            await network.call(victim.peer, wire.TELL, body, timeout_s=5)
        except P2PError:
            pass
        await network.disconnect(victim.peer)
        sim.fabric.freeze(who.peer_id)


async def test_one_machine_cannot_fill_the_table_of_members(autojump_clock: MockClock) -> None:
    """Four times as many identities call from one address as it has places: a newcomer from elsewhere has one."""
    async with open_sim() as sim:
        nodes = await sim.grow(4)
        victim = nodes[0]
        await call_once(sim, victim, range(10_000, 10_000 + 4 * LIMITS.of_home))
        assert len(victim.swarm.table.present()) <= LIMITS.of_home + 3
        newcomer = sim.add(50, [victim.peer])
        await sim.until(lambda: newcomer.peer in victim.swarm.table.present(), 5)
        await sim.until(lambda: {node.peer for node in nodes} <= set(newcomer.swarm.table.present()), 60)


async def test_identities_of_one_machine_get_few_tables_of_members(autojump_clock: MockClock) -> None:
    """A table takes milliseconds, and an address can bring 20 new identities a second with 16 requests each."""
    async with open_sim() as sim:
        (victim,) = await sim.grow(1)
        request = wire.TableRequest(bytes.fromhex(sim.record.id), {}, []).encode()

        async def is_answered(number: int, machine: str) -> bool:
            who = identity(number)
            sim.fabric.machine_of[who.peer_id] = machine
            network = sim.fabric.node(who.peer_id)
            try:
                await network.call(victim.peer, wire.TABLE, request, timeout_s=5)
            except Refused:
                return False
            return True

        answered = [await is_answered(1000 + number, ONE_MACHINE) for number in range(3 * HOME_TABLES_AT_ONCE)]
        assert sum(answered) < 1.5 * HOME_TABLES_AT_ONCE
        assert await is_answered(5000, "another machine")


async def test_members_that_called_once_and_vanished_are_soon_found_out(autojump_clock: MockClock) -> None:
    """Six machines call with a hundred identities each, which answer no probe: two minutes later none counts."""
    async with open_sim() as sim:
        nodes = await sim.grow(3)
        victim, honest = nodes[0], {node.peer for node in nodes[1:]}
        for machine in range(6):
            first = 10_000 + 100 * machine
            await call_once(sim, victim, range(first, first + 100), f"192.0.2.{machine}")
        assert len(victim.swarm.table.present()) > 400, "they were met"
        await sim.until(lambda: set(victim.swarm.table.present()) == honest, 120)


def test_places_of_an_address_are_free_again_once_members_are_gone() -> None:
    """A member is turned away if its address has no place, and taken once another one from there is gone."""
    table = Table("own", TableLimits(of_home=2))
    crowd = [identity(number) for number in range(4)]
    for who in crowd:
        table.update(serving(who, "", 1), sender=who.peer_id, now=0.0)
    first, second, third, elsewhere = (who.peer_id for who in crowd)
    assert [change.kind for peer in (first, second) if (change := table.seen(peer, 1.0, home="a"))] == ["proven"] * 2
    refused = table.seen(third, 1.0, home="a")
    assert refused is not None
    assert (refused.kind, third in table) == ("dead", False)
    assert table.update(serving(crowd[2], "", 2), sender=second, now=300.0) is None, "others do not bring it back"
    met = table.seen(elsewhere, 1.0, home="b")
    assert met is not None
    assert met.kind == "proven"
    table.failed(first, 2.0)
    table.failed(first, 3.0)
    table.update(serving(crowd[2], "", 2), sender=third, now=4.0)
    taken = table.seen(third, 4.0, home="a")
    assert taken is not None
    assert taken.kind == "proven"
    back = table.seen(first, 5.0, home="a")
    assert back is not None, "it is back, but its place is taken"
    assert (back.kind, first in table) == ("dead", False)
    assert table.present() == tuple(sorted((second, third, elsewhere)))


def test_members_that_called_through_many_relays_count_where_they_answer() -> None:
    """A machine could bring 128 members through each relay of the swarm otherwise, and answer for all of them."""
    table = Table("own", TableLimits(of_home=2))
    crowd = [identity(number) for number in range(6)]
    for number, who in enumerate(crowd):
        table.update(serving(who, "", 1), sender=who.peer_id, now=0.0)
        table.seen(who.peer_id, 1.0, home=f"relay {number % 3}")
    assert len(table.present()) == 6
    answers = [table.seen(who.peer_id, 2.0, home=ONE_MACHINE) for who in crowd]
    assert [change.kind for change in answers if change is not None] == ["dead"] * 4
    assert table.present() == tuple(sorted(who.peer_id for who in crowd[:2]))
    newcomer = identity(7)
    table.update(serving(newcomer, "", 1), sender=newcomer.peer_id, now=3.0)
    met = table.seen(newcomer.peer_id, 3.0, home="relay 0")
    assert met is not None, "those that only called through the relay take no place there"
    assert met.kind == "proven"
    assert table.seen(newcomer.peer_id, 4.0) is None, "a contact without a link changes nothing"
    assert newcomer.peer_id in table.present()


# --- members that answer probes, say that they serve, and do not -----------------------------------------------------

HALF = N_BLOCKS // 2


def says_it_serves(node: SimNode, span: Span) -> None:
    node.swarm.announce(
        state="serving", span=span, decode_tokens_per_s=50.0, prefill_tokens_per_s=500.0, kv_free_tokens=1 << 20
    )


async def test_a_node_fills_the_hole_that_members_hide_at_which_its_replies_fail(autojump_clock: MockClock) -> None:
    """Four members say that they serve the second half and never do: a node whose replies fail at them takes it."""
    async with open_sim() as sim, trio.open_nursery() as nursery:
        me, *others = await sim.grow(8)
        honest, liars = others[:3], others[3:]
        for node in honest:
            says_it_serves(node, Span(0, HALF))
        for node in liars:
            says_it_serves(node, Span(HALF, N_BLOCKS))
        planner = RoutePlanner(me.network, me.swarm.announcements)
        routes = SessionRoutes(planner, RouteRequest(Span(0, N_BLOCKS), 1))
        spec = NodeSpec(me.number, HALF, 50.0, load_s=1.0, place=(0.0, 0.0))
        host = BlockHost(
            me.network, me.swarm, SimLoader(spec), HostingOptions(), lambda state, why: None,
            failing=lambda: planner.bans.failing(trio.current_time()),
        )  # fmt: skip
        nursery.start_soon(host.run)
        await sim.until(lambda: me.swarm.own.serves, 60)
        await trio.sleep(300)
        assert me.swarm.own.span == Span(0, HALF), "the second half seems to be served by more"
        for _ in range(FAILING):
            for liar in liars:
                routes.failed(liar.peer, because("unreachable", "it does not answer"), busy=False)
            await trio.sleep(10)
        await sim.until(lambda: me.swarm.own.serves and me.swarm.own.span == Span(HALF, N_BLOCKS), 90)
        routes.worked(liars[0].peer)
        assert liars[0].peer not in planner.bans.failing(trio.current_time())
        nursery.cancel_scope.cancel()


class EmptyDisk(SimLoader):
    """Blocks come from other members."""

    async def held(self) -> tuple[Span, ...]:
        return ()


async def test_a_node_fills_a_hole_although_members_say_for_long_that_they_are_about_to(
    autojump_clock: MockClock,
) -> None:
    """Four members say that they fetch the second half, and never serve it: a node that can be spared takes it."""
    async with open_sim() as sim, trio.open_nursery() as nursery:
        me, *others = await sim.grow(8)
        for node in others[:3]:
            says_it_serves(node, Span(0, HALF))
        for node in others[3:]:
            node.swarm.announce(state="fetching", span=Span(HALF, N_BLOCKS), decode_tokens_per_s=50.0)
        others[0].swarm.announce(held=(Span(0, N_BLOCKS),))
        await trio.sleep(5)
        spec = NodeSpec(me.number, HALF, 50.0, load_s=1.0, place=(0.0, 0.0))
        host = BlockHost(me.network, me.swarm, EmptyDisk(spec), HostingOptions(), lambda state, why: None)
        nursery.start_soon(host.run)
        await sim.until(lambda: me.swarm.own.serves, 60)
        assert me.swarm.own.span == Span(0, HALF), "more seem to be about to serve the second half"
        await sim.until(lambda: me.swarm.own.serves and me.swarm.own.span == Span(HALF, N_BLOCKS), 900)
        nursery.cancel_scope.cancel()


class SlowDownload(SimLoader):
    """Blocks of the first half take hours to come."""

    async def load(self, plan: HostingPlan, span: Span, on_grown: object) -> Hosted:
        if span.start < HALF:
            await trio.sleep(6 * 3600)
        return await super().load(plan, span, on_grown)


async def test_of_nodes_that_download_for_hours_one_fills_the_hole_that_opens_meanwhile(
    autojump_clock: MockClock,
) -> None:
    """All that serve the second half die while three nodes fetch the first one, which others serve."""
    async with open_sim() as sim, trio.open_nursery() as nursery:
        nodes = await sim.grow(12)
        mine, first, second = nodes[:3], nodes[3:5], nodes[5:]
        for node in first:
            says_it_serves(node, Span(0, HALF))
        for node in second:
            says_it_serves(node, Span(HALF, N_BLOCKS))
        await trio.sleep(5)
        for me in mine:
            spec = NodeSpec(me.number, HALF, 50.0, load_s=1.0, place=(0.0, 0.0))
            host = BlockHost(me.network, me.swarm, SlowDownload(spec), HostingOptions(), lambda state, why: None)
            nursery.start_soon(host.run)
        await sim.until(lambda: all(me.swarm.own.span == Span(0, HALF) for me in mine), 60)
        for node in second:
            sim.kill(node)
        await sim.until(lambda: any(me.swarm.own.serves for me in mine), 120)
        await trio.sleep(60)
        filled = [me.swarm.own.serves and me.swarm.own.span == Span(HALF, N_BLOCKS) for me in mine]
        assert sorted(filled) == [False, False, True]
        nursery.cancel_scope.cancel()


# --- replies ---------------------------------------------------------------------------------------------------------


def claim(swarm: SessionSwarm, count: int) -> None:
    """Add members that claim to serve all blocks a thousand times as fast, and swallow whatever is sent to them."""
    for number in range(count):
        name = f"ghost {number}"
        swarm.fabric.node(name)
        swarm.fabric.freeze(name)
        swarm.announcements[name] = Announcement(name, 1, 0, "", "serving", Span(0, 8), 1e5, 1e6, 1 << 40)


async def test_a_crowd_that_claims_to_be_fast_costs_an_asker_little_time(autojump_clock: MockClock) -> None:
    """Hundreds of members claim all blocks and never answer: replies go on over those that worked before."""
    async with open_swarm((0, 4), (4, 8), delay_s=0.05) as swarm:
        asker = await swarm.asker()
        assert (await ask(asker, PROMPT, 4)).token_ids == greedy(PROMPT, 4)
        claim(swarm, 300)
        begin = trio.current_time()
        for _ in range(20):
            assert (await ask(asker, PROMPT, 4)).token_ids == greedy(PROMPT, 4)
        assert trio.current_time() - begin < 60, "each reply waited for several of them"


async def test_a_newcomer_is_used_again_after_others_failed(autojump_clock: MockClock) -> None:
    """A member that never answers makes an asker wary for a while: then a fast newcomer is tried, and used."""
    async with open_swarm((0, 4), (4, 8), delay_s=0.05) as swarm:
        asker = await swarm.asker()
        await ask(asker, PROMPT, 4)
        claim(swarm, 1)
        await ask(asker, PROMPT, 4)
        del swarm.announcements["ghost 0"]
        await swarm.serve("newcomer", HashRunner(0, 8), speed=10_000.0)
        await trio.sleep(30)
        stats = await ask(asker, PROMPT, 4)
        assert [hop.peer for hop in stats.route] == ["newcomer"]


async def silent(stream: MemoryStream) -> None:
    """Take what is sent, and answer nothing."""
    while True:
        await stream.receive()


async def join_in_vain(swarm: SessionSwarm, count: int, machine: str = "") -> None:
    """Add members that claim to be the fastest and never answer a session; the asker is linked to all members."""
    for number in range(count):
        name = f"silent {number}"
        swarm.fabric.node(name).accept(PROTOCOL, silent)
        swarm.announcements[name] = Announcement(name, 1, 0, "", "serving", Span(0, 8), 100.0, 1000.0, 1 << 40)
        if machine:
            swarm.fabric.machine_of[name] = machine
    for name in swarm.announcements:
        await swarm.fabric.dial(swarm.fabric.nodes["asker"], name)


@pytest.mark.parametrize(("count", "machine"), [(2, ""), (2, ONE_MACHINE), (40, ONE_MACHINE)])
async def test_members_that_claim_to_be_fast_and_do_nothing_keep_no_newcomer_out(
    autojump_clock: MockClock, count: int, machine: str
) -> None:
    """They came first again and again before: all strangers were left aside for longer than those that failed."""
    async with open_swarm() as swarm:
        await swarm.serve("old", HashRunner(0, 8), speed=10.0)
        swarm.devices["old"].seconds = 0.1
        asker = await swarm.asker()
        await ask(asker, PROMPT, 2)
        await swarm.serve("newcomer", HashRunner(0, 8), speed=60.0)
        await join_in_vain(swarm, count, machine)
        used: list[str] = []
        for number in range(30):
            stats = await ask(asker, [number, *PROMPT], 2)
            used += [hop.peer for hop in stats.route]
            await trio.sleep(60)
        assert used.count("newcomer") >= 25, used


async def join_slowly(swarm: SessionSwarm, count: int) -> None:
    """Add members of one machine that claim ten times the speed of the others, and take far longer than these."""
    for number in range(count):
        name = f"liar {number}"
        await swarm.serve(name, HashRunner(0, 8), speed=100.0)
        swarm.devices[name].seconds = 1.5
        swarm.fabric.machine_of[name] = ONE_MACHINE
    for name in swarm.announcements:
        await swarm.fabric.dial(swarm.fabric.nodes["asker"], name)


@pytest.mark.parametrize("knows_others", [True, False])
async def test_a_crowd_that_answers_and_takes_its_time_costs_an_asker_few_replies(
    autojump_clock: MockClock, knows_others: bool
) -> None:
    """Each of them had replies to itself before: whoever answers once is no stranger."""
    async with open_swarm() as swarm:
        for name in ("n0", "n1", "n2"):
            await swarm.serve(name, HashRunner(0, 8), speed=10.0)
            swarm.devices[name].seconds = 0.05
        asker = await swarm.asker()
        if knows_others:
            await ask(asker, PROMPT, 2)
        await join_slowly(swarm, 12)
        begin = trio.current_time()
        for number in range(10):
            assert len((await ask(asker, [number, *PROMPT], 30)).token_ids) == 30
        assert trio.current_time() - begin < 180, "over honest members alone it takes 20 s"


def strangers_of(homes: dict[str, str], seed: int = 1, worked: Sequence[str] = ("somebody",)) -> Strangers:
    """Strangers of an asker that somebody has worked for, with the home of each."""
    network: Any = SimpleNamespace(peer_id="me", source=lambda peer: homes.get(peer, ""), links=lambda: ())
    strangers = Strangers(Homes(network), random.Random(seed))
    for peer in worked:
        strangers.worked(peer)
    return strangers


def test_strangers_are_drawn_by_home_and_those_of_a_home_that_failed_come_last() -> None:
    homes = {f"one {number}": ONE_MACHINE for number in range(20)} | {"a": "192.0.2.1", "b": "192.0.2.2"}
    first = Counter(homes[strangers_of(homes, seed).in_order(sorted(homes))[0]] for seed in range(300))
    assert min(first[home] for home in set(homes.values())) > 60, "each home has one voice"
    strangers = strangers_of(homes)
    strangers.failed("one 3", 0.0)
    order = strangers.in_order(sorted(homes))
    assert set(order[:2]) == {"a", "b"}
    assert order[-1] == "one 3"
    for peer in ("a", "b"):
        strangers.failed(peer, 0.0)
    first = Counter(homes[strangers.in_order(sorted(homes))[0]] for _ in range(300))
    assert min(first[home] for home in set(homes.values())) > 60, "a home that failed has its turn among its like"


def test_a_stranger_that_failed_is_left_aside_for_longer_than_the_others_and_longer_each_time() -> None:
    strangers, now, pauses = strangers_of({}), 0.0, []
    for _ in range(12):
        begun = now
        strangers.failed("liar", now)
        while strangers.not_now({"other"}, now):
            now += 1
        assert strangers.not_now({"liar"}, now) == {"liar"} or now - begun == WARIEST_S
        while strangers.not_now({"liar"}, now):
            now += 1
        pauses.append(now - begun)
    assert pauses[0] > WARY_S
    assert all(later > earlier or later == LONGEST_ASIDE_S for earlier, later in pairwise(pauses))


def test_who_is_far_slower_than_it_claims_was_tried_in_vain_unless_it_may_have_been_another() -> None:
    strangers = strangers_of({"a": "one home", "b": "one home", "c": "another"})
    for peer in ("a", "b", "c"):
        strangers.worked(peer)
    strangers.were_far_slower(["b", "c"], 0.0)
    assert not strangers.by_lot
    strangers.were_far_slower(["a", "b"], 0.0)
    assert strangers.by_lot
    assert strangers.not_now({"d"}, 0.0) == {"d"}
    alone = strangers_of({}, worked=())
    alone.worked("a")
    alone.were_far_slower(["a"], 0.0)
    assert alone.not_now({"d"}, 0.0) == set(), "nobody else has worked"


def test_strangers_are_found_in_order_with_few_searches() -> None:
    """Of hundreds, some of which would be on a route, the first of these is found; no search is needed for each."""
    order = [f"p{number}" for number in range(500)]
    wanted, searches = {"p123", "p400", "p499"}, 0

    def search(peers: Sequence[str]) -> Pieces[Route]:
        nonlocal searches
        searches += 1
        yield
        best = max((peer for peer in peers if peer in wanted), default="known")
        return (Hop(best, Span(0, N_BLOCKS)),)

    assert [hop.peer for hop in at_once(search_in_order(search, order))] == ["p123"]
    assert searches <= 11
    assert [hop.peer for hop in at_once(search_in_order(search, order[:100]))] == ["known"]
