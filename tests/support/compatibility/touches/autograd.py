"""Graphs over parameters: losses of them, autograd's and torch.func's functions, checkpoints."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import checkpoint as checkpoints

from tests.support.compatibility.touch import Case, Net, Section

AUTOGRAD = Section("Graphs over parameters")


def penalty(name: str, of: Any) -> None:
    """A loss with a term of parameters outside of any forward, and a step on it."""

    def use(case: Case) -> None:
        (case.loss() + 0.1 * of(case)).backward()
        case.optimizer.step()

    AUTOGRAD.add(name, use)


penalty("L2 penalty: `sum(p.pow(2).sum())`", lambda c: sum(p.pow(2).sum() for p in c.params))
penalty(
    "`p @ q.t()` in a loss",
    lambda c: (c.model.first.weight @ c.model.last.weight.t()).square().mean(),
)
penalty("`p[0]`, `p.view(-1)`, `for row in p` in a loss", lambda c: views(c.model.last.weight))
penalty(
    "`F.linear(x, other.weight)` in a loss",
    lambda c: F.linear(c.inputs(), c.model.last.weight).mean(),
)
penalty("`p * p.detach()`, `(p - p.data)` in a loss", lambda c: with_detached(c.model))
penalty("`other(x)` of a submodule called directly", lambda c: c.model.last(c.inputs()).mean())


def views(weight: torch.Tensor) -> torch.Tensor:
    rows = sum(row.square().sum() for row in weight)
    return rows + weight[0].sum() + weight.view(-1).square().mean()


def with_detached(model: Net) -> torch.Tensor:
    weight = model.last.weight
    return (weight * weight.detach()).sum() + (model.first.weight - weight.data).square().mean()


@AUTOGRAD.touch("`torch.autograd.grad(loss, params)`")
def grad(case: Case) -> object:
    case.rank = None  # what it gives is this rank's
    model = case.model
    used = [model.scale, *model.first.parameters(), *model.last.parameters()]
    return torch.autograd.grad(case.loss(), used)


@AUTOGRAD.touch("`torch.autograd.grad(create_graph=True)`: a gradient penalty")
def gradient_penalty(case: Case) -> torch.Tensor:
    case.rank = None
    x = case.inputs().requires_grad_()
    (slope,) = torch.autograd.grad(case.model(x).float().sum(), x, create_graph=True)
    slope.square().mean().backward()
    kept = case.model.first.weight.grad.clone()
    case.optimizer.step()
    return kept


@AUTOGRAD.touch("`loss.backward(create_graph=True)`")
def create_graph(case: Case) -> None:
    case.loss().backward(create_graph=True)
    case.optimizer.step()
    for param in case.params:
        param.grad = None


@AUTOGRAD.touch("`loss.backward(retain_graph=True)`, then again")
def twice(case: Case) -> None:
    loss = case.loss()
    loss.backward(retain_graph=True)
    loss.backward()
    case.optimizer.step()


@AUTOGRAD.touch("`loss.backward()` twice without `retain_graph`")
def twice_without(case: Case) -> None:
    loss = case.loss()
    loss.backward()
    loss.backward()


@AUTOGRAD.touch("`y.backward(gradient=t)`")
def with_gradient(case: Case) -> None:
    y = case.model(case.inputs())
    y.backward(gradient=torch.full_like(y, 0.04 / len(y)))
    case.optimizer.step()


def _seeded(weight: torch.Tensor) -> object:
    x = torch.ones(64, 64, dtype=weight.dtype, requires_grad=True)
    (x * 2).backward(gradient=weight)
    return x.grad


AUTOGRAD.add("`y.backward(gradient=p)`", lambda c: _seeded(c.model.last.weight))
AUTOGRAD.add("`y.backward(gradient=p.detach())`", lambda c: _seeded(c.model.last.weight.detach()))


@AUTOGRAD.touch("`torch.vmap(f)(p)`")
def vmap_of_parameter(case: Case) -> torch.Tensor:
    return torch.vmap(torch.sin)(case.model.last.weight).detach()


@AUTOGRAD.touch("`torch.autograd.grad(y, x, grad_outputs=p)`")
def grad_outputs(case: Case) -> object:
    x = torch.ones(64, 64, dtype=case.dtype, requires_grad=True)
    return torch.autograd.grad(x * 2, x, grad_outputs=case.model.last.weight)


@AUTOGRAD.touch("backward after `step()` over the old values")
def stale(case: Case) -> None:
    loss = case.loss()
    case.train(2)
    loss.backward()


@AUTOGRAD.touch("backward after `p.mul_()` over the old values")
def stale_by_a_write(case: Case) -> None:
    loss = case.model.last.weight.square().sum()
    with torch.no_grad():
        case.model.last.weight.mul_(2)
    loss.backward()


@AUTOGRAD.touch("`detect_anomaly`")
def anomaly(case: Case) -> None:
    with torch.autograd.detect_anomaly():
        case.train()


@AUTOGRAD.touch("`no_grad`, `inference_mode` evaluation")
def evaluate(case: Case) -> list[torch.Tensor]:
    x, found = torch.ones(2, 64, dtype=case.dtype), []
    case.model.eval()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found.append(case.model(x).clone())
    case.model.train()
    return [each + 0 for each in found]


@AUTOGRAD.touch("reads of parameters under `inference_mode`")
def read_in_inference(case: Case) -> list[float]:
    with torch.inference_mode():
        return [p.sum().item() for p in case.params] + [p.data.sum().item() for p in case.params]


@AUTOGRAD.touch("`torch.autocast('cpu')`")
def autocast(case: Case) -> torch.Tensor:
    case.rank = None
    with torch.autocast("cpu", torch.bfloat16):
        y = case.model(case.inputs())
    y.float().square().mean().backward()
    return y.detach()


def _checkpointed(case: Case, reentrant: bool) -> None:
    x = case.inputs().requires_grad_()
    y = checkpoints.checkpoint(case.model, x, use_reentrant=reentrant)
    (y.float() - 1).square().mean().backward()
    case.optimizer.step()


AUTOGRAD.add("`checkpoint(use_reentrant=False)`", lambda c: _checkpointed(c, False))
AUTOGRAD.add("`checkpoint(use_reentrant=True)`", lambda c: _checkpointed(c, True))


class Chain(nn.Sequential):
    """Layers one after the other."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(64, 64) for _ in range(4)))


@AUTOGRAD.touch("`checkpoint_sequential`", build=Chain)
def sequential(case: Case) -> None:
    x = case.inputs().requires_grad_()
    y = checkpoints.checkpoint_sequential(case.model, 2, x, use_reentrant=False)
    (y.float() - 1).square().mean().backward()
    case.optimizer.step()


def _named(case: Case, detached: bool) -> dict[str, torch.Tensor]:
    return {n: p.detach() if detached else p for n, p in case.model.named_parameters()}


@AUTOGRAD.touch("`functional_call(model, detached)`")
def functional_call(case: Case) -> torch.Tensor:
    given = {name: value * 2 for name, value in _named(case, True).items()}
    return torch.func.functional_call(case.model, given, torch.ones(2, 64, dtype=case.dtype))


@AUTOGRAD.touch("`functional_call(model, dict(named_parameters()))`")
def functional_call_of_own(case: Case) -> None:
    x = case.inputs()
    y = torch.func.functional_call(case.model, _named(case, False), x)
    (y.float() - 1).square().mean().backward()
    case.optimizer.step()


def _func_grad(case: Case, detached: bool) -> object:
    x = torch.ones(2, 64, dtype=case.dtype)

    def output(given: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(case.model, given, x).float().square().mean()

    return torch.func.grad(output)(_named(case, detached))


AUTOGRAD.add("`torch.func.grad` over `p.detach()`", lambda c: _func_grad(c, True))
AUTOGRAD.add("`torch.func.grad` over `p`", lambda c: _func_grad(c, False))


@AUTOGRAD.touch("`torch.vmap(model)`")
def vmap(case: Case) -> torch.Tensor:
    return torch.vmap(case.model)(torch.ones(2, 3, 64, dtype=case.dtype)).detach()


@AUTOGRAD.touch("`torch.func.jvp` over `p`")
def jvp(case: Case) -> object:
    weight = case.model.last.weight
    return torch.func.jvp(lambda w: (w * w).sum(), (weight,), (torch.ones_like(weight),))


class Squares(torch.autograd.Function):
    """Saves the parameter itself."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return weight.square().sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        return 2 * weight * grad


class Scaled(torch.autograd.Function):
    """Changes the parameter in place."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(weight)
        return weight.mul_(0.5)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return 0.5 * grad


@AUTOGRAD.touch("a custom `autograd.Function` that saves `p`")
def custom_function(case: Case) -> torch.Tensor:
    value = Squares.apply(case.model.last.weight)
    (case.loss() + 0.1 * value).backward()
    case.optimizer.step()
    return value.detach()


@AUTOGRAD.touch("a custom `autograd.Function` that marks `p` dirty, under `no_grad`")
def dirty_function(case: Case) -> None:
    with torch.no_grad():
        Scaled.apply(case.model.last.weight)


@AUTOGRAD.touch("`torch.jit.trace(model)`", goes_on=False)
def trace(case: Case) -> torch.Tensor:
    x = torch.ones(2, 64, dtype=case.dtype)
    traced = torch.jit.trace(case.model, x)
    case.train()
    return traced(x).detach()


@AUTOGRAD.touch("`nn.DataParallel(model)`, without devices")
def data_parallel(case: Case) -> None:
    model = nn.DataParallel(case.model)
    case.optimizer.zero_grad()
    case.loss(model=model).backward()
    case.optimizer.step()


@AUTOGRAD.touch("a forward in a thread during another one's")
def two_threads(case: Case) -> list[torch.Tensor]:
    x, found = torch.ones(2, 64, dtype=case.dtype), []

    def run() -> None:
        torch.set_num_threads(1)  # of this thread
        with torch.no_grad():
            found.append(case.model(x * 2))

    def run_once(*_: object) -> None:
        handle.remove()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(run).result()

    handle = case.model.last.register_forward_pre_hook(run_once)
    with torch.no_grad():
        found.append(case.model(x))
    return found
