"""Downloads that wait: what is missing and why, in words for the owner."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from app.core.reasons import Reason
from app.membership import Membership, MembershipSetup
from app.weights.library import ENDS, span_parts
from app.weights.model_weights import ModelWeights, part_words
from tests.app.swarms import RECORD, identity, wall_clock
from tests.app.weights.models import WIDE
from tests.app.weights.test_exchange import World, world

BLOCKS = span_parts(0, 4)


@dataclass
class Owner:
    """A member that imported the model or, with another cache, has nothing of it."""

    world: World
    weights: ModelWeights

    async def trouble(self) -> Reason:
        """What is wrong, once something is."""
        while (found := self.weights.trouble()) is None:  # noqa: ASYNC110 - it tells nobody
            await trio.sleep(0.1)
        return found


@asynccontextmanager
async def owner(folder: Path, holders: set[str], cache: str = "seed") -> AsyncIterator[Owner]:
    """A member beside one that has the whole model and gives these parts."""
    async with world(folder) as here, trio.open_nursery() as nursery:
        who, manifest = identity(1), here.studied.manifest
        here.holders["seed"] = holders
        network = here.fabric.node(who.peer_id)
        swarm = Membership(network, who, RECORD, WIDE.n_blocks, MembershipSetup(wall_clock=wall_clock))
        weights = ModelWeights(network, swarm, manifest, folder / cache)
        weights._holders = lambda part: ["seed"] if part in holders else []  # type: ignore[method-assign]
        await nursery.start(weights.run)
        yield Owner(here, weights)
        nursery.cancel_scope.cancel()


async def test_a_models_folder_that_is_gone_is_named_until_it_is_back(tmp_path: Path, patient_clock: MockClock) -> None:
    async with owner(tmp_path, set()) as one:
        (tmp_path / "model").rename(tmp_path / "away")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.weights.need, [*ENDS, *BLOCKS])
            why = await one.trouble()
            assert why.code == "model_gone"
            folder, wanted = tmp_path / "model", "blocks 0:4, the embedding and the head"
            assert why.text == f"the model's folder {folder} is gone, and no member that is here has {wanted}"
            assert "put it back, or wait for a member that has the weights" in why.next_step
            (tmp_path / "away").rename(tmp_path / "model")
        assert one.weights.trouble() is None


async def test_a_file_of_the_model_that_is_gone_is_named(tmp_path: Path, patient_clock: MockClock) -> None:
    async with owner(tmp_path, set()) as one:
        file = tmp_path / "model" / "weights.bin"
        file.rename(tmp_path / "away")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.weights.need, BLOCKS)
            assert (await one.trouble()).text.startswith(f"the model's file {file} is gone, and no member")
            nursery.cancel_scope.cancel()


async def test_a_download_that_lacks_a_holder_names_what_it_waits_for(tmp_path: Path, patient_clock: MockClock) -> None:
    has = {"block.2"}
    async with owner(tmp_path, has, "newcomer") as one:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.weights.need, BLOCKS)
            why = await one.trouble()
            assert (why.code, why.text) == ("weights_wanted", "no member that is here has blocks 0:2, 3:4")
            assert "wait for a member" in why.next_step
            has.update(BLOCKS)
        assert one.weights.trouble() is None


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["block.3"], "blocks 3:4"),
        (["embedding", "head", *BLOCKS], "blocks 0:4, the embedding and the head"),
        (["tokenizer"], "the tokenizer"),
        (["block.0", "block.1", "block.7", "block.9"], "blocks 0:2, 7:8, 9:10"),
    ],
)
def test_parts_are_named_in_a_few_words(names: list[str], words: str) -> None:
    assert part_words(names) == words
