"""hetero/compat/deepspeed: DeepSpeed's public names, those of what hetero has not included."""

from __future__ import annotations

import importlib

import pytest
import torch

from hetero.compat import deepspeed

NAMES = {
    "": "DeepSpeedConfig DeepSpeedEngine OnDevice PipelineModule add_config_arguments comm "
    "get_accelerator init_distributed init_inference initialize is_initialized zero",
    ".accelerator": "get_accelerator",
    ".comm": "all_reduce barrier get_rank get_world_size init_distributed is_initialized",
    ".ops.adagrad": "DeepSpeedCPUAdagrad",
    ".ops.adam": "DeepSpeedCPUAdam FusedAdam",
    ".ops.lion": "DeepSpeedCPULion FusedLion",
    ".runtime.lr_schedules": "LRRangeTest OneCycle WarmupCosineLR WarmupDecayLR WarmupLR",
    ".runtime.zero": "GatheredParameters Init",
    ".runtime.zero.offload_config": "OffloadDeviceEnum OffloadStateTypeEnum",
    ".utils": "logger safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state "
    "safe_set_full_fp32_param safe_set_full_grad set_z3_leaf_modules",
    ".utils.zero_to_fp32": "get_fp32_state_dict_from_zero_checkpoint",
}


@pytest.mark.parametrize("module", NAMES)
def test_names(module: str) -> None:
    found = importlib.import_module(f"hetero.compat.deepspeed{module}")
    assert [name for name in NAMES[module].split() if not hasattr(found, name)] == []


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


def test_optimizers_have_deepspeeds_defaults() -> None:
    lion = deepspeed.ops.lion.FusedLion(torch.nn.Linear(2, 2).parameters())
    assert (lion.defaults["lr"], lion.defaults["betas"]) == (1e-3, (0.9, 0.999))
    adagrad = deepspeed.ops.adagrad.DeepSpeedCPUAdagrad(
        torch.nn.Linear(2, 2).parameters(), fp32_optimizer_states=False
    )
    assert (adagrad.defaults["lr"], adagrad.state_dtype) == (1e-2, "bf16")
