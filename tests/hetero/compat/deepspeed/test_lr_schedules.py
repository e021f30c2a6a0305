"""hetero/compat.deepspeed.lr_schedules: each step's rate, by hand and beside torch's."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hetero.compat.deepspeed.lr_schedules import SCHEDULES, make_schedule
from hetero.compat.deepspeed.options import Named


def optimizer(groups: int = 1) -> torch.optim.Optimizer:
    params = [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(groups)]
    return torch.optim.AdamW(params, lr=0.5)


def rates(name: str, steps: int, **params: object) -> list[float]:
    """The rate with which each of so many steps is made."""
    made = optimizer()
    schedule = make_schedule(Named(name, params), made)
    found = []
    for _ in range(steps):
        found.append(made.param_groups[0]["lr"])
        schedule.step()
        assert schedule.get_last_lr() == [made.param_groups[0]["lr"]]
    return found


def test_a_warm_up_is_linear_or_logarithmic() -> None:
    given = {"warmup_min_lr": 0.1, "warmup_max_lr": 0.5, "warmup_num_steps": 4}
    linear = rates("WarmupLR", 8, warmup_type="linear", **given)
    assert linear == pytest.approx([0.1, 0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5])
    logarithmic = rates("WarmupLR", 6, **given)
    expected = [0.1, *(0.1 + 0.4 * math.log(i) / math.log(4) for i in range(1, 5)), 0.5]
    assert logarithmic == pytest.approx(expected)


def test_a_warm_up_ends_at_the_optimizers_rate() -> None:
    assert rates("WarmupLR", 4, warmup_num_steps=2)[-1] == 0.5


def test_a_decay_ends_at_zero() -> None:
    found = rates(
        "WarmupDecayLR",
        10,
        total_num_steps=8,
        warmup_max_lr=1.0,
        warmup_num_steps=4,
        warmup_type="linear",
    )
    assert found == pytest.approx([0, 0, 0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0.0])


def test_a_cosine_falls_to_its_least() -> None:
    found = rates(
        "WarmupCosineLR",
        10,
        total_num_steps=8,
        warmup_num_steps=4,
        warmup_type="linear",
        cos_min_ratio=0.2,
    )
    warm = [0, 0, 0.25, 0.5, 0.75]
    falls = [0.2 + 0.8 * (1 + math.cos(math.pi * k / 4)) / 2 for k in (1, 2, 3, 4, 4)]
    assert found == pytest.approx([0.5 * factor for factor in (*warm, *falls)])


@pytest.mark.parametrize("staircase", [False, True])
def test_a_range_test_rises(staircase: bool) -> None:
    found = rates(
        "LRRangeTest",
        7,
        lr_range_test_min_lr=0.1,
        lr_range_test_step_size=2,
        lr_range_test_step_rate=3.0,
        lr_range_test_staircase=staircase,
    )
    rise: Callable[[float], float] = math.floor if staircase else float
    assert found == pytest.approx([0.1 * (1 + 3 * rise(k / 2)) for k in range(7)])


def test_one_cycle_rises_falls_and_decays() -> None:
    made = optimizer()
    schedule = make_schedule(
        Named(
            "OneCycle",
            {
                "cycle_min_lr": 0.1,
                "cycle_max_lr": 0.5,
                "cycle_first_step_size": 2,
                "cycle_second_step_size": 4,
                "decay_lr_rate": 1.0,
                "decay_step_size": 2,
                "decay_mom_rate": 0.1,
            },
        ),
        made,
    )
    lrs, moms = [], []
    for _ in range(10):
        lrs.append(made.param_groups[0]["lr"])
        moms.append(made.param_groups[0]["betas"][0])
        schedule.step()
    cycle = [0, 0.5, 1, 0.75, 0.5, 0.25, 0]
    decay = [0.5, 1.0, 1.5]
    assert lrs == pytest.approx([*(0.1 + 0.4 * h for h in cycle), *(0.1 / (1 + d) for d in decay)])
    assert moms[1:7] == pytest.approx([0.9 - 0.1 * h for h in cycle[1:]])
    assert moms[7:] == pytest.approx([0.9 * (1 + 0.1 * d) for d in decay])


def test_one_cycle_in_stairs_without_momentum() -> None:
    found = rates(
        "OneCycle",
        9,
        cycle_min_lr=0.0,
        cycle_max_lr=1.0,
        cycle_first_step_size=4,
        cycle_first_stair_count=2,
        cycle_momentum=False,
    )
    assert found == pytest.approx([0, 0, 0.5, 0.5, 1, 0.5, 0.5, 0, 0])


def test_each_param_group_may_have_its_own() -> None:
    made = optimizer(2)
    schedule = make_schedule(
        Named("WarmupLR", {"warmup_min_lr": [0.1, 0.2], "warmup_num_steps": 2}), made
    )
    assert [group["lr"] for group in made.param_groups] == [0.1, 0.2]
    schedule.step(5)
    assert schedule.get_last_lr() == [0.5, 0.5]


def test_a_state_goes_on() -> None:
    made = optimizer()
    schedule = make_schedule(Named("WarmupLR", {"warmup_num_steps": 10}), made)
    for _ in range(4):
        schedule.step()
    other = make_schedule(Named("WarmupLR", {"warmup_num_steps": 10, "warmup_max_lr": 0.5}), made)
    other.load_state_dict(schedule.state_dict())
    schedule.step()
    expected = schedule.get_last_lr()
    other.step()
    assert other.get_last_lr() == expected


def test_schedules_of_torchs_may_be_named() -> None:
    made = optimizer()
    schedule = make_schedule(Named("StepLR", {"step_size": 1, "gamma": 0.5}), made)
    made.step()
    schedule.step()
    assert made.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("WarmUpLR", {}, "there is no type 'WarmUpLR'; did you mean WarmupLR"),
        ("WarmupLR", {"warmup_steps": 3}, "scheduler: .*warmup_steps"),
        ("WarmupLR", {"warmup_num_steps": 0}, "of at least 1, not 0"),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, "of at least 1, not 0"),
        (
            "OneCycle",
            {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 0},
            "cycle_first_step_size must be above 0",
        ),
        (
            "OneCycle",
            {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_max_mom": [0.8, 0.9]},
            "cycle_max_mom has 2 values",
        ),
        ("WarmupLR", {"warmup_min_lr": [1, 2]}, "has 2 values, and the optimizer has 1"),
    ],
)
def test_what_cannot_be_is_refused(name: str, params: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_schedule(Named(name, params), optimizer())


def test_an_unknown_kind_of_warm_up_is_logarithmic(caplog: pytest.LogCaptureFixture) -> None:
    given = {"warmup_num_steps": 4}
    assert rates("WarmupLR", 6, warmup_type="cubic", **given) == rates("WarmupLR", 6, **given)
    assert "there is no warmup_type 'cubic'" in caplog.text
    schedule = make_schedule(Named("WarmupLR", {"warmup_type": "cubic"}), optimizer())
    assert schedule.warmup_type == "log"


def test_a_cycles_ratio_of_steps() -> None:
    sizes = {"cycle_first_step_size": 30, "cycle_second_step_size": 10}
    params = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, **sizes}
    assert make_schedule(Named("OneCycle", params), optimizer()).step_ratio == 0.75


def test_each_group_has_values_of_its_own() -> None:
    made = optimizer(2)
    made.param_groups[1]["lr"] = 0.25
    warm = make_schedule(Named("WarmupLR", {"warmup_num_steps": 2}), made)
    for _ in range(3):
        warm.step()
    assert warm.get_last_lr() == warm.max_lrs == [0.5, 0.25]
    cycle = make_schedule(
        Named(
            "OneCycle",
            {
                "cycle_min_lr": [0.1, 0.2],
                "cycle_max_lr": [1.0, 2.0],
                "cycle_min_mom": [0.5, 0.6],
                "cycle_first_step_size": 4,
            },
        ),
        made,
    )
    assert [group["betas"] for group in made.param_groups] == [(0.5, 0.99), (0.6, 0.99)]
    for _ in range(4):
        cycle.step()
    assert cycle.get_last_lr() == cycle.max_lrs == [1.0, 2.0]
    assert cycle.min_lrs == [0.1, 0.2]
    assert cycle.get_mom() == [(0.5, 0.99), (0.6, 0.99)]


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("LRRangeTest", {}),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_momentum": False}),
        ("WarmupLR", {}),
        ("WarmupDecayLR", {"total_num_steps": 8}),
        ("WarmupCosineLR", {"total_num_steps": 8}),
    ],
)
def test_a_rate_that_is_a_tensor_stays_that_tensor(name: str, params: dict[str, object]) -> None:
    rate = torch.tensor(0.5, dtype=torch.float64)
    made = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    same = make_schedule(Named(name, params), optimizer())
    schedule = make_schedule(Named(name, params), made)
    for _ in range(3):
        schedule.step()
        same.step()
        assert made.param_groups[0]["lr"] is rate
        assert rate.item() == pytest.approx(same.get_last_lr()[0])


def test_stairs_have_no_rounding() -> None:
    """One stair a step is no stair at all, also at the peak of a cycle of unequal halves."""
    given: dict[str, object] = {"cycle_min_lr": 0.001, "cycle_max_lr": 0.01}
    given |= {"cycle_first_step_size": 10, "cycle_second_step_size": 21}
    stairs = rates("OneCycle", 32, **given, cycle_first_stair_count=10, cycle_second_stair_count=21)
    assert stairs == pytest.approx(rates("OneCycle", 32, **given))
    assert max(stairs) == pytest.approx(0.01)


@pytest.mark.parametrize("name", SCHEDULES)
def test_arguments_are_attributes(name: str) -> None:
    found = inspect.signature(SCHEDULES[name])
    given = {p.name: 0.5 for p in found.parameters.values() if p.default is p.empty}
    given["optimizer"] = optimizer()
    made: Any = SCHEDULES[name](**given)
    assert made.last_batch_iteration == -1
    for argument in given.keys() - {"optimizer"}:
        assert getattr(made, argument) == 0.5
    with pytest.raises(AttributeError, match=f"'{name}' object has no attribute 'warmup'"):
        _ = made.warmup
    with pytest.raises(TypeError, match=rf"{name}\(\): missing a required argument: 'optimizer'"):
        SCHEDULES[name]()
