"""`shoal jobs`: lists fine-tuning and training jobs, shows one, stops one, and pauses or resumes one of fine-tuning."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from app.cli.command import Command, print_json
from app.core.errors import UsageError
from app.core.terminal_text import one_line
from app.core.units import format_size

if TYPE_CHECKING:
    from app.config.home import Home
    from app.snapshot.views import JoinableView
    from app.training.job_store import Job, JobStore

ACTIONS = ("list", "show", "pause", "resume", "stop")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the action and the job."""
    words = (
        "what to do with the job; without it, list all. stop ends it for good and removes what it has learned, or the "
        "files of a training job that is over or was left"
    )
    parser.add_argument("action", nargs="?", choices=ACTIONS, help=words)
    parser.add_argument("job", nargs="?", metavar="ID", help="the job's id, its beginning, or a training job's name")
    parser.add_argument("--yes", action="store_true", help="with stop: remove what the job has learned")


def run_jobs(arguments: argparse.Namespace) -> int:
    """List the jobs of this home, or act on one."""
    from app.config.home import Home
    from app.training.job_store import JobStore, require_unfinished

    home = Home.open(arguments.home)
    jobs = JobStore(home)
    if arguments.action in (None, "list"):
        if arguments.job is not None:
            raise UsageError(f"list takes no job: `shoal jobs show {arguments.job}` shows one")
        joinable = [] if arguments.json else _joinable(home)
        return _list(jobs, _trainings(home), joinable, as_json=arguments.json)
    if arguments.job is None:
        raise UsageError(f"name the job: `shoal jobs {arguments.action} ID`")
    for facts in _trainings(home, arguments.job):
        if arguments.action == "show":
            return _show_training(facts, as_json=arguments.json)
        if arguments.action == "stop":
            return _remove_training(home, facts, sure=arguments.yes, as_json=arguments.json)
        name = facts["name"]
        raise UsageError(f"{name} is a training job: `shoal train leave {name}` ends taking part, `join` begins it")
    job = jobs.find(arguments.job)
    if arguments.action == "show":
        return _show(job, as_json=arguments.json)
    if arguments.action == "resume":
        from app.cli.finetune import resume

        return resume(require_unfinished(job), arguments)
    steps = require_unfinished(job).progress.step
    if arguments.action == "stop" and steps and not arguments.yes:
        job_id = job.record.id
        raise UsageError(
            f"to stop job {job_id} is to lose what it has learned in {steps} {'step' if steps == 1 else 'steps'}: "
            f"`shoal jobs pause {job_id}` keeps it, `shoal jobs stop {job_id} --yes` removes it"
        )
    return _end(jobs, job, arguments.action, as_json=arguments.json)


def _end(jobs: JobStore, job: Job, action: str, *, as_json: bool) -> int:
    """Pause or stop a job, whether or not a process runs it."""
    job_id = job.record.id
    if jobs.end(job, "stop" if action == "stop" else "pause"):
        then = ", and what it has learned will be removed" if action == "stop" else ""
        words = f"Job {job_id} will {action} after the step that it is at{then}."
    elif action == "stop":
        words = f"Job {job_id} is stopped, and what it had learned is removed."
    else:
        words = f"Job {job_id} is not running: `shoal jobs resume {job_id}` goes on with it."
    if as_json:
        print_json({"job": job_id, "running": jobs.is_running(job_id)})
    else:
        print(words)
    return 0


def _trainings(home: Home, name: str | None = None) -> list[dict[str, Any]]:
    """The figures of the training jobs of this home, or of those of a name or beginning of a hash.

    The running node has them, since it knows which of them run; without one, none does.
    """
    if not home.trainings_folder.is_dir():
        return []
    from app.api.client import running_client
    from app.rounds.train_store import TrainStore

    client = running_client(home.folder)
    known = TrainStore(home).all_idle_facts() if client is None else client.get("/control/train")
    return [facts for facts in known if name in (None, facts["name"]) or facts["hash"].startswith(name)]


def _joinable(home: Home) -> list[JoinableView]:
    """The training jobs of other members that the running node could join; none without one."""
    from app.api.client import PATIENT_S, running_client
    from app.snapshot.codec import joinable_from

    client = running_client(home.folder)
    return [] if client is None else joinable_from(client.get("/control/train/joinable", timeout_s=PATIENT_S))


def _show_training(facts: dict[str, Any], *, as_json: bool) -> int:
    if as_json:
        print_json(facts)
        return 0
    _say(f"job         {facts['name']} ({facts['hash']})")
    _say(f"status      {facts['status']}{_because(facts['why'])}")
    if facts["swarm"]:
        _say(f"swarm       {facts['swarm']}")
    alone = ", alone" if facts["status"] == "running" and len(facts["islands"]) < 2 else ""
    _say(f"round       {facts['round']}, step {facts['step']} of {facts['steps']}{alone}")
    for name in ("loss", "validation_loss", "tokens", "tokens_per_s", "bytes_per_round", "utilisation"):
        if facts[name] is not None:
            _say(f"{name:<16}{facts[name]:.4g}" if isinstance(facts[name], float) else f"{name:<16}{facts[name]}")
    for island in facts["islands"]:
        data = island.get("data")
        text = (
            "" if data is None else f", {data['tokens']} tokens of {data['source']} ({data['licence'] or 'no licence'})"
        )
        _say(f"island      {island['peer']}: {island['steps']} steps in the last round{text}")
    for peer, start, stop in facts["machines"]:
        _say(f"machine     {peer}: blocks {start}:{stop} of the island here")
    for label, name in (("left out", "left_out"), ("resting", "resting"), ("doubted", "doubted")):
        for peer, why in facts[name].items():
            _say(f"{label:<12}{peer}: {why}")
    if facts["waiting"]:
        _say(f"waiting     {facts['waiting']}")
    return 0


def _remove_training(home: Home, facts: dict[str, Any], *, sure: bool, as_json: bool) -> int:
    """Remove a training job that is over or was left, by the running node or without one."""
    from app.api.client import running_client
    from app.config.home import hold
    from app.rounds.train_store import TrainStore

    name, rounds = facts["name"], facts["round"]
    if facts["status"] in ("running", "paused"):
        raise UsageError(
            f"this node takes part in {name}: `shoal train leave {name}` ends that, then it can be stopped"
        )
    if not sure:
        raise UsageError(
            f"to stop {name} is to remove its files, with what was learned in {rounds} "
            f"{'round' if rounds == 1 else 'rounds'}: `shoal train export {name} FOLDER` writes the model before, "
            f"`shoal jobs stop {name} --yes` removes them"
        )
    client = running_client(home.folder)
    if client is not None:
        client.post("/control/train/remove", {"job": facts["hash"]})
    else:
        with hold(home):  # no node may begin it meanwhile
            TrainStore(home).remove(facts["hash"])
    if as_json:
        print_json({"job": facts["job"], "removed": True})
    else:
        print(f"The training job {name} is removed with its files.")
    return 0


def _list(jobs: JobStore, trainings: list[dict[str, Any]], joinable: Sequence[JoinableView], *, as_json: bool) -> int:
    found = jobs.all()
    if as_json:
        print_json([*trainings, *(_facts(job) for job in found)])
        return 0
    for facts in trainings:
        words = f"{facts['status']}, round {facts['round']}, step {facts['step']}"
        why = facts["waiting"] if facts["status"] == "paused" else facts["why"]
        _say(f"{facts['job']}  {facts['name']}: {words}{_because(why)}")
    for job in found:
        loss = f", loss {job.progress.losses[-1]:.3f}" if job.progress.losses else ""
        record, progress = job.record, job.progress
        words = f"{progress.status}, step {progress.step} of {record.steps}{loss}"
        _say(f"{record.id}  {record.out}: {words}{_because(progress.why or progress.waiting)}")
    for other in joinable:
        words = f"a training job of other members, {other.steps} steps; {other.join_command} takes part"
        _say(f"{other.name}: {words}")
    if not found and not trainings and not joinable:
        _say("There are no jobs. `shoal finetune` and `shoal train` start one.")
    return 0


def _show(job: Job, *, as_json: bool) -> int:
    facts = _facts(job) | {"record": dataclasses.asdict(job.record)}
    if as_json:
        print_json(facts)
        return 0
    record, progress = job.record, job.progress
    _say(f"job         {record.id}")
    _say(f"adapter     {record.out}: rank {record.rank}, alpha {record.alpha:g}, {','.join(record.targets)}")
    where = "over the swarm" if job.source.swarm else "in one process"
    _say(f"model       {job.source.model} ({record.model[:8]}), trained {where}")
    _say(f"data        {job.source.data}")
    _say(f"status      {progress.status}{_because(progress.why)}")
    _say(f"steps       {progress.step} of {record.steps}, {progress.tokens} tokens in {progress.seconds:.0f} s")
    if progress.losses:
        _say(f"loss        {progress.losses[0]:.3f} at first, {progress.losses[-1]:.3f} now")
    for sender, receiver, size in progress.links:
        _say(f"link        {format_size(size)} from {sender} to {receiver}")
    for step, loss in progress.validation:
        _say(f"validation  {loss:.3f} after step {step}")
    for peer, why in progress.left_out:
        _say(f"left out    {peer}: {why}")
    if progress.waiting:
        _say(f"waiting     {progress.waiting}")
    return 0


def _say(line: str) -> None:
    """Print one line, without the control characters of those who wrote parts of it."""
    print(one_line(line))


def _because(why: str) -> str:
    return f": {why}" if why else ""


def _facts(job: Job) -> dict[str, Any]:
    from app.training.job_view import job_view

    return dataclasses.asdict(job_view(job))


COMMANDS = (
    Command(
        "jobs",
        "list, show, pause, resume or stop jobs",
        run_jobs,
        add_arguments,
        prints_facts=True,
    ),
)
