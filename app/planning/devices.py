"""The time that a machine takes for a block, the head, and a pass of training, from its measured speeds."""

from __future__ import annotations

from collections.abc import Iterable

from app.planning.machines import MachineSpec
from engine.budget import block_bytes, block_weights, ends_bytes, kv_bytes_per_token
from engine.config import ModelConfig

# Forward passes that a training pass takes, by (all weights are trained, the graph is recomputed).
PASSES = {(False, False): 2.0, (False, True): 3.0, (True, False): 3.0, (True, True): 4.0}
# The same as measured on CPUs for adapters; all weights were not measured there.
PASSES_ON_CPU = PASSES | {(False, False): 2.3, (False, True): 3.5}
# Passes consist of many small products, at each of which a process waits for its threads. Where another node's threads
# have the cores they wait longer: three nodes on one machine took 1.2 to 1.4 times as long as one, two islands 1.3.
CROWDED_PASSES = 1.25
# The same for the head, whose logits are never kept: forward and the gradient of its input, then that of its weights.
HEAD_PASSES = {False: 2.0, True: 3.0}
# Rows from which on a product reaches the machine's full speed, and up to which it has that of few rows.
MANY_ROWS, FEW_ROWS = 128, 8
# Of a token besides the head's product, measured on CPUs: to choose it, turn it into text, and pass both on.
CHOOSING_ON_CPU_S = 0.0015
OPTIMISER_BYTES = 28  # a weight, in float32: itself, two moments and its gradient are read, all but the last written


def flops_at(machine: MachineSpec, rows: int) -> float:
    """Flop/s of a machine that multiplies so many rows at once; between few and many it grows evenly."""
    few = machine.few_rows_flops_per_s or machine.flops_per_s
    share = (rows - FEW_ROWS) / (MANY_ROWS - FEW_ROWS)
    return few + min(1.0, max(0.0, share)) * (machine.flops_per_s - few)


def slowest_host_s(busy: Iterable[tuple[MachineSpec, float]]) -> float:
    """Seconds of the busiest host; the work of machines that share the cores of one adds up."""
    seconds: dict[str, float] = {}
    for machine, busy_s in busy:
        seconds[machine.host or machine.name] = seconds.get(machine.host or machine.name, 0.0) + busy_s
    return max(seconds.values(), default=0.0)


def block_time_s(config: ModelConfig, machine: MachineSpec, *, rows: int, context: int, sessions: int) -> float:
    """Seconds of one block for `rows` tokens of `sessions` conversations with `context` tokens each."""
    precision = machine.precision
    read = block_bytes(config, precision) + sessions * context * kv_bytes_per_token(config, precision)
    attended = 4 * context * config.n_heads * config.head_dim  # scores and their sum of values
    flops = rows * (2 * block_weights(config) + attended)
    return max(read / machine.reading_bytes_per_s, flops / flops_at(machine, rows), machine.block_floor_s)


def head_time_s(config: ModelConfig, machine: MachineSpec, *, rows: int) -> float:
    """Seconds of the head for `rows` tokens; the machine that asks runs it, whoever hosts the blocks."""
    read = ends_bytes(config, machine.precision, embedding=False, head=True)
    flops = rows * 2 * config.vocab_size * config.hidden_size
    return max(read / (machine.head_bytes_per_s or machine.reading_bytes_per_s), flops / flops_at(machine, rows))


def ends_time_s(config: ModelConfig, machine: MachineSpec, *, rows: int) -> float:
    """Seconds of the head and of choosing the next tokens of `rows` replies; the machine that asks does both."""
    return head_time_s(config, machine, rows=rows) + (CHOOSING_ON_CPU_S if machine.kind == "cpu" else 0.0)


def passes_of(machine: MachineSpec, *, all_weights: bool, recomputed: bool) -> float:
    """Forward passes that a training pass takes on a kind of machine."""
    return (PASSES_ON_CPU if machine.kind == "cpu" else PASSES)[all_weights, recomputed]


def trained_block_s(config: ModelConfig, machine: MachineSpec, *, rows: int, passes: float) -> float:
    """Seconds of one block for a training pass over `rows` tokens, forward and backward."""
    return passes * block_time_s(config, machine, rows=rows, context=0, sessions=0)


def trained_head_s(config: ModelConfig, machine: MachineSpec, *, rows: int, all_weights: bool) -> float:
    """Seconds of the head and its loss for a training pass in which `rows` tokens count; others do not pass it."""
    return HEAD_PASSES[all_weights] * head_time_s(config, machine, rows=rows)


def optimiser_s(machine: MachineSpec, weights: int) -> float:
    """Seconds to change so many trained weights once."""
    return OPTIMISER_BYTES * weights / machine.reading_bytes_per_s
