"""native/update/reductions: sums have always the same bits, and writes are torch's."""

from __future__ import annotations

import itertools
import math
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from offload import _native

if TYPE_CHECKING:
    from offload._native import DtypeName

DTYPES: dict[DtypeName, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
RUN = 1024  # elements that are written before their squares are summed
BLOCK = 32 * 1024  # elements that are summed together
SIZES = [0, 1, 31, 32, 33, RUN - 1, RUN, RUN + 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 77]
SPECIAL = [
    math.inf, -math.inf, math.nan, 0.0, -0.0, 1.0, -1.0, 65504.0, 65519.9, 65520.0, -65520.0,
    3.3895e38, 3.4e38, -3.4e38, 1e-40, -1e-40, 6e-8, 2.9e-8, 1.17e-38, 1.00390625, 1.01171875,
]  # fmt: skip


def values(numel: int, dtype: DtypeName, seed: int = 0) -> torch.Tensor:
    """Of many sizes, with many ties between two numbers of the smaller dtypes."""
    generator = torch.Generator().manual_seed(numel + seed)
    scale = 10.0 ** (torch.rand(numel, generator=generator) * 8 - 5)
    drawn = torch.randn(numel, generator=generator) * scale
    halfway = drawn.bfloat16().view(torch.int16).int() * 65536 + 0x8000
    drawn[::3] = halfway.view(torch.float32)[::3]
    return drawn.to(DTYPES[dtype])


def threads_for(numel: int) -> tuple[int, ...]:
    """Numbers of threads between which so many elements can be divided, block by block."""
    return (1, 2, 4) if numel > BLOCK else (2,)


def address_of_copy(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The tensor's bytes from an odd address on: the kernels ask for no alignment."""
    raw = torch.empty(tensor.nbytes + 1, dtype=torch.uint8)
    raw[1:] = tensor.view(torch.uint8)
    return raw, raw.data_ptr() + 1


def write(
    name: str, source: torch.Tensor, source_dtype: DtypeName, kept: torch.Tensor, dtype: DtypeName
) -> tuple[torch.Tensor, float]:
    """What copy_and_sum() or add_and_sum() makes of `kept`, and the sum."""
    from_, source_address = address_of_copy(source)
    raw, address = address_of_copy(kept)
    total = getattr(_native, name)(source_dtype, source_address, dtype, address, kept.numel())
    del from_
    return raw[1:].clone().view(DTYPES[dtype]), total


def by_torch(name: str, source: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    kept = kept.clone()
    return kept.copy_(source) if name == "copy_and_sum" else kept.add_(source)


def sum_of_squares(tensor: torch.Tensor, dtype: DtypeName) -> float:
    return _native.sum_of_squares(dtype, tensor.data_ptr(), tensor.numel())


def in_the_documented_order(tensor: torch.Tensor) -> float:
    """The sum of squares in fp64: of a block each 32nd element, then halves of these 32 sums."""
    total = 0.0
    for block in tensor.double().square().split(BLOCK):
        rows = torch.nn.functional.pad(block, (0, -len(block) % 32)).view(-1, 32)
        # (Row after row. torch's own sum has another order.)
        lanes = np.add.accumulate(rows.numpy(), axis=0)[-1]
        while len(lanes) > 1:
            half = len(lanes) // 2
            lanes = lanes[:half] + lanes[half:]
        total += float(lanes[0])
    return total


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_those_of_one_order_whatever_isa_threads_and_alignment(dtype: DtypeName) -> None:
    for numel in SIZES:
        tensor = values(numel, dtype)
        expected = in_the_documented_order(tensor) if numel else 0.0
        assert expected == pytest.approx(math.fsum((tensor.double() ** 2).tolist()), rel=1e-13)
        raw, address = address_of_copy(tensor)
        for isa, threads in itertools.product(_native.isa_available(), threads_for(numel)):
            _native.set_isa(isa)
            _native.set_threads(threads)
            assert sum_of_squares(tensor, dtype) == expected, (numel, isa, threads)
            assert _native.sum_of_squares(dtype, address, numel) == expected, (numel, isa, threads)
        del raw


@pytest.mark.covering(1)
@pytest.mark.parametrize("isa", _native.isa_available())
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_finite_if_and_only_if_every_element_is(dtype: str, isa: str) -> None:
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
        for name in ("copy_and_sum", "add_and_sum"):
            kept = torch.ones_like(tensor)
            assert not math.isfinite(write(name, tensor, dtype, kept, dtype)[1]), name


PAIRS = list(itertools.product(DTYPES, DTYPES))


@pytest.mark.covering(2)
@pytest.mark.parametrize("name", ["copy_and_sum", "add_and_sum"])
@pytest.mark.parametrize("source_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_of_torch_and_of_the_separate_sum(
    source_dtype: DtypeName, dtype: DtypeName, name: str
) -> None:
    for numel in SIZES:
        source, kept = values(numel, source_dtype), values(numel, dtype, seed=1)
        expected = by_torch(name, source, kept)
        total = sum_of_squares(expected, dtype)
        for isa, threads in itertools.product(_native.isa_available(), threads_for(numel)):
            _native.set_isa(isa)
            _native.set_threads(threads)
            made, found = write(name, source, source_dtype, kept, dtype)
            assert made.view(torch.uint8).equal(expected.view(torch.uint8)), (numel, isa, threads)
            assert found == total, (numel, isa, threads)


@pytest.mark.covering(1)
@pytest.mark.parametrize("isa", _native.isa_available())
@pytest.mark.parametrize("name", ["copy_and_sum", "add_and_sum"])
@pytest.mark.parametrize(("source_dtype", "dtype"), PAIRS)
def test_special_numbers_become_those_of_torch(
    source_dtype: DtypeName, dtype: DtypeName, name: str, isa: str
) -> None:
    _native.set_isa(isa)
    pairs = torch.tensor(list(itertools.product(SPECIAL, SPECIAL))).t().contiguous()
    source, kept = pairs[0].to(DTYPES[source_dtype]), pairs[1].to(DTYPES[dtype])
    made, _ = write(name, source, source_dtype, kept, dtype)
    expected = by_torch(name, source, kept)
    assert made.isnan().equal(expected.isnan())  # whose other bits differ among torch's versions
    numbers = ~expected.isnan()
    integers = torch.int32 if dtype == "fp32" else torch.int16
    assert made.view(integers)[numbers].equal(expected.view(integers)[numbers])


def test_every_16_bit_number_becomes_that_of_torch() -> None:
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    for source_dtype, dtype in PAIRS:
        of_16_bits = bits.view(torch.bfloat16 if source_dtype == "fp32" else DTYPES[source_dtype])
        source = of_16_bits.to(DTYPES[source_dtype])
        kept = torch.zeros(len(source), dtype=DTYPES[dtype])
        made, _ = write("copy_and_sum", source, source_dtype, kept, dtype)
        expected = source.to(DTYPES[dtype])
        torch.testing.assert_close(made, expected, rtol=0, atol=0, equal_nan=True)
        if source_dtype == dtype:  # NaNs as well: nothing is converted
            assert made.view(torch.uint8).equal(source.view(torch.uint8))


def mean(sources: list[torch.Tensor], target: torch.Tensor, dtype: DtypeName) -> torch.Tensor:
    _native.mean(dtype, [s.data_ptr() for s in sources], target.data_ptr(), target.numel())
    return target


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 3, 7])
def test_means_are_torchs(count: int, dtype: DtypeName) -> None:
    """Summed in fp32, in the sources' order, and rounded once; the target may be a source."""
    for numel in (1, 15, 33, 2 * BLOCK + 77):
        arrays = [values(numel, dtype, seed) for seed in range(count)]
        expected = (sum(array.float() for array in arrays) / count).to(DTYPES[dtype])
        for isa, threads in itertools.product(_native.isa_available(), (1, 2, 4)):
            _native.set_isa(isa)
            _native.set_threads(threads)
            assert mean(arrays, torch.empty_like(expected), dtype).equal(expected), isa
            for own in {0, count - 1}:
                copies = [array.clone() for array in arrays]
                assert mean(copies, copies[own], dtype).equal(expected), isa


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_mean_of_extremes(dtype: DtypeName) -> None:
    largest = torch.full((100,), torch.finfo(torch.float16).max, dtype=DTYPES[dtype])
    assert mean([largest] * 8, torch.empty_like(largest), dtype).equal(largest)  # no overflow
    special = torch.tensor([math.inf, -math.inf, math.nan, 1.0], dtype=DTYPES[dtype])
    found = mean([special, torch.ones_like(special)], torch.empty_like(special), dtype)
    torch.testing.assert_close(found, special, rtol=0, atol=0, equal_nan=True)


def test_addresses_of_a_mean_need_no_alignment_and_nothing_beyond_is_written() -> None:
    raw = torch.zeros(4 * 101 + 1, dtype=torch.uint8)
    source = torch.randn(100)
    _native.mean("fp32", [source.data_ptr()], raw.data_ptr() + 1, 100)
    assert torch.equal(raw[1:401].clone().view(torch.float32), source)
    assert not raw[401:].any()


def test_a_write_does_not_wait_for_the_pool() -> None:
    _native.set_threads(2)
    long = torch.ones(1 << 24)
    stop = threading.Event()

    def keep_the_pool_busy() -> None:
        while not stop.is_set():
            _native.sum_of_squares("fp32", long.data_ptr(), long.numel())

    busy = threading.Thread(target=keep_the_pool_busy)
    busy.start()
    try:
        source = values(3 * BLOCK + 1, "fp32")
        for _ in range(10):
            made, total = write("copy_and_sum", source, "fp32", torch.zeros_like(source), "fp32")
            assert made.equal(source)
            assert total == sum_of_squares(source, "fp32")
    finally:
        stop.set()
        busy.join()


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="'fp8'"):
        _native.sum_of_squares("fp8", 0, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="address is 0"):
        _native.sum_of_squares("fp32", 0, 1)
    with pytest.raises(ValueError, match="source_dtype is 'fp8'"):
        _native.copy_and_sum("fp8", 0, "fp32", 0, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="^dtype is 'fp8'"):
        _native.add_and_sum("fp32", 0, "fp8", 0, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="source is 0"):
        _native.copy_and_sum("fp32", 0, "fp32", 0, 1)
    with pytest.raises(ValueError, match="target is 0"):
        _native.mean("fp32", [torch.ones(1).data_ptr()], 0, 1)
    with pytest.raises(ValueError, match="at least one source"):
        _native.mean("fp32", [], 0, 0)
    with pytest.raises(ValueError, match="source is 0"):
        _native.mean("fp32", [0], 1, 1)
