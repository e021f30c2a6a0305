"""Lightning: a strategy for modules that hetero trains in one process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from hetero.api.access import masters
from hetero.checkpoint.load import load
from hetero.checkpoint.save import save
from hetero.integrations.accelerator import CHECKPOINT_NAME
from hetero.runtime.engine import Engine
from hetero.setup.initialize import initialize
from offload.errors import CheckpointError, HeteroError

_REST_NAME = "lightning.ckpt"  # in a checkpoint's folder: all that is no model state


class HeteroStrategy(SingleDeviceStrategy):
    """lightning.Trainer(strategy=HeteroStrategy(...)): the module's state is hetero's.

    configure_optimizers() returns one of hetero's optimizers (or several, and schedulers), and the
    strategy initializes the module with them. Loops, clipping, accumulation, loggers and callbacks
    are Lightning's own. A checkpoint is a folder: `lightning.ckpt` has loops, schedulers and
    callbacks, and `hetero` what hetero.save() writes, in pieces; `ckpt_path` goes on from it with
    the same bits, random numbers included.

    Hooks of on_save_checkpoint() find an empty `state_dict`; what the module has is in `hetero`.

    The engine is open until close(), or the module is gone. One process; for several ranks use a
    loop of your own, Accelerate or the Trainer of transformers.

    Args:
        **options: as hetero.initialize() takes them, for a module that was not built in
            hetero.ZeroInitContext.
    """

    strategy_name = "hetero"

    def __init__(self, **options: Any) -> None:
        super().__init__("cpu")
        self._options = options
        self._resumed: Path | None = None

    @property
    def engine(self) -> Engine | None:
        """The engine; None before fit()."""
        found = (getattr(each, "_engine", None) for each in self._plain_optimizers())
        return next(found, None)

    def close(self) -> None:
        """Frees the memory and the files of the model state; idempotent."""
        if self.engine is not None:
            self.engine.close()

    # What the library calls

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Yes: there is an engine then."""
        return True

    def setup(self, trainer: Any) -> None:
        """As the library's. Raises ValueError for a precision that would cast the module."""
        precision = self.precision_plugin.precision
        if precision != "32-true" and not precision.endswith("-mixed"):
            raise ValueError(
                f"precision={precision!r} casts the module, whose dtype is hetero's; leave it out, "
                f"and give dtype='bf16' to ZeroInitContext or HeteroStrategy for masters in fp32"
            )
        super().setup(trainer)

    def model_to_device(self) -> None:
        """Nothing: hetero's backend says where parameters are used."""

    def setup_optimizers(self, trainer: Any) -> None:
        """As the library's, and hetero.initialize().

        Raises ValueError if an optimizer is none of hetero's, HeteroError if the module has been
        trained with another one.
        """
        super().setup_optimizers(trainer)
        optimizers = self._plain_optimizers()
        if any(getattr(each, "_engine", None) is None for each in optimizers):
            if any(hasattr(param, "_hetero_engine") for param in self._module.parameters()):
                raise HeteroError(
                    "an earlier fit() has initialized this module with its optimizer "
                    "(Tuner.lr_find() and scale_batch_size() are fits, too); make the optimizer "
                    "once, keep it, and have configure_optimizers() return it each time, with the "
                    "learning rates in its param_groups"
                )
            initialize(self._module, optimizers, **self._options)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """None of it: save_checkpoint() saves the module."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """None of it, likewise."""
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Writes the folder."""
        folder = Path(filepath)
        folder.mkdir(parents=True, exist_ok=True)
        super().save_checkpoint(checkpoint, folder / _REST_NAME, storage_options)
        optimizers = self._plain_optimizers() if "optimizer_states" in checkpoint else None
        save(folder / CHECKPOINT_NAME, self._module, optimizers)

    def load_checkpoint(self, checkpoint_path: Any, *more: Any, **options: Any) -> Any:
        """What the folder has beside the model state. Raises CheckpointError."""
        folder = Path(checkpoint_path)
        if not (folder / CHECKPOINT_NAME).is_dir():
            raise CheckpointError(
                f"{folder} is no folder that HeteroStrategy has written; give one, or load another "
                f"checkpoint's values into the module before fit()"
            )
        self._resumed = folder
        # (From 2.6 on the library gives weights_only, too.)
        return super().load_checkpoint(folder / _REST_NAME, *more, **options)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads what hetero has saved. Raises what hetero.load() does, HeteroError before fit()."""
        assert self._resumed is not None
        module, trains = self._module, "optimizer_states" in checkpoint and bool(self.optimizers)
        if not any(hasattr(param, "_hetero_engine") for param in module.parameters()):
            raise HeteroError(
                f"only a module that fit() has initialized takes {self._resumed}; for another one "
                f"write its values by `hetero convert {self._resumed / CHECKPOINT_NAME} FOLDER "
                f"--to hf`, load these into the module, and give no ckpt_path"
            )
        load(self._resumed / CHECKPOINT_NAME, module, self._plain_optimizers() if trains else None)
        if checkpoint.get("state_dict"):  # by a callback: averages, say, for which it keeps ours
            if isinstance(checkpoint, dict) and "current_model_state" in checkpoint:
                checkpoint["current_model_state"] = _exact_state(module)
            super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing: it came with the module's."""

    def teardown(self) -> None:
        """As the library's, without a move of the module."""
        self.precision_plugin.teardown()
        self.checkpoint_io.teardown()

    @property
    def _module(self) -> torch.nn.Module:
        assert self.lightning_module is not None
        return self.lightning_module

    def _plain_optimizers(self) -> list[Any]:
        return [getattr(each, "_optimizer", each) for each in self.optimizers]


def _exact_state(module: torch.nn.Module) -> dict[str, Any]:
    """A copy of the module's state_dict(), with masters in the place of parameters."""
    state = {name: value.clone() for name, value in module.state_dict().items()}
    named = dict(module.named_parameters())
    return {**state, **dict(zip(named, masters(named.values()), strict=True))}
