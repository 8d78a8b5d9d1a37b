"""`shoal serve`: the node, in the foreground."""

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
    """How this node takes part; what is not given comes from the configuration."""
    words = "a swarm's name, an invite, a file that holds one, or - to read it (default: the last active swarm)"
    parser.add_argument("--join", metavar="NAME", help=words)
    parser.add_argument("--blocks", metavar="A:B", help="host exactly these (default: the node chooses by itself)")
    parser.add_argument("--device", metavar="D", help="cpu, cuda, cuda:1, … (default: the best there is)")
    parser.add_argument(
        "--max-vram", metavar="SIZE", type=size_argument, help="the most memory to host with, like 6GB; 0: host nothing"
    )
    parser.add_argument("--listen", metavar="ADDR", action="append", help="like /ip4/0.0.0.0/tcp/7464 (repeatable)")
    parser.add_argument("--advertise", metavar="MULTIADDR", action="append", help="told to others instead of guesses")
    parser.add_argument("--discovery", metavar="MEANS", help="some of mdns,dht,invite,remembered")
    parser.add_argument("--peer", metavar="MULTIADDR", action="append", help="connect to this peer (repeatable)")
    parser.add_argument("--api-port", metavar="P", type=int, help="the control API's port; 0 is any free one")
    parser.add_argument("--log-level", choices=LOG_LEVELS, help="for the log file and stderr")
    parser.add_argument("--log-json", action="store_true", default=None, help="log one JSON object a line")


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
            target_swarm(load(home), target)  # what makes no sense is said before anything heavy is loaded
        start_logging(home.log_folder, arguments.log_level, as_json=config.settings.log_json)
        live(home, config, target)
    return 0


def live(home: Home, config: Config, target: str | None) -> None:
    """The node's whole life; an error that nobody foresaw is in the log with all that is known of it."""
    log = logging.getLogger("shoal.node")
    for name in config.unknown:
        log.warning("%s: there is no setting %r; the line is ignored", home.config_file, name)
    import trio

    from app.config.home import cache_folder
    from app.node.node import Node
    from p2p.platform import keep_freed_memory

    # The loop must get its turn soon beside the threads that compute: the default costs it 5 ms each time.
    sys.setswitchinterval(0.0005)
    keep_freed_memory()
    bind_threads()
    try:
        trio.run(Node(home, config, cache_folder(), on_ready=say_ready).run, target)
    except Exception:
        log.debug("the node ended with an error", exc_info=True)
        raise


def bind_threads() -> None:
    """Give each of torch's threads a core of its own; read when torch is loaded, later.

    A hop computes in bursts. Left to itself the system wakes those threads on one core and parts them only after many
    milliseconds. Nodes of one machine begin at different cores, so that their first threads do not meet.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) > 1 and "OMP_PROC_BIND" not in os.environ and "OMP_PLACES" not in os.environ:
        first = os.getpid() % len(cores)
        places = ",".join(f"{{{core}}}" for core in cores[first:] + cores[:first])
        os.environ.update(OMP_PROC_BIND="true", OMP_PLACES=places)


def configure(home: Home, arguments: argparse.Namespace) -> Config:
    """The settings in force: the file, which is written or migrated first, the environment, and the flags."""
    from app.config.file import ensure_file, load_config, migrate, setting_named

    kept = migrate(home.config_file)
    if kept is not None:
        print(f"shoal: the configuration was brought up to date; its former text is in {kept}", file=sys.stderr)
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


def say_ready(snapshot: Snapshot) -> None:
    """The one line that scripts wait for; a node that hosts nothing says why."""
    swarm = "none" if snapshot.swarm is None else f"{snapshot.swarm}#{(snapshot.manifest or '')[:8]}"
    why = "" if snapshot.state == "serving" else f" ({snapshot.reason})"
    print(f"ready {snapshot.state} swarm={swarm} peer={snapshot.peer_id} api={snapshot.api_url}{why}", flush=True)


COMMANDS = (Command("serve", "run the node in the foreground", run_serve, add_arguments),)
