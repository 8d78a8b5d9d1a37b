"""Jobs whose hops send changes of activations: near those of int8, fewer bytes, whatever is lost on the way."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import trio

from app.core.errors import AppError
from app.training.activations import Activations
from app.training.material import wish_of
from app.training.trainer import Replicas, SwarmTrainer
from app.training.wire import Form, split_sequences
from engine.sources.base import ModelSource
from engine.sources.tiny import open_tiny
from engine.training.local_trainer import MicroBatch
from tests.app.training.job_swarm import UNHURRIED, JobSwarm, Losses, batches_of, open_job_swarm

SPLITS = ((0, 2), (2, 6), (6, 8))
STEPS = 6  # three times the same two


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return open_tiny(tmp_path_factory.mktemp("model"))


def seen_again(version: int) -> list[MicroBatch]:
    """The same data every second step."""
    return batches_of(version % 2)


class RoughLosses(Losses):
    """Steps may be repeated with other rounding."""

    def __call__(self, step: Any) -> None:
        self.steps.pop(step.version, None)
        super().__call__(step)

    @property
    def each(self) -> list[float]:
        return [self.steps[version].loss for version in sorted(self.steps)]


async def trained(swarm: JobSwarm, wire: str = "changes", **more: Any) -> tuple[list[float], SwarmTrainer]:
    losses = RoughLosses(more.pop("after", None))
    owner = swarm.owner(wire=wire, patience=UNHURRIED, **more)
    await owner.run(STEPS, seen_again, losses)
    return losses.each, owner


@pytest.fixture(scope="module")
def exact(source: ModelSource, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses with rows of float32."""

    async def train() -> list[float]:
        async with open_job_swarm(source, tmp_path_factory.mktemp("f32"), *SPLITS) as swarm:
            return (await trained(swarm, "f32"))[0]

    return trio.run(train)


def files(swarm: JobSwarm) -> list[Path]:
    return [path for path in swarm.folder.glob("*.activations/**/*") if path.is_file()]


@pytest.mark.soak
async def test_changes_take_half_of_the_bytes_forwards_and_train_alike(
    source: ModelSource, tmp_path: Path, exact: list[float]
) -> None:
    links: dict[str, Counter[tuple[str, str]]] = {}
    for wire in ("int8", "changes"):
        async with open_job_swarm(source, tmp_path / wire, *SPLITS) as swarm:
            losses, owner = await trained(swarm, wire)
            assert losses == pytest.approx(exact, rel=0.02)
            assert owner.figures.micro_batches_again == 0
            links[wire] = owner.figures.link_bytes
            for node in swarm.nodes.values():
                await node.server.no_jobs()
            assert not files(swarm)  # nothing of a job outlives it
            assert all(disk.used_bytes == 0 for disk in swarm.disks.values())
    int8, changes = links["int8"], links["changes"]
    assert int8.keys() == changes.keys()
    for sender, receiver in (("n0", "n1"), ("n1", "n2"), ("n2", "owner")):
        first = int8[sender, receiver] / 3  # the first of three visits is whole
        assert (changes[sender, receiver] - first) / (int8[sender, receiver] - first) < 0.65  # headings of short rows
        assert changes[receiver, sender] < 1.02 * int8[receiver, sender]  # gradients stay int8
    assert changes["owner", "n0"] < 0.45 * int8["owner", "n0"]  # embeddings do not change at all


async def test_the_numbers_that_arrive_are_those_that_the_sender_keeps(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpacked: list[bytes] = []
    forms: Counter[Form] = Counter()
    unpack = Activations.unpack

    def remember(self: Activations, boundary: Any, frame: Any) -> Any:
        arrival = unpack(self, boundary, frame)
        forms.update(one.form for one in split_sequences(frame))
        unpacked.extend(arrival.rows)
        return arrival

    kept: list[bytes] = []
    keep = Activations._keep

    def remember_kept(self: Activations, table: Any, place: Any, rows: bytes) -> bool:
        if table is self._sent:
            kept.append(rows)
        return keep(self, table, place, rows)

    monkeypatch.setattr(Activations, "unpack", remember)
    monkeypatch.setattr(Activations, "_keep", remember_kept)
    async with open_job_swarm(source, tmp_path, *SPLITS) as swarm:
        await trained(swarm)
    assert Counter(unpacked) == Counter(kept)
    sequences = 6 * 2  # of two steps, over four links
    assert forms == {Form.KEEP: 4 * sequences, Form.CHANGED: 3 * 2 * sequences, Form.UNCHANGED: 2 * sequences}


async def test_a_hop_killed_between_two_visits_is_replaced_and_all_begins_whole(
    source: ModelSource, tmp_path: Path, exact: list[float]
) -> None:
    async with open_job_swarm(source, tmp_path / "swarm", *SPLITS) as swarm:
        await swarm.train("spare", 2, 6)
        losses, owner = await trained(swarm, every=2, after={3: lambda: swarm.kill("n1")})
        assert losses == pytest.approx(exact, rel=0.02)
        assert owner.figures.epochs == 2
        assert not owner.figures.rejected
        assert ("n0", "spare") in owner.figures.link_bytes


@pytest.mark.soak
async def test_a_node_that_lost_its_files_is_sent_the_whole_again(
    source: ModelSource, tmp_path: Path, exact: list[float]
) -> None:
    async with open_job_swarm(source, tmp_path / "swarm", *SPLITS) as swarm:
        gone: list[Path] = []

        def lose(name: str) -> None:
            for path in (tmp_path / "swarm" / f"{name}.activations").rglob("*"):
                if path.is_file():
                    path.unlink()
                    gone.append(path)

        losses, owner = await trained(swarm, after={2: lambda: lose("n1"), 4: lambda: lose("owner-owns")})
        assert gone
        assert losses == pytest.approx(exact, rel=0.02)
        assert owner.figures.epochs == 1
        assert owner.figures.micro_batches_again > 0
        assert not owner.figures.rejected


@pytest.mark.parametrize("name", ["n1", *(pytest.param(name, marks=pytest.mark.soak) for name in ("n0", "owner-owns"))])
async def test_a_node_without_room_on_its_disk_gets_rows_of_int8(
    source: ModelSource, tmp_path: Path, exact: list[float], name: str
) -> None:
    async with open_job_swarm(source, tmp_path / "swarm", *SPLITS) as swarm:
        swarm.disk_bytes[name] = 3 * 2**14
        losses, owner = await trained(swarm)
        assert losses == pytest.approx(exact, rel=0.02)
        assert (owner.figures.epochs, owner.figures.micro_batches_again) == (1, 0)


async def test_a_resumed_job_begins_with_the_whole_and_goes_on(
    source: ModelSource, tmp_path: Path, exact: list[float]
) -> None:
    async with open_job_swarm(source, tmp_path / "swarm", *SPLITS) as swarm:
        losses = RoughLosses()
        first = swarm.owner(wire="changes", patience=UNHURRIED)
        await first.run(3, seen_again, losses)
        second = swarm.owner("later", wire="changes", patience=UNHURRIED)
        await second.resume(3, await first.final_states())
        await first.close()
        await second.run(STEPS, seen_again, losses)
        assert losses.each == pytest.approx(exact, rel=0.02)
        assert second.figures.micro_batches_again == 0


async def test_several_holders_of_a_block_agree_and_are_audited(source: ModelSource, tmp_path: Path) -> None:
    async with open_job_swarm(source, tmp_path / "swarm", (0, 4), (4, 8), (4, 8), (4, 8)) as swarm:
        losses = RoughLosses()
        owner = swarm.owner(wire="changes", patience=UNHURRIED, replicas=Replicas(swarm.holders))
        await owner.run(8, seen_again, losses)
        assert owner.figures.audits > 0
        assert not owner.figures.left_out
        assert not owner.figures.rejected


async def test_a_hop_without_a_disk_for_it_refuses_and_another_is_found(source: ModelSource, tmp_path: Path) -> None:
    async with open_job_swarm(source, tmp_path, (0, 8)) as swarm:
        swarm.nodes["n0"].server._activations = None
        await swarm.train("spare", 0, 8)
        _, owner = await trained(swarm)
        assert [hop.peer for hop in owner.route] == ["spare"]
        assert "keeps no activations" in next(iter(owner.figures.lost))


def test_a_job_that_sees_its_data_once_cannot_send_changes() -> None:
    values: dict[str, Any] = {
        "out": "a", "data": "d", "validation_file": None, "validation": 0.0, "rank": 8, "alpha": 16.0, "targets": ["q"],
        "dropout": 0.0, "seed": 0, "batch": 1, "length": 8, "rate": 1e-3, "wire": "changes",
    }  # fmt: skip
    assert wish_of({**values, "epochs": 2}).source.wire == "changes"
    with pytest.raises(AppError, match="--epochs 2 or more"):
        wish_of({**values, "epochs": 1})
