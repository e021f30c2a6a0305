"""DeepSpeed's engine: forward, backward and step of one model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from hetero.api.access import clip_grad_norm_, no_sync
from hetero.api.optimizer import HybridOptimizer
from hetero.checkpoint.load import load
from hetero.checkpoint.save import save
from hetero.compat.deepspeed.options import DeepSpeedOptions
from hetero.compat.grad_scale import GradScale
from hetero.compat.key_table import log_not_needed, logger
from hetero.compat.ranks import barrier, rank, ranks
from hetero.compat.torch_optimizers import OwnedSteps
from hetero.runtime.engine import Engine
from offload.errors import CheckpointError

_LATEST = "latest"  # the file in a folder of checkpoints that names the last one


class DeepSpeedEngine(torch.nn.Module):
    """A model and its training, as deepspeed.initialize() returns it.

        loss = engine(batch)
        engine.backward(loss)
        engine.step()

    Each of these is called once a micro-batch. At the end of gradient_accumulation_steps of them
    step() clips, updates, clears the gradients and steps the scheduler; before, it only counts.

    Attributes:
        module: the model.
        optimizer: hetero's, whose `engine` is hetero's engine; None for inference.
        lr_scheduler: None if there is none.
        training_dataloader: of the training data that initialize() was given, or None.
        options: the configuration.
        micro_steps, global_steps, global_samples, skipped_steps: counts; fp16's overflows skip.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        options: DeepSpeedOptions,
        optimizer: HybridOptimizer | None,
        lr_scheduler: Any = None,
        training_dataloader: Any = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.options = options
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.training_dataloader = training_dataloader
        self.micro_steps = self.global_steps = self.global_samples = self.skipped_steps = 0
        self._ranks = ranks()
        self._scale = GradScale(options.scale)
        self._steps = None if optimizer is None else OwnedSteps(optimizer, "engine.step()")
        self._boundary: bool | None = None  # as the loop has set it
        self._is_scaled = False  # gradients are times the loss scale
        self._unsynced = False  # inside no_sync()
        self._was_applied = False
        self._norm: float | None = None

    # A micro-batch

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's outputs."""
        return self.module(*inputs, **kwargs)

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Adds the gradients of a micro-batch.

        Args:
            loss: a scalar.
            retain_graph: as of torch.Tensor.backward().
            scale_wrt_gas: the loss is divided by gradient_accumulation_steps.

        Returns:
            The loss, divided so.

        Raises:
            ValueError: the engine has no optimizer.
        """
        engine = self._engine
        if scale_wrt_gas and self.options.accumulation_steps > 1:
            loss = loss / self.options.accumulation_steps
        self._is_scaled = True
        with self._kept_here():
            engine.backward(self._scale.scaled(loss), retain_graph=retain_graph)
        return loss

    def _kept_here(self) -> AbstractContextManager[None]:
        """Inside it gradients are not sent: those of a micro-batch that more will follow.

        In stages 2 and 3 several ranks send each micro-batch's, as DeepSpeed does: they have no
        room for whole gradients.
        """
        if self._unsynced or self.is_gradient_accumulation_boundary():
            return nullcontext()
        if self._ranks > 1 and self.options.stage >= 2:
            return nullcontext()
        return no_sync(self.module)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Ends a micro-batch; the last one of a step updates the parameters.

        Args:
            lr_kwargs: arguments of the scheduler's step().

        Raises:
            Exception: as of step() of hetero's optimizers.
        """
        self._was_applied = False
        if self.is_gradient_accumulation_boundary():
            self._update(dict(lr_kwargs or {}))
        self.micro_steps += 1
        self.global_samples += self.options.micro_batch_size * self._ranks

    def _update(self, lr_kwargs: dict[str, Any]) -> None:
        engine, optimizer = self._engine, self._optimizer
        params = [param for group in optimizer.param_groups for param in group["params"]]
        # (Gradients of the loop's own loss.backward() are not scaled.)
        overflow = self._is_scaled and self._scale.unscale(engine, params)
        self._is_scaled = False
        if not overflow:
            if self.options.gradient_clipping > 0:
                self._norm = float(clip_grad_norm_(params, self.options.gradient_clipping))
            assert self._steps is not None
            self._steps.step(optimizer)
        optimizer.zero_grad()
        self._scale.update(overflow)
        self.global_steps += 1
        self.skipped_steps += int(overflow)
        self._was_applied = not overflow
        if self.lr_scheduler is not None and not overflow:
            self.lr_scheduler.step(**lr_kwargs)
        every = self.options.steps_per_print
        if every and self.global_steps % every == 0 and rank() == 0:
            logger.info(
                "step=%d, skipped=%d, lr=%s", self.global_steps, self.skipped_steps, self.get_lr()
            )

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether this micro-batch is the last one of a step."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self.options.accumulation_steps == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """From now on each micro-batch is the last one of its step, or none is."""
        self._boundary = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside the block no gradient is sent to other ranks, as with hetero.no_sync()."""
        with no_sync(self.module):
            self._unsynced = True
            try:
                yield
            finally:
                self._unsynced = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients; step() does that, too."""
        self._optimizer.zero_grad(set_to_none)

    # Facts

    @property
    def _optimizer(self) -> HybridOptimizer:
        if self.optimizer is None:
            raise ValueError(
                "this engine has no optimizer; give deepspeed.initialize() one, or name one in the "
                "configuration"
            )
        return self.optimizer

    @property
    def _engine(self) -> Engine:
        return self._optimizer.engine

    @property
    def device(self) -> torch.device:
        """Where the model computes; inputs come there by themselves."""
        return torch.device("cpu") if self.optimizer is None else self._engine.backend.device

    @property
    def loss_scale(self) -> float:
        """The factor of fp16's losses now."""
        return self._scale.value

    @property
    def cur_scale(self) -> float:
        """As loss_scale."""
        return self._scale.value

    def was_step_applied(self) -> bool:
        """Whether the last step() changed parameters."""
        return self._was_applied

    def get_global_grad_norm(self) -> float | None:
        """The norm of all gradients before the last clipping; None if none was clipped yet."""
        return self._norm

    def get_lr(self) -> list[float]:
        """The learning rate of each param group."""
        return [group["lr"] for group in self._optimizer.param_groups]

    def train_batch_size(self) -> int:
        """Samples of a step of all ranks."""
        options = self.options
        return options.micro_batch_size * options.accumulation_steps * self._ranks

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of a micro-batch of one rank."""
        return self.options.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a step."""
        return self.options.accumulation_steps

    def gradient_clipping(self) -> float:
        """The limit of the norm of all gradients; 0: none."""
        return self.options.gradient_clipping

    def zero_optimization(self) -> bool:
        """Whether a stage of ZeRO was asked for."""
        return self.options.stage > 0

    def zero_optimization_stage(self) -> int:
        """The stage that was asked for."""
        return self.options.stage

    def fp16_enabled(self) -> bool:
        """Whether parameters are in fp16."""
        return self.options.config.dtype == "fp16"

    def bfloat16_enabled(self) -> bool:
        """Whether parameters are in bf16."""
        return self.options.config.dtype == "bf16"

    # Checkpoints

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Saves a checkpoint of hetero's in save_dir/tag; all ranks call it.

        Args:
            save_dir: the folder of checkpoints.
            tag: the checkpoint's name. Default: "global_step" and the number of steps.
            client_state: the loop's own, plain values.
            save_latest: the file "latest" in save_dir names it afterwards.
            exclude_frozen_parameters: not needed: they cost no states.

        Returns:
            True.

        Raises:
            Exception: as hetero.save().
        """
        if exclude_frozen_parameters:
            log_not_needed("save_checkpoint: exclude_frozen_parameters", "they have no states")
        name = tag or f"global_step{self.global_steps}"
        extra: dict[str, Any] = {
            "client_state": dict(client_state or {}),
            "counts": self._counts(),
            "loss_scale": self._scale.state_dict(),
        }
        if self.lr_scheduler is not None:
            extra["scheduler"] = self.lr_scheduler
        save(Path(save_dir) / name, self.module, self._optimizer, extra=extra)
        if save_latest and rank() == 0:
            new = Path(save_dir) / f"{_LATEST}.new"
            new.write_text(name)
            new.replace(Path(save_dir) / _LATEST)  # at once: a crash leaves one of the two names
        barrier()
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any]]:
        """Goes on from a checkpoint of save_checkpoint(), with any number of ranks; all call it.

        Args:
            load_dir: the folder of checkpoints.
            tag: the checkpoint's name. Default: the one that the file "latest" names.
            load_module_strict: True.
            load_optimizer_states: states of the optimizer, the loss scale and random numbers, too.
            load_lr_scheduler_states: the scheduler's, too.
            load_module_only: parameters alone.

        Returns:
            The checkpoint's path and its client_state; (None, {}) if there is none.

        Raises:
            ValueError: load_module_strict=False; or as hetero.load().
            Exception: as hetero.load().
        """
        if not load_module_strict:
            raise ValueError(
                "load_module_strict=False loads a part of a model; use "
                "module.load_state_dict(..., strict=False)"
            )
        folder = Path(load_dir)
        if tag is None:
            if not (folder / _LATEST).is_file():
                logger.warning("%s has no file %r, so nothing is loaded", folder, _LATEST)
                return None, {}
            tag = (folder / _LATEST).read_text().strip()
        path = folder / tag
        with_states = load_optimizer_states and not load_module_only
        with_scheduler = load_lr_scheduler_states and not load_module_only
        extra: dict[str, Any] = {"loss_scale": self._scale} if with_states else {}
        if with_scheduler and self.lr_scheduler is not None:
            extra["scheduler"] = self.lr_scheduler
        found = load(path, self.module, self._optimizer if with_states else None, extra=extra)
        if "client_state" not in found.extra:
            raise CheckpointError(f"{path} was not saved by save_checkpoint(); use hetero.load()")
        if not load_module_only:
            for name, count in found.extra["counts"].items():
                setattr(self, name, count)
        return str(path), dict(found.extra["client_state"])

    def _counts(self) -> dict[str, int]:
        names = ("micro_steps", "global_steps", "global_samples", "skipped_steps")
        return {name: getattr(self, name) for name in names}

    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str = "pytorch_model.bin"
    ) -> bool:
        """Saves the whole state_dict() of the model, in its compute dtype; all ranks call it.

        Args:
            save_dir: is made if it does not exist.
            save_filename: the name of the file, which torch.load() reads.

        Returns:
            True.

        Raises:
            OSError: the file cannot be written.
        """
        if rank() == 0:
            Path(save_dir).mkdir(parents=True, exist_ok=True)
            torch.save(self.module.state_dict(), Path(save_dir) / save_filename)
        barrier()
        return True

    def destroy(self) -> None:
        """Frees memory, files and threads, as hetero's engine.close()."""
        if self.optimizer is not None:
            self.optimizer.engine.close()
