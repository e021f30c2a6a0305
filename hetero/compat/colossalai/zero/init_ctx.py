"""colossalai.zero.init_ctx: construction within budgets."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from hetero.compat.colossalai.argument_keys import INIT_CONTEXT, read_arguments
from hetero.compat.late_start import EarlyContext
from hetero.compat.ranks import join
from hetero.config import Config


class ZeroInitContext(EarlyContext):
    """hetero.ZeroInitContext with ColossalAI's arguments.

    Args:
        target_device: not needed.
        shard_strategy: TensorShardStrategy() or BucketTensorShardStrategy(). Default: chunks.
        shard_param: parameters are sharded over the ranks (stage 3), or whole on each (stage 2).
        arguments: convert_fp16 (default: True), seed, default_dtype, and others of ColossalAI's;
            and hetero's options, as host_memory and nvme_path.

    Raises:
        ValueError: an unknown argument, with the nearest name, or a wrong value.
        Exception: as hetero.ZeroInitContext.
    """

    def __init__(
        self,
        target_device: Any = None,
        shard_strategy: Any = None,
        shard_param: bool = False,
        **arguments: Any,
    ) -> None:
        given = {
            "shard_strategy": shard_strategy,
            "shard_param": shard_param,
            **arguments,
        }
        values, own = read_arguments(INIT_CONTEXT, given)
        options: dict[str, Any] = {
            "backend": "auto",
            "dtype": "fp16" if values.get("convert_fp16", True) else "fp32",
            "initial_loss_scale": None,
            "zero_stage": 3 if shard_param else 2,
        }
        if shard_strategy is not None:
            options["shard_strategy"] = shard_strategy
        join()
        self._seed = values.get("seed")
        self._default_dtype = values.get("default_dtype")
        self._inside = ExitStack()
        super().__init__(Config.make(options, **own))

    def __enter__(self) -> ZeroInitContext:
        super().__enter__()
        with ExitStack() as inside:
            if self._seed is not None:
                inside.callback(torch.set_rng_state, torch.get_rng_state())
                torch.manual_seed(self._seed)
            if self._default_dtype is not None:
                inside.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(self._default_dtype)
            self._inside = inside.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._inside.close()
        super().__exit__(*error)
