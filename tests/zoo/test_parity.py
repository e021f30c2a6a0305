"""Every model of the zoo trains with hetero as with plain PyTorch, to the last bit.

The oracle's forward and backward are plain PyTorch's; its update is the one that hetero documents
(tests/support/native/update_oracle.py), because another order of rounding would leave nothing to
compare exactly. tests/whole/test_against_torch.py shows that torch's AdamW is the same formula.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from offload.memory.tiers import Tier
from tests.zoo.case import Case
from tests.zoo.rank_runs import CASES
from tests.zoo.runs import (
    Run,
    assert_same_bits,
    least_device_memory,
    least_host_memory,
    run_hetero,
    run_plain,
)

POLICIES = ("nvme", "cpu", "auto")
pytestmark = [
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*checkpointing.*is deprecated:FutureWarning:transformers"),
]


def matrix() -> list[Any]:
    """Case x policy x dtype x accumulation; per case two are run always, the rest is extra."""
    rows = []
    for number, case in enumerate(CASES.values()):
        # The nth case of three takes the nth of these, so that all pairs occur over the cases.
        turn = (
            ("cpu", "auto")[number % 2],
            ("fp32", "bf16")[number // 2 % 2],
            (1, 2)[number % 3 > 0],
        )
        on_disk = (
            ("nvme", "fp32", 2) if number % 2 or "bf16" not in case.dtypes else ("nvme", "bf16", 1)
        )
        always = {on_disk, turn}
        for policy in POLICIES:
            for dtype in case.dtypes:
                for accumulate in (1, 2):
                    chosen = (policy, dtype, accumulate) in always
                    marks = () if chosen else pytest.mark.extra
                    name = f"{case.name}-{policy}-{dtype}-{accumulate}"
                    rows.append(pytest.param(case, policy, dtype, accumulate, id=name, marks=marks))
    return rows


@functools.cache
def expected(name: str, dtype: str, accumulate: int) -> Run:
    """The oracle's run."""
    return run_plain(CASES[name], dtype, accumulate)


def settings_of(case: Case, policy: str, dtype: str, nvme_path: str) -> dict[str, Any]:
    """Budgets: "nvme" gets the least that works, "auto" half of the state besides."""
    if policy == "cpu":
        return {"placement_policy": "cpu"}
    settings = {"placement_policy": policy, "nvme_path": nvme_path}
    settings["host_memory"] = least_host_memory(case, dtype, nvme_path)
    if policy == "auto":
        # Bytes an element: of the parameter, and of its gradient and optimizer state if it is
        # trained.
        frozen, trained = {"fp32": (4, 20), "bf16": (2, 14)}[dtype]
        state_bytes = sum(
            p.numel() * (trained if p.requires_grad else frozen) for p in case.make().parameters()
        )
        settings["host_memory"] += state_bytes // 2
    return settings


@pytest.mark.parametrize(("case", "policy", "dtype", "accumulate"), matrix())
def test_same_bits_as_plain_torch(
    case: Case, policy: str, dtype: str, accumulate: int, tmp_path: Path, nothing_left: None
) -> None:
    plain = expected(case.name, dtype, accumulate)
    settings = settings_of(case, policy, dtype, str(tmp_path))
    run = run_hetero(case, dtype, accumulate, settings)
    assert_same_bits(run, plain)
    placed = {
        "cpu": lambda p: {Tier.DISK} & {*p.param, *p.grad, *p.optim_state} == set(),
        "nvme": lambda p: p.param.count(Tier.DISK) > len(p.param) / 2,
        "auto": lambda p: Tier.DISK in (*p.param, *p.optim_state),
    }
    assert placed[policy](run.placement)


@pytest.mark.parametrize(
    ("case", "number"), [(case, n) for n, case in enumerate(CASES.values())], ids=CASES.keys()
)
def test_same_bits_on_the_smallest_device(
    case: Case, number: int, tmp_path: Path, nothing_left: None
) -> None:
    """With the least memory of an emulated device; by turns as in matrix()."""
    policy, dtype = (("cpu", "nvme")[number % 2], ("bf16", "fp32")[number // 2 % 2])
    accumulate = (1, 2)[number % 3 > 0]
    plain = expected(case.name, dtype, accumulate)
    settings = {**settings_of(case, policy, dtype, str(tmp_path)), "backend": "emulated"}
    if policy == "nvme":
        settings["host_memory"] *= 2  # also for what is on its way to the device
    settings["device_memory"] = least_device_memory(case, dtype, settings)
    run = run_hetero(case, dtype, accumulate, settings)
    assert_same_bits(run, plain)
    assert run.placement is not None
    assert Tier.DEVICE not in run.placement.param
