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
from hetero.compat.key_table import REQUIRED, DeclaresArguments, logger, nearest
from hetero.option_checks import check_integer

_SECOND_BETA = 0.99  # of an optimizer whose momentum cycles


class RateSchedule(DeclaresArguments):
    """Sets the learning rates of an optimizer's param groups at each step().

    A class statement names a schedule's arguments with their defaults, in DeepSpeed's order; they
    are attributes. Rates may be one number, or a list with one for each param group.
    `last_batch_iteration` is the iteration after which the schedule goes on; -1: it begins.

    Raises ValueError for numbers that cannot be, and lists that do not fit the param groups.
    """

    _defaults: Mapping[str, Any]

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__()
        if arguments:
            cls._defaults = {"optimizer": REQUIRED, **arguments, "last_batch_iteration": -1}
            cls._declare(cls._defaults)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._arguments = {**self._defaults, **self._given(args, kwargs)}
        self.optimizer: torch.optim.Optimizer = self._arguments.pop("optimizer")
        self.last_batch_iteration: int = self._arguments.pop("last_batch_iteration")
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self._last_lr: list[Any] = rates
        self.org_lrs = [rate.clone() if isinstance(rate, torch.Tensor) else rate for rate in rates]
        self._check(self._arguments)
        if self.last_batch_iteration == -1:
            self._set_rates(self.get_lr())

    def __getattr__(self, name: str) -> Any:
        arguments = vars(self).get("_arguments", {})
        if name not in arguments:
            raise AttributeError(f"{type(self).__name__} has no {name!r}")
        return arguments[name]

    def _check(self, arguments: dict[str, Any]) -> None:
        """Raises ValueError for an argument that cannot be; mends others."""
        groups = len(self.optimizer.param_groups)
        for name, value in arguments.items():
            if isinstance(value, (list, tuple)) and len(value) != groups:
                raise ValueError(
                    f"{name} has {len(value)} values, and the optimizer has {groups} param groups"
                )
            if name in ("warmup_num_steps", "lr_range_test_step_size"):
                check_integer(name, value, 1)
        if "warmup_type" in arguments:
            arguments["warmup_num_steps"] = max(2, arguments["warmup_num_steps"])
            kind = arguments["warmup_type"]
            if kind not in ("log", "linear"):
                logger.warning(
                    "there is no warmup_type %r; rates rise as a logarithm ('log')", kind
                )
                arguments["warmup_type"] = "log"

    def get_lr(self) -> list[Any]:
        """The learning rate of each param group at the iteration that was begun last."""
        raise NotImplementedError

    def get_last_lr(self) -> list[Any]:
        """The learning rates that were set last."""
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Begins the next iteration, or the one that is given."""
        self.last_batch_iteration += 1
        if last_batch_iteration is not None:
            self.last_batch_iteration = last_batch_iteration
        self._set_rates(self.get_lr())

    def _set_rates(self, rates: Sequence[Any]) -> None:
        for group, lr in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):  # the loop, too, may hold it
                group["lr"].fill_(lr.squeeze() if isinstance(lr, torch.Tensor) else lr)
            else:
                group["lr"] = lr
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def _of_groups(self, *names: str) -> list[list[Any]]:
        """The values of each of these arguments, one for each param group."""
        groups = len(self.optimizer.param_groups)
        found = [self._arguments[name] for name in names]
        return [list(v) if isinstance(v, (list, tuple)) else [v] * groups for v in found]

    def _warm(self) -> float:
        """The share of a warm-up that is over, from 0 to 1."""
        iteration, steps = self.last_batch_iteration, self.warmup_num_steps
        if iteration >= steps:
            return 1.0
        linear = self.warmup_type == "linear"
        share: float = iteration / steps if linear else math.log(iteration + 1) / math.log(steps)
        return share

    def state_dict(self) -> dict[str, Any]:
        """The state that a checkpoint keeps."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: Mapping[str, Any]) -> None:
        """Takes what state_dict() gave; the optimizer's groups have their rates already."""
        self.last_batch_iteration = int(sd["last_batch_iteration"])


class LRRangeTest(
    RateSchedule,
    lr_range_test_min_lr=1e-3,
    lr_range_test_step_size=2000,
    lr_range_test_step_rate=1.0,
    lr_range_test_staircase=False,
):
    """Rates that rise from their least, to find the largest one that trains (Smith, 2018).

    In each step_size steps they rise by step_rate times the first rate; with `staircase` at the end
    of these steps, not in each.
    """

    def get_lr(self) -> list[Any]:
        passed = (self.last_batch_iteration + 1) / self.lr_range_test_step_size
        whole = math.floor(passed) if self.lr_range_test_staircase else passed
        factor = 1 + self.lr_range_test_step_rate * whole
        return [least * factor for least in self._of_groups("lr_range_test_min_lr")[0]]


class WarmupLR(
    RateSchedule, warmup_min_lr=0.0, warmup_max_lr=None, warmup_num_steps=1000, warmup_type="log"
):
    """Rates that rise from warmup_min_lr to warmup_max_lr, by default each group's own, and stay.

    `warmup_type` is "log" or "linear"; another one is taken for "log", with a warning.
    """

    def _check(self, arguments: dict[str, Any]) -> None:
        if arguments["warmup_max_lr"] is None:
            arguments["warmup_max_lr"] = self.org_lrs
        super()._check(arguments)
        self.min_lrs, self.max_lrs = self._of_groups("warmup_min_lr", "warmup_max_lr")

    def get_lr(self) -> list[Any]:
        if self.last_batch_iteration < 0:
            return list(self.min_lrs)
        share = self._share()
        pairs = zip(self.min_lrs, self.max_lrs, strict=True)
        return [least + (most - least) * share for least, most in pairs]

    def _share(self) -> float:
        return self._warm()


class WarmupDecayLR(
    WarmupLR,
    total_num_steps=REQUIRED,
    warmup_min_lr=0.0,
    warmup_max_lr=0.001,
    warmup_num_steps=1000,
    warmup_type="log",
):
    """WarmupLR, after which rates fall linearly to 0 at step total_num_steps."""

    def _share(self) -> float:
        if self.last_batch_iteration < self.warmup_num_steps:
            return super()._share()
        left: float = self.total_num_steps - self.last_batch_iteration
        return max(0.0, left / max(1.0, float(self.total_num_steps - self.warmup_num_steps)))


class WarmupCosineLR(
    RateSchedule,
    total_num_steps=REQUIRED,
    warmup_min_ratio=0.0,
    warmup_num_steps=1000,
    cos_min_ratio=0.0001,
    warmup_type="log",
):
    """The optimizer's rates times a factor that rises from warmup_min_ratio to 1, and then falls.

    It falls as a half cosine, to cos_min_ratio at step total_num_steps.
    """

    def get_lr(self) -> list[Any]:
        ratio = self.get_lr_ratio()
        return [whole * ratio for whole in self.org_lrs]

    def get_lr_ratio(self) -> float:
        """The factor at the iteration that was begun last; 0 before the first one."""
        iteration, steps = self.last_batch_iteration, self.warmup_num_steps
        if iteration < 0:
            return 0.0
        if iteration < steps:
            least: float = self.warmup_min_ratio
            return least + self._warm() * (1 - least)
        passed = (iteration - steps + 1) / max(1, self.total_num_steps - steps)
        cosine = (1 + math.cos(math.pi * min(1.0, passed))) / 2
        factor: float = self.cos_min_ratio + (1 - self.cos_min_ratio) * cosine
        return max(0.0, factor)


class OneCycle(
    RateSchedule,
    cycle_min_lr=REQUIRED,
    cycle_max_lr=REQUIRED,
    decay_lr_rate=0.0,
    cycle_first_step_size=2000,
    cycle_second_step_size=None,
    cycle_first_stair_count=0,
    cycle_second_stair_count=None,
    decay_step_size=0,
    cycle_momentum=True,
    cycle_min_mom=0.8,
    cycle_max_mom=0.9,
    decay_mom_rate=0.0,
):
    """Rates that rise and fall once, and then decay; momentum moves the other way (Smith, 2018).

    They rise in cycle_first_step_size steps, in so many stairs (0: in each step), and fall in the
    second's, which are as the first's by default. After the cycle rates are divided, and momentum
    (betas[0], where an optimizer has it) is multiplied, by 1 + the decay rate times the decay steps
    of decay_step_size steps each; 0: there is no decay.
    """

    def _check(self, arguments: dict[str, Any]) -> None:
        for name in ("step_size", "stair_count"):
            if arguments[f"cycle_second_{name}"] is None:
                arguments[f"cycle_second_{name}"] = arguments[f"cycle_first_{name}"]
        first, second = arguments["cycle_first_step_size"], arguments["cycle_second_step_size"]
        if first <= 0 or second < 0:
            raise ValueError(
                f"cycle_first_step_size must be above 0, and cycle_second_step_size 0 or more, not "
                f"{first} and {second}"
            )
        super()._check(arguments)
        self.total_size, self.step_ratio = first + second, first / (first + second)
        self.min_lrs, self.max_lrs = self._of_groups("cycle_min_lr", "cycle_max_lr")
        self._moms = self._of_groups("cycle_min_mom", "cycle_max_mom")
        momentum = arguments["cycle_momentum"] and "betas" in self.optimizer.defaults
        arguments["cycle_momentum"] = bool(momentum)
        # Before the cycle rate and momentum are the least ones.
        if self.last_batch_iteration == -1 and arguments["cycle_momentum"]:
            self._set_momentum(self._moms[0])

    def _height(self) -> float:
        """The height in the cycle, from 0 to 1."""
        passed = (self.last_batch_iteration + 1) % self.total_size
        half = "first" if passed <= self.cycle_first_step_size else "second"
        steps = self._arguments[f"cycle_{half}_step_size"]
        stairs = self._arguments[f"cycle_{half}_stair_count"]
        left = passed if half == "first" else self.total_size - passed
        # (The product first: it is exact, so no stair is missed by a rounding.)
        height: float = math.floor(left * stairs / steps) / stairs if stairs else left / steps
        return height

    def _decay_steps(self) -> float | None:
        """The decay steps that have passed; None in the cycle."""
        after = self.last_batch_iteration - self.total_size
        if after < 0:
            return None
        return (after + 1) / self.decay_step_size if self.decay_step_size else 0.0

    def get_lr(self) -> list[Any]:
        decay = self._decay_steps()
        if decay is not None:
            return [least / (1 + self.decay_lr_rate * decay) for least in self.min_lrs]
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
            firsts = [most * (1 + self.decay_mom_rate * decay) for most in self._moms[1]]
        return [(first, _SECOND_BETA) for first in firsts]

    def step(self, last_batch_iteration: int | None = None) -> None:
        super().step(last_batch_iteration)
        betas = self.get_mom()
        if betas is not None:
            self._set_momentum([first for first, _ in betas])

    def _set_momentum(self, firsts: Sequence[float]) -> None:
        for group, first in zip(self.optimizer.param_groups, firsts, strict=True):
            group["betas"] = (first, _SECOND_BETA)


SCHEDULES: Mapping[str, Callable[..., RateSchedule]] = {
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
