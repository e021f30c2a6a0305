"""A model's and an optimizer's state dicts: training goes on from them, in either order."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hetero
from tests.support.checkpoint.small_trainings import PLACES, RULES_AND_DTYPES, build, steps, whole
from tests.support.training.loops import same

pytestmark = pytest.mark.usefixtures("nothing_left")

OF_ONE_OPTIMIZER = [each for each in RULES_AND_DTYPES if each[0] != "muon"]


@pytest.mark.covering(1)
@pytest.mark.parametrize("place", ["cpu", "disk"])
@pytest.mark.parametrize(("rule", "dtype", "state_dtype"), OF_ONE_OPTIMIZER)
@pytest.mark.parametrize("model_first", [True, False])
def test_either_order_resumes_bit_for_bit(
    model_first: bool, rule: str, dtype: str, state_dtype: str, place: str, tmp_path: Path
) -> None:
    model, optimizer = build(PLACES[place], tmp_path, rule, dtype, state_dtype)
    steps(model, optimizer, range(3))
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    saved_optimizer = optimizer.state_dict()
    stored = whole(model, optimizer)
    steps(model, optimizer, range(3, 5))
    expected = whole(model, optimizer)
    optimizer.engine.close()

    other, other_optimizer = build(PLACES[place], tmp_path, rule, dtype, state_dtype, seed=7)
    steps(other, other_optimizer, range(9, 10))
    if model_first:
        other.load_state_dict(saved)
    other_optimizer.load_state_dict(saved_optimizer)
    if not model_first:
        other.load_state_dict(saved)
    assert same(whole(other, other_optimizer), stored)
    steps(other, other_optimizer, range(3, 5))
    assert same(whole(other, other_optimizer), expected)
    other_optimizer.engine.close()


@pytest.mark.parametrize(("place", "dtype"), [("cpu", "fp16"), ("disk", "bf16")])
def test_masters_stay_only_where_the_compute_dtype_says_the_same(
    place: str, dtype: str, tmp_path: Path
) -> None:
    """A value of fp32 is meant as it is, also where the master rounds to it."""
    model, optimizer = build(PLACES[place], tmp_path, dtype=dtype)
    steps(model, optimizer, range(2))
    weight = model.first.weight
    (before,) = hetero.masters([weight])
    rounded = model.state_dict()["first.weight"].clone()
    assert not torch.equal(before, rounded.float())

    loaded = rounded.clone()
    loaded[3] = 0.25
    model.load_state_dict({"first.weight": loaded}, strict=False)
    expected = before.clone()
    expected[3] = 0.25
    assert torch.equal(hetero.masters([weight])[0], expected)
    for value in (rounded.float(), before, before.double(), torch.zeros(64, 1).expand(64, 64)):
        model.load_state_dict({"first.weight": value}, strict=False)
        assert torch.equal(hetero.masters([weight])[0], value.float())
    optimizer.engine.close()


def test_what_is_refused_changes_nothing(tmp_path: Path) -> None:
    model, optimizer = build(PLACES["cpu"], tmp_path)
    before = hetero.masters(model.parameters())
    with pytest.raises(RuntimeError, match="expected torch.Tensor"):  # (as torch says it)
        model.load_state_dict({"first.weight": "text"}, strict=False)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**model.state_dict(), "first.weight": torch.ones(3, 3)})
    with pytest.raises(hetero.HeteroError, match="assign"):
        model.load_state_dict(model.state_dict(), assign=True)
    assert all(map(torch.equal, before, hetero.masters(model.parameters())))
    optimizer.engine.close()
