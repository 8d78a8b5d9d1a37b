"""What the doctor says about machines that are well, and about those that are not."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest

import app.cli
from app.system.doctor import (
    Check,
    check_device,
    check_disk,
    check_grids,
    check_model,
    check_python,
    check_torch,
    disk_of,
)
from engine.budget import BFLOAT16, fit
from engine.config import ModelConfig, Rope
from engine.device.probe import Device
from engine.hosting import HostingWish, plan_hosting, source_kind
from engine.sources.opening import open_source
from engine.stored_form import source_bytes

GB = 10**9
CARD = Device("cuda:0", "cuda", "Card of Test", 24 * GB, 20 * GB, 55.0, 80.2, 0.07, GB)
LLAMA_8B = ModelConfig("llama", 32, 4096, 32, 8, 128, 14336, 128256, 8192, 1e-5, Rope())


def test_a_device_that_is_well() -> None:
    check = check_device(CARD)
    assert (check.status, check.mend) == ("ok", "")
    expected = "Card of Test: 20.0 GB of 24.0 GB free, 7% busy, 55 °C, 80 W, 1.0 GB held by other programs"
    assert check.detail == expected


@pytest.mark.parametrize(
    ("changes", "mend"),
    [
        ({"temperature_c": 90.0}, "hot"),
        ({"others_bytes": 6 * GB}, "close the programs"),
        ({"note": "untested"}, "untested"),
        ({"usable": False, "note": "update the driver"}, "update the driver"),
    ],
)
def test_a_device_that_is_not_well(changes: dict[str, object], mend: str) -> None:
    check = check_device(dataclasses.replace(CARD, **changes))  # type: ignore[arg-type]
    assert check.status == "warn"
    assert mend in check.mend


def test_python_and_torch() -> None:
    assert check_python((3, 12, 1), "3.12.1").status == "ok"
    assert check_python((3, 14, 0), "3.14.0").status == "warn"
    assert check_torch("2.13.0").status == "ok"
    broken = check_torch(None, "libc10.so: cannot open shared object file")
    assert (broken.status, "libc10" in broken.detail, bool(broken.mend)) == ("fail", True, True)


def test_disk() -> None:
    assert check_disk(Path("/c"), 50 * GB, writable=True).status == "ok"
    assert check_disk(Path("/c"), GB // 2, writable=True).status == "warn"
    assert check_disk(Path("/c"), 50 * GB, writable=False).status == "fail"


def test_a_cache_that_does_not_exist_yet_is_judged_by_its_parent(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "yet"
    assert disk_of(folder).status in ("ok", "warn")
    assert not folder.exists()
    assert not (tmp_path / "not").exists()


def test_how_many_blocks_fit() -> None:
    check, none = (
        check_model("eight", 32, "cuda:0", fit(LLAMA_8B, CARD, BFLOAT16, cap_bytes).budget, cap_bytes)
        for cap_bytes in (6 * GB, 10**8)
    )
    assert check.name == "cuda:0 hosts"
    assert check.detail.startswith("8 of 32 blocks of eight (436.2 MB per block, 773.5 MB for the KV cache of")
    assert check.detail.endswith(", within the memory limit of 6.0 GB)")
    assert (none.status, none.detail[:30]) == ("warn", "none of the 32 blocks of eight")
    assert "shoal config set max_vram" in none.mend


def test_the_doctor_counts_the_blocks_that_a_node_would_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    source = open_source("tiny-random", tmp_path / "cache")
    cap_bytes = 3 * 10**6
    wish = HostingWish("cpu", cap_bytes)
    hosted = plan_hosting(source.config, source_kind(source), wish, source_bytes(source)).blocks
    assert 0 < hosted < source.config.n_blocks

    def counted(*options: str) -> str:
        app.cli.main(["doctor", "--home", str(tmp_path), "--json", "--model", "tiny-random", *options])
        checks = json.loads(capsys.readouterr().out)["checks"]
        (line,) = [check["detail"] for check in checks if check["name"] == "cpu hosts"]
        return str(line).split(" blocks")[0]

    whole = f"{source.config.n_blocks} of {source.config.n_blocks}"
    assert counted() == whole
    (tmp_path / "config.toml").write_text(f"max_vram = {cap_bytes}\n")
    assert counted() == f"{hosted} of {source.config.n_blocks}", "the setting applies"
    assert counted("--max-vram", "8GB") == whole, "the option overrides it"


def test_the_command_reports_this_machine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert app.cli.main(["doctor", "--home", str(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    names = [check["name"] for check in report["checks"]]
    assert names[:4] == ["python", "disk", "driver", "torch"]
    assert "cpu format" in names
    assert report["devices"][-1]["id"] == "cpu"
    assert all(check["mend"] for check in report["checks"] if check["status"] in ("warn", "fail"))


def test_the_command_prints_a_line_for_each_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if not line.startswith(" ")][:4] == ["python", "disk", "driver", "torch"]


def test_what_stops_shoal_is_a_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(
        "app.system.doctor.disk_of", lambda folder: Check("disk", "fail", "cannot be written", "change it")
    )
    assert app.cli.main(["doctor"]) == 1
    captured = capsys.readouterr()
    assert captured.err == "shoal: doctor found what stops Shoal from working: disk\n"
    assert "→ change it" in captured.out


def test_bits_of_gguf_files_are_reported() -> None:
    assert check_grids("cuda:0", True).detail == "GGUF files are computed with in their own bits"
    assert "decoded" in check_grids("cuda:0", False).detail
    with_package = importlib.util.find_spec("onnxruntime") is not None
    assert ("by measurement" if with_package else "onnxruntime") in check_grids("cpu", False).detail
