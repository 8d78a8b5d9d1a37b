"""Build `.venv` beside this checkout: the one set-up that `make`, CI and a person without `make` share.

Plain standard library, run by the Python that the environment will use:

    python3.12 packaging/setup_venv.py

Safe to interrupt and to run again: an environment whose install did not finish is rebuilt from nothing.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "setup.stamp"
UNFINISHED = VENV / "setup.unfinished"
OLDEST, NEWEST = (3, 11), (3, 13)

# libp2p demands fastecdsa, which has no wheel for Linux; the placeholder needs no compiler.
PLACEHOLDER = ROOT / "packaging" / "fastecdsa"


class SetupError(Exception):
    """The set-up cannot go on; the text says what to do."""


def main() -> int:
    """Create the environment and install Shoal in it; returns the exit status."""
    try:
        check_python(sys.version_info[:2])
        create_venv()
        install()
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


def create_venv() -> None:
    """A fresh environment, unless a whole one of this Python version is there."""
    python = venv_python()
    stale = UNFINISHED.exists() or not python.exists() or not runs_this_version(python)
    if stale:
        print(f"setup: creating {VENV} with Python {sys.version.split()[0]}", flush=True)
        run([sys.executable, "-m", "venv", "--clear", str(VENV)], "the environment could not be created")


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


def install() -> None:
    """Install Shoal, editable, with its test tools at the pinned versions."""
    UNFINISHED.touch()
    pip = [str(venv_python()), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    if not sys.stdout.isatty():
        pip.append("--quiet")  # a person sees the downloads' progress, a log only what went wrong
    print("setup: installing Shoal and its dependencies (the first time takes minutes)", flush=True)
    complaint = "pip did not finish; check the network and the disk, then run the set-up again"
    run([*pip, str(PLACEHOLDER)], complaint)
    run([*pip, "--constraint", str(ROOT / "constraints.txt"), "--editable", f"{ROOT}[test]"], complaint)
    STAMP.write_text(f"{sys.version}\n")
    UNFINISHED.unlink()


def run(command: list[str], complaint: str) -> None:
    """Run one step with its output shown; a failure becomes a SetupError."""
    if subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, check=False).returncode:
        raise SetupError(complaint)


if __name__ == "__main__":
    sys.exit(main())
