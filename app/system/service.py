"""Shoal as a service of the person's own account: a systemd user unit, a launchd agent or a Windows task.

A plan says which file is written and which commands make it known; carrying it out is the same for all systems. What
stands in the file is for `app.system.service_files`.
"""

from __future__ import annotations

import getpass
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from app.config.places import home_folder
from app.core.errors import AppError
from app.system.service_files import CARRIED, Service, launchd_agent, service_name, systemd_unit, template, windows_task
from p2p.platform import write_private

_PATIENCE_S = 90.0  # stopping a node lets it drain
LABEL = "app.shoal"

Command = tuple[str, ...]
Run = Callable[[Sequence[str]], "Outcome"]


@dataclass(frozen=True)
class Outcome:
    """How a command of the system ended, and what it said."""

    status: int
    text: str = ""


@dataclass(frozen=True)
class Plan:
    """How one system starts Shoal."""

    system: str
    file: Path
    content: bytes
    enable: tuple[Command, ...]  # each must succeed
    disable: tuple[Command, ...]  # each may fail: it may be gone already
    renew: tuple[Command, ...]  # after the file is gone
    query: Command  # succeeds while it runs
    running_text: str = ""  # what the query then says, where its status does not tell
    at_boot: Command | None = None  # lets it start before anybody logs in; may fail
    boot_hint: str = ""  # what to do where that failed, or cannot be


def run_command(command: Sequence[str]) -> Outcome:
    """Run a command of the system to its end."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    except FileNotFoundError:
        return Outcome(127, f"{command[0]} is not installed")
    except subprocess.TimeoutExpired:
        return Outcome(124, f"{command[0]} did not answer within {_PATIENCE_S:.0f} s")
    return Outcome(done.returncode, " ".join((done.stderr or done.stdout).split()))


def service_of(home: Path, environment: Mapping[str, str]) -> Service:
    """The service of a home folder, started as this very command was."""
    beside = Path(sys.executable).with_name("shoal.exe" if os.name == "nt" else "shoal")
    windowless = Path(sys.executable).with_name("pythonw.exe")
    if os.name == "nt" and windowless.exists():
        start: tuple[str, ...] = (str(windowless), "-P", "-m", "app.cli")
    elif beside.exists():
        start = (str(beside),)
    else:
        start = (sys.executable, "-P", "-m", "app.cli")
    carried = tuple((name, environment[name]) for name in CARRIED if environment.get(name))
    return Service(service_name(home, home_folder_default()), (*start, "--home", str(home), "serve"), home, carried)


def home_folder_default() -> Path:
    """The home that a command uses when nobody names one."""
    kept = os.environ.pop("SHOAL_HOME", None)
    try:
        return home_folder()
    finally:
        if kept is not None:
            os.environ["SHOAL_HOME"] = kept


def plan_for(service: Service, platform: str, user_folder: Path) -> Plan:
    """What to do on this system; raises `AppError` where Shoal knows none of its means."""
    if platform == "darwin":
        return _launchd(service, user_folder)
    if platform == "win32":
        return _windows(service)
    if platform.startswith("linux"):
        return _systemd(service, user_folder)
    raise AppError(f"no service is known for {platform}: start `shoal serve` by the system's own means")


def _systemd(service: Service, user_folder: Path) -> Plan:
    unit = f"{service.name}.service"
    base = Path(os.environ.get("XDG_CONFIG_HOME") or user_folder / ".config")
    user = getpass.getuser()
    control = ("systemctl", "--user")
    return Plan(
        system="systemd",
        file=base / "systemd" / "user" / unit,
        content=systemd_unit(service, template("shoal.service")).encode(),
        enable=((*control, "daemon-reload"), (*control, "enable", unit), (*control, "restart", unit)),
        disable=((*control, "disable", "--now", unit),),
        renew=((*control, "daemon-reload"),),
        query=(*control, "is-active", "--quiet", unit),
        at_boot=("loginctl", "enable-linger", user),
        boot_hint=f"it starts when {user} logs in; `sudo loginctl enable-linger {user}` lets it start with the machine",
    )


def _launchd(service: Service, user_folder: Path) -> Plan:
    label = service.name.replace("shoal", LABEL, 1)
    file = user_folder / "Library" / "LaunchAgents" / f"{label}.plist"
    domain = f"gui/{os.getuid() if hasattr(os, 'getuid') else 0}"
    gone = ("launchctl", "bootout", f"{domain}/{label}")
    return Plan(
        system="launchd",
        file=file,
        content=launchd_agent(service, label, template("shoal.plist")).encode(),
        enable=(("launchctl", "bootstrap", domain, str(file)),),
        disable=(gone,),
        renew=(),
        query=("launchctl", "print", f"{domain}/{label}"),
        running_text="state = running",
        boot_hint="it starts when you log in",
    )


def _windows(service: Service) -> Plan:
    name = service.name.capitalize()
    user = f"{os.environ['USERDOMAIN']}\\{getpass.getuser()}" if "USERDOMAIN" in os.environ else getpass.getuser()
    file = service.home / f"{service.name}.xml"
    return Plan(
        system="Task Scheduler",
        file=file,
        content=windows_task(service, user, template("shoal.xml")).encode("utf-16"),
        enable=(("schtasks", "/Create", "/TN", name, "/XML", str(file), "/F"), ("schtasks", "/Run", "/TN", name)),
        disable=(("schtasks", "/End", "/TN", name), ("schtasks", "/Delete", "/TN", name, "/F")),
        renew=(),
        query=("schtasks", "/Query", "/TN", name, "/FO", "LIST"),
        running_text="Running",
        boot_hint="it starts when you log in",
    )


def install(plan: Plan, run: Run = run_command) -> str:
    """Write the file and make it known; returns what a person should know about when it starts."""
    for command in plan.disable if plan.file.exists() else ():
        run(command)  # an older one
    plan.file.parent.mkdir(parents=True, exist_ok=True)
    write_private(plan.file, plan.content)
    for command in plan.enable:
        outcome = run(command)
        if outcome.status != 0:
            plan.file.unlink(missing_ok=True)
            raise AppError(
                f"{plan.system} did not take the service ({' '.join(command[:3])}: {outcome.text or outcome.status}); "
                "nothing was installed"
            )
    if plan.at_boot is not None and run(plan.at_boot).status == 0:
        return "it starts with the machine"
    return plan.boot_hint


def uninstall(plan: Plan, run: Run = run_command) -> bool:
    """Stop the service and remove its file; whether there was one."""
    if not plan.file.exists():
        return False
    for command in plan.disable:
        run(command)
    plan.file.unlink(missing_ok=True)
    for command in plan.renew:
        run(command)
    return True


def is_running(plan: Plan, run: Run = run_command) -> bool:
    """Whether the system runs it now."""
    if not plan.file.exists():
        return False
    outcome = run(plan.query)
    return outcome.status == 0 and plan.running_text in outcome.text
