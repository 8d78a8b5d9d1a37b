"""Computes how many blocks of a model fit into a device's memory, from the model's shape alone.

Pure arithmetic: `engine.device.probe` finds devices and their free memory, and the caller picks one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

from engine.config import ModelConfig
from engine.device.kinds import kind_named

MB = 10**6
KV_SHARE = 0.25  # fraction of the allowed memory that the KV cache gets
HEAD_SHARE = 0.25  # largest fraction of a GPU's allowed memory for the head
CONVERTED_ROWS = 2048  # rows of a matrix in int8 that are converted at a time
CONVERTED_NUMBERS = 1 << 26  # of a matrix in a grid that are converted at a time; much fewer leave a large GPU idle
LOSS_ROWS = 128  # rows whose logits are held at a time when a loss is computed
SCALE_BYTES = 4  # of a head's key or value of one token in a cache of 8 bits, besides a byte for each number
ADAPTER_ROLES = ("q", "k", "v", "o", "gate", "up", "down")  # matrices of a block that adapters can change


CacheFormat = Literal["own", "int8"]  # the setting `cache`: keys and values as computed with, or in 8 bits


@dataclass(frozen=True)
class Precision:
    """Bytes per number in memory."""

    weight_bytes: float  # per weight of a block's matrices, scales included
    compute_bytes: int  # per number of activations, norms, biases, KV cache, embedding and head
    converted: int = 0  # numbers of a matrix that prompts and training need converted at a time
    cache: CacheFormat = "own"  # "int8": the KV cache has a byte per number, and a scale for each head and token


FLOAT32 = Precision(4.0, 4)
BFLOAT16 = Precision(2.0, 2)


def unquantised(compute_bytes: int) -> Precision:
    """Precision of weights that are kept as computed with."""
    return Precision(compute_bytes, compute_bytes)


def int8_weights(compute_bytes: int) -> Precision:
    """Precision of weight-only int8: one byte per weight, plus a scale per row (under 1/64 byte per weight)."""
    return Precision(1.0 + 1 / 64, compute_bytes)


INT4_BYTES = 5 / 8  # of a weight in 4 bits, with a scale and a minimum in 16 bits for each 32


def grid_weights(weight_bytes: float, compute_bytes: int, *, on_cpu: bool) -> Precision:
    """Precision of weights in a grid of 4 or 8 bits, `weight_bytes` each with their scales.

    A CPU's products are computed by ONNX Runtime, with the integers packed three times (for steps of one session, for
    few rows of several, and for many rows) and with scales, zero points and minima in a form of their own.
    """
    if not on_cpu:
        return Precision(weight_bytes, compute_bytes, CONVERTED_NUMBERS)
    return Precision(weight_bytes + 3 * (1.0 if weight_bytes >= 1 else 0.5) + 9 / 16, compute_bytes)


@dataclass(frozen=True)
class Allowance:
    """Memory that Shoal may use on one device."""

    free_bytes: int
    headroom_bytes: int = 0  # part of the free memory that is left to other programs and the driver
    cap_bytes: int | None = None  # the user's --max-vram; 0: host nothing
    kv_share: float = KV_SHARE
    kv_least: float | None = None  # blocks may push the KV cache down to this share; None: they may not
    prefill_rows: int = 512  # longest prefill chunk, in tokens
    reserved_bytes: int = 0  # taken by the driver and its libraries; counts against the cap
    scratch_bytes: int = 0  # for captured steps and the libraries' own workspace

    def __post_init__(self) -> None:
        if not 0 <= self.kv_share < 1:
            raise ValueError(f"kv_share must be at least 0 and below 1, not {self.kv_share}")

    @property
    def usable_bytes(self) -> int:
        """Free memory less the headroom, at most `cap_bytes` less what the driver takes."""
        free = max(0, self.free_bytes - self.headroom_bytes)
        return free if self.cap_bytes is None else min(free, max(0, self.cap_bytes - self.reserved_bytes))

    @property
    def kv_floor(self) -> float:
        """Least share of the memory that the KV cache gets."""
        return self.kv_share if self.kv_least is None else self.kv_least

    @property
    def kv_bytes(self) -> int:
        """Bytes for the KV cache, if the blocks leave so much."""
        return int(self.usable_bytes * self.kv_share)


@dataclass(frozen=True)
class BlockBudget:
    """Number of blocks that a device can host, the memory they take, and the reason why not more."""

    blocks: int
    weight_bytes_per_block: int
    kv_bytes: int
    kv_bytes_per_token: int  # one token of one session in all hosted blocks
    workspace_bytes: int
    ends_bytes: int  # embedding and head, if hosted
    reason: str
    is_capped: bool = False  # the user's cap is what limits it, rather than the free memory

    @property
    def total_bytes(self) -> int:
        """Bytes that the plan takes in all; never more than the allowance."""
        return self.blocks * self.weight_bytes_per_block + self.kv_bytes + self.workspace_bytes + self.ends_bytes

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds, over all sessions."""
        return self.kv_bytes // self.kv_bytes_per_token if self.kv_bytes_per_token else 0


class DeviceMemory(Protocol):
    """The facts of a device that decide how much fits on it; `engine.device.probe.Device` has them."""

    @property
    def kind(self) -> str: ...
    @property
    def total_bytes(self) -> int: ...
    @property
    def free_bytes(self) -> int: ...
    @property
    def context_bytes(self) -> int: ...


@dataclass(frozen=True)
class Fit:
    """How much of a model fits on a device: the blocks that it can host now, and what it lacks for all of them."""

    budget: BlockBudget
    lacking_bytes: int  # free memory missing for all blocks
    too_large: bool  # would not fit even if nothing else ran


def fit(config: ModelConfig, device: DeviceMemory, precision: Precision, cap_bytes: int | None) -> Fit:
    """Return how much of a model fits on a device next to what else runs there, within the user's memory cap."""
    allowance = allowance_on(device, cap_bytes)
    may_head = kind_named(device.kind).runs_head
    hosts_head = may_head and head_on_gpu(config, allowance.usable_bytes, precision)
    whole = _whole_bytes(config, allowance, precision, head=may_head)
    if may_head and not head_on_gpu(config, whole, precision):
        whole = _whole_bytes(config, allowance, precision, head=False)
    lacking = max(0, whole - allowance.usable_bytes)
    return Fit(
        plan_blocks(config, allowance, precision, hosts_head=hosts_head),
        lacking_bytes=lacking and lacking + max(0, allowance.headroom_bytes - allowance.free_bytes),
        too_large=whole + allowance.headroom_bytes > device.total_bytes,
    )


def _whole_bytes(config: ModelConfig, allowance: Allowance, precision: Precision, *, head: bool) -> int:
    """Usable bytes from which on all blocks fit."""
    weights = config.n_blocks * block_bytes(config, precision)
    weights += ends_bytes(config, precision, embedding=False, head=head)
    workspace = workspace_bytes(config, precision, allowance.prefill_rows, head=head) + allowance.scratch_bytes
    return math.ceil((weights + workspace) / (1 - allowance.kv_floor))


def allowance_on(device: DeviceMemory, cap_bytes: int | None) -> Allowance:
    """Return the memory that Shoal may use on a device, within the user's cap."""
    kind = kind_named(device.kind)
    headroom = default_headroom(device.kind, device.total_bytes)
    if not kind.captures_steps:
        return Allowance(device.free_bytes, headroom, cap_bytes)
    return Allowance(
        device.free_bytes,
        headroom + kind.library_bytes,
        cap_bytes,
        kv_least=KV_SHARE / 2,
        reserved_bytes=device.context_bytes + kind.library_bytes,
        scratch_bytes=kind.scratch_bytes,
    )


def head_on_gpu(config: ModelConfig, usable_bytes: int, precision: Precision) -> bool:
    """True if a GPU runs the head, which then takes at most `HEAD_SHARE` of the memory; else it runs on the CPU."""
    return ends_bytes(config, precision, embedding=False, head=True) <= HEAD_SHARE * usable_bytes


def plan_blocks(
    config: ModelConfig,
    allowance: Allowance,
    precision: Precision,
    *,
    hosts_embedding: bool = False,
    hosts_head: bool = False,
) -> BlockBudget:
    """Return the largest number of blocks that fits together with KV cache, workspace and the hosted ends."""
    usable = allowance.usable_bytes
    per_block = block_bytes(config, precision)
    ends = ends_bytes(config, precision, embedding=hosts_embedding, head=hosts_head)
    workspace = workspace_bytes(config, precision, allowance.prefill_rows, head=hosts_head) + allowance.scratch_bytes
    room = usable - int(usable * allowance.kv_floor) - ends - workspace
    blocks = min(config.n_blocks, max(0, room) // per_block)
    if blocks == 0:
        return BlockBudget(0, per_block, 0, 0, 0, 0, _why_none(allowance, per_block - room), _capped(allowance))
    kv = min(allowance.kv_bytes, usable - ends - workspace - blocks * per_block)
    per_token = blocks * kv_bytes_per_token(config, precision)
    converted = _converted_cache_bytes(config, precision, kv, per_token)
    reason = _why_these(allowance, blocks, config.n_blocks)
    return BlockBudget(
        blocks, per_block, kv - converted, per_token, workspace + converted, ends, reason, _capped(allowance)
    )


def block_bytes(config: ModelConfig, precision: Precision) -> int:
    """Bytes of one block's weights."""
    c = config
    q_size, kv_size = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    matrices = c.hidden_size * (2 * q_size + 2 * kv_size + 3 * c.intermediate_size)
    vectors = 2 * c.hidden_size  # the two norms
    vectors += (q_size + 2 * kv_size) * c.qkv_bias + c.hidden_size * c.o_bias
    vectors += (2 * c.intermediate_size + c.hidden_size) * c.mlp_bias + 2 * c.head_dim * c.qk_norm
    return int(matrices * precision.weight_bytes) + vectors * precision.compute_bytes


def block_weights(config: ModelConfig) -> int:
    """Number of weights of one block, norms and biases included."""
    return block_bytes(config, unquantised(1))


def adapter_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return (out, in) of each matrix of a block that an adapter can change."""
    c = config
    q_size, kv_size = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    return {
        "q": (q_size, c.hidden_size),
        "k": (kv_size, c.hidden_size),
        "v": (kv_size, c.hidden_size),
        "o": (c.hidden_size, q_size),
        "gate": (c.intermediate_size, c.hidden_size),
        "up": (c.intermediate_size, c.hidden_size),
        "down": (c.hidden_size, c.intermediate_size),
    }


def adapter_weights(config: ModelConfig, rank: int, targets: tuple[str, ...] = ADAPTER_ROLES) -> int:
    """Number of weights of one block's adapters of a rank, on all seven of its matrices unless `targets` says less."""
    return rank * sum(sum(shape) for role, shape in adapter_shapes(config).items() if role in targets)


# Bytes a weight of an adapter takes: itself, its gradient and two moments, and itself and the moments after a step
# until that is committed. All are float32.
ADAPTER_NEXT_BYTES = 12
ADAPTER_WEIGHT_BYTES = 16 + ADAPTER_NEXT_BYTES


def block_graph_bytes(config: ModelConfig, precision: Precision, rows: int) -> int:
    """Bytes that one block keeps of a pass over `rows` rows so that its backward pass need not compute it again."""
    c = config
    q_size, kv_size = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    # Inputs of both norms and their results; q, k, v as computed and rotated, attention's output twice; gate, up, the
    # gate's activation and their product. One row more is for the adapters' own small products and the allocator.
    per_row = 5 * c.hidden_size + 4 * q_size + 3 * kv_size + 4 * c.intermediate_size
    return rows * per_row * precision.compute_bytes


@dataclass(frozen=True)
class TrainingTask:
    """What decides the memory of a span in training: its blocks and adapters, and the micro-batches under way."""

    blocks: int
    rank: int
    targets: tuple[str, ...]
    rows: int  # of the largest micro-batch
    under_way: int  # micro-batches that have been run forwards and not yet backwards


@dataclass(frozen=True)
class TrainingBudget:
    """Memory of a span in training."""

    weight_bytes: int  # of the model's own blocks
    state_bytes: int  # adapters, summed gradients, moments, and the next version during a step
    input_bytes: int  # inputs that forward passes keep
    graph_bytes: int  # what they keep beyond that, to save computing blocks again
    workspace_bytes: int  # the pass of one block, backwards

    @property
    def total_bytes(self) -> int:
        """Bytes in all."""
        return self.weight_bytes + self.state_bytes + self.input_bytes + self.graph_bytes + self.workspace_bytes

    def peak_bytes(self, loss_bytes: int) -> int:
        """Bytes at the fullest moment of a process that computes the loss too.

        The loss, a block's backward pass and the next version of the adapters are never there at the same time; what is
        set aside has room for all of them.
        """
        next_bytes = self.state_bytes * ADAPTER_NEXT_BYTES // ADAPTER_WEIGHT_BYTES
        kept = self.weight_bytes + self.state_bytes - next_bytes + self.input_bytes + self.graph_bytes
        return kept + max(loss_bytes, self.workspace_bytes, next_bytes)


def plan_training(config: ModelConfig, precision: Precision, task: TrainingTask, usable_bytes: int) -> TrainingBudget:
    """Return the memory of a span in training; what is left of `usable_bytes` is for graphs, as far as they can use it.

    The task does not fit if the total is more than `usable_bytes`.
    """
    weights = task.blocks * block_bytes(config, precision)
    state = task.blocks * ADAPTER_WEIGHT_BYTES * adapter_weights(config, task.rank, task.targets)
    inputs = task.under_way * task.blocks * task.rows * config.hidden_size * precision.compute_bytes
    graph = block_graph_bytes(config, precision, task.rows)
    # Besides what a block keeps, its backward pass has gradients of the widest rows, and quantised rows as numbers.
    converted = min(CONVERTED_ROWS, 2 * config.intermediate_size) * config.hidden_size
    converted = max(converted, _converted(config, precision))
    wide = task.rows * (3 * config.intermediate_size + 3 * config.hidden_size)
    workspace = graph + (converted + wide) * precision.compute_bytes
    left = max(0, usable_bytes - weights - state - inputs - workspace)
    return TrainingBudget(weights, state, inputs, min(left, task.under_way * task.blocks * graph), workspace)


# Bytes a weight takes where all weights are trained, in float32: itself, its gradient and two moments.
FULL_WEIGHT_BYTES = 16
# What islands add for each, in the machine's own memory. While steps are made: weights and momentum of the last round
# and what rounding left behind (12), the state that is being written (8), and merged changes that are kept for others
# (8, the most in any number format).
ROUND_KEPT_BYTES = 28
# When changes are merged: the same without the state, the own change as it is (4) and as it is sent (4), the changes
# that are merged and the last merged one (8), and both in float64 to compare them (16).
MERGED_WEIGHT_BYTES = 52
# At the fullest moment, when the change of another island is tested: what is there while steps are made, the own
# change as it was sent (4), the other one as it came (4) and as numbers (4), the state before it (8), and three sets of
# weights (12).
ROUND_WEIGHT_BYTES = 60


@dataclass(frozen=True)
class FullBudget:
    """Memory of a whole model whose weights are all trained in one process."""

    weights: int  # of all parts
    state_bytes: int  # weights, gradients and moments, and copies in the compute format
    kept_bytes: int  # what islands keep of rounds while steps are made, in the machine's own memory
    round_bytes: int  # what rounds take there at most, at their end, when no step is made
    input_bytes: int  # inputs of the blocks of one micro-batch
    graph_bytes: int  # what passes keep beyond that, to save computing blocks again
    workspace_bytes: int  # one block's pass, the loss, and the next state of the largest part during a step

    @property
    def step_bytes(self) -> int:
        """Bytes on the device that makes the steps, besides those of rounds."""
        return self.state_bytes + self.input_bytes + self.graph_bytes + self.workspace_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes at the fullest moment, if steps and rounds are in one memory."""
        return max(self.step_bytes + self.kept_bytes, self.state_bytes + self.round_bytes)


def plan_full(
    config: ModelConfig, precision: Precision, rows: int, usable_bytes: int, *, rounds_apart: bool = False
) -> FullBudget:
    """Return the memory to train all weights with micro-batches of `rows` rows.

    What is left of `usable_bytes` is for graphs, as far as they can use it. The job does not fit if the total is more;
    with `rounds_apart`, where rounds have a memory of their own, if the bytes of steps are.
    """
    ends = ends_bytes(config, unquantised(1), embedding=True, head=True)
    weights = config.n_blocks * block_weights(config) + ends
    copy = 0 if precision.weight_bytes >= 4 else int(weights * precision.weight_bytes)
    inputs = config.n_blocks * rows * config.hidden_size * precision.compute_bytes
    graph = block_graph_bytes(config, precision, rows)
    wide = rows * (3 * config.intermediate_size + 3 * config.hidden_size) * precision.compute_bytes
    largest = max(block_weights(config), config.vocab_size * config.hidden_size)
    workspace = graph + wide + max(20 * largest, loss_bytes(config, precision, rows) + 8 * largest)
    state, kept, most = FULL_WEIGHT_BYTES * weights + copy, ROUND_KEPT_BYTES * weights, ROUND_WEIGHT_BYTES * weights
    left = max(0, usable_bytes - state - inputs - workspace - (0 if rounds_apart else kept))
    return FullBudget(weights, state, kept, most, inputs, min(left, config.n_blocks * graph), workspace)


def full_blocks_bytes(config: ModelConfig, precision: Precision, blocks: int, rows: int, under_way: int) -> int:
    """Bytes of some blocks whose weights are all trained, with so many micro-batches between their two passes."""
    weights = block_weights(config)
    copy = 0 if precision.weight_bytes >= 4 else int(weights * precision.weight_bytes)
    inputs = under_way * rows * config.hidden_size * precision.compute_bytes
    wide = rows * (3 * config.intermediate_size + 3 * config.hidden_size) * precision.compute_bytes
    workspace = block_graph_bytes(config, precision, rows) + wide + 20 * weights
    return blocks * (FULL_WEIGHT_BYTES * weights + copy + inputs) + workspace


def full_ends_bytes(config: ModelConfig, precision: Precision, rows: int) -> int:
    """Bytes of embedding and head whose weights are all trained, and of a loss.

    With two states to go back to: that of the last snapshot, and that with which the round began.
    """
    weights = ends_bytes(config, unquantised(1), embedding=True, head=True)
    copy = 0 if precision.weight_bytes >= 4 else int(weights * precision.weight_bytes)
    kept = 2 * 3 * 4 * weights
    return FULL_WEIGHT_BYTES * weights + copy + kept + 20 * weights + loss_bytes(config, precision, rows)


def loss_bytes(config: ModelConfig, precision: Precision, rows: int) -> int:
    """Bytes that the loss of a micro-batch and its gradient take at the asker, besides the head's own weights."""
    logits = 3 * LOSS_ROWS * config.vocab_size * 4
    return logits + 6 * rows * config.hidden_size * precision.compute_bytes


def ends_bytes(config: ModelConfig, precision: Precision, *, embedding: bool, head: bool) -> int:
    """Bytes of the embedding and the head; a tied head shares the embedding's matrix."""
    matrices = int(embedding) + int(head) - int(embedding and head and config.tied_embeddings)
    numbers = matrices * config.vocab_size * config.hidden_size + int(head) * config.hidden_size
    return numbers * precision.compute_bytes


def kv_bytes_per_token(config: ModelConfig, precision: Precision) -> int:
    """Bytes that one token of one session takes in one block's KV cache (key and value)."""
    if precision.cache == "int8":
        return 2 * config.n_kv_heads * (config.head_dim + SCALE_BYTES)
    return 2 * config.n_kv_heads * config.head_dim * precision.compute_bytes


def _converted_cache_bytes(config: ModelConfig, precision: Precision, kv_bytes: int, per_token: int) -> int:
    """Part of the KV cache's memory that is kept for converting the longest session in it, one block at a time.

    Attention takes keys and values as numbers of the compute format. A cache that has them so needs no copy.
    """
    if precision.cache == "own":
        return 0
    converted = 2 * config.n_kv_heads * config.head_dim * precision.compute_bytes
    return converted * min(config.context_length, kv_bytes // (per_token + converted))


# For each token of the vocabulary, in captured passes: logits of 32 rows, or of 8 with their sorted probabilities.
LOGIT_BYTES = 640


def workspace_bytes(config: ModelConfig, precision: Precision, rows: int, *, head: bool) -> int:
    """Bytes for the activations of one prefill chunk, shared by all blocks, for converted weights, and for logits."""
    c = config
    q_size, kv_size = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    # Residual, normed input and output; q, k, v and the attention's output; gate, up and their product.
    per_row = 3 * c.hidden_size + 2 * q_size + 2 * kv_size + 3 * c.intermediate_size
    logits = c.vocab_size * LOGIT_BYTES if head else 0
    return (rows * per_row + _converted(c, precision)) * precision.compute_bytes + logits


def _converted(config: ModelConfig, precision: Precision) -> int:
    """Numbers of the largest part of a matrix in a grid that is converted at a time."""
    return min(precision.converted, 2 * config.intermediate_size * config.hidden_size)


def default_headroom(kind: str, total_bytes: int) -> int:
    """Bytes left to the desktop, the driver and other programs unless the user sets another value."""
    if kind == "cpu":
        return max(1000 * MB, total_bytes // 10)
    return max(500 * MB, total_bytes // 20)


def _why_none(allowance: Allowance, missing_bytes: int) -> str:
    if allowance.cap_bytes == 0:
        return "the memory cap is 0, so no blocks are hosted"
    limit = "memory cap" if _capped(allowance) else "free memory"
    missing_mb = -(-missing_bytes // MB)
    return f"not even one block fits: the {limit} is at least {missing_mb} MB short"


def _why_these(allowance: Allowance, blocks: int, n_blocks: int) -> str:
    if blocks == n_blocks:
        return "the whole model fits"
    return f"the {'memory cap' if _capped(allowance) else 'free memory'} holds {blocks} of {n_blocks} blocks"


def _capped(allowance: Allowance) -> bool:
    """True if the cap is what limits the allowance, rather than the free memory."""
    free = allowance.free_bytes - allowance.headroom_bytes
    return allowance.cap_bytes is not None and allowance.cap_bytes - allowance.reserved_bytes < free
