"""What a call of a block has found, so that it can be made again: arguments, versions of
parameters, attributes of its modules, random numbers and autocast.
"""

from __future__ import annotations

import functools
import random
import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from hetero.state.managed_param import ManagedParam
from offload.errors import StaleGraphError


class _Source(NamedTuple):
    """How the state of a generator is read, of which later numbers are no part, and put back."""

    get: Callable[[], Any]
    set: Callable[[Any], object]


def is_generator(value: Any) -> bool:
    """Whether it draws random numbers, and its state can be put back."""
    return _source(value) is not None


def _source(value: Any) -> _Source | None:
    if isinstance(value, torch.Generator):
        return _Source(value.get_state, value.set_state)
    if isinstance(value, random.Random):
        is_system = isinstance(value, random.SystemRandom)
        return None if is_system else _Source(value.getstate, value.setstate)
    # (numpy is no dependency; what is not imported draws nothing.)
    numpy = sys.modules.get("numpy.random")
    if numpy is None:
        return None
    if isinstance(value, numpy.RandomState):
        return _of_numpy_legacy(value)
    bits = value.bit_generator if isinstance(value, numpy.Generator) else value
    if not isinstance(bits, numpy.BitGenerator):
        return None
    return _Source(lambda: bits.state, partial(setattr, bits, "state"))


def _of_numpy_legacy(generator: Any) -> _Source:
    """Of a RandomState, or the module: it has half a pair of normal numbers beside its bits."""
    return _Source(partial(generator.get_state, legacy=False), generator.set_state)


def _of_process() -> Iterator[_Source]:
    generators = [torch.default_generator]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        generators += torch.cuda.default_generators
    yield from (_Source(each.get_state, each.set_state) for each in generators)
    yield _Source(random.getstate, random.setstate)
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        yield _of_numpy_legacy(numpy)


class RandomStates:
    """The states of some generators at one moment, the process's own ones among them."""

    def __init__(self, generators: Iterable[Any] = ()) -> None:
        """`generators`: beside those that the process has: is_generator() is true of each."""
        own = (_source(each) for each in generators)
        self._states = [(s, s.get()) for s in (*_of_process(), *own) if s is not None]

    def keep_drawn(self) -> None:
        """Keeps those alone whose states are others now: it forgets who has drawn nothing."""
        self._states = [(s, old) for s, old in self._states if not _is_same(old, s.get())]

    def put_back(self) -> None:
        """Each generator goes back to its state, unless it is in that."""
        for source, state in self._states:
            if not _is_same(state, source.get()):
                source.set(state)


def _is_same(first: Any, second: Any) -> bool:
    """Compares states, which are numbers, tensors and arrays in tuples and dicts."""
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_is_same(first[k], second[k]) for k in first)
    if hasattr(first, "tobytes"):
        return bool(first.tobytes() == second.tobytes())
    return bool(first == second)


_MOST = 20_000  # objects that are looked at, and elements of a container
_MOST_BYTES = 1 << 24  # of an array that is compared
# Values that nothing changes in place. What compares by value is first.
ATOMS = frozenset((int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device))
_LIBRARIES = {"torch", "numpy", "transformers", "accelerate", "peft", "hetero", "offload"}
_LIBRARIES |= set(sys.stdlib_module_names) - {"__main__"}
_CONTAINERS = (dict, list, tuple, set, frozenset, deque, SimpleNamespace, CellType)


class Reach:
    """The data that a block's forward can reach, as it was when this was made."""

    def __init__(self, block: torch.nn.Module) -> None:
        """
        Args:
            block: its submodules are searched, too.

        Attributes:
            generators: of random numbers.
            iterator: the name of an iterator, of which no state can be put back; None: it has none.
        """
        self.generators: list[Any] = []
        self.iterator: str | None = None
        self._modules = set(map(id, block.modules()))
        self._seen: set[int] = set()
        # Whatever can change in place: its name, and what it has now.
        self._data: list[tuple[str, Any, Hashable]] = []
        self._search(block)

    @property
    def changed(self) -> str | None:
        """The name of what has changed since; None: nothing has."""
        return next((name for name, each, had in self._data if _contents(each) != had), None)

    def _search(self, block: torch.nn.Module) -> None:
        left: list[tuple[str, Any]] = [("self", block)]
        while left and len(self._seen) < _MOST:
            name, each = left.pop()
            if type(each) in ATOMS or id(each) in self._seen:
                continue
            self._seen.add(id(each))
            left += self._visit(name, each)

    def _visit(self, name: str, each: Any) -> Iterable[tuple[str, Any]]:
        """Notes what it is, and gives what it leads to."""
        if isinstance(each, torch.nn.Module):
            return self._visit_module(name, each)
        if is_generator(each):
            self.generators.append(each)
        elif isinstance(each, FunctionType):
            return () if _is_of_library(each.__module__) else self._visit_function(name, each)
        elif isinstance(each, MethodType):
            return [(name, each.__func__), (name, each.__self__)]
        elif isinstance(each, functools.partial):
            return [(name, each.func), (name, each.args), (name, each.keywords)]
        elif isinstance(each, torch.Tensor) or hasattr(each, "tobytes"):
            self._data.append((name, each, _contents(each)))
        elif isinstance(each, _CONTAINERS) or _is_of_program(each):
            self._data.append((name, each, _contents(each)))
            return _parts(name, each)
        elif isinstance(each, Iterator):
            self.iterator = self.iterator or name
        return ()

    def _visit_module(self, name: str, module: torch.nn.Module) -> Iterable[tuple[str, Any]]:
        if id(module) not in self._modules:  # of the rest of the model its own numbers alone
            self._data.append((name, module, _contents(module)))
            return
        # Its own attributes are put back, and tensors have versions.
        for key, value in vars(module).items():
            if key == "_modules":
                yield from ((f"{name}.{k}", v) for k, v in value.items())
            elif key.endswith("_hooks"):
                yield from ((f"a hook of {name}", hook) for hook in list(value.values()))
            elif key not in ("_parameters", "_buffers", "_compiled_call_impl"):
                yield f"{name}.{key}", value
        for kind in type(module).__mro__:
            if not _is_of_library(kind.__module__):
                yield kind.__name__, kind

    def _visit_function(self, name: str, function: FunctionType) -> Iterable[tuple[str, Any]]:
        free = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        yield from ((f"{variable} in {function.__name__}()", cell) for variable, cell in free)
        yield name, function.__defaults__ or ()
        yield name, function.__kwdefaults__ or {}
        if vars(function):
            yield f"{function.__name__}()", vars(function)
        named = _Globals(function)
        self._data.append((f"a variable of {function.__module__}", named, _contents(named)))
        yield from named.found.items()


class _Globals:
    """The variables of its module that a function names."""

    def __init__(self, function: FunctionType) -> None:
        self._all = function.__globals__
        self._names = sorted(set(_names(function.__code__)) & self._all.keys())

    @property
    def found(self) -> dict[str, Any]:
        """Those that are there now, other modules excepted."""
        found = {name: self._all.get(name) for name in self._names}
        return {k: v for k, v in found.items() if not isinstance(v, ModuleType)}


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for const in code.co_consts:  # lambdas, comprehensions
        if isinstance(const, CodeType):
            yield from _names(const)


def _is_of_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES


def _is_of_program(each: Any) -> bool:
    """Whether it is a class of the program's, or an object of one."""
    kind = each if isinstance(each, type) else type(each)
    return not (isinstance(each, (torch.Tensor, ModuleType)) or _is_of_library(kind.__module__))


def _members(each: Any) -> Any:
    """What a container or object has: a dict, or an iterable of values."""
    if isinstance(each, _Globals):
        return each.found
    if isinstance(each, CellType):
        try:
            return (each.cell_contents,)
        except ValueError:  # nothing is in it yet
            return ()
    if isinstance(each, _CONTAINERS) and not isinstance(each, SimpleNamespace):
        return each
    found = dict(getattr(each, "__dict__", {}))
    for kind in type(each).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if hasattr(each, slot):
                found[slot] = getattr(each, slot)
    return found


def _parts(name: str, each: Any) -> list[tuple[str, Any]]:
    members = _members(each)
    if isinstance(members, dict):
        at = "{}[{!r}]" if isinstance(each, dict) else "{}.{}"
        parts = [(at.format(name, key), value) for key, value in list(members.items())[:_MOST]]
    else:
        parts = [(name, value) for value in list(members)[:_MOST]]
    if isinstance(each, type):  # of what a class has, functions and data
        return [part for part in parts if not part[0].endswith("__")]
    return parts


def _contents(each: Any) -> Hashable:
    """What it has now, to be compared; objects in it count as the same as long as they are."""
    if isinstance(each, torch.Tensor) or hasattr(each, "tobytes"):
        return _brief(each)
    members = _members(each)
    if isinstance(members, dict):
        kept = list(members.items())[:_MOST]
        if isinstance(each, torch.nn.Module):
            kept = [(key, value) for key, value in kept if type(value) in ATOMS]
        return len(members), tuple((_brief(key), _brief(value)) for key, value in kept)
    return len(members), tuple(map(_brief, list(members)[:_MOST]))


def _brief(value: Any) -> Hashable:
    if type(value) in ATOMS:
        return type(value), value
    if isinstance(value, torch.Tensor):
        return id(value), 0 if value.is_inference() else value._version
    # An array of numpy's, or of Python's, which has no version.
    if hasattr(value, "tobytes") and getattr(value, "nbytes", 0) <= _MOST_BYTES:
        return id(value), hash(value.tobytes())
    return id(value)


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
_ARGUMENT_CONTAINERS = (tuple, list, dict)


def _is_leaf(value: Any) -> bool:
    is_named = isinstance(value, tuple) and hasattr(value, "_fields")
    return type(value) not in _ARGUMENT_CONTAINERS and not is_named


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
