"""native/sum_of_squares: the sum of squares is accurate and always the same bits."""

import itertools
import math

import pytest
import torch

from offload import _native
from tests.native.update.test_summed_writes import (
    BLOCK,
    DTYPES,
    SIZES,
    address_of_copy,
    sum_of_squares,
    values,
)


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_accurate_and_independent_of_isa_and_threads(dtype: str, numel: int) -> None:
    tensor = values(numel, dtype)
    results = set()
    for isa, threads in itertools.product(_native.isa_available(), (1, 2, 3)):
        _native.set_isa(isa)
        _native.set_threads(threads)
        results.add(sum_of_squares(tensor, dtype))
    assert len(results) == 1
    exact = math.fsum(x * x for x in tensor.double().tolist())
    assert results.pop() == pytest.approx(exact, rel=1e-13, abs=0)


@pytest.mark.covering(2)
@pytest.mark.parametrize("isa", _native.isa_available())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1, 33, BLOCK + 1, 2 * BLOCK + 77])
def test_order_of_additions_is_the_documented_one(numel: int, dtype: str, isa: str) -> None:
    _native.set_isa(isa)
    tensor = values(numel, dtype).double()
    total = 0.0
    for block in tensor.split(BLOCK):
        lanes = [0.0] * 32
        for i, x in enumerate(block.tolist()):
            lanes[i % 32] += x * x
        while len(lanes) > 1:
            half = len(lanes) // 2
            lanes = [a + b for a, b in zip(lanes[:half], lanes[half:], strict=True)]
        total += lanes[0]
    assert sum_of_squares(tensor.to(DTYPES[dtype]), dtype) == total


@pytest.mark.parametrize("isa", _native.isa_available())
@pytest.mark.parametrize("dtype", DTYPES)
def test_finite_if_and_only_if_every_element_is(dtype: str, isa: str) -> None:
    _native.set_isa(isa)
    numel = BLOCK + 19
    largest = torch.full((numel,), torch.finfo(DTYPES[dtype]).max, dtype=DTYPES[dtype])
    assert math.isfinite(sum_of_squares(largest, dtype))
    smallest = torch.full((numel,), torch.finfo(DTYPES[dtype]).smallest_normal / 2).to(
        DTYPES[dtype]
    )
    assert sum_of_squares(smallest, dtype) > 0
    for poison, at in itertools.product(
        (math.inf, -math.inf, math.nan), (0, 5, BLOCK - 1, BLOCK, numel - 1)
    ):
        tensor = torch.ones(numel, dtype=DTYPES[dtype])
        tensor[at] = poison
        assert not math.isfinite(sum_of_squares(tensor, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_address_needs_no_alignment(dtype: str) -> None:
    tensor = values(1000, dtype)
    raw, address = address_of_copy(tensor)
    assert _native.sum_of_squares(dtype, address, tensor.numel()) == sum_of_squares(tensor, dtype)
    del raw


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="'fp8'"):
        _native.sum_of_squares("fp8", 0, 0)
    with pytest.raises(ValueError, match="address is 0"):
        _native.sum_of_squares("fp32", 0, 1)
