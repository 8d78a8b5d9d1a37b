"""The choices of a node that is in no swarm: the starter model, swarms nearby and saved ones.

For each choice: the bytes to download, whether the model fits this machine, and the speed of replies. Only manifests
are fetched for that (`app.joining.nearby`); a swarm without a manifest has no numbers. Speeds are those of
`app.planning`: alone, from this machine's measured speeds; through a swarm, from what its members announce and the
links measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from app.joining.nearby import NearbySwarm
from app.planning.devices import block_time_s, ends_time_s
from app.planning.machines import MachineSpec
from app.planning.replies import ReplyTask
from app.routing.cost import HOP_S
from app.snapshot.views import DeviceView, FitView, OfferView, ProspectsView
from app.swarm.saved import SavedSwarm, record_of
from app.weights.library import Library
from app.weights.manifest_store import ManifestStore, model_name
from engine.budget import Precision, block_bytes, ends_bytes, fit, unquantised
from engine.device.sensors import disk_free_bytes

if TYPE_CHECKING:
    from app.manifest.manifest import Manifest
    from engine.config import ModelConfig
    from engine.device.probe import Device
    from engine.stored_form import StoredForm


@dataclass(frozen=True)
class Machine:
    """This machine's device, its memory limits, and its measured speeds."""

    device: Device
    precision: Precision
    cap_bytes: int | None
    reading_bytes_per_s: float
    flops_per_s: float
    block_floor_s: float = 0.0  # least time per block, however small it is
    few_rows_flops_per_s: float = 0.0  # 0: not measured
    head_bytes_per_s: float = 0.0  # 0: as blocks
    grid_gain: float = 0.0  # how many times as fast weights of 4 bits are; 0: they are not kept in few bits

    def keeping(self, form: StoredForm | None) -> Machine:
        """Return the machine with its speed for a model whose files hold weights in this form."""
        if form is None or not self.grid_gain:
            return self
        precision, bits = form.precision, 8 if form.weight_bytes >= 1 else 4
        weight_s = bits / 4 * self.precision.weight_bytes / self.reading_bytes_per_s / self.grid_gain
        return replace(self, precision=precision, reading_bytes_per_s=precision.weight_bytes / weight_s)

    def view(self) -> DeviceView:
        """Return the device as the dashboard shows it."""
        device = self.device
        return DeviceView(device.id, device.name, device.total_bytes, device.free_bytes, self.cap_bytes)

    def spec(self, held_bytes: int = 0) -> MachineSpec:
        """Return this machine for a forecast; memory that a node already holds here counts as free."""
        device = self.device
        free = min(device.free_bytes + held_bytes, device.total_bytes)
        return MachineSpec(
            "here",
            free,
            self.reading_bytes_per_s,
            self.flops_per_s,
            kind="cpu" if device.kind == "cpu" else "gpu",
            few_rows_flops_per_s=self.few_rows_flops_per_s,
            block_floor_s=self.block_floor_s,
            rtt_s=0.0,
            number_bytes=self.precision.compute_bytes,
            weight_bytes=self.precision.weight_bytes,
            head_bytes_per_s=self.head_bytes_per_s,
            used_bytes=device.total_bytes - free,
            cap_bytes=self.cap_bytes,
        )

    def fit(self, config: ModelConfig) -> FitView:
        """Return how many blocks of a model the device can hold now, and the bytes it lacks for all of them."""
        fits = fit(config, self.device, self.precision, self.cap_bytes)
        return FitView(fits.budget.blocks, config.n_blocks, fits.lacking_bytes, fits.too_large)

    def head_s(self, config: ModelConfig) -> float:
        """Seconds until a token is chosen from its hidden states; the asker does that, whoever hosts the blocks."""
        return ends_time_s(config, self.spec(), rows=1)

    def alone_tokens_per_s(self, config: ModelConfig) -> float:
        """Tokens per second if this machine hosts all blocks, whether they fit now or not."""
        spec = self.spec()
        block_s = block_time_s(config, spec, rows=1, context=ReplyTask().context, sessions=1)
        return 1 / (HOP_S + config.n_blocks * block_s + ends_time_s(config, spec, rows=1))


def look_at_machine(
    device_name: str | None, cap_bytes: int | None, config: ModelConfig | None = None, form: StoredForm | None = None
) -> Machine:
    """Find the first device that would be used and measure its speed; with blocks of a model's shape if one is given.

    With `form`, they are in the grids of the model's files if the device would keep them so, as for replies. Without a
    shape it is measured once per process.
    """
    import torch

    from engine.benchmark import measure_shape
    from engine.device.dtypes import pick_dtype
    from engine.device.probe import chosen_devices, probe_devices
    from engine.device.read_speed import block_floor_s, multiplying_flops_per_s, reading_bytes_per_s
    from engine.model.onnx_graph import grid_gain, grids_pay

    device = chosen_devices(device_name, probe_devices())[0]
    in_grids = device.kind == "cpu" and (config is None or form is not None) and grids_pay()
    form = form if in_grids else None
    dtype = pick_dtype(device.id) if form is None else torch.float32
    speed = None if config is None else measure_shape(config, device.id, dtype, device.free_bytes, form)
    machine = Machine(
        device,
        speed.precision if speed else unquantised(dtype.itemsize),
        cap_bytes,
        speed.reading_bytes_per_s if speed else reading_bytes_per_s(device.id, dtype),
        speed.flops_per_s if speed else multiplying_flops_per_s(device.id, dtype),
        0.0 if speed else block_floor_s(device.id, dtype),
        speed.few_rows_flops_per_s if speed else 0.0,
        speed.head_bytes_per_s if speed else 0.0,
        0.0 if speed or not in_grids else grid_gain(),
    )
    return machine.keeping(form)  # a no-op if it was measured so


def look_around(
    machine: Machine, cache: Path, swarms: Sequence[SavedSwarm], nearby: Sequence[NearbySwarm] = ()
) -> ProspectsView:
    """Return all choices with their estimates: the starter model, nearby swarms, saved swarms. Reads the disk."""
    from engine.sources import starter
    from engine.stored_form import starter_form

    to_fetch = 0 if starter.starter_file(cache).exists() else starter.WHEEL_BYTES
    offers = [_offer(machine.keeping(starter_form()), starter.NAME, starter.LABEL, starter.SHAPE, to_fetch)]
    store = ManifestStore(cache)
    nearby_ids = {swarm.record.id for swarm in nearby}
    offers += [_nearby_offer(machine, store, swarm) for swarm in nearby]
    for known in swarms:
        if known.id not in nearby_ids:
            record, manifest = record_of(known), store.load(known.model_hash)
            named = "" if record is None else record.model_name
            offers.append(_swarm_offer(machine, store, str(known), manifest, named))
    free = disk_free_bytes(cache)
    return ProspectsView(tuple(offers), machine.view(), free, machine.reading_bytes_per_s)


def _offer(machine: Machine, target: str, model: str, config: ModelConfig, fetch_bytes: int) -> OfferView:
    fit = machine.fit(config)
    alone = None if fit.too_large else machine.alone_tokens_per_s(config)
    return OfferView(target, model, fit, fetch_bytes, alone_tokens_per_s=alone)


def _swarm_offer(
    machine: Machine, store: ManifestStore, target: str, manifest: Manifest | None, name: str = ""
) -> OfferView:
    if manifest is None:
        return OfferView(target, name)
    held = Library(store.cache, manifest).held()
    missing = sum(part.size_bytes for part in manifest.parts if part.name not in held)
    name = name or model_name(store.source(manifest.hash)) or shape_words(manifest.config)
    offer = _offer(machine.keeping(manifest_form(manifest)), target, name, manifest.config, missing)
    return replace(offer, size_bytes=manifest.size_bytes, context_length=manifest.config.context_length)


def saved_offer(machine: Machine, cache: Path, swarm: SavedSwarm) -> OfferView:
    """Return what this machine alone knows of the swarm of an invite or of a saved one. Reads the disk."""
    store, record = ManifestStore(cache), record_of(swarm)
    named = "" if record is None else record.model_name
    offer = _swarm_offer(machine, store, str(swarm), store.load(swarm.model_hash), named)
    return replace(offer, private=swarm.secret is not None)


def nearby_offer(machine: Machine, cache: Path, swarm: NearbySwarm) -> OfferView:
    """Return what a linked peer told of its swarm, as an offer. Reads the disk."""
    return _nearby_offer(machine, ManifestStore(cache), swarm)


def _nearby_offer(machine: Machine, store: ManifestStore, swarm: NearbySwarm) -> OfferView:
    offer = _swarm_offer(machine, store, str(swarm.record), swarm.manifest, swarm.record.model_name)
    token_s = swarm.expectation.token_s
    if token_s is not None and swarm.manifest is not None:
        token_s += machine.keeping(manifest_form(swarm.manifest)).head_s(swarm.manifest.config)
    return replace(
        offer,
        nearby=swarm.link,
        members=len(swarm.members),
        tokens_per_s=None if token_s is None else 1 / token_s,
        missing_block=swarm.expectation.missing_block,
    )


def manifest_form(manifest: Manifest) -> StoredForm | None:
    """Return the form in which a manifest's files hold the weights."""
    from engine.stored_form import stored_form

    return stored_form(manifest.config, lambda part: manifest.by_name[part].tensors)


def shape_words(config: ModelConfig) -> str:
    """Describe a model without a known name by its family and number of weights."""
    one = unquantised(1)
    weights = config.n_blocks * block_bytes(config, one) + ends_bytes(config, one, embedding=True, head=True)
    amount = f"{weights / 10**9:.1f} billion" if weights >= 10**9 else f"{weights / 10**6:.1f} million"
    return f"a {config.family} of {amount} weights"
