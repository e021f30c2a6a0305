"""DeepSpeed's engine: forward, backward and step of one model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from hetero.api.access import no_sync
from hetero.api.optimizer import HybridOptimizer
from hetero.compat.deepspeed.checkpoints import (
    COUNTS,
    load_checkpoint,
    save_16bit_model,
    save_checkpoint,
)
from hetero.compat.deepspeed.options import DeepSpeedOptions
from hetero.compat.grad_scale import ScaledSteps
from hetero.compat.key_table import log_given, logger
from hetero.compat.ranks import rank, ranks
from hetero.planning.placement import PlacementError
from hetero.runtime.engine import Engine
from hetero.tiling.heads import DeferredLogits
from offload.errors import BudgetError, HeteroError
from offload.memory.tiers import Tier

_running = 0  # backward() of engines: inside, gradients of outputs are scaled already


class _AnotherTensor(torch.autograd.Function):
    """Gives a tensor of the same values in the same memory, whose hooks are its own.

    It is no plain view, whose hooks a write in place would leave out: such a write is an error.
    """

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


_another_tensor: Callable[[torch.Tensor], torch.Tensor] = _AnotherTensor.apply


class DeepSpeedUseError(HeteroError, ValueError, AssertionError, RuntimeError):
    """The engine was used as DeepSpeed's must not be, which raises one of the last two."""


def _of_groups(engine: DeepSpeedEngine, option: str) -> list[Any]:
    return [group[option] for group in engine._optimizer.param_groups]


def _set_train_batch_size(engine: DeepSpeedEngine, train_batch_size: int) -> None:
    """Makes a step of so many samples, by another number of micro-batches.

    Raises ValueError if it is no multiple of the micro-batches of all ranks.
    """
    of_all = engine.options.train_micro_batch_size_per_gpu * ranks()
    if train_batch_size < 1 or train_batch_size % of_all:
        raise ValueError(
            f"train_batch_size={train_batch_size} must be a multiple of {of_all}, the samples "
            f"of a micro-batch of all {ranks()} ranks"
        )
    steps = train_batch_size // of_all
    engine.options = replace(engine.options, gradient_accumulation_steps=steps)


def _set_train_micro_batch_size(engine: DeepSpeedEngine, micro_batch_size: int) -> None:
    """Says that a micro-batch of one rank has so many samples, for the counts."""
    engine.options = replace(engine.options, train_micro_batch_size_per_gpu=micro_batch_size)


def _module_state_dict(
    engine: DeepSpeedEngine, exclude_frozen_parameters: bool = False
) -> dict[str, Any]:
    """The model's whole state_dict(), without frozen parameters if so wished."""
    named = engine.module.named_parameters()
    frozen = {n for n, p in named if exclude_frozen_parameters and not p.requires_grad}
    return {n: v for n, v in engine.module.state_dict().items() if n not in frozen}


# Methods about the configuration, the optimizer and the last step.
_ABOUT: Mapping[str, Callable[..., Any]] = {
    "train_batch_size": lambda e: e.options.train_batch_size,
    "set_train_batch_size": _set_train_batch_size,
    "set_train_micro_batch_size": _set_train_micro_batch_size,
    "module_state_dict": _module_state_dict,
    "train_micro_batch_size_per_gpu": lambda e: e.options.train_micro_batch_size_per_gpu,
    "gradient_accumulation_steps": lambda e: e.options.gradient_accumulation_steps,
    "managed_gradient_accumulation": lambda e: e.options.managed_gradient_accumulation,
    "gradient_clipping": lambda e: e.options.gradient_clipping,
    "zero_optimization": lambda e: e.options.zero_enabled,
    "zero_optimization_stage": lambda e: e.options.zero_optimization_stage,
    "fp16_enabled": lambda e: e.options.config.dtype == "fp16",
    "bfloat16_enabled": lambda e: e.options.config.dtype == "bf16",
    "get_lr": lambda e: _of_groups(e, "lr"),
    "get_mom": lambda e: _of_groups(e, "betas" if "betas" in e._optimizer.defaults else "momentum"),
    "get_global_grad_norm": lambda e: None if e._steps is None else e._steps.norm,
    "was_step_applied": lambda e: e._was_applied,
    "empty_partition_cache": lambda e: None,  # gathered parameters stay within the budget
    "save_checkpoint": save_checkpoint,
    "load_checkpoint": load_checkpoint,
    "save_16bit_model": save_16bit_model,
}


class DeepSpeedEngine(torch.nn.Module):
    """A model and its training, as deepspeed.initialize() returns it.

        loss = engine(batch)
        engine.backward(loss)  # or loss.backward(); under fp16 engine.scale(loss).backward()
        engine.step()

    Each of these is called once a micro-batch. At the end of gradient_accumulation_steps of them
    step() clips, updates, clears the gradients and steps the scheduler; before, it only counts.
    Without managed_gradient_accumulation each step() is such an end. The model's attributes are the
    engine's, too.

    Attributes:
        module: the model.
        optimizer: hetero's, whose `engine` is hetero's engine; None for inference.
        lr_scheduler: None if there is none.
        training_dataloader: of the training data that initialize() was given, or None.
        options: the configuration.
        micro_steps, global_steps, global_samples, skipped_steps: counts; overflows skip.
    """

    micro_steps: int
    global_steps: int
    global_samples: int
    skipped_steps: int
    _backwards: int  # backward() calls since the last update

    def __init__(
        self,
        module: torch.nn.Module,
        options: DeepSpeedOptions,
        engine: Engine,
        optimizer: HybridOptimizer | None,
        lr_scheduler: Any = None,
        training_dataloader: Any = None,
    ) -> None:
        """`engine` is hetero's."""
        super().__init__()
        self.module = module
        self.options: DeepSpeedOptions = options
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.training_dataloader = training_dataloader
        vars(self).update(dict.fromkeys((*COUNTS, "_backwards"), 0))
        self._engine = engine
        self._steps = (
            None if optimizer is None else ScaledSteps(optimizer, options.scale, "engine.step()")
        )
        self._boundary: bool | None = None  # as the loop has set it
        self._scaled_backward = -1  # autograd's number of the last one of a loss of scale()
        self._unsynced = False  # inside no_sync()
        self._was_applied: bool = False
        self._device_memory: int | None = None  # before offload_states()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or name.startswith("__") or not hasattr(module, name):
                raise
            return getattr(module, name)

    @property
    def _scaled_steps(self) -> ScaledSteps:
        if self._steps is None:
            raise DeepSpeedUseError(
                "this engine has no optimizer; give deepspeed.initialize() one, or name one in the "
                "configuration"
            )
        return self._steps

    @property
    def _optimizer(self) -> HybridOptimizer:
        return self._scaled_steps.optimizer

    # A micro-batch

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's outputs."""
        outputs = self.module(*inputs, **kwargs)
        if not torch.is_grad_enabled() or self.optimizer is None:
            return outputs
        several = sum(isinstance(each, torch.Tensor) for each in tree_leaves(outputs)) > 1

        def hooked(output: torch.Tensor) -> torch.Tensor:
            if output.grad_fn is None:
                return output
            if several:  # others may be made of it, and their gradients go through a hook already
                output = _another_tensor(output) if output.ndim else output.clone()
            output.register_hook(self._on_output_grad)
            if isinstance(output, DeferredLogits):
                output.inputs.loss_hooks.append(self._on_output_grad)
            return output

        return tree_map_only(torch.Tensor, hooked, outputs)

    def _on_output_grad(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        """Divides what a backward() of the loop's own brings, as engine.backward() does the loss.

        Raises DeepSpeedUseError under fp16 if the backward is not of a loss that scale() gave.
        """
        if _running or grad is None:  # as a function of the user's may give
            return None
        is_of_scaled = self._scaled_backward == torch._C._current_graph_task_id()
        if self.loss_scale != 1.0 and not is_of_scaled:
            raise DeepSpeedUseError(
                "Loss scaling is required under fp16: call engine.backward(loss), or "
                "engine.scale(loss).backward()"
            )
        self._scaled_steps.is_scaled = True
        steps = self.options.gradient_accumulation_steps
        return grad / steps if steps > 1 else None

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """A scalar loss times fp16's scale, for a backward() of the loop's own.

        Raises DeepSpeedUseError as backward().
        """
        self._check_loss(loss)
        scaled = self._scaled_steps.scale.scaled(loss)
        scaled.register_hook(self._on_scaled_grad)
        return scaled

    def _on_scaled_grad(self, grad: torch.Tensor) -> None:
        self._scaled_backward = torch._C._current_graph_task_id()

    def _check_loss(self, loss: torch.Tensor) -> None:
        _ = self._optimizer  # raises if there is none
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.grad_fn is None:
            raise DeepSpeedUseError(
                "the loss must be a scalar tensor that has a graph; of another tensor call "
                "output.backward(gradient)"
            )

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Adds the gradients of a micro-batch, and returns its loss.

        With `scale_wrt_gas` the loss is divided by gradient_accumulation_steps. Raises
        DeepSpeedUseError if the engine has no optimizer, or the loss is no scalar with a graph.
        """
        global _running
        self._check_loss(loss)
        if scale_wrt_gas and self.options.gradient_accumulation_steps > 1:
            loss = loss / self.options.gradient_accumulation_steps
        self._backwards += 1
        _running += 1
        try:
            with self._kept_here():
                self._scaled_steps.backward(loss, retain_graph=retain_graph)
        finally:
            _running -= 1
        return loss

    def _kept_here(self) -> AbstractContextManager[None]:
        """Inside it gradients are not sent: those of a micro-batch that more will follow.

        In stages 2 and 3 several ranks send each micro-batch's, as DeepSpeed does: they have no
        room for whole gradients.
        """
        if self._unsynced or self.is_gradient_accumulation_boundary():
            return nullcontext()
        if ranks() > 1 and self.options.zero_optimization_stage >= 2:
            return nullcontext()
        return no_sync(self.module)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Ends a micro-batch; the last one of a step updates the parameters.

        `lr_kwargs` are arguments of the scheduler's step(). Raises DeepSpeedUseError inside
        no_sync() and without an optimizer, and as step() of hetero's optimizers.
        """
        if self._unsynced:
            raise DeepSpeedUseError("It is illegal to call Engine.step() inside no_sync()")
        self._was_applied = False
        if (
            not self.options.managed_gradient_accumulation
            or self.is_gradient_accumulation_boundary()
        ):
            self._update(dict(lr_kwargs or {}))
        self.micro_steps += 1

    def _update(self, lr_kwargs: dict[str, Any]) -> None:
        steps, options = self._scaled_steps, self.options
        steps.clip(options.gradient_clipping)
        self._was_applied = steps.step()
        steps.zero_grad()
        self.global_steps += 1
        is_managed = options.managed_gradient_accumulation
        micro_batches = options.gradient_accumulation_steps if is_managed else self._backwards
        self.global_samples += options.train_micro_batch_size_per_gpu * micro_batches * ranks()
        self._backwards = 0
        self.skipped_steps += int(not self._was_applied)
        if self.lr_scheduler is not None and self._was_applied:
            self.lr_scheduler.step(**lr_kwargs)
        every = options.steps_per_print
        if every and self.global_steps % every == 0 and rank() == 0:
            logger.info(
                "step=%d, skipped=%d, lr=%s", self.global_steps, self.skipped_steps, self.get_lr()
            )

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether this micro-batch is the last one of a step; nobody knows if it is not managed."""
        if self._boundary is not None or not self.options.managed_gradient_accumulation:
            return bool(self._boundary)
        return (self.micro_steps + 1) % self.options.gradient_accumulation_steps == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """From now on each micro-batch is the last one of its step, or none is.

        Raises DeepSpeedUseError without managed_gradient_accumulation.
        """
        self._check_managed("set_gradient_accumulation_boundary")
        self._boundary = is_boundary

    def _check_managed(self, name: str) -> None:
        if not self.options.managed_gradient_accumulation:
            raise DeepSpeedUseError(
                f"{name}() is not for managed_gradient_accumulation=False: each step() is the end "
                f"of a step there"
            )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside the block no gradient is sent to other ranks, as with hetero.no_sync().

        Raises DeepSpeedUseError inside another one.
        """
        if self._unsynced:
            raise DeepSpeedUseError("no_sync context manager reentry is unsupported")
        with no_sync(self.module):
            self._unsynced = True
            try:
                yield
            finally:
                self._unsynced = False

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Inside the block no gradient is sent; at its end the sums are, once.

        Raises DeepSpeedUseError inside no_sync(), or without managed_gradient_accumulation.
        """
        self._check_managed("coalesce_grad_reduction")
        with self.no_sync():
            yield
        self._optimizer.engine.steps.grad_intake.average(force=True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients; step() does that, too."""
        self._optimizer.zero_grad(set_to_none)

    # Facts

    # Where the model computes, to which inputs come by themselves, and in which dtype.
    device = property(lambda self: self._engine.backend.device)
    dtype = property(lambda self: next(self.module.parameters()).dtype)

    @property
    def loss_scale(self) -> float:
        """The factor of fp16's losses now."""
        return 1.0 if self._steps is None else self._steps.scale.value

    cur_scale = loss_scale

    def offload_states(
        self,
        include: Iterable[Any] | None = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Moves what is on the device away from it, in place, until reload_states().

        Without a device, all is in RAM, or on NVMe, anyway. All ranks must call it, between steps.
        Homes leave together, except for the slots that a layer needs: other arguments are not
        needed.

        Raises ValueError unless `device` is "cpu", or "none", which does nothing; and as
        engine.set_budget() of hetero.
        """
        engine = self._optimizer.engine
        log_given("offload_states", "homes leave the device together", include=include)
        device = getattr(device, "value", device)
        if device not in ("cpu", "none"):
            raise ValueError(
                f"offload_states: device must be 'cpu', not {device!r}; the configuration says "
                f"what lives on NVMe"
            )
        if device == "none" or not engine.backend.separate or self._device_memory is not None:
            return
        before = engine.ledger.budget_bytes[Tier.DEVICE.value]
        try:
            engine.set_budget(device_memory=1)
        except BudgetError as refusal:  # it knows the smallest
            if not isinstance(refusal.__context__, PlacementError):
                raise
            engine.set_budget(device_memory=refusal.__context__.smallest_device_bytes)
        self._device_memory = before

    def reload_states(self, non_blocking: bool = False) -> None:
        """Brings back what offload_states() has moved; all ranks must call it."""
        if self._device_memory is not None:
            self._optimizer.engine.set_budget(device_memory=self._device_memory)
            self._device_memory = None

    def destroy(self) -> None:
        """Frees memory, files and threads, as hetero's engine.close()."""
        self._engine.close()


for _name, _method in _ABOUT.items():
    setattr(DeepSpeedEngine, _name, _method)
