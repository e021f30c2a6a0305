"""hetero/stand_ins: whatever a call of torch is given of parameters, mixed in any way, it gets the
values, or is refused; never what stands where values are not in memory."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, overrides
from torch.nn import functional as F

import hetero
from hetero.stand_ins.parameter_classes import AbsentParameter
from tests.support.ranks.processes import RankPool
from tests.support.training.small_net import assert_nothing_is_used

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
    "einsum": (lambda a, b: torch.einsum("ij,jk->ik", a, b), (MATRIX, MATRIX)),
    "multi_dot": (lambda *t: torch.linalg.multi_dot(list(t)), (MATRIX, MATRIX, VECTOR)),
    "where": (lambda a, b, c: torch.where(a > 0.5, b, c), (MATRIX, MATRIX, VECTOR)),
    "linear by name": (
        lambda x, w, b: F.linear(input=x, weight=w, bias=b),
        (MATRIX, MATRIX, VECTOR),
    ),
    "batch_norm": (
        lambda x, w, b: F.batch_norm(x, torch.zeros(32), torch.ones(32), w, b, True),
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
    "index by a mask": (lambda a, b: a[b > 0.5], (MATRIX, MATRIX)),
    "index by a list": (lambda a, b: a[[3, 4]] + b[None, [1, 2], None], (MATRIX, VECTOR)),
    "index_put": (lambda a, b: a.index_put((_index(), _index()), b), (MATRIX, VECTOR)),
    "foreach add": (lambda a, b: torch._foreach_add([a, b], [b, a]), (MATRIX, MATRIX)),
    "operators": (lambda a, b, c: (a @ b + c) / (1 - a) ** b, (MATRIX, MATRIX, VECTOR)),
    "reflected operators": (lambda a, b: (1 - a, 2 / b, 2**a, a // b), (MATRIX, MATRIX)),
    "scaled by an element": (lambda a, b: a * b[0] + b[1].item(), (MATRIX, VECTOR)),
    "rnn_tanh_cell": (
        lambda x, h, w: torch.rnn_tanh_cell(x, h, w, w),
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
    "foreach add_": (lambda a, b: torch._foreach_add_([a], [b], alpha=2), (MATRIX, MATRIX)),
    "foreach copy_": (lambda a, b: torch._foreach_copy_([a], [b]), (MATRIX, MATRIX)),
    "index_put_": (
        lambda a, b: a.index_put_((_index(), _index()), b, accumulate=True),
        (MATRIX, VECTOR),
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


_POSITIONS = 3


class Operands(nn.Module):
    """For each place of a call a parameter and a buffer of each shape; no two share a chunk."""

    def __init__(self) -> None:
        super().__init__()
        # First, because RAM that is left is given out in the parameters' order.
        self.ballast = nn.ParameterList(nn.Parameter(torch.ones(64, 64)) for _ in range(6))
        self.places = nn.ModuleList(Place(place) for place in range(_POSITIONS))

    def forward(self) -> torch.Tensor:
        """A sum whose gradients are between 0.1 and 0.9."""
        found = [p * values(p.shape, -1 - i) for i, p in enumerate(self.places.parameters())]
        return torch.stack([each.sum() for each in found]).sum()


class Place(nn.Module):
    """The operands of one place."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.params = nn.ParameterList(
            nn.Parameter(values(shape, 10 * place + i)) for i, shape in enumerate(SHAPES)
        )
        for i, shape in enumerate(SHAPES):
            self.register_buffer(f"buffer{i}", values(shape, 100 + 10 * place + i))


Pick = Callable[[nn.Parameter, torch.Tensor], torch.Tensor]

# Of a parameter and a buffer.
KINDS: dict[str, Pick] = {
    "parameter": lambda p, b: p,
    "view": lambda p, b: p.view_as(p),
    "detach": lambda p, b: p.detach(),
    "data": lambda p, b: p.data,
    "view of an alias": lambda p, b: p.detach().view(-1).view(p.shape),
    "grad": lambda p, b: p.grad,  # type: ignore[dict-item,return-value]
    "buffer": lambda p, b: b,
}
Combination = tuple[str, ...]


def all_combinations(operator: Operator) -> Iterator[Combination]:
    """All kinds in all places."""
    yield from product(KINDS, repeat=len(operator.shapes))


def combinations_of_pairs(operator: Operator) -> Iterator[Combination]:
    """So many that each two kinds meet in each two places."""
    kinds = list(KINDS)
    for first, second in product(range(len(kinds)), repeat=2):
        third = kinds[(first + second) % len(kinds)]
        yield (kinds[first], kinds[second], third)[: len(operator.shapes)]


def by_turns(
    operators: Sequence[Operator], each: int
) -> Iterator[tuple[Operator, Iterable[Combination]]]:
    """A few combinations of each operator; over all operators, each two kinds meet often."""
    for number, operator in enumerate(operators):
        found = list(combinations_of_pairs(operator))
        at = [(number * 11 + turn * 17) % len(found) for turn in range(each)]
        yield operator, [found[index] for index in at]


@dataclass
class Subject:
    """A managed model, and the plain one that is its oracle."""

    model: Operands
    optimizer: hetero.HybridAdam
    plain: Operands

    def pick(self, model: Operands, operator: Operator, kinds: Combination) -> list[torch.Tensor]:
        """The operands of a call."""
        found = []
        for place, (kind, shape) in enumerate(zip(kinds, operator.shapes, strict=True)):
            param, buffer = self.owners(model, place, shape)
            found.append(KINDS[kind](param, buffer))
        return found

    def owners(
        self, model: Operands, place: int, shape: Shape
    ) -> tuple[nn.Parameter, torch.Tensor]:
        """The parameter and the buffer behind a place's operands of a shape."""
        at: Any = model.places[place]
        index = SHAPES.index(shape)
        return at.params[index], getattr(at, f"buffer{index}")

    def call(self, model: Operands, operator: Operator, kinds: Combination) -> Any:
        """What the call gives, as plain tensors: the whole first operand, too, if it writes."""
        result = operator.on(self.pick(model, operator, kinds))
        result = _plain(result)
        if operator.writes:
            param, buffer = self.owners(model, 0, operator.shapes[0])
            grad = param.grad
            assert grad is not None
            result = [result, param.detach().clone(), grad.clone(), buffer.clone()]
        return result

    def compare(self, operator: Operator, kinds: Combination, with_grad: bool) -> str:
        """What is wrong with the call; "refused" if it raises a HeteroError that plain torch does
        not raise; empty if it is right."""
        with torch.set_grad_enabled(with_grad):
            wanted, plain_error = _tried(lambda: self.call(self.plain, operator, kinds))
            found, error = _tried(lambda: self.call(self.model, operator, kinds))
        if operator.writes:
            self._write_back(operator.shapes[0])
        if plain_error is not None:
            return "" if error is not None else f"plain torch raises {plain_error!r}"
        if isinstance(error, hetero.HeteroError):
            return f"refused: {error}"
        if error is not None:
            return f"raises {error!r}"
        return "" if same(found, wanted) else f"gives {found!r}, not {wanted!r}"

    def _write_back(self, shape: Shape) -> None:
        """The values from before a write."""
        index = SHAPES.index(shape)
        seeds = (index, 100 + index, -1 - index)
        for model in (self.plain, self.model):
            param, buffer = self.owners(model, 0, shape)
            grad = param.grad
            for tensor, seed in zip((param, buffer, grad), seeds, strict=True):
                assert tensor is not None
                with torch.no_grad():
                    tensor.detach().copy_(values(shape, seed))

    def close(self) -> None:
        """Ends the managed model; it has still the values that it had."""
        pairs = zip(self.model.parameters(), self.plain.parameters(), strict=True)
        assert all(torch.equal(p.detach(), q) for p, q in pairs)
        self.optimizer.engine.close()


def subject(path: Path, **settings: Any) -> Subject:
    """A model with gradients; on nvme all of it is on disk."""
    options = {"nvme_path": str(path), "chunk_numel": 4096, "dtype": "fp32", **settings}
    with hetero.ZeroInitContext(**options):
        model = Operands()
    model, optimizer = hetero.initialize(model, hetero.HybridAdam(model.parameters()))
    plain = Operands()
    for each in (model, plain):
        each().backward()
    found: Any = Subject(model, optimizer, plain)
    for place, shape in product(range(_POSITIONS), SHAPES):
        param, _ = found.owners(model, place, shape)
        wanted, _ = found.owners(plain, place, shape)
        assert isinstance(param, AbsentParameter) == (options["placement_policy"] != "cpu")
        assert torch.equal(param.grad.clone(), wanted.grad), "the oracle has the same gradients"
    assert MATRIX in SHAPES
    return found


def _tried(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return call(), None
    except Exception as error:  # which both must raise
        return None, error.with_traceback(None)


def _plain(result: Any) -> Any:
    """Copies of tensors, because a result may be a view of what is written back."""
    if isinstance(result, torch.Tensor):
        return result.detach().clone()
    if isinstance(result, (list, tuple)):
        return [_plain(each) for each in result]
    return result


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
    check(subject(tmp_path, **SETTINGS[where]), by_turns(operators(every=16), each=2))


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
