"""`shoal finetune`: trains an adapter on the user's own records, over the swarm or in this process."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.cli.command import Command, print_json
from app.cli.models import progress_on_stderr
from app.cli.parser import MODELS, number_argument
from app.cli.progress import LiveLine
from app.core.errors import AppError, UsageError
from app.core.terminal_text import one_line
from app.core.units import format_duration, format_size
from p2p.platform import stop_signals

if TYPE_CHECKING:
    from app.api.client import Client
    from app.training.job_store import Job, Progress
    from app.training.local_job import MachinePlan
    from app.training.material import Material, TrainingWish
    from app.training.record import JobRecord

_FIELDS = ("out", "rank", "alpha", "dropout", "epochs", "batch", "length", "wire", "seed")  # that the API names alike
_REDRAW_S = 0.2
_POLL_S = 0.5
_REMOVED = ", and what it had learned is removed"
_LINES = 20  # lines of progress where there is no terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the data, the adapter and how it is trained."""
    words = "JSONL with `messages`, with `prompt` and `completion`, or with `text` in each line; or a text file"
    parser.add_argument("--data", required=True, metavar="FILE", help=words)
    parser.add_argument("--out", required=True, metavar="NAME", help="name of the adapter")
    parser.add_argument("--local", action="store_true", help="train in this process, without a swarm")
    words = f"with --local: {MODELS} (default: starter)"
    parser.add_argument("--model", metavar="M", help=words)
    parser.add_argument("--device", metavar="D", help="with --local: cpu, cuda:0, … (default: the best available)")
    words = (
        "number format between members: f32, bf16, int8, changes (of data seen before, in 4 bits), or auto: int8 if a "
        "link is slow, changes if it is very slow and --epochs is more than 1 (%(default)s)"
    )
    parser.add_argument("--wire", choices=("auto", "f32", "bf16", "int8", "changes"), default="auto", help=words)
    parser.add_argument("--rank", type=int, default=8, metavar="R", help="rank of the adapter, 1 to 256 (%(default)s)")
    parser.add_argument("--alpha", type=float, default=16.0, metavar="A", help="its strength is A / R (%(default)g)")
    words = "matrices to adapt: all, or some of q,k,v,o,gate,up,down (%(default)s)"
    parser.add_argument("--targets", default="all", metavar="LIST", help=words)
    parser.add_argument("--dropout", type=float, default=0.0, metavar="P", help="share of inputs dropped (%(default)g)")
    whole = number_argument(int, 1, 10**6)
    parser.add_argument("--epochs", type=whole, default=1, metavar="N", help="passes over the data (%(default)s)")
    parser.add_argument("--batch", type=whole, default=8, metavar="N", help="records of a step (%(default)s)")
    length = number_argument(int, 2, 1 << 20)
    words = "longest record in tokens; longer ones are cut (%(default)s)"
    parser.add_argument("--length", type=length, default=256, metavar="N", help=words)
    parser.add_argument("--lr", type=float, default=2e-4, metavar="RATE", help="learning rate (%(default)g)")
    words = "share of the records to validate with, or a file of its own (%(default)s)"
    parser.add_argument("--validation", default="0.05", metavar="SHARE|FILE", help=words)
    seed = number_argument(int, 0, 2**63 - 1)
    parser.add_argument("--seed", type=seed, default=0, metavar="S", help="the same seed gives the same adapter")
    parser.add_argument("--dry-run", action="store_true", help="say what would be trained, and what it takes")


def run_finetune(arguments: argparse.Namespace) -> int:
    """Train an adapter, or say what that would take."""
    from app.config.home import Home, cache_folder
    from app.training import local_job
    from app.training.adapter_store import AdapterStore
    from app.training.job_store import JobStore
    from app.training.material import new_record, start

    if not arguments.local:
        return _over_swarm(arguments)
    wish = _wish(arguments)
    home = Home.open(arguments.home)
    jobs, adapters = JobStore(home), AdapterStore(home)
    adapters.require_free(wish.out)
    with progress_on_stderr(wish.source.model) as progress:
        material = local_job.gather(wish.source, wish, cache_folder(), progress)
    _warn_of_cuts(material.trained.cut, material.trained.dropped, wish.length)
    record = new_record(wish, material)
    plan = local_job.plan_machine(record, material, wish.device)
    if arguments.dry_run:
        return _show_plan(record, material, plan, as_json=arguments.json)
    job = start(wish, material, jobs, adapters)
    return train(job, material, plan, arguments)


def resume(job: Job, arguments: argparse.Namespace) -> int:
    """Go on with a job that was paused, or whose process ended."""
    if job.source.swarm:
        from app.api.client import client_of

        client = client_of(arguments.home)
        return _follow(client, _begun(client, "/control/jobs/resume", {"job": job.record.id}), arguments)

    from app.config.home import cache_folder
    from app.training import local_job

    with progress_on_stderr(job.source.model) as progress:
        material = local_job.gather(job.source, job.record, cache_folder(), progress)
    return train(job, material, local_job.plan_machine(job.record, material, None), arguments)


def train(job: Job, material: Material, plan: MachinePlan, arguments: argparse.Namespace) -> int:
    """Run a job in the foreground; returns 0 when it is finished, 3 if it was paused, 1 if it was stopped."""
    from app.config.home import Home
    from app.training import local_job
    from app.training.adapter_store import AdapterStore
    from app.training.job_store import JobStore, require_unfinished

    home = Home.open(arguments.home)
    jobs, adapters = JobStore(home), AdapterStore(home)
    with jobs.hold(job.record.id), _interrupts() as interrupted:
        job = require_unfinished(jobs.find(job.record.id))  # another command may have stopped it until now
        run = local_job.LocalRun(job, material, local_job.load_trainer(job.record, material, plan), jobs)
        view = _StepView(run.record.steps, run.progress.step, run.progress.tokens, run.progress.seconds)
        with view:
            run.run(lambda _, progress: view.show(progress), lambda: interrupted() or jobs.wished(job.record.id))
        if run.is_complete:
            folder = local_job.finish(run, adapters)
    progress = run.progress
    if progress.status != "finished":
        return _say_unfinished(job, progress, as_json=arguments.json)
    facts = _facts(job, progress) | {"path": str(folder)}
    if arguments.json:
        print_json(facts)
        return 0
    loss = _losses(progress)
    print(f"The adapter {job.record.out} is finished after {progress.step} steps{loss}: {folder}")
    print(f'Use it with `shoal chat --local --model {job.source.model} --adapter {job.record.out} "…"`.')
    return 0


def _over_swarm(arguments: argparse.Namespace) -> int:
    """Have the running node train over its swarm, and show how far it is."""
    from app.api.client import client_of

    for name in ("model", "device"):
        if getattr(arguments, name) is not None:
            raise UsageError(f"--{name} is for --local: a swarm trains its own model, where its members have it")
    order = _order(arguments)
    client = client_of(arguments.home)
    if arguments.dry_run:
        return _show_forecast(client.post("/control/jobs/forecast", order), as_json=arguments.json)
    job = _begun(client, "/control/jobs", order)
    _warn_of_cuts(job["cut"], job["dropped"], arguments.length)
    return _follow(client, job, arguments)


def _begun(client: Client, path: str, order: dict[str, Any]) -> Any:
    """Have the node begin a job, or go on with one, and return it; a terminal shows that this takes a while."""
    line = LiveLine(sys.stderr)
    line.draw("the node reads the records and asks members to train")
    try:
        return client.post(path, order)
    finally:
        line.finish(erase=True)


def _follow(client: Client, facts: dict[str, Any], arguments: argparse.Namespace) -> int:
    """Show a job of the node until it ends or pauses; Ctrl-C pauses it."""
    from app.api.client import NotAnswering

    job_id, asked = facts["job"], False
    view = _StepView(facts["steps"], facts["step"], facts["tokens"], facts["seconds"])
    shown = facts["step"]
    with view, _interrupts() as interrupted:
        while facts["status"] == "running":
            try:
                if interrupted() and not asked:
                    asked = True
                    client.post("/control/jobs/pause", {"job": job_id})
                time.sleep(_POLL_S)
                facts = next(one for one in client.get("/control/jobs") if one["job"] == job_id)
            except NotAnswering as error:
                raise NotAnswering(f"{error}; the job goes on in the node: `shoal jobs` shows it") from None
            if facts["step"] != shown and facts["losses"]:
                shown = facts["step"]
                view.show(_progress_of(facts))
            view.wait(facts["step"], facts["waiting"])
    if arguments.json:
        print_json(facts)
    elif facts["status"] == "finished":
        loss = _losses(_progress_of(facts))
        print(f"The adapter {facts['out']} is finished after {facts['step']} steps{loss}.")
        print(f'Use it with `shoal chat --adapter {facts["out"]} "…"`.')
    elif facts["status"] == "failed":
        print(one_line(f"Job {job_id} failed after step {facts['step']} of {facts['steps']}: {facts['why']}"))
        print(f"`shoal jobs resume {job_id}` goes on from there.")
    elif facts["status"] == "stopped":
        print(f"Job {job_id} was stopped after step {facts['step']} of {facts['steps']}{_REMOVED}.")
    else:
        print(f"Job {job_id} is paused after step {facts['step']} of {facts['steps']}.")
        print(f"`shoal jobs resume {job_id}` goes on, `shoal jobs stop {job_id}` gives it up.")
    return {"finished": 0, "paused": 3}.get(facts["status"], 1)


def _progress_of(facts: dict[str, Any]) -> Progress:
    from app.training.job_store import Progress

    names = ("status", "step", "tokens", "seconds", "losses", "validation")
    return Progress(**{name: facts[name] for name in names})


def _show_forecast(facts: dict[str, Any], *, as_json: bool) -> int:
    if as_json:
        print_json(facts)
        return 0
    print(
        f"{facts['records']} records, {facts['tokens_per_epoch']} tokens that count, {facts['steps']} steps through "
        f"{len(facts['route'])} {'member' if len(facts['route']) == 1 else 'members'}{_takes(facts.get('seconds'))}:"
    )
    for hop in facts["route"]:
        print(f"  blocks {hop['start']}:{hop['stop']}  {hop['peer']}")
    return 0


def _takes(seconds: float | None) -> str:
    return "" if seconds is None else f", about {format_duration(seconds)}"


def _say_unfinished(job: Job, progress: Progress, *, as_json: bool) -> int:
    job_id = job.record.id
    if as_json:
        print_json(_facts(job, progress))
    elif progress.status == "stopped":
        print(f"Job {job_id} was stopped after step {progress.step} of {job.record.steps}{_REMOVED}.")
    else:
        print(f"Job {job_id} is paused after step {progress.step} of {job.record.steps}{_losses(progress)}.")
        print(f"`shoal jobs resume {job_id}` goes on, `shoal jobs stop {job_id}` gives it up.")
    return 1 if progress.status == "stopped" else 3


def _facts(job: Job, progress: Progress) -> dict[str, Any]:
    record = job.record
    return {
        "job": record.id,
        "out": record.out,
        "model": record.model,
        "steps": record.steps,
        **dataclasses.asdict(progress),
        "tokens_per_s": progress.tokens / progress.seconds if progress.seconds else None,
    }


def _losses(progress: Progress) -> str:
    if not progress.losses:
        return ""
    words = f", loss {progress.losses[0]:.3f} to {progress.losses[-1]:.3f}"
    if len(progress.validation) > 1:
        words += f", on unseen records {progress.validation[0][1]:.3f} to {progress.validation[-1][1]:.3f}"
    return words


def _wish(arguments: argparse.Namespace) -> TrainingWish:
    from app.training.material import wish_of

    wish = wish_of(_order(arguments))
    model = arguments.model or "starter"
    model = model if not Path(model).exists() else str(Path(model).absolute())
    return dataclasses.replace(wish, source=dataclasses.replace(wish.source, model=model), device=arguments.device)


def _order(arguments: argparse.Namespace) -> dict[str, Any]:
    """The job as the API takes it."""
    share, file = _validation(arguments.validation)
    return {
        "data": str(Path(arguments.data).expanduser().absolute()),
        "validation_file": file,
        "validation": share,
        "targets": list(_roles(arguments.targets)),
        "rate": arguments.lr,
        **{name: getattr(arguments, name) for name in _FIELDS},
    }


def _roles(text: str) -> tuple[str, ...]:
    """Parse the targets; unknown ones are refused later."""
    from engine.budget import ADAPTER_ROLES

    return ADAPTER_ROLES if text == "all" else tuple(filter(None, text.split(",")))


def _validation(text: str) -> tuple[float, str | None]:
    """Parse a share of the records, or the name of a file."""
    try:
        share = float(text)
    except ValueError:
        return 0.0, str(Path(text).expanduser().absolute())
    if not 0 <= share < 1:
        raise AppError(f"--validation {text} is not a share from 0 to below 1, nor a file")
    return share, None


def _warn_of_cuts(cut: int, dropped: int, length: int) -> None:
    if cut:
        words = f"{cut} records are longer than {length} tokens and are cut"
        words += f"; {dropped} of them have no answer left" if dropped else ""
        print(f"shoal: {words}: a larger --length keeps them whole", file=sys.stderr)


def _show_plan(record: JobRecord, material: Material, plan: MachinePlan, *, as_json: bool) -> int:
    from app.joining.offers import look_at_machine
    from app.planning.memory import TrainingMemory, tuning_peak_bytes
    from app.training.forecasts import step_here_s, usual_step
    from engine.budget import block_graph_bytes

    config = material.source.config
    machine = look_at_machine(plan.device.id, None, config).spec()
    task = usual_step(material.trained, record)
    step_s = step_here_s(machine, config, task)
    kept = plan.budget.graph_bytes >= config.n_blocks * block_graph_bytes(config, machine.precision, task.rows)
    memory = TrainingMemory(record.rank, task.rows, 1, recomputed=not kept)
    facts = {
        "model": material.model,
        "records": len(material.trained.examples),
        "validation_records": len(material.held.examples),
        "cut": material.trained.cut,
        "tokens_per_epoch": material.trained.tokens,
        "steps": record.steps,
        "step_s": step_s,
        "seconds": None if step_s is None else record.steps * step_s,
        "device": plan.device.id,
        "memory_bytes": plan.total_bytes,
        "peak_bytes": tuning_peak_bytes(config, machine, memory),
        **{f"{name}_bytes": getattr(plan.budget, f"{name}_bytes") for name in ("weight", "state", "input", "graph")},
    }
    if as_json:
        print_json(facts)
        return 0
    print(
        f"{facts['records']} records, {facts['tokens_per_epoch']} tokens that count, {record.steps} steps on "
        f"{plan.device.id}, at most {format_size(plan.total_bytes)} of memory{_takes(facts['seconds'])}."
    )
    return 0


class _StepView:
    """Shows each step: on a terminal in one line that is drawn again, else a few lines in all."""

    def __init__(self, steps: int, step: int, tokens: int, seconds: float) -> None:
        self._steps, self._begun = steps, (step, tokens, seconds)
        self._line = LiveLine(sys.stderr)
        self._drawn_at, self._line_due = float("-inf"), 0
        self._waiting = ""

    def __enter__(self) -> _StepView:
        if self._begun[0] < self._steps:
            self._line.draw(f"step {self._begun[0]} of {self._steps}, the next one is under way")
        return self

    def __exit__(self, *error: object) -> None:
        self._line.finish()

    def show(self, progress: Progress) -> None:
        """Show the latest step if it is due."""
        step, last = progress.step, progress.step == self._steps
        now = time.monotonic()
        if not last and (now - self._drawn_at < _REDRAW_S if self._line.is_terminal else step < self._line_due):
            return
        self._drawn_at, self._line_due = now, step + max(1, self._steps // _LINES)
        begun, tokens, seconds = self._begun
        seconds = progress.seconds - seconds
        rate = (progress.tokens - tokens) / seconds if seconds > 0 else 0.0
        left_s = seconds / max(1, step - begun) * (self._steps - step)
        words = f"step {step} of {self._steps}, loss {progress.losses[-1]:.3f}, {rate:.0f} tokens/s"
        words += "" if last else f", {format_duration(left_s)} left"
        if self._line.is_terminal:
            self._line.draw(words)
        else:
            print(words, file=sys.stderr, flush=True)

    def wait(self, step: int, why: str) -> None:
        """Show what the job waits for before its next step; nothing if it does not wait."""
        if why and why != self._waiting:
            words = one_line(f"step {step} of {self._steps}, {why}")
            if self._line.is_terminal:
                self._line.draw(words)
            else:
                print(words, file=sys.stderr, flush=True)
        self._waiting = why


@contextlib.contextmanager
def _interrupts() -> Iterator[Callable[[], str]]:
    """Turn the first Ctrl-C into a wish to pause after the step; the second one ends the process at once."""
    asked = ""

    def on_signal(number: int, frame: object) -> None:
        nonlocal asked
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked = "pause"
        print("\nshoal: pausing after this step (Ctrl-C again: at once)", file=sys.stderr, flush=True)

    before = {each: signal.signal(each, on_signal) for each in stop_signals()}
    try:
        yield lambda: asked
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


COMMANDS = (
    Command("finetune", "train an adapter on your own records", run_finetune, add_arguments, prints_facts=True),
)
