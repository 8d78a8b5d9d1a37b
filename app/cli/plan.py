"""`shoal plan`: forecasts how fast a task will be, what limits it, and whether a swarm or one machine is better."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.cli.command import Command, print_json
from app.cli.parser import duration_argument, number_argument
from app.core.errors import UsageError
from app.core.units import format_size

if TYPE_CHECKING:
    from app.api.client import Client
    from app.planning.forecast import Forecast, Terms
    from app.planning.machines import Fleet, MachineSpec
    from app.planning.replies import ReplyTask
    from app.planning.training_step import StepTask
    from app.snapshot.views import OfferView, Snapshot
    from engine.config import ModelConfig
    from engine.stored_form import StoredForm, StoredTensor

TASKS = ("chat", "finetune", "train")
WIRES = ("f32", "bf16", "int8", "int4", "sparse")
_RANGE = re.compile(r"(\d{1,4}):(\d{1,4})", re.ASCII)
_TOKENS = {"chat": 256, "finetune": 10**6, "train": 10**9}  # unless --tokens says otherwise
HELD_SEQUENCES = 32  # that `shoal train` validates with after a round, `app.rounds.founding.HELD_MOST`
_MAX_FILE_BYTES = 4 * 2**20
_MORE_HELPS = 1.1  # more machines must be this much faster to be worth it
_BAR = 40
# What the numbers of a limit mean, where it is reached.
_FAILED = {
    "memory": "{share} of the model's blocks fit, all have to",
    "bandwidth": "{value}, at most {threshold} is good",
    "stragglers": "the slowest takes {value} times as long as usual, {threshold} is accepted",
    "cost": "{value} times the price of renting",
    "poisoning": "{share} probable, {accepted} is accepted",
    "unlike_data": "{share} worse on one's own data, {accepted} is accepted",
    "provenance": "{share} of the text has a source and a licence",
    "latency": "{share} of the time is spent on links",
    "compute": "{share} of the time is spent computing",
}
_BUSY = 0.2  # share of the processor, from which on other programs make a measurement worthless
_ASSUMED_RTT_S = 0.02  # between copies of this machine in a sweep


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the task, the machines, and what is asked of them."""
    words = "what to forecast; sweep: --task for growing swarms; check: past forecasts beside what was measured"
    parser.add_argument("task", choices=(*TASKS, "sweep", "check"), help=words)
    parser.add_argument("--task", dest="swept", choices=TASKS, default="chat", help="task of a sweep (%(default)s)")
    words = "model as for `shoal chat`, or the start of a manifest's hash (default: the node's model, else starter)"
    parser.add_argument("--model", metavar="M", help=words)
    words = (
        "TOML file of machines that need not exist (default: the node's swarm); for sweep also 1:64, machines like this"
    )
    parser.add_argument("--machines", metavar="FILE", help=words)
    parser.add_argument("--links", metavar="FILE", help="TOML file of the links between those machines")
    words = "chat: a swarm that the running node is not in, by its name or an invite (default: the node's swarm)"
    parser.add_argument("--swarm", metavar="NAME", help=words)
    count = number_argument(int, 1, 10**15)
    parser.add_argument("--tokens", metavar="N", type=count, help="tokens to write, or to train on")
    words = "tokens of the question, or of a sequence in training (chat: 128, training: 2048)"
    parser.add_argument("--context", metavar="N", type=number_argument(int, 1, 10**6), help=words)
    words = "replies at once, or micro-batches of a training step (chat: 1, training: 8)"
    parser.add_argument("--streams", metavar="K", type=number_argument(int, 1, 4096), help=words)
    words = "training steps between two exchanges of islands (%(default)s)"
    parser.add_argument("--every", metavar="H", type=number_argument(int, 1, 10**6), default=50, help=words)
    parser.add_argument("--wire", choices=WIRES, default="int8", help="form of an exchange (%(default)s)")
    words = "rank of the adapters of finetune (%(default)s)"
    parser.add_argument("--rank", metavar="R", type=number_argument(int, 1, 4096), default=8, help=words)
    price = number_argument(float, 0.0, 1e6)
    parser.add_argument("--price", metavar="KWH", type=price, help="price of a kilowatt-hour")
    words = "price of a GB that machines send to each other, where that is billed"
    parser.add_argument("--egress", metavar="GB", type=price, help=words)
    words = "price of an hour of a rented H100, to compare with"
    parser.add_argument("--rent", metavar="HOUR", type=price, help=words)
    parser.add_argument("--within", metavar="TIME", type=duration_argument, help="longest time it may take, like 7d")
    words = "failures of machines per hour that training must recover from (%(default)s)"
    parser.add_argument("--failures", metavar="N", type=number_argument(float, 0.0, 3600.0), default=0.0, help=words)
    words = "spread of the islands' times: standard deviation of their logarithm (%(default)s)"
    parser.add_argument("--spread", metavar="S", type=number_argument(float, 0.0, 3.0), default=0.0, help=words)


def run_plan(arguments: argparse.Namespace) -> int:
    """Print a forecast, or forecasts for growing swarms."""
    if arguments.task == "sweep":
        return _sweep(arguments)
    if arguments.task == "check":
        return _check(arguments)
    if arguments.links is not None and arguments.machines is None:
        raise UsageError("--links needs --machines: it names links between the machines of that file")
    if arguments.swarm is not None and (arguments.task != "chat" or arguments.machines is not None):
        raise UsageError("--swarm is for chat, and without --machines: only replies of other swarms can be forecast")
    found = forecast(arguments)
    if arguments.json:
        print_json(found.as_json())
        return 0
    for line in forecast_lines(found, terms_of(arguments, arguments.task)):
        print(line)
    return 0


def forecast(arguments: argparse.Namespace) -> Forecast:
    """Forecast the task over the machines of a file, the running node's swarm, or this machine alone."""
    from app.api.client import running_client

    task: str = arguments.task
    if arguments.machines is not None:
        return forecast_fleet(arguments, task, fleet_of_files(arguments), planned_model(arguments.model, None).config)
    client = running_client(arguments.home)
    snapshot = None if client is None else client.snapshot()
    if arguments.swarm is not None and (snapshot is None or arguments.swarm != snapshot.swarm):
        return forecast_other(arguments)
    model = planned_model(arguments.model, snapshot)
    config, here = model.config, this_machine(arguments.home, snapshot, model, task)
    if task != "chat" or client is None or snapshot is None or snapshot.swarm is None or arguments.model is not None:
        return forecast_fleet(arguments, task, fleet_of_one(here, task, snapshot), config)
    if (arguments.streams or 1) > 1:
        raise UsageError("--streams needs --machines: members do not say how fast they are with several replies")
    from app.config.home import Home
    from app.planning.forecast import with_other_swarms
    from app.planning.history import correction, past_forecasts
    from app.planning.running_swarm import forecast_running

    found = forecast_running(snapshot, here, config, reply_task(arguments), terms_of(arguments, task))
    found = found.corrected(correction(past_forecasts(Home(arguments.home).forecasts_file), task))
    return with_other_swarms(found, same_model(client, snapshot))


def forecast_other(arguments: argparse.Namespace) -> Forecast:
    """Forecast replies over a swarm that the node is not in; raises `NotRunning` without a node to ask it."""
    from app.api.client import client_of
    from app.planning.forecast import forecast_offer
    from app.snapshot.codec import offer_from

    offer = client_of(arguments.home).post("/control/preview", {"target": arguments.swarm})
    return forecast_offer(offer_from(offer), terms_of(arguments, "chat"))


def same_model(client: Client, snapshot: Snapshot) -> list[OfferView]:
    """Return the other swarms with the model of the node's swarm that the node knows."""
    from app.snapshot.codec import prospects_from

    offers = prospects_from(client.get("/control/prospects", timeout_s=60.0)).offers
    named = [(*offer.target.partition("#"), offer) for offer in offers]
    model = snapshot.manifest or ""
    return [offer for name, _, pin, offer in named if pin and model.startswith(pin) and name != snapshot.swarm]


def fleet_of_one(here: MachineSpec, task: str, snapshot: Snapshot | None) -> Fleet:
    """Return this machine as a fleet that says why nobody else is in it."""
    from app.planning.machines import Fleet

    why = (
        "members do not say what they can train"
        if task != "chat" and snapshot is not None
        else "no node runs in a swarm"
    )
    said = f"no swarm: this machine alone is forecast ({why}; --machines FILE describes others)"
    return Fleet(here, (here,), assumed=(said,))


def forecast_fleet(arguments: argparse.Namespace, task: str, fleet: Fleet, config: ModelConfig) -> Forecast:
    """Forecast a task over a fleet."""
    from app.planning.forecast import forecast_replies, forecast_training

    terms = terms_of(arguments, task)
    if task == "chat":
        return forecast_replies(fleet, config, reply_task(arguments), terms)
    return forecast_training(fleet, config, step_task(arguments, task), terms)


def terms_of(arguments: argparse.Namespace, task: str) -> Terms:
    """Return what the options ask."""
    from app.planning.forecast import Terms

    return Terms(
        tokens=arguments.tokens or _TOKENS[task],
        within_s=arguments.within,
        price_kwh=arguments.price,
        rent_hour=arguments.rent,
        egress_gb=arguments.egress,
        every=arguments.every,
        wire=arguments.wire,
        spread=arguments.spread,
        failures_per_hour=arguments.failures,
        held_rows=HELD_SEQUENCES * (arguments.context or 2048) if task == "train" else 0,
    )


def reply_task(arguments: argparse.Namespace) -> ReplyTask:
    """Return the replies that the options describe."""
    from app.planning.replies import ReplyTask

    tokens = min(arguments.tokens or _TOKENS["chat"], 10**6)
    return ReplyTask(arguments.context or 128, tokens, arguments.streams or 1)


def step_task(arguments: argparse.Namespace, task: str) -> StepTask:
    """Return the training step that the options describe."""
    from app.planning.training_step import StepTask

    rank = arguments.rank if task == "finetune" else None
    return StepTask(rank=rank, rows=arguments.context or 2048, micro_batches=arguments.streams or 8)


# --- machines and model ----------------------------------------------------------------------------------------------


def fleet_of_files(arguments: argparse.Namespace) -> Fleet:
    """Read --machines and --links; raises `PlanError`."""
    from app.planning.machines import read_machines, with_links

    fleet = read_machines(_text_of(arguments.machines), arguments.machines)
    return fleet if arguments.links is None else with_links(fleet, _text_of(arguments.links), arguments.links)


def _text_of(name: str) -> str:
    from app.planning.machines import PlanError

    with open(Path(name).expanduser(), "rb") as file:
        raw = file.read(_MAX_FILE_BYTES + 1)
    if len(raw) > _MAX_FILE_BYTES:
        raise PlanError(f"{name} is too large for a list of machines")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PlanError(f"{name} is not text in UTF-8") from error


@dataclass(frozen=True)
class PlannedModel:
    """The model of a forecast."""

    config: ModelConfig
    tensors_of: Callable[[str], Sequence[StoredTensor]]  # of a part, as its files hold them

    def form(self) -> StoredForm | None:
        """Return how its files hold the weights; imports torch."""
        from engine.stored_form import stored_form

        return stored_form(self.config, self.tensors_of)


def planned_model(name: str | None, snapshot: Snapshot | None) -> PlannedModel:
    """Return a model on this machine, by default the node's, else the starter."""
    from app.config.home import cache_folder
    from app.planning.machines import PlanError
    from app.weights.manifest_store import ManifestStore
    from engine.sources import starter
    from engine.sources.opening import open_source

    store = ManifestStore(cache_folder())
    if name is None and snapshot is not None and snapshot.manifest is not None:
        name = snapshot.manifest
    if name is None or name == starter.NAME:
        return PlannedModel(starter.SHAPE, starter.tensors_of)
    if re.fullmatch(r"[0-9a-f]{8,64}", name) and not Path(name).exists():
        found = [manifest for known in store.hashes() if known.startswith(name) and (manifest := store.load(known))]
        if len(found) != 1:
            what = "several manifests" if found else "no manifest"
            raise PlanError(f"{what} of model {name[:8]} on this machine: `shoal join` its swarm fetches it")
        return PlannedModel(found[0].config, lambda part: found[0].by_name[part].tensors)
    source = open_source(name, cache_folder())
    return PlannedModel(source.config, lambda part: source.parts[part])


def this_machine(home: Path, snapshot: Snapshot | None, model: PlannedModel, task: str) -> MachineSpec:
    """Measure this machine with blocks of a model's shape; what a running node holds here counts as free.

    For chat the blocks are as this machine would host them, in the grids of the model's files or not. Takes seconds, so
    a terminal is told; so is everybody of other programs that slow a processor down meanwhile.
    """
    import os

    from app.config.file import load_config
    from app.config.home import Home
    from app.joining.offers import look_at_machine
    from engine.device.sensors import ProcessorShare

    settings = load_config(Home(home).config_file, os.environ).settings
    if sys.stderr.isatty():
        print("shoal: measuring this machine", file=sys.stderr, flush=True)
    processor = ProcessorShare()
    form = model.form() if task == "chat" else None
    machine = look_at_machine(settings.chosen_device, settings.max_vram, model.config, form)
    others = processor.others_share()
    hardware = None if snapshot is None else snapshot.hardware
    spec = machine.spec(0 if hardware is None else hardware.weights_bytes + hardware.cache_bytes)
    if spec.kind == "cpu" and others >= _BUSY:
        text = f"other programs used {others:.0%} of the processor while it was measured: without them it is faster"
        print(f"shoal: {text}", file=sys.stderr)
    return spec


# --- a sweep ---------------------------------------------------------------------------------------------------------


def _sweep(arguments: argparse.Namespace) -> int:
    sizes, fleet_of_size = sweep_fleets(arguments)
    rows, assumed = sweep_rows(arguments, sizes, fleet_of_size), list(fleet_of_size(1).assumed)
    enough = stops_helping(rows)
    if arguments.json:
        print_json({"task": arguments.swept, "sizes": rows, "enough": enough, "assumed": assumed})
        return 0
    fastest = max((row["tokens_per_s"] or 0.0 for row in rows), default=0.0)
    print(f"{'machines':>8} {'tokens/s':>10} {'kWh':>9} {'cost':>9}")
    for row in rows:
        speed = row["tokens_per_s"]
        bar = "#" * round(_BAR * speed / fastest) if speed else "cannot hold the model"
        cost = "-" if row["cost"] is None else f"{row['cost']:.2f}"
        print(f"{row['machines']:>8} {_figure(speed):>10} {_figure(row['energy_kwh']):>9} {cost:>9}  {bar}")
    if assumed:
        print(f"Assumed: {'; '.join(assumed)}.")
    if enough is None:
        print("No number of them holds the model.")
    elif enough == rows[-1]["machines"]:
        print(f"Up to {enough} machines, more of them are faster.")
    else:
        print("More than one machine hardly helps." if enough == 1 else f"More than {enough} machines hardly help.")
    return 0


def sweep_fleets(arguments: argparse.Namespace) -> tuple[range, Callable[[int], Fleet]]:
    """Return the sizes of a sweep, and the fleet of each size."""
    from app.planning.machines import Fleet

    match = _RANGE.fullmatch(arguments.machines or "1:64")
    if match is None:
        whole = fleet_of_files(arguments)
        return range(1, len(whole.machines) + 1), whole.first
    first, last = int(match[1]), int(match[2])
    if not 1 <= first <= last:
        raise UsageError(f"{arguments.machines} is not a range of machines: write 1:64 for one to sixty-four")
    here = this_machine(arguments.home, None, planned_model(arguments.model, None), arguments.swept)
    alike = (replace(here, name=f"here-{n}", rtt_s=_ASSUMED_RTT_S) for n in range(1, last))
    said = f"links of {_ASSUMED_RTT_S * 1000:.0f} ms and 100 Mbit/s between machines like this one"
    return range(first, last + 1), Fleet(here, (here, *alike), assumed=(said,)).first


def sweep_rows(
    arguments: argparse.Namespace, sizes: range, fleet_of_size: Callable[[int], Fleet]
) -> list[dict[str, Any]]:
    """Forecast swarms of growing size: each twice as large as the one before, and the largest."""
    config = planned_model(arguments.model, None).config
    counts, count = [], sizes.start
    while count < sizes.stop - 1:
        counts.append(count)
        count *= 2
    rows = []
    for count in (*counts, sizes.stop - 1):
        found = forecast_fleet(arguments, arguments.swept, fleet_of_size(count), config)
        facts = found.as_json()
        kept = ("tokens_per_s", "seconds", "energy_kwh", "cost", "limit")
        rows.append({"machines": count, **{name: facts[name] for name in kept}})
    return rows


def stops_helping(rows: list[dict[str, Any]]) -> int | None:
    """Return the number of machines beyond which more hardly help; None if none of them holds the model."""
    able = [row for row in rows if row["tokens_per_s"]]
    fastest = max((row["tokens_per_s"] for row in able), default=0.0)
    return next((int(row["machines"]) for row in able if fastest < _MORE_HELPS * row["tokens_per_s"]), None)


# --- past forecasts --------------------------------------------------------------------------------------------------


def _check(arguments: argparse.Namespace) -> int:
    """Print the latest past forecasts beside what was measured, and the correction that follows for each task."""
    from app.config.home import Home
    from app.planning.history import FITTED, correction, past_forecasts

    past = past_forecasts(Home(arguments.home).forecasts_file)
    tasks = sorted({one.task for one in past})
    corrections = {task: correction(past, task) for task in tasks}
    if arguments.json:
        rows = [{**asdict(one), "error": one.error} for one in past]
        print_json({"forecasts": rows, "corrections": corrections})
        return 0
    if not past:
        print("No forecast has been compared yet: the node keeps one for each reply of 16 tokens or more.")
        return 0
    print(f"{'task':<8} {'model':<8} {'machines':>8} {'forecast':>9} {'measured':>9} {'off by':>7}")
    for one in past[:FITTED]:
        speeds = f"{_figure(one.forecast):>9} {_figure(one.measured):>9}"
        print(f"{one.task:<8} {one.model[:8]:<8} {one.machines:>8} {speeds} {one.error:>+7.0%}")
    for task, factor in corrections.items():
        said = "too few to correct by" if factor is None else f"speeds are multiplied by {factor:.2f}"
        print(f"{task}: {sum(one.task == task for one in past)} kept; {said}.")
    return 0


# --- printing --------------------------------------------------------------------------------------------------------


def forecast_lines(found: Forecast, terms: Terms) -> list[str]:
    """Return a forecast as a short table and one sentence of advice."""
    from app.planning.advice import duration

    facts = found.as_json()
    lines = []
    if found.swarm is not None:
        many = len(found.machines)
        lines.append(f"{found.task} on {many} machine{'s' if many != 1 else ''}" if many else found.task)
        bounds = f"{_figure(facts['low'])} to {_figure(facts['high'])}"
        lines.append(f"  speed        {_figure(facts['tokens_per_s'])} tokens/s ({bounds})")
        if found.swarm.first_token_s is not None:
            lines.append(f"  first token  {duration(found.swarm.first_token_s)}")
        lines.append(f"  time         {duration(found.swarm.seconds)} for {terms.tokens} tokens")
        if found.swarm.energy_kwh is not None:
            lines.append(f"  energy       {_figure(found.swarm.energy_kwh)} kWh")
        if found.swarm.cost is not None:
            lines.append(f"  cost         {found.swarm.cost:.2f}, {format_size(int(found.swarm.sent_bytes))} sent")
        whole = sum(found.swarm.parts.values())
        shares = ", ".join(f"{name} {part_s / whole:.0%}" for name, part_s in found.swarm.parts.items())
        lines.append(f"  spent on     {shares}")
    alone = "cannot hold the model" if found.alone is None else f"{_figure(found.alone.tokens_per_s)} tokens/s"
    lines.append(f"  alone        {alone}")
    for verdict in found.verdicts:
        if verdict.passed is False:
            value, threshold = verdict.value or 0.0, verdict.threshold
            said = _FAILED[verdict.name].format(
                value=_figure(value), threshold=_figure(threshold), share=f"{value:.0%}", accepted=f"{threshold:.0%}"
            )
            lines.append(f"  {verdict.name:<12} {said}: {verdict.change}")
    lines += [f"  limit        {found.limit}"]
    if found.correction is not None:
        lines.append(f"  corrected    speeds x {found.correction:.2f}, as past forecasts were off (`shoal plan check`)")
    lines += [f"  assumed      {'; '.join(found.assumed)}"] if found.assumed else []
    words = {
        "alone": "Do it alone",
        "swarm": "Use the swarm",
        "other_swarm": "Use the other swarm",
        "not_at_all": "Do not do it",
    }[found.advice]
    return [*lines, f"{words}: {found.why}"]


def _figure(value: float | None) -> str:
    """Return a number with three digits."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


COMMANDS = (
    Command("plan", "forecast a task: its speed, its limit, alone or in a swarm", run_plan, add_arguments, True),
)
