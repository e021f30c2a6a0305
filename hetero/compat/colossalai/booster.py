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
from hetero.compat.colossalai.argument_keys import GEMINI, GEMINI_OPTIMIZER, PLUGIN
from hetero.compat.colossalai.older_route import get_dataloader
from hetero.compat.colossalai.zero import (
    GeminiDDP,
    GeminiOptimizer,
    ScaledOptimizer,
    WrappedModel,
)
from hetero.compat.dtypes import TORCH
from hetero.compat.key_table import log_given
from hetero.compat.ranks import barrier, join, rank


class GeminiPlugin:
    """Wraps models by GeminiDDP and optimizers by GeminiOptimizer.

    It takes the arguments of both, `precision` ("fp16", the default, "bf16" or "fp32"), and
    hetero's options, as host_memory and nvme_path.

    Raises ValueError for an unknown argument, with the nearest name, and for a wrong value.
    """

    def __init__(self, **arguments: Any) -> None:
        values, own = PLUGIN.read_call(arguments)
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
        if not isinstance(model, GeminiDDP):
            model = GeminiDDP(model, mixed_precision=TORCH[self.precision], **self._of_model)
        if optimizer is not None and not isinstance(optimizer, GeminiOptimizer):
            optimizer = GeminiOptimizer(optimizer, model, **self._of_optimizer)
        return model, optimizer

    def prepare_dataloader(self, dataset: Any, batch_size: int, **options: Any) -> Any:
        """A loader of this rank's part of a dataset; options as of colossalai.utils."""
        return get_dataloader(dataset, batch_size=batch_size, **options)


class Booster:
    """Applies a plugin to a model, its optimizer and its scheduler, and saves and loads them.

    All ranks save and load. A checkpoint is a file for torch.load(), or, saved with `shard`, a
    folder of hetero.save(); that of an optimizer has the parameters, too.

    The plugin is a GeminiPlugin, by default one without arguments; other arguments are not needed.
    Raises ValueError for another plugin.
    """

    def __init__(
        self, device: Any = None, mixed_precision: Any = None, plugin: GeminiPlugin | None = None
    ) -> None:
        log_given("Booster", "parameters come to where compute happens", device=device)
        log_given("Booster", "the plugin's precision says it", mixed_precision=mixed_precision)
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

        The model was built inside ZeroInitContext, or outside; the optimizer is as of
        ShardedOptimizerV2.
        """
        wrapped, scaled = self.plugin.configure(model, optimizer)
        return wrapped, scaled, criterion, dataloader, lr_scheduler

    def backward(self, loss: torch.Tensor, optimizer: ScaledOptimizer) -> None:
        """optimizer.backward(loss)."""
        optimizer.backward(loss)

    def no_sync(self, model: WrappedModel, optimizer: Any = None) -> AbstractContextManager[None]:
        """hetero.no_sync() of the model."""
        return no_sync(model.module)

    def save_model(
        self, model: WrappedModel, checkpoint: str | Path, shard: bool = False, **options: Any
    ) -> None:
        """Saves parameters; `options` are not needed."""
        _save(model.module, checkpoint, model.module if shard else None, **options)

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
        _save(optimizer, checkpoint, optimizer.model.module if shard else None, **options)

    def load_optimizer(self, optimizer: ScaledOptimizer, checkpoint: str | Path) -> None:
        """Loads what save_optimizer() saved."""
        if Path(checkpoint).is_dir():
            extra = {"loss_scale": optimizer.grad_scale}
            load(checkpoint, optimizer.model.module, optimizer.optim, extra=extra)
        else:
            optimizer.load_state_dict(torch.load(checkpoint))

    def save_lr_scheduler(self, lr_scheduler: Any, checkpoint: str | Path) -> None:
        """Saves a scheduler's state."""
        _save(lr_scheduler, checkpoint)

    def load_lr_scheduler(self, lr_scheduler: Any, checkpoint: str | Path) -> None:
        """Loads it."""
        lr_scheduler.load_state_dict(torch.load(checkpoint))


def _save(
    what: Any, path: str | Path, sharded: torch.nn.Module | None = None, **not_needed: Any
) -> None:
    """Saves a folder of the model `sharded`, with an optimizer's state, or what's state_dict()."""
    log_given("Booster", "files are of the format that the call names", **not_needed)
    if sharded is None:
        if rank() == 0:
            torch.save(what.state_dict(), path)
        barrier()
    elif isinstance(what, ScaledOptimizer):
        save(path, sharded, what.optim, extra={"loss_scale": what.grad_scale})
    else:
        save(path, sharded)
