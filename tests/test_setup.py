"""The set-up script's decisions: which Python, what is missing to build, when to start over. The rest is `make`'s."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "packaging" / "setup_venv.py"


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, pointed at an empty folder."""
    spec = importlib.util.spec_from_file_location("setup_venv", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    venv = tmp_path / ".venv"
    for name, path in (("VENV", venv), ("STAMP", venv / "setup.stamp"), ("UNFINISHED", venv / "setup.unfinished")):
        monkeypatch.setattr(module, name, path)
    return module


@pytest.mark.parametrize(("version", "fine"), [((3, 10), False), ((3, 11), True), ((3, 13), True), ((3, 14), False)])
def test_python_versions(setup: ModuleType, version: tuple[int, int], fine: bool) -> None:
    if fine:
        setup.check_python(version)
    else:
        with pytest.raises(setup.SetupError, match=r"install Python 3\.11, 3\.12 or 3\.13"):
            setup.check_python(version)


@pytest.mark.parametrize(
    ("compiler_says", "missing"),
    [
        ("probe.c:1:10: fatal error: Python.h: No such file or directory", "headers of this Python"),
        ("probe.c:2:10: fatal error: gmp.h: No such file or directory", "GMP and its headers"),
        ("/usr/bin/ld: cannot find -lgmp: No such file or directory", "GMP and its headers"),
        ("", "the C compiler does not work"),
    ],
)
def test_the_missing_part_is_named(setup: ModuleType, compiler_says: str, missing: str) -> None:
    assert missing in setup.missing_part(compiler_says)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it warns, or needs no compiler")
def test_no_compiler_stops_the_set_up_with_the_mend(setup: ModuleType) -> None:
    with pytest.raises(setup.SetupError, match=r"no C compiler \(no-such-cc\)(.|\n)*apt-get install gcc libgmp-dev"):
        setup.check_compiler({"CC": "no-such-cc", "PATH": os.environ["PATH"]})


def test_homebrews_gmp_is_made_known_to_the_compiler(setup: ModuleType) -> None:
    environment = setup.build_environment({"CPATH": "/mine"}, "/brew/gmp")
    assert environment["CPATH"] == os.pathsep.join(["/brew/gmp/include", "/mine"])
    assert environment["LIBRARY_PATH"] == "/brew/gmp/lib"
    assert setup.build_environment({"A": "b"}, None) == {"A": "b"}


def test_an_unfinished_environment_is_built_anew(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(setup, "run", lambda command, environment, complaint: commands.append(command))
    monkeypatch.setattr(setup, "venv_python", lambda: Path(sys.executable))
    setup.VENV.mkdir()
    setup.create_venv()
    assert commands == []  # a whole environment of this version is kept
    setup.UNFINISHED.touch()
    setup.create_venv()
    assert commands == [[sys.executable, "-m", "venv", "--clear", str(setup.VENV)]]


def test_a_failed_install_leaves_no_stamp(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: list[str], environment: object, complaint: str) -> None:
        raise setup.SetupError(complaint)

    setup.VENV.mkdir()
    monkeypatch.setattr(setup, "run", fail)
    with pytest.raises(setup.SetupError, match="run the set-up again"):
        setup.install({})
    assert not setup.STAMP.exists()
    assert setup.UNFINISHED.exists()
    monkeypatch.setattr(setup, "run", lambda *_: None)
    setup.install({})
    assert setup.STAMP.exists()
    assert not setup.UNFINISHED.exists()
