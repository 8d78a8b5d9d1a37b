"""`shoal service`: has the operating system start this node; `app.system.service` knows how."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from app.cli.command import Command, print_json
from app.core.errors import AppError
from p2p.platform import private_directory

if TYPE_CHECKING:
    from app.system.service import ServicePlan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the action."""
    words = "install: start the node now and after each restart; uninstall: stop and remove it; status: show it"
    parser.add_argument("action", choices=("install", "uninstall", "status"), help=words)


def run_service(arguments: argparse.Namespace) -> int:
    """Install, remove or show the service of this home folder."""
    from app.system import service

    plan = plan_here(arguments.home)
    text = ""
    if arguments.action == "install":
        _warn_of_variables()
        is_new = not arguments.home.exists()
        private_directory(arguments.home)
        try:
            text = f"installed and started; {service.install(plan)}"
        except AppError:
            if is_new:
                with contextlib.suppress(OSError):  # a node may have begun to use it
                    arguments.home.rmdir()
            raise
    elif arguments.action == "uninstall":
        text = "removed" if service.uninstall(plan) else "no service was installed"
    installed, running = plan.file.exists(), service.is_running(plan)
    if arguments.json:
        file = str(plan.file) if installed else None
        print_json(
            {
                "system": plan.system,
                "installed": installed,
                "running": running,
                "file": file,
                "home": str(arguments.home),
            }
        )
    elif arguments.action == "status":
        state = "running" if running else "not running"
        print(f"{plan.system}: {f'installed, {state}: {plan.file}' if installed else 'not installed'}")
    else:
        print(f"{plan.system}: {text}")
    return 0


def plan_here(home: Path) -> ServicePlan:
    """Return how this operating system starts this home folder's node."""
    from app.system.service import plan_for, service_of

    return plan_for(service_of(home, os.environ), sys.platform, Path.home())


def _warn_of_variables() -> None:
    """Warn of settings in this shell's environment: the service does not see them."""
    from app.config.settings import SETTINGS

    lost = [setting.variable for setting in SETTINGS.values() if setting.variable in os.environ]
    if lost:
        print(f"shoal: the service does not see {', '.join(lost)}: use `shoal config set` instead", file=sys.stderr)


COMMANDS = (Command("service", "have the system start this node automatically", run_service, add_arguments, True),)
