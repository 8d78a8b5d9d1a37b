"""`shoal restart`: stops the node and starts it again, by the system's service or in the background."""

from __future__ import annotations

import argparse
import sys
import time

from app.cli.command import Command, print_json
from app.cli.dashboard import HomeConnector
from app.cli.pause import stop_node, warn_sole_holder
from app.cli.service import plan_here

_START_S = 60.0
_POLL_S = 0.1


def run_restart(arguments: argparse.Namespace) -> int:
    """Stop the node if one runs, then start it: by the system's service if that ran it, else in the background.

    A node in the background has the settings of the configuration file, not the options of an earlier `shoal serve`.
    """
    from app.config.home import Home, find_node
    from app.system import service

    was_running = find_node(Home(arguments.home)) is not None
    plan = plan_here(arguments.home) if service.has_service(sys.platform) else None
    if plan is not None and service.is_running(plan):
        warn_sole_holder(arguments.home)
        service.restart(plan)
        how = f"by {plan.system}"
    else:
        if was_running:
            warn_sole_holder(arguments.home)
            stop_node(arguments.home)
        connector = HomeConnector(arguments.home)
        connector.start()
        _wait_started(connector)
        how = "in the background"
    if arguments.json:
        print_json({"state": "started", "how": how})
    else:
        done = "restarted" if was_running else "no node was running: started one"
        print(f"{done} {how}; `shoal status` shows it")
    return 0


def _wait_started(connector: HomeConnector) -> None:
    from app.api.client import running_client
    from app.core.errors import AppError

    deadline = time.monotonic() + _START_S
    while running_client(connector.folder) is None:
        if (trouble := connector.ended()) is not None:
            raise AppError(trouble)
        if time.monotonic() > deadline:
            raise AppError(f"the node did not start within {_START_S:.0f} s: look at `shoal logs`")
        time.sleep(_POLL_S)


COMMANDS = (Command("restart", "stop the node and start it again", run_restart, prints_facts=True),)
