"""Calls and streams over real links: the contract, and what only real frames can do."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.p2p.network_contract import NetworkContract
from tests.p2p.networks import WiredWorld, wired_world


@pytest.fixture
async def world() -> AsyncIterator[WiredWorld]:
    async with wired_world() as made:
        yield made


class TestWired(NetworkContract):
    """Links over byte pipes are a network."""
