"""Reads of parameters outside their modules: what they give has plain PyTorch's bits."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn import utils

from tests.support.compatibility.touch import Case, Section
from tests.support.training.small_net import without_grad

READS = Section("Reads of parameters", exact=True)
read = READS.add

read("`p.sum()`, `p.mean()`, `p.norm()`", lambda c: [[p.sum(), p.norm()] for p in c.params])
read("`float(p)`, `p.item()`", lambda c: [float(c.model.scale), c.model.scale.item()])
read("`bool(p > 0)`, `if p:`", lambda c: [bool(c.model.scale > 0), bool(c.model.scale)])
read("`p == q`", lambda c: (c.model.first.weight == c.model.last.weight).sum())
read(
    "`torch.equal(p, q)`, `torch.allclose(p, q)`",
    lambda c: [f(c.model.first.weight, c.model.last.weight) for f in (torch.equal, torch.allclose)],
)
read("`repr(p)`, `print(p)`", lambda c: [repr(c.model.first.bias), str(c.model.first.bias)])
read("`f'{p:.3f}'`", lambda c: f"{c.model.scale.squeeze():.3f}")
read("`p.shape`, `p.stride()`, `p.numel()`, `p.nbytes`", lambda c: [metadata(p) for p in c.params])
read("`p.tolist()`", lambda c: c.model.last.bias.tolist())
read("`p.detach().numpy()`, `p.data.numpy()`", lambda c: arrays(c))
read("`torch.from_dlpack(p.detach())`", lambda c: torch.from_dlpack(c.model.scale.detach()))
read("`p.detach().clone()`, `p.data.clone()`", lambda c: copies(c))
read("`p.to(torch.float64)`, `p.float()`", lambda c: [p.detach().double() for p in c.params])
read("`p[3:5, ::2]`, `p.view(-1)`, `p.t()`", lambda c: parts(c.model.last.weight))
read("`p[mask]`, `p[[1, 2]]`, `p[array]`", lambda c: chosen(c.model.last.weight.data))
read("`for row in p`", lambda c: [row.sum() for row in c.model.last.weight])
read("`torch.cat`, `torch.stack` of parameters", lambda c: joined(c))
read("`parameters_to_vector`", lambda c: utils.parameters_to_vector(c.params).detach())
read("`get_total_norm`", lambda c: utils.get_total_norm([p.detach() for p in c.params]))
read("`torch._foreach_norm`", lambda c: torch._foreach_norm([p.detach() for p in c.params]))
read(
    "`F.linear(x, other.weight)`",
    lambda c: F.linear(torch.ones(2, 64, dtype=c.dtype), c.model.last.weight).detach(),
)
read(
    "`F.linear(x, p.detach(), q)`, `F.linear(x, p.view(...), q.data)`: views beside parameters",
    lambda c: beside(c.model.last),
)
read("`p.new_zeros()`, `torch.zeros_like(p)`", lambda c: likes(c.model.last.weight))
read("`torch.tensor([p, q])` of single elements", lambda c: torch.tensor([c.model.scale] * 2))
read("`torch.as_tensor(p)`, `torch.asarray(p)`", lambda c: as_tensors(c.model.last.bias))
read("`other.data = p.data`", lambda c: given(c.model.last.weight.data), goes_on=False)
read("`other.copy_(p)`", lambda c: without_grad(torch.zeros(64).copy_, c.model.last.bias))
read("`tensor.set_(p)`", lambda c: torch.empty(0, dtype=c.dtype).set_(c.model.last.bias.detach()))
read("`nn.Parameter(p)`", lambda c: nn.Parameter(c.model.last.weight).detach(), goes_on=False)
read("`nn.Parameter(p.detach())`", lambda c: remade(c), goes_on=False)
read("`nn.Parameter(p.detach().clone())`", lambda c: nn.Parameter(copies(c)[0][0]).detach())
read("`p.data_ptr()`", lambda c: c.model.last.weight.data_ptr() != 0, goes_on=False)


def metadata(p: torch.Tensor) -> list[object]:
    return [list(p.shape), list(p.stride()), p.numel(), p.nbytes, p.is_contiguous(), p.dim()]


def arrays(case: Case) -> list[object]:
    if case.dtype is torch.bfloat16:  # which NumPy has not
        return [case.model.last.weight.detach().float().numpy().tolist()]
    weight = case.model.last.weight
    return [weight.detach().numpy().tolist(), weight.data.numpy().tolist()]


def copies(case: Case) -> list[list[torch.Tensor]]:
    return [[p.detach().clone(), p.data.clone()] for p in case.params]


def parts(weight: torch.Tensor) -> list[torch.Tensor]:
    return [p.detach().clone() for p in (weight[3:5, ::2], weight.view(-1), weight.t())]


def chosen(data: torch.Tensor) -> list[torch.Tensor]:
    return [data[data > 0], data[[1, 2]], data[[3, 4], [1, 2]], data[np.array([5, 6])]]


def joined(case: Case) -> list[torch.Tensor]:
    flat = torch.cat([p.flatten() for p in case.params]).detach()
    return [flat, torch.stack([case.model.first.weight, case.model.last.weight]).detach()]


def likes(weight: torch.Tensor) -> list[torch.Tensor]:
    return [weight.new_zeros(3), torch.zeros_like(weight), torch.ones_like(weight).detach()]


def as_tensors(p: torch.Tensor) -> list[torch.Tensor]:
    return [torch.as_tensor(p).detach().clone(), torch.asarray(p).detach().clone()]


def given(values: torch.Tensor) -> torch.Tensor:
    other = nn.Linear(64, 64).to(values.dtype)
    other.weight.data = values
    return other.weight.detach().clone()


def remade(case: Case) -> torch.Tensor:
    return nn.Parameter(case.model.last.weight.detach()).detach().clone()


def beside(layer: nn.Linear) -> list[torch.Tensor]:
    x, weight, bias = torch.ones(2, 64, dtype=layer.weight.dtype), layer.weight, layer.bias
    found = [
        F.linear(x, weight.detach(), bias),
        F.linear(x, weight.view(64, 64), bias.data),
        torch.addmm(bias.data, x, weight),
        torch.lerp(weight.data, weight, bias),
    ]
    return [each.detach() for each in found]
