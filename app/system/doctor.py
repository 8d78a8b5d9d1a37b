"""`shoal doctor`: checks of the machine and of the network, each of them one line with a next step.

Checks take facts and return lines; measuring the network is left to a running node. Where no node runs, only what can
be seen without one is checked: whether the usual ports are free, and the clock.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from app.core.units import format_size
from app.snapshot.views import RuleView
from engine.budget import Allowance, Precision, default_headroom, plan_blocks
from engine.config import ModelConfig

if TYPE_CHECKING:  # importing it loads torch, which may be what is broken
    from engine.device.probe import Device
import errno
import socket
import statistics

from app.snapshot.views import PeerView, Snapshot

Status = Literal["ok", "warn", "fail"]
GB = 10**9
HOT_C = 87.0  # consumer cards throttle from about here
_ON_BY_DEFAULT = ("pause_on_battery", "disk_floor")  # a machine without a battery needs no rule about it
CROWDED = 0.2  # of a device's memory held by other programs


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str
    status: Status
    detail: str
    mend: str = ""


def check_python(version: tuple[int, ...], text: str) -> Check:
    """Whether this Python is one that Shoal is made for."""
    if (3, 11) <= version[:2] <= (3, 13):
        return Check("python", "ok", text)
    return Check("python", "warn", f"{text} is untried", "use Python 3.11, 3.12 or 3.13")


def check_torch(version: str | None, trouble: str = "") -> Check:
    """Whether torch can be imported at all."""
    if version is None:
        return Check("torch", "fail", f"cannot be imported: {trouble}", "run `make clean setup`, or reinstall torch")
    return Check("torch", "ok", version)


def check_driver(version: str | None, cards: int) -> Check:
    """NVIDIA's driver, where there is one."""
    if version is None:
        return Check("driver", "ok", "no driver of NVIDIA's answers; other devices bring their own")
    return Check("driver", "ok", f"NVIDIA {version}, {cards} card{'s' * (cards != 1)}")


def check_settings(path: Path, unknown: Sequence[str], trouble: str = "") -> Check:
    """Whether the configuration file is understood."""
    if trouble:
        return Check("settings", "fail", trouble, "mend the file, or move it away to begin anew")
    if unknown:
        mend = f"`shoal config list` shows what there is; take the lines out of {path}"
        return Check("settings", "warn", f"there is no setting {', '.join(unknown)}", mend)
    return Check("settings", "ok", str(path) if path.exists() else f"{path} is not there yet: all is as by default")


def check_sensor(rule: RuleView, setting: str) -> Check:
    """Whether a courtesy rule has the sensor that it needs."""
    name = f"rule {setting}"
    if rule.available and not rule.enabled:
        return Check(name, "ok", "off; its sensor answers")
    if rule.available:
        return Check(name, "ok", f"on{', and applies now' * rule.applies}; {rule.text}")
    if rule.enabled and setting not in _ON_BY_DEFAULT:
        return Check(name, "warn", f"on, but {rule.text}", f"it cannot pause this node: `shoal config unset {setting}`")
    return Check(name, "ok", f"cannot be used here: {rule.text}")


def check_device(device: Device) -> Check:
    """A device, its memory and its state."""
    facts = [f"{device.name}: {format_size(device.free_bytes)} of {format_size(device.total_bytes)} free"]
    if device.utilisation is not None:
        facts.append(f"{device.utilisation:.0%} busy")
    if device.temperature_c is not None:
        facts.append(f"{device.temperature_c:.0f} °C")
    if device.power_w is not None:
        facts.append(f"{device.power_w:.0f} W")
    if device.others_bytes:
        facts.append(f"{format_size(device.others_bytes)} held by other programs")
    detail = ", ".join(facts)
    if not device.usable:
        return Check(device.id, "warn", f"{device.name} cannot be used", device.note)
    if device.note:
        return Check(device.id, "warn", detail, device.note)
    if device.temperature_c is not None and device.temperature_c >= HOT_C:
        return Check(device.id, "warn", detail, "it is hot and will slow down: improve its cooling or lower its load")
    if device.others_bytes and device.others_bytes > CROWDED * device.total_bytes:
        return Check(device.id, "warn", detail, "close the programs that hold its memory to host more blocks")
    return Check(device.id, "ok", detail)


def check_format(device_id: str, chosen: str, seconds: Mapping[str, float]) -> Check:
    """The number format a device computes in, with the timings that chose it."""
    timings = ", ".join(f"{name} {value * 1000:.2g} ms" for name, value in seconds.items())
    return Check(f"{device_id} format", "ok", f"{chosen}, by measurement ({timings})")


def check_disk(folder: Path, free_bytes: int, *, writable: bool) -> Check:
    """Whether weights can be kept."""
    detail = f"{format_size(free_bytes)} free for weights in {folder}"
    if not writable:
        return Check("disk", "fail", f"{folder} cannot be written", "change its owner or mode, or set SHOAL_CACHE")
    if free_bytes < GB:
        return Check("disk", "warn", detail, "free some space, or set SHOAL_CACHE to a folder on another disk")
    return Check("disk", "ok", detail)


def check_model(label: str, config: ModelConfig, device: Device, precision: Precision, cap_bytes: int | None) -> Check:
    """How many of a model's blocks a device can host."""
    headroom = default_headroom(device.kind, device.total_bytes)
    budget = plan_blocks(config, Allowance(device.free_bytes, headroom, cap_bytes), precision)
    name = f"{device.id} hosts"
    if budget.blocks == 0:
        mend = "free memory on the device or choose a smaller model; without blocks this node is a client"
        return Check(name, "warn", f"none of the {config.n_blocks} blocks of {label}: {budget.reason}", mend)
    size = format_size(budget.weight_bytes_per_block)
    room = f"{size} a block, {format_size(budget.kv_bytes)} for the cache of {budget.kv_tokens} tokens"
    return Check(name, "ok", f"{budget.blocks} of {config.n_blocks} blocks of {label} ({room})")


def disk_of(folder: Path) -> Check:
    """The disk check of a folder that need not exist yet."""
    present = next(path for path in (folder, *folder.parents) if path.exists())
    return check_disk(folder, shutil.disk_usage(present).free, writable=os.access(present, os.W_OK | os.X_OK))


def examine_machine(devices: list[Device], models: Mapping[str, ModelConfig], cap_bytes: int | None) -> Iterator[Check]:
    """The checks of these devices, and of each model on each of them."""
    from engine.device.dtypes import pick_dtype

    for device in devices:
        yield check_device(device)
        if not device.usable:
            continue
        choice = pick_dtype(device.id)
        seconds = {str(dtype).removeprefix("torch."): value for dtype, value in choice.seconds.items()}
        yield check_format(device.id, str(choice.dtype).removeprefix("torch."), seconds)
        precision = Precision(choice.dtype.itemsize, choice.dtype.itemsize)
        for label, config in models.items():
            yield check_model(label, config, device, precision, cap_bytes)


MAX_PEERS = 50  # lines of single members
# Reasons that a person should look at; the others are as they should be.
TROUBLED = frozenset({"wrong_secret", "probe_blocks", "probe_api", "cannot_host", "no_room", "looking"})
WORRYING = frozenset({"peer_suspect", "peer_dead", "distrusted"})
CLOCK_TOLERANCE_S = 60.0
CLOCK_LIMIT_S = 600.0  # beyond this the other members refuse what this node signs
# No correct clock shows a time before Shoal existed.
_BEGINNING_MS = 1_735_689_600_000


def check_listening(addresses: Sequence[str]) -> Check:
    """Where the node listens."""
    if not addresses:
        return Check("listen", "fail", "the node listens nowhere", "give it an address with --listen, then restart it")
    return Check("listen", "ok", " ".join(addresses))


def check_port(label: str, port: int, *, free: bool) -> Check:
    """Whether a port that a node would use can be had."""
    if free:
        return Check(label, "ok", f"TCP port {port} is free")
    mend = "a node would use any free one instead; forward that, or stop the other program"
    return Check(label, "warn", f"TCP port {port} is taken by another program", mend)


def check_addresses(advertised: Sequence[str], verified: Sequence[str], reach: str) -> Check:
    """What others are told, and whether it was seen to work."""
    if not advertised:
        return Check("addresses", "warn", "none can be told to others", "connect this machine to a network")
    shown = " ".join(f"{one} ({'verified' if _is_among(one, verified) else 'unverified'})" for one in advertised)
    return Check("addresses", "ok", f"{shown}; reachability from outside: {reach}")


def check_nat(reach: str, *, relayed: bool, relaying: bool) -> Check:
    """Whether peers on the internet can dial in."""
    if reach == "verified":
        return Check("nat", "ok", "peers on the internet can dial in" + (", and use this node as a relay" * relaying))
    if reach == "unverified" and relayed:
        return Check("nat", "ok", "behind a NAT: reached through a relay, and directly where hole punching works")
    if reach == "unverified":
        mend = "forward the listening port in the router and name it with --advertise, or let a public node join"
        return Check("nat", "warn", "peers on the internet cannot dial in, and no relay is known", mend)
    return Check("nat", "ok", "not known yet: no peer on the internet is connected that could try")


def check_clock(now_ms: int, last_said_ms: int, heard_ms: Sequence[int]) -> Check:
    """Whether this machine's clock is believable: members' newest statements bear the times of their own clocks."""
    if now_ms < _BEGINNING_MS:
        return Check("clock", "fail", "the clock shows a time long past", "set it, best by switching time service on")
    behind_s = (statistics.median(heard_ms) - now_ms) / 1000 if heard_ms else 0.0
    set_back_s = (last_said_ms - now_ms) / 1000
    mend = "set the clock, best by switching the system's time service on"
    if behind_s > CLOCK_LIMIT_S:
        return Check("clock", "fail", f"{behind_s:.0f} s behind the other members: they refuse this node's word", mend)
    if behind_s > CLOCK_TOLERANCE_S:
        return Check("clock", "warn", f"{behind_s:.0f} s behind the other members", mend)
    if set_back_s > CLOCK_TOLERANCE_S:
        return Check("clock", "warn", f"it was set back by {set_back_s:.0f} s since this node last ran", mend)
    return Check("clock", "ok", "agrees with the other members" if heard_ms else "nothing speaks against it")


def check_peers(links: int, members: int, swarm: str | None, discovery: Sequence[str]) -> Check:
    """Whether there is company."""
    if swarm is None:
        return Check("peers", "ok", f"{links} connected; the node is in no swarm")
    detail = f"{links} connected, {members} other members of {swarm}"
    if links or members:
        return Check("peers", "ok", detail)
    means = ", ".join(discovery) or "nothing"
    mend = "ask a member for an invite (`shoal invite`), or name one with --peer"
    return Check("peers", "warn", f"{detail}; looked for by {means}", mend)


def check_peer(peer: PeerView) -> Check:
    """How one member is reached."""
    name = f"peer {peer.peer[-8:]}"
    rtt = "" if peer.rtt_s is None else f", {peer.rtt_s * 1000:.1f} ms there and back"
    detail = f"{peer.link or 'no link is open'}{rtt}; {peer.state}"
    if peer.unused is None:
        return Check(name, "ok", detail)
    status: Status = "warn" if peer.unused.code in WORRYING else "ok"
    return Check(name, status, f"{detail}; not used: {peer.unused.text}", peer.unused.next_step)


def check_state(snapshot: Snapshot) -> Check:
    """What the node does, and why, in the words that it says everywhere."""
    mend = "" if snapshot.why is None else snapshot.why.next_step
    failing = snapshot.why is not None and snapshot.why.code in TROUBLED
    return Check("state", "warn" if failing else "ok", f"{snapshot.state}: {snapshot.reason}", mend)


def running_checks(snapshot: Snapshot, *, now_ms: int, last_said_ms: int, heard_ms: Sequence[int]) -> Iterator[Check]:
    """The lines of a running node."""
    network = snapshot.network
    relayed = any("/p2p-circuit" in address for address in network.advertised)
    yield check_state(snapshot)
    yield check_listening(snapshot.listen_addrs)
    yield check_addresses(network.advertised, network.verified, network.reach)
    yield check_nat(network.reach, relayed=relayed, relaying=network.relaying)
    yield check_clock(now_ms, last_said_ms, heard_ms)
    yield check_peers(network.links, len(snapshot.peers), snapshot.swarm, network.discovery)
    yield from (check_peer(peer) for peer in snapshot.peers[:MAX_PEERS])


def resting_checks(listen_ports: Sequence[int], api_port: int, *, now_ms: int, last_said_ms: int) -> Iterator[Check]:
    """The lines where no node runs."""
    for port in dict.fromkeys(port for port in listen_ports if port):
        yield check_port("listen", port, free=is_free("0.0.0.0", port))
    if api_port:
        yield check_port("api", api_port, free=is_free("127.0.0.1", api_port))
    yield check_clock(now_ms, last_said_ms, ())
    yield Check("peers", "ok", "no node runs here: `shoal serve` starts one, which can say more")


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.setsockopt(socket.SOL_SOCKET, getattr(socket, "SO_EXCLUSIVEADDRUSE", socket.SO_REUSEADDR), 1)
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            return error.errno not in (errno.EADDRINUSE, errno.EACCES)
    return True


def _is_among(address: str, verified: Sequence[str]) -> bool:
    return any(address == proven or address.startswith(f"{proven}/") for proven in verified)
