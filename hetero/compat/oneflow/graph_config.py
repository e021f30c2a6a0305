"""The configuration of a graph: which stage of ZeRO, how many micro-batches, which options."""

from __future__ import annotations

from typing import Any

from hetero.compat.key_table import (
    KeyTable,
    honoured,
    log_not_needed,
    mapped,
    nearest,
    not_needed,
    refused,
)
from hetero.config import Config

_EAGER = "graphs run as they are written"
_SMALL = "small parameters share a chunk with others"

METHODS = KeyTable(
    "nn.Graph.config",
    {
        "enable_zero": mapped("`zero_stage`; without it 1: the same numbers with less memory"),
        "set_zero_redundancy_optimizer_mode": mapped("`zero_stage=1`"),
        "enable_amp": mapped('`dtype="bf16"`, which needs no loss scale'),
        "set_gradient_accumulation_steps": honoured(
            "inputs are divided along their first dimension; losses are means"
        ),
        "set_hetero_options": honoured("hetero's own options, as `host_memory`"),
        "shard_min_size": not_needed(_SMALL),
        "shard_restore_level": not_needed("parameters are gathered when they are used"),
        "set_zero_redundancy_optimizer_min_size_after_split": not_needed(_SMALL),
        "set_outputs_buffer_size": not_needed(_EAGER),
        "allow_fuse_model_update_ops": not_needed("an update is one kernel"),
        "allow_fuse_add_to_output": not_needed(_EAGER),
        "allow_fuse_cast_scale": not_needed("scales are factors of the update"),
        "enable_cudnn_conv_heuristic_search_algo": not_needed("torch.backends.cudnn says it"),
        "enable_xla_jit": refused("call torch.compile(model) instead"),
        "enable_tensorrt": refused("call torch.compile(model) instead"),
        "enable_openvino": refused("call torch.compile(model) instead"),
    },
)


class GraphConfig:
    """What a graph says of its training, before its first call."""

    def __init__(self) -> None:
        self.accumulation_steps = 1
        self._options: dict[str, Any] = {"backend": "auto", "dtype": "fp32", "zero_stage": 1}
        self._own: dict[str, Any] = {}

    def enable_zero(self, mode: bool = True, *, stage: int = 2, **not_needed: Any) -> None:
        """Shards optimizer state (stage 1), gradients, too (2), and parameters, too (3).

        Raises ValueError for another stage.
        """
        if isinstance(stage, bool) or stage not in (1, 2, 3):
            raise ValueError(f"enable_zero: stage must be 1, 2 or 3, not {stage!r}")
        METHODS.read(not_needed)
        self._options["zero_stage"] = stage if mode else 1

    def set_zero_redundancy_optimizer_mode(self, mode: str = "distributed_split") -> None:
        """Stage 1, by its older name. Raises ValueError for an unknown mode."""
        if mode not in ("distributed_split", "non_distributed"):
            raise ValueError(f"mode must be distributed_split or non_distributed, not {mode!r}")

    def enable_amp(self, mode: bool = True, *, dtype: Any = None) -> None:
        """Keeps parameters in bf16 with fp32 masters, whatever the dtype; in fp32 if not `mode`."""
        if dtype is not None:
            log_not_needed("enable_amp: dtype", "bf16 needs no loss scale")
        self._options["dtype"] = "bf16" if mode else "fp32"

    def set_gradient_accumulation_steps(self, value: int) -> None:
        """Divides each call into so many micro-batches. Raises ValueError below 1."""
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"gradient accumulation steps must be 1 or more, not {value!r}")
        self.accumulation_steps = value

    def set_hetero_options(self, **options: Any) -> None:
        """Sets options of hetero.Config, which go before all others.

        Raises ValueError for unknown ones.
        """
        Config.make(None, **{**self._own, **options})
        self._own |= options

    def made(self) -> Config:
        """hetero's options. Raises ValueError for those that contradict each other."""
        return Config.make({**self._options, **self._own})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in METHODS.keys:
            near = nearest(name, list(METHODS.keys))
            raise AttributeError(f"nn.Graph.config has no {name!r}; {near}")
        return lambda mode=True: METHODS.read({name: mode})
