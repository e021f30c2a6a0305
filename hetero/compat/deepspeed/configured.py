"""What a DeepSpeed engine tells of its configuration, its optimizer and its counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from hetero.api.optimizer import HybridOptimizer
from hetero.compat.deepspeed.options import DeepSpeedOptions
from hetero.compat.key_table import log_not_needed
from hetero.compat.ranks import ranks
from offload.errors import HeteroError


class DeepSpeedUseError(HeteroError, ValueError, AssertionError, RuntimeError):
    """The engine was used as DeepSpeed's must not be, which raises one of the last two."""


class ConfiguredModule(torch.nn.Module):
    """A model with its configuration; the model's attributes are this module's, too.

    Attributes:
        module: the model.
        optimizer: hetero's, whose `engine` is hetero's engine; None for inference.
        lr_scheduler: None if there is none.
        training_dataloader: of the training data that initialize() was given, or None.
        options: the configuration.
        micro_steps, global_steps, global_samples, skipped_steps: counts; overflows skip.
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

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or name.startswith("__"):
                raise
            if hasattr(module, name):
                return getattr(module, name)
            raise

    @property
    def _optimizer(self) -> HybridOptimizer:
        if self.optimizer is None:
            raise DeepSpeedUseError(
                "this engine has no optimizer; give deepspeed.initialize() one, or name one in the "
                "configuration"
            )
        return self.optimizer

    def get_lr(self) -> list[float]:
        """The learning rate of each param group."""
        return self._of_groups("lr")

    def get_mom(self) -> list[Any]:
        """The betas of each param group, or SGD's momentum."""
        return self._of_groups("betas" if "betas" in self._optimizer.defaults else "momentum")

    def _of_groups(self, option: str) -> list[Any]:
        return [group[option] for group in self._optimizer.param_groups]

    def train_batch_size(self) -> int:
        """Samples of a step of all ranks."""
        options = self.options
        return options.micro_batch_size * options.accumulation_steps * ranks()

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Makes a step of so many samples, by another number of micro-batches.

        Raises:
            ValueError: it is no multiple of the micro-batches of all ranks.
        """
        of_all = self.options.micro_batch_size * ranks()
        if train_batch_size < 1 or train_batch_size % of_all:
            raise ValueError(
                f"train_batch_size={train_batch_size} must be a multiple of {of_all}, the samples "
                f"of a micro-batch of all {ranks()} ranks"
            )
        self.options = replace(self.options, accumulation_steps=train_batch_size // of_all)

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of a micro-batch of one rank."""
        return self.options.micro_batch_size

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Says that a micro-batch of one rank has so many samples, for the counts."""
        self.options = replace(self.options, micro_batch_size=micro_batch_size)

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a step."""
        return self.options.accumulation_steps

    def managed_gradient_accumulation(self) -> bool:
        """Whether gradient_accumulation_steps say which step() updates."""
        return self.options.is_managed

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

    def empty_partition_cache(self) -> None:
        """Not needed: what is gathered stays within the budget."""
        log_not_needed("empty_partition_cache()", "gathered parameters stay within the budget")

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """The model's whole state_dict(), without frozen parameters if so wished."""
        frozen = {n for n, p in self.module.named_parameters() if not p.requires_grad}
        left_out = frozen if exclude_frozen_parameters else set[str]()
        return {n: v for n, v in self.module.state_dict().items() if n not in left_out}
