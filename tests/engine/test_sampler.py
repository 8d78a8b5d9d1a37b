"""The sampler: tables for each setting, and properties that hold for all of them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import EngineError
from engine.text.sampler import SampleRequest, Sampling, _draw, _penalties, penalised, sample, sample_rows, uniform

logit_lists = st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40)
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.1, 0.7, 1.0, 5.0]),
    top_k=st.integers(0, 50),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 1.0),
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.3, 10.0]),
    frequency_penalty=st.sampled_from([-2.0, 0.0, 0.5, 2.0]),
    presence_penalty=st.sampled_from([-2.0, 0.0, 0.5, 2.0]),
    seed=st.integers(-(2**63), 2**63),
)


def drawn(logits: list[float], settings: Sampling, count: int = 400) -> set[int]:
    """Every token that `count` positions draw."""
    return {sample(torch.tensor(logits), [], settings, position) for position in range(count)}


def test_zero_temperature_takes_the_best() -> None:
    assert sample(torch.tensor([0.0, 3.0, 2.9]), [], Sampling(temperature=0), 0) == 1


@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 1e-38, 5e-324])
def test_next_to_no_temperature_takes_the_best_too(temperature: float) -> None:
    assert drawn([-30.0, 3.0, 2.9, 30.0, 29.0], Sampling(temperature=temperature), 20) == {3}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (Sampling(temperature=1.0), {0, 1, 2, 3}),
        (Sampling(temperature=1.0, top_k=2), {0, 1}),
        (Sampling(temperature=1.0, top_p=0.5), {0, 1}),  # 0.4 does not reach a half, 0.7 does
        (Sampling(temperature=1.0, top_p=0.4), {0}),
        (Sampling(temperature=1.0, min_p=0.5), {0, 1, 2}),  # not below half of 0.4
        (Sampling(temperature=1.0, min_p=1.0), {0}),
        (Sampling(temperature=1.0, top_k=3, top_p=0.99, min_p=0.6), {0, 1}),
    ],
)
def test_each_filter_keeps_the_head_of_the_distribution(settings: Sampling, expected: set[int]) -> None:
    assert drawn([math.log(p) for p in (0.4, 0.3, 0.2, 0.1)], settings) == expected


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([math.log(p) for p in (0.5, 0.3, 0.2)])
    counts = [0, 0, 0]
    for position in range(4000):
        counts[sample(logits, [], Sampling(temperature=1.0, seed=7), position)] += 1
    assert [round(count / 4000, 1) for count in counts] == [0.5, 0.3, 0.2]


def test_the_penalty_pushes_seen_tokens_down_whatever_their_sign() -> None:
    got = penalised(torch.tensor([2.0, -2.0, 1.0]), [0, 1, 1], 2.0)
    assert got.tolist() == [1.0, -4.0, 1.0]


@pytest.mark.parametrize(
    ("penalties", "taken"),
    [
        ({"frequency_penalty": 0.5}, [0.0, 0.5, 1.0, 0.0]),
        ({"presence_penalty": 0.5}, [0.0, 0.5, 0.5, 0.0]),
        ({"frequency_penalty": -1.0, "presence_penalty": 0.25}, [0.0, -0.75, -1.75, 0.0]),
        ({}, [0.0, 0.0, 0.0, 0.0]),
    ],
)
def test_only_tokens_of_the_reply_are_counted(penalties: dict[str, float], taken: list[float]) -> None:
    """The prompt has the tokens 0 and 0, the reply 1, 2 and 2."""
    settings = Sampling(temperature=0, **penalties)  # type: ignore[arg-type]
    request = SampleRequest([0, 0, 1, 2, 2], settings, 5, None, 2)
    assert _penalties([request], torch.zeros(1, 4)).tolist() == [taken]


@given(logit_lists, samplings, st.integers(0, 10**9))
def test_a_sample_is_a_valid_token_and_depends_on_its_arguments_alone(
    logits: list[float], settings: Sampling, position: int
) -> None:
    values = torch.tensor(logits)
    history = [index for index in (0, 3, 3, 7) if index < len(logits)]
    token = sample(values, history, settings, position)
    assert 0 <= token < len(logits)
    assert sample(values.clone(), list(history), settings, position) == token


def one_by_one(logits: torch.Tensor, history: list[int], settings: Sampling, position: int) -> int:
    """The sampler's definition, for one row, filter after filter."""
    if settings.repetition_penalty != 1.0 and history:
        logits = penalised(logits, history, settings.repetition_penalty)
    for token in set(history):
        times = history.count(token)
        logits = logits.clone()
        logits[token] -= settings.frequency_penalty * times + settings.presence_penalty
    if settings.temperature == 0:
        return int(logits.argmax())
    probabilities, tokens = torch.softmax(logits / settings.temperature, dim=-1).sort(descending=True, stable=True)
    kept = len(probabilities) if not settings.top_k else min(len(probabilities), settings.top_k)
    if settings.top_p < 1:
        before = probabilities.double().cumsum(0) - probabilities.double()
        kept = min(kept, int((before < settings.top_p).sum()))
    if settings.min_p > 0:
        kept = min(kept, int((probabilities >= settings.min_p * probabilities[0]).sum()))
    mass = probabilities[: max(kept, 1)].double().cumsum(0)
    draw = uniform(settings.seed, position) * float(mass[-1])
    return int(tokens[min(int(torch.searchsorted(mass, draw, right=True)), len(mass) - 1)])


@given(st.lists(st.lists(st.floats(-30, 30, width=32), min_size=9, max_size=9), min_size=1, max_size=5), st.data())
def test_rows_sampled_together_get_the_tokens_that_each_gets_alone(
    rows: list[list[float]], data: st.DataObject
) -> None:
    requests = [
        SampleRequest(
            data.draw(st.sampled_from([[], [0, 3, 3, 7]])), data.draw(samplings), data.draw(st.integers(0, 99))
        )
        for _ in rows
    ]
    together = sample_rows(torch.tensor(rows), requests).tolist()
    assert together == [
        one_by_one(torch.tensor(row), list(one.history), one.settings, one.position)
        for row, one in zip(rows, requests, strict=True)
    ]


def test_random_numbers_are_the_same_on_every_machine() -> None:
    assert uniform(0, 0) == pytest.approx(0.8336885269740499, abs=1e-12)
    assert uniform(1, 0) != uniform(0, 1)


@pytest.mark.parametrize(
    "bad", [{"temperature": -1}, {"temperature": math.nan}, {"top_k": -1}, {"top_p": 0}, {"top_p": 1.5}, {"min_p": 2},
            {"repetition_penalty": 0}, {"frequency_penalty": 2.1}, {"presence_penalty": -3}],
)  # fmt: skip
def test_senseless_settings_are_refused_by_name(bad: dict[str, float]) -> None:
    with pytest.raises(EngineError, match=next(iter(bad))):
        Sampling(**bad)  # type: ignore[arg-type]


@settings(max_examples=60)
@given(
    st.integers(0, 2**32 - 1),
    st.lists(
        st.tuples(
            st.sampled_from([0.3, 0.8, 1.5]),
            st.sampled_from([0, 1, 5, 40]),
            st.sampled_from([0.5, 0.9, 0.95, 1.0]),
            st.sampled_from([0.0, 0.05, 0.5]),
            st.integers(0, 1000),
        ),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from([0.5, 2.0, 6.0]),
    st.booleans(),
)
def test_sorting_the_likeliest_tokens_first_changes_no_draw(
    seed: int, rows: list[tuple[float, int, float, float, int]], spread: float, coarse: bool
) -> None:
    logits = spread * torch.randn(len(rows), 600, generator=torch.Generator().manual_seed(seed))
    if coarse:  # many equal logits
        logits = logits.round()
    requests = [
        SampleRequest((), Sampling(temperature, top_k, top_p, min_p, seed=seed), position)
        for temperature, top_k, top_p, min_p, position in rows
    ]
    for head in (4, 32, 128):
        assert torch.equal(_draw(logits, requests, head), _draw(logits, requests, 600))


def test_equal_tokens_are_drawn_in_their_order_with_a_short_head() -> None:
    logits = torch.zeros(1, 100)
    logits[0, 60] = 1.0
    for position in range(50):
        request = SampleRequest((), Sampling(1.0, top_k=3, seed=9), position)
        assert int(_draw(logits, [request], 8)) in (60, 0, 1)


@given(logits=logit_lists, sampling=samplings, bars=st.sets(st.integers(0, 39)), position=st.integers(0, 99))
def test_only_allowed_tokens_are_drawn_and_biases_count(
    logits: list[float], sampling: Sampling, bars: set[int], position: int
) -> None:
    allowed = [token for token in range(len(logits)) if token not in bars]
    if not allowed:
        return
    bits = bytearray(8)
    for token in allowed:
        bits[token // 8] |= 1 << token % 8
    row = torch.tensor([logits])
    request = SampleRequest([0], sampling, position, bytes(bits))
    assert int(sample_rows(row, [request])) in allowed
    pushed = replace(sampling, temperature=0, repetition_penalty=1.0, logit_bias=((allowed[-1], 100.0),))
    assert int(sample_rows(row, [SampleRequest([0], pushed, position, bytes(bits))])) == allowed[-1]
    alone = SampleRequest([0], sampling, position)
    both = sample_rows(torch.cat([row, row]), [request, alone]).tolist()
    assert both[1] == int(sample_rows(row, [alone]))  # another row's mask changes nothing here
