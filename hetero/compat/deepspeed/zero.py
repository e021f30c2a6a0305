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
from hetero.compat.key_table import KeyTable, log_not_needed
from hetero.compat.late_start import EarlyContext
from hetero.compat.ranks import join, ranks, shard_mesh
from hetero.compat.shared_names import (
    register_external_parameter,
    unregister_external_parameter,
)
from hetero.config import Config
from hetero.stand_ins.construction_uses import arena_of
from hetero.tiling import tiled_linear

__all__ = [
    "GatheredParameters",
    "Init",
    "TiledLinear",
    "register_external_parameter",
    "unregister_external_parameter",
]

_INIT = KeyTable(
    "zero.Init",
    not_needed={
        "saved parameters hold no memory": "mem_efficient_linear",
        "buffers to and from a device are always page-locked": "pin_memory",
        "ranks of a machine read each other's memory": "zero_param_parallel_group",
        "gathers are exact": "zero_quantized_weights zero_quantized_nontrainable_weights",
        "there is no sequence parallelism": "sequence_data_parallel_group",
    },
)


class Init(EarlyContext):
    """Inside the block models are built within the budget, as with hetero.ZeroInitContext.

    Budgets, and a path on NVMe, are those of the configuration; without one the model is built in
    RAM, and deepspeed.initialize() has the last word.

    Args:
        module: a model that was built outside; its parameters are taken at once.
        data_parallel_group: the process group to shard over. Default: all ranks.
        mem_efficient_linear, pin_memory, not_needed: have no effect.
        remote_device: "cpu" or "nvme": where parameters live. Default: as configured.
        config_dict_or_path: a DeepSpeed configuration, or the path of one.
        config: another name of config_dict_or_path.
        enabled: False: plain parameters are built.
        dtype: of the model's parameters in training, if there is no configuration.
        mpu: an object whose get_data_parallel_group() gives the group.

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
        given = config_dict_or_path if config_dict_or_path is not None else config
        mesh: Any = None
        if given is not None:
            options = read_options(given, ranks(), **_placement(remote_device, with_path=True))
            made, mesh = options.config, shard_mesh(options.shard_size, data_parallel_group)
        else:
            made = Config.make(
                backend="auto",
                dtype=NAMES.get(dtype, "fp32") if dtype is not None else "fp32",
                **_placement(remote_device, with_path=False),
            )
        super().__init__(
            made,
            process_group=data_parallel_group,
            mesh=mesh,
            enabled=enabled,
            module=module,
        )


def _placement(remote_device: str | None, with_path: bool) -> dict[str, Any]:
    """placement_policy, from zero.Init's remote_device."""
    if remote_device in (None, "none") or str(remote_device).startswith("cuda"):
        return {}
    if remote_device == "nvme":
        # Without a path yet, which deepspeed.initialize() will have.
        return {"placement_policy": "nvme"} if with_path else {}
    if remote_device != "cpu":
        raise ValueError(
            f"remote_device must be None, 'none', 'cpu', 'nvme' or 'cuda', not {remote_device!r}"
        )
    return {"placement_policy": "cpu"}


def GatheredParameters(
    params: torch.Tensor | Iterable[torch.Tensor],
    modifier_rank: int | None = None,
    fwd_module: torch.nn.Module | None = None,
    enabled: bool = True,
) -> AbstractContextManager[None]:
    """hetero.gathered(): inside the block parameters are whole; also while the model is built.

    Args:
        params: parameters; those that hetero does not have are whole anyway.
        modifier_rank: the rank whose changes count. Default: values are for reading.
        fwd_module: not needed: parameters come in wherever they are used.
        enabled: False: the block does nothing.

    Returns:
        The context manager.

    Raises:
        Exception: as hetero.gathered().
    """
    if fwd_module is not None:
        log_not_needed(
            "zero.GatheredParameters: fwd_module", "parameters come in wherever they are used"
        )
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
