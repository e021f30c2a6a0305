"""colossalai.booster.plugin: Gemini as a plugin of Booster."""

from __future__ import annotations

from typing import Any

import torch

from hetero.compat.colossalai.argument_keys import (
    GEMINI,
    GEMINI_OPTIMIZER,
    PLUGIN,
    read_arguments,
)
from hetero.compat.colossalai.utilities import get_dataloader
from hetero.compat.colossalai.zero.gemini import DTYPES, GeminiDDP, GeminiOptimizer
from hetero.compat.ranks import join

_PRECISIONS = {name: dtype for dtype, name in DTYPES.items()}


class GeminiPlugin:
    """Wraps models by GeminiDDP and optimizers by GeminiOptimizer.

    Args:
        arguments: of both, and `precision` ("fp16", "bf16" or "fp32"; default: "fp16"); and
            hetero's options, as host_memory and nvme_path.

    Raises:
        ValueError: an unknown argument, with the nearest name, or a wrong value.
    """

    def __init__(self, **arguments: Any) -> None:
        values, own = read_arguments(PLUGIN, arguments)
        self.precision = values.pop("precision", "fp16")
        if self.precision not in _PRECISIONS:
            raise ValueError(
                f"GeminiPlugin: precision must be fp16, bf16 or fp32, not {self.precision!r}"
            )
        self._of_model = {n: v for n, v in values.items() if n in GEMINI.keys} | own
        self._of_optimizer = {n: v for n, v in values.items() if n in GEMINI_OPTIMIZER.keys}

    def configure(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> tuple[GeminiDDP, GeminiOptimizer | None]:
        """The model and the optimizer, wrapped. Raises as hetero.initialize()."""
        join()
        wrapped = (
            model
            if isinstance(model, GeminiDDP)
            else GeminiDDP(model, mixed_precision=_PRECISIONS[self.precision], **self._of_model)
        )
        if optimizer is None or isinstance(optimizer, GeminiOptimizer):
            return wrapped, optimizer
        return wrapped, GeminiOptimizer(optimizer, wrapped, **self._of_optimizer)

    def prepare_dataloader(self, dataset: Any, batch_size: int, **options: Any) -> Any:
        """A loader of this rank's part of a dataset; options as of colossalai.utils."""
        return get_dataloader(dataset, batch_size=batch_size, **options)
