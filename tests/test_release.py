"""Releases: the parts that they list, what a bundle leaves out and takes along, the Debian package, the container."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from app.system.releases import parse_list

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("distributions", "bundle", "bare_root", "release_key", "release")


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The scripts of `packaging/`, which import each other by name."""
    monkeypatch.syspath_prepend(str(ROOT / "packaging"))
    yield {name: importlib.import_module(name) for name in NAMES}
    for name in NAMES:
        del sys.modules[name]


def test_what_shoal_runs_with(scripts: dict[str, ModuleType]) -> None:
    names = {one.name.lower() for one in scripts["distributions"].runtime_distributions()}
    assert {"shoal", "torch", "numpy", "textual", "trio", "h2", "cryptography"} <= names
    assert not {"pytest", "mypy", "ruff", "transformers", "peft", "openai", "triton", "hypothesis"} & names


MEET = """
import sys
import trio
from p2p.identity import Identity
from p2p.network import Libp2pNetwork, NetworkConfig

async def echo(peer, body):
    return body

async def meet():
    config = NetworkConfig(listen=("/ip4/127.0.0.1/tcp/0",), discovery=frozenset({"dht"}))
    one, other = (Libp2pNetwork(Identity.generate(), config) for _ in range(2))
    other.serve("echo", echo)
    async with one.running(), other.running():
        one.learn(other.peer_id, other.addresses())
        print((await one.call(other.peer_id, "echo", b"met", timeout_s=10)).decode())

trio.run(meet)
import dns.asyncresolver, h11
of_the_tests = ("libp2p", "multiaddr", "google.protobuf", "trio_typing", "pytest", "gguf", "prometheus_client")
for name in of_the_tests:
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    print(name, "can be imported")
"""


def test_a_node_runs_with_its_own_dependencies_alone(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    """Loads all that a node and the dashboard load, and lets two nodes meet, where only links to those packages are."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    parts = scripts["distributions"].runtime_distributions(*project["dependencies"])
    assert len(parts) <= 70  # 64 on Linux with CPython 3.11; a dependency that brings many more needs a reason
    for one in parts:
        for top in {file.parts[0] for file in one.files or ()} - {"..", "__pycache__"}:
            if not (tmp_path / top).exists():
                (tmp_path / top).symlink_to(str(one.locate_file(top)))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [sys.executable, "-S", "-c", scripts["bundle"].WARM_UP + MEET],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "met\n"), done.stderr


def test_the_list_of_parts(scripts: dict[str, ModuleType]) -> None:
    module = scripts["distributions"]
    parts = module.runtime_distributions()
    document = module.cyclonedx("1.2.3", parts)
    assert document == module.cyclonedx("1.2.3", parts)  # a release can be built again and compared
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.5")
    assert re.fullmatch(r"urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", document["serialNumber"])
    references = [part["bom-ref"] for part in document["components"]]
    assert len(references) == len(set(references)) == len(parts) - 1
    assert document["dependencies"] == [{"ref": "pkg:pypi/shoal@1.2.3", "dependsOn": references}]
    torch = next(part for part in document["components"] if part["name"] == "torch")
    assert "+" not in torch["purl"]
    assert torch["licenses"]


def test_what_a_bundle_leaves_out(scripts: dict[str, ModuleType]) -> None:
    left_out = scripts["bundle"].NOT_OF_PACKAGES
    for name in ("torch/include/ATen/ATen.h", "torch/test/test_x", "torch/bin/protoc", "sympy/core/tests/test_a.py"):
        assert left_out.search(name)
    for name in (
        "torch/bin/torch_shm_manager",
        "torch/lib/libtorch_cpu.so",
        "torch/testing/__init__.py",
        "torch/utils/__init__.py",
        "rich/abc.py",
    ):
        assert not left_out.search(name)
    shoal = next(one for one in scripts["distributions"].runtime_distributions() if one.name == "shoal")
    assert list(scripts["bundle"].files_of(shoal)) == []  # it comes from a wheel of its own


def test_which_libraries_are_taken_along(scripts: dict[str, ModuleType]) -> None:
    said = (
        "\tlinux-vdso.so.1 (0x00007fff)\n"
        "\tlibssl.so.3 => /lib/x86_64-linux-gnu/libssl.so.3 (0x00007f1)\n"
        "\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f2)\n"
        "\tlibm.so.6 => /lib/x86_64-linux-gnu/libm.so.6 (0x00007f3)\n"
        "\tlibgcc_s.so.1 => /lib/x86_64-linux-gnu/libgcc_s.so.1 (0x00007f4)\n"
        "\t/lib64/ld-linux-x86-64.so.2 (0x00007f5)\n"
    )
    found = [path.name for path in scripts["bundle"].libraries_in(said, Path("x.so"))]
    assert found == ["libssl.so.3", "libgcc_s.so.1"]
    with pytest.raises(scripts["bundle"].BundleError, match=r"x\.so needs libodd\.so"):
        list(scripts["bundle"].libraries_in("\tlibodd.so => not found\n", Path("x.so")))


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
def test_the_launcher_finds_its_python_from_anywhere(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    folder = tmp_path / "a folder with spaces" / "bin"
    folder.mkdir(parents=True)
    for name, text in (("shoal", scripts["bundle"].LAUNCHER), ("python3", '#!/bin/sh\nprintf "%s|" "$@"\n')):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (tmp_path / "link").symlink_to(folder / "shoal")
    done = subprocess.run(
        [tmp_path / "link", "chat", "two words"], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout == "-I|-m|app.cli|chat|two words|"


def test_the_debian_package(scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = scripts["bundle"]
    template = (ROOT / "packaging" / "service" / "shoal.service").read_text("utf-8")
    unit = bundle.unit_file(template)
    assert "$" not in unit
    assert "\nExecStart=/usr/bin/shoal serve\n" in unit
    if shutil.which("dpkg-deb") is None:
        pytest.skip("no dpkg-deb here")
    folder = tmp_path / "shoal-1"
    (folder / "python" / "bin").mkdir(parents=True)
    (folder / "python" / "bin" / "shoal").write_text("#!/bin/sh\n")
    monkeypatch.setattr(bundle, "BUILD", tmp_path / "build")
    monkeypatch.setattr(bundle, "DIST", tmp_path)
    package = bundle.pack_deb(folder)
    told = subprocess.run(["dpkg-deb", "--info", package], capture_output=True, text=True, check=True).stdout
    assert f"Version: {bundle.version()}\n" in told
    listed = subprocess.run(["dpkg-deb", "--contents", package], capture_output=True, text=True, check=True).stdout
    assert "./usr/bin/shoal -> /opt/shoal/python/bin/shoal" in listed
    assert "./usr/lib/systemd/user/shoal.service" in listed
    assert "root/root" in listed.splitlines()[0]


def test_the_list_of_releases_goes_on(scripts: dict[str, ModuleType]) -> None:
    next_list: Any = scripts["release"].next_list
    first = next_list(None, "0.1.0", "https://example.org/1", time.time())
    second = next_list(first, "0.2.0", "https://example.org/2", time.time())
    again = next_list(second, "0.2.0", "https://example.org/2b", time.time())
    found = parse_list(json.dumps(again).encode())
    assert found.serial == 3
    assert [(one.version, one.url) for one in found.releases] == [
        ("0.2.0", "https://example.org/2b"),
        ("0.1.0", "https://example.org/1"),
    ]


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="no sha256sum here")
def test_the_sums_are_those_of_sha256sum(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    (tmp_path / "a.whl").write_bytes(b"a wheel")
    (tmp_path / "SHA256SUMS.minisig").write_bytes(b"of an earlier run")
    text = scripts["release"].sums(tmp_path)
    (tmp_path / "SHA256SUMS").write_text(text)
    assert text.count("\n") == 1
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=tmp_path, check=True, capture_output=True)


def test_the_version_is_stated_once(scripts: dict[str, ModuleType]) -> None:
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    assert scripts["bundle"].version() == stated
    for package in ("app", "engine", "p2p", "ui"):
        for path in (ROOT / package).rglob("*.py"):
            assert "__version__ =" not in path.read_text("utf-8"), path


def test_the_container_runs_as_a_user_from_files_that_exist() -> None:
    lines = (ROOT / "packaging" / "Dockerfile").read_text("utf-8").splitlines()
    steps = [line.split() for line in lines if line and not line.startswith(("#", " "))]
    for words in steps:
        if words[0] == "COPY" and not words[1].startswith("--from"):
            assert all((ROOT / name).exists() for name in words[1:-1]), words
    kinds = [words[0] for words in steps]
    assert kinds.index("USER") < kinds.index("ENTRYPOINT")
    assert "HEALTHCHECK" in kinds
