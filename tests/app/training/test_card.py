"""The memory of a card between the rounds of an island: blocks that are gone leave it to others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from app.core.device_thread import DeviceThread
from app.core.span import Span
from app.session.frame import new_session_id, plain
from app.training.hop import TrainingServer, TrainingTerms
from app.training.states import StateStore
from app.training.wire import PROTOCOL, Kind, decode, encode_open, full_order
from app.training.wiring import FullBlocksOn
from engine.budget import full_blocks_bytes, unquantised
from engine.hosting import release
from engine.sources.hf_config import parse_config
from p2p.memory.fabric import open_fabric

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda:0"
SHAPE = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 8, "hidden_size": 1024, "intermediate_size": 4096,
    "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 264, "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}  # fmt: skip
ORDER = replace(
    full_order(SHAPE, blocks=8, optimiser="adamw", weight_decay=0.0, rows=64, wire="f32"), span=Span(0, 8), under_way=2
)
NEEDED_BYTES = full_blocks_bytes(parse_config(dict(SHAPE), "the test", {}), unquantised(2), 8, 64, 2)  # 3 GB


@pytest.fixture
def full() -> Iterator[FullBlocksOn]:
    """Blocks on a card that has room for those of one job, and for half of them besides."""
    found = FullBlocksOn(DEVICE)
    release(DEVICE)
    spare = found.room(2**62) - NEEDED_BYTES * 3 // 2
    if spare < 0:
        pytest.skip(f"needs {NEEDED_BYTES * 3 // 2} bytes of a card")
    others = torch.empty(spare, dtype=torch.uint8, device=DEVICE)
    yield found
    del others
    release(DEVICE)


@pytest.mark.parametrize("is_lost", [False, True], ids=["rounds that end", "epochs that are lost"])
async def test_a_card_offers_as_much_room_for_the_next_round_as_for_the_first(
    tmp_path: Path, full: FullBlocksOn, is_lost: bool
) -> None:
    async with open_fabric() as fabric, trio.open_nursery() as nursery:
        network: Any = fabric.node("helper")
        states = StateStore(network, tmp_path, lambda peer: True)
        server = TrainingServer(network, DeviceThread(DEVICE), states, TrainingTerms, full)
        await nursery.start(server.run)
        owner = fabric.node("owner")
        run = new_session_id("owner")
        for epoch in range(1, 4):
            assert await server.room_for("owner") >= NEEDED_BYTES
            stream = await owner.open("helper", PROTOCOL)
            await stream.send(encode_open(run, epoch, 0, ORDER))
            assert decode(await stream.receive()).kind == Kind.READY
            assert await server.room_for("owner") == 0
            if is_lost:
                await stream.reset()
                while server.jobs and not next(iter(server._jobs.values())).is_parked:  # noqa: ASYNC110
                    await trio.sleep(0.01)
            else:
                await stream.send(plain(Kind.CLOSE, run, epoch))
                await server.no_jobs()
        assert await server.room_for("owner") >= NEEDED_BYTES
        nursery.cancel_scope.cancel()
