"""Build `.venv` beside this checkout: the one set-up that `make`, CI and a person without `make` share.

Plain standard library, run by the Python that the environment will use:

    python3.12 packaging/setup_venv.py

Safe to interrupt and to run again: an environment whose install did not finish is rebuilt from nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "setup.stamp"
UNFINISHED = VENV / "setup.unfinished"
OLDEST, NEWEST = (3, 11), (3, 13)

# fastecdsa (a dependency of libp2p, except on Windows) has no wheel and is compiled against GMP.
PROBE_C = "#include <Python.h>\n#include <gmp.h>\nint main(void) { mpz_t n; mpz_init(n); mpz_clear(n); return 0; }\n"
BUILD_MEND = {
    "linux": (
        "Debian/Ubuntu: sudo apt-get install gcc libgmp-dev python3-dev",
        "Fedora:        sudo dnf install gcc gmp-devel python3-devel",
        "Arch:          sudo pacman -S gcc gmp",
    ),
    "darwin": ("xcode-select --install", "brew install gmp"),
}


class SetupError(Exception):
    """The set-up cannot go on; the text says what to do."""


def main() -> int:
    """Create the environment and install Shoal in it; returns the exit status."""
    try:
        check_python(sys.version_info[:2])
        environment = build_environment(os.environ, brew_prefix())
        if not compiled_before():
            check_compiler(environment)
        create_venv()
        install(environment)
    except (SetupError, OSError) as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup: interrupted; run it again, it starts over where that is needed", file=sys.stderr)
        return 1
    return 0


def check_python(version: tuple[int, ...]) -> None:
    """Refuse a Python that Shoal does not support."""
    if not OLDEST <= version <= NEWEST:
        raise SetupError(
            f"Python {version[0]}.{version[1]} at {sys.executable} is not supported: "
            "install Python 3.11, 3.12 or 3.13 and name it, for example `make PYTHON=python3.12 setup`"
        )


def brew_prefix() -> str | None:
    """Where Homebrew keeps GMP, which no compiler on Apple silicon searches by itself."""
    if sys.platform != "darwin" or not shutil.which("brew"):
        return None
    answer = subprocess.run(["brew", "--prefix", "gmp"], capture_output=True, text=True, check=False)
    return answer.stdout.strip() or None


def build_environment(base: Mapping[str, str], gmp_prefix: str | None) -> dict[str, str]:
    """The variables pip and the compiler run under."""
    environment = dict(base)
    if gmp_prefix:
        for name, folder in (("CPATH", "include"), ("LIBRARY_PATH", "lib")):
            paths = [f"{gmp_prefix}/{folder}", environment.get(name, "")]
            environment[name] = os.pathsep.join(path for path in paths if path)
    return environment


def compiled_before() -> bool:
    """Whether this environment has fastecdsa already, so that no compiler is needed."""
    return not UNFINISHED.exists() and any(VENV.glob("lib/python*/site-packages/fastecdsa/curvemath*"))


def check_compiler(environment: Mapping[str, str]) -> None:
    """Compile three lines against Python's and GMP's headers, to fail with the mend instead of pip's output."""
    if sys.platform == "win32":
        return
    missing = missing_for_build(environment)
    if missing is None:
        return
    mend = "\n".join(f"    {line}" for line in BUILD_MEND.get(sys.platform, ("a C compiler, GMP and its headers",)))
    complaint = f"{missing}; the library fastecdsa is built from source. Install what is missing:\n{mend}"
    if sys.platform == "darwin":
        # There is a wheel for some versions of macOS, so it may still go well.
        print(f"setup: warning: {complaint}", file=sys.stderr)
        return
    raise SetupError(complaint)


def missing_for_build(environment: Mapping[str, str]) -> str | None:
    """What the machine lacks to build fastecdsa, in words, or None."""
    compiler = environment.get("CC", "cc").split()
    if not shutil.which(compiler[0], path=environment.get("PATH")):
        return f"there is no C compiler ({compiler[0]})"
    with tempfile.TemporaryDirectory() as folder:
        source, target, library = (str(Path(folder, name)) for name in ("probe.c", "probe.o", "probe.so"))
        Path(source).write_text(PROBE_C)
        include = f"-I{sysconfig.get_path('include')}"
        undefined = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
        compile_step = ["-fPIC", include, "-c", source, "-o", target]
        link_step = ["-shared", target, "-lgmp", "-o", library, *undefined]
        for step in (compile_step, link_step):
            command = [*compiler, *step]
            done = subprocess.run(command, env=dict(environment), capture_output=True, text=True, check=False)
            if done.returncode != 0:
                return missing_part(done.stderr)
    return None


def missing_part(compiler_says: str) -> str:
    """What a failed compilation lacks, in words."""
    if "Python.h" in compiler_says:
        return f"the headers of this Python ({sys.executable}) are missing"
    if "gmp" in compiler_says:
        return "GMP and its headers are missing"
    return "the C compiler does not work: " + (compiler_says.strip() or "it says nothing").splitlines()[-1]


def create_venv() -> None:
    """A fresh environment, unless a whole one of this Python version is there."""
    python = venv_python()
    stale = UNFINISHED.exists() or not python.exists() or not runs_this_version(python)
    if stale:
        print(f"setup: creating {VENV} with Python {sys.version.split()[0]}", flush=True)
        run([sys.executable, "-m", "venv", "--clear", str(VENV)], os.environ, "the environment could not be created")


def venv_python() -> Path:
    """The environment's interpreter."""
    return VENV / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def runs_this_version(python: Path) -> bool:
    """Whether an existing environment works and is of the version that runs this script."""
    code = "import pip, sys; print(sys.version_info[:2])"
    try:
        answer = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
    except OSError:
        return False
    return answer.stdout.strip() == str(tuple(sys.version_info[:2]))


def install(environment: Mapping[str, str]) -> None:
    """Install Shoal, editable, with its test tools at the pinned versions."""
    UNFINISHED.touch()
    pip = [str(venv_python()), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    if not sys.stdout.isatty():
        pip.append("--quiet")  # a person sees the downloads' progress, a log only what went wrong
    print("setup: installing Shoal and its dependencies (the first time takes minutes)", flush=True)
    run(
        [*pip, "--constraint", str(ROOT / "constraints.txt"), "--editable", f"{ROOT}[test]"],
        environment,
        "pip did not finish; check the network and the disk, then run the set-up again",
    )
    STAMP.write_text(f"{sys.version}\n")
    UNFINISHED.unlink()


def run(command: list[str], environment: Mapping[str, str], complaint: str) -> None:
    """Run one step with its output shown; a failure becomes a SetupError."""
    if subprocess.run(command, env=dict(environment), cwd=ROOT, stdin=subprocess.DEVNULL, check=False).returncode:
        raise SetupError(complaint)


if __name__ == "__main__":
    sys.exit(main())
