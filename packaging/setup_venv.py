"""Build `.venv` beside this checkout: the one set-up that `make`, CI and a person without `make` share.

Plain standard library, run by the Python that the environment will use:

    python3.12 packaging/setup_venv.py          what Shoal needs to run
    python3.12 packaging/setup_venv.py test     the tools of `make test` as well (or `release`: those of `make bundle`)

`torch_choice` decides which build of torch this machine gets; the variable SHOAL_TORCH (`cpu`, `cuda` or the address
of a package index) decides instead. Safe to interrupt and to run again: packages that were installed whole are kept,
and pip keeps what it has downloaded.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
CONSTRAINTS = ROOT / "constraints.txt"
OLDEST, NEWEST = (3, 11), (3, 13)
EXTRAS = ("test", "release")  # of pyproject.toml

# The tests compare Shoal with py-libp2p. It demands fastecdsa, which has no wheel for Linux; the placeholder needs no
# compiler.
PLACEHOLDER = ROOT / "packaging" / "fastecdsa"

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CUDA_INDEX = "https://download.pytorch.org/whl/cu130"
ROCM_INDEX = "https://download.pytorch.org/whl/rocm7.1"
GB = 10**9
# While pip unpacks; 1 and 7 GB stay, and 1.5 of the test tools.
DISK_BYTES = {"cpu": 1.5 * GB, "cuda": 9 * GB, "test": 2 * GB}
PATIENCE_S = 20.0  # for one package index; an index that cannot be reached must not cost minutes
TICK_S = 10.0


class SetupError(Exception):
    """The set-up cannot go on; the text says what to do."""


# --- which torch -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """The facts that decide which build of torch fits."""

    system: str  # as `sys.platform` says
    processor: str  # as `platform.machine()` says
    nvidia: bool = False
    amd: bool = False


@dataclass(frozen=True)
class TorchChoice:
    """The build to install: `index` is the package index that has it, None where pip's own index does."""

    kind: str  # cpu, cuda or index
    index: str | None = None
    question: str = ""  # to ask first; a "no" means the CPU's build
    note: str = ""  # a line for the user

    def fits(self, version: str) -> bool:
        """True if an installed torch of this version is of the chosen build."""
        # The index .../whl/cpu has 2.13.0+cpu, .../whl/cu130 has 2.13.0+cu130; PyPI's build has no such ending.
        ending = "" if self.index is None else self.index.rstrip("/").rpartition("/")[2]
        return version.partition("+")[2] == ending


def torch_choice(machine: Machine, wish: str, *, interactive: bool) -> TorchChoice:
    """Decide which torch to install; `wish` is the value of SHOAL_TORCH, empty if it is not set.

    Without a wish nobody gets gigabytes unasked: a machine with an NVIDIA card is asked about, and gets the CPU's build
    if nobody can answer. Raises `SetupError` for a wish that cannot be met.
    """
    if "://" in wish:
        return TorchChoice("index", wish)
    if wish not in ("", "cpu", "cuda"):
        raise SetupError(f"SHOAL_TORCH={wish} is not cpu, cuda or the address of a package index")
    # PyPI has torch for CUDA on Linux with x86-64, and for the CPU (on macOS with Metal) everywhere else.
    pypi_has_cuda = machine.system.startswith("linux") and machine.processor in ("x86_64", "AMD64")
    cpu = TorchChoice("cpu", CPU_INDEX if pypi_has_cuda else None)
    cuda = TorchChoice("cuda", None if pypi_has_cuda else CUDA_INDEX)
    if wish == "cuda" and machine.system == "darwin":
        raise SetupError("there is no CUDA on macOS: leave SHOAL_TORCH out, torch uses Metal there")
    if wish:
        return cuda if wish == "cuda" else cpu
    if machine.nvidia and interactive:
        question = "An NVIDIA card was found. Install torch for CUDA (3 GB to fetch, 7 GB of disk)? [Y/n] "
        return TorchChoice(cuda.kind, cuda.index, question=question)
    note = ""
    if machine.nvidia:
        note = "an NVIDIA card was found; this takes the build for CPUs, SHOAL_TORCH=cuda takes 3 GB and uses the card"
    elif machine.amd:
        note = f"an AMD card was found; this takes the build for CPUs, SHOAL_TORCH={ROCM_INDEX} takes the one for ROCm"
    return TorchChoice(cpu.kind, cpu.index, note=note)


def look() -> Machine:
    """Return the facts of this machine."""
    return Machine(sys.platform, platform.machine(), has_nvidia(), Path("/dev/kfd").exists())


def has_nvidia() -> bool:
    """True if NVIDIA's own tool lists a card."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        answer = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        return answer.returncode == 0 and "GPU" in answer.stdout
    return False


# --- the environment -------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None, environment: Mapping[str, str] = os.environ) -> int:
    """Create the environment and install Shoal in it; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if words and (len(words) > 1 or words[0] not in EXTRAS):
            raise SetupError(f"unknown argument {' '.join(words)!r}: write one of {', '.join(EXTRAS)}, or none")
        check_python(sys.version_info[:2])
        create_venv()
        install("".join(words), wish=environment.get("SHOAL_TORCH", ""))
    except (SetupError, OSError) as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, EOFError):
        print("setup: interrupted; run it again, it goes on from here", file=sys.stderr)
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
    """Make a fresh environment, unless a usable one of this Python version is there."""
    python = venv_python()
    if python.exists() and runs_this_version(python):
        return
    if importlib.util.find_spec("ensurepip") is None:
        raise SetupError("this Python cannot make environments; on Debian and Ubuntu: apt install python3-venv")
    print(f"setup: creating {VENV} with Python {sys.version.split()[0]}", flush=True)
    command = [sys.executable, "-m", "venv", "--clear", str(VENV)]
    if subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode:
        raise SetupError("the environment could not be created")


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


def packages() -> Iterator[Path]:
    """The metadata folders of the installed packages."""
    pattern = "Lib/site-packages" if sys.platform == "win32" else "lib/python3*/site-packages"
    return (entry for folder in VENV.glob(pattern) for entry in folder.glob("*.dist-info"))


def forget_halves() -> None:
    """Remove the metadata of packages whose installation was interrupted, so that pip installs them again.

    pip writes RECORD last, but believes in a package that has a metadata folder.
    """
    for entry in [entry for entry in packages() if not (entry / "RECORD").exists()]:
        shutil.rmtree(entry)


def installed_torch() -> str | None:
    """The version of the environment's torch, None without one."""
    found = (re.fullmatch(r"torch-(.+)\.dist-info", entry.name) for entry in packages())
    return next((match[1] for match in found if match is not None), None)


# --- installing ------------------------------------------------------------------------------------------------------


def install(extra: str, *, wish: str) -> None:
    """Install Shoal, editable, at the pinned versions, with the tools of an extra if one is named.

    At last the stamps are written that `make` compares with pyproject.toml: one of Shoal itself, one of the extra.
    """
    forget_halves()
    choice = torch_to_install(wish)
    check_disk(choice, extra)
    if choice is not None:
        install_torch(choice)
    print(f"setup: installing Shoal{f' and the tools of make {extra}' if extra else ''}", flush=True)
    shoal = f"{ROOT}[{extra}]" if extra else str(ROOT)
    placeholder = [str(PLACEHOLDER)] if extra == "test" else []
    run_pip(["--constraint", str(CONSTRAINTS), *placeholder, "--editable", shoal])
    for stamp in ("setup", extra) if extra else ("setup",):
        (VENV / f"{stamp}.stamp").write_text(f"{sys.version}\n")


def torch_to_install(wish: str) -> TorchChoice | None:
    """Choose a torch, and ask if that is needed; None if the one that is there will do."""
    pinned = re.search(r"^torch==(\S+)", CONSTRAINTS.read_text("utf-8"), re.MULTILINE)
    assert pinned is not None, "constraints.txt names torch's version"
    installed = installed_torch()
    is_current = installed is not None and installed.partition("+")[0] == pinned[1]
    if is_current and not wish:
        return None
    choice = torch_choice(look(), wish, interactive=sys.stdin.isatty() and sys.stdout.isatty())
    if is_current and installed is not None and choice.fits(installed):
        return None
    if choice.question and input(f"setup: {choice.question}").strip().lower().startswith("n"):
        choice = torch_choice(look(), "cpu", interactive=False)
    if choice.note:
        print(f"setup: {choice.note}", flush=True)
    return choice


def check_disk(choice: TorchChoice | None, extra: str) -> None:
    """Refuse to begin what the disk has no room for."""
    needed = (DISK_BYTES.get(choice.kind, DISK_BYTES["cuda"]) if choice else 0) + DISK_BYTES.get(extra, 0)
    free = shutil.disk_usage(VENV).free
    if free < needed:
        raise SetupError(f"the set-up needs {needed / GB:.1f} GB at {VENV}, and {free / GB:.1f} GB are free")


def install_torch(choice: TorchChoice) -> None:
    """Install torch alone, from its own index where it has one; what it needs in turn comes with Shoal."""
    size = {"cpu": "about 0.2 GB to fetch, 0.7 GB of disk", "cuda": "about 3 GB to fetch, 7 GB of disk"}
    print(f"setup: installing torch ({size.get(choice.kind, choice.index)})", flush=True)
    arguments = ["--constraint", str(CONSTRAINTS), "--no-deps", "--force-reinstall", "torch"]
    if choice.index is not None:
        arguments += ["--index-url", choice.index, "--timeout", f"{PATIENCE_S:.0f}", "--retries", "1"]
    try:
        run_pip(arguments)
    except SetupError as error:
        if choice.index is None:
            raise
        where = f"torch could not be fetched from {choice.index}"
        raise SetupError(f"{where}; SHOAL_TORCH=URL names another package index: {error}") from None


def run_pip(arguments: Sequence[str]) -> None:
    """Run `pip install` and say what it is doing; raises `SetupError` if it fails.

    Nothing is compiled ahead: Python does that with what Shoal imports, and the rest stays 200 MB smaller.
    """
    command = [str(venv_python()), "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--no-compile"]
    progress = Progress()
    with subprocess.Popen(
        [*command, *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    ) as pip:
        assert pip.stdout is not None
        with progress.ticking():
            for line in pip.stdout:
                progress.heard(line)
    if pip.returncode:
        raise SetupError("pip did not finish; check the network and the disk, then run the set-up again")


class Progress:
    """Turns pip's output into a few lines, and says every `TICK_S` seconds what still goes on."""

    def __init__(self) -> None:
        self._doing = "looking for packages"
        self._expected = self._already = 0
        self._began = time.monotonic()

    def heard(self, line: str) -> None:
        """Take one line of pip's output, and print what it means to a person."""
        if found := re.match(r"\s*(?:Downloading|Using cached) (\S+)\s+\((.+)\)", line):
            self._doing = f"fetching {name_of(found[1])} ({found[2]})"
            if line.lstrip().startswith("Downloading") and "MB" in found[2]:
                print(f"setup: {self._doing}", flush=True)
        elif line.startswith("Installing collected packages:"):
            self._expected = line.count(",") + 1
            self._already = sum(1 for _ in packages())
            names = line.partition(":")[2].strip()
            self._doing = f"unpacking {f'{self._expected} packages' if self._expected > 1 else names}"
            print(f"setup: {self._doing}", flush=True)

    def tick(self) -> str:
        """Say what goes on now."""
        doing = self._doing
        if self._expected > 1:
            done = sum(1 for _ in packages()) - self._already
            doing += f", {max(done, 0)} done"
        return f"setup: still {doing}, {time.monotonic() - self._began:.0f} s"

    @contextlib.contextmanager
    def ticking(self) -> Iterator[None]:
        """Print `tick` again and again until the block ends."""
        over = threading.Event()

        def talk() -> None:
            while not over.wait(TICK_S):
                print(self.tick(), flush=True)

        thread = threading.Thread(target=talk, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def name_of(file: str) -> str:
    """The package and version in the name or address of a wheel or a source archive."""
    stem = file.rpartition("/")[2].removesuffix(".metadata").removesuffix(".whl").removesuffix(".tar.gz")
    return " ".join(stem.split("-")[:2])


if __name__ == "__main__":
    sys.exit(main())
