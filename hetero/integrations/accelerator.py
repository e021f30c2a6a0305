"""Hugging Face's Accelerate: its Accelerator, for models that an engine of hetero manages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import accelerate
import torch

import hetero.api.access as access
from hetero.api.optimizer import HybridOptimizer
from hetero.checkpoint.load import load
from hetero.checkpoint.rank_data import random_stays
from hetero.checkpoint.save import save
from offload.errors import HeteroError

# In a folder of the library's, where hetero's checkpoint is.
CHECKPOINT_NAME = "hetero"
# The library's hooks, of register_save_state_pre_hook() and register_load_state_pre_hook().
_BEFORE_SAVE, _BEFORE_LOAD = "_save_model_state_pre_hook", "_load_model_state_pre_hook"


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """accelerate.Accelerator, which leaves moving, sharding and saving of model state to hetero.

    The loop stays: `prepare`, `accumulate`, `backward`, `clip_grad_norm_`, mixed precision by
    autocast, schedulers and loaders work as ever. What is different:

    prepare(): the model is not moved to a device and not wrapped in DistributedDataParallel;
    hetero computes where its backend says, and averages gradients over ranks itself.

    save_state(), load_state(): model and optimizer go, by hetero.save() and hetero.load(), to and
    from a folder named `hetero` in the library's, in pieces, instead of whole state dicts in RAM.
    Schedulers, loaders, random numbers and registered objects are the library's business still. All
    ranks must call both, load_state() after hetero.initialize() (or the first training forward).
    Hooks of register_save_state_pre_hook() get the model and its whole state_dict().

    Args:
        as accelerate.Accelerator. DeepSpeed, FSDP and Megatron plugins are refused.

    Raises:
        ValueError: one of these plugins is on, by argument or by `accelerate config`.
    """

    _models: list[Any]
    _optimizers: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_plain(self)

    def prepare_model(
        self,
        model: torch.nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> Any:
        """As the library's, without a move and without DistributedDataParallel."""
        # What the library calls evaluation mode is autocast and compilation without a wrapper.
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> Any:
        """As the library's, which would copy all optimizer state to a device otherwise."""
        return super().prepare_optimizer(optimizer, device_placement=False)

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        """hetero.no_sync(), once the model is managed."""
        managed = any(hasattr(param, "_hetero_engine") for param in model.parameters())
        return access.no_sync(model) if managed else super().no_sync(model)

    def clip_grad_norm_(self, parameters: access.Parameters, *args: Any, **options: Any) -> Any:
        """As the library's, of all gradients that some rank has. All ranks call it."""
        single = isinstance(parameters, torch.Tensor)
        listed: list[Any] = [parameters] if single else list(parameters)
        managed = [param for param in listed if hasattr(param, "_hetero_engine")]
        if managed:  # torch's takes each .grad before ranks meet
            access.engine_of(managed).with_grads(managed)
        return super().clip_grad_norm_(listed, *args, **options)

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **options: Any
    ) -> Any:
        """As the library's; model and optimizer are in the folder's `hetero`. All ranks call it."""
        model, optimizers = self._managed()
        with self._without_model_state():
            place = super().save_state(output_dir, safe_serialization, **options)
        save(Path(place) / CHECKPOINT_NAME, model, optimizers)
        return place

    def load_state(self, input_dir: str | None = None, *args: Any, **options: Any) -> None:
        """As the library's. All ranks call it.

        Args:
            input_dir: what save_state() has returned. Default: the last folder, where the library
                names them (automatic_checkpoint_naming).
            args, options: as of the library's.

        Raises:
            ValueError: no folder is given, and the library has named none.
            CheckpointError: the folder has no checkpoint of hetero, or a damaged one.
        """
        input_dir = self._last_folder() if input_dir is None else input_dir
        model, optimizers = self._managed()
        with self._without_model_state():
            super().load_state(input_dir, *args, **options)
        # Last, because a hook may load values that were rounded; the library's random numbers stay.
        with random_stays():
            load(Path(input_dir) / CHECKPOINT_NAME, model, optimizers)

    def _last_folder(self) -> str:
        """The last folder that the library has named. Raises ValueError if there is none."""
        named: list[Path] = []
        if self.project_configuration.automatic_checkpoint_naming:
            named = [*Path(self.project_dir, "checkpoints").glob("checkpoint_*")]
        if not named:
            raise ValueError(
                "load_state() needs the folder that save_state() has returned; name it"
            )
        return str(max(named, key=lambda folder: int(folder.name.rpartition("_")[2])))

    @contextmanager
    def _without_model_state(self) -> Iterator[None]:
        """Inside the block the library knows of no models and optimizers, but its hooks do."""
        models = self._models
        names = ("_models", "_optimizers", _BEFORE_SAVE, _BEFORE_LOAD)
        kept = {name: getattr(self, name) for name in names}

        def saving(hook: Callable[..., None]) -> Callable[..., None]:
            def called(_: Any, __: Any, folder: str) -> None:
                weights = [self.get_state_dict(each, unwrap=False) for each in models]
                hook([*models], weights, folder)

            return called

        def loading(hook: Callable[..., None]) -> Callable[..., None]:
            return lambda _, folder: hook([*models], folder)

        self._models, self._optimizers = [], []
        for name, of_models in ((_BEFORE_SAVE, saving), (_BEFORE_LOAD, loading)):
            setattr(self, name, {key: of_models(hook) for key, hook in kept[name].items()})
        try:
            yield
        finally:
            self.__dict__.update(kept)

    def _managed(self) -> tuple[torch.nn.Module, list[HybridOptimizer]]:
        """The one model and its optimizers. Raises HeteroError."""
        models = [self.unwrap_model(each) for each in self._models]
        if len(models) != 1:
            raise HeteroError(
                f"{len(models)} models were prepared, and a checkpoint of hetero is of one; save "
                f"the others by hetero.save() or their state_dict()"
            )
        return models[0], [plain_optimizer(each) for each in self._optimizers]


def plain_optimizer(optimizer: Any) -> HybridOptimizer:
    """The optimizer inside the library's wrappers. Raises ValueError if it is none of hetero's."""
    while not isinstance(optimizer, HybridOptimizer) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, HybridOptimizer):
        raise ValueError(
            f"the optimizer is {type(optimizer).__name__}, and a model that hetero manages is "
            f"trained by hetero.HybridAdam, HybridLion, HybridAdagrad, HybridSGD or HybridMuon"
        )
    return optimizer


def check_plain(accelerator: accelerate.Accelerator) -> None:
    """Raises ValueError if a plugin would shard or offload the model a second time."""
    kind = accelerator.distributed_type.value
    if kind in ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA"):
        raise ValueError(
            f"the Accelerator is set up for {kind}, and hetero shards and offloads the model "
            f"itself; leave the plugin out, or run `accelerate launch` with a configuration without"
            f" it"
        )
