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
from hetero.compat.key_table import logger, nearest

Rates = float | Sequence[float]
_SECOND_BETA = 0.99  # of an optimizer whose momentum cycles


class Schedule:
    """Sets the learning rates of an optimizer's param groups at each step()."""

    def __init__(self, optimizer: torch.optim.Optimizer, last_batch_iteration: int = -1) -> None:
        """`last_batch_iteration`: after which the schedule goes on; -1: it begins."""
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        self._last_lr: list[Any] = [group["lr"] for group in optimizer.param_groups]

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

    def _begin(self, rates: Sequence[Any] | None = None) -> None:
        """Called by constructors, when all is known; `rates`: the first ones, if not get_lr()'s."""
        if self.last_batch_iteration == -1:
            self._set_rates(self.get_lr() if rates is None else rates)

    def _set(self) -> None:
        self._set_rates(self.get_lr())

    def _set_rates(self, rates: Sequence[Any]) -> None:
        for group, lr in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):  # the loop, too, may hold it
                group["lr"].fill_(lr.squeeze() if isinstance(lr, torch.Tensor) else lr)
            else:
                group["lr"] = lr
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def _of_groups(self, name: str, value: Rates) -> list[Any]:
        """One value per param group. Raises ValueError for a list of another length."""
        groups = len(self.optimizer.param_groups)
        if not isinstance(value, (list, tuple)):
            return [value] * groups
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
        ValueError: for lists that do not fit the param groups, and a step size below 1.
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
        self.min_lr = self._of_groups("lr_range_test_min_lr", lr_range_test_min_lr)
        self.step_size = _whole("lr_range_test_step_size", lr_range_test_step_size)
        self.step_rate, self.staircase = lr_range_test_step_rate, lr_range_test_staircase
        self._begin(self.min_lr)

    def get_lr(self) -> list[float]:
        passed = (self.last_batch_iteration + 1) / self.step_size
        factor = 1 + self.step_rate * (math.floor(passed) if self.staircase else passed)
        return [least * factor for least in self.min_lr]


class WarmupLR(Schedule):
    """Rates that rise from warmup_min_lr to warmup_max_lr, and stay there.

    Args:
        optimizer: whose rates are set.
        warmup_min_lr, warmup_max_lr: one rate, or one per param group. Default of the latter: each
            group's own.
        warmup_num_steps: steps in which they rise.
        warmup_type: "log" or "linear"; another one is taken for "log", with a warning.
        last_batch_iteration: as of Schedule.

    Raises:
        ValueError: for numbers that cannot be, and lists that do not fit the param groups.
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
            warmup_max_lr = _own_rates(optimizer)
        self.min_lrs = self._of_groups("warmup_min_lr", warmup_min_lr)
        self.max_lrs = self._of_groups("warmup_max_lr", warmup_max_lr)
        self.warmup_num_steps = _warmup_steps(warmup_num_steps)
        self.warmup_type = _warmup_type(warmup_type)
        self._begin()

    def get_lr(self) -> list[float]:
        if self.last_batch_iteration < 0:
            return list(self.min_lrs)
        share = self._share()
        pairs = zip(self.min_lrs, self.max_lrs, strict=True)
        return [least + (most - least) * share for least, most in pairs]

    def _share(self) -> float:
        return _warm(self.last_batch_iteration, self.warmup_num_steps, self.warmup_type)


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
        self.total_num_steps = total_num_steps
        super().__init__(
            optimizer,
            warmup_min_lr,
            warmup_max_lr,
            warmup_num_steps,
            warmup_type,
            last_batch_iteration,
        )

    def _share(self) -> float:
        if self.last_batch_iteration < self.warmup_num_steps:
            return super()._share()
        left, whole = (
            self.total_num_steps - i for i in (self.last_batch_iteration, self.warmup_num_steps)
        )
        return max(0.0, left / max(1.0, whole))


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
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        self.warmup_num_steps = _warmup_steps(warmup_num_steps)
        self.warmup_type = _warmup_type(warmup_type)
        self.org_lrs = _own_rates(optimizer)
        self._begin()

    def get_lr(self) -> list[float]:
        ratio = self.get_lr_ratio()
        return [whole * ratio for whole in self.org_lrs]

    def get_lr_ratio(self) -> float:
        """The factor at the iteration that was begun last; 0 before the first one."""
        iteration, steps = self.last_batch_iteration, self.warmup_num_steps
        if iteration < 0:
            return 0.0
        if iteration < steps:
            least = self.warmup_min_ratio
            return least + _warm(iteration, steps, self.warmup_type) * (1 - least)
        passed = (iteration - steps + 1) / max(1, self.total_num_steps - steps)
        cosine = (1 + math.cos(math.pi * min(1.0, passed))) / 2
        return max(0.0, self.cos_min_ratio + (1 - self.cos_min_ratio) * cosine)


class OneCycle(Schedule):
    """Rates that rise and fall once, and then decay; momentum moves the other way (Smith, 2018).

    Args:
        optimizer: whose rates, and first betas, are set.
        cycle_min_lr, cycle_max_lr: the least and the largest rate, or one per param group.
        decay_lr_rate: after the cycle rates are divided by 1 + this times the decay steps.
        cycle_first_step_size, cycle_second_step_size: steps in which they rise, and fall; the
            second is as the first by default.
        cycle_first_stair_count, cycle_second_stair_count: rates change in so many stairs; 0: in
            each step.
        decay_step_size: steps of one decay step; 0: there is no decay.
        cycle_momentum: whether betas[0] changes; an optimizer without betas has none.
        cycle_min_mom, cycle_max_mom: its least and largest value, or one per param group.
        decay_mom_rate: after the cycle it is multiplied by 1 + this times the decay steps.
        last_batch_iteration: as of Schedule.

    Raises:
        ValueError: for step sizes that cannot be, and lists that do not fit the param groups.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        cycle_min_lr: Rates,
        cycle_max_lr: Rates,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Rates = 0.8,
        cycle_max_mom: Rates = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        second = cycle_second_step_size
        self.first_step_size = cycle_first_step_size
        self.second_step_size = cycle_first_step_size if second is None else second
        if cycle_first_step_size <= 0 or self.second_step_size < 0:
            raise ValueError(
                f"cycle_first_step_size must be above 0, and cycle_second_step_size 0 or more, not "
                f"{cycle_first_step_size} and {self.second_step_size}"
            )
        self.total_size = self.first_step_size + self.second_step_size
        self.step_ratio = self.first_step_size / self.total_size
        second_stairs = cycle_second_stair_count
        self._stairs = (
            cycle_first_stair_count,
            cycle_first_stair_count if second_stairs is None else second_stairs,
        )
        self._decays, self._decay_size = (decay_lr_rate, decay_mom_rate), decay_step_size
        self.min_lrs = self._of_groups("cycle_min_lr", cycle_min_lr)
        self.max_lrs = self._of_groups("cycle_max_lr", cycle_max_lr)
        self._moms = (
            self._of_groups("cycle_min_mom", cycle_min_mom),
            self._of_groups("cycle_max_mom", cycle_max_mom),
        )
        self.cycle_momentum = cycle_momentum and "betas" in optimizer.defaults
        if last_batch_iteration == -1 and self.cycle_momentum:
            self._set_momentum(self._moms[0])
        self._begin(self.min_lrs)  # before the cycle rate and momentum are the least ones

    def _height(self) -> float:
        """How far the cycle is up, from 0 to 1."""
        passed = (self.last_batch_iteration + 1) % self.total_size
        rises = passed <= self.first_step_size
        steps = self.first_step_size if rises else self.second_step_size
        stairs = self._stairs[0 if rises else 1]
        left = passed if rises else self.total_size - passed
        # (The product first: it is exact, so no stair is missed by a rounding.)
        return math.floor(left * stairs / steps) / stairs if stairs else left / steps

    def _decay_steps(self) -> float | None:
        """How many decay steps have passed; None in the cycle."""
        after = self.last_batch_iteration - self.total_size
        if after < 0:
            return None
        return (after + 1) / self._decay_size if self._decay_size else 0.0

    def get_lr(self) -> list[float]:
        decay = self._decay_steps()
        if decay is not None:
            return [least / (1 + self._decays[0] * decay) for least in self.min_lrs]
        pairs = zip(self.min_lrs, self.max_lrs, strict=True)
        return [least + (most - least) * self._height() for least, most in pairs]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Each group's betas at the iteration that was begun last; None if they do not change."""
        if not self.cycle_momentum:
            return None
        decay = self._decay_steps()
        if decay is None:
            pairs = zip(*self._moms, strict=True)
            firsts = [most - (most - least) * self._height() for least, most in pairs]
        else:
            firsts = [most * (1 + self._decays[1] * decay) for most in self._moms[1]]
        return [(first, _SECOND_BETA) for first in firsts]

    def _set(self) -> None:
        super()._set()
        betas = self.get_mom()
        if betas is not None:
            self._set_momentum([first for first, _ in betas])

    def _set_momentum(self, firsts: Sequence[float]) -> None:
        for group, first in zip(self.optimizer.param_groups, firsts, strict=True):
            group["betas"] = (first, _SECOND_BETA)


def _own_rates(optimizer: torch.optim.Optimizer) -> list[Any]:
    rates = [group["lr"] for group in optimizer.param_groups]
    return [rate.clone() if isinstance(rate, torch.Tensor) else rate for rate in rates]


def _whole(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number from 1 on, not {value!r}")
    return value


def _warmup_steps(given: int) -> int:
    return max(2, _whole("warmup_num_steps", given))


def _warmup_type(given: str) -> str:
    if given in ("log", "linear"):
        return given
    logger.warning("there is no warmup_type %r; rates rise as a logarithm ('log')", given)
    return "log"


def _warm(iteration: int, steps: int, kind: str) -> float:
    """How much of a warm-up is over, from 0 to 1."""
    if iteration >= steps:
        return 1.0
    return iteration / steps if kind == "linear" else math.log(iteration + 1) / math.log(steps)


SCHEDULES: Mapping[str, Callable[..., Schedule]] = {
    made.__name__: made for made in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}
VALID_LR_SCHEDULES = list(SCHEDULES)


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
