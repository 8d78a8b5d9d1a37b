"""What this node could go to: the starter model and the remembered swarms, what each would fetch, and whether it fits.

Nothing is fetched to find that out: a swarm whose manifest is not on this machine has no figures.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from app.manifest_store import ManifestStore
from app.overview import model_name
from app.remembered import Remembered
from app.snapshot import DeviceView, FitView, OfferView, ProspectsView
from app.weights.library import Library
from engine.budget import Allowance, Precision, block_bytes, default_headroom, plan_blocks, workspace_bytes

if TYPE_CHECKING:
    from engine.config import ModelConfig
    from engine.device import Device


def fit_of(config: ModelConfig, device: Device, precision: Precision, cap_bytes: int | None) -> FitView:
    """How many blocks a device takes now, and what it lacks for all of them."""
    headroom = default_headroom(device.kind, device.total_bytes)
    allowance = Allowance(device.free_bytes, headroom, cap_bytes)
    rows = allowance.prefill_rows
    weights = config.n_blocks * block_bytes(config, precision) + workspace_bytes(config, precision, rows, head=False)
    whole = int(weights / (1 - allowance.kv_share))
    return FitView(
        blocks=plan_blocks(config, allowance, precision).blocks,
        blocks_total=config.n_blocks,
        lacking_bytes=max(0, whole - allowance.usable_bytes),
        too_large=whole + headroom > device.total_bytes,
    )


def look_around(
    swarms: Sequence[Remembered], cache: Path, device_name: str | None, cap_bytes: int | None
) -> ProspectsView:
    """Every choice with its figures; reads the disk and looks at the device."""
    from engine.device import find_device, probe_devices
    from engine.dtypes import pick_dtype
    from engine.sources import starter

    device = find_device(device_name, probe_devices())
    itemsize = pick_dtype(device.id).dtype.itemsize
    precision = Precision(itemsize, itemsize)

    def offer(target: str, model: str, config: ModelConfig, fetch_bytes: int) -> OfferView:
        return OfferView(target, model, fit_of(config, device, precision, cap_bytes), fetch_bytes)

    to_fetch = 0 if starter.starter_file(cache).exists() else starter.WHEEL_BYTES
    offers = [offer(starter.NAME, starter.LABEL, starter.SHAPE, to_fetch)]
    store = ManifestStore(cache)
    for swarm in swarms:
        manifest = store.load(swarm.model_hash)
        if manifest is None:
            offers.append(OfferView(str(swarm)))
            continue
        held = Library(cache, manifest).held()
        missing = sum(part.size_bytes for part in manifest.parts if part.name not in held)
        offers.append(offer(str(swarm), model_name(store.source(swarm.model_hash)), manifest.config, missing))
    view = DeviceView(device.id, device.name, device.total_bytes, device.free_bytes, cap_bytes)
    return ProspectsView(tuple(offers), view, shutil.disk_usage(_existing(cache)).free)


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there already."""
    return next(path for path in (folder, *folder.parents) if path.exists())
