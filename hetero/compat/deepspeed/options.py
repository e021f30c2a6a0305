"""A DeepSpeed configuration, read: hetero's options, and what the training loop needs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

from hetero.compat.deepspeed import config_keys
from hetero.compat.grad_scale import ScalePolicy
from hetero.compat.key_table import log_not_needed, refuse_unknown
from hetero.config import Config

_DTYPES = {
    "fp16": "fp16",
    "float16": "fp16",
    "half": "fp16",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp32": "fp32",
    "float32": "fp32",
    "float": "fp32",
}


@dataclass(frozen=True)
class Named:
    """An optimizer or a scheduler by its name in the configuration, with its arguments."""

    type: str
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DeepSpeedOptions:
    """What a DeepSpeed configuration says.

    Attributes:
        config: hetero's options.
        accumulation_steps: micro-batches of a step.
        micro_batch_size: samples of a micro-batch of one rank.
        gradient_clipping: limit of the total norm; 0: none.
        optimizer, scheduler: None if the configuration has none.
        state_dtype: of an optimizer that the configuration names.
        scale: how fp16's losses are scaled, and by 1 if bf16's gradients are to be checked; None:
            steps are made whatever gradients are.
        steps_per_print: steps between two lines in the log; None: none.
        drop_last: the loader leaves out the last, smaller batch.
        stage: as it was given, 0 to 3.
        shard_size: ranks that share one model (MiCS); None: all.
    """

    config: Config
    accumulation_steps: int = 1
    micro_batch_size: int = 1
    gradient_clipping: float = 0.0
    optimizer: Named | None = None
    scheduler: Named | None = None
    state_dtype: str = "fp32"
    scale: ScalePolicy | None = None
    steps_per_print: int | None = None
    drop_last: bool = False
    stage: int = 0
    shard_size: int | None = None


def load(config: Mapping[str, Any] | str | PathLike[str]) -> Mapping[str, Any]:
    """A DeepSpeed configuration's keys, from a mapping or the path of a JSON file.

    Raises ValueError if the file cannot be read, is not JSON, or has a key twice.
    """
    if isinstance(config, Mapping):
        return config

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"{config} has {', '.join(twice)} more than once")
        return dict(pairs)

    try:
        with open(config, encoding="utf-8") as file:
            content = json.load(file, object_pairs_hook=unique)
    except OSError as error:
        raise ValueError(f"cannot read the configuration {config}: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"the configuration {config} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"the configuration {config} must be a JSON object")
    return content


def read_options(
    config: Mapping[str, Any] | str | PathLike[str], ranks: int = 1, **defaults: Any
) -> DeepSpeedOptions:
    """Reads a DeepSpeed configuration.

    Args:
        config: a mapping, or the path of a JSON file.
        ranks: of the training, for batch sizes.
        defaults: options of hetero that hold where the configuration says nothing else.

    Raises:
        ValueError: a key is unknown (with the nearest name), refused or wrong, or keys contradict
            each other.
        StoreError: nvme_path cannot be used.
    """
    top = config_keys.TOP.read(load(config))
    _refuse_auto("the DeepSpeed configuration", top)
    zero = _read_zero(top.get("zero_optimization", {}))
    for table in (config_keys.AIO, config_keys.CHECKPOINT):
        table.read(top.get(table.name, {}))
    stage = _stage(zero.get("stage", 0))
    if stage == 0:
        log_not_needed(
            "zero_optimization: stage 0", "stage 1 gives the same numbers with less memory"
        )
    options: dict[str, Any] = {"backend": "auto", "zero_stage": max(stage, 1)}
    options |= defaults | _placement(zero)
    dtype, scale, state_dtype = _precision(top)
    options["dtype"] = dtype
    if scale is not None:
        options["initial_loss_scale"] = None  # the engine of the adapter scales losses
    data_types = config_keys.DATA_TYPES.read(top.get("data_types", {}))
    if data_types.get("grad_accum_dtype") is not None:
        options["grad_dtype"] = _dtype("grad_accum_dtype", data_types["grad_accum_dtype"])
    if top.get("communication_data_type") is not None:
        options["reduce_dtype"] = _dtype("communication_data_type", top["communication_data_type"])
    if config_keys.ACTIVATIONS.read(top.get("activation_checkpointing", {})).get(
        "cpu_checkpointing"
    ):
        options["activation_memory"] = "auto"
    if zero.get("stage3_prefetch_bucket_size") == 0:
        options["prefetch"] = False
    own = top.get("hetero", {})
    if not isinstance(own, Mapping):
        raise ValueError(f"hetero must be a mapping of hetero's options, not {own!r}")
    micro, accumulation = _batch_sizes(top, ranks)
    shard_size = zero.get("mics_shard_size", -1)
    if shard_size != -1:
        _whole("mics_shard_size", shard_size)
    steps_per_print = top.get("steps_per_print")
    if steps_per_print is not None:
        _whole("steps_per_print", steps_per_print)
    return DeepSpeedOptions(
        Config.make(options, **own),
        accumulation,
        micro,
        _number("gradient_clipping", top.get("gradient_clipping", 0.0)),
        _named("optimizer", top.get("optimizer")),
        _named("scheduler", top.get("scheduler")),
        state_dtype,
        scale,
        steps_per_print,
        bool(top.get("dataloader_drop_last", False)),
        stage,
        shard_size if shard_size > 0 else None,
    )


def _read_zero(given: object) -> dict[str, Any]:
    """The keys of zero_optimization, with those of its parts read."""
    if isinstance(given, bool):  # as of DeepSpeed's first versions
        given = {"stage": int(given)}
    zero = config_keys.ZERO.read(given)
    _refuse_auto("zero_optimization", zero)
    for table in (config_keys.OFFLOAD_OPTIMIZER, config_keys.OFFLOAD_PARAM):
        zero[table.name] = table.read(zero.get(table.name) or {})
    if zero.get("zenflow"):
        config_keys.ZENFLOW.read(zero["zenflow"])
    return zero


def _stage(stage: object) -> int:
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_optimization: stage must be 0, 1, 2 or 3, not {stage!r}")
    assert isinstance(stage, int)
    return stage


def _placement(zero: Mapping[str, Any]) -> dict[str, Any]:
    """placement_policy and nvme_path, from what is offloaded where."""
    devices: set[str] = set()
    paths: list[str] = []
    for part, old in (("offload_optimizer", "cpu_offload"), ("offload_param", "cpu_offload_param")):
        device = zero[part].get("device", "none") or "none"
        if device not in ("none", "cpu", "nvme"):
            raise ValueError(f"{part}: device must be none, cpu or nvme, not {device!r}")
        path = zero[part].get("nvme_path")
        if device == "nvme":
            if path is None:
                raise ValueError(f"{part}: device 'nvme' needs nvme_path, a directory on the disk")
            if str(path) not in paths:
                paths.append(str(path))
        devices.add(device)
        if zero.get(old):
            devices.add("cpu")
    options: dict[str, Any] = {}
    if "nvme" in devices:
        options = {"placement_policy": "nvme", "nvme_path": paths if len(paths) > 1 else paths[0]}
    elif "cpu" in devices:
        ratio = _number("ratio", zero["offload_optimizer"].get("ratio", 1.0))
        options = {"placement_policy": "cpu" if ratio == 1 else "auto"}
    return options


def _precision(top: Mapping[str, Any]) -> tuple[str, ScalePolicy | None, str]:
    """The compute dtype, how losses are scaled, and the dtype of optimizer states."""
    fp16 = config_keys.FP16.read(top.get("fp16", {}))
    bf16 = config_keys.BF16.read(top.get("bf16", {}))
    _refuse_auto("fp16", fp16)
    _refuse_auto("bf16", bf16)
    state_dtype = "bf16" if bf16.get("bf16_optimizer_states") else "fp32"
    if fp16.get("enabled") and bf16.get("enabled"):
        raise ValueError("fp16 and bf16 are both enabled; enable one of them")
    if bf16.get("enabled"):
        checked = ScalePolicy.fixed(1.0) if bf16.get("check_grad_overflow") else None
        return "bf16", checked, state_dtype
    if not fp16.get("enabled"):
        return "fp32", None, state_dtype
    fixed = _number("fp16.loss_scale", fp16.get("loss_scale", 0))
    if fixed:
        return "fp16", ScalePolicy.fixed(fixed), state_dtype
    return (
        "fp16",
        ScalePolicy(
            initial=2.0 ** _number("initial_scale_power", fp16.get("initial_scale_power", 16)),
            growth_interval=_whole("loss_scale_window", fp16.get("loss_scale_window", 1000)),
            grows_late=True,
            hysteresis=_whole("hysteresis", fp16.get("hysteresis", 2)),
            refills_hysteresis=bool(fp16.get("consecutive_hysteresis", False)),
            least=_number("min_loss_scale", fp16.get("min_loss_scale", 1)),
        ),
        state_dtype,
    )


def _batch_sizes(top: Mapping[str, Any], ranks: int) -> tuple[int, int]:
    """The micro-batch's size and the number of micro-batches; what is missing follows."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for name in names:
        if top.get(name) is not None:
            _whole(name, top[name])
    whole, micro, accumulation = (top.get(name) for name in names)
    if whole is not None and micro is None:
        micro = max(1, whole // (ranks * (accumulation or 1)))
    micro = micro or 1
    if accumulation is None:
        accumulation = 1 if whole is None else max(1, whole // (ranks * micro))
    if whole is not None and whole != micro * accumulation * ranks:
        raise ValueError(
            f"train_batch_size={whole} is not train_micro_batch_size_per_gpu={micro} times "
            f"gradient_accumulation_steps={accumulation} times {ranks} ranks, "
            f"{micro * accumulation * ranks}; leave one of them out"
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


def _whole(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number from 1 on, not {value!r}")
    return value


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} must be a number, not {value!r}")
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a finite number, 0 or more, not {value!r}")
    return float(value)
