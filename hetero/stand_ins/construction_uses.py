"""Uses of parameters under construction whose values are offloaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch

from hetero.ranks.process_groups import ProcessGroups
from hetero.stand_ins.offloaded_tensor import ParamAlias, one_by_one
from hetero.stand_ins.parameter_classes import (
    AbsentParameter,
    PresentParameter,
    memory_in,
    tensors_among,
)
from hetero.stand_ins.tile_changes import TileChange, tile_change
from offload.errors import BudgetError, HeteroError


class ConstructionParams(Protocol):
    """The construction arena, as the uses of its parameters see it."""

    world: ProcessGroups

    def present(self, params: Sequence[torch.Tensor]) -> AbstractContextManager[list[torch.Tensor]]:
        """Inside the block the parameters are plain and stay in RAM; gives aliases of them."""

    def replace(self, param: torch.nn.Parameter, values: torch.Tensor) -> None:
        """Points the parameter to other values."""

    def change(self, param: torch.Tensor, change: TileChange) -> bool:
        """Changes an offloaded parameter tile by tile; False: it must be changed as a whole."""

    def elements(self, param: torch.Tensor, wanted: slice) -> torch.Tensor:
        """A plain copy of some elements of the flat parameter."""


class ConstructionUses:
    """The owner of a parameter under construction, which is asked while its values are offloaded.

    Each parameter has one of its own, which keeps the arena alive.
    """

    def __init__(self, arena: ConstructionParams) -> None:
        self.arena = arena
        # Checksum of what gathered(modifier_rank=None) has left on this rank; 0: it wrote nothing.
        self.written = 0

    def __reduce__(self) -> Any:
        """What is pickled with a parameter (torch.save(model)) has no owner."""
        return type(None), ()

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a torch function. Raises BudgetError if the values do not fit."""
        if _gives_itself(func, *args, **kwargs):
            return args[0]
        if func is torch._has_compatible_shallow_copy_type:  # (Module.to() asks)
            with torch._C.DisableTorchFunction():
                return func(*args)
        if func is torch.Tensor.detach:
            return self.alias(args[0])
        if getattr(func, "__name__", "").startswith("_foreach_"):
            return one_by_one(func, args, kwargs, self._call)
        return self._call(func, args, kwargs)

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = tensors_among((*args, *kwargs.values()))
        absent = (each for each in found if isinstance(each, AbsentParameter))
        needed = [p for p in absent if arena_of(p) is self.arena]
        with ExitStack() as contexts:
            try:
                contexts.enter_context(self.arena.present(needed))
            except BudgetError:
                if self._changed_by_tiles(func, args, kwargs):
                    return needed[0]
                raise
            return func(*args, **kwargs)

    def _changed_by_tiles(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Makes a change to a parameter that does not fit the budget; False if it cannot."""
        found = tile_change(func, args, kwargs)
        if found is None:
            return False
        param, change = found
        with torch.no_grad():
            if not self.arena.change(param, change):
                return False
        torch.autograd.graph.increment_version(param)
        return True

    def alias(self, param: torch.nn.Parameter) -> torch.Tensor:
        """What `param.data` is: it holds no memory, so that a state_dict() needs none."""
        return ParamAlias.of(self, param)

    def assign(self, param: torch.nn.Parameter, values: torch.Tensor) -> None:
        """`param.data = values`: as in plain torch the parameter then has the memory of `values`.

        Raises BudgetError if the values do not fit the host budget.
        """
        if values is param or (isinstance(values, ParamAlias) and values.is_all_of(param)):
            return
        with memory_of(values) as memory:
            self.arena.replace(param, memory)

    def copy(self, param: torch.nn.Parameter) -> torch.Tensor:
        """A plain copy of the values, in memory that no budget counts."""
        return self.arena.elements(param, slice(0, param.numel())).view(param.shape)

    def name(self, param: torch.nn.Parameter) -> str:
        """By its shape: the model has no names yet."""
        return f"a parameter of shape {tuple(param.shape)} that is under construction"

    def version(self, param: torch.nn.Parameter) -> int:
        """torch's own."""
        return param._version

    def values(self, param: torch.nn.Parameter) -> AbstractContextManager[torch.Tensor]:
        """As memory_of()."""
        return memory_of(param)

    def stand_in(self, param: torch.nn.Parameter) -> torch.Tensor:
        """What the parameter's memory is now."""
        return memory_in(param)


_CONVERSIONS = {
    torch.Tensor.float: torch.float32,
    torch.Tensor.double: torch.float64,
    torch.Tensor.half: torch.float16,
    torch.Tensor.bfloat16: torch.bfloat16,
}


def _gives_itself(func: Any, param: Any = None, *given: Any, **named: Any) -> bool:
    """Whether a conversion of a parameter in RAM gives the parameter itself, as `model.to("cpu")`
    does: then nobody needs its values."""
    if func in _CONVERSIONS:
        return not given and not named and param.dtype is _CONVERSIONS[func]
    if func is torch.Tensor.cpu:
        return not given and not named
    flags = [value for value in given if isinstance(value, bool)]
    if func is not torch.Tensor.to or len(flags) > 1 or named.get("copy"):
        return False
    named.pop("copy", None)
    device, dtype, _, memory_format = torch._C._nn._parse_to(*given, **named)
    same_place = device is None or device.type == "cpu"
    return same_place and dtype in (None, param.dtype) and memory_format is None


@contextmanager
def memory_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Inside the block: an alias that has memory of a parameter that may be under construction, or
    of an alias of one; any other tensor as it is.

    Raises:
        BudgetError: the values do not fit the host budget.
        HeteroError: the parameter's values are hetero.initialize()'s by now.
    """
    if isinstance(tensor, ParamAlias):
        with tensor._brought() as memory:
            yield memory
        return
    arena = arena_of(tensor)
    if arena is not None:
        with arena.present([tensor]) as held:
            yield held.pop()
        return
    if isinstance(tensor, PresentParameter):
        raise HeteroError(
            f"hetero.initialize() has moved the values of a parameter of shape "
            f"{tuple(tensor.shape)} since its .data, its .detach() or the model's state_dict() was "
            f"taken; take it again"
        )
    yield tensor.detach() if isinstance(tensor, torch.nn.Parameter) else tensor


def rows_of(param: torch.Tensor, rows: slice) -> torch.Tensor:
    """A copy of some rows of a parameter: of one under construction no more need be in memory.

    Args:
        param: a matrix, contiguous; whole.
        rows: a range of rows, with both ends.
    """
    arena = arena_of(param)
    width = param.shape[1]
    if arena is None:
        return param.detach()[rows].clone()
    wanted = slice(rows.start * width, rows.stop * width)
    return arena.elements(param, wanted).view(-1, width)


def note_written(param: torch.Tensor, checksum: int) -> None:
    """What the values of a parameter under construction are since this rank has changed them."""
    owner = getattr(param, "_hetero_owner", None)
    if isinstance(owner, ConstructionUses):
        owner.written = checksum


def written_to(param: torch.Tensor) -> int:
    """What note_written() was told last; 0 for nothing."""
    owner = getattr(param, "_hetero_owner", None)
    return owner.written if isinstance(owner, ConstructionUses) else 0


def arena_of(param: torch.Tensor) -> ConstructionParams | None:
    """The arena in which a parameter waits for its chunk, if it does."""
    owner = getattr(param, "_hetero_owner", None)
    return owner.arena if isinstance(owner, ConstructionUses) else None
