"""A DeepSpeed configuration, read: hetero's options, and what the training loop needs."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

import torch

from hetero.compat.deepspeed import config_keys as keys
from hetero.compat.dtypes import TORCH
from hetero.compat.grad_scale import ScalePolicy
from hetero.compat.key_table import KeyTable, log_not_needed, log_once, logger, refuse_unknown
from hetero.compat.ranks import ranks
from hetero.config import Config
from hetero.option_checks import check_choice, check_integer, is_number, options_from_file

# The release whose keys, defaults and names the adapter has. Where an older one had another
# default, a configuration that leaves the key out is told so, once, in the log.
RELEASE = "0.19.8"
GRADIENT_CLIPPING = 1.0
_OLDER = (
    "this is %s, as in DeepSpeed from 0.19.3 to %s; older releases had %s. Give the key to choose"
)

_DTYPES = {
    **dict.fromkeys(("fp16", "float16", "half"), "fp16"),
    **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
    **dict.fromkeys(("fp32", "float32", "float"), "fp32"),
}


class OffloadDeviceEnum(str, enum.Enum):
    """Places to which DeepSpeed offloads."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, enum.Enum):
    """Kinds of state that engine.offload_states() takes."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


@dataclass(frozen=True)
class Named:
    """An optimizer or a scheduler by its name in the configuration, with its arguments."""

    type: str
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DeepSpeedOptions:
    """What a DeepSpeed configuration says; the numbers that code asks for have DeepSpeed's names.

    Attributes:
        config: hetero's options.
        world: ranks of the training.
        gradient_accumulation_steps: micro-batches of a step.
        train_micro_batch_size_per_gpu: samples of a micro-batch of one rank.
        managed_gradient_accumulation: gradient_accumulation_steps say which step() updates; else
            each does.
        gradient_clipping: limit of the total norm; 0: none.
        optimizer, scheduler: None if the configuration has none.
        state_dtype: of an optimizer that the configuration names.
        scale: how fp16's losses are scaled, and by 1 if bf16's gradients are to be checked; None:
            steps are made whatever gradients are.
        steps_per_print: steps between two lines in the log; None: none.
        drop_last: the loader leaves out the last, smaller batch.
        zero_optimization_stage: as it was given, 0 to 3.
        shard_size: ranks that share one model (MiCS); None: all.
        buffer_dtype: that buffers are cast to; None: they keep theirs.
    """

    config: Config
    world: int = 1
    gradient_accumulation_steps: int = 1
    train_micro_batch_size_per_gpu: int = 1
    managed_gradient_accumulation: bool = True
    gradient_clipping: float = GRADIENT_CLIPPING
    optimizer: Named | None = None
    scheduler: Named | None = None
    state_dtype: str = "fp32"
    scale: ScalePolicy | None = None
    steps_per_print: int | None = None
    drop_last: bool = False
    zero_optimization_stage: int = 0
    shard_size: int | None = None
    buffer_dtype: torch.dtype | None = None

    gradient_allreduce_op: ClassVar[str] = "mean"

    @property
    def train_batch_size(self) -> int:
        """Samples of a step, of all ranks."""
        of_a_rank = self.train_micro_batch_size_per_gpu * self.gradient_accumulation_steps
        return of_a_rank * self.world

    @property
    def zero_enabled(self) -> bool:
        """Whether optimizer state is sharded there; here it always is."""
        return self.zero_optimization_stage > 0


class DeepSpeedConfig(DeepSpeedOptions):
    """The options of a configuration, for code that asks before there is an engine."""

    def __init__(
        self,
        config: Mapping[str, Any] | str | PathLike[str],
        mpu: Any = None,
        mesh_device: Any = None,
    ) -> None:
        """`mpu` has get_data_parallel_world_size(); by default all ranks count.

        Raises as read_options().
        """
        world = ranks() if mpu is None else mpu.get_data_parallel_world_size()
        vars(self).update(vars(read_options(config, world)))


def read_options(
    config: Mapping[str, Any] | str | PathLike[str], world: int = 1, **defaults: Any
) -> DeepSpeedOptions:
    """Reads a DeepSpeed configuration.

    Args:
        config: a mapping, or the path of a JSON file.
        world: ranks of the training, for batch sizes.
        defaults: options of hetero that hold where the configuration says nothing else.

    Raises:
        ValueError: a key is unknown (with the nearest name), refused or wrong, or keys contradict
            each other.
        StoreError: nvme_path cannot be used.
    """
    top = _read(keys.TOP, config if isinstance(config, Mapping) else options_from_file(config))
    zero = top.get("zero_optimization", {})
    if isinstance(zero, bool):  # as of DeepSpeed's first versions
        zero = {"stage": int(zero)}
    zero = _read(keys.ZERO, zero)
    _read(keys.ZENFLOW, zero.get("zenflow", {}))
    for table in (keys.AIO, keys.CHECKPOINT):
        _read(table, top.get(table.name, {}))
    fp16, bf16, types, activations = (
        _read(table, top.get(table.name, {}))
        for table in (keys.FP16, keys.BF16, keys.DATA_TYPES, keys.ACTIVATIONS)
    )
    stage: int = zero.get("stage", 0)
    check_choice("zero_optimization: stage", stage, (0, 1, 2, 3))
    if stage == 0:
        log_not_needed(
            "zero_optimization: stage 0", "stage 1 gives the same numbers with less memory"
        )
    dtype, scale = _precision(fp16, bf16)
    options: dict[str, Any] = {"backend": "auto", "zero_stage": max(stage, 1), "dtype": dtype}
    options |= defaults | _placement(zero)
    if scale is not None:
        options["initial_loss_scale"] = None  # the engine of the adapter scales losses
    for given, key, option in (
        (types, "grad_accum_dtype", "grad_dtype"),
        (top, "communication_data_type", "reduce_dtype"),
    ):
        if key in given:
            options[option] = _dtype(key, given[key])
    if activations.get("cpu_checkpointing"):
        options["activation_memory"] = "auto"
    if zero.get("stage3_prefetch_bucket_size") == 0:
        options["debug"] = {"prefetch": False}
    if "log_level" in top:
        logger.setLevel(str(top["log_level"]).upper())
    op = str(top.get("gradient_allreduce_op", "mean")).lower()
    if op != "mean":
        raise ValueError(
            f"gradient_allreduce_op={op!r} is refused: hetero averages over ranks; multiply the "
            f"loss by the number of ranks to have the sum"
        )
    own = top.get("hetero", {})
    if not isinstance(own, Mapping):
        raise ValueError(f"hetero must be a mapping of hetero's options, not {own!r}")
    shard_size, printed = zero.get("mics_shard_size", -1), top.get("steps_per_print")
    shard_size = None if shard_size == -1 else shard_size
    for name, value in (("mics_shard_size", shard_size), ("steps_per_print", printed)):
        if value is not None:
            check_integer(name, value, 1)
    if "gradient_clipping" not in top:
        log_once("gradient_clipping is absent", _OLDER % (GRADIENT_CLIPPING, RELEASE, 0.0))
    micro, accumulation = _batch_sizes(top, world)
    return DeepSpeedOptions(
        Config.make(options, **own),
        world,
        accumulation,
        micro,
        bool(top.get("managed_gradient_accumulation", True)),
        _number("gradient_clipping", top.get("gradient_clipping", GRADIENT_CLIPPING)),
        _named("optimizer", top.get("optimizer")),
        _named("scheduler", top.get("scheduler")),
        "bf16" if bf16.get("bf16_optimizer_states") else "fp32",
        scale,
        printed,
        bool(top.get("dataloader_drop_last", False)),
        stage,
        shard_size,
        _buffer_dtype(types, dtype),
    )


def _read(table: KeyTable, given: object) -> dict[str, Any]:
    """The keys of a part of the configuration. Raises ValueError for "auto", too."""
    values = table.read(given)
    _refuse_auto(table.name, values)
    return values


def _buffer_dtype(types: Mapping[str, Any], dtype: str) -> torch.dtype | None:
    """The dtype of buffers, where the configuration has one; checks the other keys beside it."""
    param = _dtype("param_dtype", types.get("param_dtype", dtype))
    if param != dtype:
        raise ValueError(f"data_types: param_dtype={param} conflicts with fp16 and bf16: {dtype}")
    kept = types.get("keep_in_fp32_modules", "auto")
    if kept not in ("auto", []):
        raise ValueError(
            f"data_types: keep_in_fp32_modules={kept!r} is refused: buffers keep the dtype that "
            f"they were built with, unless buffer_dtype casts all"
        )
    buffer = types.get("buffer_dtype")
    return None if buffer is None else TORCH[_dtype("buffer_dtype", buffer)]


def _placement(zero: Mapping[str, Any]) -> dict[str, Any]:
    """placement_policy and nvme_path, from what is offloaded where."""
    devices: set[str] = set()
    paths: list[str] = []
    ratio = 1.0
    for table, old in (
        (keys.OFFLOAD_OPTIMIZER, "cpu_offload"),
        (keys.OFFLOAD_PARAM, "cpu_offload_param"),
    ):
        part = _read(table, zero.get(table.name, {}))
        device = getattr(part.get("device"), "value", part.get("device")) or "none"
        if device not in ("none", "cpu", "nvme"):
            raise ValueError(f"{table.name}: device must be none, cpu or nvme, not {device!r}")
        devices |= {device, "cpu" if zero.get(old) else "none"}
        ratio = _number("ratio", part.get("ratio", ratio))
        if device == "nvme":
            path = part.get("nvme_path")
            if path is None:
                raise ValueError(
                    f"{table.name}: device 'nvme' needs nvme_path, a directory on the disk"
                )
            paths += [] if str(path) in paths else [str(path)]
            with suppress(OSError):  # as DeepSpeed does; what cannot be made is told of below
                Path(path).mkdir(parents=True, exist_ok=True)
    if "nvme" in devices:
        return {"placement_policy": "nvme", "nvme_path": paths if len(paths) > 1 else paths[0]}
    if "cpu" in devices:
        return {"placement_policy": "cpu" if ratio == 1 else "auto"}
    return {}


def _precision(fp16: Mapping[str, Any], bf16: Mapping[str, Any]) -> tuple[str, ScalePolicy | None]:
    """The compute dtype, and how losses are scaled."""
    if fp16.get("enabled") and bf16.get("enabled"):
        raise ValueError("fp16 and bf16 are both enabled; enable one of them")
    if bf16.get("enabled"):
        if "check_grad_overflow" not in bf16:
            log_once("bf16: check_grad_overflow is absent", _OLDER % (True, RELEASE, False))
        checked = bf16.get("check_grad_overflow", True)
        return "bf16", ScalePolicy.fixed(1.0) if checked else None
    if not fp16.get("enabled"):
        return "fp32", None
    fixed = _number("fp16.loss_scale", fp16.get("loss_scale", 0))
    if fixed:
        return "fp16", ScalePolicy.fixed(fixed)
    return "fp16", ScalePolicy(
        initial=2.0 ** _number("initial_scale_power", fp16.get("initial_scale_power", 16)),
        growth_interval=_whole("loss_scale_window", fp16.get("loss_scale_window", 1000)),
        grows_late=True,
        hysteresis=_whole("hysteresis", fp16.get("hysteresis", 2)),
        refills_hysteresis=bool(fp16.get("consecutive_hysteresis", False)),
        least=_number("min_loss_scale", fp16.get("min_loss_scale", 1)),
    )


def _batch_sizes(top: Mapping[str, Any], world: int) -> tuple[int, int]:
    """The micro-batch's size and the number of micro-batches; what is missing follows."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for name in names:
        if name in top:
            _whole(name, top[name])
    whole, micro, accumulation = (top.get(name) for name in names)
    if whole is not None and micro is None:
        micro = max(1, whole // (world * (accumulation or 1)))
    micro = micro or 1
    if accumulation is None:
        accumulation = 1 if whole is None else max(1, whole // (world * micro))
    if whole is not None and whole != micro * accumulation * world:
        raise ValueError(
            f"train_batch_size={whole} is not train_micro_batch_size_per_gpu={micro} times "
            f"gradient_accumulation_steps={accumulation} times {world} ranks, "
            f"{micro * accumulation * world}; leave one of them out"
        )
    return micro, accumulation


def _named(what: str, given: object) -> Named | None:
    if given is None:
        return None
    if not isinstance(given, Mapping) or not isinstance(given.get("type"), str):
        raise ValueError(f"{what} must have a type and params, not {given!r}")
    refuse_unknown(what, given, ["type", "params", "legacy_fusion"])
    if "legacy_fusion" in given:
        log_not_needed("optimizer: legacy_fusion", "there is one kernel")
    _refuse_auto(what, given.get("params") or {})
    return Named(given["type"], dict(given.get("params") or {}))


def _refuse_auto(where: str, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, str) and value == "auto":
            raise ValueError(
                f"{where}: {name} is 'auto', which Hugging Face's Trainer fills in; give a value"
            )


def _dtype(name: str, value: object) -> str:
    if value not in _DTYPES:
        raise ValueError(f"{name} must be fp16, bf16 or fp32, not {value!r}")
    return _DTYPES[str(value)]


def _whole(name: str, value: Any) -> int:
    check_integer(name, value, 1)
    return int(value)


def _number(name: str, value: Any) -> float:
    if not is_number(value) or not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a finite number, 0 or more, not {value!r}")
    return float(value)
