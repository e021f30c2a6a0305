"""DeepSpeed, whose tests know more of its insides than its users do."""

from __future__ import annotations

import types
from collections.abc import Mapping
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


class _EachOp(dict[str, bool]):
    """Of hetero's kernels all can be used."""

    def __missing__(self, name: str) -> bool:
        return True


def _names(module: str) -> Mapping[str, Any]:
    if module == "deepspeed.ops":
        return {"__compatible_ops__": _EachOp()}
    if module == "deepspeed.ops.op_builder":
        return {name: type(name, (), {"NAME": name}) for name in _BUILDERS}
    if module == "deepspeed.utils.torch":
        return {
            "required_torch_version": lambda **limits: True,
            "register_grad_hook": lambda param, hook: param.register_hook(hook),
            "jit_script_compat": lambda function: function,
        }
    if module == "deepspeed.runtime.utils":
        return {
            "see_memory_usage": lambda *said, **options: None,
            "required_torch_version": lambda **limits: True,
        }
    if module == "deepspeed.git_version_info":
        return {"torch_info": {"version": "0.0", "cuda_version": "0.0", "bf16_support": True}}
    if module == "deepspeed.runtime.zero.offload_config":
        return {"OffloadDeviceEnum": types.SimpleNamespace(none="none", cpu="cpu", nvme="nvme")}
    return {}


def without_device_ids(module: ModuleType) -> None:
    """DistributedDataParallel of a module on the CPU ignores the devices that tests give it."""
    ddp: Any = module.DistributedDataParallel
    init = ddp.__init__

    def without_devices(
        self: Any, model: Any, device_ids: Any = None, output_device: Any = None, **options: Any
    ) -> None:
        init(self, model, **options)

    ddp.__init__ = without_devices


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
    overlays={"torch.nn.parallel.distributed": without_device_ids},
    internals=r"\b_?ds_|'_\w+'|bit16|fp16_groups|fp32_(groups|partitioned)|averaged_gradients"
    r"|partition_count|optimizer_swapper|parameter_offload|persistent_parameters|ipg_|flatten",
)
