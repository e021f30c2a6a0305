"""optimizer.load_state_dict(): torch's own states are taken in, absurd ones refused by name."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import hetero
from tests.support.training.small_net import Net, assert_same, loss_of

pytestmark = pytest.mark.usefixtures("nothing_left")

HYBRID: dict[str, Callable[..., hetero.HybridOptimizer]] = {
    "AdamW": hetero.HybridAdam,
    "Adam": hetero.HybridAdam,
    "Adagrad": hetero.HybridAdagrad,
    "SGD": hetero.HybridSGD,
}


def managed(
    make: Callable[..., hetero.HybridOptimizer] = hetero.HybridAdam,
    dtype: str = "fp32",
    seed: int = 0,
    **options: Any,
) -> tuple[Net, hetero.HybridOptimizer]:
    torch.manual_seed(seed)
    model = Net()
    optimizer = make(model.parameters(), **options)
    return hetero.initialize(model, optimizer, placement_policy="cpu", dtype=dtype)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    loss_of(model, seed).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("name", HYBRID)
def test_training_goes_on_from_torchs_state(name: str) -> None:
    torch.manual_seed(0)
    plain = Net()
    options: dict[str, Any] = {"momentum": 0.9, "dampening": 0.5} if name == "SGD" else {}
    theirs = getattr(torch.optim, name)(plain.parameters(), lr=3e-3, weight_decay=0.1, **options)
    for seed in range(5):
        step(plain, theirs, seed)
    own = {"bias_correction": True} if HYBRID[name] is hetero.HybridAdam else options
    model, optimizer = managed(HYBRID[name], seed=7, **own)
    step(model, optimizer, 9)
    model.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(theirs.state_dict())
    group = optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (3e-3, 0.1)
    assert set(group) == {*optimizer.defaults, "params"} - {"differentiable"}
    assert group.get("adamw_mode", True) == (name != "Adam")
    for seed in range(5, 10):
        step(model, optimizer, seed)
        step(plain, theirs, seed)
    assert_same(model, plain)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.engine.close()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_torchs_state_leaves_masters_as_they_are(dtype: str) -> None:
    torch.manual_seed(0)
    plain = Net()
    theirs = torch.optim.AdamW(plain.parameters())
    step(plain, theirs, 0)
    model, optimizer = managed(dtype=dtype, adamw_mode=False, bias_correction=False)
    model.load_state_dict(plain.state_dict())
    old = theirs.state_dict()
    old["param_groups"][0].pop("decoupled_weight_decay", None)  # as torch's was before 2.7
    optimizer.load_state_dict(old)
    assert_same(model, plain)
    assert all(map(torch.equal, hetero.masters(model.parameters()), plain.parameters()))
    found = optimizer.state_dict()["state"]
    for index, state in old["state"].items():
        assert all(torch.equal(found[index][key], value) for key, value in state.items())
    group = optimizer.param_groups[0]
    assert (group["adamw_mode"], group["bias_correction"]) == (False, False)
    optimizer.engine.close()


def test_a_parameter_without_a_state_begins_anew() -> None:
    """So a loop goes back to the state of a fresh optimizer of torch's, which is empty."""
    torch.manual_seed(0)
    plain = Net()
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.0)
    empty = theirs.state_dict()
    step(plain, theirs, 1)
    some = theirs.state_dict()
    some["state"] = dict(list(some["state"].items())[:1])
    model, optimizer = managed(lr=1e-3)
    step(model, optimizer, 1)
    for loaded in (some, empty):
        for each, its in ((model, optimizer), (plain, theirs)):
            step(each, its, 2)
            its.load_state_dict(copy.deepcopy(loaded))
            step(each, its, 3)
    assert_same(model, plain)
    optimizer.engine.close()


def test_masters_that_went_through_torch_are_older_than_what_it_trained() -> None:
    model, optimizer = managed()
    step(model, optimizer, 0)
    plain = Net()
    theirs = torch.optim.AdamW(plain.parameters())
    plain.load_state_dict(model.state_dict())
    theirs.load_state_dict(optimizer.state_dict())
    step(plain, theirs, 1)
    assert "master" in theirs.state_dict()["state"][0]
    model.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(theirs.state_dict())
    assert all(map(torch.equal, hetero.masters(model.parameters()), plain.parameters()))
    optimizer.engine.close()


@pytest.mark.parametrize("option", ["amsgrad", "maximize"])
def test_what_no_rule_has_is_refused(option: str) -> None:
    torch.manual_seed(0)
    plain = Net()
    theirs = torch.optim.AdamW(plain.parameters(), **{option: True})
    step(plain, theirs, 0)
    _, optimizer = managed()
    with pytest.raises(ValueError, match=rf"in param group 0 of the state {option}=True"):
        optimizer.load_state_dict(theirs.state_dict())
    optimizer.engine.close()


@pytest.fixture(scope="module")
def trained() -> Iterator[tuple[Net, hetero.HybridOptimizer]]:
    model, optimizer = managed(dtype="bf16")
    step(model, optimizer, 0)
    yield model, optimizer
    optimizer.engine.close()


def at(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """The tensor with `value` in one place."""

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        found = tensor.clone()
        found.view(-1)[-1] = value
        return found

    return changed


NO_STEP = r"of first\.weight has step .*must be a whole number, 0 or more and at most 2\*\*53"
NOT_FINITE = r"with the value .*(nan|inf|e\+39).*, must be finite and in the range of fp32"
REFUSED = [
    *(
        ("step", lambda _, step=step: step, NO_STEP)
        for step in (1e20, -1.0, 0.5, math.nan, math.inf, "3", None, True, 2**53 + 2, 10**400)
    ),
    *(
        ("step", lambda _, step=step: step, NO_STEP)
        for step in (torch.ones(2), torch.tensor(True), torch.tensor(1e20), torch.tensor(1j))
    ),
    *(
        (key, at(value), rf"of first\.weight has {key} {NOT_FINITE}")
        for key in ("exp_avg", "exp_avg_sq", "master")
        for value in (math.nan, math.inf, -math.inf)
    ),
    ("exp_avg", lambda t: at(1e39)(t.double()), NOT_FINITE),
    ("exp_avg_sq", at(-1.0), r"has exp_avg_sq with the value -1\.0, must be 0 or more"),
    ("exp_avg", lambda _: "text", r"has exp_avg 'text', must be a tensor"),
    ("exp_avg", lambda t: t[:2], r"has exp_avg of shape \(2, 64\), and the parameter has"),
    ("master", lambda _: None, r"has master None, must be a tensor"),
    ("exp_avg", lambda t: t.int(), r"has exp_avg of torch\.int32, must be of fp32"),
    ("exp_avg", lambda t: t > 0, r"has exp_avg of torch\.bool, must be of fp32"),
    ("master", lambda t: t.to(torch.complex64), r"has master of torch\.complex64, must be of"),
]


@pytest.mark.parametrize(("key", "change", "message"), REFUSED)
def test_absurd_states_are_refused_and_nothing_is_changed(
    trained: tuple[Net, Any], key: str, change: Callable[[Any], Any], message: str
) -> None:
    model, optimizer = trained
    state, names = optimizer.state_dict(), [name for name, _ in model.named_parameters()]
    refuse(optimizer, state, names.index("first.weight"), key, change, message)
    again = optimizer.state_dict()
    assert again["param_groups"] == state["param_groups"]
    for index, found in again["state"].items():
        assert all(torch.equal(found[k], value) for k, value in state["state"][index].items())


def refuse(
    optimizer: hetero.HybridOptimizer,
    state: dict[str, Any],
    index: int,
    key: str,
    change: Callable[[Any], Any],
    message: str,
) -> None:
    """Loads `state` with one value, and all options, changed."""
    one = state["state"][index]
    bad = {**state["state"], index: {**one, key: change(one[key])}}
    groups = [{**group, "lr": 0.5} for group in state["param_groups"]]
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict({"state": bad, "param_groups": groups})


def test_a_negative_sum_is_refused() -> None:
    _, optimizer = managed(hetero.HybridAdagrad)
    refuse(optimizer, optimizer.state_dict(), 2, "sum", at(-1.0), r"sum with the value -1\.0")
    optimizer.engine.close()


@pytest.mark.parametrize("index", [-1, 99, "first.weight"])
def test_a_state_of_no_parameter_is_refused(trained: tuple[Net, Any], index: object) -> None:
    _, optimizer = trained
    state = optimizer.state_dict()
    state["state"] = {index: state["state"][0]}
    with pytest.raises(ValueError, match=rf"one of parameter {index!r}, and this optimizer has 7"):
        optimizer.load_state_dict(state)
    state["state"] = {0: None}
    with pytest.raises(ValueError, match=r"the state of .* is None, must be a dict with step"):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("lr", 1e39),
        ("lr", torch.tensor(1e39, dtype=torch.float64)),
        ("lr", torch.ones(2)),
        ("lr", 10**400),
        ("eps", 1e39),
        ("weight_decay", 1e300),
        ("betas", (0.9, math.nan)),
    ],
)
def test_options_beyond_fp32_are_refused_everywhere(option: str, value: object) -> None:
    message = rf"{option} must be "
    new = [nn.Parameter(torch.ones(3))]
    with pytest.raises(ValueError, match=message):
        hetero.HybridAdam(new, **{option: value})
    model, optimizer = managed()
    state = optimizer.state_dict()
    before = hetero.masters(model.parameters())
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": new, option: value})
    group = state["param_groups"][0]
    with pytest.raises(ValueError, match=rf"in param group 0 of the state {message}"):
        optimizer.load_state_dict({**state, "param_groups": [{**group, option: value}]})
    good = optimizer.param_groups[0][option]
    optimizer.param_groups[0][option] = value
    loss_of(model).backward()
    with pytest.raises(ValueError, match=rf"in param group 0 {message}"):
        optimizer.step()
    assert all(map(torch.equal, before, hetero.masters(model.parameters())))
    optimizer.param_groups[0][option] = good
    optimizer.step()
    assert not any(master.isnan().any() for master in hetero.masters(model.parameters()))
    optimizer.engine.close()


def test_the_largest_options_are_taken() -> None:
    hetero.HybridAdam([nn.Parameter(torch.ones(3))], lr=torch.finfo(torch.float32).max)
