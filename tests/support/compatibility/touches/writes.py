"""Writes to parameters outside hetero.gathered()."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import utils

from tests.support.compatibility.touch import Case, Net, Section
from tests.support.training.small_net import without_grad

WRITES = Section("Writes to parameters")
write = WRITES.add


def ramp(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.linspace(-1, 1, tensor.numel()).view(tensor.shape)
    return made.to(tensor.dtype)


def values(case: Case) -> list[torch.Tensor]:
    return [p.detach().clone() for p in case.params]


write(
    "`p.clamp_()` under `no_grad`", lambda c: [without_grad(p.clamp_, -0.05, 1) for p in c.params]
)
write("`p.data.clamp_()`", lambda c: discard(p.data.clamp_(-0.05, 1) for p in c.params))
write("`p.data.mul_()`, `p.data *= t`", lambda c: discard(p.data.mul_(0.5) for p in c.params))
write("`p.data.lerp_(q.data)`", lambda c: discard([lerp(c)]))
write("`p.data.add_(q)`, `p.data.lerp_(q.data, r)`", lambda c: discard(mixed(c.model)))
write("`p.data.copy_(t)`", lambda c: discard(p.data.copy_(ramp(p)) for p in c.params))
write("`torch._foreach_mul_(params)`", lambda c: foreach(c))
write("`torch.add(p, 1, out=q.data)`", lambda c: discard([out(c.model)]))
write("`vector_to_parameters`", lambda c: vector(c))
write("`p.index_fill_`, `p.scatter_`, `p.masked_fill_`", lambda c: scattered(c.model.last.weight))
write("`p.requires_grad_(False).mul_()`", lambda c: frozen_mul(c))


def discard(results: object) -> None:
    list(results)  # type: ignore[call-overload]


def lerp(case: Case) -> object:
    return case.model.last.weight.data.lerp_(case.model.first.weight.data, 0.5)


def mixed(model: nn.Module) -> list[object]:
    first, last = model.first.weight, model.last.weight
    with torch.no_grad():
        return [last.data.add_(first, alpha=0.5), last.data.lerp_(first.data, model.scale)]


def foreach(case: Case) -> None:
    with torch.no_grad():
        torch._foreach_mul_(case.params, 0.5)
        torch._foreach_add_([p.data for p in case.params], 0.25)


def out(model: Net) -> object:
    return torch.add(model.first.weight.data, 1.0, out=model.last.weight.data)


def vector(case: Case) -> None:
    made = utils.parameters_to_vector(case.params)
    utils.vector_to_parameters(made.detach() * 0.5, case.params)


def scattered(weight: nn.Parameter) -> None:
    rows = torch.tensor([1, 3])
    with torch.no_grad():
        weight.index_fill_(0, rows, 0.5)
        weight.scatter_(1, rows.view(2, 1), 0.25)
        weight.masked_fill_(weight < 0, 0.125)


def frozen_mul(case: Case) -> None:
    case.model.last.weight.requires_grad_(False).mul_(0.5)
    case.model.last.weight.requires_grad_(True)


@WRITES.touch("`p.data = t`")
def assign(case: Case) -> None:
    for param in case.params:
        param.data = ramp(param)


@WRITES.touch("`p.data = t` of another shape")
def assign_another_shape(case: Case) -> None:
    case.model.unused.bias.data = torch.ones(3, dtype=case.dtype)


@WRITES.touch("`p.data, q.data = q.data.clone(), p.data.clone()`")
def swap(case: Case) -> None:
    p, q = case.model.first.weight, case.model.last.weight
    p.data, q.data = q.data.clone(), p.data.clone()


@WRITES.touch("`p.data, q.data = q.data, p.data`")
def swap_without_copies(case: Case) -> object:
    p, q = case.model.first.weight, case.model.last.weight
    p.data, q.data = q.data, p.data
    return values(case)


@WRITES.touch("`p[3:5] = 1.5` under `no_grad`, `p.data[0, ::2] = 1`")
def assign_parts(case: Case) -> None:
    with torch.no_grad():
        case.model.last.weight[3:5] = 1.5
        case.model.last.weight.data[0, ::2] = -0.5


@WRITES.touch("`p.data[mask] = 0`, `p.data[[1, 2]] = 1`")
def assign_chosen(case: Case) -> None:
    data = case.model.last.weight.data
    data[data < 0] = 0.5
    data[[1, 2]] = 1


@WRITES.touch("`p.data.view(-1)[5:9].add_()`, `p.data.unbind()[3].fill_()`")
def write_to_views_of_data(case: Case) -> None:
    case.model.last.weight.data.view(-1)[5:9].add_(3.0)
    case.model.last.weight.data.unbind()[3].fill_(0.125)


@WRITES.touch("`for row in p: row.data.mul_()`")
def write_to_data_of_rows(case: Case) -> None:
    for row in case.model.last.weight:
        row.data.mul_(2)


@WRITES.touch("`p.view(-1).data.mul_()`, `p[0].detach().zero_()`")
def write_to_data_of_views(case: Case) -> None:
    case.model.last.weight.view(-1).data.mul_(2)
    case.model.last.weight[0].detach().zero_()


@WRITES.touch("`v = p.view(-1)`, then `v.mul_()` under `no_grad`")
def write_to_a_view(case: Case) -> None:
    view = case.model.last.weight.view(-1)
    with torch.no_grad():
        view.mul_(2)


@WRITES.touch("`v = p.view(-1)` and `v.mul_()`, both under `no_grad`")
def write_to_a_view_without_grad(case: Case) -> None:
    with torch.no_grad():
        case.model.last.weight.view(-1).mul_(2)


@WRITES.touch("`nn.init.*`, `reset_parameters()`")
def initialise(case: Case) -> None:
    nn.init.normal_(case.model.first.weight)
    nn.init.kaiming_uniform_(case.model.last.weight)
    nn.init.constant_(case.model.last.bias, 0.25)
    nn.init.trunc_normal_(case.model.last.weight)
    case.model.unused.reset_parameters()


@WRITES.touch("`p.numpy()[...] = 1`")
def write_to_an_array(case: Case) -> None:
    data = case.model.unused.bias.detach()
    (data.view(torch.int16) if case.dtype is torch.bfloat16 else data).numpy()[...] = 1


@WRITES.touch("`p.mul_()` with gradient mode on")
def write_with_gradient(case: Case) -> None:
    case.model.last.weight.mul_(0.5)


@WRITES.touch("`p.t_()`, `p.resize_()`, `p.set_()`")
def change_the_memory(case: Case) -> None:
    with torch.no_grad():
        case.model.last.weight.t_()


@WRITES.touch("`p.share_memory_()`")
def share(case: Case) -> bool:
    return case.model.last.weight.share_memory_().is_shared()


@WRITES.touch("`torch.utils.swap_tensors(p, q)`")
def swap_tensors(case: Case) -> list[torch.Tensor]:
    torch.utils.swap_tensors(case.model.first.weight, case.model.last.weight)
    return values(case)


@WRITES.touch("`module.weight = nn.Parameter(t)`")
def replace(case: Case) -> None:
    case.model.last.weight = nn.Parameter(ramp(case.model.last.weight))


@WRITES.touch("a write in a module's forward pre-hook")
def clamp_in_forward(case: Case) -> None:
    def clamp(module: nn.Module, *_: object) -> None:
        module.weight.data.clamp_(-0.05, 0.05)

    handle = case.model.last.register_forward_pre_hook(clamp)
    case.train()
    handle.remove()
