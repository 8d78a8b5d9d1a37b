"""What a training job is made of: the user's wish, the text as token ids, the model it starts from, and its record.

Loads torch: import it inside functions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from app.core.canonical_json import decode_object
from app.core.errors import AppError
from app.core.units import format_size
from app.core.wall_clock import wall_ms
from app.manifest.importing import hash_source
from app.planning.training_step import StepTask
from app.rounds.island import hashed
from app.rounds.record import MAX_EVERY, TrainingRecord
from app.rounds.statements import MAX_MEMBERS, MAX_SOURCE_CHARS
from app.rounds.steps import PipelineTerms
from app.rounds.traces import most_trace_bytes
from app.training.dataset import Document, order, read_records
from app.training.record import checked_name
from app.training.states import part_of
from app.training.wire import full_order
from engine.budget import (
    MERGED_WEIGHT_BYTES,
    FullBudget,
    allowance_on,
    full_blocks_bytes,
    full_ends_bytes,
    plan_full,
    unquantised,
)
from engine.config import ModelConfig
from engine.device.dtypes import pick_dtype
from engine.device.kinds import kind_named
from engine.device.probe import Device, find_device, probe_devices
from engine.hosting import release
from engine.island import TRACED_WEIGHT_BYTES, IslandModel, IslandTerms, PipelineModel, first_states, unpacked
from engine.model.block import WeightOptions
from engine.sources.base import ModelSource, TokenizerSpec, block_part
from engine.sources.hf_config import parse_config
from engine.sources.opening import open_source
from engine.sources.shape import config_values, open_shape
from engine.text.prompt import ModelText
from engine.training.codecs import codec_named
from engine.training.export import folder_files
from engine.training.optimiser import AdamW, Muon, Schedule
from engine.training.outer import Nesterov
from engine.training.parameters import divided, drawn_model, model_weights, part_weights, read_model
from engine.training_runner import SUM_BYTES
from engine.wire import wire_name

RESERVED = ("join", "leave", "export", "log")  # words of the command line
HELD_SHARE, HELD_MOST = 0.05, 32  # sequences to validate with
ROWS = 1024  # of a micro-batch
NO_LICENCE = "the swarm is public: name the licence of the text with --licence"
Rows = np.ndarray[Any, np.dtype[np.uint32]]
WEIGHT_DECAY, CLIP = 0.1, 1.0
# For rounds, without tests, and the island's own weights where those of blocks come in.
OWNER_WEIGHT_BYTES = MERGED_WEIGHT_BYTES + 4
MORE_EVERY = 10  # times the steps of the first round, at most


@dataclass(frozen=True)
class TrainWish:
    """A training job as the user asks for it."""

    name: str
    data: tuple[str, ...]
    model: str | None = None
    shape: str | None = None
    steps: int = 1000
    every: int = 50
    batch: int = 4096  # tokens of a step
    length: int = 256
    optimizer: str = "adamw"
    rate: float = 1e-3
    wire: str = "auto"
    licence: str = ""
    seed: int = 0
    own_data: bool = False  # the text stays here, and every member trains on its own
    validation: tuple[str, ...] = ()  # a public text to validate with, if texts are the members' own
    significance: float = 0.0  # share of the weights below which a change waits a round; 0: none waits


@dataclass(frozen=True)
class Founded:
    """A job that could begin: its record, the files of its text, and the weights before the first round."""

    record: TrainingRecord
    texts: dict[str, bytes]
    vectors: dict[str, torch.Tensor]
    budget: FullBudget
    sequences: int

    def states(self) -> list[bytes]:
        """The states of all parts before the first round."""
        return first_states(config_of(self.record), self.vectors)


class DoesNotFit(AppError):
    """The state of a model is too large for this machine."""

    def __init__(self, text: str, config: ModelConfig, length: int) -> None:
        super().__init__(text)
        self.config, self.length = config, length


@dataclass(frozen=True)
class Planned:
    """What a job starts from, and the memory that it takes."""

    source: ModelSource
    budget: FullBudget


@dataclass(frozen=True)
class Texts:
    """The files of a job's text by name, and the number of sequences to train on."""

    files: dict[str, bytes]
    sequences: int


def plan(wish: TrainWish, *, public: bool, cache: Path, limit_bytes: int | None = None, alone: bool = True) -> Planned:
    """Check a wish and open what it starts from; raises `AppError` or `EngineError`, one line for what is wrong.

    If this machine trains it `alone` and is too small, that is a `DoesNotFit`.
    """
    _check(wish, public=public)
    source = open_shape(Path(wish.shape)) if wish.shape else open_source(wish.model or "starter", cache)
    config = source.config
    if wish.length > config.context_length:
        raise AppError(f"--length {wish.length} is more than the model's context of {config.context_length}")
    budget, _, _ = (plan_island if alone else plan_owner)(config, wish.length, limit_bytes)
    return Planned(source, budget)


def prepare(wish: TrainWish, planned: Planned, texts: Texts, *, swarm: str, founder: str) -> Founded:
    """Make a job of a wish that was checked, with the texts that `read_texts` gave for it."""
    source, config = planned.source, planned.source.config
    public_texts = {name: part_of(data)[0] for name, data in texts.files.items()}
    if wish.own_data:
        del public_texts["tokens"]
        if not wish.validation:
            del public_texts["held"]
    vectors = drawn_model(config, wish.seed) if wish.shape else read_model(source)
    start, _ = hashed(first_states(config, vectors))
    record = TrainingRecord(
        name=wish.name, founder=founder, swarm=swarm,
        model="" if wish.shape else hash_source(source, lambda read: None).manifest.hash,
        shape=json.loads(json.dumps(config_values(config))), start=start.hex(),
        tokens=public_texts.get("tokens"), held=public_texts.get("held"), tokenizer=public_texts["tokenizer.json"],
        source=source_of(wish.data), licence=wish.licence, length=wish.length,
        batch=wish.batch // wish.length, steps=wish.steps, every=min(wish.every, wish.steps),
        least_every=min(wish.every, wish.steps), most_every=min(MAX_EVERY, MORE_EVERY * wish.every),
        optimiser=wish.optimizer, rate=wish.rate, warm_up=wish.steps // 20, weight_decay=WEIGHT_DECAY, clip=CLIP,
        wire=wish.wire, merging="clip", outer_rate=0.7, outer_momentum=0.9, seed=wish.seed,
        created_ms=wall_ms(), own_data=wish.own_data, significance=wish.significance,
        recompute=not wish.own_data, grid=True, islands=MAX_MEMBERS,
    )  # fmt: skip
    return Founded(record, texts.files, vectors, planned.budget, texts.sequences)


def _check(wish: TrainWish, *, public: bool) -> None:
    checked_name(wish.name)
    if wish.name in RESERVED:
        raise AppError(f"a training job cannot be named {wish.name}, which is a word of the command: choose another")
    if wish.model is not None and wish.shape is not None:
        raise AppError("give --model to go on from a model or --shape to begin with a new one, not both")
    if not 1 <= wish.every <= MAX_EVERY:
        raise AppError(f"--every {wish.every} is not a number of steps from 1 to {MAX_EVERY}")
    if not 1 <= wish.steps <= 10**9:
        raise AppError(f"--steps {wish.steps} is not a number of steps from 1 to {10**9}")
    if wish.length < 2 or wish.batch < wish.length:
        raise AppError(
            f"--batch {wish.batch} is smaller than one sequence of {wish.length} tokens: give a larger --batch, or a "
            "smaller --length of at least 2"
        )
    if not 0 < wish.rate < 1e3:
        raise AppError(f"--lr {wish.rate} is not a positive number")
    if not 0 <= wish.significance <= 1:
        raise AppError(f"--significance {wish.significance} is not a share from 0 to 1")
    if wish.validation and not wish.own_data:
        raise AppError("--validation is for --own-data: otherwise a part of the text is kept to validate with")
    if public and not wish.licence.strip():
        raise AppError(NO_LICENCE if wish.own_data else f"{NO_LICENCE}, because others will be sent it")


def read_texts(wish: TrainWish, source: ModelSource) -> Texts:
    """Read a job's text with the tokenizer of what it starts from, which may take any time; raises `AppError`."""
    text = ModelText(source)
    ids = _ids(text, wish.data)
    batch = wish.batch // wish.length
    if wish.validation:
        rows, held = _rows(ids, wish.length), _rows(_ids(text, wish.validation), wish.length)[:HELD_MOST]
        if not len(held):
            raise AppError(f"the text of --validation has fewer than the {wish.length} tokens of a sequence")
    else:
        rows, held = _divided(_rows(ids, wish.length), wish.seed)
    _check_enough(rows, batch, len(ids), wish.batch)
    spec = json.dumps(asdict(source.tokenizer), sort_keys=True).encode()
    return Texts({"tokens": rows.tobytes(), "held": held.tobytes(), "tokenizer.json": spec}, len(rows))


def own_texts(record: TrainingRecord, data: Sequence[str], tokenizer: bytes, held: bytes | None) -> dict[str, bytes]:
    """Return the files of a member's own text, which never leave it; raises `AppError` if it is too short.

    `held` is the job's public text to validate with; without it, a part of the member's own is kept for that.
    """
    ids = _ids(ModelText(ModelSource(record.name, config_of(record), {}, tokenizer_of(tokenizer))), data)
    rows = _rows(ids, record.length)
    if held is None:
        rows, own = _divided(rows, record.seed)
        held = own.tobytes()
    _check_enough(rows, record.batch, len(ids), record.batch * record.length)
    return {"tokens": rows.tobytes(), "held": held}


def source_of(data: Sequence[str]) -> str:
    """Return the names of some files, as a record or a member gives them."""
    return ", ".join(Path(path).name for path in data)[:MAX_SOURCE_CHARS]


def _ids(text: ModelText, data: Sequence[str]) -> list[int]:
    ids = list[int]()
    for path in data:
        for one in read_records(Path(path)):
            if not isinstance(one, Document):
                raise AppError(
                    f"{path}, line {one.line} is a conversation: training reads texts, or `text` in each line"
                )
            ids += text.document_ids(one.text)
    return ids


def _rows(ids: Sequence[int], length: int) -> Rows:
    """Cut token ids into sequences (count, length)."""
    count = len(ids) // length
    return np.asarray(ids[: count * length], dtype="<u4").reshape(count, length)


def _divided(rows: Rows, seed: int) -> tuple[Rows, Rows]:
    """Return the sequences to train on, and those to validate with."""
    held = {*order(len(rows), seed, "held")[: min(HELD_MOST, int(len(rows) * HELD_SHARE))]}
    kept = np.array([number not in held for number in range(len(rows))], dtype=bool)
    return rows[kept], rows[~kept] if held else rows[:1]


def _check_enough(rows: Rows, batch: int, tokens: int, wanted: int) -> None:
    if len(rows) < batch:
        raise AppError(f"the text has {tokens} tokens, fewer than the {wanted} of one step: give more --data")


def plan_island(
    config: ModelConfig, length: int, limit_bytes: int | None = None
) -> tuple[FullBudget, Device, torch.dtype]:
    """Choose the device and divide its memory; raises `AppError` with the bytes wanted and offered.

    Steps are made on the device; rounds, and the traces of steps, are in the machine's own memory, which may be the
    same. `limit_bytes` is the setting `max_vram`, of which 0 concerns hosting alone.
    """
    device = find_device(None, devices := probe_devices())
    dtype = pick_dtype(device.id)
    apart = not kind_named(device.kind).shared_memory
    usable = allowance_on(device, limit_bytes or None).usable_bytes
    traces = most_trace_bytes(TRACED_WEIGHT_BYTES * model_weights(config))
    room = usable if apart else usable - traces
    budget = plan_full(config, unquantised(dtype.itemsize), max(ROWS, length), room, rounds_apart=apart)
    budget = replace(budget, kept_bytes=budget.kept_bytes + traces, round_bytes=budget.round_bytes + traces)
    wanted = [(device, budget.step_bytes if apart else budget.total_bytes, usable)]
    if apart:
        memory = find_device("cpu", devices)
        wanted.append((memory, budget.round_bytes, allowance_on(memory, None).usable_bytes))
    for one, size, spare in wanted:
        capped = limit_bytes if one is device else None
        if size > spare:
            raise DoesNotFit(
                f"training {budget.weights} weights takes {format_size(size)}, but {one.id} has {format_size(spare)} "
                "to spare: give a smaller model"
                + (f", or raise max_vram, which is {format_size(capped)}" if capped else ""),
                config,
                length,
            )
    return budget, device, dtype


def plan_owner(
    config: ModelConfig, length: int, limit_bytes: int | None = None
) -> tuple[FullBudget, Device, torch.dtype]:
    """Choose the device for the owner's part of an island of several machines; raises `DoesNotFit` if it is too small.

    The ends are trained on the device, and what rounds need of all weights is in the machine's memory. The budget is
    that of the whole model.
    """
    device = find_device(None, devices := probe_devices())
    dtype = pick_dtype(device.id)
    precision, rows = unquantised(dtype.itemsize), max(ROWS, length)
    budget = plan_full(config, precision, rows, 0)
    ends, shared = full_ends_bytes(config, precision, rows), OWNER_WEIGHT_BYTES * budget.weights
    memory = find_device("cpu", devices)
    wanted = [(device, ends + shared)] if device.id == memory.id else [(device, ends), (memory, shared)]
    for one, size in wanted:
        usable = allowance_on(one, limit_bytes or None if one.id == device.id else None).usable_bytes
        if size > usable:
            raise DoesNotFit(
                f"even with other machines for all blocks, training {budget.weights} weights takes "
                f"{format_size(size)} here, but {one.id} has {format_size(usable)} to spare: give a smaller model",
                config,
                length,
            )
    return budget, device, dtype


def give_memory_back() -> None:
    """Return memory that is unused, as that of a model which was here before, to the system."""
    release(find_device(None, probe_devices()).id)


def block_needs(config: ModelConfig, length: int) -> Callable[[int, int], int]:
    """Return what some blocks take at a machine whose number format is not known, with so many micro-batches."""

    def needs(blocks: int, under_way: int) -> int:
        rows = max(ROWS, length)
        return max(full_blocks_bytes(config, unquantised(size), blocks, rows, under_way) for size in (2, 4))

    return needs


def usual_step(record: TrainingRecord) -> StepTask:
    """Return the step of a job's island for a forecast."""
    tokens = record.batch * record.length
    rows = min(tokens, max(ROWS, record.length))
    return StepTask(None, rows, -(-tokens // rows))


def config_of(record: TrainingRecord) -> ModelConfig:
    """Return the shape of a job's model; raises `SourceError`."""
    return parse_config(record.shape, "the job's record", {})


def make_model(
    record: TrainingRecord, vectors: dict[str, torch.Tensor] | None, limit_bytes: int | None = None
) -> tuple[IslandModel, str]:
    """Return the model of an island and its device; without vectors it starts as drawn from the seed."""
    config = config_of(record)
    budget, device, dtype = plan_island(config, record.length, limit_bytes)
    options = WeightOptions(torch.device(device.id), dtype)
    vectors = vectors or drawn_model(config, record.seed)
    return IslandModel(config, vectors, options, _terms(record), graph_bytes=budget.graph_bytes), device.id


def make_pipeline(
    record: TrainingRecord, vectors: dict[str, torch.Tensor] | None, limit_bytes: int | None = None
) -> tuple[PipelineModel, str, PipelineTerms]:
    """Return the owner's part of an island of several machines, its device, and what the machines train."""
    config, how = config_of(record), _terms(record)
    _, device, dtype = plan_owner(config, record.length, limit_bytes)
    options = WeightOptions(torch.device(device.id), dtype)
    model = PipelineModel(config, vectors or drawn_model(config, record.seed), options, how)
    order = full_order(
        record.shape, blocks=config.n_blocks, optimiser=record.optimiser, weight_decay=record.weight_decay,
        rows=how.rows, wire=wire_name(dtype),
    )  # fmt: skip
    sums_bytes = SUM_BYTES * part_weights(config, block_part(0))
    return model, device.id, PipelineTerms(order, how.schedule.at, how.clip, sums_bytes)


def _terms(record: TrainingRecord) -> IslandTerms:
    decay = record.weight_decay
    return IslandTerms(
        schedule=Schedule(record.rate, record.steps, record.warm_up),
        clip=record.clip,
        optimiser=Muon(weight_decay=decay) if record.optimiser == "muon" else AdamW(weight_decay=decay),
        outer=Nesterov(record.outer_rate, record.outer_momentum),
        codec=codec_named(record.codecs[0]),
        robust=record.merging == "clip",
        rows=max(ROWS, record.length),
        significance=record.significance,
    )


class TokenText:
    """The text of a job as sequences of one length."""

    def __init__(self, tokens: bytes, held: bytes, record: TrainingRecord) -> None:
        config = config_of(record)
        if len(tokens) % (4 * record.length) or len(held) % (4 * record.length):
            raise AppError(f"the text of the job is not made of sequences of {record.length} tokens")
        self._rows, rows = (np.frombuffer(data, dtype="<u4").reshape(-1, record.length) for data in (tokens, held))
        if not len(self._rows) or max(int(self._rows.max()), int(rows.max(initial=0))) >= config.vocab_size:
            raise AppError("the text of the job has tokens that its model does not know")
        if record.batch > len(self._rows):
            raise AppError(
                f"the text of the job has {len(self._rows)} sequences, fewer than the {record.batch} of a step"
            )
        self.held: Sequence[Sequence[int]] = rows.tolist()

    @property
    def count(self) -> int:
        """Number of sequences to train on."""
        return len(self._rows)

    def sequence(self, number: int) -> Sequence[int]:
        """Return the token ids of a sequence."""
        found: Sequence[int] = self._rows[number].tolist()
        return found


def export_files(record: TrainingRecord, states: list[bytes] | None, tokenizer: bytes) -> dict[str, bytes]:
    """Return the files of a Hugging Face folder with the model after the last round."""
    config = config_of(record)
    if states is None:
        raise AppError(f"{record.name} has no finished round yet, so there is nothing to export")
    values, _ = unpacked(config, states)
    return folder_files(config, divided(config, values), tokenizer_of(tokenizer))


def tokenizer_of(raw: bytes) -> TokenizerSpec:
    """Return the tokenizer of a job, which its founder wrote; raises `RecordError` if it is none."""
    fields = decode_object(raw, "the job's tokenizer", max_bytes=len(raw))
    return TokenizerSpec(
        tokenizer_json=fields.text("tokenizer_json", len(raw)),
        chat_template=fields.optional_text("chat_template", len(raw)),
        bos_token=fields.optional_text("bos_token", 256),
        eos_token=fields.optional_text("eos_token", 256),
        template_variables=dict(fields.inner("template_variables").values),
        add_bos=fields.flag("add_bos", False),
    )
