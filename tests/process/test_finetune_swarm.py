"""A fine-tuning job over real processes: two nodes train, one that hosts nothing owns it and dies on the way."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from app.api.client import client_of
from app.core.errors import AppError
from app.snapshot.views import TrainedView
from tests.process.node_process import PATIENCE_S, Place, Serving, is_covered, wait_until

STEPS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nodes")


@pytest.fixture(scope="module")
def data(folder: Path) -> Path:
    path = folder / "facts.jsonl"
    lines = [{"prompt": f"Where is fish {n}?", "completion": f"In pond {n * 7}."} for n in range(STEPS)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def hosts(folder: Path) -> Iterator[list[Serving]]:
    """Two nodes that hold the blocks between them and train for every member."""
    places = [Place(folder / name, folder / "cache") for name in ("left", "right")]
    assert places[0].shoal("create", "home", "--model", "tiny-random").status == 0
    flags = ("--discovery=invite", "--device=cpu")
    with Serving(places[0], *flags, "--blocks=0:4", max_vram="1GB", SHOAL_TRAIN="members") as left:
        left.ready()
        invite = places[0].shoal("invite").out.strip()
        with Serving(
            places[1], *flags, "--blocks=4:8", max_vram="1GB", SHOAL_TRAIN="members", SHOAL_INVITE=invite
        ) as right:
            right.ready()
            yield [left, right]


def owner(folder: Path, hosts: list[Serving]) -> Serving:
    invite = hosts[0].place.shoal("invite").out.strip()
    return Serving(Place(folder / "owner", folder / "cache"), "--discovery=invite", SHOAL_INVITE=invite)


def finetune(place: Place, data: Path, out: str, *more: str) -> Any:
    return place.facts("finetune", "--data", str(data), "--out", out, "--rank=4", "--batch=1", "--lr=1e-3", *more)


@pytest.mark.timeout(240)
def test_a_job_over_the_swarm_learns_what_one_process_learns(folder: Path, hosts: list[Serving], data: Path) -> None:
    with owner(folder, hosts) as node:
        node.ready()
        here = node.place
        wait_until(lambda: is_covered(here), "all blocks are held")
        forecast = finetune(here, data, "plan", "--dry-run", "--validation=0")
        assert forecast["steps"] == STEPS
        assert [(hop["start"], hop["stop"]) for hop in forecast["route"]] == [(0, 4), (4, 8)]
        assert 0 < forecast["step_s"] == pytest.approx(forecast["seconds"] / STEPS)
        whole = finetune(here, data, "whole", "--validation=0")
        assert (whole["status"], whole["step"], len(whole["losses"])) == ("finished", STEPS, STEPS)
        assert whole["model_name"] == "tiny-random"
        assert whole["losses"][-1] < whole["losses"][0]
        assert job_named(here, "whole")["snapshots_s"] > 0  # known after the job, too
        alone = finetune(here, data, "alone", "--validation=0", "--local", "--model=tiny-random", "--device=cpu")
        assert alone["losses"] == whole["losses"]
        assert weights(folder, "alone") == weights(folder, "whole")
        check_replies(here)
        past = here.facts("plan", "check")["forecasts"]
        tuned = next(one for one in past if one["task"] == "finetune")
        assert (tuned["machines"], tuned["model"]) == (2, whole["model"])
        assert tuned["measured"] == pytest.approx(whole["tokens"] / whole["seconds"], rel=0.01)
        taken = here.shoal("finetune", "--data", str(data), "--out", "whole")
        assert (taken.status, taken.err.count("\n")) == (1, 1)
        assert "there is an adapter named whole already" in taken.err


def test_a_job_goes_on_after_its_owner_died(folder: Path, hosts: list[Serving], data: Path) -> None:
    with owner(folder, hosts) as node:
        node.ready()
        here = node.place
        order = {"out": "again", "data": str(data), "rank": 4, "batch": 1, "rate": 1e-3, "validation": 0.0}
        client_of(here.home).post("/control/jobs", order)
        wait_until(lambda: job_named(here, "again")["step"] >= 12, "some steps are done")
        trained = [client_of(host.place.home).snapshot().trained for host in hosts]
        own = client_of(here.home).snapshot().peer_id
        for (job,), (start, stop) in zip(trained, ((0, 4), (4, 8)), strict=True):
            assert job == TrainedView(own, start, stop, job.steps_s, job.computed_s)
            assert 0 < job.computed_s < job.steps_s
        node.process.send_signal(signal.SIGKILL)
        node.process.wait(PATIENCE_S)
        assert job_on_disk(folder, "again")["step"] < STEPS
    with owner(folder, hosts) as node:
        node.ready()
        here = node.place
        wait_until(lambda: job_named(here, "again")["status"] == "finished", "the job went on by itself", 90)
        assert weights(folder, "again") == weights(folder, "whole")


def test_a_job_that_is_stopped_while_it_is_begun_again_stays_stopped(
    folder: Path, hosts: list[Serving], data: Path
) -> None:
    """It was said to be stopped, and ran on: the order came while the node still read the job's records."""
    with owner(folder, hosts) as node:
        node.ready()
        here, client = node.place, client_of(node.place.home)
        order = {"out": "halted", "data": str(data), "rank": 4, "batch": 1, "epochs": 50, "validation": 0.0}
        job = {"job": client.post("/control/jobs", order)["job"]}
        wait_until(lambda: job_named(here, "halted")["step"] >= 1, "a step is done")
        client.post("/control/jobs/pause", job)
        wait_until(lambda: job_named(here, "halted")["status"] == "paused", "the job is paused")
        with ThreadPoolExecutor(1) as pool:
            resumed = pool.submit(client_of(here.home).post, "/control/jobs/resume", job)
            client.post("/control/jobs/stop", job)
            with suppress(AppError):  # it was stopped first
                resumed.result(PATIENCE_S)
        wait_until(lambda: job_named(here, "halted")["status"] == "stopped", "the job is stopped")
        assert not (here.home / "jobs" / job["job"] / "state").exists()


def check_replies(here: Place) -> None:
    """Replies over the swarm with the new adapter have the tokens of one process, and others are as before."""
    client = client_of(here.home)
    asked = {"messages": [{"role": "user", "content": "Where is fish 3?"}], "temperature": 0.0, "max_tokens": 12}

    def reply(**more: str) -> Any:
        return next(piece["done"] for piece in client.chat({**asked, **more}) if "done" in piece)

    question = ("chat", "--temperature=0", "--max-tokens=12", "Where is fish 3?", "--adapter=whole")
    plain, tuned = reply(), here.facts(*question)
    local = here.facts(*question, "--local", "--model=tiny-random", "--device=cpu")
    assert len(tuned["route"]) == 2
    named = [tuned[name] for name in ("token_ids", "adapter", "adapter_root")]
    assert named == [local[name] for name in ("token_ids", "adapter", "adapter_root")]
    assert (tuned["adapter"], plain["adapter"]) == ("whole", None)
    assert tuned["token_ids"] != plain["token_ids"]
    assert reply()["token_ids"] == plain["token_ids"]
    assert reply(adapter="alone")["token_ids"] == tuned["token_ids"]
    missing = here.shoal("chat", "hello", "--adapter=lake")
    assert (missing.status, missing.err.count("\n")) == (1, 1)
    assert "no adapter is named lake" in missing.err
    models = client.get("/v1/models")["data"]
    assert [model["id"] for model in models][:1] == ["home"]
    assert {"home+whole", "home+alone"} <= {model["id"] for model in models}


def job_named(place: Place, out: str) -> Any:
    """What the node says of a job; quicker than a command."""
    return next(job for job in client_of(place.home).get("/control/jobs") if job["out"] == out)


def job_on_disk(folder: Path, out: str) -> Any:
    """What a command says of a job whose node is dead."""
    (job,) = [job for job in Place(folder / "owner", folder / "cache").facts("jobs") if job["out"] == out]
    assert job["status"] == "paused"
    return job


def weights(folder: Path, name: str) -> bytes:
    return (folder / "owner" / "adapters" / name / "adapter_model.safetensors").read_bytes()
