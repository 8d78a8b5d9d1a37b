"""How many blocks fit: arithmetic over a model's shape and a memory allowance. Knows no device and reads nothing."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import ModelConfig

MB = 10**6


@dataclass(frozen=True)
class Precision:
    """Bytes that one number takes in memory."""

    weight_bytes: float  # a weight of a block's matrices, scales included
    compute_bytes: int  # an activation, a norm's or bias's weight, a number in the KV cache, the embedding or the head


FLOAT32 = Precision(4.0, 4)
BFLOAT16 = Precision(2.0, 2)
FLOAT16 = Precision(2.0, 2)


def int8_weights(compute_bytes: int) -> Precision:
    """Weight-only int8: a byte a weight, and one scale for each row, which is under 1/64 of a byte a weight."""
    return Precision(1.0 + 1 / 64, compute_bytes)


@dataclass(frozen=True)
class Allowance:
    """The memory that Shoal may take on one device."""

    free_bytes: int
    headroom_bytes: int = 0  # left to everybody else, out of the free memory
    cap_bytes: int | None = None  # the person's --max-vram; 0 hosts nothing
    kv_share: float = 0.25  # of the allowance
    prefill_rows: int = 512  # the longest chunk that goes through a block at once

    def __post_init__(self) -> None:
        if not 0 <= self.kv_share < 1:
            raise ValueError(f"kv_share must be at least 0 and below 1, not {self.kv_share}")

    @property
    def usable_bytes(self) -> int:
        """Free memory less the headroom, under the cap."""
        free = max(0, self.free_bytes - self.headroom_bytes)
        return free if self.cap_bytes is None else min(free, max(0, self.cap_bytes))


@dataclass(frozen=True)
class BlockBudget:
    """What a device can host, and why not more."""

    blocks: int
    weight_bytes_per_block: int
    kv_bytes: int
    kv_bytes_per_token: int  # of one session, over all the hosted blocks
    workspace_bytes: int
    ends_bytes: int  # the embedding and the head, where hosted
    reason: str

    @property
    def total_bytes(self) -> int:
        """All that the plan takes; never more than the allowance."""
        return self.blocks * self.weight_bytes_per_block + self.kv_bytes + self.workspace_bytes + self.ends_bytes

    @property
    def kv_tokens(self) -> int:
        """How many tokens, over all sessions, the KV cache holds."""
        return self.kv_bytes // self.kv_bytes_per_token if self.kv_bytes_per_token else 0


def plan_blocks(
    config: ModelConfig,
    allowance: Allowance,
    precision: Precision,
    *,
    hosts_embedding: bool = False,
    hosts_head: bool = False,
) -> BlockBudget:
    """The most blocks that fit beside their KV cache, the workspace and the hosted ends."""
    usable = allowance.usable_bytes
    per_block = block_bytes(config, precision)
    ends = ends_bytes(config, precision, embedding=hosts_embedding, head=hosts_head)
    workspace = workspace_bytes(config, precision, allowance.prefill_rows, head=hosts_head)
    kv = int(usable * allowance.kv_share)
    room = usable - kv - ends - workspace
    blocks = min(config.n_blocks, max(0, room) // per_block)
    if blocks == 0:
        return BlockBudget(0, per_block, 0, 0, 0, 0, _why_none(allowance, per_block - room))
    per_token = blocks * kv_bytes_per_token(config, precision)
    reason = _why_these(allowance, blocks, config.n_blocks)
    return BlockBudget(blocks, per_block, kv, per_token, workspace, ends, reason)


def block_bytes(config: ModelConfig, precision: Precision) -> int:
    """The memory of one block's weights."""
    c = config
    q_size, kv_size = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    matrices = c.hidden_size * (2 * q_size + 2 * kv_size + 3 * c.intermediate_size)
    vectors = 2 * c.hidden_size  # the two norms
    vectors += (q_size + 2 * kv_size) * c.qkv_bias + c.hidden_size * c.o_bias
    vectors += (2 * c.intermediate_size + c.hidden_size) * c.mlp_bias + 2 * c.head_dim * c.qk_norm
    return int(matrices * precision.weight_bytes) + vectors * precision.compute_bytes


def ends_bytes(config: ModelConfig, precision: Precision, *, embedding: bool, head: bool) -> int:
    """The memory of the embedding and the head; a tied head shares the embedding's matrix."""
    matrices = int(embedding) + int(head) - int(embedding and head and config.tied_embeddings)
    numbers = matrices * config.vocab_size * config.hidden_size + int(head) * config.hidden_size
    return numbers * precision.compute_bytes


def kv_bytes_per_token(config: ModelConfig, precision: Precision) -> int:
    """What one token of one session keeps in one block: a key and a value."""
    return 2 * config.n_kv_heads * config.head_dim * precision.compute_bytes


def workspace_bytes(config: ModelConfig, precision: Precision, rows: int, *, head: bool) -> int:
    """The activations of one prefill chunk, and the logits where the head is hosted; the memory is reused by blocks."""
    c = config
    q_size, kv_size = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    # Residual, normed input and output; q, k, v and the attention's output; gate, up and their product.
    per_row = 3 * c.hidden_size + 2 * q_size + 2 * kv_size + 3 * c.intermediate_size
    logits = c.vocab_size * 4 if head else 0  # one row in float32: only the last position is asked for
    return rows * per_row * precision.compute_bytes + logits


def default_headroom(kind: str, total_bytes: int) -> int:
    """What is left to the desktop, the driver and other programs unless the person says otherwise."""
    if kind == "cpu":
        return max(1000 * MB, total_bytes // 10)
    return max(500 * MB, total_bytes // 20)


def _why_none(allowance: Allowance, missing_bytes: int) -> str:
    if allowance.cap_bytes == 0:
        return "client: the cap is 0, so nothing is hosted"
    limit = "cap" if _capped(allowance) else "free memory"
    missing_mb = -(-missing_bytes // MB)
    return f"client: not even one block fits; the {limit} is at least {missing_mb} MB short"


def _why_these(allowance: Allowance, blocks: int, n_blocks: int) -> str:
    if blocks == n_blocks:
        return "the whole model fits"
    return f"the {'cap' if _capped(allowance) else 'free memory'} holds {blocks} of {n_blocks} blocks"


def _capped(allowance: Allowance) -> bool:
    return allowance.cap_bytes is not None and allowance.cap_bytes < allowance.free_bytes - allowance.headroom_bytes
