"""hetero/stand_ins: whatever a call of torch is given of parameters, mixed in any way, it gets the
values, or is refused; never what stands where values are not in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies
from torch.nn import functional

from tests.support.operands.kinds import (
    KINDS,
    Combination,
    Operands,
    Subject,
    all_combinations,
    by_turns,
    combinations_of_pairs,
    subject,
)
from tests.support.operands.operators import MATRIX, Operator, operators
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


# Expressions


LEAVES = strategies.tuples(strategies.integers(0, 2), strategies.sampled_from(list(KINDS)))
JOINS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add,
    "matmul": lambda a, b: torch.matmul(a, b) / 16,
    "linear": lambda a, b: functional.linear(a, b, b[0]) / 16,
    "cat": lambda a, b: torch.cat([a[:16], b[16:]]),
    "where": lambda a, b: torch.where(a > 0.5, b, a.t()),
    "lerp": lambda a, b: torch.lerp(a, b, a[0]),
    "foreach": lambda a, b: torch._foreach_mul([a, b], [b, a])[1],
    "index": lambda a, b: a[b[:, 0].argsort()],
}
TREES = strategies.recursive(
    LEAVES,
    lambda part: strategies.tuples(strategies.sampled_from(list(JOINS)), part, part),
    max_leaves=6,
)


def value_of(tree: Any, found: Subject, model: Operands) -> torch.Tensor:
    """A tree's value: a leaf is a place and a kind, a join two trees."""
    if len(tree) == 2:
        place, kind = tree
        return KINDS[kind](*found.owners(model, place, MATRIX))
    join, left, right = tree
    return JOINS[join](value_of(left, found, model), value_of(right, found, model))


@pytest.fixture(scope="module")
def absent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    found = subject(tmp_path_factory.mktemp("absent"), **SETTINGS["absent"])
    yield found
    found.close()


@settings(max_examples=40, derandomize=True, deadline=None, database=None)
@given(tree=TREES, with_grad=strategies.booleans())
def test_expressions(tree: Any, with_grad: bool, absent: Subject) -> None:
    """Their values, and the gradient of what is no parameter."""
    with torch.set_grad_enabled(with_grad):
        values = []
        for model in (absent.model, absent.plain):
            x = torch.linspace(0, 1, 32).requires_grad_()
            value = value_of(tree, absent, model) * x
            slope = torch.autograd.grad(value.sum(), x)[0] if with_grad else None
            values.append([value.detach().clone(), slope])
    assert torch.equal(values[0][0], values[1][0])
    assert not with_grad or torch.equal(values[0][1], values[1][1])
