"""What a node could go to: what is fetched and whether it fits is said before anything is fetched."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from app.joining.nearby import ExpectedSpeed, NearbySwarm
from app.joining.offers import Machine, look_around, look_at_machine
from app.manifest.importing import hash_source
from app.planning.machines import Fleet
from app.planning.replies import ReplyTask, replies_over
from app.snapshot.views import OfferView
from app.swarm.records import sign_record
from app.swarm.saved import SavedSwarm
from engine.budget import FLOAT32, Precision, block_bytes
from engine.device.probe import Device
from engine.sources import starter
from engine.stored_form import starter_form
from tests.app.swarms import CREATOR
from tests.app.tiny_source import tiny_source

GB = 10**9


def machine(total: int, free: int, cap_bytes: int | None = None, precision: Precision = FLOAT32) -> Machine:
    return Machine(Device("cuda:0", "cuda", "some card", total, free), precision, cap_bytes, 10.0 * GB, 1e12)


@pytest.mark.parametrize(
    ("here", "fits", "lacks", "too_large"),
    [
        (machine(16 * GB, 12 * GB), True, False, False),
        (machine(16 * GB, 3 * GB // 10), False, True, False),
        (machine(GB // 4, GB // 4), False, True, True),
        (machine(16 * GB, 12 * GB, GB // 4), False, True, False),
    ],
)
def test_a_model_fits_or_says_what_is_lacking(here: Machine, fits: bool, lacks: bool, too_large: bool) -> None:
    fit = here.fit(starter.SHAPE)
    assert (fit.blocks == fit.blocks_total, fit.lacking_bytes > 0, fit.too_large) == (fits, lacks, too_large)


def test_with_what_is_lacking_it_fits() -> None:
    large = Precision(32.0, 32)
    lacking = machine(16 * GB, GB, precision=large).fit(starter.SHAPE).lacking_bytes
    assert lacking > 0
    enough = machine(16 * GB, GB + lacking, precision=large).fit(starter.SHAPE)
    assert (enough.blocks, enough.lacking_bytes) == (enough.blocks_total, 0)


def test_alone_a_token_takes_what_the_planner_says() -> None:
    here = machine(16 * GB, 12 * GB)
    planned = replies_over(Fleet(spec := here.spec(), (spec,)), starter.SHAPE, ReplyTask())
    assert planned is not None
    assert here.alone_tokens_per_s(starter.SHAPE) == pytest.approx(planned.tokens_per_s)
    read = 30 * block_bytes(starter.SHAPE, FLOAT32) + 4 * 576 * (49152 + 1)
    assert here.alone_tokens_per_s(starter.SHAPE) == pytest.approx(10 * GB / read, rel=0.1)  # and the cache
    assert machine(16 * GB, GB // 10).alone_tokens_per_s(starter.SHAPE) > 0  # what does not fit now has a speed too


def test_weights_of_few_bits_are_faster_and_smaller_where_they_are_kept() -> None:
    numbers = replace(machine(16 * GB, 12 * GB), block_floor_s=0.0)
    keeps = replace(numbers, grid_gain=4.0)
    assert numbers.keeping(starter_form()) == numbers
    assert keeps.keeping(None) == keeps
    few = keeps.keeping(starter_form())
    assert few.alone_tokens_per_s(starter.SHAPE) == pytest.approx(
        3.3 * numbers.alone_tokens_per_s(starter.SHAPE), rel=0.2
    )
    eight = keeps.keeping(replace(starter_form(), weight_bytes=1.0625))
    assert few.alone_tokens_per_s(starter.SHAPE) > 1.4 * eight.alone_tokens_per_s(starter.SHAPE)
    assert few.spec().precision == starter_form().precision
    small = Device("cpu", "cpu", "small", 6 * GB // 5, 6 * GB // 5)
    held = [replace(one, device=small).fit(starter.SHAPE).blocks for one in (numbers, few)]
    assert held[0] < held[1]


def test_nothing_is_invented_of_a_swarm_whose_manifest_is_not_here(tmp_path: Path) -> None:
    far = SavedSwarm("far", "ab" * 32, 1)
    found = look_around(look_at_machine("cpu", None), tmp_path / "cache", [far])
    assert [offer.target for offer in found.offers] == ["starter", str(far)]
    assert found.offers[0].fetch_bytes == starter.WHEEL_BYTES
    assert found.offers[0].alone_tokens_per_s
    assert found.offers[1] == OfferView(str(far))
    assert found.disk_free_bytes
    assert found.reading_bytes_per_s
    assert not (tmp_path / "cache").exists()


def test_a_swarm_nearby_is_offered_once_with_what_it_would_give(tmp_path: Path) -> None:
    manifest = hash_source(tiny_source(tmp_path)).manifest
    record = sign_record(CREATOR, "pond", manifest.hash, now_ms=1)
    near = NearbySwarm(record, "lan", (), manifest, ExpectedSpeed(token_s=0.25))
    here = machine(16 * GB, 12 * GB)
    known = SavedSwarm("pond", manifest.hash, 1)
    _, offer = look_around(here, tmp_path / "cache", [known], [near]).offers
    assert (offer.target, offer.nearby, offer.members) == (str(record), "lan", 0)
    assert offer.tokens_per_s == pytest.approx(4.0, rel=0.01)
    assert offer.alone_tokens_per_s == here.alone_tokens_per_s(manifest.config)
    assert offer.fetch_bytes == manifest.size_bytes
    assert offer.model.startswith("a llama of ")
    hole = replace(near, expectation=ExpectedSpeed(missing_block=1))
    assert look_around(here, tmp_path / "cache", [], [hole]).offers[1].missing_block == 1
