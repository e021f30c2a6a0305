"""hetero/compat.deepspeed.lr_schedules: each step's rate, by hand and beside torch's."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch

from hetero.compat.deepspeed.lr_schedules import SCHEDULES, make_schedule
from hetero.compat.deepspeed.options import Named


def made(name: str, groups: int = 1, **params: Any) -> Any:
    """A schedule of an optimizer with so many groups."""
    members = [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(groups)]
    return make_schedule(Named(name, params), torch.optim.AdamW(members, lr=0.5))


def rates(name: str, steps: int, **params: Any) -> list[float]:
    """The rate with which each of so many steps is made."""
    schedule, found = made(name, **params), []
    for _ in range(steps):
        found.append(schedule.optimizer.param_groups[0]["lr"])
        schedule.step()
        assert schedule.get_last_lr() == [schedule.optimizer.param_groups[0]["lr"]]
    return found


LINEAR: dict[str, Any] = {"warmup_num_steps": 4, "warmup_type": "linear"}
FROM_TO = {"warmup_min_lr": 0.1, "warmup_max_lr": 0.5}
RANGE = {
    "lr_range_test_min_lr": 0.1,
    "lr_range_test_step_size": 2,
    "lr_range_test_step_rate": 3.0,
}
CYCLE = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_first_step_size": 2}


@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [
        ("WarmupLR", {**LINEAR, **FROM_TO}, [0.1, 0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5]),
        (
            "WarmupLR",
            {**FROM_TO, "warmup_num_steps": 4},
            [0.1, *(0.1 + 0.4 * math.log(i) / math.log(4) for i in range(1, 5)), 0.5],
        ),
        ("WarmupLR", {"warmup_num_steps": 2}, [0, 0, 0.5, 0.5]),  # the optimizer's rate
        (
            "WarmupDecayLR",
            {**LINEAR, "total_num_steps": 8, "warmup_max_lr": 1.0},
            [0, 0, 0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0.0],
        ),
        (
            "WarmupCosineLR",
            {**LINEAR, "total_num_steps": 8, "cos_min_ratio": 0.2},
            [
                *(0, 0, 0.125, 0.25, 0.375),
                *(0.1 + 0.4 * (1 + math.cos(math.pi * k / 4)) / 2 for k in (1, 2, 3, 4, 4)),
            ],
        ),
        ("LRRangeTest", RANGE, [0.1 * (1 + 1.5 * k) for k in range(7)]),
        (
            "LRRangeTest",
            {**RANGE, "lr_range_test_staircase": True},
            [0.1 * (1 + 3 * (k // 2)) for k in range(7)],
        ),
        (
            "OneCycle",
            {
                "cycle_min_lr": 0.0,
                "cycle_max_lr": 1.0,
                "cycle_momentum": False,
                "cycle_first_step_size": 4,
                "cycle_first_stair_count": 2,
            },
            [0, 0, 0.5, 0.5, 1, 0.5, 0.5, 0, 0],
        ),
    ],
)
def test_rates(name: str, params: dict[str, Any], expected: list[float]) -> None:
    assert rates(name, len(expected), **params) == pytest.approx(expected)


def test_one_cycle_rises_falls_and_decays() -> None:
    decays = {"decay_lr_rate": 1.0, "decay_step_size": 2, "decay_mom_rate": 0.1}
    schedule = made("OneCycle", **CYCLE, cycle_second_step_size=4, **decays)
    lrs, moms = [], []
    for _ in range(10):
        (group,) = schedule.optimizer.param_groups
        lrs.append(group["lr"])
        moms.append(group["betas"][0])
        schedule.step()
    cycle = [0, 0.5, 1, 0.75, 0.5, 0.25, 0]
    decay = [0.5, 1.0, 1.5]
    assert lrs == pytest.approx([*(0.1 + 0.4 * h for h in cycle), *(0.1 / (1 + d) for d in decay)])
    assert moms[1:7] == pytest.approx([0.9 - 0.1 * h for h in cycle[1:]])
    assert moms[7:] == pytest.approx([0.9 * (1 + 0.1 * d) for d in decay])


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("WarmUpLR", {}, "there is no type 'WarmUpLR'; did you mean WarmupLR"),
        ("WarmupLR", {"warmup_steps": 3}, "scheduler: .*warmup_steps"),
        ("WarmupLR", {"warmup_num_steps": 0}, "of at least 1, not 0"),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, "of at least 1, not 0"),
        ("OneCycle", {**CYCLE, "cycle_first_step_size": 0}, "cycle_first_step_size must be above"),
        ("OneCycle", {**CYCLE, "cycle_max_mom": [0.8, 0.9]}, "cycle_max_mom has 2 values"),
        ("WarmupLR", {"warmup_min_lr": [1, 2]}, "has 2 values, and the optimizer has 1"),
    ],
)
def test_what_cannot_be_is_refused(name: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(name, **params)


def test_an_unknown_kind_of_warm_up_is_logarithmic(caplog: pytest.LogCaptureFixture) -> None:
    given = {"warmup_num_steps": 4}
    assert rates("WarmupLR", 6, warmup_type="cubic", **given) == rates("WarmupLR", 6, **given)
    assert "there is no warmup_type 'cubic'" in caplog.text
    assert made("WarmupLR", warmup_type="cubic").warmup_type == "log"


def test_a_cycles_ratio_of_steps() -> None:
    sizes = {"cycle_first_step_size": 30, "cycle_second_step_size": 10}
    assert made("OneCycle", **{**CYCLE, **sizes}).step_ratio == 0.75


def test_each_group_has_values_of_its_own() -> None:
    least = made("WarmupLR", 2, warmup_min_lr=[0.1, 0.2], warmup_num_steps=2)
    assert [group["lr"] for group in least.optimizer.param_groups] == [0.1, 0.2]
    optimizer = least.optimizer
    optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = 0.5, 0.25
    warm = make_schedule(Named("WarmupLR", {"warmup_num_steps": 2}), optimizer)
    warm.step(5)
    assert warm.get_last_lr() == warm.max_lrs == [0.5, 0.25]
    params = {"cycle_min_lr": [0.1, 0.2], "cycle_max_lr": [1.0, 2.0], "cycle_min_mom": [0.5, 0.6]}
    cycle = make_schedule(Named("OneCycle", {**params, "cycle_first_step_size": 4}), optimizer)
    assert [group["betas"] for group in optimizer.param_groups] == [(0.5, 0.99), (0.6, 0.99)]
    for _ in range(4):
        cycle.step()
    assert cycle.get_last_lr() == cycle.max_lrs == [1.0, 2.0]
    assert cycle.min_lrs == [0.1, 0.2]
    assert cycle.get_mom() == [(0.5, 0.99), (0.6, 0.99)]


NEEDED: dict[str, dict[str, Any]] = {
    "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_momentum": False},
    "WarmupDecayLR": {"total_num_steps": 8},
    "WarmupCosineLR": {"total_num_steps": 8},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_rate_that_is_a_tensor_stays_that_tensor(name: str) -> None:
    params = NEEDED.get(name, {})
    rate = torch.tensor(0.5, dtype=torch.float64)
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    schedule, same = make_schedule(Named(name, params), sgd), made(name, **params)
    for _ in range(3):
        schedule.step()
        same.step()
        assert sgd.param_groups[0]["lr"] is rate
        assert rate.item() == pytest.approx(same.get_last_lr()[0])


def test_stairs_have_no_rounding() -> None:
    """One stair a step is no stair at all, also at the peak of a cycle of unequal halves."""
    given: dict[str, Any] = {"cycle_min_lr": 0.001, "cycle_max_lr": 0.01}
    given |= {"cycle_first_step_size": 10, "cycle_second_step_size": 21}
    stairs = rates("OneCycle", 32, **given, cycle_first_stair_count=10, cycle_second_stair_count=21)
    assert stairs == pytest.approx(rates("OneCycle", 32, **given))
    assert max(stairs) == pytest.approx(0.01)


@pytest.mark.parametrize("name", SCHEDULES)
def test_arguments_are_attributes(name: str) -> None:
    found = inspect.signature(SCHEDULES[name])
    given = {p.name: 0.5 for p in found.parameters.values() if p.default is p.empty}
    del given["optimizer"]
    schedule = made(name, **given)
    assert schedule.last_batch_iteration == -1
    for argument in given:
        assert getattr(schedule, argument) == 0.5
    with pytest.raises(AttributeError, match=f"'{name}' object has no attribute 'warmup'"):
        _ = schedule.warmup
    with pytest.raises(TypeError, match=rf"{name}\(\): missing a required argument: 'optimizer'"):
        SCHEDULES[name]()
