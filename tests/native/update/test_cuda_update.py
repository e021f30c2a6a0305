"""native/update/cuda, compiled for the host, against the CPU's kernels: the same bits.

What NVRTC makes of it is compared in tests/cuda, where there is a device.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload import _native
from offload.device import cuda_runtime
from offload.device.updater import DeviceTask, Updater
from tests.support.native.device_tile import (
    DTYPES,
    RULES,
    STATE_DTYPES,
    TILE,
    Tile,
    check_update,
    native,
)
from tests.support.native.fake_cuda import FakeRuntime
from tests.support.native.update_arrays import TORCH_DTYPES, Arrays, gradients, masters, to_dtype
from tests.support.native.update_oracle import Hyper


@pytest.mark.covering(2)
@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_as_the_cpu(dtype: str, grad_dtype: str, rule: str, state_dtype: str) -> None:
    check_update(FakeRuntime(), _native.UpdateKind(dtype, grad_dtype, rule, state_dtype))


def test_many_tiles_segments_and_hyper_parameters_are_one_launch() -> None:
    kind = _native.UpdateKind("bf16", "bf16")
    runtime = FakeRuntime()
    updater = Updater(runtime, kind, TILE)
    grad = gradients(TILE, "bf16", seed=1)
    all_hypers = [Hyper(lr=1e-3 * (i + 1)) for i in range(40)]
    tiles, tasks = [], []
    for number in range(5):
        arrays, tile = Arrays(kind, masters(TILE)), Tile(runtime, kind)
        tile.take(arrays, grad)
        segments = [(64 * i, 60, (i * i + number) % 40, 64 * i) for i in range(TILE // 64)]
        for first, numel, hyper, _ in segments:
            arrays.step(grad, all_hypers[hyper], first, first + numel)
        tasks.append(tile.task(segments))
        tiles.append((tile, arrays))
    before = runtime.launched
    updater.update(
        [*tasks[:2], DeviceTask(1, 1, 1, []), *tasks[2:]], [native(h) for h in all_hypers]
    )
    assert runtime.launched == before + 1
    assert all(tile.same(arrays) for tile, arrays in tiles)
    updater.update([], [])
    assert runtime.launched == before + 1


def test_launches_that_come_late_read_their_own_tables() -> None:
    """Of several updates in one stream, whose tables' memory is given out again meanwhile."""
    kind = _native.UpdateKind("fp32", "fp32")
    runtime = FakeRuntime(eager=False)
    updater = Updater(runtime, kind, TILE)
    grad = gradients(TILE, "fp32", seed=1)
    tiles = []
    for number in range(3):
        arrays, tile = Arrays(kind, masters(TILE)), Tile(runtime, kind)
        tile.take(arrays, grad)
        hyper = Hyper(lr=1e-3 * (number + 1))
        arrays.step(grad, hyper)
        updater.update([tile.task([(0, TILE, 0, 0)])], [native(hyper)])
        tiles.append((tile, arrays))
    runtime.synchronize_all()
    assert all(tile.same(arrays) for tile, arrays in tiles)


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values(dtype: str) -> None:
    kind, hyper, runtime = _native.UpdateKind(dtype, dtype), Hyper(lr=1e-2), FakeRuntime()
    updater = Updater(runtime, kind, TILE)
    for special in (0.0, -0.0, 1e-45, 3e38, float("inf"), float("nan")):
        arrays, tile = Arrays(kind, masters(TILE)), Tile(runtime, kind)
        grad = to_dtype(np.full(TILE, special, np.float32), dtype)
        tile.take(arrays, grad)
        arrays.step(grad, hyper)
        updater.update([tile.task([(0, TILE, 0, 0)])], [native(hyper)])
        if special == special:  # a NaN's kind of state may differ
            assert tile.same(arrays), special
        else:
            assert bool(tile.param.view(TORCH_DTYPES[dtype]).isnan().all())


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=15, deadline=None)
@given(numels=st.lists(st.integers(1, 100_000), min_size=1, max_size=5), many=st.booleans())
def test_sums_of_squares(dtype: str, numels: list[int], many: bool) -> None:
    if many:
        numels = [1 + n % 700 for n in numels for _ in range(20)]
    kind = _native.UpdateKind(dtype, dtype)
    arrays = [gradients(n, dtype, seed=i) for i, n in enumerate(numels)]
    expected = [_native.sum_of_squares(dtype, a.ctypes.data, len(a)) for a in arrays]
    updater = Updater(FakeRuntime(), kind, TILE)
    assert updater.sums_of_squares([(a.ctypes.data, len(a)) for a in arrays]) == expected


def test_a_sum_that_is_not_finite() -> None:
    values = np.array([1.0, np.inf, 2.0], np.float32)
    updater = Updater(FakeRuntime(), _native.UpdateKind("fp32", "fp32"), TILE)
    assert updater.sums_of_squares([(values.ctypes.data, 3)]) == [np.inf]
    assert updater.sums_of_squares([]) == []


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("numel", [1, 255, 256, 4097])
def test_means(dtype: str, count: int, numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which a device makes by torch's operations."""
    monkeypatch.setattr(cuda_runtime, "_MEAN_NUMEL", 256)  # of a piece
    torch.manual_seed(numel)
    scales = 10.0 ** torch.randint(-6, 4, (count, numel))
    parts = (torch.randn(count, numel) * scales).to(TORCH_DTYPES[dtype])
    wanted = torch.empty(numel, dtype=TORCH_DTYPES[dtype])
    _native.mean(dtype, [part.data_ptr() for part in parts], wanted.data_ptr(), numel)
    received, elsewhere = parts.clone(), torch.empty_like(wanted)
    cuda_runtime.mean_of_rows(received, elsewhere)
    assert torch.equal(elsewhere, wanted)
    assert torch.equal(received, parts)
    cuda_runtime.mean_of_rows(received, received[0])
    assert torch.equal(received[0], wanted)
    assert torch.equal(received[1:], parts[1:])
