"""The checks of `shoal doctor`: machine, devices, settings and network, each one line with a remedy.

Checks take facts and return a `Check`; a running node measures the network (`app.node`). Without a node only the ports
and the clock are checked. `app.cli.doctor` collects the facts and prints the lines.
"""

from __future__ import annotations

import errno
import importlib.util
import ipaddress
import os
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from app.core.reasons import NEXT_STEPS
from app.core.units import format_lead, format_size
from app.snapshot.views import NetworkView, PeerView, RuleView, Snapshot
from engine.budget import BlockBudget, CacheFormat
from p2p.addresses import Scope, parse_known
from p2p.envelope import CLOCK_TOLERANCE_MS

if TYPE_CHECKING:  # importing it loads torch, which may be broken
    from engine.device.probe import Device
    from engine.hosting import Weights
    from engine.sources.base import ModelSource

Status = Literal["ok", "warn", "fail", "skip"]  # skip: nothing to check here, or not known
GB = 10**9
HOT_C = 87.0  # consumer cards throttle from about this temperature
_ON_BY_DEFAULT = ("pause_on_battery", "disk_floor")  # a missing sensor is normal: the user did not choose these rules
CROWDED = 0.2  # warn if other programs hold more than this share of a device's memory


@dataclass(frozen=True)
class Check:
    """One line of the report; `mend` tells the user how to fix it."""

    name: str
    status: Status
    detail: str
    mend: str = ""


def check_python(version: tuple[int, ...], text: str) -> Check:
    """Check that the Python version is a supported one."""
    if (3, 11) <= version[:2] <= (3, 13):
        return Check("python", "ok", text)
    return Check("python", "warn", f"{text} is not tested with Shoal", "use Python 3.11, 3.12 or 3.13")


def check_torch(version: str | None, trouble: str = "") -> Check:
    """Check that torch can be imported; `version` is None if it cannot."""
    if version is None:
        return Check("torch", "fail", f"cannot be imported: {trouble}", "run `make clean setup`, or reinstall torch")
    return Check("torch", "ok", version)


def check_driver(version: str | None, cards: int) -> Check:
    """Report the NVIDIA driver, if there is one."""
    if version is None:
        return Check("driver", "skip", "no NVIDIA driver found (fine without an NVIDIA card)")
    return Check("driver", "ok", f"NVIDIA {version}, {cards} card{'s' * (cards != 1)}")


def check_settings(path: Path, unknown: Sequence[str], trouble: str = "") -> Check:
    """Check that the configuration file is valid and has no unknown settings."""
    if trouble:
        return Check("settings", "fail", trouble, "fix the file, or move it away to start with the defaults")
    if unknown:
        mend = f"`shoal config list` shows all settings; remove these lines from {path}"
        return Check("settings", "warn", f"unknown settings: {', '.join(unknown)}", mend)
    return Check("settings", "ok", str(path) if path.exists() else f"{path} does not exist: the defaults apply")


def check_sensor(rule: RuleView, setting: str) -> Check:
    """Check that a pause rule has the sensor that it needs."""
    name = f"rule {setting}"
    if rule.available and not rule.enabled:
        return Check(name, "ok", "off; its sensor works")
    if rule.available:
        return Check(name, "ok", f"on{', and applies now' * rule.applies}; {rule.text}")
    if rule.enabled and setting not in _ON_BY_DEFAULT:
        return Check(name, "warn", f"on, but {rule.text}", f"it has no effect here: `shoal config unset {setting}`")
    return Check(name, "skip", f"not available: {rule.text}")


def check_device(device: Device) -> Check:
    """Check a device: usable, not too hot, and its memory not held by other programs."""
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
        return Check(device.id, "warn", detail, "it is hot and will slow down: improve its cooling or reduce its load")
    if device.others_bytes and device.others_bytes > CROWDED * device.total_bytes:
        return Check(device.id, "warn", detail, "to host more blocks, close the programs that hold its memory")
    return Check(device.id, "ok", detail)


def check_format(device_id: str, chosen: str, seconds: Mapping[str, float]) -> Check:
    """Report the number format that a device computes in, with the timings that decided it."""
    timings = ", ".join(f"{name} {value * 1000:.2g} ms" for name, value in seconds.items())
    return Check(f"{device_id} format", "ok", f"{chosen}, by measurement ({timings})")


def check_disk(folder: Path, free_bytes: int, *, writable: bool) -> Check:
    """Check that the cache folder can be written and has space for weights."""
    detail = f"{format_size(free_bytes)} free for weights in {folder}"
    if not writable:
        return Check("disk", "fail", f"{folder} cannot be written", "change its owner or mode, or set SHOAL_CACHE")
    if free_bytes < GB:
        return Check("disk", "warn", detail, "free disk space, or set SHOAL_CACHE to a folder on another disk")
    return Check("disk", "ok", detail)


def check_model(
    label: str, n_blocks: int, device_id: str, budget: BlockBudget, cap_bytes: int | None, cache: CacheFormat = "own"
) -> Check:
    """Report how many of a model's blocks a device can host within the user's memory cap."""
    name = f"{device_id} hosts"
    if budget.blocks == 0:
        mend = "free memory on the device or choose a smaller model; without blocks this node can only ask"
        if budget.is_capped:
            mend = "raise the limit: `shoal config set max_vram SIZE`; without blocks this node can only ask"
        return Check(name, "warn", f"none of the {n_blocks} blocks of {label}: {budget.reason}", mend)
    size = format_size(budget.weight_bytes_per_block)
    bits = " in 8 bits" if cache == "int8" else ""
    room = f"{size} per block, {format_size(budget.kv_bytes)} for the KV cache of {budget.kv_tokens} tokens{bits}"
    cap = "" if cap_bytes is None else f", within the memory limit of {format_size(cap_bytes)}"
    return Check(name, "ok", f"{budget.blocks} of {n_blocks} blocks of {label} ({room}{cap})")


def disk_of(folder: Path) -> Check:
    """Run `check_disk` on a folder, or on its nearest existing parent."""
    present = next(path for path in (folder, *folder.parents) if path.exists())
    return check_disk(folder, shutil.disk_usage(present).free, writable=os.access(present, os.W_OK | os.X_OK))


def check_grids(device_id: str, computes: bool) -> Check:
    """Report whether a device computes with weights in the 4 to 8 bits of their file."""
    if computes:
        return Check(f"{device_id} 4 bits", "ok", "GGUF files are computed with in their own bits")
    detail = "GGUF files are decoded to the format above"
    if device_id != "cpu":
        return Check(f"{device_id} 4 bits", "ok", f"{detail}, and kept in their own bits where memory is short")
    if importlib.util.find_spec("onnxruntime") is None:
        return Check("cpu 4 bits", "ok", f"{detail}; with the package onnxruntime they would take less and be faster")
    return Check("cpu 4 bits", "ok", f"{detail}, which is faster here, by measurement")


def examine_machine(
    devices: list[Device],
    models: Mapping[str, ModelSource],
    cap_bytes: int | None,
    weights: Weights,
    cache: CacheFormat = "own",
) -> Iterator[Check]:
    """Yield the checks of these devices, and of each model on each of them; times number formats, so takes a while.

    How much of a model fits is what a node with this cap and these settings would host (`plan_hosting`).
    """
    from engine.device.dtypes import dtype_times, name_of, pick_dtype
    from engine.hosting import HostingWish, computes_grids, plan_hosting, source_kind
    from engine.stored_form import source_bytes

    for device in devices:
        yield check_device(device)
        if not device.usable:
            continue
        dtype = pick_dtype(device.id)
        seconds = {name_of(timed): value for timed, value in dtype_times(device.id).seconds.items()}
        yield check_format(device.id, name_of(dtype), seconds)
        in_grids = device.kind == "cpu" and computes_grids(device.kind)
        yield check_grids(device.id, in_grids)
        for label, source in models.items():
            wish = HostingWish(device.id, cap_bytes, weights, cache=cache)
            plan = plan_hosting(source.config, source_kind(source), wish, source_bytes(source))
            yield check_model(label, source.config.n_blocks, device.id, plan.budget, cap_bytes, cache)


MAX_PEERS = 50  # most members that get a line of their own
# Reasons that need nothing to be done about a node that hosts nothing or is not in its swarm; all others do.
NORMAL = frozenset({"limit_zero", "looking_around"})
TROUBLED = frozenset({"probe_blocks", "probe_api"})  # reasons of other states that deserve a warning
FAILED = frozenset({"clock_off", "model_gone", "twin"})  # the node cannot do its work until somebody does something
WORRYING = frozenset({"peer_suspect", "peer_dead", "peer_clock", "distrusted"})
CLOCK_TOLERANCE_S = 60.0
CLOCK_LIMIT_S = CLOCK_TOLERANCE_MS / 1000  # beyond this, members refuse each other's signed records
# 2025-01-01: a correct clock cannot show a time before Shoal existed.
_BEGINNING_MS = 1_735_689_600_000


def check_listening(addresses: Sequence[str]) -> Check:
    """Check that the node listens on at least one address."""
    if not addresses:
        return Check("listen", "fail", "the node listens on no address", "restart it with an address: --listen ADDRESS")
    return Check("listen", "ok", " ".join(addresses))


def check_port(label: str, port: int, *, free: bool) -> Check:
    """Check that a port that a node would use is free."""
    if free:
        return Check(label, "ok", f"TCP port {port} is free")
    mend = "a node would use any free port instead; forward that port, or stop the other program"
    return Check(label, "warn", f"TCP port {port} is in use by another program", mend)


def check_addresses(advertised: Sequence[str], verified: Sequence[str], reach: str) -> Check:
    """Report the announced addresses, and which of them were verified from outside."""
    if not advertised:
        return Check("addresses", "warn", "there are none to announce to others", "connect this machine to a network")
    shown = " ".join(f"{one} ({'verified' if _is_among(one, verified) else 'unverified'})" for one in advertised)
    return Check("addresses", "ok", f"{shown}; reachability from outside: {reach}")


def check_nat(reach: str, *, relayed: bool, relaying: bool) -> Check:
    """Check that peers on the internet can reach this node, directly or through a relay."""
    if reach == "verified":
        return Check("nat", "ok", "peers on the internet can dial in" + (", and use this node as a relay" * relaying))
    if reach == "unverified" and relayed:
        return Check("nat", "ok", "behind a NAT: reached through a relay, and directly where hole punching works")
    if reach == "unverified":
        mend = "forward the listening port in the router and announce it with --advertise, or let a public node join"
        return Check("nat", "warn", "peers on the internet cannot dial in, and no relay is known", mend)
    return Check("nat", "skip", "not known yet: no peer on the internet is connected that could test it")


def check_mapping(network: NetworkView) -> Check:
    """Report if the router forwards the listening port, and what to do if not."""
    if network.mapping:
        return Check("port mapping", "ok", f"the router forwards a port to this node: {network.mapping}")
    if network.reach == "verified":
        return Check("port mapping", "ok", "none is needed: peers on the internet can dial in")
    if not network.mapping_problem:
        return Check("port mapping", "skip", "off: see the settings map_port, advertise and listen")
    mend = "turn on UPnP or NAT-PMP in the router, or forward the listening port there by hand"
    return Check("port mapping", "warn", network.mapping_problem, mend)


def check_relays(network: NetworkView) -> Check:
    """Report the relays through which this node can be reached."""
    if network.relays:
        shown = ", ".join(peer[-8:] for peer in network.relays)
        return Check("relays", "ok", f"reachable through {len(network.relays)}: {shown}")
    if network.reach == "unverified":
        return Check("relays", "warn", "no relay is known", "let a member with a public address join, or map a port")
    return Check(
        "relays", "skip", "none is needed" if network.reach == "verified" else "not known yet if one is needed"
    )


def check_ipv6(network: NetworkView) -> Check:
    """Report if this machine has a public IPv6 address, which needs no NAT."""
    addresses = parse_known(network.advertised)
    ours = [address for address in addresses if address.kind == "ip6" and address.scope is Scope.PUBLIC]
    if not ours:
        return Check("ipv6", "skip", "this machine has no public IPv6 address")
    if any(address.kind == "ip6" for address in parse_known(network.verified)):
        return Check("ipv6", "ok", f"peers can dial {ours[0].host}")
    mend = "allow incoming TCP connections to the listening port in the router's IPv6 firewall"
    return Check("ipv6", "warn", f"no peer has dialled {ours[0].host} yet", mend)


def check_public(network: NetworkView) -> Check:
    """Report this node's part in the public directory."""
    public = network.public
    if public is None:
        mend = "`shoal config set discovery mdns,dht,invite,remembered,public` lets others find swarms by name alone"
        return Check("public", "skip", "off, or not used for this swarm", mend)
    used = f"{public.connections} connections, {public.look_ups} look-ups, {public.bytes_used / 1e6:.1f} MB so far"
    if public.published:
        return Check("public", "ok", f"found there under {public.published} keys; {used}")
    if not public.nodes:
        mend = "check this machine's DNS and internet connection, or set other public_entries"
        return Check("public", "warn", f"no node of it answers; {used}", mend)
    mend = "map a port, or let a relay's member join: only addresses that anybody can dial are published"
    return Check("public", "warn", f"not published, as this node has no public address; {used}", mend)


def network_checks(snapshot: Snapshot) -> Iterator[Check]:
    """Yield the picture of how others reach this machine: addresses, router, NAT, relays, IPv6, public directory."""
    network = snapshot.network
    relayed = any("/p2p-circuit" in address for address in network.advertised)
    yield check_listening(snapshot.listen_addrs)
    yield check_addresses(network.advertised, network.verified, network.reach)
    yield check_nat(network.reach, relayed=relayed, relaying=network.relaying)
    yield check_mapping(network)
    yield check_relays(network)
    yield check_ipv6(network)
    yield check_public(network)
    yield check_peers(network.links, len(snapshot.peers), snapshot.swarm, network.discovery)


def check_clock(now_ms: int, last_said_ms: int, ahead_s: float | None) -> Check:
    """Compare the clock with those of connected peers and with the last run of this node.

    `ahead_s` is the clock's lead over the peers', negative if it is behind, 0 if they agree and None if there are none;
    `last_said_ms` is the stored sequence number of this node.
    """
    mend = NEXT_STEPS["clock_off"]
    if now_ms < _BEGINNING_MS:
        return Check("clock", "fail", "the clock shows a time before 2025", mend)
    set_back_s = (last_said_ms - now_ms) / 1000
    if ahead_s:
        detail = f"{format_lead(ahead_s)} the other members"
        if abs(ahead_s) > CLOCK_LIMIT_S:
            refusal = "they refuse what it says" if ahead_s > 0 else "it refuses what they say"
            return Check("clock", "fail", f"{detail}: {refusal}", mend)
        return Check("clock", "warn", detail, mend)
    if set_back_s > CLOCK_TOLERANCE_S:
        return Check("clock", "warn", f"it was set back by {set_back_s:.0f} s since this node last ran", mend)
    return Check(
        "clock",
        "ok",
        "plausible; no member to compare with" if ahead_s is None else "agrees with the other members",
    )


def check_peers(links: int, members: int, swarm: str | None, discovery: Sequence[str]) -> Check:
    """Check that other members of the swarm are known or connected."""
    if swarm is None:
        return Check("peers", "ok", f"{links} connected; the node is in no swarm")
    detail = f"{links} connected, {members} other {'member' if members == 1 else 'members'} of {swarm}"
    if links or members:
        return Check("peers", "ok", detail)
    means = ", ".join(discovery) or "nothing"
    mend = (
        "ask a member for an invite (`shoal invite`), or give the address of one with --peer; "
        "members that have banned this node do not answer it"
    )
    return Check("peers", "warn", f"{detail}; searched by {means}", mend)


def check_peer(peer: PeerView) -> Check:
    """Report the link to one member, and why it is not used if so."""
    name = f"peer {peer.peer[-8:]}"
    rtt = "" if peer.rtt_s is None else f", {peer.rtt_s * 1000:.1f} ms round trip"
    detail = f"{peer.link or 'no link is open'}{rtt}; {peer.state}"
    if peer.unused is None:
        return Check(name, "ok", detail)
    status: Status = "warn" if peer.unused.code in WORRYING else "ok"
    return Check(name, status, f"{detail}; not used: {peer.unused.text}", peer.unused.next_step)


def check_lan(api_host: str, keys: int, url: str = "", fingerprint: str = "") -> Check:
    """Check that an API that other machines reach has keys for them; `url` and `fingerprint` are a running node's."""
    if url:
        return Check("lan", "ok", f"programs with keys reach the API at {url}; certificate SHA-256 {fingerprint}")
    if ipaddress.ip_address(api_host).is_loopback:
        return Check("lan", "ok", "only programs of this machine reach the API")
    if not keys:
        mend = "`shoal keys add NAME` makes a key; `shoal config unset api_host` keeps the API on this machine"
        return Check("lan", "fail", f"the setting api_host is {api_host}, but no program has a key", mend)
    return Check("lan", "ok", f"a node would listen on {api_host} too, with TLS, for {keys} key{'s' * (keys != 1)}")


def check_state(snapshot: Snapshot) -> Check:
    """Report the node's state and its reason, as in `shoal status`."""
    why = snapshot.why
    status: Status = "ok"
    if why is not None:
        is_idle = snapshot.state in ("client", "joining") and why.code not in NORMAL
        status = "fail" if why.code in FAILED else "warn" if is_idle or why.code in TROUBLED else "ok"
    return Check("state", status, f"{snapshot.state}: {snapshot.reason}", "" if why is None else why.next_step)


def running_checks(snapshot: Snapshot, *, now_ms: int, last_said_ms: int, ahead_s: float | None) -> Iterator[Check]:
    """Yield the checks of a running node; its clock is one of them, and no warning besides."""
    network = snapshot.network
    relayed = any("/p2p-circuit" in address for address in network.advertised)
    yield check_state(snapshot)
    for warning in (one for one in snapshot.warnings if one.code != "clock_off"):
        yield Check("warning", "fail" if warning.code in FAILED else "warn", warning.text, warning.next_step)
    yield check_listening(snapshot.listen_addrs)
    yield check_addresses(network.advertised, network.verified, network.reach)
    yield check_nat(network.reach, relayed=relayed, relaying=network.relaying)
    yield check_mapping(network)
    yield check_lan("127.0.0.1", 0, snapshot.lan_url, snapshot.lan_fingerprint)
    yield check_clock(now_ms, last_said_ms, ahead_s)
    yield check_peers(network.links, len(snapshot.peers), snapshot.swarm, network.discovery)
    yield from (check_peer(peer) for peer in snapshot.peers[:MAX_PEERS])


def resting_checks(listen_ports: Sequence[int], api_port: int, *, now_ms: int, last_said_ms: int) -> Iterator[Check]:
    """Yield the checks that are possible while no node runs."""
    for port in dict.fromkeys(port for port in listen_ports if port):
        yield check_port("listen", port, free=is_free("0.0.0.0", port))
    if api_port:
        yield check_port("api", api_port, free=is_free("127.0.0.1", api_port))
    yield check_clock(now_ms, last_said_ms, None)
    yield Check("peers", "skip", "no node runs here: start one with `shoal serve` to check the network")


def is_free(host: str, port: int) -> bool:
    """True if a server could listen on this port now."""
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
