"""The set-up script's decisions: which Python, and when to start over. The rest is `make`'s."""

from __future__ import annotations

import importlib
import importlib.util
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


def test_an_unfinished_environment_is_built_anew(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(setup, "run", lambda command, complaint: commands.append(command))
    monkeypatch.setattr(setup, "venv_python", lambda: Path(sys.executable))
    setup.VENV.mkdir()
    setup.create_venv()
    assert commands == []  # a whole environment of this version is kept
    setup.UNFINISHED.touch()
    setup.create_venv()
    assert commands == [[sys.executable, "-m", "venv", "--clear", str(setup.VENV)]]


def test_a_failed_install_leaves_no_stamp(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: list[str], complaint: str) -> None:
        raise setup.SetupError(complaint)

    setup.VENV.mkdir()
    monkeypatch.setattr(setup, "run", fail)
    with pytest.raises(setup.SetupError, match="run the set-up again"):
        setup.install()
    assert not setup.STAMP.exists()
    assert setup.UNFINISHED.exists()
    monkeypatch.setattr(setup, "run", lambda *_: None)
    setup.install()
    assert setup.STAMP.exists()
    assert not setup.UNFINISHED.exists()


def test_the_placeholder_has_what_libp2p_imports_and_every_use_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent / "fastecdsa"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "fastecdsa"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("libp2p.crypto.ecc", "libp2p.crypto.key_exchange"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.import_module(name)
    ecc = importlib.import_module("libp2p.crypto.ecc")
    assert Path(str(sys.modules["fastecdsa"].__file__)).is_relative_to(SCRIPT.parent)
    with pytest.raises(NotImplementedError, match="ECDSA keys are not supported"):
        ecc.create_new_key_pair("P-256")
    for module in [module for name, module in sys.modules.items() if name.startswith("fastecdsa")]:
        assert not hasattr(module, "__wrapped__")  # torch and inspect ask every module for such names
