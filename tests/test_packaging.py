"""The wheel: what it must carry, and that it runs where nothing of this checkout can be seen."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BUILT_FROM = ("app", "engine", "p2p", "ui", "packaging", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this checkout, built from a copy, so that nothing is left in it."""
    pytest.importorskip("setuptools", reason="the wheel is built with the environment's own setuptools")
    folder = tmp_path_factory.mktemp("wheel")
    for name in BUILT_FROM:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", "dist", "."]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [built] = (folder / "dist").glob("shoal-*.whl")
    return built


def test_the_wheel_carries_all_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    modules = [path.relative_to(ROOT).as_posix() for top in BUILT_FROM[:4] for path in (ROOT / top).rglob("*.py")]
    assert set(modules) <= set(names)
    for template in (ROOT / "packaging" / "service").iterdir():
        assert any(name.endswith(f"share/shoal/service/{template.name}") for name in names)
    tops = {name.split("/")[0] for name in names}
    assert all(top in ("app", "engine", "p2p", "ui") or top.startswith("shoal-") for top in tops), tops
    data = [*(ROOT / "ui").rglob("*.tcss"), *(ROOT / "app" / "web" / "page").iterdir()]
    assert {path.relative_to(ROOT).as_posix() for path in data} <= set(names)


def test_an_installed_wheel_runs_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """The dependencies are borrowed from this environment; the package and its templates are the wheel's own."""
    place = tmp_path / "venv"
    venv.create(place, with_pip=False, symlinks=os.name != "nt")
    scripts = place / ("Scripts" if os.name == "nt" else "bin")
    python = scripts / ("python.exe" if os.name == "nt" else "python")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    borrowed = tmp_path / "borrowed"
    borrowed.mkdir()
    for entry in Path(next(path for path in sys.path if path.endswith("site-packages"))).iterdir():
        if "shoal" not in entry.name.lower():  # an editable install of the checkout must not be seen
            (borrowed / entry.name).symlink_to(entry)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("SHOAL_", "PYTHON"))},
        "PYTHONPATH": str(borrowed),
        "SHOAL_HOME": str(tmp_path / "home"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
    }

    def shoal(*arguments: str) -> str:
        done = subprocess.run(
            [str(scripts / "shoal"), *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "doctor" in shoal("--help")
    assert '"installed": false' in shoal("service", "status", "--json")
    where = "import app, app.system.service as files; print(app.__file__, files.template('shoal.plist')[:5])"
    told = subprocess.run([str(python), "-P", "-c", where], env=environment, capture_output=True, text=True, check=True)
    assert str(place) in told.stdout
    assert "<?xml" in told.stdout
