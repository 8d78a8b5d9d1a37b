"""`shoal train`: founds, joins and leaves training jobs of the swarm, exports their model and shows their log."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app.cli.command import Command, print_json
from app.cli.parser import MODELS
from app.core.errors import AppError, UsageError
from app.core.units import format_size

ACTIONS = ("join", "leave", "export", "log")
_FIELDS = (  # that the API names alike
    "steps", "every", "batch", "length", "optimizer", "wire", "significance", "licence", "seed",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what is trained, on what and how."""
    words = "NAME founds a job; or join NAME|HASH, leave NAME, export NAME FOLDER, log NAME"
    parser.add_argument("words", nargs="+", metavar="NAME", help=words)
    words = "text files, or JSONL with `text` in each line"
    parser.add_argument("--data", nargs="+", metavar="PATH", help=words)
    words = f"go on from this model: {MODELS} (default: starter)"
    parser.add_argument("--model", metavar="M", help=words)
    words = "begin with a new model of this shape, a config.json as Hugging Face writes it"
    parser.add_argument("--shape", metavar="FILE", help=words)
    parser.add_argument("--steps", type=int, default=1000, metavar="N", help="steps of each island (%(default)s)")
    words = "steps between two rounds; more where the exchange is slow (%(default)s)"
    parser.add_argument("--every", type=int, default=50, metavar="H", help=words)
    parser.add_argument("--batch", type=int, default=4096, metavar="TOKENS", help="tokens of a step (%(default)s)")
    parser.add_argument("--length", type=int, default=256, metavar="T", help="tokens of a sequence (%(default)s)")
    words = "adamw, or muon for matrices (%(default)s)"
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw", help=words)
    parser.add_argument("--lr", type=float, default=1e-3, metavar="RATE", help="learning rate (%(default)g)")
    words = (
        "number format between islands: f32, int8, int4 or auto, "
        "which is int8, f32 where links are fast and int4 where they are slow (%(default)s)"
    )
    parser.add_argument("--wire", choices=("auto", "f32", "int8", "int4"), default="auto", help=words)
    words = "changes smaller than this share of their weights wait a round, to save bytes (%(default)g: none)"
    parser.add_argument("--significance", type=float, default=0.0, metavar="SHARE", help=words)
    words = "licence of the text, which a public swarm requires"
    parser.add_argument("--licence", default="", metavar="L", help=words)
    words = "every member trains on a text of its own, which never leaves it; `join` names it with --data"
    parser.add_argument("--own-data", action="store_true", help=words)
    words = "with --own-data: a text that others may have, to validate with"
    parser.add_argument("--validation", nargs="+", default=[], metavar="PATH", help=words)
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of new weights and of the order of the text")
    parser.add_argument("--dry-run", action="store_true", help="say what would be trained, and what it takes")


def run_train(arguments: argparse.Namespace) -> int:
    """Found a job, or act on one."""
    action, *rest = arguments.words
    if action not in ACTIONS:
        if rest:
            raise UsageError(f"{rest[0]!r} was not expected after the name: use `shoal train NAME --data PATH`")
        return _found(action, arguments)
    wanted = 2 if action == "export" else 1
    if len(rest) != wanted:
        raise UsageError(f"use `shoal train {action} NAME{' FOLDER' if wanted == 2 else ''}`")
    if action == "export":
        return _export(rest[0], Path(rest[1]).expanduser(), arguments)
    if action == "log":
        return _log(rest[0], arguments)
    return (_join if action == "join" else _leave)(rest[0], arguments)


def _found(name: str, arguments: argparse.Namespace) -> int:
    from app.api.client import client_of

    if not arguments.data:
        raise UsageError(f"name the text to train on: `shoal train {name} --data PATH`")
    request = {
        "name": name,
        "data": _files(arguments.data),
        "own_data": arguments.own_data,
        "validation": _files(arguments.validation),
        "model": _absolute(arguments.model),
        "shape": _absolute(arguments.shape),
        "rate": arguments.lr,
        **{field: getattr(arguments, field) for field in _FIELDS},
    }
    client = client_of(arguments.home)
    if arguments.dry_run:
        from app.planning.advice import duration

        facts = client.post("/control/train/forecast", request)
        words = (
            f"{facts['weights']} weights, {facts['sequences']} sequences, {facts['steps']} steps of "
            f"{facts['tokens_per_step']} tokens in {facts['rounds']} rounds or fewer; "
            f"{format_size(facts['memory_bytes'])} of memory on each island"
            + (f"; about {duration(facts['seconds'])} on this machine." if facts.get("seconds") else ".")
        )
        return _show(facts, words, arguments)
    facts = client.post("/control/train", request)
    begun = "has begun" if facts["status"] == "running" else f"is founded and {facts['waiting']}"
    words = f"Training {name} {begun}; others take part with `shoal train join {name}`, hash {facts['hash']}."
    return _show(facts, words, arguments)


def _join(name: str, arguments: argparse.Namespace) -> int:
    from app.api.client import client_of

    request: dict[str, Any] = {"job": name, "data": _files(arguments.data or []), "licence": arguments.licence}
    facts = client_of(arguments.home).post("/control/train/join", request)
    words = f"This node takes part in {facts['name']} from its next round on: see `shoal jobs show {name}`."
    if facts["status"] == "paused":
        words = f"This node {facts['waiting']}; then it takes part in {facts['name']}: see `shoal jobs show {name}`."
    return _show(facts, words, arguments)


def _leave(name: str, arguments: argparse.Namespace) -> int:
    """Take no more part in a job, by the running node or without one."""
    from app.api.client import running_client
    from app.config.home import Home, hold
    from app.rounds.train_store import TrainStore

    home = Home.open(arguments.home)
    client = running_client(home.folder)
    if client is not None:
        facts = client.post("/control/train/leave", {"job": name})
    else:
        with hold(home):  # no node may begin it meanwhile
            facts = TrainStore(home).leave(name)
    words = f"This node takes no more part in {facts['name']} after round {facts['round']}; "
    words += f"`shoal train join {facts['name']}` goes on with it, `shoal jobs stop {facts['name']}` removes its files."
    return _show(facts, words, arguments)


def _export(name: str, folder: Path, arguments: argparse.Namespace) -> int:
    """Write the model after the last round as a Hugging Face folder."""
    from app.config.home import Home
    from app.rounds.founding import export_files
    from app.rounds.train_store import TrainStore

    store = TrainStore(Home.open(arguments.home))
    job = store.find(name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise AppError(f"{folder} exists and is not an empty folder: give another one")
    if not (job.folder / "tokenizer.json").exists():
        raise AppError(f"{job.record.name} has nothing to export yet: its text is still to come")
    rounds = len(store.log(job))
    states = store.states(job) if rounds else None  # before the first round it is the model that the job began with
    files = export_files(job.record, states, (job.folder / "tokenizer.json").read_bytes())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, data in files.items():
            (folder / file).write_bytes(data)
    except OSError as error:
        raise AppError(f"{folder} cannot be written: {error.strerror or error}") from error
    facts = {"name": job.record.name, "path": str(folder.absolute()), "round": rounds}
    return _show(
        facts,
        f"{job.record.name} after round {rounds} is in {folder}: `shoal chat --local --model {folder}` tries it.",
        arguments,
    )


def _log(name: str, arguments: argparse.Namespace) -> int:
    """Show the signed rounds of a job, after they were replayed."""
    from app.config.home import Home
    from app.rounds.log import replay
    from app.rounds.train_store import TrainStore

    store = TrainStore(Home.open(arguments.home))
    job = store.find(name)
    entries = store.log(job)
    replay(job.record, entries)  # raises if an entry is forged or does not follow
    rows: list[dict[str, Any]] = [
        {
            "round": entry.round,
            "hash": entry.hash.hex(),
            "root": entry.root.hex(),
            "leader": entry.list.leader,
            "attempt": entry.list.attempt,
            "members": {one.peer: {"steps": one.steps, "tokens": one.tokens} for one in entry.list.arrivals},
            "step": entry.step,
            "next": {"every": entry.every, "wire": entry.codec},
            "tokens": entry.tokens,
            "start": entry.start,
            "doubted": dict(entry.doubted),
            "left_out": dict(entry.left_out),
        }
        for entry in entries
    ]
    if arguments.json:
        print_json(rows)
        return 0
    for row in rows:
        out = f", left out: {', '.join(row['left_out'])}" if row["left_out"] else ""
        islands = "1 island" if len(row["members"]) == 1 else f"{len(row['members'])} islands"
        print(f"round {row['round']}: {islands}, step {row['step']}, {row['tokens']} tokens{out}")
    if not rows:
        print(f"{job.record.name} has no finished round yet.")
    return 0


def _files(paths: Sequence[str]) -> list[str]:
    return [str(Path(path).expanduser().absolute()) for path in paths]


def _absolute(path: str | None) -> str | None:
    """Return a file's or folder's whole path; names of models stay as they are."""
    return path if path is None or not Path(path).expanduser().exists() else str(Path(path).expanduser().absolute())


def _show(facts: dict[str, Any], words: str, arguments: argparse.Namespace) -> int:
    if arguments.json:
        print_json(facts)
    else:
        print(words)
    return 0


COMMANDS = (Command("train", "train a model together with other members", run_train, add_arguments, prints_facts=True),)
