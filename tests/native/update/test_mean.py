"""native/mean: the mean of several arrays, summed in fp32 and rounded once."""

from __future__ import annotations

import pytest
import torch

from offload import _native

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NUMELS = [1, 15, 16, 33, 4096, 65536, 3 * 65536 + 7]


def mean(sources: list[torch.Tensor], target: torch.Tensor, dtype: str) -> torch.Tensor:
    _native.mean(dtype, [s.data_ptr() for s in sources], target.data_ptr(), target.numel())
    return target


def expected(sources: list[torch.Tensor]) -> torch.Tensor:
    total = sources[0].float()
    for source in sources[1:]:
        total = total + source.float()
    return (total / len(sources)).to(sources[0].dtype)


@pytest.mark.parametrize("isa", _native.isa_available())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_it_is_torchs_to_the_bit(isa: str, dtype: str, count: int) -> None:
    before = _native.isa()
    _native.set_isa(isa)
    try:
        for numel in NUMELS:
            torch.manual_seed(numel)
            scales = 10.0 ** torch.randint(-6, 4, (count, numel))
            sources = [s.to(DTYPES[dtype]) for s in torch.randn(count, numel) * scales]
            want = expected(sources)
            assert torch.equal(mean(sources, torch.empty_like(want), dtype), want)
            for inside in {0, count // 2, count - 1}:
                copies = [s.clone() for s in sources]
                assert torch.equal(mean(copies, copies[inside], dtype), want)
    finally:
        _native.set_isa(before)


def test_fp16_does_not_overflow_on_the_way() -> None:
    largest = torch.full((100,), 65504.0, dtype=torch.float16)
    assert torch.equal(mean([largest] * 8, torch.empty_like(largest), "fp16"), largest)


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_and_nans_stay(dtype: str) -> None:
    values = torch.tensor([float("inf"), float("-inf"), float("nan"), 1.0], dtype=DTYPES[dtype])
    ones = torch.ones_like(values)
    found = mean([values, ones], torch.empty_like(values), dtype)
    assert found[:2].tolist() == [float("inf"), float("-inf")]
    assert found[2].isnan()
    assert found[3] == 1.0


def test_addresses_need_no_alignment_and_nothing_beyond_is_written() -> None:
    raw = torch.zeros(4 * 101 + 1, dtype=torch.uint8)
    source = torch.randn(100)
    _native.mean("fp32", [source.data_ptr()], raw.data_ptr() + 1, 100)
    assert torch.equal(raw[1:401].clone().view(torch.float32), source)
    assert not raw[401:].any()


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="needs at least one source"):
        _native.mean("fp32", [], 0, 0)
    with pytest.raises(ValueError, match="fp8"):
        _native.mean("fp8", [1], 1, 0)
    with pytest.raises(ValueError, match="source"):
        _native.mean("fp32", [0], 1, 1)
