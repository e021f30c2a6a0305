"""DeepSpeed's schedules of learning rates, by the names and arguments of its configuration.

A schedule is stepped once after each optimizer step; iteration 0 is the one that its first step()
begins. Until then the optimizer has the rates of iteration -1, with which its first step is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hetero.compat.deepspeed.options import Named
from hetero.compat.key_table import nearest

Rates = float | Sequence[float]


class Schedule:
    """Sets the learning rates of an optimizer's param groups at each step()."""

    def __init__(self, optimizer: torch.optim.Optimizer, last_batch_iteration: int = -1) -> None:
        """`last_batch_iteration`: after which the schedule goes on; -1: it begins."""
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        self._last_lr = [group["lr"] for group in optimizer.param_groups]

    def get_lr(self) -> list[float]:
        """The learning rate of each param group at the iteration that was begun last."""
        raise NotImplementedError

    def get_last_lr(self) -> list[float]:
        """The learning rates that were set last."""
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Begins the next iteration, or the one that is given."""
        following = self.last_batch_iteration + 1
        self.last_batch_iteration = (
            following if last_batch_iteration is None else last_batch_iteration
        )
        self._set()

    def _begin(self) -> None:
        """Called by constructors, when all is known."""
        if self.last_batch_iteration == -1:
            self._set()

    def _set(self) -> None:
        self._last_lr = self.get_lr()
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = lr

    def _of_groups(self, name: str, value: Rates) -> list[float]:
        """One value per param group. Raises ValueError for a list of another length."""
        groups = len(self.optimizer.param_groups)
        if not isinstance(value, (list, tuple)):
            return [float(value)] * groups  # type: ignore[arg-type]
        if len(value) != groups:
            raise ValueError(
                f"{name} has {len(value)} values, and the optimizer has {groups} param groups"
            )
        return list(value)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: Mapping[str, Any]) -> None:
        """Takes what state_dict() gave; the optimizer's groups have their rates already."""
        self.last_batch_iteration = int(sd["last_batch_iteration"])


class LRRangeTest(Schedule):
    """Rates that rise from their least, to find the largest one that trains (Smith, 2018).

    Args:
        optimizer: whose rates are set.
        lr_range_test_min_lr: the first rate, or one per param group.
        lr_range_test_step_size: steps in which it rises by step_rate times the first rate.
        lr_range_test_step_rate: how fast it rises.
        lr_range_test_staircase: rises at the end of each step_size steps, not in each.
        last_batch_iteration: as of Schedule.

    Raises:
        ValueError: for lists that do not fit the param groups.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lr_range_test_min_lr: Rates = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self._least = self._of_groups("lr_range_test_min_lr", lr_range_test_min_lr)
        self._step_size, self._rate = lr_range_test_step_size, lr_range_test_step_rate
        self._in_stairs = lr_range_test_staircase
        if last_batch_iteration == -1:  # the first step is made with the least rates themselves
            for group, lr in zip(optimizer.param_groups, self._least, strict=True):
                group["lr"] = lr
            self._last_lr = list(self._least)

    def get_lr(self) -> list[float]:
        passed = (self.last_batch_iteration + 1) / self._step_size
        factor = 1 + self._rate * (math.floor(passed) if self._in_stairs else passed)
        return [least * factor for least in self._least]


class WarmupLR(Schedule):
    """Rates that rise from warmup_min_lr to warmup_max_lr, and stay there.

    Args:
        optimizer: whose rates are set.
        warmup_min_lr, warmup_max_lr: one rate, or one per param group. Default of the latter: the
            optimizer's.
        warmup_num_steps: steps in which they rise.
        warmup_type: "log" or "linear".
        last_batch_iteration: as of Schedule.

    Raises:
        ValueError: for another type, and for numbers that cannot be.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        if warmup_max_lr is None:
            warmup_max_lr = float(optimizer.param_groups[0]["lr"])
        self._least = self._of_groups("warmup_min_lr", warmup_min_lr)
        self._most = self._of_groups("warmup_max_lr", warmup_max_lr)
        self._warmup = _Warmup(warmup_num_steps, warmup_type)
        self._begin()

    def get_lr(self) -> list[float]:
        if self.last_batch_iteration < 0:
            return list(self._least)
        share = self._share()
        pairs = zip(self._least, self._most, strict=True)
        return [least + (most - least) * share for least, most in pairs]

    def _share(self) -> float:
        iteration = self.last_batch_iteration
        return self._warmup.share(iteration) if iteration < self._warmup.steps else 1.0


class WarmupDecayLR(WarmupLR):
    """WarmupLR, after which rates fall linearly to 0 at step total_num_steps.

    Args:
        optimizer: whose rates are set.
        total_num_steps: of the training.
        warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type: as of WarmupLR.
        last_batch_iteration: as of Schedule.

    Raises:
        ValueError: as of WarmupLR.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self._total = total_num_steps
        super().__init__(
            optimizer,
            warmup_min_lr,
            warmup_max_lr,
            warmup_num_steps,
            warmup_type,
            last_batch_iteration,
        )

    def _share(self) -> float:
        iteration, warmup = self.last_batch_iteration, self._warmup
        if iteration < warmup.steps:
            return warmup.share(iteration)
        return max(0.0, (self._total - iteration) / max(1.0, self._total - warmup.steps))


class WarmupCosineLR(Schedule):
    """The optimizer's rates times a factor that rises, and then falls as a half cosine.

    Args:
        optimizer: whose rates are set.
        total_num_steps: of the training; the factor is cos_min_ratio from there on.
        warmup_min_ratio: the factor at first.
        warmup_num_steps, warmup_type: as of WarmupLR.
        cos_min_ratio: the factor at the end.
        last_batch_iteration: as of Schedule.

    Raises:
        ValueError: as of WarmupLR.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self._total, self._least, self._last = total_num_steps, warmup_min_ratio, cos_min_ratio
        self._warmup = _Warmup(warmup_num_steps, warmup_type)
        self._whole = [group["lr"] for group in optimizer.param_groups]
        self._begin()

    def get_lr(self) -> list[float]:
        return [whole * self._factor() for whole in self._whole]

    def _factor(self) -> float:
        iteration, warmup = self.last_batch_iteration, self._warmup
        if iteration < 0:
            return 0.0
        if iteration < warmup.steps:
            return self._least + warmup.share(iteration) * (1 - self._least)
        passed = (iteration - warmup.steps + 1) / max(1, self._total - warmup.steps)
        cosine = (1 + math.cos(math.pi * min(1.0, passed))) / 2
        return max(0.0, self._last + (1 - self._last) * cosine)


class OneCycle(Schedule):
    """Rates that rise and fall once, and then decay; momentum moves the other way (Smith, 2018).

    Args:
        optimizer: whose rates, and first betas, are set.
        cycle_min_lr, cycle_max_lr: the least and the largest rate.
        decay_lr_rate: after the cycle rates are divided by 1 + this times the decay steps.
        cycle_first_step_size, cycle_second_step_size: steps in which they rise, and fall; the
            second is as the first by default.
        cycle_first_stair_count, cycle_second_stair_count: rates change in so many stairs; 0: in
            each step.
        decay_step_size: steps of one decay step; 0: there is no decay.
        cycle_momentum: whether betas[0] changes; an optimizer without betas has none.
        cycle_min_mom, cycle_max_mom: its least and largest value.
        decay_mom_rate: after the cycle it is multiplied by 1 + this times the decay steps.
        last_batch_iteration: as of Schedule.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        cycle_min_lr: float,
        cycle_max_lr: float,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float = 0.8,
        cycle_max_mom: float = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self._lrs, self._moms = (cycle_min_lr, cycle_max_lr), (cycle_min_mom, cycle_max_mom)
        self._decays = decay_lr_rate, decay_mom_rate
        second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        self._sizes = cycle_first_step_size, second
        first_stairs = cycle_first_stair_count
        self._stairs = (
            first_stairs,
            first_stairs if cycle_second_stair_count is None else cycle_second_stair_count,
        )
        self._decay_size = decay_step_size
        self._has_momentum = cycle_momentum and "betas" in optimizer.defaults
        if last_batch_iteration == -1:  # before the cycle rate and momentum are the least ones
            for group in optimizer.param_groups:
                group["lr"] = cycle_min_lr
                if self._has_momentum:
                    group["betas"] = (cycle_min_mom, 0.99)
            self._last_lr = [cycle_min_lr] * len(optimizer.param_groups)

    def _height(self) -> float:
        """How far the cycle is up, from 0 to 1."""
        (first, second), iteration = self._sizes, self.last_batch_iteration + 1
        passed = iteration % (first + second)
        rises = passed <= first
        stairs = self._stairs[0 if rises else 1]
        height = passed / first if rises else (first + second - passed) / second
        return math.floor(height * stairs + 1e-9) / stairs if stairs else height

    def _decay_steps(self) -> float | None:
        """How many decay steps have passed; None in the cycle."""
        after = self.last_batch_iteration - sum(self._sizes)
        if after < 0:
            return None
        return (after + 1) / self._decay_size if self._decay_size else 0.0

    def get_lr(self) -> list[float]:
        (least, most), decay = self._lrs, self._decay_steps()
        if decay is None:
            lr = least + (most - least) * self._height()
        else:
            lr = least / (1 + self._decays[0] * decay)
        return [lr] * len(self.optimizer.param_groups)

    def get_mom(self) -> float | None:
        """betas[0] at the iteration that was begun last; None if it is not changed."""
        (least, most), decay = self._moms, self._decay_steps()
        if not self._has_momentum:
            return None
        if decay is None:
            return most - (most - least) * self._height()
        return most * (1 + self._decays[1] * decay)

    def _set(self) -> None:
        super()._set()
        momentum = self.get_mom()
        if momentum is not None:
            for group in self.optimizer.param_groups:
                group["betas"] = (momentum, 0.99)


class _Warmup:
    """How much of a warm-up is over."""

    def __init__(self, steps: int, kind: str) -> None:
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"warmup_num_steps must be a whole number from 1 on, not {steps!r}")
        if kind not in ("log", "linear"):
            raise ValueError(f"warmup_type must be log or linear, not {kind!r}")
        self.steps = max(2, steps)
        self._kind = kind

    def share(self, iteration: int) -> float:
        """From 0 to 1, at an iteration before the warm-up's end."""
        if self._kind == "linear":
            return iteration / self.steps
        return math.log(iteration + 1) / math.log(self.steps)


SCHEDULES: Mapping[str, Callable[..., Schedule]] = {
    made.__name__: made for made in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}


def make_schedule(named: Named, optimizer: torch.optim.Optimizer) -> Any:
    """The schedule that the configuration names; also one of torch.optim.lr_scheduler.

    Raises ValueError for a type that there is not, and for unknown or wrong arguments.
    """
    made = SCHEDULES.get(named.type) or getattr(torch.optim.lr_scheduler, named.type, None)
    if not callable(made):
        raise ValueError(
            f"scheduler: there is no type {named.type!r}; {nearest(named.type, list(SCHEDULES))}"
        )
    try:
        return made(optimizer, **named.params)
    except TypeError as error:
        raise ValueError(f"scheduler: {error}") from None
