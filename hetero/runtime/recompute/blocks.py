"""A model's blocks: the modules that repeat, of which a step is made for the most part."""

from __future__ import annotations

import difflib
import weakref
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

_CONTAINERS = (torch.nn.ModuleList, torch.nn.Sequential)


@dataclass(frozen=True)
class Block:
    """A module whose call can be computed again as a whole.

    Attributes:
        name: in the model.
        module: not kept alive.
        kind: the same number for blocks of one class whose modules are of the same classes, and
            whose parameters have the same shapes.
    """

    name: str
    module: weakref.ref[torch.nn.Module]
    kind: int


def find_blocks(model: torch.nn.Module, patterns: Sequence[str] | None = None) -> list[Block]:
    """The model's blocks, in its order; none of them is inside another one.

    They are the children of a ModuleList or a Sequential that have children themselves, and of
    which at least two are alike, and with these all of their class: transformer layers, residual
    blocks, of which the first one is often another one than the rest. (Alike layers without
    children, as Linear, are no blocks: to compute them again saves next to nothing.)

    Args:
        model: any.
        patterns: of names; the modules that fit one are the blocks, whatever they are.

    Raises:
        ValueError: a pattern fits no module's name.
    """
    chosen = _repeated(model) if patterns is None else _named(model, patterns)
    kinds: dict[Hashable, int] = {}
    return [
        Block(name, weakref.ref(module), kinds.setdefault(_kind(module), len(kinds)))
        for name, module in _outermost(chosen)
    ]


def _repeated(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    for name, module in model.named_modules():
        if isinstance(module, _CONTAINERS):
            children = [(n, c) for n, c in module.named_children() if next(c.children(), None)]
            likenesses = [_likeness(child) for _, child in children]
            classes = {
                type(child)
                for (_, child), likeness in zip(children, likenesses, strict=True)
                if likenesses.count(likeness) > 1
            }
            for (own, child), likeness in zip(children, likenesses, strict=True):
                # Containers of one class have no more in common than that.
                is_of_class = type(child) in classes and type(child) not in _CONTAINERS
                if is_of_class or likenesses.count(likeness) > 1:
                    yield f"{name}.{own}" if name else own, child


def _named(
    model: torch.nn.Module, patterns: Sequence[str]
) -> Iterator[tuple[str, torch.nn.Module]]:
    named = [(name, module) for name, module in model.named_modules() if name]
    names = [name for name, _ in named]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.0)
            hint = f"; the nearest is {near[0]!r}" if near else ""
            raise ValueError(f"recompute: no module has a name like {pattern!r}{hint}")
    for name, module in named:
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            yield name, module


def _outermost(
    named: Iterator[tuple[str, torch.nn.Module]],
) -> Iterator[tuple[str, torch.nn.Module]]:
    """Those that are inside no earlier one, which have come before them, each once."""
    inside: set[int] = set()
    for name, module in named:
        if id(module) not in inside:
            inside |= {id(part) for part in module.modules()}
            yield name, module


def _likeness(module: torch.nn.Module) -> Hashable:
    """The same for modules that compute alike."""
    shapes = tuple((name, tuple(p.shape)) for name, p in module.named_parameters())
    return type(module), shapes


def _kind(module: torch.nn.Module) -> Hashable:
    """The same for modules that compute alike in all of their parts."""
    return _likeness(module), tuple(map(type, module.modules()))
