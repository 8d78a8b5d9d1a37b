"""Shoal as a background service of the user's account: a systemd user unit, a launchd agent or a Windows task.

A `ServicePlan` says which file is written and which commands enable, stop and query the service; carrying it out is the
same for all systems. The templates are in `packaging/service`.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from xml.sax.saxutils import escape

from app.config.home import home_folder
from app.core.errors import AppError
from p2p.platform import system_program, write_private

CARRIED = ("SHOAL_CACHE",)  # environment variables passed on to the service; settings belong in the configuration file


@dataclass(frozen=True)
class Service:
    """The service to run: its name, command, home folder and environment variables."""

    name: str
    command: tuple[str, ...]
    home: Path
    environment: tuple[tuple[str, str], ...] = ()


def service_name(home: Path, default_home: Path) -> str:
    """Return `shoal` for the default home; for any other, a name with a hash of its path."""
    return "shoal" if home == default_home else f"shoal-{hashlib.sha256(str(home).encode()).hexdigest()[:8]}"


def template(name: str) -> str:
    """Read a template from this checkout, or from where the wheel installed it; raises `AppError` if it is missing."""
    beside = Path(__file__).resolve().parents[2] / "packaging" / "service" / name
    if beside.is_file():
        return beside.read_text("utf-8")
    for file in importlib.metadata.files("shoal") or ():
        if file.parts[-2:] == ("service", name):
            return Path(str(file.locate())).read_text("utf-8")
    raise AppError(f"the template {name} is missing from this installation: reinstall Shoal")


def systemd_unit(service: Service, text: str) -> str:
    """Fill in the template of a systemd user unit."""
    lines = [f"Environment={_systemd_quoted(f'{name}={value}')}" for name, value in service.environment]
    return Template(text).substitute(
        home_text=_systemd_text(str(service.home)),
        command=" ".join(_systemd_quoted(word, of_command=True) for word in service.command),
        environment="\n".join(lines) or "# No variables are needed.",
    )


def launchd_agent(service: Service, label: str, text: str) -> str:
    """Fill in the template of a launchd agent's property list."""
    variables = [
        f"        <key>{escape(name)}</key>\n        <string>{_xml(value)}</string>"
        for name, value in service.environment
    ]
    return Template(text).substitute(
        label=_xml(label),
        arguments="\n".join(f"        <string>{_xml(word)}</string>" for word in service.command),
        environment="\n".join(variables),
    )


def windows_task(service: Service, user: str, text: str) -> str:
    """Fill in the template of a Windows task.

    A task has no environment of its own, so `SHOAL_CACHE` must be set for the user's account.
    """
    return Template(text).substitute(
        home_text=_xml(str(service.home)),
        user=_xml(user),
        program=_xml(service.command[0]),
        arguments=_xml(subprocess.list2cmdline(service.command[1:])),
    )


def _systemd_quoted(word: str, *, of_command: bool = False) -> str:
    """Quote a word for a unit file, where `%` starts a specifier, and in a command `$` a variable."""
    _require_printable(word)
    text = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{text.replace("$", "$$") if of_command else text}"'


def _systemd_text(text: str) -> str:
    _require_printable(text)
    # A backslash at the end of a line would continue it on the next line.
    return text.replace("%", "%%").rstrip("\\")


def _xml(text: str) -> str:
    _require_printable(text)
    return escape(text, {'"': "&quot;"})


def _require_printable(text: str) -> None:
    if not text.isprintable():
        raise AppError(f"the path {text!r} has characters that are not possible in a service file: use another --home")


_TIMEOUT_S = 90.0  # stopping the service waits until the node has drained
LABEL = "app.shoal"

Command = tuple[str, ...]
Run = Callable[[Sequence[str]], "ServiceResult"]


@dataclass(frozen=True)
class ServiceResult:
    """Exit status and output of a system command."""

    status: int
    text: str = ""


@dataclass(frozen=True)
class ServicePlan:
    """The service file and the commands to manage it on one system."""

    system: str
    file: Path
    content: bytes
    enable: tuple[Command, ...]  # all must succeed
    disable: tuple[Command, ...]  # each may fail, because the service may be gone already
    renew: tuple[Command, ...]  # run after the file is removed
    restart: tuple[Command, ...]  # all must succeed
    query: Command  # exits with 0 while the service runs
    running_text: str = ""  # text in the query's output while it runs, if the status is not enough
    at_boot: Command | None = None  # makes it start before the user logs in; may fail
    boot_hint: str = ""  # tells the user when it starts if that failed or is not possible


def run_command(command: Sequence[str]) -> ServiceResult:
    """Run a system command; a missing program gives status 127, a timeout 124."""
    program = system_program(command[0])
    if program is None:
        return ServiceResult(127, f"{command[0]} is not installed")
    try:
        done = subprocess.run(
            [program, *command[1:]],
            capture_output=True,
            text=True,
            errors="replace",  # programs of Windows write in another code page than Python expects
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return ServiceResult(124, f"{command[0]} did not answer within {_TIMEOUT_S:.0f} s")
    return ServiceResult(done.returncode, " ".join((done.stderr or done.stdout).split()))


def service_of(home: Path, environment: Mapping[str, str]) -> Service:
    """Return the service for a home folder, started by the same installation as this command."""
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
    """Return the home folder that is used without `--home` and `SHOAL_HOME`."""
    chosen = os.environ.pop("SHOAL_HOME", None)
    try:
        return home_folder()
    finally:
        if chosen is not None:
            os.environ["SHOAL_HOME"] = chosen


def plan_for(service: Service, platform: str, user_folder: Path) -> ServicePlan:
    """Return the plan for this system; raises `AppError` if services are not supported on it."""
    if platform == "darwin":
        return _launchd(service, user_folder)
    if platform == "win32":
        return _windows(service)
    if has_service(platform):
        return _systemd(service, user_folder)
    raise AppError(f"services are not supported on {platform}: start `shoal serve` with the system's own tools")


def _systemd(service: Service, user_folder: Path) -> ServicePlan:
    unit = f"{service.name}.service"
    base = Path(os.environ.get("XDG_CONFIG_HOME") or user_folder / ".config")
    user = getpass.getuser()
    control = ("systemctl", "--user")
    return ServicePlan(
        system="systemd",
        file=base / "systemd" / "user" / unit,
        content=systemd_unit(service, template("shoal.service")).encode(),
        enable=((*control, "daemon-reload"), (*control, "enable", unit), (*control, "restart", unit)),
        disable=((*control, "disable", "--now", unit),),
        renew=((*control, "daemon-reload"),),
        restart=((*control, "restart", unit),),
        query=(*control, "is-active", "--quiet", unit),
        at_boot=("loginctl", "enable-linger", user),
        boot_hint=f"it starts when {user} logs in; to start it with the machine: `sudo loginctl enable-linger {user}`",
    )


def _launchd(service: Service, user_folder: Path) -> ServicePlan:
    label = service.name.replace("shoal", LABEL, 1)
    file = user_folder / "Library" / "LaunchAgents" / f"{label}.plist"
    domain = f"gui/{os.getuid() if hasattr(os, 'getuid') else 0}"
    gone = ("launchctl", "bootout", f"{domain}/{label}")
    return ServicePlan(
        system="launchd",
        file=file,
        content=launchd_agent(service, label, template("shoal.plist")).encode(),
        enable=(("launchctl", "bootstrap", domain, str(file)),),
        disable=(gone,),
        renew=(),
        restart=(("launchctl", "kickstart", "-k", f"{domain}/{label}"),),
        query=("launchctl", "print", f"{domain}/{label}"),
        running_text="state = running",
        boot_hint="it starts when you log in",
    )


def _windows(service: Service) -> ServicePlan:
    name = service.name.capitalize()
    user = f"{os.environ['USERDOMAIN']}\\{getpass.getuser()}" if "USERDOMAIN" in os.environ else getpass.getuser()
    file = service.home / f"{service.name}.xml"
    return ServicePlan(
        system="Task Scheduler",
        file=file,
        content=windows_task(service, user, template("shoal.xml")).encode("utf-16"),
        enable=(("schtasks", "/Create", "/TN", name, "/XML", str(file), "/F"), ("schtasks", "/Run", "/TN", name)),
        disable=(("schtasks", "/End", "/TN", name), ("schtasks", "/Delete", "/TN", name, "/F")),
        renew=(),
        restart=(("schtasks", "/End", "/TN", name), ("schtasks", "/Run", "/TN", name)),
        query=("schtasks", "/Query", "/TN", name, "/FO", "LIST"),
        running_text="Running",
        boot_hint="it starts when you log in",
    )


def has_service(platform: str) -> bool:
    """True if services are supported on this system."""
    return platform in ("darwin", "win32") or platform.startswith("linux")


def restart(plan: ServicePlan, run: Run = run_command) -> None:
    """Restart a running service; raises `AppError` if the system refuses."""
    for command in plan.restart:
        outcome = run(command)
        if outcome.status != 0:
            raise AppError(f"{plan.system} did not restart the service: {outcome.text or outcome.status}")


def install(plan: ServicePlan, run: Run = run_command) -> str:
    """Write the file and enable the service; return a sentence about when it starts.

    Raises `AppError`, with the file and the folders made for it removed again, if the system refuses.
    """
    for command in plan.disable if plan.file.exists() else ():
        run(command)  # replaces an older one
    made = [folder for folder in plan.file.parents if not folder.exists()]
    plan.file.parent.mkdir(parents=True, exist_ok=True)
    write_private(plan.file, plan.content)
    for command in plan.enable:
        outcome = run(command)
        if outcome.status != 0:
            plan.file.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # another program may use one of them by now
                for folder in made:
                    folder.rmdir()
            raise AppError(
                f"{plan.system} refused the service ({' '.join(command[:3])}: {outcome.text or outcome.status}); "
                "nothing was installed"
            )
    if plan.at_boot is not None and run(plan.at_boot).status == 0:
        return "it starts with the machine"
    return plan.boot_hint


def uninstall(plan: ServicePlan, run: Run = run_command) -> bool:
    """Stop the service and remove its file; False if there is none."""
    if not plan.file.exists():
        return False
    for command in plan.disable:
        run(command)
    plan.file.unlink(missing_ok=True)
    for command in plan.renew:
        run(command)
    return True


def is_running(plan: ServicePlan, run: Run = run_command) -> bool:
    """True if the service is running now."""
    if not plan.file.exists():
        return False
    outcome = run(plan.query)
    return outcome.status == 0 and plan.running_text in outcome.text
