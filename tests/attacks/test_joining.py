"""Peers that an invite names and that refuse whoever comes: they keep nobody from those that would admit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from app.joining.wrong_secret import SecretCheck
from app.swarm.invite import Invite, Pass, new_secret
from app.swarm.saved import SavedSwarm
from p2p.addresses import parse_address
from p2p.errors import WrongSecret
from p2p.memory.fabric import DIAL_TIMEOUT_S, LinkProfile, MemoryFabric, open_fabric
from tests.app.node.test_node import cache, found_swarm, living, until
from tests.bench.delay import delay_proxy
from tests.p2p.nodes import make_network

__all__ = ["cache"]


def refusal_by(peer: str) -> WrongSecret:
    error = WrongSecret(f"{peer} has another swarm secret")
    error.peer = peer
    return error


async def verdict(check: SecretCheck, fabric: MemoryFabric, *refusing: str) -> tuple[str | None, float]:
    """The peer for whose refusal joining fails, or None if it does not within a minute; and the seconds until then."""
    for peer in refusing:
        check.hear(refusal_by(peer))
    began = trio.current_time()
    with trio.move_on_after(60):
        error = await check.conclusive(fabric.nodes["newcomer"])
        return error.peer, trio.current_time() - began
    return None, trio.current_time() - began


@pytest.mark.parametrize("delay_s", [0.2, 1.0, 2.0])
async def test_a_peer_that_refuses_first_does_not_end_the_way_to_one_far_away(
    autojump_clock: MockClock, delay_s: float
) -> None:
    async with open_fabric() as fabric:
        for name in ("newcomer", "inviter", "hostile"):
            fabric.node(name)
        fabric.set_link("newcomer", "inviter", LinkProfile(delay_s=delay_s))
        assert await verdict(SecretCheck(["hostile", "inviter"]), fabric, "hostile") == (None, 60)
        assert [link.peer for link in fabric.nodes["newcomer"].links()] == ["inviter"]


async def test_the_secret_is_wrong_as_soon_as_the_last_named_peer_has_refused(autojump_clock: MockClock) -> None:
    async with open_fabric() as fabric:
        fabric.node("newcomer")
        assert await verdict(SecretCheck(["one"]), fabric, "one") == ("one", 0)
        assert await verdict(SecretCheck(["one", "two"]), fabric, "one", "two") == ("two", 0)


@pytest.mark.parametrize("outcome", ["it is gone", "it is silent"])
async def test_named_peers_that_cannot_be_reached_hold_up_the_verdict_for_one_dial_only(
    autojump_clock: MockClock, outcome: str
) -> None:
    async with open_fabric() as fabric:
        fabric.node("newcomer")
        if outcome == "it is silent":
            fabric.node("other")
            fabric.freeze("other")
        peer, seconds = await verdict(SecretCheck(["one", "other"]), fabric, "one")
        assert peer == "one"
        assert seconds <= DIAL_TIMEOUT_S


def guarded(**changes: object) -> SavedSwarm:
    entry = Pass(authority="creator", issuer="issuer", token=bytes(16))
    invite = Invite("den", "ab" * 32, (), new_secret(), entry)
    return replace(SavedSwarm.from_invite(invite, now_ms=1), **changes)  # type: ignore[arg-type]


async def test_with_an_invite_to_be_exchanged_only_the_issuers_refusal_counts(autojump_clock: MockClock) -> None:
    async with open_fabric() as fabric:
        for name in ("newcomer", "member"):
            fabric.node(name).serve("hello", _hello)
        named = ["member", "hostile", "issuer"]
        assert await verdict(SecretCheck(named, guarded()), fabric, "hostile", "member") == (None, 60)
        await fabric.nodes["newcomer"].call("member", "hello", b"", timeout_s=1)
        assert await verdict(SecretCheck(named, guarded()), fabric, "issuer") == ("issuer", 0)


async def test_a_link_to_any_member_of_a_private_swarm_shows_that_the_secret_is_right(
    autojump_clock: MockClock,
) -> None:
    async with open_fabric() as fabric:
        for name in ("newcomer", "found by itself"):
            fabric.node(name).serve("hello", _hello)
        await fabric.nodes["newcomer"].call("found by itself", "hello", b"", timeout_s=1)
        check = SecretCheck(["hostile"], guarded(entry=None, certificate=b"one"))
        assert await verdict(check, fabric, "hostile") == (None, 60)
        assert check.refusal(fabric.nodes["newcomer"]) is None, "the dashboard does not warn of it either"


async def _hello(peer: str, body: bytes) -> bytes:
    return body


@pytest.mark.soak
async def test_a_newcomer_joins_its_far_inviter_beside_a_peer_that_has_another_secret(
    tmp_path: Path, cache: Path
) -> None:
    """Real nodes on loopback: a round trip to the inviter takes 0.2 s, and the named peer refuses at once."""
    found_swarm(tmp_path / "a", cache, "den", private=True)
    async with living(tmp_path / "a", cache) as a, make_network(secret=new_secret()).running() as hostile:
        await until(a, lambda: a.snapshot().state == "client")
        here = parse_address(a.snapshot().listen_addrs[0])
        async with delay_proxy(here.port, 0.2) as proxy:
            invite = (await a.invite(None)).invite
            named = (str(replace(here, port=proxy.port)), hostile.addresses()[0])
            async with living(tmp_path / "b", cache) as b:
                assert (await b.join(str(replace(invite, addresses=named)))).state == "client"
