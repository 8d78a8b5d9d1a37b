"""`shoal plan` on files of machines, on this machine, and on a node's swarm; no network but loopback is touched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import app.cli
from app.cli import plan
from app.planning.forecast import WIRES
from app.planning.machines import MachineSpec
from app.snapshot.views import PeerView, Snapshot

ROOT = Path(__file__).resolve().parents[3]
MACHINES = """
[[machine]]
name = "desk"
memory_bytes = "3GB"
reading_bytes_per_s = "700GB"
flops_per_s = 40e12
watts = 250

[[machine]]
name = "friend"
count = 7
memory_bytes = "3GB"
reading_bytes_per_s = "400GB"
flops_per_s = 20e12
watts = 200
rtt_s = 0.03
"""
FIELDS = {
    "task", "tokens_per_s", "first_token_s", "seconds", "energy_kwh", "cost", "alone", "lacking_bytes", "limit",
    "verdicts", "advice", "why", "parts", "assumed", "low", "high", "machines",
    "idle", "utilisation", "correction",
}  # fmt: skip
HERE = MachineSpec("here", 64 * 10**9, 10e9, 50e9, kind="cpu", rtt_s=0.0)


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty home and cache, and a file of machines in the current folder."""
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SHOAL_DEBUG", raising=False)
    monkeypatch.chdir(tmp_path)
    Path("m.toml").write_text(MACHINES, "utf-8")


def planned(*arguments: str, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    assert app.cli.main(["plan", *arguments, "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("task", plan.TASKS)
def test_a_forecast_over_a_file(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(task, "--machines", "m.toml", "--price", "0.3", "--rent", "2.5", capsys=capsys)
    assert set(found) == FIELDS
    assert found["task"] == task
    verdicts = found["verdicts"]
    assert isinstance(verdicts, list)
    seven = {"bandwidth", "stragglers", "unlike_data", "memory", "cost", "poisoning", "provenance"}
    assert seven <= {verdict["name"] for verdict in verdicts}
    assert {"name", "value", "threshold", "change"} <= set(verdicts[0])
    assert app.cli.main(["plan", task, "--machines", "m.toml"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1].endswith(str(found["why"]))
    assert any(line.split() == ["limit", found["limit"]] for line in printed)


def test_options_change_the_forecast(capsys: pytest.CaptureFixture[str]) -> None:
    base = planned("chat", "--machines", "m.toml", capsys=capsys)
    late = planned("chat", "--machines", "m.toml", "--tokens", "1000000000", "--within", "1m", capsys=capsys)
    many = planned("chat", "--machines", "m.toml", "--streams", "8", capsys=capsys)
    assert (base["advice"], late["advice"]) == ("alone", "not_at_all")
    assert float(str(many["tokens_per_s"])) > float(str(base["tokens_per_s"]))
    Path("l.toml").write_text('[[link]]\nfrom = "desk"\nto = "friend-1"\nrtt_s = 0.001\n', "utf-8")
    assert set(planned("chat", "--machines", "m.toml", "--links", "l.toml", capsys=capsys)) == FIELDS


def test_growing_swarms(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.cli.main(["plan", "sweep", "--machines", "m.toml", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["machines"] for row in found["sizes"]] == [1, 2, 4, 8]
    speeds = [row["tokens_per_s"] for row in found["sizes"]]
    assert speeds == sorted(speeds)
    assert found["enough"] == 1
    assert app.cli.main(["plan", "sweep", "--machines", "m.toml", "--task", "train"]) == 0
    assert "#" in capsys.readouterr().out


def test_machines_like_this_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(plan, "this_machine", lambda home, snapshot: HERE)
    assert app.cli.main(["plan", "sweep", "--machines", "2:5", "--task", "train", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["machines"] for row in found["sizes"]] == [2, 4, 5]
    assert found["sizes"][1]["tokens_per_s"] > found["sizes"][0]["tokens_per_s"]


def test_without_a_node_this_machine_is_measured_alone(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned("chat", capsys=capsys)
    assert isinstance(found["assumed"], list)
    assert found["assumed"][0].startswith("no swarm: this machine alone is forecast")
    assert found["machines"] == ["here"]


class RunningNode:
    """A client of a node in a swarm of one other member."""

    def snapshot(self) -> Snapshot:
        peer = PeerView("near", start=0, stop=30, rtt_s=0.01, state="serving", tokens_per_s=100.0)
        return Snapshot("me", "client", "", "http://127.0.0.1", swarm="reef", peers=(peer,), blocks_total=30)


def test_a_running_nodes_swarm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("app.api.client.running_client", lambda home: RunningNode())
    monkeypatch.setattr(plan, "this_machine", lambda home, snapshot: HERE)
    assert planned("chat", capsys=capsys)["machines"] == ["near"]
    assert app.cli.main(["plan", "chat", "--streams", "4"]) == 2
    assert "--streams needs --machines" in capsys.readouterr().err
    alone = planned("train", capsys=capsys)
    assert "members do not say what they can train" in str(alone["assumed"])


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["chat", "--machines", "none.toml"], 1, "none.toml"),
        (["chat", "--machines", "bad.toml"], 1, "machine 'x' has no memory_bytes"),
        (["chat", "--machines", "binary.toml"], 1, "not text in UTF-8"),
        (["chat", "--machines", "m.toml", "--links", "l.toml"], 1, "leads to 'moon', which is not one of the machines"),
        (["chat", "--machines", "m.toml", "--model", "org/none"], 1, "shoal pull org/none"),
        (["chat", "--machines", "m.toml", "--model", "0123456789"], 1, "`shoal join` its swarm fetches it"),
        (["chat", "--links", "l.toml"], 2, "--links needs --machines"),
        (["sweep", "--machines", "9:3"], 2, "9:3 is not a range of machines"),
        (["sweep", "--machines", "0:3"], 2, "0:3 is not a range of machines"),
    ],
)
def test_refusals(arguments: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.toml").write_text('[[machine]]\nname = "x"\nflops_per_s = 1\n', "utf-8")
    Path("binary.toml").write_bytes(b"\xff\xfe\x00")
    Path("l.toml").write_text('[[link]]\nfrom = "desk"\nto = "moon"\nrtt_s = 1\n', "utf-8")
    assert app.cli.main(["plan", *arguments]) == status
    shown = capsys.readouterr()
    assert shown.out == ""
    assert said in shown.err
    assert len(shown.err.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["fly"],
        [],
        ["chat", "--tokens", "0"],
        ["chat", "--price", "nan"],
        ["chat", "--within", "soon"],
        ["train", "--wire", "tin"],
    ],
)
def test_bad_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        app.cli.main(["plan", *arguments])
    assert stopped.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_wires_of_the_command_are_those_of_the_forecast() -> None:
    assert plan.WIRES == tuple(WIRES)


def test_a_file_is_planned_without_torch() -> None:
    code = "import sys, app.cli\nassert app.cli.main(['plan', 'train', '--machines', 'm.toml', '--json']) == 0\n"
    code += "print(*({'torch', 'trio', 'libp2p'} & sys.modules.keys()))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert answer.stdout.splitlines()[1:] == [""]
