"""A weight in tiles, each a parameter of its own, so that hetero gathers one of them at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from hetero.stand_ins.construction_uses import rows_of


class TiledWeight(torch.nn.Module):
    """A module in the place of a plain one whose weight, (rows, columns), it has in tiles.

    Each tile is the weight of a module inside. A state of the plain module loads as well as one of
    its own.
    """

    def _places(self) -> Iterator[tuple[str, slice, slice]]:
        """Yields the name of each tile's module, and the rows and the columns that it has."""
        raise NotImplementedError

    def _tiles(self) -> Iterator[tuple[Any, slice, slice]]:
        """As _places(), with the modules."""
        for name, rows, columns in self._places():
            yield self.get_submodule(name), rows, columns

    @property
    def _sizes(self) -> tuple[int, int]:
        """The rows and columns of the whole weight."""
        _, rows, columns = list(self._places())[-1]
        return rows.stop, columns.stop

    @property
    def weight(self) -> torch.Tensor:
        """A copy of the whole weight, without gradient, in memory that no budget counts."""
        first = next(self._tiles())[0].weight
        whole = torch.empty(self._sizes, dtype=first.dtype, device=first.device)
        with torch.no_grad():
            for tile, rows, columns in self._tiles():
                whole[rows, columns] = tile.weight
        return whole

    def _take(self, weight: torch.Tensor) -> None:
        """Gives the tiles the values of a whole weight, which may be larger than the budget."""
        for tile, rows, columns in self._tiles():
            values = rows_of(weight, rows)[:, columns].contiguous()
            tile.weight = torch.nn.Parameter(values, weight.requires_grad)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        tiles = list(self._tiles())
        biased = [tile for tile, _, _ in tiles if getattr(tile, "bias", None) is not None]
        weight = state_dict.pop(f"{prefix}weight", None)
        bias = state_dict.pop(f"{prefix}bias", None) if biased else None
        if weight is not None and tuple(weight.shape) != self._sizes:
            error_messages: list[str] = args[-1]
            error_messages.append(
                f"size mismatch for {prefix}weight: its shape is {tuple(weight.shape)} in the "
                f"state, and {self._sizes} in the model"
            )
            return
        for name, rows, columns in self._places():
            if weight is not None:
                state_dict[f"{prefix}{name}.weight"] = weight[rows, columns]
            if bias is not None and self.get_submodule(name) in biased:
                state_dict[f"{prefix}{name}.bias"] = bias[rows]
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def owners_of(model: torch.nn.Module) -> dict[int, tuple[torch.Tensor, list[Any]]]:
    """By the id of each parameter, it and the modules that have it."""
    owners: dict[int, tuple[torch.Tensor, list[Any]]] = {}
    for module in model.modules():
        for param in module._parameters.values():
            if param is not None:
                owners.setdefault(id(param), (param, []))[1].append(module)
    return owners


# Where torch keeps hooks, of a module and of a tensor.
_STATE_HOOKS = (
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
_GRAD_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def require_replaceable(model: torch.nn.Module, modules: Iterable[torch.nn.Module]) -> None:
    """Raises ValueError, naming the module, if one has what replace() cannot hand over."""
    names = {module: name for name, module in model.named_modules()}
    for module in modules:
        params = {name: param for name, param in module._parameters.items() if param is not None}
        with torch._C.DisableTorchFunction():  # which the class of an absent one is asked by
            hooked = [name for name, param in params.items() if _has(param, _GRAD_HOOKS)]
        others = [*(params.keys() - {"weight", "bias"}), *module._buffers, *module._modules]
        what = None
        if hooked:
            what = f"a hook of the gradient of its {hooked[0]}"
        elif others:
            what = f"{others[0]} beside its weight"
        elif _has(module, _STATE_HOOKS):
            what = "a hook of its state_dict()"
        elif _has(module, ("_compiled_call_impl",)) or "forward" in vars(module):
            what = "a forward of its own"
        if what is not None:
            raise ValueError(
                f"{names[module]} has {what}, which its tiles would not have; add that after the "
                f"weight was cut into tiles, or give a max_numel of {params['weight'].numel()} or "
                f"more"
            )


def _has(owner: object, names: Iterable[str]) -> bool:
    return any(getattr(owner, name, None) for name in names)


def replace(model: torch.nn.Module, old: torch.nn.Module, new: torch.nn.Module) -> list[str]:
    """Puts a module in the place of another one, wherever that is; returns the names it has.

    The new one gets the hooks around forward and backward, which their handles go on removing, and
    the attributes that user code has set.
    """
    for key, value in vars(old).items():
        if "_hook" in key or key not in vars(new):
            vars(new)[key] = value
    names = []
    for parent_name, parent in list(model.named_modules()):
        for name in [name for name, child in parent._modules.items() if child is old]:
            setattr(parent, name, new)
            names.append(f"{parent_name}.{name}".lstrip("."))
    return names
