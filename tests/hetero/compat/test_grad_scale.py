"""hetero/compat/grad_scale: how scales of losses change, and what a step makes of overflows."""

from __future__ import annotations

import pytest
import torch

import hetero
from hetero.compat.grad_scale import GradScale, ScalePolicy
from offload.errors import NonFiniteError


def scales(policy: ScalePolicy, overflows: str) -> list[float]:
    """The scale after each step; "x" overflows."""
    scale = GradScale(policy)
    found = []
    for step in overflows:
        scale.update(step == "x")
        found.append(scale.value)
    return found


def test_without_a_policy_nothing_is_scaled() -> None:
    scale = GradScale(None)
    loss = torch.ones(())
    scale.update(True)
    assert scale.value == 1.0
    assert scale.scaled(loss) is loss


def test_the_scale_grows_after_an_interval_and_is_limited() -> None:
    policy = ScalePolicy(8.0, growth_interval=2, most=16.0)
    assert scales(policy, "......") == [8, 16, 16, 16, 16, 16]


def test_it_may_grow_one_step_late() -> None:
    """As DeepSpeed counts: steps since the last overflow, without this one."""
    policy = ScalePolicy(8.0, growth_interval=2, grows_late=True)
    assert scales(policy, ".....x...") == [8, 8, 16, 16, 32, 16, 16, 16, 32]


def test_hysteresis_is_filled_again_by_growth_only() -> None:
    policy = ScalePolicy(8.0, growth_interval=3, hysteresis=2)
    assert scales(policy, "x.x.x...x") == [8, 8, 4, 4, 2, 2, 2, 4, 4]


def test_hysteresis_is_filled_again_by_each_good_step() -> None:
    policy = ScalePolicy(8.0, growth_interval=100, hysteresis=2, refills_hysteresis=True)
    assert scales(policy, "x.x.xxx") == [8, 8, 8, 8, 8, 4, 2]


def test_a_scale_that_cannot_become_smaller_is_an_error() -> None:
    with pytest.raises(NonFiniteError, match="down to 4"):
        scales(ScalePolicy(8.0, least=4.0), "xx")


def test_a_fixed_scale_stays() -> None:
    assert scales(ScalePolicy.fixed(128.0), "x" * 5 + "." * 2000) == [128.0] * 2005


def test_a_state_goes_on() -> None:
    policy = ScalePolicy(8.0, growth_interval=2, hysteresis=2)
    first, second = GradScale(policy), GradScale(policy)
    for overflow in (True, False):
        first.update(overflow)
    second.load_state_dict(first.state_dict())
    for overflow in (True, False, False):
        first.update(overflow)
        second.update(overflow)
        assert first.value == second.value


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"initial": 0.5}, "from the least, 1.0"),
        ({"growth_factor": 0.5}, "growth_factor must be 1 or more"),
        ({"backoff_factor": 2.0}, "backoff_factor from 0 to 1"),
        ({"growth_interval": 0}, "must be 1 or more"),
        ({"hysteresis": 0}, "must be 1 or more"),
    ],
)
def test_policies_that_cannot_be(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScalePolicy(**options)


def test_gradients_are_divided_and_overflows_found() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    model, optimizer = hetero.initialize(
        model, hetero.HybridAdam(model.parameters()), dtype="fp16", initial_loss_scale=None
    )
    scale = GradScale(ScalePolicy(1024.0))
    x = torch.ones(2, 4)
    optimizer.engine.backward(scale.scaled(model(x).float().sum()))
    assert not scale.unscale(optimizer.engine, model.parameters())
    (weight, bias) = hetero.grads(model.parameters())
    assert torch.equal(weight, torch.full((4, 4), 2.0))
    assert torch.equal(bias, torch.full((4,), 2.0))
    optimizer.zero_grad()
    optimizer.engine.backward(scale.scaled(model(x).float().sum()) * 1e9)
    assert scale.unscale(optimizer.engine, model.parameters())
