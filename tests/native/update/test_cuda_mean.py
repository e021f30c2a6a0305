"""native/update/cuda/mean.cu, compiled for the host, against the CPU's kernel: the same bits."""

import pytest
import torch

from offload import _native
from offload.device.updater import MeanKernel
from tests.support.native.fake_cuda import FakeRuntime

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("numel", [1, 255, 256, 4097])
def test_same_bits_as_the_cpu(dtype: str, count: int, numel: int) -> None:
    torch.manual_seed(numel)
    scales = 10.0 ** torch.randint(-6, 4, (count, numel))
    parts = (torch.randn(count, numel) * scales).to(DTYPES[dtype])
    wanted = torch.empty(numel, dtype=DTYPES[dtype])
    _native.mean(dtype, [part.data_ptr() for part in parts], wanted.data_ptr(), numel)
    kernel = MeanKernel(FakeRuntime())
    flat = parts.flatten().clone()
    elsewhere = torch.empty_like(wanted)
    kernel.launch(flat, count, elsewhere)
    assert torch.equal(elsewhere, wanted)
    assert torch.equal(flat, parts.flatten())
    kernel.launch(flat, count, flat[:numel])
    assert torch.equal(flat[:numel], wanted)
    assert torch.equal(flat[numel:], parts.flatten()[numel:])
    kernel.close()
