"""Hosting that fails: a full disk or blocks that do not load leave the node a member that can still ask."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from app.api.supervisor import ApiHealth
from app.asker import reply_service, text_places
from app.config.file import Config
from app.config.home import Home
from app.config.settings import Settings
from app.core.errors import HomeError
from app.core.reasons import Reason, because
from app.courtesy.pause import PauseControl
from app.manifest.manifest import build
from app.manifest.merkle import leaf_hash
from app.membership import Membership, MembershipSetup
from app.node.hosting_loop import HostingLoop
from app.snapshot.startup import StartupSteps
from app.snapshot.views import State
from app.training.activations import ActivationDisk
from app.training.states import StateStore
from app.weights import disk_space, part_store
from app.weights.disk_space import DiskRoom
from app.weights.library import ENDS, Library
from app.weights.manifest_store import ManifestStore
from app.weights.model_weights import ModelWeights
from app.weights.part_store import PartFiles
from engine import hosting
from engine.device.probe import Device
from engine.errors import SourceError
from engine.sources.base import ModelSource
from engine.text.tokenizer import Tokenizer
from p2p.memory.fabric import open_fabric
from tests.app.swarms import RECORD, identity, wall_clock
from tests.app.weights.models import WIDE, import_model


class Observer:
    """Keeps what hosting says of itself."""

    def __init__(self) -> None:
        self.state: State = "joining"
        self.why: Reason = because("starting", "starting")
        self.steps = StartupSteps(lambda: None)
        self.is_client = trio.Event()

    def say(self, state: State, why: Reason) -> None:
        self.state, self.why = state, why
        if state == "client":
            self.is_client.set()

    def settle(self, state: State, why: Reason) -> None:
        self.say(state, why)


class DamagedWeights(ModelWeights):
    """Parts that are all here and cannot be read."""

    async def need(
        self, names: Sequence[str], on_part: Callable[[str], None] = lambda name: None, *, hosted: bool = False
    ) -> ModelSource:
        raise SourceError("block.0 is damaged: import the model again")


class FailedCard(ModelWeights):
    """Parts that are all here, and a card that has failed."""

    async def need(
        self, names: Sequence[str], on_part: Callable[[str], None] = lambda name: None, *, hosted: bool = False
    ) -> ModelSource:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


async def head_stays(options: object) -> None:
    """A plan for the CPU leaves the head there."""
    assert options is None


@pytest.mark.parametrize(
    ("kind", "has_model", "words"),
    [
        (ModelWeights, False, "do not fit"),
        (DamagedWeights, True, "is damaged"),
        (FailedCard, True, "RuntimeError: CUDA error"),
    ],
)
async def test_a_node_whose_blocks_cannot_be_had_stays_as_a_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[ModelWeights], has_model: bool, words: str
) -> None:
    """The disk is full, the blocks do not load, or the card fails: the node says why, and goes on as a client."""
    device = Device("cpu", "cpu", "a processor", 8 << 30, 8 << 30)
    monkeypatch.setattr(hosting, "probe_devices", lambda: [device])
    manifest = import_model(tmp_path / "model", tmp_path / "seed").manifest
    who, told = identity(1), Observer()
    context: Any = SimpleNamespace(
        config=lambda: Config(Settings(blocks="0:2", device="cpu"), {}),
        pause_control=PauseControl(tmp_path / "pause.json", lambda: None),
        api=ApiHealth(),
        home=Home.open(tmp_path / "home"),
    )
    async with open_fabric() as fabric, trio.open_nursery() as nursery:
        network = fabric.node(who.peer_id)
        swarm = Membership(network, who, RECORD, WIDE.n_blocks, MembershipSetup(wall_clock=wall_clock))
        cache = tmp_path / ("seed" if has_model else "empty")
        replies: Any = SimpleNamespace(place_head=head_stays, failing=frozenset)
        weights = kind(network, swarm, manifest, cache, lambda: DiskRoom(limit_bytes=1))
        states = StateStore(network, context.home.training_folder, lambda peer: True)
        activations = ActivationDisk(tmp_path / "activations", lambda: 0)
        nursery.start_soon(HostingLoop(network, swarm, weights, replies, states, activations, context, told).run)
        with trio.fail_after(30):  # torch may have to be imported
            await told.is_client.wait()
        assert words in told.why.text
        assert swarm.own.state == "client"
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("error", "devices"),
    [(SourceError("the model's chat template is damaged"), ["cuda"]), (RuntimeError("CUDA error"), ["cuda", "cpu"])],
)
async def test_a_damaged_tokenizer_costs_replies_and_not_the_stay_in_the_swarm(
    monkeypatch: pytest.MonkeyPatch, error: Exception, devices: list[str]
) -> None:
    """A creator publishes a chat template that does not compile: nodes with a card left the swarm again and again."""
    tried: list[str] = []

    def damaged(source: object, options: Any) -> None:
        tried.append(options.device.type)
        raise error

    async def get_ends() -> Any:
        return object()

    monkeypatch.setattr(reply_service, "_load_ends", damaged)
    nobody: Any = SimpleNamespace(n_blocks=2)
    service = reply_service.ReplyService(nobody, nobody, get_ends, lambda: "")
    card: Any = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    async with trio.open_nursery() as nursery:
        await service.place_head(card)
        await nursery.start(service.run)
        with trio.fail_after(10):
            await service._arrived.wait()
            await service.place_head(card)
        assert tried[: len(devices)] == devices
        nursery.cancel_scope.cancel()


async def test_ends_that_cannot_be_loaded_are_not_loaded_again_for_each_request(
    monkeypatch: pytest.MonkeyPatch, mock_clock: MockClock
) -> None:
    """A node stands still while it reads a tokenizer; one that it refused it read again for each request."""
    tried: list[float] = []

    def damaged(source: object, options: object) -> None:
        tried.append(mock_clock.current_time())
        mock_clock.jump(3)
        raise SourceError("the tokenizer is damaged")

    async def get_ends() -> Any:
        return object()

    monkeypatch.setattr(reply_service, "_load_ends", damaged)
    nobody: Any = SimpleNamespace(n_blocks=2)
    service = reply_service.ReplyService(nobody, nobody, get_ends, lambda: "")
    async with trio.open_nursery() as nursery:
        await nursery.start(service.run)
        for _ in range(10):
            with pytest.raises(SourceError, match="the tokenizer is damaged"):
                await service.training_ends()
        assert len(tried) == 1
        mock_clock.jump(3 * reply_service.REST_OF_LOADING)
        with pytest.raises(SourceError, match="the tokenizer is damaged"):
            await service.training_ends()
        assert len(tried) == 2
        nursery.cancel_scope.cancel()


def test_a_tokenizer_that_is_no_text_costs_replies_and_not_the_stay_in_the_swarm(tmp_path: Path) -> None:
    """A creator publishes one whose hash is right and whose bytes are no UTF-8: whoever joined left again at once, and
    went on so, because what gets the tokenizer ready expected no such failure.
    """
    good = import_model(tmp_path / "model", tmp_path / "cache").manifest
    data = b"\xff\xfe"
    leaves = (leaf_hash(data),)
    part = replace(good.by_name["tokenizer"], size_bytes=len(data), root=leaves[0])
    manifest = build(good.config, good.text, good.licence, (*good.parts[:-1], part))
    store, files = ManifestStore(tmp_path / "cache"), PartFiles(tmp_path / "cache")
    store.save_index(manifest.hash, store.index(good.hash))
    files.keep(part, leaves, data)
    source = Library(tmp_path / "cache", manifest).source(ENDS)
    with pytest.raises(SourceError, match="the tokenizer is damaged"):
        Tokenizer(source.tokenizer)


def test_a_full_disk_costs_no_part_of_a_model_whose_files_were_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That they are as they were could not be noted down, and a member that needed them left its swarm."""
    manifest = import_model(tmp_path / "model", tmp_path / "cache").manifest
    library = Library(tmp_path / "cache", manifest)
    os.utime(tmp_path / "model" / "weights.bin", ns=(1, 1))

    def full(store: ManifestStore, model_hash: str, index: object) -> None:
        raise HomeError("the disk is full", code="disk_full")

    monkeypatch.setattr(ManifestStore, "save_index", full)
    assert library.check(ENDS) == []
    assert library.source(ENDS).parts


async def test_a_full_disk_costs_no_blocks_whose_weights_are_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member with all its weights on disk hosted nothing after a restart, as it could not list them as in use."""
    who = identity(1)
    manifest = import_model(tmp_path / "model", tmp_path / "cache").manifest

    def full(path: Path, data: bytes, *, durable: bool = True) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with open_fabric() as fabric, trio.open_nursery() as nursery:
        network = fabric.node(who.peer_id)
        swarm = Membership(network, who, RECORD, WIDE.n_blocks, MembershipSetup(wall_clock=wall_clock))
        weights = ModelWeights(network, swarm, manifest, tmp_path / "cache")
        await nursery.start(weights.run)
        for module in (disk_space, part_store):
            monkeypatch.setattr(module, "write_private", full)
        (tmp_path / "cache" / "parts" / f"{manifest.by_name['tokenizer'].root.hex()}.ok").unlink()
        assert (await weights.need(ENDS)).parts
        nursery.cancel_scope.cancel()


async def test_a_tokenizer_that_does_not_end_costs_its_request_and_not_the_nodes_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pattern of a tokenizer can take days for a text that the chat template makes: the reply was never given up,
    and the node could not stop before.
    """
    monkeypatch.setattr(text_places, "TEXT_S", 0.1)
    monkeypatch.setattr(text_places, "PLACE_S", 0.1)
    over = threading.Event()
    ends: Any = SimpleNamespace(prompt_text=lambda ids: over.wait(60))

    async def ready() -> Any:
        return ends, None

    async def get_ends() -> Any:
        return object()

    nobody: Any = SimpleNamespace(n_blocks=2)
    service = reply_service.ReplyService(nobody, nobody, get_ends, lambda: "")
    monkeypatch.setattr(service, "_ready", ready)
    try:
        with trio.fail_after(20):
            for _ in range(text_places.NODE_OWNER_TEXTS):
                with pytest.raises(SourceError, match="take more than"):
                    await service.detokenize([1])
            with pytest.raises(text_places.NoPlaceForText):  # these threads compute on
                await service.detokenize([1])
            monkeypatch.setattr(text_places, "PLACE_S", 1000.0)
            with trio.move_on_after(0.1) as stopped:
                await service.detokenize([1])
            assert stopped.cancelled_caught
    finally:
        over.set()
