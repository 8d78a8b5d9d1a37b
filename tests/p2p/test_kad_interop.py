"""One directory of nodes of ours and of other libp2p implementations: each finds what the others published."""

from __future__ import annotations

import os

import pytest
import trio

from p2p.dht.streams import PROTOCOL
from p2p.dht.wire import provider_key, value_key
from tests.p2p.foreign_directory import ForeignDirectory, directory
from tests.p2p.mixed_directory import look_up_under_churn
from tests.p2p.nodes import make_network, until

KINDS = pytest.mark.parametrize("kind", ["py", "js"])


async def known_to(theirs: ForeignDirectory, peer: str) -> None:
    """Wait until the foreign node has `peer` in its routing table."""
    with trio.fail_after(20):
        while peer not in (await theirs.order("known"))["peers"]:  # noqa: ASYNC110
            await trio.sleep(0.05)


@KINDS
async def test_providers_and_values_are_found_in_both_directions(kind: str) -> None:
    first, second, third, fourth = (os.urandom(32) for _ in range(4))
    ours = make_network("dht")
    async with directory(kind, PROTOCOL) as theirs, ours.running():
        ours.seek(theirs.addresses[0])
        table = ours._directory.table  # type: ignore[union-attr]
        await until(lambda: theirs.peers[0] in table, 20)  # it answers requests, so it is a directory node
        await theirs.order("dial", address=ours.addresses()[0])
        await known_to(theirs, ours.peer_id)

        await ours.provide(first)
        assert (await theirs.order("find", key=provider_key(first).hex()))["peers"] == [ours.peer_id]
        await theirs.order("provide", key=provider_key(second).hex())
        with trio.fail_after(20):  # a provider's announcement is not answered: it may still be under way
            while await ours.find_providers(second, timeout_s=5) != theirs.peers:  # noqa: ASYNC110
                await trio.sleep(0.05)

        await ours.put_value(third, b"of ours")
        assert bytes.fromhex((await theirs.order("get", key=value_key(third).decode()))["value"]) == b"of ours"
        await theirs.order("put", key=value_key(fourth).decode(), value=b"of theirs".hex())
        assert await ours.get_value(fourth, timeout_s=5) == b"of theirs"


@KINDS
async def test_two_of_ours_meet_through_foreign_nodes_alone(kind: str) -> None:
    key, path = os.urandom(32), os.urandom(32)
    member, joiner = make_network("dht"), make_network("dht")
    async with directory(kind, PROTOCOL, 3) as theirs, member.running(), joiner.running():
        member.seek(theirs.addresses[1])
        joiner.seek(theirs.addresses[2])
        for ours in (member, joiner):
            await until(lambda ours=ours: len(ours._directory.table) >= 1, 20)  # type: ignore[misc]
        await member.provide(key)
        await member.put_value(path, b"a record")
        assert await joiner.find_providers(key, timeout_s=5) == [member.peer_id]
        assert await joiner.get_value(path, timeout_s=5) == b"a record"
        member.serve("echo", echo)
        assert await joiner.call(member.peer_id, "echo", b"met", timeout_s=5) == b"met"


@pytest.mark.soak
async def test_look_ups_succeed_among_foreign_nodes_and_churn() -> None:
    """The short form of `tests/soak/test_mixed_directory.py`; how long look-ups take is measured there alone."""
    outcome = await look_up_under_churn(8, {"py": 2}, lasting=4, look_ups=12)
    assert outcome.found == 12


async def echo(peer: str, body: bytes) -> bytes:
    return body
