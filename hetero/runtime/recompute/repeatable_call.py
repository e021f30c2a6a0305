"""One call of a block that is made again in backward, from the arguments that were saved of it.

Backward uses the graph of the first call, so all that the second one has to give are the tensors
that the first one saved. A fingerprint is kept of each of them, and the second call's are compared
with these: whatever a forward depends on, other gradients cannot come of it. (torch's checkpoint
compares shapes and dtypes alone, and gives each saved tensor once.) A fingerprint reads each byte
once and keeps next to nothing. In RAM it is a CRC, which costs a core about a nanosecond for 15
bytes. On a device it is sums along rows and columns of the tensor's words, which stay there, so
nothing waits.

The process's random numbers, autocast, and whether each module trains are what the first call
found, and afterwards what they were before. Parameters that an optimizer step or a write has
changed since are an error, where torch's checkpoint would use the new values in silence. Lists and
dicts among the arguments are copies as they were.
"""

from __future__ import annotations

import random
import sys
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from hetero.activations.store import SavedActivation, has_plain_memory
from hetero.runtime.modules.saved_tensors import SavedTensor, SavedTensors
from hetero.stand_ins.offloaded_tensor import OffloadedTensor
from hetero.state.chunk_access import SavedView
from hetero.state.managed_param import ManagedParam
from offload._native import crc32c
from offload.errors import HeteroError, StaleGraphError

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


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


def _random_states() -> list[Callable[[], object]]:
    """What puts back the states that the process's generators of random numbers have now."""
    # (Of a device's module: none until the device is used.)
    of_devices = getattr(torch.get_device_module(), "default_generators", ())
    generators = [torch.default_generator, *of_devices]
    states: list[Callable[[], object]]
    states = [partial(each.set_state, each.get_state()) for each in generators]
    states.append(partial(random.setstate, random.getstate()))
    numpy = sys.modules.get("numpy.random")  # (what is not imported draws nothing)
    if numpy is not None:
        states.append(partial(numpy.set_state, numpy.get_state(legacy=False)))
    return states


class Surroundings:
    """Random numbers, autocast, and the modes of a block's modules as one call has found them."""

    def __init__(self, block: torch.nn.Module) -> None:
        """`block`: whose call begins now."""
        self._training = [each.training for each in block.modules()]
        device = torch.accelerator.current_accelerator()
        kinds = ["cpu"] if device is None else ["cpu", device.type]
        self._autocast = [_autocast(kind) for kind in kinds]
        self._random = _random_states()

    @contextmanager
    def put_back(self, block: torch.nn.Module) -> Iterator[None]:
        """Inside it all is as the call has found it; after it, as before."""
        modules = list(block.modules())
        now = [each.training for each in modules]
        drawn = _random_states()
        with ExitStack() as contexts:
            for kind, enabled, dtype in self._autocast:
                if (kind, enabled, dtype) != _autocast(kind):
                    contexts.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            try:
                _set_modes(modules, self._training)
                for put_back in self._random:
                    put_back()
                yield
            finally:
                for put_back in drawn:
                    put_back()
                _set_modes(modules, now)


def _set_modes(modules: Sequence[torch.nn.Module], training: Sequence[bool]) -> None:
    for module, trains in zip(modules, training, strict=False):
        module.training = trains


def _autocast(kind: str) -> tuple[str, bool, torch.dtype]:
    """A kind of device, whether it casts now, and to what."""
    return kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


_PACKED = (SavedActivation, SavedTensor, SavedView)


class _EnoughError(Exception):
    """The rest of the call need not be computed: all tensors are there, or one is another one."""


class _Saved:
    """One tensor that the first call saved: its number, and its value while a backward has it."""

    __slots__ = ("__weakref__", "backward", "number", "value")

    def __init__(self, number: int) -> None:
        self.number = number
        self.value: torch.Tensor | None = None
        self.backward = -1  # the number of the backward that `value` was computed in


class RepeatableCall:
    """A call, and what it takes to make it again. It lives as long as the graph that needs it."""

    def __init__(
        self,
        arguments: Arguments,
        saved_tensors: SavedTensors,
        again: Callable[[Args, Kwargs], object],
        differed: Callable[[], HeteroError],
    ) -> None:
        """
        Args:
            arguments: of the call.
            saved_tensors: the hooks in force around the call.
            again: makes the call with such arguments, all else as the first call has found it.
            differed: is told that the second call was another one; gives the error to raise.
        """
        self._saved_tensors = saved_tensors
        self._again = again
        self._differed = differed
        self._spec = arguments.spec
        self._leaves = list(arguments.leaves)
        self._need_grad = [isinstance(x, torch.Tensor) and x.requires_grad for x in self._leaves]
        self._saved: list[weakref.ref[_Saved]] = []
        self._fingerprints: list[Fingerprint] = []

    def unkept(self, plain: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """What plain(*args, **kwargs) returns, which saves its arguments alone."""
        self._leaves = [self._saved_tensors.pack(x) if _can_pack(x) else x for x in self._leaves]
        with saved_tensors_hooks(self._pack, self._unpack):
            return plain(*args, **kwargs)

    def _pack(self, tensor: torch.Tensor) -> _Saved | SavedView:
        view = self._saved_tensors.pack_view(tensor)
        if view is not None:
            return view
        saved = _Saved(len(self._saved))
        self._saved.append(weakref.ref(saved))
        self._fingerprints.append(Fingerprint.of(tensor))
        return saved

    def _unpack(self, saved: _Saved | SavedView) -> torch.Tensor:
        if isinstance(saved, SavedView):
            return self._saved_tensors.unpack(saved)
        backward = torch._C._current_graph_task_id()
        value = saved.value
        if value is None or saved.backward != backward:
            unpack = self._saved_tensors.unpack
            values = self._values([unpack(x) if type(x) in _PACKED else x for x in self._leaves])
            if values is None:
                raise self._differed()
            value = values[saved.number]
            if backward != -1:  # (else somebody looks into the graph)
                self._give(values, backward)
        return value

    def _give(self, values: list[torch.Tensor], backward: int) -> None:
        """Nodes of the graph have the values, each until it was used, and none after backward."""
        for reference, value in zip(self._saved, values, strict=True):
            saved = reference()
            if saved is not None:
                saved.value, saved.backward = value, backward
        torch.autograd.Variable._execution_engine.queue_callback(self._take_back)

    def _take_back(self) -> None:
        for reference in self._saved:
            saved = reference()
            if saved is not None:
                saved.value = None

    def _values(self, leaves: list[Any]) -> list[torch.Tensor] | None:
        """What a second call saves; None if it is not what the first one has saved."""
        expected = list(self._fingerprints)  # so far, if the first call asks in its middle
        found: list[Fingerprint] = []
        values: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> Any:
            view = self._saved_tensors.pack_view(tensor)
            if view is not None:
                return view
            is_other = False
            if len(found) < len(expected):  # (if not, somebody has caught what is raised below)
                found.append(Fingerprint.of(tensor))
                values.append(tensor.detach() if tensor.requires_grad else tensor)
                is_other = not found[-1].may_be(expected[len(found) - 1])
            if is_other or len(found) == len(expected):
                raise _EnoughError
            return values[-1]

        args, kwargs = nest(list(map(_as_argument, leaves, self._need_grad)), self._spec)
        try:
            with torch.enable_grad(), saved_tensors_hooks(pack, self._unpack_again):
                self._again(args, kwargs)
        except _EnoughError:
            pass
        is_whole = len(found) == len(expected)
        if not (is_whole and all(map(Fingerprint.may_be, found, expected))):
            return None
        if not have_same_sums(found, expected):
            self._differed()  # from now on such calls are kept
            # Unless the user has forbidden it, an operation may add in another order each time.
            return None if torch.are_deterministic_algorithms_enabled() else values
        return values

    def _unpack_again(self, packed: Any) -> Any:
        """For a call that differentiates something in its middle."""
        return self._saved_tensors.unpack(packed) if isinstance(packed, SavedView) else packed


def _can_pack(leaf: Any) -> bool:
    is_own = isinstance(leaf, OffloadedTensor)
    return isinstance(leaf, torch.Tensor) and not is_own and not leaf.is_inference()


def _as_argument(leaf: Any, needs_grad: bool) -> Any:
    """A leaf of the second call's own graph."""
    if not isinstance(leaf, torch.Tensor) or (leaf.is_leaf and leaf.requires_grad == needs_grad):
        return leaf
    return leaf.detach().requires_grad_(needs_grad)


_COLUMNS = 1021  # of words on a device; a prime, so that a tensor's own rows are not these rows
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True)
class Fingerprint:
    """What tells a tensor from others.

    Attributes:
        form: its shape, strides and dtype, or which parameter it views.
        bits: the checksum of its bytes in RAM; 0 if it has none there.
        sums: of its words, on its device; None if it is in RAM.
    """

    form: Hashable
    bits: int = 0
    sums: torch.Tensor | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Fingerprint:
        """That of a tensor as it is now."""
        for each in (tensor, tensor._base):
            if isinstance(each, torch.nn.Parameter):  # its versions are compared, which is cheaper
                place = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
                return cls((id(each), place))
        form: tuple[Hashable, ...] = (tuple(tensor.shape), tensor.dtype, tensor.device)
        if tensor.layout is not torch.strided or not has_plain_memory(tensor):
            return cls((type(tensor), *form))
        form = (*form, tensor.stride())
        tensor = _without_gaps(tensor.detach())
        if tensor.device.type == "cpu":
            return cls(form, crc32c(tensor.data_ptr(), tensor.nbytes))
        return cls(form, sums=sums_of(tensor))

    def may_be(self, other: Fingerprint) -> bool:
        """Whether both may be of tensors with the same bits, as far as is known in RAM."""
        return (self.form, self.bits) == (other.form, other.bits)


def have_same_sums(first: Sequence[Fingerprint], second: Sequence[Fingerprint]) -> bool:
    """Whether what is on the device has the same bits in both; waits for it."""
    pairs = [
        (one.sums, other.sums)
        for one, other in zip(first, second, strict=True)
        if one.sums is not None and other.sums is not None
    ]
    return not pairs or torch.equal(*map(torch.cat, zip(*pairs, strict=True)))


def sums_of(tensor: torch.Tensor) -> torch.Tensor:
    """Sums of a tensor's words along rows and columns, flat; its memory has no gaps."""
    size = next(s for s in _WORDS if tensor.nbytes % s == 0 and _begins_at(tensor) % s == 0)
    flat = torch.empty(0, dtype=_WORDS[size], device=tensor.device)
    flat.set_(tensor.untyped_storage(), _begins_at(tensor) // size, (tensor.nbytes // size,), (1,))
    whole = len(flat) // _COLUMNS * _COLUMNS
    rows = flat[:whole].view(-1, _COLUMNS)
    parts = (rows.sum(0), rows.sum(1)) if whole else ()
    return torch.cat([*parts, flat[whole:].to(torch.int64)])


def _begins_at(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.itemsize


def _without_gaps(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with the same elements whose memory is one piece: a view if there is one."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:  # of an expanded one each element once
            tensor = tensor.narrow(dim, 0, 1)
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return tensor.contiguous()
        expected *= size
    return tensor
