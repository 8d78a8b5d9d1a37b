"""The number of blocks that fit, checked by hand-computed tables and by properties."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.budget import (
    BFLOAT16,
    FLOAT32,
    KV_SHARE,
    Allowance,
    Precision,
    allowance_on,
    block_bytes,
    default_headroom,
    ends_bytes,
    fit,
    grid_weights,
    int8_weights,
    kv_bytes_per_token,
    plan_blocks,
)
from engine.config import ModelConfig, Rope
from engine.device.kinds import KINDS
from engine.device.probe import Device

GB = 10**9

SMOLLM2 = ModelConfig("llama", 30, 576, 9, 3, 64, 1536, 49152, 8192, 1e-5, Rope(), tied_embeddings=True)
LLAMA_8B = ModelConfig("llama", 32, 4096, 32, 8, 128, 14336, 128256, 8192, 1e-5, Rope())


@pytest.mark.parametrize(
    ("config", "precision", "expected"),
    [
        # 2·576² + 2·576·192 + 3·576·1536 matrix weights and 2·576 norm weights, four bytes each.
        (SMOLLM2, FLOAT32, 4 * (663_552 + 221_184 + 2_654_208 + 1152)),
        (LLAMA_8B, BFLOAT16, 2 * (33_554_432 + 8_388_608 + 176_160_768 + 8192)),
        (LLAMA_8B, Precision(1.0, 2), 218_103_808 + 2 * 8192),
        # Biases on q (576), k and v (192 each), norms of q and k (64 each).
        (dataclasses.replace(SMOLLM2, qkv_bias=True, qk_norm=True), FLOAT32, 4 * (3_538_944 + 1152 + 960 + 128)),
        (dataclasses.replace(SMOLLM2, o_bias=True, mlp_bias=True), FLOAT32, 4 * (3_538_944 + 1152 + 576 + 3072 + 576)),
    ],
)
def test_block_bytes(config: ModelConfig, precision: Precision, expected: int) -> None:
    assert block_bytes(config, precision) == expected


def test_tied_head_shares_the_embedding() -> None:
    matrix = 49152 * 576 * 4
    norm = 576 * 4
    assert ends_bytes(SMOLLM2, FLOAT32, embedding=True, head=False) == matrix
    assert ends_bytes(SMOLLM2, FLOAT32, embedding=False, head=True) == matrix + norm
    assert ends_bytes(SMOLLM2, FLOAT32, embedding=True, head=True) == matrix + norm
    untied = dataclasses.replace(SMOLLM2, tied_embeddings=False)
    assert ends_bytes(untied, FLOAT32, embedding=True, head=True) == 2 * matrix + norm


@pytest.mark.parametrize(
    ("config", "allowance", "precision", "blocks"),
    [
        (LLAMA_8B, Allowance(24 * GB), BFLOAT16, 32),
        # 6 GB: 1.5 for the KV, 0.06 for the workspace, 4.44 / 0.4362 a block.
        (LLAMA_8B, Allowance(24 * GB, cap_bytes=6 * GB), BFLOAT16, 10),
        (LLAMA_8B, Allowance(6 * GB), BFLOAT16, 10),
        (LLAMA_8B, Allowance(24 * GB, cap_bytes=6 * GB, kv_share=0.0), BFLOAT16, 13),
        (LLAMA_8B, Allowance(7 * GB, headroom_bytes=GB), BFLOAT16, 10),
        (LLAMA_8B, Allowance(24 * GB, cap_bytes=6 * GB), int8_weights(2), 20),
        (LLAMA_8B, Allowance(24 * GB, cap_bytes=6 * GB), grid_weights(4.5 / 8, 2, on_cpu=False), 32),  # Q4_0: all of it
        (LLAMA_8B, Allowance(24 * GB, cap_bytes=6 * GB), grid_weights(6 / 8, 2, on_cpu=False), 26),  # Q4_K
        (LLAMA_8B, Allowance(24 * GB, cap_bytes=0), BFLOAT16, 0),
        (LLAMA_8B, Allowance(GB // 2), BFLOAT16, 0),
        (LLAMA_8B, Allowance(GB, headroom_bytes=2 * GB), BFLOAT16, 0),
        (SMOLLM2, Allowance(24 * GB), FLOAT32, 30),
    ],
)
def test_plan(config: ModelConfig, allowance: Allowance, precision: Precision, blocks: int) -> None:
    assert plan_blocks(config, allowance, precision).blocks == blocks


def test_hosted_ends_cost_blocks() -> None:
    allowance = Allowance(24 * GB, cap_bytes=6 * GB)
    ends = plan_blocks(LLAMA_8B, allowance, BFLOAT16, hosts_embedding=True, hosts_head=True)
    assert ends.blocks == 5  # two matrices of 1.05 GB
    assert ends.ends_bytes == 2 * (2 * 128256 * 4096 + 4096)


@pytest.mark.parametrize(
    ("cap_gb", "vocabulary", "blocks", "head"),
    [(7, 264, 11, True), (7, 128256, 9, True), (24, 128256, 32, True), (2, 128256, 1, False), (1, 264, 0, False)],
)
def test_a_cap_on_a_gpu_includes_what_the_driver_takes(cap_gb: int, vocabulary: int, blocks: int, head: bool) -> None:
    config = dataclasses.replace(LLAMA_8B, vocab_size=vocabulary)
    card = Device("cuda:0", "cuda", "a card", 80 * GB, 78 * GB, context_bytes=543_162_368)
    budget = fit(config, card, BFLOAT16, cap_gb * GB).budget
    assert budget.blocks == blocks
    if blocks:
        assert budget.total_bytes + card.context_bytes + KINDS["cuda"].library_bytes <= cap_gb * GB
        usable = allowance_on(card, cap_gb * GB).usable_bytes
        assert KV_SHARE / 2 * usable - block_bytes(config, BFLOAT16) <= budget.kv_bytes <= KV_SHARE * usable
        assert budget.ends_bytes == ends_bytes(config, BFLOAT16, embedding=False, head=head)


def test_reasons_name_the_limit() -> None:
    uncapped = Allowance(9 * GB)
    nothing, little, some = (dataclasses.replace(uncapped, cap_bytes=cap) for cap in (0, 10**8, 6 * GB))
    assert plan_blocks(LLAMA_8B, nothing, BFLOAT16).reason.startswith("the memory cap is 0")
    assert "the memory cap is at least" in plan_blocks(LLAMA_8B, little, BFLOAT16).reason
    assert plan_blocks(LLAMA_8B, little, BFLOAT16).is_capped
    assert not plan_blocks(LLAMA_8B, Allowance(10**8), BFLOAT16).is_capped
    assert "the free memory is at least" in plan_blocks(LLAMA_8B, Allowance(10**8), BFLOAT16).reason
    assert plan_blocks(LLAMA_8B, Allowance(6 * GB), BFLOAT16).reason == "the free memory holds 10 of 32 blocks"
    assert plan_blocks(LLAMA_8B, some, BFLOAT16).reason.startswith("the memory cap holds 10")
    assert plan_blocks(SMOLLM2, uncapped, FLOAT32).reason == "the whole model fits"


def test_the_missing_memory_is_enough_for_one_block() -> None:
    allowance = Allowance(100 * 10**6, kv_share=0.0)
    reason = plan_blocks(LLAMA_8B, allowance, BFLOAT16).reason
    missing_mb = int(reason.split("at least ")[1].split(" MB")[0])
    more = dataclasses.replace(allowance, free_bytes=allowance.free_bytes + missing_mb * 10**6)
    assert plan_blocks(LLAMA_8B, more, BFLOAT16).blocks == 1


def test_kv_tokens_counts_all_hosted_blocks() -> None:
    budget = plan_blocks(LLAMA_8B, Allowance(6 * GB), BFLOAT16)
    assert kv_bytes_per_token(LLAMA_8B, BFLOAT16) == 2 * 8 * 128 * 2
    assert budget.kv_tokens == int(1.5 * GB) // (10 * 4096)
    assert plan_blocks(LLAMA_8B, Allowance(0), BFLOAT16).kv_tokens == 0


@pytest.mark.parametrize(
    ("config", "precision", "gigabytes", "times"),
    [
        (SMOLLM2, FLOAT32, 1, 3.575),  # 256 bytes become 64 and a scale of 4, less what conversion needs
        (SMOLLM2, BFLOAT16, 1, 1.835),
        (LLAMA_8B, BFLOAT16, 24, 1.93),
        (LLAMA_8B, BFLOAT16, 6, 1.896),
    ],
)
def test_a_cache_of_8_bits_holds_more_tokens_in_the_same_memory(
    config: ModelConfig, precision: Precision, gigabytes: int, times: float
) -> None:
    own, int8 = (
        plan_blocks(config, Allowance(gigabytes * GB), dataclasses.replace(precision, cache=cache))
        for cache in ("own", "int8")
    )
    assert kv_bytes_per_token(config, dataclasses.replace(precision, cache="int8")) == (
        2 * config.n_kv_heads * (config.head_dim + 4)
    )
    assert (int8.blocks, int8.total_bytes) == (own.blocks, own.total_bytes)
    assert int8.kv_tokens / own.kv_tokens == pytest.approx(times, abs=0.005)
    # What attention over the longest session needs is set aside.
    longest = min(config.context_length, int8.kv_tokens)
    assert int8.workspace_bytes - own.workspace_bytes >= longest * kv_bytes_per_token(config, precision)


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_a_senseless_share_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="kv_share"):
        Allowance(GB, kv_share=share)


def test_headroom_has_a_floor() -> None:
    assert default_headroom("cuda", 8 * GB) == 500 * 10**6
    assert default_headroom("cuda", 24 * GB) == int(1.2 * GB)
    assert default_headroom("cpu", 4 * GB) == GB


configs = st.builds(
    lambda heads, groups, head_dim, inter, tied, blocks: ModelConfig(
        "qwen3",
        blocks,
        64 * heads,
        heads * groups,
        heads,
        head_dim,
        inter,
        1000,
        512,
        1e-6,
        Rope(),
        tied_embeddings=tied,
    ),
    st.integers(1, 16),
    st.integers(1, 8),
    st.sampled_from([32, 64, 128]),
    st.integers(1, 20_000),
    st.booleans(),
    st.integers(1, 100),
)
allowances = st.builds(
    Allowance,
    free_bytes=st.integers(0, 10**11),
    headroom_bytes=st.integers(0, 10**9),
    cap_bytes=st.none() | st.integers(0, 10**11),
    kv_share=st.floats(0, 0.9),
)
precisions = st.sampled_from([FLOAT32, BFLOAT16, int8_weights(2), int8_weights(4)])


@given(configs, allowances, precisions, st.booleans(), st.booleans())
def test_a_plan_never_exceeds_what_is_allowed(
    config: ModelConfig, allowance: Allowance, precision: Precision, embedding: bool, head: bool
) -> None:
    budget = plan_blocks(config, allowance, precision, hosts_embedding=embedding, hosts_head=head)
    assert 0 <= budget.blocks <= config.n_blocks
    assert 0 <= budget.total_bytes <= max(0, allowance.free_bytes - allowance.headroom_bytes)
    if allowance.cap_bytes is not None:
        assert budget.total_bytes <= allowance.cap_bytes
    # And it is the largest number: one block more does not fit.
    if 0 < budget.blocks < config.n_blocks:
        assert budget.total_bytes + budget.weight_bytes_per_block > allowance.usable_bytes


@given(configs, precisions, st.integers(0, 10**11), st.integers(0, 10**11), st.none() | st.integers(0, 10**11))
def test_the_whole_model_fits_if_nothing_is_lacking_and_with_what_is_lacking(
    config: ModelConfig, precision: Precision, total: int, used: int, cap: int | None
) -> None:
    device = Device("cuda:0", "cuda", "some card", total, max(0, total - used))
    fits = fit(config, device, precision, cap)
    if fits.budget.blocks == config.n_blocks:
        assert fits.lacking_bytes <= 1  # of rounding
    else:
        assert fits.lacking_bytes > 0
    more = dataclasses.replace(device, free_bytes=device.free_bytes + fits.lacking_bytes)
    if cap is None:
        assert fit(config, more, precision, None).budget.blocks == config.n_blocks
    alone = dataclasses.replace(device, free_bytes=total)
    assert fits.too_large == (fit(config, alone, precision, None).lacking_bytes > 0)


@given(configs, allowances, precisions, st.integers(0, 10**11))
def test_more_memory_never_hosts_less(
    config: ModelConfig, allowance: Allowance, precision: Precision, more: int
) -> None:
    richer = dataclasses.replace(allowance, free_bytes=allowance.free_bytes + more)
    assert plan_blocks(config, richer, precision).blocks >= plan_blocks(config, allowance, precision).blocks
    if allowance.cap_bytes is not None:
        raised = dataclasses.replace(allowance, cap_bytes=allowance.cap_bytes + more)
        assert plan_blocks(config, raised, precision).blocks >= plan_blocks(config, allowance, precision).blocks
