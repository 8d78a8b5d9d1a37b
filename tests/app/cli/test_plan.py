"""`shoal plan` on files of machines, on this machine, and on a node's swarm; no network but loopback is touched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import app.cli
from app.cli import plan
from app.planning.forecast import WIRES, Terms, forecast_replies
from app.planning.machines import Fleet, MachineSpec
from app.planning.replies import ReplyTask
from app.planning.verdicts import Verdict, at_least, at_most, memory_verdict
from app.rounds.founding import HELD_MOST
from app.snapshot.codec import to_json
from app.snapshot.views import OfferView, PeerView, Snapshot
from engine.sources.starter import SHAPE, tensors_of

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
    "idle", "utilisation", "correction", "sent_bytes",
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


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        (at_most("compute", 1.0, 0.5), "compute 100% of the time is spent computing: faster machines"),
        (at_most("latency", 0.743, 0.5), "latency 74% of the time is spent on links: "),
        (
            at_most("stragglers", 2.346, 1.5),
            "stragglers the slowest takes 2.35 times as long as usual, 1.5 is accepted: ",
        ),
        (memory_verdict(20, 32), "memory 62% of the model's blocks fit, all have to: "),
        (at_most("poisoning", 0.1, 0.05), "poisoning 10% probable, 5% is accepted: "),
        (at_most("bandwidth", 400.0, 50.0), "bandwidth 400, at most 50 is good: "),
        (at_most("cost", 1.5, 1.0), "cost 1.5 times the price of renting: "),
        (at_most("unlike_data", 0.1, 0.03), "unlike_data 10% worse on one's own data, 3% is accepted: "),
        (at_least("provenance", 0.5, 1.0), "provenance 50% of the text has a source and a licence: "),
    ],
)
def test_a_limit_says_what_its_numbers_mean(verdict: Verdict, words: str) -> None:
    assert verdict.passed is False
    machine = replace(HERE, name="here")
    terms = Terms(64)
    found = forecast_replies(Fleet(machine, (machine,)), SHAPE, ReplyTask(), terms)
    lines = plan.forecast_lines(replace(found, verdicts=(verdict,)), terms)
    assert any(" ".join(line.split()).startswith(words) for line in lines), lines


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
    monkeypatch.setattr(plan, "this_machine", lambda home, snapshot, model, task: HERE)
    assert app.cli.main(["plan", "sweep", "--machines", "2:5", "--task", "train", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["machines"] for row in found["sizes"]] == [2, 4, 5]
    assert found["sizes"][1]["tokens_per_s"] > found["sizes"][0]["tokens_per_s"]


@pytest.mark.parametrize("model", [("--model", "tiny-random"), pytest.param((), marks=pytest.mark.soak)])
def test_without_a_node_this_machine_is_measured_alone(
    model: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    found = planned("chat", *model, capsys=capsys)
    assert isinstance(found["assumed"], list)
    assert found["assumed"][0].startswith("no swarm: this machine alone is forecast")
    assert found["machines"] == ["here"]


@pytest.mark.parametrize(("busy_s", "said"), [(9.0, "shoal: other programs used 80% of the processor"), (2.0, "")])
def test_a_measurement_beside_other_programs_says_so(
    busy_s: float, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The speed of a busy machine was forecast as if it were an idle one's, 28 times too low."""
    seconds = iter([(0.0, 0.0, 0.0), (10.0, busy_s, 1.0)])
    monkeypatch.setattr("engine.device.sensors.machine_cpu_seconds", lambda: next(seconds))
    assert app.cli.main(["plan", "chat", "--model", "tiny-random"]) == 0
    heard = capsys.readouterr()
    assert "tokens/s" in heard.out
    assert (heard.err.startswith(said), bool(heard.err)) == (True, bool(said))


MODEL = "0123456789abcdef" * 4
LAGOON = OfferView(f"lagoon#{MODEL[:8]}", "starter", members=3, tokens_per_s=400.0, alone_tokens_per_s=20.0)


class RunningNode:
    """A client of a node in a swarm of one other member, which knows other swarms."""

    def __init__(self, *offers: OfferView) -> None:
        self.offers = offers

    def snapshot(self) -> Snapshot:
        peer = PeerView("near", start=0, stop=30, rtt_s=0.01, state="serving", tokens_per_s=100.0)
        return Snapshot(
            "me", "client", "", "http://127.0.0.1", swarm="reef", manifest=MODEL, peers=(peer,), blocks_total=30
        )

    def get(self, path: str, timeout_s: float) -> dict[str, object]:
        assert path == "/control/prospects"
        return {"offers": [to_json(offer) for offer in self.offers]}

    def post(self, path: str, body: dict[str, str]) -> dict[str, object]:
        assert (path, body) == ("/control/preview", {"target": "lagoon"})
        return to_json(self.offers[0])


def test_a_running_nodes_swarm(node: RunningNode, capsys: pytest.CaptureFixture[str]) -> None:
    assert planned("chat", capsys=capsys)["machines"] == ["near"]
    assert app.cli.main(["plan", "chat", "--streams", "4"]) == 2
    assert "--streams needs --machines" in capsys.readouterr().err
    alone = planned("train", capsys=capsys)
    assert "members do not say what they can train" in str(alone["assumed"])


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> RunningNode:
    """A running node that knows a faster swarm with the same model, one with another, and an incomplete one."""
    known = RunningNode(LAGOON, replace(LAGOON, target="other#ffffffffffffffffffff", tokens_per_s=900.0))
    monkeypatch.setattr("app.api.client.running_client", lambda home: known)
    monkeypatch.setattr("app.api.client.client_of", lambda home: known)
    monkeypatch.setattr(plan, "this_machine", lambda home, snapshot, model, task: HERE)
    monkeypatch.setattr(plan, "planned_model", lambda name, snapshot: plan.PlannedModel(SHAPE, tensors_of))
    return known


def test_a_faster_swarm_with_the_same_model_is_advised(node: RunningNode, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned("chat", capsys=capsys)
    assert (found["advice"], found["machines"]) == ("other_swarm", ["near"])
    assert found["why"] == f"{LAGOON.target} serves the same model at 400.0 tokens/s."
    node.offers = (replace(LAGOON, tokens_per_s=10.0), replace(LAGOON, tokens_per_s=None, missing_block=3))
    assert planned("chat", capsys=capsys)["advice"] != "other_swarm"


def test_another_swarm_is_forecast_by_its_name(node: RunningNode, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned("chat", "--swarm", "lagoon", "--tokens", "800", capsys=capsys)
    assert (found["tokens_per_s"], found["seconds"], found["advice"]) == (400.0, 2.0, "swarm")
    assert planned("chat", "--swarm", "reef", capsys=capsys)["machines"] == ["near"]
    node.offers = (replace(LAGOON, tokens_per_s=None, missing_block=3),)
    alone = planned("chat", "--swarm", "lagoon", capsys=capsys)
    assert (alone["tokens_per_s"], alone["advice"]) == (20.0, "alone")
    assert alone["assumed"] == ["no swarm: this machine alone is forecast (nobody there serves block 3)"]
    node.offers = (replace(LAGOON, tokens_per_s=None, alone_tokens_per_s=None),)
    assert planned("chat", "--swarm", "lagoon", capsys=capsys)["advice"] == "not_at_all"
    assert app.cli.main(["plan", "chat", "--swarm", "lagoon"]) == 0


def test_sent_bytes_cost_where_they_are_billed(capsys: pytest.CaptureFixture[str]) -> None:
    for task in ("finetune", "train"):
        free, billed = (
            planned(task, "--machines", "m.toml", "--price", "0.3", *more, capsys=capsys)
            for more in ((), ("--egress", "0.09"))
        )
        sent = float(str(free["sent_bytes"]))
        assert sent > 0
        assert float(str(billed["cost"])) == pytest.approx(float(str(free["cost"])) + sent / 1e9 * 0.09)


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["chat", "--swarm", "lagoon", "--machines", "m.toml"], 2, "--swarm is for chat"),
        (["train", "--swarm", "lagoon"], 2, "--swarm is for chat"),
        (["chat", "--swarm", "lagoon"], 1, "no node runs"),
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


def test_constants_of_the_command_are_those_of_the_code() -> None:
    assert plan.WIRES == tuple(WIRES)
    assert plan.HELD_SEQUENCES == HELD_MOST


def test_a_file_is_planned_without_torch() -> None:
    code = "import sys, app.cli\nassert app.cli.main(['plan', 'train', '--machines', 'm.toml', '--json']) == 0\n"
    code += "print(*({'torch', 'trio', 'libp2p'} & sys.modules.keys()))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert answer.stdout.splitlines()[1:] == [""]
