"""colossalai.booster: Gemini as a plugin, applied to what trains, and its files."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from hetero.api.access import no_sync
from hetero.checkpoint.load import load
from hetero.checkpoint.save import save
from hetero.compat.colossalai.argument_keys import (
    GEMINI,
    GEMINI_OPTIMIZER,
    PLUGIN,
    read_arguments,
)
from hetero.compat.colossalai.older_route import get_dataloader
from hetero.compat.colossalai.zero import (
    GeminiDDP,
    GeminiOptimizer,
    ScaledOptimizer,
    WrappedModel,
)
from hetero.compat.dtypes import TORCH
from hetero.compat.key_table import log_not_needed
from hetero.compat.ranks import barrier, join, rank


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
        if self.precision not in TORCH:
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
            else GeminiDDP(model, mixed_precision=TORCH[self.precision], **self._of_model)
        )
        if optimizer is None or isinstance(optimizer, GeminiOptimizer):
            return wrapped, optimizer
        return wrapped, GeminiOptimizer(optimizer, wrapped, **self._of_optimizer)

    def prepare_dataloader(self, dataset: Any, batch_size: int, **options: Any) -> Any:
        """A loader of this rank's part of a dataset; options as of colossalai.utils."""
        return get_dataloader(dataset, batch_size=batch_size, **options)


class Booster:
    """Applies a plugin to a model, its optimizer and its scheduler, and saves and loads them.

    Args:
        device: not needed: parameters come to where compute happens.
        mixed_precision: not needed: the plugin's `precision` says it.
        plugin: a GeminiPlugin. Default: one without arguments.

    Raises:
        ValueError: another plugin.
    """

    def __init__(
        self, device: Any = None, mixed_precision: Any = None, plugin: GeminiPlugin | None = None
    ) -> None:
        if device is not None:
            log_not_needed("Booster: device", "parameters come to where compute happens")
        if mixed_precision is not None:
            log_not_needed("Booster: mixed_precision", "the plugin's precision says it")
        self.plugin = GeminiPlugin() if plugin is None else plugin
        if not isinstance(self.plugin, GeminiPlugin):
            raise ValueError(f"the plugin must be a GeminiPlugin, not {type(plugin).__name__}")

    def boost(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        criterion: Callable[..., torch.Tensor] | None = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
    ) -> tuple[Any, Any, Any, Any, Any]:
        """The same five things, of which the first two are wrapped. Raises as the plugin.

        Args:
            model: built inside ZeroInitContext, or outside.
            optimizer: as of ShardedOptimizerV2.
            criterion, dataloader, lr_scheduler: come back as they are.
        """
        wrapped, scaled = self.plugin.configure(model, optimizer)
        return wrapped, scaled, criterion, dataloader, lr_scheduler

    def backward(self, loss: torch.Tensor, optimizer: ScaledOptimizer) -> None:
        """optimizer.backward(loss)."""
        optimizer.backward(loss)

    def no_sync(self, model: WrappedModel, optimizer: Any = None) -> AbstractContextManager[None]:
        """hetero.no_sync() of the model."""
        return no_sync(model.module)

    # All ranks call each of these. A checkpoint is a file for torch.load(), or, saved with `shard`,
    # a folder of hetero.save(); that of an optimizer has the parameters, too.

    def save_model(
        self, model: WrappedModel, checkpoint: str | Path, shard: bool = False, **options: Any
    ) -> None:
        """Saves parameters; `options` are not needed."""
        _name_options("save_model", options)
        if shard:
            save(checkpoint, model.module)
        else:
            _save_whole(model.module.state_dict(), checkpoint)

    def load_model(self, model: WrappedModel, checkpoint: str | Path, strict: bool = True) -> None:
        """Loads what save_model() saved; `strict`: a file must have all parameters."""
        if Path(checkpoint).is_dir():
            load(checkpoint, model.module)
        else:
            model.module.load_state_dict(torch.load(checkpoint), strict=strict)

    def save_optimizer(
        self,
        optimizer: ScaledOptimizer,
        checkpoint: str | Path,
        shard: bool = False,
        **options: Any,
    ) -> None:
        """Saves optimizer state; `options` are not needed."""
        _name_options("save_optimizer", options)
        if shard:
            extra = {"loss_scale": optimizer.grad_scale}
            save(checkpoint, optimizer.model.module, optimizer.optim, extra=extra)
        else:
            _save_whole(optimizer.state_dict(), checkpoint)

    def load_optimizer(self, optimizer: ScaledOptimizer, checkpoint: str | Path) -> None:
        """Loads what save_optimizer() saved."""
        if Path(checkpoint).is_dir():
            extra = {"loss_scale": optimizer.grad_scale}
            load(checkpoint, optimizer.model.module, optimizer.optim, extra=extra)
        else:
            optimizer.load_state_dict(torch.load(checkpoint))

    def save_lr_scheduler(self, lr_scheduler: Any, checkpoint: str | Path) -> None:
        """Saves a scheduler's state."""
        _save_whole(lr_scheduler.state_dict(), checkpoint)

    def load_lr_scheduler(self, lr_scheduler: Any, checkpoint: str | Path) -> None:
        """Loads it."""
        lr_scheduler.load_state_dict(torch.load(checkpoint))


def _save_whole(state: Any, path: str | Path) -> None:
    """The first rank writes a file."""
    if rank() == 0:
        torch.save(state, path)
    barrier()


def _name_options(call: str, options: dict[str, Any]) -> None:
    for name in options:
        log_not_needed(f"Booster.{call}: {name}", "files are of the format that the call names")
