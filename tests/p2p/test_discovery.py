"""Finding each other between real processes, each time by one means alone, and saying who is told off and why."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import trio

from tests.p2p.nodes import Process, node_process

KEY = "ab" * 32
READY_S = 20.0


async def linked(node: Process, peer: str, within_s: float = READY_S) -> None:
    """Wait until `node` has a link to `peer`."""
    with trio.fail_after(within_s):
        while peer not in (await node.ask("links")).split():  # noqa: ASYNC110
            await trio.sleep(0.05)


async def found(node: Process, key: str, within_s: float = READY_S) -> list[str]:
    """Look for providers until there are some."""
    with trio.fail_after(within_s):
        while True:
            answer = await node.ask(f"find {key}")
            if answer != "nobody":
                return answer.split()
            await trio.sleep(0.05)


@pytest.mark.skipif(sys.platform == "win32", reason="multicast on loopback needs a firewall rule there")
async def test_by_mdns_alone() -> None:
    async with node_process("--discovery", "mdns") as member, node_process("--discovery", "mdns") as joiner:
        await linked(joiner, member.peer_id)
        assert await joiner.ask(f"echo {member.peer_id} hello") == "hello"


async def test_by_the_directory_through_one_node_that_is_no_member() -> None:
    async with node_process("--discovery", "dht") as bootstrap:
        arguments = ("--discovery", "dht", "--peer", bootstrap.addresses[0])
        async with node_process(*arguments) as member, node_process(*arguments) as joiner:
            await linked(member, bootstrap.peer_id)
            assert await member.ask(f"provide {KEY}") == "provided"
            assert await found(joiner, KEY) == [member.peer_id]
            assert await joiner.ask(f"echo {member.peer_id} hello") == "hello"


async def test_by_a_peer_remembered_from_before_a_restart(tmp_path: Path) -> None:
    home = ("--discovery", "remembered", "--home", str(tmp_path))
    async with node_process() as member:
        async with node_process(*home) as first:
            await first.ask(f"learn {member.peer_id} {member.addresses[0]}")
            assert await first.ask(f"echo {member.peer_id} hello") == "hello"
            await first.quit()
        async with node_process(*home) as second:
            assert second.peer_id == first.peer_id
            await linked(second, member.peer_id)


async def test_by_an_address_from_an_invite() -> None:
    async with (
        node_process("--discovery", "invite") as member,
        node_process("--discovery", "invite", "--peer", member.addresses[0]) as joiner,
    ):
        await linked(joiner, member.peer_id)


async def test_a_bootstrap_node_that_comes_later_is_found(tmp_path: Path) -> None:
    port = random.randrange(20_000, 32_000)  # systems give out higher ones: nobody else may get it meanwhile
    place = ("--home", str(tmp_path), "--listen", f"/ip4/127.0.0.1/tcp/{port}")
    async with node_process(*place) as once:
        address = once.addresses[0]
        await once.quit()
    async with node_process("--peer", address) as early:
        assert await early.ask("links") == "none"
        async with node_process(*place) as late:
            assert late.peer_id == once.peer_id
            await linked(early, late.peer_id, within_s=10)


async def test_no_means_no_company() -> None:
    async with node_process("--discovery", "mdns") as a, node_process("--discovery", "dht") as b:
        assert await b.ask(f"find {KEY}") == "nobody"
        assert await a.ask(f"find {KEY}") == "nobody"
        assert await b.ask(f"echo {a.peer_id} hello") == f"failed: no address of {a.peer_id} is known"


async def test_another_secret_is_refused_at_once_and_by_name() -> None:
    async with node_process("--secret", "the first of two secrets") as member:
        for arguments in (("--secret", "the second of two secrets"), ()):
            async with node_process(*arguments) as stranger:
                await stranger.ask(f"learn {member.peer_id} {member.addresses[0]}")
                with trio.fail_after(2):
                    answer = await stranger.ask(f"echo {member.peer_id} hello")
                assert answer.startswith("failed:")
                assert "secret" in answer
        async with node_process("--secret", "the first of two secrets") as friend:
            await friend.ask(f"learn {member.peer_id} {member.addresses[0]}")
            assert await friend.ask(f"echo {member.peer_id} hello") == "hello"
