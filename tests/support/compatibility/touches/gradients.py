"""What is done to `.grad`: reads, writes, clipping, clearing, hooks."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import torch
from torch.nn import utils

from tests.support.compatibility.touch import Case, Section

GRADIENTS = Section("Gradients")
Change = Callable[[torch.Tensor], object]


def grads(case: Case) -> list[torch.Tensor]:
    return [p.grad for p in case.params if p.grad is not None]


def read(name: str, of: Change) -> None:
    """Reads of each gradient, after one backward."""

    def use(case: Case) -> object:
        case.backward()
        return [of(grad) for grad in grads(case)]

    GRADIENTS.add(name, use)


def change(name: str, to: Change) -> None:
    """Changes of each gradient, between backward and step."""

    def use(case: Case) -> object:
        case.backward()
        for grad in grads(case):
            to(grad)
        kept = [grad.clone() for grad in grads(case)]
        case.optimizer.step()
        return kept

    GRADIENTS.add(name, use)


def clip(name: str, of: Callable[[list[torch.nn.Parameter]], object]) -> None:
    """Clipping of all gradients, between backward and step."""

    def use(case: Case) -> object:
        case.backward()
        found = of(case.params)
        case.optimizer.step()
        return found

    GRADIENTS.add(name, use)


read("`p.grad.mean()`, `.abs().max()`, `.norm()`", lambda g: [g.mean(), g.abs().max(), g.norm()])
read("`p.grad.norm(1)`, `.norm(float('inf'))`", lambda g: [g.norm(1), g.norm(float("inf"))])
read("`(p.grad != 0).sum()`", lambda g: (g != 0).sum())
read("`p.grad.isnan().any()`, `.isfinite()`", lambda g: [bool(g.isnan().any()), g.isfinite()])
read("`p.grad.clone()`, `.detach()`, `.data`", lambda g: [g.clone(), g.detach() + 0, g.data + 0])
read("`p.grad.float()`, `.cpu()`, `.to()`", lambda g: [g.float(), g.cpu() + 0, g.to(torch.float64)])
read("`float(p.grad.sum())`, `p.grad.tolist()`", lambda g: [float(g.sum()), g.float().tolist()])
read("`p.grad.float().numpy()`", lambda g: torch.from_numpy(g.float().numpy().copy()))
read("`torch.tensor(p.grad)`", lambda g: torch.tensor(g))
read(
    "`pickle`, `copy.deepcopy` of `p.grad`",
    lambda g: [pickle.loads(pickle.dumps(g)), copy.deepcopy(g)],
)
read("`p.grad.data_ptr()`", lambda g: g.data_ptr() != 0)

change("`p.grad.mul_()`, `/=`", lambda g: g.mul_(0.5).div_(4))
change("`p.grad.add_(noise)`", lambda g: g.add_(torch.linspace(-1, 1, g.numel()).view(g.shape)))


@GRADIENTS.touch("`p.grad.add_(p, alpha=0.1)`: a decay of weights")
def decay(case: Case) -> None:
    case.rank = None
    case.backward()
    with torch.no_grad():
        for param in case.params:
            if param.grad is not None:
                param.grad.add_(param, alpha=0.1)
    case.optimizer.step()


change("`p.grad.clamp_()`", lambda g: g.clamp_(-1e-3, 5e-4))
change("`p.grad[0] = 0`, `p.grad.view(-1)[0] = 1`", lambda g: g.view(-1).__setitem__(0, 1.0))
change("`p.grad.data = t`", lambda g: setattr(g, "data", g.data * 3 + 0.5))
change("`p.grad.zero_()`", lambda g: g.zero_())
change("`torch._foreach_mul_(grads)`", lambda g: torch._foreach_mul_([g], 0.5))

clip("`clip_grad_norm_`", lambda ps: utils.clip_grad_norm_(ps, 0.1))
clip("`clip_grad_norm_(norm_type=1)`", lambda ps: utils.clip_grad_norm_(ps, 0.1, norm_type=1.0))
clip("`clip_grad_norm_(norm_type=inf)`", lambda ps: utils.clip_grad_norm_(ps, 0.1, float("inf")))
clip("`clip_grad_value_`", lambda ps: utils.clip_grad_value_(ps, 1e-3))
clip(
    "`get_total_norm(grads)`, `clip_grads_with_norm_`",
    lambda ps: utils.clip_grads_with_norm_(
        ps, 0.1, utils.get_total_norm([p.grad for p in ps if p.grad is not None])
    ),
)


@GRADIENTS.touch("`p.grad = t`")
def assign(case: Case) -> None:
    case.backward()
    for param in case.params:
        param.grad = torch.full_like(param, 0.01)
    case.optimizer.step()


@GRADIENTS.touch("`p.grad = p.grad * 0.5`, `p.grad += t`")
def assign_computed(case: Case) -> None:
    case.backward()
    case.model.first.weight.grad = case.model.first.weight.grad * 0.5
    case.model.last.bias.grad += 0.25
    case.optimizer.step()


@GRADIENTS.touch("`p.grad = q.grad`")
def assign_anothers(case: Case) -> object:
    case.backward()
    case.model.first.weight.grad = case.model.last.weight.grad
    kept = case.model.first.weight.grad.clone()
    case.optimizer.step()
    return kept


@GRADIENTS.touch("`p.grad = None`")
def forget(case: Case) -> list[bool]:
    case.backward()
    case.model.first.weight.grad = None
    case.optimizer.step()
    return [p.grad is None for p in case.params]


@GRADIENTS.touch("`zero_grad()`")
def clear(case: Case) -> list[bool]:
    case.backward(1)
    case.optimizer.zero_grad()
    case.backward(2)
    case.model.zero_grad()
    case.optimizer.step()
    return [p.grad is None for p in case.params]


@GRADIENTS.touch("`zero_grad(set_to_none=False)`")
def clear_to_zero(case: Case) -> list[torch.Tensor]:
    case.train()
    case.optimizer.zero_grad(set_to_none=False)
    case.optimizer.step()
    case.model.zero_grad(set_to_none=False)
    return [grad.clone() for grad in grads(case)]


@GRADIENTS.touch("gradient accumulation over micro-batches")
def accumulate(case: Case) -> None:
    for seed in range(3):
        (case.loss(seed) / 3).backward()
    case.optimizer.step()


@GRADIENTS.touch("`p.register_hook(lambda g: g * 0.5)`")
def hook(case: Case) -> None:
    handle = case.model.first.weight.register_hook(lambda g: g * 0.5)
    case.train()
    handle.remove()


@GRADIENTS.touch("`p.register_post_accumulate_grad_hook`")
def post_hook(case: Case) -> list[bool]:
    seen = []
    handle = case.model.first.weight.register_post_accumulate_grad_hook(
        lambda p: seen.append(p.grad is not None)
    )
    case.train()
    handle.remove()
    return seen


@GRADIENTS.touch("`p.grad.mul_()` in a post-accumulate hook")
def post_hook_that_writes(case: Case) -> None:
    handle = case.model.first.weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))
    case.train()
    handle.remove()


@GRADIENTS.touch("a gradient kept over `zero_grad()` and read later")
def keep(case: Case) -> torch.Tensor:
    case.backward()
    kept = case.model.first.weight.grad
    case.optimizer.zero_grad()
    return kept + 0


@GRADIENTS.touch("`GradScaler`: scale, unscale_, step, update")
def scaler(case: Case) -> list[float]:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scales = []
    for seed in range(2):
        case.optimizer.zero_grad()
        scaler.scale(case.loss(seed)).backward()
        scaler.unscale_(case.optimizer)
        utils.clip_grad_norm_(case.params, 0.1)
        scaler.step(case.optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales
