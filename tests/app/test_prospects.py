"""What a node could go to: what is fetched and whether it fits is said before anything is fetched."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.prospects import fit_of, look_around
from app.remembered import Remembered
from engine.budget import FLOAT32, Precision
from engine.device import Device
from engine.sources import starter

GB = 10**9


def machine(total: int, free: int) -> Device:
    return Device("cuda:0", "cuda", "some card", total, free)


@pytest.mark.parametrize(
    ("device", "cap_bytes", "fits", "lacks", "too_large"),
    [
        (machine(16 * GB, 12 * GB), None, True, False, False),
        (machine(16 * GB, 3 * GB // 10), None, False, True, False),
        (machine(GB // 4, GB // 4), None, False, True, True),
        (machine(16 * GB, 12 * GB), GB // 4, False, True, False),
    ],
)
def test_a_model_fits_or_says_what_is_lacking(
    device: Device, cap_bytes: int | None, fits: bool, lacks: bool, too_large: bool
) -> None:
    fit = fit_of(starter.SHAPE, device, FLOAT32, cap_bytes)
    assert (fit.blocks == fit.blocks_total, fit.lacking_bytes > 0, fit.too_large) == (fits, lacks, too_large)


def test_with_what_is_lacking_it_fits() -> None:
    scarce = machine(16 * GB, GB)
    large = Precision(32.0, 32)
    lacking = fit_of(starter.SHAPE, scarce, large, None).lacking_bytes
    assert lacking > 0
    enough = fit_of(starter.SHAPE, machine(16 * GB, scarce.free_bytes + lacking), large, None)
    assert (enough.blocks, enough.lacking_bytes) == (enough.blocks_total, 0)


def test_nothing_is_invented_of_a_swarm_whose_manifest_is_not_here(tmp_path: Path) -> None:
    far = Remembered("far", "ab" * 32, 1)
    found = look_around([far], tmp_path / "cache", "cpu", None)
    assert [offer.target for offer in found.offers] == ["starter", str(far)]
    assert found.offers[0].fetch_bytes == starter.WHEEL_BYTES
    assert (found.offers[1].fit, found.offers[1].fetch_bytes) == (None, None)
    assert found.disk_free_bytes
    assert not (tmp_path / "cache").exists()
