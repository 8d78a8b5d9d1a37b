"""The set-up script: which Python, which torch, and what is kept of an interrupted run. The rest is `make`'s."""

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
    monkeypatch.setitem(sys.modules, "setup_venv", module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "VENV", tmp_path / ".venv")
    (tmp_path / ".venv").mkdir()
    return module


def site_packages(setup: ModuleType) -> Path:
    """The folder of the installed packages, made if need be."""
    name = "Lib/site-packages" if sys.platform == "win32" else "lib/python3.11/site-packages"
    folder: Path = setup.VENV / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.mark.parametrize(("version", "fine"), [((3, 10), False), ((3, 11), True), ((3, 13), True), ((3, 14), False)])
def test_python_versions(setup: ModuleType, version: tuple[int, int], fine: bool) -> None:
    if fine:
        setup.check_python(version)
    else:
        with pytest.raises(setup.SetupError, match=r"install Python 3\.11, 3\.12 or 3\.13"):
            setup.check_python(version)


LINUX, ARM, MAC, WINDOWS = ("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64"), ("win32", "AMD64")
CPU, CUDA = "https://download.pytorch.org/whl/cpu", "https://download.pytorch.org/whl/cu130"


@pytest.mark.parametrize(
    ("system", "cards", "wish", "asked", "kind", "index"),
    [
        (LINUX, "", "", False, "cpu", CPU),
        (LINUX, "amd", "", False, "cpu", CPU),
        (LINUX, "nvidia", "", True, "cuda", None),
        (LINUX, "", "cuda", False, "cuda", None),
        (LINUX, "nvidia", "cpu", False, "cpu", CPU),
        (LINUX, "amd", "https://example.org/whl/rocm7.1", False, "index", "https://example.org/whl/rocm7.1"),
        (ARM, "", "", False, "cpu", None),
        (ARM, "nvidia", "", True, "cuda", CUDA),
        (MAC, "", "", False, "cpu", None),
        (WINDOWS, "", "", False, "cpu", None),
        (WINDOWS, "nvidia", "", True, "cuda", CUDA),
        (WINDOWS, "", "cuda", False, "cuda", CUDA),
    ],
)
def test_which_torch(
    setup: ModuleType, system: tuple[str, str], cards: str, wish: str, asked: bool, kind: str, index: str | None
) -> None:
    machine = setup.Machine(*system, nvidia=cards == "nvidia", amd=cards == "amd")
    choice = setup.torch_choice(machine, wish, interactive=True)
    assert (bool(choice.question), choice.kind, choice.index) == (asked, kind, index)
    alone = setup.torch_choice(machine, wish, interactive=False)
    assert not alone.question
    assert alone.kind == (kind if wish else "cpu")  # nobody gets gigabytes unasked
    assert bool(alone.note) == (bool(cards) and not wish)


@pytest.mark.parametrize(("system", "wish"), [(MAC, "cuda"), (LINUX, "gpu")])
def test_a_torch_that_cannot_be_had(setup: ModuleType, system: tuple[str, str], wish: str) -> None:
    with pytest.raises(setup.SetupError, match="SHOAL_TORCH"):
        setup.torch_choice(setup.Machine(*system), wish, interactive=True)


@pytest.mark.parametrize(
    ("installed", "wish", "again"),
    [
        (None, "", True),
        ("2.13.0+cpu", "", False),
        ("2.13.0", "", False),  # whatever build was chosen before stays
        ("2.12.1+cpu", "", True),
        ("2.13.0+cpu", "cpu", False),
        ("2.13.0+cpu", "cuda", True),
        ("2.13.0", "cuda", False),
        ("2.13.0", "cpu", True),
        ("2.13.0+rocm7.1", "https://example.org/whl/rocm7.1", False),
    ],
)
def test_an_installed_torch_is_kept(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, installed: str | None, wish: str, again: bool
) -> None:
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("numpy==1\ntorch==2.13.0\n")
    monkeypatch.setattr(setup, "CONSTRAINTS", constraints)
    monkeypatch.setattr(setup, "look", lambda: setup.Machine(*LINUX))
    if installed is not None:
        (site_packages(setup) / f"torch-{installed}.dist-info").mkdir()
    assert (setup.torch_to_install(wish) is not None) == again


@pytest.mark.parametrize(("answer", "kind"), [("", "cuda"), ("y", "cuda"), ("No", "cpu")])
def test_the_question_before_gigabytes(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, answer: str, kind: str
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(setup, "look", lambda: setup.Machine(*LINUX, nvidia=True))

    def ask(text: str) -> str:
        asked.append(text)
        return answer

    monkeypatch.setattr("builtins.input", ask)
    for stream in ("stdin", "stdout"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True)
    assert setup.torch_to_install("").kind == kind
    assert "3 GB" in asked[0]


def test_an_environment_of_this_version_is_kept(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(setup, "venv_python", lambda: Path(sys.executable))
    setup.create_venv()
    monkeypatch.setattr(setup, "runs_this_version", lambda python: False)

    def run(command: list[str], **_: object) -> Done:
        commands.append(command)
        return Done(0)

    monkeypatch.setattr(setup.subprocess, "run", run)
    setup.create_venv()
    assert commands == [[sys.executable, "-m", "venv", "--clear", str(setup.VENV)]]
    monkeypatch.setattr(setup.subprocess, "run", lambda *command, **_: Done(1))
    with pytest.raises(setup.SetupError, match="could not be created"):
        setup.create_venv()
    monkeypatch.setattr(setup.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(setup.SetupError, match="apt install python3-venv"):
        setup.create_venv()


class Done:
    """A command that has ended."""

    def __init__(self, returncode: int) -> None:
        self.returncode = returncode


def test_half_installed_packages_are_installed_again(setup: ModuleType) -> None:
    whole, half = site_packages(setup) / "trio-1.dist-info", site_packages(setup) / "torch-2.dist-info"
    for folder in (whole, half):
        folder.mkdir()
        (folder / "METADATA").touch()
    (whole / "RECORD").touch()
    setup.forget_halves()
    assert [entry.name for entry in setup.packages()] == ["trio-1.dist-info"]


@pytest.mark.parametrize(
    ("extra", "what", "stamps"),
    [("", "", ["setup.stamp"]), ("test", "[test]", ["setup.stamp", "test.stamp"])],
)
def test_the_stamps_are_written_last(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, extra: str, what: str, stamps: list[str]
) -> None:
    installed: list[list[str]] = []

    def fail_at_last(arguments: list[str]) -> None:
        if "--editable" in arguments:
            raise setup.SetupError("pip did not finish")

    monkeypatch.setattr(setup, "look", lambda: setup.Machine(*LINUX))
    monkeypatch.setattr(setup, "run_pip", fail_at_last)
    with pytest.raises(setup.SetupError, match="did not finish"):
        setup.install(extra, wish="")
    assert list(setup.VENV.glob("*.stamp")) == []
    monkeypatch.setattr(setup, "run_pip", installed.append)
    setup.install(extra, wish="")
    assert sorted(path.name for path in setup.VENV.glob("*.stamp")) == stamps
    assert installed[-1][-1] == f"{setup.ROOT}{what}"
    assert (str(setup.PLACEHOLDER) in installed[-1]) == (extra == "test")


def test_a_full_disk_is_said_before_anything_is_fetched(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "look", lambda: setup.Machine(*LINUX))
    monkeypatch.setattr(setup, "run_pip", lambda arguments: pytest.fail("installed something"))
    monkeypatch.setattr(setup.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10**9}))
    with pytest.raises(setup.SetupError, match=r"needs 1\.5 GB .* 1\.0 GB are free"):
        setup.install("", wish="")


def test_pips_output_becomes_a_few_lines(setup: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    progress = setup.Progress()
    for line in (
        "Collecting torch\n",
        "  Downloading https://example.org/torch-2.13.0%2Bcpu-cp311-cp311-manylinux_2_28_x86_64.whl.metadata (29 kB)\n",
        "Downloading torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl (190.5 MB)\n",
        "Using cached numpy-2.4.6-cp311-cp311-manylinux_2_28_x86_64.whl (16.0 MB)\n",
    ):
        progress.heard(line)
    assert capsys.readouterr().out == "setup: fetching torch 2.13.0+cpu (190.5 MB)\n"
    assert "still fetching numpy 2.4.6 (16.0 MB)" in progress.tick()
    progress.heard("Installing collected packages: numpy, torch\n")
    (site_packages(setup) / "numpy-2.4.6.dist-info").mkdir()
    assert capsys.readouterr().out == "setup: unpacking 2 packages\n"
    assert "still unpacking 2 packages, 1 done" in progress.tick()


def test_pip_is_run_and_its_failure_told(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "venv_python", lambda: Path(sys.executable))
    setup.run_pip(["--dry-run", "--quiet", "pip"])
    with pytest.raises(setup.SetupError, match="check the network and the disk"):
        setup.run_pip(["--quiet", "--no-index", "no-such-package-of-shoal"])


def test_unknown_arguments_are_refused(setup: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert setup.main(["tests"], {}) == 1
    assert "unknown argument 'tests'" in capsys.readouterr().err


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
