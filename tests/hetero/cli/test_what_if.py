"""hetero/cli/what_if: other budgets and disks are planned and predicted as the given ones."""

from __future__ import annotations

from collections import Counter, defaultdict

from hetero.cli.what_if import (
    DEVICE,
    NVME_RATE,
    RAM,
    explain_cases,
    other_budgets,
    other_disks,
)
from hetero.planning.placement import PlacementError
from hetero.planning.step_cost import PhaseCost, StepCost
from offload.profile.machine_profile import Profile
from tests.support.training.planning import make_profile

MIB = 1 << 20


def step(seconds: float) -> StepCost:
    busy_s = defaultdict(float, {"NVMe": seconds})
    return StepCost((PhaseCost("forward", seconds, busy_s, Counter(nvme_read=int(seconds * MIB))),))


def step_with(host: int, device: int | None) -> StepCost:
    """Nothing fits less than 10 MiB of RAM; each MiB of any budget saves a tenth of a second."""
    if host < 10 * MIB:
        raise PlacementError("too small", 10 * MIB)
    return step(40 - (host + (device or 0)) / MIB / 10)


def test_budgets_go_from_the_least_to_all_state_and_have_the_given_one() -> None:
    cases = other_budgets(
        step_with, (50 * MIB, None), {"host": 10 * MIB, "device": None}, 200 * MIB
    )
    values = [case.value for case in cases]
    assert {case.of for case in cases} == {RAM}
    assert values == sorted(set(values))
    assert (values[0], values[-1]) == (10 * MIB, int(220 * MIB))
    (given,) = (case for case in cases if case.is_given)
    assert given.value == 50 * MIB
    assert all(c.step == step_with(int(c.value), None) for c in cases), "each by itself"


def test_a_given_budget_that_is_more_than_all_state_is_there_too() -> None:
    cases = other_budgets(step_with, (300 * MIB, None), {"host": 10 * MIB, "device": None}, MIB)
    assert cases[-1].is_given
    assert cases[-1].value == 300 * MIB


def test_with_a_device_one_budget_changes_at_a_time() -> None:
    least = {"host": 10 * MIB, "device": 2 * MIB}
    cases = other_budgets(step_with, (50 * MIB, 30 * MIB), least, 100 * MIB)
    for case in cases:
        host, device = (50 * MIB, 30 * MIB)
        wanted = (int(case.value), device) if case.of == RAM else (host, int(case.value))
        assert case.step == step_with(*wanted)
    assert [case.of for case in cases if case.is_given] == [RAM, DEVICE]
    assert min(case.value for case in cases if case.of == DEVICE) == 2 * MIB


def test_what_does_not_fit_is_said_and_not_left_out() -> None:
    cases = other_budgets(step_with, (50 * MIB, None), {"host": MIB, "device": None}, 200 * MIB)
    assert cases[0].step is None
    assert cases[0].as_dict()["step_s"] is None
    text = explain_cases(cases)
    assert "nothing fits" in text
    assert "50.0 MiB of RAM" in text
    assert "given" in text


def test_another_disk_reads_and_writes_faster_alike() -> None:
    profile = make_profile(
        nvme_read_bytes_per_s=4e9, nvme_write_bytes_per_s=2e9, nvme_mixed_bytes_per_s=3e9
    )
    seen: list[Profile] = []

    def with_profile(other: Profile) -> StepCost:
        seen.append(other)
        return step(1.0)

    cases = other_disks(with_profile, profile)
    assert [case.value for case in cases] == [1e9, 2e9, 4e9, 8e9, 16e9]
    assert [case.is_given for case in cases] == [False, False, True, False, False]
    assert seen[2] == profile
    assert (seen[4].nvme_write_bytes_per_s, seen[4].nvme_mixed_bytes_per_s) == (8e9, 12e9)
    assert {case.of for case in cases} == {NVME_RATE}
