"""`shoal finetune`, `jobs` and `adapters` in one process: from a file of records to a reply with the adapter."""

from __future__ import annotations

import io
import json
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.api.client import NotAnswering
from app.cli import main
from app.config.home import Home
from app.core.wall_clock import wall_ms
from app.rounds.record import sign_training
from app.rounds.train_store import JoinWords, TrainStore
from app.training.job_store import JobStore, Progress
from tests.app.rounds.statements import PEOPLE, RECORD
from tests.engine.models import VARIANT, write_folder

RECORDS = [{"prompt": f"What is number {n}?", "completion": f"It is {n * 7}."} for n in range(6)]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SHOAL_DEBUG", raising=False)
    return tmp_path / "home"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, RECORDS)))
    return path


def finetune(data: Path, *arguments: str, out: str = "sevens") -> int:
    fixed = ["--device", "cpu", "--model", "tiny-random", "--batch", "2", "--lr", "1e-3", "--validation", "0.3"]
    return main(["finetune", "--local", "--data", str(data), "--out", out, *fixed, *arguments])


def weights(home: Path, name: str) -> bytes:
    return (home / "adapters" / name / "adapter_model.safetensors").read_bytes()


def test_from_records_to_a_reply_with_the_adapter(
    data: Path, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert finetune(data, "--epochs", "3", "--lr", "0.02", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["status"], facts["step"], facts["steps"], facts["out"]) == ("finished", 6, 6, "sevens")
    assert [step for step, _ in facts["validation"]] == [0, 2, 4, 6]
    assert facts["losses"][-1] < facts["losses"][0]
    assert main(["jobs", "--json"]) == 0
    (job,) = json.loads(capsys.readouterr().out)
    assert (job["job"], job["status"]) == (facts["job"], "finished")
    assert not (home / "jobs" / facts["job"] / "state").exists()
    assert main(["jobs", "show", facts["job"][:4]]) == 0
    assert "rank 8, alpha 16" in capsys.readouterr().out
    assert main(["adapters", "--json"]) == 0
    (adapter,) = json.loads(capsys.readouterr().out)
    assert (adapter["name"], adapter["model"], adapter["rank"]) == ("sevens", facts["model"], 8)

    question = "chat --local --model tiny-random --device cpu --temperature 0 --max-tokens 8".split()
    replies = []
    for option in ([], ["--adapter", "sevens"], []):
        assert main([*question, *option, "--json", "hello"]) == 0
        replies.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert replies[0] == replies[2] != replies[1]

    assert main(["adapters", "export", "sevens", str(tmp_path / "out")]) == 0
    assert main(["adapters", "import", str(tmp_path / "out"), "--name", "again", "--model", "tiny-random"]) == 0
    assert weights(home, "again") == weights(home, "sevens")
    assert main(["adapters", "remove", "sevens"]) == 0
    capsys.readouterr()
    assert main(["adapters"]) == 0
    assert capsys.readouterr().out.startswith("again: for tiny-random")


class Watched(io.StringIO):
    """A stderr whose reader presses Ctrl-C when a line appears."""

    def __init__(self, line: str) -> None:
        super().__init__()
        self._line = line

    def write(self, text: str) -> int:
        written = super().write(text)
        if self._line and self._line in self.getvalue():
            self._line = ""
            signal.raise_signal(signal.SIGINT)
        return written


def test_ctrl_c_pauses_and_the_job_goes_on_bit_for_bit(
    data: Path, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        finetune(
            data,
            "--epochs",
            "3",
            "--dropout",
            "0.1",
            out="whole",
        )
        == 0
    )
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", Watched("step 2 of 6"))
        assert finetune(data, "--epochs", "3", "--dropout", "0.1", out="parts") == 3
    said = capsys.readouterr().out
    job = JobStore(Home(home)).all()[0]
    assert f"`shoal jobs resume {job.record.id}` goes on" in said
    assert (job.progress.status, job.progress.step) == ("paused", 2)
    assert finetune(data, out="parts") == 1
    assert f"job {job.record.id} makes an adapter named parts already" in capsys.readouterr().err
    assert main(["jobs", "resume", job.record.id]) == 0
    assert weights(home, "parts") == weights(home, "whole")
    one, other = JobStore(Home(home)).all()
    assert (one.progress.losses, one.progress.validation) == (other.progress.losses, other.progress.validation)
    assert main(["jobs", "resume", job.record.id]) == 1
    assert "is finished already" in capsys.readouterr().err


def test_a_job_can_be_stopped_while_it_rests_and_data_must_stay_as_it_was(
    data: Path, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", Watched("step 1 of 2"))
        assert finetune(data) == 3
    job_id = JobStore(Home(home)).all()[0].record.id
    before = data.read_bytes()
    data.write_bytes(before.replace(b"7", b"8"))
    assert main(["jobs", "resume", job_id]) == 1
    assert f"the data of job {job_id} has changed" in capsys.readouterr().err
    data.write_bytes(before)
    assert main(["jobs", "pause", job_id]) == 0
    assert "is not running" in capsys.readouterr().out
    with JobStore(Home(home)).hold(job_id):  # as another process does while it trains
        assert main(["jobs", "stop", job_id, "--yes"]) == 0
        assert "what it has learned will be removed" in capsys.readouterr().out
        assert JobStore(Home(home)).wished(job_id) == "stop"
        assert main(["jobs", "resume", job_id]) == 1
    assert "is running in another process" in capsys.readouterr().err
    assert main(["jobs", "stop", job_id]) == 2
    said = capsys.readouterr().err
    assert "lose what it has learned in 1 step:" in said
    assert f"`shoal jobs pause {job_id}` keeps it" in said
    assert JobStore(Home(home)).load_state(job_id) is not None
    assert main(["jobs", "stop", job_id, "--yes"]) == 0
    assert JobStore(Home(home)).all()[0].progress.status == "stopped"
    assert JobStore(Home(home)).load_state(job_id) is None
    assert finetune(data) == 0  # its name is free again


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--targets", "q,w"], "unknown target 'w'"),
        (["--rank", "0"], "the rank 0 is outside 1 to 256"),
        (["--rank", "257"], "the rank 257 is outside 1 to 256"),
        (["--lr", "-1"], "the learning rate must be a positive number, not -1.0"),
        (["--lr", "nan"], "the learning rate must be a positive number, not nan"),
        (["--out", "a/b"], "cannot be an adapter's name"),
        (["--validation", "2"], "--validation 2 is not a share"),
        (["--validation", "none.jsonl"], "none.jsonl cannot be read"),
        (["--length", "100000"], "is more than the model's context"),
        (["--model", "nonsense"], "unknown model 'nonsense'"),
    ],
)
def test_bad_input_is_one_line_and_exit_1(
    data: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert finetune(data, *arguments) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.splitlines()[-1].startswith("shoal: ")


def test_data_that_is_cut_or_broken_is_named(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert finetune(data, "--length", "40", "--dry-run") == 0
    assert "6 records are longer than 40 tokens and are cut" in capsys.readouterr().err
    data.write_text('{"text": "a"}\nno json\n')
    assert finetune(data) == 1
    assert "line 2 is not JSON" in capsys.readouterr().err
    data.write_text("")
    assert finetune(data) == 1
    assert "is empty" in capsys.readouterr().err


def test_a_dry_run_trains_nothing(data: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert finetune(data, "--dry-run", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["records"], facts["validation_records"], facts["steps"]) == (4, 2, 2)
    assert facts["memory_bytes"] >= facts["peak_bytes"] > facts["weight_bytes"] > 0
    assert facts["seconds"] == 2 * facts["step_s"] > 0
    assert JobStore(Home(home)).all() == []


def test_a_loss_that_is_not_finite_stops_at_the_last_good_step(
    data: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert finetune(data, "--lr", "1e20", "--epochs", "4") == 1
    assert "start again with a smaller --lr" in capsys.readouterr().err
    job = JobStore(Home(home)).all()[0]
    assert job.progress.status == "failed"
    assert job.progress.step == len(job.progress.losses) >= 1
    assert main(["jobs"]) == 0
    assert job.progress.why in capsys.readouterr().out


def test_an_adapter_of_another_model_is_refused_with_both_hashes(
    data: Path, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert finetune(data) == 0
    write_folder(tmp_path / "other", VARIANT["llama"])
    capsys.readouterr()
    assert main(["chat", "--local", "--model", str(tmp_path / "other"), "--adapter", "sevens", "hello"]) == 1
    assert "belongs to the model" in capsys.readouterr().err
    folder = home / "adapters" / "sevens"
    weights_file = folder / "adapter_model.safetensors"
    raw = weights_file.read_bytes()
    known = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]["shoal_model"]
    weights_file.write_bytes(raw.replace(known.encode(), b"0" * 64))  # the same shape, another model
    for command in (
        ["chat", "--local", "--model", "tiny-random", "--adapter", "sevens", "hello"],
        ["adapters", "import", str(folder), "--name", "copy", "--model", "tiny-random"],
    ):
        assert main(command) == 1
        error = capsys.readouterr().err
        assert known in error
        assert "0" * 64 in error


def test_adapters_that_are_not_there_or_already_are(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["adapters"]) == 0
    assert "There are no adapters" in capsys.readouterr().out
    for command in (["adapters", "remove", "x"], ["adapters", "export", "x", str(tmp_path / "y")]):
        assert main(command) == 1
        assert "no adapter is named x" in capsys.readouterr().err
    assert main(["adapters", "remove", "../x"]) == 1
    assert "cannot be an adapter's name" in capsys.readouterr().err
    assert finetune(data) == 0
    assert finetune(data) == 1
    assert "there is an adapter named sevens already" in capsys.readouterr().err
    assert main(["adapters", "export", "sevens", str(tmp_path)]) == 1
    assert "is not an empty folder" in capsys.readouterr().err
    assert main(["adapters", "export", "sevens"]) == 2
    assert main(["jobs", "show"]) == 2
    assert main(["jobs", "show", "abc"]) == 1


def test_jobs_shows_a_training_job(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = TrainStore(Home.open(home))
    job = store.create(sign_training(PEOPLE[0], replace(RECORD, created_ms=wall_ms())), {})
    said = {"left_out": {"a": "it lied\x1b[2J"}, "resting": {"b": "it failed"}, "doubted": {"c": "it is unlike"}}
    island = {"peer": "a", "here": True, "alive": True, "steps": 5, "tokens": 9, "lag_s": 0.5, "tokens_per_s": 2.0}
    store.save_facts(job, {**store.facts(job), **said, "status": "running", "islands": [island], "loss": 2.5})
    assert main(["jobs", "show", "fish"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "status      paused" in lines  # no node runs, so that it does not either
    assert "waiting     waits until this node is in its swarm again; `shoal train leave fish` gives it up" in lines
    assert "round       0, step 0 of 40" in lines
    assert lines[-4:-1] == ["left out    a: it lied[2J", "resting     b: it failed", "doubted     c: it is unlike"]
    assert main(["jobs", "show", job.id, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["resting"], facts["islands"]) == ({"b": "it failed"}, [island])


def test_a_training_job_of_another_swarm_is_left_and_then_removed(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each command named another one, in a circle."""
    store = TrainStore(Home.open(home))
    job = store.create(sign_training(PEOPLE[0], replace(RECORD, created_ms=wall_ms())), {"tokens": b"1"})
    store.save_facts(job, {**store.facts(job), "status": "running", "round": 3, "swarm": "reef#1a2b3c4d"})
    assert main(["jobs"]) == 0
    assert "fish: paused, round 3, step 0: waits until this node is in reef#1a2b3c4d again" in capsys.readouterr().out
    assert main(["jobs", "stop", "fish", "--yes"]) == 2
    assert "`shoal train leave fish` ends that" in capsys.readouterr().err
    assert main(["train", "leave", "fish"]) == 0
    assert "`shoal jobs stop fish` removes its files" in capsys.readouterr().out
    assert main(["jobs", "stop", "fish"]) == 2
    error = capsys.readouterr().err
    assert "with what was learned in 3 rounds: `shoal train export fish FOLDER` writes the model before" in error
    assert (job.folder / "tokens").exists()
    assert main(["jobs", "stop", "fish", "--yes"]) == 0
    assert capsys.readouterr().out == "The training job fish is removed with its files.\n"
    assert not job.folder.exists()
    assert main(["jobs", "stop", "fish", "--yes"]) == 1


def test_a_training_job_is_left_and_removed_by_the_node_that_runs(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = TrainStore(Home.open(home))
    job = store.create(sign_training(PEOPLE[0], replace(RECORD, created_ms=wall_ms())), {})
    store.save_facts(job, {**store.facts(job), "status": "finished"})
    asked: list[tuple[str, dict[str, Any]]] = []

    class Node:
        def get(self, path: str, timeout_s: float | None = None) -> list[dict[str, Any]]:
            return store.all_idle_facts()

        def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
            asked.append((path, body))
            return store.all_idle_facts()[0]

    monkeypatch.setattr("app.api.client.running_client", lambda folder: Node())
    assert main(["jobs", "stop", job.id, "--yes"]) == 0
    assert main(["train", "leave", "fish"]) == 0
    assert asked == [
        ("/control/train/remove", {"job": job.record.id.hex()}), ("/control/train/leave", {"job": "fish"})
    ]  # fmt: skip


def test_a_training_job_whose_text_is_still_fetched_is_joined_and_shown(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = TrainStore(Home.open(home))
    job = store.begin_joining(sign_training(PEOPLE[0], replace(RECORD, created_ms=wall_ms())), JoinWords())
    facts = {**store.idle_facts(job), "waiting": "fetches its text (3.1 MB of 30 MB)"}

    class Node:
        def get(self, path: str, timeout_s: float | None = None) -> list[dict[str, Any]]:
            return [facts] if path == "/control/train" else []

        def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
            return facts

    monkeypatch.setattr("app.api.client.running_client", lambda folder: Node())
    monkeypatch.setattr("app.api.client.client_of", lambda folder: Node())
    assert main(["train", "join", "fish"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("This node fetches its text (3.1 MB of 30 MB); then it takes part in fish: see `shoal jobs")
    assert main(["jobs"]) == 0
    assert "fish: paused, round 0, step 0: fetches its text (3.1 MB of 30 MB)" in capsys.readouterr().out
    assert main(["train", "export", "fish", str(home / "model")]) == 1
    assert "its text is still to come" in capsys.readouterr().err


def test_a_running_node_says_which_training_jobs_run(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The files of a job say that it runs after its node has gone to another swarm."""
    store = TrainStore(Home.open(home))
    job = store.create(sign_training(PEOPLE[0], replace(RECORD, created_ms=wall_ms())), {})
    store.save_facts(job, {**store.facts(job), "status": "running"})

    class Node:
        def get(self, path: str, timeout_s: float | None = None) -> list[dict[str, Any]]:
            if path == "/control/train/joinable":
                return [{"job": "1a2b", "name": "poems", "founder": "a", "steps": 40, "own_data": False}]
            assert path == "/control/train"
            return [store.idle_facts(job), {**store.idle_facts(job), "name": "reef", "hash": "ab", "status": "running"}]

    monkeypatch.setattr("app.api.client.running_client", lambda folder: Node())
    assert main(["jobs"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[1].split(",")[0] for line in lines] == ["paused", "running"]
    assert last == "poems: a training job of other members, 40 steps; `shoal train join poems` takes part"
    assert main(["jobs", "list"]) == 0
    assert capsys.readouterr().out.splitlines() == [*lines, last]
    assert main(["jobs", "list", "reef"]) == 2
    assert "`shoal jobs show reef`" in capsys.readouterr().err
    assert main(["jobs", "show", "reef"]) == 0
    assert "round       0, step 0 of 40, alone" in capsys.readouterr().out


def test_a_full_disk_leaves_no_half_adapter(
    data: Path, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("app.training.adapter_store.write_private", full)
        assert finetune(data) == 1
    assert "the disk is full" in capsys.readouterr().err
    assert list((home / "adapters").iterdir()) == []
    job = JobStore(Home(home)).all()[0]
    assert (job.progress.status, job.progress.step) == ("paused", 2)
    assert main(["jobs", "resume", job.record.id]) == 0  # nothing is left to compute
    assert weights(home, "sevens")


class FrozenNode:
    """A node that begins a job, and answers nothing after that."""

    def post(self, path: str, order: dict[str, Any]) -> dict[str, Any]:
        facts = dict.fromkeys(("step", "tokens", "seconds", "cut", "dropped"), 0)
        return {
            **facts,
            "job": "1a2b3c4d",
            "status": "running",
            "steps": 9,
            "waiting": "",
            "losses": [],
            "validation": [],
        }

    def get(self, path: str) -> Any:
        raise NotAnswering("the node at http://127.0.0.1:1 did not answer in time")


def test_a_job_whose_node_hangs_is_not_said_to_be_over(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("app.api.client.client_of", lambda folder: FrozenNode())
    monkeypatch.setattr("app.cli.finetune._POLL_S", 0.0)
    assert main(["finetune", "--data", str(data), "--out", "sevens"]) == 1
    *_, last = capsys.readouterr().err.splitlines()
    assert last.endswith("did not answer in time; the job goes on in the node: `shoal jobs` shows it")


class WaitingNode(FrozenNode):
    """A node whose job waits for members, until its user pauses it."""

    def __init__(self) -> None:
        self.waits = ["", "waits for members: no route", "waits for members: no route", "waits for memory: 1 GB"]

    def get(self, path: str) -> Any:
        status, waiting = ("running", self.waits.pop(0)) if self.waits else ("paused", "")
        return [{**self.post(path, {}), "status": status, "waiting": waiting, "step": 2, "losses": [1.0, 0.9]}]


def test_what_a_job_waits_for_is_said_once(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    node = WaitingNode()
    monkeypatch.setattr("app.api.client.client_of", lambda folder: node)
    monkeypatch.setattr("app.cli.finetune._POLL_S", 0.0)
    assert main(["finetune", "--data", str(data), "--out", "sevens"]) == 3
    out, err = capsys.readouterr()
    said = [line for line in err.splitlines() if "waits" in line]
    assert said == ["step 2 of 9, waits for members: no route", "step 2 of 9, waits for memory: 1 GB"]
    assert "Job 1a2b3c4d is paused after step 2 of 9." in out


def test_jobs_says_what_a_job_waits_for(home: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert finetune(data, "--json") == 0
    job_id = json.loads(capsys.readouterr().out)["job"]
    store = JobStore(Home(home))
    store.save_progress(job_id, Progress("running", step=1, waiting="waits for members: no route"))
    with store.hold(job_id):  # as the node does that runs it
        assert main(["jobs"]) == 0
        assert "running, step 1 of 2: waits for members: no route" in capsys.readouterr().out
        assert main(["jobs", "show", job_id]) == 0
        assert "waiting     waits for members: no route" in capsys.readouterr().out.splitlines()
        assert main(["jobs", "show", job_id, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["waiting"] == "waits for members: no route"
    assert main(["jobs", "show", job_id]) == 0
    assert "waits" not in capsys.readouterr().out  # no node runs, so that nothing waits either
