"""Ways in which a call can be given the values of a parameter, and a model that has all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hetero
from hetero.stand_ins.parameter_classes import AbsentParameter
from tests.support.operands.operators import MATRIX, SHAPES, Operator, Shape, same, values

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
