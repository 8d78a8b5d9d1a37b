"""Shoal as a service: the files that systems are given, what is run to make them known, and the way out again."""

from __future__ import annotations

import os
import plistlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

from app.core.errors import AppError
from app.system import service
from app.system.service import (
    Service,
    ServicePlan,
    ServiceResult,
    install,
    is_running,
    launchd_agent,
    plan_for,
    restart,
    service_name,
    service_of,
    systemd_unit,
    template,
    uninstall,
    windows_task,
)

ODD = Path('/home/o\'brien & "co"/50% $HOME/ünder <x>')
ODD_SERVICE = Service("shoal", ("/opt/a b/shoal", "--home", str(ODD), "serve"), ODD, (("SHOAL_CACHE", "/data/$x %h"),))
TASKS = "{http://schemas.microsoft.com/windows/2004/02/mit/task}"


class System:
    """Commands that were run, and what each is to answer."""

    def __init__(self, **answers: ServiceResult) -> None:
        self.commands: list[tuple[str, ...]] = []
        self._answers = answers

    def run(self, command: Sequence[str]) -> ServiceResult:
        self.commands.append(tuple(command))
        return next((answer for word, answer in self._answers.items() if word in command), ServiceResult(0))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("odd", [False, True])
def test_systemd_takes_the_unit(tmp_path: Path, odd: bool) -> None:
    home = tmp_path / ODD.name if odd else tmp_path
    program = tmp_path / "a b" / "shoal"
    program.parent.mkdir()
    program.symlink_to(sys.executable)
    made = Service("shoal", (str(program), "--home", str(home), "serve"), home, ODD_SERVICE.environment)
    unit = tmp_path / "shoal.service"
    unit.write_text(systemd_unit(made, template("shoal.service")))
    answer = subprocess.run(
        ["systemd-analyze", "verify", "--user", str(unit)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
    )
    assert answer.returncode == 0, answer.stderr
    assert "shoal.service" not in answer.stderr


def test_a_unit_says_each_word_as_it_is() -> None:
    lines = systemd_unit(ODD_SERVICE, template("shoal.service")).splitlines()
    start = next(line for line in lines if line.startswith("ExecStart="))
    assert start == ('ExecStart="/opt/a b/shoal" "--home" "/home/o\'brien & \\"co\\"/50%% $$HOME/ünder <x>" "serve"')
    assert 'Environment="SHOAL_CACHE=/data/$x %%h"' in lines


def test_a_property_list_is_one() -> None:
    parsed = plistlib.loads(launchd_agent(ODD_SERVICE, "app.shoal", template("shoal.plist")).encode())
    assert parsed["Label"] == "app.shoal"
    assert tuple(parsed["ProgramArguments"]) == ODD_SERVICE.command
    assert parsed["EnvironmentVariables"] == dict(ODD_SERVICE.environment)
    assert parsed["RunAtLoad"] is True
    assert parsed["KeepAlive"] == {"SuccessfulExit": False}
    assert parsed["Umask"] == 0o077


def test_a_task_is_one() -> None:
    text = windows_task(ODD_SERVICE, "PC\\ann & bob", template("shoal.xml"))
    root = ElementTree.fromstring(text.encode("utf-16"))
    assert root.tag == f"{TASKS}Task"
    found = {tag: root.find(f".//{TASKS}{tag}") for tag in ("Command", "Arguments", "UserId", "ExecutionTimeLimit")}
    said = {tag: None if element is None else element.text for tag, element in found.items()}
    assert said["Command"] == "/opt/a b/shoal"
    assert said["Arguments"] == subprocess.list2cmdline(ODD_SERVICE.command[1:])
    assert said["UserId"] == "PC\\ann & bob"
    assert said["ExecutionTimeLimit"] == "PT0S", "a node is not ended after three days, as tasks are by default"
    control_frame = [element.tag.removeprefix(TASKS) for element in root]
    assert control_frame == ["RegistrationInfo", "Triggers", "Principals", "Settings", "Actions"], (
        "the schema's own order"
    )


def test_what_cannot_stand_in_a_file_is_refused() -> None:
    with pytest.raises(AppError, match="another --home"):
        systemd_unit(Service("shoal", ("shoal", "a\nExecStart=/bin/evil"), Path("/x")), template("shoal.service"))


@pytest.mark.parametrize("platform", ["linux", "darwin", "win32"])
def test_no_secret_is_in_what_a_service_is_given(
    platform: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    environment = {"SHOAL_INVITE": "shoal:hush-invite", "SHOAL_TOKEN": "hush-token", "SHOAL_MAX_VRAM": "1GB"}
    plan = plan_for(service_of(tmp_path / "home", environment), platform, tmp_path)
    told = plan.content + repr((plan.enable, plan.disable, plan.query)).encode()
    assert b"hush" not in told.replace(b"\0", b"")


@pytest.fixture(params=["linux", "darwin", "win32"])
def plan(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServicePlan:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "home").mkdir()
    return plan_for(service_of(tmp_path / "home", {}), request.param, tmp_path)


def test_install_twice_look_and_uninstall(plan: ServicePlan) -> None:
    system = System()
    install(plan, system.run)
    assert plan.file.read_bytes() == plan.content
    assert set(plan.enable) <= set(system.commands)
    install(plan, system.run)
    words = {"is-active", "print", "/Query"} & set(plan.query)
    assert is_running(plan, System(**{words.pop(): ServiceResult(0, plan.running_text)}).run)
    assert uninstall(plan, system.run)
    assert not plan.file.exists()
    assert set(plan.disable) <= set(system.commands)
    assert not uninstall(plan, system.run)
    assert not is_running(plan, system.run)


def test_a_system_that_refuses_leaves_nothing_behind(plan: ServicePlan) -> None:
    word = plan.enable[0][-1]
    with pytest.raises(AppError, match="no bus; nothing was installed") as refused:
        install(plan, System(**{word: ServiceResult(1, "no bus; nothing was installed")}).run)
    assert plan.system in str(refused.value)
    assert not plan.file.exists()
    assert plan.file.parent.exists() == (plan.system == "Task Scheduler")  # made for it, but on Windows the home


def test_a_restart_that_the_system_refuses_is_said(plan: ServicePlan) -> None:
    system = System()
    restart(plan, system.run)
    assert tuple(system.commands) == plan.restart
    with pytest.raises(AppError, match=f"{plan.system} did not restart the service: no bus"):
        restart(plan, lambda command: ServiceResult(1, "no bus"))


def test_linger_is_asked_for_and_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    plan = plan_for(service_of(tmp_path, {}), "linux", tmp_path)
    assert install(plan, System().run) == "it starts with the machine"
    assert "sudo loginctl enable-linger" in install(plan, System(**{"enable-linger": ServiceResult(1)}).run)


def test_homes_have_services_of_their_own(tmp_path: Path) -> None:
    assert service_name(tmp_path, tmp_path) == "shoal"
    names = {service_name(tmp_path / str(number), tmp_path) for number in range(3)}
    assert len(names) == 3
    assert all(name.startswith("shoal-") for name in names)


def test_other_systems_are_told(tmp_path: Path) -> None:
    with pytest.raises(AppError, match="services are not supported on plan9"):
        plan_for(ODD_SERVICE, "plan9", tmp_path)


def test_a_command_that_is_not_there_is_an_answer() -> None:
    assert service.run_command(["no-such-program-of-shoal"]) == ServiceResult(
        127, "no-such-program-of-shoal is not installed"
    )


@pytest.mark.skipif(os.name == "nt", reason="it has no printf")
def test_a_command_may_write_in_any_encoding() -> None:
    result = service.run_command(["printf", r"\215 done"])
    assert result.status == 0
    assert result.text.endswith("done")
