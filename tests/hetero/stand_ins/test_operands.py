"""hetero/stand_ins: whatever a call of torch is given of parameters, mixed in any way, it gets the
values, or is refused; never what stands where values are not in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.operands.kinds import (
    Combination,
    Subject,
    all_combinations,
    by_turns,
    combinations_of_pairs,
    subject,
)
from tests.support.operands.operators import Operator, operators
from tests.support.ranks.processes import RankPool
from tests.support.training.small_net import assert_nothing_is_used

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
Cases = Iterable[tuple[Operator, Iterable[Combination]]]
SETTINGS: dict[str, dict[str, Any]] = {
    "absent": {"placement_policy": "nvme", "host_memory": "180KiB"},
    "present": {"placement_policy": "cpu"},
}


def wrong_ones(found: Subject, cases: Cases, counts: Counter[str]) -> list[str]:
    """The cases that are wrong; counts those that are right, and those that are refused."""
    wrong = []
    for operator, combinations in cases:
        for kinds in combinations:
            for with_grad in (False, True):
                text = found.compare(operator, kinds, with_grad)
                refused = text.startswith("refused")
                counts["refused" if refused else "wrong" if text else "right"] += 1
                if text and not refused:
                    grad = "with" if with_grad else "without"
                    wrong.append(f"{operator.name} of {kinds} {grad} grad {text[:300]}")
    return wrong


def check(found: Subject, cases: Cases) -> None:
    """All cases are right, and few are refused."""
    counts: Counter[str] = Counter()
    wrong = wrong_ones(found, cases, counts)
    print(counts)
    assert not wrong, "\n".join(wrong)
    assert counts["refused"] <= 0.02 * counts["right"], counts
    assert_nothing_is_used(found.optimizer)
    found.close()


@pytest.mark.parametrize("where", SETTINGS)
def test_a_selection(where: str, tmp_path: Path) -> None:
    check(subject(tmp_path, **SETTINGS[where]), by_turns(operators(every=8), each=2))


@pytest.mark.extra
@pytest.mark.parametrize("where", SETTINGS)
@pytest.mark.parametrize("tensors", [2, 3])
def test_all_operators(tensors: int, where: str, tmp_path: Path) -> None:
    """All kinds in both places of two, and each two kinds in each two places of three."""
    combinations = all_combinations if tensors == 2 else combinations_of_pairs
    table = [each for each in operators() if len(each.shapes) == tensors]
    check(subject(tmp_path, **SETTINGS[where]), ((each, combinations(each)) for each in table))


# Two ranks: each has a half of all values, and only reads.


def of_ranks(rank: int, world: int, path: str, every: int, each: int) -> tuple[list[str], int]:
    torch.manual_seed(0)
    found = subject(Path(path), placement_policy="nvme", host_memory="280KiB", zero_stage=3)
    table = [operator for operator in operators(every) if not operator.writes]
    counts: Counter[str] = Counter()
    wrong = wrong_ones(found, by_turns(table, each), counts)
    found.optimizer.engine.close()
    return wrong, counts["right"]


@pytest.mark.parametrize(("every", "each"), [(40, 1), pytest.param(1, 8, marks=pytest.mark.extra)])
def test_two_ranks(every: int, each: int, ranks2: RankPool, tmp_path: Path) -> None:
    for wrong, right in ranks2.run(of_ranks, str(tmp_path), every, each):
        print(right)
        assert not wrong, "\n".join(wrong)
        assert right > 60
