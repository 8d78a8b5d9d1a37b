"""The in-memory twin: the contract, and the faults it can be told to have."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.p2p.network_contract import NetworkContract
from tests.p2p.networks import MemoryWorld, memory_world


@pytest.fixture
async def world() -> AsyncIterator[MemoryWorld]:
    async with memory_world() as made:
        yield made


class TestMemory(NetworkContract):
    """The twin is a network."""
