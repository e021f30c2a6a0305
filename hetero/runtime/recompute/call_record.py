"""What a call of a block has found, so that it can be made again: arguments, versions of
parameters, attributes of its modules, random numbers and autocast.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from hetero.runtime.recompute.random_states import RandomStates, is_generator
from hetero.runtime.recompute.reach import ATOMS
from hetero.state.managed_param import ManagedParam
from offload.errors import StaleGraphError

# Arguments that are the same when a call is made again. Others may not be: a cache of keys and
# values has grown by then.
_PLAIN = (
    torch.Tensor,
    int,
    float,
    complex,
    bool,
    str,
    bytes,
    slice,
    range,
    torch.Size,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    type(None),
)
# What has arguments in it. Other classes that torch can take apart, too, are arguments themselves:
# a call may change them, and then a copy of them would be changed instead.
_CONTAINERS = (tuple, list, dict)


def _is_leaf(value: Any) -> bool:
    is_named = isinstance(value, tuple) and hasattr(value, "_fields")
    return type(value) not in _CONTAINERS and not is_named


class Arguments:
    """The tensors and values in (args, kwargs), in their order, and how they were nested."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves, spec = tree_flatten((args, kwargs), is_leaf=_is_leaf)
        self.leaves: Sequence[Any] = leaves
        self.spec: TreeSpec = spec

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Those that are tensors."""
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    @property
    def size_bytes(self) -> int:
        """Of the first floating-point tensor: how large the micro-batch is."""
        return next((t.nbytes for t in self.tensors if t.is_floating_point()), 0)

    @property
    def odd_one(self) -> Any:
        """One that may be another when the call is made again; None: there is none."""
        return next((leaf for leaf in self.leaves if not isinstance(leaf, _PLAIN)), None)

    @property
    def versions(self) -> list[int]:
        """Of the tensors: they tell whether a call has changed them in place."""
        return [version_of(tensor) for tensor in self.tensors]


def nest(leaves: Sequence[Any], spec: TreeSpec) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of such leaves, in containers of their own."""
    args, kwargs = tree_unflatten(leaves, spec)
    return args, kwargs


def version_of(tensor: torch.Tensor) -> int:
    """Another number after each change in place; tensors of inference mode have none."""
    return 0 if tensor.is_inference() else tensor._version


FindsManaged = Callable[[torch.Tensor], ManagedParam | None]
_Version = tuple[int, int]  # (updates, writes in place)


@dataclass(frozen=True)
class CallState:
    """A block's modules and parameters as one call has found them.

    Attributes:
        training: of each of its modules, whether it trains.
        trained: of each of its parameters, whether it is trained.
        params: the identities of its parameters, and their versions.
        steps: how many steps of the optimizer had been made.
    """

    training: tuple[bool, ...]
    trained: tuple[bool, ...]
    params: tuple[tuple[int, _Version], ...]
    steps: int

    @classmethod
    def of(cls, module: torch.nn.Module, find: FindsManaged, steps: int) -> CallState | None:
        """That of `module` now; None if the call has parameters of its own, as those of
        torch.func.functional_call(), which are gone when backward comes."""
        tensors = list(module.parameters())
        own = all(isinstance(each, torch.nn.Parameter) for each in tensors)
        return (
            None
            if not own
            else cls(
                tuple(each.training for each in module.modules()),
                tuple(each.requires_grad for each in tensors),
                _versions(module, find),
                steps,
            )
        )

    @property
    def kind(self) -> Hashable:
        """The same for calls of alike blocks that save alike."""
        return self.training, self.trained

    def has_changed(self, module: torch.nn.Module, find: FindsManaged) -> bool:
        """Whether the call, which has just ended, has changed a parameter."""
        return _versions(module, find) != self.params

    def check(self, name: str, module: torch.nn.Module, find: FindsManaged, steps: int) -> None:
        """Raises StaleGraphError if the parameters are others now than in the call.

        An update that step() has not confirmed yet is none: who uses a value has it revoked.
        """
        now = _versions(module, find)
        if steps == self.steps:
            same = [(p, w) for p, (_, w) in now] == [(p, w) for p, (_, w) in self.params]
        else:
            same = now == self.params
        if not same:
            raise StaleGraphError(
                f"{name} is to be computed again in backward (option recompute), which needs its "
                f"parameters as they were before an optimizer step, or a write in place, that came "
                f"between this graph's forward and its backward; call backward before that, or use "
                f"recompute='none'"
            )


def _versions(module: torch.nn.Module, find: FindsManaged) -> tuple[tuple[int, _Version], ...]:
    return tuple((id(each), _version(each, find)) for each in module.parameters())


def _version(param: torch.Tensor, find: FindsManaged) -> _Version:
    managed = find(param)
    return (0, version_of(param)) if managed is None else managed.version


_OF_TORCH = frozenset(vars(torch.nn.Module()))  # attributes that each module has
_SAME = object()  # stands for a value of the program's that the call has left in its place


class Surroundings:
    """The attributes of a block's modules, states of random numbers, and autocast, as one call has
    found them; it puts them back for the time that the call is made again."""

    def __init__(self, block: torch.nn.Module, generators: Sequence[Any]) -> None:
        """
        Args:
            block: whose call begins now.
            generators: of random numbers, that it can reach. Those that its modules have got since
                they were searched are found here.
        """
        modules = list(block.modules())
        self._attributes = [dict(vars(each)) for each in modules]
        known = set(map(id, generators))
        self._generators = [*generators]
        for attributes in self._attributes:
            for name, value in attributes.items():
                if type(value) in ATOMS or name in _OF_TORCH or id(value) in known:
                    continue
                if is_generator(value):
                    self._generators.append(value)
        self._autocast = [_autocast(kind) for kind in ("cpu", "cuda")]
        self._random = RandomStates(self._generators)

    def settle(self, block: torch.nn.Module) -> None:
        """The call has ended: what it has found and not changed is not kept."""
        self._random.keep_drawn()
        for module, attributes in zip(block.modules(), self._attributes, strict=False):
            now = vars(module)
            for name, value in attributes.items():
                if type(value) not in ATOMS and now.get(name) is value:
                    attributes[name] = _SAME

    @contextmanager
    def put_back(self, block: torch.nn.Module) -> Iterator[None]:
        """Inside it all is as the call has found it; after it, as before."""
        modules = list(block.modules())
        before = [dict(vars(each)) for each in modules]
        random = RandomStates(self._generators)
        with ExitStack() as contexts:
            for kind, enabled, dtype in self._autocast:
                if (kind, enabled, dtype) != _autocast(kind):
                    contexts.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            try:
                if len(modules) == len(self._attributes):
                    for module, attributes in zip(modules, self._attributes, strict=True):
                        _set_attributes(module, attributes)
                self._random.put_back()
                yield
            finally:
                random.put_back()
                for module, attributes in zip(modules, before, strict=True):
                    _set_attributes(module, attributes)


def _set_attributes(module: torch.nn.Module, attributes: dict[str, Any]) -> None:
    now = vars(module)
    now.update({name: value for name, value in attributes.items() if value is not _SAME})
    for name in now.keys() - attributes.keys():
        del now[name]


def _autocast(kind: str) -> tuple[str, bool, torch.dtype]:
    """A kind of device, whether it casts now, and to what."""
    return kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
