"""colossalai.trainer: a loop over epochs, with hooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from hetero.compat.colossalai.by_configuration import Engine
from hetero.compat.colossalai.utilities import DistributedLogger
from hetero.compat.key_table import log_not_needed


class Hook:
    """Calls of a training; each does nothing here.

    after_train_iter() and after_test_iter() get the trainer, output, label and loss, and all others
    the trainer. Hooks of smaller `priority` are called first.
    """

    def __init__(self, priority: int = 10) -> None:
        self.priority = priority

    def _ignore(self, trainer: Trainer) -> None:
        """Does nothing."""

    before_train = after_train = before_train_epoch = after_train_epoch = _ignore
    before_train_iter = before_test_epoch = after_test_epoch = _ignore

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        """After a micro-batch."""

    def after_test_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        """After a batch of an evaluation."""


class LossHook(Hook):
    """Keeps the mean loss of the epoch in trainer.states["loss"], and "test_loss"."""

    def __init__(self, priority: int = 0) -> None:
        super().__init__(priority)
        self._losses: list[torch.Tensor] = []

    def before_train_epoch(self, trainer: Trainer) -> None:
        self._losses = []

    before_test_epoch = before_train_epoch

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        self._losses.append(loss.detach().float())

    after_test_iter = after_train_iter

    def after_train_epoch(self, trainer: Trainer) -> None:
        trainer.states["loss"] = float(torch.stack(self._losses).mean())

    def after_test_epoch(self, trainer: Trainer) -> None:
        trainer.states["test_loss"] = float(torch.stack(self._losses).mean())


class LRSchedulerHook(Hook):
    """Steps a scheduler at the end of each epoch (by_epoch), or after each update."""

    def __init__(self, lr_scheduler: Any, by_epoch: bool, priority: int = 1) -> None:
        super().__init__(priority)
        self._scheduler, self._by_epoch = lr_scheduler, by_epoch

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        if not self._by_epoch and trainer.was_stepped:
            self._scheduler.step()

    def after_train_epoch(self, trainer: Trainer) -> None:
        if self._by_epoch:
            self._scheduler.step()


class LogMetricByEpochHook(Hook):
    """Logs trainer.states at the end of each `interval` epochs."""

    def __init__(self, logger: DistributedLogger, interval: int = 1, priority: int = 10) -> None:
        super().__init__(priority)
        self._logger, self._interval = logger, interval

    def after_train_epoch(self, trainer: Trainer) -> None:
        if (trainer.cur_epoch + 1) % self._interval == 0:
            said = ", ".join(f"{name}={value:.6g}" for name, value in trainer.states.items())
            self._logger.info(f"epoch {trainer.cur_epoch}: {said}", ranks=[0])


class hooks:
    """The hooks, by ColossalAI's path."""

    BaseHook = Hook
    LossHook = LossHook
    LRSchedulerHook = LRSchedulerHook
    LogMetricByEpochHook = LogMetricByEpochHook


class Trainer:
    """Trains an engine of colossalai.initialize() over epochs; a timer is not needed.

    Attributes:
        states: values that hooks have found.
        cur_epoch, cur_step: the epoch, and the micro-batch in the training, that run now.
        was_stepped: whether the last micro-batch ended with an update.
    """

    def __init__(
        self, engine: Engine, timer: Any = None, logger: DistributedLogger | None = None
    ) -> None:
        if timer is not None:
            log_not_needed("Trainer: timer", "optimizer.engine.explain() says where time goes")
        self.engine, self.logger = engine, logger
        self.states: dict[str, float] = {}
        self.cur_epoch = self.cur_step = 0
        self.was_stepped = False
        self._hooks: list[Hook] = []

    def fit(
        self,
        train_dataloader: Iterable[Any],
        epochs: int,
        max_steps: int | None = None,
        test_dataloader: Iterable[Any] | None = None,
        test_interval: int = 1,
        hooks: Sequence[Hook] = (),
        display_progress: bool = False,
        return_output_label: bool = True,
    ) -> None:
        """Trains.

        Args:
            train_dataloader: gives (data, label).
            epochs: how often all data are used.
            max_steps: micro-batches after which it ends; None: no limit.
            test_dataloader: for an evaluation after each `test_interval` epochs.
            test_interval: epochs between evaluations.
            hooks: called besides.
            display_progress, return_output_label: not needed.
        """
        if display_progress:
            log_not_needed("Trainer.fit: display_progress", "hooks say what happens")
        self._hooks = sorted(hooks, key=lambda hook: hook.priority)
        self._call("before_train")
        for self.cur_epoch in range(epochs):
            self._pass(train_dataloader, "train", max_steps)
            if test_dataloader is not None and (self.cur_epoch + 1) % test_interval == 0:
                self._pass(test_dataloader, "test", None)
            if max_steps is not None and self.cur_step >= max_steps:
                break
        self._call("after_train")

    def _call(self, name: str, *given: Any) -> None:
        for hook in self._hooks:
            getattr(hook, name)(self, *given)

    def _pass(self, data: Iterable[Any], kind: str, max_steps: int | None) -> None:
        """One pass over the data, "train" or "test"."""
        trains = kind == "train"
        (self.engine.train if trains else self.engine.eval)()
        self._call(f"before_{kind}_epoch")
        with nullcontext() if trains else torch.no_grad():
            for batch in data:
                if trains:
                    self._call("before_train_iter")
                    self.engine.zero_grad()
                found = self.engine.execute_schedule(batch)
                if trains:
                    self.was_stepped = self.engine.step()
                    self.cur_step += 1
                self._call(f"after_{kind}_iter", *found)
                if trains and max_steps is not None and self.cur_step >= max_steps:
                    break
        self._call(f"after_{kind}_epoch")
