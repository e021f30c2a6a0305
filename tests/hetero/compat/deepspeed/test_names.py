"""hetero/compat/deepspeed: DeepSpeed's public names, those of what hetero has not included."""

from __future__ import annotations

import pytest
import torch

from hetero.compat import deepspeed


@pytest.mark.parametrize("name", ["PipelineModule", "init_inference", "tp_model_init"])
def test_what_hetero_has_not_says_so(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: hetero has no"):
        getattr(deepspeed, name)([torch.nn.Linear(2, 2)])


def test_the_accelerator() -> None:
    accelerator = deepspeed.get_accelerator()
    assert accelerator is deepspeed.accelerator.get_accelerator()
    device = torch.empty(1, device=accelerator.current_device_name())
    assert accelerator.on_accelerator(device)
    assert accelerator.is_available()
    assert accelerator.device_count() >= 1
    assert accelerator.memory_allocated() >= 0
    accelerator.synchronize()
    accelerator.empty_cache()
    with accelerator.device(0):
        assert torch.bfloat16 in accelerator.supported_dtypes()
    assert accelerator.get_rng_state().dtype == torch.uint8
    with pytest.raises(AttributeError, match="hetero has no 'nothing'"):
        accelerator.nothing()


def test_comm_is_torch_distributed() -> None:
    assert deepspeed.comm.all_reduce is torch.distributed.all_reduce
    deepspeed.init_distributed()  # without torchrun's environment it does nothing
    assert not deepspeed.is_initialized()
    with pytest.raises(AttributeError, match="has no 'nothing'"):
        deepspeed.comm.nothing()
