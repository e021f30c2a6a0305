"""hetero/stand_ins/grad_placeholder: .grad reads and changes the kept gradient, as torch's does."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import utils

import hetero
from hetero.stand_ins.grad_placeholder import GradPlaceholder
from tests.support.training.small_net import (
    SETTINGS,
    Net,
    Settings,
    assert_same,
    loss_of,
    managed,
    plain,
)

pytestmark = [
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.covering(1),
    pytest.mark.parametrize("settings", SETTINGS),
]


def scaled_out_of_place(grad: torch.Tensor) -> None:
    grad *= 0.5


# (tests/support/compatibility has more, each on a model of its own.)
CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    # Those that are kept as factors and bounds:
    "mul_ by a tensor": lambda g: g.mul_(torch.tensor(0.5)),
    "*=": scaled_out_of_place,
    "neg factor, then clamp": lambda g: g.mul_(-2).clamp_(-1e-3, 5e-4),
    "zero factor, then clamp": lambda g: g.mul_(0).clamp_(min=1e-3),
    "clamp_ one side": lambda g: g.clamp_(max=1e-3),
    "data.clamp_": lambda g: g.data.clamp_(-1e-3, 1e-3),
    "detach.mul_": lambda g: g.detach().mul_(0.25),
    "clamp_min_": lambda g: torch.clamp_min_(g, -1e-3),
    "foreach": lambda g: torch._foreach_div_([g, torch.ones(2)], 2.0),
    # All others:
    "copy_": lambda g: g.copy_(torch.ones(g.shape)),
    "fill_": lambda g: g.fill_(1.0),
    "nan_to_num_": lambda g: g.nan_to_num_(),
    "mul_ by a mask": lambda g: g.mul_(torch.arange(g.numel()).view(g.shape) % 2),
    "mul_ by itself": lambda g: g.mul_(g),
    "a view": lambda g: g.view(-1).mul_(2.0),
    "a view of a view": lambda g: g.data.view(-1)[0:1].zero_(),
    "one of several views": lambda g: g.view(1, -1).unbind(0)[0].neg_(),
    "foreach_mul_ by a list": lambda g: torch._foreach_mul_([g, torch.ones(2)], [2.0, 3.0]),
    "foreach_clamp_min_ of a view": lambda g: torch._foreach_clamp_min_([g.view(-1)], 2.0),
    "after clipping": lambda g: (g.mul_(0.5), g.add_(1.0)),
    "copy from another": lambda g: g.copy_(g.flip(0) if g.ndim else g),
}


def named(name: str) -> Callable[[str], str]:
    """A message that begins with the name."""
    return lambda message: f"{name}: {message}"


def test_changes(settings: Settings, tmp_path: Path) -> None:
    """Of two gradients, or one of them."""
    model, optimizer = managed(settings, tmp_path)
    expected, adam = plain()
    choices = itertools.cycle([("first.weight", "scale"), ("first.weight",), ("scale",)])
    for (name, change), params in zip(CHANGES.items(), choices, strict=False):
        for each, its in ((model, optimizer), (expected, adam)):
            its.zero_grad()
            loss_of(each).backward()
            for param in params:
                grad = each.get_parameter(param).grad
                change(grad)
                assert each.get_parameter(param).grad is grad
        grads = hetero.grads(model.parameters())
        for grad, param in zip(grads, expected.parameters(), strict=True):
            torch.testing.assert_close(grad, param.grad, rtol=1e-5, atol=1e-8, msg=named(name))
    optimizer.step()
    adam.step()
    assert_same(model, expected)
    optimizer.engine.close()


READS: dict[str, Callable[[torch.Tensor], object]] = {
    "norm(2)": lambda g: g.data.norm(2),
    "norm(inf)": lambda g: g.detach().norm(float("inf")),
    "torch.norm": lambda g: torch.norm(g, 2.0),
    "vector_norm": lambda g: torch.linalg.vector_norm(g, dtype=torch.float64),
    "vector_norm over all": lambda g: torch.linalg.vector_norm(g, dim=tuple(range(g.ndim))),
    "foreach": lambda g: torch._foreach_norm([g, torch.ones(2)]),
    "total": lambda g: utils.get_total_norm([torch.ones(3), g]),
    "+": lambda g: g + 1,
    "3-norms of several": lambda g: torch._foreach_norm([g, g], 3)[1],
    "norm along a dimension": lambda g: g.norm(dim=-1),
    "norm of a part": lambda g: g.view(-1)[1:].norm(),
    "view": lambda g: g.view(-1).clone(),
    "iterated": lambda g: sum(list(g)),
    "into another": lambda g: torch.ones(g.shape).add_(g).mul_(g),
    "deep copy": lambda g: copy.deepcopy([g, g])[1],
    "cat": lambda g: torch.cat([g.view(-1), torch.ones(1)]),
    "histogram": lambda g: torch.histc(g, 10),
}


def test_reads(settings: Settings, tmp_path: Path) -> None:
    model, optimizer = managed(settings, tmp_path)
    expected, _ = plain()
    for each in (model, expected):
        loss_of(each).backward()
    for name in ("first.weight", "scale"):
        grads = [each.get_parameter(name).grad for each in (model, expected)]
        for read, of in READS.items():
            found, wanted = map(of, grads)
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-8, msg=named(read))
            assert not isinstance(found, GradPlaceholder)
        assert str(grads[0]).split("e")[0] == str(grads[1]).split("e")[0]
    with pytest.raises(ValueError, match="read-only"):  # what is written there would be lost
        model.scale.grad.numpy()[...] = 1
    with pytest.raises(hetero.HeteroError, match="the gradient of scale has no address now"):
        model.scale.grad.data_ptr()
    held = model.first.weight.grad
    optimizer.zero_grad()
    for use in (lambda: held.norm(), lambda: held.mul_(2)):
        with pytest.raises(hetero.HeteroError, match=r"first\.weight was cleared"):
            use()
    optimizer.engine.close()


def test_a_gradient_that_was_cleared_is_not_the_next_one(
    settings: Settings, tmp_path: Path
) -> None:
    """Loops that compare the gradients of two losses keep those of the first over zero_grad()."""
    model, optimizer = managed(settings, tmp_path)
    weight = model.first.weight
    comes = [lambda: loss_of(model, 2).backward(), lambda: setattr(weight, "grad", weight.detach())]
    loss_of(model, 1).backward()
    for come in comes:
        held = weight.grad
        views = [held.data, held.view(-1)]
        loss_of(model, 1).backward()
        held.add_(1.0)
        assert weight.grad is held  # added to, and changed in place, it is the same one
        model.zero_grad()
        come()
        assert optimizer.engine.grad_norm([weight]) > 0
        for each in (held, *views):
            with pytest.raises(hetero.HeteroError, match=r"first\.weight was cleared"):
                each.clone()
        assert weight.grad.norm() > 0
    optimizer.engine.close()


def test_where_gradients_are_finite(settings: Settings, tmp_path: Path) -> None:
    model, optimizer = managed(settings, tmp_path)
    loss_of(model).backward()
    poisoned = torch.arange(64.0)
    poisoned[3], poisoned[5] = float("nan"), float("inf")
    model.last.bias.grad = poisoned.clone()
    hetero.grads(model.last.bias)  # takes it in
    for where in (torch.isnan, torch.isinf, torch.isfinite):
        assert torch.equal(where(model.last.bias.grad), where(poisoned))
        for good in (model.first.weight.grad, model.scale.grad):
            assert torch.equal(where(good), where(torch.zeros(good.shape)))
            assert torch.equal(getattr(good, where.__name__)(), where(good))
    optimizer.engine.close()


def test_moving_the_model_with_gradients_is_noticed(settings: Settings, tmp_path: Path) -> None:
    model, optimizer = managed(settings, tmp_path)
    loss_of(model).backward()
    model.to("cpu")  # moves nothing
    optimizer.step()
    with pytest.raises(hetero.HeteroError, match="cannot become"):
        model.double()
    optimizer.step()
    optimizer.engine.close()


ZEROING: dict[str, Callable[[Net, torch.optim.Optimizer], object]] = {
    "zero_": lambda m, o: [p.grad.zero_() for p in m.parameters() if p.grad is not None],
    "foreach": lambda m, o: torch._foreach_zero_(
        [p.grad for p in m.parameters() if p.grad is not None]
    ),
    "module": lambda m, o: m.zero_grad(set_to_none=False),
    "optimizer": lambda m, o: o.zero_grad(set_to_none=False),
    "none": lambda m, o: o.zero_grad(),
}


def test_zeroing(settings: Settings, tmp_path: Path) -> None:
    """Gradients are zero, and parameters that get no other are updated with zeros."""
    model, optimizer = managed(settings, tmp_path)
    expected, adam = plain()
    for number, zero in enumerate(ZEROING.values()):
        for each, its in ((model, optimizer), (expected, adam)):
            its.zero_grad()
            loss_of(each, number).backward()
            each.first.weight.grad[0] = float("nan")  # what is kept does not matter
            zero(each, its)
        if number % 2:
            found = hetero.grads(model.parameters())
            for grad, param in zip(found, expected.parameters(), strict=True):
                assert grad is None if param.grad is None else torch.equal(grad, param.grad)
        for each, its in ((model, optimizer), (expected, adam)):
            loss_of(each, number + 1).backward()  # more than one is added
            zero(each, its)
            (each.last.weight.sum() + 2 * each.scale.sum()).backward()
            its.step()
        assert_same(model, expected)
    optimizer.engine.close()


@pytest.mark.parametrize("foreach", [False, True])
def test_models_of_two_engines_and_of_none_are_clipped_together(
    foreach: bool, settings: Settings, tmp_path: Path
) -> None:
    (first, one), (second, two) = managed(settings, tmp_path), managed(settings, tmp_path)
    third, _ = plain()
    expected = [plain()[0] for _ in range(3)]
    norms = []
    for nets in ([first, second, third], expected):
        for seed, net in enumerate(nets):
            loss_of(net, seed).backward()
        params = [p for net in nets for p in net.parameters()]
        norms.append(utils.clip_grad_norm_(params, 0.1, foreach=foreach))
        utils.clip_grad_value_(params, 1e-3, foreach=foreach)
    torch.testing.assert_close(*norms, rtol=1e-5, atol=0)
    for net, its_expected in zip((first, second), expected, strict=False):
        for grad, param in zip(
            hetero.grads(net.parameters()), its_expected.parameters(), strict=True
        ):
            torch.testing.assert_close(grad, param.grad, rtol=1e-5, atol=1e-8)
    assert torch.equal(third.scale.grad, expected[2].scale.grad)
    one.engine.close()
    two.engine.close()


def test_reading_gradients(settings: Settings, tmp_path: Path) -> None:
    model, optimizer = managed(settings, tmp_path)
    expected, _ = plain()
    assert hetero.grads([]) == []
    assert hetero.grads(model.scale) == [None]
    loss_of(model).backward()
    loss_of(expected).backward()
    model.unused.bias.grad = torch.ones(8)
    for name in ("last.weight", "first.bias", "scale"):
        (found,) = hetero.grads(model.get_parameter(name))
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected.get_parameter(name).grad)
        found.zero_()  # a copy
    weight, none, one = hetero.grads([model.last.weight, model.unused.weight, model.unused.bias])
    assert weight.any()
    assert none is None
    assert torch.equal(one, torch.ones(8))
    optimizer.engine.close()


def test_gradients_are_read_unscaled(settings: Settings, tmp_path: Path) -> None:
    model, optimizer = managed(settings, tmp_path, "fp16", initial_loss_scale=1024.0)
    expected, _ = plain(torch.float16)
    optimizer.backward(loss_of(model))
    (loss_of(expected) * 1024).backward()
    for grad, param in zip(hetero.grads(model.parameters()), expected.parameters(), strict=True):
        assert grad is None if param.grad is None else torch.equal(grad, param.grad.float() / 1024)
    optimizer.engine.close()


def test_parameters_made_by_a_net_that_is_dropped_without_close_are_freed(
    settings: Settings, tmp_path: Path
) -> None:
    """nothing_left fails if a placeholder in .grad keeps its parameter alive."""
    model, _ = managed(settings, tmp_path)
    loss_of(model).backward()
    assert isinstance(model, Net)


def test_a_gradient_in_fp16_can_be_written_to(settings: Settings, tmp_path: Path) -> None:
    """By any operator, though torch takes no `.grad` in fp32, which it reads as, for fp16."""
    model, optimizer = managed(settings, tmp_path, "fp16", initial_loss_scale=1024.0)
    optimizer.backward(loss_of(model))
    grad = model.last.weight.grad
    assert grad is not None
    before = grad.clone()
    with torch.no_grad():
        grad.add_(1.0)
    assert model.last.weight.grad is grad
    assert torch.equal(grad.clone(), (before + 1.0).half().float())
    optimizer.step()
    optimizer.engine.close()
