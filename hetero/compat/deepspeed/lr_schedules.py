"""DeepSpeed's schedules of learning rates, by the names and arguments of its configuration.

A schedule is stepped once after each optimizer step; iteration 0 is the one that its first step()
begins. Until then the optimizer has the rates of iteration -1, with which its first step is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hetero.compat.deepspeed.options import Named
from hetero.compat.key_table import DeclaresArguments, logger, nearest
from hetero.option_checks import check_integer

_SECOND_BETA = 0.99  # of an optimizer whose momentum cycles


class RateSchedule(DeclaresArguments):
    """Sets the learning rates of an optimizer's param groups at each step().

    A schedule's arguments are its attributes. Rates may be one number, or a list with one for each
    param group. `last_batch_iteration` is the iteration after which it goes on; -1: it begins.

    Raises ValueError for numbers that cannot be, and lists that do not fit the param groups.
    """

    optimizer: torch.optim.Optimizer
    last_batch_iteration: int
    warmup_num_steps: Any
    cycle_momentum: Any

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = self._given(args, kwargs)
        vars(self).update(given)
        groups = self.optimizer.param_groups
        for name, value in given.items():
            if isinstance(value, (list, tuple)) and len(value) != len(groups):
                raise ValueError(
                    f"{name} has {len(value)} values, and the optimizer has {len(groups)} param "
                    f"groups"
                )
            if name in ("warmup_num_steps", "lr_range_test_step_size"):
                check_integer(name, value, 1)
        if "warmup_type" in given:
            self.warmup_num_steps = max(2, self.warmup_num_steps)
            if self.warmup_type not in ("log", "linear"):
                said = "there is no warmup_type %r; rates rise as a logarithm ('log')"
                logger.warning(said, self.warmup_type)
                vars(self)["warmup_type"] = "log"
        self._last_lr: list[Any] = [group["lr"] for group in groups]
        self.org_lrs = [
            rate.clone() if isinstance(rate, torch.Tensor) else rate for rate in self._last_lr
        ]
        self._begin()
        if self.last_batch_iteration == -1:
            self._set_rates(self.get_lr())

    def _begin(self) -> None:
        """Derives from the arguments what stays the same. Raises ValueError as the constructor."""

    def get_lr(self) -> list[Any]:
        """The learning rate of each param group at the iteration that was begun last."""
        share, pairs = self._share(), zip(self.min_lrs, self.max_lrs, strict=True)
        return [least + (most - least) * share for least, most in pairs]

    def _share(self) -> float:
        """Where between the least and the largest rates these are, from 0 to 1."""
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

    def _of_groups(self, value: Any) -> list[Any]:
        """One value for each param group."""
        groups = len(self.optimizer.param_groups)
        return list(value) if isinstance(value, (list, tuple)) else [value] * groups

    def _warm(self) -> float:
        """The share of a warm-up that is over, from 0 to 1."""
        iteration, steps = self.last_batch_iteration, self.warmup_num_steps
        if iteration < 0 or iteration >= steps:
            return float(iteration >= 0)
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
    arguments=lambda optimizer, lr_range_test_min_lr=1e-3, lr_range_test_step_size=2000,
    lr_range_test_step_rate=1.0, lr_range_test_staircase=False, last_batch_iteration=-1: None,
):  # fmt: skip
    """Rates that rise from their least, to find the largest one that trains (Smith, 2018).

    In each step_size steps they rise by step_rate times the first rate; with `staircase` at the end
    of these steps, not in each.
    """

    def get_lr(self) -> list[Any]:
        passed = (self.last_batch_iteration + 1) / self.lr_range_test_step_size
        whole = math.floor(passed) if self.lr_range_test_staircase else passed
        factor = 1 + self.lr_range_test_step_rate * whole
        return [least * factor for least in self._of_groups(self.lr_range_test_min_lr)]


class WarmupLR(
    RateSchedule,
    arguments=lambda optimizer, warmup_min_lr=0.0, warmup_max_lr=None, warmup_num_steps=1000,
    warmup_type="log", last_batch_iteration=-1: None,
):  # fmt: skip
    """Rates that rise from warmup_min_lr to warmup_max_lr, by default each group's own, and stay.

    `warmup_type` is "log" or "linear"; another one is taken for "log", with a warning.
    """

    def _begin(self) -> None:
        most = self.org_lrs if self.warmup_max_lr is None else self.warmup_max_lr
        self.min_lrs, self.max_lrs = self._of_groups(self.warmup_min_lr), self._of_groups(most)

    def _share(self) -> float:
        return self._warm()


class WarmupDecayLR(
    WarmupLR,
    arguments=lambda optimizer, total_num_steps, warmup_min_lr=0.0, warmup_max_lr=0.001,
    warmup_num_steps=1000, warmup_type="log", last_batch_iteration=-1: None,
):  # fmt: skip
    """WarmupLR, after which rates fall linearly to 0 at step total_num_steps."""

    def _share(self) -> float:
        if self.last_batch_iteration < self.warmup_num_steps:
            return self._warm()
        left: float = self.total_num_steps - self.last_batch_iteration
        return max(0.0, left / max(1.0, float(self.total_num_steps - self.warmup_num_steps)))


class WarmupCosineLR(
    RateSchedule,
    arguments=lambda optimizer, total_num_steps, warmup_min_ratio=0.0, warmup_num_steps=1000,
    cos_min_ratio=0.0001, warmup_type="log", last_batch_iteration=-1: None,
):  # fmt: skip
    """The optimizer's rates times a factor that rises from warmup_min_ratio to 1, and then falls.

    It falls as a half cosine, to cos_min_ratio at step total_num_steps.
    """

    def _begin(self) -> None:
        self.min_lrs, self.max_lrs = self._of_groups(0.0), self.org_lrs

    def _share(self) -> float:
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

    get_lr_ratio = _share  # as DeepSpeed names it


class OneCycle(
    RateSchedule,
    arguments=lambda optimizer, cycle_min_lr, cycle_max_lr, decay_lr_rate=0.0,
    cycle_first_step_size=2000, cycle_second_step_size=None, cycle_first_stair_count=0,
    cycle_second_stair_count=None, decay_step_size=0, cycle_momentum=True, cycle_min_mom=0.8,
    cycle_max_mom=0.9, decay_mom_rate=0.0, last_batch_iteration=-1: None,
):  # fmt: skip
    """Rates that rise and fall once, and then decay; momentum moves the other way (Smith, 2018).

    They rise in cycle_first_step_size steps, in so many stairs (0: in each step), and fall in the
    second's, which are as the first's by default. After the cycle rates are divided, and momentum
    (betas[0], where an optimizer has it) is multiplied, by 1 + the decay rate times the decay steps
    of decay_step_size steps each; 0: there is no decay.
    """

    def _begin(self) -> None:
        for name in ("step_size", "stair_count"):
            if getattr(self, f"cycle_second_{name}") is None:
                setattr(self, f"cycle_second_{name}", getattr(self, f"cycle_first_{name}"))
        first, second = self.cycle_first_step_size, self.cycle_second_step_size
        if first <= 0 or second < 0:
            raise ValueError(
                f"cycle_first_step_size must be above 0, and cycle_second_step_size 0 or more, not "
                f"{first} and {second}"
            )
        self.step_ratio = first / (first + second)
        self.min_lrs = self._of_groups(self.cycle_min_lr)
        self.max_lrs = self._of_groups(self.cycle_max_lr)
        self.cycle_momentum = bool(self.cycle_momentum and "betas" in self.optimizer.defaults)
        # Before the cycle rate and momentum are the least ones.
        if self.last_batch_iteration == -1 and self.cycle_momentum:
            least = self._of_groups(self.cycle_min_mom)
            self._set_betas([(first, _SECOND_BETA) for first in least])

    def _share(self) -> float:
        total = self.cycle_first_step_size + self.cycle_second_step_size
        left = (self.last_batch_iteration + 1) % total
        steps, stairs = self.cycle_first_step_size, self.cycle_first_stair_count
        if left > steps:
            steps, stairs = self.cycle_second_step_size, self.cycle_second_stair_count
            left = total - left
        # (The product first: it is exact, so no stair is missed by a rounding.)
        height: float = math.floor(left * stairs / steps) / stairs if stairs else left / steps
        return height

    def _decayed(self, rate: float) -> float | None:
        """The factor of a decay at this rate; None in the cycle."""
        after = self.last_batch_iteration + 1
        after -= self.cycle_first_step_size + self.cycle_second_step_size
        if after <= 0:
            return None
        return 1 + rate * (after / self.decay_step_size if self.decay_step_size else 0.0)

    def get_lr(self) -> list[Any]:
        decay = self._decayed(self.decay_lr_rate)
        if decay is not None:
            return [least / decay for least in self.min_lrs]
        return super().get_lr()

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Each group's betas at the iteration that was begun last; None if they do not change."""
        if not self.cycle_momentum:
            return None
        least, most = self._of_groups(self.cycle_min_mom), self._of_groups(self.cycle_max_mom)
        decay = self._decayed(self.decay_mom_rate)
        if decay is not None:
            return [(high * decay, _SECOND_BETA) for high in most]
        height, pairs = self._share(), zip(least, most, strict=True)
        return [(high - (high - low) * height, _SECOND_BETA) for low, high in pairs]

    def step(self, last_batch_iteration: int | None = None) -> None:
        super().step(last_batch_iteration)
        self._set_betas(self.get_mom() or [])

    def _set_betas(self, betas: Sequence[tuple[float, float]]) -> None:
        for group, pair in zip(self.optimizer.param_groups, betas, strict=False):
            group["betas"] = pair


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
