"""DeepSpeed, whose tests know more of its insides than its users do."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from bench.peers_tests.peer import Peer

_BUILDERS = (
    *(
        "AsyncIOBuilder",
        "CPUAdagradBuilder",
        "CPUAdamBuilder",
        "CPULionBuilder",
        "FusedAdamBuilder",
    ),
    *("FusedLambBuilder", "FusedLionBuilder", "InferenceBuilder", "OpBuilder", "UtilsBuilder"),
)


_VALUES = {"MIN_SWAPPABLE_BYTES": 1 << 20}  # of DeepSpeed, which tests choose sizes by


class _EachOp(dict[str, bool]):
    """Of hetero's kernels all can be used."""

    def __missing__(self, name: str) -> bool:
        return True


def _of(module: str) -> dict[str, Any]:
    """The names of a module of the adapter, which DeepSpeed has in another one, too."""
    return vars(importlib.import_module(f"hetero.compat.deepspeed{module}"))


def _schedule_keys() -> dict[str, str]:
    """The names of schedules' arguments as constants."""
    found = {"WARMUP_LOG_RATE": "log", "WARMUP_LINEAR_RATE": "linear"}
    for schedule in _of(".runtime.lr_schedules")["SCHEDULES"].values():
        found |= {name.upper(): name for name in inspect.signature(schedule).parameters}
        found[re.sub("(?<=[a-z])(?=[A-Z])", "_", schedule.__name__).upper()] = schedule.__name__
    return {**found, "LR_RANGE_TEST": "LRRangeTest"}


def _gather(output: Any, tensor: Any, *more: Any, **options: Any) -> Any:
    """torch.distributed's, for tensors of no dimension, too, which gloo does not take."""
    import torch.distributed  # not earlier: overlays come over modules that are not imported yet

    return torch.distributed.all_gather_into_tensor(output, tensor.reshape(-1), *more, **options)


_NAMES: Mapping[str, Callable[[], Mapping[str, Any]]] = {
    "deepspeed.comm": lambda: {"all_gather_into_tensor": _gather},
    "deepspeed.ops": lambda: {"__compatible_ops__": _EachOp()},
    "deepspeed.ops.op_builder": lambda: {n: type(n, (), {"NAME": n}) for n in _BUILDERS},
    "deepspeed.ops.aio": lambda: {"AsyncIOBuilder": type("AsyncIOBuilder", (), {"NAME": "aio"})},
    "deepspeed.utils.torch": lambda: {
        "required_torch_version": lambda **limits: True,
        "register_grad_hook": lambda param, hook: param.register_hook(hook),
        "jit_script_compat": lambda function: function,
    },
    "deepspeed.runtime.utils": lambda: {
        "see_memory_usage": lambda *said, **options: None,
        "required_torch_version": lambda **limits: True,
    },
    "deepspeed.runtime.config": lambda: {"ADAM_OPTIMIZER": "adam", **_of(".options")},
    "deepspeed.runtime.engine": lambda: _of(".engine"),
    "deepspeed.runtime.lr_schedules": _schedule_keys,
    "deepspeed.runtime.swap_tensor": lambda: _VALUES,
    "deepspeed.runtime.swap_tensor.constants": lambda: _VALUES,
    "deepspeed.runtime.zero.partition_parameters": lambda: _of(".zero"),
    "deepspeed.runtime.zero.tiling": lambda: _of(".zero"),
    "deepspeed.git_version_info": lambda: {
        "torch_info": {
            "version": "0.0",
            "cuda_version": "0.0",
            "nccl_version": "9.9",
            "hip_version": "0.0",
            "bf16_support": True,
        }
    },
}


def _names(module: str) -> Mapping[str, Any]:
    found = _NAMES.get(module, dict)()
    return {
        name: value
        for name, value in found.items()
        if not name.startswith("_") or module == "deepspeed.ops"
    }


def without_device_ids(module: ModuleType) -> None:
    """DistributedDataParallel of a module on the CPU ignores the devices that tests give it."""
    ddp: Any = module.DistributedDataParallel
    init = ddp.__init__

    def without_devices(
        self: Any, model: Any, device_ids: Any = None, output_device: Any = None, **options: Any
    ) -> None:
        init(self, model, **options)

    ddp.__init__ = without_devices


def _failures_are_errors(module: ModuleType) -> None:
    """A rank whose test fails by pytest.fail(), or raises nothing where pytest.raises() waits, says
    so: by an exception that is no Exception it would end, and the test wait for it."""
    import pytest

    launcher: Any = module.DistributedExec
    run = launcher._dist_run

    def run_saying_so(self: Any, *args: Any, **options: Any) -> Any:
        try:
            return run(self, *args, **options)
        except pytest.fail.Exception as failed:
            raise AssertionError(str(failed)) from None

    run_saying_so.__name__ = run.__name__
    launcher._dist_run = run_saying_so


PEER = Peer(
    "deepspeed",
    {"deepspeed": "hetero.compat.deepspeed"},
    (
        "unit/runtime/test_lr_schedulers.py",
        "unit/v1/half_precision/test_gradient_clipping_default.py",
        "unit/runtime/zero/test_zero_tiled.py",
        "unit/runtime/zero/test_zero_tensor_fragment.py",
        "unit/v1/zero/test_offload_states.py",
        "unit/v1/zero/test_zero_user_backward.py",
        "unit/runtime/zero/test_zero_dynamic_class.py",
        "unit/runtime/zero/test_zero_nesting_init.py",
        "unit/runtime/zero/test_zero_context_ancestry.py",
        "unit/runtime/zero/test_zero_context_return.py",
        "unit/runtime/zero/test_zero_context.py",
        "unit/runtime/zero/test_ignore_unused_parameters.py",
        "unit/runtime/zero/test_unwrap_model.py",
        "unit/runtime/zero/test_zero_late_module_attach.py",
        "unit/runtime/zero/test_zero_grad_clip.py",
        "unit/v1/zero/test_zero_cpu_offload_grad_accum.py",
        "unit/v1/zero/test_zero2_offload_multi_backward.py",
        "unit/runtime/zero/test_nvme_checkpointing.py",
        "unit/checkpoint/test_latest_checkpoint.py",
        "unit/checkpoint/test_zero_optimizer.py",
        "unit/ops/adam/test_cpu_adam.py",
        "unit/ops/lion/test_cpu_lion.py",
        "unit/ops/adagrad/test_cpu_adagrad.py",
        "unit/ops/muon/test_muon.py",
        "unit/runtime/test_ds_config_dict.py",
        "unit/runtime/test_no_sync_ctxt.py",
        "unit/runtime/test_ds_initialize.py",
    ),
    names=_names,
    overlays={
        "torch.nn.parallel.distributed": without_device_ids,
        "unit.common": _failures_are_errors,
    },
    internals=r"\b_?ds_|SimpleNamespace|(in|out)_parts|tput_timer|'_\w+'|bit16|fp16_groups"
    r"|fp32_(groups|partitioned)|averaged_gradients|partition_count|leaf_parameters|needs_scaler"
    r"|optimizer_swapper|parameter_offload|accumulated_grads|no attribute .optimizer."
    r"|persistent_parameters|ipg_|flatten|_subgroup|eigenvalue|git_hash|Builder. object",
)
