"""Our channel against peers that are not ours, each in a process of its own, both dialling and dialled."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.peerinfo import info_from_p2p_addr
from multiaddr import Multiaddr

from p2p.channel.noise import AESGCM_ID, NOISE_ID, security_options
from p2p.channel.yamux import YamuxConnection
from tests.p2p.channels import install_yamux
from tests.p2p.foreign_directory import INSTALL_S, js_folder
from tests.p2p.stock_peer import ECHO, answer, echo

KIB, MIB = 1 << 10, 1 << 20
SIZES = [1, 12, 65_519, 256 * KIB, MIB + 1]
MANY = [1000 + number for number in range(24)]


class Peer:
    """A foreign peer: its address, and a way to make it dial."""

    def __init__(self, command: list[str], cwd: Path | None = None) -> None:
        self._process = subprocess.Popen(command, cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.address: str = self._hear()["address"]

    def _hear(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def dial(self, address: str, sizes: list[int]) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"dial": address, "sizes": sizes}) + "\n")
        self._process.stdin.flush()
        return self._hear()

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def stock_peer() -> Iterator[Peer]:
    peer = Peer([sys.executable, "-m", "tests.p2p.stock_peer"])
    yield peer
    peer.stop()


@pytest.fixture(scope="module")
def js_peer() -> Iterator[Peer]:
    folder = js_folder()
    peer = Peer(["node", "peer.mjs"], cwd=folder)
    yield peer
    peer.stop()


@contextlib.asynccontextmanager
async def _own_host() -> AsyncIterator[Any]:
    install_yamux()
    keys = create_new_key_pair()
    host = new_host(key_pair=keys, sec_opt=security_options(keys, secret=None))
    async with host.run([Multiaddr("/ip4/127.0.0.1/tcp/0")]):
        host.set_stream_handler(ECHO, answer)
        yield host


async def _dial(host: Any, address: str, sizes: list[int]) -> Any:
    info = info_from_p2p_addr(Multiaddr(address))
    await host.connect(info)
    async with trio.open_nursery() as nursery:
        for size in sizes:
            nursery.start_soon(echo, host, info.peer_id, size)
    [connection] = host.get_network().connections[info.peer_id]
    return connection.muxed_conn


async def _is_dialled(host: Any, peer: Peer, sizes: list[int]) -> None:
    outcome = await trio.to_thread.run_sync(peer.dial, str(host.get_addrs()[0]), sizes)
    assert outcome == {"ok": True}


@pytest.mark.parametrize("sizes", [SIZES, MANY, [64 * MIB]], ids=["sizes", "many streams", "64 MiB"])
async def test_stock_libp2p(stock_peer: Peer, sizes: list[int]) -> None:
    async with _own_host() as host:
        muxed = await _dial(host, stock_peer.address, sizes)
        assert isinstance(muxed, YamuxConnection)
        assert muxed.negotiated_security_protocol == NOISE_ID  # type: ignore[attr-defined]
        await _is_dialled(host, stock_peer, sizes)


@pytest.mark.timeout(INSTALL_S + 60)
@pytest.mark.parametrize("sizes", [SIZES, MANY, [64 * MIB]], ids=["sizes", "many streams", "64 MiB"])
async def test_js_libp2p(js_peer: Peer, sizes: list[int]) -> None:
    async with _own_host() as host:
        await _dial(host, js_peer.address, sizes)
        await _is_dialled(host, js_peer, sizes)


async def test_two_of_ours_choose_the_faster_cipher() -> None:
    async with _own_host() as one, _own_host() as other:
        muxed = await _dial(one, str(other.get_addrs()[0]), SIZES)
        assert muxed.negotiated_security_protocol == AESGCM_ID
