"""The files that make a system start Shoal: from the templates in `packaging/service` to text, quoted as each demands.

Pure but for finding the templates. No secret goes into them: a node finds its swarms and their secrets in its home.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import subprocess
from dataclasses import dataclass
from pathlib import Path
from string import Template
from xml.sax.saxutils import escape

from app.core.errors import AppError

CARRIED = ("SHOAL_CACHE",)  # variables that a service keeps; settings belong into the configuration file


@dataclass(frozen=True)
class Service:
    """What is to be started: its name, the command, and the few variables that it needs."""

    name: str
    command: tuple[str, ...]
    home: Path
    environment: tuple[tuple[str, str], ...] = ()


def service_name(home: Path, default_home: Path) -> str:
    """`shoal` for the usual home, and a name of its own for every other."""
    return "shoal" if home == default_home else f"shoal-{hashlib.sha256(str(home).encode()).hexdigest()[:8]}"


def template(name: str) -> str:
    """A template's text: from this checkout, or from where the wheel put it."""
    beside = Path(__file__).resolve().parents[2] / "packaging" / "service" / name
    if beside.is_file():
        return beside.read_text("utf-8")
    for file in importlib.metadata.files("shoal") or ():
        if file.parts[-2:] == ("service", name):
            return Path(str(file.locate())).read_text("utf-8")
    raise AppError(f"the template {name} is missing from this installation: install Shoal anew")


def systemd_unit(service: Service, text: str) -> str:
    """A user unit."""
    lines = [f"Environment={_systemd_quoted(f'{name}={value}')}" for name, value in service.environment]
    return Template(text).substitute(
        home_text=_systemd_text(str(service.home)),
        command=" ".join(_systemd_quoted(word, of_command=True) for word in service.command),
        environment="\n".join(lines) or "# No variables are needed.",
    )


def launchd_agent(service: Service, label: str, text: str) -> str:
    """An agent's property list."""
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
    """A scheduled task; it has no variables of its own, so that a cache elsewhere must be set for the whole user."""
    return Template(text).substitute(
        home_text=_xml(str(service.home)),
        user=_xml(user),
        program=_xml(service.command[0]),
        arguments=_xml(subprocess.list2cmdline(service.command[1:])),
    )


def _systemd_quoted(word: str, *, of_command: bool = False) -> str:
    """A word between quotes; `%` is always a specifier's beginning there, `$` a variable's in a command."""
    _demand_printable(word)
    text = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{text.replace("$", "$$") if of_command else text}"'


def _systemd_text(text: str) -> str:
    _demand_printable(text)
    # A backslash at the end of a line would join the next one to it.
    return text.replace("%", "%%").rstrip("\\")


def _xml(text: str) -> str:
    _demand_printable(text)
    return escape(text, {'"': "&quot;"})


def _demand_printable(text: str) -> None:
    if not text.isprintable():
        raise AppError(f"the path {text!r} has characters that cannot stand in a service's file: use another --home")
