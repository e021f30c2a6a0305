"""hetero/compat/module_paths: module paths of other projects."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import pytest

from tests.support.ranks.processes import run_forked

PATHS = {
    "deepspeed": "DeepSpeedConfig DeepSpeedEngine OnDevice PipelineModule add_config_arguments "
    "comm get_accelerator init_distributed init_inference initialize is_initialized zero",
    "deepspeed.accelerator": "get_accelerator",
    "deepspeed.comm": "all_reduce barrier get_rank get_world_size init_distributed is_initialized",
    "deepspeed.ops": "adam adagrad lion",
    "deepspeed.ops.adagrad": "DeepSpeedCPUAdagrad",
    "deepspeed.ops.adam": "DeepSpeedCPUAdam FusedAdam",
    "deepspeed.ops.lion": "DeepSpeedCPULion FusedLion",
    "deepspeed.runtime": "lr_schedules zero",
    "deepspeed.runtime.lr_schedules": "LRRangeTest OneCycle WarmupCosineLR WarmupDecayLR WarmupLR",
    "deepspeed.runtime.zero": "GatheredParameters Init offload_config",
    "deepspeed.runtime.zero.offload_config": "OffloadDeviceEnum OffloadStateTypeEnum",
    "deepspeed.utils": "logger safe_get_full_fp32_param safe_get_full_grad set_z3_leaf_modules "
    "safe_get_full_optimizer_state safe_set_full_fp32_param safe_set_full_grad",
    "deepspeed.utils.zero_to_fp32": "get_fp32_state_dict_from_zero_checkpoint",
    "oneflow": "nn optim placement sbp",
    "oneflow.nn": "Graph CrossEntropyLoss Linear",
    "oneflow.optim": "SGD Adam AdamW Adagrad",
    "colossalai.booster": "Booster plugin",
    "colossalai.booster.plugin": "GeminiPlugin",
    "colossalai.nn": "optimizer",
    "colossalai.nn.optimizer": "HybridAdam CPUAdam",
    "colossalai.core": "global_context",
    "colossalai.engine": "Engine",
    "colossalai.logging": "disable_existing_loggers get_dist_logger",
    "colossalai.utils": "get_current_device get_dataloader is_main_process",
    "colossalai.zero.gemini": "GeminiDDP GeminiOptimizer",
    "colossalai.zero.init_ctx": "ZeroInitContext",
    "colossalai.zero.shard_utils": "TensorShardStrategy BucketTensorShardStrategy",
    "colossalai.zero.sharded_model": "ShardedModelV2",
    "colossalai.zero.sharded_optim": "ShardedOptimizerV2",
}


def test_paths() -> None:
    for path, names in PATHS.items():
        found = importlib.import_module(f"hetero.compat.{path}")
        assert [name for name in names.split() if not hasattr(found, name)] == [], path
        assert importlib.util.find_spec(f"hetero.compat.{path}") is not None


def import_paths() -> None:
    for name in [each for each in sys.modules if each.startswith("hetero.compat")]:
        del sys.modules[name]
    path = "hetero.compat.deepspeed.runtime.zero.offload_config"
    assert importlib.import_module(path).OffloadDeviceEnum.cpu
    assert importlib.import_module("hetero.compat.oneflow.nn").Linear


def test_a_path_may_be_the_first_import() -> None:
    run_forked(import_paths)


def test_a_path_that_is_not_there() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"hetero\.compat\.deepspeed\.ops\.lamb"):
        importlib.import_module("hetero.compat.deepspeed.ops.lamb")
