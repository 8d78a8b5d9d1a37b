"""`shoal serve`: runs the node in the foreground.

This module reads the settings and prepares the process; `app.node.node.Node` is the node.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from typing import TYPE_CHECKING

from app.cli.command import Command
from app.cli.parser import size_argument

if TYPE_CHECKING:
    from app.config.file import Config
    from app.config.home import Home
    from app.snapshot.views import Snapshot

LOG_LEVELS = ("debug", "info", "warning", "error")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that override settings, and --join."""
    words = "a swarm's name, an invite, a file with one, or - for stdin (default: the last active swarm)"
    parser.add_argument("--join", metavar="NAME", help=words)
    parser.add_argument("--blocks", metavar="A:B", help="host exactly these blocks (default: the node chooses)")
    parser.add_argument("--device", metavar="D", help="cpu, cuda, cuda:1, … (default: the best available)")
    parser.add_argument(
        "--max-vram", metavar="SIZE", type=size_argument, help="memory limit for hosting, like 6GB; 0 hosts nothing"
    )
    parser.add_argument("--listen", metavar="ADDR", action="append", help="like /ip4/0.0.0.0/tcp/7464 (repeatable)")
    words = "announce this address instead of the detected ones (repeatable)"
    parser.add_argument("--advertise", metavar="MULTIADDR", action="append", help=words)
    parser.add_argument(
        "--discovery", metavar="MEANS", help="any of mdns,dht,invite,remembered,public, separated by commas"
    )
    parser.add_argument("--peer", metavar="MULTIADDR", action="append", help="connect to this peer (repeatable)")
    parser.add_argument("--api-port", metavar="P", type=int, help="the control API's port; 0 means any free one")
    parser.add_argument("--log-level", choices=LOG_LEVELS, help="level of the log file and stderr")
    parser.add_argument("--log-json", action="store_true", default=None, help="log one JSON object per line")


def run_serve(arguments: argparse.Namespace) -> int:
    """Run the node until it is asked to stop."""
    from app.cli.swarms import INVITE_VARIABLE, read_target
    from app.config.home import Home, hold
    from app.joining.targets import target_swarm
    from app.swarm.saved import load
    from app.system.logs import start_logging

    wanted = arguments.join if arguments.join is not None or INVITE_VARIABLE in os.environ else ""
    target = read_target(wanted) if wanted != "" else None
    home = Home.open(arguments.home)
    with hold(home):
        config = configure(home, arguments)
        if target is not None:
            target_swarm(load(home), target)  # raises for a bad target before the slow imports
        start_logging(home.log_folder, arguments.log_level, as_json=config.settings.log_json)
        warn_of_device(config)
        live(home, config, target)
    return 0


def warn_of_device(config: Config) -> None:
    """Log a warning if the device that the user chose does not exist here; the node runs on, and hosts nothing."""
    name = config.settings.device
    if name in ("auto", "cpu") or config.settings.max_vram == 0:
        return
    from engine.device.probe import chosen_devices, probe_devices
    from engine.errors import DeviceError

    try:
        chosen_devices(name, probe_devices())
    except DeviceError as error:
        logging.getLogger("shoal.node").warning("%s; until then this node hosts nothing", error)


def live(home: Home, config: Config, target: str | None) -> None:
    """Run the node until it ends; an error is logged with its traceback at level debug, and raised."""
    log = logging.getLogger("shoal.node")
    for name in config.unknown:
        log.warning("%s: unknown setting %r is ignored", home.config_file, name)
    from app.config.home import cache_folder

    say_step("the node is starting")
    bind_threads()
    # Compiled kernels are kept with the models, so that later starts find them.
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache_folder() / "kernels"))
    import trio

    from app.node.node import Node
    from p2p.platform import allow_open_files, keep_freed_memory

    # The event loop shares the interpreter with computing threads: the default makes it wait 5 ms for each turn.
    sys.setswitchinterval(0.0005)
    keep_freed_memory()
    allow_open_files()
    try:
        trio.run(Node(home, config, cache_folder(), say_ready, say_step).run, target)
    except Exception:
        log.debug("the node ended with an error", exc_info=True)
        raise


def bind_threads() -> None:
    """Bind each of torch's threads to a core of its own, by environment variables that OpenMP reads when torch loads.

    A hop computes in bursts. By default the system wakes these threads on one core and spreads them only after many
    milliseconds. Nodes of one machine start at different cores, so that their first threads do not share one.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) > 1 and "OMP_PROC_BIND" not in os.environ and "OMP_PLACES" not in os.environ:
        first = os.getpid() % len(cores)
        places = ",".join(f"{{{core}}}" for core in cores[first:] + cores[:first])
        os.environ.update(OMP_PROC_BIND="true", OMP_PLACES=places)


def configure(home: Home, arguments: argparse.Namespace) -> Config:
    """Return the settings in force: the file, which is created or migrated first, the environment and the flags."""
    from app.config.file import ensure_file, load_config, migrate, setting_named

    backup = migrate(home.config_file)
    if backup is not None:
        print(f"shoal: the configuration was updated; its old version is in {backup}", file=sys.stderr)
    ensure_file(home.config_file)
    discovery = None if arguments.discovery is None else setting_named("discovery").parse(arguments.discovery)
    flags = {
        "listen": _many(arguments.listen),
        "advertise": _many(arguments.advertise),
        "peers": _many(arguments.peer),
        "discovery": discovery,
        "api_port": arguments.api_port,
        "blocks": arguments.blocks,
        "device": arguments.device,
        "max_vram": arguments.max_vram,
        "log_json": arguments.log_json,
    }
    return load_config(home.config_file, os.environ).with_flags(flags)


def _many(values: list[str] | None) -> tuple[str, ...] | None:
    return None if values is None else tuple(values)


def say_step(text: str) -> None:
    """Tell whoever watches the terminal what the node does until it is ready, which can take minutes."""
    if sys.stderr.isatty():
        print(f"shoal: {text}", file=sys.stderr, flush=True)


def say_ready(snapshot: Snapshot) -> None:
    """Print the `ready` line that scripts wait for, with the reason if the node hosts nothing."""
    from app.swarm.names import pinned

    swarm = "none" if snapshot.swarm is None else pinned(snapshot.swarm, snapshot.manifest or "")
    why = "" if snapshot.state == "serving" else f" ({snapshot.reason})"
    lan = f" lan={snapshot.lan_url}" if snapshot.lan_url else ""
    print(f"ready {snapshot.state} swarm={swarm} peer={snapshot.peer_id} api={snapshot.api_url}{lan}{why}", flush=True)


COMMANDS = (Command("serve", "run the node in the foreground", run_serve, add_arguments),)
