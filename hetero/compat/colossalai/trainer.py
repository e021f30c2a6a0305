"""colossalai.trainer: a loop over epochs, with hooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hetero.compat.colossalai.engine import Engine
from hetero.compat.colossalai.logging import DistributedLogger
from hetero.compat.key_table import log_not_needed


class Hook:
    """What a training does besides; each function does nothing here.

    Args:
        priority: hooks of smaller ones are called first.
    """

    def __init__(self, priority: int = 10) -> None:
        self.priority = priority

    def before_train(self, trainer: Trainer) -> None:
        """At the beginning of fit()."""

    def after_train(self, trainer: Trainer) -> None:
        """At its end."""

    def before_train_epoch(self, trainer: Trainer) -> None:
        """At the beginning of an epoch."""

    def after_train_epoch(self, trainer: Trainer) -> None:
        """At its end."""

    def before_train_iter(self, trainer: Trainer) -> None:
        """Before a micro-batch."""

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        """After it."""

    def before_test_epoch(self, trainer: Trainer) -> None:
        """At the beginning of an evaluation."""

    def after_test_epoch(self, trainer: Trainer) -> None:
        """At its end."""

    def after_test_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        """After a batch of it."""


class LossHook(Hook):
    """Keeps the mean loss of the epoch in trainer.states["loss"], and an evaluation's."""

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
    """Steps a scheduler of learning rates.

    Args:
        lr_scheduler: the scheduler.
        by_epoch: at the end of each epoch, or else after each step of the optimizer.
        priority: as of Hook.
    """

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
    """Logs trainer.states at the end of each epoch.

    Args:
        logger: of get_dist_logger().
        interval: epochs between messages.
        priority: as of Hook.
    """

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
    """Trains an engine over epochs.

    Args:
        engine: of colossalai.initialize().
        timer: not needed.
        logger: of get_dist_logger(), or None.

    Attributes:
        states: what hooks have found out.
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
            hooks: what to do besides.
            display_progress: not needed: hooks say what happens.
            return_output_label: not needed: hooks always get them.
        """
        if display_progress:
            log_not_needed("Trainer.fit: display_progress", "hooks say what happens")
        called = sorted(hooks, key=lambda hook: hook.priority)
        for hook in called:
            hook.before_train(self)
        for self.cur_epoch in range(epochs):
            self._epoch(train_dataloader, called, max_steps)
            if test_dataloader is not None and (self.cur_epoch + 1) % test_interval == 0:
                self._evaluate(test_dataloader, called)
            if max_steps is not None and self.cur_step >= max_steps:
                break
        for hook in called:
            hook.after_train(self)

    def _epoch(self, data: Iterable[Any], called: Sequence[Hook], max_steps: int | None) -> None:
        self.engine.train()
        for hook in called:
            hook.before_train_epoch(self)
        for batch in data:
            for hook in called:
                hook.before_train_iter(self)
            self.engine.zero_grad()
            found = self.engine.execute_schedule(batch)
            self.was_stepped = bool(self.engine.step())
            self.cur_step += 1
            for hook in called:
                hook.after_train_iter(self, *found)
            if max_steps is not None and self.cur_step >= max_steps:
                break
        for hook in called:
            hook.after_train_epoch(self)

    @torch.no_grad()
    def _evaluate(self, data: Iterable[Any], called: Sequence[Hook]) -> None:
        self.engine.eval()
        for hook in called:
            hook.before_test_epoch(self)
        for batch in data:
            found = self.engine.execute_schedule(batch)
            for hook in called:
                hook.after_test_iter(self, *found)
        for hook in called:
            hook.after_test_epoch(self)
