"""`shoal doctor`: checks this machine and says what to fix.

`app.system.doctor` judges; this module gathers what is judged, and prints the results.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.cli.command import Command, print_json
from app.cli.parser import size_argument
from app.core.wall_clock import wall_ms

if TYPE_CHECKING:
    from app.config.settings import Settings
    from app.system.doctor import Check
    from engine.device.probe import Device
    from engine.sources.base import ModelSource


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model to size the devices for, the memory limit to assume, and the bug report."""
    parser.add_argument("--model", metavar="MODEL", help="show how many blocks of MODEL fit (default: each cached one)")
    words = "assume this memory limit, like 6GB (default: the setting max_vram)"
    parser.add_argument("--max-vram", metavar="SIZE", type=size_argument, help=words)
    words = "show only how others reach this machine: router, NAT, relays, IPv6, public directory"
    parser.add_argument("--network", action="store_true", help=words)
    words = "write a zip for a bug report: checks, state of the last ten minutes, devices, settings, log; no secrets"
    parser.add_argument("--bundle", metavar="FILE", type=Path, help=words)


def run_doctor(arguments: argparse.Namespace) -> int:
    """Print each check as it is made, or all of them as JSON; exit status 1 if one failed."""
    devices: list[Device] = []
    checks: list[Check] = []
    for check in examine_reach(arguments.home) if arguments.network else examine(arguments, devices):
        checks.append(check)
        if not arguments.json:
            print_check(check)
    failed = [check.name for check in checks if check.status == "fail"]
    facts: dict[str, Any] = {
        "ok": not failed,
        "checks": [dataclasses.asdict(check) for check in checks],
        "devices": [dataclasses.asdict(device) for device in devices],
    }
    if arguments.bundle is not None:
        facts["bundle"] = bundle(arguments, facts)
    if arguments.json:
        print_json(facts)
    elif arguments.bundle is not None:
        print(f"{arguments.bundle} contains the following; read it before you share it:")
        print("\n".join(f"  {line}" for line in facts["bundle"]))
    if failed:
        print(f"shoal: doctor found what stops Shoal from working: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def bundle(arguments: argparse.Namespace, facts: dict[str, Any]) -> list[str]:
    """Write the zip for a bug report; return one line for each file in it."""
    import importlib.metadata

    from app.api.client import running_client
    from app.config.file import load_config
    from app.config.home import Home
    from app.config.settings import SETTINGS
    from app.core.errors import AppError
    from app.system.bug_report import about, write_bundle

    home = Home(arguments.home)
    contents: dict[str, Any] = {
        "about": about(importlib.metadata.version("shoal")),
        "doctor": facts["checks"],
        "devices": facts["devices"],
    }
    recording: list[dict[str, Any]] = []
    try:
        config = load_config(home.config_file, os.environ)
        contents["settings"] = [config.facts(name) for name in SETTINGS]
        client = running_client(arguments.home)
        if client is not None:
            contents["snapshot"] = client.get("/control/snapshot")
            recording = client.get("/control/recording")
    except AppError as error:
        contents["trouble"] = str(error)
    return write_bundle(arguments.bundle, home, contents, recording)


def examine(arguments: argparse.Namespace, devices: list[Device]) -> Iterator[Check]:
    """Yield all checks of this machine; the devices found are added to `devices`."""
    from app.config.home import cache_folder
    from app.system.doctor import check_driver, check_python, disk_of
    from engine.device.sensors import driver_version, nvidia_cards

    yield check_python(sys.version_info[:3], f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield disk_of(cache_folder())
    yield check_driver(driver_version(), len(nvidia_cards()))
    yield from examine_devices(arguments, devices)
    yield from examine_home(arguments.home)
    yield from examine_network(arguments.home)


def examine_home(folder: Path) -> Iterator[Check]:
    """Yield the checks of the settings, and of the sensors that the courtesy rules need."""
    from app.config.file import load_config
    from app.config.home import Home
    from app.config.settings import Settings
    from app.core.errors import AppError
    from app.system.doctor import check_sensor, check_settings

    path = Home(folder).config_file
    try:
        config = load_config(path, os.environ)
        settings = config.settings
        yield check_settings(path, config.unknown)
    except AppError as error:
        settings = Settings()
        yield check_settings(path, (), str(error))
    from app.config.home import cache_folder
    from app.courtesy.watch import look_once

    for rule, view in look_once(settings, cache_folder()):
        yield check_sensor(view, rule.setting)


def settings_of(folder: Path) -> Settings:
    """Return the settings of a home; the defaults if its file is wrong, which `examine_home` reports."""
    from app.config.file import load_config
    from app.config.home import Home
    from app.config.settings import Settings
    from app.core.errors import AppError

    try:
        return load_config(Home(folder).config_file, os.environ).settings
    except AppError:
        return Settings()


def examine_devices(arguments: argparse.Namespace, devices: list[Device]) -> Iterator[Check]:
    """Yield the checks of torch and of the devices that it can use."""
    from app.system.doctor import check_torch, examine_machine

    try:
        import torch
    except (ImportError, OSError) as error:  # a missing or mismatched shared library is an OSError
        yield check_torch(None, str(error))
        return
    yield check_torch(f"{torch.__version__} with {torch.get_num_threads()} threads")
    from engine.device.probe import probe_devices

    devices += probe_devices()
    settings = settings_of(arguments.home)
    cap_bytes = settings.max_vram if arguments.max_vram is None else arguments.max_vram
    yield from examine_machine(devices, wanted_models(arguments.model), cap_bytes, settings.weights, settings.cache)


def examine_network(folder: Path) -> Iterator[Check]:
    """Yield the checks of the network: the running node's, or those that need no node."""
    from app.api.client import running_client
    from app.config.file import load_config
    from app.config.home import Home, read_sequence
    from app.config.keys import read_keys
    from app.core.errors import AppError
    from app.system.doctor import Check, check_lan, resting_checks
    from p2p.addresses import parse_address

    try:
        client = running_client(folder)
        if client is not None:
            yield from (Check(**line) for line in client.get("/control/doctor"))
            return
        home = Home(folder)
        settings = load_config(home.config_file, os.environ).settings
        yield check_lan(settings.api_host, len(read_keys(home.keys_file)))
    except AppError as error:
        yield Check("network", "fail", str(error), "fix this first, then run `shoal doctor` again")
        return
    ports = [parse_address(text).port for text in settings.listen]
    now_ms = wall_ms()
    yield from resting_checks(ports, settings.api_port, now_ms=now_ms, last_said_ms=read_sequence(home))


def examine_reach(folder: Path) -> Iterator[Check]:
    """Yield how others reach this machine, according to the running node; without one, what needs no node."""
    from app.api.client import running_client
    from app.core.errors import AppError
    from app.snapshot.codec import snapshot_from
    from app.system.doctor import Check, network_checks

    try:
        client = running_client(folder)
        if client is not None:
            yield from network_checks(snapshot_from(client.get("/control/snapshot")))
            return
    except AppError as error:
        yield Check("network", "fail", str(error), "fix this first, then run `shoal doctor --network` again")
        return
    yield from examine_network(folder)


def wanted_models(name: str | None) -> Mapping[str, ModelSource]:
    """Return the models to size devices for: the named one, or every intact one in the cache."""
    from app.cli.models import cached_models
    from app.config.home import cache_folder
    from engine.errors import SourceError
    from engine.sources.opening import BUILT_IN, open_source

    cached = {facts.name: source for facts, source in cached_models() if source is not None}
    if name is None or name in cached:
        return cached if name is None else {name: cached[name]}
    if name in BUILT_IN:
        raise SourceError(f"{name} is not in the cache: `shoal pull {name}` downloads it")
    return {name: open_source(name, cache_folder())}


def print_check(check: Check) -> None:
    """Print a check on one line, with the fix on the next."""
    status = "\N{EN DASH}" if check.status == "skip" else check.status
    print(f"{status:<5} {check.name:<22} {check.detail}", flush=True)
    if check.mend:
        print(f"{'':<29}→ {check.mend}", flush=True)


COMMANDS = (Command("doctor", "check this machine and say what to fix", run_doctor, add_doctor_arguments, True),)
