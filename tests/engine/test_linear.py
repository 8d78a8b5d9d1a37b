"""Products with weights: every method gives the same result; int8 is close and takes a quarter of the memory."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest
import torch

from engine.model.linear import TIMED_ROWS, DenseLinear, Int8Linear, _candidates, cpu_products, packed

ROWS = (1, 2, 3, 4, 7, 16, 33, 200)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_dense_product_is_exact_for_any_number_of_rows(rows: int, biased: bool, is_packed: bool) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(40, 24), torch.randn(40) if biased else None
    x, residual = torch.randn(rows, 24), torch.randn(rows, 40)
    linear = DenseLinear(weight, bias, packed(weight) if is_packed else None)
    expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    with torch.inference_mode():
        assert torch.allclose(linear(x).double(), expected, atol=1e-5)
        assert torch.allclose(linear(x, residual).double(), expected + residual.double(), atol=1e-5)


class _Mallinfo(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in "abcdefghij")


def allocated_bytes() -> int:
    """What glibc's malloc has given out."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo
    info = mallinfo2()
    return int(info.e + info.h)  # mapped one by one, and the rest


@pytest.mark.skipif(sys.platform != "linux", reason="asks glibc")
def test_products_of_many_lengths_keep_little_memory() -> None:
    """A process of its own, since what the libraries may keep is read once. Without a limit they keep 170 MB here."""
    code = "from tests.engine.test_linear import multiply_all_lengths; print(multiply_all_lengths())"
    variables = {name: value for name, value in os.environ.items() if "CACHE_CAPACITY" not in name}
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=variables, check=True)
    assert int(answer.stdout) < 60e6


def multiply_all_lengths() -> int:
    """Multiply 2 to 300 rows with one weight; returns the bytes that were allocated meanwhile."""
    torch.set_num_threads(1)
    weight = torch.randn(64, 64)
    linear = DenseLinear(weight, None, packed(weight))
    before = allocated_bytes()
    with torch.inference_mode():
        for rows in range(2, 300):
            linear(torch.zeros(rows, 64))
    return allocated_bytes() - before


@pytest.mark.parametrize("rows", TIMED_ROWS)
def test_every_way_to_multiply_agrees(rows: int) -> None:
    x, weight = torch.randn(rows, 24), torch.randn(40, 24)
    for way in _candidates(rows):
        assert torch.allclose(way(x, weight), x @ weight.t(), atol=1e-5)
    assert cpu_products(torch.float32)[TIMED_ROWS.index(rows)] in _candidates(rows)


@pytest.mark.parametrize("rows", ROWS)
def test_int8_stays_within_half_a_step_of_each_weight(rows: int) -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(40, 24), torch.randn(40), torch.randn(rows, 24)
    linear = Int8Linear.of(weight, bias)
    step = weight.abs().amax(dim=1) / 127
    assert ((linear.quantised * linear.scale[:, None] - weight).abs() <= step[:, None] * 0.501).all()
    bound = 0.501 * x.abs().sum(dim=1, keepdim=True) * step + 1e-4
    with torch.inference_mode():
        assert ((linear(x) - (x @ weight.t() + bias)).abs() <= bound).all()
        assert torch.allclose(linear(x, residual=bias.expand(rows, 40)), linear(x) + bias, atol=1e-5)
    assert linear.nbytes == 40 * 24 + 40 * 4 + 40 * 4


def test_a_row_of_zeros_survives_int8() -> None:
    linear = Int8Linear.of(torch.zeros(3, 8))
    assert linear(torch.ones(1, 8)).tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize("biased", [False, True])
def test_a_product_in_training_has_the_same_bits_with_and_without_gradients(biased: bool) -> None:
    torch.manual_seed(0)
    weight, bias, residual = torch.randn(40, 24), torch.randn(40) if biased else None, torch.randn(7, 40)
    for linear in (DenseLinear(weight, bias, packed(weight)), Int8Linear.of(weight, bias)):
        for rows in (1, 3, 7):
            x = torch.randn(rows, 24)
            with torch.enable_grad():
                kept = linear(x.requires_grad_(), residual[:rows], training=True).detach()
            with torch.inference_mode():
                assert torch.equal(linear(x, residual[:rows], training=True), kept)


def test_the_gradient_of_the_input_is_that_of_autograd() -> None:
    weight, dy = torch.randn(6, 4), torch.randn(3, 6)
    for linear in (DenseLinear(weight, packed=packed(weight)), Int8Linear.of(weight)):
        x = torch.randn(3, 4, requires_grad=True)
        linear(x, training=True).backward(dy)
        assert x.grad is not None
        assert torch.allclose(linear.input_gradient(dy), x.grad, atol=1e-6)


def test_packed_weights_are_counted_twice() -> None:
    weight = torch.randn(64, 32)
    copy = packed(weight)
    if copy is None:
        pytest.skip("this torch has no packed weights")
    assert DenseLinear(weight, packed=copy).nbytes == 2 * weight.nbytes
