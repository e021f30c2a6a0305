"""All functions of torch that take two or three tensors, from torch's own list of what it lets
tensor subclasses override; and calls that take them in lists, by name, or beside other arguments.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import overrides
from torch.nn import functional as F

Shape = tuple[int, ...]
MATRIX, VECTOR, SIGNAL, FILTER = (32, 32), (32,), (2, 32, 5), (32, 32, 3)
SHAPES = (MATRIX, VECTOR, SIGNAL, FILTER)


@dataclass(frozen=True)
class Operator:
    """A call of a function of torch.

    Attributes:
        name: says which.
        call: the function, of tensors.
        shapes: of the tensors, all fp32.
        writes: it changes the first tensor.
    """

    name: str
    call: Callable[..., Any]
    shapes: tuple[Shape, ...]
    writes: bool = False

    def on(self, tensors: Sequence[torch.Tensor]) -> Any:
        """What it gives, with the same random numbers each time."""
        torch.default_generator.manual_seed(0)  # (torch.manual_seed() takes long)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of broadcast and resized tensors
            return self.call(*tensors)


def values(shape: Shape, seed: int) -> torch.Tensor:
    """Numbers between 0.1 and 0.9, which no function here refuses."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 0.8 + 0.1


# What follows the tensors is added to the call.
_PATTERNS: tuple[tuple[tuple[Shape, ...], tuple[Any, ...]], ...] = (
    ((MATRIX, MATRIX), ()),
    ((VECTOR, VECTOR), ()),
    ((MATRIX, VECTOR), ()),
    ((SIGNAL, FILTER), ()),
    ((MATRIX, MATRIX), (0,)),
    ((MATRIX, MATRIX), (1,)),
    ((MATRIX, MATRIX, VECTOR), ()),
    ((MATRIX, MATRIX, MATRIX), ()),
    ((VECTOR, MATRIX, MATRIX), ()),
    ((VECTOR, MATRIX, VECTOR), ()),
    ((MATRIX, VECTOR, VECTOR), ()),
    ((SIGNAL, FILTER, VECTOR), ()),
)
_CALLS_OF_EACH = 2  # for two tensors, and for three
# These are about a tensor's memory, which only writes below torch's operators change; or give other
# bits where a tensor begins elsewhere, in plain torch, too.
_OF_MEMORY = {"set_", "is_set_to", "module_load", "resize_as", "resize_as_", "slice_inverse"}
_OF_ALIGNMENT = {"lstsq"}


def _works(operator: Operator) -> bool:
    """Whether plain torch takes such tensors, and gives the same each time."""
    found = []
    for _ in range(2):
        try:
            found.append(operator.on([values(s, i) for i, s in enumerate(operator.shapes)]))
        except Exception:  # of a function that takes others
            return False
    return found[0] is not NotImplemented and same(*found)


def _listed(every: int) -> list[Operator]:
    found = []
    for function in list(overrides.get_testing_overrides())[::every]:
        name = overrides.resolve_name(function) or ""
        last = name.rpartition(".")[2]
        if last.startswith("_") or last in _OF_MEMORY | _OF_ALIGNMENT or ".distributed." in name:
            continue
        calls = {2: 0, 3: 0}
        for shapes, more in _PATTERNS:
            if calls[len(shapes)] == _CALLS_OF_EACH:
                continue
            operator = Operator(
                f"{name}{(*map(list, shapes), *more)}",
                lambda *tensors, function=function, more=more: function(*tensors, *more),
                shapes,
                last.endswith("_"),
            )
            if _works(operator):
                calls[len(shapes)] += 1
                found.append(operator)
    return found


def _index() -> torch.Tensor:
    return torch.arange(31, -1, -1)


def _set(a: torch.Tensor, key: Any, b: Any) -> torch.Tensor:
    a[key] = b
    return a


def _into(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function that writes its result to its first tensor."""
    return lambda a, *others: function(*others, out=a)


_MORE: dict[str, tuple[Callable[..., Any], tuple[Shape, ...]]] = {
    "cat": (lambda a, b, c: torch.cat([a, b, c]), (MATRIX, MATRIX, MATRIX)),
    "cat of a tuple": (lambda a, b: torch.cat((a, b[None]), dim=0), (MATRIX, VECTOR)),
    "stack": (lambda a, b: torch.stack(tensors=[a, b]), (MATRIX, MATRIX)),
    "hstack": (lambda a, b: torch.hstack([a, b]), (MATRIX, MATRIX)),
    "column_stack": (lambda a, b: torch.column_stack((a, b)), (MATRIX, VECTOR)),
    "einsum": (lambda a, b: torch.einsum("ij,jk->ik", a, b), (MATRIX, MATRIX)),
    "einsum of three": (
        lambda a, b, c: torch.einsum("i,ij,j->j", a, b, c),
        (VECTOR, MATRIX, VECTOR),
    ),
    "multi_dot": (lambda *t: torch.linalg.multi_dot(list(t)), (MATRIX, MATRIX, VECTOR)),
    "where": (lambda a, b, c: torch.where(a > 0.5, b, c), (MATRIX, MATRIX, VECTOR)),
    "where by a comparison": (lambda a, b: torch.where(a > b, a, b), (MATRIX, MATRIX)),
    "linear by name": (
        lambda x, w, b: F.linear(input=x, weight=w, bias=b),
        (MATRIX, MATRIX, VECTOR),
    ),
    "layer_norm": (
        lambda x, w, b: F.layer_norm(x, (32,), weight=w, bias=b, eps=1e-3),
        (MATRIX, VECTOR, VECTOR),
    ),
    "rms_norm": (lambda x, w: F.rms_norm(x, (32,), w), (MATRIX, VECTOR)),
    "group_norm": (lambda x, w, b: F.group_norm(x, 4, w, b), (SIGNAL, VECTOR, VECTOR)),
    "batch_norm": (
        lambda x, w, b: F.batch_norm(x, torch.zeros(32), torch.ones(32), w, b, True),
        (SIGNAL, VECTOR, VECTOR),
    ),
    "batch_norm's means": (
        lambda x, m, v: F.batch_norm(x, m, v, training=False),
        (SIGNAL, VECTOR, VECTOR),
    ),
    "conv1d of groups": (
        lambda x, w, b: F.conv1d(x, w[:, :1], bias=b, groups=32, padding=2),
        (SIGNAL, FILTER, VECTOR),
    ),
    "bilinear": (lambda a, b, w: F.bilinear(a, b, w[None]), (MATRIX, MATRIX, MATRIX)),
    "scaled_dot_product_attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True),
        (MATRIX, MATRIX, MATRIX),
    ),
    "embedding": (lambda w, b: F.embedding(_index(), w) + b, (MATRIX, VECTOR)),
    "embedding_bag": (
        lambda w, s: F.embedding_bag(
            _index(), w, torch.arange(0, 32, 2), mode="sum", per_sample_weights=s
        ),
        (MATRIX, VECTOR),
    ),
    "gather": (lambda a, b: torch.gather(a, 1, (b * 30).long()), (MATRIX, MATRIX)),
    "take_along_dim": (
        lambda a, b: torch.take_along_dim(a, b.argsort(-1), -1),
        (MATRIX, MATRIX),
    ),
    "index by a mask": (lambda a, b: a[b > 0.5], (MATRIX, MATRIX)),
    "index by a list": (lambda a, b: a[[3, 4]] + b[None, [1, 2], None], (MATRIX, VECTOR)),
    "scatter": (
        lambda a, b: a.scatter(0, _index()[None].expand(32, 32), b),
        (MATRIX, MATRIX),
    ),
    "index_add": (lambda a, b: a.index_add(0, _index(), b, alpha=0.5), (MATRIX, MATRIX)),
    "index_copy": (lambda a, b: torch.index_copy(a, 1, _index(), b), (MATRIX, MATRIX)),
    "index_put": (lambda a, b: a.index_put((_index(), _index()), b), (MATRIX, VECTOR)),
    "masked_scatter": (lambda a, b: a.masked_scatter(a > 0.5, b), (MATRIX, MATRIX)),
    "unflatten and broadcast": (
        lambda a, b: a.unflatten(1, (4, 8)) * b.view(4, 8),
        (MATRIX, VECTOR),
    ),
    "foreach add": (lambda a, b: torch._foreach_add([a, b], [b, a]), (MATRIX, MATRIX)),
    "foreach addcmul": (
        lambda a, b, c: torch._foreach_addcmul([a, b], [b, c], [c, a], value=0.5),
        (MATRIX, MATRIX, MATRIX),
    ),
    "foreach lerp": (
        lambda a, b: torch._foreach_lerp([a, b], [b, a], 0.25),
        (VECTOR, VECTOR),
    ),
    "operators": (lambda a, b, c: (a @ b + c) / (1 - a) ** b, (MATRIX, MATRIX, VECTOR)),
    "reflected operators": (lambda a, b: (1 - a, 2 / b, 2**a, a // b), (MATRIX, MATRIX)),
    "scaled by an element": (lambda a, b: a * b[0] + b[1].item(), (MATRIX, VECTOR)),
    "rnn_tanh_cell": (
        lambda x, h, w: torch.rnn_tanh_cell(x, h, w, w),
        (MATRIX, MATRIX, MATRIX),
    ),
    "lstm_cell": (
        lambda x, h, w: torch.lstm_cell(x, (h, h), w.repeat(4, 1), w.repeat(4, 1)),
        (MATRIX, MATRIX, MATRIX),
    ),
    "aten.addmm": (
        lambda a, b, c: torch.ops.aten.addmm.default(a, b, c),
        (VECTOR, MATRIX, MATRIX),
    ),
    "vmap of two": (
        lambda a, b: torch.vmap(torch.mul)(a, b),
        (MATRIX, MATRIX),
    ),
}
_WRITES: dict[str, tuple[Callable[..., Any], tuple[Shape, ...]]] = {
    "a[...] = b": (lambda a, b: _set(a, ..., b), (MATRIX, MATRIX)),
    "a[1] = b": (lambda a, b: _set(a, 1, b), (MATRIX, VECTOR)),
    "a[b > 0.5] = c": (lambda a, b, c: _set(a, b > 0.5, c[0]), (MATRIX, MATRIX, VECTOR)),
    "a[1] += b": (lambda a, b: a[1].add_(b), (MATRIX, VECTOR)),
    "add(out=a)": (_into(torch.add), (MATRIX, MATRIX, VECTOR)),
    "mm(out=a)": (_into(torch.mm), (MATRIX, MATRIX, MATRIX)),
    "addcdiv_ by value": (
        lambda a, b, c: a.addcdiv_(b, c, value=-0.1),
        (MATRIX, MATRIX, MATRIX),
    ),
    "foreach add_": (lambda a, b: torch._foreach_add_([a], [b], alpha=2), (MATRIX, MATRIX)),
    "foreach lerp_": (lambda a, b: torch._foreach_lerp_([a], [b], 0.25), (MATRIX, MATRIX)),
    "foreach copy_": (lambda a, b: torch._foreach_copy_([a], [b]), (MATRIX, MATRIX)),
    "index_add_": (lambda a, b: a.index_add_(0, _index(), b), (MATRIX, MATRIX)),
    "index_put_": (
        lambda a, b: a.index_put_((_index(), _index()), b, accumulate=True),
        (MATRIX, VECTOR),
    ),
    "scatter_add_": (
        lambda a, b: a.scatter_add_(0, _index()[None].expand(32, 32), b),
        (MATRIX, MATRIX),
    ),
    "masked_fill_ by one": (lambda a, b: a.masked_fill_(a > 0.5, b[0]), (MATRIX, VECTOR)),
}


@cache
def operators(every: int = 1) -> tuple[Operator, ...]:
    """The table; of torch's list each `every`th function, because to try all takes a while."""
    more = [Operator(name, call, shapes) for name, (call, shapes) in _MORE.items()]
    writes = [Operator(name, call, shapes, True) for name, (call, shapes) in _WRITES.items()]
    return (*_listed(every), *more, *writes)


def same(one: Any, other: Any) -> bool:
    """Whether two results have the same bits; a NaN is a NaN."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
            return False
        return torch.equal(one.nan_to_num(-7.0), other.nan_to_num(-7.0)) and torch.equal(
            one.isnan(), other.isnan()
        )
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(type(one) is type(other) and one == other)
