"""deepspeed.zero: construction within budgets, gathered parameters, tiled linear layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from os import PathLike
from typing import Any

import torch

from hetero.api.access import gathered
from hetero.compat.deepspeed.options import read_options
from hetero.compat.dtypes import NAMES
from hetero.compat.key_table import KeyTable, log_given
from hetero.compat.late_start import EarlyContext
from hetero.compat.ranks import join, ranks, shard_mesh
from hetero.compat.shared_names import (
    register_external_parameter as register_external_parameter,
)
from hetero.compat.shared_names import (
    unregister_external_parameter as unregister_external_parameter,
)
from hetero.config import Config
from hetero.stand_ins.construction_uses import arena_of
from hetero.tiling import tiled_linear

_INIT = KeyTable(
    "zero.Init",
    not_needed={
        "the engine does it, or does without it": """mem_efficient_linear pin_memory
            zero_param_parallel_group zero_quantized_weights zero_quantized_nontrainable_weights
            sequence_data_parallel_group"""
    },
)


class Init(EarlyContext):
    """Inside the block models are built within the budget, as with hetero.ZeroInitContext.

    Budgets, and a path on NVMe, are those of the configuration; without one the model is built in
    RAM, and deepspeed.initialize() has the last word.

    Args:
        module: a model that was built outside; its parameters are taken at once.
        data_parallel_group: the process group to shard over. Default: that of `mpu`, or all ranks.
        remote_device: "cpu" or "nvme": where parameters live. Default: as configured.
        config_dict_or_path, config: a DeepSpeed configuration, or the path of one.
        enabled: False: plain parameters are built.
        dtype: of the model's parameters in training, if there is no configuration.
        mem_efficient_linear, pin_memory, not_needed: have no effect.

    Raises:
        ValueError: a configuration that cannot work.
        Exception: as hetero.ZeroInitContext.
    """

    def __init__(
        self,
        module: torch.nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Mapping[str, Any] | str | PathLike[str] | None = None,
        config: Mapping[str, Any] | str | PathLike[str] | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        **not_needed: Any,
    ) -> None:
        not_needed |= {"mem_efficient_linear": not mem_efficient_linear, "pin_memory": pin_memory}
        _INIT.read({name: v for name, v in not_needed.items() if v or name not in _INIT.keys})
        if enabled:
            join()
        if data_parallel_group is None and mpu is not None:
            data_parallel_group = mpu.get_data_parallel_group()
        device = str(getattr(remote_device, "value", remote_device))  # as OffloadDeviceEnum has it
        if device not in ("None", "none", "cpu", "nvme") and not device.startswith("cuda"):
            raise ValueError(
                f"remote_device must be None, 'none', 'cpu', 'nvme' or 'cuda', not {device!r}"
            )
        policy = {"placement_policy": device} if device in ("cpu", "nvme") else {}
        given = config_dict_or_path if config_dict_or_path is not None else config
        mesh: Any = None
        if given is not None:
            options = read_options(given, ranks(), **policy)
            made, mesh = options.config, shard_mesh(options.shard_size, data_parallel_group)
        else:
            # (For NVMe deepspeed.initialize() has a path; there is none yet.)
            policy = {} if device == "nvme" else policy
            made = Config.make(
                backend="auto", dtype=NAMES.get(dtype or torch.float32, "fp32"), **policy
            )
        super().__init__(
            made, process_group=data_parallel_group, mesh=mesh, enabled=enabled, module=module
        )


def GatheredParameters(
    params: torch.Tensor | Iterable[torch.Tensor],
    modifier_rank: int | None = None,
    fwd_module: torch.nn.Module | None = None,
    enabled: bool = True,
) -> AbstractContextManager[None]:
    """hetero.gathered(): inside the block parameters are whole; also while the model is built.

    `modifier_rank` is the rank whose changes count; None: values are for reading. Parameters that
    hetero does not have are whole anyway. Raises as hetero.gathered().
    """
    reason = "parameters come in wherever they are used"
    log_given("zero.GatheredParameters", reason, fwd_module=fwd_module)
    listed = [params] if isinstance(params, torch.Tensor) else list(params)
    managed = [p for p in listed if arena_of(p) is not None or hasattr(p, "_hetero_engine")]
    if not enabled or not managed:
        return nullcontext()
    return gathered(managed, modifier_rank)


class DeepSpeedTiledLinear(tiled_linear.TiledLinear):
    """hetero.TiledLinear, with DeepSpeed's linear_cls and init_linear, a layer to take values of.

    Raises ValueError for a linear_cls that is not torch.nn.Linear, and as hetero.TiledLinear.
    """

    def __init__(
        self,
        *args: Any,
        linear_cls: type[torch.nn.Module] = torch.nn.Linear,
        init_linear: torch.nn.Linear | None = None,
        **kwargs: Any,
    ) -> None:
        if linear_cls is not torch.nn.Linear:
            raise ValueError(
                f"TiledLinear: linear_cls must be torch.nn.Linear, not {linear_cls.__name__}"
            )
        super().__init__(*args, **kwargs)
        if init_linear is not None:
            self.copy_params_from(init_linear)


TiledLinear = DeepSpeedTiledLinear  # as DeepSpeed names it
