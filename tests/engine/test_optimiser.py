"""AdamW, its schedule and clipping beside `torch.optim`."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import TrainingError
from engine.training.optimiser import AdamW, Moments, Schedule, adamw_step, are_moments, clip_factor, total_norm


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_fifty_steps_equal_those_of_torch(decay: float) -> None:
    generator = torch.Generator().manual_seed(1)
    sizes = (40, 7, 300)  # three tensors of theirs are one vector of ours
    theirs = [torch.randn(size, generator=generator).requires_grad_() for size in sizes]
    optimiser = torch.optim.AdamW(theirs, lr=1e-2, weight_decay=decay)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimiser, start_factor=1 / 6, total_iters=5)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, T_max=45)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimiser, [warm_up, cosine], milestones=[5])
    state = Moments.fresh(torch.cat([tensor.detach().clone() for tensor in theirs]))
    ours = Schedule(1e-2, 50, 5)
    for number in range(50):
        gradient = torch.randn(sum(sizes), generator=generator) * 10 ** (number % 5 - 2)
        for tensor, part in zip(theirs, gradient.split(sizes), strict=True):
            tensor.grad = part.clone()
        expected = float(torch.nn.utils.clip_grad_norm_(theirs, 1.0))
        norm = total_norm([float(part.double().square().sum()) for part in gradient.split((100, 247))], 1.0)
        assert norm == pytest.approx(expected, rel=1e-6)
        assert ours.at(number) == pytest.approx(schedule.get_last_lr()[0], rel=1e-6)
        state = adamw_step(
            state, gradient * clip_factor(norm, 1.0), number + 1, ours.at(number), AdamW(weight_decay=decay)
        )
        optimiser.step()
        schedule.step()
        joined = torch.cat([tensor.detach() for tensor in theirs])
        assert (state.values - joined).abs().max() <= 1e-6 * joined.abs().max()


def test_a_step_leaves_the_old_state_alone() -> None:
    state = Moments.fresh(torch.ones(5))
    adamw_step(state, torch.ones(5), 1, 0.1, AdamW())
    assert state.values.tolist() == [1.0] * 5
    assert not state.first.any()


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_the_norm_does_not_depend_on_order_or_division(squares: list[float], random: object) -> None:
    shuffled = sorted(squares, key=lambda _: random.random())  # type: ignore[attr-defined]
    assert total_norm(squares, 0.5) == total_norm(shuffled, 0.5)


def test_the_rate_rises_then_falls_to_zero() -> None:
    schedule = Schedule(1.0, 20, 4)
    rates = [schedule.at(number) for number in range(25)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[20:] == [0.0] * 5
    assert Schedule(1.0, 1).at(0) == 1.0


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
def test_a_rate_that_is_no_positive_number_is_refused(rate: float) -> None:
    with pytest.raises(TrainingError, match="must be a positive number"):
        Schedule(rate, 10)


def test_clipping_only_shortens() -> None:
    assert clip_factor(0.5, 1.0) == 1.0
    assert clip_factor(4.0, 1.0) == pytest.approx(0.25, rel=1e-6)
    assert clip_factor(4.0, None) == 1.0


@given(st.lists(st.floats(1e-30, 1.0), min_size=1, max_size=60), st.integers(0, 40))
def test_what_training_makes_are_moments(sizes: list[float], zeros: int) -> None:
    state = Moments.fresh(torch.zeros(3))
    for number, size in enumerate([*sizes, *[0.0] * zeros]):
        gradient = torch.tensor([size, -size, size if number == 0 else 0.0]) / 2
        state = adamw_step(state, gradient, number + 1, 1e-3, AdamW())
        first, second = (each.to(torch.bfloat16).float() for each in (state.first, state.second))
        assert are_moments(state.first, state.second, 1.0)
        assert are_moments(first, second, 1.0)


@pytest.mark.parametrize(
    ("first", "second", "clip"),
    [
        ([math.nan, 0.0], [0.0, 0.0], None),
        ([0.0, 0.0], [math.inf, 0.0], None),
        ([0.0, 0.0], [0.0, -1e-9], None),
        ([0.0, 1e-3], [1.0, 0.0], None),  # a step of 1e5 times the rate
        ([0.0, 1e-3], [1.0, 1e-9], None),
        ([1e20, 0.0], [0.0], 1.0),  # of a matrix, whose update would be nothing for hundreds of steps
        ([2.0, 2.0], [1.0, 1.0], 1.0),
    ],
)
def test_what_training_cannot_make_are_none(first: list[float], second: list[float], clip: float | None) -> None:
    assert not are_moments(torch.tensor(first), torch.tensor(second), clip)
    assert are_moments(torch.tensor([0.5, 0.5]), torch.tensor([1.0]), 1.0)
