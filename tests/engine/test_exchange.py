"""The exchange between islands as numbers: the codec, the merging of changes and the outer step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from engine.errors import NotFinite, TrainingError
from engine.training.codecs import CODECS, GROUP, Codec, codec_named, decode, encode, encoded_bytes
from engine.training.outer import Nesterov, agreement, merged, nesterov_step

NUMBERS = st.floats(-(2.0**60), 2.0**60, width=32, allow_nan=False, allow_infinity=False)
VECTORS = arrays.arrays(np.float32, st.integers(0, 300), elements=NUMBERS).map(
    lambda values: torch.from_numpy(values.repeat(29)[: 2 * GROUP + 7].copy())
)


@pytest.mark.parametrize(("codec", "group", "most"), [("int8", GROUP, 127), ("int4", 128, 7)])
@given(vector=VECTORS)
@settings(max_examples=60, deadline=None)
def test_whole_numbers_are_off_by_half_a_scale_at_most_and_idempotent(
    codec: Codec, group: int, most: int, vector: torch.Tensor
) -> None:
    data = encode(vector, codec)
    found = decode(data, vector.numel(), codec)
    assert len(data) == encoded_bytes(vector.numel(), codec)
    for part, back in zip(vector.split(group), found.split(group), strict=True):
        scale = float(part.abs().max()) / most * (1 + 2.0**-15) if part.numel() else 0.0
        assert bool(((part - back).abs() <= 0.5 * scale + 2.0**-100).all())
    assert encode(found, codec) == data


@pytest.mark.parametrize("count", [0, 1, 2, 127, 128, 129, 4097])
def test_int4_keeps_the_order_and_the_signs(count: int) -> None:
    vector = (torch.arange(count) % 15 - 7).float()
    assert torch.allclose(decode(encode(vector, "int4"), count, "int4"), vector, rtol=1e-4)


@given(VECTORS)
@settings(max_examples=20, deadline=None)
def test_float32_is_exact(vector: torch.Tensor) -> None:
    assert torch.equal(decode(encode(vector, "f32"), vector.numel(), "f32"), vector)


def test_a_codec_has_its_name() -> None:
    assert tuple(map(codec_named, CODECS)) == CODECS
    with pytest.raises(TrainingError, match="int2"):
        codec_named("int2")


def test_int8_takes_a_quarter_of_the_bytes() -> None:
    assert encoded_bytes(10**6, "int8") / encoded_bytes(10**6, "f32") < 0.2503
    assert encoded_bytes(10**6, "int4") / encoded_bytes(10**6, "f32") < 0.133


@pytest.mark.parametrize("codec", ["f32", "int8", "int4"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 2.0**120])
def test_numbers_that_are_not_finite_are_not_sent(codec: Codec, value: float) -> None:
    with pytest.raises(NotFinite):
        encode(torch.tensor([1.0, value, 0.0]), codec)


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_bytes_that_are_no_such_numbers_are_refused(codec: Codec) -> None:
    data = encode(torch.ones(5000), codec)
    for wrong in (data[:-1], data + b"\0", b""):
        with pytest.raises(TrainingError, match="5000 numbers"):
            decode(wrong, 5000, codec)
    for scale in (float("nan"), float("inf"), -1.0):
        with pytest.raises(TrainingError, match="scale"):
            decode(np.float32(scale).tobytes() + data[4:], 5000, codec)
    with pytest.raises(TrainingError, match="not finite"):
        decode(np.array([1, np.nan], dtype="<f4").tobytes(), 2, "f32")


@pytest.mark.parametrize(("codec", "most"), [("int8", 0.05), ("int4", 0.8)])
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_error_feedback_loses_nothing_over_rounds(codec: Codec, most: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    sent, wanted, residual = torch.zeros(600), torch.zeros(600), torch.zeros(600)
    for _ in range(20):
        change = torch.randn(600, generator=generator) * torch.logspace(-4, 0, 600)
        found = decode(encode(change + residual, codec), 600, codec)
        residual = change + residual - found
        sent, wanted = sent + found, wanted + change
    assert torch.allclose(sent + residual, wanted, atol=1e-4)
    assert bool((residual.abs() < most).all())


def test_the_outer_step_is_that_of_torch() -> None:
    generator = torch.Generator().manual_seed(3)
    theirs = torch.nn.Parameter(torch.randn(50, generator=generator))
    ours, momentum = theirs.detach().clone(), torch.zeros(50)
    optimiser = torch.optim.SGD([theirs], lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(50):
        change = torch.randn(50, generator=generator) * 0.01
        theirs.grad = change.clone()
        optimiser.step()
        ours, momentum = nesterov_step(ours, momentum, change, Nesterov())
        assert (ours - theirs.detach()).abs().max() <= 1e-6 * float(theirs.detach().abs().max())


def test_plain_changes_are_averaged_by_weight() -> None:
    changes = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    assert torch.allclose(merged(changes, [3, 1], clip=True), torch.tensor([1.75, 3.5]))
    assert torch.allclose(merged(torch.ones(4, 3), [1, 1, 1, 1], clip=True), torch.ones(3))


@pytest.mark.parametrize("attack", ["flip", "flip10", "noise", "zero", "huge"])
def test_one_liar_of_four_moves_the_clipped_mean_little(attack: str) -> None:
    generator = torch.Generator().manual_seed(5)
    common = torch.randn(1000, generator=generator)
    changes = common + 0.5 * torch.randn(4, 1000, generator=generator)
    honest = merged(changes[:3], [1, 1, 1], clip=False)
    lie = {"flip": -1.0, "flip10": -10.0, "zero": 0.0, "huge": 1e6}.get(attack)
    changes[3] = torch.randn(1000, generator=generator) * 10 if lie is None else changes[3] * lie
    clipped, plain = (merged(changes, [1, 1, 1, 1], clip=clip) for clip in (True, False))
    size = float(honest.norm())
    assert float((clipped - honest).norm()) < 0.35 * size
    assert attack in ("zero", "flip") or float((plain - honest).norm()) > 0.9 * size
    norms, cosines = zip(*agreement(changes), strict=True)
    assert all(cosine > 0.6 for cosine in cosines[:3])
    assert cosines[3] < 0.2 or norms[3] > 100 * norms[0]


def test_of_two_changes_each_is_compared_with_the_other() -> None:
    pair = agreement(torch.tensor([[1.0, 0.0], [-2.0, 0.0]]))
    assert pair == [(1.0, -1.0), (2.0, -1.0)]
    assert agreement(torch.tensor([[3.0, 4.0]])) == [(5.0, 1.0)]


def test_an_even_number_of_changes_has_an_unbiased_middle() -> None:
    changes = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    assert torch.allclose(merged(changes, [1, 1, 1, 1], clip=True), torch.tensor([1.5]), atol=1e-6)
    assert torch.allclose(merged(-changes, [1, 1, 1, 1], clip=True), torch.tensor([-1.5]), atol=1e-6)
