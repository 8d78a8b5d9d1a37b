"""Link times between peers: measurements are certain, claims count as far as measurements allow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.span import Span
from app.routing.cost import ASSUMED_BYTES_PER_S, MOST_BELIEVED_BYTES_PER_S, UNKNOWN_LINK_S
from app.routing.estimates import link_rates, link_seconds, rates_to_announce, rtts_to_announce
from app.routing.route import KnownCosts, RouteRequest
from app.routing.search import find_route
from app.swarm.records import MAX_RATES, MAX_RTTS, Announcement, tail
from p2p.values import LinkInfo

ME = "12D3KooWasker"


def member(peer: str, start: int = 0, stop: int = 4, rtts: Mapping[str, float] | None = None) -> Announcement:
    said = tuple((tail(other), rtt_s) for other, rtt_s in (rtts or {}).items())
    return Announcement(peer, 1, 0, "", "serving", Span(start, stop), 10.0, 100.0, 1000, rtts=said)


def test_own_measurements_are_certain_and_the_rest_is_guessed() -> None:
    link_s = link_seconds(ME, {"a": 0.02, "b": 0.1}, [member("a", rtts={ME: 9.0})])
    assert link_s("", "a") == link_s("a", ME) == 0.01
    assert link_s("", ME) == link_s("a", "a") == 0.0
    assert link_s("", "far") == link_s("far", "") == UNKNOWN_LINK_S
    assert link_s("a", "b") == 0.05
    assert link_s("a", "far") == UNKNOWN_LINK_S


@pytest.mark.parametrize(
    ("said_by_a", "said_by_b", "expected_s"),
    [
        (None, None, 0.05),
        (0.09, 0.09, 0.045),
        (0.09, 0.12, 0.06),  # the longer of the two claims counts
        (0.2, None, 0.1),  # a claim of a long link is believed
        (0.0, 0.0, 0.04),  # not nearer to each other than their distances from here differ
        (0.0, None, 0.04),
        (0.0, 3.0, 1.5),
    ],
)
def test_claims_count_as_far_as_measurements_allow(
    said_by_a: float | None, said_by_b: float | None, expected_s: float
) -> None:
    a = member("a", rtts={} if said_by_a is None else {"b": said_by_a})
    b = member("b", rtts={} if said_by_b is None else {"a": said_by_b})
    link_s = link_seconds(ME, {"a": 0.02, "b": 0.1}, [a, b])
    assert link_s("a", "b") == link_s("b", "a") == pytest.approx(expected_s)


def test_one_end_alone_makes_an_unmeasured_link_half_as_long_at_most() -> None:
    assert link_seconds(ME, {}, [member("a", rtts={"b": 0.0})])("a", "b") == UNKNOWN_LINK_S / 2
    assert link_seconds(ME, {}, [member("a", rtts={"b": 0.0}), member("b", rtts={"a": 0.004})])(
        "a", "b"
    ) == pytest.approx(0.002)


PEERS = ["p0", "p1", "p2", "p3"]
rtts = st.floats(0, 2)


@given(
    st.dictionaries(st.sampled_from(PEERS), rtts, min_size=4),
    st.dictionaries(st.tuples(st.sampled_from(PEERS), st.sampled_from(PEERS)), rtts),
    st.permutations(PEERS),
)
def test_no_claims_bring_a_hop_nearer_than_it_was_measured_to_be(
    measured: dict[str, float], claims: dict[tuple[str, str], float], way: list[str]
) -> None:
    members = [member(peer, rtts={b: rtt_s for (a, b), rtt_s in claims.items() if a == peer}) for peer in PEERS]
    link_s = link_seconds(ME, measured, members)
    whole_s = sum(link_s(a, b) for a, b in pairwise(["", *way, ""]))
    assert whole_s >= max(measured.values()) - 1e-9


def test_routing_takes_hops_that_are_near_each_other() -> None:
    # All are equally far from the asker; x and y stand in one room, and x and z do not.
    members = [
        member("x", 0, 2, {"y": 0.002, "z": 0.1}),
        member("y", 2, 4, {"x": 0.002, "z": 0.1}),
        member("z", 2, 4, {"x": 0.1, "y": 0.1}),
    ]
    distances = {"x": 0.06, "y": 0.06, "z": 0.059}
    demand = RouteRequest(Span(0, 4), 100)
    chosen = find_route(members, demand, link_seconds(ME, distances, members))
    assert [hop.peer for hop in chosen] == ["x", "y"]
    silent = [member("x", stop=2), member("y", start=2), member("z", start=2)]
    assert [hop.peer for hop in find_route(silent, demand, link_seconds(ME, distances, silent))] == ["x", "z"]


def test_a_liar_that_claims_to_be_next_to_everybody_does_not_beat_who_is_near() -> None:
    liar = member("liar", 2, 4, {"near": 0.0})
    members = [member("near", 0, 2, {"honest": 0.01}), member("honest", 2, 4, {"near": 0.01}), liar]
    route = find_route(
        members, RouteRequest(Span(0, 4), 100), link_seconds(ME, {"near": 0.01, "honest": 0.01, "liar": 0.2}, members)
    )
    assert [hop.peer for hop in route] == ["near", "honest"]


def test_an_announcement_tells_of_those_whose_blocks_lie_beside_first() -> None:
    members = [member(f"other{number:02}", start=8, stop=9) for number in range(20)]
    members += [member("before", start=0, stop=4), member("behind", start=6, stop=9), member("unlinked", start=0)]
    links = [LinkInfo(m.peer, "direct", 0.01, 0, 0) for m in members if m.peer != "unlinked"]
    links += [LinkInfo("stranger", "direct", 0.01, 0, 0), LinkInfo("unlinked", "direct", None, 0, 0)]
    told = rtts_to_announce(links, Span(4, 6), members)
    assert len(told) == MAX_RTTS
    assert {tail("before"), tail("behind")} <= {who for who, _ in told}
    assert tail("stranger") not in {who for who, _ in told}
    assert rtts_to_announce([], Span(4, 6), members) == ()


def receiver(peer: str, rates: Mapping[str, float], start: int = 0, stop: int = 4) -> Announcement:
    return replace(member(peer, start, stop), rates=tuple((tail(other), rate) for other, rate in rates.items()))


def down(peer: str, bytes_per_s: float) -> LinkInfo:
    return LinkInfo(peer, "direct", 0.01, 0, 0, bytes_per_s)


def test_the_receiver_of_bytes_tells_a_links_speed() -> None:
    rates = link_rates(ME, [down("a", 1e6)], [receiver("a", {ME: 2e6, "b": 3e6}), receiver("b", {"a": 4e6})])
    assert rates("a", "") == rates("a", ME) == 1e6
    assert rates("", "a") == 2e6
    assert (rates("b", "a"), rates("a", "b")) == (3e6, 4e6)
    assert rates("a", "a") is None


def test_without_a_measurement_the_slower_end_counts() -> None:
    rates = link_rates(ME, [down("a", 1e6)], [receiver("b", {"x": 5e6}), receiver("x", {"b": 7e6})])
    assert rates("a", "b") == 1e6  # what `a` sends here is all that is known of it
    assert rates("b", "") == 1e6
    assert rates("x", "unknown") == ASSUMED_BYTES_PER_S  # what one receiver says bounds no other link of the sender
    assert rates("x", "b") == 5e6
    assert rates("unknown", "other") is None
    assert rates.byte_s(["b"])["b"] == pytest.approx(1 / ASSUMED_BYTES_PER_S + 1 / 5e6)


def test_a_claim_slows_down_nobody_but_the_claimant_and_counts_up_to_a_limit() -> None:
    honest = [receiver("a", {"b": 5e6}), receiver("b", {"a": 5e6})]
    liars = [receiver("liar", {"a": 1e4, "b": 1e4, ME: 1e4, "liar": 1e12}), receiver("boaster", {"a": 1e12})]
    before, after = link_rates(ME, [], honest), link_rates(ME, [], [*honest, *liars])
    for pair in (("a", "b"), ("b", "a")):
        assert before(*pair) == after(*pair) == 5e6
    for peer in ("a", "b"):
        assert after.byte_s([peer])[peer] <= before.byte_s([peer])[peer]
    assert after("a", "boaster") == MOST_BELIEVED_BYTES_PER_S
    alone = link_rates(ME, [], liars)
    assert alone.byte_s(["b"])["b"] == 2 / ASSUMED_BYTES_PER_S
    seen = link_rates(ME, [down("a", 1e6)], liars)
    assert seen("a", "") == 1e6  # what was measured here counts, whatever others say
    assert seen.up("a") == 1e6


def test_a_link_on_the_lan_never_counts_as_slow() -> None:
    near = LinkInfo("near", "lan", 0.001, 0, 0, 1e6)
    assert link_rates(ME, [near], [])("near", "") == ASSUMED_BYTES_PER_S
    assert rates_to_announce([near], None, [member("near")]) == ((tail("near"), ASSUMED_BYTES_PER_S),)


def test_a_prompts_bytes_avoid_a_slow_link_and_single_tokens_do_not() -> None:
    members = [member("slow"), replace(member("fast"), decode_tokens_per_s=9.5)]
    rates = link_rates(ME, [down("slow", 1e5), down("fast", 1e8)], members)
    known = KnownCosts(byte_s=rates.byte_s(["slow", "fast"]))
    links = link_seconds(ME, {"slow": 0.01, "fast": 0.01}, members)
    chat = RouteRequest(Span(0, 4), 101, 1, row_bytes=128)
    assert [hop.peer for hop in find_route(members, chat, links, known=known)] == ["slow"]
    long_prompt = replace(chat, tokens=900, prompt_tokens=800, row_bytes=2304)
    assert [hop.peer for hop in find_route(members, long_prompt, links, known=known)] == ["fast"]


def test_an_announcement_tells_the_speed_of_measured_links() -> None:
    members = [member(f"other{number:02}", start=8, stop=9) for number in range(20)] + [member("before")]
    links = [down(m.peer, 1e6) for m in members] + [LinkInfo("unmeasured", "direct", 0.01, 0, 0)]
    told = rates_to_announce(links, Span(4, 6), members)
    assert len(told) == MAX_RATES
    assert (tail("before"), 1e6) in told
    assert rates_to_announce([], Span(4, 6), members) == ()
