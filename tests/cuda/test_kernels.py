"""What NVRTC makes of native/update/cuda/update.cu has the bits of the CPU's kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from offload import _native
from offload.device.cuda_runtime import CudaRuntime
from offload.device.updater import Updater
from tests.support.native.device_tile import DTYPES, KINDS, TILE, check_update
from tests.support.native.update_arrays import TORCH_DTYPES, gradients


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_updates(runtime: CudaRuntime, kind: _native.UpdateKind) -> None:
    check_update(runtime, kind)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_squares(runtime: CudaRuntime, dtype: str) -> None:
    numels = [1, 31, 32, 33, 32 * 1024, 32 * 1024 + 1, 1_000_003, *range(100, 200)]
    arrays = [gradients(n, dtype, seed=i) for i, n in enumerate(numels)]
    expected = [_native.sum_of_squares(dtype, a.ctypes.data, len(a)) for a in arrays]
    there = [torch.from_numpy(a.view(np.uint8)).cuda() for a in arrays]
    updater = Updater(runtime, _native.UpdateKind(dtype, dtype), TILE)
    pairs = [(t.data_ptr(), n) for t, n in zip(there, numels, strict=True)]
    assert updater.sums_of_squares(pairs) == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 7])
def test_means(runtime: CudaRuntime, dtype: str, count: int) -> None:
    numel = 100_003
    torch.manual_seed(count)
    scales = 10.0 ** torch.randint(-6, 4, (count, numel))
    parts = (torch.randn(count, numel) * scales).to(TORCH_DTYPES[dtype])
    wanted = torch.empty(numel, dtype=parts.dtype)
    _native.mean(dtype, [part.data_ptr() for part in parts], wanted.data_ptr(), numel)
    received = parts.cuda()
    for target in (torch.empty_like(received[0]), received[0]):
        runtime.mean(received, target)
        assert torch.equal(target.cpu(), wanted)
