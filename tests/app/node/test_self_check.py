"""The self-test of hosting: blocks that are busy with others' rows have not failed, blocks that stand still have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing

from app.core.network import FrameStream
from app.node.self_check import PATIENCE_S, span_trouble
from app.serving.stats import ServerStats

STARTS, STOPS, HIDDEN = 0, 8, 16


class Silent:
    """A block server that opens no session, because the step under way takes long; others' rows may pass meanwhile."""

    def __init__(self, rows_at_once: int) -> None:
        self._rows_at_once, self._rows = rows_at_once, 0

    async def attend(self, stream: FrameStream) -> None:
        await trio.sleep_forever()

    @property
    def stats(self) -> ServerStats:
        self._rows += self._rows_at_once
        return ServerStats(rows=self._rows)


@pytest.mark.parametrize(("rows_at_once", "has_failed"), [(256, False), (0, True)])
async def test_blocks_that_are_busy_with_a_long_prompt_have_not_failed(
    rows_at_once: int, has_failed: bool, autojump_clock: trio.testing.MockClock
) -> None:
    """A step of a prompt that took more than 5 s made the node unload its blocks, and the prompt began anew."""
    network, runner = SimpleNamespace(peer_id="me"), SimpleNamespace(start=STARTS, stop=STOPS, hidden_size=HIDDEN)
    began = trio.current_time()
    trouble = await span_trouble(cast(Any, network), Silent(rows_at_once), cast(Any, runner))
    assert trio.current_time() - began >= PATIENCE_S
    assert (trouble is not None) is has_failed
    if trouble is not None:
        assert trouble.code == "probe_blocks"
        assert "a token did not pass its blocks within" in trouble.text
